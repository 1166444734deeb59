//! Without a span processor nothing waits for the end of an OpenTelemetry span.

use crate::keep::KeptSpan;
use crate::span::SpanKey;

/// Nobody has one.
#[derive(Debug)]
pub(crate) enum Meeting {}

impl Meeting {
    pub(crate) fn note_direct(&self) {
        match *self {}
    }

    pub(crate) fn order(&self) -> Order {
        match *self {}
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Theirs,
}

/// Nobody has one.
#[derive(Debug)]
pub(crate) enum EndedSpan {}

/// A span that has closed before OpenTelemetry has ended it: nobody makes one.
#[derive(Debug)]
pub(crate) struct Close {
    pub(crate) kept: Option<Box<KeptSpan>>,
    pub(crate) untold: Option<SpanKey>,
}

//! The open spans that a caller asks for.

use std::collections::HashMap;
use std::time::Duration;

use crate::profile::{Link, Profile};
use crate::span::SpanKey;

/// A profiled span that is open, from [`Handle::open_spans`](crate::Handle::open_spans).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenSpan {
    /// The name of the span.
    pub name: String,
    /// The target of the span.
    pub target: String,
    /// The values of its shown fields.
    pub fields: Vec<(&'static str, String)>,
    /// For how long it has been open.
    pub open_for: Duration,
    /// What it does.
    pub state: OpenState,
    /// For how long it has been doing that, if that is known.
    pub state_for: Option<Duration>,
    /// Where it awaits, or where its thread is blocked: functions with files and lines, the innermost first. Empty if that
    /// is not known. If it awaits several things at the same time, all of them, each after a line
    /// `[await, one of 2 at the same time]`.
    pub stack: Vec<String>,
}

/// What an open span does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpenState {
    /// A thread is in it.
    Entered,
    /// The future of the span, or that of a span inside it, awaits something.
    Awaiting,
    /// The awaiting future was woken, and its executor has not polled it yet.
    Woken,
    /// No thread is in it, and what it awaits is not known, since its future is not
    /// [`Profiled`](crate::Profiled).
    Idle,
}

impl OpenState {
    /// In lower case, as in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Entered => "entered",
            Self::Awaiting => "awaiting",
            Self::Woken => "woken",
            Self::Idle => "idle",
        }
    }
}

/// The link of the stack of a span with that key.
pub(crate) fn link_of(key: SpanKey) -> Link {
    Link { fields: vec![("key", key.get().to_string())], ..Link::default() }
}

/// Adds the symbolized stacks to open spans, each given with the key of the span that has its stack.
pub(super) fn with_stacks(
    spans: Vec<(OpenSpan, Option<SpanKey>)>,
    stacks: &Profile,
) -> Vec<OpenSpan> {
    let mut known: HashMap<&[(&str, String)], Vec<String>> = HashMap::new();
    for sample in stacks.samples() {
        let Some(link) = sample.link.and_then(|link| stacks.link(link)) else { continue };
        // A span has several if it awaits several things at the same time.
        known.entry(&link.fields).or_default().extend(stacks.stack_in_words(sample));
    }
    let with_stack = |(span, key): (OpenSpan, Option<SpanKey>)| {
        let stack = key.and_then(|key| known.get(&*link_of(key).fields).cloned());
        let stack = stack.unwrap_or_default();
        OpenSpan { stack, ..span }
    };
    spans.into_iter().map(with_stack).collect()
}

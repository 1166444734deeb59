//! The spans and threads of a profile.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::table::handle;
use crate::ids::{SpanId, TraceId};

handle! {
    /// The index of a [`Link`].
    LinkId
}
handle! {
    /// The index of a [`ProfiledThread`].
    ThreadId
}

/// The span that a sample belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Link {
    /// The span's name.
    pub span: String,
    /// The enclosing span in this profile.
    pub parent: Option<LinkId>,
    /// The ids under which the span is exported, if it is exported.
    pub ids: Option<(TraceId, SpanId)>,
    /// The ids that its samples link to in OTLP: those of the root of its request.
    pub linked: Option<(TraceId, SpanId)>,
    /// The values of its fields that identify it, if it was kept; see
    /// `Builder::span_fields`.
    pub fields: Vec<(&'static str, String)>,
    /// 0 if unknown.
    pub start_unix_ns: u64,
    /// 0 if it is open, or if that is unknown.
    pub end_unix_ns: u64,
}

impl Link {
    /// A link of which only the name and the place in the tree are known.
    pub fn named(span: impl Into<String>, parent: Option<LinkId>) -> Self {
        Self { span: span.into(), parent, ..Self::default() }
    }

    /// When the span was created; `None` if unknown.
    pub fn start(&self) -> Option<SystemTime> {
        time(self.start_unix_ns)
    }

    /// When the span closed; `None` if it was open when the profile was made, or if that is unknown.
    pub fn end(&self) -> Option<SystemTime> {
        time(self.end_unix_ns)
    }

    /// The memory that it points to.
    pub(super) fn bytes(&self) -> usize {
        let fields = self.fields.iter().map(|(_, value)| size_of::<(&str, String)>() + value.len());
        self.span.len() + fields.sum::<usize>()
    }
}

fn time(unix_ns: u64) -> Option<SystemTime> {
    (unix_ns > 0).then(|| UNIX_EPOCH + Duration::from_nanos(unix_ns))
}

/// A thread with samples or waits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ProfiledThread {
    /// The name of the thread for the system, of at most 15 bytes.
    pub name: String,
    /// The kernel's id of it.
    pub tid: u32,
}

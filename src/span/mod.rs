//! Open spans: which thread is in which span, since when, and where their time goes.
//!
//! This module is independent of rules, perf and profiles. It reports to the collector through [`SpanEvent`]s and
//! [`ThreadShared`](crate::sampler::ThreadShared).

mod account;
mod age;
mod awaits;
mod children;
mod close;
mod first_run;
mod flags;
mod inside;
mod local;
mod open_spans;
mod sample_counts;
mod segment;
mod slot;
mod spans;
mod sync;
mod table;
#[cfg(test)]
mod tests;
mod usage_read;

use std::num::NonZeroU64;

use tracing_subscriber::registry;

pub(crate) use crate::ids::TraceIds;
pub(crate) use crate::sys::Tag as SpanKey;

pub(crate) use account::with_segment;
pub(crate) use awaits::{
    InnermostSpan, LONG_SEGMENT_NS, LongSegment, OtherSpan, has_woken, take_first_entered,
};
pub(crate) use children::ChildClose;
pub(crate) use close::{Ancestor, SpanSnapshot, Verdict};
pub(crate) use first_run::{PollingFirst, SpawnedAt};
pub(crate) use flags::{
    ADDED_UP, ALWAYS_JUDGED, CHOSEN, FAILED, FAILED_ITSELF, FORCED, HAS_FIELDS, HAS_STATUS,
    JUDGES_ALLOCATIONS, JUDGES_CPU, JUDGES_SUBTREE, JUDGES_USAGE, KEEP_ON_ERROR, ONE_IN,
    REGISTERED, SAMPLED_ITSELF, SHOWS_FIELDS, WATCHED,
};
pub(crate) use local::{
    ObservedPoll, explain_idle, find_sampled_span, forget_this_thread, ignore_this_thread,
    innermost_span, is_ignored, is_in_span, last_long_segment, spans_created, spawn_ignored,
};
pub(crate) use open_spans::OpenSlot;
pub(crate) use sample_counts::SampleCounts;
pub(crate) use segment::has_deepest;
pub(crate) use spans::{IdleCause, SpanEvent, SpanInfo, Spans};

/// The registry's id of a span. The registry reuses ids.
pub(crate) type RegistryId = NonZeroU64;

/// The part of a callsite's rules that the hooks need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The number that identifies the callsite and its rule.
    pub(crate) number: u64,
    /// The slot flags that the rule sets.
    pub(crate) flags: u32,
    /// A span whose wall time exceeds this many ticks is judged when it closes.
    pub(crate) judge_after: u64,
    /// A span is old, and its threads are sampled, after it has been entered for this many ticks.
    pub(crate) sampling_delay: u64,
    /// After this many ticks an open span counts as a container of others, and only its current segment makes it old.
    pub(crate) long_after: u64,
    /// A span that allocates more bytes is judged when it closes.
    pub(crate) judge_above_bytes: u64,
    /// A span with more allocations is judged when it closes.
    pub(crate) judge_above_allocations: u64,
}

impl Default for Plan {
    /// Of spans that are never sampled and never judged.
    fn default() -> Self {
        let never = u64::MAX;
        Self {
            number: 0,
            flags: 0,
            judge_after: never,
            sampling_delay: never,
            long_after: never,
            judge_above_bytes: never,
            judge_above_allocations: never,
        }
    }
}

/// Asks the registry for spans, from the inside out: a given span and its ancestors, or the spans entered on this
/// thread. Stops when the visitor returns true.
pub(crate) type Ancestry<'a> = &'a dyn Fn(AncestryFrom, &mut dyn FnMut(RegistryId) -> bool);

/// The span at which an [`Ancestry`] begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AncestryFrom {
    Current,
    Span(RegistryId),
}

/// The parent given to a new span.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GivenParent {
    /// The span that is entered on this thread, if any.
    Contextual,
    /// Like [`Contextual`](Self::Contextual), where a filter of the program can hide enters from the layer.
    ContextualBehindFilter,
    None,
    Span(RegistryId),
}

/// The [`Ancestry`] of a layer's context.
pub(crate) fn ancestry<S>(
    context: &tracing_subscriber::layer::Context<'_, S>,
    from: AncestryFrom,
    visit: &mut dyn FnMut(RegistryId) -> bool,
) where
    S: tracing::Subscriber + for<'a> registry::LookupSpan<'a>,
{
    let first = match from {
        AncestryFrom::Current => context.lookup_current(),
        AncestryFrom::Span(id) => context.span(&tracing::span::Id::from_non_zero_u64(id)),
    };
    let Some(first) = first else { return };
    for span in first.scope() {
        if visit(span.id().into_non_zero_u64()) {
            return;
        }
    }
}

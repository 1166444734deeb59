//! Open spans: which thread is in which, since when, and where its time goes.
//!
//! Knows nothing of rules, perf or profiles. What the collector must learn goes out as [`Notice`]s, and as what a
//! [`SampledThread`](crate::sampler::SampledThread) shows.

mod account;
mod age;
mod close;
mod local;
mod overdue;
mod segment;
mod slot;
mod spans;
mod sync;
mod table;
#[cfg(test)]
mod tests;

use std::num::NonZeroU64;

use tracing_subscriber::registry;

pub(crate) use crate::ids::SpanKey;
use crate::ids::{SpanId, TraceId};

pub use account::{Account, Hardware};
pub(crate) use close::{Closing, Verdict};
#[cfg(any(test, feature = "_otlp"))]
pub(crate) use local::ignore_this_thread;
pub(crate) use local::{forget_this_thread, is_ignored, spawn_ignored};
pub(crate) use overdue::OpenSpan;
pub(crate) use slot::{
    CHOSEN, FAILED, FAILED_ITSELF, FORCED, HAS_FIELDS, HAS_STATUS, JUDGES_CPU, KEEP_ON_ERROR,
    ONE_IN, SAMPLED_ITSELF, SUSPECT, WATCHED,
};
pub(crate) use spans::{GivenParent, KnownSpan, Notice, Spans};

/// The number that the registry gives a span, and gives again to a later one.
pub(crate) type RegistryId = NonZeroU64;

/// Under what a span is exported by OpenTelemetry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TraceIds {
    pub(crate) trace: TraceId,
    pub(crate) span: SpanId,
    /// Whether the trace is exported at all.
    pub(crate) is_sampled: bool,
}

/// What the rules say of a callsite, as far as the hooks must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The number under which the rules know callsite and rule.
    pub(crate) number: u64,
    /// Those of the flags of a slot that come from the rule.
    pub(crate) flags: u32,
    /// Ticks after which a closing span must be judged.
    pub(crate) suspect_after: u64,
    /// Ticks that a span is entered before it is old: then the threads in it are sampled.
    pub(crate) arm_after: u64,
    /// Ticks after which an open span is one that holds others, and only its present segment makes it old.
    pub(crate) long_after: u64,
}

/// Asks the registry for spans: the given one and its ancestors, or those that are entered on this
/// thread from the inside out. Stops when it is answered with true.
pub(crate) type Ancestry<'a> = &'a dyn Fn(AncestryFrom, &mut dyn FnMut(RegistryId) -> bool);

/// Where an [`Ancestry`] begins.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AncestryFrom {
    Current,
    Span(RegistryId),
}

/// The [`Ancestry`] that a layer's context knows.
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

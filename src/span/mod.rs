//! Open spans: which thread is in which, since when, and where its time goes.
//!
//! Knows nothing of rules, perf or profiles. What opens a ring or reads the scheduler comes in
//! through [`ThreadSource`]; what the collector must learn goes out as [`Notice`]s and [`Mark`]s.

mod account;
mod local;
mod recording;
mod slot;
mod spans;
mod table;

use std::num::NonZeroU64;

use tracing_subscriber::registry;

pub(crate) use account::sure_parts;
pub use account::{Account, Hardware};
pub(crate) use local::{Armed, Interval, Source, ThreadSource, Usage, ignore_this_thread};
pub(crate) use recording::{Mark, Recording, Stretch};
pub(crate) use slot::{FAILED, KEEP_ON_ERROR, TIGHTER};
pub(crate) use spans::{Closing, LOOK_INTERVAL, Notice, Spans};

/// The number that the registry gives a span, and gives again to a later one.
pub(crate) type RegistryId = NonZeroU64;

/// Our own number of a span: never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SpanKey(NonZeroU64);

impl SpanKey {
    pub(crate) const MIN: Self = Self(NonZeroU64::MIN);

    pub(crate) const fn new(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    pub(crate) const fn get(self) -> u64 {
        self.0.get()
    }
}

/// What the rules say of a callsite, as far as the hooks must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The number under which the rules know callsite and rule.
    pub(crate) number: u32,
    /// `KEEP_ON_ERROR`, `TIGHTER`, or nothing.
    pub(crate) flags: u32,
    /// Ticks after which a closing span must be judged.
    pub(crate) suspect_after: u64,
    /// The sampling period that the rule needs, if `TIGHTER` is set.
    pub(crate) period_ns: u64,
}

/// The parents of a span, as the registry knows them.
pub(crate) trait Scope {
    /// The nearest span that is entered on this thread, profiled or not, and its ancestors.
    fn current(&self) -> impl Iterator<Item = RegistryId>;
    /// A span and its ancestors.
    fn of(&self, id: RegistryId) -> impl Iterator<Item = RegistryId>;
}

impl<S> Scope for tracing_subscriber::layer::Context<'_, S>
where
    S: tracing::Subscriber + for<'a> registry::LookupSpan<'a>,
{
    fn current(&self) -> impl Iterator<Item = RegistryId> {
        ids(self.lookup_current())
    }

    fn of(&self, id: RegistryId) -> impl Iterator<Item = RegistryId> {
        ids(self.span(&tracing::span::Id::from_non_zero_u64(id)))
    }
}

fn ids<'a, R: registry::LookupSpan<'a> + 'a>(
    span: Option<registry::SpanRef<'a, R>>,
) -> impl Iterator<Item = RegistryId> + 'a {
    span.into_iter().flat_map(|span| span.scope()).map(|span| span.id().into_non_zero_u64())
}

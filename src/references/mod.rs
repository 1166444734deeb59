//! Reference spans: of each cohort some are chosen at random when they are created, sampled from their first enter on,
//! and kept in nothing but what is known of their cohort. Kept spans are compared with them.

mod choice;
mod cohorts;
mod set;
#[cfg(test)]
mod tests;
#[cfg_attr(not(feature = "metrics"), allow(dead_code, reason = "metrics alone read it"))]
mod totals;
mod typical;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::choice::SpanChoice;
use self::cohorts::TypicalSpans;
use self::set::CohortSet;
use self::totals::RouteTotals;
use crate::encode::HtmlContext;
use crate::keep::KeptSpan;
use crate::span::SpanKey;
use crate::stats::Counters;

pub(crate) use choice::{ALL_CPU, CohortHash, Moment, ReferenceLimits, Throw};
pub use cohorts::Route;
pub(crate) use cohorts::cohort_of;
#[cfg(feature = "metrics")]
pub(crate) use totals::{RouteTotal, SUMMED};

/// Cohorts of which something is known.
const MAX_COHORTS: usize = 64;
/// Reference spans that have closed and wait for the collector. More are dropped and counted.
const MAX_CLOSED: usize = 64;

/// How long a reference waits until its close is reported, or for a profile that has its samples, too: spans that are kept
/// wait for two seconds for others of their tree.
const LONGEST_WAIT: Duration = Duration::from_secs(4);
/// Profiles that wait for their names, and the memory of each: 16 MiB in all. More samples are downsampled.
const MAX_ON_WAY: usize = 16;
pub(crate) const MAX_PROFILE_BYTES: usize = 1 << 20;

/// The reference spans of a layer, and what is known of the spans of each route.
#[derive(Debug)]
pub(crate) struct References {
    /// What profiles on request are shown with.
    pub(crate) context: HtmlContext,
    pub(crate) choice: SpanChoice,
    pub(crate) totals: RouteTotals,
    /// The reference spans that have closed, until the collector has read all of their samples.
    closed: Mutex<HashMap<SpanKey, ClosedReference>>,
    /// Each profile of a reference span between the collector and what is typical has another one.
    on_way: Arc<()>,
    cohorts: Mutex<CohortSet<TypicalSpans>>,
    counters: Arc<Counters>,
}

/// A reference span that has closed.
#[derive(Debug)]
pub(crate) struct ClosedReference {
    pub(crate) span: KeptSpan,
    /// How many spans it represents.
    pub(crate) weight: u64,
    /// When it closed.
    pub(crate) since: Instant,
    /// The CPU time that was spent on it since then.
    pub(crate) spent_ns: u64,
}

impl References {
    pub(crate) fn new(
        limits: ReferenceLimits,
        context: HtmlContext,
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            context,
            choice: SpanChoice::new(limits, Arc::clone(&counters), Moment::now()),
            totals: RouteTotals::default(),
            closed: Mutex::default(),
            on_way: Arc::default(),
            cohorts: Mutex::new(CohortSet::new(MAX_COHORTS)),
            counters,
        }
    }

    /// Adds one that has closed, before that is reported to the collector.
    pub(crate) fn close(&self, reference: ClosedReference) {
        let mut closed = self.closed.lock();
        if closed.len() >= MAX_CLOSED {
            return Counters::add(&self.counters.references.dropped_busy, 1);
        }
        closed.insert(reference.span.key, reference);
    }

    /// Begins to make the profile of one; `None` if too many are on their way. It is until the value is dropped.
    pub(crate) fn begin(&self) -> Option<Arc<()>> {
        let is_free = Arc::strong_count(&self.on_way) <= MAX_ON_WAY;
        Counters::add(&self.counters.references.dropped_busy, u64::from(!is_free));
        is_free.then(|| Arc::clone(&self.on_way))
    }

    /// Takes those among spans that have closed, and those whose close was not reported in time. One of which `must_wait`
    /// returns true waits for that time, too, unless `everything` is to be taken.
    pub(crate) fn take_closed(
        &self,
        spans: &[SpanKey],
        everything: bool,
        must_wait: impl Fn(&KeptSpan) -> bool,
    ) -> Vec<ClosedReference> {
        let is_due = |key: &SpanKey, reference: &mut ClosedReference| {
            everything
                || reference.since.elapsed() >= LONGEST_WAIT
                || spans.contains(key) && !must_wait(&reference.span)
        };
        let mut closed = self.closed.lock();
        closed.extract_if(is_due).map(|(_, reference)| reference).collect()
    }
}

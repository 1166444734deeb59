//! Which spans count among those inside another one.

use super::SpanKey;
use super::flags::{CHOSEN, FORCED, HAS_FIELDS};
use super::slot::Slot;

/// The close of a span that counts among those inside another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChildClose {
    /// The span in which it counts.
    pub(crate) owner: SpanKey,
    /// The number of the child's plan.
    pub(crate) plan: u64,
    /// In ticks.
    pub(crate) opened: u64,
    pub(crate) closed: u64,
    /// All spans inside the owner count that open from then on.
    pub(crate) from: u64,
}

/// How many of them can wait for the collector.
pub(super) const CHILD_CLOSES: usize = 4096;

/// How much longer a span is open than it has to be entered to be old: many are open for as long as some upstream takes.
const OPEN_TIMES: u64 = 10;

impl Slot {
    /// How long it is open before what is awaited in it matters: ten times as long as it has to be entered to be old.
    pub(super) fn old_as_open_after(&self) -> u64 {
        self.sampling_delay().saturating_mul(OPEN_TIMES)
    }

    /// From when on that is so.
    pub(super) fn old_as_open_at(&self) -> u64 {
        self.opened().saturating_add(self.old_as_open_after())
    }

    /// Whether that is so at `now`, and it is not open for long.
    #[inline]
    pub(super) fn is_old_as_open(&self, now: u64) -> bool {
        now >= self.old_as_open_at() && !self.is_open_for_long(now)
    }

    /// Whether it samples threads from their first enter on, since it was created.
    pub(super) fn is_sampled_from_start(&self) -> bool {
        let flags = self.flags();
        let is_chosen_late = flags & CHOSEN != 0 && flags & HAS_FIELDS != 0;
        self.arms_at_enter() && flags & FORCED == 0 && !is_chosen_late
    }
}

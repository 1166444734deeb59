//! Which spans count among those inside another one.

use super::SpanKey;
use super::slot::{CHOSEN, FORCED, HAS_FIELDS, Slot};

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
    /// All spans inside the owner count, not only those that open once it is old.
    pub(crate) is_from_start: bool,
}

/// How many of them can wait for the collector.
pub(super) const CHILD_CLOSES: usize = 4096;

/// How much longer a span is open than it has to be entered to be old. An async service has many spans that are open for
/// as long as some fast upstream takes.
pub(super) const OPEN_TIMES: u64 = 10;
/// How much longer it is open than one that counts as open for long elsewhere: a slow request awaits to its end.
const LONG_TIMES: u64 = 10;

impl Slot {
    /// Whether it has been open for so long that what is awaited in it matters: ten times as long as it has to be entered
    /// to be old, and not for very long.
    #[inline]
    pub(super) fn is_old_as_open(&self, now: u64) -> bool {
        let open = now.saturating_sub(self.opened());
        self.is_old_after(open / OPEN_TIMES) && open / LONG_TIMES < self.long_after()
    }

    /// Whether it samples threads from their first enter on, since it was created.
    pub(super) fn is_sampled_from_start(&self) -> bool {
        let flags = self.flags();
        let is_chosen_late = flags & CHOSEN != 0 && flags & HAS_FIELDS != 0;
        self.arms_at_enter() && flags & FORCED == 0 && !is_chosen_late
    }
}

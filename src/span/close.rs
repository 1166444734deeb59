//! How spans close.

use std::sync::atomic::Ordering;

use super::account::with_inside;
use super::flags::{HAS_SUMS, REFERENCE, REFERENCE_SHIFT, REGISTERED};
use super::local::with_state;
use super::sample_counts::SampleCounts;
use super::slot::Slot;
use super::spans::SpanEvent;
use super::{RegistryId, SpanKey, Spans, TraceIds};
use crate::facts::TimeBreakdown;

/// A span that has closed and must be judged, or an open one in the state it would close in now.
#[derive(Clone, Debug)]
pub(crate) struct SpanSnapshot {
    pub(crate) id: RegistryId,
    pub(crate) key: SpanKey,
    pub(crate) root: SpanKey,
    pub(crate) plan: u64,
    /// The flags of its slot: `FAILED` and others.
    flags: u32,
    pub(crate) samples: SampleCounts,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) opened_ns: u64,
    /// When it closed, in ticks.
    pub(crate) closed_at: u64,
    pub(crate) account: TimeBreakdown,
}

impl SpanSnapshot {
    /// Of a reference span, how many spans it represents: as many as one of which was chosen on average.
    pub(crate) fn represents(&self) -> Option<u64> {
        let halvings = ((self.flags & REFERENCE) >> REFERENCE_SHIFT).checked_sub(1)?;
        Some(1_u64.checked_shl(halvings).unwrap_or(u64::MAX))
    }

    pub(crate) fn has(&self, flags: u32) -> bool {
        self.flags & flags != 0
    }
}

/// A span that is closing, or one around it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ancestor {
    pub(crate) id: RegistryId,
    pub(crate) key: SpanKey,
    pub(crate) was_entered: bool,
    /// The span was open for long at the time in question, as a connection or `main` is.
    pub(crate) is_long: bool,
}

/// The decision on a closed span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Whether the close must be reported to the collector, even if it does not know the span.
    pub(crate) must_notify: bool,
    pub(crate) ids: Option<TraceIds>,
}

/// Of deeper trees, only the innermost spans count: a thread that closes ten thousand nested spans must not walk all of
/// them for each.
const MOST_ENCLOSING: usize = 256;

impl Spans {
    /// Closes a span. If it must be judged, calls `judge`. The slot is released only afterwards, so a span counts as
    /// open until its verdict is known. Returns whether the collector may have to be woken.
    #[inline]
    pub(crate) fn close(
        &self,
        id: RegistryId,
        judge: impl FnOnce(&SpanSnapshot) -> Verdict,
    ) -> bool {
        match self.table.get_in_table(id) {
            Some(slot) => {
                let now = self.clock.now();
                if slot.closes_plainly(now) {
                    slot.release();
                    return false;
                }
                self.close_slowly(slot, now, judge, || slot.release())
            }
            None => self.table.may_overflow(id) && self.close_overflow(id, judge),
        }
    }

    #[cold]
    fn close_overflow(&self, id: RegistryId, judge: impl FnOnce(&SpanSnapshot) -> Verdict) -> bool {
        let Some(slot) = self.table.get_overflow(id) else { return false };
        let release = || self.table.release_overflow(id, &slot);
        self.close_slowly(&slot, self.clock.now(), judge, release)
    }

    /// The close of a span that must be judged, that counts in another, or that has allocated.
    #[inline(never)]
    fn close_slowly(
        &self,
        slot: &Slot,
        now: u64,
        judge: impl FnOnce(&SpanSnapshot) -> Verdict,
        release: impl FnOnce(),
    ) -> bool {
        if slot.flags() & HAS_SUMS != 0 {
            slot.unset(HAS_SUMS);
            self.counts.lock().move_sums_of(slot);
        }
        let closing =
            if slot.must_be_judged(now) { self.close_for_verdict(slot, now) } else { None };
        self.pass_up_allocations(slot);
        let counts_from = self.counts_from(slot, now);
        if let Some(from) = counts_from {
            self.report_child(slot, from, now);
        }
        let has_many = counts_from.is_some() && self.has_many_child_closes();
        let reported = closing.map(|closing| {
            let Verdict { must_notify, ids } = judge(&closing);
            let closed_ns = closing.opened_ns + closing.account.wall_ns;
            let event = SpanEvent::Closed { key: closing.key, ids, closed_ns };
            let must_report = must_notify || closing.has(REGISTERED);
            !must_report || self.span_events.push(event).is_ok()
        });
        release();
        if reported == Some(false) {
            // Release: a thread that reads true finds the slot released.
            self.event_lost.store(true, Ordering::Release);
        }
        reported.is_some() || has_many
    }

    /// What was allocated in a span that closes was allocated inside its parent, which is still open.
    #[inline(always)]
    fn pass_up_allocations(&self, slot: &Slot) {
        if let Some(all) = slot.allocations() {
            match self.table.parent_of(slot) {
                Some(parent) => parent.count_allocations_inside(all),
                None => self.counters.add_allocations(all),
            }
        }
    }

    /// A span that is closing and those around it, from the inside out. `at` is when it matters how long they were open.
    pub(crate) fn enclosing(&self, id: RegistryId, at: u64) -> Vec<Ancestor> {
        let mut enclosing = Vec::new();
        let mut add = |slot: &Slot| {
            enclosing.extend(slot.id().zip(slot.key()).map(|(id, key)| Ancestor {
                id,
                key,
                was_entered: slot.was_entered(),
                is_long: slot.is_open_for_long(at),
            }));
            enclosing.len() < MOST_ENCLOSING
        };
        if let Some(slot) = self.table.get(id) {
            add(&slot);
            self.for_ancestors(&slot, add);
        }
        enclosing
    }

    #[cold]
    #[inline(never)]
    fn close_for_verdict(&self, slot: &Slot, now: u64) -> Option<SpanSnapshot> {
        _ = with_state(self.layer, |state| {
            if !state.pending.is_empty() {
                self.sync_accounts(state, now);
                // The sync may have attached the thread.
                state.end_hook(now);
            }
        });
        self.closing(slot, now)
    }

    pub(super) fn closing(&self, slot: &Slot, now: u64) -> Option<SpanSnapshot> {
        let mut account = slot.account(&self.clock, now);
        if slot.flags() & HAS_SUMS != 0 {
            account = with_inside(account, self.counts.lock().sums_of(slot));
        }
        Some(SpanSnapshot {
            id: slot.id()?,
            key: slot.key()?,
            root: SpanKey::new(slot.raw_root())?,
            plan: slot.plan(),
            flags: slot.flags(),
            samples: slot.samples(),
            opened_ns: self.clock.raw_ns(slot.opened()),
            closed_at: now,
            account,
        })
    }
}

#[cfg(test)]
impl SpanSnapshot {
    pub(crate) fn for_test(wall_ns: u64, flags: u32) -> Self {
        Self {
            id: RegistryId::MIN,
            key: SpanKey::MIN,
            root: SpanKey::MIN,
            plan: 0,
            flags,
            samples: SampleCounts::default(),
            opened_ns: 0,
            closed_at: 0,
            account: TimeBreakdown { wall_ns, ..TimeBreakdown::default() },
        }
    }
}

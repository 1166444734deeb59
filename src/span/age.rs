//! When spans become old, so that the threads in them are sampled.

use super::account::Sure;
use super::local::{ThreadState, put, take};
use super::sample_counts::SampleCounts;
use super::segment::DETACHED;
use super::slot::{CPU_UNKNOWN, FORCED, JUDGES_ALLOCATIONS, JUDGES_SUBTREE, SUSPECT, Slot};
use super::{InnermostSpan, RegistryId, Spans};
use crate::sys::Uncounted;

impl Spans {
    /// Keeps the innermost profiled span on this thread, whatever its rule decides, and samples it from now on. Returns
    /// false if there is none.
    pub(crate) fn force_current(&self) -> bool {
        let Some(mut state) = take(self.layer) else { return false };
        let is_forced = self.force_top(&mut state).is_some();
        put(state);
        is_forced
    }

    fn force_top(&self, state: &mut ThreadState) -> Option<()> {
        let (id, key) = state.top().and_then(|top| Some((RegistryId::new(top.id)?, top.key)))?;
        let slot = self.table.get(id).filter(|slot| slot.raw_key() == key)?;
        slot.set(FORCED | SUSPECT);
        slot.arm_at_enter();
        let (has_turned, now) = (state.begin_hook(), self.clock.now());
        if has_turned {
            self.sync_accounts(state, now);
        }
        state.make_old(now);
        if !state.is_armed {
            self.enter_old(state, &slot, false, now);
        }
        state.end_hook(now);
        Some(())
    }

    /// Whether a span that this thread enters has a parent that is not entered on this thread.
    #[cold]
    pub(super) fn is_detached(&self, state: &ThreadState, slot: &Slot) -> bool {
        slot.parent().is_some_and(|parent| !state.is_in(parent))
    }

    /// When such a span, or one of its ancestors that the thread is not in, becomes old, and whether the rule of such
    /// an ancestor judges the CPU time of the segment. Ancestors that the thread is in are accounted for by their own
    /// segments.
    #[cold]
    pub(super) fn old_and_judged_at_detached(
        &self,
        state: &ThreadState,
        slot: &Slot,
        now: u64,
        old_at: u64,
    ) -> (u64, bool) {
        let (mut old_at, mut is_judged) = (old_at, false);
        self.for_ancestors(slot, |ancestor| {
            let is_detached = ancestor.id().is_some_and(|id| !state.is_in(id));
            if is_detached {
                old_at = old_at.min(ancestor.old_at(now));
                is_judged |= ancestor.flags() & JUDGES_SUBTREE != 0;
            }
            is_detached
        });
        (old_at, is_judged)
    }

    /// Adds an ended segment of such a span to its ancestors: its length, and what is known of its CPU time.
    pub(super) fn pass_up(&self, state: &ThreadState, slot: &Slot, ticks: u64, sure: Sure) {
        let segment_ns = self.clock.ns(ticks);
        self.for_ancestors(slot, |ancestor| {
            // An ancestor of another segment on this thread gets this time from that segment.
            let is_detached = ancestor.id().is_some_and(|id| !self.is_around(state, id));
            if is_detached {
                ancestor.grow_older(ticks);
                ancestor.count_inside(segment_ns, sure);
                if state.cpu_unknown {
                    ancestor.set(CPU_UNKNOWN);
                }
            }
            is_detached
        });
    }

    /// Whether this thread is in that span or in a descendant of it.
    fn is_around(&self, state: &ThreadState, id: RegistryId) -> bool {
        state.entered().iter().any(|segment| {
            let slot = || RegistryId::new(segment.id).and_then(|id| self.table.get(id));
            let is_inside = |slot: &Slot| {
                let mut is_found = false;
                self.for_ancestors(slot, |ancestor| {
                    is_found |= ancestor.id() == Some(id);
                    !is_found
                });
                is_found
            };
            // The parent of any other segment is entered on this thread too, and is checked itself.
            segment.id == id.get()
                || segment.has(DETACHED) && slot().is_some_and(|slot| is_inside(&slot))
        })
    }

    /// A thread that is not sampled enters an old span. The thread arms itself if the span is sampled from its enter
    /// on, or if the thread is new, since it may end before the collector finds it. Returns the time of the enter.
    #[cold]
    #[inline(never)]
    pub(super) fn enter_old(
        &self,
        state: &mut ThreadState,
        slot: &Slot,
        is_detached: bool,
        now: u64,
    ) -> u64 {
        let _uncounted = Uncounted::begin();
        let mut arms_at_enter = slot.arms_at_enter();
        if is_detached {
            self.for_ancestors(slot, |ancestor| {
                arms_at_enter |= ancestor.arms_at_enter();
                !arms_at_enter
            });
        }
        if arms_at_enter {
            state.sampled.iter().for_each(|sampled| sampled.note_arms_itself());
        }
        if arms_at_enter || std::mem::take(&mut state.is_new) {
            self.arm_self(state, now);
        }
        now.max(state.synced)
    }

    /// Whether an allocation in that span, which is old from `old_at` on, is worth a sample: also if the span is young,
    /// but its rule, or that of a span around it, judges what is allocated.
    pub(crate) fn samples_allocations(&self, span: &InnermostSpan, old_at: u64) -> bool {
        let Some(slot) = self.slot_of(span) else { return false };
        let judges = |slot: &Slot| slot.flags() & JUDGES_ALLOCATIONS != 0;
        let mut is_sampled = judges(&slot) || self.clock.now() >= old_at;
        if !is_sampled {
            self.for_ancestors(&slot, |ancestor| {
                is_sampled = judges(ancestor);
                !is_sampled
            });
        }
        is_sampled
    }

    /// Whether spans can be looked up without waiting for a lock.
    pub(crate) fn can_look_up(&self) -> bool {
        self.table.can_look_up()
    }

    /// Counts an allocation as a sample of its span. Returns false if the span cannot be registered with the collector.
    pub(crate) fn report_allocation(&self, span: &InnermostSpan) -> bool {
        self.register_with_collector(span.id, SampleCounts::ALLOCATION)
    }
}

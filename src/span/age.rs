//! From when on spans are old, and the threads in them sampled.

use super::account::Sure;
use super::local::{ThreadState, put, take};
use super::segment::APART;
use super::slot::{FORCED, SUSPECT, Slot};
use super::{RegistryId, Spans};

impl Spans {
    /// The innermost profiled span on this thread will be kept, whatever it does, and is sampled from now on.
    /// False if there is none.
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

    /// Whether a span that this thread enters has a parent that the thread is not in.
    #[cold]
    pub(super) fn is_apart(&self, state: &ThreadState, slot: &Slot) -> bool {
        slot.parent().is_some_and(|parent| !state.is_in(parent))
    }

    /// When such a span is old, or one of those around it that the thread is not in: the others know by
    /// themselves.
    #[cold]
    pub(super) fn old_at_apart(
        &self,
        state: &ThreadState,
        slot: &Slot,
        now: u64,
        old_at: u64,
    ) -> u64 {
        let mut old_at = old_at;
        self.for_ancestors(slot, |ancestor| {
            let is_apart = ancestor.id().is_some_and(|id| !state.is_in(id));
            if is_apart {
                old_at = old_at.min(ancestor.old_at(now));
            }
            is_apart
        });
        old_at
    }

    /// Tells those around such a span for how long it was entered by a segment that has ended, and what is known of
    /// that time.
    pub(super) fn tell_apart(&self, state: &ThreadState, slot: &Slot, ticks: u64, sure: Sure) {
        let segment_ns = self.clock.ns(ticks);
        self.for_ancestors(slot, |ancestor| {
            // What is around a segment that was told of, or will be, has that time from there.
            let is_apart = ancestor.id().is_some_and(|id| !self.is_around(state, id));
            if is_apart {
                ancestor.grow_older(ticks);
                ancestor.count_inside(segment_ns, sure);
            }
            is_apart
        });
    }

    /// Whether this thread is in that span, or in one inside it.
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
            // The parent of any other one is entered too.
            segment.id == id.get()
                || segment.has(APART) && slot().is_some_and(|slot| is_inside(&slot))
        })
    }

    /// A thread that is not sampled enters a span that is old. It arms itself if the span is one that is sampled
    /// from its enter, or if the thread is new: it may have ended before anybody else sees it. Returns when it
    /// enters.
    #[cold]
    #[inline(never)]
    pub(super) fn enter_old(
        &self,
        state: &mut ThreadState,
        slot: &Slot,
        is_apart: bool,
        now: u64,
    ) -> u64 {
        let mut arms_at_enter = slot.arms_at_enter();
        if is_apart {
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
}

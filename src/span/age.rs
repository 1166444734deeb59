//! When spans become old, so that the threads in them are sampled and their child spans counted.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::account::{LowerBounds, inside_time};
use super::children::{CHILD_CLOSES, ChildClose};
use super::flags::{
    ADDED_UP, AGED, ALWAYS_JUDGED, CPU_UNKNOWN, FORCED, IS_COUNTED, JUDGES_ALLOCATIONS, JUDGES_CPU,
    JUDGES_SUBTREE, REFERENCE, REFERENCE_SHIFT,
};
use super::local::{ThreadState, with_state};
use super::sample_counts::SampleCounts;
use super::segment::{DEEPEST, DETACHED, JUDGED_ABOVE, READS_CPU, SWITCHED, Segment};
use super::slot::Slot;
use super::{InnermostSpan, RegistryId, SpanKey, Spans};
use crate::sampler::{NEVER, ThreadShared};
use crate::stats::Counters;
use crate::sys::SuspendCounting;

impl Spans {
    /// Makes a new span a reference, which was chosen with that probability, as a power of one half: threads in it are
    /// sampled from their first enter on, and it is judged when it closes.
    pub(crate) fn make_reference(&self, id: RegistryId, halvings: u8) {
        let most = REFERENCE >> REFERENCE_SHIFT;
        self.mark(id, (u32::from(halvings) + 1).min(most) << REFERENCE_SHIFT);
    }

    /// Sets flags of a new span, which is judged when it closes. Unless it is only added up, threads are sampled in it.
    #[cold]
    pub(crate) fn mark(&self, id: RegistryId, flags: u32) {
        if let Some(slot) = self.table.get(id) {
            slot.set(flags | ALWAYS_JUDGED);
            if flags != ADDED_UP {
                slot.attach_at_enter();
            }
        }
    }

    /// Keeps this thread's innermost profiled span, whatever its rule says, and samples it. False if there is none.
    pub(crate) fn force_current(&self) -> bool {
        let force = |state: &mut ThreadState| {
            let slot = state.top()?.slot(&self.table)?;
            slot.set(FORCED | ALWAYS_JUDGED);
            slot.attach_at_enter();
            let (has_turned, now) = (state.begin_hook(), self.clock.now());
            if has_turned {
                self.sync_accounts(state, now);
            }
            _ = state.top_mut().map(|top| top.samples_from = now);
            if !state.is_attached {
                self.enter_old(state, &slot, false, now);
            }
            state.end_hook(now);
            Some(())
        };
        with_state(self.layer, force).flatten().is_some()
    }

    /// Whether this thread is in a span that is one of the deepest, so that no more may be created here.
    #[cold]
    pub(crate) fn is_too_deep(&self) -> bool {
        let is_too_deep =
            with_state(self.layer, |state| state.top().is_some_and(Segment::is_deepest));
        let is_too_deep = is_too_deep.unwrap_or(false);
        Counters::add(&self.counters.spans.declined_too_deep, is_too_deep.into());
        is_too_deep
    }

    /// The enter if something must be synced first, or if the exit has to record more than the segment's length.
    #[cold]
    #[inline(never)]
    pub(super) fn enter_slowly(
        &self,
        state: &mut ThreadState,
        id: RegistryId,
        slot: &Slot,
        mut now: u64,
        must_sync: bool,
    ) {
        if state.enter_again(id, slot.raw_key()) {
            state.end_hook(now);
            return;
        }
        state.inside.set_reach(now);
        let mut reads_cpu = slot.flags() & (JUDGES_CPU | AGED);
        if reads_cpu == AGED && slot.is_open_for_long(now) {
            reads_cpu = 0;
        }
        if must_sync || now >= state.deadline || self.must_read_cpu(state, reads_cpu, now) {
            self.sync_judged(state, slot, now);
            // The setup of a thread takes time that is not the span's.
            now = now.max(state.synced);
        }
        let (below, old_below, mut depth) =
            state.top().map_or((0, NEVER, 0), |top| (top.id, top.samples_from, top.depth + 1));
        let mut flags = if reads_cpu == 0 { 0 } else { READS_CPU };
        let mut samples_from = slot.samples_from(now).min(old_below);
        let is_elsewhere = slot.raw_parent() != below;
        let around = slot.parent().map(|parent| state.depth_of(parent));
        let is_detached = is_elsewhere && around == Some(None);
        if is_elsewhere {
            depth = around.flatten().map_or(0, |around| around + 1);
        }
        if is_detached {
            flags |= DETACHED;
            let is_judged;
            (samples_from, is_judged, depth) =
                self.old_and_judged_at_detached(state, slot, now, samples_from);
            if is_judged {
                flags |= JUDGED_ABOVE;
                self.sync_accounts(state, now);
                now = now.max(state.synced);
            }
        }
        if is_elsewhere && self.switch_to(state, slot, now) {
            flags |= SWITCHED;
            now = now.max(state.synced);
        }
        let mut is_unsampled = false;
        if samples_from <= now && !state.is_attached {
            now = self.enter_old(state, slot, is_detached, now);
            let could_be = |sampled: &Arc<ThreadShared>| !sampled.is_refused();
            is_unsampled = !state.is_attached && state.sampled.as_ref().is_some_and(could_be);
        }
        state.push_slowly(id, slot, flags, now, (samples_from, depth));
        let idle = slot.enter(now, state.thread);
        if idle.is_none_or(|idle| idle >= self.ticks.long_idle) {
            self.note_entered(state, id, slot, idle, now);
        }
        state.end_hook(now);
        // Only after the collector can see the enter.
        if is_unsampled {
            self.request_scan(state);
        }
    }

    /// A span was entered that was idle for long, or (`None`) that was entered already.
    #[cold]
    #[inline(never)]
    pub(super) fn note_entered(
        &self,
        state: &mut ThreadState,
        id: RegistryId,
        slot: &Slot,
        idle: Option<u64>,
        now: u64,
    ) {
        match idle {
            Some(idle) => self.note_idle(state, slot, idle, now),
            None => {
                if state.note_nested(id) && self.switch_to(state, slot, now) {
                    _ = state.top_mut().map(|top| top.set(SWITCHED));
                }
                // On two threads at once, a span can run for longer than its wall time.
                slot.set_once(ALWAYS_JUDGED);
            }
        }
    }

    /// When a span whose parent is not entered on this thread, or one of its ancestors that the thread is not in, becomes
    /// old, whether the rule of such an ancestor judges the CPU time of the segment, and how many ancestors there are.
    /// Ancestors that the thread is in are accounted for by their own segments.
    #[cold]
    pub(super) fn old_and_judged_at_detached(
        &self,
        state: &ThreadState,
        slot: &Slot,
        now: u64,
        samples_from: u64,
    ) -> (u64, bool, u32) {
        let (mut samples_from, mut is_judged, mut around) = (samples_from, false, 0);
        let ancestors = self.for_detached(&state.inside, slot, |ancestor| {
            around = ancestor.id().and_then(|id| state.depth_of(id)).map_or(0, |depth| depth + 1);
            if around == 0 {
                let here = state.inside.ticks(ancestor.raw_key());
                samples_from = samples_from.min(ancestor.samples_from_after(now, here));
                is_judged |= ancestor.flags() & JUDGES_SUBTREE != 0;
            }
            around == 0
        });
        (samples_from, is_judged, ancestors + around)
    }

    /// Adds a segment of such a span that ends at `now` to its ancestors: its length, and what is known of its CPU time.
    pub(super) fn pass_up(
        &self,
        state: &ThreadState,
        slot: &Slot,
        (now, ticks): (u64, u64),
        sure: LowerBounds,
    ) {
        let time = inside_time(self.clock.ns(ticks), sure);
        let visited = self.for_detached(&state.inside, slot, |ancestor| {
            // An ancestor that the thread is in has this time in its own segment. Other segments below it were suspended.
            let is_detached = ancestor.id().is_some_and(|id| state.depth_of(id).is_none());
            if is_detached {
                state.inside.add(&self.table, ancestor, ticks, time);
                if state.cpu_unknown {
                    ancestor.set_once(CPU_UNKNOWN);
                }
            }
            is_detached
        });
        state.inside.note_reached(visited, now, self.ticks.cpu_clock_read);
    }

    /// A thread that is not sampled enters an old span. The thread attaches itself if the span is sampled from its enter
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
        let _uncounted = SuspendCounting::begin();
        // Few spans are references, and others of the rule need not be sampled.
        let (mut arms_at_enter, mut is_brief) = (false, true);
        let mut note = |slot: &Slot| {
            let is_long = slot.is_open_for_long(now);
            if slot.arms_at_enter() && (!is_long || slot.delay_when_long() == 0) {
                arms_at_enter = true;
                is_brief &= slot.flags() & REFERENCE != 0;
            }
            is_brief
        };
        note(slot);
        if is_detached {
            self.for_detached(&state.inside, slot, note);
        }
        for sampled in state.sampled.iter().filter(|_| arms_at_enter) {
            if is_brief { sampled.note_brief() } else { sampled.set_attaches_at_enter() }
        }
        if arms_at_enter || std::mem::take(&mut state.is_new) {
            self.arm_self(state, now);
        }
        now.max(state.synced)
    }

    /// Whether an allocation in that span, which is old from `samples_from` on, is worth a sample: also if the span is young,
    /// but its rule, or that of a span around it, judges what is allocated.
    pub(crate) fn samples_allocations(&self, span: &InnermostSpan, samples_from: u64) -> bool {
        let Some(slot) = self.slot_of(span) else { return false };
        let judges = |slot: &Slot| slot.flags() & JUDGES_ALLOCATIONS != 0;
        judges(&slot) || self.clock.now() >= samples_from || self.is_in_one(&slot, judges)
    }

    /// From when on a span is old, or one around it, by what threads that are in them have published: 0 or never.
    pub(super) fn samples_from_of(&self, state: &ThreadState, id: RegistryId) -> u64 {
        let Some(slot) = self.table.get(id) else { return NEVER };
        let now = self.clock.now();
        let mut is_old = slot.is_old(now);
        if !is_old {
            state.inside.set_reach(now);
            let ancestors = self.for_detached(&state.inside, &slot, |ancestor| {
                is_old = ancestor.is_old(now);
                !is_old
            });
            state.inside.note_reached(ancestors, now, self.ticks.cpu_clock_read);
        }
        if is_old { 0 } else { NEVER }
    }

    /// If a span that closes counts, from when on all count that open inside the one around it. One that opened earlier
    /// counts if that is old by now: the first step of a request that awaits.
    #[inline]
    pub(super) fn counts_from(&self, slot: &Slot, now: u64) -> Option<u64> {
        if slot.flags() & IS_COUNTED != 0 {
            return Some(slot.opened());
        }
        let around = self.table.parent_of(slot);
        around.filter(|it| it.is_old_as_open(now)).map(|it| it.old_as_open_at())
    }

    /// A span closes that counts: reports it for the outermost span of its request. Of a request inside a span that was
    /// open for long when it began, such as a connection, also for that one.
    pub(super) fn report_child(&self, slot: &Slot, from: u64, now: u64) {
        let close = |owner: &Slot| {
            Some(ChildClose {
                owner: owner.key()?,
                plan: slot.plan(),
                opened: slot.opened(),
                closed: now,
                from: if owner.is_sampled_from_start() { 0 } else { from },
            })
        };
        let mut next = self.table.parent_of(slot);
        for _ in 0..DEEPEST {
            let Some(owner) = next else { return };
            next = self.table.parent_of(&owner);
            if next.as_ref().is_some_and(|around| !around.is_open_for_long(owner.opened())) {
                continue;
            }
            // Its close is then reported, too, so that what is counted is released.
            let is_reported = self.registers(&owner)
                && close(&owner).is_some_and(|close| self.child_closes.push(close).is_ok());
            if !is_reported {
                self.child_lost.store(true, Ordering::Relaxed);
                Counters::add(&self.counters.children.dropped_queue_full, 1);
            }
        }
        if next.is_some() {
            self.child_lost.store(true, Ordering::Relaxed);
            Counters::add(&self.counters.children.dropped_too_deep, 1);
        }
    }

    pub(super) fn has_many_child_closes(&self) -> bool {
        self.child_closes.len() > CHILD_CLOSES / 2
    }

    /// Takes the child closes that were reported until now.
    pub(crate) fn take_child_closes(&self) -> impl Iterator<Item = ChildClose> {
        (0..self.child_closes.len()).map_while(|_| self.child_closes.pop())
    }

    /// The spans in which those count that the collector has not taken yet. Nothing else may happen in the meantime.
    #[cfg(test)]
    pub(crate) fn owners_of_child_closes(&self) -> Vec<SpanKey> {
        let closes: Vec<_> = self.take_child_closes().collect();
        let owners = closes.iter().map(|close| close.owner).collect();
        closes.into_iter().for_each(|close| assert!(self.child_closes.push(close).is_ok()));
        owners
    }

    /// Whether the close of a child span could not be reported since the last call.
    pub(crate) fn take_lost_child(&self) -> bool {
        self.child_lost.swap(false, Ordering::Relaxed)
    }

    /// Whether that span is open, slow by its rule, and not open for so long that it contains requests.
    pub(crate) fn is_slow_request(&self, id: RegistryId, key: SpanKey) -> bool {
        let (slot, now) = (self.table.find(id, key.get()), self.clock.now());
        slot.is_some_and(|slot| {
            let judge_after = slot.judge_after.load(Ordering::Relaxed);
            now.saturating_sub(slot.opened()) > judge_after && !slot.is_open_for_long(now)
        })
    }

    /// Whether spans can be looked up without waiting for a lock.
    pub(crate) fn can_look_up(&self) -> bool {
        self.table.can_look_up()
    }

    /// Counts an allocation as a sample of its span. Returns false if the span cannot be registered with the collector.
    pub(crate) fn report_allocation(&self, span: &InnermostSpan) -> bool {
        let slot = self.slot_of(span);
        slot.is_some_and(|slot| self.register_with_collector(&slot, SampleCounts::ALLOCATION))
    }
}

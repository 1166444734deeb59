//! What happens to a span at each hook.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam::queue::ArrayQueue;

use super::account::{Account, Tally};
use super::local::{
    ArmThreads, ThreadState, Unresolved, add_state, count_unmatched, is_ignored, put, take,
    unmatched,
};
use super::slot::{ANNOUNCED, FAILED, HAS_STATUS, Parent, Slot, TIGHTER};
use super::table::SlotTable;
use super::{Ancestry, From, Plan, RegistryId, SpanKey, TraceIds};
use crate::stats::Counters;
use crate::sys::Clock;

/// All open profiled spans of a layer.
#[derive(Debug)]
pub(crate) struct Spans {
    pub(super) layer: u32,
    pub(super) clock: Clock,
    pub(super) table: SlotTable,
    pub(super) notices: ArrayQueue<Notice>,
    /// Set if a close could not be told: then the collector must look for itself.
    pub(super) notice_lost: AtomicBool,
    pub(super) next_key: AtomicU64,
    pub(super) source: Box<dyn ArmThreads>,
    pub(super) base_period_ns: u64,
    pub(super) counters: Arc<Counters>,
    /// Tells threads that the layer lives.
    pub(super) life: Arc<()>,
    /// The constants of these names in ticks.
    pub(super) cpu_clock_interval: u64,
    pub(super) usage_interval: u64,
    pub(super) look_interval: u64,
    pub(super) retry_interval: u64,
}

/// What the collector is told of spans in which samples fell, in the order in which it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A sample fell in the span or inside it, for the first time.
    Opened { key: SpanKey, parent: Option<SpanKey>, root: SpanKey, id: RegistryId, plan: u32 },
    /// A span of which `Opened` was said, or which is kept, has closed.
    Closed { key: SpanKey, ids: Option<TraceIds> },
}

/// A span that has closed and must be judged.
#[derive(Clone, Debug)]
pub(crate) struct Closing {
    pub(crate) key: SpanKey,
    pub(crate) root: SpanKey,
    pub(crate) plan: u32,
    pub(crate) failed: bool,
    /// Samples that fell in the span and inside it.
    pub(crate) samples: u64,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) opened_ns: u64,
    pub(crate) account: Account,
    /// The collector knows it: a sample fell in it or inside it.
    pub(crate) announced: bool,
}

/// What was decided on a span that has closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Whether the collector has something to do for it.
    pub(crate) must_know: bool,
    /// The collector is told later, by [`tell_closed`](Spans::tell_closed).
    pub(crate) is_told_later: bool,
    pub(crate) ids: Option<TraceIds>,
}

/// The CPU clock takes half a microsecond to read: this makes it at most half a percent.
const CPU_CLOCK_INTERVAL: Duration = Duration::from_micros(100);
const USAGE_INTERVAL: Duration = Duration::from_millis(1);
/// How often a thread looks whether it was disarmed, and whether its rate may sink again. Less
/// than the time after which an idle thread is disarmed.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// When a thread that got no ring asks again: others may have given theirs back.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Keys a thread takes at a time, so that threads do not share a counter's cache line.
const KEY_BLOCK: u64 = 1 << 16;
const NOTICES: usize = 4096;

impl Spans {
    pub(crate) fn new(
        clock: Clock,
        source: Box<dyn ArmThreads>,
        base_period_ns: u64,
        counters: Arc<Counters>,
    ) -> Self {
        static NEXT_LAYER: AtomicU32 = AtomicU32::new(1);
        Self {
            layer: NEXT_LAYER.fetch_add(1, Ordering::Relaxed),
            life: Arc::new(()),
            table: SlotTable::new(),
            notices: ArrayQueue::new(NOTICES),
            notice_lost: AtomicBool::new(false),
            next_key: AtomicU64::new(1),
            source,
            base_period_ns,
            counters,
            cpu_clock_interval: clock.ticks(CPU_CLOCK_INTERVAL),
            usage_interval: clock.ticks(USAGE_INTERVAL),
            look_interval: clock.ticks(LOOK_INTERVAL),
            retry_interval: clock.ticks(RETRY_INTERVAL),
            clock,
        }
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    pub(crate) fn take_notice(&self) -> Option<Notice> {
        self.notices.pop()
    }

    /// Whether the queue fills up although nobody was woken.
    pub(crate) fn has_many_notices(&self) -> bool {
        self.notices.len() > NOTICES / 2
    }

    /// Whether a close went untold since this was last asked.
    pub(crate) fn lost_notice(&self) -> bool {
        self.notice_lost.swap(false, Ordering::Acquire)
    }

    /// Whether the span of that id and key is still open.
    pub(crate) fn is_open(&self, id: RegistryId, key: SpanKey) -> bool {
        self.table.get(id).is_some_and(|slot| slot.key() == Some(key))
    }

    #[cfg(test)]
    pub(super) fn key_of(&self, id: RegistryId) -> Option<SpanKey> {
        self.table.get(id)?.key()
    }

    /// A span that a rule matches was created.
    pub(crate) fn open(
        &self,
        id: RegistryId,
        plan: &Plan,
        given: GivenParent,
        ancestry: Ancestry<'_>,
    ) {
        let Some(mut state) = take(self.layer).or_else(|| self.begin_thread()) else {
            return;
        };
        let parent = match (given, state.top()) {
            (GivenParent::Contextual, Some(top)) if unmatched() == 0 => top.as_parent(),
            (GivenParent::None, _) => None,
            _ => self.ask_for_parent(given, ancestry),
        };
        let key = self.take_key(&mut state);
        match self.table.claim_inside(id) {
            Some(slot) => slot.open(id, key, self.clock.now(), state.thread, plan, parent),
            None => {
                let (now, slot) = (self.clock.now(), self.table.claim_outside(id));
                slot.open(id, key, now, state.thread, plan, parent);
            }
        }
        put(state);
    }

    /// The nearest profiled span above, where we do not know it ourselves.
    fn ask_for_parent(&self, given: GivenParent, ancestry: Ancestry<'_>) -> Option<Parent> {
        let from = match given {
            GivenParent::Contextual => From::Current,
            GivenParent::Span(parent) => From::Span(parent),
            GivenParent::None => return None,
        };
        let mut found = None;
        ancestry(from, &mut |id| {
            found = self.table.get(id).and_then(|slot| slot.as_parent());
            found.is_some()
        });
        found
    }

    #[inline(always)]
    fn take_key(&self, state: &mut ThreadState) -> SpanKey {
        if state.keys.start == state.keys.end {
            let first = self.next_key.fetch_add(KEY_BLOCK, Ordering::Relaxed);
            state.keys = first..first + KEY_BLOCK;
        }
        let key = state.keys.start;
        state.keys.start += 1;
        SpanKey::new(key).unwrap_or(SpanKey::MIN)
    }

    /// Makes a state for this thread and takes it, unless we must not touch the thread.
    #[cold]
    fn begin_thread(&self) -> Option<Box<ThreadState>> {
        if is_ignored() {
            return None;
        }
        add_state(ThreadState::new(self.layer, Arc::downgrade(&self.life)));
        take(self.layer)
    }

    /// A span was entered on this thread.
    #[inline(always)]
    pub(crate) fn enter(&self, id: RegistryId) {
        match self.table.get_inside(id) {
            Some(slot) => self.enter_slot(id, slot),
            None if self.table.has_outside() => self.enter_outside(id),
            None => count_unmatched(self.layer, 1),
        }
    }

    #[cold]
    #[inline(never)]
    fn enter_outside(&self, id: RegistryId) {
        match self.table.get_outside(id) {
            Some(slot) => self.enter_slot(id, &slot),
            None => count_unmatched(self.layer, 1),
        }
    }

    #[inline(never)]
    fn enter_slot(&self, id: RegistryId, slot: &Slot) {
        let Some(mut state) = take(self.layer).or_else(|| self.begin_thread()) else {
            return;
        };
        let (key, root) = (slot.raw_key(), slot.raw_root());
        // Arming takes time, which is not the span's.
        let now = self.now_settled(&mut state).max(state.settled);
        if slot.flags() & TIGHTER != 0 {
            self.raise_rate(&mut state, slot, now);
        }
        state.push(id, key, root, now);
        if slot.enter(now, state.thread) {
            state.note_nested(id);
        }
        if let Some(recording) = &state.recording {
            recording.set_span(key);
        }
        put(state);
    }

    /// A span was left on this thread.
    #[inline(always)]
    pub(crate) fn exit(&self, id: RegistryId) {
        match self.table.get_inside(id) {
            Some(slot) => self.exit_slot(id, slot),
            None if self.table.has_outside() => self.exit_outside(id),
            None => count_unmatched(self.layer, -1),
        }
    }

    #[cold]
    #[inline(never)]
    fn exit_outside(&self, id: RegistryId) {
        match self.table.get_outside(id) {
            Some(slot) => self.exit_slot(id, &slot),
            None => count_unmatched(self.layer, -1),
        }
    }

    #[inline(never)]
    fn exit_slot(&self, id: RegistryId, slot: &Slot) {
        if let Some(mut state) = take(self.layer) {
            self.exit_on(&mut state, id, slot);
            put(state);
        }
        if std::thread::panicking() {
            self.fail_slot(slot);
        }
    }

    #[inline(always)]
    fn exit_on(&self, state: &mut ThreadState, id: RegistryId, slot: &Slot) {
        let Some(top) = state.top() else { return };
        let (entered, below, unmatched_below) = (top.entered, top.key_below, top.unmatched_below);
        let has_more = top.id != id.get() || top.has_more;
        let was_sampled = state.samples.load() != state.from;
        // What does not need the time comes first: reading the clock holds up what is after it.
        let now = self.clock.now();
        if has_more || was_sampled || self.is_due(state, now) {
            self.exit_slowly(state, id, slot, now);
            return;
        }
        state.pop(unmatched_below);
        slot.exit(now, now.saturating_sub(entered), state.thread);
        if let Some(recording) = &state.recording {
            recording.set_span(below);
        }
    }

    /// The same where something was settled first, or where more is to be said of the segment than
    /// its length.
    #[inline(never)]
    fn exit_slowly(&self, state: &mut ThreadState, id: RegistryId, slot: &Slot, now: u64) {
        if state.samples.load() != state.from || self.is_due(state, now) {
            self.settle(state, now);
        }
        let (thread, settled) = (state.thread, state.settled);
        let Some(segment) = state.bring_to_top(id) else {
            return;
        };
        let Some(key) = SpanKey::new(segment.key) else {
            return;
        };
        let (entered, below) = (segment.entered, segment.key_below);
        let (is_nested, unmatched_below) = (segment.is_nested, segment.unmatched_below);
        if segment.is_tallied && !is_nested {
            slot.count(key, &segment.tally);
        }
        state.pop(unmatched_below);
        if is_nested {
            slot.exit(now, 0, thread);
        } else {
            if !state.follows_switches {
                let ns = self.clock.ns(now.saturating_sub(entered.max(settled)));
                slot.count(key, &Tally { bounded_ns: ns, ..Tally::default() });
                if !state.leave_unresolved(Unresolved { id, key, ns }) {
                    self.settle(state, now);
                }
            }
            slot.exit(now, now.saturating_sub(entered), thread);
        }
        if let Some(recording) = &state.recording {
            recording.set_span(below);
        }
    }

    /// Whether the span of that id has the field by which it can say that it failed.
    #[inline]
    pub(crate) fn has_status(&self, id: RegistryId) -> bool {
        self.table.get(id).is_some_and(|slot| slot.flags() & HAS_STATUS != 0)
    }

    /// An error happened in the span of that id, or in the innermost one.
    pub(crate) fn fail(&self, id: RegistryId) {
        if let Some(slot) = self.table.get(id) {
            self.fail_slot(&slot);
        }
    }

    /// An error happened there: in the nearest span that is profiled.
    pub(crate) fn fail_nearest(&self, from: From, ancestry: Ancestry<'_>) {
        ancestry(from, &mut |id| {
            let slot = self.table.get(id);
            if let Some(slot) = &slot {
                self.fail_slot(slot);
            }
            slot.is_some()
        });
    }

    #[cold]
    fn fail_slot(&self, slot: &Slot) {
        if slot.set(FAILED) & FAILED == 0 {
            self.for_ancestors(slot, |ancestor| ancestor.set(FAILED) & FAILED == 0);
        }
    }

    /// A span has closed. If it must be judged, `judge` does that. Only then is the slot free: as
    /// long as the span counts as open, nobody takes it for judged.
    #[inline]
    pub(crate) fn close(&self, id: RegistryId, judge: impl FnOnce(&Closing) -> Verdict) {
        match self.table.get_inside(id) {
            Some(slot) => {
                let closing = self.close_slot(slot);
                let told = closing.is_none_or(|closing| self.told(&closing, judge(&closing)));
                slot.release();
                if !told {
                    self.note_untold();
                }
            }
            None if self.table.has_outside() => self.close_outside(id, judge),
            None => {}
        }
    }

    #[cold]
    fn close_outside(&self, id: RegistryId, judge: impl FnOnce(&Closing) -> Verdict) {
        let Some(slot) = self.table.get_outside(id) else { return };
        let closing = self.close_slot(&slot);
        let told = closing.is_none_or(|closing| self.told(&closing, judge(&closing)));
        self.table.release_outside(id, &slot);
        if !told {
            self.note_untold();
        }
    }

    /// A span was released of which the collector could not be told that it closed.
    fn note_untold(&self) {
        // Release: who finds it set finds the slot released.
        self.notice_lost.store(true, Ordering::Release);
    }

    #[inline(always)]
    fn close_slot(&self, slot: &Slot) -> Option<Closing> {
        let now = self.clock.now();
        if slot.is_suspect(now) { self.close_suspect(slot, now) } else { None }
    }

    #[cold]
    #[inline(never)]
    fn close_suspect(&self, slot: &Slot, now: u64) -> Option<Closing> {
        if let Some(mut state) = take(self.layer) {
            if !state.unresolved.is_empty() {
                self.settle(&mut state, now);
            }
            put(state);
        }
        let flags = slot.flags();
        Some(Closing {
            key: slot.key()?,
            root: slot.root()?,
            plan: slot.plan(),
            failed: flags & FAILED != 0,
            samples: slot.samples(),
            opened_ns: self.clock.raw_ns(slot.opened()),
            account: slot.account(&self.clock, now),
            announced: flags & ANNOUNCED != 0,
        })
    }

    /// Tells the collector that a span has closed, if it knows of it or must. False if the queue
    /// was full.
    fn told(&self, closing: &Closing, verdict: Verdict) -> bool {
        let is_of_interest = closing.announced || verdict.must_know;
        let notice = Notice::Closed { key: closing.key, ids: verdict.ids };
        !is_of_interest || verdict.is_told_later || self.notices.push(notice).is_ok()
    }

    /// Tells the collector of a span that has closed a while ago.
    pub(crate) fn tell_closed(&self, key: SpanKey, ids: Option<TraceIds>) {
        if self.notices.push(Notice::Closed { key, ids }).is_err() {
            self.note_untold();
        }
    }

    /// When the span of that id was created, and the number of its plan, if it is profiled.
    pub(crate) fn opened(&self, id: RegistryId) -> Option<(SystemTime, u32)> {
        let slot = self.table.get(id)?;
        let opened = self.clock.raw_ns(slot.opened());
        let unix_ns = i128::from(opened) + self.clock.unix_offset_ns();
        let since = Duration::from_nanos(u64::try_from(unix_ns).unwrap_or(0));
        Some((UNIX_EPOCH + since, slot.plan()))
    }

    /// The time, after everything until then was [settled](Self::settle) if there was anything.
    #[inline(always)]
    fn now_settled(&self, state: &mut ThreadState) -> u64 {
        let was_sampled = state.samples.load() != state.from;
        let now = self.clock.now();
        if was_sampled || self.is_due(state, now) {
            self.settle(state, now);
        }
        now
    }

    /// Whether something but a sample must be settled. Asked after the clock was read: a context
    /// switch just before that belongs to what was until now.
    #[inline(always)]
    fn is_due(&self, state: &ThreadState, now: u64) -> bool {
        state.switches.load() != state.switches_seen || now >= state.deadline
    }
}

#[cfg(test)]
impl Closing {
    pub(crate) fn for_test(wall_ns: u64, failed: bool) -> Self {
        Self {
            key: SpanKey::MIN,
            root: SpanKey::MIN,
            plan: 0,
            failed,
            samples: 0,
            opened_ns: 0,
            account: Account { wall_ns, ..Account::default() },
            announced: false,
        }
    }
}

/// The parent that a new span was given.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GivenParent {
    /// The span that is entered on this thread, if one is.
    Contextual,
    None,
    Span(RegistryId),
}

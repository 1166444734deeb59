//! What happens to a span at each hook.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use parking_lot::Mutex;

use super::account::{Account, Tally};
use super::local::{
    Armed, Source, ThreadState, Unresolved, Usage, add_state, count_unmatched, ignore_this_thread,
    is_ignored, put, take, unmatched,
};
use super::slot::{ANNOUNCED, FAILED, HAS_STATUS, Parent, Slot, TIGHTER};
use super::table::SlotTable;
use super::{Ancestry, From, Plan, RegistryId, SpanKey};
use crate::stats::Counters;
use crate::sys::{Clock, fork_generation};

/// All open profiled spans of a layer.
#[derive(Debug)]
pub(crate) struct Spans {
    layer: u32,
    clock: Clock,
    table: SlotTable,
    notices: ArrayQueue<Notice>,
    /// Set if a close could not be told: then the collector must look for itself.
    notice_lost: AtomicBool,
    next_key: AtomicU64,
    source: Box<dyn Source>,
    base_period_ns: u64,
    counters: Arc<Counters>,
    fork_generation: u32,
    /// The constants of these names in ticks.
    cpu_clock_interval: u64,
    usage_interval: u64,
    look_interval: u64,
    retry_interval: u64,
}

/// What the collector is told of spans in which samples fell, in the order in which it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A sample fell in the span or inside it, for the first time.
    Opened { key: SpanKey, parent: Option<SpanKey>, root: SpanKey, id: RegistryId, plan: u32 },
    /// A span of which `Opened` was said, or which is kept, has closed.
    Closed { key: SpanKey },
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
    announced: bool,
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

/// The layers that exist.
static LAYERS: Mutex<Vec<u32>> = Mutex::new(Vec::new());

impl Spans {
    pub(crate) fn new(
        clock: Clock,
        source: Box<dyn Source>,
        base_period_ns: u64,
        counters: Arc<Counters>,
    ) -> Self {
        static NEXT_LAYER: AtomicU32 = AtomicU32::new(1);
        let layer = NEXT_LAYER.fetch_add(1, Ordering::Relaxed);
        LAYERS.lock().push(layer);
        Self {
            layer,
            table: SlotTable::new(),
            notices: ArrayQueue::new(NOTICES),
            notice_lost: AtomicBool::new(false),
            next_key: AtomicU64::new(1),
            source,
            base_period_ns,
            counters,
            fork_generation: fork_generation(ignore_this_thread),
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
        self.notice_lost.swap(false, Ordering::Relaxed)
    }

    /// Whether the span of that id and key is still open.
    pub(crate) fn is_open(&self, id: RegistryId, key: SpanKey) -> bool {
        self.table.get(id).is_some_and(|slot| slot.key() == Some(key))
    }

    /// A span that a rule matches was created.
    pub(crate) fn open(
        &self,
        id: RegistryId,
        plan: &Plan,
        given: GivenParent,
        ancestry: Ancestry<'_>,
    ) {
        let Some(mut state) = take(self.layer).or_else(|| self.begin_thread()) else { return };
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
        if fork_generation(ignore_this_thread) != self.fork_generation {
            ignore_this_thread();
            return None;
        }
        add_state(ThreadState::new(self.layer), |layer| LAYERS.lock().contains(&layer));
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
        let Some(mut state) = take(self.layer).or_else(|| self.begin_thread()) else { return };
        let (key, root) = (slot.raw_key(), slot.raw_root());
        let now = self.now_settled(&mut state);
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
        let Some(segment) = state.bring_to_top(id) else { return };
        let Some(key) = SpanKey::new(segment.key) else { return };
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

    /// A span has closed: its slot is free afterwards. Returns it if it must be judged; then
    /// [`told`](Self::told) must follow.
    #[inline]
    pub(crate) fn close(&self, id: RegistryId) -> Option<Closing> {
        match self.table.get_inside(id) {
            Some(slot) => {
                let closing = self.close_slot(slot);
                slot.release();
                closing
            }
            None if self.table.has_outside() => self.close_outside(id),
            None => None,
        }
    }

    #[cold]
    fn close_outside(&self, id: RegistryId) -> Option<Closing> {
        let slot = self.table.get_outside(id)?;
        let closing = self.close_slot(&slot);
        self.table.release_outside(id, &slot);
        closing
    }

    #[inline(always)]
    fn close_slot(&self, slot: &Slot) -> Option<Closing> {
        let now = self.clock.now();
        if slot.is_suspect(now) { self.close_suspect(slot, now) } else { None }
    }

    #[cold]
    #[inline(never)]
    fn close_suspect(&self, slot: &Slot, now: u64) -> Option<Closing> {
        if is_ignored() {
            return None;
        }
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

    /// Tells the collector that a span has closed, if it knows of it or must.
    pub(crate) fn told(&self, closing: &Closing, must_know: bool) {
        let is_of_interest = closing.announced || must_know;
        if is_of_interest && self.notices.push(Notice::Closed { key: closing.key }).is_err() {
            self.notice_lost.store(true, Ordering::Relaxed);
        }
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

    /// Brings everything up to now: all that happened since the last hook belongs to the spans
    /// that are entered at present.
    #[cold]
    #[inline(never)]
    fn settle(&self, state: &mut ThreadState, now: u64) {
        // First: if the thread was never armed, or was disarmed, there is nothing to settle.
        if now >= state.deadline && self.look(state, now) {
            return;
        }
        self.settle_samples(state, now);
        self.settle_scheduler(state, now);
    }

    fn arm(&self, state: &mut ThreadState) {
        let Armed { recording, samples, sample_size, switches, follows_switches, may_retry, mut source } =
            self.source.arm(&self.clock);
        state.from = samples.load();
        state.switches_seen = switches.load();
        if let Some(recording) = &recording {
            recording.cut(None, state.from);
            recording.set_span(state.top().map_or(0, |top| top.key));
        }
        let now = self.clock.now();
        state.settled = now;
        state.cpu_ns = source.cpu_ns().unwrap_or(0);
        state.usage = source.usage();
        state.usage_read = now;
        source.catch_up(&self.clock, now);
        state.samples = samples;
        state.switches = switches;
        state.sample_size = sample_size.max(1);
        state.follows_switches = follows_switches;
        state.may_retry = may_retry;
        state.recording = recording;
        state.source = Some(source);
        state.armed_at = now;
        self.set_deadline(state, now);
    }

    fn set_deadline(&self, state: &mut ThreadState, now: u64) {
        let interval =
            if state.follows_switches { self.look_interval } else { self.cpu_clock_interval };
        state.deadline = now.saturating_add(interval);
    }

    fn settle_samples(&self, state: &mut ThreadState, now: u64) {
        let head = state.samples.load();
        // Less: the ring was retired under us because everything ends.
        let Some(moved) = head.checked_sub(state.from).filter(|moved| *moved > 0) else { return };
        // Losses are recorded in the ring too, in much less than a sample takes.
        let samples = moved / state.sample_size;
        let mut span = state.top().and_then(|top| SpanKey::new(top.key)).filter(|_| samples > 0);
        if span.is_some() && !self.announce(state, samples) {
            Counters::add(&self.counters.samples_dropped_notices_full, samples);
            span = None;
        }
        if let Some(recording) = &state.recording
            && !recording.cut(span, head)
        {
            Counters::add(&self.counters.samples_dropped_marks_full, samples);
        }
        state.from = head;
        self.settle_usage(state, now);
    }

    /// Makes the innermost span and its ancestors known to the collector, and gives each of them
    /// `samples`.
    fn announce(&self, state: &ThreadState, samples: u64) -> bool {
        let Some(slot) =
            state.top().and_then(|top| RegistryId::new(top.id)).and_then(|id| self.table.get(id))
        else {
            return false;
        };
        if slot.flags() & ANNOUNCED == 0 {
            let mut all_told = self.tell_opened(&slot);
            self.for_ancestors(&slot, |ancestor| {
                let known = ancestor.flags() & ANNOUNCED != 0;
                all_told = all_told && (known || self.tell_opened(ancestor));
                all_told && !known
            });
            if !all_told {
                return false;
            }
        }
        // The flag is set only after the notice is out: who finds it set may rely on that.
        slot.set(ANNOUNCED);
        slot.add_samples(samples);
        self.for_ancestors(&slot, |ancestor| {
            ancestor.set(ANNOUNCED);
            ancestor.add_samples(samples);
            true
        });
        true
    }

    fn tell_opened(&self, slot: &Slot) -> bool {
        let parent = slot.parent().and_then(|parent| self.table.get(parent)?.key());
        let (Some(id), Some(key), Some(root)) = (slot.id(), slot.key(), slot.root()) else {
            return false;
        };
        let plan = slot.plan();
        self.notices.push(Notice::Opened { key, parent, root, id, plan }).is_ok()
    }

    /// Visits the ancestors from the inside out until `visit` says false. They are open: the
    /// registry keeps a span as long as a child is open.
    fn for_ancestors(&self, slot: &Slot, mut visit: impl FnMut(&Slot) -> bool) {
        let mut next = slot.parent();
        while let Some(slot) = next.and_then(|id| self.table.get(id)) {
            if !visit(&slot) {
                return;
            }
            next = slot.parent();
        }
    }

    fn settle_usage(&self, state: &mut ThreadState, now: u64) {
        let Some(source) = &mut state.source else { return };
        let usage = source.usage();
        let before = std::mem::replace(&mut state.usage, usage);
        state.usage_read = now;
        let mut tally = usage_between(&before, &usage);
        if state.follows_switches {
            // Counted one by one from their records.
            tally.voluntary_switches = 0;
            tally.involuntary_switches = 0;
        }
        state.tally_all(&tally);
    }

    fn settle_scheduler(&self, state: &mut ThreadState, now: u64) {
        let Some(source) = &mut state.source else { return };
        if state.follows_switches {
            let switches = state.switches.load();
            if switches == state.switches_seen {
                return;
            }
            state.switches_seen = switches;
            let interval = source.catch_up(&self.clock, now);
            let wall_ns = self.clock.ns(now.saturating_sub(state.settled));
            // Before a segment began, and since the last switch, the thread was running: so the
            // time that it was not belongs whole to each segment.
            state.tally_all(&Tally {
                on_cpu_shift_ns: interval.on_cpu_ns.cast_signed() - wall_ns.cast_signed(),
                off_cpu_ns: interval.off_cpu_ns,
                voluntary_switches: interval.voluntary_switches,
                involuntary_switches: interval.involuntary_switches,
                ..Tally::default()
            });
        } else {
            let Some(cpu_ns) = source.cpu_ns() else {
                state.unresolved.clear();
                state.settled = now;
                return;
            };
            let ran_ns = cpu_ns.saturating_sub(std::mem::replace(&mut state.cpu_ns, cpu_ns));
            state.bound(&self.clock, now, ran_ns, |part, sure_on_ns, sure_off_ns| {
                if let Some(slot) = self.table.get(part.id) {
                    slot.count_late(part.key, sure_on_ns, sure_off_ns);
                }
            });
            if now.saturating_sub(state.usage_read) > self.usage_interval {
                self.settle_usage(state, now);
            }
        }
        state.settled = now;
    }

    /// What is done once in a while: here a thread learns that it was disarmed. Returns whether
    /// it was armed anew.
    fn look(&self, state: &mut ThreadState, now: u64) -> bool {
        self.set_deadline(state, now);
        match &state.recording {
            Some(recording) if recording.is_used() => {
                if now >= state.calm_at {
                    let needed = self.period_needed(state);
                    self.set_rate(state, needed);
                }
                false
            }
            None if state.source.is_some() => {
                let may = state.may_retry
                    && now.saturating_sub(state.armed_at) > self.retry_interval;
                if may {
                    self.settle_scheduler(state, now);
                    self.arm(state);
                }
                may
            }
            _ => {
                self.arm(state);
                true
            }
        }
    }

    fn period_needed(&self, state: &ThreadState) -> u64 {
        let slots = state.entered().iter().filter_map(|top| self.table.get(RegistryId::new(top.id)?));
        slots
            .filter(|slot| slot.flags() & TIGHTER != 0)
            .map(|slot| slot.period_ns())
            .min()
            .unwrap_or(self.base_period_ns)
    }

    /// Samples more often from now on, until a look finds the thread in no span that needs it.
    /// Not undone at exit: starting the kernel's timer anew at each of many short segments would
    /// keep it from ever running out.
    #[cold]
    fn raise_rate(&self, state: &mut ThreadState, slot: &Slot, now: u64) {
        let Some(recording) = &state.recording else { return };
        if slot.period_ns() < recording.period_ns() {
            self.settle(state, now);
            self.set_rate(state, slot.period_ns());
        }
        state.calm_at = now.saturating_add(self.look_interval);
    }

    fn set_rate(&self, state: &mut ThreadState, period_ns: u64) {
        let Some(recording) = &state.recording else { return };
        let Some(source) = &mut state.source else { return };
        // A sample of the old period may have fallen since the stretch began: then another time.
        if recording.period_ns() != period_ns
            && state.samples.load() == state.from
            && source.set_period_ns(period_ns)
        {
            recording.set_period_ns(period_ns);
        }
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

impl Drop for Spans {
    fn drop(&mut self) {
        LAYERS.lock().retain(|layer| *layer != self.layer);
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

fn usage_between(before: &Usage, after: &Usage) -> Tally {
    Tally {
        minor_faults: after.minor_faults.saturating_sub(before.minor_faults),
        major_faults: after.major_faults.saturating_sub(before.major_faults),
        voluntary_switches: after.voluntary_switches.saturating_sub(before.voluntary_switches),
        involuntary_switches: after
            .involuntary_switches
            .saturating_sub(before.involuntary_switches),
        cycles: after.cycles.saturating_sub(before.cycles),
        instructions: after.instructions.saturating_sub(before.instructions),
        cache_misses: after.cache_misses.saturating_sub(before.cache_misses),
        ..Tally::default()
    }
}

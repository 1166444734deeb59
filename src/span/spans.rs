//! What happens to a span at each hook.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use parking_lot::Mutex;

use super::account::{Account, Tally};
use super::local::{
    Source, ThreadState, Unresolved, Usage, add_state, ignore_this_thread, is_ignored,
    with_state,
};
use super::slot::{ANNOUNCED, FAILED, Parent, Slot, TIGHTER};
use super::table::SlotTable;
use super::{Plan, RegistryId, Scope, SpanKey};
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
    #[inline]
    pub(crate) fn open(
        &self,
        id: RegistryId,
        plan: &Plan,
        explicit_parent: Option<RegistryId>,
        is_root: bool,
        scope: &impl Scope,
    ) {
        if is_ignored() {
            return;
        }
        let now = self.clock.now();
        let found = with_state(self.layer, |state| (self.take_key(state), Self::open_in(state)));
        let (key, place) = match found {
            Some(found) => found,
            None => match self.begin_thread() {
                Some(key) => (key, OpenIn::AskRegistry),
                None => return,
            },
        };
        let parent = if is_root {
            None
        } else if let Some(parent) = explicit_parent {
            self.nearest(scope.of(parent))
        } else {
            match place {
                OpenIn::Span(parent) => self.table.get(parent).and_then(|slot| slot.as_parent()),
                OpenIn::AskRegistry => self.nearest(scope.current()),
            }
        };
        self.table.claim(id).open(id, key, now, plan, parent);
    }

    /// The innermost segment, if nothing that we do not know was entered above it.
    #[inline]
    fn open_in(state: &ThreadState) -> OpenIn {
        match state.top().and_then(|segment| RegistryId::new(segment.id)) {
            Some(id) if state.unmatched == 0 => OpenIn::Span(id),
            _ => OpenIn::AskRegistry,
        }
    }

    #[inline]
    fn take_key(&self, state: &mut ThreadState) -> SpanKey {
        if state.keys.is_empty() {
            let first = self.next_key.fetch_add(KEY_BLOCK, Ordering::Relaxed);
            state.keys = first..first + KEY_BLOCK;
        }
        let key = state.keys.start;
        state.keys.start += 1;
        SpanKey::new(key).unwrap_or(SpanKey::MIN)
    }

    /// The first of these spans that is profiled.
    fn nearest(&self, mut scope: impl Iterator<Item = RegistryId>) -> Option<Parent> {
        scope.find_map(|id| self.table.get(id)?.as_parent())
    }

    /// Makes a state for this thread, unless we must not touch it.
    #[cold]
    fn begin_thread(&self) -> Option<SpanKey> {
        if fork_generation(ignore_this_thread) != self.fork_generation {
            ignore_this_thread();
            return None;
        }
        let mut state = ThreadState::new(self.layer);
        let key = self.take_key(&mut state);
        add_state(state, |layer| LAYERS.lock().contains(&layer));
        Some(key)
    }

    #[inline]
    pub(crate) fn enter(&self, id: RegistryId) {
        let Some(slot) = self.table.get(id) else {
            with_state(self.layer, |state| state.unmatched += 1);
            return;
        };
        if is_ignored() {
            return;
        }
        let now = self.clock.now();
        if with_state(self.layer, |state| self.enter_on(state, id, &slot, now)).is_none()
            && self.begin_thread().is_some()
        {
            with_state(self.layer, |state| self.enter_on(state, id, &slot, now));
        }
    }

    #[inline]
    fn enter_on(&self, state: &mut ThreadState, id: RegistryId, slot: &Slot, now: u64) {
        let Some(key) = slot.key() else { return };
        if self.has_moved(state, now) {
            self.settle(state, now);
        }
        if slot.flags() & TIGHTER != 0 {
            self.raise_rate(state, slot, now);
        }
        state.push(id, key, now);
        if slot.enter(now) && state.is_below_top(id) {
            state.set_nested();
        }
        if let Some(recording) = recording(state) {
            recording.set_span(Some(key));
        }
    }

    #[inline]
    pub(crate) fn exit(&self, id: RegistryId) {
        let Some(slot) = self.table.get(id) else {
            with_state(self.layer, |state| state.unmatched = state.unmatched.saturating_sub(1));
            return;
        };
        if is_ignored() {
            return;
        }
        let now = self.clock.now();
        with_state(self.layer, |state| self.exit_on(state, id, &slot, now));
        if std::thread::panicking() {
            self.fail_slot(&slot);
        }
    }

    #[inline]
    fn exit_on(&self, state: &mut ThreadState, id: RegistryId, slot: &Slot, now: u64) {
        if self.has_moved(state, now) {
            self.settle(state, now);
        }
        let settled = state.settled;
        let follows = state.armed.as_ref().is_some_and(|armed| armed.follows_switches);
        let Some(segment) = state.pop(id) else { return };
        let Some(key) = SpanKey::new(segment.key) else { return };
        if segment.nested {
            slot.exit(now, 0);
        } else {
            if segment.tallied {
                slot.count(key, &segment.tally);
            }
            let entered = segment.entered;
            if !follows {
                let ns = self.clock.ns(now.saturating_sub(entered.max(settled)));
                slot.count(key, &Tally { bounded_ns: ns, ..Tally::default() });
                if !state.leave_unresolved(Unresolved { id, key, ns }) {
                    self.settle(state, now);
                }
            }
            slot.exit(now, now.saturating_sub(entered));
        }
        if let Some(recording) = recording(state) {
            recording.set_span(state.top_key());
        }
    }

    /// An error happened in the span of that id, or in the innermost one.
    pub(crate) fn fail(&self, id: RegistryId) {
        if let Some(slot) = self.table.get(id) {
            self.fail_slot(&slot);
        }
    }

    /// An error happened in the innermost of these spans that is profiled.
    pub(crate) fn fail_nearest(&self, mut scope: impl Iterator<Item = RegistryId>) {
        if let Some(slot) = scope.find_map(|id| self.table.get(id)) {
            self.fail_slot(&slot);
        }
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
        let slot = self.table.get(id)?;
        let now = self.clock.now();
        let closing =
            if slot.is_suspect(now) { self.close_suspect(&slot, now) } else { None };
        self.table.release(id, &slot);
        closing
    }

    #[cold]
    fn close_suspect(&self, slot: &Slot, now: u64) -> Option<Closing> {
        if is_ignored() {
            return None;
        }
        with_state(self.layer, |state| {
            if !state.unresolved.is_empty() {
                self.settle(state, now);
            }
        });
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

    #[inline]
    fn has_moved(&self, state: &ThreadState, now: u64) -> bool {
        match &state.armed {
            Some(armed) => {
                armed.samples.load() != state.from
                    || armed.switches.load() != state.switches_seen
                    || now >= state.deadline
            }
            None => true,
        }
    }

    /// Brings everything up to now: all that happened since the last hook belongs to the spans
    /// that are entered at present.
    #[cold]
    fn settle(&self, state: &mut ThreadState, now: u64) {
        if state.armed.is_none() {
            self.arm(state, now);
            return;
        }
        // First: if the thread was disarmed there is nothing to settle, and no ring to look at.
        if now >= state.deadline && self.look(state, now) {
            return;
        }
        self.settle_samples(state, now);
        self.settle_scheduler(state, now);
    }

    fn arm(&self, state: &mut ThreadState, now: u64) {
        let mut armed = self.source.arm(&self.clock);
        state.from = armed.samples.load();
        state.switches_seen = armed.switches.load();
        if let Some(recording) = &armed.recording {
            recording.cut(None, state.from);
        }
        state.settled = self.clock.now();
        state.cpu_ns = armed.source.cpu_ns().unwrap_or(0);
        state.usage = armed.source.usage();
        state.usage_read = now;
        armed.source.catch_up(&self.clock, state.settled);
        state.armed_at = state.settled;
        state.armed = Some(armed);
        self.look(state, state.settled);
    }

    fn settle_samples(&self, state: &mut ThreadState, now: u64) {
        let top = state.top_key();
        let Some(armed) = &mut state.armed else { return };
        let head = armed.samples.load();
        // Less: the ring was retired under us because everything ends.
        let Some(moved) = head.checked_sub(state.from).filter(|moved| *moved > 0) else { return };
        // Losses are recorded in the ring too, in much less than a sample takes.
        let samples = moved / armed.sample_size;
        let mut span = top.filter(|_| samples > 0);
        if span.is_some() && !self.announce(state, samples) {
            Counters::add(&self.counters.samples_dropped_notices_full, samples);
            span = None;
        }
        let Some(armed) = &mut state.armed else { return };
        if let Some(recording) = &armed.recording
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
        let Some(armed) = &mut state.armed else { return };
        let usage = armed.source.usage();
        let before = std::mem::replace(&mut state.usage, usage);
        state.usage_read = now;
        let mut tally = usage_between(&before, &usage);
        if armed.follows_switches {
            // Counted one by one from their records.
            tally.voluntary_switches = 0;
            tally.involuntary_switches = 0;
        }
        state.tally_all(&tally);
    }

    fn settle_scheduler(&self, state: &mut ThreadState, now: u64) {
        let Some(armed) = &mut state.armed else { return };
        if armed.follows_switches {
            let switches = armed.switches.load();
            if switches == state.switches_seen {
                return;
            }
            state.switches_seen = switches;
            let interval = armed.source.catch_up(&self.clock, now);
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
            let Some(cpu_ns) = armed.source.cpu_ns() else {
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
        let Some(armed) = &state.armed else { return false };
        let interval =
            if armed.follows_switches { self.look_interval } else { self.cpu_clock_interval };
        state.deadline = now.saturating_add(interval);
        match &armed.recording {
            Some(recording) if recording.is_used() => {
                if now >= state.calm_at {
                    let needed = self.period_needed(state);
                    self.set_rate(state, needed);
                }
                false
            }
            Some(_) => {
                self.arm(state, now);
                true
            }
            None if armed.may_retry && now.saturating_sub(state.armed_at) > self.retry_interval => {
                self.settle_scheduler(state, now);
                self.arm(state, now);
                true
            }
            None => false,
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
        let Some(recording) = recording(state) else { return };
        if slot.period_ns() < recording.period_ns() {
            self.settle(state, now);
            self.set_rate(state, slot.period_ns());
        }
        state.calm_at = now.saturating_add(self.look_interval);
    }

    fn set_rate(&self, state: &mut ThreadState, period_ns: u64) {
        let Some(armed) = &mut state.armed else { return };
        let Some(recording) = &armed.recording else { return };
        // A sample of the old period may have fallen since the stretch began: then another time.
        if recording.period_ns() != period_ns
            && armed.samples.load() == state.from
            && armed.source.set_period_ns(period_ns)
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

/// Where a new span is.
#[derive(Clone, Copy, Debug)]
enum OpenIn {
    Span(RegistryId),
    AskRegistry,
}

#[inline(always)]
fn recording(state: &ThreadState) -> Option<&super::recording::Recording> {
    state.armed.as_ref()?.recording.as_deref()
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

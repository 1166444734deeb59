//! The hooks: new span, enter, exit, and errors.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use parking_lot::Mutex;

use super::account::{LowerBounds, inside_time};
use super::awaits::LONG_SEGMENT_NS;
use super::children::{CHILD_CLOSES, ChildClose};
use super::flags::{
    AGED, CPU_UNKNOWN, FAILED, FAILED_ITSELF, HAS_FIELDS, IS_COUNTED, JUDGES_CPU, WATCHED,
};
use super::inside::SpanCounts;
use super::local::{ThreadState, add_state, count_unmatched, is_ignored, put, take, unmatched};
use super::segment::{DETACHED, NESTED, PendingSegment, READS_CPU, SWITCHED};
use super::slot::{Parent, Slot};
use super::table::SlotTable;
use super::{Ancestry, AncestryFrom, GivenParent, OtherSpan, Plan, RegistryId, SpanKey, TraceIds};
use crate::sampler::{AttachThreads, NEVER};
use crate::stats::Counters;
use crate::sys::{Allocations, Clock, SuspendCounting};

/// All open profiled spans of a layer. What each hook reads comes first: the end of the clock, the beginning of the table,
/// and what is between them.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Spans {
    pub(crate) clock: Clock,
    pub(crate) layer: u32,
    pub(super) ticks: Ticks,
    pub(super) table: SlotTable,
    pub(super) span_events: ArrayQueue<SpanEvent>,
    /// Set if a close could not be reported. The collector must then scan for closed spans.
    pub(super) event_lost: AtomicBool,
    pub(super) child_closes: ArrayQueue<ChildClose>,
    /// Set if the close of a child span could not be reported.
    pub(super) child_lost: AtomicBool,
    pub(super) next_key: AtomicU64,
    pub(super) source: Box<dyn AttachThreads>,
    /// See [`set_scans_rarely`](Self::set_scans_rarely).
    scans_rarely: AtomicBool,
    pub(super) counters: Arc<Counters>,
    pub(super) counts: Mutex<SpanCounts>,
    /// Whether spans may be open for which the collector checks how long they stay open.
    pub(super) has_watched: AtomicBool,
}

/// The constants of these names in ticks.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Ticks {
    long_segment: u64,
    pub(super) cpu_clock_interval: u64,
    /// Longer than a read of the CPU clock and shorter than an interrupt.
    pub(super) cpu_clock_read: u64,
    cpu_clock_interval_old: u64,
    pub(super) long_idle: u64,
}

/// What the collector knows of an open span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpanInfo {
    pub(crate) parent: Option<SpanKey>,
    pub(crate) root: SpanKey,
    pub(crate) id: RegistryId,
    pub(crate) plan: u64,
    /// When it was created: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) opened_ns: u64,
}

impl SpanInfo {
    pub(crate) fn span(&self, key: SpanKey) -> OtherSpan {
        OtherSpan { id: self.id, key, plan: self.plan }
    }
}

/// The reports to the collector on spans in which samples fell, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpanEvent {
    /// The first sample fell in the span or in a descendant.
    Opened(SpanKey, SpanInfo),
    /// A span that was idle for long. Follows its `OpenedSpan`.
    Idle {
        key: SpanKey,
        /// When that began: `CLOCK_MONOTONIC_RAW` in nanoseconds.
        since_ns: u64,
        idle_ns: u64,
        cause: IdleCause,
    },
    /// A span that was reported as `OpenedSpan`, or that is kept, has closed.
    Closed {
        key: SpanKey,
        ids: Option<TraceIds>,
        /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
        closed_ns: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleCause {
    /// The cause is not known: the span's future is not observed.
    NotObserved,
    /// The future or closure had not begun to run. With the span that was on the thread for most of that.
    NotBegun { behind: Option<OtherSpan> },
}

/// A read of the CPU clock takes half a microsecond, so the reads take at most 0.05 % of a thread's time, or at most 1 %
/// in old spans. (Rules on `on_cpu`, `own_on_cpu` and `off_cpu` cause more reads.)
const CPU_CLOCK_INTERVAL: Duration = Duration::from_millis(1);
const CPU_CLOCK_INTERVAL_OLD: Duration = Duration::from_micros(100);
const CPU_CLOCK_READ: Duration = Duration::from_micros(5);
/// Shorter idle time of futures that are not profiled is not shown in profiles.
const LONG_IDLE: Duration = Duration::from_millis(10);

/// Keys that a thread reserves at a time, so that threads do not share a counter's cache line.
const KEY_BLOCK: u64 = 1 << 16;
const SPAN_EVENTS: usize = 4096;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpenedSpan {
    /// The span is the first one for which the collector must check how long it stays open.
    pub(crate) is_first_watched: bool,
    /// The span is a local root, or inside one that is open for long, as a connection or `main` is.
    pub(crate) is_outermost: bool,
}

impl Spans {
    pub(crate) fn new(
        clock: Clock,
        source: Box<dyn AttachThreads>,
        counters: Arc<Counters>,
    ) -> Self {
        static NEXT_LAYER: AtomicU32 = AtomicU32::new(1);
        Self {
            layer: NEXT_LAYER.fetch_add(1, Ordering::Relaxed),
            counts: Mutex::default(),
            has_watched: AtomicBool::new(false),
            table: SlotTable::new(),
            span_events: ArrayQueue::new(SPAN_EVENTS),
            event_lost: AtomicBool::new(false),
            child_closes: ArrayQueue::new(CHILD_CLOSES),
            child_lost: AtomicBool::new(false),
            next_key: AtomicU64::new(1),
            source,
            scans_rarely: AtomicBool::new(false),
            counters,
            ticks: Ticks {
                cpu_clock_interval: clock.ticks(CPU_CLOCK_INTERVAL),
                cpu_clock_interval_old: clock.ticks(CPU_CLOCK_INTERVAL_OLD),
                cpu_clock_read: clock.ticks(CPU_CLOCK_READ),
                long_segment: clock.ticks(Duration::from_nanos(LONG_SEGMENT_NS)),
                long_idle: clock.ticks(LONG_IDLE),
            },
            clock,
        }
    }

    /// The number of spans created that a rule matches.
    pub(crate) fn seen(&self) -> u64 {
        self.counts.lock().seen()
    }

    /// Whether the collector is to be woken, and no thread has woken it yet.
    pub(crate) fn scans_rarely(&self) -> bool {
        self.scans_rarely.load(Ordering::Relaxed)
    }

    /// Sets whether a thread that enters an old span wakes the collector, because its next scan is much later.
    pub(crate) fn set_scans_rarely(&self, scans_rarely: bool) {
        self.scans_rarely.store(scans_rarely, Ordering::Relaxed);
    }

    /// Wakes the collector if needed: this thread is in an old span and not sampled.
    #[cold]
    #[inline(never)]
    pub(super) fn request_scan(&self, state: &ThreadState) {
        if self.scans_rarely.load(Ordering::Relaxed)
            && self.scans_rarely.swap(false, Ordering::Relaxed)
        {
            state.source.iter().for_each(|source| source.wake_collector());
        }
    }

    pub(crate) fn take_span_event(&self) -> Option<SpanEvent> {
        self.span_events.pop()
    }

    /// Whether a queue is filling up although the collector was not woken.
    pub(crate) fn has_many_span_events(&self) -> bool {
        self.span_events.len() > SPAN_EVENTS / 2 || self.has_many_child_closes()
    }

    /// Whether a close was not reported since the last call.
    pub(crate) fn take_lost_event(&self) -> bool {
        self.event_lost.swap(false, Ordering::Acquire)
    }

    pub(crate) fn is_open(&self, id: RegistryId, key: SpanKey) -> bool {
        self.table.find(id, key.get()).is_some()
    }

    #[cfg(any(test, feature = "tower"))]
    pub(crate) fn key_of(&self, id: RegistryId) -> Option<SpanKey> {
        self.table.get(id)?.key()
    }

    /// A span that a rule matches was created. `matched` is what is known of its field values, if the rule depends on
    /// them.
    pub(crate) fn open(
        &self,
        id: RegistryId,
        plan: &Plan,
        matched: u64,
        given: GivenParent,
        ancestry: Ancestry<'_>,
    ) -> OpenedSpan {
        let Some(mut state) = take(self.layer).or_else(|| self.begin_thread()) else {
            return OpenedSpan::default();
        };
        let (parent, samples_from) = match (given, state.top()) {
            // If the innermost segment is a re-entry on this thread, the registry's current span is another one.
            (GivenParent::Contextual | GivenParent::ContextualBehindFilter, Some(top))
                if unmatched() == 0 && !top.has(NESTED) =>
            {
                (top.as_parent(), top.samples_from)
            }
            (GivenParent::None, _) => (None, NEVER),
            (GivenParent::Contextual, None) if unmatched() == 0 && !state.may_miss_enters => {
                (None, NEVER)
            }
            _ => self.find_parent(&mut state, given, ancestry),
        };
        let key = self.take_key(&mut state);
        let now = self.clock.now();
        let around = parent.and_then(|parent| self.table.get(parent.id));
        // If the thread is in an old span, or the one around it counts, or has been open for so long that its awaits are
        // sampled. A request that awaits does not grow old otherwise.
        let is_counted = around.as_ref().is_some_and(|around| {
            now >= samples_from || around.flags() & IS_COUNTED != 0 || around.is_old_as_open(now)
        });
        let open = |slot: &Slot, now| {
            if plan.flags & HAS_FIELDS != 0 {
                slot.matched.store(matched, Ordering::Relaxed);
            }
            slot.open(id, key, now, state.thread, plan, parent);
            if is_counted {
                slot.set(IS_COUNTED);
            }
        };
        match self.table.claim_in_table(id) {
            Some(slot) => open(slot, now),
            None => open(&self.table.claim_overflow(id), now),
        }
        put(state);
        OpenedSpan {
            is_first_watched: plan.flags & WATCHED != 0 && self.note_watched(),
            is_outermost: parent.is_none() || around.is_some_and(|slot| slot.is_open_for_long(now)),
        }
    }

    /// Values of a span are recorded. If they decide which rule it has, `choose` gets the number of its plan and what
    /// was known of the values, and returns the new ones. Returns whether the span is now the first for which the
    /// collector must check how long it stays open.
    pub(crate) fn replan(
        &self,
        id: RegistryId,
        choose: impl FnOnce(u64, u64) -> Option<(Plan, u64)>,
    ) -> bool {
        let Some(slot) = self.table.get(id).filter(|slot| slot.flags() & HAS_FIELDS != 0) else {
            return false;
        };
        let Some((plan, matched)) = choose(slot.plan(), slot.matched.load(Ordering::Relaxed))
        else {
            return false;
        };
        let before = slot.replan(&plan, matched);
        before & WATCHED == 0 && plan.flags & WATCHED != 0 && self.note_watched()
    }

    /// Asks the registry for the nearest profiled ancestor, where the slots do not show it, and finds out from when on it
    /// is old, or one around it. On a thread that was in no span when it was asked, hooks have seen each enter since.
    #[cold]
    #[inline(never)]
    fn find_parent(
        &self,
        state: &mut ThreadState,
        given: GivenParent,
        ancestry: Ancestry<'_>,
    ) -> (Option<Parent>, u64) {
        let from = match given {
            GivenParent::Contextual | GivenParent::ContextualBehindFilter => AncestryFrom::Current,
            GivenParent::Span(parent) => AncestryFrom::Span(parent),
            GivenParent::None => return (None, NEVER),
        };
        let (mut found, mut is_in_a_span) = (None, false);
        ancestry(from, &mut |id| {
            is_in_a_span = true;
            found = self.table.get(id).and_then(|slot| slot.as_parent());
            found.is_some()
        });
        state.may_miss_enters &= is_in_a_span || matches!(from, AncestryFrom::Span(_));
        (found, found.map_or(NEVER, |parent: Parent| self.samples_from_of(state, parent.id)))
    }

    #[inline(always)]
    fn take_key(&self, state: &mut ThreadState) -> SpanKey {
        if state.keys.start == state.keys.end {
            let first = self.next_key.fetch_add(KEY_BLOCK, Ordering::Relaxed);
            state.keys = first..first + KEY_BLOCK;
        }
        let key = state.keys.start;
        state.keys.start += 1;
        // Only this thread writes it.
        let seen = &state.inside.totals.seen;
        seen.store(seen.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        SpanKey::new(key).unwrap_or(SpanKey::MIN)
    }

    /// Makes a state for this thread and takes it, unless the thread is ignored.
    #[cold]
    fn begin_thread(&self) -> Option<Box<ThreadState>> {
        if is_ignored() {
            return None;
        }
        let uncounted = SuspendCounting::begin();
        let mut state = ThreadState::new(self.layer);
        state.note_allocated(uncounted.before());
        self.counts.lock().add_thread(&state.inside.totals);
        add_state(state);
        take(self.layer)
    }

    #[inline(always)]
    pub(crate) fn enter(&self, id: RegistryId) {
        match self.table.get_in_table(id) {
            Some(slot) => self.enter_slot(id, slot),
            None if self.table.may_overflow(id) => self.in_overflow(id, Self::enter_slot, 1),
            None => count_unmatched(self.layer, 1),
        }
    }

    #[cold]
    #[inline(never)]
    fn in_overflow(&self, id: RegistryId, hook: fn(&Self, RegistryId, &Slot), change: i32) {
        match self.table.get_overflow(id) {
            Some(slot) => hook(self, id, &slot),
            None => count_unmatched(self.layer, change),
        }
    }

    #[inline(never)]
    fn enter_slot(&self, id: RegistryId, slot: &Slot) {
        let Some(mut state) = take(self.layer).or_else(|| self.begin_thread()) else {
            return;
        };
        self.count_allocations(&mut state);
        let must_sync =
            state.begin_hook() || state.is_attached && state.samples.load() != state.from;
        let (below, old_below, depth) =
            state.top().map_or((0, NEVER, 0), |top| (top.id, top.samples_from, top.depth + 1));
        let is_usual = !must_sync
            && slot.flags() & (JUDGES_CPU | AGED) == 0
            && slot.raw_parent() == below
            && !state.cpu_unknown
            && !std::thread::panicking();
        let now = self.clock.now();
        let samples_from = slot.samples_from(now).min(old_below);
        let is_usual =
            is_usual && now < state.deadline && (now < samples_from || state.is_attached);
        if is_usual && state.push(id, slot, 0, now, (samples_from, depth)) {
            let idle = slot.enter(now, state.thread);
            if idle.is_none_or(|idle| idle >= self.ticks.long_idle) {
                self.note_entered(&mut state, id, slot, idle, now);
            }
            state.end_hook_in(now, slot.raw_key(), samples_from);
        } else {
            self.enter_slowly(&mut state, id, slot, now, must_sync);
        }
        put(state);
    }

    /// What the thread has allocated since the last hook belongs to its innermost span.
    #[inline(always)]
    fn count_allocations(&self, state: &mut ThreadState) {
        if state.has_allocated() {
            self.add_allocations(state);
        }
    }

    #[inline(never)]
    fn add_allocations(&self, state: &mut ThreadState) {
        // While the layer runs code of the program (that formats a field), nothing counts.
        if SuspendCounting::is_active() {
            return;
        }
        let now = Allocations::here();
        let before = state.note_allocated(now);
        if let Some(slot) = state.top().and_then(|top| top.slot(&self.table)) {
            slot.count_own_allocations(now.since(before), state.thread);
        }
    }

    #[inline(always)]
    pub(crate) fn exit(&self, id: RegistryId) {
        match self.table.get_in_table(id) {
            Some(slot) => self.exit_slot(id, slot),
            None if self.table.may_overflow(id) => self.in_overflow(id, Self::exit_slot, -1),
            None => count_unmatched(self.layer, -1),
        }
    }

    #[inline(never)]
    fn exit_slot(&self, id: RegistryId, slot: &Slot) {
        let Some(mut state) = take(self.layer) else { return };
        self.count_allocations(&mut state);
        let fails = std::thread::panicking() && state.panicked_in(id);
        self.exit_on(&mut state, id, slot);
        put(state);
        if fails {
            self.fail_slot(slot, &|_| {});
        }
    }

    #[inline(always)]
    fn exit_on(&self, state: &mut ThreadState, id: RegistryId, slot: &Slot) {
        let Some(top) = state.top() else { return };
        let (entered, unmatched_below) = (top.entered, top.unmatched_below);
        let is_judged = slot.flags() & JUDGES_CPU != 0;
        let (key, has_more) = (top.key, top.id != id.get() || top.has_more() || is_judged);
        let was_sampled =
            state.begin_hook() || state.is_attached && state.samples.load() != state.from;
        // The clock is read last, because a read delays the instructions after it.
        let now = self.clock.now();
        let ticks = now.saturating_sub(entered.max(state.synced));
        let is_plain = !has_more && !was_sampled && now < state.deadline;
        if is_plain && state.pending.add(PendingSegment { id, key, ticks }) {
            state.pop(unmatched_below);
            slot.exit(now, now.saturating_sub(entered), state.thread);
        } else {
            self.exit_slowly(state, id, slot, now, was_sampled);
        }
        state.end_hook(now);
    }

    /// The exit if something must be synced first, or if more than the segment's length must be recorded.
    #[inline(never)]
    fn exit_slowly(
        &self,
        state: &mut ThreadState,
        id: RegistryId,
        slot: &Slot,
        mut now: u64,
        must_sync: bool,
    ) {
        if state.leave_again(id) {
            return;
        }
        let reads_cpu = state.top().is_some_and(|top| top.has(READS_CPU));
        // If the clock was read at this segment's enter, it is read at its exit too: a long wait may follow before the
        // next read.
        let is_pair = reads_cpu && state.top().is_some_and(|top| top.entered == state.synced);
        let reads_cpu = slot.flags() & JUDGES_CPU | if reads_cpu { AGED } else { 0 };
        let is_due = is_pair || now >= state.deadline || self.must_read_cpu(state, reads_cpu, now);
        let is_due = is_due || state.top().is_some_and(|top| top.must_be_exact(now));
        let is_due = is_due || self.must_read_cpu_to_switch_back(state, now);
        if must_sync || is_due || !state.pending.has_room(id, slot.raw_key()) {
            self.sync_judged(state, slot, now);
            now = now.max(state.synced);
        }
        let (thread, synced) = (state.thread, state.synced);
        let is_left_early = state.top().is_some_and(|top| top.id != id.get());
        let Some(segment) = state.bring_to_top(id).copied() else { return };
        let Some(key) = SpanKey::new(segment.key) else { return };
        let (sure, is_nested) = (segment.sure(), segment.has(NESTED));
        if sure != LowerBounds::default() && !is_nested {
            slot.counts().add(key, sure, false);
        }
        state.pop(segment.unmatched_below);
        if let Some(gap) = segment.current_gap(now) {
            slot.counts().resume(gap);
        }
        state.inside.set_reach(now);
        if segment.has(SWITCHED) {
            self.switch_back(state, now);
        }
        self.report_idle(state);
        if now.saturating_sub(segment.entered) >= self.ticks.long_segment {
            self.note_long(state, slot, (id, key), (segment.entered, now));
        }
        if is_left_early {
            // The thread goes on in spans that may be inside this one, whose time is not in this account.
            slot.count_inside(inside_time(0, LowerBounds::default()));
        }
        if is_nested {
            slot.exit(now, 0, thread);
        } else {
            if state.cpu_unknown {
                slot.set(CPU_UNKNOWN);
            } else {
                let ticks = segment.taken_since(synced, now);
                // There is room; otherwise the accounts were synced above.
                _ = ticks > 0 && state.pending.add(PendingSegment { id, key: segment.key, ticks });
            }
            let taken = segment.taken(now);
            slot.exit(now, taken, thread);
            if segment.has(DETACHED) {
                self.pass_up(state, slot, (now, taken), sure);
            }
        }
        state.is_new = false;
    }

    /// The flags of the span with that id and the number of its plan; 0 if it is not profiled.
    #[inline]
    pub(crate) fn flags_and_plan(&self, id: RegistryId) -> (u32, u64) {
        self.table.get(id).map_or((0, 0), |slot| (slot.flags(), slot.plan()))
    }

    pub(crate) fn fail(&self, id: RegistryId) {
        self.table.get(id).into_iter().for_each(|slot| self.fail_slot(&slot, &|_| {}));
    }

    /// An error occurred: marks the nearest profiled span as failed. `failed` is called for that span, and for those around
    /// it if it had not failed before.
    pub(crate) fn fail_nearest(
        &self,
        from: AncestryFrom,
        ancestry: Ancestry<'_>,
        failed: &dyn Fn(SpanKey),
    ) {
        ancestry(from, &mut |id| {
            self.table.get(id).is_some_and(|slot| {
                self.fail_slot(&slot, failed);
                true
            })
        });
    }

    #[cold]
    fn fail_slot(&self, slot: &Slot, failed: &dyn Fn(SpanKey)) {
        let fail = |slot: &Slot, flags| {
            slot.key().into_iter().for_each(failed);
            slot.set(flags) & FAILED == 0
        };
        if fail(slot, FAILED | FAILED_ITSELF) {
            self.for_ancestors(slot, |ancestor| fail(ancestor, FAILED));
        }
    }

    /// Whether the CPU clock must be read before its deadline. `reads_cpu` has the flags that can require it.
    #[inline(always)]
    pub(super) fn must_read_cpu(&self, state: &ThreadState, reads_cpu: u32, now: u64) -> bool {
        reads_cpu != 0
            && (reads_cpu & JUDGES_CPU != 0
                || now.saturating_sub(state.synced) >= self.ticks.cpu_clock_interval_old)
    }
}

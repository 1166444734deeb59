//! The idle time of spans whose futures report what they await.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use super::first_run::{FirstPoll, PollingFirst};
use super::flags::{ALWAYS_JUDGED, OBSERVED, SHOWS_FIELDS};
use super::local::{ObservedPoll, ThreadState, with_state};
use super::sample_counts::SampleCounts;
use super::segment::{DETACHED, IDLE_BEFORE, NESTED, SUSPENDED};
use super::slot::Slot;
use super::spans::{IdleCause, SpanEvent};
use super::table::SlotRef;
use super::{RegistryId, SpanKey, Spans};
use crate::stats::Counters;

/// The innermost span that a thread is in, which becomes idle when the thread leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InnermostSpan {
    pub(crate) layer: u32,
    pub(crate) id: RegistryId,
    pub(crate) key: SpanKey,
    /// How many of its ancestors the thread leaves together with it.
    around: u32,
}

impl InnermostSpan {
    pub(super) fn of(state: &ThreadState) -> Option<Self> {
        let top = state.top()?;
        // Those that are not around the innermost span are not left.
        let entered = state.entered().iter().rev();
        let around = entered.filter(|segment| !segment.has(SUSPENDED) && !segment.has(NESTED));
        // The thread is not in the parent of a detached one, but leaves that one together with those in it.
        let mut detached = around.clone();
        let around = match detached.position(|segment| segment.has(DETACHED)) {
            Some(at) => at + 1,
            None => around.count(),
        };
        Some(Self {
            layer: state.layer,
            id: RegistryId::new(top.id)?,
            key: SpanKey::new(top.key)?,
            around: u32::try_from(around).unwrap_or(u32::MAX),
        })
    }
}

#[cfg(test)]
impl InnermostSpan {
    pub(crate) fn for_test(number: u64) -> Self {
        let (id, key) = (RegistryId::new(number), SpanKey::new(number));
        let (id, key) = id.zip(key).expect("not 0");
        Self { layer: 1, id, key, around: 1 }
    }
}

/// A span that was entered for the first time on the calling thread, long after it was opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstEntered {
    pub(crate) span: InnermostSpan,
    /// In ticks.
    at: u64,
}

thread_local! {
    /// The last one that was not entered by what runs for the first time: it may be around that.
    static FIRST_ENTERED: Cell<Option<FirstEntered>> = const { Cell::new(None) };
}

/// The span around what runs now for the first time on the calling thread, if it was entered for the first time.
pub(crate) fn take_first_entered() -> Option<FirstEntered> {
    FIRST_ENTERED.take()
}

/// A span that another one waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OtherSpan {
    pub(crate) id: RegistryId,
    pub(crate) key: SpanKey,
    pub(crate) plan: u64,
}

/// A segment of this length, in nanoseconds, has delayed whatever waited for its thread. Not less
/// than the interval of the CPU clock: its exit is never a plain one.
pub(crate) const LONG_SEGMENT_NS: u64 = 5_000_000;

/// A segment that has just ended on a thread, and was so long that it delayed whatever waited for the thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LongSegment {
    pub(crate) span: Option<OtherSpan>,
    /// In ticks.
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// Idle time of a span, before it was entered on this thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unexplained {
    span: InnermostSpan,
    /// In ticks.
    idle: u64,
    until: u64,
    cause: IdleCause,
}

/// For how long no thread was in a span until now, and what happened last, in ticks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IdleTime {
    pub(crate) all: u64,
    /// When a thread left it last.
    pub(crate) last_exit: u64,
    /// If a thread is in it now.
    pub(crate) entered_since: Option<u64>,
}

/// The spans around one that are kept in case it closes.
const MOST_AROUND: usize = 16;

/// Spans that woke others lately, at places that their keys decide.
static WOKE: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

fn place_of(key: SpanKey) -> Option<&'static AtomicU64> {
    // By Fibonacci hashing: the keys of each thread begin at a multiple of a power of two.
    WOKE.get((key.get().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize)
}

/// Whether the span woke another one, and was not forgotten since.
pub(crate) fn has_woken(key: SpanKey) -> bool {
    place_of(key).is_some_and(|at| at.load(Ordering::Relaxed) == key.get())
}

impl Spans {
    /// The innermost span that the calling thread is in, and the outermost one around it. A span that is open for long (a
    /// connection, `main`) wakes whatever its thread does.
    pub(crate) fn waking_span(&self) -> Option<(OtherSpan, SpanKey)> {
        let span = super::innermost_span().filter(|span| span.layer == self.layer)?;
        let slot = self.slot_of(&span).filter(|slot| !slot.is_open_for_long(self.clock.now()))?;
        // Its close leaves its name.
        if slot.flags() & SHOWS_FIELDS != 0 {
            slot.set_once(ALWAYS_JUDGED);
            _ = place_of(span.key).map(|at| at.store(span.key.get(), Ordering::Relaxed));
        }
        let waking = OtherSpan { id: span.id, key: span.key, plan: slot.plan() };
        self.outermost_of(&span).map(|outermost| (waking, outermost.key))
    }

    /// A segment of that span has ended, and was long.
    #[cold]
    pub(super) fn note_long(
        &self,
        state: &mut ThreadState,
        slot: &Slot,
        (id, key): (RegistryId, SpanKey),
        (from, to): (u64, u64),
    ) {
        // A segment inside of it says more, if it took most of the time.
        let inside = state.last_long;
        if inside.from >= from && inside.to - inside.from > (to - from) / 2 {
            return;
        }
        // Its close leaves its name.
        if slot.flags() & SHOWS_FIELDS != 0 {
            slot.set_once(ALWAYS_JUDGED);
        }
        let span = Some(OtherSpan { id, key, plan: slot.plan() });
        state.last_long = LongSegment { span, from, to };
    }

    /// A span was idle for long before it was entered just now. Unless the wrapper of a future explains that, the
    /// innermost span that was idle shows it, since that one says most about what was awaited.
    #[cold]
    pub(super) fn note_idle(&self, state: &mut ThreadState, slot: &Slot, idle: u64, now: u64) {
        let began = now.saturating_sub(idle);
        // It was not polled before, so there is nothing that it awaited.
        if began <= slot.opened() {
            match (PollingFirst::here(), InnermostSpan::of(state)) {
                (Some(run), Some(_)) => self.count_first_run(state, slot, run, now),
                (None, Some(span)) => FIRST_ENTERED.set(Some(FirstEntered { span, at: now })),
                (_, None) => {}
            }
            return;
        }
        // Another task or thread may be in a span in which a wrapped future is pending.
        if ObservedPoll::is_in_one() || slot.flags() & OBSERVED != 0 {
            return;
        }
        self.keep_unexplained(state, slot, (idle, now), IdleCause::NotObserved);
    }

    /// The span is idle no more; how long it was, and until when.
    fn keep_unexplained(
        &self,
        state: &mut ThreadState,
        slot: &Slot,
        (idle, until): (u64, u64),
        cause: IdleCause,
    ) {
        let Some(span) = InnermostSpan::of(state) else { return };
        let began = until.saturating_sub(idle);
        // The same time, in a span inside the one before.
        let is_inside =
            |before: Unexplained| began < before.until && slot.raw_parent() == before.span.id.get();
        if !state.unexplained.is_some_and(is_inside) {
            self.report_idle(state);
        }
        _ = state.top_mut().map(|top| top.set(IDLE_BEFORE));
        state.unexplained = Some(Unexplained { span, idle, until, cause });
    }

    /// The innermost span was entered for the first time, at `entered`, around or inside of what runs for the first time.
    fn count_first_run(&self, state: &mut ThreadState, slot: &Slot, run: FirstPoll, entered: u64) {
        let ticks = |duration| self.clock.ticks(duration);
        let since_began = ticks(run.began.elapsed());
        let began = self.clock.now().saturating_sub(since_began).min(entered);
        let since = slot.opened().max(began.saturating_sub(ticks(run.waited)));
        let delay = began.saturating_sub(since);
        if delay == 0 {
            return;
        }
        if let Some(key) = slot.key() {
            slot.counts().add_await(key, [0, self.clock.ns(delay), 0]);
        }
        let last = state.last_long;
        let overlap = last.to.min(began).saturating_sub(last.from.max(since));
        let behind = last.span.filter(|_| overlap > delay / 2);
        self.keep_unexplained(state, slot, (delay, began), IdleCause::NotBegun { behind });
    }

    /// What runs for the first time on this thread is inside of that span, which was entered just before.
    pub(crate) fn note_first_run(&self, FirstEntered { span, at }: &FirstEntered) {
        _ = with_state(self.layer, |state| {
            let top = state.top().filter(|top| top.key == span.key.get() && top.entered == *at);
            if let (Some(_), Some(run)) = (top, PollingFirst::here())
                && let Some(slot) = self.slot_of(span)
            {
                self.count_first_run(state, &slot, run, *at);
            }
        });
    }

    /// Reports idle time that was noted, and that nothing has explained since.
    pub(super) fn report_idle(&self, state: &mut ThreadState) {
        let Some(Unexplained { span, idle, until, cause }) = state.unexplained.take() else {
            return;
        };
        let since = until.saturating_sub(idle);
        let report = || match cause {
            IdleCause::NotObserved => self.report_idle_inside(&span),
            IdleCause::NotBegun { .. } => self.report_await(&span),
        };
        if self.is_old_await(&span, since, until) && report() {
            let (since_ns, idle_ns) = (self.clock.raw_ns(since), self.clock.ns(idle));
            let idle = SpanEvent::Idle { key: span.key, since_ns, idle_ns, cause };
            self.counted(self.span_events.push(idle).is_ok());
        }
    }

    pub(super) fn slot_of(&self, span: &InnermostSpan) -> Option<SlotRef<'_>> {
        self.table.find(span.id, span.key.get())
    }

    /// Whether that holds for a span around that one.
    pub(super) fn is_in_one(&self, slot: &Slot, mut is_it: impl FnMut(&Slot) -> bool) -> bool {
        let mut is_in = false;
        self.for_ancestors(slot, |ancestor| {
            is_in = is_it(ancestor);
            !is_in
        });
        is_in
    }

    /// Visits the spans that were left together with that one, from the inside out, until `visit` returns false.
    fn for_left_with(
        &self,
        span: &InnermostSpan,
        slot: &Slot,
        mut visit: impl FnMut(&Slot, InnermostSpan) -> bool,
    ) {
        let mut around = span.around;
        self.for_ancestors(slot, |ancestor| {
            around = around.saturating_sub(1);
            let ids = ancestor.id().zip(ancestor.key()).filter(|_| around > 0);
            ids.is_some_and(|(id, key)| {
                visit(ancestor, InnermostSpan { id, key, around, ..*span }) && around > 1
            })
        });
    }

    /// Adds idle time that is explained to the accounts of a span and those that were left together with it: what was
    /// awaited and the delays, in ticks. `idle` says how much of each, by id.
    pub(crate) fn count_await(&self, span: &InnermostSpan, idle: impl Fn(RegistryId) -> [u64; 3]) {
        let count = |slot: &Slot, span: InnermostSpan| {
            let [awaited, delayed, awaits] = idle(span.id);
            let [await_ns, delay_ns] = [awaited, delayed].map(|ticks| self.clock.ns(ticks));
            // It can have closed in the meantime, and its slot be reused.
            if slot.key() == Some(span.key) {
                slot.counts().add_await(span.key, [await_ns, delay_ns, awaits]);
            }
            true
        };
        let Some(slot) = self.slot_of(span) else { return };
        count(&slot, *span);
        self.for_left_with(span, &slot, count);
    }

    /// The outermost of the spans that were left together with this one and are not open for long; `None` if it has
    /// closed.
    pub(crate) fn outermost_of(&self, span: &InnermostSpan) -> Option<InnermostSpan> {
        let slot = self.slot_of(span)?;
        let (mut outermost, now) = (*span, self.clock.now());
        self.for_left_with(span, &slot, |ancestor, it| {
            // The requests of a connection do not belong together.
            let is_in = !ancestor.is_open_for_long(now);
            outermost = if is_in { it } else { outermost };
            is_in
        });
        Some(InnermostSpan { around: 1, ..outermost })
    }

    /// Whether a span is one of these, or inside one.
    pub(crate) fn is_in_any(&self, span: &InnermostSpan, of: &HashSet<SpanKey>) -> bool {
        let is_one = |slot: &Slot| slot.key().is_some_and(|key| of.contains(&key));
        of.contains(&span.key)
            || self.slot_of(span).is_some_and(|slot| self.is_in_one(&slot, is_one))
    }

    /// Whether a span is inside another one, or inside any if there is no other.
    pub(crate) fn is_inside(&self, span: &InnermostSpan, other: Option<&InnermostSpan>) -> bool {
        let Some(other) = other else { return true };
        let is_it = |slot: &Slot| slot.key() == Some(other.key);
        span.key != other.key && self.slot_of(span).is_some_and(|slot| self.is_in_one(&slot, is_it))
    }

    /// The idle time until `now` of the span with that id (as a number); `None` if it has closed.
    #[inline]
    pub(crate) fn idle_until(&self, id: u64, now: u64) -> Option<IdleTime> {
        let slot = self.table.get(RegistryId::new(id)?)?;
        Some(IdleTime {
            all: slot.idle_until(now),
            last_exit: slot.last_exit(),
            entered_since: slot.entered_since(),
        })
    }

    /// A wrapped future is in that span. Replaces `around` by those that a thread leaves together with it, from the inside
    /// out.
    pub(crate) fn note_observed(
        &self,
        span: Option<&InnermostSpan>,
        around: &mut Vec<InnermostSpan>,
    ) {
        around.clear();
        let Some((span, slot)) = span.and_then(|span| Some((span, self.slot_of(span)?))) else {
            return;
        };
        slot.set_once(OBSERVED);
        self.for_left_with(span, &slot, |ancestor, it| {
            ancestor.set_once(OBSERVED);
            around.push(it);
            around.len() < MOST_AROUND
        });
    }

    /// The future has left that span.
    pub(crate) fn forget_observed(&self, span: &InnermostSpan) {
        if let Some(slot) = self.slot_of(span) {
            slot.unset(OBSERVED);
        }
    }

    /// Whether what the span awaited from `since` to `now`, in ticks, is worth a sample before it is kept: if the span,
    /// or one around it, has been open for ten times as long as it has to be entered to be old. A span that is open for
    /// very long (a connection, `main`) does not make others old.
    pub(crate) fn is_old_await(&self, span: &InnermostSpan, since: u64, now: u64) -> bool {
        let Some(slot) = self.slot_of(span) else { return false };
        let is_old = |slot: &Slot| slot.is_old_as_open(now);
        now.saturating_sub(since) >= slot.old_as_open_after()
            || is_old(&slot)
            || self.is_in_one(&slot, is_old)
    }

    /// Counts idle time that nothing explains as a sample of the spans around the one that was idle: only of these it is
    /// worth a profile. Returns false if the spans cannot be registered.
    fn report_idle_inside(&self, span: &InnermostSpan) -> bool {
        let Some(slot) = self.slot_of(span) else { return false };
        let register =
            |around: SlotRef<'_>| self.register_with_collector(&around, SampleCounts::AWAIT);
        self.counted(self.registers(&slot) && self.table.parent_of(&slot).is_none_or(register))
    }

    /// The model of the tests has no such reports.
    #[cfg(test)]
    pub(crate) fn without_idle_reports(mut self) -> Self {
        self.ticks.long_idle = u64::MAX;
        self
    }

    /// Counts an await as a sample of its span. Returns false if the span has closed, or cannot be registered, which is
    /// counted.
    pub(crate) fn report_await(&self, span: &InnermostSpan) -> bool {
        let register = |slot: SlotRef<'_>| self.register_with_collector(&slot, SampleCounts::AWAIT);
        self.slot_of(span).is_some_and(|slot| self.counted(register(slot)))
    }

    /// Counts an await that cannot be sent because the collector is behind.
    fn counted(&self, is_registered: bool) -> bool {
        if !is_registered {
            Counters::add(&self.counters.awaits.dropped_queue_full, 1);
        }
        is_registered
    }
}

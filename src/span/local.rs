//! What a thread knows of the spans it is in.

use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::sync::Arc;

use super::account::{Tally, sure_parts};
use super::recording::Recording;
use super::{RegistryId, SpanKey};
use crate::sys::{Clock, Position};

thread_local! {
    /// Set on our own threads, and on the one thread of a fork's child: nothing of ours happens
    /// there. Without a destructor, so that it can be set at any time.
    static IGNORED: Cell<bool> = const { Cell::new(false) };

    static LOCAL: Local = const { Local { first: RefCell::new(None), others: RefCell::new(Vec::new()) } };
}

/// From now on the calling thread is not profiled.
pub(crate) fn ignore_this_thread() {
    IGNORED.set(true);
}

#[inline(always)]
pub(super) fn is_ignored() -> bool {
    IGNORED.get()
}

/// One state a layer that this thread has met: nearly always one.
struct Local {
    first: RefCell<Option<ThreadState>>,
    others: RefCell<Vec<ThreadState>>,
}

/// Runs `action` on this thread's state for the layer of that number, if there is one.
///
/// Nothing happens when a hook runs inside a hook, or when the thread is past its destructors.
#[inline]
pub(super) fn with_state<R>(
    layer: u32,
    action: impl FnOnce(&mut ThreadState) -> R,
) -> Option<R> {
    LOCAL
        .try_with(|local| {
            let mut first = local.first.try_borrow_mut().ok()?;
            match &mut *first {
                Some(state) if state.layer == layer => Some(action(state)),
                _ => local.with_other(layer, action),
            }
        })
        .ok()
        .flatten()
}

/// Makes `state` this thread's state for its layer. `is_alive` tells which layers still exist.
pub(super) fn add_state(state: ThreadState, is_alive: impl Fn(u32) -> bool) {
    // If the thread is past its destructors it stays without a state.
    _ = LOCAL.try_with(|local| {
        let (Ok(mut first), Ok(mut others)) =
            (local.first.try_borrow_mut(), local.others.try_borrow_mut())
        else {
            return;
        };
        others.retain(|state| is_alive(state.layer));
        match &*first {
            Some(other) if is_alive(other.layer) => others.push(state),
            _ => *first = Some(state),
        }
    });
}

impl Local {
    #[cold]
    fn with_other<R>(&self, layer: u32, action: impl FnOnce(&mut ThreadState) -> R) -> Option<R> {
        let mut others = self.others.try_borrow_mut().ok()?;
        others.iter_mut().find(|state| state.layer == layer).map(action)
    }
}

/// Where raw samples and the scheduler's doings come from.
pub(crate) trait Source: Send + Sync + Debug {
    /// Begins with the calling thread. Called on its first profiled segment, and again on the
    /// first one after its recording was ended.
    fn arm(&self, clock: &Clock) -> Armed;
}

/// A thread that a [`Source`] has begun with.
#[derive(Debug)]
pub(crate) struct Armed {
    /// What the collector was given; none if the thread is not sampled.
    pub(crate) recording: Option<Arc<Recording>>,
    /// Moves when a sample is taken.
    pub(crate) samples: Position,
    /// By how much it moves, at least.
    pub(crate) sample_size: u64,
    /// Moves when the thread is switched off or onto a CPU.
    pub(crate) switches: Position,
    /// Whether `switches` does so; if not, on-CPU time is bounded by the thread's CPU clock.
    pub(crate) follows_switches: bool,
    /// Without a recording: whether one may be had later.
    pub(crate) may_retry: bool,
    pub(crate) source: Box<dyn ThreadSource>,
}

/// A [`Source`] on one thread; called by that thread only, and only where something moved.
pub(crate) trait ThreadSource: Debug {
    /// What the scheduler did since the last call.
    fn catch_up(&mut self, clock: &Clock, now: u64) -> Interval;
    /// The thread's CPU clock in nanoseconds.
    fn cpu_ns(&mut self) -> Option<u64>;
    /// What the thread has used since it started.
    fn usage(&mut self) -> Usage;
    /// Changes the time between samples. Returns whether that worked.
    fn set_period_ns(&mut self, period_ns: u64) -> bool;
}

/// What the scheduler did with a thread between two looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interval {
    pub(crate) on_cpu_ns: u64,
    pub(crate) off_cpu_ns: u64,
    pub(crate) voluntary_switches: u64,
    pub(crate) involuntary_switches: u64,
}

/// What a thread has used since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
    pub(crate) voluntary_switches: u64,
    pub(crate) involuntary_switches: u64,
    pub(crate) cycles: u64,
    pub(crate) instructions: u64,
    pub(crate) cache_misses: u64,
}

/// One enter of a span on this thread.
#[derive(Debug, Default)]
pub(super) struct Segment {
    pub(super) id: u64,
    pub(super) key: u64,
    pub(super) entered: u64,
    /// Unmatched spans that had been entered since the segment below.
    pub(super) unmatched_below: u32,
    /// The span was entered on this thread already: its time is counted there.
    pub(super) nested: bool,
    /// `tally` is in use; else it holds what an earlier segment left.
    pub(super) tallied: bool,
    pub(super) tally: Tally,
}

/// The time of a segment of which the CPU clock has not been read since.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unresolved {
    pub(super) id: RegistryId,
    pub(super) key: SpanKey,
    pub(super) ns: u64,
}

/// A thread's state for one layer.
#[derive(Debug)]
pub(super) struct ThreadState {
    pub(super) layer: u32,
    depth: usize,
    /// As long as the deepest nesting so far; the first `depth` are entered.
    segments: Vec<Segment>,
    /// Unmatched spans entered above the innermost segment.
    pub(super) unmatched: u32,
    pub(super) keys: std::ops::Range<u64>,
    pub(super) armed: Option<Armed>,
    pub(super) armed_at: u64,
    /// Where the present stretch of the ring began.
    pub(super) from: u64,
    pub(super) switches_seen: u64,
    /// When to look at what time alone changes.
    pub(super) deadline: u64,
    /// Until when the rate stays raised.
    pub(super) calm_at: u64,
    /// When the scheduler or the CPU clock was last looked at.
    pub(super) settled: u64,
    pub(super) cpu_ns: u64,
    pub(super) usage: Usage,
    pub(super) usage_read: u64,
    pub(super) unresolved: Vec<Unresolved>,
}

/// Nesting that needs no allocation after a thread's first profiled span.
const USUAL_DEPTH: usize = 32;
/// Segments of which the CPU clock may be behind: then it is read at once.
const MOST_UNRESOLVED: usize = 64;

impl ThreadState {
    pub(super) fn new(layer: u32) -> Self {
        Self {
            layer,
            depth: 0,
            segments: std::iter::repeat_with(Segment::default).take(USUAL_DEPTH).collect(),
            unmatched: 0,
            keys: 0..0,
            armed: None,
            armed_at: 0,
            from: 0,
            switches_seen: 0,
            deadline: 0,
            calm_at: 0,
            settled: 0,
            cpu_ns: 0,
            usage: Usage::default(),
            usage_read: 0,
            unresolved: Vec::with_capacity(MOST_UNRESOLVED),
        }
    }

    #[inline]
    pub(super) fn top(&self) -> Option<&Segment> {
        self.segments.get(self.depth.checked_sub(1)?)
    }

    #[inline]
    pub(super) fn top_key(&self) -> Option<SpanKey> {
        self.top().and_then(|segment| SpanKey::new(segment.key))
    }

    pub(super) fn entered(&self) -> &[Segment] {
        self.segments.get(..self.depth).unwrap_or_default()
    }

    pub(super) fn entered_mut(&mut self) -> &mut [Segment] {
        self.segments.get_mut(..self.depth).unwrap_or_default()
    }

    #[inline]
    pub(super) fn push(&mut self, id: RegistryId, key: SpanKey, now: u64) {
        if self.depth == self.segments.len() {
            self.segments.push(Segment::default());
        }
        if let Some(segment) = self.segments.get_mut(self.depth) {
            segment.id = id.get();
            segment.key = key.get();
            segment.entered = now;
            segment.unmatched_below = self.unmatched;
            segment.nested = false;
            segment.tallied = false;
            self.depth += 1;
            self.unmatched = 0;
        }
    }

    /// Whether `id` is entered below the innermost segment.
    #[cold]
    pub(super) fn is_below_top(&self, id: RegistryId) -> bool {
        let below = self.depth.saturating_sub(1);
        self.entered().iter().take(below).any(|segment| segment.id == id.get())
    }

    pub(super) fn set_nested(&mut self) {
        if let Some(segment) = self.segments.get_mut(self.depth.saturating_sub(1)) {
            segment.nested = true;
        }
    }

    /// Takes the latest segment of `id` off, wherever it is: spans need not be left in the order
    /// in which they were entered. It stays readable until the next [`push`](Self::push).
    #[inline]
    pub(super) fn pop(&mut self, id: RegistryId) -> Option<&Segment> {
        let top = self.depth.checked_sub(1)?;
        let at = if self.segments.get(top)?.id == id.get() {
            self.unmatched = self.segments.get(top)?.unmatched_below;
            top
        } else {
            let at = self.entered().iter().rposition(|segment| segment.id == id.get())?;
            self.segments.get_mut(at..=top)?.rotate_left(1);
            top
        };
        self.depth = at;
        self.segments.get(at)
    }

    pub(super) fn tally_all(&mut self, tally: &Tally) {
        for segment in self.entered_mut() {
            segment.tally(tally);
        }
    }

    /// Bounds the on-CPU time of everything since the last look, now that the thread is known to
    /// have run for `cpu_ns` of it. What belongs to segments left meanwhile goes to `late`.
    pub(super) fn bound(
        &mut self,
        clock: &Clock,
        now: u64,
        cpu_ns: u64,
        mut late: impl FnMut(Unresolved, u64, u64),
    ) {
        let settled = self.settled;
        let interval_ns = clock.ns(now.saturating_sub(settled));
        for segment in self.entered_mut() {
            let bounded_ns = clock.ns(now.saturating_sub(segment.entered.max(settled)));
            let (sure_on_ns, sure_off_ns) = sure_parts(bounded_ns, interval_ns, cpu_ns);
            segment.tally(&Tally { bounded_ns, sure_on_ns, sure_off_ns, ..Tally::default() });
        }
        for part in self.unresolved.drain(..) {
            let (sure_on_ns, sure_off_ns) = sure_parts(part.ns, interval_ns, cpu_ns);
            late(part, sure_on_ns, sure_off_ns);
        }
    }

    /// Remembers the end of a segment that the CPU clock has not seen yet. Returns false when
    /// there is no room: then the clock must be read.
    pub(super) fn leave_unresolved(&mut self, part: Unresolved) -> bool {
        self.unresolved.push(part);
        self.unresolved.len() < MOST_UNRESOLVED
    }
}

impl Segment {
    fn tally(&mut self, tally: &Tally) {
        if !self.tallied {
            self.tallied = true;
            self.tally = Tally::default();
        }
        self.tally.add(tally);
    }
}

impl Drop for ThreadState {
    fn drop(&mut self) {
        if let Some(recording) = self.armed.as_ref().and_then(|armed| armed.recording.as_ref()) {
            recording.end();
        }
    }
}

//! What a thread knows of the spans it is in.

use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::account::{Tally, sure_parts};
use super::recording::Recording;
use super::slot::Parent;
use super::{RegistryId, SpanKey};
use crate::sys::{Clock, Position};

thread_local! {
    /// Set on our own threads, and on the one thread of a fork's child: nothing of ours happens
    /// there. Without a destructor, so that it can be set at any time.
    static IGNORED: Cell<bool> = const { Cell::new(false) };

    /// Whether `LOCAL` holds a state.
    static IN_USE: Cell<bool> = const { Cell::new(false) };

    static LOCAL: Local = const {
        Local { first: RefCell::new(ThreadState::none()), others: RefCell::new(Vec::new()) }
    };
}

/// From now on the calling thread is not profiled. Only stores to memory: it may be called in the
/// child of a fork.
pub(crate) fn ignore_this_thread() {
    IGNORED.set(true);
    if IN_USE.get() {
        // What the states hold stays as it is: it is not ours any more.
        _ = LOCAL.try_with(|local| {
            if let Ok(mut first) = local.first.try_borrow_mut() {
                first.layer = NO_LAYER;
            }
            if let Ok(mut others) = local.others.try_borrow_mut() {
                others.iter_mut().for_each(|state| state.layer = NO_LAYER);
            }
        });
    }
}

pub(super) fn is_ignored() -> bool {
    IGNORED.get()
}

/// One state a layer that this thread has met: nearly always one.
struct Local {
    first: RefCell<ThreadState>,
    others: RefCell<Vec<ThreadState>>,
}

/// The number that no layer has.
const NO_LAYER: u32 = 0;

/// Runs `action` on this thread's state for the layer of that number, if there is one.
///
/// Nothing happens when a hook runs inside a hook, or when the thread is past its destructors.
#[inline(always)]
pub(super) fn with_state<R>(
    layer: u32,
    action: impl FnOnce(&mut ThreadState) -> R,
) -> Option<R> {
    LOCAL
        .try_with(|local| match local.first.try_borrow_mut() {
            Ok(mut first) if first.layer == layer => Some(action(&mut first)),
            Ok(_) => local.with_other(layer, action),
            Err(_) => None,
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
        IN_USE.set(true);
        others.retain(|state| is_alive(state.layer));
        if first.layer != NO_LAYER && is_alive(first.layer) {
            others.push(state);
        } else {
            *first = state;
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

impl Usage {
    const NONE: Self = Self {
        minor_faults: 0,
        major_faults: 0,
        voluntary_switches: 0,
        involuntary_switches: 0,
        cycles: 0,
        instructions: 0,
        cache_misses: 0,
    };
}

/// One enter of a span on this thread.
#[derive(Debug, Default)]
pub(super) struct Segment {
    pub(super) id: u64,
    pub(super) key: u64,
    pub(super) root: u64,
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
    /// The thread's number, which no other thread has.
    pub(super) thread: u32,
    depth: usize,
    /// As long as the deepest nesting so far; the first `depth` are entered.
    segments: Vec<Segment>,
    /// Unmatched spans entered above the innermost segment.
    pub(super) unmatched: u32,
    pub(super) keys: std::ops::Range<u64>,
    pub(super) samples: Position,
    pub(super) switches: Position,
    pub(super) recording: Option<Arc<Recording>>,
    /// None before the first profiled segment.
    pub(super) source: Option<Box<dyn ThreadSource>>,
    pub(super) sample_size: u64,
    pub(super) follows_switches: bool,
    pub(super) may_retry: bool,
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
    const fn none() -> Self {
        Self {
            layer: NO_LAYER,
            thread: 0,
            depth: 0,
            segments: Vec::new(),
            unmatched: 0,
            keys: 0..0,
            samples: Position::fixed(),
            switches: Position::fixed(),
            recording: None,
            source: None,
            sample_size: 1,
            follows_switches: false,
            may_retry: false,
            armed_at: 0,
            from: 0,
            switches_seen: 0,
            // Long ago: the first enter looks, and arms the thread.
            deadline: 0,
            calm_at: 0,
            settled: 0,
            cpu_ns: 0,
            usage: Usage::NONE,
            usage_read: 0,
            unresolved: Vec::new(),
        }
    }

    pub(super) fn new(layer: u32) -> Self {
        static NEXT_THREAD: AtomicU32 = AtomicU32::new(1);
        let mut state = Self::none();
        state.layer = layer;
        state.thread = NEXT_THREAD.fetch_add(1, Ordering::Relaxed);
        state.segments.resize_with(USUAL_DEPTH, Segment::default);
        state.unresolved.reserve(MOST_UNRESOLVED);
        state
    }

    #[inline(always)]
    pub(super) fn top(&self) -> Option<&Segment> {
        self.segments.get(self.depth.checked_sub(1)?)
    }

    pub(super) fn entered(&self) -> &[Segment] {
        self.segments.get(..self.depth).unwrap_or_default()
    }

    pub(super) fn entered_mut(&mut self) -> &mut [Segment] {
        self.segments.get_mut(..self.depth).unwrap_or_default()
    }

    #[inline(always)]
    pub(super) fn push(&mut self, id: RegistryId, key: u64, root: u64, now: u64) {
        if self.depth == self.segments.len() {
            self.make_room();
        }
        if let Some(segment) = self.segments.get_mut(self.depth) {
            segment.id = id.get();
            segment.key = key;
            segment.root = root;
            segment.entered = now;
            segment.unmatched_below = self.unmatched;
            segment.nested = false;
            segment.tallied = false;
            self.depth += 1;
            self.unmatched = 0;
        }
    }

    #[cold]
    fn make_room(&mut self) {
        self.segments.push(Segment::default());
    }

    /// The span just pushed is entered somewhere already. If it is on this thread, its time counts
    /// there.
    #[cold]
    pub(super) fn note_nested(&mut self, id: RegistryId) {
        let below = self.depth.saturating_sub(1);
        let is_nested = self.entered().iter().take(below).any(|segment| segment.id == id.get());
        if let Some(segment) = self.segments.get_mut(below) {
            segment.nested = is_nested;
        }
    }

    /// The segment that [`pop`](Self::pop) has taken off.
    pub(super) fn just_left(&self) -> Option<&Segment> {
        self.segments.get(self.depth)
    }

    /// Takes the latest segment of `id` off, wherever it is: spans need not be left in the order
    /// in which they were entered. It stays readable until the next [`push`](Self::push).
    #[inline(always)]
    pub(super) fn pop(&mut self, id: RegistryId) -> Option<&Segment> {
        let top = self.depth.checked_sub(1)?;
        if self.segments.get(top)?.id != id.get() {
            self.bring_to_top(id)?;
        }
        self.depth = top;
        let segment = self.segments.get(top)?;
        self.unmatched = segment.unmatched_below;
        Some(segment)
    }

    #[cold]
    fn bring_to_top(&mut self, id: RegistryId) -> Option<()> {
        let (top, unmatched) = (self.depth - 1, self.unmatched);
        let at = self.entered().iter().rposition(|segment| segment.id == id.get())?;
        self.segments.get_mut(at..=top)?.rotate_left(1);
        // What was entered above the top is still above what is the top now.
        self.segments.get_mut(top)?.unmatched_below = unmatched;
        Some(())
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
    /// What a span that opens inside this one must know.
    #[inline(always)]
    pub(super) fn as_parent(&self) -> Option<Parent> {
        Some(Parent { id: RegistryId::new(self.id)?, root: SpanKey::new(self.root)? })
    }

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
        if let Some(recording) = &self.recording {
            recording.end();
        }
    }
}

//! A thread's own state: the spans it is in.

use std::cell::{Cell, RefCell};
use std::io;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::awaits::{InnermostSpan, LongSegment, Unexplained};
use super::inside::Inside;
use super::segment::{CPU_UNKNOWN, NESTED, PendingSegments, SWITCHED, Segment, UNWINDING};
use super::slot::Slot;
use super::usage_read::UsageRead;
use super::{RegistryId, SpanKey};
use crate::facts::Allocations;
use crate::sampler::{NEVER, SamplingSession, ThreadShared, ThreadSource};
use crate::sys::{self, Position, SuspendCounting};

thread_local! {
    /// Set on the layer's own threads, and on threads whose thread-locals have been destroyed. Hooks do nothing there.
    static IGNORED: Cell<bool> = const { Cell::new(false) };

    /// What each hook reads first.
    static HERE: Here = const { Here { first: Cell::new(First::NONE), state: Cell::new(None) } };

    /// See [`ObservedPoll`].
    static IS_OBSERVED: Cell<bool> = const { Cell::new(false) };

    static OTHERS: Others = const { Others(RefCell::new(Vec::new())) };
}

/// Aligned so that it is in one cache line.
#[repr(align(16))]
struct Here {
    /// The layer whose state is in `state`, or 0, and the number of unmatched spans entered above its innermost
    /// segment. Kept outside the state, so that entering an unmatched span touches nothing else.
    first: Cell<First>,
    /// The state of the layer in `first`, taken out while a hook uses it. (A closure over it would not be inlined, and
    /// its captures would go through memory.) It has no destructor, since a thread-local with one checks at each access
    /// whether it is alive; `OTHERS` drops it.
    state: Cell<Option<ManuallyDrop<Box<ThreadState>>>>,
}

#[derive(Clone, Copy)]
struct First {
    layer: u32,
    unmatched: u32,
}

/// Not the number of any layer.
const NO_LAYER: u32 = 0;

impl First {
    const NONE: Self = Self { layer: NO_LAYER, unmatched: 0 };
}

#[inline(always)]
fn first() -> First {
    HERE.with(|here| here.first.get())
}

/// Sets the first layer. Returns the previous one.
#[inline(always)]
fn set_first(first: First) -> First {
    HERE.with(|here| here.first.replace(first))
}

#[inline(always)]
fn take_first() -> Option<Box<ThreadState>> {
    HERE.with(|here| here.state.take()).map(ManuallyDrop::into_inner)
}

/// The states of further layers; almost always empty.
#[expect(clippy::vec_box, reason = "they are swapped with the first one, which is a box")]
struct Others(RefCell<Vec<Box<ThreadState>>>);

impl Drop for Others {
    /// The thread ends.
    fn drop(&mut self) {
        set_first(First::NONE);
        drop(take_first());
        // Destructors that run later may still use spans.
        IGNORED.set(true);
    }
}

pub(crate) fn ignore_this_thread() {
    IGNORED.set(true);
    forget_this_thread();
}

pub(crate) fn spawn_ignored(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let run = move || {
        ignore_this_thread();
        run();
    };
    sys::spawn(name, run).map(drop)
}

/// Leaks the calling thread's states. Only stores to memory: it is called in the child of a fork, which must not touch
/// what the states own.
pub(crate) fn forget_this_thread() {
    set_first(First::NONE);
    HERE.with(|here| here.state.set(None));
}

/// Whether the calling thread is not profiled. Such a thread must not wait for the layer's threads.
pub(crate) fn is_ignored() -> bool {
    IGNORED.get()
}

/// Takes this thread's state for the given layer, if there is one; [`put`] must follow.
///
/// There is none when a hook runs inside a hook, or when the thread's thread-locals have been destroyed.
#[inline(always)]
pub(super) fn take(layer: u32) -> Option<Box<ThreadState>> {
    if first().layer != layer {
        make_first(layer)?;
    }
    take_first()
}

#[inline(always)]
pub(super) fn put(state: Box<ThreadState>) {
    HERE.with(|here| here.state.set(Some(ManuallyDrop::new(state))));
}

/// What `ask` returns of this thread's state for the given layer, if there is one.
pub(super) fn with_state<T>(layer: u32, ask: impl FnOnce(&mut ThreadState) -> T) -> Option<T> {
    let mut state = take(layer)?;
    let answer = ask(&mut state);
    put(state);
    Some(answer)
}

/// The number of unmatched spans entered above the innermost segment of the first state.
#[inline(always)]
pub(super) fn unmatched() -> u32 {
    first().unmatched
}

#[inline(always)]
pub(super) fn set_unmatched(unmatched: u32) {
    set_first(First { unmatched, ..first() });
}

/// Counts an unmatched span that is entered (1) or left (-1).
#[inline(always)]
pub(super) fn count_unmatched(layer: u32, change: i32) {
    let first = first();
    // Without a state there is no count: when a state is made, the registry is asked instead.
    if first.layer == layer || (first.layer != NO_LAYER && make_first(layer).is_some()) {
        set_unmatched(unmatched().saturating_add_signed(change));
    }
}

#[cold]
fn make_first(layer: u32) -> Option<()> {
    if first().layer == NO_LAYER {
        return None;
    }
    OTHERS
        .try_with(|others| {
            let mut others = others.0.try_borrow_mut().ok()?;
            let place = others.iter_mut().find(|state| state.layer == layer)?;
            let mut first = take_first()?;
            std::mem::swap(place, &mut first);
            let now = First { layer, unmatched: first.unmatched_later };
            place.unmatched_later = set_first(now).unmatched;
            put(first);
            Some(())
        })
        .ok()
        .flatten()
}

/// The innermost profiled span that the calling thread is in, of any layer.
#[inline]
pub(crate) fn innermost_span() -> Option<InnermostSpan> {
    in_innermost(InnermostSpan::of)
}

/// The innermost profiled spans that the calling thread is in, one of each layer, and the times from which on they are
/// old, in ticks: what `find` returns of the first for which that is something.
pub(crate) fn find_sampled_span<T>(find: impl Fn(InnermostSpan, u64) -> Option<T>) -> Option<T> {
    in_innermost(|state| find(InnermostSpan::of(state)?, state.top()?.samples_from))
}

#[inline]
fn in_innermost<T>(of: impl Fn(&ThreadState) -> Option<T>) -> Option<T> {
    let state = take_first()?;
    let innermost = of(&state);
    put(state);
    innermost.or_else(|| in_others(of))
}

#[cold]
fn in_others<T>(of: impl Fn(&ThreadState) -> Option<T>) -> Option<T> {
    let innermost = OTHERS.try_with(|others| {
        let others = others.0.try_borrow().ok()?;
        others.iter().find_map(|state| of(state))
    });
    innermost.ok().flatten()
}

pub(crate) fn is_in_span(key: SpanKey) -> bool {
    let is_it = |segment: &Segment| segment.key == key.get();
    in_innermost(|state| state.entered().iter().any(is_it).then_some(())).is_some()
}

/// The last long segment that ended on the calling thread, in a span of that layer.
pub(crate) fn last_long_segment(layer: u32) -> Option<LongSegment> {
    with_state(layer, |state| state.last_long)
}

/// While it lives, a future is polled on the calling thread that explains the idle time of the spans inside it.
#[derive(Debug)]
pub(crate) struct ObservedPoll {
    was_observed: bool,
}

impl ObservedPoll {
    #[inline]
    pub(crate) fn begin() -> Self {
        Self { was_observed: IS_OBSERVED.replace(true) }
    }

    pub(super) fn is_in_one() -> bool {
        IS_OBSERVED.get()
    }
}

impl Drop for ObservedPoll {
    #[inline]
    fn drop(&mut self) {
        IS_OBSERVED.set(self.was_observed);
    }
}

/// How many profiled spans the calling thread has created, in the layer that was last active on it.
pub(crate) fn spans_created() -> u64 {
    in_innermost(|state| Some(state.inside.totals.seen.load(Ordering::Relaxed))).unwrap_or(0)
}

/// The idle time of spans that were entered on the calling thread just now is explained.
pub(crate) fn explain_idle(layer: u32) {
    _ = with_state(layer, |state| state.unexplained = None);
}

/// Makes `state` this thread's state for its layer, unless the thread's thread-locals have been destroyed or a hook is
/// running. Drops the states of layers that are gone.
pub(super) fn add_state(state: Box<ThreadState>) {
    _ = OTHERS.try_with(|others| {
        let taken = take_first();
        let before = first();
        if taken.is_none() && before.layer != NO_LAYER {
            return;
        }
        if let Ok(mut others) = others.0.try_borrow_mut() {
            others.extend(taken.map(|mut first| {
                first.unmatched_later = before.unmatched;
                first
            }));
            // The layer has the totals of all threads.
            others.retain(|state| Arc::strong_count(&state.inside.totals) > 1);
        }
        set_first(First { layer: state.layer, unmatched: 0 });
        put(state);
    });
}

/// A thread's state for one layer. The fields that most hooks touch come first, in two cache lines.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(super) struct ThreadState {
    pub(super) layer: u32,
    /// The thread's number, unique in this process.
    pub(super) thread: u32,
    /// As long as the deepest nesting so far; the first `depth` are entered.
    segments: Vec<Segment>,
    depth: usize,
    /// When the next time-based checks are due.
    pub(super) deadline: u64,
    /// When the CPU clock was last read.
    pub(super) synced: u64,
    pub(super) sampled: Option<Arc<ThreadShared>>,

    pub(super) samples: Position,
    /// The position at which the open interval began.
    pub(super) from: u64,
    /// The number of calls in `allocated`.
    allocator_calls: u64,
    /// The number of sessions before `session`.
    pub(super) turn: u32,
    /// Whether the session samples the thread.
    pub(super) is_attached: bool,
    /// The thread's CPU clock cannot be read.
    pub(super) cpu_unknown: bool,
    /// The collector may not have scanned the thread since it began.
    pub(super) is_new: bool,
    /// See [`Spans::find_parent`](super::Spans::find_parent).
    pub(super) may_miss_enters: bool,
    pub(super) keys: std::ops::Range<u64>,

    pub(super) pending: PendingSegments,
    pub(super) inside: Inside,
    /// What the thread had allocated at the last hook.
    allocated: Allocations,
    /// The latest idle time of the innermost span that was idle, until it is reported.
    pub(super) unexplained: Option<Unexplained>,
    pub(super) last_long: LongSegment,
    /// The session of `sampled` that the thread has taken up.
    pub(super) session: Option<Arc<SamplingSession>>,
    /// None before the first profiled segment.
    pub(super) source: Option<Box<dyn ThreadSource>>,
    pub(super) cpu_ns: u64,
    /// For how long `session` had sampled the thread at that read.
    pub(super) sampled_ns: u64,
    /// For how long earlier sessions have sampled it since that read.
    pub(super) sampled_ended_ns: u64,
    pub(super) read: UsageRead,
    /// The value of [`unmatched`] when this state becomes the first again.
    unmatched_later: u32,
}

const _: () = {
    assert!(std::mem::offset_of!(ThreadState, samples) == 64);
    assert!(std::mem::offset_of!(ThreadState, inside) <= 128);
};

/// Nesting that needs no allocation after a thread's first profiled span.
const USUAL_DEPTH: usize = 32;

impl ThreadState {
    /// Apart from its caller, whose frame must be small: the thread's stack may be.
    #[inline(never)]
    pub(super) fn new(layer: u32) -> Box<Self> {
        static NEXT_THREAD: AtomicU32 = AtomicU32::new(1);
        // The deadline is in the past, so that the first enter runs the checks and attaches the thread.
        let mut state = Box::<Self>::default();
        state.layer = layer;
        state.may_miss_enters = true;
        state.thread = NEXT_THREAD.fetch_add(1, Ordering::Relaxed);
        state.segments.resize_with(USUAL_DEPTH, Segment::default);
        state
    }

    /// Whether the thread has allocated or freed anything since the last hook.
    #[inline(always)]
    pub(super) fn has_allocated(&self) -> bool {
        calls(Allocations::here()) != self.allocator_calls
    }

    /// Notes what the thread has allocated until now. Returns what it had at the last hook.
    pub(super) fn note_allocated(&mut self, allocated: Allocations) -> Allocations {
        self.allocator_calls = calls(allocated);
        std::mem::replace(&mut self.allocated, allocated)
    }

    #[inline(always)]
    pub(super) fn top(&self) -> Option<&Segment> {
        self.segments.get(self.depth.checked_sub(1)?)
    }

    #[inline(always)]
    pub(super) fn top_mut(&mut self) -> Option<&mut Segment> {
        self.segments.get_mut(self.depth.checked_sub(1)?)
    }

    /// Enters the innermost span again, which changes nothing, unless the thread unwinds: then segments are noted.
    pub(super) fn enter_again(&mut self, id: RegistryId, key: u64) -> bool {
        let is_it = |top: &Segment| top.id == id.get() && top.key == key;
        self.top().is_some_and(is_it)
            && unmatched() == 0
            && !std::thread::panicking()
            && self.top_mut().is_some_and(Segment::enter_again)
    }

    /// Leaves a span once that is entered, if it was entered again right above its latest segment.
    pub(super) fn leave_again(&mut self, id: RegistryId) -> bool {
        let latest = self.entered_mut().iter_mut().rev().find(|segment| segment.id == id.get());
        latest.is_some_and(Segment::leave_again)
    }

    /// See [`ThreadShared::begin_hook`]. Returns whether there is a new session to take up.
    #[inline(always)]
    pub(super) fn begin_hook(&self) -> bool {
        let Some(sampled) = &self.sampled else { return false };
        sampled.begin_hook();
        sampled.turn() != self.turn
    }

    /// Ends a hook, in the span that is now innermost.
    #[inline(always)]
    pub(super) fn end_hook(&self, now: u64) {
        let (key, samples_from) = self.top().map_or((0, NEVER), |top| (top.key, top.samples_from));
        self.end_hook_in(now, key, samples_from);
    }

    #[inline(always)]
    pub(super) fn end_hook_in(&self, now: u64, key: u64, samples_from: u64) {
        if let Some(sampled) = &self.sampled {
            sampled.set_times(now, samples_from);
            sampled.set_span(key);
        }
    }

    pub(super) fn entered(&self) -> &[Segment] {
        self.segments.get(..self.depth).unwrap_or_default()
    }

    pub(super) fn entered_mut(&mut self) -> &mut [Segment] {
        self.segments.get_mut(..self.depth).unwrap_or_default()
    }

    /// Enters a span at `now`. Returns false if that takes a [`push_slowly`](Self::push_slowly).
    #[inline(always)]
    pub(super) fn push(
        &mut self,
        id: RegistryId,
        slot: &Slot,
        flags: u32,
        now: u64,
        (samples_from, depth): (u64, u32),
    ) -> bool {
        let Some(segment) = self.segments.get_mut(self.depth) else { return false };
        segment.depth = depth;
        segment.id = id.get();
        segment.key = slot.raw_key();
        segment.root = slot.raw_root();
        segment.entered = now;
        segment.samples_from = samples_from;
        segment.unmatched_below = unmatched();
        segment.flags = flags;
        self.depth += 1;
        if segment.unmatched_below != 0 {
            set_unmatched(0);
        }
        true
    }

    /// Like [`push`](Self::push), at any depth, and for a segment whose exit has more to record.
    pub(super) fn push_slowly(
        &mut self,
        id: RegistryId,
        slot: &Slot,
        mut flags: u32,
        now: u64,
        age_and_depth: (u64, u32),
    ) {
        if self.depth >= self.segments.len() {
            let _uncounted = SuspendCounting::begin();
            self.segments.push(Segment::default());
        }
        if std::thread::panicking() {
            flags |= UNWINDING;
        }
        if self.cpu_unknown {
            flags |= CPU_UNKNOWN;
        }
        self.push(id, slot, flags, now, age_and_depth);
    }

    /// Whether the panic that unwinds this thread began inside the latest segment of `id`.
    #[cold]
    pub(super) fn panicked_in(&self, id: RegistryId) -> bool {
        let latest = self.entered().iter().rev().find(|segment| segment.id == id.get());
        latest.is_some_and(|segment| !segment.has(UNWINDING))
    }

    /// The span just pushed was already entered, on some thread. Returns whether on this one, whose first segment counts.
    #[cold]
    pub(super) fn note_nested(&mut self, id: RegistryId) -> bool {
        let below = self.depth.saturating_sub(1);
        let is_nested = self.entered().iter().take(below).any(|segment| segment.id == id.get());
        if is_nested {
            _ = self.top_mut().map(|top| top.set(NESTED));
        }
        is_nested
    }

    /// The [`Segment::depth`] of that span, if it is entered on this thread.
    pub(super) fn depth_of(&self, id: RegistryId) -> Option<u32> {
        let is_it = |segment: &&Segment| segment.id == id.get();
        self.entered().iter().find(is_it).map(|segment| segment.depth)
    }

    #[inline(always)]
    pub(super) fn pop(&mut self, unmatched_below: u32) {
        self.depth -= 1;
        if unmatched_below != 0 {
            // There are unmatched spans above it only if it is left before them.
            set_unmatched(unmatched().saturating_add(unmatched_below));
        }
    }

    /// Moves the latest segment of `id` to the top. Spans need not be left in the reverse order of their enters.
    pub(super) fn bring_to_top(&mut self, id: RegistryId) -> Option<&Segment> {
        let top = self.depth.checked_sub(1)?;
        let at = self.entered().iter().rposition(|segment| segment.id == id.get())?;
        if at < top {
            self.segments.get_mut(at..=top)?.rotate_left(1);
            // The unmatched spans below it are now below the segment that was above it.
            let moved = self.segments.get_mut(top)?;
            let below = std::mem::take(&mut moved.unmatched_below);
            let was_switched = if moved.has(SWITCHED) { SWITCHED } else { 0 };
            let above = self.segments.get_mut(at)?;
            above.unmatched_below += below;
            // When that one is left, the segments below may have to be resumed.
            above.set(was_switched);
        }
        self.top()
    }
}

/// Grows with each call of the allocator that counts.
#[inline(always)]
fn calls(allocated: Allocations) -> u64 {
    allocated.allocations.wrapping_add(allocated.frees)
}

impl Drop for ThreadState {
    fn drop(&mut self) {
        if let Some(sampled) = &self.sampled {
            sampled.end();
        }
    }
}

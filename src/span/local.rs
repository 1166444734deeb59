//! What a thread knows of the spans it is in.

use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::account::{Sure, Tally};
use super::recording::Recording;
use super::slot::Parent;
use super::{RegistryId, SpanKey};
use crate::sys::{self, Clock, Position};

thread_local! {
    /// Set on our own threads, and on those that are past their destructors: nothing of ours
    /// happens there.
    static IGNORED: Cell<bool> = const { Cell::new(false) };

    /// The layer whose state is in `STATE`, or 0, and the unmatched spans that are entered above
    /// its innermost segment. Not in the state, so that entering an unmatched span touches nothing
    /// else.
    static FIRST: Cell<First> = const { Cell::new(First::NONE) };

    /// The state of that layer; taken out while a hook works on it. (A closure over it would not
    /// be inlined, and what it captures would go through memory.) It has no destructor of its own,
    /// which would have to be asked about at each access: `OTHERS` drops it.
    static STATE: Cell<Option<ManuallyDrop<Box<ThreadState>>>> = const { Cell::new(None) };

    static OTHERS: Others = const { Others(RefCell::new(Vec::new())) };
}

#[derive(Clone, Copy)]
struct First {
    layer: u32,
    unmatched: u32,
}

/// The number that no layer has.
const NO_LAYER: u32 = 0;

impl First {
    const NONE: Self = Self { layer: NO_LAYER, unmatched: 0 };
}

/// The states of further layers; nearly always there are none.
#[expect(clippy::vec_box, reason = "they change places with the first one, which is a box")]
struct Others(RefCell<Vec<Box<ThreadState>>>);

impl Drop for Others {
    /// The thread ends.
    fn drop(&mut self) {
        FIRST.set(First::NONE);
        drop(STATE.take().map(ManuallyDrop::into_inner));
        // Destructors that run after this one may still use spans.
        IGNORED.set(true);
    }
}

/// From now on the calling thread is not profiled.
pub(crate) fn ignore_this_thread() {
    IGNORED.set(true);
    forget_this_thread();
}

/// Starts a thread that is not profiled.
pub(crate) fn spawn_ignored(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let run = move || {
        ignore_this_thread();
        run();
    };
    sys::spawn(name, run).map(drop)
}

/// Leaves the calling thread's states as they are, for good. Only stores to memory: it is called in
/// the child of a fork, where what they hold is not ours any more.
pub(crate) fn forget_this_thread() {
    FIRST.set(First::NONE);
    STATE.set(None);
}

/// Whether the calling thread is not profiled, and may wait for none of our threads.
pub(crate) fn is_ignored() -> bool {
    IGNORED.get()
}

/// Takes this thread's state for the layer of that number, if there is one; [`put`] must follow.
///
/// There is none when a hook runs inside a hook, or when the thread is past its destructors.
#[inline(always)]
pub(super) fn take(layer: u32) -> Option<Box<ThreadState>> {
    if FIRST.get().layer != layer {
        make_first(layer)?;
    }
    STATE.take().map(ManuallyDrop::into_inner)
}

/// Puts back what was taken.
#[inline(always)]
pub(super) fn put(state: Box<ThreadState>) {
    STATE.set(Some(ManuallyDrop::new(state)));
}

/// The unmatched spans that are entered above the innermost segment of the first state.
#[inline(always)]
pub(super) fn unmatched() -> u32 {
    FIRST.get().unmatched
}

#[inline(always)]
pub(super) fn set_unmatched(unmatched: u32) {
    FIRST.set(First { unmatched, ..FIRST.get() });
}

/// Counts an unmatched span that is entered (1) or left (-1).
#[inline(always)]
pub(super) fn count_unmatched(layer: u32, change: i32) {
    let first = FIRST.get();
    // Without a state there is nothing to count for: whoever makes one asks the registry.
    if first.layer == layer || (first.layer != NO_LAYER && make_first(layer).is_some()) {
        set_unmatched(unmatched().saturating_add_signed(change));
    }
}

/// Makes the state of that layer the first.
#[cold]
fn make_first(layer: u32) -> Option<()> {
    if FIRST.get().layer == NO_LAYER {
        return None;
    }
    OTHERS
        .try_with(|others| {
            let mut others = others.0.try_borrow_mut().ok()?;
            let place = others.iter_mut().find(|state| state.layer == layer)?;
            let mut first = STATE.take().map(ManuallyDrop::into_inner)?;
            std::mem::swap(place, &mut first);
            let now = First { layer, unmatched: first.unmatched_later };
            place.unmatched_later = FIRST.replace(now).unmatched;
            put(first);
            Some(())
        })
        .ok()
        .flatten()
}

/// Makes `state` this thread's state for its layer, unless the thread is past its destructors or in
/// the middle of a hook. States of layers that are gone are dropped.
pub(super) fn add_state(state: ThreadState) {
    _ = OTHERS.try_with(|others| {
        let first = STATE.take().map(ManuallyDrop::into_inner);
        let before = FIRST.get();
        if first.is_none() && before.layer != NO_LAYER {
            return;
        }
        if let Ok(mut others) = others.0.try_borrow_mut() {
            others.extend(first.map(|mut first| {
                first.unmatched_later = before.unmatched;
                first
            }));
            others.retain(|state| state.life.strong_count() > 0);
        }
        FIRST.set(First { layer: state.layer, unmatched: 0 });
        put(Box::new(state));
    });
}

/// Where raw samples and the scheduler's doings come from.
pub(crate) trait ArmThreads: Send + Sync + Debug {
    /// Begins with the calling thread. Called on its first profiled segment, and again on the
    /// first one after its recording was ended.
    fn arm(&self, clock: &Clock) -> Armed;
}

/// A thread that [`ArmThreads`] has begun with.
#[derive(Debug)]
pub(crate) struct Armed {
    /// What the collector was given; none if the thread is not sampled.
    pub(crate) recording: Option<Arc<Recording>>,
    /// Moves when a sample is taken.
    pub(crate) samples: Position,
    /// By how much it moves, at least.
    pub(crate) sample_size: u64,
    /// Without a recording: whether one may be had later.
    pub(crate) may_retry: bool,
    pub(crate) source: Box<dyn ThreadSource>,
}

/// A source on one thread; called by that thread only, and only where something moved.
pub(crate) trait ThreadSource: Debug {
    /// The samples between two positions, if they can be counted; else their number follows from their
    /// least size.
    fn count_samples(&self, _from: u64, _until: u64) -> Option<u64> {
        None
    }
    /// The thread's CPU clock in nanoseconds.
    fn cpu_ns(&mut self) -> Option<u64> {
        sys::thread_cpu_ns()
    }
    /// What the thread has used since it started.
    fn usage(&mut self) -> Usage;
    /// The collector is to look sooner than it means to.
    fn wake_collector(&self) {}
    /// Changes the time between samples.
    ///
    /// # Errors
    ///
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if it may work at the next try.
    fn set_period_ns(&mut self, period_ns: u64) -> io::Result<()>;
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

/// One enter of a span on this thread. What most enters and exits touch comes first, in one line of cache.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Segment {
    pub(super) id: u64,
    pub(super) key: u64,
    pub(super) root: u64,
    pub(super) entered: u64,
    /// The key of the segment below; 0 if there is none.
    pub(super) key_below: u64,
    /// Unmatched spans that had been entered since the segment below.
    pub(super) unmatched_below: u32,
    /// There is more to say at its end than its length.
    pub(super) has_more: bool,
    /// The span was entered on this thread already: its time is counted there.
    pub(super) is_nested: bool,
    /// The thread was unwinding already: that panic is not of this span.
    pub(super) was_unwinding: bool,
    /// It is one of a span that may be kept: the CPU clock is read more often.
    pub(super) is_old: bool,
    /// `tally` is in use; else it holds what an earlier segment left.
    pub(super) is_tallied: bool,
    pub(super) tally: Tally,
}

const _: () = assert!(std::mem::offset_of!(Segment, tally) <= 64);

/// Segments that have ended since the CPU clock was last read: at most one span for each place, so that a hook
/// finds it without a search.
#[derive(Debug)]
pub(super) struct Unresolved {
    parts: [Part; UNRESOLVED],
    /// A bit for each place.
    used: u64,
}

const UNRESOLVED: usize = u64::BITS as usize;
/// Of the registry's ids: without how often the place was used before. It is given again only when the span
/// that had it is closed, and nobody asks for that any more.
const REGISTRY_PLACE: u64 = (1 << 51) - 1;

/// Segments of one span.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) id: RegistryId,
    /// The span's [`SpanKey`] as a number.
    pub(super) key: u64,
    /// Since the CPU clock was read or the segment began.
    pub(super) ticks: u64,
}

/// A thread's state for one layer.
#[derive(Debug)]
pub(super) struct ThreadState {
    pub(super) layer: u32,
    /// As long as the layer lives.
    life: Weak<()>,
    /// The thread's number, which no other thread has.
    pub(super) thread: u32,
    depth: usize,
    /// As long as the deepest nesting so far; the first `depth` are entered.
    segments: Vec<Segment>,
    /// What [`unmatched`] will be when this state is the first again.
    unmatched_later: u32,
    pub(super) keys: std::ops::Range<u64>,
    /// Spans that this thread has made.
    pub(super) seen: Arc<AtomicU64>,
    pub(super) samples: Position,
    pub(super) recording: Option<Arc<Recording>>,
    /// None before the first profiled segment.
    pub(super) source: Option<Box<dyn ThreadSource>>,
    pub(super) sample_size: u64,
    /// Nobody says when the thread runs.
    pub(super) cpu_unknown: bool,
    pub(super) may_retry: bool,
    pub(super) armed_at: u64,
    /// Where the present stretch of the ring began.
    pub(super) from: u64,
    /// When to look at what time alone changes.
    pub(super) deadline: u64,
    /// Until when the rate stays raised.
    pub(super) calm_at: u64,
    /// The rate may not be what it should be.
    pub(super) must_look_at_rate: bool,
    /// How often the rates that there may be had changed when that was last looked at.
    pub(super) rate_changes: u32,
    /// When the CPU clock was last read.
    pub(super) settled: u64,
    pub(super) cpu_ns: u64,
    pub(super) usage: Usage,
    pub(super) usage_read: u64,
    pub(super) unresolved: Unresolved,
}

/// Nesting that needs no allocation after a thread's first profiled span.
const USUAL_DEPTH: usize = 32;
impl ThreadState {
    pub(super) fn none() -> Self {
        Self {
            layer: NO_LAYER,
            life: Weak::new(),
            thread: 0,
            depth: 0,
            segments: Vec::new(),
            unmatched_later: 0,
            keys: 0..0,
            seen: Arc::default(),
            samples: Position::fixed(),
            recording: None,
            source: None,
            sample_size: 1,
            cpu_unknown: false,
            may_retry: false,
            armed_at: 0,
            from: 0,
            // Long ago: the first enter looks, and arms the thread.
            deadline: 0,
            calm_at: 0,
            must_look_at_rate: false,
            rate_changes: 0,
            settled: 0,
            cpu_ns: 0,
            usage: Usage::NONE,
            usage_read: 0,
            unresolved: Unresolved::NONE,
        }
    }

    pub(super) fn new(layer: u32, life: Weak<()>) -> Self {
        static NEXT_THREAD: AtomicU32 = AtomicU32::new(1);
        let mut state = Self::none();
        state.layer = layer;
        state.life = life;
        state.thread = NEXT_THREAD.fetch_add(1, Ordering::Relaxed);
        state.segments.resize_with(USUAL_DEPTH, Segment::default);
        state
    }

    #[inline(always)]
    pub(super) fn top(&self) -> Option<&Segment> {
        self.segments.get(self.depth.checked_sub(1)?)
    }

    /// See [`Recording::begin_hook`].
    pub(super) fn end_hook(&self) {
        if let Some(recording) = &self.recording {
            recording.set_span(self.top().map_or(0, |top| top.key));
        }
    }

    pub(super) fn entered(&self) -> &[Segment] {
        self.segments.get(..self.depth).unwrap_or_default()
    }

    pub(super) fn entered_mut(&mut self) -> &mut [Segment] {
        self.segments.get_mut(..self.depth).unwrap_or_default()
    }

    #[inline(always)]
    pub(super) fn push(
        &mut self,
        id: RegistryId,
        key: u64,
        root: u64,
        is_old: bool,
        is_judged: bool,
        now: u64,
    ) {
        let key_below = self.top().map_or(0, |top| top.key);
        if self.depth == self.segments.len() {
            self.make_room();
        }
        if let Some(segment) = self.segments.get_mut(self.depth) {
            segment.id = id.get();
            segment.key = key;
            segment.root = root;
            segment.entered = now;
            segment.key_below = key_below;
            segment.unmatched_below = unmatched();
            segment.has_more = self.cpu_unknown || is_old || is_judged;
            segment.is_old = is_old;
            segment.is_nested = false;
            segment.was_unwinding = std::thread::panicking();
            segment.is_tallied = false;
            self.depth += 1;
            set_unmatched(0);
        }
    }

    /// Whether the panic that unwinds this thread began inside the latest segment of `id`.
    #[cold]
    pub(super) fn panicked_in(&self, id: RegistryId) -> bool {
        let latest = self.entered().iter().rev().find(|segment| segment.id == id.get());
        latest.is_some_and(|segment| !segment.was_unwinding)
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
            segment.is_nested = is_nested;
            segment.has_more |= is_nested;
        }
    }

    /// Takes the innermost segment off.
    #[inline(always)]
    pub(super) fn pop(&mut self, unmatched_below: u32) {
        self.depth -= 1;
        // Above it there are some only if it is left before them.
        set_unmatched(unmatched().saturating_add(unmatched_below));
    }

    /// Brings the latest segment of `id` to the top, wherever it is: spans need not be left in the
    /// order in which they were entered.
    pub(super) fn bring_to_top(&mut self, id: RegistryId) -> Option<&Segment> {
        let top = self.depth.checked_sub(1)?;
        let at = self.entered().iter().rposition(|segment| segment.id == id.get())?;
        if at < top {
            self.segments.get_mut(at..=top)?.rotate_left(1);
            // What was below it is now below the one that was above it.
            let below = std::mem::take(&mut self.segments.get_mut(top)?.unmatched_below);
            self.segments.get_mut(at)?.unmatched_below += below;
            let mut key_below = 0;
            for segment in self.entered_mut() {
                segment.key_below = key_below;
                key_below = segment.key;
            }
        }
        self.top()
    }

    pub(super) fn tally_all(&mut self, tally: &Tally) {
        for segment in self.entered_mut() {
            segment.tally(tally);
        }
    }

    /// Bounds the on-CPU time of everything since the CPU clock was last read, now that the thread is
    /// known to have run for `cpu_ns` of it. What belongs to segments left meanwhile goes to `late`.
    pub(super) fn bound(
        &mut self,
        clock: &Clock,
        now: u64,
        cpu_ns: u64,
        mut late: impl FnMut(Part, Sure),
    ) {
        let settled = self.settled;
        let interval_ns = clock.ns(now.saturating_sub(settled));
        for segment in self.entered_mut() {
            let part_ns = clock.ns(now.saturating_sub(segment.entered.max(settled)));
            let sure = Sure::of_part(part_ns, interval_ns, cpu_ns);
            segment.tally(&Tally { sure, ..Tally::default() });
        }
        for part in self.unresolved.take() {
            late(part, Sure::of_part(clock.ns(part.ticks), interval_ns, cpu_ns));
        }
    }
}

impl Unresolved {
    const NONE: Self =
        Self { parts: [Part { id: RegistryId::MIN, key: 0, ticks: 0 }; UNRESOLVED], used: 0 };

    fn place(id: RegistryId) -> usize {
        // The registry's ids are dense on each thread.
        ((id.get() - 1) % UNRESOLVED as u64) as usize
    }

    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Whether a segment of that span can be added, and none of another one that is open is forgotten for it.
    #[inline(always)]
    pub(super) fn has_room(&self, id: RegistryId) -> bool {
        let place = Self::place(id);
        let is_same = |part: &Part| ((part.id.get() - 1) ^ (id.get() - 1)) & REGISTRY_PLACE == 0;
        self.used >> place & 1 == 0 || self.parts.get(place).is_some_and(is_same)
    }

    /// Adds a segment that has ended.
    #[inline(always)]
    pub(super) fn add(&mut self, Part { id, key, ticks }: Part) {
        let place = Self::place(id);
        if let Some(part) = self.parts.get_mut(place) {
            // Of another key: a span that is closed.
            let before =
                if self.used >> place & 1 == 1 && part.key == key { part.ticks } else { 0 };
            *part = Part { id, key, ticks: before + ticks };
            self.used |= 1 << place;
        }
    }

    fn take(&mut self) -> impl Iterator<Item = Part> {
        let used = std::mem::take(&mut self.used);
        let parts = self.parts.iter().enumerate();
        parts.filter(move |(place, _)| used >> place & 1 == 1).map(|(_, part)| *part)
    }

    pub(super) fn clear(&mut self) {
        self.used = 0;
    }
}

impl Segment {
    /// What a span that opens inside this one must know.
    #[inline(always)]
    pub(super) fn as_parent(&self) -> Option<Parent> {
        Some(Parent { id: RegistryId::new(self.id)?, root: SpanKey::new(self.root)? })
    }

    fn tally(&mut self, tally: &Tally) {
        if !self.is_tallied {
            self.is_tallied = true;
            self.has_more = true;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn part(id: u64, key: u64, ticks: u64) -> Part {
        Part { id: RegistryId::new(id).unwrap(), key, ticks }
    }

    #[test]
    fn a_span_in_the_place_of_a_closed_one_has_room() {
        let mut unresolved = Unresolved::NONE;
        unresolved.add(part(1, 7, 10));
        unresolved.add(part(1, 7, 5));
        // The same place of the registry, used once more.
        let next = part(1 | 1 << 51, 8, 3);
        assert!(unresolved.has_room(next.id));
        unresolved.add(next);
        assert!(!unresolved.has_room(RegistryId::new(65).unwrap()), "another one that is open");
        let left: Vec<_> = unresolved.take().map(|part| (part.key, part.ticks)).collect();
        assert_eq!(left, [(8, 3)]);
        assert!(unresolved.is_empty() && unresolved.has_room(RegistryId::new(65).unwrap()));
    }
}

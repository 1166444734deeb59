//! A global allocator that counts what each thread allocates, and samples allocations.
//!
//! A sample falls after a random number of bytes, exponentially distributed, so a block of *s* bytes is sampled with
//! *p* = 1 − e^(−*s*/interval) and represents 1/*p* blocks: the estimator of Horvitz and Thompson.
#![allow(unsafe_code, reason = "implements `GlobalAlloc`")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crossbeam::utils::CachePadded;

use super::live_blocks::{LiveBlocks, TrackedBlock};
use super::live_stack::{LiveStack, Registers, live_registers};
use super::usage::Allocations;
use super::words::WORDS;

/// A global allocator that counts what spans allocate, in front of the program's own:
///
/// ```
/// use tracing_profiling_capture::ProfilingAllocator;
///
/// #[global_allocator]
/// static ALLOCATOR: ProfilingAllocator = ProfilingAllocator::system();
/// ```
///
/// Any other allocator can do the work, for example `ProfilingAllocator::new(tikv_jemallocator::Jemalloc)`, of the type
/// `ProfilingAllocator<tikv_jemallocator::Jemalloc>`.
///
/// The allocator passes each call on unchanged. While a layer profiles spans, it also adds to counters of the calling
/// thread, from which the hooks of spans take the difference: `TimeBreakdown::allocations` of `tracing-profiling`.
/// After random numbers of bytes it looks whether the thread is in a span that is old, and if so copies its stack:
/// `Builder::alloc_sample_interval`. What C code allocates with `malloc` does not pass through it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProfilingAllocator<A = System> {
    allocator: A,
}

impl ProfilingAllocator {
    /// In front of the system's allocator.
    pub const fn system() -> Self {
        Self::new(System)
    }
}

impl<A> ProfilingAllocator<A> {
    /// In front of that allocator.
    pub const fn new(allocator: A) -> Self {
        Self { allocator }
    }
}

/// The sampled blocks in use; made when they are first tracked. In lines of its own, as each free reads it then.
static LIVE_BLOCKS: CachePadded<OnceLock<LiveBlocks>> = CachePadded::new(OnceLock::new());

/// Takes a sample if it is of use to a layer. Returns how far the collector is behind then, from 0 to 1.
pub(super) type TakeSample = fn(&SampledAllocation) -> Option<f64>;

/// The counts of a thread. Each has its own cell, so that a signal handler that allocates can only lose counts. Without
/// a destructor, they can be used as long as the thread allocates.
struct ThreadAllocations {
    /// As those of [`Allocations`].
    counts: [Cell<u64>; Allocations::COUNTS],
    /// The number of allocated bytes with which a sample or a look is due; [`NEVER`] while none may be taken.
    sample_at: Cell<u64>,
    sampling: ThreadSampling,
}

/// What is only touched when a sample is due.
struct ThreadSampling {
    /// The end of the gap, and its mean; 0 if none was chosen.
    due: Cell<u64>,
    gap_bytes: Cell<u64>,
    /// How many samples may be taken, and when that was known.
    samples_left: Cell<f64>,
    refilled: Cell<Option<Instant>>,
    random: Cell<u64>,
}

const NEVER: u64 = u64::MAX;

thread_local! {
    static COUNTS: ThreadAllocations = const {
        ThreadAllocations {
            counts: [const { Cell::new(0) }; Allocations::COUNTS],
            sample_at: Cell::new(0),
            sampling: ThreadSampling {
                due: Cell::new(0),
                gap_bytes: Cell::new(0),
                samples_left: Cell::new(0.0),
                refilled: Cell::new(None),
                random: Cell::new(0),
            },
        }
    };
}

#[inline(always)]
fn add(count: &Cell<u64>, more: u64) {
    count.set(count.get().wrapping_add(more));
}

#[inline(always)]
fn is_counting() -> bool {
    WORDS.users.load(Ordering::Relaxed) != 0
}

#[inline(always)]
fn note_allocated(block: *mut u8, bytes: usize) {
    COUNTS.with(|counts| {
        let [allocated_bytes, allocations, ..] = &counts.counts;
        add(allocated_bytes, bytes as u64);
        add(allocations, 1);
        if allocated_bytes.get() >= counts.sample_at.get() {
            sample(counts, block.addr(), bytes as u64);
        }
    });
}

/// An allocation that is sampled, and that represents others.
#[derive(Debug)]
pub struct SampledAllocation {
    /// How many allocations it represents in the mean.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
    block: usize,
    registers: Option<Registers>,
}

impl SampledAllocation {
    /// Whether this system shows the stacks of threads: samples without would be of no use.
    pub const fn can_be_taken() -> bool {
        CAN_COUNT && cfg!(not(tracing_profiling_unsupported)) && LiveStack::CAN_BE_READ
    }

    /// Samples allocations from now on, with a gap of that many bytes in the mean; 0 for no samples. Threads notice that after
    /// at most 16 gaps, or after a megabyte if they took no samples.
    pub fn take_each(every_bytes: u64, take: TakeSample) {
        if Self::can_be_taken() {
            _ = WORDS.take_sample.set(take);
            WORDS.sample_bytes.store(every_bytes, Ordering::Relaxed);
        }
    }

    /// The stack of the calling thread, up to that many bytes. `None` if it is not the thread's own.
    pub fn stack(&self, most_bytes: usize) -> Option<LiveStack> {
        LiveStack::at_most(self.registers?, most_bytes)
    }

    /// Tracks whether the block is in use, from before the program has it. `None` if that is impossible. Once an allocation.
    pub fn track(&self) -> Option<TrackedBlock> {
        LIVE_BLOCKS.get()?.add(self.block)
    }

    /// Ends that: nothing will ask for the block.
    pub fn untrack(&self) {
        _ = LIVE_BLOCKS.get().map(|live| live.remove(self.block));
    }
}

/// How many samples a thread can take at once, and how many in a second after that. It has longer gaps when fewer than
/// half of them are left, and when the collector is behind.
const MAX_SAMPLES: f64 = 1_000.0;
const SAMPLES_A_SECOND: f64 = 250.0;
/// How much longer its gaps can be.
const MAX_TIMES: f64 = 64.0;
/// After how many usual gaps a longer one is chosen again, since it may not have to be as long any more.
const LOOK_TIMES: u64 = 16;
/// How often a thread that takes no samples looks whether it should, in bytes.
const LOOK_BYTES: u64 = 1 << 20;

/// A sample is due, or a look.
///
/// The mean gap of a thread depends only on what was before the gap, which can be chosen again at any point: the rest of
/// an exponentially distributed gap has the same distribution.
#[cold]
#[inline(never)]
fn sample(counts: &ThreadAllocations, block: usize, bytes: u64) {
    let registers = live_registers!();
    // Nothing in here is sampled, nor what a signal handler allocates that interrupts it.
    counts.sample_at.set(NEVER);
    let uncounted = SuspendCounting::begin();
    let [allocated, ..] = counts.counts.each_ref().map(Cell::get);
    let sampling = &counts.sampling;
    let next = match (WORDS.sample_bytes.load(Ordering::Relaxed), WORDS.take_sample.get()) {
        (0, _) | (_, None) => {
            sampling.gap_bytes.set(0);
            allocated.wrapping_add(LOOK_BYTES)
        }
        (usual_bytes, Some(take)) => {
            if sampling.gap_bytes.get() == 0 {
                sampling.choose_gap(allocated.wrapping_sub(bytes), usual_bytes);
            }
            if sampling.due.get() <= allocated
                && let Some(behind) = take(&sampling.represented(block, bytes, registers))
            {
                sampling.note_taken(behind);
            }
            sampling.choose_gap(allocated, usual_bytes);
            let look = allocated.saturating_add(usual_bytes.saturating_mul(LOOK_TIMES));
            sampling.due.get().min(look)
        }
    };
    drop(uncounted);
    counts.sample_at.set(next);
}

impl ThreadSampling {
    fn represented(
        &self,
        block: usize,
        bytes: u64,
        registers: Option<Registers>,
    ) -> SampledAllocation {
        let probability = -(-(bytes as f64) / self.gap_bytes.get().max(1) as f64).exp_m1();
        let blocks = 1.0 / probability.max(f64::MIN_POSITIVE);
        SampledAllocation {
            // Rounded up or down such that the mean is exact.
            count: (blocks + self.random()) as u64,
            bytes: (bytes as f64 * blocks).round() as u64,
            block,
            registers,
        }
    }

    fn note_taken(&self, behind: f64) {
        let most = MAX_SAMPLES * (1.0 - behind);
        self.samples_left.set((self.samples_left.get() - 1.0).max(0.0).min(most));
    }

    fn refill(&self) {
        let now = Instant::now();
        let since = self.refilled.replace(Some(now)).map(|last| now.duration_since(last));
        let more = since.map_or(MAX_SAMPLES, |since| since.as_secs_f64() * SAMPLES_A_SECOND);
        self.samples_left.set((self.samples_left.get() + more).min(MAX_SAMPLES));
    }

    /// Chooses how many bytes are allocated from `begin` on before the next sample.
    fn choose_gap(&self, begin: u64, usual_bytes: u64) {
        self.refill();
        let half = MAX_SAMPLES / 2.0;
        let times = (half / self.samples_left.get().max(1.0)).clamp(1.0, MAX_TIMES);
        let mean = usual_bytes as f64 * times;
        self.gap_bytes.set(mean as u64);
        let gap = -(1.0 - self.random()).ln() * mean;
        self.due.set(begin.saturating_add(gap as u64).saturating_add(1));
    }

    /// From 0 to less than 1.
    fn random(&self) -> f64 {
        const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
        let state = match self.random.get() {
            0 => self.seed(),
            state => state,
        };
        self.random.set(state.wrapping_add(GAMMA));
        (mixed(state) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Another one in each thread and each process.
    fn seed(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let place = std::ptr::from_ref(self).addr() as u64;
        mixed(place ^ mixed(since.as_nanos() as u64)) | 1
    }
}

/// The finalizer of SplitMix64, whose output for different numbers is as good as random.
pub const fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

#[cfg(all(any(test, feature = "_test"), not(tracing_profiling_unsupported)))]
pub fn sample_bytes() -> u64 {
    WORDS.sample_bytes.load(Ordering::Relaxed)
}

#[inline(always)]
fn forget_block(block: *mut u8) {
    if WORDS.tracks_blocks.load(Ordering::Relaxed)
        && let Some(live) = LIVE_BLOCKS.get()
    {
        live.remove(block.addr());
    }
}

#[inline(always)]
fn note_freed(bytes: usize) {
    COUNTS.with(|counts| {
        let [.., freed_bytes, frees] = &counts.counts;
        add(freed_bytes, bytes as u64);
        add(frees, 1);
    });
}

// SAFETY: each method passes its arguments on to the same method of the allocator and returns its result.
unsafe impl<A: GlobalAlloc> GlobalAlloc for ProfilingAllocator<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Without anything to do afterwards, the call is a jump.
        if !is_counting() {
            // SAFETY: what the caller guarantees.
            return unsafe { self.allocator.alloc(layout) };
        }
        // SAFETY: as above.
        let block = unsafe { self.allocator.alloc(layout) };
        if !block.is_null() {
            note_allocated(block, layout.size());
        }
        block
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !is_counting() {
            // SAFETY: what the caller guarantees.
            return unsafe { self.allocator.alloc_zeroed(layout) };
        }
        // SAFETY: as above.
        let block = unsafe { self.allocator.alloc_zeroed(layout) };
        if !block.is_null() {
            note_allocated(block, layout.size());
        }
        block
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if is_counting() {
            note_freed(layout.size());
            forget_block(block);
        }
        // SAFETY: what the caller guarantees.
        unsafe { self.allocator.dealloc(block, layout) };
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !is_counting() {
            // SAFETY: what the caller guarantees.
            return unsafe { self.allocator.realloc(block, layout, new_size) };
        }
        // Before another thread can be given the same address. If it fails, the block is no longer tracked.
        forget_block(block);
        // SAFETY: as above.
        let new = unsafe { self.allocator.realloc(block, layout, new_size) };
        if !new.is_null() {
            note_freed(layout.size());
            note_allocated(new, new_size);
        }
        new
    }
}

impl TrackedBlock {
    /// Tracks which sampled blocks are in use, or stops that. Only while allocations are counted without a break.
    pub fn track(tracks: bool) {
        if !CAN_COUNT {
            return;
        }
        let _uncounted = SuspendCounting::begin();
        let live = LIVE_BLOCKS.get_or_init(LiveBlocks::new);
        WORDS.tracks_blocks.store(tracks, Ordering::Relaxed);
        live.clear();
    }

    pub fn is_in_use(self) -> bool {
        LIVE_BLOCKS.get().is_some_and(|live| live.contains(self))
    }
}

#[doc(hidden)]
impl Allocations {
    /// What the calling thread has allocated since it began. Meaningful as a difference.
    #[inline(always)]
    pub fn here() -> Self {
        COUNTS.with(|counts| Self::from_counts(counts.counts.each_ref().map(Cell::get)))
    }

    /// One more layer profiles spans.
    pub fn begin_counting() {
        if !CAN_COUNT {
            return;
        }
        WORDS.users.fetch_add(1, Ordering::Relaxed);
        let _uncounted = SuspendCounting::begin();
        let before = Self::here();
        drop(black_box(Box::new(0_u8)));
        if Self::here() != before {
            WORDS.is_installed.store(true, Ordering::Relaxed);
        }
    }

    /// One layer fewer profiles spans.
    pub fn end_counting() {
        WORDS.users.fetch_sub(u32::from(CAN_COUNT), Ordering::Relaxed);
    }

    /// Whether allocations are counted now, and the program's global allocator is a [`ProfilingAllocator`].
    #[inline]
    pub fn are_counted() -> bool {
        is_counting() && WORDS.is_installed.load(Ordering::Relaxed)
    }
}

/// While it lives, what the calling thread allocates is the layer's, and does not count. Nothing is sampled, either.
#[derive(Debug)]
pub struct SuspendCounting {
    before: Allocations,
    sample_at: u64,
}

impl SuspendCounting {
    #[inline]
    pub fn begin() -> Self {
        let sample_at = COUNTS.with(|counts| counts.sample_at.replace(NEVER));
        Self { before: Allocations::here(), sample_at }
    }

    /// Whether one lives on the calling thread.
    #[inline]
    pub fn is_active() -> bool {
        COUNTS.with(|counts| counts.sample_at.get() == NEVER)
    }

    pub fn before(&self) -> Allocations {
        self.before
    }
}

impl Drop for SuspendCounting {
    #[inline]
    fn drop(&mut self) {
        COUNTS.with(|counts| {
            counts.counts.iter().zip(self.before.counts()).for_each(|(count, now)| count.set(now));
            counts.sample_at.set(self.sample_at);
        });
    }
}

/// Whether thread-locals are at hand without an allocation. Elsewhere their first use may allocate.
const CAN_COUNT: bool = cfg!(any(
    all(target_os = "linux", any(target_env = "gnu", target_env = "musl")),
    target_vendor = "apple",
    all(windows, target_env = "msvc"),
));

/// Called in the child of a fork, where no layer profiles spans.
#[allow(dead_code, reason = "only Linux has forks")]
pub(super) fn forget_counting() {
    WORDS.users.store(0, Ordering::Relaxed);
    WORDS.tracks_blocks.store(false, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The global allocator of the tests is another one.
    const ALLOCATOR: ProfilingAllocator = ProfilingAllocator::system();

    fn counted(action: impl FnOnce()) -> [u64; 4] {
        let before = Allocations::here();
        action();
        let Allocations { allocated_bytes, allocations, freed_bytes, frees } =
            Allocations::here().since(before);
        [allocated_bytes, allocations, freed_bytes, frees]
    }

    #[test]
    fn each_call_is_passed_on_and_counted() {
        Allocations::begin_counting();
        let layout = Layout::from_size_align(100, 64).unwrap();
        let larger = Layout::from_size_align(300, 64).unwrap();
        // SAFETY: blocks are used within their layouts, and freed once with the layout that they have.
        unsafe {
            let mut block = std::ptr::null_mut();
            assert_eq!(counted(|| block = ALLOCATOR.alloc(layout)), [100, 1, 0, 0]);
            assert_eq!(block.addr() % 64, 0);
            block.write_bytes(7, 100);
            let grow = || block = ALLOCATOR.realloc(block, layout, 300);
            assert_eq!(counted(grow), [300, 1, 100, 1]);
            assert_eq!(std::slice::from_raw_parts(block, 100), [7; 100]);
            assert_eq!(counted(|| ALLOCATOR.dealloc(block, larger)), [0, 0, 300, 1]);
            assert_eq!(counted(|| block = ALLOCATOR.alloc_zeroed(layout)), [100, 1, 0, 0]);
            assert_eq!(std::slice::from_raw_parts(block, 100), [0; 100]);
            let uncounted = || {
                let _uncounted = SuspendCounting::begin();
                ALLOCATOR.dealloc(block, layout);
            };
            assert_eq!(counted(uncounted), [0; 4]);
        }
        Allocations::end_counting();
    }

    #[test]
    fn a_failed_allocation_does_not_count() {
        Allocations::begin_counting();
        let huge = Layout::from_size_align(isize::MAX as usize - 63, 64).unwrap();
        let layout = Layout::from_size_align(64, 64).unwrap();
        // SAFETY: the block is freed once, with the layout that it has after the failed call.
        unsafe {
            assert_eq!(counted(|| assert!(ALLOCATOR.alloc(huge).is_null())), [0; 4]);
            let block = ALLOCATOR.alloc(layout);
            let grow = || assert!(ALLOCATOR.realloc(block, layout, huge.size()).is_null());
            assert_eq!(counted(grow), [0; 4]);
            ALLOCATOR.dealloc(block, layout);
        }
        Allocations::end_counting();
    }

    /// In a process of its own, since other tests have layers.
    #[test]
    fn counts_stand_still_while_no_layer_profiles() {
        let name = "sys::allocator::tests::counts_stand_still_while_no_layer_profiles";
        if !crate::testing::is_alone(name) {
            return;
        }
        let layout = Layout::from_size_align(100, 64).unwrap();
        // SAFETY: the block is freed once with its layout.
        let pair = || unsafe { ALLOCATOR.dealloc(ALLOCATOR.alloc(layout), layout) };
        assert_eq!(counted(pair), [0; 4]);
        Allocations::begin_counting();
        Allocations::begin_counting();
        Allocations::end_counting();
        assert_eq!(counted(pair), [100, 1, 100, 1]);
        Allocations::end_counting();
        assert_eq!(counted(pair), [0; 4]);
        Allocations::begin_counting();
        forget_counting();
        assert_eq!(counted(pair), [0; 4], "in the child of a fork");
    }

    fn sampling() -> ThreadSampling {
        ThreadSampling {
            due: Cell::new(0),
            gap_bytes: Cell::new(0),
            samples_left: Cell::new(0.0),
            refilled: Cell::new(None),
            random: Cell::new(1),
        }
    }

    /// The weights of samples add up to what was allocated, in the mean, also if gaps are chosen again on the way.
    #[test]
    fn weights_are_unbiased() {
        let sampling = sampling();
        for (size, look) in [1_u64, 100, 4_000, 30_000, 200_000].into_iter().zip([
            1 << 60,
            1 << 60,
            9_000,
            1,
            1 << 60,
        ]) {
            let blocks = 400_000_000 / size.max(1_000);
            let (mut bytes, mut count, mut variance) = (0.0, 0.0, 0.0);
            let (mut allocated, mut looked) = (0, 0);
            sampling.choose_gap(0, 20_000);
            for _ in 0..blocks {
                allocated += size;
                if sampling.due.get() <= allocated {
                    let of = sampling.represented(0, size, None);
                    bytes += of.bytes as f64;
                    count += of.count as f64;
                    variance += of.bytes as f64 * (of.bytes as f64 - size as f64);
                } else if allocated - looked < look {
                    continue;
                }
                looked = allocated;
                sampling.choose_gap(allocated, 20_000);
            }
            let truth = (blocks * size) as f64;
            // Half of the last digit of each weight is rounded.
            assert!((bytes - truth).abs() < 4.0 * f64::sqrt(variance) + count, "{size}: {bytes}");
            assert!((count * size as f64 / bytes - 1.0).abs() < 0.02, "{size}: {count}");
        }
    }

    #[test]
    fn gaps_are_longer_while_the_collector_is_behind() {
        let sampling = sampling();
        sampling.choose_gap(0, 1_000);
        let gap_after = |behind| {
            sampling.note_taken(behind);
            // No time passes for what is compared.
            sampling.refilled.set(Some(Instant::now() + std::time::Duration::from_secs(3_600)));
            sampling.choose_gap(0, 1_000);
            sampling.gap_bytes.get()
        };
        assert_eq!(gap_after(0.0), 1_000);
        assert_eq!(gap_after(0.9), 5_000);
        assert_eq!(gap_after(1.0), 64_000);
        // Some seconds later they are as before, however many there were.
        (0..100_000).for_each(|_| sampling.note_taken(0.0));
        sampling.refilled.set(Instant::now().checked_sub(std::time::Duration::from_secs(3)));
        sampling.choose_gap(0, 1_000);
        assert_eq!(sampling.gap_bytes.get(), 1_000);
    }
}

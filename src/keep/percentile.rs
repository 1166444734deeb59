//! How long spans of one name usually take.

use std::iter;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam::utils::CachePadded;
use hdrhistogram::Histogram;
use parking_lot::Mutex;

use crate::sys::{STRIPES, own_stripe};

/// The sketches for the spans of one name and rule: one for each combination of values of their shown fields, so that the
/// requests of a route are compared with each other.
#[derive(Debug)]
pub(super) struct Sketches {
    /// For spans without shown fields.
    others: Sketch,
    /// By the hash of the values. Read without a lock, so nothing is removed; a sketch that is in use no more is used for
    /// other values.
    by_values: Box<[Chain]>,
    in_use: Arc<SketchesInUse>,
    is_forgotten: AtomicBool,
}

/// The sketches for values that are in use in a layer.
pub(super) type SketchesInUse = Mutex<Vec<Arc<SketchOfValues>>>;

type Chain = OnceLock<Arc<SketchOfValues>>;

#[derive(Debug)]
pub(super) struct SketchOfValues {
    /// [`UNUSED`] if it is not in use. A span that is added while this changes may be added to the sketch of others.
    values: AtomicU64,
    sketch: Sketch,
    next: Chain,
}

const UNUSED: u64 = u64::MAX;
/// Most names have few values.
const CHAINS: u64 = 32;

impl Sketches {
    pub(super) fn new(millionths: u32, in_use: &Arc<SketchesInUse>) -> Self {
        Self {
            others: Sketch::new(millionths),
            by_values: (0..CHAINS).map(|_| Chain::new()).collect(),
            in_use: Arc::clone(in_use),
            is_forgotten: AtomicBool::new(false),
        }
    }

    /// Frees the memory, because the rule is no longer in force: no span is rare any more. A rule that comes back begins
    /// with new sketches.
    pub(super) fn forget(&self) {
        self.is_forgotten.store(true, Ordering::Relaxed);
        self.others.forget();
        self.give_back_places();
    }

    fn give_back_places(&self) {
        let mut in_use = self.in_use.lock();
        for known in self.by_values.iter().flat_map(Self::in_chain) {
            if known.values.swap(UNUSED, Ordering::Relaxed) != UNUSED {
                in_use.retain(|one| !ptr::eq(Arc::as_ptr(one), known));
            }
            known.sketch.forget();
        }
    }

    /// Whether the sketch for spans without values holds memory.
    pub(super) fn is_in_use(&self) -> bool {
        self.others.is_in_use()
    }

    /// Adds a span with the hash of its values, if it has any. Returns whether it took longer than the percentile of the
    /// spans before it with the same values.
    pub(super) fn add(&self, values: Option<u64>, wall_ns: u64, now_ns: u64) -> bool {
        if self.is_forgotten.load(Ordering::Relaxed) {
            return false;
        }
        let sketch =
            values.map_or(&self.others, |values| self.sketch_of(values.min(UNUSED - 1), now_ns));
        sketch.add(wall_ns, now_ns)
    }

    fn in_chain(chain: &Chain) -> impl Iterator<Item = &SketchOfValues> {
        iter::successors(chain.get(), |known| known.next.get()).map(Arc::as_ref)
    }

    fn sketch_of(&self, values: u64, now_ns: u64) -> &Sketch {
        let number = usize::try_from(values % CHAINS).unwrap_or(0);
        let Some(chain) = self.by_values.get(number) else { return &self.others };
        let is_it = |known: &&SketchOfValues| known.values.load(Ordering::Relaxed) == values;
        match Self::in_chain(chain).find(is_it) {
            Some(known) => &known.sketch,
            None => self.add_sketch_of(values, chain, now_ns),
        }
    }

    #[cold]
    fn add_sketch_of<'a>(&'a self, values: u64, mut chain: &'a Chain, now_ns: u64) -> &'a Sketch {
        let mut in_use = self.in_use.lock();
        let mut unused = None;
        while let Some(known) = chain.get() {
            match known.values.load(Ordering::Relaxed) {
                // Another thread has added it just now.
                same if same == values => return &known.sketch,
                UNUSED => unused = Some(known),
                _ => {}
            }
            chain = &known.next;
        }
        if in_use.len() >= MOST_SKETCHES {
            evict(&mut in_use, now_ns);
        }
        let new = unused.unwrap_or_else(|| {
            let values = AtomicU64::new(UNUSED);
            let sketch = Sketch::new(self.others.millionths);
            chain.get_or_init(|| Arc::new(SketchOfValues { values, sketch, next: Chain::new() }))
        });
        new.values.store(values, Ordering::Relaxed);
        in_use.push(Arc::clone(new));
        &new.sketch
    }
}

/// Takes the sketch out of use that the fewest spans were added to lately, the oldest of several. One of values that come
/// back again and again stays, however many others occur once.
fn evict(in_use: &mut Vec<Arc<SketchOfValues>>, now_ns: u64) {
    let used = in_use.iter().map(|known| known.sketch.used(now_ns)).enumerate();
    if let Some((least, _)) = used.min_by_key(|(at, used)| (*used, *at)) {
        let known = in_use.remove(least);
        known.values.store(UNUSED, Ordering::Relaxed);
        known.sketch.forget();
    }
}

impl Drop for Sketches {
    fn drop(&mut self) {
        self.give_back_places();
    }
}

/// How long spans of one name and rule took in the last five to ten minutes.
///
/// There are two windows, and one of them fills. Old spans are forgotten a window at a time, and once a window has
/// passed, the limit always covers at least a whole one.
///
/// Where such spans are frequent, threads do not add each of them to the windows, but [`BUFFERED`] at a time, and once a
/// second all that there are, so that they do not write to the same memory at each close.
#[derive(Debug)]
struct Sketch {
    /// In parts of a million.
    millionths: u32,
    /// Spans that must be counted before the limit applies.
    warm_up: u64,
    /// The percentile in nanoseconds, or [`UNKNOWN`].
    limit_ns: AtomicU64,
    /// By the part of the threads; made when the spans are found to be frequent on several of them.
    buffers: OnceLock<Box<[CachePadded<Mutex<Buffer>>]>>,
    /// `None` before the first span, and while the rule is not in force.
    windows: CachePadded<Mutex<Option<Windows>>>,
}

#[derive(Debug)]
struct Windows {
    filling: Histogram<u32>,
    full: Histogram<u32>,
    began_ns: u64,
    /// The percentile in nanoseconds, once known, and when it was computed.
    limit_ns: Option<u64>,
    computed_ns: u64,
    /// Spans until the limit is computed again.
    until_next: u32,
    /// When all buffers were last emptied.
    gathered_ns: u64,
    /// The part of the thread that added the last span, and whether the limit was last computed by another one.
    last_part: usize,
    is_shared: bool,
}

/// The lengths of spans that a part of the threads has not added to the windows, in nanoseconds.
#[derive(Debug)]
struct Buffer {
    lengths_ns: [u64; BUFFERED],
    count: usize,
    emptied_ns: u64,
}

const UNKNOWN: u64 = u64::MAX;
/// With this number, a buffer and its lock take four lines.
const BUFFERED: usize = 29;
/// How old the limit can be, and how long a span can be missing from it.
const LONGEST_BUFFERED_NS: u64 = 1_000_000_000;

const WINDOW_NS: u64 = 5 * 60 * 1_000_000_000;
/// Sketches of a layer, and as many again for values of fields; each takes up to some 20 KiB, and 16 more for buffers.
pub(super) const MOST_SKETCHES: usize = 256;
/// The expected number of spans above the percentile before it is meaningful.
const EXPECTED_ABOVE: u64 = 10;
const LEAST_WARM_UP: u64 = 100;
/// Spans between two evaluations of the histograms, which take microseconds.
const BETWEEN: u32 = 64;
const MILLION: u64 = 1_000_000;
/// Histograms count microseconds, to within 1 %.
const UNIT_NS: u64 = 1_000;
const DIGITS: u8 = 2;
const LONGEST: u64 = 24 * 60 * 60 * 1_000_000;

impl Buffer {
    fn new(now_ns: u64) -> Self {
        Self { lengths_ns: [0; BUFFERED], count: 0, emptied_ns: now_ns }
    }

    /// Adds a length. Returns false if it has to be emptied instead.
    #[inline]
    fn add(&mut self, wall_ns: u64, now_ns: u64) -> bool {
        let is_old = now_ns.saturating_sub(self.emptied_ns) >= LONGEST_BUFFERED_NS;
        match self.lengths_ns.get_mut(self.count).filter(|_| !is_old) {
            Some(place) => {
                *place = wall_ns;
                self.count += 1;
                true
            }
            None => false,
        }
    }

    fn lengths_ns(&self) -> &[u64] {
        self.lengths_ns.get(..self.count).unwrap_or_default()
    }
}

impl Sketch {
    /// A sketch of that percentile, in parts of a million.
    fn new(millionths: u32) -> Self {
        let above = MILLION.saturating_sub(u64::from(millionths)).max(1);
        let warm_up = (EXPECTED_ABOVE * MILLION / above).max(LEAST_WARM_UP);
        let (limit_ns, buffers) = (AtomicU64::new(UNKNOWN), OnceLock::new());
        Self { millionths, warm_up, limit_ns, buffers, windows: CachePadded::default() }
    }

    /// Frees the memory, because the rule is no longer in force.
    fn forget(&self) {
        let mut windows = self.windows.lock();
        self.limit_ns.store(UNKNOWN, Ordering::Relaxed);
        *windows = None;
    }

    /// How many spans were added in the present window and the one before it.
    fn used(&self, now_ns: u64) -> u64 {
        let Some(windows) = self.windows.try_lock() else { return u64::MAX };
        let Some(Windows { filling, full, began_ns, .. }) = &*windows else { return 0 };
        match now_ns.saturating_sub(*began_ns) / WINDOW_NS {
            0 => filling.len() + full.len(),
            1 => filling.len(),
            _ => 0,
        }
    }

    /// Whether it holds memory.
    fn is_in_use(&self) -> bool {
        self.windows.lock().is_some()
    }

    /// Adds a span that took `wall_ns`. Returns whether it took longer than the percentile of the spans before it.
    fn add(&self, wall_ns: u64, now_ns: u64) -> bool {
        let limit_ns = self.limit_ns.load(Ordering::Relaxed);
        let buffers = self.buffers.get().filter(|_| limit_ns != UNKNOWN);
        let Some(buffer) = buffers.and_then(|buffers| buffers.get(own_stripe())) else {
            return self.add_to_windows(&[], wall_ns, now_ns);
        };
        let mut buffer = buffer.lock();
        if buffer.add(wall_ns, now_ns) {
            return wall_ns > limit_ns;
        }
        let before = mem::replace(&mut *buffer, Buffer::new(now_ns));
        // The lock of the windows comes before those of buffers.
        drop(buffer);
        self.add_to_windows(before.lengths_ns(), wall_ns, now_ns)
    }

    /// The same, after spans that this thread had not added yet.
    fn add_to_windows(&self, before_ns: &[u64], wall_ns: u64, now_ns: u64) -> bool {
        let mut windows = self.windows.lock();
        if windows.is_none() {
            *windows = Windows::new(now_ns);
        }
        // Without memory for histograms, no span is rare.
        let Some(windows) = &mut *windows else { return false };
        windows.record(before_ns);
        self.gather(windows, now_ns);
        windows.turn(now_ns);
        if windows.filling.len() + windows.full.len() < self.warm_up {
            windows.limit_ns = None;
        } else if windows.limit_ns.is_none() || windows.until_next == 0 {
            windows.limit_ns = windows.limit_ns(self.millionths);
            windows.until_next = BETWEEN;
            let since = now_ns.saturating_sub(mem::replace(&mut windows.computed_ns, now_ns));
            if mem::take(&mut windows.is_shared) && since < LONGEST_BUFFERED_NS {
                let buffer = |_| CachePadded::new(Mutex::new(Buffer::new(now_ns)));
                self.buffers.get_or_init(|| (0..STRIPES).map(buffer).collect());
            }
        }
        windows.record(&[wall_ns]);
        windows.is_shared |= mem::replace(&mut windows.last_part, own_stripe()) != own_stripe();
        // All threads read it.
        let limit_ns = windows.limit_ns.unwrap_or(UNKNOWN);
        if self.limit_ns.load(Ordering::Relaxed) != limit_ns {
            self.limit_ns.store(limit_ns, Ordering::Relaxed);
        }
        wall_ns > limit_ns
    }

    /// Once a second, adds what threads have not added yet: those that close no more spans of this name never would.
    fn gather(&self, windows: &mut Windows, now_ns: u64) {
        if now_ns.saturating_sub(windows.gathered_ns) < LONGEST_BUFFERED_NS {
            return;
        }
        windows.gathered_ns = now_ns;
        for buffer in self.buffers.get().into_iter().flatten() {
            let before = mem::replace(&mut *buffer.lock(), Buffer::new(now_ns));
            windows.record(before.lengths_ns());
        }
    }
}

impl Windows {
    fn new(now_ns: u64) -> Option<Self> {
        let histogram = || Histogram::new(DIGITS).ok();
        Some(Self {
            filling: histogram()?,
            full: histogram()?,
            began_ns: now_ns,
            limit_ns: None,
            computed_ns: now_ns,
            until_next: 0,
            gathered_ns: now_ns,
            last_part: own_stripe(),
            is_shared: false,
        })
    }

    fn record(&mut self, lengths_ns: &[u64]) {
        for length_ns in lengths_ns {
            // Fails only if a counter is saturated, and then the count stays.
            _ = self.filling.record((length_ns / UNIT_NS).min(LONGEST));
            self.until_next = self.until_next.saturating_sub(1);
        }
    }

    fn turn(&mut self, now_ns: u64) {
        let passed = now_ns.saturating_sub(self.began_ns) / WINDOW_NS;
        if passed == 0 {
            return;
        }
        std::mem::swap(&mut self.filling, &mut self.full);
        self.filling.reset();
        if passed > 1 {
            self.full.reset();
        }
        self.began_ns += passed * WINDOW_NS;
        self.until_next = 0;
    }

    fn limit_ns(&self, millionths: u32) -> Option<u64> {
        let mut both = self.filling.clone();
        both.add(&self.full).ok()?;
        let limit = both.value_at_quantile(f64::from(millionths) / MILLION as f64);
        // The largest value in the same bucket, so that every longer span is certainly above the percentile.
        Some(both.highest_equivalent(limit).saturating_add(1).saturating_mul(UNIT_NS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Spans of 1 to 1000 ms, in an order that visits each of them once.
    fn lengths() -> impl Iterator<Item = u64> {
        (0..1_000_u64).map(|number| (number * 617 % 1_000 + 1) * MS)
    }

    #[test]
    fn no_span_is_rare_before_the_warm_up() {
        let sketch = Sketch::new(990_000);
        assert!(lengths().all(|wall_ns| !sketch.add(wall_ns, 0)));
        assert!(sketch.add(10_000 * MS, 0));
    }

    #[test]
    fn the_share_of_spans_above_the_limit_matches_the_percentile() {
        for (millionths, expected) in [(990_000, 10), (900_000, 100), (500_000, 500)] {
            let sketch = Sketch::new(millionths);
            lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
            let above = lengths().filter(|wall_ns| sketch.add(*wall_ns, 0)).count();
            // The histogram rounds by up to 1 %.
            assert!(above <= expected && above + expected / 10 + 5 >= expected, "{above}");
        }
    }

    #[test]
    fn spans_are_compared_with_those_of_the_same_values() {
        let total = Arc::<SketchesInUse>::default();
        let sketches = Sketches::new(990_000, &total);
        let (get, put) = (Some(1), Some(2));
        lengths().for_each(|wall_ns| _ = sketches.add(get, wall_ns, 0));
        lengths().for_each(|wall_ns| _ = sketches.add(put, wall_ns / 1_000, 0));
        lengths().for_each(|wall_ns| _ = sketches.add(None, wall_ns * 10, 0));
        let is_rare = |values, ms| sketches.add(values, ms * MS, 0);
        assert_eq!([is_rare(get, 900), is_rare(get, 1_100)], [false, true]);
        assert_eq!([is_rare(put, 2), is_rare(None, 5_000)], [true, false]);
        assert_eq!(total.lock().len(), 2);
        sketches.forget();
        assert_eq!(total.lock().len(), 0);
        assert!(!sketches.is_in_use() && !is_rare(get, 100_000));
        drop(sketches);
        assert_eq!(total.lock().len(), 0);
    }

    #[test]
    fn the_number_of_sketches_is_limited() {
        let total = Arc::<SketchesInUse>::default();
        let sketches = Sketches::new(990_000, &total);
        for number in 0..MOST_SKETCHES as u64 + 100 {
            sketches.add(Some(number), MS, 0);
        }
        assert_eq!(total.lock().len(), MOST_SKETCHES);
        let has_memory = |known: &&SketchOfValues| known.sketch.is_in_use();
        let all = sketches.by_values.iter().flat_map(Sketches::in_chain);
        assert_eq!(all.filter(has_memory).count(), MOST_SKETCHES);
    }

    #[test]
    fn values_that_come_back_are_compared_after_a_flood_of_others() {
        let total = Arc::<SketchesInUse>::default();
        let sketches = Sketches::new(990_000, &total);
        let flooded = Sketches::new(990_000, &total);
        let mut invented = (1_000..).map(Some);
        let mut flood = |count| {
            for sketches in [&sketches, &flooded] {
                for values in invented.by_ref().take(count) {
                    assert!(!sketches.add(values, 9_000 * MS, 0));
                }
            }
        };
        flood(2 * MOST_SKETCHES);
        // Two routes, while invented values go on.
        for wall_ns in lengths() {
            for _ in 0..2 {
                sketches.add(Some(1), wall_ns, 0);
                sketches.add(Some(2), wall_ns / 1_000, 0);
            }
            flood(1);
        }
        let is_rare = |values, ms| sketches.add(values, ms * MS, 0);
        assert_eq!([is_rare(Some(1), 900), is_rare(Some(1), 1_100)], [false, true]);
        assert!(is_rare(Some(2), 2), "of its own route");
        assert_eq!(total.lock().len(), MOST_SKETCHES);
        // What is used no more makes room.
        assert_eq!(evicted_after(&sketches, 3 * WINDOW_NS), 1);
        drop((sketches, flooded));
        assert_eq!(total.lock().len(), 0);
    }

    /// How many places a new value takes then.
    fn evicted_after(sketches: &Sketches, now_ns: u64) -> usize {
        let before: Vec<_> = sketches.in_use.lock().iter().map(Arc::as_ptr).collect();
        sketches.add(Some(7), MS, now_ns);
        let after: Vec<_> = sketches.in_use.lock().iter().map(Arc::as_ptr).collect();
        before.iter().filter(|one| !after[..after.len() - 1].contains(one)).count()
    }

    #[test]
    fn a_higher_percentile_needs_a_longer_warm_up() {
        let sketch = Sketch::new(999_000);
        for _ in 0..9 {
            lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        }
        assert!(!sketch.add(10_000 * MS, 0));
        lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        assert!(sketch.add(10_000 * MS, 0));
    }

    #[test]
    fn old_spans_are_forgotten() {
        let sketch = Sketch::new(900_000);
        lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        // The service is ten times faster now.
        let faster = || lengths().map(|wall_ns| wall_ns / 10);
        let above = |now_ns| faster().filter(|wall_ns| sketch.add(*wall_ns, now_ns)).count();
        assert_eq!(above(WINDOW_NS), 0);
        above(2 * WINDOW_NS);
        assert!(above(2 * WINDOW_NS) > 50);
        // After a pause, the windows are empty.
        assert!(!sketch.add(u64::MAX, 9 * WINDOW_NS));
        assert!(sketch.is_in_use());
        sketch.forget();
        assert!(!sketch.is_in_use());
    }

    /// Runs it on another thread, whose part is another one.
    fn elsewhere<R: Send>(action: impl FnOnce() -> R + Send) -> R {
        let here = own_stripe();
        let mut action = Some(action);
        // Other tests take numbers at the same time.
        loop {
            let action = &mut action;
            let run = move || (own_stripe() != here).then(|| action.take().map(|action| action()));
            let ran = std::thread::scope(|scope| scope.spawn(run).join().unwrap());
            if let Some(ran) = ran.flatten() {
                return ran;
            }
        }
    }

    fn counted(sketch: &Sketch) -> u64 {
        sketch.windows.lock().as_ref().map_or(0, |both| both.filling.len() + both.full.len())
    }

    /// A sketch of the median that two threads have made frequent, and how many spans it has.
    fn frequent() -> (Sketch, u64) {
        let sketch = Sketch::new(500_000);
        let add = || lengths().for_each(|wall_ns| _ = sketch.add(wall_ns, 0));
        add();
        assert!(sketch.buffers.get().is_none(), "one thread");
        elsewhere(add);
        assert!(sketch.buffers.get().is_some());
        (sketch, 2_000)
    }

    #[test]
    fn threads_do_not_share_the_windows_of_frequent_spans() {
        let (sketch, _) = frequent();
        // Each could be in the middle of a long evaluation.
        let windows = sketch.windows.lock();
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let empty = sketch.buffers.get().unwrap().get(own_stripe()).unwrap();
                *empty.lock() = Buffer::new(0);
                let verdicts = [400, 600].map(|ms| sketch.add(ms * MS, 0));
                assert_eq!(verdicts, [false, true]);
                done.send(()).unwrap();
            });
            let is_done = is_done.recv_timeout(std::time::Duration::from_secs(60)).is_ok();
            drop(windows);
            assert!(is_done, "it does not wait for the windows");
        });
    }

    #[test]
    fn no_span_of_frequent_ones_is_lost() {
        let (sketch, mut all) = frequent();
        for round in 1..=5 {
            let now_ns = round * LONGEST_BUFFERED_NS;
            for each in 0..40 {
                elsewhere(|| (0..each).for_each(|_| _ = sketch.add(MS, now_ns)));
                all += each;
            }
            assert!(counted(&sketch) + STRIPES as u64 * BUFFERED as u64 > all);
            // The thread that closes the next one later adds what the others have left, and its own.
            sketch.add(MS, now_ns + LONGEST_BUFFERED_NS);
            all += 1;
            assert_eq!(counted(&sketch), all, "{round}");
        }
        // Also when the window in which they closed is over.
        elsewhere(|| (0..7).for_each(|_| _ = sketch.add(MS, 6 * LONGEST_BUFFERED_NS)));
        sketch.add(MS, WINDOW_NS);
        let windows = sketch.windows.lock();
        let windows = windows.as_ref().unwrap();
        assert_eq!((windows.full.len(), windows.filling.len()), (all + 7, 1));
    }

    #[test]
    fn the_limit_of_frequent_spans_follows_and_ends() {
        let (sketch, _) = frequent();
        let above = |times: u64, now_ns: u64| {
            let add = |wall_ns: u64| sketch.add(wall_ns * times, now_ns);
            elsewhere(|| lengths().filter(|wall_ns| add(*wall_ns)).count())
        };
        assert!((450..=505).contains(&above(1, 0)), "half of them");
        above(3, WINDOW_NS);
        above(3, WINDOW_NS);
        assert!(above(3, 2 * WINDOW_NS) < 700, "it follows");
        // After a pause, no span is rare, whichever thread closes it, and with an empty buffer, too.
        for _ in 0..LEAST_WARM_UP - 1 {
            assert!(!elsewhere(|| sketch.add(u64::MAX, 9 * WINDOW_NS)));
        }
    }

    /// Threads that find a new value at the same time find the same sketch.
    #[test]
    fn a_sketch_of_values_is_added_once() {
        let total = Arc::<SketchesInUse>::default();
        let sketches = Sketches::new(500_000, &total);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    (0..1_000).for_each(|number| _ = sketches.add(Some(number % 100), MS, 0))
                });
            }
        });
        assert_eq!(total.lock().len(), 100);
        let all = sketches.by_values.iter().flat_map(Sketches::in_chain);
        let each: Vec<_> =
            all.map(|known| known.sketch.windows.lock().as_ref().unwrap().filling.len()).collect();
        assert_eq!((each.len(), each.iter().sum::<u64>()), (100, 4_000));
    }
}

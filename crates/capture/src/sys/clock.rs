//! Wall time that is cheap enough to read in every span hook.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::platform::{self, TickSource};

#[cfg(any(test, feature = "_test"))]
mod scripted;

/// Counts ticks of the CPU's time stamp counter if the kernel itself uses it, else ns of `CLOCK_MONOTONIC_RAW`.
///
/// `CLOCK_MONOTONIC_RAW` is a fixed multiple of the counter, since the kernel never slews it. So the measured rate becomes
/// more accurate over time, and the kernel's records, which have that clock, are on the same time line.
#[derive(Debug)]
pub struct Clock {
    source: TickSource,
    /// Nanoseconds per tick, times 2³².
    rate: AtomicU64,
    anchor: Anchor,
    /// Locked by those that change the rate and the anchor; no other thread waits for it.
    measurement: Mutex<Measurement>,
    #[cfg(any(test, feature = "_test"))]
    by_hand: Option<std::sync::Arc<AtomicU64>>,
}

#[derive(Clone, Copy, Debug)]
struct Measurement {
    first: Pair,
    is_certain: bool,
}

/// A recent pair, from which other times are extrapolated.
///
/// Hooks read it, so readers write nothing: a lock of theirs would be a line that all threads write. And they never wait
/// for a writer, which may be preempted, or may not exist in the child of a fork. So there are two copies, of which one is
/// whole at any time: what Linux calls a latch.
#[derive(Debug)]
struct Anchor {
    /// The number of changes. Odd while the copy for even numbers is written.
    changes: AtomicU64,
    copies: [[AtomicU64; 2]; 2],
}

impl Anchor {
    fn new(Pair { ticks, raw_ns }: Pair) -> Self {
        let copy = || [AtomicU64::new(ticks), AtomicU64::new(raw_ns)];
        Self { changes: AtomicU64::new(0), copies: [copy(), copy()] }
    }

    #[inline]
    fn load(&self) -> Pair {
        let [even, odd] = &self.copies;
        loop {
            let before = self.changes.load(Ordering::Acquire);
            let [ticks, raw_ns] = if before.is_multiple_of(2) { even } else { odd };
            let pair = Pair {
                ticks: ticks.load(Ordering::Relaxed),
                raw_ns: raw_ns.load(Ordering::Relaxed),
            };
            fence(Ordering::Acquire);
            // Otherwise another change has begun since then, and this copy may have been written.
            if self.changes.load(Ordering::Relaxed) == before {
                return pair;
            }
        }
    }

    /// One at a time.
    fn store(&self, pair: Pair) {
        for copy in &self.copies {
            self.begin_copy();
            Self::write(copy, pair);
        }
    }

    /// From now on, readers take the other copy.
    fn begin_copy(&self) {
        // Release: the copy that was written last is whole. The fence: this is visible before what follows is written.
        self.changes.store(self.changes.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        fence(Ordering::Release);
    }

    fn write([to_ticks, to_raw_ns]: &[AtomicU64; 2], Pair { ticks, raw_ns }: Pair) {
        to_ticks.store(ticks, Ordering::Relaxed);
        to_raw_ns.store(raw_ns, Ordering::Relaxed);
    }
}

/// A moment on both time lines.
#[derive(Clone, Copy, Debug)]
struct Pair {
    ticks: u64,
    raw_ns: u64,
}

const ONE: u64 = 1 << 32;

/// Long enough that read errors of some 50 ns stay below 50 ppm.
const FIRST_MEASUREMENT: Duration = Duration::from_millis(1);

/// How long after that the rate is measured again. Each time, conversions of earlier readings move a little.
const REFINED_AGAIN: Duration = Duration::from_secs(1);

/// Two readings this far apart determine the rate to a few ppm.
const CERTAIN: Duration = Duration::from_millis(100);

impl Default for Clock {
    /// Takes about a millisecond if a counter's rate must be measured.
    fn default() -> Self {
        let source = platform::tick_source();
        let first = Pair::take(source);
        let clock = Self {
            source,
            rate: AtomicU64::new(ONE),
            anchor: Anchor::new(first),
            measurement: Mutex::new(Measurement { first, is_certain: false }),
            #[cfg(any(test, feature = "_test"))]
            by_hand: None,
        };
        if source.needs_rate() {
            std::thread::sleep(FIRST_MEASUREMENT);
            clock.refine_at(Pair::take(source));
        }
        clock
    }
}

impl Clock {
    #[inline(always)]
    pub fn now(&self) -> u64 {
        #[cfg(any(test, feature = "_test"))]
        if let Some(now) = &self.by_hand {
            return now.load(Ordering::Relaxed);
        }
        platform::read_ticks(self.source)
    }

    #[inline]
    pub fn ns(&self, ticks: u64) -> u64 {
        scale(ticks, self.rate.load(Ordering::Relaxed))
    }

    /// The length of `duration` in ticks; `u64::MAX` if it does not fit.
    pub fn ticks(&self, duration: Duration) -> u64 {
        let rate = u128::from(self.rate.load(Ordering::Relaxed).max(1));
        let ticks = duration.as_nanos().saturating_mul(u128::from(ONE)) / rate;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }

    /// The reading of `CLOCK_MONOTONIC_RAW` at the moment `ticks`.
    pub fn raw_ns(&self, ticks: u64) -> u64 {
        let anchor = self.anchor.load();
        if ticks >= anchor.ticks {
            anchor.raw_ns.saturating_add(self.ns(ticks - anchor.ticks))
        } else {
            anchor.raw_ns.saturating_sub(self.ns(anchor.ticks - ticks))
        }
    }

    /// Measures the counter's rate since this clock was created, or since the system last resumed from suspend.
    ///
    /// Does nothing if that was done a moment ago.
    pub fn refine(&self) {
        #[cfg(any(test, feature = "_test"))]
        if self.by_hand.is_some() {
            return;
        }
        if !self.source.needs_rate() {
            return;
        }
        let known = *self.measurement.lock().unwrap_or_else(PoisonError::into_inner);
        let again = if known.is_certain { REFINED_AGAIN } else { CERTAIN };
        let ago_ns = platform::monotonic_raw_ns().saturating_sub(self.anchor.load().raw_ns);
        if ago_ns >= again.as_nanos() as u64 {
            self.refine_at(Pair::take(self.source));
        }
    }

    fn refine_at(&self, now: Pair) {
        let mut measurement = self.measurement.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.rate.load(Ordering::Relaxed);
        if measurement.is_certain && self.anchor.load().is_far_from(now, known) {
            // During suspend the kernel's clock stands still, while the counter may continue or restart.
            measurement.first = now;
        } else if let Some(rate) = measurement.first.rate_until(now) {
            self.rate.store(rate, Ordering::Relaxed);
        } else {
            return;
        }
        measurement.is_certain |=
            now.raw_ns.saturating_sub(measurement.first.raw_ns) >= CERTAIN.as_nanos() as u64;
        self.anchor.store(now);
    }

    /// What to add to a `CLOCK_MONOTONIC_RAW` reading to get nanoseconds since the Unix epoch.
    ///
    /// Measured now: for the past, the error is the slew since then, at most 0.5 ms per second, and usually a hundredth.
    pub fn unix_offset_ns(&self) -> i128 {
        narrowest(|| {
            let before = platform::monotonic_raw_ns();
            let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let width = platform::monotonic_raw_ns().saturating_sub(before);
            let unix = i128::try_from(unix.as_nanos()).unwrap_or(i128::MAX);
            (width, unix - i128::from(before + width / 2))
        })
    }
}

impl Pair {
    fn rate_until(self, now: Self) -> Option<u64> {
        rate(now.ticks.saturating_sub(self.ticks), now.raw_ns.saturating_sub(self.raw_ns))
    }

    /// Whether `now` cannot follow this pair at that rate, within 0.1 %.
    fn is_far_from(self, now: Self, rate: u64) -> bool {
        if now.raw_ns.saturating_sub(self.raw_ns) < CERTAIN.as_nanos() as u64 {
            return now.ticks < self.ticks;
        }
        self.rate_until(now).is_none_or(|found| found.abs_diff(rate) > rate / 1_000)
    }

    fn take(source: TickSource) -> Self {
        narrowest(|| {
            let before = platform::read_ticks(source);
            let raw_ns = platform::monotonic_raw_ns();
            let width = platform::read_ticks(source).saturating_sub(before);
            (width, Self { ticks: before + width / 2, raw_ns })
        })
    }
}

/// The narrowest of three readings, each with its width.
fn narrowest<T>(read: impl Fn() -> (u64, T)) -> T {
    let narrower = |best: (u64, T), next: (u64, T)| if next.0 < best.0 { next } else { best };
    narrower(narrower(read(), read()), read()).1
}

fn scale(ticks: u64, rate: u64) -> u64 {
    ((u128::from(ticks) * u128::from(rate)) >> 32) as u64
}

/// Nanoseconds per tick times 2³², if both lengths are long enough.
fn rate(ticks: u64, ns: u64) -> Option<u64> {
    if ticks < 1_000 || ns < 1_000 {
        return None;
    }
    u64::try_from((u128::from(ns) << 32) / u128::from(ticks)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_of_a_three_gigahertz_counter() {
        let rate = rate(3_000_000_000, 1_000_000_000).unwrap();
        assert_eq!(scale(3_000_000, rate), 999_999);
        assert!(scale(3_000_000_000_000, rate).abs_diff(1_000_000_000_000) < 1_000);
    }

    #[test]
    fn too_short_a_time_gives_no_rate() {
        assert_eq!(rate(999, 1_000_000), None);
        assert_eq!(rate(1_000_000, 999), None);
    }

    #[test]
    fn long_times_do_not_overflow() {
        assert_eq!(scale(u64::MAX, ONE), u64::MAX);
        let clock = Clock::default();
        assert_eq!(clock.ticks(Duration::MAX), u64::MAX);
    }

    #[test]
    fn suspend_does_not_change_the_rate() {
        const SECOND: u64 = 1_000_000_000;
        let clock = Clock::nanoseconds();
        let at = |ticks, raw_ns| clock.refine_at(Pair { ticks, raw_ns });
        let rate = || clock.rate.load(Ordering::Relaxed);
        // The first short measurement was off by a factor of two.
        clock.rate.store(ONE / 6, Ordering::Relaxed);
        at(3 * SECOND, SECOND);
        assert!(rate().abs_diff(ONE / 3) <= 1);
        // The counter continued for an hour of suspend.
        at(10_800 * SECOND, 2 * SECOND);
        assert!(rate().abs_diff(ONE / 3) <= 1);
        assert_eq!(clock.raw_ns(10_800 * SECOND), 2 * SECOND);
        // The counter restarted.
        at(3 * SECOND, 3 * SECOND);
        at(6 * SECOND, 4 * SECOND);
        assert!(rate().abs_diff(ONE / 3) <= 1);
        assert!(clock.raw_ns(9 * SECOND).abs_diff(5 * SECOND) <= 1);
        // A small drift is followed.
        at(9 * SECOND + 3_000, 5 * SECOND);
        assert!(rate() < ONE / 3 && rate() > ONE / 3 - 5_000);
    }

    /// The writer can stand still between any two of its steps, and each reading is a pair that was stored.
    #[test]
    fn a_reading_does_not_wait_for_a_writer() {
        let [first, second] = [(1, 10), (2, 20)].map(|(ticks, raw_ns)| Pair { ticks, raw_ns });
        let anchor = Anchor::new(first);
        let [even, odd] = &anchor.copies;
        let read = || anchor.load().raw_ns;
        for (copy, before, after) in [(even, first, first), (odd, second, second)] {
            anchor.begin_copy();
            assert_eq!(read(), before.raw_ns);
            copy[0].store(second.ticks, Ordering::Relaxed);
            assert_eq!(read(), after.raw_ns, "half a copy");
            copy[1].store(second.raw_ns, Ordering::Relaxed);
            assert_eq!(read(), after.raw_ns);
        }
        // Nor for one that was in the middle of a measurement when the process forked.
        let clock = Clock::nanoseconds();
        let _measures = clock.measurement.lock().unwrap();
        assert_eq!(clock.raw_ns(7), 7);
    }

    #[test]
    fn readings_are_whole_while_the_anchor_moves() {
        let changes = if cfg!(miri) { 50 } else { 50_000_u64 };
        let anchor = Anchor::new(Pair { ticks: 0, raw_ns: 0 });
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut last = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        let Pair { ticks, raw_ns } = anchor.load();
                        assert_eq!(raw_ns, 3 * ticks);
                        assert!(ticks >= last, "it does not go back");
                        last = ticks;
                    }
                });
            }
            (0..changes).for_each(|ticks| anchor.store(Pair { ticks, raw_ns: 3 * ticks }));
            is_over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn follows_the_kernel_clock() {
        let clock = Clock::default();
        std::thread::sleep(CERTAIN);
        clock.refine();
        for _ in 0..100 {
            let before = platform::monotonic_raw_ns();
            let reading = clock.raw_ns(clock.now());
            let after = platform::monotonic_raw_ns();
            // The reading lies between the kernel's two, however long the thread is preempted.
            let slack = 20_000;
            assert!(
                reading + slack >= before && reading <= after + slack,
                "{before} {reading} {after}"
            );
        }
    }
}

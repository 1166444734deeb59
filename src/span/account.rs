//! The sums behind the time breakdown of a span.
//!
//! The thread's CPU clock takes 515 ns to read, so segments between two reads have bounds. Of an interval in which a
//! thread ran for *c*, a span that had *w* of it, and others *o*, ran for at least `max(0, c - o)` and at most `min(c,
//! w)`. The account is the middle, with its error. The next read adds to the slot, which may belong to another span by
//! then, so sums carry a part of their span's key.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};

use once_cell::race::OnceBox;

use super::SpanKey;
use crate::facts::TimeBreakdown;
use crate::facts::{Allocations, Usage};
use crate::sys::{Clock, SuspendCounting};

/// Sums of [`Usage`] over threads.
#[derive(Debug, Default)]
struct UsageSums([AtomicU64; Usage::COUNTS]);

impl UsageSums {
    fn add(&self, more: &Usage) {
        for (sum, more) in self.0.iter().zip(more.counts()) {
            if more != 0 {
                sum.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    fn get(&self) -> Usage {
        let mut sums = self.0.iter();
        let next = |_| sums.next().map_or(0, |sum| sum.load(Ordering::Relaxed));
        Usage::from_counts(array::from_fn(next))
    }

    fn clear(&self) {
        self.0.iter().for_each(|sum| sum.store(0, Ordering::Relaxed));
    }
}

/// The account of an open span, with time that threads have not added to it yet.
pub(crate) fn with_inside(account: TimeBreakdown, time: InsideTime) -> TimeBreakdown {
    if account.is_cpu_time_unknown {
        return account;
    }
    TimeBreakdown {
        subtree_on_cpu_ns: account.subtree_on_cpu_ns + time.on_ns + time.unsure_ns / 2,
        subtree_on_cpu_error_ns: account.subtree_on_cpu_error_ns + time.unsure_ns.div_ceil(2),
        subtree_sampled_ns: account.subtree_sampled_ns + time.sampled_ns,
        ..account
    }
}

/// The account of an open span, with its current segment added. Since it began, the thread certainly ran for `ran_ns`
/// and certainly did not run for `waited_ns`; the rest is unknown. The thread was sampled for the last `sampled_ns` of
/// its CPU time.
pub(crate) fn with_segment(
    account: TimeBreakdown,
    segment_ns: u64,
    ran_ns: u64,
    waited_ns: u64,
    sampled_ns: u64,
) -> TimeBreakdown {
    if account.is_cpu_time_unknown {
        return account;
    }
    // The times of the thread can be those of other spans on its stack.
    let known_ns = ran_ns.saturating_add(waited_ns);
    let LowerBounds { on_ns: ran_ns, off_ns: waited_ns, sampled_ns } = match known_ns > segment_ns {
        true => LowerBounds::of_part(segment_ns, known_ns, ran_ns, sampled_ns),
        false => {
            LowerBounds { on_ns: ran_ns, off_ns: waited_ns, sampled_ns: sampled_ns.min(ran_ns) }
        }
    };
    let unsure_ns = segment_ns - ran_ns - waited_ns;
    let (on_cpu_ns, error_ns) = (ran_ns + unsure_ns / 2, unsure_ns.div_ceil(2));
    TimeBreakdown {
        on_cpu_ns: account.on_cpu_ns + on_cpu_ns,
        on_cpu_error_ns: account.on_cpu_error_ns + error_ns,
        off_cpu_ns: account.off_cpu_ns + waited_ns + (unsure_ns - unsure_ns / 2),
        sampled_ns: account.sampled_ns + sampled_ns,
        subtree_on_cpu_ns: account.subtree_on_cpu_ns + on_cpu_ns,
        subtree_on_cpu_error_ns: account.subtree_on_cpu_error_ns + error_ns,
        subtree_sampled_ns: account.subtree_sampled_ns + sampled_ns,
        ..account
    }
}

/// The parts of a time in which a thread certainly ran and certainly did not run. The rest is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LowerBounds {
    pub(crate) on_ns: u64,
    pub(crate) off_ns: u64,
    /// The part of `on_ns` in which it certainly was sampled.
    pub(crate) sampled_ns: u64,
}

impl LowerBounds {
    /// The certain times of a part of `part_ns` of an interval of `interval_ns`. The thread ran for `cpu_ns` of the
    /// interval, and was sampled for the last `sampled_ns` of its CPU time.
    pub(crate) fn of_part(part_ns: u64, interval_ns: u64, cpu_ns: u64, sampled_ns: u64) -> Self {
        let outside_ns = interval_ns.saturating_sub(part_ns);
        let on_ns = cpu_ns.saturating_sub(outside_ns).min(part_ns);
        let sampled_ns = sampled_ns.saturating_sub(outside_ns).min(on_ns);
        Self { on_ns, off_ns: part_ns.saturating_sub(cpu_ns), sampled_ns }
    }

    pub(crate) fn add(&mut self, more: Self) {
        self.on_ns += more.on_ns;
        self.off_ns += more.off_ns;
        self.sampled_ns += more.sampled_ns;
    }
}

/// The time of segments of descendants, on threads that are not in the span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InsideTime {
    pub(crate) on_ns: u64,
    pub(crate) unsure_ns: u64,
    pub(crate) sampled_ns: u64,
}

impl InsideTime {
    /// Of a segment that took `segment_ns`.
    pub(crate) fn of(segment_ns: u64, sure: LowerBounds) -> Self {
        let sure_ns = sure.on_ns.saturating_add(sure.off_ns);
        // At least 1, so that the sum shows that there was such a segment, even if it was entirely off-CPU.
        let unsure_ns = segment_ns.saturating_sub(sure_ns).max(1);
        Self { on_ns: sure.on_ns, unsure_ns, sampled_ns: sure.sampled_ns }
    }

    pub(crate) fn add(&mut self, more: Self) {
        self.on_ns += more.on_ns;
        self.unsure_ns += more.unsure_ns;
        self.sampled_ns += more.sampled_ns;
    }
}

/// The times and counts of all threads that were in a span.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    sure_on_ns: Tagged,
    sure_off_ns: Tagged,
    sure_sampled_ns: Tagged,
    /// Of descendants on threads that are not in this span. This span is open while they are, so the sums need no tag.
    inside_on_ns: AtomicU64,
    inside_unsure_ns: AtomicU64,
    inside_sampled_ns: AtomicU64,
    await_ns: Tagged,
    delay_ns: Tagged,
    awaits: Tagged,
    /// For how long threads in the span were in others on their stacks, in ticks, and since when one is, or 0.
    suspended: AtomicU64,
    suspended_since: AtomicU64,
    /// What few spans have: made when first needed, left to the next in the slot. No lock, which a fork could leave held.
    usage: OnceBox<UsageSums>,
}

impl Counts {
    /// Adds the times of a thread that is in the span. The span therefore cannot close concurrently.
    pub(crate) fn add(&self, key: SpanKey, sure: LowerBounds) {
        self.sure_on_ns.add(key, sure.on_ns);
        self.sure_off_ns.add(key, sure.off_ns);
        self.sure_sampled_ns.add(key, sure.sampled_ns);
    }

    pub(crate) fn add_usage(&self, more: &Usage) {
        let _uncounted = SuspendCounting::begin();
        self.usage.get_or_init(Box::default).add(more);
    }

    /// Adds segments of descendants, on threads that are not in this span.
    pub(crate) fn add_inside(&self, time: InsideTime) {
        add(&self.inside_on_ns, time.on_ns);
        add(&self.inside_unsure_ns, time.unsure_ns);
        add(&self.inside_sampled_ns, time.sampled_ns);
    }

    /// Adds the times of a thread that has left the span. The span may be closed, and its slot reused.
    pub(crate) fn add_late(&self, key: SpanKey, sure: LowerBounds) {
        self.sure_on_ns.add_late(key, sure.on_ns);
        self.sure_off_ns.add_late(key, sure.off_ns);
        self.sure_sampled_ns.add_late(key, sure.sampled_ns);
    }

    /// Adds idle time that is explained. The span may be closed, and its slot reused.
    pub(crate) fn add_await(&self, key: SpanKey, [await_ns, delay_ns, awaits]: [u64; 3]) {
        self.await_ns.add_late(key, await_ns);
        self.delay_ns.add_late(key, delay_ns);
        self.awaits.add_late(key, awaits);
    }

    pub(crate) fn suspend(&self, now: u64) {
        self.suspended_since.store(now, Ordering::Relaxed);
    }

    pub(crate) fn resume(&self, ticks: u64) {
        self.suspended_since.store(0, Ordering::Relaxed);
        add(&self.suspended, ticks);
    }

    /// For how long it was suspended until `now`.
    pub(crate) fn suspended(&self, now: u64) -> u64 {
        let current = match get(&self.suspended_since) {
            0 => 0,
            since => now.saturating_sub(since),
        };
        get(&self.suspended).saturating_add(current)
    }

    pub(crate) fn clear(&self) {
        let sure = [&self.sure_on_ns, &self.sure_off_ns, &self.sure_sampled_ns].map(|sum| &sum.0);
        let awaits = [&self.await_ns, &self.delay_ns, &self.awaits].map(|sum| &sum.0);
        let inside = [&self.inside_on_ns, &self.inside_unsure_ns, &self.inside_sampled_ns];
        let suspended = [&self.suspended, &self.suspended_since];
        let times = sure.into_iter().chain(awaits).chain(inside).chain(suspended);
        times.for_each(|time| time.store(0, Ordering::Relaxed));
        self.usage.get().into_iter().for_each(|usage| usage.clear());
    }

    pub(crate) fn account(
        &self,
        clock: &Clock,
        key: SpanKey,
        wall: u64,
        entered: u64,
        idle: u64,
    ) -> TimeBreakdown {
        let entered_ns = clock.ns(entered);
        let sure_on_ns = self.sure_on_ns.get(key).min(entered_ns);
        let sure_off_ns = self.sure_off_ns.get(key).min(entered_ns - sure_on_ns);
        // The middle of the bounds has the smallest possible error.
        let unsure_ns = entered_ns - sure_on_ns - sure_off_ns;
        let on_cpu_ns = sure_on_ns + unsure_ns / 2;
        let inside_unsure_ns = get(&self.inside_unsure_ns);
        let (error_ns, sampled_ns) =
            (unsure_ns.div_ceil(2), self.sure_sampled_ns.get(key).min(sure_on_ns));
        let idle_ns = clock.ns(idle);
        let delay_ns = self.delay_ns.get(key).min(idle_ns);
        TimeBreakdown {
            wall_ns: clock.ns(wall),
            on_cpu_ns,
            on_cpu_error_ns: error_ns,
            sampled_ns,
            subtree_on_cpu_ns: on_cpu_ns + get(&self.inside_on_ns) + inside_unsure_ns / 2,
            subtree_on_cpu_error_ns: error_ns + inside_unsure_ns.div_ceil(2),
            subtree_sampled_ns: sampled_ns + get(&self.inside_sampled_ns),
            off_cpu_ns: entered_ns - on_cpu_ns,
            idle_ns,
            await_ns: self.await_ns.get(key).min(idle_ns - delay_ns),
            delay_ns,
            awaits: self.awaits.get(key),
            usage: self.usage.get().map_or_else(Usage::default, |usage| usage.get()),
            // The slot has these.
            after_last_exit_ns: 0,
            other_spans_ns: 0,
            own_allocations: None,
            allocations: None,
            is_cpu_time_unknown: false,
        }
    }
}

/// What was allocated in a span. Only hooks of threads in it, or that close spans inside it, add to it.
#[derive(Debug, Default)]
pub(crate) struct AllocationSums {
    /// Only the thread that opened the span writes it, so no locked instruction is needed.
    of_owner: [AtomicU64; 4],
    of_others: [AtomicU64; 4],
    inside: [AtomicU64; 4],
    /// The span may have to be kept if it allocates more bytes, or more often. Only set if its rule judges that.
    limits: [AtomicU64; 2],
}

impl AllocationSums {
    pub(crate) fn add_of_owner(&self, more: Allocations) {
        let more = counts(more);
        for (sum, more) in self.of_owner.iter().zip(more) {
            sum.store(get(sum).wrapping_add(more), Ordering::Relaxed);
        }
    }

    pub(crate) fn add_of_others(&self, more: Allocations) {
        add_allocations(&self.of_others, more);
    }

    pub(crate) fn add_inside(&self, more: Allocations) {
        add_allocations(&self.inside, more);
    }

    #[inline(always)]
    pub(crate) fn set_limits(&self, bytes: u64, allocations: u64) {
        let [most_bytes, most_allocations] = &self.limits;
        most_bytes.store(bytes, Ordering::Relaxed);
        most_allocations.store(allocations, Ordering::Relaxed);
    }

    pub(crate) fn exceed_limits(&self) -> bool {
        let [bytes, allocations] = self.limits.each_ref().map(get);
        let all = self.all();
        all.allocated_bytes > bytes || all.allocations > allocations
    }

    pub(crate) fn own(&self) -> Allocations {
        get_allocations(&self.of_owner).and(get_allocations(&self.of_others))
    }

    /// Returns the allocations of the span and of the spans inside it.
    pub(crate) fn all(&self) -> Allocations {
        self.own().and(get_allocations(&self.inside))
    }

    pub(crate) fn clear(&self) {
        let sums = self.of_owner.iter().chain(&self.of_others).chain(&self.inside);
        sums.for_each(|sum| sum.store(0, Ordering::Relaxed));
    }
}

fn counts(of: Allocations) -> [u64; 4] {
    [of.allocated_bytes, of.allocations, of.freed_bytes, of.frees]
}

fn add_allocations(sums: &[AtomicU64; 4], more: Allocations) {
    sums.iter().zip(counts(more)).for_each(|(sum, more)| add(sum, more));
}

fn get_allocations(sums: &[AtomicU64; 4]) -> Allocations {
    let [allocated_bytes, allocations, freed_bytes, frees] = sums.each_ref().map(get);
    Allocations { allocated_bytes, allocations, freed_bytes, frees }
}

fn add(to: &AtomicU64, value: u64) {
    if value != 0 {
        to.fetch_add(value, Ordering::Relaxed);
    }
}

fn get(from: &AtomicU64) -> u64 {
    from.load(Ordering::Relaxed)
}

/// A sum that belongs to one span: 16 bits of the span's key and 48 bits of nanoseconds. Values are capped at 47 bits
/// (39 hours). Late amounts of another span are not added.
#[derive(Debug, Default)]
struct Tagged(AtomicU64);

const TAG_SHIFT: u32 = 48;
const VALUE: u64 = (1 << TAG_SHIFT) - 1;

impl Tagged {
    fn tag(key: SpanKey) -> u64 {
        // Never 0, the tag of a cleared sum.
        (key.get() | 1 << (u64::BITS - TAG_SHIFT - 1)) << TAG_SHIFT
    }

    /// For a thread that is in the span. Replaces whatever an earlier span left here.
    fn add(&self, key: SpanKey, value: u64) {
        if value == 0 {
            return;
        }
        let add = |sum| Some(Self::sum(key, sum).unwrap_or(Self::tag(key)) + value.min(VALUE / 2));
        _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// For a thread that has left the span.
    fn add_late(&self, key: SpanKey, value: u64) {
        if value == 0 {
            return;
        }
        let add = |sum| {
            let sum = if sum == 0 { Some(Self::tag(key)) } else { Self::sum(key, sum) };
            sum.map(|sum| sum + value.min(VALUE / 2))
        };
        _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// The sum if it belongs to this span, capped so that another value can be added.
    fn sum(key: SpanKey, sum: u64) -> Option<u64> {
        (sum & !VALUE == Self::tag(key)).then_some(sum & !VALUE | (sum & VALUE).min(VALUE / 2))
    }

    fn get(&self, key: SpanKey) -> u64 {
        let sum = self.0.load(Ordering::Relaxed);
        if sum & !VALUE == Self::tag(key) { sum & VALUE } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64) -> SpanKey {
        SpanKey::new(number).unwrap()
    }

    fn sure_parts(part_ns: u64, interval_ns: u64, cpu_ns: u64) -> (u64, u64) {
        let LowerBounds { on_ns, off_ns, .. } =
            LowerBounds::of_part(part_ns, interval_ns, cpu_ns, 0);
        (on_ns, off_ns)
    }

    fn sure(on_ns: u64, off_ns: u64) -> LowerBounds {
        LowerBounds { on_ns, off_ns, sampled_ns: 0 }
    }

    #[test]
    fn a_thread_that_always_ran_was_on_cpu_in_each_part() {
        assert_eq!(sure_parts(30, 100, 100), (30, 0));
        assert_eq!(sure_parts(100, 100, 100), (100, 0));
    }

    #[test]
    fn a_thread_that_never_ran_was_off_cpu_in_each_part() {
        assert_eq!(sure_parts(30, 100, 0), (0, 30));
    }

    #[test]
    fn the_rest_is_unknown() {
        // On-CPU for 40 of 100; all of the 30 can be on-CPU, or none.
        assert_eq!(sure_parts(30, 100, 40), (0, 0));
        // 80 of 100: at least 10 of the 30 are on-CPU.
        assert_eq!(sure_parts(30, 100, 80), (10, 0));
        // 20 of 100: at least 10 of the 30 are off-CPU.
        assert_eq!(sure_parts(30, 100, 20), (0, 10));
        // The two clocks may disagree slightly.
        assert_eq!(sure_parts(100, 100, 101), (100, 0));
        assert_eq!(sure_parts(101, 100, 100), (100, 1));
    }

    #[test]
    fn bounds_contain_the_true_time_for_every_placement() {
        for interval in 1..12_u64 {
            for cpu in 0..=interval {
                for part in 0..=interval {
                    let (on, off) = sure_parts(part, interval, cpu);
                    let most = cpu.min(part);
                    let least = cpu.saturating_sub(interval - part);
                    assert_eq!((on, part - off), (least, most), "{interval} {cpu} {part}");
                }
            }
        }
    }

    #[test]
    fn the_sampled_part_has_a_lower_bound() {
        let sampled =
            |part_ns, sampled_ns| LowerBounds::of_part(part_ns, 100, 100, sampled_ns).sampled_ns;
        assert_eq!([sampled(100, 100), sampled(100, 40), sampled(100, 0)], [100, 40, 0]);
        // The sampled time can be the first 30 of the 100.
        assert_eq!([sampled(30, 100), sampled(30, 70), sampled(30, 71)], [30, 0, 1]);
    }

    #[test]
    fn unknown_time_is_split_in_half() {
        let clock = Clock::nanoseconds();
        let account = Counts::default().account(&clock, key(1), 1_500, 1_000, 500);
        assert_eq!((account.on_cpu_ns, account.on_cpu_error_ns), (500, 500));
        assert_eq!((account.off_cpu_ns, account.idle_ns, account.wall_ns), (500, 500, 1_500));
    }

    #[test]
    fn the_account_is_the_middle_of_its_bounds() {
        let counts = Counts::default();
        counts.add(key(1), sure(20, 0));
        counts.add_late(key(1), LowerBounds { on_ns: 40, off_ns: 10, sampled_ns: 0 });
        let account = counts.account(&Clock::nanoseconds(), key(1), 100, 100, 0);
        assert_eq!((account.on_cpu_ns, account.on_cpu_error_ns), (75, 15));
        assert_eq!(account.off_cpu_ns, 25);
    }

    #[test]
    fn neither_time_exceeds_the_time_entered() {
        let counts = Counts::default();
        counts.add(key(1), sure(60, u64::MAX));
        counts.add(key(1), sure(0, u64::MAX));
        let account = counts.account(&Clock::nanoseconds(), key(1), 100, 100, 0);
        assert_eq!((account.on_cpu_ns, account.off_cpu_ns, account.on_cpu_error_ns), (60, 40, 0));
    }

    #[test]
    fn late_amounts_of_another_span_are_not_added() {
        let late = LowerBounds { on_ns: 40, off_ns: 40, sampled_ns: 0 };
        let on_cpu_ns = |counts: &Counts| {
            let account = counts.account(&Clock::nanoseconds(), key(2), 1_000, 1_000, 0);
            account.on_cpu_ns - account.on_cpu_error_ns
        };
        let counts = Counts::default();
        counts.add(key(2), sure(100, 0));
        counts.add_late(key(1), late);
        assert_eq!(on_cpu_ns(&counts), 100);
        // The late amount arrives first.
        let counts = Counts::default();
        counts.add_late(key(1), late);
        assert_eq!(on_cpu_ns(&counts), 0);
        counts.add(key(2), sure(100, 0));
        assert_eq!(on_cpu_ns(&counts), 100);
    }
}

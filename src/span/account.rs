//! The sums behind the time breakdown of a span.
//!
//! The thread's CPU clock takes 515 ns to read, so segments between two reads have bounds. Of an interval in which a
//! thread ran for *c*, a span that had *w* of it, and others *o*, ran for at least `max(0, c - o)` and at most `min(c,
//! w)`. The account is the middle, with its error. The next read adds to the slot, which may belong to another span by
//! then, so sums carry a part of their span's key.

use std::sync::atomic::{AtomicU64, Ordering};

use once_cell::race::OnceBox;

use super::SpanKey;
use crate::facts::{Allocations, TimeBreakdown, Usage};
use crate::sys::{Clock, SuspendCounting};

/// Sums to which several threads add.
#[derive(Debug)]
pub(crate) struct Sums<const N: usize>([AtomicU64; N]);

impl<const N: usize> Default for Sums<N> {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; N])
    }
}

impl<const N: usize> Sums<N> {
    pub(crate) fn add(&self, more: [u64; N]) {
        for (sum, more) in self.0.iter().zip(more) {
            if more != 0 {
                sum.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    /// Adds on the only thread that does so, without a locked instruction.
    pub(crate) fn add_alone(&self, more: [u64; N]) {
        for (sum, more) in self.0.iter().zip(more) {
            sum.store(sum.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
        }
    }

    pub(crate) fn get(&self) -> [u64; N] {
        self.0.each_ref().map(|sum| sum.load(Ordering::Relaxed))
    }

    pub(crate) fn clear(&self) {
        self.0.iter().for_each(|sum| sum.store(0, Ordering::Relaxed));
    }
}

/// The account of an open span, with time that threads have not added to it yet.
pub(crate) fn with_inside(account: TimeBreakdown, time: InsideTime) -> TimeBreakdown {
    if account.is_cpu_time_unknown {
        return account;
    }
    let [on_ns, unsure_ns, sampled_ns] = time;
    TimeBreakdown {
        subtree_on_cpu_ns: account.subtree_on_cpu_ns + on_ns + unsure_ns / 2,
        subtree_on_cpu_error_ns: account.subtree_on_cpu_error_ns + unsure_ns.div_ceil(2),
        subtree_sampled_ns: account.subtree_sampled_ns + sampled_ns,
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
    let own = TimeBreakdown {
        on_cpu_ns: account.on_cpu_ns + ran_ns + unsure_ns / 2,
        on_cpu_error_ns: account.on_cpu_error_ns + unsure_ns.div_ceil(2),
        off_cpu_ns: account.off_cpu_ns + waited_ns + (unsure_ns - unsure_ns / 2),
        sampled_ns: account.sampled_ns + sampled_ns,
        ..account
    };
    with_inside(own, [ran_ns, unsure_ns, sampled_ns])
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

/// The time of segments of descendants, on threads that are not in the span, in nanoseconds: in which the threads
/// certainly ran, of which that is unknown, and the part of the first that was sampled.
pub(crate) type InsideTime = [u64; 3];

/// The time of a segment that took `segment_ns`.
pub(crate) fn inside_time(segment_ns: u64, sure: LowerBounds) -> InsideTime {
    let sure_ns = sure.on_ns.saturating_add(sure.off_ns);
    // At least 1, so that the sum shows that there was such a segment, even if it was entirely off-CPU.
    [sure.on_ns, segment_ns.saturating_sub(sure_ns).max(1), sure.sampled_ns]
}

/// The times and counts of all threads that were in a span.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// [`LowerBounds`].
    sure: Tagged,
    /// What was awaited and the delays, in nanoseconds, and the number of awaits.
    awaited: Tagged,
    /// Of descendants on threads that are not in this span. This span is open while they are, so the sums need no tag.
    pub(crate) inside: Sums<3>,
    /// For how long threads in the span were in others on their stacks, in ticks, and since when one is, or 0.
    suspended: AtomicU64,
    suspended_since: AtomicU64,
    /// What few spans have: made when first needed, left to the next in the slot. No lock, which a fork could leave held.
    usage: OnceBox<Sums<{ Usage::COUNTS }>>,
}

impl Counts {
    /// Adds the times of a thread that is in the span, which therefore cannot close concurrently, or that has left it. In
    /// that case the span may be closed, and its slot reused.
    pub(crate) fn add(&self, key: SpanKey, sure: LowerBounds, has_left: bool) {
        self.sure.add(key, [sure.on_ns, sure.off_ns, sure.sampled_ns], has_left);
    }

    /// Adds idle time that is explained. The span may be closed, and its slot reused.
    pub(crate) fn add_await(&self, key: SpanKey, more: [u64; 3]) {
        self.awaited.add(key, more, true);
    }

    pub(crate) fn add_usage(&self, more: Usage) {
        let _uncounted = SuspendCounting::begin();
        self.usage.get_or_init(Box::default).add(more.counts());
    }

    /// A thread that is in the span goes on in one that is not inside it.
    pub(crate) fn suspend(&self, now: u64) {
        self.suspended_since.store(now, Ordering::Relaxed);
    }

    /// The thread comes back to the span after `ticks`.
    pub(crate) fn resume(&self, ticks: u64) {
        self.suspended_since.store(0, Ordering::Relaxed);
        self.suspended.fetch_add(ticks, Ordering::Relaxed);
    }

    /// For how long it was suspended until `now`.
    pub(crate) fn suspended(&self, now: u64) -> u64 {
        let current = match self.suspended_since.load(Ordering::Relaxed) {
            0 => 0,
            since => now.saturating_sub(since),
        };
        self.suspended.load(Ordering::Relaxed).saturating_add(current)
    }

    pub(crate) fn clear(&self) {
        self.sure.0.clear();
        self.awaited.0.clear();
        self.inside.clear();
        self.suspended.store(0, Ordering::Relaxed);
        self.suspended_since.store(0, Ordering::Relaxed);
        self.usage.get().into_iter().for_each(Sums::clear);
    }

    /// The account, without what only the slot knows.
    pub(crate) fn account(
        &self,
        clock: &Clock,
        key: SpanKey,
        wall: u64,
        entered: u64,
        idle: u64,
    ) -> TimeBreakdown {
        let [sure_on_ns, sure_off_ns, sampled_ns] = self.sure.get(key);
        let [await_ns, delay_ns, awaits] = self.awaited.get(key);
        let (entered_ns, idle_ns) = (clock.ns(entered), clock.ns(idle));
        let sure_on_ns = sure_on_ns.min(entered_ns);
        let sure_off_ns = sure_off_ns.min(entered_ns - sure_on_ns);
        // The middle of the bounds has the smallest possible error.
        let unsure_ns = entered_ns - sure_on_ns - sure_off_ns;
        let (on_cpu_ns, error_ns) = (sure_on_ns + unsure_ns / 2, unsure_ns.div_ceil(2));
        let sampled_ns = sampled_ns.min(sure_on_ns);
        let delay_ns = delay_ns.min(idle_ns);
        let usage = self.usage.get().map(|usage| Usage::from_counts(usage.get()));
        let own = TimeBreakdown {
            wall_ns: clock.ns(wall),
            on_cpu_ns,
            on_cpu_error_ns: error_ns,
            sampled_ns,
            subtree_on_cpu_ns: on_cpu_ns,
            subtree_on_cpu_error_ns: error_ns,
            subtree_sampled_ns: sampled_ns,
            off_cpu_ns: entered_ns - on_cpu_ns,
            idle_ns,
            await_ns: await_ns.min(idle_ns - delay_ns),
            delay_ns,
            awaits,
            usage: usage.unwrap_or_default(),
            ..TimeBreakdown::default()
        };
        with_inside(own, self.inside.get())
    }
}

/// What was allocated in a span. Only hooks of threads in it, or that close spans inside it, add to it.
#[derive(Debug, Default)]
pub(crate) struct AllocationSums {
    /// Only the thread that opened the span adds to it.
    pub(crate) of_owner: Sums<{ Allocations::COUNTS }>,
    pub(crate) of_others: Sums<{ Allocations::COUNTS }>,
    pub(crate) inside: Sums<{ Allocations::COUNTS }>,
    /// The span may have to be kept if it allocates more bytes, or more often. Only set if its rule judges that.
    pub(crate) limits: [AtomicU64; 2],
}

impl AllocationSums {
    pub(crate) fn exceed_limits(&self) -> bool {
        let [bytes, allocations] = self.limits.each_ref().map(|it| it.load(Ordering::Relaxed));
        let all = self.all();
        all.allocated_bytes > bytes || all.allocations > allocations
    }

    pub(crate) fn own(&self) -> Allocations {
        let [of_owner, of_others] =
            [&self.of_owner, &self.of_others].map(|sums| Allocations::from_counts(sums.get()));
        of_owner.and(of_others)
    }

    /// Returns the allocations of the span and of the spans inside it.
    pub(crate) fn all(&self) -> Allocations {
        self.own().and(Allocations::from_counts(self.inside.get()))
    }

    pub(crate) fn clear(&self) {
        for sums in [&self.of_owner, &self.of_others, &self.inside] {
            sums.clear();
        }
    }
}

/// Sums that belong to one span: each is 16 bits of the span's key and 48 bits of value. Values are capped at 47 bits
/// (39 hours in nanoseconds). Late amounts of another span are not added.
#[derive(Debug, Default)]
struct Tagged(Sums<3>);

const TAG_SHIFT: u32 = 48;
const VALUE: u64 = (1 << TAG_SHIFT) - 1;

impl Tagged {
    fn tag(key: SpanKey) -> u64 {
        // Never 0, the tag of a cleared sum.
        (key.get() | 1 << (u64::BITS - TAG_SHIFT - 1)) << TAG_SHIFT
    }

    /// A thread that is in the span replaces whatever an earlier span left here; one that has left it does not.
    fn add(&self, key: SpanKey, more: [u64; 3], has_left: bool) {
        let tag = Self::tag(key);
        for (sum, more) in self.0.0.iter().zip(more).filter(|(_, more)| *more != 0) {
            let add = |sum: u64| {
                let before = match sum & !VALUE == tag {
                    // Capped so that another value can be added.
                    true => (sum & VALUE).min(VALUE / 2),
                    false if sum == 0 || !has_left => 0,
                    false => return None,
                };
                Some(tag | (before + more.min(VALUE / 2)))
            };
            _ = sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        }
    }

    fn get(&self, key: SpanKey) -> [u64; 3] {
        let tag = Self::tag(key);
        self.0.get().map(|sum| if sum & !VALUE == tag { sum & VALUE } else { 0 })
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
        counts.add(key(1), sure(20, 0), false);
        counts.add(key(1), sure(40, 10), true);
        let account = counts.account(&Clock::nanoseconds(), key(1), 100, 100, 0);
        assert_eq!((account.on_cpu_ns, account.on_cpu_error_ns), (75, 15));
        assert_eq!(account.off_cpu_ns, 25);
    }

    #[test]
    fn neither_time_exceeds_the_time_entered() {
        let counts = Counts::default();
        counts.add(key(1), sure(60, u64::MAX), false);
        counts.add(key(1), sure(0, u64::MAX), false);
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
        counts.add(key(2), sure(100, 0), false);
        counts.add(key(1), late, true);
        assert_eq!(on_cpu_ns(&counts), 100);
        // The late amount arrives first.
        let counts = Counts::default();
        counts.add(key(1), late, true);
        assert_eq!(on_cpu_ns(&counts), 0);
        counts.add(key(2), sure(100, 0), false);
        assert_eq!(on_cpu_ns(&counts), 100);
    }
}

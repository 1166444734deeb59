//! Where a span's time went.

use std::sync::atomic::{AtomicU64, Ordering};

use super::SpanKey;
use crate::sampler::{Usage, UsageCounts};
use crate::sys::Clock;

/// Where the wall time of a span went, and what else it cost.
///
/// On-CPU time is that of the threads' CPU clocks (`CLOCK_THREAD_CPUTIME_ID`), which are read once a
/// millisecond of a thread's wall time at most, and every 100 µs in a span that has been entered for a
/// sixty-fourth of what its rule keeps it for, and at each enter and exit if its rule judges `on_cpu` or `off_cpu`. Of a segment that begins or ends between two reads it is known between
/// two bounds: the account is their middle, and `on_cpu_error_ns` how far that may be off. Off-CPU time is
/// the rest of the time that the span was entered, idle time the rest of its wall time: their sum is exact.
///
/// While a span is entered on two threads at once, both count: on-CPU and off-CPU time together may then be
/// more than wall time, while idle time is what it is on neither. A span that is entered twice on one thread
/// counts once. Where nobody says when threads run, [neither is known](Self::is_cpu_time_unknown).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Account {
    /// From the span's creation to its close, in nanoseconds.
    pub wall_ns: u64,
    /// Time that threads ran on a CPU inside the span, in nanoseconds; children on the same
    /// thread included.
    pub on_cpu_ns: u64,
    /// How far `on_cpu_ns` and `off_cpu_ns` may be off, in nanoseconds.
    pub on_cpu_error_ns: u64,
    /// What of `on_cpu_ns` surely ran on threads that were sampled meanwhile, in nanoseconds: a span is sampled only
    /// when it has been entered for a while ([`Builder::arm_after`](crate::Builder::arm_after)).
    pub sampled_ns: u64,
    /// `on_cpu_ns`, and that of the spans inside it on threads that were not in it at the same time, in nanoseconds:
    /// what the samples of a profile are to be compared with.
    pub subtree_on_cpu_ns: u64,
    /// How far `subtree_on_cpu_ns` may be off, in nanoseconds.
    pub subtree_on_cpu_error_ns: u64,
    /// What of `subtree_on_cpu_ns` surely ran on threads that were sampled meanwhile, in nanoseconds.
    pub subtree_sampled_ns: u64,
    /// Time that the span was entered while its thread did not run (blocked or preempted), in
    /// nanoseconds.
    pub off_cpu_ns: u64,
    /// Time that the span was open and not entered (awaiting), in nanoseconds.
    pub idle_ns: u64,
    /// The last part of `idle_ns`: from its last exit to its close, in nanoseconds. A span is open as long
    /// as a child is, and as long as somebody holds it.
    pub after_last_exit_ns: u64,
    /// Times a thread gave up the CPU inside the span, to wait. Read when a sample falls and otherwise every
    /// millisecond at most, as the three that follow.
    pub voluntary_switches: u64,
    /// Times the scheduler took the CPU away inside the span.
    pub involuntary_switches: u64,
    /// Page faults that needed no disk.
    pub minor_faults: u64,
    /// Page faults that waited for a disk.
    pub major_faults: u64,
    /// Counts of the hardware, where it has counters, of the time in which the span was sampled.
    pub hardware: Option<Hardware>,
    /// Nobody knows when its threads ran: the system has no clock of a thread's CPU time, or it may not be
    /// read. `on_cpu_ns`, `on_cpu_error_ns` and `off_cpu_ns` are 0 then, and say nothing.
    pub is_cpu_time_unknown: bool,
}

impl Account {
    /// Without what nobody knows.
    pub(crate) fn without_cpu_time(self) -> Self {
        Self {
            on_cpu_ns: 0,
            on_cpu_error_ns: 0,
            sampled_ns: 0,
            subtree_on_cpu_ns: 0,
            subtree_on_cpu_error_ns: 0,
            subtree_sampled_ns: 0,
            off_cpu_ns: 0,
            is_cpu_time_unknown: true,
            ..self
        }
    }

    /// What surely ran while nothing was sampled, in it and in the spans inside it.
    pub(crate) fn unsampled_ns(&self) -> u64 {
        let least_ns = self.subtree_on_cpu_ns.saturating_sub(self.subtree_on_cpu_error_ns);
        least_ns.saturating_sub(self.subtree_sampled_ns)
    }

    /// On-CPU time of the spans inside it on other threads, in nanoseconds.
    pub(crate) fn inside_on_cpu_ns(&self) -> u64 {
        self.subtree_on_cpu_ns.saturating_sub(self.on_cpu_ns)
    }

    /// The time that it was entered, and nothing is known of it but that.
    pub(crate) fn busy_ns(&self) -> u64 {
        self.wall_ns.saturating_sub(self.idle_ns)
    }

    /// The account of a span that is open, with its present segment: `ran_ns` of it it surely ran,
    /// `waited_ns` it surely did not, and of the rest nobody knows. Its thread has been sampled for the last `sampled_ns`
    /// for which it ran.
    pub(crate) fn with_segment(
        self,
        segment_ns: u64,
        ran_ns: u64,
        waited_ns: u64,
        sampled_ns: u64,
    ) -> Self {
        if self.is_cpu_time_unknown {
            return self;
        }
        let ran_ns = ran_ns.min(segment_ns);
        let waited_ns = waited_ns.min(segment_ns - ran_ns);
        let unsure_ns = segment_ns - ran_ns - waited_ns;
        let (on_cpu_ns, error_ns) = (ran_ns + unsure_ns / 2, unsure_ns.div_ceil(2));
        let sampled_ns = sampled_ns.min(ran_ns);
        Self {
            on_cpu_ns: self.on_cpu_ns + on_cpu_ns,
            on_cpu_error_ns: self.on_cpu_error_ns + error_ns,
            off_cpu_ns: self.off_cpu_ns + waited_ns + (unsure_ns - unsure_ns / 2),
            sampled_ns: self.sampled_ns + sampled_ns,
            subtree_on_cpu_ns: self.subtree_on_cpu_ns + on_cpu_ns,
            subtree_on_cpu_error_ns: self.subtree_on_cpu_error_ns + error_ns,
            subtree_sampled_ns: self.subtree_sampled_ns + sampled_ns,
            ..self
        }
    }
}

/// Hardware counts of a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the events' own names")]
#[non_exhaustive]
pub struct Hardware {
    pub cycles: u64,
    pub instructions: u64,
    pub cache_misses: u64,
}

/// What one thread counts while it is in a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) sure: Sure,
    pub(crate) usage: Usage,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        self.sure.on_ns += other.sure.on_ns;
        self.sure.off_ns += other.sure.off_ns;
        self.sure.sampled_ns += other.sure.sampled_ns;
        self.usage.add(&other.usage);
    }
}

/// What of a time is known of a thread: that it ran, and that it did not. Of the rest nobody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sure {
    pub(crate) on_ns: u64,
    pub(crate) off_ns: u64,
    /// That it ran and was sampled.
    pub(crate) sampled_ns: u64,
}

impl Sure {
    /// Of a part of `part_ns` of an interval of `interval_ns` in which the thread ran for `cpu_ns`, of the last
    /// `sampled_ns` of them sampled.
    pub(crate) fn of_part(part_ns: u64, interval_ns: u64, cpu_ns: u64, sampled_ns: u64) -> Self {
        let outside_ns = interval_ns.saturating_sub(part_ns);
        let on_ns = cpu_ns.saturating_sub(outside_ns).min(part_ns);
        let sampled_ns = sampled_ns.saturating_sub(outside_ns).min(on_ns);
        Self { on_ns, off_ns: part_ns.saturating_sub(cpu_ns), sampled_ns }
    }
}

/// The tallies of all threads that were in a span.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    sure_on_ns: Tagged,
    sure_off_ns: Tagged,
    sure_sampled_ns: Tagged,
    /// Of spans inside it on threads that were not in it: as long as they are open, so is this one.
    inside_on_ns: AtomicU64,
    inside_unsure_ns: AtomicU64,
    inside_sampled_ns: AtomicU64,
    usage: UsageCounts<AtomicU64>,
}

impl Counts {
    /// For a thread that is in the span, so that it cannot close meanwhile.
    pub(crate) fn add(&self, key: SpanKey, tally: &Tally) {
        let Tally { sure, usage } = tally;
        self.sure_on_ns.add(key, sure.on_ns);
        self.sure_off_ns.add(key, sure.off_ns);
        self.sure_sampled_ns.add(key, sure.sampled_ns);
        self.usage.iter().zip(usage.counts()).for_each(|(sum, count)| add(sum, count));
    }

    /// For a thread that was for `segment_ns` in a span inside it, and not in this one, and knows that of it.
    pub(crate) fn add_inside(&self, segment_ns: u64, sure: Sure) {
        let sure_ns = sure.on_ns.saturating_add(sure.off_ns);
        add(&self.inside_on_ns, sure.on_ns);
        // Not known to the nanosecond in any case: so it shows that there was one, also one that only waited.
        add(&self.inside_unsure_ns, segment_ns.saturating_sub(sure_ns).max(1));
        add(&self.inside_sampled_ns, sure.sampled_ns);
    }

    /// For a thread that has left the span, which may be closed by now, and its slot in use again.
    pub(crate) fn add_late(&self, key: SpanKey, sure: Sure) {
        self.sure_on_ns.add_late(key, sure.on_ns);
        self.sure_off_ns.add_late(key, sure.off_ns);
        self.sure_sampled_ns.add_late(key, sure.sampled_ns);
    }

    pub(crate) fn clear(&self) {
        let sure = [&self.sure_on_ns, &self.sure_off_ns, &self.sure_sampled_ns].map(|sum| &sum.0);
        let inside = [&self.inside_on_ns, &self.inside_unsure_ns, &self.inside_sampled_ns];
        for count in sure.into_iter().chain(inside).chain(&self.usage) {
            count.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn account(
        &self,
        clock: &Clock,
        key: SpanKey,
        wall: u64,
        entered: u64,
        idle: u64,
    ) -> Account {
        let entered_ns = clock.ns(entered);
        let sure_on_ns = self.sure_on_ns.get(key).min(entered_ns);
        let sure_off_ns = self.sure_off_ns.get(key).min(entered_ns - sure_on_ns);
        // The middle of the bounds is the guess that can be wrong by least.
        let unsure_ns = entered_ns - sure_on_ns - sure_off_ns;
        let on_cpu_ns = sure_on_ns + unsure_ns / 2;
        let inside_unsure_ns = get(&self.inside_unsure_ns);
        let (error_ns, sampled_ns) =
            (unsure_ns.div_ceil(2), self.sure_sampled_ns.get(key).min(sure_on_ns));
        let usage = Usage::from_counts(self.usage.each_ref().map(get));
        let Usage { cycles, instructions, cache_misses, .. } = usage;
        let hardware = Hardware { cycles, instructions, cache_misses };
        Account {
            wall_ns: clock.ns(wall),
            on_cpu_ns,
            on_cpu_error_ns: error_ns,
            sampled_ns,
            subtree_on_cpu_ns: on_cpu_ns + get(&self.inside_on_ns) + inside_unsure_ns / 2,
            subtree_on_cpu_error_ns: error_ns + inside_unsure_ns.div_ceil(2),
            subtree_sampled_ns: sampled_ns + get(&self.inside_sampled_ns),
            off_cpu_ns: entered_ns - on_cpu_ns,
            idle_ns: clock.ns(idle),
            after_last_exit_ns: 0,
            voluntary_switches: usage.voluntary_switches,
            involuntary_switches: usage.involuntary_switches,
            minor_faults: usage.minor_faults,
            major_faults: usage.major_faults,
            hardware: (hardware.cycles > 0).then_some(hardware),
            is_cpu_time_unknown: false,
        }
    }
}

fn add(to: &AtomicU64, value: u64) {
    if value != 0 {
        to.fetch_add(value, Ordering::Relaxed);
    }
}

fn get(from: &AtomicU64) -> u64 {
    from.load(Ordering::Relaxed)
}

/// A sum that belongs to one span: 16 bits of its key, 48 bits of nanoseconds, of which half are used (39 hours). What comes late
/// for another span is not added to it.
#[derive(Debug, Default)]
struct Tagged(AtomicU64);

const TAG_SHIFT: u32 = 48;
const VALUE: u64 = (1 << TAG_SHIFT) - 1;

impl Tagged {
    fn tag(key: SpanKey) -> u64 {
        // Not 0, which is what a cleared sum has.
        (key.get() | 1 << (u64::BITS - TAG_SHIFT - 1)) << TAG_SHIFT
    }

    /// For a thread in the span: whatever another span has left here is over.
    fn add(&self, key: SpanKey, value: u64) {
        if value == 0 {
            return;
        }
        let add = |sum| Some(Self::sum(key, sum).unwrap_or(Self::tag(key)) + value.min(VALUE / 2));
        _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// For one that has left it.
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

    /// That sum, if it is this span's; with room for more.
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
        let Sure { on_ns, off_ns, .. } = Sure::of_part(part_ns, interval_ns, cpu_ns, 0);
        (on_ns, off_ns)
    }

    fn sure(on_ns: u64, off_ns: u64) -> Tally {
        Tally { sure: Sure { on_ns, off_ns, sampled_ns: 0 }, ..Tally::default() }
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
    fn the_rest_is_unsure() {
        // 40 of 100 on the CPU; 30 were inside: all of them may have been, or none.
        assert_eq!(sure_parts(30, 100, 40), (0, 0));
        // 80 of 100: at least 10 of the 30.
        assert_eq!(sure_parts(30, 100, 80), (10, 0));
        // 20 of 100: at least 10 of the 30 were not.
        assert_eq!(sure_parts(30, 100, 20), (0, 10));
        // The two clocks may disagree by a little.
        assert_eq!(sure_parts(100, 100, 101), (100, 0));
        assert_eq!(sure_parts(101, 100, 100), (100, 1));
    }

    #[test]
    fn bounds_hold_the_truth_for_every_placement() {
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
    fn what_was_sampled_at_the_end_was_surely_so_in_a_part_that_is_long_enough() {
        let sampled = |part_ns, sampled_ns| Sure::of_part(part_ns, 100, 100, sampled_ns).sampled_ns;
        assert_eq!([sampled(100, 100), sampled(100, 40), sampled(100, 0)], [100, 40, 0]);
        // It can have been the first 30 of the 100.
        assert_eq!([sampled(30, 100), sampled(30, 70), sampled(30, 71)], [30, 0, 1]);
    }

    #[test]
    fn of_what_nothing_is_known_half_may_be_off_cpu() {
        let clock = Clock::nanoseconds();
        let account = Counts::default().account(&clock, key(1), 1_500, 1_000, 500);
        assert_eq!((account.on_cpu_ns, account.on_cpu_error_ns), (500, 500));
        assert_eq!((account.off_cpu_ns, account.idle_ns, account.wall_ns), (500, 500, 1_500));
    }

    #[test]
    fn the_account_is_the_middle_and_says_how_wrong_it_may_be() {
        let counts = Counts::default();
        counts.add(key(1), &sure(20, 0));
        counts.add_late(key(1), Sure { on_ns: 40, off_ns: 10, sampled_ns: 0 });
        let account = counts.account(&Clock::nanoseconds(), key(1), 100, 100, 0);
        assert_eq!((account.on_cpu_ns, account.on_cpu_error_ns), (75, 15));
        assert_eq!(account.off_cpu_ns, 25);
    }

    #[test]
    fn there_is_no_more_of_either_than_the_span_was_entered() {
        let counts = Counts::default();
        counts.add(key(1), &sure(60, u64::MAX));
        counts.add(key(1), &sure(0, u64::MAX));
        let account = counts.account(&Clock::nanoseconds(), key(1), 100, 100, 0);
        assert_eq!((account.on_cpu_ns, account.off_cpu_ns, account.on_cpu_error_ns), (60, 40, 0));
    }

    #[test]
    fn what_comes_late_for_another_span_is_not_added() {
        let late = Sure { on_ns: 40, off_ns: 40, sampled_ns: 0 };
        let on_cpu_ns = |counts: &Counts| {
            let account = counts.account(&Clock::nanoseconds(), key(2), 1_000, 1_000, 0);
            account.on_cpu_ns - account.on_cpu_error_ns
        };
        let counts = Counts::default();
        counts.add(key(2), &sure(100, 0));
        counts.add_late(key(1), late);
        assert_eq!(on_cpu_ns(&counts), 100);
        // It was there first.
        let counts = Counts::default();
        counts.add_late(key(1), late);
        assert_eq!(on_cpu_ns(&counts), 0);
        counts.add(key(2), &sure(100, 0));
        assert_eq!(on_cpu_ns(&counts), 100);
    }
}

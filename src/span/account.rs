//! Where a span's time went.

use std::sync::atomic::{AtomicU64, Ordering};

use super::SpanKey;
use crate::sys::Clock;

/// Where the wall time of a span went, and what else it cost.
///
/// The three parts are measured each on its own: on-CPU by the kernel's account of the thread,
/// off-CPU by the times at which the scheduler switched the thread out and in, idle by the gaps
/// between segments. They add up to `wall_ns`, but for some microseconds a context switch (the
/// kernel notes one twice; 10 to 20 on a virtual machine), where the span was on one thread at a time. While a span is entered on two threads at once, both count: on-CPU
/// and off-CPU time together may then be more than wall time, while idle time is what it is on
/// neither. A span that is entered twice on one thread counts once.
///
/// Where perf is refused, on-CPU time is known only between two bounds, and off-CPU time is the
/// rest of the entered time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Account {
    /// From the span's creation to its close, in nanoseconds.
    pub wall_ns: u64,
    /// Time that threads ran on a CPU inside the span, in nanoseconds; children on the same
    /// thread included.
    pub on_cpu_ns: u64,
    /// How far `on_cpu_ns` may be off, in nanoseconds. 0 where perf counts context switches.
    pub on_cpu_error_ns: u64,
    /// Time that the span was entered while its thread did not run (blocked or preempted), in
    /// nanoseconds.
    pub off_cpu_ns: u64,
    /// Time that the span was open and not entered (awaiting), in nanoseconds.
    pub idle_ns: u64,
    /// The last part of `idle_ns`: from its last exit to its close, in nanoseconds. A span is open as long
    /// as a child is, and as long as somebody holds it.
    pub after_last_exit_ns: u64,
    /// Times a thread gave up the CPU inside the span, to wait.
    pub voluntary_switches: u64,
    /// Times the scheduler took the CPU away inside the span.
    pub involuntary_switches: u64,
    /// Page faults that needed no disk. Read when a sample falls, so accurate to one sampling
    /// period.
    pub minor_faults: u64,
    /// Page faults that waited for a disk; as accurate as `minor_faults`.
    pub major_faults: u64,
    /// Counts of the hardware, where it has counters; as accurate as `minor_faults`.
    pub hardware: Option<Hardware>,
}

impl Account {
    /// The account of a span that is open, with its present segment: `ran_ns` of it it surely ran,
    /// `waited_ns` it surely did not, and of the rest nobody knows.
    pub(crate) fn with_segment(self, segment_ns: u64, ran_ns: u64, waited_ns: u64) -> Self {
        let ran_ns = ran_ns.min(segment_ns);
        let waited_ns = waited_ns.min(segment_ns - ran_ns);
        let unsure_ns = segment_ns - ran_ns - waited_ns;
        Self {
            on_cpu_ns: self.on_cpu_ns + ran_ns + unsure_ns / 2,
            on_cpu_error_ns: self.on_cpu_error_ns + unsure_ns.div_ceil(2),
            off_cpu_ns: self.off_cpu_ns + waited_ns + (unsure_ns - unsure_ns / 2),
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
    /// On-CPU time less wall time, where the scheduler is followed exactly: never above 0 but for
    /// rounding.
    pub(crate) on_cpu_shift_ns: i64,
    pub(crate) off_cpu_ns: u64,
    /// Wall time for which on-CPU time is known between bounds only.
    pub(crate) bounded_ns: u64,
    /// On-CPU time that is sure, out of `bounded_ns`.
    pub(crate) sure_on_ns: u64,
    /// Off-CPU time that is sure, out of `bounded_ns`.
    pub(crate) sure_off_ns: u64,
    pub(crate) voluntary_switches: u64,
    pub(crate) involuntary_switches: u64,
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
    pub(crate) cycles: u64,
    pub(crate) instructions: u64,
    pub(crate) cache_misses: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        self.on_cpu_shift_ns += other.on_cpu_shift_ns;
        self.off_cpu_ns += other.off_cpu_ns;
        self.bounded_ns += other.bounded_ns;
        self.sure_on_ns += other.sure_on_ns;
        self.sure_off_ns += other.sure_off_ns;
        self.voluntary_switches += other.voluntary_switches;
        self.involuntary_switches += other.involuntary_switches;
        self.minor_faults += other.minor_faults;
        self.major_faults += other.major_faults;
        self.cycles += other.cycles;
        self.instructions += other.instructions;
        self.cache_misses += other.cache_misses;
    }
}

/// Of `wall_ns` out of an interval of `interval_ns` in which the thread ran for `cpu_ns`, what is
/// surely on-CPU and what is surely off-CPU.
pub(crate) fn sure_parts(wall_ns: u64, interval_ns: u64, cpu_ns: u64) -> (u64, u64) {
    let outside = interval_ns.saturating_sub(wall_ns);
    let on = cpu_ns.saturating_sub(outside).min(wall_ns);
    let off = wall_ns.saturating_sub(cpu_ns);
    (on, off)
}

/// The tallies of all threads that were in a span.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    on_cpu_shift_ns: AtomicU64,
    off_cpu_ns: AtomicU64,
    bounded_ns: AtomicU64,
    sure_on_ns: Tagged,
    sure_off_ns: Tagged,
    voluntary_switches: AtomicU64,
    involuntary_switches: AtomicU64,
    minor_faults: AtomicU64,
    major_faults: AtomicU64,
    cycles: AtomicU64,
    instructions: AtomicU64,
    cache_misses: AtomicU64,
}

impl Counts {
    /// For a thread that is in the span, so that it cannot close meanwhile.
    pub(crate) fn add(&self, key: SpanKey, tally: &Tally) {
        let Tally {
            on_cpu_shift_ns,
            off_cpu_ns,
            bounded_ns,
            sure_on_ns,
            sure_off_ns,
            voluntary_switches,
            involuntary_switches,
            minor_faults,
            major_faults,
            cycles,
            instructions,
            cache_misses,
        } = *tally;
        add(&self.on_cpu_shift_ns, on_cpu_shift_ns.cast_unsigned());
        add(&self.off_cpu_ns, off_cpu_ns);
        if bounded_ns > 0 {
            add(&self.bounded_ns, bounded_ns);
            self.sure_on_ns.begin(key);
            self.sure_off_ns.begin(key);
            self.add_late(key, sure_on_ns, sure_off_ns);
        }
        add(&self.voluntary_switches, voluntary_switches);
        add(&self.involuntary_switches, involuntary_switches);
        add(&self.minor_faults, minor_faults);
        add(&self.major_faults, major_faults);
        add(&self.cycles, cycles);
        add(&self.instructions, instructions);
        add(&self.cache_misses, cache_misses);
    }

    /// For a thread that has left the span, which may be closed by now, and its slot in use again.
    pub(crate) fn add_late(&self, key: SpanKey, sure_on_ns: u64, sure_off_ns: u64) {
        self.sure_on_ns.add(key, sure_on_ns);
        self.sure_off_ns.add(key, sure_off_ns);
    }

    pub(crate) fn clear(&self) {
        let Self {
            on_cpu_shift_ns,
            off_cpu_ns,
            bounded_ns,
            sure_on_ns,
            sure_off_ns,
            voluntary_switches,
            involuntary_switches,
            minor_faults,
            major_faults,
            cycles,
            instructions,
            cache_misses,
        } = self;
        for count in [
            on_cpu_shift_ns,
            off_cpu_ns,
            bounded_ns,
            &sure_on_ns.0,
            &sure_off_ns.0,
            voluntary_switches,
            involuntary_switches,
            minor_faults,
            major_faults,
            cycles,
            instructions,
            cache_misses,
        ] {
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
        let bounded_ns = get(&self.bounded_ns).min(entered_ns);
        let sure_on_ns = self.sure_on_ns.get(key).min(bounded_ns);
        let sure_off_ns = self.sure_off_ns.get(key).min(bounded_ns - sure_on_ns);
        let exact_wall_ns = entered_ns - bounded_ns;
        let shift = get(&self.on_cpu_shift_ns).cast_signed();
        let exact_on_ns = exact_wall_ns.saturating_add_signed(shift);
        // The middle of the bounds is the guess that can be wrong by least.
        let unsure_ns = bounded_ns - sure_on_ns - sure_off_ns;
        let bounded_on_ns = sure_on_ns + unsure_ns / 2;
        let hardware = Hardware {
            cycles: get(&self.cycles),
            instructions: get(&self.instructions),
            cache_misses: get(&self.cache_misses),
        };
        Account {
            wall_ns: clock.ns(wall),
            on_cpu_ns: exact_on_ns + bounded_on_ns,
            on_cpu_error_ns: unsure_ns.div_ceil(2),
            off_cpu_ns: get(&self.off_cpu_ns) + (bounded_ns - bounded_on_ns),
            idle_ns: clock.ns(idle),
            after_last_exit_ns: 0,
            voluntary_switches: get(&self.voluntary_switches),
            involuntary_switches: get(&self.involuntary_switches),
            minor_faults: get(&self.minor_faults),
            major_faults: get(&self.major_faults),
            hardware: (hardware.cycles > 0).then_some(hardware),
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

/// A sum that belongs to one span: what comes for another is not added. 16 bits of the span's key,
/// 48 bits of nanoseconds (78
/// hours).
#[derive(Debug, Default)]
struct Tagged(AtomicU64);

const TAG_SHIFT: u32 = 48;
const VALUE: u64 = (1 << TAG_SHIFT) - 1;

impl Tagged {
    fn tag(key: SpanKey) -> u64 {
        // Not 0, which is what a cleared sum has.
        (key.get() | 1 << (u64::BITS - TAG_SHIFT - 1)) << TAG_SHIFT
    }

    fn begin(&self, key: SpanKey) {
        // Fails if the sum has begun: then all is well.
        _ = self.0.compare_exchange(0, Self::tag(key), Ordering::Relaxed, Ordering::Relaxed);
    }

    fn add(&self, key: SpanKey, value: u64) {
        _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |sum| {
            let (tag, sum) = (sum & !VALUE, sum & VALUE);
            (tag == Self::tag(key)).then(|| tag | (sum + value.min(VALUE - sum)))
        });
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
                for wall in 0..=interval {
                    let (on, off) = sure_parts(wall, interval, cpu);
                    let most = cpu.min(wall);
                    let least = cpu.saturating_sub(interval - wall);
                    assert_eq!((on, wall - off), (least, most), "{interval} {cpu} {wall}");
                }
            }
        }
    }

    #[test]
    fn exact_parts_add_up() {
        let counts = Counts::default();
        let tally = Tally { on_cpu_shift_ns: -300, off_cpu_ns: 290, ..Tally::default() };
        counts.add(key(1), &tally);
        let clock = Clock::nanoseconds();
        let account = counts.account(&clock, key(1), 1_500, 1_000, 500);
        assert_eq!(account.on_cpu_ns, 700);
        assert_eq!(account.on_cpu_error_ns, 0);
        assert_eq!(account.off_cpu_ns, 290);
        assert_eq!(account.idle_ns, 500);
        assert_eq!(account.wall_ns, 1_500);
    }

    #[test]
    fn bounded_parts_say_how_wrong_they_may_be() {
        let counts = Counts::default();
        counts.add(key(1), &Tally { bounded_ns: 100, sure_on_ns: 20, ..Tally::default() });
        counts.add_late(key(1), 40, 10);
        let account = counts.account(&Clock::nanoseconds(), key(1), 100, 100, 0);
        assert_eq!((account.on_cpu_ns, account.on_cpu_error_ns), (75, 15));
        assert_eq!(account.off_cpu_ns, 25);
    }

    #[test]
    fn what_comes_late_for_another_span_is_not_added() {
        let counts = Counts::default();
        counts.add_late(key(1), 40, 10);
        counts.add(key(2), &Tally { bounded_ns: 100, ..Tally::default() });
        counts.add_late(key(1), 40, 10);
        let account = counts.account(&Clock::nanoseconds(), key(2), 100, 100, 0);
        assert_eq!((account.on_cpu_ns, account.on_cpu_error_ns), (50, 50));
    }
}

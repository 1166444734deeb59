//! The continuous profile: one timer for all threads of the process, and what its handler leaves.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::budget::CpuBudget;
use crate::intake::Intake;
use crate::sampler::record::{Record, Records};
use crate::sampler::{Sampler, ThreadShared, describe_refusal};
use crate::stats::Counters;
use crate::sys::{self, ProcessTimer, RingMemory, WhyRefused};

/// The assumed cost of a sample, and what all of them may cost: of each processor 333 samples per second, and as many as in
/// three seconds at once.
const A_SAMPLE_NS: u64 = 30_000;
const THOUSANDTHS: u64 = 10;
const AT_ONCE_NS: i64 = 30_000_000;

/// Why the process cannot be profiled continuously.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoContinuous {
    /// The timer is refused.
    Refused(WhyRefused),
    /// The kernel sends its signals to the first thread, whichever runs.
    FirstThread,
    /// It sends none.
    NoSignals,
    /// What probes it had too little CPU time.
    Busy,
}

/// The log says what may pass after this many tries, and the kernel is judged by as many: its tick may miss what runs on a
/// busy machine.
pub(crate) const QUIET_TRIES: u32 = 5;

impl NoContinuous {
    /// Whether it may be so for now, after that many tries: a debugger is attached, a thread blocks the signal, perhaps for a
    /// moment, or the machine is busy.
    pub(crate) fn may_pass(self, tries: u32) -> bool {
        match self {
            Self::Refused(why) => matches!(why, WhyRefused::Traced | WhyRefused::SignalBlocked),
            Self::FirstThread | Self::NoSignals => tries < QUIET_TRIES,
            Self::Busy => true,
        }
    }
}

impl fmt::Display for NoContinuous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the process is not profiled continuously: ")?;
        f.write_str(&match self {
            Self::Refused(WhyRefused::NotAsked) => {
                "the source uses no timers; set TRACING_PROFILING_SOURCE=auto".to_owned()
            }
            Self::Refused(why) => describe_refusal(*why),
            Self::FirstThread => {
                "this kernel sends the signals of its timer to the first thread, whichever runs (until Linux 6.4)"
                    .to_owned()
            }
            Self::NoSignals => "its timer sends no signals here".to_owned(),
            Self::Busy => "the machine is too busy to find out whether it can be".to_owned(),
        })
    }
}

pub(super) struct ContinuousThreads {
    timer: Option<Arc<ProcessTimer>>,
    period_ns: u64,
    /// The timer has ended, and its rings are read once more.
    is_ending: bool,
    /// A debugger would stop at each signal, or the program has taken it.
    pub(super) must_end: bool,
    /// What the kernel was found to do, once that was probed.
    probed: Option<Result<(), NoContinuous>>,
    budget: CpuBudget,
    clocks: SampledClocks,
}

impl ContinuousThreads {
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let at_once_ns = AT_ONCE_NS.saturating_mul(i64::try_from(processors).unwrap_or(i64::MAX));
        let budget = CpuBudget::of_thousandths(THOUSANDTHS * processors as u64, at_once_ns);
        Self {
            timer: None,
            period_ns: 0,
            is_ending: false,
            must_end: false,
            probed: None,
            budget,
            clocks: SampledClocks::default(),
        }
    }

    /// Samples all threads from now on, with that CPU time of the process between two samples. `hooked` are those that
    /// publish their spans.
    pub(super) fn begin<'a>(
        &mut self,
        period_ns: u64,
        (source, counters): (&Sampler, &Counters),
        hooked: impl Iterator<Item = &'a Arc<ThreadShared>> + Clone,
    ) -> Result<(), NoContinuous> {
        // The kernel would end the process if its frame does not fit.
        let is_small =
            |thread: &Arc<ThreadShared>| thread.stack == Err(WhyRefused::SmallSignalStack);
        if hooked.clone().any(is_small) {
            return Err(NoContinuous::Refused(WhyRefused::SmallSignalStack));
        }
        // First: the collector would cause signals to other threads in the probe, too.
        let timer = source.open_process_timer(period_ns);
        let timer = timer.map_err(NoContinuous::Refused)?;
        sys::admit_process_timer();
        let probed = self.probed.unwrap_or_else(|| probe(source));
        self.probed = Some(probed).filter(Result::is_ok);
        probed?;
        self.clocks = SampledClocks::now();
        timer.start().map_err(NoContinuous::Refused)?;
        let timer = Arc::new(timer);
        // Threads that meet their first hook from here on add themselves.
        source.set_process_timer(Some(Arc::clone(&timer)));
        (self.timer, self.period_ns, self.is_ending) = (Some(timer), period_ns, false);
        let left_out = hooked.filter(|thread| !self.add(thread)).count();
        Counters::add(&counters.continuous.threads_without_spans, left_out as u64);
        Ok(())
    }

    /// A thread has met its first hook, perhaps before the timer began. Returns false if there are too many.
    pub(super) fn add(&self, thread: &Arc<ThreadShared>) -> bool {
        self.timer.as_ref().is_none_or(|timer| timer.add_thread(Arc::clone(thread) as _))
    }

    /// Ends the sampling. All samples are in the rings, which are read in the present round.
    pub(super) fn end(&mut self, source: &Sampler) {
        source.set_process_timer(None);
        self.timer.iter().for_each(|timer| timer.stop());
        self.is_ending = true;
    }

    pub(super) fn has_lost_signal(&self) -> bool {
        self.timer.as_ref().is_some_and(|timer| timer.has_lost_signal())
    }

    /// Forgets threads that have ended.
    pub(super) fn forget_ended(&mut self) {
        self.clocks.forget_ended();
        self.timer.iter().for_each(|timer| timer.forget_ended_threads());
    }

    /// Reads everything in the rings.
    pub(super) fn drain(&mut self, intake: &mut Intake) {
        let Some(timer) = &self.timer else { return };
        let losses = timer.take_losses();
        let counters = &intake.counters.continuous;
        for (counter, lost) in [
            (&counters.dropped_rings_taken, losses.all_taken),
            (&counters.dropped_rings_full, losses.full),
            (&counters.dropped_unreadable, losses.unreadable),
        ] {
            Counters::add(counter, lost);
        }
        let start = sys::thread_cpu_ns();
        let mut is_first = true;
        for ring in timer.rings() {
            if ring.head() != ring.tail() {
                if std::mem::take(&mut is_first) {
                    intake.unwinder.refresh();
                }
                let budget = &mut self.budget;
                drain_ring(ring, self.period_ns, (budget, &mut self.clocks), intake);
            }
        }
        if let Some(took) = crate::budget::passed(start, sys::thread_cpu_ns()).filter(|_| !is_first)
        {
            Counters::add(&intake.counters.sampling.collector_cpu_ns, took);
        }
        if self.is_ending {
            self.timer = None;
        }
    }
}

/// The CPU clocks of threads at their last samples.
#[derive(Debug, Default)]
struct SampledClocks(HashMap<u32, u64>);

impl SampledClocks {
    /// Those of all threads now. Those of later ones begin at 0.
    fn now() -> Self {
        let clocks = sys::own_threads().unwrap_or_default().into_iter();
        Self(clocks.filter_map(|tid| Some((tid, sys::cpu_ns_of(tid)?))).collect())
    }

    /// The CPU time of a thread since its sample before. `stated` is what the record has.
    fn ran_ns(&mut self, tid: u32, stated: u64) -> u64 {
        if stated & sys::IS_NO_CLOCK != 0 {
            return stated & !sys::IS_NO_CLOCK;
        }
        let before = self.0.get(&tid).copied().unwrap_or(0);
        match stated.checked_sub(before) {
            // The record before it was in another ring, and was read first.
            None if before - stated < REORDERED_NS => 0,
            // The thread is another one with the id of one that has ended, or has no sample before.
            ran_ns => {
                self.0.insert(tid, stated);
                ran_ns.unwrap_or(stated)
            }
        }
    }

    fn forget_ended(&mut self) {
        let threads = sys::own_threads().map(HashSet::<u32>::from_iter);
        threads.into_iter().for_each(|threads| self.0.retain(|tid, _| threads.contains(tid)));
    }
}

/// Between samples of a thread that are in two rings.
const REORDERED_NS: u64 = 1_000_000_000;

fn drain_ring(
    ring: &RingMemory,
    period_ns: u64,
    (budget, clocks): (&mut CpuBudget, &mut SampledClocks),
    intake: &mut Intake,
) {
    let head = ring.head();
    let now_ns = intake.now_ns();
    for record in Records::between(ring, ring.tail(), head) {
        match record {
            Ok(Record::Sample(place)) if budget.has_budget(now_ns) => {
                budget.spend(A_SAMPLE_NS);
                let ran_ns = |tid, stated| clocks.ran_ns(tid, stated);
                intake.add_continuous((ring, place), period_ns, ran_ns);
                // Makes room for the next sample before this round has read all of them.
                ring.release_to(place.position + u64::from(place.size));
            }
            Ok(Record::Sample(_)) => {
                Counters::add(&intake.counters.continuous.dropped_over_budget, 1);
            }
            Ok(_) => {}
            Err(_) => intake.lose(|counters| &counters.sampling.records_malformed, 1),
        }
    }
    ring.release_to(head);
}

/// Which CPU time of two threads that run makes the signals of the probe.
const PROBE_PERIOD_NS: u64 = 1_000_000;
const PROBED: Duration = Duration::from_millis(40);
/// On a busy machine.
const LONGEST_PROBE: Duration = Duration::from_millis(500);

/// Whether the signals go to threads that run: two that do nothing else are sampled for a moment.
fn probe(source: &Sampler) -> Result<(), NoContinuous> {
    let timer = source.open_process_timer(PROBE_PERIOD_NS).map_err(NoContinuous::Refused)?;
    timer.start().map_err(NoContinuous::Refused)?;
    let (used_ns, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let start = Instant::now();
    // Without the clock the time in which they could run.
    let clock_ns = move || sys::thread_cpu_ns().unwrap_or(start.elapsed().as_nanos() as u64);
    let threads = [(); 2].map(|()| {
        let (used_ns, is_over) = (Arc::clone(&used_ns), Arc::clone(&is_over));
        sys::spawn("profiling-probe", move || {
            sys::admit_process_timer();
            let mut before_ns = clock_ns();
            while !is_over.load(Ordering::Relaxed) {
                let now_ns = clock_ns();
                let ran_ns = now_ns.saturating_sub(std::mem::replace(&mut before_ns, now_ns));
                used_ns.fetch_add(ran_ns, Ordering::Relaxed);
            }
            sys::current_tid()
        })
    });
    let used = || Duration::from_nanos(used_ns.load(Ordering::Relaxed));
    while used() < PROBED && start.elapsed() < LONGEST_PROBE {
        std::thread::sleep(Duration::from_millis(2));
    }
    is_over.store(true, Ordering::Relaxed);
    let own = threads.map(|thread| thread.ok().and_then(|thread| thread.join().ok()));
    timer.stop();
    let own: Vec<u32> = own.into_iter().flatten().collect();
    let tids = timer.rings().flat_map(|ring| {
        let records = Records::between(ring, ring.tail(), ring.head());
        records.filter_map(move |record| match record {
            Ok(Record::Sample(place)) => {
                Some(crate::sampler::record::thread_of_record(ring, place).1.tid)
            }
            _ => None,
        })
    });
    judge_probe((&own, used()), tids.collect())
}

/// `sampled` has the thread of each sample.
fn judge_probe((own, ran): (&[u32], Duration), sampled: Vec<u32>) -> Result<(), NoContinuous> {
    let first = sys::process_id();
    match () {
        () if sampled.iter().any(|tid| own.contains(tid)) => Ok(()),
        () if ran < PROBED => Err(NoContinuous::Busy),
        () if sampled.is_empty() => Err(NoContinuous::NoSignals),
        () if sampled.iter().all(|tid| *tid == first) => Err(NoContinuous::FirstThread),
        // Other threads of the program ran.
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::{ContinuousSettings, Source, SourceSettings};
    use crate::sys::{Poller, SampleRequest};

    #[test]
    fn signals_must_reach_threads_that_run() {
        let first = sys::process_id();
        let [a, b, other] = [first + 1, first + 2, first + 3];
        let busy = Err(NoContinuous::Busy);
        for (sampled, judged, starved) in [
            (vec![a, b, a], Ok(()), Ok(())),
            (vec![first, first, b], Ok(()), Ok(())),
            (vec![other, first], Ok(()), busy),
            (vec![first; 9], Err(NoContinuous::FirstThread), busy),
            (vec![], Err(NoContinuous::NoSignals), busy),
        ] {
            for (ran, judged) in [(PROBED, judged), (PROBED / 2, starved)] {
                let found = judge_probe((&[a, b], ran), sampled.clone());
                assert_eq!(found, judged, "{sampled:?} in {ran:?}");
            }
            if let Err(why) = judged {
                assert!(why.may_pass(0) && !why.may_pass(QUIET_TRIES), "{why}");
            }
        }
        assert!(NoContinuous::Busy.may_pass(u32::MAX));
    }

    #[test]
    fn the_samples_of_a_thread_add_up_to_its_clock() {
        let mut clocks = SampledClocks(HashMap::from([(1, 50_000_000_000)]));
        let mut ran = |tid, stated| clocks.ran_ns(tid, stated);
        assert_eq!([ran(1, 50_000_000_020), ran(1, 50_000_000_050)], [20, 30]);
        assert_eq!([ran(2, 7), ran(2, 17)], [7, 10], "it has begun later");
        assert_eq!([ran(1, 50_000_000_040), ran(1, 50_000_000_060)], [0, 10], "of another ring");
        assert_eq!([ran(1, 5), ran(1, 6)], [5, 1], "another thread has the id");
        assert_eq!([ran(1, 9 | sys::IS_NO_CLOCK), ran(1, 8)], [9, 2], "without a clock");
    }

    /// As before Linux 6.4. In a process of its own: threads of other tests block all signals for a moment.
    #[test]
    fn nothing_is_sampled_where_the_first_thread_gets_all_signals() {
        let name = "threads::continuous::tests::nothing_is_sampled_where_the_first_thread_gets_all_signals";
        if !crate::sys::is_alone(name) {
            return;
        }
        let (poller, counters) = (Poller::new().unwrap(), Arc::new(Counters::default()));
        let settings = SourceSettings {
            source: Source::Timer,
            signal: None,
            stack_bytes: 1024,
            periods: None,
            waits: false,
            sampling_delay: None,
            continuous: ContinuousSettings::OFF,
        };
        let request =
            SampleRequest { stack_bytes: 1024, ring_bytes: 1 << 16, ..SampleRequest::default() };
        let source = Sampler::new(settings, request, &poller.waker(), Arc::clone(&counters));
        if source.is_refused() {
            return;
        }
        let mut threads = ContinuousThreads::new();
        threads.probed = Some(Err(NoContinuous::FirstThread));
        let begun = threads.begin(10_000_000, (&source, &counters), std::iter::empty());
        assert_eq!(begun, Err(NoContinuous::FirstThread));
        assert!(threads.timer.is_none());
        assert!(NoContinuous::FirstThread.to_string().contains("Linux 6.4"));
        threads.probed = Some(Ok(()));
        assert_eq!(threads.begin(10_000_000, (&source, &counters), std::iter::empty()), Ok(()));
        assert!(threads.timer.is_some());
        threads.end(&source);
    }
}

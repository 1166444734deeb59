//! Which source samples which thread.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::arming::Arming;
use super::counters::{HardwareCounts, Usage, parse_group};
use super::hooks::{ArmThreads, Begun, ThreadSource};
use super::perf::Perf;
use super::rate::{Level, Periods, Rate};
use super::record::{Record, Records};
use super::thread::SampledThread;
use super::timer::Timers;
use crate::stats::Counters;
use crate::sys::{self, HardwareCounters, SampleRequest, TimerClock, Waker, WhyRefused};

/// What produces stacks; `TRACING_PROFILING_SOURCE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// `perf` where it is allowed, and `timer` for the threads that it has no room for or where it is
    /// refused.
    #[default]
    Auto,
    /// Perf events: the kernel copies stacks, and records when a thread waits.
    Perf,
    /// A timer for each thread, and a signal handler that copies its registers and stack.
    Timer,
    /// Times only, no stacks.
    None,
}

impl FromStr for Source {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Auto),
            "perf" => Ok(Self::Perf),
            "timer" => Ok(Self::Timer),
            "none" => Ok(Self::None),
            _ => Err(()),
        }
    }
}

/// What is set of sources.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceSettings {
    pub(crate) source: Source,
    pub(crate) timer_clock: TimerClock,
    pub(crate) stack_bytes: u32,
    /// `None` for the usual ones.
    pub(crate) periods: Option<Periods>,
    /// Whether to look where threads wait.
    pub(crate) waits: bool,
    /// For how long a span is entered before threads in it are sampled; `None` to let its rule decide.
    pub(crate) arm_after: Option<Duration>,
}

/// Arms threads.
#[derive(Clone, Debug)]
pub(crate) struct Sampler(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    perf: Option<Perf>,
    timers: Option<Timers>,
    /// Why no thread at all can have a timer, if that was tried.
    timers_refused: Option<WhyRefused>,
    is_over: Mutex<bool>,
    /// No more threads are armed at present.
    sheds: AtomicBool,
    counters: Arc<Counters>,
    waker: Waker,
    periods: Periods,
    /// That of a thread that begins.
    first_period_ns: AtomicU64,
    new: Mutex<Vec<Arc<SampledThread>>>,
    /// What a test has in the place of both.
    #[cfg(test)]
    scripted: std::sync::OnceLock<Box<dyn ArmThreads>>,
}

impl Sampler {
    /// Tries out on the calling thread what this process is allowed.
    pub(crate) fn new(
        SourceSettings { source, timer_clock, periods, .. }: SourceSettings,
        request: SampleRequest,
        waker: &Waker,
        counters: Arc<Counters>,
    ) -> Self {
        sys::look_at_filters();
        let perf = matches!(source, Source::Auto | Source::Perf).then(|| Perf::new(request));
        let timers = matches!(source, Source::Auto | Source::Timer)
            .then(|| Timers::new(request, timer_clock));
        // No signal handler where perf will do.
        let needs_timers = perf.as_ref().is_none_or(|perf| perf.refused().is_some());
        let timers_refused =
            timers.as_ref().filter(|_| needs_timers).and_then(|timers| timers.probe().err());
        // The rest may be otherwise by the time the first thread is armed.
        let timers_refused = timers_refused.filter(|why| why.is_for_good());
        // A timer that does not follow the CPU clock interrupts waits as often.
        let interrupts = needs_timers && timer_clock == TimerClock::Monotonic;
        let usual = if interrupts { Periods::SELDOM } else { Periods::USUAL };
        let periods = periods.unwrap_or(usual);
        Self(Arc::new(Shared {
            perf,
            timers,
            timers_refused,
            is_over: Mutex::new(false),
            sheds: AtomicBool::new(false),
            counters,
            waker: waker.clone(),
            periods,
            first_period_ns: AtomicU64::new(periods.first()),
            new: Mutex::default(),
            #[cfg(test)]
            scripted: std::sync::OnceLock::new(),
        }))
    }

    /// Whether no thread at all can be sampled.
    pub(crate) fn is_refused(&self) -> bool {
        let shared = &*self.0;
        let has_perf = shared.perf.as_ref().is_some_and(|perf| perf.refused().is_none());
        let has_timers = shared.timers.is_some() && shared.timers_refused.is_none();
        !has_perf && !has_timers
    }

    pub(crate) fn periods(&self) -> Periods {
        self.0.periods
    }

    /// The time between samples of threads that begin from now on is so many times as long.
    pub(crate) fn slow_down(&self, times: f64) {
        let first = self.0.periods.rate(Level::First).slowed(times);
        self.0.first_period_ns.store(first.period_ns, Ordering::Relaxed);
    }

    /// Whether no more threads are armed from now on.
    pub(crate) fn set_sheds(&self, sheds: bool) {
        self.0.sheds.store(sheds, Ordering::Relaxed);
    }

    /// What runs here, what it cannot see and what would change that, in one line. Whether it is
    /// less than was asked for.
    pub(crate) fn describe(&self) -> (String, bool) {
        let (mut line, is_less) = self.describe_source();
        if sys::thread_cpu_ns().is_none() {
            line.push_str(
                "; whether threads run inside spans is unknown: `on_cpu` and `off_cpu` of rules hold for no span",
            );
        }
        (line, is_less)
    }

    fn describe_source(&self) -> (String, bool) {
        let shared = &*self.0;
        let periods = shared.periods;
        let is_elsewhere = |why| why == Some(WhyRefused::OtherSystem);
        let of_perf = shared.perf.as_ref().and_then(Perf::refused);
        if is_elsewhere(of_perf) || is_elsewhere(shared.timers_refused) {
            return (ELSEWHERE.to_owned(), true);
        }
        let perf_refused = match &shared.perf {
            Some(perf) => match perf.refused() {
                None => return (describe_perf(perf, periods), false),
                Some(WhyRefused::NotSupported) => NO_PERF_HERE,
                Some(WhyRefused::Deadly) => PERF_DEADLY,
                Some(_) => PERF_REFUSED,
            },
            None => "it was not asked for",
        };
        match (&shared.timers, shared.timers_refused) {
            (Some(timers), None) => (describe_timers(timers, periods, perf_refused), false),
            (None, _) if shared.perf.is_none() => (
                "source none, as asked for: kept spans have their times but no stacks".to_owned(),
                false,
            ),
            (None, _) => (
                format!(
                    "source none: kept spans have their times but no stacks; perf is not there: \
                     {perf_refused}; or set TRACING_PROFILING_SOURCE=auto"
                ),
                true,
            ),
            (Some(_), Some(why)) => (
                format!(
                    "source none: kept spans have their times but no stacks; timers are refused \
                     ({}); perf is not there: {perf_refused}",
                    describe_refusal(why),
                ),
                true,
            ),
        }
    }

    /// Whether samples are taken in user code only, of every thread, and none was lost: then what is in
    /// no sample is the kernel's.
    pub(crate) fn hides_kernel_alone(&self) -> bool {
        let perf = self.0.perf.as_ref().filter(|perf| perf.refused().is_none());
        let counters = &self.0.counters;
        let losses = [
            &counters.threads.refused_perf,
            &counters.threads.refused_locked_memory,
            &counters.threads.refused_open_files,
            &counters.threads.refused_timers,
            &counters.threads.refused_other,
            &counters.samples.dropped_intervals_full,
            &counters.samples.dropped_span_events_full,
            &counters.samples.dropped_unknown_span,
            &counters.samples.dropped_off_stack,
            &counters.samples.dropped_late,
            &counters.sampling.records_malformed,
            &counters.sampling.throttled,
        ];
        perf.is_some_and(|perf| !perf.sees_kernel())
            && losses.iter().all(|counter| counter.load(Ordering::Relaxed) == 0)
    }

    /// For the collector's thread, as it starts: within a second of when the first events were tried.
    pub(crate) fn keep_on(&self) {
        if let Some(perf) = &self.0.perf {
            perf.keep_on();
        }
    }

    /// Nothing will be opened any more.
    pub(crate) fn end(&self) {
        // With the lock: who is arming now is done before, and found among the new.
        *self.0.is_over.lock() = true;
        if let Some(perf) = &self.0.perf {
            perf.end();
        }
    }

    /// The threads that were begun with since the last call.
    pub(crate) fn take_new(&self) -> Vec<Arc<SampledThread>> {
        std::mem::take(&mut self.0.new.lock())
    }

    #[cfg(test)]
    pub(crate) fn set_scripted(&self, scripted: Box<dyn ArmThreads>) {
        _ = self.0.scripted.set(scripted);
    }

    /// A thread that a test has begun with.
    #[cfg(test)]
    pub(crate) fn add_scripted(&self, thread: Arc<SampledThread>) {
        self.0.new.lock().push(thread);
    }

    pub(crate) fn count_sampled(&self, arming: &Arming) {
        let counters = &self.0.counters;
        Counters::add(&counters.threads.armed, 1);
        Counters::add(&counters.threads.sampled, 1);
        if !arming.has_switch_records() {
            Counters::add(&counters.threads.sampled_by_timer, 1);
        }
    }

    /// A thread that was paused is in an old span again.
    pub(crate) fn start_again(&self, thread: &SampledThread, arming: &Arming) {
        arming.note_since(sys::cpu_ns_of(thread.tid).unwrap_or(u64::MAX));
        if let Err(why) = arming.start() {
            self.note_refusal(why);
        }
    }

    /// Sampling of a thread is over, and what it was armed with last is read: another thread may have the place.
    /// So many of its samples, from `from` on, its hooks have not counted.
    pub(crate) fn give_back(
        &self,
        thread: &SampledThread,
        arming: &Arming,
        from: u64,
        samples: u64,
    ) {
        self.retire(arming, from, samples);
        if thread.note_refused(false) {
            self.0.counters.threads.unsampled.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// What a thread was armed with is read, does not sample it any more, and is given back. So many samples of the
    /// interval that is open from `from` on its hooks have not counted.
    pub(crate) fn retire(&self, arming: &Arming, from: u64, samples: u64) {
        if arming.ring.is_none() {
            return;
        }
        arming.retire(from, samples);
        let counters = &self.0.counters;
        counters.threads.sampled.fetch_sub(1, Ordering::Relaxed);
        if arming.has_switch_records() {
            self.0.perf.iter().for_each(Perf::give_files);
        } else {
            counters.threads.sampled_by_timer.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether a thread is sampled by a timer now.
    pub(crate) fn has_timers(&self) -> bool {
        self.0.counters.threads.sampled_by_timer.load(Ordering::Relaxed) > 0
    }

    /// Opens what samples that thread, and does nothing yet.
    fn open(&self, thread: &SampledThread) -> Result<Arming, WhyRefused> {
        let shared = &*self.0;
        let Rate { period_ns, by_timer } = thread.rate();
        if by_timer && let Some(timers) = &shared.timers {
            // Where there is none perf will do.
            let by_timer = timers.open(thread.tid, thread.stack.as_ref(), period_ns);
            if let Ok(arming) = by_timer {
                return Ok(arming);
            }
        }
        let by_perf = shared.perf.as_ref().map(|perf| perf.open(thread.tid, period_ns));
        let refused = match by_perf {
            Some(Ok(arming)) => return Ok(arming),
            // It ends while it is armed: nothing is refused.
            Some(Err(_)) if thread.is_over() => return Err(WhyRefused::Ended),
            Some(Err(WhyRefused::Ended)) => return Err(WhyRefused::Ended),
            Some(Err(why)) => {
                // Where all are refused it is said once and for all.
                let perf_refused =
                    shared.perf.as_ref().is_some_and(|perf| perf.refused().is_some());
                if !perf_refused || shared.timers.is_none() || shared.timers_refused.is_some() {
                    self.note_refusal(why);
                }
                Some(why)
            }
            None => None,
        };
        let Some(timers) = shared.timers.as_ref().filter(|_| shared.timers_refused.is_none())
        else {
            return Err(refused.or(shared.timers_refused).unwrap_or(WhyRefused::NotAsked));
        };
        timers
            .open(thread.tid, thread.stack.as_ref(), period_ns)
            .inspect_err(|why| self.note_refusal(*why))
    }

    /// Whether a thread can have a timer.
    pub(crate) fn may_have_timers(&self) -> bool {
        self.0.timers.is_some() && self.0.timers_refused.is_none()
    }

    /// Whether threads have timers: no signal handler where perf will do.
    fn uses_timers(&self) -> bool {
        let has_perf = self.0.perf.as_ref().is_some_and(|perf| perf.refused().is_none());
        let counters = &self.0.counters;
        let run_out =
            [&counters.threads.refused_open_files, &counters.threads.refused_locked_memory];
        let has_run_out = run_out.iter().any(|counter| counter.load(Ordering::Relaxed) > 0);
        self.may_have_timers() && (!has_perf || has_run_out)
    }

    fn note_refusal(&self, why: WhyRefused) {
        if why == WhyRefused::Ended {
            return;
        }
        let counters = &self.0.counters;
        let counter = match why {
            why if why.is_for_good() => &counters.threads.refused_perf,
            WhyRefused::NoLockedMemory => &counters.threads.refused_locked_memory,
            WhyRefused::NoFiles => &counters.threads.refused_open_files,
            WhyRefused::NoTimers => &counters.threads.refused_timers,
            _ => &counters.threads.refused_other,
        };
        Counters::add(counter, 1);
    }
}

const ELSEWHERE: &str = "source none: kept spans have their times but no stacks; threads are sampled on Linux \
    alone (x86-64 and aarch64), not on this system";
const NO_PERF_HERE: &str = "this kernel has no perf events";
const PERF_DEADLY: &str = "the seccomp filter of this process ends it at perf_event_open, which is therefore not \
    called; allow it (`SystemCallFilter=` of systemd)";
const PERF_REFUSED: &str = "perf_event_open is refused; allow it on the host with \
    `sysctl kernel.perf_event_paranoid=2`, in a container with the capability PERFMON \
    (`docker run --cap-add PERFMON`)";

fn describe_rate(periods: Periods) -> String {
    let rate = |period_ns: u64| 1e9 / period_ns.max(1) as f64;
    let (first, last) = (rate(periods.first()), rate(periods.last()));
    if periods.first() == periods.last() {
        return format!("{first:.0} samples a second of CPU time");
    }
    format!("{first:.0} samples a second of CPU time, down to {last:.0} of a thread that has many")
}

fn describe_perf(perf: &Perf, periods: Periods) -> String {
    let kernel = if perf.sees_kernel() {
        "time in the kernel has its frames"
    } else {
        "time in the kernel is one frame of its own (its functions need CAP_PERFMON or \
             kernel.perf_event_paranoid=1)"
    };
    let hardware = if perf.has_hardware() { "counted" } else { "not available" };
    let rate = describe_rate(periods);
    format!("source perf: {rate}; {kernel}; hardware counters {hardware}")
}

fn describe_timers(timers: &Timers, periods: Periods, perf_refused: &str) -> String {
    let period_ns = periods.first();
    let wanted = 1e9 / period_ns.max(1) as f64;
    let rate = match (timers.clock(), sys::tick_ns()) {
        (TimerClock::Cpu, Some(tick_ns)) if tick_ns > period_ns => format!(
            "{:.0} samples a second of CPU time, the kernel's tick, instead of {wanted:.0} (finer with \
             TRACING_PROFILING_TIMER_CLOCK=monotonic, which interrupts waiting system calls)",
            1e9 / tick_ns as f64
        ),
        (TimerClock::Cpu, _) => describe_rate(periods),
        (TimerClock::Monotonic, _) => {
            format!("{}, which interrupt waiting system calls", describe_rate(periods))
        }
    };
    format!(
        "source timer: {rate}; time in the kernel shows at the user's call; no hardware counters; \
         perf would see more: {perf_refused}"
    )
}

fn describe_refusal(why: WhyRefused) -> &'static str {
    match why {
        WhyRefused::NotAllowed => "timer_create is not allowed here",
        WhyRefused::NotSupported | WhyRefused::OtherSystem => "this system has none",
        WhyRefused::Deadly => "the seccomp filter of this process ends it at their system calls",
        WhyRefused::NoTimers => "as many signals are pending as `ulimit -i` lets this user have",
        WhyRefused::NoFiles => "no more files may be open",
        WhyRefused::NoLockedMemory | WhyRefused::NoMemory => "there is no memory",
        WhyRefused::Other(_) | WhyRefused::NotAsked | WhyRefused::Ended => "for an unusual reason",
    }
}

impl ArmThreads for Sampler {
    fn begin(&self) -> Begun {
        // The thread's own filters may be others than those of the thread that made the layer.
        sys::look_at_filters();
        let counters = &self.0.counters;
        let is_refused = self.is_refused();
        if is_refused {
            Counters::add(&counters.threads.unsampled, 1);
            self.0.perf.iter().filter_map(Perf::refused).for_each(|why| self.note_refusal(why));
        }
        let source = Box::new(ThreadSampler {
            waker: self.0.waker.clone(),
            unsampled: is_refused.then(|| Arc::clone(counters)),
            has_hardware: self.0.perf.as_ref().is_some_and(Perf::has_hardware),
        });
        let sampled = (!is_refused).then(|| {
            let stack = if self.may_have_timers() { sys::stack_bounds() } else { None };
            if self.uses_timers() {
                // Who cannot have them is told when one is asked for.
                _ = sys::unblock_timers();
            }
            let first = Arc::new(Arming::none());
            let tid = sys::current_tid();
            let period_ns = self.0.first_period_ns.load(Ordering::Relaxed);
            let thread = SampledThread::new(tid, stack, Rate::of(period_ns), Arc::clone(&first));
            let thread = Arc::new(thread);
            let is_over = self.0.is_over.lock();
            if *is_over {
                thread.end();
            } else {
                self.0.new.lock().push(Arc::clone(&thread));
            }
            drop(is_over);
            // It may wait before its first sample.
            self.0.waker.wake();
            (thread, first)
        });
        Begun { sampled, source }
    }

    fn arm(&self, thread: &SampledThread) {
        #[cfg(test)]
        if let Some(scripted) = self.0.scripted.get() {
            scripted.arm(thread);
            return;
        }
        if self.0.sheds.load(Ordering::Relaxed) {
            return;
        }
        sys::look_at_filters();
        let armed = thread.follow(|last| {
            // Who ends everything says so first, and then looks for what is last, which waits for this.
            if last.ring.is_some() || *self.0.is_over.lock() || thread.is_over() {
                return None;
            }
            let arming = self.open(thread);
            if matches!(arming, Err(WhyRefused::Ended)) {
                return None;
            }
            let arming = arming.ok();
            let counters = &self.0.counters;
            if thread.note_refused(arming.is_none()) != arming.is_none() {
                match arming {
                    Some(_) => _ = counters.threads.unsampled.fetch_sub(1, Ordering::Relaxed),
                    None => Counters::add(&counters.threads.unsampled, 1),
                }
            }
            let arming = arming?;
            self.count_sampled(&arming);
            arming.note_since(sys::cpu_ns_of(thread.tid).unwrap_or(u64::MAX));
            Some(arming)
        });
        // Not before the thread can see where its samples are.
        if let Some(armed) = armed
            && let Err(why) = armed.start()
            && !thread.is_over()
        {
            self.note_refusal(why);
        }
    }
}

/// One thread, of which samples are taken or the CPU clock alone is read.
#[derive(Debug)]
struct ThreadSampler {
    waker: Waker,
    /// Where it is counted if it will not be sampled.
    unsampled: Option<Arc<Counters>>,
    has_hardware: bool,
}

impl Drop for ThreadSampler {
    fn drop(&mut self) {
        match &self.unsampled {
            Some(counters) => _ = counters.threads.unsampled.fetch_sub(1, Ordering::Relaxed),
            // Nothing else tells the collector that a thread has ended.
            None => self.waker.wake(),
        }
    }
}

impl ThreadSource for ThreadSampler {
    /// The thread itself opens its counters: a group of `perf_event` counts the thread that makes it.
    fn took_up(&self, arming: &Arming) {
        if arming.ring.is_some() && !arming.has_switch_records() {
            // It may have been begun with when no thread had a timer.
            _ = sys::unblock_timers();
        }
        if self.has_hardware && arming.has_switch_records() {
            sys::look_at_filters();
            let mut hardware = arming.hardware.lock();
            // Who gives it back says so before it takes the lock.
            if !arming.is_retired() {
                *hardware = HardwareCounters::open().ok();
            }
        }
    }

    /// One by one: those that were taken in the kernel are longer than others, and there are records beside
    /// them. What lies there may have been read long ago, but is written over only by this thread's own samples.
    fn count_samples(&self, arming: &Arming, from: u64, until: u64) -> Option<u64> {
        let ring = arming.ring.as_ref().filter(|ring| ring.timer().is_none())?;
        let fits = |head: u64| head.saturating_sub(from) <= ring.data_size() as u64;
        if !fits(until) {
            return None;
        }
        let records = Records::between(&***ring, from, until);
        let samples = records.filter(|record| matches!(record, Ok(Record::Sample(_)))).count();
        fits(ring.head()).then_some(samples as u64)
    }

    fn usage(&mut self, arming: Option<&Arming>) -> Usage {
        let used = sys::thread_usage().unwrap_or_default();
        let hardware = arming.and_then(|arming| arming.hardware.lock().as_ref()?.read().ok());
        let HardwareCounts { cycles, instructions, cache_misses } =
            hardware.and_then(|words| parse_group(&words)).unwrap_or_default();
        Usage {
            minor_faults: used.minor_faults,
            major_faults: used.major_faults,
            voluntary_switches: used.voluntary_switches,
            involuntary_switches: used.involuntary_switches,
            cycles,
            instructions,
            cache_misses,
        }
    }

    fn wake_collector(&self) {
        self.waker.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_have_the_names_that_users_give() {
        let names = ["auto", "perf", "timer", "none"].map(str::parse);
        assert_eq!(
            names,
            [Ok(Source::Auto), Ok(Source::Perf), Ok(Source::Timer), Ok(Source::None)]
        );
        assert_eq!("Perf".parse::<Source>(), Err(()));
    }
}

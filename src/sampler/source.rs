//! The choice of the source that samples a thread.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::arming::Arming;
use super::describe::{
    OTHER_SYSTEM, PERF_DEADLY, PERF_NOT_SUPPORTED, PERF_REFUSED, describe_perf, describe_refusal,
    describe_timers,
};
use super::hooks::{ArmThreads, Begun};
use super::losses::LossTimes;
use super::perf::Perf;
use super::rate::{Level, Periods, Rate};
use super::thread::SampledThread;
use super::thread_source::ThreadSampler;
use super::timer::Timers;
use crate::stats::Counters;
use crate::sys::{self, SampleRequest, TimerClock, Waker, WhyRefused};

/// The source of stacks; `TRACING_PROFILING_SOURCE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// `perf` where it is allowed, and `timer` where perf is refused or has no room for further threads.
    #[default]
    Auto,
    /// Perf events: the kernel copies stacks and records context switches.
    Perf,
    /// A timer per thread, and a signal handler that copies the thread's registers and stack.
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

/// The settings of the sources.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceSettings {
    pub(crate) source: Source,
    pub(crate) timer_clock: TimerClock,
    /// The signal of timers; `None` to choose one.
    pub(crate) signal: Option<i32>,
    pub(crate) stack_bytes: u32,
    /// `None` for the default.
    pub(crate) periods: Option<Periods>,
    /// Whether to capture waits.
    pub(crate) waits: bool,
    /// For how long a span must be entered before its threads are sampled; `None` if its rule decides.
    pub(crate) arm_after: Option<Duration>,
}

/// Arms threads.
#[derive(Clone, Debug)]
pub(crate) struct Sampler(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    perf: Option<Perf>,
    timers: Option<Timers>,
    /// Why no thread can have a timer, if that was probed and failed.
    timers_refused: Option<WhyRefused>,
    /// No timer is created while a tracer is attached.
    avoids_tracers: bool,
    is_traced: AtomicBool,
    is_over: Mutex<bool>,
    /// No more threads are armed at present.
    sheds: AtomicBool,
    counters: Arc<Counters>,
    losses: LossTimes,
    waker: Waker,
    periods: Periods,
    /// The period of new threads.
    first_period_ns: AtomicU64,
    new: Mutex<Vec<Arc<SampledThread>>>,
    /// Threads that were parked and are in use again.
    returned: Mutex<Vec<Arc<SampledThread>>>,
    /// Replaces both sources in a test.
    #[cfg(test)]
    scripted: std::sync::OnceLock<Box<dyn ArmThreads>>,
}

impl Sampler {
    /// Probes on the calling thread what this process is allowed to do.
    pub(crate) fn new(
        SourceSettings { source, timer_clock, signal, periods, .. }: SourceSettings,
        request: SampleRequest,
        waker: &Waker,
        counters: Arc<Counters>,
    ) -> Self {
        sys::read_filters();
        let perf = matches!(source, Source::Auto | Source::Perf).then(|| Perf::new(request));
        let timers = matches!(source, Source::Auto | Source::Timer).then(|| {
            sys::note_claimed_signals();
            Timers::new(SampleRequest { signal, ..request }, timer_clock)
        });
        let avoids_tracers = source == Source::Auto;
        let is_traced = avoids_tracers && sys::is_traced();
        // No signal handler is installed if perf works.
        let needs_timers = perf.as_ref().is_none_or(|perf| perf.refused().is_some());
        let timers_refused = timers
            .as_ref()
            .filter(|_| needs_timers)
            .and_then(|timers| timers.probe(!is_traced).err());
        // Other reasons may no longer apply when the first thread is armed.
        let timers_refused = timers_refused.filter(|why| why.is_permanent());
        // A timer on the monotonic clock interrupts a blocking system call at each expiration.
        let interrupts = needs_timers && timer_clock == TimerClock::Monotonic;
        let usual = if interrupts { Periods::INTERRUPTING } else { Periods::USUAL };
        let periods = periods.unwrap_or(usual);
        Self(Arc::new(Shared {
            perf,
            timers,
            timers_refused,
            avoids_tracers,
            is_traced: AtomicBool::new(is_traced),
            is_over: Mutex::new(false),
            sheds: AtomicBool::new(false),
            counters,
            losses: LossTimes::default(),
            waker: waker.clone(),
            periods,
            first_period_ns: AtomicU64::new(periods.first()),
            new: Mutex::default(),
            returned: Mutex::default(),
            #[cfg(test)]
            scripted: std::sync::OnceLock::new(),
        }))
    }

    /// The source in use: `perf`, `timer` or `none`.
    pub(crate) fn name(&self) -> &'static str {
        let shared = &*self.0;
        let has_perf = shared.perf.as_ref().is_some_and(|perf| perf.refused().is_none());
        let has_timers = shared.timers.is_some() && shared.timers_refused.is_none();
        let otherwise = if has_timers { "timer" } else { "none" };
        if has_perf { "perf" } else { otherwise }
    }

    /// Whether no thread can be sampled.
    pub(crate) fn is_refused(&self) -> bool {
        self.name() == "none"
    }

    pub(crate) fn periods(&self) -> Periods {
        self.0.periods
    }

    /// Multiplies the time between samples of new threads.
    pub(crate) fn slow_down(&self, times: f64) {
        let first = self.0.periods.rate(Level::First).slowed(times);
        self.0.first_period_ns.store(first.period_ns, Ordering::Relaxed);
    }

    /// Sets whether arming is suspended.
    pub(crate) fn set_sheds(&self, sheds: bool) {
        self.0.sheds.store(sheds, Ordering::Relaxed);
    }

    /// Describes the source, its limits and how to lift them, in one line. The flag is true if it is less than was
    /// requested.
    pub(crate) fn describe(&self) -> (String, bool) {
        let (mut line, is_less) = self.describe_source();
        if sys::thread_cpu_ns().is_none() {
            line.push_str(
                "; the CPU time of threads cannot be read: rules with `on_cpu`, `own_on_cpu` or `off_cpu` match no span",
            );
        }
        (line, is_less)
    }

    fn describe_source(&self) -> (String, bool) {
        let shared = &*self.0;
        let periods = shared.periods;
        let is_other_system = |why| why == Some(WhyRefused::OtherSystem);
        let of_perf = shared.perf.as_ref().and_then(Perf::refused);
        if is_other_system(of_perf) || is_other_system(shared.timers_refused) {
            return (OTHER_SYSTEM.to_owned(), true);
        }
        let perf_refused = match &shared.perf {
            Some(perf) => match perf.refused() {
                None => return (describe_perf(perf, periods), false),
                Some(WhyRefused::NotSupported) => PERF_NOT_SUPPORTED,
                Some(WhyRefused::Deadly) => PERF_DEADLY,
                Some(_) => PERF_REFUSED,
            },
            None => "it was not requested",
        };
        match (&shared.timers, shared.timers_refused) {
            (Some(timers), None) => {
                let is_traced = shared.is_traced.load(Ordering::Relaxed);
                (describe_timers(timers, periods, perf_refused, is_traced), is_traced)
            }
            (None, _) if shared.perf.is_none() => (
                "source none, as configured: kept spans have times but no stacks".to_owned(),
                false,
            ),
            (None, _) => (
                format!(
                    "source none: kept spans have times but no stacks; perf is not used: \
                     {perf_refused}; or set TRACING_PROFILING_SOURCE=auto"
                ),
                true,
            ),
            (Some(_), Some(why)) => (
                format!(
                    "source none: kept spans have times but no stacks; timers are refused \
                     ({}); perf is not used: {perf_refused}",
                    describe_refusal(why),
                ),
                true,
            ),
        }
    }

    /// Whether samples are taken of every thread but in user code only, and none was lost since then. On-CPU time without
    /// samples is then time in the kernel.
    pub(crate) fn hides_kernel_alone(&self, since_ns: u64) -> bool {
        let perf = self.0.perf.as_ref().filter(|perf| perf.refused().is_none());
        perf.is_some_and(|perf| !perf.sees_kernel()) && self.0.losses.are_none_since(since_ns)
    }

    /// Notices at that time whether samples were lost, or threads not sampled, since the last call.
    pub(crate) fn check_losses(&self, now_ns: u64) {
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
            &counters.samples.dropped_signal_stack_full,
            &counters.samples.dropped_late,
            &counters.sampling.records_malformed,
            &counters.sampling.throttled,
        ];
        let count = losses.iter().map(|counter| counter.load(Ordering::Relaxed)).sum();
        self.0.losses.check(count, now_ns);
    }

    /// Holds an event open. Called on the collector's thread as it starts, within a second of the first probe.
    pub(crate) fn keep_on(&self) {
        if let Some(perf) = &self.0.perf {
            perf.keep_on();
        }
    }

    /// Ends arming: no more events are opened.
    pub(crate) fn end(&self) {
        // Under the lock: a thread that is being set up has either added itself to `new`, or finds this set.
        *self.0.is_over.lock() = true;
        if let Some(perf) = &self.0.perf {
            perf.end();
        }
    }

    /// The threads that were set up since the last call.
    pub(crate) fn take_new(&self) -> Vec<Arc<SampledThread>> {
        std::mem::take(&mut self.0.new.lock())
    }

    /// The threads that have returned to the scans since the last call.
    pub(crate) fn take_returned(&self) -> Vec<Arc<SampledThread>> {
        std::mem::take(&mut self.0.returned.lock())
    }

    /// A thread that was parked may be about to enter a span.
    pub(crate) fn return_to_scans(&self, thread: &Arc<SampledThread>) {
        self.0.returned.lock().push(Arc::clone(thread));
        self.0.waker.wake_soon();
    }

    #[cfg(test)]
    pub(crate) fn set_scripted(&self, scripted: Box<dyn ArmThreads>) {
        _ = self.0.scripted.set(scripted);
    }

    /// Adds a thread that a test has set up.
    #[cfg(test)]
    pub(crate) fn add_scripted(&self, thread: Arc<SampledThread>) {
        self.0.new.lock().push(thread);
    }

    pub(crate) fn note_thread_sampled(&self, arming: &Arming) {
        let counters = &self.0.counters;
        Counters::add(&counters.threads.armed, 1);
        Counters::add(&counters.threads.sampled, 1);
        if !arming.has_switch_records() {
            Counters::add(&counters.threads.sampled_by_timer, 1);
        }
    }

    /// Resumes the sampling of a paused thread that is in an old span again.
    pub(crate) fn start_again(&self, thread: &SampledThread, arming: &Arming) {
        arming.note_since(sys::cpu_ns_of(thread.tid()).unwrap_or(u64::MAX));
        if let Err(why) = arming.start() {
            self.note_refusal(why);
        }
    }

    /// Releases the last arming of a thread whose sampling has ended, once it has been read. `samples` is the number of
    /// its samples from position `from` on that hooks have not counted.
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

    /// Releases an arming that has been read and no longer samples its thread. `samples` is the number of samples in
    /// the open interval, which begins at `from`, that hooks have not counted.
    pub(crate) fn retire(&self, arming: &Arming, from: u64, samples: u64) {
        if arming.ring.is_none() {
            return;
        }
        arming.retire(from, samples);
        let counters = &self.0.counters;
        counters.threads.sampled.fetch_sub(1, Ordering::Relaxed);
        if arming.has_switch_records() {
            self.0.perf.iter().for_each(|perf| perf.give_back(arming));
        } else {
            self.0.timers.iter().for_each(Timers::give_back);
            counters.threads.sampled_by_timer.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Releases an arming that no thread has got.
    fn give_back_unused(&self, arming: &Arming) {
        arming.retire(0, 0);
        match arming.has_switch_records() {
            true => self.0.perf.iter().for_each(|perf| perf.give_back(arming)),
            false => self.0.timers.iter().for_each(Timers::give_back),
        }
    }

    /// Whether any thread is currently sampled by a timer.
    pub(crate) fn has_timers(&self) -> bool {
        self.0.counters.threads.sampled_by_timer.load(Ordering::Relaxed) > 0
    }

    /// Opens the rings of that thread, inactive until started.
    fn open(&self, thread: &SampledThread) -> Result<Arming, WhyRefused> {
        let shared = &*self.0;
        let Rate { period_ns, by_timer } = thread.rate();
        let is_traced = shared.is_traced.load(Ordering::Relaxed);
        if by_timer
            && !is_traced
            && let Some(timers) = &shared.timers
        {
            // Without a timer, perf is used.
            let by_timer = timers.open(thread.tid(), thread.stack.clone(), period_ns);
            if let Ok(arming) = by_timer {
                return Ok(arming);
            }
        }
        let by_perf = shared.perf.as_ref().map(|perf| perf.open(thread.tid(), period_ns));
        let refused = match by_perf {
            Some(Ok(arming)) => return Ok(arming),
            // The thread ends while it is being armed: this is not a refusal.
            Some(Err(_)) if thread.is_over() => return Err(WhyRefused::Ended),
            Some(Err(WhyRefused::Ended)) => return Err(WhyRefused::Ended),
            Some(Err(why)) => {
                // If perf is refused for all threads, that is counted once.
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
        if is_traced {
            self.note_refusal(WhyRefused::Traced);
            return Err(WhyRefused::Traced);
        }
        timers
            .open(thread.tid(), thread.stack.clone(), period_ns)
            .inspect_err(|why| self.note_refusal(*why))
    }

    pub(super) fn timers(&self) -> Option<&Timers> {
        self.0.timers.as_ref()
    }

    /// Whether a thread can have a timer.
    pub(crate) fn may_have_timers(&self) -> bool {
        self.0.timers.is_some() && self.0.timers_refused.is_none()
    }

    /// Whether threads have timers. They have none while perf works.
    fn uses_timers(&self) -> bool {
        let has_perf = self.0.perf.as_ref().is_some_and(|perf| perf.refused().is_none());
        let counters = &self.0.counters;
        let run_out =
            [&counters.threads.refused_open_files, &counters.threads.refused_locked_memory];
        let has_run_out = run_out.iter().any(|counter| counter.load(Ordering::Relaxed) > 0);
        self.may_have_timers() && (!has_perf || has_run_out)
    }

    /// Checks whether a tracer is attached. Returns whether there may be no timers because of it.
    pub(crate) fn check_tracer(&self) -> bool {
        let shared = &*self.0;
        let is_traced = shared.avoids_tracers && self.watches_signal_stacks() && sys::is_traced();
        shared.is_traced.store(is_traced, Ordering::Relaxed);
        is_traced
    }

    /// Whether threads must notice that their signal stack has become too small.
    pub(super) fn watches_signal_stacks(&self) -> bool {
        self.uses_timers() || self.has_timers()
    }

    fn note_refusal(&self, why: WhyRefused) {
        if why == WhyRefused::Ended {
            return;
        }
        let counters = &self.0.counters;
        let counter = match why {
            WhyRefused::NoSignal => &counters.threads.refused_other,
            WhyRefused::Traced => &counters.threads.refused_traced,
            why if why.is_permanent() => &counters.threads.refused_perf,
            WhyRefused::NoLockedMemory => &counters.threads.refused_locked_memory,
            WhyRefused::NoFiles => &counters.threads.refused_open_files,
            WhyRefused::NoTimers => &counters.threads.refused_timers,
            WhyRefused::SmallSignalStack => &counters.threads.refused_signal_stack,
            _ => &counters.threads.refused_other,
        };
        Counters::add(counter, 1);
    }
}

impl ArmThreads for Sampler {
    fn begin(&self) -> Begun {
        // The thread's seccomp filters may differ from those of the thread that built the layer.
        sys::read_filters();
        let counters = &self.0.counters;
        let is_refused = self.is_refused();
        if is_refused {
            Counters::add(&counters.threads.unsampled, 1);
            self.0.perf.iter().filter_map(Perf::refused).for_each(|why| self.note_refusal(why));
        }
        // A thread that installs a smaller one later is set up anew.
        let has_small_signal_stack = self.may_have_timers() && sys::has_small_signal_stack();
        let source = Box::new(ThreadSampler {
            sampler: self.clone(),
            has_small_signal_stack,
            waker: self.0.waker.clone(),
            unsampled: is_refused.then(|| Arc::clone(counters)),
            has_hardware: self.0.perf.as_ref().is_some_and(Perf::has_hardware),
        });
        let sampled = (!is_refused).then(|| {
            let stack = match self.may_have_timers() {
                true if has_small_signal_stack => Err(WhyRefused::SmallSignalStack),
                true => sys::stack_bounds().ok_or(WhyRefused::NotAsked),
                false => Err(WhyRefused::NotAsked),
            };
            if self.uses_timers() && !has_small_signal_stack {
                self.timers().iter().for_each(|timers| timers.unblock());
            }
            let first = Arc::new(Arming::none());
            let rate = Rate::of(self.0.first_period_ns.load(Ordering::Relaxed));
            let current = sys::current_thread();
            let thread = Arc::new(SampledThread::new(current, stack, rate, Arc::clone(&first)));
            let is_over = self.0.is_over.lock();
            if *is_over {
                thread.end();
            } else {
                self.0.new.lock().push(Arc::clone(&thread));
            }
            drop(is_over);
            // The thread may block before its first sample. Many may start at once.
            self.0.waker.wake_soon();
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
        sys::read_filters();
        let armed = thread.follow(|last| {
            // `end` first sets the flag and then takes the last arming, whose lock is held here.
            if last.ring.is_some() || *self.0.is_over.lock() || thread.is_over() {
                return None;
            }
            let arming = self.open(thread);
            // If the thread has ended since the check above, its id, and so the event, may be those of another thread,
            // even of another process.
            let is_gone = || thread.is_over() || !sys::is_own_thread(thread.tid());
            if matches!(arming, Err(WhyRefused::Ended)) || arming.is_ok() && is_gone() {
                arming.iter().for_each(|arming| self.give_back_unused(arming));
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
            self.note_thread_sampled(&arming);
            arming.note_since(sys::cpu_ns_of(thread.tid()).unwrap_or(u64::MAX));
            Some(arming)
        });
        // Only now can the thread find the ring of its samples.
        if let Some(armed) = armed
            && let Err(why) = armed.start()
            && !thread.is_over()
        {
            self.note_refusal(why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_parsed_by_name() {
        let names = ["auto", "perf", "timer", "none"].map(str::parse);
        assert_eq!(
            names,
            [Ok(Source::Auto), Ok(Source::Perf), Ok(Source::Timer), Ok(Source::None)]
        );
        assert_eq!("Perf".parse::<Source>(), Err(()));
    }
}

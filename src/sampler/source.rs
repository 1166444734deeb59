//! Which source samples which thread.

use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use super::perf::{Perf, software_usage};
use super::timer::Timers;
use crate::span::{ArmThreads, Armed, Recording, ThreadSource, Usage};
use crate::stats::Counters;
use crate::sys::{self, Clock, Position, SampleRequest, TimerClock, Waker, WhyRefused};

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
    /// Between samples; `None` to let the rules decide.
    pub(crate) period: Option<Duration>,
    /// Whether to look where threads wait.
    pub(crate) waits: bool,
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
    counters: Arc<Counters>,
    waker: Waker,
    new: Mutex<Vec<Arc<Recording>>>,
}

impl Sampler {
    /// Tries out on the calling thread what this process is allowed.
    pub(crate) fn new(
        SourceSettings { source, timer_clock, .. }: SourceSettings,
        request: SampleRequest,
        waker: &Waker,
        counters: Arc<Counters>,
    ) -> Self {
        sys::look_at_filters();
        let perf = matches!(source, Source::Auto | Source::Perf)
            .then(|| Perf::new(request, waker.clone()));
        let timers = matches!(source, Source::Auto | Source::Timer)
            .then(|| Timers::new(request, timer_clock, waker.clone()));
        // No signal handler where perf will do.
        let needs_timers = perf.as_ref().is_none_or(|perf| perf.refused().is_some());
        let timers_refused =
            timers.as_ref().filter(|_| needs_timers).and_then(|timers| timers.probe().err());
        // The rest may be otherwise by the time the first thread is armed.
        let timers_refused = timers_refused.filter(|why| why.is_for_good());
        Self(Arc::new(Shared {
            perf,
            timers,
            timers_refused,
            is_over: Mutex::new(false),
            counters,
            waker: waker.clone(),
            new: Mutex::default(),
        }))
    }

    /// Whether no thread at all can be sampled.
    pub(crate) fn is_refused(&self) -> bool {
        let shared = &*self.0;
        let has_perf = shared.perf.as_ref().is_some_and(|perf| perf.refused().is_none());
        let has_timers = shared.timers.is_some() && shared.timers_refused.is_none();
        !has_perf && !has_timers
    }

    /// What runs here, what it cannot see and what would change that, in one line. Whether it is
    /// less than was asked for.
    pub(crate) fn describe(&self, period_ns: u64) -> (String, bool) {
        let (mut line, is_less) = self.describe_source(period_ns);
        if sys::thread_cpu_ns().is_none() {
            line.push_str(
                "; whether threads run inside spans is unknown: `on_cpu` and `off_cpu` of rules hold for no span",
            );
        }
        (line, is_less)
    }

    fn describe_source(&self, period_ns: u64) -> (String, bool) {
        let shared = &*self.0;
        let rate = 1e9 / period_ns.max(1) as f64;
        let is_elsewhere = |why| why == Some(WhyRefused::OtherSystem);
        let of_perf = shared.perf.as_ref().and_then(Perf::refused);
        if is_elsewhere(of_perf) || is_elsewhere(shared.timers_refused) {
            return (ELSEWHERE.to_owned(), true);
        }
        let perf_refused = match &shared.perf {
            Some(perf) => match perf.refused() {
                None => return (describe_perf(perf, rate), false),
                Some(WhyRefused::NotSupported) => NO_PERF_HERE,
                Some(WhyRefused::Deadly) => PERF_DEADLY,
                Some(_) => PERF_REFUSED,
            },
            None => "it was not asked for",
        };
        match (&shared.timers, shared.timers_refused) {
            (Some(timers), None) => (describe_timers(timers, rate, period_ns, perf_refused), false),
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
            &counters.threads_refused_perf,
            &counters.threads_refused_locked_memory,
            &counters.threads_refused_open_files,
            &counters.threads_refused_timers,
            &counters.threads_refused_other,
            &counters.samples_dropped_marks_full,
            &counters.samples_dropped_notices_full,
            &counters.samples_dropped_unknown_span,
            &counters.records_malformed,
            &counters.sampling_throttled,
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

    /// The threads armed since the last call.
    pub(crate) fn take_new(&self) -> Vec<Arc<Recording>> {
        std::mem::take(&mut self.0.new.lock())
    }

    /// A thread that a test has armed.
    #[cfg(test)]
    pub(crate) fn add_scripted(&self, recording: Arc<Recording>) {
        let counters = &self.0.counters;
        Counters::add(&counters.threads_sampled, 1);
        if !recording.has_switch_records() {
            Counters::add(&counters.threads_sampled_by_timer, 1);
        }
        self.0.new.lock().push(recording);
    }

    /// A recording is over and its ring is read: another thread may have the place.
    pub(crate) fn give_back(&self, recording: &Recording) {
        for ring in [&recording.ring, &recording.switches].into_iter().flatten() {
            ring.retire();
        }
        *recording.hardware.lock() = None;
        let counters = &self.0.counters;
        counters.threads_sampled.fetch_sub(1, Ordering::Relaxed);
        if recording.has_switch_records() {
            self.0.perf.iter().for_each(Perf::give_files);
        } else {
            counters.threads_sampled_by_timer.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether a thread is sampled by a timer now.
    pub(crate) fn has_timers(&self) -> bool {
        self.0.counters.threads_sampled_by_timer.load(Ordering::Relaxed) > 0
    }

    fn arm_thread(&self) -> Result<Armed, WhyRefused> {
        let shared = &*self.0;
        let by_perf = shared.perf.as_ref().map(Perf::arm);
        let refused = match by_perf {
            Some(Ok(armed)) => return Ok(armed),
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
        let armed = timers.arm().inspect_err(|why| self.note_refusal(*why))?;
        Counters::add(&shared.counters.threads_sampled_by_timer, 1);
        Ok(armed)
    }

    fn note_refusal(&self, why: WhyRefused) {
        let counters = &self.0.counters;
        let counter = match why {
            why if why.is_for_good() => &counters.threads_refused_perf,
            WhyRefused::NoLockedMemory => &counters.threads_refused_locked_memory,
            WhyRefused::NoFiles => &counters.threads_refused_open_files,
            WhyRefused::NoTimers => &counters.threads_refused_timers,
            _ => &counters.threads_refused_other,
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

fn describe_perf(perf: &Perf, rate: f64) -> String {
    let kernel = if perf.sees_kernel() {
        "time in the kernel has its frames"
    } else {
        "time in the kernel is one frame of its own (its functions need CAP_PERFMON or \
             kernel.perf_event_paranoid=1)"
    };
    let hardware = if perf.has_hardware() { "counted" } else { "not available" };
    format!(
        "source perf: {rate:.0} samples a second of CPU time; {kernel}; hardware counters {hardware}"
    )
}

fn describe_timers(timers: &Timers, rate: f64, period_ns: u64, perf_refused: &str) -> String {
    let rate = match (timers.clock(), sys::tick_ns()) {
        (TimerClock::Cpu, Some(tick_ns)) if tick_ns > period_ns => format!(
            "{:.0} samples a second of CPU time, the kernel's tick, instead of {rate:.0} (finer with \
             TRACING_PROFILING_TIMER_CLOCK=monotonic, which interrupts waiting system calls)",
            1e9 / tick_ns as f64
        ),
        (TimerClock::Cpu, _) => format!("{rate:.0} samples a second of CPU time"),
        (TimerClock::Monotonic, _) => {
            format!("{rate:.0} samples a second, which interrupt waiting system calls")
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
        WhyRefused::Other(_) | WhyRefused::NotAsked => "for an unusual reason",
    }
}

impl ArmThreads for Sampler {
    fn arm(&self, _clock: &Clock) -> Armed {
        // The thread's own filters may be others than those of the thread that made the layer.
        sys::look_at_filters();
        match self.arm_thread() {
            Ok(armed) => {
                Counters::add(&self.0.counters.threads_sampled, 1);
                let is_over = self.0.is_over.lock();
                if let Some(recording) = armed.recording.as_ref().filter(|_| *is_over) {
                    recording.end();
                    self.give_back(recording);
                } else {
                    self.0.new.lock().extend(armed.recording.clone());
                }
                drop(is_over);
                // It may wait before its first sample.
                self.0.waker.wake();
                armed
            }
            Err(_) => {
                let source = Unsampled::new(Arc::clone(&self.0.counters));
                Armed {
                    recording: None,
                    samples: Position::fixed(),
                    sample_size: 1,
                    may_retry: !self.is_refused(),
                    source: Box::new(source),
                }
            }
        }
    }
}

/// A thread of which only the CPU clock is read.
#[derive(Debug)]
struct Unsampled {
    counters: Arc<Counters>,
}

impl Unsampled {
    fn new(counters: Arc<Counters>) -> Self {
        Counters::add(&counters.threads_unsampled, 1);
        Self { counters }
    }
}

impl Drop for Unsampled {
    fn drop(&mut self) {
        self.counters.threads_unsampled.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ThreadSource for Unsampled {
    fn usage(&mut self) -> Usage {
        software_usage()
    }

    fn set_period_ns(&mut self, _period_ns: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
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

//! The choice of the source that samples a thread.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::hooks::{AttachThreads, ThreadSampler, ThreadSetup};
use super::perf::Perf;
use super::probe::Probed;
use super::rate::{Periods, Rate};
use super::session::SamplingSession;
use super::thread::ThreadShared;
use super::timer::Timers;
use crate::sys::{self, FilteredSyscall, SampleRequest, Waker, WhyRefused};

#[cfg(any(test, feature = "_test"))]
mod scripted;

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
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        match text {
            "auto" => Ok(Self::Auto),
            "perf" => Ok(Self::Perf),
            "timer" => Ok(Self::Timer),
            "none" => Ok(Self::None),
            _ => Err(UnknownName::new(["auto", "perf", "timer", "none"])),
        }
    }
}

/// The error for a name that is not one of a few, or whose feature is off.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected one of {}", known.join(", "))]
pub struct UnknownName {
    known: Vec<&'static str>,
}

impl UnknownName {
    pub fn new(known: impl IntoIterator<Item = &'static str>) -> Self {
        Self { known: known.into_iter().collect() }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct SourceSettings {
    pub source: Source,
    /// The signal of timers; `None` to choose one.
    pub signal: Option<i32>,
    pub stack_bytes: u32,
    /// `None` for the default.
    pub periods: Option<Periods>,
}

/// Counters of threads, shared by all clones.
pub type ThreadCounters = Arc<ThreadCounts>;

/// One counter for each cause. `attached` and `attach_deferred` count times, `sampled` and `unsampled` threads.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "`ThreadStats` of `tracing-profiling` has them")]
pub struct ThreadCounts {
    pub attach_deferred: AtomicU64,
    pub attached: AtomicU64,
    pub sampled: AtomicU64,
    pub sampled_by_timer: AtomicU64,
    pub unsampled: AtomicU64,
    pub refused_perf: AtomicU64,
    pub refused_locked_memory: AtomicU64,
    pub refused_timers: AtomicU64,
    pub refused_signal_stack: AtomicU64,
    pub refused_traced: AtomicU64,
    pub refused_open_files: AtomicU64,
    pub refused_other: AtomicU64,
    pub unlisted: AtomicU64,
}

/// When a loss was last noticed. It does not matter to spans that opened later.
#[derive(Debug, Default)]
struct LossTimes {
    is_new: AtomicBool,
    /// 0 if there was none.
    last_ns: AtomicU64,
}

impl LossTimes {
    fn note(&self) {
        self.is_new.store(true, Ordering::Relaxed);
    }

    /// Notices at that time whether there was a loss since the last call.
    fn check(&self, now_ns: u64) {
        if self.is_new.swap(false, Ordering::Relaxed) {
            self.last_ns.store(now_ns.max(1), Ordering::Relaxed);
        }
    }

    fn are_none_since(&self, since_ns: u64) -> bool {
        let last_ns = self.last_ns.load(Ordering::Relaxed);
        last_ns == 0 || last_ns < since_ns
    }
}

/// Attaches threads.
#[derive(Clone, Debug)]
pub struct Sampler(pub(super) Arc<Shared>);

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) probed: Probed,
    /// No timer is created while a tracer is attached.
    avoids_tracers: bool,
    is_traced: AtomicBool,
    unsampled: Mutex<Option<WhyRefused>>,
    is_over: Mutex<bool>,
    counters: ThreadCounters,
    losses: LossTimes,
    pub(super) waker: Waker,
    periods: Periods,
    first_period_ns: AtomicU64,
    /// Threads on their way to the collector: those that are new, and those that were parked and are in use again.
    new: Mutex<Vec<Arc<ThreadShared>>>,
    returned: Mutex<Vec<Arc<ThreadShared>>>,
    /// Replaces both sources in a test.
    #[cfg(any(test, feature = "_test"))]
    scripted: std::sync::OnceLock<Box<dyn AttachThreads>>,
}

impl Sampler {
    /// Probes what this process is allowed to do.
    pub fn new(
        settings: SourceSettings,
        ring_bytes: usize,
        waker: &Waker,
        counters: ThreadCounters,
    ) -> Self {
        let SourceSettings { signal, stack_bytes, .. } = settings;
        let periods = settings.periods.unwrap_or(Periods::USUAL);
        let period_ns = periods.full_ns;
        let usual = SampleRequest::default();
        let request = SampleRequest { period_ns, stack_bytes, ring_bytes, signal, ..usual };
        let probed = Probed::new(settings.source, request);
        Self(Arc::new(Shared {
            avoids_tracers: settings.source == Source::Auto,
            is_traced: AtomicBool::new(probed.is_traced),
            probed,
            unsampled: Mutex::default(),
            is_over: Mutex::new(false),
            counters,
            losses: LossTimes::default(),
            waker: waker.clone(),
            periods,
            first_period_ns: AtomicU64::new(periods.full_ns),
            new: Mutex::default(),
            returned: Mutex::default(),
            #[cfg(any(test, feature = "_test"))]
            scripted: std::sync::OnceLock::new(),
        }))
    }

    /// The source in use: `perf`, `timer` or `none`.
    pub fn name(&self) -> &'static str {
        self.0.probed.name()
    }

    pub fn is_refused(&self) -> bool {
        self.name() == "none"
    }

    pub fn counters(&self) -> &ThreadCounters {
        &self.0.counters
    }

    pub fn periods(&self) -> Periods {
        self.0.periods
    }

    /// Multiplies the time between samples of new threads.
    pub fn slow_down(&self, times: f64) {
        let first = Rate::of(self.0.periods.full_ns).slowed(times);
        self.0.first_period_ns.store(first.period_ns, Ordering::Relaxed);
    }

    /// What this process was found to be allowed to do.
    pub fn probed(&self) -> &Probed {
        &self.0.probed
    }

    /// Why a thread was not sampled since then.
    pub fn unsampled(&self) -> Option<WhyRefused> {
        *self.0.unsampled.lock()
    }

    /// Whether user code of all threads is sampled, and none was lost since then. The rest of on-CPU time is the kernel's.
    pub fn hides_kernel_alone(&self, since_ns: u64) -> bool {
        let probed = &self.0.probed;
        let perf = probed.perf.as_ref().filter(|_| probed.has_perf());
        perf.is_some_and(|perf| !perf.sees_kernel()) && self.0.losses.are_none_since(since_ns)
    }

    /// A sample was lost of which no profile says so, or a thread not sampled.
    pub fn note_loss(&self) {
        self.0.losses.note();
    }

    /// How many signals of timers found no room on their stack since the last call.
    pub fn take_missed_signals(&self) -> u64 {
        let missed = sys::take_signals_without_room();
        if missed > 0 {
            self.note_loss();
        }
        missed
    }

    /// Notices at that time whether there was a loss since the last call.
    pub fn check_losses(&self, now_ns: u64) {
        self.0.losses.check(now_ns);
    }

    /// Holds an event open. Called on the collector's thread as it starts, within a second of the first probe.
    pub fn keep_alive(&self) {
        if let Some(perf) = &self.0.probed.perf {
            perf.keep_alive();
        }
    }

    /// Ends sampling: no more events are opened.
    pub fn end(&self) {
        // Under the lock: a thread that is being set up has either added itself to `new`, or finds this set.
        *self.0.is_over.lock() = true;
        if let Some(perf) = &self.0.probed.perf {
            perf.end();
        }
    }

    /// The threads that were set up since the last call.
    pub fn take_new(&self) -> Vec<Arc<ThreadShared>> {
        std::mem::take(&mut self.0.new.lock())
    }

    /// The threads that have returned to the scans since the last call.
    pub fn take_returned(&self) -> Vec<Arc<ThreadShared>> {
        std::mem::take(&mut self.0.returned.lock())
    }

    /// A thread that was parked may be about to enter a span.
    pub fn return_to_scans(&self, thread: &Arc<ThreadShared>) {
        self.0.returned.lock().push(Arc::clone(thread));
        self.0.waker.wake_soon();
    }

    pub fn note_thread_sampled(&self, session: &SamplingSession) {
        let counters = &self.0.counters;
        counters.attached.fetch_add(1, Ordering::Relaxed);
        counters.sampled.fetch_add(1, Ordering::Relaxed);
        if !session.has_switch_records() {
            counters.sampled_by_timer.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Resumes the sampling of a paused thread that is in an old span again.
    pub fn start_again(&self, thread: &ThreadShared, session: &SamplingSession) {
        session.note_since(sys::cpu_ns_of(thread.tid()).unwrap_or(u64::MAX));
        if let Err(why) = session.start() {
            self.note_not_started(session, why);
        }
    }

    fn note_not_started(&self, session: &SamplingSession, why: WhyRefused) {
        session.note_since(u64::MAX);
        self.note_refusal(why);
        self.note_unsampled_thread(why);
    }

    /// Releases the last session of a thread whose sampling has ended, once it has been read. `samples` is the number of
    /// its samples from position `from` on that hooks have not counted.
    pub fn give_back(
        &self,
        thread: &ThreadShared,
        session: &SamplingSession,
        from: u64,
        samples: u64,
    ) {
        self.retire(session, from, samples);
        if thread.note_refused(false) {
            self.0.counters.unsampled.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Releases a session that has been read and no longer samples its thread. `samples` is the number of samples in
    /// the open interval, which begins at `from`, that hooks have not counted.
    pub fn retire(&self, session: &SamplingSession, from: u64, samples: u64) {
        if session.ring.is_none() {
            return;
        }
        session.retire(from, samples);
        let counters = &self.0.counters;
        counters.sampled.fetch_sub(1, Ordering::Relaxed);
        if !session.has_switch_records() {
            counters.sampled_by_timer.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub fn has_timers(&self) -> bool {
        self.0.probed.timers.as_ref().is_some_and(|timers| !timers.taken.is_none())
    }

    /// Opens the rings of that thread, inactive until started.
    fn open(&self, thread: &ThreadShared) -> Result<SamplingSession, WhyRefused> {
        let shared = &*self.0;
        let rate = thread.rate();
        let is_traced = shared.is_traced.load(Ordering::Relaxed);
        let open_timer =
            |timers: &Timers| timers.open(thread.tid(), thread.stack.clone(), rate, &shared.waker);
        // Without a timer, perf is used.
        if rate.by_timer
            && !is_traced
            && let Some(timers) = &shared.probed.timers
            && let Ok(session) = open_timer(timers)
        {
            return Ok(session);
        }
        let by_perf = shared.probed.perf.as_ref().map(|perf| perf.open(thread.tid(), rate));
        let refused = match by_perf {
            Some(Ok(session)) => return Ok(session),
            // The thread ends while it is being attached: this is not a refusal.
            Some(Err(_)) if thread.is_over() => return Err(WhyRefused::Ended),
            Some(Err(WhyRefused::Ended)) => return Err(WhyRefused::Ended),
            Some(Err(why)) => {
                // If perf is refused for all threads, that is counted once.
                if shared.probed.has_perf() || !shared.probed.may_have_timers() {
                    self.note_refusal(why);
                }
                Some(why)
            }
            None => None,
        };
        let timers_refused = shared.probed.timers_refused;
        let Some(timers) = shared.probed.timers.as_ref().filter(|_| timers_refused.is_none())
        else {
            return Err(refused.or(timers_refused).unwrap_or(WhyRefused::NotAsked));
        };
        if is_traced {
            self.note_refusal(WhyRefused::Traced);
            return Err(WhyRefused::Traced);
        }
        open_timer(timers).inspect_err(|why| self.note_refusal_of_timer(*why))
    }

    pub fn may_have_timers(&self) -> bool {
        self.0.probed.may_have_timers()
    }

    /// Whether threads get timers. They get none while perf has room for them.
    fn uses_timers(&self) -> bool {
        let has_room = self.0.probed.perf.as_ref().is_some_and(Perf::has_room);
        self.may_have_timers() && !has_room
    }

    /// Checks whether a tracer is attached. Returns whether there may be no timers because of it.
    pub fn check_tracer(&self) -> bool {
        let is_traced = self.0.avoids_tracers && sys::is_traced();
        self.0.is_traced.store(is_traced, Ordering::Relaxed);
        is_traced
    }

    /// Whether threads must notice that their signal stack has become too small.
    pub(super) fn watches_signal_stacks(&self) -> bool {
        self.uses_timers() || self.has_timers()
    }

    /// What is said of the source from the start, or of the thread's signal stack, is not said again.
    fn note_unsampled_thread(&self, why: WhyRefused) {
        let is_said = matches!(
            why,
            WhyRefused::Ended
                | WhyRefused::NotAsked
                | WhyRefused::Traced
                | WhyRefused::SmallSignalStack
                | WhyRefused::SignalBlocked
        );
        if !is_said && !self.is_refused() {
            self.0.unsampled.lock().get_or_insert(why);
        }
    }

    fn note_refusal_of_timer(&self, why: WhyRefused) {
        // A filter of that thread alone; one of all threads is counted as why there is no perf.
        if why == WhyRefused::KilledBySeccomp {
            self.note_loss();
            self.0.counters.refused_timers.fetch_add(1, Ordering::Relaxed);
        } else {
            self.note_refusal(why);
        }
    }

    fn note_refusal(&self, why: WhyRefused) {
        if why == WhyRefused::Ended {
            return;
        }
        self.note_loss();
        let counters = &self.0.counters;
        let counter = match why {
            WhyRefused::NoSignal => &counters.refused_other,
            WhyRefused::Traced => &counters.refused_traced,
            WhyRefused::Failed(call, _) if call != FilteredSyscall::PerfEventOpen => {
                &counters.refused_timers
            }
            why if why.is_permanent() => &counters.refused_perf,
            WhyRefused::NoLockedMemory => &counters.refused_locked_memory,
            WhyRefused::NoFiles => &counters.refused_open_files,
            WhyRefused::NoTimers => &counters.refused_timers,
            WhyRefused::SmallSignalStack => &counters.refused_signal_stack,
            _ => &counters.refused_other,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl AttachThreads for Sampler {
    fn begin(&self) -> ThreadSetup {
        // The thread's seccomp filters may differ from those of the thread that built the layer.
        sys::read_filters();
        let counters = &self.0.counters;
        let is_refused = self.is_refused();
        if is_refused {
            counters.unsampled.fetch_add(1, Ordering::Relaxed);
            self.0.probed.refused().into_iter().for_each(|why| self.note_refusal(why));
        }
        // A thread that installs a smaller one later is set up anew.
        let has_small_signal_stack = self.may_have_timers() && sys::has_small_signal_stack();
        let source = Box::new(ThreadSampler {
            sampler: self.clone(),
            has_small_signal_stack,
            is_unsampled: is_refused,
        });
        let sampled = (!is_refused).then(|| {
            let stack = match has_small_signal_stack {
                true => Err(WhyRefused::SmallSignalStack),
                false => sys::thread_stack().ok_or(WhyRefused::NoStack),
            };
            if self.uses_timers() && !has_small_signal_stack {
                self.0.probed.timers.iter().for_each(Timers::unblock);
            }
            let first = Arc::new(SamplingSession::none());
            let rate = Rate::of(self.0.first_period_ns.load(Ordering::Relaxed));
            let current = sys::current_thread();
            let thread = Arc::new(ThreadShared::new(current, stack, rate, Arc::clone(&first)));
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
        ThreadSetup { sampled, source }
    }

    fn attach(&self, thread: &ThreadShared) {
        #[cfg(any(test, feature = "_test"))]
        if let Some(scripted) = self.0.scripted.get() {
            scripted.attach(thread);
            return;
        }
        sys::read_filters();
        let attached = thread.append_session(|last| {
            // `end` first sets the flag and then takes the last session, whose lock is held here.
            if last.ring.is_some() || *self.0.is_over.lock() || thread.is_over() {
                return None;
            }
            let session = self.open(thread);
            // If the thread has ended since that check, its id and the event may be those of another one, of any process.
            let is_gone = || thread.is_over() || !sys::is_own_thread(thread.tid());
            if matches!(session, Err(WhyRefused::Ended)) || session.is_ok() && is_gone() {
                session.iter().for_each(|session| session.retire(0, 0));
                return None;
            }
            let session = session.inspect_err(|why| self.note_unsampled_thread(*why)).ok();
            let counters = &self.0.counters;
            if thread.note_refused(session.is_none()) != session.is_none() {
                match session {
                    Some(_) => _ = counters.unsampled.fetch_sub(1, Ordering::Relaxed),
                    None => _ = counters.unsampled.fetch_add(1, Ordering::Relaxed),
                }
            }
            let session = session?;
            self.note_thread_sampled(&session);
            session.note_since(sys::cpu_ns_of(thread.tid()).unwrap_or(u64::MAX));
            Some(session)
        });
        // Only now can the thread find the ring of its samples.
        if let Some(attached) = attached
            && let Err(why) = attached.start()
            && !thread.is_over()
        {
            self.note_not_started(&attached, why);
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
        let error = "Perf".parse::<Source>().unwrap_err();
        assert_eq!(error.to_string(), "expected one of auto, perf, timer, none");
    }

    #[test]
    fn a_loss_matters_to_what_was_open_when_it_was_noticed() {
        let losses = LossTimes::default();
        losses.check(10);
        assert!(losses.are_none_since(0));
        losses.note();
        losses.check(20);
        losses.check(30);
        assert_eq!(
            [0, 19, 20, 21].map(|ns| losses.are_none_since(ns)),
            [false, false, false, true]
        );
        losses.note();
        losses.check(40);
        assert!(!losses.are_none_since(21) && losses.are_none_since(41));
    }
}

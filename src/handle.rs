//! Access to a layer after it was added to a subscriber.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::collect::CONTINUOUS_RATES;
use crate::control::Control;
use crate::encode::{HtmlContext, KeptSummary};
use crate::engine::{Command, Engine, LONGEST_ANSWER, ProfileKind, StartedProfile, not_listed};
use crate::error::{Error, FlushError, FlushStage, ProfileError};
use crate::keep::Rules;
use crate::profile::{Profile, ThreadDump};
use crate::publish::{OpenSpan, RecentlyKept, Reply, ShutdownResult};
use crate::references::Route;
use crate::sinks::HeapPart;
use crate::stats::Stats;
use crate::sys::SuspendCounting;

/// A handle to a [`ProfilingLayer`](crate::ProfilingLayer) that has become part of a subscriber.
///
/// The handle does not keep the layer alive. If the layer was dropped or is off, waiting methods return at once and all
/// numbers are 0; but [`flush`](Self::flush) and [`shutdown`](Self::shutdown) wait for what it still delivers.
#[derive(Clone, Debug)]
pub struct Handle(Weak<Control>, Arc<OnceLock<Arc<ShutdownResult>>>);

impl Handle {
    pub(crate) fn new(control: &Arc<Control>) -> Self {
        Self(Arc::downgrade(control), Arc::clone(&control.ending))
    }

    /// Replaces the rules. New spans are judged by these rules; open spans are judged by the rules under which they
    /// were created, so none is lost. Each span is judged by one set of rules.
    ///
    /// Rules that keep something start a layer that was [off](crate::ProfilingLayer::from_env). Rules that keep nothing
    /// stop profiling new spans.
    ///
    /// ```
    /// # use tracing_profiling::{ProfilingLayer, Rules};
    /// # fn main() -> Result<(), tracing_profiling::Error> {
    /// let profiling = ProfilingLayer::builder().rules("off".parse()?).build()?;
    /// let handle = profiling.handle();
    /// assert!(!handle.is_enabled());
    /// handle.set_rules("100ms|error".parse()?)?;
    /// assert!(handle.is_enabled());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// This returns when all callsites of the program know the rules, but after a second at the latest: another layer may
    /// hold a lock that its answer needs. In async code call it from `spawn_blocking`. The same holds for the other methods
    /// that change the rules.
    ///
    /// If a rule comes back, its rate limit continues, and its percentile begins anew. Open spans are checked as often as the
    /// strictest rules so far ask.
    ///
    /// # Errors
    ///
    /// If compiled rules have taken 32 MiB, 1 KiB for each and 200 bytes for each callsite, and this set was never in force in
    /// this process: the rules then stay as they are. If the layer was dropped or [shut down](Self::shutdown),
    /// or if the system refuses to start a thread. Starting is not tried again.
    pub fn set_rules(&self, rules: Rules) -> Result<(), Error> {
        self.control()?.set_rules(rules)
    }

    /// The rules in force. If profiling is disabled, the last ones.
    pub fn rules(&self) -> Rules {
        self.find().map_or(Rules::new([]), |control| control.rules())
    }

    /// Turns profiling off and on. Off, no new spans are profiled; open spans are still judged and may leave profiles, and
    /// some milliseconds after the last of them no thread is sampled any more. On again, the last rules are in force, or
    /// the default rules if those keep nothing, as `TRACING_PROFILING=off`.
    ///
    /// # Errors
    ///
    /// As for [`set_rules`](Self::set_rules).
    pub fn set_enabled(&self, enabled: bool) -> Result<(), Error> {
        self.control()?.set_enabled(enabled)
    }

    /// The profiled spans that have been open for longer than `older_than`, each with where it is: what it awaits if its
    /// future is [`Profiled`](crate::Profiled), or where its thread is blocked. The oldest come first, at most 1,000.
    ///
    /// A layer that does not run has none.
    ///
    /// # Errors
    ///
    /// If the layer's threads, which read symbols, do not answer in 30 seconds.
    pub fn open_spans(&self, older_than: Duration) -> Result<Vec<OpenSpan>, ProfileError> {
        match self.ask(|reply| Command::FindOpen { older_than, reply }) {
            Err(ProfileError::Ended) => Ok(Vec::new()),
            answer => answer,
        }
    }

    /// The live heap of the process: a profile with all that was allocated since the layer was built and what of it
    /// is still in use, by stack, in spans or not. Amounts are estimates from samples.
    /// [`encode::pprof`](crate::encode::pprof) writes it as a heap profile.
    ///
    /// # Errors
    ///
    /// Unless the layer has [`Builder::heap`](crate::Builder::heap) and no other such layer runs; also if its threads do not
    /// answer in 30 seconds.
    pub fn heap_profile(&self) -> Result<Profile, ProfileError> {
        self.heap_part(HeapPart::All)
    }

    /// What is in use now and was not at the last call of this, or when the layer was built: only
    /// stacks with more bytes in use than then, by how much they grew. Memory that leaks is among the largest after some time.
    ///
    /// # Errors
    ///
    /// As for [`heap_profile`](Self::heap_profile).
    pub fn heap_growth(&self) -> Result<Profile, ProfileError> {
        self.heap_part(HeapPart::Growth)
    }

    fn heap_part(&self, part: HeapPart) -> Result<Profile, ProfileError> {
        /// One at a time: each takes memory and the time of the layer's threads.
        static ASKING: Mutex<()> = Mutex::new(());
        if !self.running(Engine::is_heap_tracked).unwrap_or(false) {
            return Err(ProfileError::HeapNotTracked);
        }
        let _uncounted = SuspendCounting::begin();
        let _asking = ASKING.try_lock_for(LONGEST_ANSWER).ok_or(ProfileError::NoAnswer)?;
        self.ask(|reply| Command::Heap(part, reply))
    }

    /// Where all threads of the process are now, also those that were never in a span: each with its name and state,
    /// what it is blocked in, its stack, and its profiled spans. `println!("{dump}")` prints all of it;
    /// [`encode::pprof_of_threads`](crate::encode::pprof_of_threads) writes it for `go tool pprof`.
    ///
    /// The threads are not stopped, and each is inspected at another moment. One that runs has the stack of its newest
    /// sample, if it is in a span that is sampled, or none. The stack of a blocked one is complete up to
    /// [`Builder::stack_bytes`](crate::Builder::stack_bytes). Inspecting takes at most five seconds; threads that were not
    /// reached are counted. Reading symbols comes after that.
    /// Call it on a thread of its own if the executor of the routes can hang.
    ///
    /// # Errors
    ///
    /// If the layer is off or was dropped, if its threads do not answer in 30 seconds, and where the system does not list
    /// the threads of a process.
    pub fn threads(&self) -> Result<ThreadDump, ProfileError> {
        self.ask(Command::DumpThreads)?.ok_or_else(not_listed)
    }

    fn ask<T>(&self, question: impl FnOnce(Reply<T>) -> Command) -> Result<T, ProfileError> {
        self.running(|engine| engine.ask(question)).unwrap_or(Err(ProfileError::Ended))
    }

    /// A profile of the process: by default the CPU time of all its threads for that long, in spans or not, of Rust
    /// and of other languages. [`encode::pprof`](crate::encode::pprof) writes it, with thread, span, and the name and
    /// shown fields of its local root as labels. CPU time in which no sample was taken is one frame `[not sampled:
    /// ...]`, so that it adds up to the CPU time of the process.
    ///
    /// With [`ProfileKind::Wall`] it shows where all threads are, running or blocked, each thread all the time:
    /// `OnCpu` while it ran, `OffCpu` with what it was blocked in. It needs no perf events and no timers. Threads are
    /// visited 20 times per second, or a random part of them. The notes of the profile state the number of
    /// observations and the error.
    ///
    /// Returns after [`ProfileOptions::duration`]; in async code call it from `spawn_blocking`. It needs rules that
    /// keep something, since a layer that is off has no threads.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use tracing_profiling::{Handle, ProfileOptions};
    /// # fn write(handle: &Handle) -> Result<(), Box<dyn std::error::Error>> {
    /// let options = ProfileOptions { duration: Duration::from_secs(10), ..ProfileOptions::default() };
    /// let profile = handle.profile(options)?;
    /// # #[cfg(feature = "pprof")]
    /// std::fs::write("cpu.pb.gz", tracing_profiling::encode::pprof(&profile))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Why there is none, as if another one is being made.
    pub fn profile(&self, options: ProfileOptions) -> Result<Profile, ProfileError> {
        self.begin_profile(options)?.wait()
    }

    /// Begins a [`profile`](Self::profile), and returns at once.
    ///
    /// # Errors
    ///
    /// As for [`profile`](Self::profile).
    pub fn begin_profile(&self, options: ProfileOptions) -> Result<StartedProfile, ProfileError> {
        let ProfileOptions { kind, duration, rate } = options;
        let most = match kind {
            ProfileKind::Cpu => 1_000,
            ProfileKind::Wall => 100,
        };
        if duration.is_zero() || duration > LONGEST_PROFILE || !(1..=most).contains(&rate) {
            return Err(ProfileError::OutOfRange);
        }
        self.running(|engine| engine.begin_profile(kind, duration, period_ns(rate)))
            .unwrap_or(Err(ProfileError::Ended))
    }

    /// Samples per second of CPU time for the [continuous profile](crate::Builder::continuous); 0 if it is off.
    pub fn continuous(&self) -> u32 {
        let rate =
            |engine: &Engine| engine.commands.process.continuous_rate.load(Ordering::Relaxed);
        self.running(rate).unwrap_or(0)
    }

    /// Turns the [continuous profile](crate::Builder::continuous) on, at that many samples per second of CPU time, or off if
    /// that is 0. A profile that is being made ends.
    ///
    /// # Errors
    ///
    /// If the rate is over 1,000, or if the layer was dropped, has ended, or is off since it was built.
    pub fn set_continuous(&self, rate: u32) -> Result<(), ProfileError> {
        if rate > *CONTINUOUS_RATES.end() {
            return Err(ProfileError::OutOfRange);
        }
        let set = |engine: &Engine| {
            engine.commands.process.continuous_rate.store(rate, Ordering::Relaxed);
            engine.waker.wake();
        };
        self.running(set).ok_or(ProfileError::Ended)
    }

    /// Whether new spans are profiled, if a rule matches them.
    pub fn is_enabled(&self) -> bool {
        self.find().is_some_and(|control| control.is_enabled())
    }

    /// Keeps the innermost profiled span that the calling thread is in, whatever it does from here on and regardless of
    /// its rule's rate limit. Its reason is [`Forced`](crate::Reason::Forced). Returns false if there is no such span;
    /// a span that no rule matches has no samples.
    pub fn keep_current(&self) -> bool {
        self.running(|engine| engine.spans.force_current()).unwrap_or(false)
    }

    /// Logs the rules that are now in force, as changed from outside the program: by a request or by a signal. `by` begins
    /// the line, such as `HTTP`. Waits for the log, for at most a second. Nothing is logged while nothing runs.
    pub fn log_rules(&self, by: &str) {
        if let Some(control) = self.find() {
            control.log_rules(by);
        }
    }

    fn control(&self) -> Result<Arc<Control>, Error> {
        self.find().ok_or_else(Error::ended)
    }

    /// What `action` returns for the engine, while it runs.
    fn running<R>(&self, action: impl FnOnce(&Engine) -> R) -> Option<R> {
        self.0.upgrade()?.running().map(|engine| action(engine))
    }

    /// What `action` returns for the engine, also once it has ended.
    fn known<R>(&self, action: impl FnOnce(&Engine) -> R) -> Option<R> {
        self.find()?.engine().map(|engine| action(engine))
    }

    /// The layer's state. `None` if the layer was dropped, or in the child of a fork.
    fn find(&self) -> Option<Arc<Control>> {
        self.0.upgrade().filter(|control| control.is_here())
    }

    /// Waits until everything that was kept before is delivered, logged and passed to
    /// [`Builder::on_kept`](crate::Builder::on_kept), but not for longer than `timeout` (and 20 ms). If the exporter
    /// fails, it is retried until then. Kept spans are exported without waiting for their roots to close. If the
    /// layer was dropped or is shut down, this waits for its end.
    ///
    /// This blocks; in async code call it from `spawn_blocking`.
    ///
    /// # Errors
    ///
    /// Why that was not done. Also if a profile with a reported id was lost since the last call, or if the receiver is
    /// known to refuse profiles. After the end of the layer it is what went wrong at that.
    pub fn flush(&self, timeout: Duration) -> Result<(), FlushError> {
        let (control, deadline) = (self.0.upgrade(), until(timeout));
        if control.as_ref().is_some_and(|control| !control.is_here()) {
            return Err(FlushError::Forked);
        }
        let running = control.as_ref().and_then(|control| control.running());
        running.map_or_else(|| self.wait_for_end(deadline), |engine| engine.flush(deadline))
    }

    /// Waits for the end of the delivery, if anything was started.
    fn wait_for_end(&self, deadline: Instant) -> Result<(), FlushError> {
        self.1.get().map_or(Ok(()), |ending| ending.wait(deadline))
    }

    /// Flushes as [`flush`](Self::flush) does, and ends profiling permanently: rings, threads and files are released.
    ///
    /// # Errors
    ///
    /// As for [`flush`](Self::flush). Profiling ends in any case, but in the child of a fork, where none runs.
    pub fn shutdown(&self, timeout: Duration) -> Result<(), FlushError> {
        let deadline = until(timeout);
        self.end(deadline, deadline)
    }

    fn end(&self, deadline: Instant, return_by: Instant) -> Result<(), FlushError> {
        let Some(control) = self.0.upgrade() else { return self.wait_for_end(return_by) };
        if !control.is_here() {
            return Err(FlushError::Forked);
        }
        let ended = control.end(|engine| engine.shutdown(deadline, return_by));
        ended.unwrap_or_else(|| self.wait_for_end(return_by))
    }

    /// The spans that were kept and reported last, the newest first: of spans with one profile the outermost, at most 1,000.
    /// Remembered from the first call of this on; they take some 2 MiB.
    pub fn recently_kept(&self) -> Vec<RecentlyKept> {
        self.known(|engine| engine.publish.reporter.recent.list()).unwrap_or_default()
    }

    /// The one of these with that [`id`](RecentlyKept::id).
    pub fn find_kept(&self, id: &str) -> Option<RecentlyKept> {
        self.known(|engine| engine.publish.reporter.recent.find(id))?
    }

    /// The routes of which something is known from [reference spans](crate::Builder::references), in no order.
    pub fn routes(&self) -> Vec<Route> {
        self.known(|engine| engine.publish.references.routes()).unwrap_or_default()
    }

    /// The typical request of a route, by its [name](Route::name): the mean of the last reference spans. `None` if there
    /// are none.
    pub fn typical_request(&self, route: &str) -> Option<Profile> {
        self.known(|engine| engine.publish.references.typical(route))?
    }

    /// What reports contain beside profiles: the service and its version, and the templates of links.
    pub fn report_context(&self) -> HtmlContext {
        self.known(|engine| engine.publish.references.context.clone()).unwrap_or_default()
    }

    /// The directory of the layer's [`Directory`](crate::Directory), in which its profiles and those of earlier runs are.
    pub fn directory(&self) -> Option<PathBuf> {
        self.0.upgrade()?.dir.clone()
    }

    #[cfg(feature = "metrics")]
    pub(crate) fn has_layer(&self) -> bool {
        self.0.strong_count() > 0
    }

    #[cfg(feature = "metrics")]
    pub(crate) fn with_references<T>(
        &self,
        read: impl FnOnce(&crate::references::References) -> T,
    ) -> Option<T> {
        self.running(|engine| read(&engine.publish.references))
    }

    /// Counts of what was done and lost since the layer was built.
    pub fn stats(&self) -> Stats {
        self.known(Engine::stats).unwrap_or_default()
    }

    /// One line that states which source samples threads, what it cannot observe, and what would change that. The same
    /// line is logged when the layer starts. If a thread could not be sampled since then, it ends with the first cause.
    /// Empty if the layer is off or was dropped, and in the child of a fork.
    pub fn source(&self) -> String {
        self.known(|engine| engine.source.describe()).unwrap_or_default()
    }

    /// Returns a guard for `main` that exports everything that was kept when it is dropped. It waits for at most 5
    /// seconds, or 20 if the profiles are not yet made and given to the exporter, which takes long on a busy machine. If
    /// something could not be exported by then, it ends profiling as [`shutdown`](Self::shutdown) does.
    /// Without it, and without [`flush`](Self::flush), spans that were kept just before the process ends are lost.
    #[must_use = "dropping the guard flushes, so an unused one flushes immediately"]
    pub fn flush_on_drop(&self) -> FlushGuard {
        FlushGuard(self.clone())
    }
}

impl RecentlyKept {
    /// What short forms say of it.
    pub fn summary(&self) -> Option<KeptSummary<'_>> {
        Some(KeptSummary {
            id: (&self.id).into(),
            facts: &self.kept.spans.first()?.facts,
            samples: self.kept.samples,
            headline: &self.headline,
            hotspots: &self.kept.hotspots,
            compared: self.kept.compared.as_ref(),
            no_profile: self.no_profile.as_deref(),
        })
    }
}

/// What a profile of the process shows, and for how long; see [`Handle::profile`].
///
/// The default is the CPU time of 30 seconds, with 100 samples per second of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfileOptions {
    /// What it shows.
    pub kind: ProfileKind,
    /// For how long: at most an hour.
    pub duration: Duration,
    /// Samples per second of CPU time, of each thread: 1 to 1,000. A thread that was in a profiled span and has used 2,000
    /// of them, and all such threads together 2,000 for each processor, fall to 100 per second if this is more. For wall
    /// time, how often per second all threads are visited: 1 to 100.
    pub rate: u32,
}

impl ProfileOptions {
    /// 30 seconds of that kind, at its usual rate: 100 samples per second of CPU time, or 20 visits per second.
    pub const fn of(kind: ProfileKind) -> Self {
        let rate = match kind {
            ProfileKind::Cpu => 100,
            ProfileKind::Wall => 20,
        };
        Self { kind, duration: Duration::from_secs(30), rate }
    }
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self::of(ProfileKind::Cpu)
    }
}

const LONGEST_PROFILE: Duration = Duration::from_secs(60 * 60);

/// The time between two samples: slightly less than stated, so that samples do not run in step with the kernel's tick or
/// with the program's timers.
fn period_ns(rate: u32) -> u64 {
    997_000_000 / u64::from(rate.max(1))
}

/// Timeouts that overflow an `Instant` are limited to a century.
fn until(timeout: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    let now = Instant::now();
    now.checked_add(timeout.min(CENTURY)).unwrap_or(now)
}

/// Flushes when dropped; see [`Handle::flush_on_drop`].
#[derive(Debug)]
pub struct FlushGuard(Handle);

const GUARD_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait further while the layer's own threads work.
const LONGEST_COLLECTION: Duration = Duration::from_secs(15);

/// How long to wait for the log lines of what is lost.
const LAST_REPORTS: Duration = Duration::from_secs(1);

impl Drop for FlushGuard {
    fn drop(&mut self) {
        let mut flushed = self.0.flush(GUARD_TIMEOUT);
        if flushed == Err(FlushError::Timeout(FlushStage::Collection)) {
            flushed = self.0.flush(LONGEST_COLLECTION);
        }
        if flushed.is_err() {
            let now = Instant::now();
            // The log states what is lost.
            _ = self.0.end(now, now + LAST_REPORTS);
        }
    }
}

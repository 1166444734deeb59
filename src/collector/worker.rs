//! Symbolizing and exporting, on a thread of its own.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError};
use tracing::level_filters::LevelFilter;

use super::command::{FlushRequest, Job};
use super::engine::Engine;
use super::report;
use super::room::TakenRoom;
use crate::export::{Exported, Exporter, Hopeless, Reporter};
use crate::keep::{Kept, KeptSpan, OnKept};
use crate::profile::{MappingId, Profile, Symbolized, Waits};
use crate::redact::Redaction;
use crate::stats::Counters;
use crate::symbols::{Missing, SymbolSettings, Symbolizer};
use crate::sys::{Files, Owning};
use crate::unwind::Module;

/// After how long without a profile what was read of symbols is given back.
const FORGET_AFTER: Duration = Duration::from_secs(30);
/// How soon after a failure the exporter is tried again, at first and at last.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);
/// The same while somebody waits for it, at first: at last it is [`FIRST_PAUSE`].
const FIRST_PAUSE_OF_FLUSH: Duration = Duration::from_millis(20);
/// How long the last profiles may take if nobody waits for them.
const LAST_FLUSH: Duration = Duration::from_secs(5);
/// How often a profile is tried before it is lost, flushes apart: for some five minutes.
const MOST_TRIES: u32 = 10;

/// What a worker is made of.
pub(super) struct WorkerParts {
    pub(super) engine: Arc<Engine>,
    pub(super) jobs: Receiver<Job>,
    pub(super) exporter: Owning<Box<dyn Exporter>>,
    pub(super) files: Arc<Files>,
    pub(super) reporter: Reporter,
    pub(super) on_kept: Option<OnKept>,
    pub(super) symbols: SymbolSettings,
    /// Whether something is wrong with the exporter from the beginning.
    pub(super) is_failing: bool,
}

/// The thread that exports.
pub(super) struct Worker {
    parts: WorkerParts,
    symbolizer: Option<Owning<Symbolizer>>,
    /// When it was last used.
    symbolized: Instant,
    told: HashSet<Missing>,
    /// Since when the exporter fails, and when to try it again.
    failing: Option<FailingExporter>,
    /// What it has refused; no more than may be promised.
    refused: VecDeque<Refused>,
    /// Profiles that were lost before the last flush.
    lost: u64,
    told_of_hopeless: bool,
}

/// An exporter that fails.
struct FailingExporter {
    next: Instant,
    pause: Duration,
}

/// A profile that the exporter has refused.
struct Refused {
    profile: Profile,
    report: Kept,
    tries: u32,
    _room: TakenRoom,
}

impl Refused {
    /// Whether a span has its id: else it is only a trial.
    fn is_promised(&self) -> bool {
        self.report.spans.iter().any(|span| span.profile.is_ok())
    }
}

impl FailingExporter {
    fn new() -> Self {
        Self { next: Instant::now() + FIRST_PAUSE, pause: FIRST_PAUSE }
    }

    fn wait_longer(&mut self) {
        self.pause = (2 * self.pause).min(LAST_PAUSE);
        self.next = Instant::now() + self.pause;
    }
}

impl Worker {
    pub(super) fn new(parts: WorkerParts) -> Self {
        let failing = parts.is_failing.then(FailingExporter::new);
        Self {
            parts,
            symbolizer: None,
            symbolized: Instant::now(),
            told: HashSet::new(),
            failing,
            refused: VecDeque::new(),
            lost: 0,
            told_of_hopeless: false,
        }
    }

    pub(super) fn run(mut self) {
        let reporter = self.parts.reporter.clone();
        _ = catch_unwind(AssertUnwindSafe(|| self.parts.exporter.start(reporter)));
        loop {
            let job = match self.sleep() {
                Some(time) => self.parts.jobs.recv_timeout(time),
                None => self.parts.jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match job {
                Ok(Job::Say { line, is_warning: false }) => {
                    wait_for_level(LevelFilter::INFO);
                    self.parts.engine.log(|| tracing::info!(target: "tracing_profiling", "{line}"));
                }
                Ok(Job::Say { line, is_warning: true }) => {
                    wait_for_level(LevelFilter::WARN);
                    self.parts.engine.log(|| tracing::warn!(target: "tracing_profiling", "{line}"));
                }
                Ok(Job::Export { profile, modules, kept, room }) => {
                    self.prepare(profile, &modules, &kept, room);
                }
                Ok(Job::Report(kept)) => self.report(&unexported(&kept)),
                Ok(Job::Done(FlushRequest { done, deadline })) => {
                    _ = done.send(self.flush(deadline));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Job::Stop(waiting)) => return self.end(waiting),
                Err(RecvTimeoutError::Disconnected) => return self.end(Vec::new()),
            }
            // Whatever else there was to do meanwhile.
            if self.symbolized.elapsed() >= FORGET_AFTER {
                self.symbolizer = None;
            }
            let is_due = match &self.failing {
                Some(failing) => failing.next <= Instant::now(),
                // It has taken a later one meanwhile, and so is well.
                None => !self.refused.is_empty(),
            };
            if is_due && !self.has_lost_exporter() {
                self.try_refused(true);
            }
        }
    }

    /// Waits until all that was promised is delivered, and tries what was refused until then. Returns
    /// whether it was, and nothing was lost since the last flush.
    fn flush(&mut self, deadline: Instant) -> bool {
        if self.has_lost_exporter() {
            return false;
        }
        let mut pause = FIRST_PAUSE_OF_FLUSH;
        let is_done = loop {
            // First, for it can be that only then it takes what it has refused.
            let is_done = self.flush_exporter(deadline);
            if self.refused.is_empty() {
                break is_done;
            }
            self.try_refused(false);
            let left = deadline.saturating_duration_since(Instant::now());
            if self.refused.is_empty() {
                break self.flush_exporter(deadline);
            }
            if left.is_zero() {
                break false;
            }
            std::thread::sleep(pause.min(left));
            pause = (2 * pause).min(FIRST_PAUSE);
        };
        self.has_lost_none() && is_done && !self.parts.engine.keeper.is_distrusted()
    }

    /// Whether no profile was lost since this was last asked.
    fn has_lost_none(&mut self) -> bool {
        let lost = self.parts.engine.counters.profiles_lost();
        std::mem::replace(&mut self.lost, lost) == lost
    }

    /// Whether the program has closed files that the exporter goes on to use.
    fn has_lost_exporter(&self) -> bool {
        !self.parts.files.are_ours() && self.parts.exporter.keeps_files()
    }

    fn flush_exporter(&mut self, deadline: Instant) -> bool {
        let flush = || self.parts.exporter.flush(deadline);
        catch_unwind(AssertUnwindSafe(flush)).unwrap_or(false)
    }

    /// Delivers what can be delivered, and gives everything back.
    fn end(mut self, waiting: Vec<FlushRequest>) {
        let deadline = waiting.iter().map(|waiting| waiting.deadline).max();
        let is_done = self.flush(deadline.unwrap_or_else(|| Instant::now() + LAST_FLUSH));
        let (counters, lost) = (Arc::clone(&self.parts.engine.counters), self.lost);
        while let Some(refused) = self.refused.pop_front() {
            self.lose(refused.report);
        }
        // Then it has counted what it could not deliver.
        let exporter = self.parts.exporter;
        _ = catch_unwind(AssertUnwindSafe(|| drop(exporter)));
        let is_done = is_done && counters.profiles_lost() == lost;
        waiting.into_iter().for_each(|waiting| _ = waiting.done.send(is_done));
    }

    /// How long there is nothing to do, if somebody has to look again at all.
    fn sleep(&self) -> Option<Duration> {
        // With nothing to export, the next kept span is soon enough.
        let failing = self.failing.as_ref().filter(|_| !self.refused.is_empty());
        let again = failing.map(|failing| failing.next.saturating_duration_since(Instant::now()));
        let unused = || FORGET_AFTER.saturating_sub(self.symbolized.elapsed());
        self.symbolizer.as_ref().map(|_| unused()).into_iter().chain(again).min()
    }

    /// Symbolizes, redacts and exports.
    fn prepare(
        &mut self,
        profile: Box<Profile>,
        modules: &HashMap<MappingId, Arc<Module>>,
        kept: &[KeptSpan],
        mut room: TakenRoom,
    ) {
        crate::sys::look_at_filters();
        let mut report = Kept { samples: profile.sample_count(), ..unexported(kept) };
        if !self.parts.files.are_ours() {
            // It is never dropped, and a new one opens files of its own.
            self.symbolizer = None;
            if self.parts.exporter.keeps_files() {
                return self.lose(report);
            }
        }
        // Debug information is a large input: what goes wrong there must not be the end of all
        // later profiles.
        let most_bytes = room.most_bytes;
        match catch_unwind(AssertUnwindSafe(|| self.symbolize(profile, modules, most_bytes))) {
            Ok(mut profile) => {
                room.shrink(profile.bytes());
                report.samples = profile.sample_count();
                report.waits = profile.waits();
                report::describe_waits(&mut profile, &report);
                report.top_function = profile.top_function();
                let refused = self.export(Refused { profile, report, tries: 0, _room: room });
                self.refused.extend(refused);
            }
            Err(_) => {
                self.symbolizer = None;
                self.lose(report);
            }
        }
    }

    /// Gives a profile to the exporter. Returns it if it was refused.
    fn export(&mut self, refused: Refused) -> Option<Refused> {
        // An exporter is not ours.
        let export = || self.parts.exporter.export(&refused.profile);
        match catch_unwind(AssertUnwindSafe(export)) {
            Ok(Ok(Exported { files, .. })) => {
                self.failing = None;
                let engine = &self.parts.engine;
                Counters::add(&engine.counters.profiles_exported, 1);
                engine.keeper.set_exporter_fails(false);
                // One that says so later has only taken it, but for what is in files.
                if !engine.keeper.demands_proof() || !files.is_empty() {
                    engine.keeper.note_delivered();
                }
                engine.keeper.redeem();
                let profile = refused.is_promised().then_some(refused.profile.id);
                self.report(&Kept { profile, files, ..refused.report });
                None
            }
            Ok(Err(error)) if error.is::<Hopeless>() => {
                if !std::mem::replace(&mut self.told_of_hopeless, true) {
                    self.parts.engine.log(|| {
                        tracing::warn!(
                            target: "tracing_profiling",
                            "a profile is lost: {error} (said once)"
                        );
                    });
                }
                self.lose(refused.report);
                None
            }
            Ok(Err(error)) => {
                self.note_failing(&error.to_string());
                if refused.is_promised() {
                    return Some(refused);
                }
                // It has told what it was made for.
                self.parts.engine.keeper.redeem();
                self.report(&refused.report);
                None
            }
            Err(_) => {
                self.note_failing("the exporter panicked");
                self.lose(refused.report);
                None
            }
        }
    }

    fn note_failing(&mut self, problem: &str) {
        self.parts.engine.keeper.note_exporter_fails();
        if self.failing.is_none() {
            self.failing = Some(FailingExporter::new());
            self.parts.engine.log(|| {
                tracing::warn!(
                    target: "tracing_profiling",
                    "a profile could not be exported: {problem} (said once until it works again; \
                     until then spans are kept without profiles, and the service is not affected)"
                );
            });
        }
    }

    /// If the exporter fails: looks whether it is well again, by what it has refused if there is
    /// something. If it does not: gives it that. `counts` if that is to be one of the tries that a profile
    /// has.
    fn try_refused(&mut self, counts: bool) {
        if let Some(failing) = &mut self.failing {
            if counts {
                failing.wait_longer();
            }
            let checked = catch_unwind(AssertUnwindSafe(|| self.parts.exporter.check()));
            if !matches!(checked, Ok(Ok(()))) {
                return;
            }
            if self.refused.is_empty() {
                // Only a profile can tell: the next kept span has one, if only a trial. It is well when that is
                // exported.
                self.parts.engine.keeper.set_exporter_fails(false);
                return;
            }
        }
        for _ in 0..self.refused.len() {
            let Some(refused) = self.refused.pop_front() else { return };
            if let Some(mut refused) = self.export(refused) {
                refused.tries += u32::from(counts);
                if refused.tries < MOST_TRIES {
                    // To the end: if it is the profile that is wrong, others have their turn.
                    self.refused.push_back(refused);
                } else {
                    self.lose(refused.report);
                }
                if self.failing.is_some() {
                    return;
                }
            }
        }
    }

    /// A profile that was promised will not be.
    fn lose(&self, report: Kept) {
        Counters::add(&self.parts.engine.counters.profiles_dropped_export_failed, 1);
        let keeper = &self.parts.engine.keeper;
        keeper.redeem();
        keeper.note_refused();
        self.report(&Kept { profile: None, ..report });
    }

    fn symbolize(
        &mut self,
        profile: Box<Profile>,
        modules: &HashMap<MappingId, Arc<Module>>,
        most_bytes: usize,
    ) -> Profile {
        let (settings, files) = (self.parts.symbols, &self.parts.files);
        let symbolizer = || Owning::new(Symbolizer::new(settings), files);
        let symbolizer = self.symbolizer.get_or_insert_with(symbolizer);
        let names = &self.parts.engine.redaction;
        let mut symbolized = symbolizer.symbolize(&profile, modules, names, most_bytes);
        drop(profile);
        report::describe_symbolized(&mut symbolized);
        let Symbolized { profile, thinned, .. } = symbolized;
        Counters::add(&self.parts.engine.counters.samples_thinned, thinned as u64);
        self.symbolized = Instant::now();
        for missing in symbolizer.take_missing() {
            if matches!(missing, Missing::TooLarge(..)) {
                Counters::add(&self.parts.engine.counters.symbols_over_limit, 1);
            }
            if self.told.insert(missing.clone()) {
                let text = missing_in_words(&missing, names);
                self.parts.engine.log(|| tracing::warn!(target: "tracing_profiling", "{text}"));
            }
        }
        profile
    }

    fn report(&self, kept: &Kept) {
        let line = report::line(kept, &self.parts.engine.redaction);
        self.parts.engine.log(|| tracing::info!(target: "tracing_profiling", "{line}"));
        if let Some(on_kept) = &self.parts.on_kept {
            // Not ours either.
            let told = catch_unwind(AssertUnwindSafe(|| on_kept(kept)));
            let panicked = &self.parts.engine.counters.on_kept_panicked;
            if told.is_err() && panicked.fetch_add(1, Ordering::Relaxed) == 0 {
                self.parts.engine.log(|| {
                    tracing::warn!(
                        target: "tracing_profiling",
                        "what was given to `on_kept` has panicked; from now on that is only counted"
                    );
                });
            }
        }
    }
}

/// A layer is told of its subscriber a moment before that is asked for its level, and events between
/// are lost: so this waits for the level, if it is one that will come.
fn wait_for_level(level: LevelFilter) {
    for _ in 0..20 {
        if LevelFilter::current() >= level {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What is told of spans without a profile.
fn unexported(kept: &[KeptSpan]) -> Kept {
    Kept {
        spans: report::outermost_first(kept),
        profile: None,
        samples: 0,
        top_function: None,
        waits: Waits::default(),
        files: Vec::new(),
    }
}

fn missing_in_words(missing: &Missing, names: &Redaction) -> String {
    match missing {
        Missing::LineTables => "this program has no line tables, so profiles show functions but \
            no lines and no inlined functions; add `debug = \"line-tables-only\"` to \
            [profile.release] in Cargo.toml, and do not strip the program"
            .to_owned(),
        Missing::Replaced(file) => format!(
            "{} is not the file that was loaded, so its functions have no names; restart to \
             get them",
            names.code(file)
        ),
        Missing::Unreadable(file, error) => {
            let shown = names.code(file);
            let error = error.replace(file, &shown);
            format!("{shown} cannot be read, so its functions have no names: {error}")
        }
        Missing::Compressed(file) => format!(
            "the debug information of {} is compressed with zstd, which is not read here, so profiles show \
             its functions but no lines and no inlined functions; compress it with zlib \
             (`-C link-arg=-Wl,--compress-debug-sections=zlib`) or not at all",
            names.code(file)
        ),
        Missing::TooLarge(file, bytes) => {
            let (file, mib) = (names.code(file), bytes.div_ceil(1024 * 1024));
            format!(
                "{file} has {mib} MiB of symbols, which is more than may be held, so profiles show its \
                 functions at most, and no lines; raise TRACING_PROFILING_SYMBOL_BYTES, or build it with \
                 `debug = \"line-tables-only\"`"
            )
        }
    }
}

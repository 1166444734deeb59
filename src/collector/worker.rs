//! The thread that symbolizes and exports.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, select};
use tracing::level_filters::LevelFilter;

use super::command::{FlushRequest, Job, ReplyWith};
use super::delivery::{Delivery, HeldProfile};
use super::engine::Engine;
use super::report;
use super::room::TakenRoom;
use crate::export::Exporter;
use crate::keep::{Kept, KeptSpan, OnKept};
use crate::log::{LogEvent, LogKind};
use crate::profile::{Awaits, MappingId, Profile, Symbolized, Waits};
use crate::redact::Redaction;
use crate::stats::Counters;
use crate::symbols::{Missing, SymbolSettings, Symbolizer};
use crate::sys::{Files, Owning};
use crate::unwind::Module;

/// The symbolizer is dropped after this long without a profile.
const FORGET_AFTER: Duration = Duration::from_secs(30);
/// How long the last profiles may take if no caller waits for them.
const LAST_FLUSH: Duration = Duration::from_secs(5);

/// Everything that a [`Worker`] is made of.
pub(super) struct WorkerParts {
    pub(super) engine: Arc<Engine>,
    pub(super) jobs: Receiver<Job>,
    pub(super) exporter: Owning<Box<dyn Exporter>>,
    pub(super) files: Arc<Files>,
    pub(super) on_kept: Option<OnKept>,
    pub(super) symbols: SymbolSettings,
    /// An error of the exporter that was found when it was made.
    pub(super) problem: Option<String>,
}

/// The exporting thread.
pub(super) struct Worker {
    engine: Arc<Engine>,
    jobs: Receiver<Job>,
    files: Arc<Files>,
    delivery: Delivery,
    symbols: SymbolSettings,
    symbolizer: Option<Owning<Symbolizer>>,
    /// When the symbolizer was last used.
    symbolized: Instant,
    reported: HashSet<Missing>,
}

impl Worker {
    pub(super) fn new(parts: WorkerParts) -> Self {
        let WorkerParts { engine, jobs, exporter, files, on_kept, symbols, problem } = parts;
        let delivery =
            Delivery::new(Arc::clone(&engine), exporter, Arc::clone(&files), on_kept, problem);
        let (symbolized, reported) = (Instant::now(), HashSet::new());
        Self { engine, jobs, files, delivery, symbols, symbolizer: None, symbolized, reported }
    }

    pub(super) fn run(mut self) {
        self.delivery.start();
        loop {
            let wake = self.next_wake().map_or_else(channel::never, channel::at);
            let answers = self.delivery.answers();
            let job = select! {
                recv(self.jobs) -> job => Some(job.unwrap_or(Job::Stop(Vec::new()))),
                recv(answers) -> answer => {
                    self.delivery.note_answer(answer);
                    None
                }
                recv(wake) -> _ => None,
            };
            match job {
                Some(Job::Log(event)) => {
                    wait_for_level(event.level);
                    self.engine.log_event(&event);
                }
                Some(Job::Export { profile, modules, kept, room }) => {
                    self.prepare(profile, &modules, &kept, room);
                }
                Some(Job::Reply { profile, modules, then: ReplyWith(then) }) => {
                    self.reply(profile, &modules, then);
                }
                Some(Job::Report(kept)) => self.delivery.report(&unexported(&kept)),
                Some(Job::Done(FlushRequest { done, deadline })) => {
                    _ = done.send(self.delivery.flush(deadline));
                }
                Some(Job::Stop(waiting)) => return self.end(waiting),
                None => {}
            }
            // Also done if jobs keep coming.
            if self.symbolized.elapsed() >= FORGET_AFTER {
                self.symbolizer = None;
            }
            self.delivery.advance(false);
        }
    }

    /// Delivers what can be delivered, and drops everything else.
    fn end(mut self, waiting: Vec<FlushRequest>) {
        let deadline = waiting.iter().map(|waiting| waiting.deadline).max();
        let is_done = self.delivery.flush(deadline.unwrap_or_else(|| Instant::now() + LAST_FLUSH));
        let is_done = self.delivery.end() && is_done;
        waiting.into_iter().for_each(|waiting| _ = waiting.done.send(is_done));
    }

    /// When the thread must wake up next, if at all.
    fn next_wake(&self) -> Option<Instant> {
        let unused = self.symbolizer.as_ref().map(|_| self.symbolized + FORGET_AFTER);
        unused.into_iter().chain(self.delivery.next_attempt()).min()
    }

    /// Symbolizes, redacts and exports a profile.
    fn prepare(
        &mut self,
        profile: Box<Profile>,
        modules: &HashMap<MappingId, Arc<Module>>,
        kept: &[KeptSpan],
        mut room: TakenRoom,
    ) {
        crate::sys::read_filters();
        let mut report = Kept { samples: profile.sample_count(), ..unexported(kept) };
        if !self.files.still_owned() {
            // [`Owning`] leaks it if its files were closed. A new one opens its own files.
            self.symbolizer = None;
            if self.delivery.has_lost_exporter() {
                return self.delivery.lose(report);
            }
        }
        // Debug information is large, untrusted input. A panic there must not prevent all later profiles.
        let most_bytes = room.most_bytes;
        match catch_unwind(AssertUnwindSafe(|| self.symbolize(profile, modules, most_bytes))) {
            Ok(mut profile) => {
                room.shrink(profile.bytes());
                report.samples = profile.sample_count();
                report.waits = profile.waits();
                report.awaits = profile.awaits();
                report::describe_waits(&mut profile, &report);
                report::describe_awaits(&mut profile, &report.awaits);
                report.top_function = profile.top_function();
                let held = HeldProfile { profile, report, since: Instant::now(), _room: room };
                self.delivery.deliver(held);
            }
            Err(_) => {
                self.symbolizer = None;
                self.delivery.lose(report);
            }
        }
    }

    /// Symbolizes a profile for a caller.
    fn reply(
        &mut self,
        profile: Box<Profile>,
        modules: &HashMap<MappingId, Arc<Module>>,
        then: impl FnOnce(Profile),
    ) {
        let symbolize = || self.symbolize(profile, modules, usize::MAX);
        match catch_unwind(AssertUnwindSafe(symbolize)) {
            Ok(profile) => then(profile),
            Err(_) => self.symbolizer = None,
        }
    }

    fn symbolize(
        &mut self,
        profile: Box<Profile>,
        modules: &HashMap<MappingId, Arc<Module>>,
        most_bytes: usize,
    ) -> Profile {
        let (settings, files) = (self.symbols, &self.files);
        let symbolizer = || Owning::new(Symbolizer::new(settings), files);
        let symbolizer = self.symbolizer.get_or_insert_with(symbolizer);
        let names = &self.engine.redaction;
        let mut symbolized = symbolizer.symbolize(&profile, modules, names, most_bytes);
        drop(profile);
        report::describe_symbolized(&mut symbolized);
        let Symbolized { profile, downsampled, .. } = symbolized;
        Counters::add(&self.engine.counters.samples.downsampled, downsampled as u64);
        self.symbolized = Instant::now();
        for missing in symbolizer.take_missing() {
            if matches!(missing, Missing::TooLarge(..)) {
                Counters::add(&self.engine.counters.profiles.symbols_over_limit, 1);
            }
            if self.reported.insert(missing.clone()) {
                self.engine.log_event(&missing_event(&missing, names));
            }
        }
        profile
    }
}

/// A layer gets its dispatcher just before the global maximum level is set, and events in between are lost. Waits up
/// to 200 ms for the level, in case it is still to be set.
fn wait_for_level(level: LevelFilter) {
    for _ in 0..20 {
        if LevelFilter::current() >= level {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The report of spans without a profile.
fn unexported(kept: &[KeptSpan]) -> Kept {
    Kept {
        spans: report::outermost_first(kept),
        profile: None,
        samples: 0,
        top_function: None,
        waits: Waits::default(),
        awaits: Awaits::default(),
        files: Vec::new(),
    }
}

fn missing_event(missing: &Missing, names: &Redaction) -> LogEvent {
    let (kind, file, error) = match missing {
        Missing::LineTables => (LogKind::NoLineTables, None, None),
        Missing::Replaced(file) => (LogKind::FileReplaced, Some(file), None),
        Missing::Unreadable(file, error) => (LogKind::FileUnreadable, Some(file), Some(error)),
        Missing::Compressed(file) => (LogKind::FileCompressed, Some(file), None),
        Missing::TooLarge(file, _) => (LogKind::FileTooLarge, Some(file), None),
    };
    let redacted = file.map(|file| names.redact_module(file).into_owned());
    let error = error.zip(file.zip(redacted.as_ref()));
    let is_limit = kind == LogKind::FileTooLarge;
    LogEvent {
        variable: is_limit.then_some("TRACING_PROFILING_SYMBOL_BYTES".into()),
        error: error.map(|(error, (file, redacted))| error.replace(file.as_str(), redacted)),
        file: redacted,
        ..LogEvent::warning(kind, missing_in_words(missing, names))
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
            names.redact_module(file)
        ),
        Missing::Unreadable(file, error) => {
            let shown = names.redact_module(file);
            let error = error.replace(file, &shown);
            format!("{shown} cannot be read, so its functions have no names: {error}")
        }
        Missing::Compressed(file) => format!(
            "the debug information of {} is compressed with zstd, which is not supported, so profiles show \
             its functions but no lines and no inlined functions; compress it with zlib \
             (`-C link-arg=-Wl,--compress-debug-sections=zlib`) or not at all",
            names.redact_module(file)
        ),
        Missing::TooLarge(file, bytes) => {
            let (file, mib) = (names.redact_module(file), bytes.div_ceil(1024 * 1024));
            format!(
                "{file} has {mib} MiB of symbols, which is more than the limit, so profiles show its \
                 functions at most, and no lines; raise TRACING_PROFILING_SYMBOL_BYTES, or build it with \
                 `debug = \"line-tables-only\"`"
            )
        }
    }
}

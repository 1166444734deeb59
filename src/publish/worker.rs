//! The thread that reads symbols.

use std::collections::{HashSet, VecDeque};
use std::mem::{self, Discriminant};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, Sender, select};

use super::delivery::PublishState;
use super::exporting::ExportJob;
use super::job::{Job, ShutdownDeadline, UnnamedProfile};
use super::memory::MemoryReservation;
use super::outbox::HeldProfile;
use crate::budget::passed;
use crate::keep::{Kept, KeptSpan, Reservation};
use crate::log::{LogEvent, LogKind};
use crate::profile::{Compared, Hotspot, Hotspots, Profile, SampleKind, Symbolized};
use crate::redact::Redaction;
use crate::references::ClosedReference;
use crate::report;
use crate::stats::Counters;
use crate::symbols::{Missing, SymbolProblem, SymbolSettings, Symbolizer};
use crate::sys::{self, Files, FilesGuard};

/// The symbolizer is dropped after this long without a profile.
const FORGET_AFTER: Duration = Duration::from_secs(30);

/// Of these, it is known where they were.
const MOST_RECENT: usize = 32;

/// A program that loads its plugins again and again, from a new file each time, can have any number of them.
const MAX_REPORTED: usize = 32;

/// Symbolizes profiles for the exporting thread, and for callers that wait, whom the exporter must not delay.
pub(super) struct SymbolsThread {
    pub(super) shared: PublishState,
    pub(super) jobs: Receiver<Job>,
    pub(super) exports: Sender<ExportJob>,
    pub(super) files: Arc<Files>,
    pub(super) symbols: SymbolSettings,
    /// With when it was last used.
    pub(super) symbolizer: Option<(FilesGuard<Symbolizer>, Instant)>,
    /// The problems that were logged, by file.
    pub(super) reported: HashSet<(Discriminant<SymbolProblem>, Option<String>)>,
    /// The last kept spans that were mostly in one function: name, begin and end, and the function. The latest first.
    pub(super) recent: VecDeque<(String, [u64; 2], String)>,
}

impl SymbolsThread {
    pub(super) fn run(mut self) {
        loop {
            let forget = self.symbolizer.as_ref().map(|(_, used)| *used + FORGET_AFTER);
            let wake = forget.map_or_else(channel::never, channel::at);
            let job = select! {
                recv(self.jobs) -> job => Some(job.unwrap_or(Job::Stop(ShutdownDeadline::FAILED))),
                recv(wake) -> _ => None,
            };
            // In the order in which they came.
            match job {
                Some(Job::Export { unnamed, kept, room, reservation }) => {
                    let job = self.prepare(unnamed, &kept, (room, reservation));
                    _ = self.exports.send(job);
                }
                Some(Job::Reference { unnamed, reference, now_ns, on_way: _on_way }) => {
                    let began_ns = sys::thread_cpu_ns();
                    let ClosedReference { span, weight, spent_ns, .. } = *reference;
                    if let Some(profile) = self.symbolize(unnamed, usize::MAX) {
                        self.shared.references.add(&profile, &span.facts, weight, now_ns);
                    } else {
                        // Reading symbols failed.
                        Counters::add(&self.shared.counters.references.dropped_failed, 1);
                    }
                    let took_ns = passed(began_ns, sys::thread_cpu_ns());
                    let choice = &self.shared.references.choice;
                    took_ns.into_iter().for_each(|ns| choice.spend(ns + spent_ns));
                }
                Some(Job::Reply { unnamed, asked }) => {
                    // A caller gets no answer if that panics.
                    _ = self.symbolize(unnamed, usize::MAX).map(|profile| asked.answer(profile));
                }
                Some(Job::Done(waiting)) => _ = self.exports.send(ExportJob::Done(waiting)),
                Some(Job::Stop(last)) => {
                    _ = self.exports.send(ExportJob::Stop(last));
                    return;
                }
                None => {}
            }
            // Also done if jobs keep coming.
            self.symbolizer.take_if(|(_, used)| used.elapsed() >= FORGET_AFTER);
        }
    }

    fn prepare(
        &mut self,
        unnamed: UnnamedProfile,
        kept: &[KeptSpan],
        (mut room, reservation): (MemoryReservation, Option<Reservation>),
    ) -> ExportJob {
        sys::read_filters();
        let samples = unnamed.profile.sample_count();
        let mut report = Kept { samples, ..report::unexported(kept) };
        if !self.files.still_owned() {
            // [`FilesGuard`] leaks it if its files were closed. A new one opens its own files.
            self.symbolizer = None;
        }
        room.grow();
        let Some(mut profile) = self.symbolize(unnamed, room.most_bytes) else {
            return ExportJob::Lose(Box::new(report));
        };
        room.shrink(profile.bytes());
        report.samples = profile.sample_count();
        report.waits = profile.waits();
        report.awaits = profile.awaits();
        report.hotspots = profile.hotspots();
        self.place(&profile, &mut report.hotspots);
        // Of further spans, it is not known which are inside others.
        let is_topmost = profile.spans.iter().map(|span| span.is_topmost);
        let is_topmost = is_topmost.chain(std::iter::repeat(true));
        for (span, is_topmost) in report.spans.iter_mut().zip(is_topmost) {
            span.facts.is_topmost = is_topmost;
        }
        report::describe_waits(&mut profile, &report.waits);
        // The outermost of which there are reference spans, against these.
        let mut closed = profile.spans.iter().filter(|span| !span.is_open);
        let compared = closed.find_map(|span| self.shared.references.compare(&profile, span));
        report.compared = compared.as_ref().map(Compared::summary);
        profile.compared = compared.map(Arc::new);
        report.coverage = profile.coverage();
        let headline = |first| report::kept_event::headline(first, &report);
        profile.headline = report.spans.first().map(headline).unwrap_or_default();
        let since = Instant::now();
        let held = HeldProfile { profile, report, since, _room: room, _permit: reservation };
        ExportJob::Deliver(Box::new(held))
    }

    /// Says in which functions spans were that left the thread of the first one, and remembers in which that one was.
    fn place(&mut self, profile: &Profile, hotspots: &mut Hotspots) {
        let Some(first) = profile.spans.first() else { return };
        let (from_ns, to_ns) = (first.start_unix_ns, first.start_unix_ns + first.times.wall_ns);
        hotspots.place_until(|name| {
            let at_once = self.recent.iter().filter(|(of, [begin_ns, end_ns], _)| {
                of == name && *begin_ns < to_ns && from_ns < *end_ns
            });
            // It is not known which of several it was.
            let mut places = at_once.map(|(.., place)| place);
            let place = places.next()?;
            places.all(|other| other == place).then(|| place.clone())
        });
        let is_alone = profile.spans.iter().skip(1).all(|span| !span.is_topmost);
        let [(ran_ns, ran), (blocked_ns, blocked)] = [SampleKind::OnCpu, SampleKind::OffCpu]
            .map(|kind| (profile.total(kind), hotspots.of(kind)));
        // Spans inside it that are on other threads may be what was blocked.
        let is_blocked = blocked_ns > ran_ns && first.times.covers_subtree();
        let was_in = if is_blocked { blocked } else { ran };
        if let Some(place) = was_in.filter(|_| is_alone).and_then(Hotspot::place) {
            self.recent.truncate(MOST_RECENT - 1);
            self.recent.push_front((first.name(), [from_ns, to_ns], place));
        }
    }

    /// Debug information is large, untrusted input. A panic there must not prevent all later profiles.
    fn symbolize(&mut self, unnamed: UnnamedProfile, most_bytes: usize) -> Option<Profile> {
        let symbolized = catch_unwind(AssertUnwindSafe(|| self.try_symbolize(unnamed, most_bytes)));
        symbolized.inspect_err(|_| self.symbolizer = None).ok()
    }

    fn try_symbolize(&mut self, unnamed: UnnamedProfile, most_bytes: usize) -> Profile {
        let (settings, files) = (self.symbols, &self.files);
        let new = || (FilesGuard::new(Symbolizer::new(settings), files), Instant::now());
        let (symbolizer, used) = self.symbolizer.get_or_insert_with(new);
        let names = &self.shared.redaction;
        let UnnamedProfile { profile, modules } = unnamed;
        let mut symbolized = symbolizer.symbolize(&profile, &modules, names, most_bytes);
        drop(profile);
        report::describe_symbolized(&mut symbolized);
        let resource = self.shared.references.context.resource();
        symbolized.profile.notes.extend(report::machine(resource));
        let Symbolized { profile, downsampled, .. } = symbolized;
        Counters::add(&self.shared.counters.samples.downsampled, downsampled as u64);
        *used = Instant::now();
        for missing in symbolizer.take_missing() {
            if matches!(missing.lack, SymbolProblem::TooLarge { .. }) {
                Counters::add(&self.shared.counters.profiles.symbols_over_limit, 1);
            }
            let problem = (mem::discriminant(&missing.lack), missing.file.clone());
            if self.reported.len() < MAX_REPORTED && self.reported.insert(problem) {
                let mut event = missing_event(&missing, names);
                if self.reported.len() == MAX_REPORTED {
                    event.message += " (further files are not reported)";
                }
                self.shared.reporter.log(event);
            }
        }
        if symbolizer.holds_what_is_gone() {
            self.symbolizer = None;
        }
        profile
    }
}

fn missing_event(Missing { file, lack }: &Missing, names: &Redaction) -> LogEvent {
    let (kind, error) = match lack {
        SymbolProblem::LineTables { .. } => (LogKind::NoLineTables, None),
        SymbolProblem::Replaced => (LogKind::FileReplaced, None),
        SymbolProblem::Unreadable(error)
        | SymbolProblem::Mappings(error)
        | SymbolProblem::DebugUnreadable(error)
        | SymbolProblem::EmbeddedUnreadable(error)
        | SymbolProblem::SupplementUnreadable(error) => (LogKind::FileUnreadable, Some(error)),
        SymbolProblem::Compressed => (LogKind::FileCompressed, None),
        SymbolProblem::Split => (LogKind::FileSplit, None),
        SymbolProblem::TooLarge { .. } => (LogKind::FileTooLarge, None),
    };
    let redacted = file.as_ref().map(|file| names.redact_module(file).into_owned());
    let error = error.map(|error| match file.as_ref().zip(redacted.as_ref()) {
        Some((file, redacted)) => error.replace(file, redacted),
        None => error.clone(),
    });
    let is_limit = matches!(lack, SymbolProblem::TooLarge { is_own: true, .. });
    let shown = [&redacted, &error].map(|text| text.as_deref().unwrap_or_default());
    let message = lack_in_words(lack, shown);
    LogEvent {
        variable: is_limit.then_some("TRACING_PROFILING_MEMORY".into()),
        error,
        file: redacted,
        ..LogEvent::warning(kind, message)
    }
}

/// What it means, with the redacted name of the file and the error.
fn lack_in_words(lack: &SymbolProblem, [file, error]: [&str; 2]) -> String {
    match lack {
        SymbolProblem::LineTables { is_stripped: false } => "this program has no line tables, so profiles show functions but \
            no lines and no inlined functions; add `debug = \"line-tables-only\"` to [profile.release] in Cargo.toml"
            .to_owned(),
        SymbolProblem::LineTables { is_stripped: true } => "this program is stripped, so profiles show addresses instead of its \
            functions; remove `strip` from [profile.release] in Cargo.toml and add `debug = \"line-tables-only\"`, or \
            leave the symbols in a file beside it (`objcopy --add-gnu-debuglink`)"
            .to_owned(),
        SymbolProblem::Replaced => format!(
            "{file} was replaced, changed or deleted after it was loaded, so functions in it have no names; \
             restart to get them"
        ),
        SymbolProblem::Mappings(_) => format!(
            "/proc/self/maps cannot be read, so it is not known which files are loaded, and functions have no \
             names: {error}; mount /proc"
        ),
        SymbolProblem::Unreadable(_) => {
            format!("{file} cannot be read, so its functions have no names: {error}")
        }
        SymbolProblem::DebugUnreadable(_) => format!(
            "the debug information of {file} cannot be read, so profiles show its functions but no lines and no \
             inlined functions: {error}"
        ),
        SymbolProblem::EmbeddedUnreadable(_) => format!(
            "the symbols in .gnu_debugdata of {file} cannot be read, so only functions that it exports have names: {error}"
        ),
        SymbolProblem::SupplementUnreadable(_) => format!(
            "the debug information of {file} has a part in a supplementary file (as `dwz -m` makes), which cannot be read, so \
             profiles show its functions and lines but not all inlined functions: {error}"
        ),
        SymbolProblem::Compressed => format!(
            "the debug information of {file} is compressed with zstd or in an old way (its sections are named `.zdebug_`), \
             which is not supported, so profiles show its functions but no lines and no inlined functions; compress it with \
             zlib (`-C link-arg=-Wl,--compress-debug-sections=zlib`) or not at all"
        ),
        SymbolProblem::Split => format!(
            "a part of the debug information of {file} is in other files (`.dwo` or `.dwp`), which are not read, so profiles \
             show its functions and lines but no inlined functions; remove `split-debuginfo` from [profile.release] in \
             Cargo.toml, or set it to \"off\""
        ),
        SymbolProblem::TooLarge { bytes, is_own } => {
            let mib = bytes.div_ceil(1024 * 1024);
            let (limit, raise) = match is_own {
                true => ("the limit", "TRACING_PROFILING_MEMORY"),
                false => ("a quarter of what memory limits leave", "that of the control group, or `ulimit`"),
            };
            format!(
                "{file} has {mib} MiB of symbols, which is more than {limit}, so profiles show its \
                 functions at most, and no lines; raise {raise}, or build it with \
                 `debug = \"line-tables-only\"`"
            )
        }
    }
}

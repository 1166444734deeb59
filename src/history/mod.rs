//! What is typical, by version of the service and hour: stored in the directory of profiles, and compared with the day
//! and the version before.
//!
//! Traffic differs by the hour of the day, so an hour is compared with that of the day before.

mod format;
mod routes;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use self::format::HourFile;
use crate::compare::{Baseline, CohortHour, Drift, DriftDetector, hour_begins, hour_of};
use crate::export::typical::{TypicalFile, TypicalFiles};
use crate::facts::format::Ns;
use crate::log::{LogEvent, LogKind};
use crate::references::{Moment, References};
use crate::stats::Counters;

pub use routes::{Period, RouteHistory};

/// Where hours are stored, and as what.
#[derive(Debug, Default)]
pub(crate) struct HistorySettings {
    /// The directory of profiles. Without one, an hour is only compared with those of this process.
    pub(crate) dir: Option<PathBuf>,
    /// The name and the version of the service; empty if unknown.
    pub(crate) service: String,
    pub(crate) version: String,
}

/// The hours of a layer.
pub(crate) struct HourlyHistory {
    settings: HistorySettings,
    references: Arc<References>,
    counters: Arc<Counters>,
    files: Option<TypicalFiles>,
    detector: DriftDetector,
    /// The one that has not ended, counted from 1970, and since when its spans are known.
    hour: u64,
    known_since: SystemTime,
    /// The last write: its hour, and the number of reference spans.
    written: (u64, u64),
    next_write: SystemTime,
    has_warned: bool,
    /// What is to be logged.
    pub(crate) events: Vec<LogEvent>,
}

/// Of an hour of which less is known, nothing is said: a process that has just started is slower.
const MIN_OF_AN_HOUR: Duration = Duration::from_secs(30 * 60);
/// What is lost if the process is killed.
const WRITE_EVERY: Duration = Duration::from_secs(5 * 60);
const HOURS_PER_DAY: u64 = 24;

impl HourlyHistory {
    pub(crate) fn new(
        settings: HistorySettings,
        references: &Arc<References>,
        counters: &Arc<Counters>,
    ) -> Self {
        Self {
            files: settings.dir.as_deref().map(TypicalFiles::new),
            settings,
            references: Arc::clone(references),
            counters: Arc::clone(counters),
            detector: DriftDetector::default(),
            hour: 0,
            known_since: UNIX_EPOCH,
            written: (0, 0),
            next_write: UNIX_EPOCH,
            has_warned: false,
            events: Vec::new(),
        }
    }

    /// Reads what earlier processes have stored, and others that share the directory.
    pub(crate) fn begin(&mut self, now: SystemTime) {
        (self.hour, self.known_since) = (hour_of(now), now);
        self.next_write = now + WRITE_EVERY;
        self.detector = DriftDetector::new(self.hour);
        let dir = self.settings.dir.clone().filter(|_| self.references.choice.are_on());
        let Some(dir) = dir else { return };
        match TypicalFile::list(&dir) {
            Ok(files) => self.read(&files),
            Err(error) => self.note_unreadable(&dir, &error.to_string()),
        }
    }

    /// Reads those of the last day, and those of the last day of the version before. The newest are first.
    fn read(&mut self, files: &[TypicalFile]) {
        let day_ago = hour_begins(self.hour.saturating_sub(HOURS_PER_DAY));
        let mut before: Option<(&TypicalFile, u64)> = None;
        for file in files {
            let is_recent = file.is_since(day_ago);
            let may_be_before = !self.settings.version.is_empty()
                && !file.is_of_version(&self.settings.version)
                && before.is_none_or(|(newest, _)| file.version == newest.version);
            if !is_recent && !may_be_before {
                continue;
            }
            let hour = match HourFile::read(&file.path) {
                Ok(hour) if hour.service == self.settings.service => hour,
                Ok(_) => continue,
                Err(error) => {
                    self.note_unreadable(&file.path, &error);
                    continue;
                }
            };
            if is_recent {
                self.detector.add_stored(hour.hour, &hour.routes);
            }
            if may_be_before && !hour.version.is_empty() {
                let (_, newest) = *before.get_or_insert((file, hour.hour));
                if hour.hour + HOURS_PER_DAY > newest {
                    self.detector.add_before(&hour.version, hour.hour, &hour.routes);
                }
            }
        }
    }

    fn note_unreadable(&mut self, file: &Path, error: &str) {
        Counters::add(&self.counters.references.history_unreadable, 1);
        if !self.events.is_empty() {
            return;
        }
        let file = file.display().to_string();
        let message = format!(
            "what was typical in an earlier hour cannot be read, so nothing is compared with it: {file}: {error} (logged \
             once)"
        );
        let event = LogEvent::failure(LogKind::HistoryUnreadable, message, error.to_owned());
        self.events.push(LogEvent { file: Some(file), ..event });
    }

    /// How long there is nothing to do.
    pub(crate) fn due_in(&self, now: SystemTime) -> Option<Duration> {
        let in_hour = hour_begins(self.hour + 1).duration_since(now).unwrap_or_default();
        let in_minutes = self.next_write.duration_since(now).unwrap_or_default();
        // Also if the clock was set back.
        let next = in_hour.min(in_minutes).min(WRITE_EVERY);
        self.references.choice.are_on().then_some(next)
    }

    /// Ends the hour if it has ended, and writes what there is from time to time.
    pub(crate) fn advance(&mut self, now: SystemTime) {
        if !self.references.choice.are_on() {
            return;
        }
        self.references.choice.relax(Moment::now());
        let hour = hour_of(now);
        if hour + 1 < self.hour {
            // The clock was set back.
            (self.hour, self.known_since) = (hour, now);
        }
        if hour > self.hour {
            let ended = std::mem::replace(&mut self.hour, hour);
            let routes = self.references.end_hour();
            self.end_hour(ended, routes);
            self.next_write = now + WRITE_EVERY;
        } else if now >= self.next_write || now + WRITE_EVERY < self.next_write {
            self.write(self.hour, self.references.hour());
            self.next_write = now + WRITE_EVERY;
        }
    }

    fn end_hour(&mut self, hour: u64, routes: BTreeMap<String, CohortHour>) {
        let known_for = hour_begins(hour + 1).duration_since(self.known_since).unwrap_or_default();
        let drifts = match known_for >= MIN_OF_AN_HOUR {
            true => self.detector.end_hour(hour, &routes),
            false => Vec::new(),
        };
        Counters::add(&self.counters.references.drifted, drifts.len() as u64);
        self.references.note_drifts(&drifts, hour);
        self.events.extend(drifts.iter().map(|drift| drifted(drift, &self.settings.version)));
        self.write(hour, routes);
    }

    /// Writes the file of an hour, if there is more than in the last one.
    fn write(&mut self, hour: u64, routes: BTreeMap<String, CohortHour>) {
        let Some(files) = &self.files else { return };
        let spans = routes.values().map(|hour| hour.references.spans()).sum();
        if spans == 0 || self.written == (hour, spans) {
            return;
        }
        let version = self.settings.version.clone();
        let service = self.settings.service.clone();
        let file = HourFile { service, version, hour, routes };
        let written = files.write(hour_begins(hour), &file.version, &file.encode());
        let Err(problem) = written else {
            self.written = (hour, spans);
            self.has_warned = false;
            return;
        };
        Counters::add(&self.counters.references.history_unwritten, 1);
        let has_warned = std::mem::replace(&mut self.has_warned, true);
        let message =
            format!("what is typical is not stored: {problem} (logged once until it works again)");
        let event = LogEvent::failure(LogKind::HistoryUnwritten, message, problem);
        self.events.extend((!has_warned).then_some(event));
    }

    /// Writes what there is: many programs end after a flush.
    pub(crate) fn flush(&mut self, now: SystemTime) {
        self.advance(now);
        self.write(self.hour, self.references.hour());
    }
}

fn drifted(drift: &Drift, own_version: &str) -> LogEvent {
    let Drift { route, was_ns, is_ns, since, .. } = drift;
    let percent = (*is_ns as f64 / (*was_ns).max(1) as f64 - 1.0) * 100.0;
    let (now, then) = match since {
        Baseline::DayBefore => {
            ("in the last hour".to_owned(), "in the same hour of the day before".to_owned())
        }
        Baseline::Version(version) => {
            (format!("with version {own_version}"), format!("with version {version}"))
        }
    };
    let (is, was) = (Ns(*is_ns), Ns(*was_ns));
    let message =
        format!("{route} has become slower: {is} on average {now}, {was} {then} (+{percent:.0} %)");
    LogEvent { value: Some(route.clone()), ..LogEvent::warning(LogKind::Drift, message) }
}

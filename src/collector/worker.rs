//! Symbolizing and exporting, on a thread of its own.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError};

use super::command::Job;
use super::engine::Engine;
use super::report;
use crate::export::{ExportError, Exported, Exporter};
use crate::keep::{Kept, KeptSpan, OnKept};
use crate::profile::{MappingId, Profile};
use crate::stats::Counters;
use crate::symbols::{Missing, Symbolizer};
use crate::unwind::Module;

/// After how long without a profile what was read of debug information is given back.
const FORGET_AFTER: Duration = Duration::from_secs(30);

/// What a worker is made of.
pub(super) struct WorkerParts {
    pub(super) engine: Arc<Engine>,
    pub(super) jobs: Receiver<Job>,
    pub(super) exporter: Box<dyn Exporter>,
    pub(super) on_kept: Option<OnKept>,
}

/// The thread that exports.
pub(super) struct Worker {
    parts: WorkerParts,
    symbolizer: Option<Symbolizer>,
    told: HashSet<Missing>,
    /// The last export failed, and that was said.
    is_failing: bool,
}

impl Worker {
    pub(super) fn new(parts: WorkerParts) -> Self {
        Self { parts, symbolizer: None, told: HashSet::new(), is_failing: false }
    }

    pub(super) fn run(mut self) {
        loop {
            let job = match &self.symbolizer {
                Some(_) => self.parts.jobs.recv_timeout(FORGET_AFTER),
                None => self.parts.jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match job {
                Ok(Job::Say { line, is_warning: false }) => {
                    self.say(|| tracing::info!(target: "tracing_profiling", "{line}"));
                }
                Ok(Job::Say { line, is_warning: true }) => {
                    self.say(|| tracing::warn!(target: "tracing_profiling", "{line}"));
                }
                Ok(Job::Export { profile, modules, kept }) => {
                    self.export(*profile, &modules, kept);
                    self.parts.engine.keeper.redeem();
                }
                Ok(Job::Report(kept)) => self.report(Kept {
                    spans: report::outermost_first(&kept),
                    profile: None,
                    samples: 0,
                    top_function: None,
                    files: Vec::new(),
                }),
                Ok(Job::Done(done)) => _ = done.send(()),
                Err(RecvTimeoutError::Timeout) => self.symbolizer = None,
                Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn say(&self, event: impl FnOnce()) {
        // It goes through other layers, which are not ours.
        let say = || self.parts.engine.with_dispatch(event);
        _ = catch_unwind(AssertUnwindSafe(say));
    }

    fn export(
        &mut self,
        profile: Profile,
        modules: &HashMap<MappingId, Arc<Module>>,
        kept: Vec<KeptSpan>,
    ) {
        let mut report = Kept {
            spans: report::outermost_first(&kept),
            profile: None,
            samples: profile.sample_count(),
            top_function: None,
            files: Vec::new(),
        };
        // Debug information is a large input, and an exporter is not ours: what goes wrong there
        // must not be the end of all later profiles.
        let exported = catch_unwind(AssertUnwindSafe(|| {
            let profile = self.symbolize(profile, modules);
            report.top_function =
                profile.top_function().map(|(name, share)| (name.to_owned(), share));
            report.profile = Some(profile.id);
            self.parts.exporter.export(&profile)
        }));
        let exported = exported.unwrap_or_else(|_| {
            self.symbolizer = None;
            Err("it panicked".into())
        });
        self.conclude(exported, &mut report);
        self.report(report);
    }

    fn symbolize(
        &mut self,
        profile: Profile,
        modules: &HashMap<MappingId, Arc<Module>>,
    ) -> Profile {
        let symbolizer = self.symbolizer.get_or_insert_with(Symbolizer::new);
        let profile = symbolizer.symbolize(profile, modules);
        for missing in symbolizer.take_missing() {
            if self.told.insert(missing.clone()) {
                let text = missing_in_words(&missing);
                self.say(|| tracing::warn!(target: "tracing_profiling", "{text}"));
            }
        }
        profile
    }

    fn conclude(&mut self, exported: Result<Exported, ExportError>, report: &mut Kept) {
        let counters = &self.parts.engine.counters;
        match exported {
            Ok(exported) => {
                Counters::add(&counters.profiles_exported, 1);
                self.is_failing = false;
                report.files = exported.files;
            }
            Err(error) => {
                Counters::add(&counters.profiles_dropped_export_failed, 1);
                report.profile = None;
                if !std::mem::replace(&mut self.is_failing, true) {
                    self.say(|| {
                        tracing::warn!(
                            target: "tracing_profiling",
                            "a profile could not be exported: {error} (said once until it works \
                             again; the service is not affected)"
                        );
                    });
                }
            }
        }
    }

    fn report(&self, kept: Kept) {
        let line = report::line(&kept);
        self.say(|| tracing::info!(target: "tracing_profiling", "{line}"));
        if let Some(on_kept) = &self.parts.on_kept {
            // Not ours either.
            _ = catch_unwind(AssertUnwindSafe(|| on_kept(&kept)));
        }
    }
}

fn missing_in_words(missing: &Missing) -> String {
    match missing {
        Missing::LineTables => "this program has no line tables, so profiles show functions but \
            no lines and no inlined functions; add `debug = \"line-tables-only\"` to \
            [profile.release] in Cargo.toml, and do not strip the program"
            .to_owned(),
        Missing::Replaced(file) => format!(
            "{file} is not the file that was loaded, so its functions have no names; restart to \
             get them"
        ),
        Missing::Unreadable(file, error) => {
            format!("{file} cannot be read, so its functions have no names: {error}")
        }
    }
}

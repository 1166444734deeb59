//! Publishes what the collector makes: symbols, export, log and callbacks.
//!
//! Each has a thread of its own, since each can block forever: on a file, in foreign code, on a pipe that is not read.
//! None waits for another, and no caller waits for one of them without a deadline. A profile is exported before it is
//! logged.

mod delivery;
mod ending;
mod exporting;
mod job;
mod memory;
mod open_span;
mod outbox;
mod queue;
mod recent;
mod reporter;
mod worker;

use std::collections::{HashSet, VecDeque};
use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use crossbeam::channel::{self, Receiver, Sender};

use self::delivery::Delivery;
use self::worker::SymbolsThread;
use crate::export::Exporter;
use crate::history::{HistorySettings, HourlyHistory};
use crate::keep::OnKept;
use crate::span::spawn_ignored;
use crate::symbols::SymbolSettings;
use crate::sys::{Files, FilesGuard};

pub(crate) use delivery::PublishState;
pub(crate) use ending::{ANSWERED_WITHIN, ShutdownResult};
pub(crate) use job::{
    Asked, FlushRequest, FlushResult, Job, PendingReplies, Reply, ShutdownDeadline, UnnamedProfile,
};
pub(crate) use memory::{MemoryBudget, waiting_profiles};
pub(crate) use open_span::link_of;
pub use open_span::{OpenSpan, OpenState};
pub use recent::RecentlyKept;
#[cfg(test)]
pub(crate) use reporter::LogItem;
pub(crate) use reporter::Reporter;

pub(crate) struct PublishSettings {
    pub(crate) exporter: Box<dyn Exporter>,
    /// An error of the exporter that was found when it was made.
    pub(crate) problem: Option<String>,
    pub(crate) history: HistorySettings,
    pub(crate) on_kept: Option<OnKept>,
    pub(crate) symbols: SymbolSettings,
}

pub(crate) struct PublisherParts {
    pub(crate) shared: PublishState,
    pub(crate) jobs: Receiver<Job>,
    pub(crate) files: Arc<Files>,
    pub(crate) settings: PublishSettings,
    pub(crate) delivers: Sender<Infallible>,
}

impl PublisherParts {
    /// Starts the threads. They end after [`Job::Stop`], or if the system refuses to create one of them.
    pub(crate) fn start(self) -> io::Result<()> {
        let reporter = Arc::clone(&self.shared.reporter);
        self.start_threads().inspect_err(|_| reporter.close())
    }

    fn start_threads(self) -> io::Result<()> {
        let Self { shared, jobs, files, settings, delivers } = self;
        let PublishSettings { exporter, problem, history, on_kept, symbols } = settings;
        let history = HourlyHistory::new(history, &shared.references, &shared.counters);
        let exporter = FilesGuard::new(exporter, &files);
        let (exports, to_export) = channel::unbounded();
        let reporter = Arc::clone(&shared.reporter);
        spawn_ignored("profiling-log", move || reporter.run_log())?;
        if let Some(on_kept) = on_kept {
            let reporter = Arc::clone(&shared.reporter);
            spawn_ignored("profiling-kept", move || reporter.run_callback(&on_kept))?;
        }
        let (of_export, own_files) = (shared.clone(), Arc::clone(&files));
        spawn_ignored("profiling-export", move || {
            let _delivers = delivers;
            Delivery::new(of_export, exporter, own_files, problem).run(&to_export, history);
        })?;
        spawn_ignored("profiling-symbols", move || {
            let (symbolizer, reported, recent) = (None, HashSet::new(), VecDeque::new());
            SymbolsThread { shared, jobs, exports, files, symbols, symbolizer, reported, recent }
                .run();
        })
    }
}

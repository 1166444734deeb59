//! What the hooks, the handle and the collector share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crossbeam::channel::{self, Sender};
use parking_lot::RwLock;
use tracing::Dispatch;
use tracing::dispatcher::WeakDispatch;

use super::command::Command;
use super::run::Collector;
use super::worker::{Worker, WorkerParts};
use crate::error::Error;
use crate::export::Exporter;
use crate::keep::{Callsites, Keeper, KeptSpan, NoProfile, OnKept, Reasons};
use crate::profile::ProfileId;
use crate::sampler::PerfSource;
use crate::span::{Closing, RegistryId, Spans, is_ignored};
use crate::stats::{Counters, Stats};
use crate::sys::{self, Poller, Waker};

/// A generation that no process reaches.
const NOWHERE: u32 = u32::MAX;

/// How much may be held, and how much may be made of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) memory_bytes: usize,
    pub(crate) samples_per_profile: usize,
    pub(crate) frames_per_stack: usize,
}

/// What an engine is made of.
pub(crate) struct Parts {
    pub(crate) spans: Spans,
    pub(crate) callsites: Callsites,
    pub(crate) keeper: Keeper,
    pub(crate) counters: Arc<Counters>,
    pub(crate) source: PerfSource,
    pub(crate) poller: Poller,
    pub(crate) limits: Limits,
    pub(crate) base_period_ns: u64,
    pub(crate) exporter: Box<dyn Exporter>,
    pub(crate) on_kept: Option<OnKept>,
}

/// A layer's spans, rules and threads.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) spans: Spans,
    pub(crate) callsites: Callsites,
    pub(super) keeper: Keeper,
    pub(super) counters: Arc<Counters>,
    pub(super) waker: Waker,
    /// Why a span without samples has none.
    without_samples: NoProfile,
    commands: Sender<Command>,
    /// The fork generation of the process in which our threads run, or [`NOWHERE`].
    runs_in: AtomicU32,
    dispatch: RwLock<Option<WeakDispatch>>,
}

impl Engine {
    /// Starts the two threads.
    ///
    /// # Errors
    ///
    /// If the system does not let us.
    pub(crate) fn start(parts: Parts) -> Result<Arc<Self>, Error> {
        let (commands, received) = channel::unbounded();
        let (jobs, to_do) = channel::unbounded();
        let engine = Arc::new(Self {
            spans: parts.spans,
            callsites: parts.callsites,
            keeper: parts.keeper,
            counters: parts.counters,
            waker: parts.poller.waker(),
            without_samples: match parts.source.is_refused() {
                true => NoProfile::NoStacksHere,
                false => NoProfile::NoSamples,
            },
            commands,
            runs_in: AtomicU32::new(sys::fork_generation()),
            dispatch: RwLock::new(None),
        });
        let worker = WorkerParts {
            engine: Arc::clone(&engine),
            jobs: to_do,
            exporter: parts.exporter,
            on_kept: parts.on_kept,
        };
        let collector = Collector::new(
            Arc::clone(&engine),
            parts.source,
            parts.poller,
            received,
            jobs,
            parts.limits,
            parts.base_period_ns,
        );
        spawn("profiling-export", move || Worker::new(worker).run())?;
        spawn("profiling-drain", move || collector.run())?;
        Ok(engine)
    }

    /// False once everything has ended, and in the child of a fork, where locks of ours may be held
    /// for ever: then the hooks must do nothing.
    #[inline(always)]
    pub(crate) fn is_running(&self) -> bool {
        self.runs_in.load(Ordering::Relaxed) == sys::fork_generation()
    }

    pub(super) fn stop(&self) {
        self.runs_in.store(NOWHERE, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> Stats {
        self.counters.snapshot()
    }

    /// Where our own events go.
    pub(crate) fn set_dispatch(&self, dispatch: &Dispatch) {
        *self.dispatch.write() = Some(dispatch.downgrade());
        // It says what it can see here, as soon as somebody listens.
        self.waker.wake();
    }

    /// Runs `action` with our subscriber as the default.
    pub(super) fn with_dispatch(&self, action: impl FnOnce()) {
        let dispatch = self.dispatch.read().as_ref().and_then(WeakDispatch::upgrade);
        match dispatch {
            Some(dispatch) => tracing::dispatcher::with_default(&dispatch, action),
            None => action(),
        }
    }

    pub(crate) fn has_dispatch(&self) -> bool {
        self.dispatch.read().is_some()
    }

    /// A span has closed.
    #[inline]
    pub(crate) fn close(&self, id: RegistryId) {
        let mut is_due = false;
        self.spans.close(id, |closing| {
            is_due = self.judge(closing);
            is_due
        });
        // Now that the collector has been told.
        if is_due || self.spans.has_many_notices() {
            self.waker.wake();
        }
    }

    /// Whether the collector has something to do for a span that has closed.
    #[cold]
    fn judge(&self, closing: &Closing) -> bool {
        let Some(callsite) = self.callsites.callsite(closing.plan) else {
            return false;
        };
        let reasons = Reasons::judge(&callsite.keep, closing);
        if reasons.is_empty() {
            return false;
        }
        let mut span = KeptSpan {
            key: closing.key,
            root: closing.root,
            metadata: callsite.metadata,
            rule: callsite.rule,
            reasons,
            opened_ns: closing.opened_ns,
            opened: SystemTime::now()
                .checked_sub(Duration::from_nanos(closing.account.wall_ns))
                .unwrap_or(SystemTime::UNIX_EPOCH),
            samples: closing.samples,
            profile: Err(self.without_samples),
            earlier: Vec::new(),
            account: closing.account,
        };
        let is_due = self.keeper.keep(&mut span, || ProfileId::random().ok());
        self.count(&span);
        is_due
    }

    fn count(&self, span: &KeptSpan) {
        let counters = &self.counters;
        Counters::add(&counters.spans_kept, 1);
        let without = match span.profile {
            Ok(_) => return,
            Err(NoProfile::NoSamples | NoProfile::NoStacksHere) => {
                &counters.spans_kept_without_samples
            }
            Err(NoProfile::RateLimit) => &counters.spans_kept_over_rate_limit,
            Err(NoProfile::ExporterBusy) => &counters.spans_kept_exporter_busy,
            Err(NoProfile::NoId) => &counters.spans_kept_without_id,
        };
        Counters::add(without, 1);
    }

    /// Exports what has been kept until now. Returns whether that was done before the deadline.
    pub(crate) fn flush(&self, deadline: Instant) -> bool {
        let (done, wait) = channel::bounded(1);
        self.ask(Command::Flush(done)) && wait.recv_deadline(deadline).is_ok()
    }

    /// The same, and then ends everything.
    pub(crate) fn shutdown(&self, deadline: Instant) -> bool {
        let (done, wait) = channel::bounded(1);
        self.ask(Command::Shutdown(Some(done))) && wait.recv_deadline(deadline).is_ok()
    }

    /// Ends everything after what has been kept is exported, without waiting.
    pub(crate) fn shutdown_later(&self) {
        self.ask(Command::Shutdown(None));
    }

    fn ask(&self, command: Command) -> bool {
        // In the child of a fork nobody is there to answer, and our own threads would wait for
        // themselves.
        if !self.is_running() || (is_ignored() && command.is_waited_for()) {
            return false;
        }
        let sent = self.commands.send(command).is_ok();
        self.waker.wake();
        sent
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let run = move || {
        crate::span::ignore_this_thread();
        run();
    };
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(run);
    spawned.map(drop).map_err(Error::thread)
}

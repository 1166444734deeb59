//! The messages to the collector, and how callers wait for its answers.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crossbeam::channel::{RecvTimeoutError, Sender};

use super::Engine;
use super::process::{
    CancelProfile, LONGEST, ProcessRequest, ProcessRequests, ProfileKind, StartedProfile,
};
use crate::error::{FlushError, FlushStage, ProfileError};
use crate::profile::{Profile, ThreadDump};
use crate::publish::{ANSWERED_WITHIN, FlushRequest, FlushResult, OpenSpan, PendingReplies, Reply};
use crate::sinks::HeapPart;
use crate::span::is_ignored;
use crate::sys::{self, SuspendCounting};

#[derive(Debug)]
pub(crate) enum Command {
    /// Export everything that has been kept so far, then acknowledge.
    Flush(FlushRequest),
    /// Export everything that has been kept so far until then, and stop.
    Shutdown(Option<Instant>),
    /// List the spans that have been open for longer than `older_than`.
    FindOpen {
        older_than: Duration,
        reply: Reply<Vec<OpenSpan>>,
    },
    /// Make the profile of the live heap.
    Heap(HeapPart, Reply<Profile>),
    /// Find out where all threads of the process are. The answer is `None` if they cannot be listed.
    DumpThreads(Reply<Option<ThreadDump>>),
    ProfileProcess(ProcessRequest),
}

/// How long a caller waits for the layer's threads, which read symbols.
pub(crate) const LONGEST_ANSWER: Duration = Duration::from_secs(30);

pub(crate) fn not_listed() -> ProfileError {
    let why =
        "the system does not list the threads of the process in /proc/self/task: is /proc mounted?";
    ProfileError::Unavailable(why.to_owned())
}

#[derive(Debug)]
pub(crate) struct Commands {
    pub(crate) to_collector: Sender<Command>,
    /// Of callers that wait.
    pub(crate) questions: PendingReplies,
    pub(crate) process: ProcessRequests,
    /// Of those that wait for a flush. Apart, since an exporter that blocks leaves them without an answer.
    flushes: PendingReplies,
}

impl Commands {
    pub(crate) fn new(to_collector: Sender<Command>) -> Self {
        let (questions, flushes) = (PendingReplies::default(), PendingReplies::default());
        Self { to_collector, questions, process: ProcessRequests::default(), flushes }
    }
}

impl Engine {
    /// Asks the collector, and waits for the answer.
    pub(crate) fn ask<T>(
        &self,
        question: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, ProfileError> {
        let _uncounted = SuspendCounting::begin();
        let (reply, wait) = self.commands.questions.ask().ok_or(ProfileError::NoAnswer)?;
        // A question that cannot be sent is dropped, which ends the wait.
        self.send(question(reply));
        wait.recv_timeout(LONGEST_ANSWER).map_err(ProfileError::from)
    }

    /// Exports and reports what has been kept so far.
    pub(crate) fn flush(&self, deadline: Instant) -> FlushResult {
        let _uncounted = SuspendCounting::begin();
        let (done, wait) = self.commands.flushes.ask().ok_or(FlushError::TooManyCallers)?;
        if is_ignored() {
            return Err(FlushError::OwnThread);
        }
        if !self.send(Command::Flush(FlushRequest { done, deadline })) {
            return self.publish.ending.wait(deadline);
        }
        let delivered = match wait.recv_deadline(deadline + ANSWERED_WITHIN) {
            Ok(delivered) => delivered,
            Err(RecvTimeoutError::Timeout) => Err(FlushError::Timeout(FlushStage::Collection)),
            // The layer has ended in the meantime.
            Err(RecvTimeoutError::Disconnected) => return self.publish.ending.wait(deadline),
        };
        drop(wait);
        let are_reported = self.publish.reporter.wait(deadline);
        let reported = are_reported.then_some(()).ok_or(FlushError::Timeout(FlushStage::Reports));
        delivered.and(reported)
    }

    /// Flushes as [`flush`](Self::flush), then reports what is lost and stops everything, waiting until `return_by`.
    pub(crate) fn shutdown(&self, deadline: Instant, return_by: Instant) -> FlushResult {
        let _uncounted = SuspendCounting::begin();
        if is_ignored() {
            self.shutdown_later();
            return Err(FlushError::OwnThread);
        }
        self.send(Command::Shutdown(Some(deadline)));
        self.publish.ending.wait(return_by)
    }

    /// Stops everything once the kept spans are exported, without waiting for that.
    pub(crate) fn shutdown_later(&self) {
        self.send(Command::Shutdown(None));
    }

    pub(crate) fn begin_profile(
        &self,
        kind: ProfileKind,
        duration: Duration,
        period_ns: u64,
    ) -> Result<StartedProfile, ProfileError> {
        if is_ignored() {
            return Err(ProfileError::OwnThread);
        }
        if kind == ProfileKind::Cpu && self.source.sampler.is_refused() {
            let why = format!("no thread can be sampled: {}", self.source.describe());
            return Err(ProfileError::Unavailable(why));
        }
        if kind == ProfileKind::Wall && sys::own_threads().is_err() {
            return Err(not_listed());
        }
        let _uncounted = SuspendCounting::begin();
        let running = self.commands.process.begin().ok_or(ProfileError::Busy)?;
        let (reply, answer) = self.commands.questions.ask().ok_or(ProfileError::NoAnswer)?;
        let deadline = Instant::now() + duration + LONGEST;
        let is_canceled: Arc<AtomicBool> = Arc::default();
        let waker = self.waker.clone();
        let cancel = CancelProfile { is_canceled: Arc::clone(&is_canceled), waker };
        let request = ProcessRequest { kind, period_ns, duration, reply, is_canceled };
        if !self.send(Command::ProfileProcess(request)) {
            return Err(ProfileError::Ended);
        }
        Ok(StartedProfile { answer, deadline, _running: running, cancel })
    }

    pub(super) fn send(&self, command: Command) -> bool {
        // In a forked child no thread would answer.
        if !self.is_running() {
            return false;
        }
        let _uncounted = SuspendCounting::begin();
        let sent = self.commands.to_collector.send(command).is_ok();
        self.waker.wake();
        sent
    }
}

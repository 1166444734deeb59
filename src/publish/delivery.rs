//! Delivery: one queue and one retry policy for all exporters.
//!
//! A profile is in the outbox until it is delivered, stored or dropped. Most exporters export it when they are given it. A
//! [`Remote`] gets it encoded, one request at a time, and answers on a channel, so that other profiles and a flush do not
//! wait for a server.
//!
//! [`Remote`]: crate::export::remote::Remote

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvError, RecvTimeoutError};

use super::ending::ShutdownResult;
use super::outbox::{Content, DeliveryOutcome, HeldProfile, Outage, OutageCause, Outbox, Outgoing};
use super::reporter::Reporter;
use crate::error::{FlushError, FlushStage};
use crate::export::remote::{Answer, QueueLimits, RefusedScope};
use crate::export::{ExportError, Exporter, Format, Unexportable, stem};
use crate::keep::{ExporterHealth, Kept};
use crate::log::{LogEvent, LogKind};
use crate::profile::Profile;
use crate::redact::Redaction;
use crate::references::References;
use crate::span::ignore_this_thread;
use crate::stats::Counters;
use crate::sys::{self, Files, FilesGuard};

/// The pause before a retry while a caller waits in a flush, at first and at most.
const FIRST_PAUSE_OF_FLUSH: Duration = Duration::from_millis(20);
const LAST_PAUSE_OF_FLUSH: Duration = Duration::from_secs(1);
/// A profile that could not be delivered for this long is given up, as receivers reject older ones.
const MAX_AGE: Duration = Duration::from_secs(60 * 60);
const MINUTE: Duration = Duration::from_secs(60);

pub(super) struct Delivery {
    pub(super) shared: PublishState,
    exporter: FilesGuard<Box<dyn Exporter>>,
    files: Arc<Files>,
    is_remote: bool,
    outbox: Outbox,
    /// A remote's. Of others there are none.
    pub(super) answers: Receiver<Answer>,
    outage: Option<Outage>,
    lost: u64,
    age: Duration,
    has_logged_loss: bool,
    /// The log says that the exporter accepts no profile, and it has accepted none since.
    has_logged_failure: bool,
    /// Likewise for continuous profiles.
    has_logged_process: bool,
    /// When a problem of the receiver was last logged.
    warned: Option<Instant>,
    owes_all_clear: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct PublishState {
    pub(crate) counters: Arc<Counters>,
    /// Written by the exporting thread alone, except that admission takes what it may give.
    pub(crate) health: Arc<ExporterHealth>,
    pub(crate) reporter: Arc<Reporter>,
    pub(crate) redaction: Arc<Redaction>,
    pub(crate) references: Arc<References>,
    pub(crate) ending: Arc<ShutdownResult>,
}

impl Delivery {
    pub(super) fn new(
        shared: PublishState,
        mut exporter: FilesGuard<Box<dyn Exporter>>,
        files: Arc<Files>,
        problem: Option<String>,
    ) -> Self {
        let limits = exporter.remote().map(|remote| remote.limits());
        let (is_remote, limits) = (limits.is_some(), limits.unwrap_or(QueueLimits::NONE));
        let mut delivery = Self {
            shared,
            exporter,
            files,
            is_remote,
            outbox: Outbox { limits, queue: VecDeque::new(), sending: None },
            answers: channel::never(),
            outage: None,
            lost: 0,
            age: MAX_AGE,
            has_logged_loss: false,
            has_logged_failure: problem.is_some(),
            has_logged_process: false,
            warned: None,
            owes_all_clear: false,
        };
        if let Some(problem) = problem {
            delivery.fail(None, problem, OutageCause::Fails);
        }
        if let Some(remote) = delivery.exporter.remote() {
            let (sender, answers) = channel::unbounded();
            let answer = Box::new(move |answer: Answer| _ = sender.send(answer));
            let started = remote.start(answer, ignore_this_thread);
            delivery.answers = answers;
            if let Err(error) = started {
                delivery.break_down(format!("no thread to send profiles: {error}"));
            }
        }
        delivery
    }

    /// Whether the program has closed files that the exporter keeps using.
    fn has_lost_exporter(&self) -> bool {
        !self.files.still_owned() && self.exporter.keeps_files()
    }

    /// The outage, unless a probe has ended it.
    fn failing(&self) -> Option<&Outage> {
        self.outage.as_ref().filter(|outage| !outage.is_over)
    }

    /// Why no profile is accepted now, if that is so.
    fn problem(&self) -> Option<String> {
        let away = self.failing().filter(|outage| outage.is_away(self.outbox.limits.grace_period));
        away.map(|outage| outage.problem.clone()).or_else(|| self.outbox.is_full())
    }

    pub(super) fn next_attempt(&self) -> Option<Instant> {
        if self.outbox.sending.is_some() || self.has_lost_exporter() {
            return None;
        }
        let waits = !self.outbox.queue.is_empty();
        self.failing().map(|outage| outage.until).or_else(|| waits.then(Instant::now))
    }

    pub(super) fn deliver(&mut self, held: Box<HeldProfile>) {
        sys::read_filters();
        if self.has_lost_exporter() {
            return self.lose(held.report);
        }
        while let Ok(answer) = self.answers.try_recv() {
            self.note_answer(Ok(answer));
        }
        self.outbox.add(Outgoing::whole(held));
    }

    /// Does what is due. A hurried call waits for no pause after a failure, unless the receiver has asked for it.
    pub(super) fn advance(&mut self, is_hurried: bool) {
        if self.has_lost_exporter() {
            return;
        }
        let is_due = self.failing().is_none_or(|outage| outage.may_try(is_hurried));
        if is_due && !self.is_remote && self.failing().is_some() {
            match catch_unwind(AssertUnwindSafe(|| self.exporter.check())) {
                Ok(Ok(())) => self.outage.iter_mut().for_each(|outage| outage.is_over = true),
                Ok(Err(error)) => self.fail(None, error.to_string(), OutageCause::Fails),
                Err(_) => self.fail(None, "it cannot be checked".to_owned(), OutageCause::Fails),
            }
        }
        while (self.is_remote || self.failing().is_none())
            && let Some(Outgoing { content: Content::Whole(held), .. }) =
                self.outbox.take(Outgoing::is_whole)
            && self.hand_over(held)
        {}
        if is_due {
            self.send_next();
        }
        self.take_stock();
    }

    /// Drops what is too old to be tried again, and those of the process, as the next one comes soon. No profiles are made
    /// that would not be accepted: a fallback directory accepts all, unless it fails.
    fn take_stock(&mut self) {
        let age = self.age;
        let is_old = |it: &Outgoing| match it.content {
            Content::Whole(_) if it.is_of_process => true,
            Content::Whole(_) | Content::Encoded { .. } => it.since.elapsed() > age,
            Content::Stored(_) => false,
        };
        if self.failing().is_some() {
            for old in self.outbox.take_all(is_old) {
                self.conclude(old, DeliveryOutcome::TooOld);
            }
        }
        let has_fallback = self.exporter.remote().is_some_and(|it| it.fallback().is_some());
        let holds = self.outbox.queue.iter().any(Outgoing::is_whole);
        let accepts = self.problem().is_none() || has_fallback && !holds;
        self.shared.health.accepts.store(accepts, Ordering::Relaxed);
    }

    /// Gives a profile to the exporter. Returns whether it may accept others.
    fn hand_over(&mut self, held: Box<HeldProfile>) -> bool {
        let is_of_process = held.report.spans.is_empty();
        // An exporter is foreign code and may panic.
        let exported = catch_unwind(AssertUnwindSafe(|| self.export(&held.profile, held.since)));
        let (problem, is_alone, has_panicked) = match exported {
            // It says nothing of those of kept spans: they are elsewhere.
            Ok(Ok(_)) if is_of_process => {
                self.has_logged_process = false;
                return true;
            }
            Ok(Ok(files)) => {
                self.has_logged_failure = false;
                if !self.is_remote {
                    self.outage = None;
                }
                Counters::add(&self.shared.counters.profiles.exported, 1);
                let profile = Some(held.profile.id);
                self.shared.reporter.report(Kept { profile, files, ..held.report });
                return true;
            }
            Ok(Err(error)) => (error.to_string(), error.is::<Unexportable>(), false),
            Err(_) => ("the exporter panicked".to_owned(), false, true),
        };
        let (kind, is_logged, message) = if is_of_process {
            let what = "a continuous profile could not be exported";
            let message = format!("{what}: {problem} (logged once until it works again)");
            (LogKind::ExportFails, &mut self.has_logged_process, message)
        } else if is_alone {
            let message = format!("a profile is lost: {problem} (logged once)");
            (LogKind::ProfileLost, &mut self.has_logged_loss, message)
        } else {
            let message = format!(
                "a profile could not be exported: {problem} (logged once until it works again; until then \
                 spans are kept without profiles, and the program is not affected)"
            );
            (LogKind::ExportFails, &mut self.has_logged_failure, message)
        };
        if !std::mem::replace(is_logged, true) {
            self.shared.reporter.log(LogEvent::failure(kind, message, problem.clone()));
        }
        let says_nothing_of_others = is_of_process || is_alone;
        match says_nothing_of_others || has_panicked {
            true => self.lose(held.report),
            // To the back: if this profile is at fault, others get their turn.
            false => self.outbox.add(Outgoing::whole(held)),
        }
        if !says_nothing_of_others && !self.is_remote {
            self.fail(None, problem, OutageCause::Fails);
        }
        says_nothing_of_others
    }

    /// Exports a profile. For a remote, it is added to the outbox, or written to the fallback directory.
    fn export(&mut self, profile: &Profile, since: Instant) -> Result<Vec<PathBuf>, ExportError> {
        let problem = self.problem();
        let is_ended = self.failing().is_some_and(|outage| outage.cause == OutageCause::Ended);
        let Some(remote) = self.exporter.remote() else {
            return Ok(self.exporter.export(profile)?.files);
        };
        let is_of_process = profile.is_of_process();
        let outgoing = |content| Outgoing { content, since, is_repeated: false, is_of_process };
        let is_away = problem.is_some();
        if let (Some(problem), None) = (problem, remote.fallback()) {
            return Err(problem.into());
        }
        let message = remote.message(profile);
        let Some(fallback) = remote.fallback().filter(|_| is_away) else {
            self.outbox
                .add(outgoing(Content::Encoded { stem: stem(profile), message: message.into() }));
            return Ok(Vec::new());
        };
        let files = fallback.store(profile, Some(message))?;
        let encoded = files.iter().find(|path| path.extension().is_some_and(|e| e == "otlp"));
        if let Some(path) = encoded.filter(|_| !is_ended) {
            self.outbox.add(outgoing(Content::Stored(path.clone())));
        }
        self.count(DeliveryOutcome::Stored, is_of_process);
        Ok(files)
    }

    /// Sends a request if none is in flight: a profile, or only a probe whether the receiver is still away.
    fn send_next(&mut self) {
        let cause = self.failing().map(|outage| outage.cause);
        if cause == Some(OutageCause::Ended) {
            let problem = self.problem().unwrap_or_default();
            return self.fail(None, problem, OutageCause::Ended);
        }
        let may_probe = self.failing().is_some_and(Outage::may_probe);
        let can_go = |it: &Outgoing| match it.content {
            Content::Whole(_) => false,
            Content::Encoded { .. } => true,
            // A receiver that refuses all profiles gets no stored ones, which can wait.
            Content::Stored(_) => cause != Some(OutageCause::Refuses),
        };
        while let (None, Some(remote)) = (&self.outbox.sending, self.exporter.remote()) {
            let Some(outgoing) = self.outbox.take(can_go) else {
                if may_probe {
                    remote.send(Arc::default());
                    self.outbox.sending = Some(None);
                }
                return;
            };
            let message = match &outgoing.content {
                Content::Encoded { message, .. } => Some(Arc::clone(message)),
                Content::Stored(path) if outgoing.since.elapsed() <= self.age => {
                    // The file is small and local. If it is gone, the directory has made room.
                    std::fs::read(path).ok().map(Arc::from)
                }
                _ => None,
            };
            let Some(message) = message else {
                self.conclude(outgoing, DeliveryOutcome::TooOld);
                continue;
            };
            if outgoing.is_repeated {
                Counters::add(&self.shared.counters.profiles.requests_retried, 1);
            }
            remote.send(message);
            self.outbox.sending = Some(Some(outgoing));
        }
    }

    /// Handles an answer. An error means that the sending thread has ended.
    pub(super) fn note_answer(&mut self, answer: Result<Answer, RecvError>) {
        let Ok(answer) = answer else {
            return self.break_down("the thread that sends profiles has panicked".to_owned());
        };
        let Some(sent) = self.outbox.sending.take() else { return };
        let outcome = match answer {
            Answer::NotNow { after, problem } => {
                let waiting = self.outbox.queue.len() + usize::from(sent.is_some());
                let message =
                    format!("takes no profiles at present: {problem} ({waiting} waiting)");
                self.owes_all_clear |= self.warn(LogEvent {
                    count: u64::try_from(waiting).ok(),
                    ..LogEvent::failure(LogKind::ReceiverAway, message, problem.clone())
                });
                self.fail(after, problem, OutageCause::Fails);
                None
            }
            Answer::Refused { what: RefusedScope::All, problem } => {
                self.owes_all_clear |= self.warn(refuses(problem.clone()));
                self.fail(None, problem, OutageCause::Refuses);
                if sent.is_some() {
                    self.shared.health.note_refused();
                }
                // The receiver refuses all others too: they are not sent one by one. Stored ones it may accept later.
                let encoded = |it: &Outgoing| matches!(it.content, Content::Encoded { .. });
                for other in self.outbox.take_all(encoded) {
                    self.conclude(other, DeliveryOutcome::Refused);
                }
                sent.as_ref().is_some_and(encoded).then_some(DeliveryOutcome::Refused)
            }
            // Any other answer to an empty request means that the receiver is back.
            _ if sent.is_none() => {
                self.outage.iter_mut().for_each(|outage| outage.is_over = true);
                None
            }
            Answer::Accepted { message } => {
                self.outage = None;
                self.note_accepted(message);
                Some(DeliveryOutcome::Delivered)
            }
            Answer::Refused { what: RefusedScope::Request, problem } => {
                let is_logged = self.warn(refuses(problem.clone()));
                let is_of_process = sent.as_ref().is_some_and(|it| it.is_of_process);
                let may_refuse_all = match is_of_process {
                    true => self.failing().is_some_and(|it| it.cause == OutageCause::Refuses),
                    false => self.shared.health.note_refused(),
                };
                self.owes_all_clear |= is_logged && may_refuse_all;
                match may_refuse_all {
                    true => {
                        self.fail(None, problem, OutageCause::Refuses);
                        self.outage.iter_mut().for_each(Outage::begin_doubt);
                    }
                    false => self.outage = None,
                }
                // It must not be sent again. Only another profile can show whether all are refused.
                Some(DeliveryOutcome::Refused)
            }
        };
        match (sent, outcome) {
            (Some(sent), Some(outcome)) => self.conclude(sent, outcome),
            (Some(sent), None) => self.outbox.add(Outgoing { is_repeated: true, ..sent }),
            (None, _) => {}
        }
        self.take_stock();
    }

    fn conclude(&mut self, outgoing: Outgoing, outcome: DeliveryOutcome) {
        let mut is_stored = false;
        match outgoing.content {
            Content::Whole(held) => return self.lose(held.report),
            Content::Stored(_) => {
                Counters::add(&self.shared.counters.profiles.resent_from_fallback, 1);
            }
            Content::Encoded { .. } if outcome == DeliveryOutcome::Delivered => {}
            Content::Encoded { stem, message } => {
                let fallback = self.exporter.remote().and_then(|remote| remote.fallback());
                let left = [(Format::Otlp.extension(), &message)];
                is_stored = fallback.is_some_and(|it| it.write_files(&stem, &left).is_ok());
            }
        }
        // A refused profile counts as refused even if it was stored: it is not sent again.
        let is_stored = is_stored && outcome != DeliveryOutcome::Refused;
        let outcome = if is_stored { DeliveryOutcome::Stored } else { outcome };
        self.count(outcome, outgoing.is_of_process);
    }

    fn count(&self, outcome: DeliveryOutcome, is_of_process: bool) {
        let PublishState { counters, health, .. } = &self.shared;
        let counter = match outcome {
            DeliveryOutcome::Delivered => &counters.profiles.delivered,
            DeliveryOutcome::Stored => &counters.profiles.stored_as_fallback,
            // No span refers to it.
            _ if is_of_process => &counters.continuous.dropped_export_failed,
            DeliveryOutcome::Refused => &counters.profiles.dropped_refused,
            DeliveryOutcome::TooOld => &counters.profiles.dropped_too_old,
            DeliveryOutcome::AtShutdown => &counters.profiles.dropped_at_shutdown,
        };
        Counters::add(counter, 1);
        match outcome {
            DeliveryOutcome::Delivered => health.note_delivered(),
            DeliveryOutcome::Stored => {}
            _ if is_of_process => {}
            _ => health.note_lost(),
        }
    }

    /// An attempt has failed. `after` is the pause that the receiver asks for.
    fn fail(&mut self, after: Option<Duration>, problem: String, cause: OutageCause) {
        self.outage = Some(Outage::after(self.outage.take(), after, problem, cause));
    }

    fn break_down(&mut self, problem: String) {
        let message = format!("{problem}; profiles are not sent until the program restarts");
        let event = LogEvent::failure(LogKind::SendingEnded, message, problem.clone());
        self.shared.reporter.log(event);
        self.answers = channel::never();
        if let Some(Some(outgoing)) = self.outbox.sending.take() {
            self.outbox.add(outgoing);
        }
        // They stay in the directory.
        self.outbox.take_all(Outgoing::is_stored);
        self.fail(None, problem, OutageCause::Ended);
    }

    /// Waits until all promised profiles are delivered, and retries failures until then. An error if not all were, or some
    /// were lost since the last flush.
    pub(super) fn flush(&mut self, deadline: Instant) -> Result<(), FlushError> {
        if self.has_lost_exporter() {
            let problem = "the program has closed the files of the exporter";
            return Err(FlushError::ExporterFails(problem.to_owned()));
        }
        let (mut pause, mut hurries_at) = (FIRST_PAUSE_OF_FLUSH, Instant::now());
        // Asks a receiver that has failed before reporting that nothing is left.
        let mut has_asked = !self.is_remote || self.failing().is_none_or(Outage::is_known);
        loop {
            let now = Instant::now();
            let is_hurried = now >= hurries_at;
            if is_hurried {
                hurries_at = now + pause;
                pause = (2 * pause).min(LAST_PAUSE_OF_FLUSH);
            }
            self.advance(is_hurried);
            // Profiles in the fallback directory are waited for only while the receiver answers.
            let outage = self.failing();
            let is_done = outage.is_some_and(|outage| outage.cause == OutageCause::Ended)
                || self.outbox.all().all(|it| outage.is_some() && it.is_stored());
            if has_asked && is_done || now >= deadline {
                break;
            }
            let wake = self.next_attempt().map_or(hurries_at, |next| next.min(hurries_at));
            match self.answers.recv_deadline(wake.min(deadline)) {
                Err(RecvTimeoutError::Timeout) => {}
                answer => {
                    has_asked = true;
                    self.note_answer(answer.map_err(|_| RecvError));
                }
            }
        }
        self.none_lost()?;
        let profiles = self.outbox.all().count();
        match self.failing() {
            Some(outage) if profiles > 0 || self.is_remote && self.problem().is_some() => {
                Err(FlushError::ExporterFails(outage.problem.clone()))
            }
            None if profiles > 0 => Err(FlushError::Timeout(FlushStage::Delivery { profiles })),
            _ => Ok(()),
        }
    }

    /// An error if profiles were lost since the last call.
    fn none_lost(&mut self) -> Result<(), FlushError> {
        let lost = self.shared.counters.profiles_lost();
        match lost - std::mem::replace(&mut self.lost, lost) {
            0 => Ok(()),
            more => Err(FlushError::ProfilesLost(more)),
        }
    }

    /// A caller that gave up does not know that profiles were lost: the next one gets to know it.
    pub(super) fn note_unanswered(&mut self, answer: Result<(), FlushError>) {
        if let Err(FlushError::ProfilesLost(lost)) = answer {
            self.lost = self.lost.saturating_sub(lost);
        }
    }

    /// Ends delivery. An error if a profile was lost since the last flush.
    pub(super) fn end(mut self) -> Result<(), FlushError> {
        if let Some(Some(sent)) = self.outbox.sending.take() {
            self.outbox.add(sent);
        }
        for left in self.outbox.take_all(|it| !it.is_stored()) {
            self.conclude(left, DeliveryOutcome::AtShutdown);
        }
        let ended = self.none_lost();
        _ = catch_unwind(AssertUnwindSafe(|| drop(self)));
        ended
    }

    pub(super) fn lose(&mut self, report: Kept) {
        // Of a profile of the process, nothing is reported.
        if report.spans.is_empty() {
            return Counters::add(&self.shared.counters.continuous.dropped_export_failed, 1);
        }
        Counters::add(&self.shared.counters.profiles.dropped_export_failed, 1);
        self.shared.health.note_lost();
        self.shared.reporter.report(Kept { profile: None, ..report });
    }

    fn note_accepted(&mut self, message: String) {
        // Only after a warning, so no more often than warnings.
        if std::mem::take(&mut self.owes_all_clear)
            && let Some(remote) = self.exporter.remote()
        {
            let endpoint = remote.endpoint().to_owned();
            let message = format!("profiles are sent to {endpoint} again");
            let event = LogEvent::info(LogKind::ReceiverBack, message);
            self.shared.reporter.log(LogEvent { endpoint: Some(endpoint), ..event });
        }
        if !message.is_empty() {
            let said = format!("took a profile and replied: {message}");
            self.warn(LogEvent::failure(LogKind::ReceiverReplies, said, message));
        }
    }

    /// Logs what the receiver does, at most once a minute. Returns whether it was logged.
    fn warn(&mut self, event: LogEvent) -> bool {
        let is_due = self.warned.is_none_or(|warned| warned.elapsed() >= MINUTE);
        if is_due && let Some(remote) = self.exporter.remote() {
            let endpoint = remote.endpoint().to_owned();
            self.warned = Some(Instant::now());
            let message = format!("{endpoint} {} (logged once a minute)", event.message);
            self.shared.reporter.log(LogEvent { message, endpoint: Some(endpoint), ..event });
        }
        is_due
    }
}

fn refuses(problem: String) -> LogEvent {
    let message = format!("refuses profiles: {problem}");
    LogEvent::failure(LogKind::ReceiverRefuses, message, problem)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};

    use parking_lot::Mutex;

    use super::super::memory::MemoryBudget;
    use super::*;
    use crate::export::remote::{AnswerTo, Remote};
    use crate::export::{Directory, Exported};
    use crate::keep::KeptSpan;
    use crate::profile::{Hotspots, ProfileId};
    use crate::references::ReferenceLimits;
    use crate::span::SpanKey;
    use crate::stats::Stats;
    use crate::sys::Poller;

    const PLENTY: Duration = Duration::from_secs(60);
    const MS: Duration = Duration::from_millis(1);

    /// A network exporter's messages and answers, as a test sees them.
    #[derive(Clone, Default)]
    struct Line {
        sent: Arc<Mutex<Vec<Arc<[u8]>>>>,
        answers: Arc<Mutex<Option<AnswerTo>>>,
        /// The next profile makes the exporter panic.
        panics: Arc<AtomicBool>,
    }

    impl Line {
        fn answer(&self, answer: Answer) {
            self.answers.lock().as_ref().unwrap()(answer);
        }

        /// The lengths of the messages sent since the last call.
        fn sent(&self) -> Vec<usize> {
            self.sent.lock().drain(..).map(|message| message.len()).collect()
        }
    }

    struct Sends {
        line: Line,
        grace_period: Duration,
        fallback: Option<Directory>,
    }

    impl Exporter for Sends {
        fn export(&mut self, _: &Profile) -> Result<Exported, ExportError> {
            Err("not called for a remote".into())
        }

        fn remote(&mut self) -> Option<&mut dyn Remote> {
            Some(self)
        }
    }

    impl Remote for Sends {
        fn limits(&self) -> QueueLimits {
            QueueLimits { profiles: 9, bytes: 9, grace_period: self.grace_period }
        }

        fn endpoint(&self) -> &str {
            "nowhere"
        }

        fn start(&mut self, answer: AnswerTo, _: fn()) -> io::Result<()> {
            *self.line.answers.lock() = Some(answer);
            Ok(())
        }

        fn message(&mut self, _: &Profile) -> Vec<u8> {
            assert!(!self.line.panics.swap(false, Ordering::Relaxed), "as the test wants");
            vec![7]
        }

        fn send(&self, message: Arc<[u8]>) {
            self.line.sent.lock().push(message);
        }

        fn fallback(&self) -> Option<&Directory> {
            self.fallback.as_ref()
        }
    }

    fn shared() -> PublishState {
        let (counters, redaction) = (Arc::<Counters>::default(), Arc::<Redaction>::default());
        let reporter = Arc::new(Reporter::new(Arc::clone(&counters), Arc::default(), false));
        let health = Arc::new(ExporterHealth::new(true, false));
        let references =
            References::new(ReferenceLimits::NONE, Default::default(), Arc::clone(&counters));
        PublishState {
            counters,
            health,
            ending: Arc::new(ShutdownResult::new(Arc::downgrade(&reporter)).0),
            reporter,
            redaction,
            references: Arc::new(references),
        }
    }

    fn delivery_by(exporter: impl Exporter + 'static) -> Delivery {
        let files = Arc::clone(Poller::new().unwrap().files());
        let exporter: Box<dyn Exporter> = Box::new(exporter);
        let exporter = FilesGuard::new(exporter, &files);
        Delivery::new(shared(), exporter, files, None)
    }

    fn delivery_to(grace_period: Duration, fallback: Option<Directory>) -> (Delivery, Line) {
        let line = Line::default();
        let sends = Sends { line: line.clone(), grace_period, fallback };
        (delivery_by(sends), line)
    }

    fn stats(delivery: &Delivery) -> Stats {
        delivery.shared.counters.snapshot()
    }

    /// The profiles that the exporter has not accepted.
    fn held(delivery: &Delivery) -> usize {
        delivery.outbox.queue.iter().filter(|it| matches!(it.content, Content::Whole(_))).count()
    }

    /// Delivers a promised profile, and does what is due.
    fn deliver(delivery: &mut Delivery) {
        let key = SpanKey::new(1).unwrap();
        let profile = Profile::new(ProfileId::for_test(1), 1);
        let span = KeptSpan { profile: Ok(profile.id), ..KeptSpan::for_test(key, key, 1) };
        deliver_of(delivery, profile, vec![span]);
    }

    fn deliver_of_process(delivery: &mut Delivery) {
        let mut profile = Profile::new(ProfileId::for_test(1), 1);
        profile.scope = crate::profile::ProfileScope::Process;
        deliver_of(delivery, profile, Vec::new());
    }

    fn deliver_of(delivery: &mut Delivery, profile: Profile, spans: Vec<KeptSpan>) {
        let report = Kept {
            spans,
            profile: None,
            samples: 1,
            hotspots: Hotspots::default(),
            coverage: None,
            waits: crate::profile::Waits::default(),
            awaits: crate::profile::Awaits::default(),
            compared: None,
            files: Vec::new(),
        };
        let (_room, _permit) = (MemoryBudget::new(1 << 20).take(), None);
        let since = Instant::now();
        delivery.deliver(Box::new(HeldProfile { profile, report, since, _room, _permit }));
        delivery.advance(false);
    }

    fn accepted() -> Answer {
        Answer::Accepted { message: String::new() }
    }

    fn busy(after: Option<Duration>) -> Answer {
        Answer::NotNow { after, problem: "busy".to_owned() }
    }

    fn never(what: RefusedScope) -> Answer {
        Answer::Refused { what, problem: "no".to_owned() }
    }

    /// Passes on an answer, and does what is due.
    fn receive(delivery: &mut Delivery, answer: Answer) {
        delivery.note_answer(Ok(answer));
        delivery.advance(true);
    }

    #[test]
    fn expired_profiles_are_given_up_together_and_newer_ones_stay() {
        let (mut delivery, line) = delivery_to(Duration::MAX, None);
        delivery.age = PLENTY;
        for _ in 0..4 {
            deliver(&mut delivery);
        }
        let Outbox { queue, sending, .. } = &mut delivery.outbox;
        let Some(Some(sending)) = sending else { panic!("the first") };
        let Some(since) = Instant::now().checked_sub(2 * PLENTY) else { return };
        (sending.since, queue[0].since, queue[2].since) = (since, since, since);
        // All expired profiles are given up with the first, without a request and a pause for each.
        receive(&mut delivery, busy(Some(PLENTY)));
        assert_eq!(stats(&delivery).profiles.dropped_too_old, 3);
        assert_eq!(delivery.outbox.queue.len(), 1);
        assert_eq!(line.sent(), [1], "the next request is a minute away");
    }

    #[test]
    fn a_receiver_that_was_away_is_asked_again_without_a_profile() {
        for answer in [accepted(), never(RefusedScope::Request)] {
            let (mut delivery, line) = delivery_to(Duration::ZERO, None);
            delivery.age = Duration::ZERO;
            deliver(&mut delivery);
            delivery.note_answer(Ok(busy(None)));
            assert_eq!(stats(&delivery).profiles.dropped_too_old, 1);
            // Also without a flush.
            assert!(delivery.next_attempt().is_some());
            delivery.advance(true);
            assert_eq!(line.sent(), [1, 0]);
            let question = line.clone();
            let probed = std::thread::spawn(move || question.answer(busy(None)));
            assert!(delivery.flush(Instant::now() + PLENTY).is_err(), "the receiver is still away");
            probed.join().unwrap();
            line.answer(answer);
            delivery.flush(Instant::now() + PLENTY).unwrap();
            assert!(delivery.next_attempt().is_none());
        }
    }

    #[test]
    fn held_profiles_are_accepted_when_the_receiver_is_back() {
        let (mut delivery, line) = delivery_to(Duration::ZERO, None);
        deliver(&mut delivery);
        receive(&mut delivery, busy(None));
        for _ in 0..3 {
            deliver(&mut delivery);
        }
        assert_eq!((held(&delivery), stats(&delivery).profiles.exported), (3, 1));
        for _ in 0..4 {
            receive(&mut delivery, accepted());
        }
        assert_eq!(
            (stats(&delivery).profiles.exported, stats(&delivery).profiles.delivered),
            (4, 4)
        );
        assert_eq!(stats(&delivery).profiles.requests_retried, 1);
        assert_eq!(line.sent(), [1; 5]);
        delivery.flush(Instant::now()).unwrap();
    }

    /// A delivery with a fallback directory whose receiver is away.
    fn away(dir: &tempfile::TempDir) -> (Delivery, Line) {
        let (mut delivery, line) = delivery_to(Duration::ZERO, Some(Directory::new(dir.path())));
        deliver(&mut delivery);
        receive(&mut delivery, busy(None));
        assert_eq!(line.sent(), [1, 1]);
        (delivery, line)
    }

    #[test]
    fn a_flush_waits_for_stored_profiles_while_the_receiver_answers() {
        let dir = tempfile::tempdir().unwrap();
        let (mut delivery, line) = away(&dir);
        (0..2).for_each(|_| deliver(&mut delivery));
        assert_eq!(stats(&delivery).profiles.stored_as_fallback, 2);
        receive(&mut delivery, accepted());
        let sending = FlushError::Timeout(FlushStage::Delivery { profiles: 2 });
        assert_eq!(delivery.flush(Instant::now() + MS), Err(sending));
        receive(&mut delivery, accepted());
        assert!(delivery.flush(Instant::now() + MS).is_err());
        // The receiver goes away: a flush does not wait for stored profiles.
        let start = Instant::now();
        line.answer(busy(Some(PLENTY)));
        assert!(delivery.flush(start + PLENTY).is_err());
        assert!(start.elapsed() < PLENTY);
        let stats = stats(&delivery);
        assert_eq!((stats.profiles.delivered, stats.profiles.resent_from_fallback), (2, 1));
    }

    #[test]
    fn stored_profiles_wait_while_the_receiver_refuses_all() {
        let dir = tempfile::tempdir().unwrap();
        let (mut delivery, line) = away(&dir);
        deliver(&mut delivery);
        receive(&mut delivery, never(RefusedScope::All));
        deliver(&mut delivery);
        assert_eq!(line.sent(), [0], "only a probe");
        for answer in [accepted(), accepted(), accepted()] {
            receive(&mut delivery, answer);
        }
        let stats = stats(&delivery);
        assert_eq!((stats.profiles.delivered, stats.profiles.resent_from_fallback), (2, 2));
        assert_eq!(stats.profiles.dropped_refused, 1);
    }

    #[test]
    fn while_the_receiver_is_away_profiles_are_made_as_long_as_the_fallback_directory_works() {
        let dir = tempfile::tempdir().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().join("below");
        for (path, is_accepted) in
            [(None, false), (Some(dir.path().to_owned()), true), (Some(path.clone()), false)]
        {
            let (mut delivery, _line) = delivery_to(Duration::ZERO, path.map(Directory::new));
            deliver(&mut delivery);
            receive(&mut delivery, busy(None));
            deliver(&mut delivery);
            assert_eq!(delivery.shared.health.accepts.load(Ordering::Relaxed), is_accepted);
            assert_eq!(held(&delivery), usize::from(!is_accepted));
        }
        // It is tried again.
        let (mut delivery, _line) = delivery_to(Duration::ZERO, Some(Directory::new(&path)));
        deliver(&mut delivery);
        receive(&mut delivery, busy(None));
        deliver(&mut delivery);
        drop(file);
        delivery.advance(true);
        assert_eq!((held(&delivery), stats(&delivery).profiles.stored_as_fallback), (0, 1));
        assert!(delivery.shared.health.accepts.load(Ordering::Relaxed));
    }

    /// One that must prove that it works.
    fn unproven() -> (Delivery, Line) {
        let (mut delivery, line) = delivery_to(Duration::ZERO, None);
        delivery.shared.health = Arc::new(ExporterHealth::new(true, true));
        (delivery, line)
    }

    #[test]
    fn refused_profiles_of_the_process_say_nothing_of_those_of_spans() {
        let (mut delivery, line) = unproven();
        for _ in 0..5 {
            deliver_of_process(&mut delivery);
            receive(&mut delivery, never(RefusedScope::Request));
            assert!(delivery.shared.health.accepts.load(Ordering::Relaxed));
        }
        assert_eq!(stats(&delivery).continuous.dropped_export_failed, 5);
        // While all may be refused, they are the test.
        deliver(&mut delivery);
        deliver_of_process(&mut delivery);
        receive(&mut delivery, never(RefusedScope::Request));
        assert!(!delivery.shared.health.accepts.load(Ordering::Relaxed));
        pass_pause(&mut delivery);
        assert_eq!(line.sent(), [1; 7]);
        receive(&mut delivery, accepted());
        assert!(delivery.shared.health.accepts.load(Ordering::Relaxed));
    }

    #[test]
    fn what_waits_is_sent_one_by_one_while_all_may_be_refused() {
        let (mut delivery, line) = unproven();
        (0..3).for_each(|_| deliver(&mut delivery));
        for is_hurried in [false, true] {
            delivery.note_answer(Ok(never(RefusedScope::Request)));
            delivery.advance(false);
            assert_eq!(line.sent(), [1]);
            assert!(!delivery.shared.health.accepts.load(Ordering::Relaxed));
            match is_hurried {
                true => delivery.advance(true),
                false => pass_pause(&mut delivery),
            }
        }
        receive(&mut delivery, accepted());
        assert!(delivery.shared.health.accepts.load(Ordering::Relaxed) && held(&delivery) == 0);
        assert_eq!(line.sent(), [1]);
    }

    fn pass_pause(delivery: &mut Delivery) {
        delivery.outage.iter_mut().for_each(|outage| outage.until = Instant::now());
        delivery.advance(false);
    }

    /// OTLP forbids to send again what was refused.
    #[test]
    fn while_all_may_be_refused_a_receiver_is_probed_and_the_next_profile_is_the_test() {
        let (mut delivery, line) = unproven();
        for lost in 1..=2 {
            deliver(&mut delivery);
            receive(&mut delivery, never(RefusedScope::Request));
            assert_eq!(stats(&delivery).profiles.dropped_refused, lost);
            assert!(!delivery.shared.health.accepts.load(Ordering::Relaxed));
            assert!(delivery.flush(Instant::now()).is_err(), "not even probed");
            pass_pause(&mut delivery);
            receive(&mut delivery, never(RefusedScope::Request));
            assert!(delivery.shared.health.accepts.load(Ordering::Relaxed));
        }
        deliver(&mut delivery);
        receive(&mut delivery, accepted());
        assert!(delivery.shared.health.accepts.load(Ordering::Relaxed) && held(&delivery) == 0);
        assert_eq!(line.sent(), [1, 0, 1, 0, 1]);
        assert_eq!(stats(&delivery).profiles.delivered, 1);
    }

    #[test]
    fn delivery_survives_the_end_of_the_sending_thread() {
        let (mut delivery, line) = delivery_to(Duration::MAX, None);
        deliver(&mut delivery);
        *line.answers.lock() = None;
        let start = Instant::now();
        let problem = "the thread that sends profiles has panicked".to_owned();
        assert_eq!(
            delivery.flush(start + PLENTY),
            Err(FlushError::ExporterFails(problem)),
            "at once"
        );
        assert!(start.elapsed() < PLENTY);
        assert!(delivery.problem().unwrap().contains("panicked"));
        deliver(&mut delivery);
        // It is retried, which is also when it expires.
        assert_eq!(held(&delivery), 1);
        assert!(delivery.next_attempt().unwrap() > Instant::now());
        let counters = Arc::clone(&delivery.shared.counters);
        assert_eq!(delivery.end(), Err(FlushError::ProfilesLost(2)));
        let stats = counters.snapshot();
        assert_eq!(
            (stats.profiles.dropped_at_shutdown, stats.profiles.dropped_export_failed),
            (1, 1)
        );
    }

    /// Exports all profiles but the first, and cannot be checked at first.
    struct FailsFirst {
        exports: usize,
        checks: usize,
    }

    impl Exporter for FailsFirst {
        fn export(&mut self, _: &Profile) -> Result<Exported, ExportError> {
            self.exports += 1;
            if self.exports == 1 { Err("the first".into()) } else { Ok(Exported::default()) }
        }

        fn check(&mut self) -> Result<(), ExportError> {
            self.checks += 1;
            if self.checks == 1 { Err("not now".into()) } else { Ok(()) }
        }
    }

    #[test]
    fn a_check_that_fails_is_repeated_after_a_pause() {
        let fails = FailsFirst { exports: 0, checks: 0 };
        let mut delivery = delivery_by(fails);
        deliver(&mut delivery);
        deliver(&mut delivery);
        delivery.advance(true);
        assert_eq!((held(&delivery), stats(&delivery).profiles.exported), (2, 0));
        assert!(!delivery.shared.health.accepts.load(Ordering::Relaxed));
        assert!(delivery.next_attempt().unwrap() > Instant::now());
        delivery.advance(true);
        assert_eq!((held(&delivery), stats(&delivery).profiles.exported), (0, 2));
        assert!(
            delivery.shared.health.accepts.load(Ordering::Relaxed)
                && delivery.next_attempt().is_none()
        );
    }

    #[test]
    fn a_remote_that_panicked_once_gets_profiles_again() {
        let (mut delivery, line) = delivery_to(Duration::MAX, None);
        line.panics.store(true, Ordering::Relaxed);
        deliver(&mut delivery);
        assert_eq!(stats(&delivery).profiles.dropped_export_failed, 1);
        delivery.advance(true);
        assert!(delivery.shared.health.accepts.load(Ordering::Relaxed));
        deliver(&mut delivery);
        assert_eq!(line.sent(), [1]);
    }

    /// Cannot be checked at first.
    struct StartsLate {
        checks: usize,
    }

    impl Exporter for StartsLate {
        fn export(&mut self, _: &Profile) -> Result<Exported, ExportError> {
            Ok(Exported::default())
        }

        fn check(&mut self) -> Result<(), ExportError> {
            self.checks += 1;
            if self.checks == 1 { Err("not yet".into()) } else { Ok(()) }
        }
    }

    /// No reservation is given, so that no profile comes that would cause a retry.
    #[test]
    fn an_exporter_that_has_no_profile_to_retry_is_checked_again() {
        let mut delivery = delivery_by(StartsLate { checks: 0 });
        delivery.shared.health.accepts.store(false, Ordering::Relaxed);
        delivery.fail(None, "not yet".to_owned(), OutageCause::Fails);
        for _ in 0..2 {
            assert!(
                !delivery.shared.health.accepts.load(Ordering::Relaxed)
                    && delivery.next_attempt().is_some()
            );
            delivery.advance(true);
        }
        assert!(
            delivery.shared.health.accepts.load(Ordering::Relaxed)
                && delivery.next_attempt().is_none()
        );
    }

    #[test]
    fn a_flush_does_not_wait_for_a_sending_thread_that_ended_during_an_outage() {
        let (mut delivery, line) = delivery_to(Duration::MAX, None);
        deliver(&mut delivery);
        receive(&mut delivery, busy(Some(PLENTY)));
        *line.answers.lock() = None;
        delivery.note_answer(Err(RecvError));
        let start = Instant::now();
        assert!(delivery.flush(start + PLENTY).is_err());
        assert!(start.elapsed() < PLENTY);
    }
}

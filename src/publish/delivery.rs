//! Delivery: one queue and one retry policy for all exporters.
//!
//! A profile is *held* until the exporter has accepted it. Most exporters export in that call. A [`Remote`] has
//! accepted a profile once it is encoded and queued in the outbox, which sends one request at a time. Answers arrive
//! on a channel, so that other profiles and a flush do not wait for a server.
//!
//! [`Remote`]: crate::export::Remote

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvError, RecvTimeoutError};

use super::ending::Ending;
use super::memory::TakenRoom;
use super::outbox::{Content, DeliveryOutcome, LAST_PAUSE, Outage, Outbox, Outgoing, Request};
use super::reporter::Reporter;
use crate::error::{FlushError, FlushStage};
use crate::export::{Answer, AnyExporter, ExportError, Exported, Unexportable};
use crate::keep::{ExporterHealth, Kept, Reservation};
use crate::log::{LogEvent, LogKind};
use crate::profile::Profile;
use crate::redact::Redaction;
use crate::references::References;
use crate::stats::Counters;
use crate::sys::{Files, FilesGuard};

/// The pause before a retry while a caller waits in a flush, at first and at most.
const FIRST_PAUSE_OF_FLUSH: Duration = Duration::from_millis(20);
const LAST_PAUSE_OF_FLUSH: Duration = Duration::from_secs(1);
/// A profile that could not be delivered for this long is given up, as receivers reject older ones.
const MOST_AGE: Duration = Duration::from_secs(60 * 60);
/// How many profiles in the fallback directory are queued to be sent.
const MOST_STORED: usize = 4096;

/// Delivers profiles. Runs on the exporting thread.
pub(super) struct Delivery {
    pub(super) shared: PublishState,
    pub(super) exporter: FilesGuard<AnyExporter>,
    pub(super) files: Arc<Files>,
    /// Profiles that the exporter has not accepted; no more than there are reservations.
    pub(super) held: VecDeque<HeldProfile>,
    /// The outbox of an exporter that sends over a network.
    pub(super) outbox: Option<Outbox>,
    /// Set while the last attempt has failed.
    pub(super) trouble: Option<Outage>,
    /// When to retry after that if no answer of a remote is expected, which would be the time otherwise.
    pub(super) retry_at: Instant,
    /// The number of lost profiles at the last flush.
    pub(super) lost: u64,
    pub(super) age: Duration,
    pub(super) has_logged_loss: bool,
    /// It was logged that it accepts no profile, and it has accepted none since.
    pub(super) has_logged_failure: bool,
    /// The same of profiles of the process.
    pub(super) has_logged_process: bool,
    /// When a problem of the receiver was last logged, and whether it was that no profiles are sent.
    pub(super) warned: Option<Instant>,
    pub(super) owes_all_clear: bool,
}

/// What the threads that publish share.
#[derive(Clone, Debug)]
pub(crate) struct PublishState {
    pub(crate) counters: Arc<Counters>,
    /// Written by the exporting thread alone, except that admission takes what it may give.
    pub(crate) health: Arc<ExporterHealth>,
    pub(crate) reporter: Arc<Reporter>,
    pub(crate) redaction: Arc<Redaction>,
    pub(crate) references: Arc<References>,
    pub(crate) ending: Arc<Ending>,
}

/// A profile that the exporter has not accepted.
#[derive(Debug)]
pub(super) struct HeldProfile {
    pub(super) profile: Profile,
    pub(super) report: Kept,
    pub(super) since: Instant,
    pub(super) _room: TakenRoom,
    pub(super) _permit: Option<Reservation>,
}

impl HeldProfile {
    /// Whether a span refers to this profile. If not, it is only a trial.
    fn is_reserved(&self) -> bool {
        self.report.spans.iter().any(|span| span.profile.is_ok())
    }
}

/// Whether the profile is one of the process, of which nothing is reported: no span was kept.
fn is_of_process(report: &Kept) -> bool {
    report.spans.is_empty()
}

impl Delivery {
    pub(super) fn new(
        shared: PublishState,
        exporter: FilesGuard<AnyExporter>,
        files: Arc<Files>,
        problem: Option<String>,
    ) -> Self {
        let mut delivery = Self {
            shared,
            exporter,
            files,
            held: VecDeque::new(),
            outbox: None,
            trouble: None,
            retry_at: Instant::now(),
            lost: 0,
            age: MOST_AGE,
            has_logged_loss: false,
            has_logged_failure: problem.is_some(),
            has_logged_process: false,
            warned: None,
            owes_all_clear: false,
        };
        if let Some(problem) = problem {
            delivery.fail(None, problem, false);
        }
        delivery
    }

    pub(super) fn reporter(&self) -> &Arc<Reporter> {
        &self.shared.reporter
    }

    pub(super) fn start(&mut self) {
        let Some(remote) = self.exporter.remote() else { return };
        let (sender, answers) = channel::unbounded();
        let started = remote.start(sender);
        let limits = remote.limits();
        let (waiting, stored) = (VecDeque::new(), VecDeque::new());
        let outbox = Outbox { limits, answers, waiting, stored, sending: None, broken: None };
        self.outbox = Some(outbox);
        if let Err(error) = started {
            self.break_down(format!("no thread to send profiles: {error}"));
        }
    }

    /// The receiver's answers. Never yields if there is no receiver.
    pub(super) fn answers(&self) -> Receiver<Answer> {
        self.outbox.as_ref().map_or_else(channel::never, |outbox| outbox.answers.clone())
    }

    /// Whether the program has closed files that the exporter keeps using.
    pub(super) fn has_lost_exporter(&self) -> bool {
        !self.files.still_owned() && self.exporter.keeps_files()
    }

    /// When to try again, if there is anything to try.
    pub(super) fn next_attempt(&self) -> Option<Instant> {
        if self.has_lost_exporter() {
            return None;
        }
        let trouble = self.trouble.as_ref().filter(|trouble| !trouble.is_over);
        let waits = match &self.outbox {
            None => !self.held.is_empty() || !self.shared.health.accepts(),
            Some(outbox) => {
                let is_idle = outbox.sending.is_none() && outbox.broken.is_none();
                let has_any = !outbox.waiting.is_empty() || !outbox.stored.is_empty();
                is_idle && (has_any || trouble.is_some())
            }
        };
        let next = waits.then(|| trouble.map_or_else(Instant::now, |trouble| trouble.until));
        next.or(self.retries_without_answer().then_some(self.retry_at))
    }

    /// Whether a remote accepts no profile for a reason of its own, and no answer will cause a retry.
    fn retries_without_answer(&self) -> bool {
        let is_quiet = |outbox: &Outbox| outbox.sending.is_none();
        !self.shared.health.accepts() && self.outbox.as_ref().is_some_and(is_quiet)
    }

    /// Gives a profile to the exporter, and holds it if the exporter does not accept it now.
    pub(super) fn deliver(&mut self, held: HeldProfile) {
        // Process pending answers first.
        while let Ok(answer) = self.answers().try_recv() {
            self.note_answer(Ok(answer));
        }
        let held = self.hand_over(held);
        self.held.extend(held);
    }

    /// Gives a profile to the exporter. Returns it if it must be tried again.
    fn hand_over(&mut self, held: HeldProfile) -> Option<HeldProfile> {
        let health = &Arc::clone(&self.shared.health);
        // An exporter is foreign code and may panic.
        match catch_unwind(AssertUnwindSafe(|| self.export(&held.profile, held.since))) {
            // It says nothing of those of kept spans: they are elsewhere.
            Ok(Ok(_)) if is_of_process(&held.report) => {
                self.has_logged_process = false;
                None
            }
            Ok(Err(error)) if is_of_process(&held.report) => {
                self.lose_process(held.report, &error.to_string());
                None
            }
            Err(_) if is_of_process(&held.report) => {
                self.lose_process(held.report, "the exporter panicked");
                None
            }
            Ok(Ok(Exported { files, .. })) => {
                self.has_logged_failure = false;
                if self.outbox.is_none() {
                    self.trouble = None;
                }
                Counters::add(&self.shared.counters.profiles.exported, 1);
                health.set_accepts(true);
                // A remote has only queued it, unless it was written to files.
                if !files.is_empty() {
                    health.note_delivered();
                }
                let profile = held.is_reserved().then_some(held.profile.id);
                self.shared.reporter.report(Kept { profile, files, ..held.report });
                None
            }
            Ok(Err(error)) if error.is::<Unexportable>() => {
                if !std::mem::replace(&mut self.has_logged_loss, true) {
                    let message = format!("a profile is lost: {error} (logged once)");
                    let lost = LogEvent::failure(LogKind::ProfileLost, message, error.to_string());
                    self.shared.reporter.log(lost);
                }
                self.lose(held.report);
                None
            }
            Ok(Err(error)) => {
                self.note_refuses_all(&error.to_string());
                if held.is_reserved() {
                    return Some(held);
                }
                // The trial has served its purpose.
                self.shared.reporter.report(held.report);
                None
            }
            Err(_) => {
                self.note_refuses_all("the exporter panicked");
                self.lose(held.report);
                None
            }
        }
    }

    /// A profile of the process is lost. The next one comes soon.
    fn lose_process(&mut self, report: Kept, problem: &str) {
        if !std::mem::replace(&mut self.has_logged_process, true) {
            let message = format!(
                "a continuous profile could not be exported: {problem} (logged once until it works again)"
            );
            let fails = LogEvent::failure(LogKind::ExportFails, message, problem.to_owned());
            self.shared.reporter.log(fails);
        }
        self.lose(report);
    }

    fn export(&mut self, profile: &Profile, since: Instant) -> Result<Exported, ExportError> {
        let problem = match &self.outbox {
            None => return self.exporter.export(profile),
            Some(outbox) => outbox.problem(self.trouble.as_ref()),
        };
        let (Some(remote), Some(outbox)) = (self.exporter.remote(), &mut self.outbox) else {
            return Ok(Exported::default());
        };
        let (is_repeated, is_of_process) = (false, profile.is_of_process());
        let Some(problem) = problem else {
            let encoded = remote.encoded(profile);
            let content = Content::Encoded { stem: encoded.stem, message: encoded.message.into() };
            outbox.waiting.push_back(Outgoing { content, since, is_repeated, is_of_process });
            return Ok(Exported::default());
        };
        if remote.fallback().is_none() {
            return Err(problem.into());
        }
        let message = remote.encoded(profile).message;
        let Some(fallback) = remote.fallback() else { return Err(problem.into()) };
        let files = fallback.store(profile, Some(message))?;
        let encoded = files.iter().find(|path| path.extension().is_some_and(|e| e == "otlp"));
        if let Some(path) = encoded.filter(|_| outbox.broken.is_none()) {
            if outbox.stored.len() >= MOST_STORED {
                // The file stays in the directory.
                outbox.stored.pop_front();
            }
            let content = Content::Stored(path.clone());
            outbox.stored.push_back(Outgoing { content, since, is_repeated, is_of_process });
        }
        self.count(DeliveryOutcome::Stored, is_of_process);
        Ok(Exported::to_files(files))
    }

    /// Whether a profile would be accepted now, as far as that can be determined without one.
    fn check(&mut self) -> Result<(), ExportError> {
        let Some(outbox) = &self.outbox else { return self.exporter.check() };
        let Some(problem) = outbox.problem(self.trouble.as_ref()) else { return Ok(()) };
        match self.exporter.remote().and_then(|remote| remote.fallback()) {
            // Profiles go there in the meantime, if they can.
            Some(fallback) => fallback.check_writable(),
            None => Err(problem.into()),
        }
    }

    fn note_refuses_all(&mut self, problem: &str) {
        self.shared.health.note_failure();
        self.retry_at = Instant::now() + LAST_PAUSE;
        if self.outbox.is_none() {
            self.fail(None, problem.to_owned(), false);
        }
        if !std::mem::replace(&mut self.has_logged_failure, true) {
            let message = format!(
                "a profile could not be exported: {problem} (logged once until it works again; until then \
                 spans are kept without profiles, and the program is not affected)"
            );
            let fails = LogEvent::failure(LogKind::ExportFails, message, problem.to_owned());
            self.shared.reporter.log(fails);
        }
    }

    /// Does what is due. A hurried call does not wait for the end of the pause after a failure, unless the receiver
    /// has asked for that pause.
    pub(super) fn advance(&mut self, is_hurried: bool) {
        if self.has_lost_exporter() {
            return;
        }
        let now = Instant::now();
        if let Some(trouble) = &mut self.trouble
            && !trouble.is_over
        {
            let is_due = trouble.until <= now;
            if !is_due && (trouble.is_requested || !is_hurried) {
                return;
            }
            if is_due && self.outbox.is_none() {
                trouble.postpone(now);
            }
        }
        if self.outbox.is_some() {
            self.send_next();
            if self.retries_without_answer() && (is_hurried || self.retry_at <= now) {
                self.retry_at = now + LAST_PAUSE;
                self.retry_held();
            }
        } else if !self.shared.health.accepts() || !self.held.is_empty() {
            self.retry_held();
        }
    }

    /// Tries the held profiles again if the exporter may work again.
    pub(super) fn retry_held(&mut self) {
        let age = self.age;
        let is_old = |held: &HeldProfile| held.since.elapsed() > age;
        while let Some(oldest) = self.held.iter().position(is_old) {
            self.held.remove(oldest).into_iter().for_each(|held| self.lose(held.report));
        }
        let checked = catch_unwind(AssertUnwindSafe(|| self.check()));
        if !matches!(checked, Ok(Ok(()))) {
            if self.outbox.is_none() && self.trouble.is_none() {
                // Another profile was exported since the last failure.
                self.fail(None, "it cannot be checked".to_owned(), false);
            }
            return self.shared.health.set_accepts(false);
        }
        if self.held.is_empty() {
            // Only a profile can show whether the exporter works. The next kept span gets one, if only as a trial,
            // and the exporter is trusted again once that is exported.
            return self.shared.health.set_accepts(true);
        }
        for _ in 0..self.held.len() {
            let Some(held) = self.held.pop_front() else { return };
            if let Some(held) = self.hand_over(held) {
                // To the back: if this profile is at fault, others get their turn.
                return self.held.push_back(held);
            }
        }
    }

    /// Waits until all promised profiles are delivered, and retries failures until then.
    ///
    /// # Errors
    ///
    /// If not all were delivered, or some were lost since the last flush.
    pub(super) fn flush(&mut self, deadline: Instant) -> Result<(), FlushError> {
        if self.has_lost_exporter() {
            let problem = "the program has closed the files of the exporter";
            return Err(FlushError::ExporterFails(problem.to_owned()));
        }
        let (mut pause, mut hurries_at) = (FIRST_PAUSE_OF_FLUSH, Instant::now());
        // Asks a receiver that has failed before reporting that nothing is left.
        let is_known = |trouble: &Outage| trouble.is_requested || trouble.is_over;
        let mut has_asked = self.trouble.as_ref().is_none_or(is_known) || self.outbox.is_none();
        loop {
            let now = Instant::now();
            let is_hurried = now >= hurries_at;
            if is_hurried {
                hurries_at = now + pause;
                pause = (2 * pause).min(LAST_PAUSE_OF_FLUSH);
            }
            self.advance(is_hurried);
            if has_asked && self.is_done() || now >= deadline {
                break;
            }
            let wake = self.next_attempt().map_or(hurries_at, |next| next.min(hurries_at));
            match self.answers().recv_deadline(wake.min(deadline)) {
                Err(RecvTimeoutError::Timeout) => {}
                answer => {
                    has_asked = true;
                    self.note_answer(answer.map_err(|_| RecvError));
                }
            }
        }
        self.none_lost()?;
        let profiles = self.held.len() + self.outbox.as_ref().map_or(0, Outbox::count);
        let is_away = |outbox: &Outbox| {
            self.trouble.as_ref().is_some_and(|trouble| trouble.is_away(outbox.limits.grace_period))
        };
        let is_away = self.outbox.as_ref().is_some_and(is_away);
        if profiles == 0 && !is_away && !self.shared.health.is_doubted() {
            return Ok(());
        }
        let broken = self.outbox.as_ref().and_then(|outbox| outbox.broken.clone());
        let trouble = self.trouble.as_ref().filter(|trouble| !trouble.is_over);
        let problem = broken.or_else(|| trouble.map(|trouble| trouble.problem.clone()));
        Err(match problem {
            Some(problem) => FlushError::ExporterFails(problem),
            None if profiles > 0 => FlushError::Timeout(FlushStage::Delivery { profiles }),
            None => FlushError::ExporterFails("the last profiles were not delivered".to_owned()),
        })
    }

    /// Whether there is nothing to wait for. Profiles in the fallback directory count only while the receiver
    /// answers.
    fn is_done(&self) -> bool {
        let Some(outbox) = &self.outbox else { return self.held.is_empty() };
        let is_well = self.trouble.as_ref().is_none_or(|trouble| trouble.is_over);
        let is_sent = outbox.is_empty() && !(is_well && outbox.has_stored());
        outbox.broken.is_some() || self.held.is_empty() && is_sent
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
        while let Some(held) = self.held.pop_front() {
            self.lose(held.report);
        }
        if let Some(mut outbox) = self.outbox.take() {
            let sending = match outbox.sending.take() {
                Some(Request::Profile(outgoing)) => Some(outgoing),
                _ => None,
            };
            let sending = sending.filter(|outgoing| outgoing.message().is_some());
            let left: Vec<_> = sending.into_iter().chain(outbox.waiting).collect();
            self.abandon(&left, DeliveryOutcome::AtShutdown);
        }
        let ended = self.none_lost();
        _ = catch_unwind(AssertUnwindSafe(|| drop(self)));
        ended
    }

    /// Counts a promised profile as lost.
    pub(super) fn lose(&mut self, report: Kept) {
        if is_of_process(&report) {
            return Counters::add(&self.shared.counters.continuous.dropped_export_failed, 1);
        }
        Counters::add(&self.shared.counters.profiles.dropped_export_failed, 1);
        self.shared.health.note_refused();
        self.shared.reporter.report(Kept { profile: None, ..report });
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};

    use crossbeam::channel::Sender;
    use parking_lot::Mutex;

    use super::super::memory::MemoryBudget;
    use super::*;
    use crate::compare::ReferenceLimits;
    use crate::export::{Directory, Encoded, Exporter, QueueLimits, RefusedScope, Remote};
    use crate::keep::KeptSpan;
    use crate::profile::{Hotspots, ProfileId};
    use crate::span::SpanKey;
    use crate::stats::Stats;
    use crate::sys::Poller;

    const PLENTY: Duration = Duration::from_secs(60);
    const MS: Duration = Duration::from_millis(1);

    /// A network exporter's messages and answers, as a test sees them.
    #[derive(Clone, Default)]
    struct Line {
        sent: Arc<Mutex<Vec<Arc<[u8]>>>>,
        answers: Arc<Mutex<Option<Sender<Answer>>>>,
        /// The next profile makes the exporter panic.
        panics: Arc<AtomicBool>,
    }

    impl Line {
        fn answer(&self, answer: Answer) {
            self.answers.lock().as_ref().unwrap().send(answer).unwrap();
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
    }

    impl Remote for Sends {
        fn limits(&self) -> QueueLimits {
            QueueLimits { profiles: 9, bytes: 9, grace_period: self.grace_period }
        }

        fn endpoint(&self) -> &str {
            "nowhere"
        }

        fn start(&mut self, answers: Sender<Answer>) -> io::Result<()> {
            *self.line.answers.lock() = Some(answers);
            Ok(())
        }

        fn encoded(&mut self, profile: &Profile) -> Encoded {
            assert!(!self.line.panics.swap(false, Ordering::Relaxed), "as the test wants");
            Encoded { stem: profile.id.to_string(), message: vec![7] }
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
        let references = References::new(ReferenceLimits::NONE, Arc::clone(&counters), 0);
        PublishState {
            counters,
            health,
            ending: Arc::new(Ending::new(Arc::downgrade(&reporter))),
            reporter,
            redaction,
            references: Arc::new(references),
        }
    }

    fn delivery_by(exporter: AnyExporter) -> Delivery {
        let files = Arc::clone(Poller::new().unwrap().files());
        let exporter = FilesGuard::new(exporter, &files);
        let mut delivery = Delivery::new(shared(), exporter, files, None);
        delivery.start();
        delivery
    }

    fn delivery_to(grace_period: Duration, fallback: Option<Directory>) -> (Delivery, Line) {
        let line = Line::default();
        let sends = Sends { line: line.clone(), grace_period, fallback };
        (delivery_by(AnyExporter::Remote(Box::new(sends))), line)
    }

    fn stats(delivery: &Delivery) -> Stats {
        delivery.shared.counters.snapshot()
    }

    /// Delivers a promised profile, and does what is due.
    fn deliver(delivery: &mut Delivery) {
        let key = SpanKey::new(1).unwrap();
        let profile = Profile::new(ProfileId::for_test(1), 1);
        let span = KeptSpan { profile: Ok(profile.id), ..KeptSpan::for_test(key, key, 1) };
        let report = Kept {
            spans: vec![span],
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
        delivery.deliver(HeldProfile { profile, report, since: Instant::now(), _room, _permit });
        delivery.advance(false);
    }

    fn accepted() -> Answer {
        Answer::Accepted { rejected: 0, message: String::new() }
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
        let outbox = delivery.outbox.as_mut().unwrap();
        let Some(Request::Profile(sending)) = &mut outbox.sending else { panic!("the first") };
        let Some(since) = Instant::now().checked_sub(2 * PLENTY) else { return };
        (sending.since, outbox.waiting[0].since, outbox.waiting[2].since) = (since, since, since);
        // All expired profiles are given up with the first, without a request and a pause for each.
        receive(&mut delivery, busy(Some(PLENTY)));
        assert_eq!(stats(&delivery).profiles.dropped_too_old, 3);
        assert_eq!(delivery.outbox.as_ref().unwrap().waiting.len(), 1);
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
        assert_eq!((delivery.held.len(), stats(&delivery).profiles.exported), (3, 1));
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
    fn while_the_receiver_is_away_the_check_covers_the_fallback_directory() {
        let dir = tempfile::tempdir().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        for (path, expected) in [
            (None, Some("busy")),
            (Some(dir.path().to_owned()), None),
            (Some(file.path().join("below")), Some("cannot write to")),
        ] {
            let (mut delivery, _line) = delivery_to(Duration::ZERO, path.map(Directory::new));
            assert!(delivery.check().is_ok(), "the directory is not used yet");
            deliver(&mut delivery);
            receive(&mut delivery, busy(None));
            let problem = delivery.check().err().map(|error| error.to_string());
            match expected {
                Some(expected) => assert!(problem.unwrap().contains(expected)),
                None => assert_eq!(problem, None),
            }
        }
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
        assert!(delivery.check().unwrap_err().to_string().contains("panicked"));
        deliver(&mut delivery);
        // It is retried, which is also when it expires.
        assert_eq!(delivery.held.len(), 1);
        assert!(delivery.next_attempt().unwrap() > Instant::now());
        let counters = Arc::clone(&delivery.shared.counters);
        assert_eq!(delivery.end(), Err(FlushError::ProfilesLost(2)));
        let stats = counters.snapshot();
        assert_eq!(
            (stats.profiles.dropped_at_shutdown, stats.profiles.dropped_export_failed),
            (1, 1)
        );
    }

    /// Exports all profiles but the first, and cannot be checked.
    struct FailsFirst {
        exports: usize,
    }

    impl Exporter for FailsFirst {
        fn export(&mut self, _: &Profile) -> Result<Exported, ExportError> {
            self.exports += 1;
            if self.exports == 1 { Err("the first".into()) } else { Ok(Exported::default()) }
        }

        fn check(&mut self) -> Result<(), ExportError> {
            Err("not now".into())
        }
    }

    #[test]
    fn a_check_that_fails_after_a_success_is_repeated_after_a_pause() {
        let mut delivery = delivery_by(AnyExporter::Direct(Box::new(FailsFirst { exports: 0 })));
        deliver(&mut delivery);
        deliver(&mut delivery);
        assert_eq!((delivery.held.len(), stats(&delivery).profiles.exported), (1, 1));
        delivery.advance(true);
        assert!(delivery.next_attempt().unwrap() > Instant::now());
    }

    #[test]
    fn a_remote_that_panicked_once_gets_profiles_again() {
        let (mut delivery, line) = delivery_to(Duration::MAX, None);
        line.panics.store(true, Ordering::Relaxed);
        deliver(&mut delivery);
        assert_eq!(stats(&delivery).profiles.dropped_export_failed, 1);
        let health = Arc::clone(&delivery.shared.health);
        assert!(!health.accepts() && delivery.next_attempt().is_some());
        delivery.advance(true);
        assert!(health.accepts());
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
        let mut delivery = delivery_by(AnyExporter::Direct(Box::new(StartsLate { checks: 0 })));
        delivery.shared.health.set_accepts(false);
        delivery.fail(None, "not yet".to_owned(), false);
        for _ in 0..2 {
            assert!(!delivery.shared.health.accepts() && delivery.next_attempt().is_some());
            delivery.advance(true);
        }
        assert!(delivery.shared.health.accepts() && delivery.next_attempt().is_none());
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

//! The outbox: sends the profiles that a remote has accepted, and counts the outcome of each.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvError};

use super::delivery::{Delivery, PublishState};
use crate::export::{Answer, QueueLimits, RefusedScope};
use crate::log::{LogEvent, LogKind};
use crate::stats::Counters;

/// The pause before a retry, at first and at most. A random part, up to the pause itself, is added so that processes
/// do not retry in step.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
pub(super) const LAST_PAUSE: Duration = Duration::from_secs(30);
/// The longest pause that a receiver can ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(60 * 60);
const MINUTE: Duration = Duration::from_secs(60);

/// Accepted profiles that wait to be sent.
pub(super) struct Outbox {
    pub(super) limits: QueueLimits,
    pub(super) answers: Receiver<Answer>,
    pub(super) waiting: VecDeque<Outgoing>,
    /// Profiles in the fallback directory. They are sent when no others wait.
    pub(super) stored: VecDeque<Outgoing>,
    pub(super) sending: Option<Request>,
    /// Why nothing can be sent any more.
    pub(super) broken: Option<String>,
}

pub(super) struct Outgoing {
    pub(super) content: Content,
    pub(super) since: Instant,
    pub(super) is_repeated: bool,
    /// It is a continuous profile, to which no span refers.
    pub(super) is_of_process: bool,
}

pub(super) enum Content {
    Encoded { stem: String, message: Arc<[u8]> },
    Stored(PathBuf),
}

pub(super) enum Request {
    Profile(Outgoing),
    /// An empty request to a receiver that has failed, so that no profile is at risk.
    Probe,
}

/// The state since an attempt failed.
pub(super) struct Outage {
    pub(super) since: Instant,
    /// When to try again.
    pub(super) until: Instant,
    /// The receiver has asked for that time.
    pub(super) is_requested: bool,
    pub(super) pause: Duration,
    pub(super) problem: String,
    /// The receiver refuses all profiles.
    pub(super) refuses: bool,
    /// The receiver has accepted a request without profiles: the next profile is sent as a test.
    pub(super) is_over: bool,
}

impl Outage {
    /// Doubles the pause, up to the longest one, and starts it anew.
    pub(super) fn postpone(&mut self, now: Instant) {
        self.pause = (2 * self.pause).min(LAST_PAUSE);
        self.until = now + self.pause;
    }

    /// Whether the trouble is not known to be over and has lasted for longer than `grace_period`.
    pub(super) fn is_away(&self, grace_period: Duration) -> bool {
        !self.is_over && (self.refuses || self.since.elapsed() >= grace_period)
    }
}

/// The outcome of a profile that a remote has accepted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DeliveryOutcome {
    Delivered,
    Stored,
    Refused,
    TooOld,
    AtShutdown,
}

impl Outbox {
    /// Why no profile can be accepted now, if that is so.
    pub(super) fn problem(&self, trouble: Option<&Outage>) -> Option<String> {
        if self.broken.is_some() {
            return self.broken.clone();
        }
        if let Some(trouble) = trouble.filter(|trouble| trouble.is_away(self.limits.grace_period)) {
            return Some(trouble.problem.clone());
        }
        let sending = self.sending.as_ref().and_then(Request::message);
        let messages = self.waiting.iter().filter_map(Outgoing::message).chain(sending);
        let (profiles, bytes) =
            messages.fold((0, 0), |(count, bytes), message| (count + 1, bytes + message.len()));
        let is_full = profiles >= self.limits.profiles || bytes >= self.limits.bytes;
        is_full.then(|| {
            let mib = bytes as f64 / (1024.0 * 1024.0);
            format!("{profiles} profiles ({mib:.1} MiB) are already waiting to be sent")
        })
    }

    pub(super) fn is_sending_stored(&self) -> bool {
        matches!(&self.sending, Some(request @ Request::Profile(_)) if request.message().is_none())
    }

    pub(super) fn has_stored(&self) -> bool {
        !self.stored.is_empty() || self.is_sending_stored()
    }

    /// The profiles that are not delivered, also those in the fallback directory that wait to be sent.
    pub(super) fn count(&self) -> usize {
        let sending = matches!(self.sending, Some(Request::Profile(_)));
        self.waiting.len() + self.stored.len() + usize::from(sending)
    }

    /// Whether all profiles that wait are in the fallback directory.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.sending.as_ref().is_none_or(|sent| sent.message().is_none())
    }
}

impl Outgoing {
    pub(super) fn message(&self) -> Option<&Arc<[u8]>> {
        match &self.content {
            Content::Encoded { message, .. } => Some(message),
            Content::Stored(_) => None,
        }
    }
}

impl Request {
    /// The message of a profile that exists only here.
    pub(super) fn message(&self) -> Option<&Arc<[u8]>> {
        match self {
            Self::Profile(outgoing) => outgoing.message(),
            Self::Probe => None,
        }
    }
}

impl Delivery {
    /// Sends a request if none is in flight: a waiting profile, a stored profile, or only a probe whether the
    /// receiver is still away.
    pub(super) fn send_next(&mut self) {
        loop {
            let (Some(remote), Some(outbox)) = (self.exporter.remote(), &mut self.outbox) else {
                return;
            };
            if outbox.sending.is_some() || outbox.broken.is_some() {
                return;
            }
            let trouble = self.trouble.as_ref().filter(|trouble| !trouble.is_over);
            let may_wait = trouble.is_some_and(|trouble| trouble.refuses);
            // A receiver that refuses all profiles gets no stored ones, which can wait.
            let next = match outbox.waiting.pop_front() {
                None if may_wait => None,
                None => outbox.stored.pop_front(),
                next => next,
            };
            let Some(outgoing) = next else {
                if trouble.is_some() {
                    remote.send(Arc::default());
                    outbox.sending = Some(Request::Probe);
                }
                return;
            };
            let message = match &outgoing.content {
                Content::Encoded { message, .. } => Some(Arc::clone(message)),
                Content::Stored(_) if outgoing.since.elapsed() > self.age => None,
                // The file is small and local. If it is gone, the directory has made room.
                Content::Stored(path) => std::fs::read(path).ok().map(Arc::from),
            };
            let Some(message) = message else {
                self.finish_stored(DeliveryOutcome::TooOld, outgoing.is_of_process);
                continue;
            };
            if outgoing.is_repeated {
                Counters::add(&self.shared.counters.profiles.requests_retried, 1);
            }
            remote.send(message);
            outbox.sending = Some(Request::Profile(outgoing));
            return;
        }
    }

    /// Handles an answer. An error means that the sending thread has ended.
    pub(super) fn note_answer(&mut self, answer: Result<Answer, RecvError>) {
        let Ok(answer) = answer else {
            return self.break_down("the thread that sends profiles has panicked".to_owned());
        };
        let Some(request) = self.outbox.as_mut().and_then(|outbox| outbox.sending.take()) else {
            return;
        };
        let is_probe = matches!(request, Request::Probe);
        // The receiver counts a profile's samples and waits as two profiles.
        let (outcome, wants_none) = match answer {
            Answer::NotNow { after, problem } => {
                self.fail(after, problem.clone(), false);
                let outbox = self.outbox.as_ref();
                let waiting = outbox.map_or(0, |outbox| outbox.waiting.len() + outbox.stored.len());
                let waiting = waiting + usize::from(!is_probe);
                let message =
                    format!("takes no profiles at present: {problem} ({waiting} waiting)");
                self.owes_all_clear |= self.warn(LogEvent {
                    count: u64::try_from(waiting).ok(),
                    error: Some(problem),
                    ..LogEvent::warning(LogKind::ReceiverAway, message)
                });
                (None, false)
            }
            Answer::Refused { what: RefusedScope::All, problem } => {
                self.fail(None, problem.clone(), true);
                self.owes_all_clear |= self.warn(refuses(problem));
                (Some(DeliveryOutcome::Refused), true)
            }
            // Any other answer to an empty request means that the receiver is back.
            _ if is_probe => {
                match &mut self.trouble {
                    // A receiver that refused all profiles is back when it accepts one. The pause is kept until then.
                    Some(trouble) if trouble.refuses => trouble.is_over = true,
                    _ => self.trouble = None,
                }
                (None, false)
            }
            Answer::Refused { what: RefusedScope::Request, problem } => {
                self.trouble = None;
                self.warn(refuses(problem));
                (Some(DeliveryOutcome::Refused), false)
            }
            Answer::Accepted { rejected, message } => {
                self.trouble = None;
                self.note_accepted(rejected, &message);
                let is_accepted = rejected == 0;
                let outcome =
                    if is_accepted { DeliveryOutcome::Delivered } else { DeliveryOutcome::Refused };
                (Some(outcome), false)
            }
        };
        if let Request::Profile(outgoing) = request {
            self.finish(outgoing, outcome, wants_none);
        }
        self.retry_held();
    }

    /// Handles a profile that was sent. Without an outcome it is sent again.
    pub(super) fn finish(
        &mut self,
        mut outgoing: Outgoing,
        outcome: Option<DeliveryOutcome>,
        wants_none: bool,
    ) {
        let age = self.age;
        let is_old = |outgoing: &Outgoing| outgoing.since.elapsed() > age;
        let outcome = outcome.or(is_old(&outgoing).then_some(DeliveryOutcome::TooOld));
        let Some(outbox) = &mut self.outbox else { return };
        let is_stored = outgoing.message().is_none();
        match outcome {
            None => {
                outgoing.is_repeated = true;
                let queue = if is_stored { &mut outbox.stored } else { &mut outbox.waiting };
                queue.push_front(outgoing);
            }
            // The receiver may accept profiles again later.
            Some(_) if is_stored && wants_none => {
                outgoing.is_repeated = false;
                outbox.stored.push_front(outgoing);
            }
            Some(outcome) if is_stored => self.finish_stored(outcome, outgoing.is_of_process),
            Some(DeliveryOutcome::Delivered) => {
                self.count(DeliveryOutcome::Delivered, outgoing.is_of_process);
            }
            Some(outcome) => {
                // The receiver refuses all others too, or they are as old: they are not sent one by one.
                let goes = |other: &Outgoing| {
                    wants_none || outcome == DeliveryOutcome::TooOld && is_old(other)
                };
                let waiting = std::mem::take(&mut outbox.waiting);
                let (mut gone, stays): (Vec<_>, Vec<_>) = waiting.into_iter().partition(goes);
                outbox.waiting = stays.into();
                gone.push(outgoing);
                self.abandon(&gone, outcome);
            }
        }
    }

    /// Counts the outcome of a profile in the fallback directory.
    pub(super) fn finish_stored(&self, outcome: DeliveryOutcome, is_of_process: bool) {
        self.count(outcome, is_of_process);
        Counters::add(&self.shared.counters.profiles.resent_from_fallback, 1);
    }

    /// These profiles will not be delivered. They go to the fallback directory, if there is one.
    pub(super) fn abandon(&mut self, gone: &[Outgoing], outcome: DeliveryOutcome) {
        for outgoing in gone {
            let fallback = self.exporter.remote().and_then(|remote| remote.fallback());
            let is_stored = match (&outgoing.content, fallback) {
                (Content::Encoded { stem, message }, Some(fallback)) => {
                    fallback.write_otlp(stem, message).is_ok()
                }
                _ => false,
            };
            // A refused profile counts as refused even if it was stored: it is not sent again.
            let outcome = match outcome {
                DeliveryOutcome::Refused => DeliveryOutcome::Refused,
                _ if is_stored => DeliveryOutcome::Stored,
                outcome => outcome,
            };
            self.count(outcome, outgoing.is_of_process);
        }
    }

    /// Counts a profile.
    pub(super) fn count(&self, outcome: DeliveryOutcome, is_of_process: bool) {
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
            DeliveryOutcome::Refused | DeliveryOutcome::TooOld if !is_of_process => {
                health.note_refused();
            }
            _ => {}
        }
    }

    /// An attempt has failed. `after` is the pause that the receiver asks for.
    pub(super) fn fail(&mut self, after: Option<Duration>, problem: String, refuses: bool) {
        let now = Instant::now();
        let before = self.trouble.take();
        let pause = before.as_ref().map_or(FIRST_PAUSE, |before| {
            // The failure of an early retry does not lengthen the pause.
            let is_next = before.until <= now;
            if is_next { (2 * before.pause).min(LAST_PAUSE) } else { before.pause }
        });
        let share = f64::from(getrandom::u32().unwrap_or(0)) / f64::from(u32::MAX);
        // Never at once, as the receiver may ask for that each time.
        let wait = after.map_or_else(
            || pause + pause.mul_f64(share),
            |after| after.clamp(FIRST_PAUSE, LONGEST_PAUSE),
        );
        let still_refuses = |before: &Outage| before.refuses && !before.is_over;
        self.trouble = Some(Outage {
            since: before
                .as_ref()
                .filter(|before| !before.refuses)
                .map_or(now, |before| before.since),
            until: now + wait,
            is_requested: after.is_some(),
            pause,
            problem,
            refuses: refuses || before.as_ref().is_some_and(still_refuses),
            is_over: false,
        });
    }

    pub(super) fn break_down(&mut self, problem: String) {
        let Some(outbox) = &mut self.outbox else { return };
        let message = format!("{problem}; profiles are not sent until the program restarts");
        let error = Some(problem.clone());
        outbox.broken = Some(problem);
        outbox.answers = channel::never();
        outbox.stored.clear();
        self.trouble = None;
        if let Some(Request::Profile(outgoing)) = outbox.sending.take() {
            outbox.waiting.extend(Some(outgoing).filter(|outgoing| outgoing.message().is_some()));
        }
        let event = LogEvent::warning(LogKind::SendingEnded, message);
        self.shared.reporter.log(LogEvent { error, ..event });
    }

    pub(super) fn note_accepted(&mut self, rejected: u64, message: &str) {
        // Only after a warning, so no more often than warnings.
        if std::mem::take(&mut self.owes_all_clear)
            && let Some(remote) = self.exporter.remote()
        {
            let endpoint = remote.endpoint().to_owned();
            let event = LogEvent::info(
                LogKind::ReceiverBack,
                format!("profiles are sent to {endpoint} again"),
            );
            self.shared.reporter.log(LogEvent { endpoint: Some(endpoint), ..event });
        }
        let (kind, what) = match rejected {
            0 => (LogKind::ReceiverReplies, "took a profile and replied"),
            _ => (LogKind::ReceiverRefuses, "has refused a profile"),
        };
        if rejected > 0 || !message.is_empty() {
            let error = Some(message.to_owned());
            self.warn(LogEvent { error, ..LogEvent::warning(kind, format!("{what}: {message}")) });
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

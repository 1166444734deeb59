//! What a remote has taken: it waits here, is sent, and becomes one of several numbers.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvError};

use super::delivery::Delivery;
use super::engine::Engine;
use crate::export::{Answer, Never, QueueLimits};
use crate::stats::Counters;

/// How soon after a failure the exporter is tried again, at first and at last. Up to as much again is added at random, so
/// that processes do not retry in step.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// No receiver is waited for longer, whatever it says.
const LONGEST_PAUSE: Duration = Duration::from_secs(60 * 60);
const MINUTE: Duration = Duration::from_secs(60);

/// What was taken and waits to be sent.
pub(super) struct Outbox {
    pub(super) limits: QueueLimits,
    pub(super) answers: Receiver<Answer>,
    pub(super) waiting: VecDeque<Outgoing>,
    /// In the fallback directory, to be sent when nothing else waits.
    pub(super) stored: VecDeque<Outgoing>,
    pub(super) sending: Option<Request>,
    /// Why nothing is sent any more.
    pub(super) broken: Option<String>,
}

pub(super) struct Outgoing {
    pub(super) content: Content,
    pub(super) since: Instant,
    pub(super) is_repeated: bool,
}

pub(super) enum Content {
    Encoded { stem: String, message: Arc<[u8]> },
    Stored(PathBuf),
}

pub(super) enum Request {
    Profile(Outgoing),
    /// Without a profile, to ask a receiver that has failed: a profile could be lost.
    Probe,
}

/// Since the last attempt failed.
pub(super) struct Trouble {
    pub(super) since: Instant,
    /// When to try again.
    pub(super) until: Instant,
    /// The receiver has said so.
    pub(super) is_said: bool,
    pub(super) pause: Duration,
    pub(super) problem: String,
    /// It wants nothing from us.
    pub(super) refuses: bool,
    /// It did not refuse a request without profiles: the next profile is sent, to see.
    pub(super) is_over: bool,
}

impl Trouble {
    /// Nothing is tried before a longer pause is over.
    pub(super) fn postpone(&mut self, now: Instant) {
        self.pause = (2 * self.pause).min(LAST_PAUSE);
        self.until = now + self.pause;
    }

    /// Whether it is not known to be over, and how long it may last has passed.
    pub(super) fn is_away(&self, patience: Duration) -> bool {
        !self.is_over && (self.refuses || self.since.elapsed() >= patience)
    }
}

/// What became of a profile that a remote has taken.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Delivered,
    Stored,
    Refused,
    TooOld,
    AtShutdown,
}

impl Outbox {
    /// Why no profile can be taken now, if that is so.
    pub(super) fn problem(&self, trouble: Option<&Trouble>) -> Option<String> {
        if self.broken.is_some() {
            return self.broken.clone();
        }
        if let Some(trouble) = trouble.filter(|trouble| trouble.is_away(self.limits.patience)) {
            return Some(trouble.problem.clone());
        }
        let sending = self.sending.as_ref().and_then(Request::message);
        let messages = self.waiting.iter().filter_map(Outgoing::message).chain(sending);
        let (profiles, bytes) =
            messages.fold((0, 0), |(count, bytes), message| (count + 1, bytes + message.len()));
        let is_full = profiles >= self.limits.profiles || bytes >= self.limits.bytes;
        is_full.then(|| {
            let mib = bytes as f64 / (1024.0 * 1024.0);
            format!("{profiles} profiles of {mib:.1} MiB wait to be sent already")
        })
    }

    pub(super) fn sends_stored(&self) -> bool {
        matches!(&self.sending, Some(request @ Request::Profile(_)) if request.message().is_none())
    }

    pub(super) fn has_stored(&self) -> bool {
        !self.stored.is_empty() || self.sends_stored()
    }

    /// Whether no profile waits that is not in the fallback directory.
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
    /// The message of a profile that is nowhere else.
    pub(super) fn message(&self) -> Option<&Arc<[u8]>> {
        match self {
            Self::Profile(outgoing) => outgoing.message(),
            Self::Probe => None,
        }
    }
}

impl Delivery {
    /// Sends a request if none is being sent: what waits, what is in the fallback directory, or only a question
    /// whether the receiver is still away.
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
            // To a receiver that wants nothing no more is sent of what can wait.
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
                // Small and local. If it is gone, the directory has made room.
                Content::Stored(path) => std::fs::read(path).ok().map(Arc::from),
            };
            let Some(message) = message else {
                self.settle_stored(Fate::TooOld);
                continue;
            };
            if outgoing.is_repeated {
                Counters::add(&self.engine.counters.profiles.requests_retried, 1);
            }
            remote.send(message);
            outbox.sending = Some(Request::Profile(outgoing));
            return;
        }
    }

    /// The receiver has answered; or never will, if the thread that sends is gone.
    pub(super) fn note_answer(&mut self, answer: Result<Answer, RecvError>) {
        let Ok(answer) = answer else {
            return self.break_down("the thread that sends profiles has panicked".to_owned());
        };
        let Some(request) = self.outbox.as_mut().and_then(|outbox| outbox.sending.take()) else {
            return;
        };
        let is_probe = matches!(request, Request::Probe);
        // Its samples and its waits are two profiles to the receiver.
        let (fate, wants_none) = match answer {
            Answer::NotNow { after, problem } => {
                self.fail(after, problem.clone(), false);
                let outbox = self.outbox.as_ref();
                let waiting = outbox.map_or(0, |outbox| outbox.waiting.len() + outbox.stored.len());
                let waiting = waiting + usize::from(!is_probe);
                self.owes_all_clear |= self.warn(&format!(
                    "does not take profiles at present: {problem} ({waiting} wait)"
                ));
                (None, false)
            }
            Answer::Never { what: Never::All, problem } => {
                self.fail(None, problem.clone(), true);
                self.owes_all_clear |= self.warn(&format!("refuses profiles: {problem}"));
                (Some(Fate::Refused), true)
            }
            // Whatever else it says to an empty request is not of that kind.
            _ if is_probe => {
                match &mut self.trouble {
                    // It wants profiles again when it takes one: until then the last pause is not forgotten.
                    Some(trouble) if trouble.refuses => trouble.is_over = true,
                    _ => self.trouble = None,
                }
                (None, false)
            }
            Answer::Never { what: Never::Request, problem } => {
                self.trouble = None;
                self.warn(&format!("refuses profiles: {problem}"));
                (Some(Fate::Refused), false)
            }
            Answer::Accepted { rejected, message } => {
                self.trouble = None;
                self.note_accepted(rejected, &message);
                (Some(if rejected == 0 { Fate::Delivered } else { Fate::Refused }), false)
            }
        };
        if let Request::Profile(outgoing) = request {
            self.settle(outgoing, fate, wants_none);
        }
        self.retry_held();
    }

    /// What becomes of a profile that was sent; it is sent again without a fate.
    pub(super) fn settle(&mut self, mut outgoing: Outgoing, fate: Option<Fate>, wants_none: bool) {
        let age = self.age;
        let is_old = |outgoing: &Outgoing| outgoing.since.elapsed() > age;
        let fate = fate.or(is_old(&outgoing).then_some(Fate::TooOld));
        let Some(outbox) = &mut self.outbox else { return };
        let is_stored = outgoing.message().is_none();
        match fate {
            None => {
                outgoing.is_repeated = true;
                let queue = if is_stored { &mut outbox.stored } else { &mut outbox.waiting };
                queue.push_front(outgoing);
            }
            // Which may pass.
            Some(_) if is_stored && wants_none => {
                outgoing.is_repeated = false;
                outbox.stored.push_front(outgoing);
            }
            Some(fate) if is_stored => self.settle_stored(fate),
            Some(Fate::Delivered) => self.count(Fate::Delivered, 1),
            Some(fate) => {
                // It wants none of the others either, or they are as old: they are not sent one by one to be told so.
                let goes = |other: &Outgoing| wants_none || fate == Fate::TooOld && is_old(other);
                let waiting = std::mem::take(&mut outbox.waiting);
                let (mut gone, stays): (Vec<_>, Vec<_>) = waiting.into_iter().partition(goes);
                outbox.waiting = stays.into();
                gone.push(outgoing);
                self.give_up(&gone, fate);
            }
        }
    }

    /// A profile in the fallback directory is done with.
    pub(super) fn settle_stored(&self, fate: Fate) {
        self.count(fate, 1);
        Counters::add(&self.engine.counters.profiles.resent_from_fallback, 1);
    }

    /// These will not be delivered: they go to the fallback directory, if there is one.
    pub(super) fn give_up(&mut self, gone: &[Outgoing], fate: Fate) {
        let fallback = self.exporter.remote().and_then(|remote| remote.fallback());
        let is_stored = |outgoing: &&Outgoing| match (&outgoing.content, fallback) {
            (Content::Encoded { stem, message }, Some(fallback)) => {
                fallback.write_otlp(stem, message).is_ok()
            }
            _ => false,
        };
        let stored = gone.iter().filter(is_stored).count();
        // What is refused stays refused, whatever is in the directory: it is sent no more.
        let stored = if fate == Fate::Refused { 0 } else { stored };
        self.count(Fate::Stored, stored);
        self.count(fate, gone.len() - stored);
    }

    pub(super) fn count(&self, fate: Fate, profiles: usize) {
        if profiles == 0 {
            return;
        }
        let Engine { counters, keeper, .. } = &*self.engine;
        let counter = match fate {
            Fate::Delivered => &counters.profiles.delivered,
            Fate::Stored => &counters.profiles.stored_as_fallback,
            Fate::Refused => &counters.profiles.dropped_refused,
            Fate::TooOld => &counters.profiles.dropped_too_old,
            Fate::AtShutdown => &counters.profiles.dropped_at_shutdown,
        };
        Counters::add(counter, profiles as u64);
        match fate {
            Fate::Delivered => keeper.note_delivered(),
            Fate::Refused | Fate::TooOld => keeper.note_refused(),
            Fate::Stored | Fate::AtShutdown => {}
        }
    }

    /// An attempt has failed. The next is made in so long, if the receiver has said that.
    pub(super) fn fail(&mut self, after: Option<Duration>, problem: String, refuses: bool) {
        let now = Instant::now();
        let before = self.trouble.take();
        let pause = before.as_ref().map_or(FIRST_PAUSE, |before| {
            // One that was cut short tells nothing new.
            let is_next = before.until <= now;
            if is_next { (2 * before.pause).min(LAST_PAUSE) } else { before.pause }
        });
        let share = f64::from(getrandom::u32().unwrap_or(0)) / f64::from(u32::MAX);
        // Not at once: it may say so each time.
        let wait = after.map_or_else(
            || pause + pause.mul_f64(share),
            |after| after.clamp(FIRST_PAUSE, LONGEST_PAUSE),
        );
        let still_refuses = |before: &Trouble| before.refuses && !before.is_over;
        self.trouble = Some(Trouble {
            since: before
                .as_ref()
                .filter(|before| !before.refuses)
                .map_or(now, |before| before.since),
            until: now + wait,
            is_said: after.is_some(),
            pause,
            problem,
            refuses: refuses || before.as_ref().is_some_and(still_refuses),
            is_over: false,
        });
    }

    pub(super) fn break_down(&mut self, problem: String) {
        let Some(outbox) = &mut self.outbox else { return };
        let line = format!("{problem}: none is sent");
        outbox.broken = Some(problem);
        outbox.answers = channel::never();
        outbox.stored.clear();
        if let Some(Request::Profile(outgoing)) = outbox.sending.take() {
            outbox.waiting.extend(Some(outgoing).filter(|outgoing| outgoing.message().is_some()));
        }
        self.log(true, &line);
    }

    pub(super) fn note_accepted(&mut self, rejected: u64, message: &str) {
        // After a warning only, and so no more often than these.
        if std::mem::take(&mut self.owes_all_clear)
            && let Some(remote) = self.exporter.remote()
        {
            let line = format!("profiles are sent to {} again", remote.endpoint());
            self.log(false, &line);
        }
        if rejected > 0 {
            self.warn(&format!("has refused a profile: {message}"));
        } else if !message.is_empty() {
            self.warn(&format!("has taken a profile and says: {message}"));
        }
    }

    /// Logs what the receiver does, once a minute at most. Returns whether it did.
    pub(super) fn warn(&mut self, what: &str) -> bool {
        let is_due = self.warned.is_none_or(|warned| warned.elapsed() >= MINUTE);
        if is_due && let Some(remote) = self.exporter.remote() {
            let line = format!("{} {what} (said once a minute)", remote.endpoint());
            self.warned = Some(Instant::now());
            self.log(true, &line);
        }
        is_due
    }
}

//! The outbox: the profiles on their way, and what is known of an exporter that fails.
//!
//! A profile stays until it is delivered, stored or dropped, and is never evicted for another. Only an answer to a
//! profile proves that there is a receiver.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::memory::MemoryReservation;
use crate::export::remote::QueueLimits;
use crate::keep::{Kept, Reservation};
use crate::profile::Profile;

/// The pause before a retry, at first and at most. A random part is added, so that processes do not retry in step.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// The pause of a receiver that may refuse all profiles: each that it refuses is an id that leads nowhere.
const DOUBT: Duration = Duration::from_secs(10);
/// The longest pause that a receiver can ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(60 * 60);
const MAX_STORED: usize = 4096;

#[derive(Debug)]
pub(super) struct HeldProfile {
    pub(super) profile: Profile,
    pub(super) report: Kept,
    pub(super) since: Instant,
    pub(super) _room: MemoryReservation,
    pub(super) _permit: Option<Reservation>,
}

/// A profile until it is delivered, stored or dropped.
pub(super) struct Outgoing {
    pub(super) content: Content,
    pub(super) since: Instant,
    pub(super) is_repeated: bool,
    /// The profile is a continuous one, to which no span refers.
    pub(super) is_of_process: bool,
}

pub(super) enum Content {
    /// The exporter has not accepted it. There are no more than reservations.
    Whole(Box<HeldProfile>),
    /// A remote has accepted it.
    Encoded { stem: String, message: Arc<[u8]> },
    /// The profile is in the fallback directory of a remote.
    Stored(PathBuf),
}

impl Outgoing {
    pub(super) fn whole(held: Box<HeldProfile>) -> Self {
        let (since, is_of_process) = (held.since, held.profile.is_of_process());
        Self { content: Content::Whole(held), since, is_repeated: false, is_of_process }
    }

    pub(super) fn is_stored(&self) -> bool {
        matches!(self.content, Content::Stored(_))
    }

    pub(super) fn is_whole(&self) -> bool {
        matches!(self.content, Content::Whole(_))
    }
}

pub(super) struct Outbox {
    pub(super) limits: QueueLimits,
    /// The profiles in the fallback directory are the last: they are sent when no others wait.
    pub(super) queue: VecDeque<Outgoing>,
    /// What a remote has been given, and has not answered. Without a profile, so that none is at risk, only whether it would
    /// accept one: it has failed before.
    pub(super) sending: Option<Option<Outgoing>>,
}

impl Outbox {
    /// Adds a profile to the end, before those that are stored. One that is stored now is the last of these; of too many, the
    /// oldest only stays in the directory.
    pub(super) fn add(&mut self, outgoing: Outgoing) {
        let stored = self.queue.partition_point(|other| !other.is_stored());
        if !outgoing.is_stored() || outgoing.is_repeated {
            return self.queue.insert(stored, outgoing);
        }
        if self.queue.len() - stored >= MAX_STORED {
            self.queue.remove(stored);
        }
        self.queue.push_back(outgoing);
    }

    pub(super) fn take(&mut self, is_it: impl Fn(&Outgoing) -> bool) -> Option<Outgoing> {
        self.queue.remove(self.queue.iter().position(is_it)?)
    }

    pub(super) fn take_all(&mut self, are_they: impl Fn(&Outgoing) -> bool) -> Vec<Outgoing> {
        let queue = std::mem::take(&mut self.queue);
        let (taken, stays): (Vec<_>, Vec<_>) = queue.into_iter().partition(are_they);
        self.queue = stays.into();
        taken
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Outgoing> {
        self.queue.iter().chain(self.sending.iter().flatten())
    }

    /// Why a remote has no room for another profile, if that is so.
    pub(super) fn is_full(&self) -> Option<String> {
        let (mut profiles, mut bytes) = (0, 0);
        for outgoing in self.all() {
            if let Content::Encoded { message, .. } = &outgoing.content {
                (profiles, bytes) = (profiles + 1, bytes + message.len());
            }
        }
        let is_full = profiles >= self.limits.profiles || bytes >= self.limits.bytes;
        is_full.then(|| {
            let mib = bytes as f64 / (1024.0 * 1024.0);
            format!("{profiles} profiles ({mib:.1} MiB) are already waiting to be sent")
        })
    }
}

pub(super) struct Outage {
    since: Instant,
    pub(super) until: Instant,
    /// The receiver has asked for that time.
    is_requested: bool,
    /// The receiver may refuse all profiles, which only another profile can show.
    is_doubt: bool,
    pause: Duration,
    pub(super) problem: String,
    pub(super) cause: OutageCause,
    /// A probe has succeeded: the next profile is the test. The pause is kept until one is delivered.
    pub(super) is_over: bool,
}

/// What has failed. Of two, the larger one counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum OutageCause {
    Fails,
    /// The receiver refuses all profiles, or so it seems.
    Refuses,
    /// The thread that sends profiles has ended.
    Ended,
}

impl Outage {
    /// An attempt has failed. `after` is the pause that the receiver asks for.
    pub(super) fn after(
        before: Option<Self>,
        after: Option<Duration>,
        problem: String,
        cause: OutageCause,
    ) -> Self {
        let now = Instant::now();
        let pause = before.as_ref().map_or(FIRST_PAUSE, |before| {
            // The failure of an early retry does not lengthen the pause.
            let is_next = before.until <= now;
            if is_next { (2 * before.pause).min(LAST_PAUSE) } else { before.pause }
        });
        let share = f64::from(getrandom::u32().unwrap_or(0)) / f64::from(u32::MAX);
        // Never at once, as the receiver may ask for that each time.
        let wait = after
            .map_or(pause + pause.mul_f64(share), |after| after.clamp(FIRST_PAUSE, LONGEST_PAUSE));
        let lasting = before.filter(|before| !before.is_over);
        Self {
            since: lasting.as_ref().map_or(now, |before| before.since),
            until: now + wait,
            is_requested: after.is_some(),
            is_doubt: false,
            pause,
            problem,
            cause: lasting.map_or(cause, |before| before.cause.max(cause)),
            is_over: false,
        }
    }

    /// The receiver may refuse all profiles: the next one is tried after [`DOUBT`], or by a hurried call.
    pub(super) fn begin_doubt(&mut self) {
        (self.until, self.is_doubt) = (Instant::now() + DOUBT, true);
    }

    /// Whether the exporter may be asked now.
    pub(super) fn may_try(&self, is_hurried: bool) -> bool {
        self.until <= Instant::now() || is_hurried && !self.is_requested
    }

    /// Whether asking without a profile would show nothing.
    pub(super) fn is_known(&self) -> bool {
        self.is_requested || self.is_doubt || self.cause == OutageCause::Ended
    }

    /// Whether the exporter may be asked without a profile, if it may be asked.
    pub(super) fn may_probe(&self) -> bool {
        self.may_try(false) || !self.is_known()
    }

    /// Whether it will not end within `grace_period`.
    pub(super) fn is_away(&self, grace_period: Duration) -> bool {
        self.cause != OutageCause::Fails || self.since.elapsed() >= grace_period
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DeliveryOutcome {
    Delivered,
    Stored,
    Refused,
    TooOld,
    AtShutdown,
}

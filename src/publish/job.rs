//! The messages of the collector to the threads that publish.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, Sender};

use super::memory::MemoryReservation;
use super::open_span::{OpenSpan, with_stacks};
use crate::error::FlushError;
use crate::keep::{KeptSpan, Reservation};
use crate::profile::{MappingId, Profile, ThreadDump};
use crate::references::ClosedReference;
use crate::span::SpanKey;
use crate::sys::SuspendCounting;
use crate::unwind::Module;

/// A message to the thread that reads symbols. There are as many as there are reservations and callers that wait, so that the
/// channels of these threads need no bound of their own.
#[derive(Debug)]
pub(crate) enum Job {
    Export {
        unnamed: UnnamedProfile,
        kept: Vec<KeptSpan>,
        room: MemoryReservation,
        reservation: Option<Reservation>,
    },
    /// Symbolize the profile of a reference span, and add it to what is typical.
    Reference {
        unnamed: UnnamedProfile,
        reference: Box<ClosedReference>,
        now_ns: u64,
        /// Dropped once that is done.
        on_way: Arc<()>,
    },
    /// Symbolize a profile for a caller that waits for it.
    Reply {
        unnamed: UnnamedProfile,
        asked: Asked,
    },
    /// Acknowledge once all earlier jobs are done.
    Done(FlushRequest),
    Stop(ShutdownDeadline),
}

/// A profile without symbols, and the modules that symbolization needs.
#[derive(Debug)]
pub(crate) struct UnnamedProfile {
    pub(crate) profile: Box<Profile>,
    pub(crate) modules: HashMap<MappingId, Arc<Module>>,
}

impl From<(Profile, HashMap<MappingId, Arc<Module>>)> for UnnamedProfile {
    fn from((profile, modules): (Profile, HashMap<MappingId, Arc<Module>>)) -> Self {
        Self { profile: Box::new(profile), modules }
    }
}

#[derive(Debug)]
pub(crate) enum Asked {
    Profile(Reply<Profile>),
    /// Each span with the key of the one inside it that has its stack.
    OpenSpans(Vec<(OpenSpan, Option<SpanKey>)>, Reply<Vec<OpenSpan>>),
    Threads(ThreadDump, Reply<Option<ThreadDump>>),
}

impl Asked {
    pub(super) fn answer(self, symbolized: Profile) -> bool {
        match self {
            Self::Profile(reply) => reply.send(symbolized),
            Self::OpenSpans(spans, reply) => reply.send(with_stacks(spans, &symbolized)),
            Self::Threads(dump, reply) => reply.send(Some(dump.with_stacks(symbolized))),
        }
    }
}

/// Why not everything was delivered, if so.
pub(crate) type FlushResult = Result<(), FlushError>;

#[derive(Debug)]
pub(crate) struct FlushRequest {
    pub(crate) done: Reply<FlushResult>,
    pub(crate) deadline: Instant,
}

/// How long the last profiles may take without a deadline.
const WITHOUT_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
pub(crate) struct ShutdownDeadline {
    /// Until when. Without one, for a few seconds once everything else is done.
    until: Option<Instant>,
    /// A thread has failed, so that something may not have come so far.
    pub(super) has_failed: bool,
}

impl ShutdownDeadline {
    pub(crate) const FAILED: Self = Self { until: None, has_failed: true };

    pub(crate) fn until(deadline: Option<Instant>) -> Self {
        Self { until: deadline, has_failed: false }
    }

    pub(crate) fn or(self, other: Self) -> Self {
        let until = match (self.until, other.until) {
            (None, None) => None,
            _ => Some(self.deadline().max(other.deadline())),
        };
        Self { until, has_failed: self.has_failed || other.has_failed }
    }

    pub(super) fn deadline(self) -> Instant {
        self.until.unwrap_or_else(|| Instant::now() + WITHOUT_DEADLINE)
    }
}

/// The questions that have no answer yet. A caller whose deadline has passed leaves its question in a queue, perhaps for
/// ever: beyond a number of them no more are accepted.
#[derive(Debug, Default)]
pub(crate) struct PendingReplies(Arc<()>);

const MAX_PENDING: usize = 64;

impl PendingReplies {
    pub(crate) fn ask<T>(&self) -> Option<(Reply<T>, Receiver<T>)> {
        let _uncounted = SuspendCounting::begin();
        let (reply, answer) = channel::bounded(1);
        let question = Reply { reply, _open: Arc::clone(&self.0) };
        // With this one and the own.
        let open = Arc::strong_count(&self.0) - 1;
        (open <= MAX_PENDING).then_some((question, answer))
    }
}

#[derive(Debug)]
pub(crate) struct Reply<T> {
    reply: Sender<T>,
    /// There are as many as open questions.
    _open: Arc<()>,
}

impl<T> Reply<T> {
    /// Returns whether the caller still waited.
    pub(crate) fn send(self, answer: T) -> bool {
        self.reply.send(answer).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_deadline_counts() {
        let [soon, late] = [1, 3_600].map(|s| Instant::now() + Duration::from_secs(s));
        let or = |one, other| ShutdownDeadline::until(one).or(ShutdownDeadline::until(other)).until;
        assert_eq!(or(None, None), None);
        assert_eq!((or(Some(soon), Some(late)), or(None, Some(late))), (Some(late), Some(late)));
        assert!(or(Some(soon), None).is_some_and(|until| until > soon && until < late));
    }

    #[test]
    fn questions_without_an_answer_are_bounded() {
        let questions = PendingReplies::default();
        let mut open: Vec<_> = (0..100).filter_map(|_| questions.ask::<u8>()).collect();
        assert_eq!(open.len(), MAX_PENDING);
        let (question, answer) = open.pop().unwrap();
        question.send(7);
        assert_eq!(answer.try_recv(), Ok(7));
        // A caller that has given up does not make room.
        let (question, answer) = open.pop().unwrap();
        drop(answer);
        assert!(questions.ask::<u8>().is_some() && questions.ask::<u8>().is_some());
        question.send(7);
        open.clear();
        assert_eq!(Arc::strong_count(&questions.0), 1);
    }
}

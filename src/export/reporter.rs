//! What an exporter that works on by itself says.

use std::fmt;
use std::sync::Arc;

use crate::stats::Counters;

type Say = dyn Fn(String, bool) + Send + Sync;
type Hear = dyn Fn(Fate) + Send + Sync;

/// Where an exporter that delivers profiles later says what became of them: into
/// [`Stats`](crate::Stats) and into the log.
#[derive(Clone)]
pub struct Reporter {
    counters: Arc<Counters>,
    say: Arc<Say>,
    hear: Arc<Hear>,
}

/// What became of a profile that an exporter has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fate {
    /// The receiver has it.
    Delivered,
    /// It is in a directory until it can be delivered.
    Stored,
    /// The receiver does not want it.
    Refused,
    /// It could not be delivered for too long.
    TooOld,
    /// It could not be delivered before the end.
    AtShutdown,
}

impl Reporter {
    /// `say` puts a line into the log, as a warning if the second argument is true.
    pub(crate) fn new(
        counters: Arc<Counters>,
        say: impl Fn(String, bool) + Send + Sync + 'static,
    ) -> Self {
        Self { counters, say: Arc::new(say), hear: Arc::new(|_| {}) }
    }

    /// The same, and `hear` is told what became of profiles.
    pub(crate) fn heard_by(self, hear: impl Fn(Fate) + Send + Sync + 'static) -> Self {
        Self { hear: Arc::new(hear), ..self }
    }

    /// Counts so many profiles.
    pub fn count(&self, fate: Fate, profiles: u64) {
        let counters = &self.counters;
        let counter = match fate {
            Fate::Delivered => &counters.profiles_delivered,
            Fate::Stored => &counters.profiles_stored_meanwhile,
            Fate::Refused => &counters.profiles_dropped_refused,
            Fate::TooOld => &counters.profiles_dropped_too_old,
            Fate::AtShutdown => &counters.profiles_dropped_at_shutdown,
        };
        Counters::add(counter, profiles);
        if profiles > 0 {
            (self.hear)(fate);
        }
    }

    /// Counts a request that is sent again.
    pub fn count_repeated(&self) {
        Counters::add(&self.counters.requests_repeated, 1);
    }

    /// Counts a stored profile for which another [`Fate`] is counted, too: it was sent after all.
    pub fn count_after_all(&self) {
        Counters::add(&self.counters.profiles_sent_after_all, 1);
    }

    /// Puts a warning into the log.
    pub fn warn(&self, line: impl Into<String>) {
        (self.say)(line.into(), true);
    }

    /// Puts something into the log that is no problem.
    pub fn inform(&self, line: impl Into<String>) {
        (self.say)(line.into(), false);
    }
}

impl Default for Reporter {
    /// Counts for nobody, and says nothing: for an exporter that no layer has.
    fn default() -> Self {
        Self::new(Arc::default(), |_, _| {})
    }
}

impl fmt::Debug for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reporter").finish_non_exhaustive()
    }
}

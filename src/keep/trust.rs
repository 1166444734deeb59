//! Whether profiles that get a permit will be delivered.

use std::time::Duration;

use super::NoProfile;

/// Permits before the first outcome from a receiver is known.
const ON_TRIAL: u32 = 3;
/// Refusals in a row after which the receiver is assumed to refuse everything.
const MOST_REFUSED: u32 = 3;
/// The first and the longest pause before a trial profile.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(30);

/// What is known about an exporter that reports outcomes later. Every other exporter is trusted while it does not fail.
#[derive(Debug)]
pub(super) struct Trust {
    state: TrustState,
    /// When the next trial profile is due.
    next_ns: u64,
    pause: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrustState {
    /// No outcome is known yet; `left` more permits may be given.
    Untried { left: u32 },
    /// It has delivered a profile, and refused `refused` since.
    Good { refused: u32 },
    /// It has failed, and delivered nothing since.
    Bad,
}

impl Trust {
    pub(super) fn new() -> Self {
        let state = TrustState::Good { refused: 0 };
        Self { state, next_ns: 0, pause: FIRST_PAUSE }
    }

    /// The trust in an exporter with no known outcome.
    pub(super) fn none() -> Self {
        Self { state: TrustState::Untried { left: ON_TRIAL }, ..Self::new() }
    }

    /// Why no permit may be given, if none may.
    pub(super) fn refusal_reason(&self) -> Option<NoProfile> {
        match self.state {
            TrustState::Untried { left: 0 } => Some(NoProfile::ExporterBusy),
            TrustState::Bad => Some(NoProfile::ExporterFails),
            TrustState::Untried { .. } | TrustState::Good { .. } => None,
        }
    }

    pub(super) fn is_bad(&self) -> bool {
        self.state == TrustState::Bad
    }

    /// A permit was given.
    pub(super) fn note_permit(&mut self) {
        if let TrustState::Untried { left } = &mut self.state {
            *left = left.saturating_sub(1);
        }
    }

    /// A profile was delivered.
    pub(super) fn note_delivered(&mut self) {
        *self = Self::new();
    }

    /// The receiver has refused a profile.
    pub(super) fn note_refused(&mut self, now_ns: u64) {
        match self.state {
            TrustState::Good { refused } if refused + 1 < MOST_REFUSED => {
                self.state = TrustState::Good { refused: refused + 1 };
            }
            _ => self.note_failure(now_ns),
        }
    }

    /// The exporter fails for every profile.
    pub(super) fn note_failure(&mut self, now_ns: u64) {
        if self.state != TrustState::Bad {
            self.state = TrustState::Bad;
            self.wait(now_ns);
        }
    }

    /// Whether a trial profile is due. If it is delivered, the exporter is trusted again.
    pub(super) fn tries(&mut self, now_ns: u64) -> bool {
        let tries = self.is_bad() && now_ns >= self.next_ns;
        if tries {
            self.pause = (2 * self.pause).min(LAST_PAUSE);
            self.wait(now_ns);
        }
        tries
    }

    fn wait(&mut self, now_ns: u64) {
        let pause_ns = u64::try_from(self.pause.as_nanos()).unwrap_or(u64::MAX);
        self.next_ns = now_ns.saturating_add(pause_ns);
    }
}

impl Default for Trust {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn an_unknown_receiver_gets_few_permits() {
        let mut trust = Trust::none();
        for _ in 0..ON_TRIAL {
            assert_eq!(trust.refusal_reason(), None);
            trust.note_permit();
        }
        assert_eq!(trust.refusal_reason(), Some(NoProfile::ExporterBusy));
        trust.note_delivered();
        (0..100).for_each(|_| trust.note_permit());
        assert_eq!(trust.refusal_reason(), None);
    }

    #[test]
    fn one_refusal_is_decisive_only_before_a_delivery() {
        let mut unknown = Trust::none();
        unknown.note_refused(0);
        assert_eq!(unknown.refusal_reason(), Some(NoProfile::ExporterFails));
        let mut good = Trust::new();
        for _ in 0..10 {
            (1..MOST_REFUSED).for_each(|_| good.note_refused(0));
            assert_eq!(good.refusal_reason(), None);
            good.note_delivered();
        }
        (0..MOST_REFUSED).for_each(|_| good.note_refused(0));
        assert!(good.is_bad());
    }

    #[test]
    fn a_failing_exporter_is_tried_less_and_less_often() {
        let mut trust = Trust::new();
        assert!(!trust.tries(SECOND));
        trust.note_failure(SECOND);
        assert!(!trust.tries(2 * SECOND - 1));
        assert!(trust.tries(2 * SECOND));
        // Further failures change nothing.
        trust.note_failure(2 * SECOND);
        assert!(!trust.tries(4 * SECOND - 1));
        assert!(trust.tries(4 * SECOND));
        for minute in 1..10 {
            assert!(trust.tries(minute * 60 * SECOND));
        }
        assert_eq!(trust.pause, LAST_PAUSE);
        trust.note_delivered();
        assert_eq!((trust.refusal_reason(), trust.pause), (None, FIRST_PAUSE));
    }
}

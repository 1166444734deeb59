//! Whether what is promised will be kept.

use std::time::Duration;

use super::NoProfile;

/// So many profiles are promised before anything is known of a receiver.
const ON_TRIAL: u32 = 3;
/// After so many in a row that it has refused it is believed to refuse all.
const MOST_REFUSED: u32 = 3;
/// How soon a profile that nobody was promised is tried, at first and at last.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(30);

/// What speaks for an exporter that says only later what became of a profile. All others are trusted as
/// long as they do not fail.
#[derive(Debug)]
pub(super) struct Trust {
    state: TrustState,
    /// When the next profile is tried that nobody was promised.
    next_ns: u64,
    pause: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrustState {
    /// Nothing was heard of it: so many more may be promised.
    Untried { left: u32 },
    /// It has delivered, and then refused so many.
    Good { refused: u32 },
    /// It has failed, and delivered nothing since.
    Bad,
}

impl Trust {
    pub(super) fn new() -> Self {
        let state = TrustState::Good { refused: 0 };
        Self { state, next_ns: 0, pause: FIRST_PAUSE }
    }

    /// Of one of which nothing is known.
    pub(super) fn none() -> Self {
        Self { state: TrustState::Untried { left: ON_TRIAL }, ..Self::new() }
    }

    /// Why nothing may be promised, if that is so.
    pub(super) fn doubt(&self) -> Option<NoProfile> {
        match self.state {
            TrustState::Untried { left: 0 } => Some(NoProfile::ExporterBusy),
            TrustState::Bad => Some(NoProfile::ExporterFails),
            TrustState::Untried { .. } | TrustState::Good { .. } => None,
        }
    }

    pub(super) fn is_bad(&self) -> bool {
        self.state == TrustState::Bad
    }

    /// Something was promised.
    pub(super) fn note_promise(&mut self) {
        if let TrustState::Untried { left } = &mut self.state {
            *left = left.saturating_sub(1);
        }
    }

    /// A profile is where it belongs.
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

    /// It fails, whatever is given to it.
    pub(super) fn note_failure(&mut self, now_ns: u64) {
        if self.state != TrustState::Bad {
            self.state = TrustState::Bad;
            self.wait(now_ns);
        }
    }

    /// Whether to try a profile now that nobody is promised: if it is delivered, all is well again.
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
    fn of_an_unknown_receiver_little_is_promised() {
        let mut trust = Trust::none();
        for _ in 0..ON_TRIAL {
            assert_eq!(trust.doubt(), None);
            trust.note_promise();
        }
        assert_eq!(trust.doubt(), Some(NoProfile::ExporterBusy));
        trust.note_delivered();
        (0..100).for_each(|_| trust.note_promise());
        assert_eq!(trust.doubt(), None);
    }

    #[test]
    fn one_refusal_tells_of_the_receiver_only_if_nothing_else_does() {
        let mut unknown = Trust::none();
        unknown.note_refused(0);
        assert_eq!(unknown.doubt(), Some(NoProfile::ExporterFails));
        let mut good = Trust::new();
        for _ in 0..10 {
            (1..MOST_REFUSED).for_each(|_| good.note_refused(0));
            assert_eq!(good.doubt(), None);
            good.note_delivered();
        }
        (0..MOST_REFUSED).for_each(|_| good.note_refused(0));
        assert!(good.is_bad());
    }

    #[test]
    fn one_that_fails_is_tried_ever_less_often() {
        let mut trust = Trust::new();
        assert!(!trust.tries(SECOND));
        trust.note_failure(SECOND);
        assert!(!trust.tries(2 * SECOND - 1));
        assert!(trust.tries(2 * SECOND));
        // More failures change nothing.
        trust.note_failure(2 * SECOND);
        assert!(!trust.tries(4 * SECOND - 1));
        assert!(trust.tries(4 * SECOND));
        for minute in 1..10 {
            assert!(trust.tries(minute * 60 * SECOND));
        }
        assert_eq!(trust.pause, LAST_PAUSE);
        trust.note_delivered();
        assert_eq!((trust.doubt(), trust.pause), (None, FIRST_PAUSE));
    }
}

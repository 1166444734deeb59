//! Whether profiles will be delivered: one word, which the publisher writes and admission reads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::NoProfile;

/// Reservations before the first outcome from a receiver is known.
const UNPROVEN_PERMITS: u8 = 3;
/// Refusals in a row after which the receiver is assumed to refuse everything.
const MOST_REFUSED: u8 = 3;
/// The first and the longest pause before a trial profile, in seconds.
const FIRST_PAUSE_S: u8 = 1;
const LAST_PAUSE_S: u8 = 30;

/// What is known of the exporter.
#[derive(Debug)]
pub(crate) struct ExporterHealth {
    /// A packed [`Known`].
    word: AtomicU64,
    /// It reports outcomes later, so only a delivered profile shows that it works.
    must_prove: bool,
    started: Instant,
    /// The clock of a test, which replaces the time since `started`.
    #[cfg(test)]
    by_hand: Option<std::sync::Arc<AtomicU64>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    /// It would accept a profile now.
    accepts: bool,
    outcomes: Outcomes,
}

/// What the outcomes of profiles that it has accepted say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcomes {
    /// It has delivered a profile, or need not, and refused `refused` since.
    Works { refused: u8 },
    /// No outcome is known yet; `left` more reservations may be given.
    Untried { left: u8 },
    /// It has failed, and delivered nothing since. A trial profile is due at `trial_ms`, and the next one after twice the
    /// pause.
    Fails { pause_s: u8, trial_ms: u64 },
}

impl Known {
    fn pack(self) -> u64 {
        let (kind, small, large) = match self.outcomes {
            Outcomes::Works { refused } => (0, refused, 0),
            Outcomes::Untried { left } => (1, left, 0),
            Outcomes::Fails { pause_s, trial_ms } => (2, pause_s, trial_ms),
        };
        u64::from(self.accepts) | (kind << 1) | (u64::from(small) << 8) | (large << 16)
    }

    fn unpack(word: u64) -> Self {
        let [_, small, ..] = word.to_le_bytes();
        let outcomes = match (word >> 1) & 3 {
            0 => Outcomes::Works { refused: small },
            1 => Outcomes::Untried { left: small },
            _ => Outcomes::Fails { pause_s: small, trial_ms: word >> 16 },
        };
        Self { accepts: word & 1 != 0, outcomes }
    }
}

fn fails_from(now_ms: u64, pause_s: u8) -> Outcomes {
    Outcomes::Fails { pause_s, trial_ms: now_ms + 1_000 * u64::from(pause_s) }
}

impl ExporterHealth {
    /// `accepts` is whether the exporter has passed its own check.
    pub(crate) fn new(accepts: bool, must_prove: bool) -> Self {
        let outcomes = match must_prove {
            true => Outcomes::Untried { left: UNPROVEN_PERMITS },
            false => Outcomes::Works { refused: 0 },
        };
        Self {
            word: AtomicU64::new(Known { accepts, outcomes }.pack()),
            must_prove,
            started: Instant::now(),
            #[cfg(test)]
            by_hand: None,
        }
    }

    /// One that works, and whose clock a test sets, in nanoseconds.
    #[cfg(test)]
    pub(crate) fn by_hand(must_prove: bool, now: std::sync::Arc<AtomicU64>) -> Self {
        Self { by_hand: Some(now), ..Self::new(true, must_prove) }
    }

    /// The time since the layer was made.
    pub(super) fn now_ns(&self) -> u64 {
        #[cfg(test)]
        if let Some(now) = &self.by_hand {
            return now.load(Ordering::Relaxed);
        }
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(Duration::from_nanos(self.now_ns()).as_millis()).unwrap_or(u64::MAX)
    }

    fn known(&self) -> Known {
        Known::unpack(self.word.load(Ordering::Relaxed))
    }

    /// Changes what is known. Returns whether that was done.
    fn update(&self, change: impl Fn(Known) -> Option<Known>) -> bool {
        let change = |word| change(Known::unpack(word)).map(Known::pack);
        self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).is_ok()
    }

    /// Whether it would accept a profile now, as far as is known.
    pub(crate) fn accepts(&self) -> bool {
        self.known().accepts
    }

    /// Whether a profile that it accepts would not be delivered, as far as is known.
    pub(crate) fn is_doubted(&self) -> bool {
        matches!(self.known().outcomes, Outcomes::Fails { .. })
    }

    /// Why no reservation may be given, if none may.
    pub(super) fn refusal(&self) -> Option<NoProfile> {
        match self.known() {
            Known { accepts: false, .. } | Known { outcomes: Outcomes::Fails { .. }, .. } => {
                Some(NoProfile::ExporterFails)
            }
            Known { outcomes: Outcomes::Untried { left: 0 }, .. } => Some(NoProfile::ExporterBusy),
            Known { outcomes: Outcomes::Untried { .. } | Outcomes::Works { .. }, .. } => None,
        }
    }

    /// A reservation was given.
    pub(super) fn note_reservation(&self) {
        self.update(|known| match known.outcomes {
            Outcomes::Untried { left } => Some(Known {
                outcomes: Outcomes::Untried { left: left.saturating_sub(1) },
                ..known
            }),
            _ => None,
        });
    }

    /// Whether a trial profile is due, for the first caller only. If it is delivered, the exporter works again.
    pub(super) fn take_trial(&self) -> bool {
        let now_ms = self.now_ms();
        self.update(|known| match known {
            Known { accepts: true, outcomes: Outcomes::Fails { pause_s, trial_ms } }
                if now_ms >= trial_ms =>
            {
                let pause_s = pause_s.saturating_mul(2).min(LAST_PAUSE_S);
                Some(Known { outcomes: fails_from(now_ms, pause_s), ..known })
            }
            _ => None,
        })
    }

    /// It accepts profiles, or it does not.
    pub(crate) fn set_accepts(&self, accepts: bool) {
        self.update(|known| Some(Known { accepts, ..known }));
    }

    /// A profile was delivered.
    pub(crate) fn note_delivered(&self) {
        self.update(|_| Some(Known { accepts: true, outcomes: Outcomes::Works { refused: 0 } }));
    }

    /// A profile that it had accepted was refused by the receiver.
    pub(crate) fn note_refused(&self) {
        let now_ms = self.now_ms();
        self.update(|known| {
            let outcomes = match known.outcomes {
                _ if !self.must_prove => return None,
                Outcomes::Works { refused } if refused + 1 < MOST_REFUSED => {
                    Outcomes::Works { refused: refused + 1 }
                }
                Outcomes::Works { .. } | Outcomes::Untried { .. } => {
                    fails_from(now_ms, FIRST_PAUSE_S)
                }
                // Further failures change nothing.
                Outcomes::Fails { .. } => return None,
            };
            Some(Known { outcomes, ..known })
        });
    }

    /// It accepts no profile.
    pub(crate) fn note_failure(&self) {
        let now_ms = self.now_ms();
        self.update(|known| {
            let outcomes = match known.outcomes {
                Outcomes::Works { .. } | Outcomes::Untried { .. } if self.must_prove => {
                    fails_from(now_ms, FIRST_PAUSE_S)
                }
                outcomes => outcomes,
            };
            Some(Known { accepts: false, outcomes })
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const FAILS: Option<NoProfile> = Some(NoProfile::ExporterFails);

    fn late() -> (ExporterHealth, Arc<AtomicU64>) {
        let now = Arc::default();
        (ExporterHealth::by_hand(true, Arc::clone(&now)), now)
    }

    #[test]
    fn what_is_known_fits_into_a_word() {
        let cases = [
            Outcomes::Works { refused: 2 },
            Outcomes::Untried { left: 3 },
            Outcomes::Fails { pause_s: 30, trial_ms: (1 << 48) - 1 },
        ];
        for known in cases.map(|outcomes| [true, false].map(|accepts| Known { accepts, outcomes }))
        {
            assert_eq!(known.map(|known| Known::unpack(known.pack())), known);
        }
    }

    #[test]
    fn an_unknown_receiver_gets_few_reservations() {
        let (health, _) = late();
        for _ in 0..UNPROVEN_PERMITS {
            assert_eq!(health.refusal(), None);
            health.note_reservation();
        }
        assert_eq!(health.refusal(), Some(NoProfile::ExporterBusy));
        health.note_delivered();
        (0..100).for_each(|_| health.note_reservation());
        assert_eq!(health.refusal(), None);
    }

    #[test]
    fn one_refusal_is_decisive_only_before_a_delivery() {
        let (health, _) = late();
        health.note_refused();
        assert_eq!(health.refusal(), FAILS);
        for _ in 0..10 {
            health.note_delivered();
            (1..MOST_REFUSED).for_each(|_| health.note_refused());
            assert_eq!(health.refusal(), None);
        }
        health.note_delivered();
        (0..MOST_REFUSED).for_each(|_| health.note_refused());
        assert!(health.is_doubted());
    }

    #[test]
    fn a_failing_exporter_is_tried_less_and_less_often() {
        let (health, now) = late();
        let tries = |now_ns| {
            now.store(now_ns, Ordering::Relaxed);
            health.take_trial()
        };
        health.note_delivered();
        assert!(!tries(SECOND));
        health.note_failure();
        assert!(!tries(2 * SECOND), "it accepts none");
        health.set_accepts(true);
        assert!(!tries(2 * SECOND - 1) && health.refusal() == FAILS);
        assert!(tries(2 * SECOND) && !tries(2 * SECOND), "one");
        // Further failures change nothing.
        health.note_refused();
        assert!(!tries(4 * SECOND - 1));
        assert!(tries(4 * SECOND));
        for minute in 1..10 {
            assert!(tries(minute * 60 * SECOND));
        }
        assert!(!tries(570 * SECOND - 1) && tries(570 * SECOND));
        health.note_delivered();
        assert_eq!(health.refusal(), None);
    }

    #[test]
    fn an_exporter_that_reports_at_once_works_when_it_accepts_profiles() {
        let health = ExporterHealth::new(false, false);
        assert_eq!(health.refusal(), FAILS);
        health.set_accepts(true);
        (0..9).for_each(|_| health.note_refused());
        assert_eq!(health.refusal(), None);
        health.note_failure();
        assert!(health.refusal() == FAILS && !health.is_doubted() && !health.take_trial());
    }
}

//! Whether profiles will be delivered: the publisher writes it, and admission reads it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::NoProfile;

/// Reservations before the first outcome from a receiver is known.
const UNPROVEN_PERMITS: u32 = 3;
/// Refusals in a row after which the receiver is assumed to refuse everything.
const MAX_REFUSED: u32 = 3;
/// A profile was delivered, or an exporter need not prove that it works.
const NO_LIMIT: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct ExporterHealth {
    /// The exporter would accept a profile now.
    pub(crate) accepts: AtomicBool,
    /// How many reservations may be given until a profile is delivered.
    permits: AtomicU32,
    /// Profiles that it has refused since the last one that was delivered.
    refused: AtomicU32,
    /// The exporter reports outcomes later, so only a delivered profile shows that it works.
    must_prove: bool,
}

impl ExporterHealth {
    /// `accepts` is whether the exporter has passed its own check.
    pub(crate) fn new(accepts: bool, must_prove: bool) -> Self {
        let permits = AtomicU32::new(if must_prove { UNPROVEN_PERMITS } else { NO_LIMIT });
        Self { accepts: accepts.into(), permits, refused: AtomicU32::new(0), must_prove }
    }

    /// Why no reservation may be given, if none may.
    pub(super) fn refusal(&self) -> Option<NoProfile> {
        match self.permits.load(Ordering::Relaxed) {
            _ if !self.accepts.load(Ordering::Relaxed) => Some(NoProfile::ExporterFails),
            0 => Some(NoProfile::ExporterBusy),
            _ => None,
        }
    }

    pub(super) fn note_reservation(&self) {
        let taken = |left: u32| (left != NO_LIMIT).then(|| left.saturating_sub(1));
        _ = self.permits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
    }

    pub(crate) fn note_delivered(&self) {
        self.refused.store(0, Ordering::Relaxed);
        self.permits.store(NO_LIMIT, Ordering::Relaxed);
    }

    /// A profile was refused. Returns whether all others may be refused as well: before the first delivery, one is enough.
    pub(crate) fn note_refused(&self) -> bool {
        let refused = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        let is_proven = self.permits.load(Ordering::Relaxed) == NO_LIMIT;
        let is_doubted = self.must_prove && (refused >= MAX_REFUSED || !is_proven);
        if is_doubted {
            self.permits.fetch_min(1, Ordering::Relaxed);
        }
        is_doubted
    }

    /// A profile is lost, which leaves room for another one.
    pub(crate) fn note_lost(&self) {
        self.permits.fetch_max(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILS: Option<NoProfile> = Some(NoProfile::ExporterFails);
    const BUSY: Option<NoProfile> = Some(NoProfile::ExporterBusy);

    #[test]
    fn an_unknown_receiver_gets_few_reservations() {
        let health = ExporterHealth::new(true, true);
        for _ in 0..UNPROVEN_PERMITS {
            assert_eq!(health.refusal(), None);
            health.note_reservation();
        }
        assert_eq!(health.refusal(), BUSY);
        health.note_lost();
        assert_eq!(health.refusal(), None);
        health.note_reservation();
        assert_eq!(health.refusal(), BUSY, "another one for each that is lost");
        health.note_delivered();
        (0..100).for_each(|_| health.note_reservation());
        assert_eq!(health.refusal(), None);
    }

    #[test]
    fn one_refusal_is_decisive_only_before_a_delivery() {
        let health = ExporterHealth::new(true, true);
        assert!(health.note_refused());
        for _ in 0..10 {
            health.note_delivered();
            assert!((1..MAX_REFUSED).all(|_| !health.note_refused()));
            assert_eq!(health.refusal(), None);
        }
        assert!(health.note_refused());
        // The next one shows whether it still refuses all.
        health.note_reservation();
        assert_eq!(health.refusal(), BUSY);
        assert!(health.note_refused());
        health.note_delivered();
        assert!(!health.note_refused());
    }

    #[test]
    fn an_exporter_that_reports_at_once_works_when_it_accepts_profiles() {
        let health = ExporterHealth::new(false, false);
        assert_eq!(health.refusal(), FAILS);
        health.accepts.store(true, Ordering::Relaxed);
        assert!((0..9).all(|_| !health.note_refused()));
        assert_eq!(health.refusal(), None);
        health.accepts.store(false, Ordering::Relaxed);
        assert_eq!(health.refusal(), FAILS);
    }
}

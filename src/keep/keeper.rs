//! Kept spans, the permits for their profiles, and the epochs of their roots.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::bucket::TokenBucket;
use super::trust::Trust;
use super::{KeptSpan, NoProfile, Reason};
use crate::profile::ProfileId;
use crate::span::SpanKey;

/// The spans of one local root that were kept together, and that share a profile.
#[derive(Clone, Debug)]
pub(crate) struct Epoch {
    pub(crate) root: SpanKey,
    /// The profile that was promised, if one was.
    pub(crate) id: Option<ProfileId>,
    /// Nobody was: it is to show whether the exporter is well again.
    is_trial: bool,
    pub(crate) kept: Vec<KeptSpan>,
    opened_ns: u64,
}

/// What of a span was exported while it was open.
#[derive(Debug, Default)]
struct ExportedWhileOpen {
    samples: u64,
    profiles: Vec<ProfileId>,
}

impl ExportedWhileOpen {
    fn add(&mut self, id: ProfileId, samples: u64) {
        self.samples += samples;
        // Once for each kept span inside it: they share the profile.
        if self.profiles.last() == Some(&id) {
            return;
        }
        if self.profiles.len() == MOST_EARLIER {
            self.profiles.remove(0);
        }
        self.profiles.push(id);
    }
}

/// The limits of one rule.
#[derive(Clone, Copy, Debug)]
struct Buckets {
    profiles: TokenBucket,
    /// Of epochs without a profile, which are only reported.
    reports: TokenBucket,
}

impl Buckets {
    fn are_full(&self, now_ns: u64) -> bool {
        self.profiles.is_full(now_ns) && self.reports.is_full(now_ns)
    }
}

#[derive(Debug, Default)]
struct State {
    epochs: HashMap<SpanKey, Epoch>,
    /// Of spans that are open.
    snapshots: HashMap<SpanKey, Epoch>,
    exported: HashMap<SpanKey, ExportedWhileOpen>,
    /// By the rule's id.
    buckets: HashMap<u64, Buckets>,
    trust: Trust,
}

/// Gives kept spans their profile ids.
///
/// Called by the threads on which spans close, and by the collector when it makes the profiles;
/// only for spans that are kept, so a lock is cheap enough.
#[derive(Debug)]
pub(crate) struct Keeper {
    state: Mutex<State>,
    full: Buckets,
    /// Profiles that have been promised and not yet exported.
    promised: AtomicUsize,
    most_promised: usize,
    exporter_fails: AtomicBool,
    memory_is_short: AtomicBool,
    is_over: AtomicBool,
    /// The exporter says later what became of a profile.
    must_prove: AtomicBool,
    started: Instant,
    /// The time since then, where a test says it.
    #[cfg(test)]
    by_hand: Option<std::sync::Arc<std::sync::atomic::AtomicU64>>,
}

/// Profiles that may be promised at once, unless it is set: what waits is at most this many roots' samples.
pub(crate) const MOST_PROMISED: usize = 32;
/// Epochs that may be open at once.
const MOST_EPOCHS: usize = 1024;
/// Spans beside the root that may be kept in one epoch.
const MOST_KEPT: usize = 1024;
/// Rules whose limits are known at once.
const MOST_BUCKETS: usize = 1024;
/// Earlier profiles that a span that goes on for ever lists.
const MOST_EARLIER: usize = 16;

impl Keeper {
    pub(crate) fn new(profiles_per_minute: u32) -> Self {
        let bucket = TokenBucket::new(profiles_per_minute);
        Self {
            state: Mutex::default(),
            full: Buckets { profiles: bucket, reports: bucket },
            promised: AtomicUsize::new(0),
            most_promised: MOST_PROMISED,
            exporter_fails: AtomicBool::new(false),
            memory_is_short: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            must_prove: AtomicBool::new(false),
            started: Instant::now(),
            #[cfg(test)]
            by_hand: None,
        }
    }

    /// So many profiles may be promised at once.
    pub(crate) fn with_most_promised(self, profiles: usize) -> Self {
        Self { most_promised: profiles, ..self }
    }

    /// One whose time a test sets, in nanoseconds.
    #[cfg(test)]
    pub(crate) fn by_hand(
        profiles_per_minute: u32,
        now: std::sync::Arc<std::sync::atomic::AtomicU64>,
    ) -> Self {
        Self { by_hand: Some(now), ..Self::new(profiles_per_minute) }
    }

    fn now_ns(&self) -> u64 {
        #[cfg(test)]
        if let Some(now) = &self.by_hand {
            return now.load(Ordering::Relaxed);
        }
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn has_lingered_for(&self, epoch: &Epoch) -> Duration {
        Duration::from_nanos(self.now_ns().saturating_sub(epoch.opened_ns))
    }

    /// Decides whether a kept span has a profile, and which, and writes it into the span, where
    /// there is the reason for which a span without samples has none. If a new id is needed it
    /// comes from `new_id`.
    ///
    /// Returns false if not even a report is due.
    pub(crate) fn keep(
        &self,
        span: &mut KeptSpan,
        mut new_id: impl FnMut() -> Option<ProfileId>,
    ) -> bool {
        let now_ns = self.now_ns();
        let mut state = self.state.lock();
        let state = &mut *state;
        if let Some(exported) = state.exported.get(&span.key) {
            // Of one that is open only those were counted that are left.
            if !span.is_open {
                span.samples = span.samples.saturating_sub(exported.samples);
            }
            span.earlier.clone_from(&exported.profiles);
        }
        let epochs = if span.is_open { &mut state.snapshots } else { &mut state.epochs };
        let open = epochs.get(&span.root);
        let full = match open {
            // The root has room: all the others are inside it.
            Some(epoch) if epoch.kept.len() >= MOST_KEPT && span.key != span.root => {
                Some(NoProfile::TreeFull)
            }
            None if epochs.len() >= MOST_EPOCHS => Some(NoProfile::ExporterBusy),
            _ => None,
        };
        let is_trial = open.is_some_and(|epoch| epoch.is_trial);
        let open = open.map(|epoch| epoch.id);
        if let Some(full) = full {
            span.profile = Err(full);
            return false;
        }
        if state.buckets.len() >= MOST_BUCKETS {
            // Of rules that were replaced, mostly.
            state.buckets.retain(|_, buckets| !buckets.are_full(now_ns));
        }
        let buckets = state.buckets.entry(span.rule).or_insert(self.full);
        let is_forced = span.reasons.contains(Reason::Forced);
        span.profile = match open.flatten() {
            // Which the caller knows best.
            _ if span.samples == 0 => span.profile.and(Err(NoProfile::NoSamples)),
            Some(_) if is_trial => Err(NoProfile::ExporterFails),
            Some(id) => Ok(id),
            None => {
                let take_token = || is_forced || buckets.profiles.take(now_ns);
                self.promise(&mut state.trust, take_token, &mut new_id)
            }
        };
        let is_open = open.is_some();
        let trial = match span.profile {
            Err(NoProfile::ExporterFails) if open.flatten().is_none() => {
                self.trial(&mut state.trust, now_ns, new_id)
            }
            _ => None,
        };
        let is_due = is_open || span.profile.is_ok() || is_forced || buckets.reports.take(now_ns);
        let is_due = is_due || trial.is_some();
        if is_due {
            let epoch = epochs.entry(span.root).or_insert_with(|| Epoch {
                root: span.root,
                id: None,
                is_trial: false,
                kept: Vec::new(),
                opened_ns: now_ns,
            });
            epoch.is_trial |= trial.is_some();
            epoch.id = epoch.id.or(span.profile.ok()).or(trial);
            epoch.kept.push(span.clone());
            if let Some(id) = span.profile.ok().filter(|_| span.is_open) {
                // It takes no samples from the profile that is made when the span closes.
                state.exported.entry(span.key).or_default().add(id, 0);
            }
        }
        is_due
    }

    fn promise(
        &self,
        trust: &mut Trust,
        take_token: impl FnOnce() -> bool,
        new_id: impl FnOnce() -> Option<ProfileId>,
    ) -> Result<ProfileId, NoProfile> {
        if self.exporter_fails.load(Ordering::Relaxed) || self.is_over.load(Ordering::Relaxed) {
            return Err(NoProfile::ExporterFails);
        }
        if self.memory_is_short.load(Ordering::Relaxed) {
            return Err(NoProfile::NoMemory);
        }
        if let Some(doubt) = trust.doubt() {
            return Err(doubt);
        }
        // Under the lock of the state, so two threads cannot both take the last place.
        if self.promised.load(Ordering::Relaxed) >= self.most_promised {
            return Err(NoProfile::ExporterBusy);
        }
        if !take_token() {
            return Err(NoProfile::RateLimit);
        }
        let id = new_id().ok_or(NoProfile::NoId)?;
        self.promised.fetch_add(1, Ordering::Relaxed);
        trust.note_promise();
        Ok(id)
    }

    /// The id of a profile that nobody is promised, if one is due: only a profile can tell whether a receiver
    /// is well again that takes requests and refuses profiles.
    fn trial(
        &self,
        trust: &mut Trust,
        now_ns: u64,
        new_id: impl FnOnce() -> Option<ProfileId>,
    ) -> Option<ProfileId> {
        let fails = self.exporter_fails.load(Ordering::Relaxed);
        let cannot = fails
            || self.is_over.load(Ordering::Relaxed)
            || self.memory_is_short.load(Ordering::Relaxed)
            || self.promised.load(Ordering::Relaxed) >= self.most_promised;
        if cannot || !trust.tries(now_ns) {
            return None;
        }
        let id = new_id()?;
        self.promised.fetch_add(1, Ordering::Relaxed);
        Some(id)
    }

    /// Ends the epoch of that root, if one is open: who is kept from now on opens another.
    ///
    /// `taken` says how many samples of spans that are open the epoch's profile will have, if it has one. In the same step:
    /// were one of them kept between, it would be promised a profile with samples that it will not get.
    pub(crate) fn end_epoch(
        &self,
        root: SpanKey,
        taken: impl FnOnce(&Epoch) -> HashMap<SpanKey, u64>,
    ) -> Option<Epoch> {
        let mut state = self.state.lock();
        let epoch = state.epochs.remove(&root)?;
        if let Some(id) = epoch.id {
            for (span, samples) in taken(&epoch) {
                let exported = state.exported.entry(span).or_default();
                // A profile in which nothing of a span is, it does not list.
                if epoch.is_trial {
                    exported.samples += samples;
                } else if samples > 0 {
                    exported.add(id, samples);
                }
            }
        }
        Some(epoch)
    }

    /// The epochs of spans that were kept while they were open: each is exported at once.
    pub(crate) fn take_snapshots(&self) -> Vec<Epoch> {
        std::mem::take(&mut self.state.lock().snapshots).into_values().collect()
    }

    /// Whether spans of that root have been kept and not yet exported.
    pub(crate) fn has_epoch(&self, root: SpanKey) -> bool {
        self.state.lock().epochs.contains_key(&root)
    }

    /// The roots whose epochs have been open for `linger`.
    pub(crate) fn ripe(&self, linger: Duration) -> Vec<SpanKey> {
        let state = self.state.lock();
        let ripe = state.epochs.values().filter(|epoch| self.has_lingered_for(epoch) >= linger);
        ripe.map(|epoch| epoch.root).collect()
    }

    /// How long until the next epoch has been open for `linger`.
    pub(crate) fn next_ripe(&self, linger: Duration) -> Option<Duration> {
        let state = self.state.lock();
        let left = |epoch| linger.saturating_sub(self.has_lingered_for(epoch));
        state.epochs.values().map(left).min()
    }

    /// A span is closed, and was judged.
    pub(crate) fn forget(&self, span: SpanKey) {
        self.state.lock().exported.remove(&span);
    }

    /// Nothing more is promised as long as the exporter fails.
    pub(crate) fn set_exporter_fails(&self, fails: bool) {
        self.exporter_fails.store(fails, Ordering::Relaxed);
    }

    /// The exporter says later what became of a profile. Until it has delivered one, few are promised.
    pub(crate) fn demand_proof(&self) {
        self.must_prove.store(true, Ordering::Relaxed);
        self.state.lock().trust = Trust::none();
    }

    /// Whether it does so.
    pub(crate) fn demands_proof(&self) -> bool {
        self.must_prove.load(Ordering::Relaxed)
    }

    /// A profile was delivered.
    pub(crate) fn note_delivered(&self) {
        self.state.lock().trust.note_delivered();
        self.set_exporter_fails(false);
    }

    /// A profile that the exporter had taken was refused.
    pub(crate) fn note_refused(&self) {
        if self.demands_proof() {
            self.state.lock().trust.note_refused(self.now_ns());
        }
    }

    /// The exporter takes no profile.
    pub(crate) fn note_exporter_fails(&self) {
        self.set_exporter_fails(true);
        if self.demands_proof() {
            self.state.lock().trust.note_failure(self.now_ns());
        }
    }

    /// Whether what is promised would not be delivered, as far as is known.
    pub(crate) fn is_distrusted(&self) -> bool {
        self.state.lock().trust.is_bad()
    }

    /// Nothing is promised any more: the last profiles are being made.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Nothing more is promised as long as samples are lost for want of memory.
    pub(crate) fn set_memory_is_short(&self, is_short: bool) {
        self.memory_is_short.store(is_short, Ordering::Relaxed);
    }

    /// A promised profile has been exported, or failed to be.
    pub(crate) fn redeem(&self) {
        self.promised.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ProfileId = ProfileId::for_test(1);
    const OTHER: ProfileId = ProfileId::for_test(2);

    fn key(number: u64) -> SpanKey {
        SpanKey::new(number).unwrap()
    }

    fn keep(keeper: &Keeper, span: u64, root: u64, samples: u64, id: ProfileId) -> KeptSpan {
        let mut span = KeptSpan::for_test(key(span), key(root), samples);
        keeper.keep(&mut span, || Some(id));
        span
    }

    #[test]
    fn spans_kept_in_one_epoch_share_a_profile() {
        let keeper = Keeper::new(60);
        assert_eq!(keep(&keeper, 2, 1, 5, ID).profile, Ok(ID));
        assert_eq!(keep(&keeper, 1, 1, 9, OTHER).profile, Ok(ID));
        assert_eq!(keep(&keeper, 7, 7, 9, OTHER).profile, Ok(OTHER));
        let epoch = keeper.end_epoch(key(1), |_| HashMap::new()).unwrap();
        assert_eq!((epoch.id, epoch.kept.len()), (Some(ID), 2));
        assert!(!keeper.has_epoch(key(1)));
        assert!(keeper.has_epoch(key(7)));
    }

    #[test]
    fn without_samples_there_is_no_profile_but_a_report() {
        let keeper = Keeper::new(60);
        assert_eq!(keep(&keeper, 2, 1, 0, ID).profile, Err(NoProfile::NoSamples));
        let epoch = keeper.end_epoch(key(1), |_| HashMap::from([(key(8), 1)])).unwrap();
        assert_eq!(epoch.id, None);
        assert!(keeper.state.lock().exported.is_empty(), "nothing was exported");
        // A span without samples in an epoch with a profile has none all the same.
        assert_eq!(keep(&keeper, 3, 3, 1, ID).profile, Ok(ID));
        assert_eq!(keep(&keeper, 4, 3, 0, ID).profile, Err(NoProfile::NoSamples));
    }

    #[test]
    fn an_enclosing_span_gets_what_is_left_and_lists_the_rest() {
        let keeper = Keeper::new(60);
        keep(&keeper, 2, 1, 3, ID);
        keep(&keeper, 3, 1, 2, ID);
        keeper.end_epoch(key(1), |_| HashMap::from([(key(1), 5)]));
        let outer = keep(&keeper, 1, 1, 8, OTHER);
        assert_eq!(outer.profile, Ok(OTHER));
        assert_eq!(outer.samples, 3);
        assert_eq!(outer.earlier, [ID]);
    }

    #[test]
    fn an_enclosing_span_with_nothing_left_has_only_the_earlier_ones() {
        let keeper = Keeper::new(60);
        keep(&keeper, 2, 1, 5, ID);
        keeper.end_epoch(key(1), |_| HashMap::from([(key(1), 5)]));
        let outer = keep(&keeper, 1, 1, 5, OTHER);
        assert_eq!(outer.profile, Err(NoProfile::NoSamples));
        assert_eq!(outer.earlier, [ID]);
        keeper.forget(key(1));
        assert!(keep(&keeper, 1, 1, 5, OTHER).earlier.is_empty());
    }

    #[test]
    fn a_snapshot_of_an_open_span_takes_nothing_from_its_last_profile() {
        let keeper = Keeper::new(60);
        keep(&keeper, 2, 1, 3, ID);
        for span in [1, 3] {
            let mut open = KeptSpan { is_open: true, ..KeptSpan::for_test(key(span), key(1), 7) };
            assert!(keeper.keep(&mut open, || Some(OTHER)));
            assert_eq!((open.profile, open.samples), (Ok(OTHER), 7));
        }
        let snapshots = keeper.take_snapshots();
        assert_eq!((snapshots.len(), snapshots[0].kept.len()), (1, 2));
        assert!(keeper.take_snapshots().is_empty());
        assert!(keeper.has_epoch(key(1)), "of the span that has closed");
        keeper.end_epoch(key(1), |_| HashMap::from([(key(1), 3)]));
        let inner = keep(&keeper, 3, 1, 9, ID);
        assert_eq!((inner.samples, inner.earlier.as_slice()), (9, [OTHER].as_slice()));
        let outer = keep(&keeper, 1, 1, 12, ID);
        assert_eq!((outer.samples, outer.earlier.as_slice()), (9, [OTHER, ID].as_slice()));
    }

    #[test]
    fn a_rule_gives_no_more_than_its_limit() {
        let keeper = Keeper::new(3);
        let kept: Vec<_> = (1..=5).map(|n| keep(&keeper, n, n, 1, ID).profile).collect();
        let dry = Err(NoProfile::RateLimit);
        assert_eq!(kept, [Ok(ID), Ok(ID), Ok(ID), dry, dry]);
        // Reports of what has no profile are limited too.
        let mut span = KeptSpan::for_test(key(9), key(9), 0);
        assert!(keeper.keep(&mut span, || None));
        let mut span = KeptSpan::for_test(key(10), key(10), 0);
        assert!(!keeper.keep(&mut span, || None));
    }

    #[test]
    fn no_more_are_promised_than_can_wait() {
        for most in [1, MOST_PROMISED as u64, 100] {
            let keeper = Keeper::new(10_000).with_most_promised(most as usize);
            for n in 1..=most {
                assert!(keep(&keeper, n, n, 1, ID).profile.is_ok());
            }
            let busy = Err(NoProfile::ExporterBusy);
            assert_eq!(keep(&keeper, most + 1, most + 1, 1, ID).profile, busy);
            keeper.redeem();
            assert!(keep(&keeper, most + 2, most + 2, 1, ID).profile.is_ok());
        }
    }

    #[test]
    fn nothing_is_promised_that_could_not_be_kept() {
        let keeper = Keeper::new(60);
        assert_eq!(keep(&keeper, 1, 1, 1, ID).profile, Ok(ID));
        keeper.set_exporter_fails(true);
        assert_eq!(keep(&keeper, 2, 2, 1, ID).profile, Err(NoProfile::ExporterFails));
        assert_eq!(keep(&keeper, 3, 1, 1, OTHER).profile, Ok(ID), "promised before");
        keeper.set_exporter_fails(false);
        keeper.set_memory_is_short(true);
        assert_eq!(keep(&keeper, 4, 4, 1, ID).profile, Err(NoProfile::NoMemory));
        keeper.set_memory_is_short(false);
        assert_eq!(keep(&keeper, 5, 5, 1, OTHER).profile, Ok(OTHER));
        keeper.end();
        // The last profile is exported meanwhile.
        keeper.set_exporter_fails(false);
        assert_eq!(keep(&keeper, 6, 6, 1, ID).profile, Err(NoProfile::ExporterFails));
    }

    #[test]
    fn an_exporter_that_refuses_is_tried_with_what_nobody_was_promised() {
        let now = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let keeper = Keeper::by_hand(60, std::sync::Arc::clone(&now));
        keeper.demand_proof();
        let profiles: Vec<_> = (1..=5).map(|n| keep(&keeper, n, n, 1, ID).profile).collect();
        let busy = Err(NoProfile::ExporterBusy);
        assert_eq!(profiles, [Ok(ID), Ok(ID), Ok(ID), busy, busy]);
        (0..3).for_each(|_| keeper.redeem());
        keeper.note_refused();
        assert!(keeper.is_distrusted());
        let fails = Err(NoProfile::ExporterFails);
        assert_eq!(keep(&keeper, 6, 6, 1, OTHER).profile, fails);
        assert_eq!(keeper.end_epoch(key(6), |_| HashMap::new()).unwrap().id, None);
        now.store(1_000_000_000, Ordering::Relaxed);
        // It and all that is kept with it know nothing of their profile.
        assert_eq!(keep(&keeper, 8, 7, 1, OTHER).profile, fails);
        keeper.note_delivered();
        assert_eq!(keep(&keeper, 7, 7, 2, ID).profile, fails);
        let epoch = keeper.end_epoch(key(7), |_| HashMap::from([(key(9), 1)])).unwrap();
        assert_eq!((epoch.id, epoch.kept.len()), (Some(OTHER), 2));
        let outer = keep(&keeper, 9, 7, 3, ID);
        assert_eq!((outer.profile, outer.samples, outer.earlier.len()), (Ok(ID), 2, 0));
    }

    #[test]
    fn an_epoch_has_no_more_spans_than_it_may() {
        let keeper = Keeper::new(60);
        let most = MOST_KEPT as u64;
        for n in 2..=most + 1 {
            assert_eq!(keep(&keeper, n, 1, 1, ID).profile, Ok(ID));
        }
        assert_eq!(keep(&keeper, most + 2, 1, 1, ID).profile, Err(NoProfile::TreeFull));
        assert_eq!(keep(&keeper, 1, 1, 1, ID).profile, Ok(ID));
        assert_eq!(keeper.end_epoch(key(1), |_| HashMap::new()).unwrap().kept.len(), MOST_KEPT + 1);
        assert_eq!(keep(&keeper, most + 3, 1, 1, OTHER).profile, Ok(OTHER));
    }

    #[test]
    fn an_epoch_is_ripe_after_it_has_lingered() {
        let keeper = Keeper::new(60);
        assert_eq!(keeper.next_ripe(Duration::from_secs(60)), None);
        keep(&keeper, 2, 1, 5, ID);
        assert!(keeper.ripe(Duration::from_secs(3600)).is_empty());
        assert!(keeper.next_ripe(Duration::from_secs(3600)) > Some(Duration::from_secs(3000)));
        assert_eq!(keeper.ripe(Duration::ZERO), [key(1)]);
    }
}

//! Admits kept spans to profiles: reservations, and the groups of local roots.
//!
//! A group ends when the root closes, or 2 s after its first span was kept. An id is given only with a reservation at
//! the exporter and a sample, and then its profile is made, downsampled if necessary.

use std::collections::HashMap;
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::health::ExporterHealth;
use super::limits::{Limited, RateLimits};
use super::{KeptSpan, NoProfile, SpanLink};
use crate::facts::Reason;
use crate::facts::format::nanoseconds;
use crate::profile::ProfileId;
use crate::span::SpanKey;

/// The spans of one local root that were kept together and share a profile.
#[derive(Debug)]
pub(crate) struct ProfileGroup {
    pub(crate) root: SpanKey,
    pub(crate) id: Option<ProfileId>,
    pub(crate) reservation: Option<Reservation>,
    pub(crate) kept: Vec<KeptSpan>,
    /// On-CPU samples of kept spans that link to a span inside the key's.
    linked_inside: HashMap<SpanKey, u64>,
    /// Since when it waits for its root to close.
    waits_from_ns: u64,
}

impl ProfileGroup {
    fn new(root: SpanKey, waits_from_ns: u64) -> Self {
        Self {
            root,
            id: None,
            reservation: None,
            kept: Vec::new(),
            linked_inside: HashMap::new(),
            waits_from_ns,
        }
    }

    fn waits_for(&self, now_ns: u64) -> Duration {
        Duration::from_nanos(now_ns.saturating_sub(self.waits_from_ns))
    }

    /// A span alone that is not kept.
    pub(crate) fn of_reference(span: KeptSpan) -> Self {
        Self { kept: vec![span.clone()], ..Self::new(span.root, span.opened_ns) }
    }

    #[cfg(test)]
    pub(crate) fn for_test(root: SpanKey, kept: Vec<KeptSpan>) -> Self {
        Self { kept, ..Self::new(root, 0) }
    }
}

/// A slot with the exporter, until the profile is exported or lost: there are as many as values.
pub(crate) type Reservation = Arc<()>;

#[derive(Debug)]
struct State {
    groups: HashMap<SpanKey, ProfileGroup>,
    /// Groups of spans that are still open.
    snapshots: HashMap<SpanKey, ProfileGroup>,
    /// The profiles of spans that are still open: at most one for each reason to keep an open span.
    earlier: HashMap<SpanKey, Vec<ProfileId>>,
    limits: RateLimits,
}

/// Gives kept spans their profile ids.
///
/// The threads that close spans and the collector call it, only for spans that are kept. A lock is cheap enough for
/// that: nothing that takes long is done under it.
#[derive(Debug)]
pub(crate) struct ProfileAdmission {
    state: Mutex<State>,
    /// Each profile that has a reservation and is not yet exported has another one.
    reservations: Arc<()>,
    pub(crate) most_reservations: usize,
    pub(crate) health: Arc<ExporterHealth>,
    started: Instant,
    #[cfg(test)]
    by_hand: Option<Arc<AtomicU64>>,
    /// While samples are lost because memory is short, no reservations are given.
    pub(crate) memory_is_short: AtomicBool,
    /// The last profiles are being made, and no more reservations are given.
    pub(crate) is_over: AtomicBool,
}

/// Default for the reservations in use at once. It bounds the samples that wait for export to those of this many roots.
pub(crate) const MAX_RESERVED: usize = 32;
const MAX_GROUPS: usize = 1024;
/// Kept spans in one group, besides the root.
const MAX_KEPT: usize = 1024;

impl ProfileAdmission {
    pub(crate) fn new(profiles_per_minute: u32, health: ExporterHealth) -> Self {
        let limits = RateLimits::new(profiles_per_minute);
        let (groups, snapshots, earlier) = (HashMap::new(), HashMap::new(), HashMap::new());
        Self {
            state: Mutex::new(State { groups, snapshots, earlier, limits }),
            reservations: Arc::default(),
            most_reservations: MAX_RESERVED,
            health: Arc::new(health),
            started: Instant::now(),
            #[cfg(test)]
            by_hand: None,
            memory_is_short: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        }
    }

    #[cfg(test)]
    pub(crate) fn by_hand(self, now: Arc<AtomicU64>) -> Self {
        Self { by_hand: Some(now), ..self }
    }

    fn now_ns(&self) -> u64 {
        #[cfg(test)]
        if let Some(now) = &self.by_hand {
            return now.load(Ordering::Relaxed);
        }
        nanoseconds(self.started.elapsed())
    }

    /// Whether a closed span of that rule, name and root would get no profile and no report, as no token is left.
    pub(crate) fn is_over_limit(
        &self,
        (rule, name, root): (u64, u64, SpanKey),
        has_samples: bool,
    ) -> bool {
        let now_ns = self.now_ns();
        let state = self.state.lock();
        let has_token = |what| state.limits.taken((rule, name), what, now_ns).is_some();
        // The spans of an open group need no token.
        let is_reported = state.groups.contains_key(&root) || has_token(Limited::Report);
        !is_reported && (!has_samples || !has_token(Limited::Profile))
    }

    /// Decides which profile a kept span gets, if any, and writes the decision into the span. For a span without
    /// samples, `span.profile` already holds the reason. `name` is a hash of its name and values. `new_id` is for a new
    /// profile, if the span has samples.
    ///
    /// Returns false if the span is not even reported.
    pub(crate) fn keep(&self, span: &mut KeptSpan, name: u64, new_id: Option<ProfileId>) -> bool {
        let now_ns = self.now_ns();
        let state = &mut *self.state.lock();
        if let Some(earlier) = state.earlier.get(&span.key) {
            span.earlier.clone_from(earlier);
        }
        let groups = if span.facts.is_open { &mut state.snapshots } else { &mut state.groups };
        let open = groups.get(&span.root);
        let full = match open {
            // A root still fits, because all other spans are inside it.
            Some(group) if group.kept.len() >= MAX_KEPT && span.key != span.root => {
                Some(NoProfile::TreeFull)
            }
            None if groups.len() >= MAX_GROUPS => Some(NoProfile::ExporterBusy),
            _ => None,
        };
        if let Some(full) = full {
            span.profile = Err(full);
            return false;
        }
        let linked_inside = open.and_then(|group| group.linked_inside.get(&span.key));
        let links_here = span.link.to.is_some()
            && span.samples.on_cpu > linked_inside.copied().unwrap_or_default();
        let (is_open, open_id) = (open.is_some(), open.and_then(|group| group.id));
        let of = (span.rule, name);
        let mut take = |what| state.limits.take(of, what, now_ns);
        let is_forced = span.facts.reasons.contains(Reason::Forced);
        let mut reservation = None;
        span.profile = match open_id {
            // The caller has already set the reason.
            _ if span.samples.total() == 0 => span.profile.and(Err(NoProfile::NoSamples)),
            Some(id) => Ok(id),
            None => {
                self.reserve(|| is_forced || take(Limited::Profile), new_id).map(|(id, new)| {
                    reservation = Some(new);
                    id
                })
            }
        };
        span.link.has_on_cpu = span.profile.is_ok() && (span.link.has_on_cpu || links_here);
        if !is_open && span.profile.is_err() && !is_forced && !take(Limited::Report) {
            return false;
        }
        let new = || ProfileGroup::new(span.root, now_ns);
        let group = groups.entry(span.root).or_insert_with(new);
        group.id = group.id.or(span.profile.ok());
        group.reservation = group.reservation.take().or(reservation);
        let is_linked = span.link.has_on_cpu && span.link.ids.is_some();
        for outside in span.link.outside.iter().filter(|_| is_linked) {
            *group.linked_inside.entry(*outside).or_default() += span.samples.on_cpu;
        }
        group.kept.push(span.clone());
        if span.facts.is_open {
            state.earlier.entry(span.key).or_default().extend(span.profile);
        }
        true
    }

    fn reserve(
        &self,
        take_token: impl FnOnce() -> bool,
        new_id: Option<ProfileId>,
    ) -> Result<(ProfileId, Reservation), NoProfile> {
        if self.is_over.load(Ordering::Relaxed) {
            return Err(NoProfile::ExporterFails);
        }
        if let Some(why) = self.health.refusal() {
            return Err(why);
        }
        if self.memory_is_short.load(Ordering::Relaxed) {
            return Err(NoProfile::NoMemory);
        }
        // Under the lock of the state, so two threads cannot both take the last reservation.
        if Arc::strong_count(&self.reservations) > self.most_reservations {
            return Err(NoProfile::ExporterBusy);
        }
        if !take_token() {
            return Err(NoProfile::RateLimit);
        }
        let id = new_id.ok_or(NoProfile::NoId)?;
        self.health.note_reservation();
        Ok((id, Arc::clone(&self.reservations)))
    }

    /// Ends the group of that root, if one is open. Spans kept after this open another one.
    pub(crate) fn end_group(&self, root: SpanKey) -> Option<ProfileGroup> {
        self.state.lock().groups.remove(&root)
    }

    /// What was decided when the first span of that root's group was kept, if it has one.
    pub(crate) fn first_link(&self, root: SpanKey) -> Option<SpanLink> {
        let state = self.state.lock();
        Some(state.groups.get(&root)?.kept.first()?.link.clone())
    }

    pub(crate) fn was_kept_open(&self, span: SpanKey) -> bool {
        self.state.lock().earlier.contains_key(&span)
    }

    /// Takes the groups of spans that were kept while open. Each is exported at once.
    pub(crate) fn take_snapshots(&self) -> Vec<ProfileGroup> {
        std::mem::take(&mut self.state.lock().snapshots).into_values().collect()
    }

    /// Whether spans of that root were kept and are not yet exported.
    pub(crate) fn has_group(&self, root: SpanKey) -> bool {
        self.state.lock().groups.contains_key(&root)
    }

    /// Whether a profile will be made of the group of that root. Of others, spans are only reported.
    pub(crate) fn has_reservation(&self, root: SpanKey) -> bool {
        self.state.lock().groups.get(&root).is_some_and(|group| group.id.is_some())
    }

    /// The roots whose groups have waited for `linger`. Those that are not ended wait again.
    pub(crate) fn expired_groups(&self, linger: Duration) -> Vec<SpanKey> {
        let now_ns = self.now_ns();
        let mut state = self.state.lock();
        let expired = state.groups.values_mut().filter(|group| group.waits_for(now_ns) >= linger);
        let roots = expired.map(|group| {
            group.waits_from_ns = now_ns;
            group.root
        });
        roots.collect()
    }

    pub(crate) fn until_next_expiry(&self, linger: Duration) -> Option<Duration> {
        let now_ns = self.now_ns();
        let state = self.state.lock();
        let left = |group: &ProfileGroup| linger.saturating_sub(group.waits_for(now_ns));
        state.groups.values().map(left).min()
    }

    /// Drops the state of a span that has closed and was judged.
    pub(crate) fn forget(&self, span: SpanKey) {
        self.state.lock().earlier.remove(&span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{SpanId, TraceId};
    use crate::span::{SampleCounts, TraceIds};

    const ID: ProfileId = ProfileId::for_test(1);
    const OTHER: ProfileId = ProfileId::for_test(2);

    fn admission(profiles_per_minute: u32) -> ProfileAdmission {
        ProfileAdmission::new(profiles_per_minute, ExporterHealth::new(true, false))
    }

    fn key(number: u64) -> SpanKey {
        SpanKey::new(number).unwrap()
    }

    fn on_cpu(on_cpu: u64) -> SampleCounts {
        SampleCounts::of_on_cpu(on_cpu)
    }

    fn keep(
        admission: &ProfileAdmission,
        span: u64,
        root: u64,
        samples: u64,
        id: ProfileId,
    ) -> KeptSpan {
        let mut span = KeptSpan::for_test(key(span), key(root), samples);
        admission.keep(&mut span, 0, Some(id));
        span
    }

    #[test]
    fn spans_kept_in_one_group_share_a_profile() {
        let admission = admission(60);
        assert_eq!(keep(&admission, 2, 1, 5, ID).profile, Ok(ID));
        assert_eq!(keep(&admission, 1, 1, 9, OTHER).profile, Ok(ID));
        assert_eq!(keep(&admission, 7, 7, 9, OTHER).profile, Ok(OTHER));
        let group = admission.end_group(key(1)).unwrap();
        assert_eq!((group.id, group.kept.len()), (Some(ID), 2));
        assert!(!admission.has_group(key(1)));
        assert!(admission.has_group(key(7)));
    }

    #[test]
    fn a_span_without_samples_is_reported_without_a_profile() {
        let admission = admission(60);
        assert_eq!(keep(&admission, 2, 1, 0, ID).profile, Err(NoProfile::NoSamples));
        assert_eq!(admission.end_group(key(1)).unwrap().id, None);
        // A span without samples has no profile, even in a group that has one.
        assert_eq!(keep(&admission, 3, 3, 1, ID).profile, Ok(ID));
        assert_eq!(keep(&admission, 4, 3, 0, ID).profile, Err(NoProfile::NoSamples));
    }

    #[test]
    fn an_enclosing_span_has_a_profile_of_all_its_samples() {
        let admission = admission(60);
        keep(&admission, 2, 1, 5, ID);
        admission.end_group(key(1));
        let outer = keep(&admission, 1, 1, 5, OTHER);
        assert_eq!((outer.profile, outer.samples), (Ok(OTHER), on_cpu(5)));
        assert!(outer.earlier.is_empty());
    }

    #[test]
    fn a_span_lists_the_profiles_that_were_made_of_it_while_it_was_open() {
        let admission = admission(60);
        keep(&admission, 2, 1, 3, ID);
        for span in [1, 3] {
            let mut open = KeptSpan::for_test(key(span), key(1), 7);
            open.facts.is_open = true;
            assert!(admission.keep(&mut open, 0, Some(OTHER)));
            assert_eq!((open.profile, open.samples), (Ok(OTHER), on_cpu(7)));
        }
        let snapshots = admission.take_snapshots();
        assert_eq!((snapshots.len(), snapshots[0].kept.len()), (1, 2));
        assert!(admission.take_snapshots().is_empty());
        assert!(admission.has_group(key(1)), "the group of the closed span");
        admission.end_group(key(1));
        for (span, samples) in [(3, 9), (1, 12)] {
            let closed = keep(&admission, span, 1, samples, ID);
            assert_eq!((closed.samples, closed.earlier), (on_cpu(samples), vec![OTHER]));
        }
        admission.forget(key(1));
        assert!(keep(&admission, 1, 1, 5, ID).earlier.is_empty());
    }

    /// Keeps a span whose samples link to span `to`, inside the spans `outside`.
    fn keep_linked(
        admission: &ProfileAdmission,
        span: u64,
        on_cpu: u64,
        to: u64,
        outside: &[u64],
    ) -> KeptSpan {
        let ids = TraceIds {
            trace: TraceId::from_bytes([1; 16]),
            span: SpanId::from_bytes([1; 8]),
            is_sampled: true,
        };
        let outside = outside.iter().copied().map(key).collect();
        let link = SpanLink { to: Some(key(to)), ids: Some(ids), outside, ..SpanLink::default() };
        let mut span = KeptSpan { link, ..KeptSpan::for_test(key(span), key(1), on_cpu) };
        span.samples.waits = 1;
        admission.keep(&mut span, 0, Some(ID));
        span
    }

    #[test]
    fn a_span_links_to_samples_only_if_it_has_some() {
        let admission = admission(60);
        // 1 is a connection with the streams 2 and 3.
        assert!(!keep_linked(&admission, 4, 0, 2, &[1]).link.has_on_cpu, "it only waited");
        assert!(keep_linked(&admission, 5, 3, 2, &[1]).link.has_on_cpu);
        assert!(keep_linked(&admission, 2, 4, 2, &[1]).link.has_on_cpu);
        assert!(keep_linked(&admission, 3, 2, 3, &[1]).link.has_on_cpu);
        // Of its 9 samples, 4 are in stream 2, of which 3 are counted twice, and 2 in stream 3.
        assert!(!keep_linked(&admission, 1, 9, 1, &[]).link.has_on_cpu);
        assert!(keep_linked(&admission, 1, 10, 1, &[]).link.has_on_cpu);
    }

    #[test]
    fn a_root_links_to_samples_that_were_exported_before_it_closed() {
        let admission = admission(60);
        keep_linked(&admission, 2, 5, 2, &[1]);
        admission.end_group(key(1));
        assert!(keep_linked(&admission, 1, 5, 1, &[]).link.has_on_cpu);
    }

    #[test]
    fn the_first_kept_span_decides_when_spans_count_as_open_for_long() {
        let admission = admission(60);
        assert!(admission.first_link(key(1)).is_none());
        for at in [7, 9] {
            let link = SpanLink { at, ..SpanLink::default() };
            let mut span = KeptSpan { link, ..KeptSpan::for_test(key(2), key(1), 1) };
            admission.keep(&mut span, 0, Some(ID));
            assert_eq!(admission.first_link(key(1)).unwrap().at, 7);
        }
        admission.end_group(key(1));
        assert!(admission.first_link(key(1)).is_none());
    }

    #[test]
    fn a_rule_has_a_rate_limit() {
        let admission = admission(3);
        let kept: Vec<_> = (1..=5).map(|n| keep(&admission, n, n, 1, ID).profile).collect();
        let dry = Err(NoProfile::RateLimit);
        assert_eq!(kept, [Ok(ID), Ok(ID), Ok(ID), dry, dry]);
        // Reports of groups without a profile are limited too.
        let mut span = KeptSpan::for_test(key(9), key(9), 0);
        assert!(admission.keep(&mut span, 0, None));
        let mut span = KeptSpan::for_test(key(10), key(10), 0);
        assert!(!admission.keep(&mut span, 0, None));
    }

    #[test]
    fn what_is_over_its_limit_is_known_before_it_is_kept() {
        const MINUTE: u64 = 60_000_000_000;
        let now = Arc::new(AtomicU64::new(0));
        let admission = admission(1).by_hand(Arc::clone(&now));
        let over =
            |root, has_samples, name| admission.is_over_limit((0, name, key(root)), has_samples);
        assert!(!over(9, false, 0) && !over(9, true, 0));
        assert_eq!(keep(&admission, 1, 1, 1, ID).profile, Ok(ID));
        assert!(!over(9, true, 0), "it would be reported");
        assert_eq!(keep(&admission, 2, 2, 1, ID).profile, Err(NoProfile::RateLimit));
        assert!(over(3, true, 0) && over(3, false, 0));
        assert_eq!(keep(&admission, 3, 3, 1, ID).profile, Err(NoProfile::RateLimit));
        assert!(over(9, true, 0) && over(9, false, 0));
        // The spans of an open group need no token, and other names have tokens of their own.
        assert!(!over(1, true, 0) && !over(2, true, 0) && over(3, true, 0), "3 is not reported");
        assert!(!over(9, true, 1));
        for root in [1, 2] {
            admission.end_group(key(root));
            assert!(over(root, true, 0));
        }
        now.store(MINUTE - 1, Ordering::Relaxed);
        assert!(over(9, true, 0) && over(9, false, 0));
        now.store(MINUTE, Ordering::Relaxed);
        assert!(!over(9, true, 0) && !over(9, false, 0));
    }

    #[test]
    fn a_rule_without_tokens_is_over_its_limit_whatever_the_name() {
        let admission = admission(1);
        for number in 1..=20 {
            let mut span = KeptSpan::for_test(key(number), key(number), 0);
            span.facts.fields = vec![("route", number.to_string())];
            admission.keep(&mut span, number, None);
        }
        let over = |rule, has_samples| admission.is_over_limit((rule, 99, key(99)), has_samples);
        assert!(over(0, false) && !over(0, true) && !over(1, false));
    }

    #[test]
    fn reservations_are_limited() {
        for most in [1, MAX_RESERVED as u64, 100] {
            let admission =
                ProfileAdmission { most_reservations: most as usize, ..admission(10_000) };
            for n in 1..=most {
                assert!(keep(&admission, n, n, 1, ID).profile.is_ok());
            }
            let busy = Err(NoProfile::ExporterBusy);
            assert_eq!(keep(&admission, most + 1, most + 1, 1, ID).profile, busy);
            drop(admission.end_group(key(1)));
            assert!(keep(&admission, most + 2, most + 2, 1, ID).profile.is_ok());
        }
    }

    #[test]
    fn no_reservation_is_given_while_profiles_cannot_be_exported() {
        let admission = admission(60);
        assert_eq!(keep(&admission, 1, 1, 1, ID).profile, Ok(ID));
        admission.health.accepts.store(false, Ordering::Relaxed);
        assert_eq!(keep(&admission, 2, 2, 1, ID).profile, Err(NoProfile::ExporterFails));
        assert_eq!(
            keep(&admission, 3, 1, 1, OTHER).profile,
            Ok(ID),
            "a reservation was given before"
        );
        admission.health.accepts.store(true, Ordering::Relaxed);
        admission.memory_is_short.store(true, Ordering::Relaxed);
        assert_eq!(keep(&admission, 4, 4, 1, ID).profile, Err(NoProfile::NoMemory));
        admission.memory_is_short.store(false, Ordering::Relaxed);
        assert_eq!(keep(&admission, 5, 5, 1, OTHER).profile, Ok(OTHER));
        admission.is_over.store(true, Ordering::Relaxed);
        // The last profile is exported in the meantime.
        admission.health.accepts.store(true, Ordering::Relaxed);
        assert_eq!(keep(&admission, 6, 6, 1, ID).profile, Err(NoProfile::ExporterFails));
    }

    #[test]
    fn few_profiles_are_reserved_before_one_is_delivered() {
        let admission = ProfileAdmission::new(60, ExporterHealth::new(true, true));
        let profiles: Vec<_> = (1..=5).map(|n| keep(&admission, n, n, 1, ID).profile).collect();
        let busy = Err(NoProfile::ExporterBusy);
        assert_eq!(profiles, [Ok(ID), Ok(ID), Ok(ID), busy, busy]);
        (1..=3).for_each(|root| drop(admission.end_group(key(root))));
        admission.health.accepts.store(false, Ordering::Relaxed);
        let fails = Err(NoProfile::ExporterFails);
        assert_eq!(keep(&admission, 6, 6, 1, OTHER).profile, fails);
        assert_eq!(admission.end_group(key(6)).unwrap().id, None);
        admission.health.accepts.store(true, Ordering::Relaxed);
        admission.health.note_delivered();
        assert_eq!(keep(&admission, 7, 7, 2, ID).profile, Ok(ID));
    }

    #[test]
    fn the_spans_of_a_group_are_limited() {
        let admission = admission(60);
        let most = MAX_KEPT as u64;
        for n in 2..=most + 1 {
            assert_eq!(keep(&admission, n, 1, 1, ID).profile, Ok(ID));
        }
        assert_eq!(keep(&admission, most + 2, 1, 1, ID).profile, Err(NoProfile::TreeFull));
        assert_eq!(keep(&admission, 1, 1, 1, ID).profile, Ok(ID));
        assert_eq!(admission.end_group(key(1)).unwrap().kept.len(), MAX_KEPT + 1);
        assert_eq!(keep(&admission, most + 3, 1, 1, OTHER).profile, Ok(OTHER));
    }

    #[test]
    fn a_group_expires_after_it_has_lingered() {
        let admission = admission(60);
        assert_eq!(admission.until_next_expiry(Duration::from_secs(60)), None);
        keep(&admission, 2, 1, 5, ID);
        assert!(admission.expired_groups(Duration::from_secs(3600)).is_empty());
        assert!(
            admission.until_next_expiry(Duration::from_secs(3600))
                > Some(Duration::from_secs(3000))
        );
        assert_eq!(admission.expired_groups(Duration::ZERO), [key(1)]);
    }
}

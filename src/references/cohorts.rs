//! What is known of the spans of each cohort.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::References;
use super::typical::TypicalProfile;
use crate::compare::{Breakdown, CohortHour, ComparedRow, Drift, ReferenceSet, compare};
use crate::facts::format::nanoseconds;
use crate::facts::{Facts, name_with_fields};
use crate::keep::of_route;
use crate::profile::{Compared, Profile};
use crate::stats::Counters;

/// The name of a span's cohort, as [`Facts::name`]: `GET /similar`. Spans are compared with those of the same name and the
/// same values of the fields that name the route of a request. Other shown fields, such as a customer's number, tell
/// requests of a cohort apart. Not by their rule: it can be changed, and what is typical does not depend on what is kept.
pub(crate) fn cohort_of(facts: &Facts) -> String {
    let fields = of_route(&facts.fields);
    name_with_fields(&facts.span, fields.iter().map(|(name, value)| (*name, &**value)))
}

/// What is known of the requests of a route from its reference spans; see [`Handle::routes`](crate::Handle::routes).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Route {
    /// The name of the span with the values of the fields that name the route of a request: `GET /similar`.
    pub name: String,
    /// This hour and the one before.
    pub recent: CohortHour,
    /// How much slower its requests have become, if that was found in the last day.
    pub drift: Option<Drift>,
}

/// For how many hours it is shown that a cohort has become slower, after it was said.
const HOURS_SHOWN: u64 = 24;

/// What is known of the spans of a cohort. 64 of them take at most some 20 MiB, with 200 references of 57 quantities each.
#[derive(Debug, Default)]
pub(crate) struct TypicalSpans {
    pub(crate) references: ReferenceSet,
    pub(crate) profile: TypicalProfile,
    /// The hour that has not ended, and the one before.
    pub(crate) hour: CohortHour,
    pub(crate) last_hour: CohortHour,
    /// When they were last found to have become slower.
    pub(crate) drift: Option<Drift>,
}

impl References {
    /// Adds a reference span with its profile, whose functions have names. `weight` is how many spans it represents.
    pub(crate) fn add(&self, profile: &Profile, facts: &Facts, weight: u64, now_ns: u64) {
        let (cohort, breakdown) = (cohort_of(facts), Breakdown::of(profile, facts));
        let mut cohorts = self.cohorts.lock();
        let counters = &self.counters.references;
        let known = cohorts.use_at(&cohort, now_ns, TypicalSpans::default);
        let Some((known, has_evicted)) = known else {
            return Counters::add(&counters.dropped_cohorts_full, 1);
        };
        known.references.push(&breakdown);
        known.hour.add(&breakdown, weight);
        known.profile.add(profile);
        Counters::add(&counters.added, 1);
        Counters::add(&counters.cohorts_evicted, has_evicted.into());
    }

    /// Compares the span of a profile with the reference spans of its cohort, if there are any. It should be none yet.
    pub(crate) fn compare(&self, profile: &Profile, facts: &Facts) -> Option<Compared> {
        let (cohort, breakdown) = (cohort_of(facts), Breakdown::of(profile, facts));
        let (references, typical) = {
            let cohorts = self.cohorts.lock();
            let known = cohorts.get(&cohort)?;
            (known.references.clone(), Arc::new(known.profile.mean(&cohort)))
        };
        let mut comparison = compare(&breakdown, &references);
        comparison.allow_for_unsampled(&breakdown);
        if facts.children.totals.is_empty() || facts.children.from_ns > 0 {
            // All child spans of references count. Of this one, more may be there than is known, and not less.
            let is_certain =
                |row: &ComparedRow| !row.quantity.is_of_children() || row.value.extra() > 0;
            comparison.beside.retain(is_certain);
        }
        (comparison.references > 0).then(|| Compared {
            cohort,
            span: facts.name(),
            comparison: Arc::new(comparison),
            typical,
        })
    }

    /// What was added in the hour that has not ended, by the name of the cohort.
    pub(crate) fn hour(&self) -> BTreeMap<String, CohortHour> {
        let cohorts = self.cohorts.lock();
        cohorts.iter().map(|(name, known)| (name.clone(), known.hour.clone())).collect()
    }

    /// Ends the hour, and returns what was added in it. Cohorts without any are left out.
    pub(crate) fn end_hour(&self) -> BTreeMap<String, CohortHour> {
        let mut cohorts = self.cohorts.lock();
        let hours = cohorts.iter_mut().map(|(name, known)| {
            known.last_hour = std::mem::take(&mut known.hour);
            (name.clone(), known.last_hour.clone())
        });
        hours.filter(|(_, hour)| hour.references.spans() > 0).collect()
    }

    /// Remembers which cohorts have become slower.
    pub(crate) fn note_drifts(&self, drifts: &[Drift], hour: u64) {
        for (name, known) in self.cohorts.lock().iter_mut() {
            known.drift.take_if(|drift| drift.hour + HOURS_SHOWN < hour);
            if let Some(drift) = drifts.iter().find(|drift| drift.route == *name) {
                known.drift = Some(drift.clone());
            }
        }
    }

    pub(crate) fn routes(&self) -> Vec<Route> {
        let route = |(name, known): (&String, &TypicalSpans)| {
            let mut recent = known.last_hour.clone();
            recent.merge(&known.hour);
            Route { name: name.clone(), recent, drift: known.drift.clone() }
        };
        self.cohorts.lock().iter().map(route).collect()
    }

    pub(crate) fn typical(&self, route: &str) -> Option<Profile> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let cohorts = self.cohorts.lock();
        let known = cohorts.get(route)?;
        Some(known.profile.requested(route, known.references.mean_wall_ns(), nanoseconds(now)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::compare::Quantity;
    use crate::facts::{ChildTotals, Children};
    use crate::profile::ProfileId;
    use crate::references::ReferenceLimits;

    /// A request with as many queries inside it, of which all are known or only some.
    fn facts(queries: u64, from_ns: u64) -> Facts {
        let query = ChildTotals { name: Some("query".to_owned()), ..ChildTotals::default() };
        let totals = (queries > 0).then_some(ChildTotals { count: queries, ..query });
        let children =
            Children { totals: totals.into_iter().collect(), from_ns, ..Children::default() };
        Facts { span: "request".into(), children, ..Facts::default() }
    }

    #[test]
    fn child_spans_that_may_not_all_be_known_are_compared_only_if_there_are_more() {
        let references = References::new(ReferenceLimits::NONE, Default::default(), Arc::default());
        let profile = Profile::new(ProfileId::for_test(1), 1);
        references.add(&profile, &facts(3, 0), 1, 0);
        let queries = |facts: &Facts| {
            let compared = references.compare(&profile, facts).unwrap();
            let quantity = Quantity::ChildSpans(Some("query".into()));
            let mut rows = compared.comparison.beside.clone().into_iter();
            rows.find(|row| row.quantity == quantity).map(|row| row.value.extra())
        };
        assert_eq!([queries(&facts(1, 0)), queries(&facts(214, 0))], [Some(-2), Some(211)]);
        assert_eq!([queries(&facts(0, 0)), queries(&facts(1, 5))], [None, None]);
        assert_eq!(queries(&facts(214, 5)), Some(211));
    }
}

//! Maps a callsite to the plan of its rule, without a lock.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::field::Visit;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};

use super::attribute;
use super::candidates::{Candidate, candidates};
use super::condition::boxed;
use super::fields::{Choice, FieldRules};
use super::logged_errors::LoggedErrors;
use super::percentile::{MOST_SKETCHES, Sketches};
use super::plans::{Callsite, Cohort, Plans};
use super::shown_fields::ShownFields;
use super::{Keep, Rule, Rules};
use crate::ids::hash_of;
use crate::span::{HAS_FIELDS, HAS_STATUS, JUDGES_ALLOCATIONS, Plan, SHOWS_FIELDS};
use crate::stats::Counters;
use crate::sys::Uncounted;

/// Caches what the rules decide for each callsite.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Callsites {
    /// Chains of callsites that share a hash. Metadata live forever, so nothing is removed.
    sites: Box<[Chain]>,
    /// Starts at 1 and grows whenever the rules are replaced.
    generation: AtomicU64,
    planner: Planner,
    shown_fields: ShownFields,
    plans: Plans,
    /// Some plans belong to rules that were replaced.
    has_replaced: AtomicBool,
    known: Mutex<Known>,
    /// Whether the rules in force keep nothing.
    are_off: AtomicBool,
    /// Whether a rule in force judges errors, or the attribute of a callsite seen so far does.
    judges_errors: AtomicBool,
    attribute_judges_errors: AtomicBool,
    /// Whether spans may be open whose rules were replaced and judge errors.
    replaced_judge_errors: AtomicBool,
    /// The number of [`Sketches`] of routes.
    sketches_of_routes: Arc<AtomicUsize>,
    started: Instant,
    counters: Arc<Counters>,
    pub(crate) logged_errors: LoggedErrors,
}

type Chain = OnceLock<Box<Site>>;

/// A callsite and the last decision about it. What the creation of a span reads is in one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
struct Site {
    metadata: &'static Metadata<'static>,
    /// The last generation of the rules in which no rule matched; 0 means none.
    unmatched: AtomicU64,
    matched: MatchedPlan,
    next: Chain,
    /// No other layer wants its spans: see `SelfFilter::register_callsite`.
    is_only_ours: AtomicBool,
    /// And no rule names them.
    is_declined: AtomicBool,
}

/// The last plan of a callsite, as a sequence lock. The locks of crossbeam's `AtomicCell` are shared by the whole
/// process: a child forked while one is held would wait for it forever.
#[derive(Debug, Default)]
#[repr(C)]
struct MatchedPlan {
    /// The generation of the rules for which the plan was made; 0 while there is none, or while it is replaced.
    generation: AtomicU64,
    number: AtomicU64,
    flags: AtomicU32,
    suspect_after: AtomicU64,
    sampling_delay: AtomicU64,
    long_after: AtomicU64,
    /// Only read if the rule judges allocations, as the next one.
    suspect_bytes: AtomicU64,
    suspect_allocations: AtomicU64,
}

const _: () = {
    let of_plan = std::mem::offset_of!(Site, matched);
    assert!(of_plan + std::mem::offset_of!(MatchedPlan, suspect_bytes) == 64);
};

impl MatchedPlan {
    #[inline(always)]
    fn load(&self, generation: u64) -> Option<Plan> {
        if self.generation.load(Ordering::Acquire) != generation {
            return None;
        }
        let mut plan = Plan {
            number: self.number.load(Ordering::Relaxed),
            flags: self.flags.load(Ordering::Relaxed),
            suspect_after: self.suspect_after.load(Ordering::Relaxed),
            sampling_delay: self.sampling_delay.load(Ordering::Relaxed),
            long_after: self.long_after.load(Ordering::Relaxed),
            ..Plan::default()
        };
        if plan.flags & JUDGES_ALLOCATIONS != 0 {
            plan.suspect_bytes = self.suspect_bytes.load(Ordering::Relaxed);
            plan.suspect_allocations = self.suspect_allocations.load(Ordering::Relaxed);
        }
        fence(Ordering::Acquire);
        (self.generation.load(Ordering::Relaxed) == generation).then_some(plan)
    }

    /// Only under the lock of the rules, and once per generation.
    fn store(&self, generation: u64, plan: Plan) {
        self.generation.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        self.number.store(plan.number, Ordering::Relaxed);
        self.flags.store(plan.flags, Ordering::Relaxed);
        self.suspect_after.store(plan.suspect_after, Ordering::Relaxed);
        self.sampling_delay.store(plan.sampling_delay, Ordering::Relaxed);
        self.long_after.store(plan.long_after, Ordering::Relaxed);
        self.suspect_bytes.store(plan.suspect_bytes, Ordering::Relaxed);
        self.suspect_allocations.store(plan.suspect_allocations, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Release);
    }
}

/// The state that is changed only under the lock.
#[derive(Debug)]
struct Known {
    rules: Rules,
    /// Cohorts of the rules in force, by the rule's id and the span's name.
    cohorts: HashMap<(u64, &'static str), Arc<Cohort>>,
    /// The number of the next plan. Numbers are not reused.
    next: u64,
    /// The number of the first plan that was made for the current rules.
    current: u64,
}

/// Makes the plan for spans with that `Keep`. The plan's number is set later.
pub(crate) type MakePlan = Box<dyn Fn(&Keep) -> Plan + Send + Sync>;

struct Planner(MakePlan);

impl std::fmt::Debug for Planner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Planner").finish_non_exhaustive()
    }
}

/// The field by which `tracing-opentelemetry` marks a span as failed.
pub(crate) const STATUS_FIELD: &str = "otel.status_code";

/// A power of two, and more callsites than most programs have.
const CHAINS: usize = 2048;

impl Callsites {
    pub(crate) fn new(
        rules: Rules,
        planner: MakePlan,
        shown_fields: ShownFields,
        counters: Arc<Counters>,
    ) -> Self {
        let judges_errors = AtomicBool::new(rules.judge_errors());
        Self {
            are_off: AtomicBool::new(rules.is_off()),
            judges_errors,
            attribute_judges_errors: AtomicBool::new(false),
            replaced_judge_errors: AtomicBool::new(false),
            planner: Planner(planner),
            shown_fields,
            sites: (0..CHAINS).map(|_| Chain::new()).collect(),
            generation: AtomicU64::new(1),
            plans: Plans::new(),
            has_replaced: AtomicBool::new(false),
            known: Mutex::new(Known { rules, cohorts: HashMap::new(), next: 0, current: 0 }),
            sketches_of_routes: Arc::default(),
            started: Instant::now(),
            counters,
            logged_errors: LoggedErrors::default(),
        }
    }

    /// The plan for spans from this callsite; `None` if they are not profiled.
    #[inline]
    pub(crate) fn find(&self, metadata: &'static Metadata<'static>) -> Option<Plan> {
        let site = self.site(metadata)?;
        let decided = site.decided(self.generation.load(Ordering::Relaxed));
        decided.unwrap_or_else(|| self.decide(site))
    }

    #[inline(always)]
    fn site(&self, metadata: &'static Metadata<'static>) -> Option<&Site> {
        let mut chain = self.chain(std::ptr::from_ref(metadata).addr())?;
        loop {
            let site = chain.get_or_init(|| {
                let _uncounted = Uncounted::begin();
                Box::new(Site::new(metadata))
            });
            if std::ptr::eq(site.metadata, metadata) {
                return Some(site);
            }
            chain = &site.next;
        }
    }

    /// Whether spans of that callsite may be profiled, or its events may make a span fail. What is neither a span nor an
    /// event only asks whether something is enabled, as `tracing::enabled!` does, usually before an event.
    pub(crate) fn wants(&self, metadata: &Metadata<'_>) -> bool {
        if !metadata.is_span() {
            return *metadata.level() == Level::ERROR && self.judge_errors();
        }
        let site = self.known_site(metadata);
        let decided = site.and_then(|site| site.decided(self.generation.load(Ordering::Relaxed)));
        match (decided, site) {
            (Some(plan), _) => plan.is_some(),
            (None, Some(site)) => self.decide(site).is_some(),
            // Not a static: nothing can be cached.
            (None, None) => {
                let rules = &self.known.lock().rules;
                !rules.is_off() && candidates(metadata, rules).iter().any(Candidate::keeps)
            }
        }
    }

    /// Like [`wants`](Self::wants), for a callsite that may be new. Also whether errors are judged because of it, and were
    /// not before.
    pub(crate) fn register(&self, metadata: &'static Metadata<'static>) -> (bool, bool) {
        if !metadata.is_span() {
            return (self.wants(metadata), false);
        }
        let is_wanted = self.find(metadata).is_some();
        let judges_errors =
            is_wanted && attribute::keep_of(metadata).is_some_and(|keep| keep.judges_errors());
        let is_news = judges_errors
            && !self.attribute_judges_errors.swap(true, Ordering::Relaxed)
            && !self.judges_errors.load(Ordering::Relaxed);
        (is_wanted, is_news)
    }

    /// Whether the rules want spans of that callsite, whatever other layers do. Only then these may be asked: their answer
    /// is replaced by the one of this layer.
    pub(crate) fn may_want(&self, metadata: &'static Metadata<'static>) -> bool {
        if attribute::is_on(metadata) {
            return metadata.is_span() && self.find(metadata).is_some();
        }
        let known = self.known.lock();
        metadata.is_span() && candidates(metadata, &known.rules).iter().any(|one| one.keeps())
    }

    /// Whether spans of that callsite are profiled only if another layer wants them: rules that name neither them nor their
    /// level match.
    fn follow_others(&self, metadata: &Metadata<'_>) -> bool {
        if attribute::is_on(metadata) {
            return false;
        }
        let known = self.known.lock();
        let candidates = candidates(metadata, &known.rules);
        let mut keeping = candidates.iter().filter(|one| one.keeps()).peekable();
        keeping.peek().is_some() && keeping.all(|one| one.rule.names_nothing())
    }

    /// Whether no other layer wants spans of that callsite, as stated.
    pub(crate) fn is_only_ours(&self, metadata: &Metadata<'_>) -> bool {
        self.known_site(metadata).is_some_and(|site| site.is_only_ours.load(Ordering::Relaxed))
    }

    /// States whether no other layer wants spans of that callsite, which may [follow others](Self::follow_others).
    pub(crate) fn set_only_ours(&self, metadata: &'static Metadata<'static>, is_only_ours: bool) {
        let Some(site) = self.site(metadata) else { return };
        site.is_only_ours.store(is_only_ours, Ordering::Relaxed);
        let is_declined = is_only_ours && self.follow_others(metadata);
        if site.is_declined.swap(is_declined, Ordering::Relaxed) != is_declined {
            // Decided anew, unless it is declined.
            let unmatched = if is_declined { self.generation() } else { 0 };
            site.unmatched.store(unmatched, Ordering::Relaxed);
            Counters::add(&self.counters.rules.declined, u64::from(is_declined));
        }
    }

    /// The callsites that are declined for that reason, and rules under which the first one is not.
    pub(crate) fn declined(&self) -> (Vec<&'static Metadata<'static>>, String) {
        let chain = |first| std::iter::successors(Chain::get(first), |site| site.next.get());
        let sites = self.sites.iter().flat_map(chain);
        let declined: Vec<_> = sites
            .filter(|site| site.is_declined.load(Ordering::Relaxed))
            .map(|site| site.metadata)
            .collect();
        let known = self.known.lock();
        let for_all = known.rules.iter().rfind(|rule| rule.names_nothing());
        let named = declined.first().zip(for_all).map(|(metadata, rule)| {
            format!("{},{}", known.rules, Rule::for_target(metadata.target(), rule.keep))
        });
        (declined, named.unwrap_or_default())
    }

    fn judge_errors(&self) -> bool {
        self.judges_errors.load(Ordering::Relaxed)
            || self.replaced_judge_errors.load(Ordering::Relaxed)
            || self.attribute_judges_errors.load(Ordering::Relaxed) && !self.are_off()
    }

    /// The highest level of spans and events that the rules in force enable.
    pub(crate) fn max_level(&self) -> LevelFilter {
        let of_rules = self.known.lock().rules.enabled_level();
        if self.judge_errors() { of_rules.max(LevelFilter::ERROR) } else { of_rules }
    }

    /// The callsite, if it has been seen.
    #[inline]
    fn known_site(&self, metadata: &Metadata<'_>) -> Option<&Site> {
        let mut chain = self.chain(std::ptr::from_ref(metadata).addr())?;
        loop {
            let site = chain.get()?;
            if std::ptr::addr_eq(site.metadata, metadata) {
                return Some(site);
            }
            chain = &site.next;
        }
    }

    #[inline(always)]
    fn chain(&self, address: usize) -> Option<&Chain> {
        // Metadata are statics of some hundred bytes, so the lowest bits of the address carry little information.
        let hash = (address >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as usize) >> 20;
        self.sites.get(hash % CHAINS)
    }

    pub(crate) fn shown_fields(&self) -> &ShownFields {
        &self.shown_fields
    }

    /// The callsite and rule behind a plan's number.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<Callsite>> {
        self.plans.get(number)
    }

    /// Calls `used` with the same, for a hook: see [`Plans::get_here`].
    pub(crate) fn get_here<T>(
        &self,
        number: u64,
        used: impl FnOnce(&Callsite) -> Option<T>,
    ) -> Option<T> {
        self.plans.get_here(number, used)
    }

    /// The plan of a new span by its field values, if the rules for its callsite depend on them.
    pub(crate) fn choose(
        &self,
        number: u64,
        record: impl FnOnce(&mut dyn Visit),
    ) -> Option<(Plan, u64)> {
        self.choose_by(number, |fields| fields.choose(record))
    }

    /// The same for an open span of which more values are recorded. `bits` is what was known of its values.
    pub(crate) fn choose_again(
        &self,
        number: u64,
        bits: u64,
        record: impl FnOnce(&mut dyn Visit),
    ) -> Option<(Plan, u64)> {
        self.choose_by(number, |fields| Some(fields.choose_again(bits, record)))
    }

    fn choose_by(
        &self,
        number: u64,
        choose: impl FnOnce(&FieldRules) -> Option<Choice>,
    ) -> Option<(Plan, u64)> {
        let choice = self.get_here(number, |site| choose(site.fields.as_ref()?))?;
        let plan = self.get_here(choice.number, |site| Some(site.plan))?;
        Some((plan, choice.bits))
    }

    /// Whether a new span with that plan is the one in *n* that is kept.
    pub(crate) fn is_chosen(&self, number: u64) -> bool {
        self.get_here(number, |site| Some(site.is_chosen())).unwrap_or(false)
    }

    /// The shortest `sampling_delay` of all plans, in ticks, except of those that sample from the enter.
    pub(crate) fn least_age(&self) -> u64 {
        self.plans.least_age.load(Ordering::Relaxed)
    }

    /// The shortest time after which an open span may have to be kept; `None` if no rule asks for that.
    pub(crate) fn least_limit(&self) -> Option<Duration> {
        let limit_ns = self.plans.least_limit_ns.load(Ordering::Relaxed);
        (limit_ns != u64::MAX).then(|| Duration::from_nanos(limit_ns))
    }

    /// Whether no new span is profiled.
    pub(crate) fn are_off(&self) -> bool {
        self.are_off.load(Ordering::Relaxed)
    }

    /// Whether a rule has conditions on allocations.
    pub(crate) fn judge_allocations(&self) -> bool {
        self.known.lock().rules.iter().any(|rule| rule.keep.judges_allocations())
    }

    /// New spans are judged by these rules from now on. Open spans keep theirs.
    pub(crate) fn replace(&self, rules: Rules) {
        let judged_errors = self.judge_errors();
        let mut known = self.known.lock();
        let in_force: HashSet<_> = rules.iter().map(hash_of).collect();
        known.cohorts.retain(|(rule, _), cohort| {
            let stays = in_force.contains(rule);
            if !stays {
                cohort.sketches.iter().for_each(Sketches::forget);
            }
            stays
        });
        known.cohorts.shrink_to_fit();
        if judged_errors && known.next > 0 {
            self.replaced_judge_errors.store(true, Ordering::Relaxed);
        }
        self.judges_errors.store(rules.judge_errors(), Ordering::Relaxed);
        self.are_off.store(rules.is_off(), Ordering::Relaxed);
        known.rules = rules;
        known.current = known.next;
        self.generation.fetch_add(1, Ordering::Release);
        self.has_replaced.store(known.next > 0, Ordering::Relaxed);
    }

    /// Grows whenever the rules are replaced.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Whether [`sweep`](Self::sweep) may have something to do.
    pub(crate) fn has_replaced(&self) -> bool {
        self.has_replaced.load(Ordering::Relaxed)
    }

    /// Drops the plans of replaced rules that two sweeps in a row did not find in use, by an open span or by the
    /// collector.
    ///
    /// A hook that has found a plan but not yet opened its span is not visible here. If it stays there for two sweeps,
    /// its span is not judged. Returns whether errors were judged only for spans of replaced rules, and now are not.
    pub(crate) fn sweep(&self, in_use: &HashSet<u64>) -> bool {
        let has_replaced = {
            let known = self.known.lock();
            let has_replaced = self.plans.sweep(known.current, in_use);
            self.has_replaced.store(has_replaced, Ordering::Relaxed);
            has_replaced
        };
        !has_replaced
            && self.replaced_judge_errors.swap(false, Ordering::Relaxed)
            && !self.judge_errors()
    }

    /// Whether a span with that wall time took longer than the percentile of its rule, among the spans of the same route,
    /// of which `route` returns a hash.
    pub(crate) fn is_rare(
        &self,
        callsite: &Callsite,
        route: impl FnOnce() -> Option<u64>,
        wall_ns: u64,
    ) -> bool {
        let sketches = callsite.cohort.as_ref().and_then(|cohort| cohort.sketches.as_ref());
        sketches.is_some_and(|sketches| sketches.add(route(), wall_ns, self.now_ns()))
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    #[cold]
    fn decide(&self, site: &Site) -> Option<Plan> {
        let _uncounted = Uncounted::begin();
        // Read under the lock, so that the rules belong to this generation.
        let mut known = self.known.lock();
        let generation = self.generation();
        if let Some(plan) = site.decided(generation) {
            return plan;
        }
        let is_declined = site.is_declined.load(Ordering::Relaxed);
        let plan = (!is_declined).then(|| self.plan(site.metadata, &mut known)).flatten();
        match plan {
            Some(plan) => site.matched.store(generation, plan),
            None => site.unmatched.store(generation, Ordering::Relaxed),
        }
        plan
    }

    /// Makes a plan for each rule that may decide, and returns the initial one.
    fn plan(&self, metadata: &'static Metadata<'static>, known: &mut Known) -> Option<Plan> {
        let Known { rules, cohorts, next, .. } = known;
        let candidates = candidates(metadata, rules);
        let (sure, plan_by_values) = match candidates.split_last() {
            Some((last, rest)) if !last.rule.needs_values() => (Some(last), rest),
            _ => (None, candidates.as_slice()),
        };
        let sure = sure.filter(|one| one.keeps());
        if rules.is_off() || (sure.is_none() && !plan_by_values.iter().any(Candidate::keeps)) {
            return None;
        }
        let first = *next;
        let mut planned = Vec::new();
        let mut number = |candidate| {
            planned.push(candidate);
            *next += 1;
            *next - 1
        };
        let tests: Vec<_> = plan_by_values
            .iter()
            .map(|one| (one.rule, Some(one).filter(|one| one.keeps()).map(|one| number(Some(one)))))
            .collect();
        let otherwise = sure.map(|sure| number(Some(sure)));
        // Also needed if a value can mean `off`.
        let waiting = (!tests.is_empty()).then(|| number(None));
        let fields = waiting.map(|waiting| {
            let fields = FieldRules::new(metadata, &tests, otherwise, waiting);
            Counters::add(&self.counters.rules.skipped, fields.left_out());
            Arc::new(fields)
        });
        let sketches = cohorts.values().filter_map(|cohort| cohort.sketches.as_ref());
        let has_room = sketches.filter(|sketches| sketches.is_in_use()).count() < MOST_SKETCHES;
        let shows_fields = self.shown_fields.is_any_of(metadata);
        for (number, candidate) in (first..).zip(planned) {
            let keep = candidate.map_or(Keep::NEVER, Candidate::keep);
            let id = candidate.map_or(0, |candidate| candidate.id);
            let plan = self.planner.0(keep);
            let has_status = metadata.fields().field(STATUS_FIELD).is_some();
            let status = if has_status { HAS_STATUS } else { 0 };
            let values = if fields.is_some() { HAS_FIELDS } else { 0 };
            let shown = if shows_fields { SHOWS_FIELDS } else { 0 };
            let plan = Plan { number, flags: plan.flags | status | values | shown, ..plan };
            let ns = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
            self.plans.insert(Callsite {
                metadata,
                keep: boxed(keep),
                rule: id,
                plan,
                hung_ns: keep.hung_limit().map(ns),
                open_ns: keep.open_limit().map(ns),
                fields: fields.clone(),
                cohort: self.cohort((id, metadata.name()), keep, has_room, cohorts),
                first,
                text: OnceLock::new(),
                was_unused: AtomicBool::new(false),
            });
        }
        Some(self.get(otherwise.or(waiting)?)?.plan)
    }

    fn cohort(
        &self,
        key: (u64, &'static str),
        keep: &Keep,
        has_room: bool,
        cohorts: &mut HashMap<(u64, &'static str), Arc<Cohort>>,
    ) -> Option<Arc<Cohort>> {
        if let Some(known) = cohorts.get(&key) {
            return Some(Arc::clone(known));
        }
        let sketches =
            |millionths| Sketches::new(millionths, &self.sketches_of_routes, &self.counters);
        let sketches = keep.percentile().map(sketches);
        if sketches.is_some() && !has_room {
            Counters::add(&self.counters.rules.percentiles_dropped, 1);
            return Some(Arc::new(Cohort::new(None)));
        }
        let is_needed = sketches.is_some() || keep.one_in().is_some();
        is_needed.then(|| {
            let new = Arc::new(Cohort::new(sketches));
            Arc::clone(cohorts.entry(key).or_insert(new))
        })
    }
}

impl Site {
    fn new(metadata: &'static Metadata<'static>) -> Self {
        let (unmatched, matched) = (AtomicU64::new(0), MatchedPlan::default());
        Self {
            metadata,
            unmatched,
            matched,
            next: Chain::new(),
            is_only_ours: AtomicBool::new(false),
            is_declined: AtomicBool::new(false),
        }
    }

    /// The plan under the rules of that generation, or `None` if it is not decided yet.
    #[inline(always)]
    fn decided(&self, generation: u64) -> Option<Option<Plan>> {
        // A single word, because unmatched spans must cost nothing.
        if self.unmatched.load(Ordering::Relaxed) == generation {
            return Some(None);
        }
        self.matched.load(generation).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Condition, Rule};
    use super::*;

    fn callsites(rules: Rules) -> Callsites {
        let plan = |keep: &Keep| Plan {
            suspect_after: keep.shortest().map_or(u64::MAX, |latency| latency.as_nanos() as u64),
            sampling_delay: 0,
            long_after: 0,
            ..Plan::default()
        };
        Callsites::new(rules, Box::new(plan), ShownFields::default(), Arc::default())
    }

    fn metadata_of(span: &tracing::Span) -> &'static Metadata<'static> {
        span.metadata().expect("enabled by the registry")
    }

    fn with_spans(test: impl FnOnce()) {
        tracing::subscriber::with_default(tracing_subscriber::registry(), test);
    }

    #[test]
    fn spans_are_wanted_up_to_the_level_of_their_rule() {
        with_spans(|| {
            let info = metadata_of(&tracing::info_span!("info"));
            let debug = metadata_of(&tracing::debug_span!("debug", tenant = 1));
            let trace = metadata_of(&tracing::trace_span!("trace", tenant = 1));
            let all = [info, debug, trace];
            for (rules, expected, max_level) in [
                ("250ms", [true, true, false], LevelFilter::INFO),
                ("250ms|level<=debug", [true, true, false], LevelFilter::DEBUG),
                ("250ms|level<=info", [true, false, false], LevelFilter::INFO),
                ("250ms|level<=error", [false, false, false], LevelFilter::INFO),
                ("250ms|level<=trace", [true, true, true], LevelFilter::TRACE),
                ("[trace]=1s", [false, false, true], LevelFilter::TRACE),
                ("[{tenant=1}]=1s", [false, true, true], LevelFilter::TRACE),
                ("[{tenant=1}]=1s|level<=debug", [false, true, false], LevelFilter::DEBUG),
                ("250ms,[info]=off", [false, true, false], LevelFilter::INFO),
                // The most specific rule decides, also about the level.
                ("250ms,tracing_profiling=1s|level<=info", [true, false, false], LevelFilter::INFO),
                ("[trace]=1s|level<=info", [false, false, false], LevelFilter::INFO),
                ("off", [false, false, false], LevelFilter::OFF),
            ] {
                let callsites = callsites(rules.parse().unwrap());
                // Without and with what is known of the callsites.
                assert_eq!(all.map(|one| callsites.wants(one)), expected, "{rules}");
                assert_eq!(all.map(|one| callsites.register(one).0), expected, "{rules}");
                assert_eq!(all.map(|one| callsites.wants(one)), expected, "{rules}");
                assert_eq!(callsites.max_level(), max_level, "{rules}");
                callsites.replace(Rules::new([]));
                assert_eq!(all.map(|one| callsites.wants(one)), [false; 3], "{rules}");
                assert_eq!(callsites.max_level(), LevelFilter::OFF, "{rules}");
                callsites.replace(rules.parse().unwrap());
                assert_eq!(all.map(|one| callsites.wants(one)), expected, "{rules}");
            }
        });
    }

    #[test]
    fn spans_of_infrastructure_are_wanted_if_a_rule_names_them() {
        with_spans(|| {
            let connection = metadata_of(&tracing::info_span!(target: "h2::client", "Connection"));
            let task = metadata_of(&tracing::info_span!(target: "tokio::task", "runtime.spawn"));
            let similar = metadata_of(&tracing::info_span!(target: "tokio_postgres", "query"));
            for (rules, expected) in [
                ("250ms", [false, false, true]),
                ("250ms,h2=1s", [true, false, true]),
                ("250ms,[runtime.spawn]=1s", [false, true, true]),
                ("tokio=1s", [false, true, true]),
                ("250ms,h2::client=off", [false, false, true]),
            ] {
                let callsites = callsites(rules.parse().unwrap());
                let wanted = [connection, task, similar].map(|one| callsites.wants(one));
                assert_eq!(wanted, expected, "{rules}");
            }
        });
    }

    #[test]
    fn errors_are_wanted_while_they_can_make_a_span_fail() {
        with_spans(|| {
            let metadata = |level| {
                let span = metadata_of(&tracing::info_span!("any"));
                let fields = tracing::field::FieldSet::new(&[], span.callsite());
                let kind = tracing::metadata::Kind::EVENT;
                Metadata::new("event", "any", level, None, None, None, fields, kind)
            };
            let (error, warn) = (metadata(Level::ERROR), metadata(Level::WARN));
            for (rules, expected) in
                [("error", true), ("250ms", false), ("off", false), ("250ms,[x]=error=self", true)]
            {
                let callsites = callsites(rules.parse().unwrap());
                assert_eq!(callsites.wants(&error), expected, "{rules}");
                assert!(!callsites.wants(&warn), "{rules}");
            }
            // The attribute of a callsite that is seen later.
            let callsites = callsites("250ms".parse().unwrap());
            let attribute =
                metadata_of(&tracing::info_span!("a", "tracing_profiling on_error" = 0));
            assert_eq!(callsites.register(attribute), (true, true));
            assert_eq!(callsites.register(attribute), (true, false));
            assert!(callsites.wants(&error));
            // A span that is open when the rules are replaced can still fail.
            let open = metadata_of(&tracing::info_span!("open"));
            let callsites = self::callsites("error".parse().unwrap());
            let number = callsites.find(open).unwrap().number;
            callsites.replace(Rules::new([]));
            for _ in 0..3 {
                assert!(!callsites.sweep(&HashSet::from([number])));
                assert!(callsites.wants(&error));
                assert_eq!(callsites.max_level(), LevelFilter::ERROR);
            }
            let ends = [callsites.sweep(&HashSet::new()), callsites.sweep(&HashSet::new())];
            assert!(ends[1] && !callsites.wants(&error));
            assert_eq!(callsites.max_level(), LevelFilter::OFF);
        });
    }

    #[test]
    fn gives_each_callsite_the_plan_of_its_rule() {
        with_spans(|| {
            let slow = metadata_of(&tracing::info_span!(target: "slow", "a"));
            let fast = metadata_of(&tracing::info_span!(target: "fast", "a"));
            let off = metadata_of(&tracing::info_span!(target: "off", "a"));
            let none = metadata_of(&tracing::info_span!(target: "none", "a"));
            let callsites = callsites(Rules::new([
                Rule::for_target("slow", Keep::slower_than(Duration::from_nanos(9))),
                Rule::for_target("fast", Keep::slower_than(Duration::from_nanos(3))),
                Rule::for_target("off", Keep::never()),
            ]));
            for _ in 0..2 {
                let plan = callsites.find(slow).unwrap();
                assert_eq!(plan.suspect_after, 9);
                let callsite = callsites.get(plan.number).unwrap();
                assert_eq!(
                    (callsite.metadata.target(), callsite.keep.to_string().as_str()),
                    ("slow", "9ns")
                );
                assert_eq!(callsite.plan.number, plan.number);
                assert_eq!(callsites.find(fast).unwrap().suspect_after, 3);
                assert!(callsites.find(off).is_none());
                assert!(callsites.find(none).is_none());
            }
        });
    }

    #[test]
    fn an_attribute_overrides_the_default_but_not_a_directive_that_names_it() {
        with_spans(|| {
            let span = |target| match target {
                "named" => tracing::info_span!(
                    target: "named", "a", "tracing_profiling threshold_ns=7" = tracing::field::Empty
                ),
                _ => tracing::info_span!(
                    "a",
                    "tracing_profiling threshold_ns=7" = tracing::field::Empty
                ),
            };
            let (named, plain) = (metadata_of(&span("named")), metadata_of(&span("")));
            let says_nothing =
                metadata_of(&tracing::info_span!("b", "tracing_profiling" = tracing::field::Empty));
            let off = metadata_of(&tracing::info_span!(
                "c",
                "tracing_profiling off" = tracing::field::Empty
            ));
            let nanos = |ns| Keep::slower_than(Duration::from_nanos(ns));
            let rules = [Rule::for_all(nanos(100)), Rule::for_target("named", nanos(50))];
            let [for_all, of_target] = rules.each_ref().map(hash_of);
            let callsites = callsites(Rules::new(rules));
            let seen = |metadata| {
                let plan = callsites.find(metadata)?;
                let rule = callsites.get(plan.number)?.rule;
                Some((plan.suspect_after, rule))
            };
            assert_eq!(seen(named), Some((50, of_target)));
            let (suspect_after, rule) = seen(plain).unwrap();
            assert_eq!(suspect_after, 7);
            assert!(![for_all, of_target].contains(&rule), "the attribute is a rule of its own");
            assert_eq!(seen(says_nothing), Some((100, for_all)));
            assert_eq!(seen(off), None);
        });
    }

    #[test]
    fn callsites_that_share_a_hash_are_distinguished() {
        with_spans(|| {
            let real = metadata_of(&tracing::info_span!("real"));
            let copy = || {
                let (name, target) = (real.name(), real.target());
                let fields = tracing::field::FieldSet::new(&[], real.callsite());
                let kind = tracing::metadata::Kind::SPAN;
                let level = tracing::Level::INFO;
                Metadata::new(name, target, level, None, None, None, fields, kind)
            };
            let many: &'static [_] =
                Vec::leak((0..3 * CHAINS).map(|_| copy()).collect::<Vec<Metadata<'static>>>());
            let callsites = callsites(Rules::default());
            let find = || many.iter().map(|one| callsites.find(one).unwrap().number);
            let numbers: Vec<_> = find().collect();
            assert_eq!(numbers.iter().collect::<HashSet<_>>().len(), many.len());
            assert_eq!(find().collect::<Vec<_>>(), numbers);
        });
    }

    #[test]
    fn counts_of_a_rule_continue_while_it_is_in_force() {
        with_spans(|| {
            let span = metadata_of(&tracing::info_span!("a"));
            let third = || Rule::for_all(Keep::when(Condition::OneIn(3.try_into().unwrap())));
            let with = |ns| {
                let other = Rule::for_target("x", Keep::slower_than(Duration::from_nanos(ns)));
                Rules::new([third(), other])
            };
            let callsites = callsites(with(0));
            let find = || callsites.get(callsites.find(span)?.number);
            let chosen: Vec<_> = (1..7)
                .map(|ns| {
                    let is_chosen = find().unwrap().is_chosen();
                    callsites.replace(with(ns));
                    is_chosen
                })
                .collect();
            assert_eq!(chosen, [false, false, true, false, false, true]);
            let id = find().unwrap().rule;
            assert!(!find().unwrap().is_chosen());
            callsites.replace(Rules::new([]));
            assert!(find().is_none());
            callsites.replace(with(0));
            assert_eq!(find().unwrap().rule, id);
            assert!(!find().unwrap().is_chosen() && !find().unwrap().is_chosen());
        });
    }

    #[test]
    fn plans_of_rules_that_were_replaced_are_dropped_unless_they_are_in_use() {
        with_spans(|| {
            let spans = [
                tracing::info_span!("a", tenant = 1),
                tracing::info_span!("b", tenant = 1),
                tracing::info_span!("c"),
            ];
            let spans = spans.each_ref().map(metadata_of);
            let rules = |set: u64| {
                let nanos = |ns| Keep::slower_than(Duration::from_nanos(ns));
                let by_value = move |value: u64| {
                    Rule::for_all(nanos(9 + set)).with_field_value("tenant", value.to_string())
                };
                let percentile =
                    Condition::Percentile { millionths: 990_000, floor: Duration::ZERO };
                let open = Condition::Open(Duration::from_secs(1 + set));
                let rule = Rule::for_all(nanos(1 + set).or(percentile).or(open));
                Rules::new((0..20).map(|value| by_value(set * 20 + value)).chain([rule]))
            };
            let callsites = callsites(rules(0));
            let open = callsites.find(spans[0]).unwrap().number;
            let count = || (callsites.plans.count(), callsites.known.lock().cohorts.len());
            let in_use = HashSet::from([open]);
            let mut most = (0, 0);
            for set in 1..200 {
                callsites.replace(rules(set));
                let found = spans.map(|span| callsites.find(span).unwrap());
                for plan in found {
                    assert_eq!(plan.suspect_after, 1 + set);
                    assert!(callsites.get(plan.number).unwrap().keep.shortest().is_some());
                }
                assert!(callsites.has_replaced());
                callsites.sweep(&in_use);
                if set == 20 {
                    most = count();
                }
                assert!(set < 20 || count() == most, "{set}: {:?}", count());
            }
            let first = callsites.get(open).unwrap();
            assert_eq!((first.metadata.name(), first.plan.suspect_after), ("a", 1));
            // The plans that its values may select are kept as well.
            let tenant = spans[0].fields().field("tenant").unwrap();
            let fields = first.fields.as_ref().unwrap();
            let chosen = fields.choose(|visit| visit.record_u64(&tenant, 7)).unwrap();
            assert_eq!(callsites.get(chosen.number).unwrap().plan.suspect_after, 9);
            assert!(callsites.has_replaced());
            assert_eq!(callsites.least_limit(), Some(Duration::from_secs(1)));
            callsites.sweep(&HashSet::new());
            assert!(
                callsites.has_replaced() && callsites.get(open).is_some(),
                "a hook may have it"
            );
            callsites.sweep(&HashSet::new());
            assert!(!callsites.has_replaced() && callsites.get(open).is_none());
            assert!(callsites.least_limit() > Some(Duration::from_secs(1)));
        });
    }

    #[test]
    fn rules_with_values_are_tried_before_those_without() {
        with_spans(|| {
            let span = metadata_of(&tracing::info_span!("a", tenant = 1, other = 2));
            let without = metadata_of(&tracing::info_span!("a"));
            let nanos = |ns| Keep::slower_than(Duration::from_nanos(ns));
            let callsites = callsites(Rules::new([
                Rule::for_span("a", nanos(8)).with_field("other"),
                Rule::for_span("a", nanos(9)).with_field_value("tenant", "1"),
                Rule::for_all(nanos(7)),
            ]));
            let base = callsites.find(span).unwrap();
            assert_eq!((base.suspect_after, base.flags & HAS_FIELDS), (8, HAS_FIELDS));
            let tenant = span.fields().field("tenant").unwrap();
            let site = callsites.get(base.number).unwrap();
            let fields = site.fields.as_ref().unwrap();
            let chosen = fields.choose(|visit| visit.record_u64(&tenant, 1)).unwrap();
            assert_eq!(callsites.get(chosen.number).unwrap().plan.suspect_after, 9);
            assert_eq!(fields.choose(|_| {}).unwrap().number, base.number);
            let plain = callsites.find(without).unwrap();
            assert_eq!((plain.suspect_after, plain.flags & HAS_FIELDS), (7, 0));
        });
    }
}

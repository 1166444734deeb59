//! Maps a callsite to the plan of its rule, without a lock.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::field::Visit;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};

use super::candidates::{Candidate, candidates, has_attribute, stated_by};
use super::condition::boxed;
use super::fields::FieldRules;
use super::logged_errors::{BySpan, LoggedError};
use super::percentile::{HistogramCounts, WallHistograms};
use super::plan::{PlanSettings, plan};
use super::plans::{Callsite, CompiledRule, Plans};
use super::shown_fields::ShownFields;
use super::{Keep, Rule, Rules};
use crate::error::Error;
use crate::export::InvalidSetting;
use crate::facts::format::nanoseconds;
use crate::ids::hash_of;
use crate::span::{HAS_FIELDS, HAS_STATUS, Plan, SHOWS_FIELDS};
use crate::stats::Counters;
use crate::sys::SuspendCounting;

/// Caches what the rules decide for each callsite.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Callsites {
    /// Chains of callsites that share a hash. Metadata live forever, so nothing is removed.
    sites: Box<[Chain]>,
    plans: Plans,
    settings: PlanSettings,
    pub(crate) shown_fields: ShownFields,
    generation: AtomicU64,
    known: Mutex<Known>,
    are_off: AtomicBool,
    /// Whether a rule judges errors, or the attribute of a callsite that was seen, or one ever did: spans that are open when
    /// the rules are replaced can still fail.
    judges_errors: AtomicBool,
    histogram_counts: Arc<HistogramCounts>,
    started: Instant,
    counters: Arc<Counters>,
    pub(crate) logged_errors: BySpan<LoggedError>,
    /// When responses were ready, in ticks; `None` where several were.
    pub(crate) answered: BySpan<Option<u64>>,
}

type Chain = OnceLock<Box<Site>>;

/// A callsite and the last decision about it.
#[derive(Debug)]
#[repr(C, align(64))]
struct Site {
    metadata: &'static Metadata<'static>,
    /// The number of its plan, or one of those below. A single word, because unmatched spans must cost nothing.
    decided: AtomicU64,
    next: Chain,
    /// No other layer wants its spans: see `SelfFilter::register_callsite`.
    is_only_ours: AtomicBool,
    /// And no rule names them.
    is_declined: AtomicBool,
}

const UNDECIDED: u64 = 0;
const UNMATCHED: u64 = 1;
const FIRST_NUMBER: u64 = 2;

/// The state that is changed only under the lock.
#[derive(Debug)]
struct Known {
    rules: Rules,
    /// All rule sets that were ever in force, by hashes: what was compiled for one serves it again.
    sets: HashSet<u64>,
    compiled: Compiled,
}

#[derive(Debug, Default)]
struct Compiled {
    rules: HashMap<u64, Arc<CompiledRule>>,
    /// The number of the initial plan, by a hash of a callsite and the ids of the rules that may decide for it.
    initial: HashMap<u64, u64>,
    /// By the rule's id and the span's name, of rules with a percentile.
    histograms: HashMap<(u64, &'static str), Arc<WallHistograms>>,
    /// How many plans there are. Each has a number, which is not reused.
    plans: u64,
    bytes: usize,
}

/// What compiled rules take, about. Beyond that, only rule sets can be put in force that were before.
const MAX_BYTES: usize = 32 << 20;
/// A plan, with its part of places that are still empty; a rule; and a test of values.
const PLAN_BYTES: usize = 2 * size_of::<Callsite>();
const RULE_BYTES: usize = size_of::<CompiledRule>() + size_of::<Keep>();
const TEST_BYTES: usize = 256;

fn set_of(rules: &Rules) -> u64 {
    hash_of(rules.iter().map(hash_of).collect::<Vec<_>>())
}

/// The field by which `tracing-opentelemetry` marks a span as failed.
pub(crate) const STATUS_FIELD: &str = "otel.status_code";

/// A power of two, and more callsites than most programs have.
const CHAINS: usize = 2048;

impl Callsites {
    pub(crate) fn new(
        rules: Rules,
        settings: PlanSettings,
        shown_fields: ShownFields,
        counters: Arc<Counters>,
    ) -> Self {
        let judges_errors = AtomicBool::new(rules.judge_errors());
        Self {
            are_off: AtomicBool::new(rules.is_off()),
            judges_errors,
            settings,
            shown_fields,
            sites: (0..CHAINS).map(|_| Chain::new()).collect(),
            plans: Plans::new(),
            generation: AtomicU64::new(0),
            known: Mutex::new(Known {
                // Those that switch profiling off, and on again.
                sets: [&rules, &Rules::new([]), &Rules::default()].map(set_of).into(),
                rules,
                compiled: Compiled::default(),
            }),
            histogram_counts: Arc::default(),
            started: Instant::now(),
            counters,
            logged_errors: BySpan::default(),
            answered: BySpan::default(),
        }
    }

    /// One for which ticks are nanoseconds, and spans are sampled from their enter on.
    #[cfg(test)]
    pub(crate) fn for_test(rules: Rules) -> Self {
        let (sampling_delay, long_after) = (Some(Duration::ZERO), None);
        let settings = PlanSettings { ticks_a_second: 1_000_000_000, sampling_delay, long_after };
        Self::new(rules, settings, ShownFields::default(), Arc::default())
    }

    /// The rule for spans from this callsite; `None` if they are not profiled.
    #[inline]
    pub(crate) fn find(&self, metadata: &'static Metadata<'static>) -> Option<&Callsite> {
        self.decided(self.site(metadata)?)
    }

    #[inline(always)]
    fn decided(&self, site: &Site) -> Option<&Callsite> {
        match site.decided.load(Ordering::Relaxed) {
            UNMATCHED => None,
            UNDECIDED => self.decide(site),
            // The number may be visible before what it leads to.
            number => self.plans.get(number).or_else(|| self.decide(site)),
        }
    }

    #[inline(always)]
    fn site(&self, metadata: &'static Metadata<'static>) -> Option<&Site> {
        let new = || {
            let _uncounted = SuspendCounting::begin();
            Box::new(Site {
                metadata,
                decided: AtomicU64::new(UNDECIDED),
                next: Chain::new(),
                is_only_ours: AtomicBool::new(false),
                is_declined: AtomicBool::new(false),
            })
        };
        self.find_site(metadata, |chain| Some(chain.get_or_init(new).as_ref()))
    }

    /// Whether spans of that callsite may be profiled, or its events may make a span fail. What is neither a span nor an
    /// event only asks whether something is enabled, as `tracing::enabled!` does, usually before an event.
    pub(crate) fn wants(&self, metadata: &Metadata<'_>) -> bool {
        if !metadata.is_span() {
            return *metadata.level() == Level::ERROR && self.judges_errors.load(Ordering::Relaxed);
        }
        match self.known_site(metadata) {
            Some(site) => self.decided(site).is_some(),
            // Not a static: nothing can be cached.
            None => {
                let rules = &self.known.lock().rules;
                !rules.is_off() && candidates(metadata, rules).iter().any(Candidate::keeps)
            }
        }
    }

    /// Like [`wants`](Self::wants), for a callsite that may be new. Also whether errors are judged only because of it.
    pub(crate) fn register(&self, metadata: &'static Metadata<'static>) -> (bool, bool) {
        if !metadata.is_span() {
            return (self.wants(metadata), false);
        }
        let is_wanted = self.find(metadata).is_some();
        let judges_errors =
            is_wanted && stated_by(metadata).is_some_and(|keep| keep.judges_errors());
        (is_wanted, judges_errors && !self.judges_errors.swap(true, Ordering::Relaxed))
    }

    /// Whether the rules want spans of that callsite, whatever other layers do. Only then these may be asked: their answer
    /// is replaced by the one of this layer.
    pub(crate) fn may_want(&self, metadata: &'static Metadata<'static>) -> bool {
        if has_attribute(metadata) {
            return metadata.is_span() && self.find(metadata).is_some();
        }
        let known = self.known.lock();
        metadata.is_span() && candidates(metadata, &known.rules).iter().any(Candidate::keeps)
    }

    /// Whether spans of that callsite are profiled only if another layer wants them: rules name neither them nor their level.
    fn follow_others(&self, metadata: &Metadata<'_>) -> bool {
        if has_attribute(metadata) {
            return false;
        }
        let known = self.known.lock();
        let candidates = candidates(metadata, &known.rules);
        let mut keeping = candidates.iter().filter(|one| one.keeps()).peekable();
        keeping.peek().is_some() && keeping.all(|one| one.rule.names_nothing())
    }

    pub(crate) fn is_only_ours(&self, metadata: &Metadata<'_>) -> bool {
        self.known_site(metadata).is_some_and(|site| site.is_only_ours.load(Ordering::Relaxed))
    }

    /// States whether no other layer wants spans of that callsite, which may [follow others](Self::follow_others).
    pub(crate) fn set_only_ours(&self, metadata: &'static Metadata<'static>, is_only_ours: bool) {
        let Some(site) = self.site(metadata) else { return };
        site.is_only_ours.store(is_only_ours, Ordering::Relaxed);
        let is_declined = is_only_ours && self.follow_others(metadata);
        // Not while it is decided.
        let _known = self.known.lock();
        if site.is_declined.swap(is_declined, Ordering::Relaxed) != is_declined {
            // Decided anew, unless it is declined.
            let decided = if is_declined { UNMATCHED } else { UNDECIDED };
            site.decided.store(decided, Ordering::Relaxed);
            Counters::add(&self.counters.rules.declined, u64::from(is_declined));
        }
    }

    /// The callsites that are declined for that reason, and rules under which the first one is not.
    pub(crate) fn declined(&self) -> (Vec<&'static Metadata<'static>>, String) {
        let declined = self.all_sites().filter(|site| site.is_declined.load(Ordering::Relaxed));
        let declined: Vec<_> = declined.map(|site| site.metadata).collect();
        let known = self.known.lock();
        let for_all = known.rules.iter().rfind(|rule| rule.names_nothing());
        let named = declined.first().zip(for_all).map(|(metadata, rule)| {
            format!("{},{}", known.rules, Rule::for_target(metadata.target(), rule.keep))
        });
        (declined, named.unwrap_or_default())
    }

    fn all_sites(&self) -> impl Iterator<Item = &Site> {
        let chain = |first| std::iter::successors(Chain::get(first), |site| site.next.get());
        self.sites.iter().flat_map(chain).map(Box::as_ref)
    }

    /// The highest level of spans and events that the rules in force enable.
    pub(crate) fn max_level(&self) -> LevelFilter {
        let of_rules = self.known.lock().rules.enabled_level();
        let judges_errors = self.judges_errors.load(Ordering::Relaxed);
        if judges_errors { of_rules.max(LevelFilter::ERROR) } else { of_rules }
    }

    #[inline]
    fn known_site(&self, metadata: &Metadata<'_>) -> Option<&Site> {
        self.find_site(metadata, |chain| chain.get().map(Box::as_ref))
    }

    #[inline(always)]
    fn find_site<'a>(
        &'a self,
        metadata: &Metadata<'_>,
        first: impl Fn(&'a Chain) -> Option<&'a Site>,
    ) -> Option<&'a Site> {
        let address = std::ptr::from_ref(metadata).addr();
        // Metadata are statics of some hundred bytes, so the lowest bits of the address carry little information.
        let hash = (address >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as usize) >> 20;
        let mut chain = self.sites.get(hash % CHAINS)?;
        loop {
            let site = first(chain)?;
            if std::ptr::addr_eq(site.metadata, metadata) {
                return Some(site);
            }
            chain = &site.next;
        }
    }

    #[inline(always)]
    pub(crate) fn get(&self, number: u64) -> Option<&Callsite> {
        self.plans.get(number)
    }

    /// The rule of a new span by its field values, if the rules for its callsite depend on them, and what is known of them.
    #[cold]
    pub(crate) fn choose(
        &self,
        callsite: &Callsite,
        record: impl FnOnce(&mut dyn Visit),
    ) -> Option<(&Callsite, u64)> {
        let _uncounted = SuspendCounting::begin();
        let choice = callsite.fields.as_ref()?.choose(record)?;
        Some((self.get(choice.number)?, choice.bits))
    }

    /// Like [`choose`](Self::choose), for an open span that records more values. `bits` is what was known of them.
    pub(crate) fn choose_again(
        &self,
        number: u64,
        bits: u64,
        record: impl FnOnce(&mut dyn Visit),
    ) -> Option<(&Callsite, u64)> {
        let choice = self.get(number)?.fields.as_ref()?.choose_again(bits, record);
        Some((self.get(choice.number)?, choice.bits))
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

    pub(crate) fn are_off(&self) -> bool {
        self.are_off.load(Ordering::Relaxed)
    }

    pub(crate) fn judge_allocations(&self) -> bool {
        self.known.lock().rules.iter().any(|rule| rule.keep.judges_allocations())
    }

    /// New spans are judged by these rules, open ones by theirs. Refused if a rule is new and the memory for them is used up.
    pub(crate) fn replace(&self, rules: Rules) -> Result<(), Error> {
        let mut known = self.known.lock();
        let in_force: HashSet<_> = rules.iter().map(hash_of).collect();
        if known.compiled.bytes + known.sets.len() * 32 >= MAX_BYTES
            && !known.sets.contains(&set_of(&rules))
        {
            Counters::add(&self.counters.rules.refused, 1);
            let problem = "this process has had too many different rules, of which 32 MiB stay in memory: only sets \
                           that were in force before can be again, until it starts anew";
            return Err(
                InvalidSetting::unusable("the rule set", &rules.to_string(), problem).into()
            );
        }
        known.sets.insert(set_of(&rules));
        for ((rule, _), histograms) in &known.compiled.histograms {
            if in_force.contains(rule) { histograms.resume() } else { histograms.forget() }
        }
        self.judges_errors.fetch_or(rules.judge_errors(), Ordering::Relaxed);
        self.are_off.store(rules.is_off(), Ordering::Relaxed);
        known.rules = rules;
        self.all_sites().for_each(|site| site.decided.store(UNDECIDED, Ordering::Relaxed));
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Grows whenever the rules are replaced.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Whether a span with that wall time took longer than the percentile of its rule, among the spans of the same route,
    /// of which `route` returns a hash.
    pub(crate) fn is_rare(
        &self,
        callsite: &Callsite,
        route: impl FnOnce() -> Option<u64>,
        wall_ns: u64,
    ) -> bool {
        let now_ns = || nanoseconds(self.started.elapsed());
        let histograms = callsite.histograms.as_ref();
        histograms.is_some_and(|histograms| histograms.add(route(), wall_ns, now_ns()))
    }

    #[cold]
    fn decide(&self, site: &Site) -> Option<&Callsite> {
        let _uncounted = SuspendCounting::begin();
        let mut known = self.known.lock();
        let is_declined = site.is_declined.load(Ordering::Relaxed);
        let number = (!is_declined).then(|| self.compile(site.metadata, &mut known)).flatten();
        site.decided.store(number.unwrap_or(UNMATCHED), Ordering::Relaxed);
        self.get(number?)
    }

    /// Makes a plan for each rule that may decide, unless that was done before, and returns the number of the initial one.
    fn compile(&self, metadata: &'static Metadata<'static>, known: &mut Known) -> Option<u64> {
        let Known { rules, compiled, .. } = known;
        let candidates = candidates(metadata, rules);
        if rules.is_off() || !candidates.iter().any(Candidate::keeps) {
            return None;
        }
        let ids: Vec<_> = candidates.iter().map(|one| one.id).collect();
        let group = hash_of((std::ptr::from_ref(metadata).addr(), ids));
        if let Some(initial) = compiled.initial.get(&group) {
            return Some(*initial);
        }
        let initial = self.new_plans(metadata, &candidates, compiled);
        compiled.initial.insert(group, initial);
        Some(initial)
    }

    fn new_plans(
        &self,
        metadata: &'static Metadata<'static>,
        candidates: &[Candidate<'_>],
        compiled: &mut Compiled,
    ) -> u64 {
        let first = FIRST_NUMBER + compiled.plans;
        let known_rules = compiled.rules.len();
        let mut numbers = first..;
        let planned: Vec<_> = candidates
            .iter()
            .map(|one| (one, if one.keeps() { numbers.next() } else { None }))
            .collect();
        let (by_values, sure): (Vec<_>, Vec<_>) =
            planned.iter().partition(|(one, _)| one.rule.needs_values());
        let tests: Vec<_> = by_values.into_iter().map(|(one, number)| (one.rule, number)).collect();
        let otherwise = sure.first().and_then(|(_, number)| *number);
        // Also needed if a value can mean `off`.
        let waiting = if tests.is_empty() { None } else { numbers.next() };
        let fields = waiting.map(|waiting| {
            let fields = FieldRules::new(metadata, &tests, otherwise, waiting);
            Counters::add(&self.counters.rules.skipped, fields.left_out);
            Arc::new(fields)
        });
        let status = metadata.fields().field(STATUS_FIELD).map_or(0, |_| HAS_STATUS);
        let values = if fields.is_some() { HAS_FIELDS } else { 0 };
        let shown_fields = self.shown_fields.of(metadata);
        let shown = if shown_fields == 0 { 0 } else { SHOWS_FIELDS };
        let keeping =
            planned.iter().filter_map(|(one, number)| Some(((*number)?, one.id, one.keep())));
        for (number, id, keep) in keeping.chain(waiting.map(|number| (number, 0, Keep::NEVER))) {
            let rule = compiled.rules.entry(id);
            let rule = rule.or_insert_with(|| Arc::new(CompiledRule::new(id, boxed(keep))));
            let histograms = keep.percentile().map(|percentile| {
                let new =
                    || WallHistograms::new(percentile, &self.histogram_counts, &self.counters);
                let known = compiled.histograms.entry((id, metadata.name()));
                Arc::clone(known.or_insert_with(|| Arc::new(new())))
            });
            let plan = plan(keep, self.settings);
            self.plans.insert(Callsite {
                plan: Plan { number, flags: plan.flags | status | values | shown, ..plan },
                metadata,
                shown_fields,
                rule: Arc::clone(rule),
                fields: fields.clone(),
                histograms,
            });
        }
        let plans = numbers.start - first;
        let rules = compiled.rules.len() - known_rules;
        compiled.plans += plans;
        compiled.bytes +=
            plans as usize * PLAN_BYTES + rules * RULE_BYTES + tests.len() * TEST_BYTES;
        // One of both is there, since one of the rules keeps spans.
        otherwise.or(waiting).unwrap_or(UNMATCHED)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Condition, Rule};
    use super::*;

    fn callsites(rules: Rules) -> Callsites {
        Callsites::for_test(rules)
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
                callsites.replace(Rules::new([])).unwrap();
                assert_eq!(all.map(|one| callsites.wants(one)), [false; 3], "{rules}");
                assert_eq!(callsites.max_level(), LevelFilter::OFF, "{rules}");
                callsites.replace(rules.parse().unwrap()).unwrap();
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
            let callsites = self::callsites("error".parse().unwrap());
            callsites.replace(Rules::new([])).unwrap();
            assert!(callsites.wants(&error));
            assert_eq!(callsites.max_level(), LevelFilter::ERROR);
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
                let callsite = callsites.find(slow).unwrap();
                assert_eq!(callsite.plan.judge_after, 9);
                assert_eq!(
                    (callsite.metadata.target(), callsite.rule.keep.to_string().as_str()),
                    ("slow", "9ns")
                );
                let number = callsite.plan.number;
                assert_eq!(callsites.get(number).unwrap().plan.number, number);
                assert_eq!(callsites.find(fast).unwrap().plan.judge_after, 3);
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
                let callsite = callsites.find(metadata)?;
                Some((callsite.plan.judge_after, callsite.rule.id))
            };
            assert_eq!(seen(named), Some((50, of_target)));
            let (judge_after, rule) = seen(plain).unwrap();
            assert_eq!(judge_after, 7);
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
            let find = || many.iter().map(|one| callsites.find(one).unwrap().plan.number);
            let numbers: Vec<_> = find().collect();
            assert_eq!(numbers.iter().collect::<HashSet<_>>().len(), many.len());
            assert_eq!(find().collect::<Vec<_>>(), numbers);
        });
    }

    #[test]
    fn one_in_n_are_chosen_on_any_thread() {
        with_spans(|| {
            let span = metadata_of(&tracing::info_span!("a"));
            for number in [1, 4, 100] {
                let keep = Keep::when(Condition::OneIn(number.try_into().unwrap()));
                let callsites = callsites(Rules::new([Rule::for_all(keep)]));
                let chosen = || callsites.find(span).unwrap().is_chosen();
                let many = |spans: u32| (0..spans).filter(|_| chosen()).count() as f64;
                let short_lived = (0..256)
                    .map(|_| std::thread::scope(|scope| scope.spawn(|| many(1)).join().unwrap()));
                let (spans, found) = (100_256.0, many(100_000) + short_lived.sum::<f64>());
                let share = 1.0 / f64::from(number);
                let deviation = (spans * share * (1.0 - share)).sqrt();
                assert!(
                    (found - spans * share).abs() <= 6.0 * deviation,
                    "{found} of 1 in {number}"
                );
            }
        });
    }

    #[test]
    fn rules_are_compiled_once_and_new_ones_are_refused_when_there_were_too_many() {
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
            let open = callsites.find(spans[0]).unwrap().plan.number;
            let numbers = || spans.map(|span| callsites.find(span).unwrap().plan.number);
            let first = numbers();
            let judge_after = |set: u64| (1 + set) - (1 + set) / 1024;
            let mut last = 0;
            for set in 1.. {
                if callsites.replace(rules(set)).is_err() {
                    break;
                }
                for callsite in spans.map(|span| callsites.find(span).unwrap()) {
                    assert_eq!(callsite.plan.judge_after, judge_after(set));
                }
                last = set;
            }
            assert!((100..10_000).contains(&last), "{last}");
            assert_eq!(callsites.counters.rules.refused.load(Ordering::Relaxed), 1);
            let in_force = callsites.find(spans[2]).unwrap().plan.judge_after;
            assert_eq!(in_force, judge_after(last));
            let compiled = callsites.known.lock().compiled.plans;
            for set in [Rules::new([]), rules(last), rules(0), rules(1)] {
                callsites.replace(set).unwrap();
                _ = spans.map(|span| callsites.find(span));
            }
            assert_eq!(callsites.known.lock().compiled.plans, compiled);
            // The plans of an open span are there, and those that its values may select.
            let site = callsites.get(open).unwrap();
            assert_eq!((site.metadata.name(), site.plan.judge_after), ("a", 1));
            let tenant = spans[0].fields().field("tenant").unwrap();
            let chosen = callsites.choose(site, |visit| visit.record_u64(&tenant, 7)).unwrap();
            assert_eq!(chosen.0.plan.judge_after, 9);
            assert_eq!(callsites.least_limit(), Some(Duration::from_secs(1)));
            callsites.replace(rules(0)).unwrap();
            assert_eq!(numbers(), first);
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
            assert_eq!((base.plan.judge_after, base.plan.flags & HAS_FIELDS), (8, HAS_FIELDS));
            let tenant = span.fields().field("tenant").unwrap();
            let chosen = callsites.choose(base, |visit| visit.record_u64(&tenant, 1)).unwrap();
            assert_eq!(chosen.0.plan.judge_after, 9);
            assert!(std::ptr::eq(callsites.choose(base, |_| {}).unwrap().0, base));
            let plain = &callsites.find(without).unwrap().plan;
            assert_eq!((plain.judge_after, plain.flags & HAS_FIELDS), (7, 0));
        });
    }
}

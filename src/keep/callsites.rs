//! From a callsite to what the rules say of it, without hashing or locks.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::Metadata;

use super::attribute::Settings;
use super::fields::FieldRules;
use super::percentile::{MOST_SKETCHES, Sketch};
use super::plans::{Callsite, Plans};
use super::{Keep, Rule, Rules};
use crate::span::{HAS_FIELDS, HAS_STATUS, Plan};
use crate::stats::Counters;

/// Remembers for each callsite what the rules say.
///
/// We do not use `Interest` for this: a `never` of ours would switch the callsite off for every
/// other layer too.
#[derive(Debug)]
pub(crate) struct Callsites {
    planner: Planner,
    /// Each twice as long as the one before. The last one that is there is in use; what is only
    /// in another is found again the slow way, once.
    tables: [OnceLock<Box<[Entry]>>; TABLES],
    in_use: AtomicUsize,
    /// How often the rules were replaced.
    generation: AtomicU32,
    plans: Plans,
    /// After which an open span may have to be kept, of all plans so far.
    least_limit_ns: AtomicU64,
    known: Mutex<Known>,
    started: Instant,
    counters: Arc<Counters>,
}

/// A callsite's metadata and its plan. Zeros are a free entry.
#[derive(Debug, Default)]
struct Entry {
    address: AtomicUsize,
    /// The generation of the rules in the upper half, and the plan's number plus 1 in the lower: 0 if no
    /// rule matches. In one word, so that they belong together.
    decided: AtomicU64,
}

/// All that is decided under a lock.
#[derive(Debug)]
struct Known {
    rules: Rules,
    /// By the address of the metadata; of the present generation.
    by_address: HashMap<usize, Option<u32>>,
    /// What was decided in any generation: the same again has the same number.
    by_decision: HashMap<Decision, Option<u32>>,
    rule_numbers: HashMap<RuleKey, u32>,
    sketches: HashMap<(u32, &'static str), Arc<Sketch>>,
    next: u32,
    in_table: usize,
}

/// A callsite, and the rules that may decide on its spans.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Decision {
    address: usize,
    rules: Vec<u32>,
    /// On which the rate depends.
    usual_latency: Option<Duration>,
}

/// What makes a rule the same one in other rules.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum RuleKey {
    Rule(Box<Rule>),
    /// A `#[profiled]` that says when to keep, at that address.
    Attribute(usize),
}

/// A rule that may decide, as far as a callsite is concerned.
struct Candidate<'a> {
    rule: &'a Rule,
    number: u32,
    keep: Keep,
    rate: Option<u32>,
}

/// Says what spans get that are kept so, and sampled at that rate, if one is given, where spans in
/// general are kept above that latency. The number does not matter.
pub(crate) type MakePlan = Box<dyn Fn(&Keep, Option<u32>, Option<Duration>) -> Plan + Send + Sync>;

struct Planner(MakePlan);

impl std::fmt::Debug for Planner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Planner").finish_non_exhaustive()
    }
}

/// The field by which `tracing-opentelemetry` lets a span say that it failed.
pub(crate) const STATUS_FIELD: &str = "otel.status_code";

const TABLES: usize = 12;
const FIRST_TABLE: usize = 512;

impl Callsites {
    pub(crate) fn new(rules: Rules, planner: MakePlan, counters: Arc<Counters>) -> Self {
        let callsites = Self {
            planner: Planner(planner),
            tables: [const { OnceLock::new() }; TABLES],
            in_use: AtomicUsize::new(0),
            generation: AtomicU32::new(0),
            plans: Plans::new(),
            least_limit_ns: AtomicU64::new(u64::MAX),
            known: Mutex::new(Known {
                rules,
                by_address: HashMap::new(),
                by_decision: HashMap::new(),
                rule_numbers: HashMap::new(),
                sketches: HashMap::new(),
                next: 0,
                in_table: 0,
            }),
            started: Instant::now(),
            counters,
        };
        callsites.table(0);
        callsites
    }

    /// What the rules say of spans from this callsite; `None` if they are not profiled.
    #[inline]
    pub(crate) fn find(&self, metadata: &'static Metadata<'static>) -> Option<&Callsite> {
        let address = std::ptr::from_ref(metadata).addr();
        let generation = self.generation.load(Ordering::Relaxed);
        let table = self.tables.get(self.in_use.load(Ordering::Acquire))?.get()?;
        let first = table.get(mixed(address) & table.len().wrapping_sub(1))?;
        if first.address.load(Ordering::Acquire) == address
            && let Some(number) = first.number(generation)
        {
            return self.get(number.checked_sub(1)?);
        }
        self.search(table, metadata, address, generation)
    }

    fn search(
        &self,
        table: &[Entry],
        metadata: &'static Metadata<'static>,
        address: usize,
        generation: u32,
    ) -> Option<&Callsite> {
        for entry in probe(table, address) {
            match entry.address.load(Ordering::Acquire) {
                found if found == address => match entry.number(generation) {
                    Some(number) => return self.get(number.checked_sub(1)?),
                    None => break,
                },
                0 => break,
                _ => {}
            }
        }
        self.get(self.find_slowly(metadata, address)?)
    }

    /// What a plan's number stands for.
    #[inline]
    pub(crate) fn get(&self, number: u32) -> Option<&Callsite> {
        self.plans.get(number)
    }

    /// After how long an open span may have to be kept, under any rules so far; `None` if none asks.
    pub(crate) fn least_limit(&self) -> Option<Duration> {
        let limit_ns = self.least_limit_ns.load(Ordering::Relaxed);
        (limit_ns != u64::MAX).then(|| Duration::from_nanos(limit_ns))
    }

    /// From now on spans that are made have these rules. Those that are open keep theirs.
    pub(crate) fn replace(&self, rules: Rules) {
        let mut known = self.known.lock();
        let known = &mut *known;
        let in_force: HashSet<_> = rules
            .iter()
            .filter_map(|rule| known.rule_numbers.get(&RuleKey::Rule(Box::new(rule.clone()))))
            .copied()
            .collect();
        let over = known.sketches.iter().filter(|((rule, _), _)| !in_force.contains(rule));
        over.for_each(|(_, sketch)| sketch.forget());
        known.rules = rules;
        known.by_address.clear();
        // Entries of the generation before are decided anew, with the lock.
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Whether a span of that wall time took longer than the percentile of its rule.
    pub(crate) fn is_rare(&self, callsite: &Callsite, wall_ns: u64) -> bool {
        let sketch = callsite.sketch.as_ref();
        sketch.is_some_and(|sketch| sketch.add(wall_ns, self.now_ns()))
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    #[cold]
    fn find_slowly(&self, metadata: &'static Metadata<'static>, address: usize) -> Option<u32> {
        let mut known = self.known.lock();
        let known = &mut *known;
        // With the lock, so that the rules are those of this generation.
        let generation = self.generation.load(Ordering::Relaxed);
        let number = match known.by_address.get(&address) {
            Some(number) => *number,
            None => {
                let number = self.decide(metadata, address, known);
                known.by_address.insert(address, number);
                number
            }
        };
        self.remember(address, number, generation, &mut known.in_table);
        number
    }

    fn decide(
        &self,
        metadata: &'static Metadata<'static>,
        address: usize,
        known: &mut Known,
    ) -> Option<u32> {
        if known.rules.is_off() {
            return None;
        }
        let rules = known.rules.clone();
        let candidates = self.candidates(metadata, address, &rules, known);
        let decision = Decision {
            address,
            rules: candidates.iter().map(|candidate| candidate.number).collect(),
            usual_latency: rules.usual_latency(),
        };
        if let Some(decided) = known.by_decision.get(&decision) {
            return *decided;
        }
        let decided = self.plan_all(metadata, &candidates, decision.usual_latency, known);
        known.by_decision.insert(decision, decided);
        decided
    }

    /// The rules that may decide on spans of a callsite, the most specific first.
    fn candidates<'a>(
        &self,
        metadata: &'static Metadata<'static>,
        address: usize,
        rules: &'a Rules,
        known: &mut Known,
    ) -> Vec<Candidate<'a>> {
        let mut number = |key| {
            let next = u32::try_from(known.rule_numbers.len()).unwrap_or(u32::MAX);
            *known.rule_numbers.entry(key).or_insert(next)
        };
        let matching = rules.candidates(metadata);
        let is_decided = matching.last().is_some_and(|rule| !rule.needs_values());
        let mut candidates: Vec<_> = matching
            .into_iter()
            .map(|rule| Candidate {
                rule,
                number: number(RuleKey::Rule(Box::new(rule.clone()))),
                keep: *rule.keep(),
                rate: None,
            })
            .collect();
        // A directive that names the span or its target beats the attribute.
        let last = candidates.last_mut().filter(|_| is_decided);
        if last.as_ref().is_some_and(|last| !last.rule.is_for_all()) {
            return candidates;
        }
        let Some(Settings { keep, rate }) = Settings::of(metadata) else { return candidates };
        match (keep, last) {
            (Some(keep), last) => {
                let number = number(RuleKey::Attribute(address));
                let rule = last.map_or(Rule::any(), |last| last.rule);
                if is_decided {
                    candidates.pop();
                }
                candidates.push(Candidate { rule, number, keep, rate });
            }
            (None, Some(last)) => last.rate = rate,
            (None, None) => {}
        }
        candidates
    }

    /// Gives each of the rules that may decide a number, and returns the one to begin with.
    fn plan_all(
        &self,
        metadata: &'static Metadata<'static>,
        candidates: &[Candidate<'_>],
        usual_latency: Option<Duration>,
        known: &mut Known,
    ) -> Option<u32> {
        let (sure, by_values) = match candidates.split_last() {
            Some((last, rest)) if !last.rule.needs_values() => (Some(last), rest),
            _ => (None, candidates),
        };
        let keeps = |candidate: &&Candidate<'_>| !candidate.keep.is_never();
        let sure = sure.filter(keeps);
        if sure.is_none() && !by_values.iter().any(|candidate| keeps(&candidate)) {
            return None;
        }
        let mut next = known.next;
        let mut new_number = || {
            next += 1;
            next - 1
        };
        let numbers: Vec<_> =
            by_values.iter().map(|one| (!one.keep.is_never()).then(&mut new_number)).collect();
        let otherwise = sure.map(|_| new_number());
        // Also where `off` may be said by a value.
        let waiting = if by_values.is_empty() { 0 } else { new_number() };
        let fields = (!by_values.is_empty()).then(|| {
            let tests: Vec<_> =
                by_values.iter().map(|one| one.rule).zip(numbers.iter().copied()).collect();
            let fields = FieldRules::new(metadata, &tests, otherwise, waiting);
            Counters::add(&self.counters.rules_left_out, fields.left_out());
            Arc::new(fields)
        });
        let mut set = |number, candidate: Option<&Candidate<'_>>| {
            let callsite =
                self.callsite(metadata, number, candidate, fields.clone(), usual_latency, known);
            self.plans.set(number, callsite)
        };
        let mut all_set = true;
        for (number, candidate) in numbers.iter().zip(by_values) {
            all_set &= number.is_none_or(|number| set(number, Some(candidate)));
        }
        all_set &= otherwise.is_none_or(|number| set(number, sure));
        if fields.is_some() {
            all_set &= set(waiting, None);
        }
        known.next = next;
        // Else there are no more numbers, after a hundred million decisions.
        all_set.then_some(otherwise.unwrap_or(waiting))
    }

    fn callsite(
        &self,
        metadata: &'static Metadata<'static>,
        number: u32,
        candidate: Option<&Candidate<'_>>,
        fields: Option<Arc<FieldRules>>,
        usual_latency: Option<Duration>,
        known: &mut Known,
    ) -> Callsite {
        let keep = candidate.map_or(Keep::never(), |candidate| candidate.keep);
        let rule = candidate.map_or(u32::MAX, |candidate| candidate.number);
        let plan = self.planner.0(&keep, candidate.and_then(|one| one.rate), usual_latency);
        let has_status = metadata.fields().field(STATUS_FIELD).is_some();
        let status = if has_status { HAS_STATUS } else { 0 };
        let values = if fields.is_some() { HAS_FIELDS } else { 0 };
        let plan = Plan { number, flags: plan.flags | status | values, ..plan };
        let sketch = keep.percentile().and_then(|(millionths, _)| {
            self.sketch((rule, metadata.name()), millionths, &mut known.sketches)
        });
        let ns = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let (hung_ns, open_ns) = (keep.hung_limit().map(ns), keep.open_limit().map(ns));
        for limit_ns in [hung_ns, open_ns].into_iter().flatten() {
            self.least_limit_ns.fetch_min(limit_ns, Ordering::Relaxed);
        }
        let count = AtomicU32::new(0);
        Callsite { metadata, keep, rule, plan, hung_ns, open_ns, fields, sketch, count }
    }

    fn sketch(
        &self,
        key: (u32, &'static str),
        millionths: u32,
        sketches: &mut HashMap<(u32, &'static str), Arc<Sketch>>,
    ) -> Option<Arc<Sketch>> {
        if let Some(known) = sketches.get(&key) {
            return Some(Arc::clone(known));
        }
        if sketches.values().filter(|sketch| sketch.is_in_use()).count() >= MOST_SKETCHES {
            Counters::add(&self.counters.percentiles_not_kept, 1);
            return None;
        }
        let new = Arc::new(Sketch::new(millionths));
        sketches.insert(key, Arc::clone(&new));
        Some(new)
    }

    fn remember(&self, address: usize, number: Option<u32>, generation: u32, in_table: &mut usize) {
        let mut in_use = self.in_use.load(Ordering::Relaxed);
        let mut table = self.table(in_use);
        if let Some(entry) = entry_of(table, address)
            && entry.address.load(Ordering::Relaxed) == address
        {
            entry.set(address, number, generation);
            return;
        }
        if *in_table >= table.len() / 2 {
            if in_use + 1 == TABLES {
                // A million callsites: the rest is found the slow way each time.
                return;
            }
            in_use += 1;
            table = self.table(in_use);
            *in_table = 0;
        }
        if let Some(entry) = entry_of(table, address) {
            entry.set(address, number, generation);
            *in_table += 1;
        }
        self.in_use.store(in_use, Ordering::Release);
    }

    fn table(&self, number: usize) -> &[Entry] {
        let new = || (0..FIRST_TABLE << number).map(|_| Entry::default()).collect();
        self.tables.get(number).map_or(&[], |table| table.get_or_init(new))
    }
}

/// The entry of an address, or the one that is free for it.
fn entry_of(table: &[Entry], address: usize) -> Option<&Entry> {
    probe(table, address)
        .find(|entry| [0, address].contains(&entry.address.load(Ordering::Relaxed)))
}

/// The places where an address may be, in order.
fn probe(table: &[Entry], address: usize) -> impl Iterator<Item = &Entry> {
    let mask = table.len().wrapping_sub(1);
    (0..table.len()).filter_map(move |step| table.get(mixed(address).wrapping_add(step) & mask))
}

#[inline(always)]
fn mixed(address: usize) -> usize {
    // Metadata are statics of some hundred bytes: the lowest bits say little.
    (address >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as usize) >> 20
}

impl Entry {
    /// The plan's number plus 1, or 0, if it was decided in that generation of the rules.
    #[inline(always)]
    fn number(&self, generation: u32) -> Option<u32> {
        let decided = self.decided.load(Ordering::Acquire);
        ((decided >> u32::BITS) as u32 == generation).then_some(decided as u32)
    }

    fn set(&self, address: usize, number: Option<u32>, generation: u32) {
        let number = number.map_or(0, |number| number + 1);
        let decided = u64::from(generation) << u32::BITS | u64::from(number);
        // Release: who finds the number finds what it stands for.
        self.decided.store(decided, Ordering::Release);
        self.address.store(address, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Rule;
    use super::*;

    fn callsites(rules: Rules) -> Callsites {
        let plan = |keep: &Keep, rate: Option<u32>, _: Option<Duration>| Plan {
            number: 0,
            flags: 0,
            suspect_after: keep.latency().map_or(u64::MAX, |latency| latency.as_nanos() as u64),
            period_ns: rate.map_or(5, u64::from),
        };
        Callsites::new(rules, Box::new(plan), Arc::default())
    }

    fn metadata_of(span: &tracing::Span) -> &'static Metadata<'static> {
        span.metadata().expect("enabled by the registry")
    }

    fn with_spans(test: impl FnOnce()) {
        tracing::subscriber::with_default(tracing_subscriber::registry(), test);
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
                assert_eq!(callsite.plan.suspect_after, 9);
                assert_eq!((callsite.metadata.target(), callsite.rule), ("slow", 0));
                let by_number = callsites.get(callsite.plan.number).unwrap();
                assert!(std::ptr::eq(by_number, callsite));
                assert_eq!(callsites.find(fast).unwrap().plan.suspect_after, 3);
                assert!(callsites.find(off).is_none());
                assert!(callsites.find(none).is_none());
            }
        });
    }

    #[test]
    fn an_attribute_beats_the_bare_default_and_no_directive_that_names_it() {
        with_spans(|| {
            let span = |target| match target {
                "named" => tracing::info_span!(
                    target: "named", "a", "tracing_profiling threshold_ns=7 rate=9" = tracing::field::Empty
                ),
                _ => tracing::info_span!(
                    "a",
                    "tracing_profiling threshold_ns=7 rate=9" = tracing::field::Empty
                ),
            };
            let (named, plain) = (metadata_of(&span("named")), metadata_of(&span("")));
            let rate_only = metadata_of(&tracing::info_span!(
                "b",
                "tracing_profiling rate=9" = tracing::field::Empty
            ));
            let off = metadata_of(&tracing::info_span!(
                "c",
                "tracing_profiling off" = tracing::field::Empty
            ));
            let nanos = |ns| Keep::slower_than(Duration::from_nanos(ns));
            let rules = [Rule::for_all(nanos(100)), Rule::for_target("named", nanos(50))];
            let callsites = callsites(Rules::new(rules));
            let seen = |metadata| {
                let Callsite { plan, rule, .. } = callsites.find(metadata)?;
                Some((plan.suspect_after, plan.period_ns, *rule))
            };
            assert_eq!(seen(named), Some((50, 5, 0)));
            assert_eq!(seen(plain), Some((7, 9, 2)), "a rule of its own");
            assert_eq!(seen(rate_only), Some((100, 9, 1)));
            assert_eq!(seen(off), None);
        });
    }

    #[test]
    fn a_table_that_fills_up_is_replaced_and_forgets_nothing() {
        let callsites = callsites(Rules::default());
        // Only the address of the metadata matters here, and only these callsites are ever read.
        with_spans(|| {
            let metadata = metadata_of(&tracing::info_span!("real"));
            let number = callsites.find(metadata).unwrap().plan.number;
            let mut in_table = callsites.known.lock().in_table;
            for address in 1..5 * FIRST_TABLE {
                callsites.remember(address << 4, Some(address as u32), 0, &mut in_table);
            }
            assert!(callsites.in_use.load(Ordering::Relaxed) >= 2);
            assert_eq!(callsites.find(metadata).unwrap().plan.number, number);
            let table = callsites.table(callsites.in_use.load(Ordering::Relaxed));
            let last = (5 * FIRST_TABLE - 1) << 4;
            let entry = probe(table, last).find(|e| e.address.load(Ordering::Relaxed) == last);
            assert_eq!(entry.unwrap().number(0), Some((last >> 4) as u32 + 1));
            assert_eq!(entry.unwrap().number(1), None, "of rules that were replaced");
        });
    }

    #[test]
    fn rules_that_are_replaced_and_come_back_have_the_same_numbers() {
        with_spans(|| {
            let span = metadata_of(&tracing::info_span!("a"));
            let rules =
                |ns| Rules::new([Rule::for_all(Keep::slower_than(Duration::from_nanos(ns)))]);
            let callsites = callsites(rules(9));
            let find = || {
                callsites
                    .find(span)
                    .map(|site| (site.plan.suspect_after, site.plan.number, site.rule))
            };
            assert_eq!(find(), Some((9, 0, 0)));
            for _ in 0..1_000 {
                callsites.replace(rules(3));
                assert_eq!(find(), Some((3, 1, 1)));
                callsites.replace(Rules::new([]));
                assert_eq!(find(), None);
                callsites.replace(rules(9));
                assert_eq!(find(), Some((9, 0, 0)));
            }
        });
    }

    #[test]
    fn rules_without_values_stand_behind_those_with_them() {
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
            assert_eq!((base.plan.suspect_after, base.plan.flags & HAS_FIELDS), (8, HAS_FIELDS));
            let tenant = span.fields().field("tenant").unwrap();
            let fields = base.fields.as_ref().unwrap();
            let chosen = fields.choose(|visit| visit.record_u64(&tenant, 1)).unwrap();
            assert_eq!(callsites.get(chosen.number).unwrap().plan.suspect_after, 9);
            assert_eq!(fields.choose(|_| {}).unwrap().number, base.plan.number);
            let plain = callsites.find(without).unwrap();
            assert_eq!((plain.plan.suspect_after, plain.plan.flags & HAS_FIELDS), (7, 0));
        });
    }
}

//! From a callsite to what the rules say of it, without hashing or locks.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::Metadata;

use super::attribute;
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
    /// After which an open span may have to be kept, of all plans that there are.
    least_limit_ns: AtomicU64,
    /// Of those that are not sampled from the enter, in ticks.
    least_age: AtomicU64,
    /// There are plans of rules that were replaced a while ago.
    has_old: AtomicBool,
    known: Mutex<Known>,
    started: Instant,
    counters: Arc<Counters>,
}

/// A callsite's metadata and its plan. Zeros are a free entry.
#[derive(Debug, Default)]
struct Entry {
    address: AtomicUsize,
    /// The generation of the rules in the upper half, and the plan's number plus 1 in the lower: 0 if no
    /// rule matches. In one word, so that they belong together; and what follows belongs to it if it is the
    /// same before and after that was read.
    decided: AtomicU64,
    suspect_after: AtomicU64,
    arm_after: AtomicU64,
    long_after: AtomicU64,
    flags: AtomicU32,
}

/// All that is decided under a lock.
#[derive(Debug)]
struct Known {
    rules: Rules,
    /// By the address of the metadata; of the present generation.
    by_address: HashMap<usize, Option<u32>>,
    /// What was decided in this generation and some before: the same again has the same number.
    by_decision: HashMap<Decision, Decided>,
    rule_numbers: HashMap<RuleKey, RuleNumber>,
    next_rule: u32,
    sketches: HashMap<(u32, &'static str), Arc<Sketch>>,
    /// As of the last decision: they are taken into use later.
    sketches_in_use: usize,
    next: u32,
    in_table: usize,
}

/// A callsite, and the rules that may decide on its spans.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Decision {
    address: usize,
    rules: Vec<u32>,
}

/// What came of a decision.
#[derive(Clone, Debug)]
struct Decided {
    /// The plan to begin with.
    number: Option<u32>,
    /// All plans that spans may have by it.
    numbers: Range<u32>,
    /// When it was last asked for.
    generation: u32,
}

#[derive(Clone, Copy, Debug)]
struct RuleNumber {
    number: u32,
    generation: u32,
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
}

/// Says what spans get that are kept so. The number does not matter.
pub(crate) type MakePlan = Box<dyn Fn(&Keep) -> Plan + Send + Sync>;

struct Planner(MakePlan);

impl std::fmt::Debug for Planner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Planner").finish_non_exhaustive()
    }
}

/// The field by which `tracing-opentelemetry` lets a span say that it failed.
pub(crate) const STATUS_FIELD: &str = "otel.status_code";

/// In the place of a plan's number plus 1, while what belongs to it is written.
const IN_WORK: u32 = u32::MAX;

/// Rules that were replaced keep their numbers, limits and percentiles as long as no more than so many
/// others came after them.
const GENERATIONS_KEPT: u32 = 8;

const TABLES: usize = 12;
const FIRST_TABLE: usize = 512;

impl Callsites {
    pub(crate) fn new(rules: Rules, planner: MakePlan, counters: Arc<Counters>) -> Self {
        let callsites = Self {
            planner: Planner(planner),
            tables: [const { OnceLock::new() }; TABLES],
            in_use: AtomicUsize::new(0),
            generation: AtomicU32::new(0),
            plans: Plans::default(),
            least_limit_ns: AtomicU64::new(u64::MAX),
            least_age: AtomicU64::new(u64::MAX),
            has_old: AtomicBool::new(false),
            known: Mutex::new(Known {
                rules,
                by_address: HashMap::new(),
                by_decision: HashMap::new(),
                rule_numbers: HashMap::new(),
                next_rule: 0,
                sketches: HashMap::new(),
                sketches_in_use: 0,
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
    pub(crate) fn find(&self, metadata: &'static Metadata<'static>) -> Option<Plan> {
        let address = std::ptr::from_ref(metadata).addr();
        let generation = self.generation.load(Ordering::Relaxed);
        let table = self.tables.get(self.in_use.load(Ordering::Acquire))?.get()?;
        let first = table.get(mixed(address) & table.len().wrapping_sub(1))?;
        if first.address.load(Ordering::Acquire) == address
            && let Some(plan) = first.plan(generation)
        {
            return plan;
        }
        self.search(table, metadata, address, generation)
    }

    fn search(
        &self,
        table: &[Entry],
        metadata: &'static Metadata<'static>,
        address: usize,
        generation: u32,
    ) -> Option<Plan> {
        for entry in probe(table, address) {
            match entry.address.load(Ordering::Acquire) {
                found if found == address => match entry.plan(generation) {
                    Some(plan) => return plan,
                    None => break,
                },
                0 => break,
                _ => {}
            }
        }
        self.find_slowly(metadata, address)
    }

    /// What a plan's number stands for.
    pub(crate) fn get(&self, number: u32) -> Option<Arc<Callsite>> {
        self.plans.get(number)
    }

    /// How soon a span may be old, in ticks, if it is not from the enter.
    pub(crate) fn least_age(&self) -> u64 {
        self.least_age.load(Ordering::Relaxed)
    }

    /// After how long an open span may have to be kept; `None` if none asks.
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
            .map(|rule| rule.number)
            .collect();
        let over = known.sketches.iter().filter(|((rule, _), _)| !in_force.contains(rule));
        over.for_each(|(_, sketch)| sketch.forget());
        known.rules = rules;
        known.by_address.clear();
        known.by_address.shrink_to_fit();
        // Entries of the generation before are decided anew, with the lock.
        let generation = self.generation.fetch_add(1, Ordering::Release).wrapping_add(1);
        let has_old = known.by_decision.values().any(|one| is_old(one.generation, generation));
        self.has_old.store(has_old, Ordering::Relaxed);
    }

    /// How often the rules were replaced.
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Whether [`give_back`](Self::give_back) may have something to do.
    pub(crate) fn has_old(&self) -> bool {
        self.has_old.load(Ordering::Relaxed)
    }

    /// Forgets what rules meant that were replaced a while ago, but for the plans that are in use: by spans that
    /// are open, or of which the collector still knows.
    ///
    /// A hook that has found a plan and not yet opened its span is not among these. It would have to stop there
    /// while the rules are replaced [`GENERATIONS_KEPT`] times; then its span is not judged.
    pub(crate) fn give_back(&self, in_use: &HashSet<u32>) {
        let mut known = self.known.lock();
        let known = &mut *known;
        let generation = self.generation.load(Ordering::Relaxed);
        let (mut gone, mut has_old) = (Vec::new(), false);
        known.by_decision.retain(|_, decided| {
            let is_old = is_old(decided.generation, generation);
            let stays = !is_old || decided.numbers.clone().any(|number| in_use.contains(&number));
            has_old |= is_old && stays;
            if !stays {
                gone.extend(decided.numbers.clone());
            }
            stays
        });
        known.rule_numbers.retain(|_, rule| !is_old(rule.generation, generation));
        let numbers: HashSet<_> = known.rule_numbers.values().map(|rule| rule.number).collect();
        known.sketches.retain(|(rule, _), _| numbers.contains(rule));
        known.by_decision.shrink_to_fit();
        known.rule_numbers.shrink_to_fit();
        known.sketches.shrink_to_fit();
        self.plans.remove(gone);
        self.least_limit_ns.store(self.plans.least_limit_ns(), Ordering::Relaxed);
        self.least_age.store(self.plans.least_age(), Ordering::Relaxed);
        self.has_old.store(has_old, Ordering::Relaxed);
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
    fn find_slowly(&self, metadata: &'static Metadata<'static>, address: usize) -> Option<Plan> {
        let mut known = self.known.lock();
        let known = &mut *known;
        // With the lock, so that the rules are those of this generation.
        let generation = self.generation.load(Ordering::Relaxed);
        let number = match known.by_address.get(&address) {
            Some(number) => *number,
            None => {
                let number = self.decide(metadata, address, generation, known);
                known.by_address.insert(address, number);
                number
            }
        };
        let plan = number.and_then(|number| Some(self.plans.get(number)?.plan));
        self.remember(address, plan.as_ref(), generation, &mut known.in_table);
        plan
    }

    fn decide(
        &self,
        metadata: &'static Metadata<'static>,
        address: usize,
        generation: u32,
        known: &mut Known,
    ) -> Option<u32> {
        if known.rules.is_off() {
            return None;
        }
        let rules = known.rules.clone();
        let candidates = candidates(metadata, address, generation, &rules, known);
        let decision = Decision {
            address,
            rules: candidates.iter().map(|candidate| candidate.number).collect(),
        };
        if let Some(decided) = known.by_decision.get_mut(&decision) {
            decided.generation = generation;
            return decided.number;
        }
        let (number, numbers) = self.plan_all(metadata, &candidates, known);
        known.by_decision.insert(decision, Decided { number, numbers, generation });
        number
    }

    /// Gives each of the rules that may decide a number, and returns the one to begin with, and all.
    fn plan_all(
        &self,
        metadata: &'static Metadata<'static>,
        candidates: &[Candidate<'_>],
        known: &mut Known,
    ) -> (Option<u32>, Range<u32>) {
        let (sure, by_values) = match candidates.split_last() {
            Some((last, rest)) if !last.rule.needs_values() => (Some(last), rest),
            _ => (None, candidates),
        };
        let keeps = |candidate: &&Candidate<'_>| !candidate.keep.is_never();
        let sure = sure.filter(keeps);
        if sure.is_none() && !by_values.iter().any(|candidate| keeps(&candidate)) {
            return (None, 0..0);
        }
        known.sketches_in_use = known.sketches.values().filter(|sketch| sketch.is_in_use()).count();
        let most = u32::try_from(candidates.len() + 1).unwrap_or(u32::MAX);
        let first = self.plans.free(known.next, most).start;
        let mut next = first;
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
            let callsite = self.callsite(metadata, number, candidate, fields.clone(), known);
            self.plans.set(number, callsite);
        };
        for (number, candidate) in numbers.iter().zip(by_values) {
            if let Some(number) = number {
                set(*number, Some(candidate));
            }
        }
        if let Some(number) = otherwise {
            set(number, sure);
        }
        if fields.is_some() {
            set(waiting, None);
        }
        known.next = next;
        (Some(otherwise.unwrap_or(waiting)), first..next)
    }

    fn callsite(
        &self,
        metadata: &'static Metadata<'static>,
        number: u32,
        candidate: Option<&Candidate<'_>>,
        fields: Option<Arc<FieldRules>>,
        known: &mut Known,
    ) -> Callsite {
        let keep = candidate.map_or(Keep::never(), |candidate| candidate.keep);
        let rule = candidate.map_or(u32::MAX, |candidate| candidate.number);
        let plan = self.planner.0(&keep);
        let has_status = metadata.fields().field(STATUS_FIELD).is_some();
        let status = if has_status { HAS_STATUS } else { 0 };
        let values = if fields.is_some() { HAS_FIELDS } else { 0 };
        let plan = Plan { number, flags: plan.flags | status | values, ..plan };
        let sketch = keep
            .percentile()
            .and_then(|(millionths, _)| self.sketch((rule, metadata.name()), millionths, known));
        let ns = |limit: Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let (hung_ns, open_ns) = (keep.hung_limit().map(ns), keep.open_limit().map(ns));
        for limit_ns in [hung_ns, open_ns].into_iter().flatten() {
            self.least_limit_ns.fetch_min(limit_ns, Ordering::Relaxed);
        }
        if plan.arm_after > 0 && !keep.is_never() {
            self.least_age.fetch_min(plan.arm_after, Ordering::Relaxed);
        }
        let count = AtomicU32::new(0);
        Callsite { metadata, keep, rule, plan, hung_ns, open_ns, fields, sketch, count }
    }

    fn sketch(
        &self,
        key: (u32, &'static str),
        millionths: u32,
        known: &mut Known,
    ) -> Option<Arc<Sketch>> {
        if let Some(known) = known.sketches.get(&key) {
            return Some(Arc::clone(known));
        }
        if known.sketches_in_use >= MOST_SKETCHES {
            Counters::add(&self.counters.percentiles_not_kept, 1);
            return None;
        }
        let new = Arc::new(Sketch::new(millionths));
        known.sketches.insert(key, Arc::clone(&new));
        Some(new)
    }

    fn remember(&self, address: usize, plan: Option<&Plan>, generation: u32, in_table: &mut usize) {
        let mut in_use = self.in_use.load(Ordering::Relaxed);
        let mut table = self.table(in_use);
        if let Some(entry) = entry_of(table, address)
            && entry.address.load(Ordering::Relaxed) == address
        {
            entry.set(address, plan, generation);
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
            entry.set(address, plan, generation);
            *in_table += 1;
        }
        self.in_use.store(in_use, Ordering::Release);
    }

    fn table(&self, number: usize) -> &[Entry] {
        let new = || (0..FIRST_TABLE << number).map(|_| Entry::default()).collect();
        self.tables.get(number).map_or(&[], |table| table.get_or_init(new))
    }
}

/// The rules that may decide on spans of a callsite, the most specific first.
fn candidates<'a>(
    metadata: &'static Metadata<'static>,
    address: usize,
    generation: u32,
    rules: &'a Rules,
    known: &mut Known,
) -> Vec<Candidate<'a>> {
    let mut number = |key| {
        let number = known.next_rule;
        let new = || {
            known.next_rule = number.wrapping_add(1);
            RuleNumber { number, generation }
        };
        let rule = known.rule_numbers.entry(key).or_insert_with(new);
        rule.generation = generation;
        rule.number
    };
    let matching = rules.candidates(metadata);
    let is_decided = matching.last().is_some_and(|rule| !rule.needs_values());
    let mut candidates: Vec<_> = matching
        .into_iter()
        .map(|rule| Candidate {
            rule,
            number: number(RuleKey::Rule(Box::new(rule.clone()))),
            keep: *rule.keep(),
        })
        .collect();
    // A directive that names the span or its target beats the attribute.
    let last = candidates.last().filter(|_| is_decided);
    if last.is_some_and(|last| !last.rule.is_for_all()) {
        return candidates;
    }
    let Some(keep) = attribute::keep_of(metadata) else { return candidates };
    let rule = last.map_or(Rule::any(), |last| last.rule);
    if is_decided {
        candidates.pop();
    }
    candidates.push(Candidate { rule, number: number(RuleKey::Attribute(address)), keep });
    candidates
}

/// Whether so many rules came after those of that generation that it need not be known any more.
fn is_old(generation: u32, now: u32) -> bool {
    now.wrapping_sub(generation) > GENERATIONS_KEPT
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
    /// The plan, if it was decided in that generation of the rules whether there is one.
    #[inline(always)]
    fn plan(&self, generation: u32) -> Option<Option<Plan>> {
        let decided = self.decided.load(Ordering::Acquire);
        if (decided >> u32::BITS) as u32 != generation || decided as u32 == IN_WORK {
            return None;
        }
        let Some(number) = (decided as u32).checked_sub(1) else { return Some(None) };
        // Acquire: if one of them is newer, so is what is read last.
        let plan = Plan {
            number,
            flags: self.flags.load(Ordering::Acquire),
            suspect_after: self.suspect_after.load(Ordering::Acquire),
            arm_after: self.arm_after.load(Ordering::Acquire),
            long_after: self.long_after.load(Ordering::Acquire),
        };
        (self.decided.load(Ordering::Relaxed) == decided).then_some(Some(plan))
    }

    /// With the lock, so that nobody else does.
    fn set(&self, address: usize, plan: Option<&Plan>, generation: u32) {
        if let Some(plan) = plan {
            // Nobody takes half of it for a whole.
            self.decided.store(u64::from(IN_WORK), Ordering::Relaxed);
            // Release: who finds one of them finds that.
            self.flags.store(plan.flags, Ordering::Release);
            self.suspect_after.store(plan.suspect_after, Ordering::Release);
            self.arm_after.store(plan.arm_after, Ordering::Release);
            self.long_after.store(plan.long_after, Ordering::Release);
        }
        let number = plan.map_or(0, |plan| plan.number + 1);
        let decided = u64::from(generation) << u32::BITS | u64::from(number);
        // Release: who finds the number finds what it stands for.
        self.decided.store(decided, Ordering::Release);
        self.address.store(address, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Condition, Rule};
    use super::*;

    fn callsites(rules: Rules) -> Callsites {
        let plan = |keep: &Keep| Plan {
            number: 0,
            flags: 0,
            suspect_after: keep.latency().map_or(u64::MAX, |latency| latency.as_nanos() as u64),
            arm_after: 0,
            long_after: 0,
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
                let plan = callsites.find(slow).unwrap();
                assert_eq!(plan.suspect_after, 9);
                let callsite = callsites.get(plan.number).unwrap();
                assert_eq!((callsite.metadata.target(), callsite.rule), ("slow", 0));
                assert_eq!(callsite.plan.number, plan.number);
                assert_eq!(callsites.find(fast).unwrap().suspect_after, 3);
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
            let callsites = callsites(Rules::new(rules));
            let seen = |metadata| {
                let plan = callsites.find(metadata)?;
                let rule = callsites.get(plan.number)?.rule;
                Some((plan.suspect_after, rule))
            };
            assert_eq!(seen(named), Some((50, 0)));
            assert_eq!(seen(plain), Some((7, 2)), "a rule of its own");
            assert_eq!(seen(says_nothing), Some((100, 1)));
            assert_eq!(seen(off), None);
        });
    }

    #[test]
    fn a_table_that_fills_up_is_replaced_and_forgets_nothing() {
        let callsites = callsites(Rules::default());
        // Only the address of the metadata matters here, and only these callsites are ever read.
        with_spans(|| {
            let metadata = metadata_of(&tracing::info_span!("real"));
            let number = callsites.find(metadata).unwrap().number;
            let mut in_table = callsites.known.lock().in_table;
            for address in 1..5 * FIRST_TABLE {
                let plan = Plan {
                    number: address as u32,
                    flags: 0,
                    suspect_after: 1,
                    arm_after: 0,
                    long_after: 0,
                };
                callsites.remember(address << 4, Some(&plan), 0, &mut in_table);
            }
            assert!(callsites.in_use.load(Ordering::Relaxed) >= 2);
            assert_eq!(callsites.find(metadata).unwrap().number, number);
            let table = callsites.table(callsites.in_use.load(Ordering::Relaxed));
            let last = (5 * FIRST_TABLE - 1) << 4;
            let entry = probe(table, last).find(|e| e.address.load(Ordering::Relaxed) == last);
            let plan = |generation| entry.unwrap().plan(generation);
            assert_eq!(plan(0).unwrap().unwrap().number, (last >> 4) as u32);
            assert!(plan(1).is_none(), "of rules that were replaced");
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
                let plan = callsites.find(span)?;
                let site = callsites.get(plan.number)?;
                Some((plan.suspect_after, plan.number, site.rule))
            };
            assert_eq!(find(), Some((9, 0, 0)));
            for _ in 0..1_000 {
                callsites.give_back(&HashSet::new());
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
    fn what_rules_meant_that_were_replaced_is_given_back_unless_it_is_in_use() {
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
            let count = || {
                let known = callsites.known.lock();
                let (plans, rules) = (callsites.plans.count(), known.rule_numbers.len());
                (plans, known.by_decision.len(), rules, known.sketches.len())
            };
            let in_use = HashSet::from([open]);
            let mut most = (0, 0, 0, 0);
            for set in 1..200 {
                callsites.replace(rules(set));
                let found = spans.map(|span| callsites.find(span).unwrap());
                for plan in found {
                    assert_eq!(plan.suspect_after, 1 + set);
                    assert!(callsites.get(plan.number).unwrap().keep.latency().is_some());
                }
                if callsites.has_old() {
                    callsites.give_back(&in_use);
                }
                if set == 20 {
                    most = count();
                }
                assert!(set < 20 || count() == most, "{set}: {:?}", count());
            }
            let first = callsites.get(open).unwrap();
            assert_eq!((first.metadata.name(), first.plan.suspect_after), ("a", 1));
            // Also what its values may make of it.
            let tenant = spans[0].fields().field("tenant").unwrap();
            let fields = first.fields.as_ref().unwrap();
            let chosen = fields.choose(|visit| visit.record_u64(&tenant, 7)).unwrap();
            assert_eq!(callsites.get(chosen.number).unwrap().plan.suspect_after, 9);
            assert!(callsites.has_old());
            assert_eq!(callsites.least_limit(), Some(Duration::from_secs(1)));
            callsites.give_back(&HashSet::new());
            assert!(!callsites.has_old() && callsites.get(open).is_none());
            assert!(callsites.least_limit() > Some(Duration::from_secs(1)));
        });
    }

    #[test]
    fn a_plan_is_never_read_half() {
        let entry = Entry::default();
        let plan = |generation: u32| Plan {
            number: generation,
            flags: generation,
            suspect_after: u64::from(generation),
            arm_after: 0,
            long_after: u64::from(generation),
        };
        let generation = AtomicU32::new(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..200_000 {
                    entry.set(16, Some(&plan(number)), number);
                    generation.store(number, Ordering::Release);
                }
                generation.store(u32::MAX, Ordering::Release);
            });
            scope.spawn(|| {
                loop {
                    let asked = generation.load(Ordering::Acquire);
                    if asked == u32::MAX {
                        break;
                    }
                    if let Some(Some(read)) = entry.plan(asked) {
                        assert_eq!(format!("{read:?}"), format!("{:?}", plan(asked)));
                    }
                }
            });
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

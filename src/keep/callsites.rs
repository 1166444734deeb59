//! From a callsite to what the rules say of it, without hashing or locks.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tracing::Metadata;

use super::attribute::Settings;
use super::{Keep, Rules};
use crate::span::{HAS_STATUS, Plan};

/// Remembers for each callsite what the rules say.
///
/// We do not use `Interest` for this: a `never` of ours would switch the callsite off for every
/// other layer too.
#[derive(Debug)]
pub(crate) struct Callsites {
    rules: Rules,
    planner: Planner,
    /// Each twice as long as the one before. The last one that is there is in use; what is only
    /// in another is found again the slow way, once.
    tables: [OnceLock<Box<[Entry]>>; TABLES],
    in_use: AtomicUsize,
    known: Mutex<Known>,
}

/// A callsite's metadata and its plan. Zeros are a free entry.
#[derive(Debug, Default)]
struct Entry {
    address: AtomicUsize,
    /// The plan's number plus 1; 0 if no rule matches.
    number: AtomicU32,
    flags: AtomicU32,
    suspect_after: AtomicU64,
    period_ns: AtomicU64,
}

/// All callsites that have been asked for.
#[derive(Debug, Default)]
struct Known {
    by_address: HashMap<usize, Option<Plan>>,
    by_number: Vec<Callsite>,
    in_table: usize,
}

/// What a plan's number stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Callsite {
    pub(crate) metadata: &'static Metadata<'static>,
    pub(crate) keep: Keep,
    /// The number of the rule that decided. Each `#[profiled]` that says when to keep is one.
    pub(crate) rule: usize,
}

/// Says what spans get that are kept so and sampled at that rate, if one is given. The number does
/// not matter.
pub(crate) type Plans = Box<dyn Fn(&Keep, Option<u32>) -> Plan + Send + Sync>;

struct Planner(Plans);

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
    pub(crate) fn new(rules: Rules, plans: Plans) -> Self {
        let callsites = Self {
            rules,
            planner: Planner(plans),
            tables: [const { OnceLock::new() }; TABLES],
            in_use: AtomicUsize::new(0),
            known: Mutex::default(),
        };
        callsites.table(0);
        callsites
    }

    /// What the rules say of spans from this callsite; `None` if they are not profiled.
    #[inline]
    pub(crate) fn plan(&self, metadata: &'static Metadata<'static>) -> Option<Plan> {
        let address = std::ptr::from_ref(metadata).addr();
        let table = self.tables.get(self.in_use.load(Ordering::Acquire))?.get()?;
        let first = table.get(mixed(address) & table.len().wrapping_sub(1))?;
        if first.address.load(Ordering::Acquire) == address {
            return first.plan();
        }
        self.search(table, metadata, address)
    }

    fn search(
        &self,
        table: &[Entry],
        metadata: &'static Metadata<'static>,
        address: usize,
    ) -> Option<Plan> {
        for entry in probe(table, address) {
            match entry.address.load(Ordering::Acquire) {
                found if found == address => return entry.plan(),
                0 => break,
                _ => {}
            }
        }
        self.find(metadata, address)
    }

    /// The callsite and rule of a plan.
    pub(crate) fn callsite(&self, number: u32) -> Option<Callsite> {
        self.known.lock().by_number.get(number as usize).copied()
    }

    #[cold]
    fn find(&self, metadata: &'static Metadata<'static>, address: usize) -> Option<Plan> {
        let mut known = self.known.lock();
        let plan = match known.by_address.get(&address) {
            Some(plan) => *plan,
            None => {
                let plan = self.decide(metadata, &mut known.by_number);
                known.by_address.insert(address, plan);
                plan
            }
        };
        self.remember(address, plan, &mut known.in_table);
        plan
    }

    fn decide(
        &self,
        metadata: &'static Metadata<'static>,
        by_number: &mut Vec<Callsite>,
    ) -> Option<Plan> {
        let number = u32::try_from(by_number.len()).ok()?;
        let rule = self.rules.decide(metadata);
        let decided = rule.and_then(|rule| self.rules.get(rule));
        let settings = match decided {
            Some(rule) if !rule.is_for_all() => None,
            _ => Settings::of(metadata),
        };
        let Settings { keep, rate } = settings.unwrap_or_default();
        let (keep, rule) = match keep {
            Some(keep) => (keep, self.rules.len() + by_number.len()),
            None => (*decided?.keep(), rule?),
        };
        if keep.is_never() {
            return None;
        }
        let plan = self.planner.0(&keep, rate);
        by_number.push(Callsite { metadata, keep, rule });
        let has_status = metadata.fields().iter().any(|field| field.name() == STATUS_FIELD);
        let status = if has_status { HAS_STATUS } else { 0 };
        Some(Plan { number, flags: plan.flags | status, ..plan })
    }

    fn remember(&self, address: usize, plan: Option<Plan>, in_table: &mut usize) {
        let mut in_use = self.in_use.load(Ordering::Relaxed);
        let mut table = self.table(in_use);
        if *in_table >= table.len() / 2 {
            if in_use + 1 == TABLES {
                // A million callsites: the rest is found the slow way each time.
                return;
            }
            in_use += 1;
            table = self.table(in_use);
            *in_table = 0;
        }
        let free = probe(table, address).find(|entry| entry.address.load(Ordering::Relaxed) == 0);
        if let Some(entry) = free {
            entry.set(address, plan);
            *in_table += 1;
        }
        self.in_use.store(in_use, Ordering::Release);
    }

    fn table(&self, number: usize) -> &[Entry] {
        let new = || (0..FIRST_TABLE << number).map(|_| Entry::default()).collect();
        self.tables.get(number).map_or(&[], |table| table.get_or_init(new))
    }
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
    #[inline]
    fn plan(&self) -> Option<Plan> {
        Some(Plan {
            number: self.number.load(Ordering::Relaxed).checked_sub(1)?,
            flags: self.flags.load(Ordering::Relaxed),
            suspect_after: self.suspect_after.load(Ordering::Relaxed),
            period_ns: self.period_ns.load(Ordering::Relaxed),
        })
    }

    fn set(&self, address: usize, plan: Option<Plan>) {
        if let Some(plan) = plan {
            self.number.store(plan.number + 1, Ordering::Relaxed);
            self.flags.store(plan.flags, Ordering::Relaxed);
            self.suspect_after.store(plan.suspect_after, Ordering::Relaxed);
            self.period_ns.store(plan.period_ns, Ordering::Relaxed);
        }
        // Who finds the address finds all of the above.
        self.address.store(address, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Rule;
    use super::*;

    fn callsites(rules: Rules) -> Callsites {
        let plan = |keep: &Keep, rate: Option<u32>| Plan {
            number: 0,
            flags: 0,
            suspect_after: keep.latency().map_or(u64::MAX, |latency| latency.as_nanos() as u64),
            period_ns: rate.map_or(5, u64::from),
        };
        Callsites::new(rules, Box::new(plan))
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
                let plan = callsites.plan(slow).unwrap();
                assert_eq!(plan.suspect_after, 9);
                let callsite = callsites.callsite(plan.number).unwrap();
                assert_eq!((callsite.metadata.target(), callsite.rule), ("slow", 0));
                assert_eq!(callsites.plan(fast).unwrap().suspect_after, 3);
                assert_eq!(callsites.plan(off), None);
                assert_eq!(callsites.plan(none), None);
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
                let plan = callsites.plan(metadata)?;
                let rule = callsites.callsite(plan.number)?.rule;
                Some((plan.suspect_after, plan.period_ns, rule))
            };
            assert_eq!(seen(named), Some((50, 5, 1)));
            assert_eq!(seen(plain), Some((7, 9, 3)), "a rule of its own");
            assert_eq!(seen(rate_only), Some((100, 9, 0)));
            assert_eq!(seen(off), None);
        });
    }

    #[test]
    fn a_table_that_fills_up_is_replaced_and_forgets_nothing() {
        let callsites = callsites(Rules::default());
        // Only the address of the metadata matters here, and only these callsites are ever read.
        with_spans(|| {
            let metadata = metadata_of(&tracing::info_span!("real"));
            let number = callsites.plan(metadata).unwrap().number;
            let mut in_table = callsites.known.lock().in_table;
            for address in 1..5 * FIRST_TABLE {
                let plan = callsites.planner.0(&Keep::failed(), None);
                let plan = Plan { number: address as u32, ..plan };
                callsites.remember(address << 4, Some(plan), &mut in_table);
            }
            assert!(callsites.in_use.load(Ordering::Relaxed) >= 2);
            assert_eq!(callsites.plan(metadata).unwrap().number, number);
            let table = callsites.table(callsites.in_use.load(Ordering::Relaxed));
            let last = (5 * FIRST_TABLE - 1) << 4;
            let entry = probe(table, last).find(|e| e.address.load(Ordering::Relaxed) == last);
            assert_eq!(entry.unwrap().plan().unwrap().number as usize, last >> 4);
        });
    }
}

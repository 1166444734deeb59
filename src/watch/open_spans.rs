//! The list of open spans, each with where it is.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::assemble::ProfileInputs;
use crate::engine::Engine;
use crate::intake::Intake;
use crate::profile::{ProfileId, SampleKind};
use crate::publish::{Asked, Job, OpenSpan, OpenState, Reply, link_of};
use crate::sinks::{Stack, StackLeaf};
use crate::span::{RegistryId, SpanKey};
use crate::threads::Threads;

/// Spans beyond that number are left out, the youngest first.
const MAX_LISTED: usize = 1_000;

struct SpanPlace {
    state: OpenState,
    since_ns: u64,
    stack: Stack,
}

pub(crate) fn list_open(
    engine: &Engine,
    intake: &mut Intake,
    threads: &Threads,
    (older_than, reply): (Duration, Reply<Vec<OpenSpan>>),
) -> Job {
    let now_ns = intake.now_ns();
    let mut open = Vec::new();
    engine.spans.for_each_open(|slot| {
        if u128::from(slot.open_ns) > older_than.as_nanos() {
            open.push(*slot);
        }
    });
    open.sort_by_key(|slot| u64::MAX - slot.open_ns);
    open.truncate(MAX_LISTED);
    let ids: HashMap<SpanKey, RegistryId> = open.iter().map(|slot| (slot.key, slot.id)).collect();
    let mut places = places(engine, intake, threads, &ids);
    // Of several tasks in a span, the one that has been there for longest is shown.
    places.sort_by_key(|(_, place)| place.since_ns);
    let mut known = HashSet::new();
    places.retain(|(key, _)| known.insert(*key));
    let mut shown: HashMap<SpanKey, &(SpanKey, SpanPlace)> = HashMap::new();
    for place in &places {
        let around = ids.get(&place.0).and_then(|id| engine.spans.describe(*id, place.0));
        for (key, _) in around.unwrap_or_default() {
            shown.entry(key).or_insert(place);
        }
    }
    let spans = open.iter().map(|slot| {
        // A thread in the span, or no thread and a future.
        let is_there =
            |place: &SpanPlace| (place.state == OpenState::Entered) == slot.entered_ns.is_some();
        let shown = shown.get(&slot.key).filter(|(_, place)| is_there(place));
        let place = shown.map(|(_, place)| place);
        let state = match (slot.entered_ns, place) {
            (Some(_), _) => OpenState::Entered,
            (None, Some(place)) => place.state,
            (None, None) => OpenState::Idle,
        };
        let state_ns = place.map(|place| now_ns.saturating_sub(place.since_ns)).or(slot.entered_ns);
        let callsite = engine.callsites.get(slot.plan);
        let target = callsite.map_or("", |callsite| callsite.metadata.target());
        let open = OpenSpan {
            name: engine.name_by(slot.plan).unwrap_or_default(),
            target: engine.names.redaction.redact_function(target).into_owned(),
            fields: engine.names.values_of(slot.id).into_vec(),
            open_for: Duration::from_nanos(slot.open_ns),
            state,
            state_for: state_ns.map(Duration::from_nanos),
            stack: Vec::new(),
        };
        (open, shown.map(|(key, _)| *key))
    });
    let asked = Asked::OpenSpans(spans.collect(), reply);
    let stacks = places.iter().map(|(key, place)| {
        let is_blocked = place.state == OpenState::Entered;
        let kind = if is_blocked { SampleKind::OffCpu } else { SampleKind::Await };
        (place.stack.entries(), (None, Some(link_of(*key))), vec![(kind, 1)])
    });
    let inputs =
        ProfileInputs::new(&engine.callsites, &intake.sinks.store, &intake.reader.unwinder);
    Job::Reply { unnamed: inputs.profile_of_stacks(ProfileId::NONE, stacks).into(), asked }
}

/// Where threads are blocked and futures await, by innermost span.
fn places(
    engine: &Engine,
    intake: &mut Intake,
    threads: &Threads,
    ids: &HashMap<SpanKey, RegistryId>,
) -> Vec<(SpanKey, SpanPlace)> {
    let waiting = threads.waiting().map(|waiting| {
        let (since_ns, stack) = (waiting.since_ns, waiting.stack.clone());
        (waiting.span, SpanPlace { state: OpenState::Entered, since_ns, stack })
    });
    let mut places: Vec<_> = waiting.collect();
    let present = engine.awaits.present(|span| ids.contains_key(&span.key));
    intake.reader.unwinder.refresh();
    for (span, sample) in present {
        let mut stack = intake.unwound(&sample);
        let [awaited, delay] = sample.amounts;
        let (state, at) = match delay.weight > 0 {
            true => (OpenState::Woken, delay.at),
            false => (OpenState::Awaiting, awaited.at),
        };
        if state == OpenState::Woken {
            stack.waited = Some(StackLeaf::Scheduling);
        }
        places.push((span.key, SpanPlace { state, since_ns: intake.clock().raw_ns(at), stack }));
    }
    places
}

//! The list of open spans, each with where it is.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::awaits::unwound;
use super::build::{ProfileAssembler, StackWeight};
use super::command::Command;
use super::engine::Engine;
use super::run::Collector;
use super::sampled::Sampled;
use super::stack::{Stack, Waited};
use crate::ids::ProfileId;
use crate::keep::FieldValues;
use crate::profile::{LinkId, Profile, SampleKind};
use crate::publish::{Job, Question, ReplyWith};
use crate::span::{OpenSlot, RegistryId, SpanKey};
use crate::text::beginning;

/// A profiled span that is open, from [`Handle::open_spans`](crate::Handle::open_spans).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenSpan {
    /// Its name.
    pub name: String,
    /// Its target.
    pub target: String,
    /// The values of its shown fields.
    pub fields: Vec<(&'static str, String)>,
    /// For how long it has been open.
    pub open_for: Duration,
    /// What it does.
    pub state: OpenState,
    /// For how long it has been doing that, if that is known.
    pub state_for: Option<Duration>,
    /// Where it awaits, or where its thread is blocked: functions with files and lines, the innermost first. Empty if that
    /// is not known.
    pub stack: Vec<String>,
}

/// What an open span does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OpenState {
    /// A thread is in it.
    Entered,
    /// Its future, or that of a span inside it, awaits something.
    Awaiting,
    /// That future was woken, and its executor has not polled it yet.
    Woken,
    /// No thread is in it, and what it awaits is not known, since its future is not
    /// [`Profiled`](crate::Profiled).
    Idle,
}

impl OpenState {
    /// In lower case, as in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Entered => "entered",
            Self::Awaiting => "awaiting",
            Self::Woken => "woken",
            Self::Idle => "idle",
        }
    }
}

/// Spans beyond that number are left out, the youngest first.
const MOST_LISTED: usize = 1_000;
/// How long the caller waits for the layer's threads.
const LONGEST: Duration = Duration::from_secs(10);

/// Open spans whose stacks have no symbols yet.
#[derive(Debug)]
pub(super) struct FoundSpans {
    /// Each with the number of its stack.
    spans: Vec<(OpenSpan, Option<usize>)>,
    reply: Question<Vec<OpenSpan>>,
}

impl FoundSpans {
    /// Replies with the stacks of a symbolized profile.
    pub(super) fn reply(self, symbolized: &Profile) {
        let lines = |number: usize| {
            let is_it = |link: LinkId| {
                symbolized.link(link).is_some_and(|link| link.span == number.to_string())
            };
            let mut samples = symbolized.samples().iter();
            let sample = samples.find(|sample| sample.link.is_some_and(is_it))?;
            Some(symbolized.stack_in_words(sample.stack))
        };
        let spans = self.spans.into_iter().map(|(span, stack)| {
            let stack = stack.and_then(lines).unwrap_or_default();
            OpenSpan { stack, ..span }
        });
        self.reply.send(spans.collect());
    }
}

/// Where a span is.
struct SpanPlace {
    state: OpenState,
    since_ns: u64,
    stack: Stack,
}

/// Finds all spans that have been open for longer than `older_than`.
pub(super) fn find_open(
    collector: &mut Collector,
    older_than: Duration,
    reply: Question<Vec<OpenSpan>>,
) -> Job {
    let clock = collector.engine.spans.clock();
    let now_ns = clock.raw_ns(clock.now());
    let mut open = Vec::new();
    collector.engine.spans.for_each_open(|slot| {
        if u128::from(slot.open_ns) > older_than.as_nanos() {
            open.push(*slot);
        }
    });
    open.sort_by_key(|slot| u64::MAX - slot.open_ns);
    open.truncate(MOST_LISTED);
    let ids: HashMap<SpanKey, RegistryId> = open.iter().map(|slot| (slot.key, slot.id)).collect();
    let mut places = places(collector, &ids);
    // Of several tasks in a span, the one that has been there for longest is shown.
    places.sort_by_key(|(_, place)| place.since_ns);
    let mut numbers: HashMap<SpanKey, usize> = HashMap::new();
    for (number, (key, _)) in places.iter().enumerate() {
        let around = ids.get(key).and_then(|id| collector.engine.spans.describe(*id, *key));
        for (key, _) in around.unwrap_or_default() {
            numbers.entry(key).or_insert(number);
        }
    }
    let stacks = places.iter().enumerate().map(|(number, (_, place))| StackWeight {
        stack: &place.stack,
        link: Some(number.to_string()),
        kind: SampleKind::Await,
        weight: 1,
    });
    let spans = open.iter().map(|slot| {
        let number = numbers.get(&slot.key).copied().filter(|number| {
            let place = places.get(*number).map(|(_, place)| place.state);
            // A thread in the span, or no thread and a future.
            (place == Some(OpenState::Entered)) == slot.entered_ns.is_some()
        });
        let place = number.and_then(|number| places.get(number)).map(|(_, place)| place);
        (describe_open(&collector.engine, slot, place, now_ns), number)
    });
    let spans = spans.collect();
    let (profile, modules) = ProfileAssembler::profile_of_stacks(
        &collector.pending,
        collector.unwinder.modules(),
        &collector.engine,
        (ProfileId::NONE, 1),
        stacks,
    );
    let found = FoundSpans { spans, reply };
    let then = ReplyWith(Box::new(move |profile| found.reply(&profile)));
    Job::Reply { profile: Box::new(profile), modules, then }
}

/// Where threads are blocked and futures await, by innermost span.
fn places(
    collector: &mut Collector,
    ids: &HashMap<SpanKey, RegistryId>,
) -> Vec<(SpanKey, SpanPlace)> {
    let waiting = collector.sampled.iter().filter_map(Sampled::waiting).map(|waiting| {
        let (since_ns, stack) = (waiting.since_ns, waiting.stack.clone());
        (waiting.span, SpanPlace { state: OpenState::Entered, since_ns, stack })
    });
    let mut places: Vec<_> = waiting.collect();
    collector.unwinder.refresh();
    for sample in collector.engine.copied.awaits.present(|span| ids.contains_key(&span.key)) {
        let most_frames = collector.limits.frames_per_stack;
        let mut stack = unwound(&sample.stacks, &mut collector.unwinder, most_frames);
        let is_woken = sample.delay_ns > 0;
        if is_woken {
            stack.waited = Some(Waited::Scheduling(None));
        }
        let (state, since_ns) = match is_woken {
            true => (OpenState::Woken, sample.woken_ns),
            false => (OpenState::Awaiting, sample.since_ns),
        };
        places.push((sample.span.key, SpanPlace { state, since_ns, stack }));
    }
    places
}

/// The profiled spans that have been open for longer than that; `None` if the layer's threads do not answer in time.
pub(crate) fn open_spans(engine: &Engine, older_than: Duration) -> Option<Vec<OpenSpan>> {
    let (reply, wait) = engine.commands.questions.ask()?;
    let deadline = Instant::now() + LONGEST;
    let asked = engine.ask(Command::FindOpen { older_than, reply });
    wait.recv_deadline(deadline).ok().filter(|_| asked)
}

fn describe_open(
    engine: &Engine,
    slot: &OpenSlot,
    place: Option<&SpanPlace>,
    now_ns: u64,
) -> OpenSpan {
    let callsite = engine.callsites.get(slot.plan);
    let text = |of: fn(&tracing::Metadata<'static>) -> &'static str| {
        callsite.as_ref().map_or("", |callsite| of(callsite.metadata))
    };
    let values = engine.with_dispatch(|dispatch| FieldValues::of(slot.id, dispatch));
    let values = values.map(|value| engine.redaction.redact_span(value).into());
    let state = match (slot.entered_ns, place) {
        (Some(_), _) => OpenState::Entered,
        (None, Some(place)) => place.state,
        (None, None) => OpenState::Idle,
    };
    let state_ns = place.map(|place| now_ns.saturating_sub(place.since_ns)).or(slot.entered_ns);
    OpenSpan {
        name: engine
            .redaction
            .redact_span(text(|metadata| beginning(metadata.name())))
            .into_owned(),
        target: engine.redaction.redact_function(text(|metadata| metadata.target())).into_owned(),
        fields: values.into_vec(),
        open_for: Duration::from_nanos(slot.open_ns),
        state,
        state_for: state_ns.map(Duration::from_nanos),
        stack: Vec::new(),
    }
}

//! Whole traces of what was kept, and one in *n* of the others: a processor of OpenTelemetry spans that holds those of a
//! trace until none of them is open any more.
//!
//! A trace is decided when none of its spans is open, which needs no local roots: overlapping calls and detached spans
//! are decided together.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::mem::take;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crossbeam::utils::CachePadded;
use opentelemetry::trace::{Span as _, SpanContext, Status, TraceContextExt, TraceId};
use opentelemetry::{Array, Context, KeyValue, Value};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use parking_lot::{Mutex, MutexGuard, RwLock};

use super::probability::{randomness_of, with_threshold};
use super::span_delivery::{COUNTERS, Lot, PAUSE, SpanOutbox};
use crate::span::{InnermostSpan, TraceIds, innermost_span};
use crate::stats::{Counters, TraceStats};
use crate::sys;

const SHARDS: usize = 32;
/// Spans and bytes.
const DEFAULT_BOUNDS: (usize, usize) = (131_072, 64 << 20);
/// Traces that hold spans, of a shard, among which the one to drop is found at the bound.
const MOST_COMPARED: usize = 256;
/// Traces of a shard that went on and have no open span.
const MOST_FOLLOWED: usize = 4_096;
/// For how long what starts later follows one of them.
const FOLLOWED: Duration = Duration::from_secs(10);
/// How many of them are forgotten at once.
const MOST_FORGOTTEN: usize = 8;
/// Places for spans that an open trace gets at first, and that a large one gets at once.
const PLACES: (usize, usize) = (4, 1_024);
const LONGEST_FLUSH: Duration = Duration::from_secs(10);

/// What layers report kept spans to, whichever was made first.
static ALL: RwLock<Vec<Weak<HeldTraces>>> = RwLock::new(Vec::new());

/// A processor of OpenTelemetry spans that passes on the whole traces of spans that were kept or failed, and one in *n* of
/// the others, to another processor, such as one that exports in batches.
///
/// ```
/// use opentelemetry_sdk::trace::{BatchSpanProcessor, Sampler, SdkTracerProvider};
/// use tracing_profiling::KeptTraces;
///
/// # let exporter = opentelemetry_sdk::trace::InMemorySpanExporter::default();
/// let batches = BatchSpanProcessor::builder(exporter).build();
/// let provider = SdkTracerProvider::builder()
///     .with_sampler(Sampler::AlwaysOn)
///     .with_span_processor(KeptTraces::new(batches).one_in(100))
///     .build();
/// ```
///
/// The processor holds the spans of a trace that ended, as far as they are of this process, until none of them is open.
/// All of them go on if a layer of this crate kept one, which sets [`profile.reason`](crate::span_attributes), or the
/// status of one is an error: at once, and those that end later with them. Of the other traces one in *n* goes on at
/// its end, chosen by the randomness of its id as OpenTelemetry specifies it, so processes with the same *n* choose the
/// same. The rest is dropped. [`TraceStats`] counts this; the [guide](crate::guide::kept_traces) has the limits.
///
/// Spans are passed on by a thread, which waits while the other processor has no room. The program never waits. The other
/// processor learns of the start of each span (`on_start`), also of those that are dropped later.
pub struct KeptTraces<P> {
    next: Arc<P>,
    choice: TraceChoice,
    bounds: (usize, usize),
    /// From the first span on; `None` if all spans are to be passed on, or no thread can be started.
    held: OnceLock<Option<Arc<HeldTraces>>>,
}

/// Which traces go on beside those of kept and failed spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TraceChoice {
    /// 0 for none.
    one_in: u32,
    /// Traces that come from a remote parent with the sampled flag go on.
    sampled_parents: bool,
}

impl TraceChoice {
    /// The rejection threshold of ordinary traces, of 56 bits: one goes on whose randomness is not below it.
    fn threshold(self) -> u64 {
        match u64::from(self.one_in) {
            0 => 1 << 56,
            traces => (1 << 56) - (1 << 56) / traces,
        }
    }
}

impl<P: SpanProcessor + 'static> KeptTraces<P> {
    /// Passes the traces of kept and failed spans, and one in 100 of the others, on to `next`.
    pub fn new(next: P) -> Self {
        let (next, choice) = (Arc::new(next), TraceChoice { one_in: 100, sampled_parents: false });
        Self { next, choice, bounds: DEFAULT_BOUNDS, held: OnceLock::new() }
    }

    /// One in how many traces without a kept or failed span goes on: 0 for none; 1 for all traces, which are then not held.
    #[must_use]
    pub fn one_in(mut self, traces: u32) -> Self {
        self.choice.one_in = traces;
        self
    }

    /// Whether each trace goes on that comes from a remote parent with the sampled flag. The default is false: services
    /// that decide at the end set the flag in all traces.
    #[must_use]
    pub fn sampled_parents(mut self, go_on: bool) -> Self {
        self.choice.sampled_parents = go_on;
        self
    }

    /// How many spans are held at most, and their bytes in memory, estimated: 131,072 and 64 MiB by default. At the bound the
    /// trace that has held most for longest is dropped whole: [`TraceStats::dropped_over_bound`].
    #[must_use]
    pub fn bounds(mut self, spans: usize, bytes: usize) -> Self {
        self.bounds = (spans.max(1), bytes);
        self
    }

    fn held(&self) -> Option<&HeldTraces> {
        let start =
            || HeldTraces::start(self.choice, self.bounds, Arc::clone(&self.next) as Arc<_>);
        let held = self.held.get_or_init(start).as_deref();
        // In the child of a fork, its locks may be held forever.
        held.filter(|held| held.made_in == sys::Forks::generation())
    }
}

impl<P: fmt::Debug> fmt::Debug for KeptTraces<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KeptTraces").field(&self.next).field(&self.choice).finish()
    }
}

impl<P: SpanProcessor + 'static> SpanProcessor for KeptTraces<P> {
    fn on_start(&self, span: &mut Span, context: &Context) {
        if let Some(held) = self.held() {
            let is_forced = held.choice.sampled_parents && {
                let parent = context.span();
                parent.span_context().is_remote() && parent.span_context().is_sampled()
            };
            held.begin(span.span_context().trace_id(), is_forced);
        }
        self.next.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        match self.held() {
            Some(held) => held.end(span),
            None => self.next.on_end(with_threshold(span, None)),
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        match self.held() {
            Some(held) => held.outbox.flush(LONGEST_FLUSH),
            None => self.next.force_flush(),
        }
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        let Some(held) = self.held() else { return self.next.shutdown_with_timeout(timeout) };
        held.outbox.shutdown(timeout, || held.decide_all())
    }

    fn set_resource(&mut self, resource: &Resource) {
        // A provider sets it before there are spans.
        if let Some(next) = Arc::get_mut(&mut self.next) {
            next.set_resource(resource);
        }
    }
}

/// A layer has kept a span of the trace that `find` returns, which is asked only if traces are held.
pub(crate) fn keep_trace(find: impl FnOnce() -> Option<TraceIds>) {
    let all = all_here();
    if !all.is_empty()
        && let Some(ids) = find()
    {
        let trace = TraceId::from_bytes(ids.trace.to_bytes());
        all.iter().for_each(|held| held.keep(trace));
    }
}

/// A layer has kept an open span, which is one of those spans or inside them.
pub(crate) fn keep_traces_begun_in(spans: impl Fn(InnermostSpan) -> bool) {
    all_here().iter().for_each(|held| held.keep_begun_in(&spans));
}

/// The processors of this process. The lock is not held while they are used, since a further one may start then.
fn all_here() -> Vec<Arc<HeldTraces>> {
    let Some(all) = ALL.try_read_for(PAUSE) else { return Vec::new() };
    let here = |held: &Arc<HeldTraces>| held.made_in == sys::Forks::generation();
    all.iter().filter_map(Weak::upgrade).filter(here).collect()
}

pub(crate) fn trace_stats() -> TraceStats {
    let held = all_here().iter().map(|held| held.spans()).sum();
    TraceStats { held, ..TraceStats::from(&*COUNTERS) }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum TraceVerdict {
    Open,
    /// The spans of the trace go on, with that rejection threshold if it is known.
    GoesOn(Option<u64>),
    Dropped,
}

/// All like it go on.
const KEPT: TraceVerdict = TraceVerdict::GoesOn(Some(0));

#[derive(Debug)]
struct Trace {
    verdict: TraceVerdict,
    /// The number of its spans that are open.
    open: u32,
    ended: Lot,
    /// The number of traces before it.
    number: u64,
    /// When it last had no open span any more, if it went on and none has started since.
    since: Option<Instant>,
    /// The first profiled span in which one of its spans was started: usually that span itself, which was being entered.
    begun_in: Option<InnermostSpan>,
}

#[derive(Default)]
struct Shard {
    traces: HashMap<TraceId, Trace>,
    /// The traces that went on and have no open span, and since when.
    followed: BTreeSet<(Instant, [u8; 16])>,
    /// The number of traces so far.
    begun: u64,
    /// The bytes that they hold.
    held: usize,
}

impl Shard {
    /// A trace that went on has no open span any more.
    fn follow(&mut self, id: TraceId, now: Instant) {
        if let Some(trace) = self.traces.get_mut(&id) {
            trace.since = Some(now);
            self.followed.insert((now, id.to_bytes()));
        }
        self.forget(now);
    }

    /// A span starts in a trace of which none may be open. Returns whether it follows what went on.
    fn start(&mut self, id: TraceId, now: Instant) -> bool {
        let since = self.traces.get_mut(&id).and_then(|trace| trace.since.take());
        let is_late = since.is_some_and(|since| {
            self.followed.remove(&(since, id.to_bytes()));
            now.duration_since(since) < FOLLOWED
        });
        if since.is_some() && !is_late {
            self.traces.remove(&id);
        }
        self.forget(now);
        is_late
    }

    /// Forgets some of those that nothing has followed for long, and those over the bound.
    fn forget(&mut self, now: Instant) {
        for _ in 0..MOST_FORGOTTEN {
            let is_over = |(since, _): &(Instant, _)| {
                now.duration_since(*since) >= FOLLOWED || self.followed.len() > MOST_FOLLOWED
            };
            if !self.followed.first().is_some_and(is_over) {
                return;
            }
            if let Some((_, id)) = self.followed.pop_first() {
                self.traces.remove(&TraceId::from_bytes(id));
            }
        }
    }
}

struct HeldTraces {
    shards: [CachePadded<Mutex<Shard>>; SHARDS],
    choice: TraceChoice,
    /// The bytes that a span counts for at least beside its place, so that the number of spans is bounded.
    least: usize,
    outbox: SpanOutbox,
    /// The fork generation in which it was made.
    made_in: u32,
}

impl HeldTraces {
    /// `None` if nothing is to be held, or no thread can be started.
    fn start(
        choice: TraceChoice,
        (spans, bytes): (usize, usize),
        next: Arc<dyn SpanProcessor>,
    ) -> Option<Arc<Self>> {
        if choice.threshold() == 0 {
            return None;
        }
        sys::Forks::watch();
        let held = Arc::new(Self {
            shards: Default::default(),
            choice,
            least: bytes.div_ceil(spans).saturating_sub(size_of::<SpanData>()),
            outbox: SpanOutbox::start(bytes, next)?,
            made_in: sys::Forks::generation(),
        });
        let mut all = ALL.write();
        all.retain(|held| held.strong_count() > 0);
        all.push(Arc::downgrade(&held));
        Some(held)
    }

    #[expect(clippy::indexing_slicing, reason = "it is less than the length")]
    fn shard(&self, trace: TraceId) -> MutexGuard<'_, Shard> {
        self.shards[u128::from_be_bytes(trace.to_bytes()) as usize % SHARDS].lock()
    }

    fn spans(&self) -> u64 {
        let held = |shard: &CachePadded<Mutex<Shard>>| -> usize {
            shard.lock().traces.values().map(|trace| trace.ended.spans.len()).sum()
        };
        self.shards.iter().map(held).sum::<usize>() as u64
    }

    fn begin(&self, id: TraceId, is_forced: bool) {
        let mut shard = self.shard(id);
        if shard.traces.get(&id).is_none_or(|trace| trace.open == 0)
            && shard.start(id, Instant::now())
        {
            Counters::add(&COUNTERS.late, 1);
        }
        let Shard { traces, begun, .. } = &mut *shard;
        let trace = traces.entry(id).or_insert_with(|| {
            let verdict = match is_forced {
                true if self.outbox.is_full() => TraceVerdict::Dropped,
                true => TraceVerdict::GoesOn(None),
                false => TraceVerdict::Open,
            };
            let (number, ended) = (*begun, Lot::default());
            *begun += 1;
            Trace { verdict, open: 0, ended, number, since: None, begun_in: None }
        });
        trace.begun_in = trace.begun_in.or_else(innermost_span);
        trace.open += 1;
    }

    fn end(&self, span: SpanData) {
        let id = span.span_context.trace_id();
        let bytes = bytes_of(&span).max(self.least);
        for can_retry in [true, false] {
            let mut shard = self.shard(id);
            let Shard { traces, held, .. } = &mut *shard;
            let Some(trace) = traces.get_mut(&id) else {
                // Its start was not seen.
                return Counters::add(&COUNTERS.dropped_over_bound, 1);
            };
            let mut verdict = match trace.verdict {
                TraceVerdict::Open if matches!(span.status, Status::Error { .. }) => KEPT,
                TraceVerdict::Open if trace.open <= 1 => self.ordinary(&span.span_context),
                known => known,
            };
            let mut missing = 1;
            if verdict != TraceVerdict::Dropped {
                let spans = &mut trace.ended.spans;
                let places = match verdict {
                    _ if spans.len() < spans.capacity() => 0,
                    TraceVerdict::Open => spans.len().clamp(PLACES.0, PLACES.1),
                    _ => 1,
                };
                let needed = bytes + places * size_of::<SpanData>();
                if self.outbox.take(needed) {
                    spans.reserve_exact(places);
                    spans.push(span);
                    trace.ended.bytes += needed;
                    *held += needed;
                    missing = 0;
                } else if can_retry {
                    drop(shard);
                    self.make_room(needed);
                    continue;
                } else if verdict == TraceVerdict::Open {
                    verdict = TraceVerdict::Dropped;
                }
            }
            trace.open = trace.open.saturating_sub(1);
            if verdict != TraceVerdict::Open {
                self.decide(shard, id, verdict, missing);
            }
            return;
        }
    }

    fn keep(&self, id: TraceId) {
        let shard = self.shard(id);
        if shard.traces.get(&id).is_some_and(|trace| trace.verdict == TraceVerdict::Open) {
            self.decide(shard, id, KEPT, 0);
        }
    }

    fn keep_begun_in(&self, spans: impl Fn(InnermostSpan) -> bool) {
        for shard in &self.shards {
            let is_kept = |(_, trace): &(_, &Trace)| trace.begun_in.is_some_and(&spans);
            let kept: Vec<_> =
                shard.lock().traces.iter().filter(is_kept).map(|(id, _)| *id).collect();
            kept.into_iter().for_each(|id| self.keep(id));
        }
    }

    /// The verdict on a trace in which nothing was kept or failed.
    fn ordinary(&self, context: &SpanContext) -> TraceVerdict {
        let threshold = self.choice.threshold();
        let is_chosen = randomness_of(context) >= threshold;
        if is_chosen { TraceVerdict::GoesOn(Some(threshold)) } else { TraceVerdict::Dropped }
    }

    /// Decides on a trace, or on what has ended since. It holds no spans that are dropped or without room.
    fn decide(
        &self,
        mut shard: MutexGuard<'_, Shard>,
        id: TraceId,
        mut verdict: TraceVerdict,
        missing: usize,
    ) {
        let Shard { traces, held, .. } = &mut *shard;
        let Some(trace) = traces.get_mut(&id) else { return };
        let was_open = trace.verdict == TraceVerdict::Open;
        let mut is_over = trace.open > 0 || !was_open;
        // It would not be whole.
        if was_open && verdict != TraceVerdict::Dropped && (missing > 0 || self.outbox.is_full()) {
            (verdict, is_over) = (TraceVerdict::Dropped, true);
        }
        trace.verdict = verdict;
        let lot = take(&mut trace.ended);
        *held -= lot.bytes;
        let is_at_end = trace.open == 0;
        if let TraceVerdict::GoesOn(threshold) = verdict {
            if is_at_end {
                shard.follow(id, Instant::now());
            }
            drop(shard);
            Counters::add(&COUNTERS.dropped_over_bound, missing as u64);
            return self.outbox.send(lot, threshold);
        }
        self.outbox.give(lot.bytes);
        if is_at_end {
            traces.remove(&id);
        }
        drop(shard);
        let counter = match is_over {
            true if self.outbox.is_ending() => &COUNTERS.dropped_at_shutdown,
            true => &COUNTERS.dropped_over_bound,
            false => &COUNTERS.dropped,
        };
        Counters::add(counter, (lot.spans.len() + missing) as u64);
    }

    /// Drops the traces that have held most for longest, until there is room.
    #[cold]
    fn make_room(&self, bytes: usize) {
        for _ in 0..MOST_COMPARED {
            if self.outbox.has_room(bytes) {
                return;
            }
            let fullest =
                self.shards.iter().filter_map(|shard| Some((shard.try_lock()?.held, shard)));
            let Some((_, fullest)) = fullest.max_by_key(|(bytes, _)| *bytes) else { return };
            let shard = fullest.lock();
            // By how many traces came later.
            let held = |trace: &Trace| {
                (trace.ended.bytes as u64).saturating_mul(shard.begun - trace.number)
            };
            let some = shard.traces.iter().filter(|(_, trace)| trace.ended.bytes > 0);
            let worst = some.take(MOST_COMPARED).max_by_key(|(_, trace)| held(trace));
            let Some((id, verdict)) =
                worst.and_then(|(id, trace)| Some((*id, self.verdict_now(trace)?)))
            else {
                return;
            };
            self.decide(shard, id, verdict, 0);
        }
    }

    /// The verdict on a trace that is not decided, if it holds spans.
    fn verdict_now(&self, trace: &Trace) -> Option<TraceVerdict> {
        Some(self.ordinary(&trace.ended.spans.first()?.span_context))
    }

    /// Decides on all traces: of those that are open, the chosen ones go on.
    fn decide_all(&self) {
        for shard in &self.shards {
            let open: Vec<_> = shard.lock().traces.keys().copied().collect();
            for id in open {
                let shard = shard.lock();
                let trace = shard.traces.get(&id);
                if let Some(verdict) = trace.and_then(|trace| self.verdict_now(trace)) {
                    self.decide(shard, id, verdict, 0);
                }
            }
        }
    }
}

/// The bytes of a span beside its place, estimated.
fn bytes_of(span: &SpanData) -> usize {
    let events = span.events.iter();
    let events =
        events.map(|event| size_of_val(event) + event.name.len() + text_in(&event.attributes));
    let links = span.links.iter().map(|link| size_of_val(link) + text_in(&link.attributes));
    text_in(&span.attributes) + events.sum::<usize>() + links.sum::<usize>()
}

fn text_in(attributes: &[KeyValue]) -> usize {
    let of = |attribute: &KeyValue| match &attribute.value {
        Value::String(text) => text.as_str().len(),
        Value::Array(Array::Bool(values)) => values.len(),
        Value::Array(Array::I64(values)) => size_of_val(&**values),
        Value::Array(Array::F64(values)) => size_of_val(&**values),
        Value::Array(Array::String(values)) => {
            values.iter().map(|value| size_of_val(value) + value.as_str().len()).sum()
        }
        _ => 0,
    };
    size_of_val(attributes) + attributes.iter().map(of).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_n_is_a_threshold_of_56_bits() {
        let threshold = |one_in| TraceChoice { one_in, sampled_parents: false }.threshold();
        assert_eq!([0, 1, 2, 4].map(threshold), [1 << 56, 0, 1 << 55, 3 << 54]);
        assert_eq!(threshold(u32::MAX), (1 << 56) - (1 << 24));
    }

    #[test]
    fn a_trace_that_went_on_is_followed_for_some_time_and_as_one_of_some_thousand() {
        let mut shard = Shard::default();
        let id = |number: u128| TraceId::from_bytes(number.to_be_bytes());
        let ends = |shard: &mut Shard, number, at| {
            let id = id(number);
            shard.start(id, at);
            let trace = shard.traces.entry(id).or_insert_with(|| Trace {
                verdict: KEPT,
                open: 0,
                ended: Lot::default(),
                number: 0,
                since: None,
                begun_in: None,
            });
            trace.open = 0;
            shard.follow(id, at);
        };
        let known = |shard: &Shard| {
            let ids = shard.traces.keys();
            let mut known: Vec<_> = ids.map(|id| u128::from_be_bytes(id.to_bytes())).collect();
            known.sort_unstable();
            known
        };
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        for number in 1..=3 {
            ends(&mut shard, number, start);
        }
        // One is followed by a span that is still open, and one by a span that has ended.
        assert!(shard.start(id(2), start));
        shard.traces.get_mut(&id(2)).unwrap().open = 1;
        ends(&mut shard, 3, after(5));
        ends(&mut shard, 4, after(9));
        assert_eq!(known(&shard), [1, 2, 3, 4]);
        ends(&mut shard, 5, after(10));
        assert_eq!(known(&shard), [2, 3, 4, 5]);
        ends(&mut shard, 2, after(16));
        assert_eq!(known(&shard), [2, 4, 5]);
        ends(&mut shard, 6, after(100));
        assert_eq!((known(&shard), shard.followed.len()), (vec![6], 1));
        for number in 0..MOST_FOLLOWED as u128 {
            ends(&mut shard, 10 + number, after(101));
        }
        assert_eq!((shard.traces.len(), shard.followed.len()), (MOST_FOLLOWED, MOST_FOLLOWED));
        assert_eq!(known(&shard).first(), Some(&10));
        // One that many calls follow is one of them, and not the first that is forgotten.
        for _ in 0..2 * MOST_FOLLOWED {
            ends(&mut shard, 10, after(102));
        }
        assert_eq!((shard.traces.len(), shard.followed.len()), (MOST_FOLLOWED, MOST_FOLLOWED));
        ends(&mut shard, 9, after(103));
        assert_eq!(known(&shard)[..3], [9, 10, 12]);
        // Others that start let them be forgotten, though none of those goes on, and nothing follows them then.
        assert!(shard.start(id(10), after(111)));
        assert!(!shard.start(id(4_000), after(111)));
        assert!(!shard.traces.contains_key(&id(4_000)));
        for _ in 0..MOST_FOLLOWED / MOST_FORGOTTEN {
            shard.start(id(1), after(200));
        }
        assert_eq!((known(&shard), shard.followed.len()), (vec![10], 0), "its span is open");
    }
}

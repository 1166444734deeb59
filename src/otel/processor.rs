//! Spans as OpenTelemetry ends them, brought together with spans as they close here.
//!
//! Which of the two happens first depends on the order of the layers. Both happen on one thread,
//! one right after the other: so whichever comes first waits for the other.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use parking_lot::Mutex;
use tracing::Metadata;

use super::SpanAttributes;
use super::values;
use crate::ids::SpanId;
use crate::keep::KeptSpan;
use crate::span::{SpanKey, TraceIds};

/// Puts the attributes of kept spans on their OpenTelemetry spans, and hands all spans on to
/// another processor.
///
/// [`Handle::span_processor`](crate::Handle::span_processor) makes it. It works in whichever order
/// the layers are, and where the layer of `tracing-opentelemetry` cannot be reached, as inside a
/// `reload::Layer`. There, a span of OpenTelemetry that is none of `tracing` may be handed on a
/// second late.
#[derive(Debug)]
pub struct ProfilingSpanProcessor {
    next: Arc<dyn SpanProcessor>,
    ends: Option<Weak<dyn SpanEnds>>,
}

impl ProfilingSpanProcessor {
    pub(crate) fn new(
        next: impl SpanProcessor + 'static,
        ends: Option<Weak<dyn SpanEnds>>,
    ) -> Self {
        Self { next: Arc::new(next), ends }
    }

    fn hand_on(&self) {
        if let Some(ends) = self.ends.as_ref().and_then(Weak::upgrade) {
            ends.hand_on();
        }
    }
}

/// Who waits for the ends of spans.
pub(crate) trait SpanEnds: Debug + Send + Sync {
    fn ended(&self, ended: Ended);
    /// Hands on all that waits in vain.
    fn hand_on(&self);
}

impl SpanProcessor for ProfilingSpanProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.next.on_start(span, context);
    }

    fn on_end(&self, data: SpanData) {
        match self.ends.as_ref().and_then(Weak::upgrade) {
            Some(ends) => ends.ended(Ended { data, next: Arc::clone(&self.next) }),
            None => self.next.on_end(data),
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.hand_on();
        self.next.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.hand_on();
        self.next.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        // Nobody else has it yet: the provider is being built.
        if let Some(next) = Arc::get_mut(&mut self.next) {
            next.set_resource(resource);
        }
    }
}

/// A span that OpenTelemetry has ended, and where it goes.
#[derive(Debug)]
pub(crate) struct Ended {
    data: SpanData,
    next: Arc<dyn SpanProcessor>,
}

thread_local! {
    /// A span is being handed on on this thread. Who takes it may hold a lock over that, and make and close
    /// spans of `tracing` with it.
    static HANDS_ON: Cell<bool> = const { Cell::new(false) };
}

impl Ended {
    pub(crate) fn hand_on(self) {
        struct Before(bool);
        impl Drop for Before {
            fn drop(&mut self) {
                HANDS_ON.set(self.0);
            }
        }

        let _before = Before(HANDS_ON.replace(true));
        self.next.on_end(self.data);
    }

    pub(crate) fn hand_on_with(mut self, attributes: SpanAttributes) {
        self.data.attributes.extend(values::key_values(attributes));
        self.hand_on();
    }

    pub(crate) fn ids(&self) -> TraceIds {
        values::ids_of(&self.data.span_context)
    }

    fn id(&self) -> SpanId {
        self.data.span_context.span_id().into()
    }
}

/// The same span, once for each processor that waits for it.
#[derive(Debug)]
pub(crate) struct EndedSpan(Vec<Ended>);

impl EndedSpan {
    /// Does something with the data of the first, lets the others have its attributes too, and
    /// hands all on.
    pub(crate) fn with(mut self, action: impl FnOnce(&RefCell<SpanData>)) {
        let Some(first) = self.0.pop() else { return };
        let before = first.data.attributes.len();
        let data = RefCell::new(first.data);
        action(&data);
        let data = data.into_inner();
        for mut other in self.0 {
            other.data.attributes.extend(data.attributes.iter().skip(before).cloned());
            other.hand_on();
        }
        Ended { data, ..first }.hand_on();
    }

    pub(crate) fn hand_on(self) {
        self.0.into_iter().for_each(Ended::hand_on);
    }

    /// The same, unless this thread is in the middle of that: then it is given back.
    pub(crate) fn hand_on_unless_inside(self) -> Option<Self> {
        if HANDS_ON.get() {
            return Some(self);
        }
        self.hand_on();
        None
    }

    /// Whether OpenTelemetry's span is the one that closes.
    fn is(&self, closing: &ClosingSpan, order: Order) -> bool {
        self.0.first().is_some_and(|ended| closing.is(&ended.data, order))
    }
}

/// What is known of a profiled span that closes, to know it again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClosingSpan {
    pub(crate) metadata: &'static Metadata<'static>,
    pub(crate) opened: SystemTime,
}

impl ClosingSpan {
    fn is(&self, data: &SpanData, order: Order) -> bool {
        // A field may have renamed it.
        let may_have_name = data.name == self.metadata.name()
            || self.metadata.fields().field("otel.name").is_some();
        let is_of_callsite = self.is_where(data);
        // Both clocks were read one right after the other, if the thread was not preempted between;
        // since then they may have drifted.
        let is_likely = order != Order::Unknown || is_of_callsite == Some(true);
        let tolerance = if is_likely { TOLERANCE_IF_LIKELY } else { TOLERANCE };
        let age = self.opened.elapsed().unwrap_or_default();
        let apart = data.start_time.duration_since(self.opened);
        let apart = apart.unwrap_or_else(|earlier| earlier.duration());
        may_have_name && is_of_callsite != Some(false) && apart < tolerance + age / 1000
    }

    /// Whether the span comes from the same place in the source, if it says from where it comes, as
    /// `tracing-opentelemetry` does unless it is told not to.
    fn is_where(&self, data: &SpanData) -> Option<bool> {
        let value = |key| {
            let mut attributes = data.attributes.iter();
            attributes.find(|attribute| attribute.key.as_str() == key).map(|found| &found.value)
        };
        let (file, line) = (value("code.file.path")?, value("code.line.number")?);
        let is_file = self.metadata.file() == Some(file.as_str().as_ref());
        Some(is_file && self.metadata.line().map(i64::from) == as_line(line))
    }
}

fn as_line(value: &Value) -> Option<i64> {
    match value {
        Value::I64(line) => Some(*line),
        _ => None,
    }
}

/// A span that has closed here before OpenTelemetry has ended it.
#[derive(Debug)]
pub(crate) struct Close {
    span: ClosingSpan,
    /// If it was kept, what to say on the OpenTelemetry span.
    pub(crate) kept: Option<Box<KeptSpan>>,
    /// The collector is to be told of the close.
    pub(crate) untold: Option<SpanKey>,
}

impl Close {
    pub(crate) fn new(span: ClosingSpan) -> Self {
        Self { span, kept: None, untold: None }
    }

    /// Whether nothing is to be done when it meets its end.
    pub(crate) fn is_plain(&self) -> bool {
        self.kept.is_none() && self.untold.is_none()
    }
}

#[derive(Debug)]
enum Waiting {
    Ended(EndedSpan),
    Close(Close),
    /// The two have met: what was said is for further processors too.
    Said(SpanId, Vec<KeyValue>),
}

type Shard = HashMap<ThreadId, (Instant, Waiting)>;

/// Where they wait for each other, one for each thread.
#[derive(Debug, Default)]
pub(crate) struct Meeting {
    shards: [Mutex<Shard>; SHARDS],
    /// What waits for nothing but another thread that hands it on.
    late: Mutex<Vec<EndedSpan>>,
    /// Somebody will look for what has waited too long.
    is_watched: AtomicBool,
    /// Nobody will any more.
    is_over: AtomicBool,
    /// More than 0 if ours comes first, less if theirs does: the layers do not change places, but
    /// one meeting might be a mistake.
    score: AtomicI32,
    /// Spans on their way to the thread that hands them on.
    in_transit: AtomicUsize,
    /// OpenTelemetry's spans can be reached when they close: nobody has to wait.
    is_direct: AtomicBool,
}

/// Whose close comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Unknown,
    /// That of the profiling layer.
    Ours,
    Theirs,
}

/// What is there for a span that closes.
#[derive(Debug)]
pub(crate) enum Found {
    Nothing,
    /// Its end.
    End(EndedSpan),
    /// The end of another span.
    OtherEnd(EndedSpan),
    /// Another span, whose end has not come and will not.
    OtherClose(Close),
}

/// What is there for a span that has ended.
#[derive(Debug)]
pub(crate) enum FoundClose {
    Nothing,
    /// Its close.
    Same(Close),
    /// It has met its close for another processor.
    Said,
    /// The close of another span, whose end has not come and will not.
    Other(Close),
}

const SHARDS: usize = 16;
/// Threads of a shard after which those are forgotten of which nothing waits.
const MANY: usize = 64;
/// After so long it waits for something that will not come.
pub(crate) const TOO_LONG: Duration = Duration::from_secs(1);
/// By how much two readings of the clock at a span's creation may differ.
const TOLERANCE: Duration = Duration::from_millis(5);
/// The same when the order is known, or the place in the source is the same: then what comes right
/// before is the one with near certainty.
const TOLERANCE_IF_LIKELY: Duration = Duration::from_secs(10);
/// Meetings that make an order sure.
const SURE: i32 = 3;
/// Meetings that it takes to change one's mind.
const MOST: i32 = 8;

impl Meeting {
    pub(crate) fn order(&self) -> Order {
        match self.score.load(Ordering::Relaxed) {
            SURE.. => Order::Ours,
            score if score <= -SURE => Order::Theirs,
            _ => Order::Unknown,
        }
    }

    fn learn(&self, by: i32) {
        let score = self.score.load(Ordering::Relaxed);
        self.score.store((score + by).clamp(-MOST, MOST), Ordering::Relaxed);
    }

    /// A span that closed was reached.
    pub(crate) fn note_direct(&self) {
        if !self.is_direct.load(Ordering::Relaxed) {
            self.is_direct.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.is_direct.load(Ordering::Relaxed)
    }

    fn shard(&self) -> (ThreadId, &Mutex<Shard>) {
        let thread = std::thread::current().id();
        let mut hasher = DefaultHasher::new();
        thread.hash(&mut hasher);
        let shards = &self.shards;
        let number = hasher.finish() as usize % SHARDS;
        (thread, shards.get(number).unwrap_or(&shards[0]))
    }

    /// A span closes on this thread; what is known of it, if it is profiled. Takes what waits.
    pub(crate) fn take(&self, closing: Option<&ClosingSpan>) -> Found {
        let (thread, shard) = self.shard();
        let waiting = shard.lock().remove(&thread).map(|(_, waiting)| waiting);
        match waiting {
            None | Some(Waiting::Said(..)) => Found::Nothing,
            Some(Waiting::Close(close)) => Found::OtherClose(close),
            Some(Waiting::Ended(ended))
                if closing.is_some_and(|closing| ended.is(closing, self.order())) =>
            {
                self.learn(-1);
                Found::End(ended)
            }
            Some(Waiting::Ended(ended)) => Found::OtherEnd(ended),
        }
    }

    /// The span that closed waits for its end; nothing else waits on this thread.
    pub(crate) fn leave_close(&self, close: Close) {
        let (thread, shard) = self.shard();
        let mut shard = shard.lock();
        make_room(&mut shard);
        shard.insert(thread, (Instant::now(), Waiting::Close(close)));
    }

    /// OpenTelemetry has ended a span on this thread. Takes the span that closed just before. What
    /// was said on the same span for another processor is said again.
    pub(crate) fn take_close(&self, ended: &mut Ended) -> FoundClose {
        let (thread, shard) = self.shard();
        let mut shard = shard.lock();
        match shard.remove(&thread) {
            Some((_, Waiting::Close(close))) if close.span.is(&ended.data, self.order()) => {
                self.learn(1);
                FoundClose::Same(close)
            }
            Some((_, Waiting::Close(close))) => FoundClose::Other(close),
            Some((since, Waiting::Said(id, attributes))) if id == ended.id() => {
                ended.data.attributes.extend(attributes.iter().cloned());
                shard.insert(thread, (since, Waiting::Said(id, attributes)));
                FoundClose::Said
            }
            Some((_, Waiting::Said(..))) | None => FoundClose::Nothing,
            Some(other) => {
                shard.insert(thread, other);
                FoundClose::Nothing
            }
        }
    }

    /// What was said on that span is for further processors too.
    pub(crate) fn leave_said(&self, id: SpanId, attributes: SpanAttributes) {
        let (thread, shard) = self.shard();
        let mut shard = shard.lock();
        make_room(&mut shard);
        shard.insert(thread, (Instant::now(), Waiting::Said(id, values::key_values(attributes))));
    }

    /// The span that ended waits for its close. Returns what must be handed on.
    pub(crate) fn leave_ended(&self, ended: Ended) -> Option<EndedSpan> {
        let (thread, shard) = self.shard();
        let mut shard = shard.lock();
        if self.is_over.load(Ordering::Acquire) {
            return Some(EndedSpan(vec![ended]));
        }
        if let Some((_, Waiting::Ended(before))) = shard.get_mut(&thread)
            && before.0.first().is_some_and(|first| first.id() == ended.id())
        {
            before.0.push(ended);
            return None;
        }
        make_room(&mut shard);
        let waiting = Waiting::Ended(EndedSpan(vec![ended]));
        match shard.insert(thread, (Instant::now(), waiting)) {
            Some((_, Waiting::Ended(before))) => Some(before),
            _ => None,
        }
    }

    /// Another thread shall hand it on. Given back if none will any more.
    pub(crate) fn leave_late(&self, ended: EndedSpan) -> Option<EndedSpan> {
        let mut late = self.late.lock();
        if self.is_over.load(Ordering::Acquire) {
            return Some(ended);
        }
        late.push(ended);
        None
    }

    /// Whether whoever has left something must see to it that somebody watches.
    pub(crate) fn needs_watching(&self) -> bool {
        !self.is_watched.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Acquire)
    }

    /// Takes what has been waiting for so long: ends, and closes of which nobody was told.
    pub(crate) fn give_up(&self, waited: Duration) -> (Vec<EndedSpan>, Vec<Close>) {
        // Before the look: what is left after it asks for another.
        self.is_watched.store(false, Ordering::Release);
        let mut all_ended = std::mem::take(&mut *self.late.lock());
        let (mut closes, mut is_left) = (Vec::new(), false);
        for shard in &self.shards {
            let mut shard = shard.lock();
            let old = shard.extract_if(|_, (since, _)| since.elapsed() >= waited);
            for (_, (_, waiting)) in old {
                match waiting {
                    Waiting::Ended(ended) => all_ended.push(ended),
                    Waiting::Close(close) => closes.push(close),
                    Waiting::Said(..) => {}
                }
            }
            is_left |= shard.values().any(|(_, waiting)| is_of_interest(waiting));
        }
        if is_left {
            self.is_watched.store(true, Ordering::Release);
        }
        (all_ended, closes)
    }

    /// Takes what waits in vain, so that a flush has all that ended before it: what waits on this
    /// very thread, and what has waited too long on others, for which it waits too.
    pub(crate) fn give_up_for_flush(&self) -> (Vec<EndedSpan>, Vec<Close>) {
        let (thread, shard) = self.shard();
        let own = shard.lock().remove(&thread).map(|(_, waiting)| waiting);
        let start = Instant::now();
        let waits_since =
            |(since, waiting): &(Instant, Waiting)| *since <= start && is_of_interest(waiting);
        let is_waiting = |shard: &Mutex<Shard>| shard.lock().values().any(waits_since);
        while self.shards.iter().any(is_waiting) && start.elapsed() < TOO_LONG {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (mut all_ended, mut closes) = self.give_up(TOO_LONG);
        match own {
            Some(Waiting::Ended(ended)) => all_ended.push(ended),
            Some(Waiting::Close(close)) => closes.push(close),
            Some(Waiting::Said(..)) | None => {}
        }
        (all_ended, closes)
    }

    /// So many spans are now on their way.
    pub(crate) fn send_off(&self, spans: usize) {
        self.in_transit.fetch_add(spans, Ordering::AcqRel);
    }

    /// One of them has been handed on.
    pub(crate) fn arrive(&self) {
        self.in_transit.fetch_sub(1, Ordering::AcqRel);
    }

    /// Waits until they all have, but no longer than that.
    pub(crate) fn wait_for_arrivals(&self, longest: Duration) {
        let start = Instant::now();
        while self.in_transit.load(Ordering::Acquire) > 0 && start.elapsed() < longest {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// From now on nothing waits.
    pub(crate) fn end(&self) -> Vec<EndedSpan> {
        self.is_over.store(true, Ordering::Release);
        self.give_up(Duration::ZERO).0
    }
}

fn is_of_interest(waiting: &Waiting) -> bool {
    match waiting {
        Waiting::Ended(_) => true,
        Waiting::Close(close) => !close.is_plain(),
        Waiting::Said(..) => false,
    }
}

fn make_room(shard: &mut Shard) {
    if shard.len() >= MANY {
        shard.retain(|_, (_, waiting)| is_of_interest(waiting));
    }
}

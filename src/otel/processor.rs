//! Spans as OpenTelemetry ends them, brought together with spans as they close here.
//!
//! Which of the two happens first depends on the order of the layers. Both happen on one thread,
//! one right after the other: so whichever comes first waits for the other.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::Context;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use parking_lot::Mutex;

use crate::keep::KeptSpan;
use crate::span::{SpanKey, TraceIds};

/// Puts the attributes of kept spans on their OpenTelemetry spans, and hands all spans on to
/// another processor.
///
/// [`Handle::span_processor`](crate::Handle::span_processor) makes it. It works in whichever order
/// the layers are, and where the layer of `tracing-opentelemetry` cannot be reached, as inside a
/// `reload::Layer`. A span of OpenTelemetry that is none of `tracing` may be handed on a tenth of a
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

    fn ends(&self) -> Option<Arc<dyn SpanEnds>> {
        self.ends.as_ref()?.upgrade()
    }
}

/// Who waits for the ends of spans.
pub(crate) trait SpanEnds: Debug + Send + Sync {
    fn ended(&self, ended: Ended);
    /// Hands on all that waits.
    fn hand_on(&self);
}

impl SpanProcessor for ProfilingSpanProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.next.on_start(span, context);
    }

    fn on_end(&self, data: SpanData) {
        match self.ends() {
            Some(ends) => ends.ended(Ended { data, next: Arc::clone(&self.next) }),
            None => self.next.on_end(data),
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        if let Some(ends) = self.ends() {
            ends.hand_on();
        }
        self.next.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        if let Some(ends) = self.ends() {
            ends.hand_on();
        }
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
    pub(crate) data: SpanData,
    next: Arc<dyn SpanProcessor>,
}

impl Ended {
    pub(crate) fn hand_on(self) {
        self.next.on_end(self.data);
    }

    /// Does something with the data, and hands them on.
    pub(crate) fn with(self, action: impl FnOnce(&RefCell<SpanData>)) {
        let data = RefCell::new(self.data);
        action(&data);
        self.next.on_end(data.into_inner());
    }

    pub(crate) fn ids(&self) -> TraceIds {
        TraceIds::of(&self.data.span_context)
    }
}

/// A span that has closed here before OpenTelemetry has ended it.
#[derive(Debug)]
pub(crate) struct Close {
    /// When it was created.
    pub(crate) opened: SystemTime,
    /// If it was kept, what to say on the OpenTelemetry span.
    pub(crate) kept: Option<KeptSpan>,
    /// The collector is to be told of the close.
    pub(crate) untold: Option<SpanKey>,
}

impl Close {
    pub(crate) fn new(opened: SystemTime) -> Self {
        Self { opened, kept: None, untold: None }
    }

    /// Whether nothing is to be done when it meets its end.
    pub(crate) fn is_plain(&self) -> bool {
        self.kept.is_none() && self.untold.is_none()
    }
}

#[derive(Debug)]
enum Waiting {
    Ended(Ended),
    Close(Close),
}

type Shard = HashMap<ThreadId, (Instant, Waiting)>;

/// Where they wait for each other, one for each thread.
#[derive(Debug, Default)]
pub(crate) struct Meeting {
    shards: [Mutex<Shard>; SHARDS],
    /// Somebody will look for what has waited too long.
    is_watched: AtomicBool,
    /// An [`Order`], once it is known: the layers do not change places.
    order: AtomicU8,
}

/// Whose close comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Order {
    Unknown,
    /// That of the profiling layer.
    Ours,
    Theirs,
}

const SHARDS: usize = 16;
/// Threads of a shard after which those are forgotten of which nothing waits.
const MANY: usize = 64;
/// After so long it waits for something that will not come.
pub(crate) const TOO_LONG: Duration = Duration::from_millis(100);
/// By how much two readings of the clock at a span's creation may differ.
const TOLERANCE: Duration = Duration::from_millis(50);

impl Meeting {
    pub(crate) fn order(&self) -> Order {
        match self.order.load(Ordering::Relaxed) {
            1 => Order::Ours,
            2 => Order::Theirs,
            _ => Order::Unknown,
        }
    }

    fn learn(&self, order: Order) {
        self.order.store(order as u8, Ordering::Relaxed);
    }

    fn shard(&self) -> (ThreadId, &Mutex<Shard>) {
        let thread = std::thread::current().id();
        let mut hasher = DefaultHasher::new();
        thread.hash(&mut hasher);
        let shards = &self.shards;
        let number = hasher.finish() as usize % SHARDS;
        (thread, shards.get(number).unwrap_or(&shards[0]))
    }

    /// A span closes on this thread that was created then, if it is profiled. Returns what
    /// OpenTelemetry has ended just before, with whether it is that span.
    pub(crate) fn take_ended(&self, opened: Option<SystemTime>) -> Option<(Ended, bool)> {
        let (thread, shard) = self.shard();
        let mut shard = shard.lock();
        match shard.remove(&thread)? {
            (_, Waiting::Ended(ended)) => {
                let is_it = opened.is_some_and(|opened| is_same(&ended.data, opened));
                if is_it {
                    self.learn(Order::Theirs);
                }
                Some((ended, is_it))
            }
            close => {
                shard.insert(thread, close);
                None
            }
        }
    }

    /// The span that closed waits for its end. Returns another one that has waited in vain.
    pub(crate) fn leave_close(&self, close: Close) -> Option<Close> {
        match self.leave(Waiting::Close(close)) {
            Some(Waiting::Close(close)) => Some(close),
            Some(Waiting::Ended(ended)) => {
                ended.hand_on();
                None
            }
            None => None,
        }
    }

    /// OpenTelemetry has ended a span on this thread. Returns the span that closed just before, with
    /// whether it is the same.
    pub(crate) fn take_close(&self, ended: &Ended) -> Option<(Close, bool)> {
        let (thread, shard) = self.shard();
        let mut shard = shard.lock();
        match shard.remove(&thread)? {
            (_, Waiting::Close(close)) => {
                let is_it = is_same(&ended.data, close.opened);
                if is_it {
                    self.learn(Order::Ours);
                }
                Some((close, is_it))
            }
            ended => {
                shard.insert(thread, ended);
                None
            }
        }
    }

    /// The span that ended waits for its close.
    pub(crate) fn leave_ended(&self, ended: Ended) {
        if let Some(Waiting::Ended(before)) = self.leave(Waiting::Ended(ended)) {
            before.hand_on();
        }
    }

    fn leave(&self, waiting: Waiting) -> Option<Waiting> {
        let (thread, shard) = self.shard();
        let mut shard = shard.lock();
        if shard.len() >= MANY {
            shard.retain(
                |_, (_, waiting)| !matches!(waiting, Waiting::Close(close) if close.is_plain()),
            );
        }
        shard.insert(thread, (Instant::now(), waiting)).map(|(_, before)| before)
    }

    /// Whether whoever has left something must see to it that somebody watches.
    pub(crate) fn needs_watching(&self) -> bool {
        !self.is_watched.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Acquire)
    }

    /// Hands on what has been waiting for so long. Returns closes of which nobody was told.
    pub(crate) fn give_up(&self, waited: Duration) -> Vec<Close> {
        // Before the look: what is left after it asks for another.
        self.is_watched.store(false, Ordering::Release);
        let (mut all_ended, mut closes, mut is_left) = (Vec::new(), Vec::new(), false);
        for shard in &self.shards {
            let mut shard = shard.lock();
            let old = shard.extract_if(|_, (since, _)| since.elapsed() >= waited);
            for (_, (_, waiting)) in old {
                match waiting {
                    Waiting::Ended(ended) => all_ended.push(ended),
                    Waiting::Close(close) => closes.push(close),
                }
            }
            is_left |= shard.values().any(|(_, waiting)| match waiting {
                Waiting::Ended(_) => true,
                Waiting::Close(close) => !close.is_plain(),
            });
        }
        if is_left {
            self.is_watched.store(true, Ordering::Release);
        }
        // Not under a lock: what comes next is not ours.
        all_ended.into_iter().for_each(Ended::hand_on);
        closes
    }
}

/// Whether OpenTelemetry's span is the one that was created then here.
fn is_same(data: &SpanData, opened: SystemTime) -> bool {
    let apart = data.start_time.duration_since(opened).unwrap_or_else(|earlier| earlier.duration());
    apart < TOLERANCE
}

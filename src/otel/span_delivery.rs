//! Passes spans on, on a thread, no faster than the next processor has room for them. The program waits for neither.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, OnceLock};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, SendError, Sender, bounded, unbounded};
use opentelemetry::Context;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SpanData, SpanProcessor};

use super::probability::with_threshold;
use crate::span::spawn_ignored;
use crate::stats::{Counters, TraceCounters};

/// Spans after which the processor must have room again. A batch processor has 2,048 by default.
const PASSED_AT_ONCE: usize = 512;
/// Between two attempts to flush a processor that does not answer, at first.
pub(super) const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const LONGEST_SHUTDOWN: Duration = Duration::from_secs(60 * 60);

/// The counters of all processors of the process.
pub(super) static COUNTERS: LazyLock<TraceCounters> = LazyLock::new(TraceCounters::default);

#[derive(Debug, Default)]
pub(super) struct Lot {
    pub(super) spans: Vec<SpanData>,
    pub(super) bytes: usize,
}

enum Message {
    /// Spans that go on, with the rejection threshold.
    Pass(Lot, Option<u64>),
    Flush(Sender<OTelSdkResult>),
    Shutdown(Sender<OTelSdkResult>),
}

/// The bytes that spans may take, and the way to the next processor.
pub(super) struct SpanOutbox {
    shared: Arc<SharedBytes>,
    messages: Sender<Message>,
}

struct SharedBytes {
    left: AtomicUsize,
    /// The bytes of spans that wait to be passed on.
    waiting: AtomicUsize,
    most_waiting: usize,
    ends_at: OnceLock<Instant>,
}

impl SpanOutbox {
    /// `None` if no thread can be started. The thread ends with the outbox, or with a shutdown.
    pub(super) fn start(bytes: usize, next: Arc<dyn SpanProcessor>) -> Option<Self> {
        let (messages, received) = unbounded();
        let shared = Arc::new(SharedBytes {
            left: AtomicUsize::new(bytes),
            waiting: AtomicUsize::new(0),
            most_waiting: bytes / 2,
            ends_at: OnceLock::new(),
        });
        let mut delivery =
            SpanDelivery { next, shared: Arc::clone(&shared), unflushed: 0, is_stuck: false };
        spawn_ignored("profiling-spans", move || delivery.run(&received)).ok()?;
        Some(Self { shared, messages })
    }

    pub(super) fn take(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        self.shared.left.fetch_update(Relaxed, Relaxed, less).is_ok()
    }

    pub(super) fn give(&self, bytes: usize) {
        self.shared.left.fetch_add(bytes, Relaxed);
    }

    /// Whether there is room for that, and at least for some spans, so that it is not made for each one.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.shared.left.load(Relaxed) >= bytes.max(self.shared.most_waiting / 512)
    }

    /// Whether no further trace may go on, so that those can that began to.
    pub(super) fn is_full(&self) -> bool {
        self.shared.waiting.load(Relaxed) > self.shared.most_waiting
    }

    pub(super) fn is_ending(&self) -> bool {
        self.shared.ends_at.get().is_some()
    }

    /// The spans go on. Their bytes have been taken.
    pub(super) fn send(&self, lot: Lot, threshold: Option<u64>) {
        if lot.spans.is_empty() {
            return;
        }
        self.shared.waiting.fetch_add(lot.bytes, Relaxed);
        let sent = self.messages.send(Message::Pass(lot, threshold));
        if let Err(SendError(message)) = sent {
            self.shared.drop_at_shutdown(&message);
        }
    }

    pub(super) fn flush(&self, timeout: Duration) -> OTelSdkResult {
        self.ask(timeout, Message::Flush)
    }

    pub(super) fn shutdown(&self, timeout: Duration, decide: impl FnOnce()) -> OTelSdkResult {
        let timeout = timeout.min(LONGEST_SHUTDOWN);
        _ = self.shared.ends_at.set(Instant::now() + timeout);
        decide();
        self.ask(timeout, Message::Shutdown)
    }

    fn ask(
        &self,
        timeout: Duration,
        question: impl FnOnce(Sender<OTelSdkResult>) -> Message,
    ) -> OTelSdkResult {
        let (reply, answer) = bounded(1);
        self.messages.send(question(reply)).map_err(|_| OTelSdkError::AlreadyShutdown)?;
        answer.recv_timeout(timeout).unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => Err(OTelSdkError::Timeout(timeout)),
            RecvTimeoutError::Disconnected => Err(OTelSdkError::AlreadyShutdown),
        })
    }
}

impl SharedBytes {
    fn drop_at_shutdown(&self, message: &Message) {
        if let Message::Pass(lot, _) = message {
            self.passed(lot.bytes);
            Counters::add(&COUNTERS.dropped_at_shutdown, lot.spans.len() as u64);
        }
    }

    fn passed(&self, bytes: usize) {
        self.waiting.fetch_sub(bytes, Relaxed);
        self.left.fetch_add(bytes, Relaxed);
    }
}

struct SpanDelivery {
    next: Arc<dyn SpanProcessor>,
    shared: Arc<SharedBytes>,
    /// The number of spans since the processor was last known to have room.
    unflushed: usize,
    /// The processor has not answered, and may have no room for further questions.
    is_stuck: bool,
}

impl SpanDelivery {
    fn run(&mut self, messages: &Receiver<Message>) {
        // What an exporter does is no part of a trace.
        let _suppressed = Context::enter_telemetry_suppressed_scope();
        for message in messages {
            match message {
                Message::Pass(lot, threshold) => {
                    lot.spans.into_iter().for_each(|span| self.pass(span, threshold));
                    self.shared.passed(lot.bytes);
                }
                Message::Flush(reply) => _ = self.flush().map(|flushed| reply.send(flushed)),
                Message::Shutdown(reply) => {
                    let ends_at = self.shared.ends_at.get().copied().unwrap_or_else(Instant::now);
                    let left = ends_at.saturating_duration_since(Instant::now());
                    let end = || reply.send(self.next.shutdown_with_timeout(left));
                    if catch_unwind(AssertUnwindSafe(end)).is_ok() {
                        // What came after it was asked for.
                        messages.try_iter().for_each(|it| self.shared.drop_at_shutdown(&it));
                        return;
                    }
                }
            }
        }
    }

    fn pass(&mut self, span: SpanData, threshold: Option<u64>) {
        if self.unflushed < PASSED_AT_ONCE || self.wait_for_room() {
            self.unflushed += 1;
            Counters::add(&COUNTERS.passed, 1);
            let pass = || self.next.on_end(with_threshold(span, threshold));
            _ = catch_unwind(AssertUnwindSafe(pass));
        } else {
            Counters::add(&COUNTERS.dropped_at_shutdown, 1);
        }
    }

    /// A processor is code of the program, and may panic.
    fn flush(&self) -> thread::Result<OTelSdkResult> {
        catch_unwind(AssertUnwindSafe(|| self.next.force_flush()))
    }

    /// Waits until the processor has passed on what it has, so that it drops nothing; false if the shutdown's time is over.
    fn wait_for_room(&mut self) -> bool {
        let ends_at = || self.shared.ends_at.get();
        let mut pause = PAUSE;
        while ends_at().is_none_or(|ends_at| Instant::now() < *ends_at) {
            match self.flush() {
                Ok(Err(OTelSdkError::Timeout(_))) => self.is_stuck = true,
                Ok(Err(OTelSdkError::InternalFailure(_))) if self.is_stuck => {}
                _ => {
                    (self.unflushed, self.is_stuck) = (0, false);
                    return true;
                }
            }
            let until = Instant::now() + pause;
            pause = (pause * 2).min(LONGEST_PAUSE);
            sleep(PAUSE);
            while Instant::now() < until && ends_at().is_none() {
                sleep(PAUSE);
            }
        }
        false
    }
}

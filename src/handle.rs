//! Reaching a layer that has been given away.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use opentelemetry_sdk::trace::SpanProcessor;

use crate::collector::Engine;
use crate::config::{SelfTest, self_test};
use crate::otel::{ProfilingSpanProcessor, SpanEnds};
use crate::stats::Stats;

/// Reaches a [`ProfilingLayer`](crate::ProfilingLayer) after it has become part of a subscriber.
///
/// A handle does not keep the layer alive. Where there is no layer any more, or where it is off,
/// there is nothing to wait for, and all numbers are 0.
#[derive(Clone, Debug)]
pub struct Handle(Weak<Engine>);

impl Handle {
    pub(crate) fn new(engine: Option<&Arc<Engine>>) -> Self {
        Self(engine.map_or_else(Weak::new, Arc::downgrade))
    }

    /// Waits until everything that was kept before is exported, but no longer than `deadline`.
    /// Returns whether it was. Kept spans do not wait for their roots to close then.
    ///
    /// It blocks; in async code call it from `spawn_blocking`.
    pub fn flush(&self, deadline: Duration) -> bool {
        self.with_engine(|engine| engine.flush(until(deadline)))
    }

    /// The same, and ends profiling for good: rings, threads and files are given back.
    pub fn shutdown(&self, deadline: Duration) -> bool {
        self.with_engine(|engine| engine.shutdown(until(deadline)))
    }

    fn with_engine(&self, action: impl FnOnce(&Engine) -> bool) -> bool {
        match self.0.upgrade() {
            Some(engine) if engine.is_running() => action(&engine),
            _ => true,
        }
    }

    /// What was done and what was lost since the layer was made.
    pub fn stats(&self) -> Stats {
        self.0.upgrade().map(|engine| engine.stats()).unwrap_or_default()
    }

    /// Which source samples threads, and what it cannot see and what would change that, in one line:
    /// as it is logged when the layer starts. Empty if the layer is off or gone.
    pub fn source(&self) -> String {
        self.0.upgrade().map(|engine| engine.source_line.0.clone()).unwrap_or_default()
    }

    /// Runs a short known load, and reports whether samples, stacks, symbols and waits are seen here:
    /// in this very program, on this system, with the source that this layer has.
    ///
    /// It takes a little more than half a second, and longer where the program has much debug information. The load
    /// runs on a thread of its own under a layer of its own, and leaves no profile. It blocks; in async
    /// code call it from `spawn_blocking`.
    ///
    /// ```
    /// # use tracing_profiling::ProfilingLayer;
    /// # fn main() -> Result<(), tracing_profiling::Error> {
    /// let profiling = ProfilingLayer::from_env()?;
    /// let found = profiling.handle().self_test();
    /// println!("{found}");
    /// for problem in found.problems() {
    ///     eprintln!("profiling: {problem}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn self_test(&self) -> SelfTest {
        match self.0.upgrade().filter(|engine| engine.is_running()) {
            Some(engine) => self_test(engine.source_settings),
            None => SelfTest { source: "the layer is off".to_owned(), ..SelfTest::default() },
        }
    }

    /// A processor for the tracer provider, around the one that exports: it puts the attributes of
    /// kept spans on their OpenTelemetry spans, in whichever order the layers are.
    ///
    /// It is not needed where the profiling layer is added before the one of
    /// `tracing-opentelemetry`; see [`ProfilingLayer::with_opentelemetry`].
    ///
    /// ```
    /// # use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SimpleSpanProcessor};
    /// # use tracing_profiling::ProfilingLayer;
    /// # fn main() -> Result<(), tracing_profiling::Error> {
    /// # let exporter = InMemorySpanExporter::default();
    /// let profiling = ProfilingLayer::from_env()?;
    /// let exporting = SimpleSpanProcessor::new(exporter);
    /// let provider = SdkTracerProvider::builder()
    ///     .with_span_processor(profiling.handle().span_processor(exporting))
    ///     .build();
    /// # _ = provider;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// [`ProfilingLayer::with_opentelemetry`]: crate::ProfilingLayer::with_opentelemetry
    pub fn span_processor(&self, next: impl SpanProcessor + 'static) -> ProfilingSpanProcessor {
        let ends = self.0.upgrade().map(|engine| {
            engine.expect_ends();
            let ends: Weak<dyn SpanEnds> = Arc::<Engine>::downgrade(&engine);
            ends
        });
        ProfilingSpanProcessor::new(next, ends)
    }

    /// A guard for `main`: when it is dropped, what was kept is exported, for which it waits up to
    /// 5 seconds.
    ///
    /// Without it, and without [`flush`](Self::flush), what was kept in the last moments before
    /// the end of the process is lost: at the return from `main`, at `std::process::exit` (which
    /// drops nothing) and at an abort.
    #[must_use = "it flushes when it is dropped, which would be at once"]
    pub fn flush_on_drop(&self) -> FlushGuard {
        FlushGuard(self.clone())
    }
}

/// A deadline that is too far away to be a moment is one that nobody lives to see.
fn until(deadline: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    let now = Instant::now();
    now.checked_add(deadline.min(CENTURY)).unwrap_or(now)
}

/// Flushes when it is dropped; see [`Handle::flush_on_drop`].
#[derive(Debug)]
pub struct FlushGuard(Handle);

const GUARD_DEADLINE: Duration = Duration::from_secs(5);

impl Drop for FlushGuard {
    fn drop(&mut self) {
        self.0.flush(GUARD_DEADLINE);
    }
}

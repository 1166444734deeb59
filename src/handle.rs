//! Reaching a layer that has been given away.

#[cfg(feature = "axum")]
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

#[cfg(feature = "opentelemetry-sdk")]
use opentelemetry_sdk::trace::SpanProcessor;

use crate::collector::Engine;
use crate::config::rules_of_env;
use crate::control::Control;
use crate::error::Error;
use crate::keep::Rules;
#[cfg(feature = "opentelemetry-sdk")]
use crate::otel::{ProfilingSpanProcessor, SpanEnds};
use crate::sampler::SourceSettings;
use crate::stats::Stats;

/// Reaches a [`ProfilingLayer`](crate::ProfilingLayer) after it has become part of a subscriber.
///
/// A handle does not keep the layer alive. Where there is no layer any more, or where it is off,
/// there is nothing to wait for, and all numbers are 0.
#[derive(Clone, Debug)]
pub struct Handle(Weak<Control>);

impl Handle {
    pub(crate) fn new(control: &Arc<Control>) -> Self {
        Self(Arc::downgrade(control))
    }

    /// Replaces the rules. From now on spans that are made have these; spans that are open are judged
    /// by those that they were made under, so none is lost. Each span is judged by one set of rules.
    ///
    /// A layer that was [off](crate::ProfilingLayer::from_env) is started by rules that keep something,
    /// and rules that keep nothing do what [`disable`](Self::disable) does. The rate of sampling follows
    /// the rules, unless it was set; threads notice within a second.
    ///
    /// ```
    /// # use tracing_profiling::{ProfilingLayer, Rules};
    /// # fn main() -> Result<(), tracing_profiling::Error> {
    /// let profiling = ProfilingLayer::builder().rules("off".parse()?).build()?;
    /// let handle = profiling.handle();
    /// assert!(!handle.is_enabled());
    /// handle.set_rules("100ms|error".parse()?)?;
    /// assert!(handle.is_enabled());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// What replaced rules took is given back once eight other sets came after them and no span is open that was
    /// made under them. Until then a rule that comes back goes on with its limits and percentiles.
    ///
    /// # Errors
    ///
    /// If the layer is gone or [shut down](Self::shutdown), or if the system does not let us start two
    /// threads: that is not tried again.
    pub fn set_rules(&self, rules: Rules) -> Result<(), Error> {
        self.control()?.set_rules(rules)
    }

    /// Reads `TRACING_PROFILING` again, and replaces the rules by what it says; if it is not set, by those
    /// that the layer was made with. While profiling is [disabled](Self::disable) it stays so, and the rules
    /// wait.
    ///
    /// # Errors
    ///
    /// If it does not parse: then the rules stay as they are. And as for [`set_rules`](Self::set_rules).
    pub fn reload_env(&self) -> Result<(), Error> {
        self.control()?.reload(rules_of_env()?)
    }

    /// The rules in force, or while profiling is disabled those that were last.
    pub fn rules(&self) -> Rules {
        self.find().map_or(Rules::new([]), |control| control.rules())
    }

    /// From now on no span that is made is profiled. Spans that are open are judged all the same, and
    /// may leave their profiles. After some milliseconds without one, no thread is sampled any more.
    pub fn disable(&self) {
        if let Some(control) = self.find() {
            control.disable();
        }
    }

    /// Ends what [`disable`](Self::disable) began: the last rules are in force again. If they keep
    /// nothing, as with `TRACING_PROFILING=off`, it is the default ones.
    ///
    /// # Errors
    ///
    /// As for [`set_rules`](Self::set_rules).
    pub fn enable(&self) -> Result<(), Error> {
        self.control()?.enable()
    }

    /// Whether spans that are made now are profiled, if the rules say so.
    pub fn is_enabled(&self) -> bool {
        self.find().is_some_and(|control| control.is_enabled())
    }

    /// Keeps the innermost profiled span that is entered on the calling thread, whatever it does from
    /// here on and however many its rule has kept already; its reason is then
    /// [`Forced`](crate::Reason::Forced). Returns false if there is none: of a span that no rule
    /// matches there are no samples.
    pub fn keep_current(&self) -> bool {
        let control = self.0.upgrade();
        let engine = control.as_ref().and_then(|control| control.running());
        engine.is_some_and(|engine| engine.spans.force_current())
    }

    fn control(&self) -> Result<Arc<Control>, Error> {
        self.find().ok_or_else(Error::ended)
    }

    /// What the layer has, unless it is gone, or this is the child of a fork.
    fn find(&self) -> Option<Arc<Control>> {
        self.0.upgrade().filter(|control| control.is_here())
    }

    /// Waits until everything that was kept before is delivered, but no longer than `deadline`. Returns
    /// whether it was: false also if a profile that was promised was lost since the last call, and if the
    /// receiver is known to refuse profiles. While the exporter fails it is tried again until the deadline.
    /// Kept spans do not wait for their roots to close then.
    ///
    /// It blocks; in async code call it from `spawn_blocking`.
    pub fn flush(&self, deadline: Duration) -> bool {
        self.with_engine(|engine| engine.flush(until(deadline)))
    }

    /// The same, and ends profiling for good: rings, threads and files are given back.
    pub fn shutdown(&self, deadline: Duration) -> bool {
        let Some(control) = self.find() else { return true };
        #[cfg(feature = "sighup")]
        control.set_hangups(None);
        let ended = control.end(|engine| engine.shutdown(until(deadline)));
        ended.unwrap_or_else(|| has_lost_none(&control))
    }

    /// What samples threads, while it does.
    pub(crate) fn source_settings(&self) -> Option<SourceSettings> {
        let control = self.0.upgrade()?;
        control.running().map(|engine| engine.source_settings)
    }

    fn with_engine(&self, action: impl FnOnce(&Engine) -> bool) -> bool {
        let Some(control) = self.0.upgrade() else { return true };
        match control.running() {
            Some(engine) => action(engine),
            None => has_lost_none(&control),
        }
    }

    /// Where profiles can be found, if they become files.
    #[cfg(feature = "axum")]
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        self.0.upgrade()?.folder().map(PathBuf::from)
    }

    /// Whether there is still a layer, be it off.
    #[cfg(feature = "metrics")]
    pub(crate) fn has_layer(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// What was done and what was lost since the layer was made.
    pub fn stats(&self) -> Stats {
        let control = self.find();
        let engine = control.as_ref().and_then(|control| control.engine());
        engine.map(|engine| engine.stats()).unwrap_or_default()
    }

    /// Which source samples threads, and what it cannot see and what would change that, in one line:
    /// as it is logged when the layer starts. Empty if the layer is off or gone.
    pub fn source(&self) -> String {
        let control = self.0.upgrade();
        let engine = control.as_ref().and_then(|control| control.engine());
        engine.map(|engine| engine.source_line.0.clone()).unwrap_or_default()
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
    #[cfg(feature = "opentelemetry-sdk")]
    pub fn span_processor(&self, next: impl SpanProcessor + 'static) -> ProfilingSpanProcessor {
        let ends = self.find().map(|control| {
            control.expect_processor();
            let ends: Weak<dyn SpanEnds> = Arc::<Control>::downgrade(&control);
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

/// Whether profiling that has ended, if it ever began, has delivered all that was promised.
fn has_lost_none(control: &Control) -> bool {
    !control.is_here() || control.engine().is_none_or(|engine| engine.has_lost_none())
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

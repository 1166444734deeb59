//! The layer, whose hooks call into the engine.

use std::any::type_name;
use std::cell::{Cell, OnceCell};
use std::sync::Arc;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, span};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
#[cfg(feature = "tower")]
use tracing_subscriber::registry::Registry;

use crate::config::Builder;
use crate::control::Control;
use crate::engine::Engine;
use crate::error::Error;
use crate::handle::Handle;
use crate::interest::SelfFilter;
use crate::keep::{FieldValues, LoggedError, STATUS_FIELD};
use crate::log::{LogEvent, LogKind};
use crate::otel::OtelSpan;
use crate::references::CohortHash;
use crate::span::{
    AncestryFrom, CHOSEN, GivenParent, HAS_FIELDS, HAS_STATUS, ONE_IN, RegistryId, SHOWS_FIELDS,
    ancestry,
};
use crate::sys::SuspendCounting;

/// A `tracing-subscriber` layer that keeps CPU profiles of the spans that its rules select: slow, failed or hung ones.
///
/// The layer filters itself: it enables the callsites that its rules need and no others, and disables none for other
/// layers. Spans that no directive names are profiled if another layer wants them, or there is none, up to the level `INFO`.
/// While it is off, it wants nothing.
/// The [guide](crate::guide::subscriber) says in which arrangements of layers that is free.
///
/// When the layer is dropped, its threads export the kept profiles and end. Use a [`Handle`] to wait for that.
#[derive(Debug)]
pub struct ProfilingLayer {
    control: Arc<Control>,
    filter: SelfFilter,
}

impl ProfilingLayer {
    /// A layer configured by environment variables; see the crate's documentation.
    ///
    /// A malformed value does not end the program: the log has a warning that shows where it is wrong, and the other
    /// variables apply. The layer is then off if the value is one of rules, of what is hidden, or of where profiles go, and
    /// otherwise has its default. To end the program instead, use
    /// `ProfilingLayer::builder().`[`with_env`](Builder::with_env)`()?.build()?`.
    ///
    /// # Errors
    ///
    /// If the system does not allow the layer to start two threads.
    pub fn from_env() -> Result<Self, Error> {
        Self::builder().with_usable_env()?.build()
    }

    /// A builder, for settings in code.
    pub fn builder() -> Builder {
        Builder::new()
    }

    pub(crate) fn new(control: Arc<Control>) -> Self {
        let filter = SelfFilter::new(&control);
        Self { control, filter }
    }

    /// A handle to the layer. Take it before the layer is moved into a subscriber.
    pub fn handle(&self) -> Handle {
        Handle::new(&self.control)
    }

    #[cfg(test)]
    pub(crate) fn engine(&self) -> Option<&Engine> {
        self.control.engine().map(|engine| &**engine)
    }

    /// The OpenTelemetry span that a span is exported as, if it can be reached.
    #[cold]
    fn otel_span(&self, engine: &Engine, id: &span::Id) -> Option<OtelSpan> {
        // Some combinations of layers do not pass on their subscriber. It is then the default one, if that contains this layer.
        let is_own = |layer: &Self| std::ptr::eq(layer, self);
        let default = || {
            tracing::dispatcher::get_default(|default| {
                default.downcast_ref().is_some_and(is_own).then(|| default.clone())
            })
        };
        OtelSpan::find(id, &engine.dispatch().or_else(default)?)
    }
}

impl Builder {
    /// Builds the layer.
    ///
    /// With rules that never keep anything, the layer does nothing: it creates no threads, files or signal handlers
    /// until [`Handle::set_rules`] or [`Handle::set_enabled`] is called.
    ///
    /// # Errors
    ///
    /// If a setting is invalid, or the system does not allow the layer to start its threads and open a file.
    pub fn build(self) -> Result<ProfilingLayer, Error> {
        Ok(ProfilingLayer::new(Control::new(self.finished()?)?))
    }
}

impl Drop for ProfilingLayer {
    fn drop(&mut self) {
        if self.control.is_here() {
            self.control.end(Engine::shutdown_later);
        }
    }
}

/// What `action` returns for the default subscriber and the engine of its layer, if that has anything to do.
#[cfg(feature = "tower")]
fn in_default<R>(action: impl Fn(&Dispatch, &Engine) -> R) -> Option<R> {
    tracing::dispatcher::get_default(|dispatch| {
        let engine = dispatch.downcast_ref::<ProfilingLayer>()?.control.open_engine()?;
        Some(action(dispatch, engine))
    })
}

/// Whether the layer of the default subscriber profiles spans.
#[cfg(feature = "tower")]
pub(crate) fn is_on() -> bool {
    in_default(|_, engine| !engine.callsites.are_off()).unwrap_or(false)
}

/// Adds what names a request to the shown fields of the current span.
#[cfg(feature = "tower")]
pub(crate) fn add_route(names: [(&'static str, Option<&str>); 2]) {
    in_default(|dispatch, engine| {
        let (_uncounted, current) = (SuspendCounting::begin(), dispatch.current_span());
        let span = dispatch.downcast_ref::<Registry>()?.span(current.id()?)?;
        let mut extensions = span.extensions_mut();
        extensions.get_mut::<FieldValues>()?.add_route(names, &engine.callsites.shown_fields);
        Some(())
    });
}

/// The response of a request is ready, whose span is that one or, if there is none, the current one. Marks the innermost
/// profiled span that it is in as failed if the server has, as `failure` says.
#[cfg(feature = "tower")]
pub(crate) fn note_response(span: &tracing::Span, failure: impl Fn() -> Option<String>) {
    in_default(|dispatch, engine| {
        let (_uncounted, failure) = (SuspendCounting::begin(), failure());
        let innermost =
            || crate::span::innermost_span().filter(|it| it.layer == engine.spans.layer);
        let key = match span.id() {
            Some(id) => engine.spans.key_of(number(&id)),
            None => innermost().map(|span| span.key),
        };
        let now = || engine.spans.clock.now();
        // A connection has several.
        let note = |known: Option<_>| known.is_none().then(now);
        _ = key.map(|key| engine.callsites.answered.change(key, note));
        let registry = dispatch.downcast_ref::<Registry>();
        let current = span.id().or_else(|| dispatch.current_span().id().cloned());
        let (Some(registry), Some(id), Some(failure)) = (registry, current, &failure) else {
            return;
        };
        let ask = |_, visit: &mut dyn FnMut(RegistryId) -> bool| {
            let scope = registry.span(&id).into_iter().flat_map(|span| span.scope());
            _ = scope.map(|span| number(&span.id())).find(|id| visit(*id));
        };
        engine.spans.fail_nearest(AncestryFrom::Current, &ask, &|span| {
            let error =
                || LoggedError { place: None, is_panic: false, text: failure.as_str().into() };
            engine.callsites.logged_errors.add(span, error);
        });
    });
}

const UNFILTERED: &str = "the profiling layer is part of a subscriber without per-layer filters, such as that of \
    `tracing_subscriber::fmt().finish()`, so it cannot decline what its rules do not need, and all that the subscriber \
    allows is enabled, at a cost: use \
    `tracing_subscriber::registry().with(tracing_subscriber::fmt::layer()).with(profiling)`";

const HIDDEN: &str = "the profiling layer is inside a layer that hides its per-layer filters, such as `reload::Layer`, \
    so spans and events that no layer needs are enabled, at a cost, also while profiling is off: add it directly, and use \
    `Handle::set_rules` or `Handle::set_enabled` to change it";

#[inline(always)]
fn number(id: &span::Id) -> RegistryId {
    id.into_non_zero_u64()
}

impl<S> Layer<S> for ProfilingLayer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_register_dispatch(&self, subscriber: &Dispatch) {
        self.control.set_dispatch(subscriber);
        if self.filter.is_hidden() && !subscriber.is::<Self>() {
            self.control.warn(LogEvent::warning(LogKind::Unfiltered, HIDDEN));
        }
    }

    fn on_layer(&mut self, subscriber: &mut S) {
        let _uncounted = SuspendCounting::begin();
        self.control.unreached.note_type(type_name::<S>());
        if !self.filter.on_layer(subscriber) {
            self.control.warn(LogEvent::warning(LogKind::Unfiltered, UNFILTERED));
        }
    }

    #[inline]
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        self.control.unreached.note_callsite(metadata.target(), metadata.name());
        self.filter.register_callsite::<S>(metadata)
    }

    #[inline]
    fn enabled(&self, metadata: &Metadata<'_>, ctx: Context<'_, S>) -> bool {
        self.filter.get::<S>().is_none_or(|filter| {
            filter.enabled(metadata, ctx) && !SelfFilter::forbids(filter.filter(), metadata)
        })
    }

    #[inline]
    fn event_enabled(&self, event: &Event<'_>, ctx: Context<'_, S>) -> bool {
        self.filter.get::<S>().is_none_or(|filter| filter.event_enabled(event, ctx))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        self.filter.max_level_hint::<S>()
    }

    tracing_profiling_capture::downcast_through!(filter.answer);

    #[inline]
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, ctx: Context<'_, S>) {
        if let Some(filter) = self.filter.get::<S>() {
            filter.on_new_span(attributes, id, ctx.clone());
        }
        let Some(engine) = self.control.open_engine() else { return };
        let Some(mut callsite) = engine.callsites.find(attributes.metadata()) else { return };
        let mut matched = 0;
        if callsite.plan.flags & HAS_FIELDS != 0 {
            let record = |visit: &mut dyn Visit| attributes.record(visit);
            let Some(chosen) = engine.callsites.choose(callsite, record) else { return };
            (callsite, matched) = chosen;
        }
        let plan = &callsite.plan;
        let parent = match attributes.parent() {
            Some(parent) => GivenParent::Span(number(parent)),
            None if attributes.is_root() => GivenParent::None,
            None if self.filter.sees_all_spans() => GivenParent::Contextual,
            None => GivenParent::ContextualBehindFilter,
        };
        let ask = |from, visit: &mut dyn FnMut(RegistryId) -> bool| ancestry(&ctx, from, visit);
        let opened = engine.spans.open(number(id), plan, matched, parent, &ask);
        if opened.is_first_watched {
            // For an open span whose open time is limited: nothing else may wake the collector.
            engine.waker.wake();
        }
        let throw = if opened.is_outermost { engine.note_request(number(id)) } else { None };
        let mut cohort = CohortHash::of(attributes.metadata());
        if plan.flags & ONE_IN != 0 && callsite.is_chosen() {
            engine.spans.mark(number(id), CHOSEN);
        }
        if plan.flags & SHOWS_FIELDS != 0
            && let Some(span) = ctx.span(id)
        {
            let _uncounted = SuspendCounting::begin();
            let record = |visit: &mut dyn Visit| attributes.record(visit);
            let values = FieldValues::read(callsite.shown_fields, span.metadata(), record);
            if throw.is_some() {
                cohort = cohort.with(&values);
            }
            values.store(&mut span.extensions_mut());
        }
        if let Some(throw) = throw {
            engine.choose_reference(number(id), throw, cohort);
        }
        if plan.flags & HAS_STATUS != 0 && Status::is_error(|status| attributes.record(status)) {
            engine.spans.fail(number(id));
        }
    }

    #[inline]
    fn on_enter(&self, id: &span::Id, _: Context<'_, S>) {
        if let Some(engine) = self.control.open_engine() {
            engine.spans.enter(number(id));
        }
    }

    #[inline]
    fn on_exit(&self, id: &span::Id, _: Context<'_, S>) {
        if let Some(engine) = self.control.open_engine() {
            engine.spans.exit(number(id));
        }
    }

    #[inline]
    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, ctx: Context<'_, S>) {
        let Some(engine) = self.control.open_engine() else { return };
        let (flags, plan) = engine.spans.flags_and_plan(number(id));
        if flags & SHOWS_FIELDS != 0
            && let Some(span) = ctx.span(id)
        {
            let _uncounted = SuspendCounting::begin();
            let callsite = engine.callsites.get(plan);
            let shown = callsite.map_or(0, |callsite| callsite.shown_fields);
            let record = |visit: &mut dyn Visit| values.record(visit);
            let values = FieldValues::read(shown, span.metadata(), record);
            values.store(&mut span.extensions_mut());
        }
        let id = number(id);
        if flags & HAS_STATUS != 0 && Status::is_error(|status| values.record(status)) {
            engine.spans.fail(id);
        }
        engine.record_values(id, |visit| values.record(visit));
    }

    #[inline]
    fn on_event(&self, event: &Event<'_>, ctx: Context<'_, S>) {
        if let Some(filter) = self.filter.get::<S>() {
            filter.on_event(event, ctx.clone());
        }
        if *event.metadata().level() != Level::ERROR {
            return;
        }
        let Some(engine) = self.control.open_engine() else { return };
        let ask = |from, visit: &mut dyn FnMut(RegistryId) -> bool| ancestry(&ctx, from, visit);
        let from = match event.parent() {
            Some(parent) => AncestryFrom::Span(number(parent)),
            None if event.is_contextual() => AncestryFrom::Current,
            None => return,
        };
        let (known, error) = (&engine.callsites.logged_errors, OnceCell::new());
        let error = || error.get_or_init(|| LoggedError::of(event)).clone();
        let noted = Cell::new(None);
        engine.spans.fail_nearest(from, &ask, &|span| {
            // The outermost one is the last.
            noted.set(known.add(span, error).then_some(span));
        });
        if let Some(noted) = noted.get() {
            engine.awaits.note_error(noted);
        }
    }

    #[inline]
    fn on_close(&self, id: span::Id, _: Context<'_, S>) {
        if let Some(engine) = self.control.open_engine() {
            let reach = |id| self.otel_span(engine, &span::Id::from_non_zero_u64(id));
            engine.close(number(&id), &reach);
        }
    }
}

/// Reads the field that sets a span's status in `tracing-opentelemetry`.
struct Status(bool);

impl Status {
    fn is_error(record: impl FnOnce(&mut Self)) -> bool {
        let mut status = Self(false);
        record(&mut status);
        status.0
    }
}

impl Visit for Status {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0 |= field.name() == STATUS_FIELD && value.eq_ignore_ascii_case("error");
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == STATUS_FIELD {
            let _uncounted = SuspendCounting::begin();
            self.record_str(field, format!("{value:?}").trim_matches('"'));
        }
    }
}

//! Which callsites the layer wants. It filters itself, as a layer with a `with_filter` does, so that it enables no
//! callsite that its rules do not need, and disables none for other layers.
//!
//! A span that only this layer wanted would be the current one, and hide the span around it from layers that propagate
//! contexts, record values or move `Span::current()` to a task. So the layer wants a span that no rule names only if
//! another layer wants it, which it asks its own subscriber: see [`SelfFilter::register_callsite`].
//!
//! Only a *per-layer filter* of `tracing-subscriber` can decline a callsite for one layer alone: a layer that answers
//! `never` by itself disables it for all. The layer therefore contains one, [`Filtered`], around a layer that does
//! nothing. It is asked for everything that decides whether a callsite is enabled, and receives new spans and events, for
//! it then clears what it noted about them. Enters, exits and closes do not go through it, since it would look up the span
//! for each. The hooks decide for themselves which spans are profiled.

use std::any::{Any, TypeId, type_name};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Dispatch, Metadata, Subscriber};
use tracing_subscriber::filter::Filtered;
use tracing_subscriber::layer::{Context, Filter, Layer};
use tracing_subscriber::registry::{LookupSpan, Registry};

use crate::control::Control;
use crate::engine::Engine;
use crate::refresh::refresh_interest;
use crate::span::has_deepest;
use crate::sys::SuspendCounting;

thread_local! {
    /// The callsite of which this thread asks what other layers want.
    static ASKS_OTHERS: Cell<Option<&'static Metadata<'static>>> = const { Cell::new(None) };
}

/// The filter: what the rules in force want. Nothing while the layer is off.
#[derive(Debug)]
pub(crate) struct Wanted(Arc<Control>);

impl<S> Filter<S> for Wanted {
    #[inline]
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        self.0.open_engine().is_some_and(|engine| engine.callsites.wants(metadata))
    }

    /// `sometimes` for what is wanted. If all filters answered `always`, no filter would be asked again, and what a filter
    /// noted about a callsite that was only asked about (`enabled!`) would hide the next span or event.
    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        let Some(engine) = self.0.open_engine() else { return Interest::never() };
        let (is_wanted, has_news) = engine.callsites.register(metadata);
        if has_news {
            // Later: `tracing` holds locks now.
            refresh_interest(self.0.own_dispatch(), || {});
        }
        if is_wanted { Interest::sometimes() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.0.open_engine().map_or(LevelFilter::OFF, |engine| engine.callsites.max_level()))
    }
}

/// The layer inside the filter, which does nothing.
#[derive(Debug)]
pub(crate) struct Inert;

impl<S: Subscriber> Layer<S> for Inert {}

pub(crate) type FilterOf<S> = Filtered<Inert, Wanted, S>;

/// The filter of a layer, and how the layer is part of its subscriber.
#[derive(Debug)]
pub(crate) struct SelfFilter {
    /// Says that the layer filters itself, for any subscriber: it is asked before the subscriber is known.
    marker: FilterOf<Registry>,
    /// The [`FilterOf`] its subscriber, once the layer is part of one.
    filter: Option<Box<dyn Any + Send + Sync>>,
    /// The subscriber has no per-layer filters.
    is_impossible: bool,
    is_over_registry: bool,
    /// The layer was asked whether it filters itself before it was part of a subscriber, and after that.
    was_asked_before: AtomicBool,
    was_asked: AtomicBool,
}

impl SelfFilter {
    pub(crate) fn new(control: &Arc<Control>) -> Self {
        Self {
            marker: Filtered::new(Inert, Wanted(Arc::clone(control))),
            filter: None,
            is_impossible: false,
            is_over_registry: false,
            was_asked_before: AtomicBool::new(false),
            was_asked: AtomicBool::new(false),
        }
    }

    /// The layer becomes part of a subscriber. Returns false if it cannot filter itself there.
    pub(crate) fn on_layer<S>(&mut self, subscriber: &mut S) -> bool
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        if !has_filters(type_name::<S>()) {
            self.is_impossible = true;
            return false;
        }
        let control = Arc::clone(&self.marker.filter().0);
        let mut filter: FilterOf<S> = Filtered::new(Inert, Wanted(control));
        filter.on_layer(subscriber);
        self.filter = Some(Box::new(filter));
        self.is_over_registry = TypeId::of::<S>() == TypeId::of::<Registry>();
        true
    }

    /// The filter. `None` in a subscriber without per-layer filters, and in a `reload::Layer` that got this layer later,
    /// which does not say so. All callsites are then enabled, as for a layer without a filter.
    #[inline]
    pub(crate) fn get<S>(&self) -> Option<&FilterOf<S>>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        self.filter.as_ref()?.downcast_ref()
    }

    /// Adds what the rules want to what other filters want of the callsite.
    ///
    /// `tracing-subscriber` sums up the interests of filters in a thread-local, which the registry takes at the end. Asking
    /// the subscriber about the same callsite from here, without an answer of our own, ends in that, too: its result is
    /// the sum of all others, and what filters around this layer had added is taken. What is added now replaces these:
    /// if no other layer wants the callsite, `never` is their sum, and if one does, `sometimes` is a sum for any of them.
    pub(crate) fn register_callsite<S>(&self, metadata: &'static Metadata<'static>) -> Interest
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        // See `Wanted::callsite_enabled`.
        let Some(filter) = self.get::<S>() else { return Interest::sometimes() };
        if ASKS_OTHERS.get().is_some_and(|asked| std::ptr::eq(asked, metadata)) {
            return Interest::always();
        }
        // A wrapper that hides this layer may hold a lock now (`reload::Layer`), or has a filter that the program chose.
        if self.was_asked.load(Ordering::Relaxed)
            && let Some(engine) = filter.filter().0.open_engine()
        {
            let _uncounted = SuspendCounting::begin();
            let is_only_ours = engine.callsites.may_want(metadata) && !self.others_want(metadata);
            engine.callsites.set_only_ours(metadata, is_only_ours);
        }
        filter.register_callsite(metadata)
    }

    /// Whether nothing may be created from the callsite now: no other layer wants the span, and the thread is too deep in
    /// others. A filter that declines it would not do: the registry makes a span that all filters decline.
    #[inline]
    pub(crate) fn forbids(filter: &Wanted, metadata: &Metadata<'_>) -> bool {
        let is_too_deep =
            |engine: &Engine| engine.callsites.is_only_ours(metadata) && engine.spans.is_too_deep();
        has_deepest() && metadata.is_span() && filter.0.open_engine().is_some_and(is_too_deep)
    }

    /// Whether a layer of the subscriber besides those of this crate wants the callsite, or there is no other.
    fn others_want(&self, metadata: &'static Metadata<'static>) -> bool {
        /// Restored also if a layer panics.
        struct Asks(Option<&'static Metadata<'static>>);
        impl Drop for Asks {
            fn drop(&mut self) {
                ASKS_OTHERS.set(self.0);
            }
        }
        let own = self.marker.filter().0.own_dispatch().or_else(|| self.find_dispatch());
        let Some(own) = own else { return true };
        let _asks = Asks(ASKS_OTHERS.replace(Some(metadata)));
        !own.register_callsite(metadata).is_never()
    }

    /// The default subscriber, if it is that of this layer: `Option` and `Vec` do not pass it on.
    #[cold]
    fn find_dispatch(&self) -> Option<Dispatch> {
        let control = &self.marker.filter().0;
        let is_own = |own: &Wanted| Arc::ptr_eq(&own.0, control);
        let found = tracing::dispatcher::get_default(|default| {
            default.downcast_ref().is_some_and(is_own).then(|| default.clone())
        })?;
        control.set_dispatch(&found);
        // For callsites that were seen before. Later: `tracing` holds locks now.
        refresh_interest(Some(found.clone()), || {});
        Some(found)
    }

    /// The level above which nothing is wanted. It may only be said where layers around this one know that it filters
    /// itself; others would take it for the level of the whole program. `reload::Layer` hides that. So does a tree of layers
    /// (`and_then`) right over the registry, which takes the level of its last layer for its own.
    pub(crate) fn max_level_hint<S>(&self) -> Option<LevelFilter>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let is_in_tree = self.was_asked_before.load(Ordering::Relaxed);
        let is_known = self.was_asked.load(Ordering::Relaxed);
        if !is_known || is_in_tree && self.is_over_registry {
            return None;
        }
        self.get::<S>()?.max_level_hint()
    }

    /// Whether the hooks see the enters of all spans: the layer is not inside a `with_filter`, which answers for itself.
    #[inline(always)]
    pub(crate) fn sees_all_spans(&self) -> bool {
        self.was_asked.load(Ordering::Relaxed)
    }

    /// Whether the layers around this one do not know that it filters itself.
    pub(crate) fn is_hidden(&self) -> bool {
        self.filter.is_some() && !self.sees_all_spans()
    }

    /// Answers whether the layer filters itself: `id` is that of a private type of `tracing-subscriber`.
    pub(crate) fn answer(&self, id: TypeId) -> Option<*const ()> {
        if self.is_impossible {
            return None;
        }
        let answer = tracing_profiling_capture::answer_of!(self.marker, id)?;
        let was_asked = match self.filter {
            Some(_) => &self.was_asked,
            None => &self.was_asked_before,
        };
        was_asked.store(true, Ordering::Relaxed);
        Some(answer)
    }
}

/// Whether a subscriber of that type registers per-layer filters: a registry, below any layers. `register_filter` of
/// others panics unless they implement it, which cannot be known.
fn has_filters(subscriber: &str) -> bool {
    const LAYERED: &str = "tracing_subscriber::layer::layered::Layered<";
    const REGISTRY: &str = "tracing_subscriber::registry::sharded::Registry";
    let mut innermost = subscriber;
    while let Some(parameters) = innermost.strip_prefix(LAYERED) {
        innermost = second(parameters);
    }
    innermost == REGISTRY
}

/// The second of the generic parameters at the beginning of the text.
fn second(parameters: &str) -> &str {
    let mut depth = 0_usize;
    let mut start = None;
    let mut previous = ' ';
    for (at, c) in parameters.char_indices() {
        match c {
            '<' | '(' | '[' => depth += 1,
            // Not the one of `->`.
            '>' if previous == '-' => {}
            '>' | ')' | ']' if depth > 0 => depth -= 1,
            ',' | '>' if depth == 0 => match start {
                Some(start) => return parameters.get(start..at).unwrap_or_default().trim(),
                None => start = Some(at + 1),
            },
            _ => {}
        }
        previous = c;
    }
    ""
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::prelude::*;

    use super::*;

    fn is_possible_in<S>(_: &S) -> bool {
        has_filters(type_name::<S>())
    }

    #[test]
    fn registries_below_any_layers_have_filters() {
        let of_registry = tracing_subscriber::registry();
        assert!(is_possible_in(&of_registry));
        let function = tracing_subscriber::filter::filter_fn(|_| true);
        let layered = of_registry
            .with(tracing_subscriber::fmt::layer().with_writer(std::io::stderr))
            .with(Inert.and_then(Inert))
            .with(Inert.with_filter(function))
            .with(None::<Box<dyn Layer<_> + Send + Sync>>)
            .with(vec![Inert]);
        assert!(is_possible_in(&layered));
        assert!(is_possible_in(&layered.with(tracing_subscriber::filter::filter_fn(move |_| {
            type_name::<fn(u8, &str) -> [Option<u8>; 2]>().is_empty()
        }))));
    }

    #[test]
    fn other_subscribers_do_not() {
        assert!(!is_possible_in(&tracing_subscriber::fmt().finish()));
        assert!(!is_possible_in(&tracing_subscriber::fmt().finish().with(Inert)));
        assert!(!is_possible_in(&tracing::subscriber::NoSubscriber::new()));
        assert!(!has_filters("my::Wrapper<tracing_subscriber::registry::sharded::Registry>"));
    }

    #[test]
    fn the_second_parameter_is_found_in_any_type() {
        for (text, expected) in [
            ("A, B, B>", "B"),
            ("A, B>", "B"),
            ("fn(u8, u8) -> Vec<u8>, m::B<C, D>, X>", "m::B<C, D>"),
            ("[u8; 3], (A, B), C>", "(A, B)"),
            ("A<B<C, D>, E>, F<G>>", "F<G>"),
            ("A", ""),
            ("", ""),
        ] {
            assert_eq!(second(text), expected, "{text}");
        }
    }
}

//! Makes `tracing` ask all layers again which callsites they want.

use tracing::level_filters::LevelFilter;
use tracing::subscriber::{Interest, NoSubscriber};
use tracing::{Dispatch, Event, Metadata, Subscriber, span};

use crate::sys;

/// Asks on a thread of its own, so that it can be called in a hook, and calls `then` on it. `own` is the subscriber of the
/// layer, as far as it is known.
///
/// As long as `tracing` knows of one subscriber only, it asks the default of the calling thread, and disables all callsites
/// if that has none. So the layer's is made the default. Some combinations of layers (`Option`, `Vec`) do not let the
/// layer know its subscriber. It is then the global default, which this thread has, or a scoped one of another thread: a
/// second subscriber makes `tracing` ask all that it knows of.
pub(crate) fn refresh_interest(own: Option<Dispatch>, then: impl FnOnce() + Send + 'static) {
    let refresh = move || {
        sys::log_between_forks(|| match &own {
            Some(own) => {
                tracing::dispatcher::with_default(own, tracing::callsite::rebuild_interest_cache);
            }
            None => {
                let has_global =
                    tracing::dispatcher::get_default(|default| !default.is::<NoSubscriber>());
                if !has_global {
                    drop(Dispatch::new(NoSpans));
                }
                tracing::callsite::rebuild_interest_cache();
            }
        });
        then();
    };
    // Without memory for a thread, callsites that are wanted now stay as they are.
    _ = sys::spawn("profiling-rules", refresh);
}

/// A subscriber that wants nothing.
struct NoSpans;

impl Subscriber for NoSpans {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::never()
    }

    fn enabled(&self, _: &Metadata<'_>) -> bool {
        false
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::OFF)
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

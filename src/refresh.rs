//! Makes `tracing` ask all layers again which callsites they want.

use tracing::Dispatch;
use tracing::level_filters::LevelFilter;
use tracing::subscriber::NoSubscriber;
use tracing_subscriber::prelude::*;
use tracing_subscriber::registry;

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
        sys::Forks::log_between(|| match &own {
            Some(own) => {
                tracing::dispatcher::with_default(own, tracing::callsite::rebuild_interest_cache);
            }
            None => {
                let has_global =
                    tracing::dispatcher::get_default(|default| !default.is::<NoSubscriber>());
                if !has_global {
                    drop(wants_nothing());
                }
                tracing::callsite::rebuild_interest_cache();
            }
        });
        then();
    };
    // Without memory for a thread, callsites that are wanted now stay as they are.
    _ = sys::spawn("profiling-rules", refresh);
}

/// Returns a subscriber that wants nothing, also by its level, so that the maximum level does not rise.
fn wants_nothing() -> Dispatch {
    Dispatch::new(registry().with(LevelFilter::OFF))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a process of its own: the maximum level is that of all subscribers.
    #[test]
    fn a_second_subscriber_does_not_raise_the_maximum_level() {
        if !tracing_profiling_capture::testing::is_alone(
            "refresh::tests::a_second_subscriber_does_not_raise_the_maximum_level",
        ) {
            return;
        }
        let _own = Dispatch::new(registry().with(LevelFilter::WARN));
        let _second = wants_nothing();
        assert_eq!(LevelFilter::current(), LevelFilter::WARN);
    }
}

//! Finding out that the layers are in the wrong order.

use std::cell::Cell;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt;

use crate::span::is_ignored;

/// What is known of the order of this layer and the one of `tracing-opentelemetry`.
///
/// If that one sees a span close first, its OpenTelemetry span has ended before anything can be said
/// on it.
#[derive(Debug, Default)]
pub(crate) struct LayerOrder {
    /// Exits of spans at which to look, because a span that closed had no OpenTelemetry span.
    looks: AtomicU32,
    was_suspected: AtomicBool,
    state: AtomicU8,
}

const FINE: u8 = 0;
const WRONG: u8 = 1;
const SAID: u8 = 2;

/// Without OpenTelemetry, spans never have one: so it is looked for only so often.
const LOOKS: u32 = 256;

thread_local! {
    /// The span that was entered last, if OpenTelemetry had a current one then; or 0.
    static LOOKED_AT: Cell<u64> = const { Cell::new(0) };

    /// Whether a context was there when it was first asked for, if it was.
    static HAS_CONTEXT: Cell<Option<bool>> = const { Cell::new(None) };

    static SENTINEL: Sentinel = const { Sentinel };
}

/// Is dropped before the context of its thread, of which nothing may be asked from then on: that panics,
/// and who asks can be the destructor of a thread-local that enters a span.
struct Sentinel;

impl Drop for Sentinel {
    fn drop(&mut self) {}
}

/// Whether OpenTelemetry has a current span on this thread, if that can be said.
fn has_current() -> Option<bool> {
    let look = || Context::map_current(|context| context.span().span_context().is_valid());
    if is_ignored() {
        return None;
    }
    let Some(has_context) = HAS_CONTEXT.get() else {
        // It may be gone already; else it is made by this, so that the sentinel comes after it, and goes
        // before it.
        let found = catch_unwind(look).ok();
        HAS_CONTEXT.set(Some(found.is_some()));
        _ = SENTINEL.try_with(|_| ());
        return found;
    };
    (has_context && SENTINEL.try_with(|_| ()).is_ok()).then(look)
}

impl LayerOrder {
    /// The layer is put on that subscriber.
    pub(crate) fn see_subscriber<S>(&self) {
        if std::any::type_name::<S>().contains("tracing_opentelemetry::layer::OpenTelemetryLayer<")
        {
            self.note_wrong();
        }
    }

    fn note_wrong(&self) {
        _ = self.state.compare_exchange(FINE, WRONG, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// A span closed that has no OpenTelemetry span. Returns whether to look from now on.
    pub(crate) fn suspect(&self) -> bool {
        let is_first = !self.was_suspected.swap(true, Ordering::Relaxed);
        if is_first {
            self.looks.store(LOOKS, Ordering::Relaxed);
        }
        is_first
    }

    /// A span is entered. In the right order, it is not the current one of OpenTelemetry yet.
    #[cold]
    pub(crate) fn look_at_enter(&self, id: u64) {
        LOOKED_AT.set(if has_current() == Some(true) { id } else { 0 });
    }

    /// A span is left. In the right order, it is still the current one of OpenTelemetry: in the
    /// wrong one there was one when it was entered, and there is none now.
    /// Returns whether to go on looking.
    #[cold]
    pub(crate) fn look_at_exit(&self, id: u64) -> bool {
        if LOOKED_AT.replace(0) == id && has_current() == Some(false) {
            self.note_wrong();
            return false;
        }
        self.looks.fetch_sub(1, Ordering::Relaxed) > 1
    }

    /// Whether the order is wrong. True only once.
    pub(crate) fn take_wrong(&self) -> bool {
        self.state.compare_exchange(WRONG, SAID, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

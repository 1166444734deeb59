//! Finding out that the layers are in the wrong order.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt;
use tracing::{Dispatch, span};

use super::OtelSpan;

/// What is known of the order of this layer and the one of `tracing-opentelemetry`.
///
/// If that one sees a span close first, its OpenTelemetry span has ended before anything can be said
/// on it.
#[derive(Debug, Default)]
pub(crate) struct LayerOrder {
    /// Enters of spans at which to look, because a span that closed had no OpenTelemetry span.
    looks: AtomicU32,
    was_suspected: AtomicBool,
    state: AtomicU8,
}

const FINE: u8 = 0;
const WRONG: u8 = 1;
const SAID: u8 = 2;

/// Without OpenTelemetry, spans never have one: so it is looked for only so often.
const LOOKS: u32 = 64;

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

    /// A span closed that has no OpenTelemetry span.
    pub(crate) fn suspect(&self) {
        if !self.was_suspected.swap(true, Ordering::Relaxed) {
            self.looks.store(LOOKS, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    pub(crate) fn must_look(&self) -> bool {
        self.looks.load(Ordering::Relaxed) > 0
    }

    /// A span is entered. In the right order OpenTelemetry does not know that yet.
    #[cold]
    pub(crate) fn look(&self, id: &span::Id, dispatch: &Dispatch) {
        self.looks.fetch_sub(1, Ordering::Relaxed);
        let current = Context::map_current(|context| context.span().span_context().clone());
        // Only where it makes its spans current is it sure that to ask for one starts it no sooner
        // than it would be in a moment.
        if !current.is_valid() {
            return;
        }
        if let Some(found) = OtelSpan::find(id, dispatch) {
            self.looks.store(0, Ordering::Relaxed);
            if found.ids().span == current.span_id() {
                self.note_wrong();
            }
        }
    }

    /// Whether the order is wrong. True only once.
    pub(crate) fn take_wrong(&self) -> bool {
        self.state.compare_exchange(WRONG, SAID, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

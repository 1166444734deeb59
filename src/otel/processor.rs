//! The span processor that sets attributes on OpenTelemetry spans when they end.

use std::fmt::Debug;
use std::sync::Weak;
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};

use super::pairing::{leave_attributes, take_attributes};
use super::values;
use crate::span::TraceIds;
use crate::sys::Uncounted;

/// Sets the attributes of kept spans on their OpenTelemetry spans, and forwards all spans to another processor
/// immediately.
///
/// Created by [`Handle::span_processor`](crate::Handle::span_processor). It works in either order of the layers, and
/// also if the layer of `tracing-opentelemetry` cannot be accessed, as inside a `reload::Layer`.
#[derive(Debug)]
pub struct ProfilingSpanProcessor {
    next: Box<dyn SpanProcessor>,
    ends: Option<Weak<dyn SpanEnds>>,
}

impl ProfilingSpanProcessor {
    pub(crate) fn new(
        next: impl SpanProcessor + 'static,
        ends: Option<Weak<dyn SpanEnds>>,
    ) -> Self {
        Self { next: Box::new(next), ends }
    }
}

/// Notified when OpenTelemetry ends a span.
pub(crate) trait SpanEnds: Debug + Send + Sync {
    /// If this is the OpenTelemetry span of a span that is closing now, that span is judged before this returns.
    fn ended(&self, ids: TraceIds);
}

impl SpanProcessor for ProfilingSpanProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.next.on_start(span, context);
    }

    fn on_end(&self, mut data: SpanData) {
        let ids = values::ids_of(&data.span_context);
        if let Some(ends) = self.ends.as_ref().and_then(Weak::upgrade) {
            ends.ended(ids);
        }
        // What it adds counts for no span.
        let uncounted = Uncounted::begin();
        let attributes = take_attributes(ids.span);
        data.attributes.extend(attributes.clone().map(values::key_values).into_iter().flatten());
        drop(uncounted);
        self.next.on_end(data);
        // For further processors.
        if let Some(attributes) = attributes {
            leave_attributes(ids.span, attributes);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.next.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.next.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.next.set_resource(resource);
    }
}

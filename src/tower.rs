//! A tower layer, for axum, tonic and other servers: the profiles of all requests show what they await.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;
use tracing::field::Empty;
use tracing::instrument::{Instrument as _, Instrumented};
use tracing::{Span, info_span};

use crate::awaits::{Profiled, ProfiledExt};
use crate::layer::{is_on, note_response};
use crate::span::{innermost_span, spans_created};

/// Wraps the future of each request in [`Profiled`], and opens a span for requests that have none.
///
/// Where the first request of a server runs in no profiled span, for example because `TraceLayer` of tower-http creates
/// `DEBUG` spans and nothing wants these, the following ones get a span at `INFO`: `request`, target
/// `tracing_profiling::request`, with the fields `http.request.method` and, with the feature `axum` in a router,
/// `http.route`. Requests of gRPC have `rpc.service` and `rpc.method` instead.
///
/// A response with a status of 500 and above fails the span of its request, so that the condition `error` keeps it. So does
/// a `grpc-status` that is the server's fault (`UNKNOWN`, `DEADLINE_EXCEEDED`, `UNIMPLEMENTED`, `INTERNAL`, `UNAVAILABLE`,
/// `DATA_LOSS`), unless it comes only after the body.
///
/// Add this layer before the one that creates spans: it is then inside of it, and sees its span.
///
/// ```
/// # use tower_http::trace::TraceLayer;
/// # async fn cart() {}
/// let app: axum::Router = axum::Router::new()
///     .route("/cart", axum::routing::get(cart))
///     .layer(tracing_profiling::tower::AwaitsLayer::new())
///     .layer(TraceLayer::new_for_http());
/// ```
#[derive(Clone, Debug, Default)]
pub struct AwaitsLayer {
    spans: SpansOfOthers,
}

impl AwaitsLayer {
    /// A layer for one server.
    pub fn new() -> Self {
        Self::default()
    }
}

impl<S> Layer<S> for AwaitsLayer {
    type Service = AwaitsService<S>;

    fn layer(&self, inner: S) -> AwaitsService<S> {
        AwaitsService { inner, spans: self.spans.clone() }
    }
}

/// Whether requests have spans without this layer, as far as the first one has shown it. The first answer counts.
#[derive(Clone, Debug, Default)]
struct SpansOfOthers(Arc<OnceLock<bool>>);

impl SpansOfOthers {
    /// Whether nothing is known yet, after the calling thread had created `created` profiled spans before it ran a part of
    /// the first request.
    fn are_unknown_after(&self, created: u64) -> bool {
        if innermost_span().is_some() || spans_created() != created {
            _ = self.0.set(true);
        }
        self.0.get().is_none()
    }
}

/// A service whose futures are [`Profiled`]; made by [`AwaitsLayer`].
#[derive(Clone, Debug)]
pub struct AwaitsService<S> {
    inner: S,
    spans: SpansOfOthers,
}

impl<S, B, T> Service<Request<B>> for AwaitsService<S>
where
    S: Service<Request<B>, Response = Response<T>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let created = spans_created();
        let is_missing = self.spans.0.get() == Some(&false) && innermost_span().is_none();
        let span = if is_missing { span_of(&request) } else { Span::none() };
        let future = span.in_scope(|| self.inner.call(request)).profiled().instrument(span);
        let is_unknown = self.spans.0.get().is_none() && self.spans.are_unknown_after(created);
        let watched = is_unknown.then(|| self.spans.clone());
        ResponseFuture { future, watched }
    }
}

pin_project! {
    /// The response of an [`AwaitsService`].
    #[derive(Debug)]
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct ResponseFuture<F> {
        #[pin]
        future: Instrumented<Profiled<F>>,
        watched: Option<SpansOfOthers>,
    }
}

impl<T, E, F: Future<Output = Result<Response<T>, E>>> Future for ResponseFuture<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        let created = this.watched.as_ref().map(|_| spans_created());
        let polled = this.future.as_mut().poll(context);
        if let Some((spans, created)) = this.watched.as_ref().zip(created)
            && !spans.are_unknown_after(created)
        {
            *this.watched = None;
        }
        let result = ready!(polled);
        if let Some(spans) = this.watched.take().filter(|_| is_on()) {
            _ = spans.0.set(false);
        }
        if let Ok(response) = &result {
            note_response(this.future.span(), has_failed(response));
        }
        Poll::Ready(result)
    }
}

fn span_of<B>(request: &Request<B>) -> Span {
    let span = info_span!(
        target: "tracing_profiling::request",
        "request",
        http.request.method = Empty,
        http.route = Empty,
        rpc.service = Empty,
        rpc.method = Empty,
        // As of `#[profiled]`: wanted also if no other layer wants it.
        "tracing_profiling" = Empty,
    );
    // A client can send any path. An axum router has accepted a matched one; a server of gRPC has names in its path.
    let content_type = request.headers().get(http::header::CONTENT_TYPE);
    if content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc")) {
        if let Some((service, method)) =
            request.uri().path().trim_start_matches('/').split_once('/')
        {
            span.record("rpc.service", service).record("rpc.method", method);
        }
        return span;
    }
    span.record("http.request.method", request.method().as_str());
    #[cfg(feature = "axum")]
    if let Some(route) = request.extensions().get::<axum::extract::MatchedPath>() {
        span.record("http.route", route.as_str());
    }
    span
}

/// Whether a response says that the server failed.
fn has_failed<B>(response: &Response<B>) -> bool {
    let status = response.headers().get("grpc-status");
    let is_fault = |status: &http::HeaderValue| {
        [&b"2"[..], b"4", b"12", b"13", b"14", b"15"].contains(&status.as_bytes())
    };
    response.status().is_server_error() || status.is_some_and(is_fault)
}

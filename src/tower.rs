//! A tower layer, for axum, tonic and other servers: the profiles of all requests show what they await.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;
use tracing::field::Empty;
use tracing::instrument::{Instrument as _, Instrumented};
use tracing::{Span, info_span};

use crate::awaits::{Profiled, ProfiledExt};
use crate::ids::hash_of;
use crate::layer::{add_route, is_on, note_response};
use crate::span::{innermost_span, spans_created};

/// Wraps the future of each request in [`Profiled`], and opens a span for requests that have none.
///
/// A request that is in no profiled span, for example because `TraceLayer` of tower-http creates `DEBUG` spans and nothing
/// wants these, gets one at `INFO`: `request`, target `tracing_profiling::request`, with the fields `http.request.method`
/// and, with the feature `axum` in a router, `http.route`. Requests of gRPC have `rpc.service` and `rpc.method` instead. The
/// span of a request that shows its method and no route, as those of `TraceLayer`, is named by these, too.
///
/// A response with a status of 500 and above fails the span of its request, so that the condition `error` keeps it. So does
/// a `grpc-status` that is the server's fault (`UNKNOWN`, `DEADLINE_EXCEEDED`, `UNIMPLEMENTED`, `INTERNAL`, `UNAVAILABLE`,
/// `DATA_LOSS`), unless it comes only after the body.
///
/// Add this layer so that it is inside of the one that creates spans, whose span is then around it: in axum before that
/// one, in tonic, whose first layer is the outermost, after it. Where it is outside, or handlers have spans of their own, the
/// first request of each route has both spans, and those after it only the other.
///
/// ```
/// # use tower_http::trace::TraceLayer;
/// # async fn cart() {}
/// let app: axum::Router = axum::Router::new()
///     .route("/cart", axum::routing::get(cart))
///     .layer(tracing_profiling::tower::AwaitsLayer::new())
///     .layer(TraceLayer::new_for_http());
/// ```
#[derive(Clone, Debug)]
pub struct AwaitsLayer(Routes);

impl Default for AwaitsLayer {
    fn default() -> Self {
        Self((0..ROUTES).map(|_| AtomicU8::new(UNKNOWN)).collect())
    }
}

impl AwaitsLayer {
    /// A layer for one server.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Whether requests have spans without this layer, at places that the hashes of their routes decide, as far as a first
/// request has shown it.
type Routes = Arc<[AtomicU8]>;

const ROUTES: u64 = 4_096;
const UNKNOWN: u8 = 0;
const HAS_SPANS: u8 = 1;
const HAS_NONE: u8 = 2;

impl<S> Layer<S> for AwaitsLayer {
    type Service = AwaitsService<S>;

    fn layer(&self, inner: S) -> AwaitsService<S> {
        AwaitsService { inner, routes: Arc::clone(&self.0) }
    }
}

/// A service whose futures are [`Profiled`]; made by [`AwaitsLayer`].
#[derive(Clone, Debug)]
pub struct AwaitsService<S> {
    inner: S,
    routes: Routes,
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
        let (mut span, mut unknown) = (Span::none(), None);
        if innermost_span().is_some() {
            add_route(names_of(&request));
        } else if is_on() {
            let at = usize::try_from(hash_of(names_of(&request)) % ROUTES).unwrap_or(0);
            let known = self.routes.get(at).map_or(HAS_SPANS, |it| it.load(Ordering::Relaxed));
            if known != HAS_SPANS {
                span = span_of(&request);
            }
            unknown = (known == UNKNOWN).then_some(at);
        }
        let created = spans_created();
        let future = span.in_scope(|| self.inner.call(request)).profiled().instrument(span);
        let watched = unknown.map(|at| (Arc::clone(&self.routes), at, spans_created() != created));
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
        // Of the first request of a route, before its first poll: its place, and whether there was a span of others.
        watched: Option<(Routes, usize, bool)>,
    }
}

impl<T, E, F: Future<Output = Result<Response<T>, E>>> Future for ResponseFuture<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let mut this = self.project();
        let created = spans_created();
        let polled = this.future.as_mut().poll(context);
        if let Some((routes, at, has_spans)) = this.watched.take() {
            let has_spans = has_spans || spans_created() != created;
            let known = if has_spans { HAS_SPANS } else { HAS_NONE };
            _ = routes.get(at).map(|route| route.store(known, Ordering::Relaxed));
        }
        let result = ready!(polled);
        if let Ok(response) = &result {
            note_response(this.future.span(), || failure(response));
        }
        Poll::Ready(result)
    }
}

fn is_grpc<B>(request: &Request<B>) -> bool {
    let content_type = request.headers().get(http::header::CONTENT_TYPE);
    content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// The fields that name a request. A client can send any path: an axum router has accepted a matched one, and a server of
/// gRPC has names in its path.
fn names_of<B>(request: &Request<B>) -> [(&'static str, Option<&str>); 2] {
    #[cfg(feature = "axum")]
    let route = request.extensions().get().map(axum::extract::MatchedPath::as_str);
    #[cfg(not(feature = "axum"))]
    let route: Option<&str> = None;
    // The route of a service is `/shop.Cart/{*rest}`.
    let may_be_rpc = route.is_none_or(|route| !route.contains('{') || route.ends_with("/{*rest}"));
    if is_grpc(request) && may_be_rpc {
        let path = request.uri().path().trim_start_matches('/').split_once('/');
        return [("rpc.service", path.map(|it| it.0)), ("rpc.method", path.map(|it| it.1))];
    }
    [("http.request.method", Some(request.method().as_str())), ("http.route", route)]
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
    for (name, value) in names_of(request) {
        span.record(name, value);
    }
    span
}

/// How the server failed, by its response.
fn failure<B>(response: &Response<B>) -> Option<String> {
    let is_fault = |status: &&http::HeaderValue| {
        [&b"2"[..], b"4", b"12", b"13", b"14", b"15"].contains(&status.as_bytes())
    };
    let of_grpc = response.headers().get("grpc-status").filter(is_fault);
    let of_grpc = of_grpc.and_then(|status| Some(format!("grpc-status {}", status.to_str().ok()?)));
    let status = Some(response.status()).filter(http::StatusCode::is_server_error);
    status.map(|status| format!("HTTP status {status}")).or(of_grpc)
}

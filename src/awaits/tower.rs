//! A tower layer, for axum, tonic and other servers: the profiles of all requests show what they await.

use std::task::{Context, Poll};

use tower_layer::Layer;
use tower_service::Service;

use super::{Profiled, ProfiledExt};

/// Wraps the future of each request in [`Profiled`]. It does not matter whether this layer is inside or outside of the one
/// that creates the spans.
///
/// ```
/// # async fn cart() {}
/// let app: axum::Router = axum::Router::new()
///     .route("/cart", axum::routing::get(cart))
///     .layer(tracing_profiling::tower::AwaitsLayer);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct AwaitsLayer;

impl<S> Layer<S> for AwaitsLayer {
    type Service = AwaitsService<S>;

    fn layer(&self, inner: S) -> AwaitsService<S> {
        AwaitsService { inner }
    }
}

/// A service whose futures are [`Profiled`]; made by [`AwaitsLayer`].
#[derive(Clone, Copy, Debug)]
pub struct AwaitsService<S> {
    inner: S,
}

impl<S: Service<R>, R> Service<R> for AwaitsService<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = Profiled<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: R) -> Self::Future {
        self.inner.call(request).profiled()
    }
}

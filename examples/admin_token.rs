//! The routes of `router_for` behind a token, for operators on other machines.
//!
//! ```sh
//! PROFILING_TOKEN=$(openssl rand -hex 16) cargo run --example admin_token
//! ```
//!
//! The token is the password of HTTP basic authentication, without a user, so browsers ask for it. It is sent in clear
//! text: use TLS.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use tracing::level_filters::LevelFilter;
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::prelude::*;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let profiling = ProfilingLayer::from_env()?;
    let handle = profiling.handle();
    tracing_subscriber::registry()
        .with(tracing_subscriber::fmt::layer().with_filter(LevelFilter::INFO))
        .with(profiling)
        .init();

    let token = std::env::var("PROFILING_TOKEN")?;
    if token.len() < 32 {
        return Err("PROFILING_TOKEN must have 32 characters: `openssl rand -hex 16`".into());
    }
    let expected = format!("Basic {}", BASE64_STANDARD.encode(format!(":{token}")));
    let admin = Router::new()
        .nest("/profiling", tracing_profiling_server::router_for(&handle, ["shop.internal"]))
        .layer(from_fn_with_state(Arc::<str>::from(expected), only_with_token));
    // In a service, the address of the network of operators.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:9999").await?;
    axum::serve(listener, admin).await?;
    Ok(())
}

async fn only_with_token(
    State(expected): State<Arc<str>>,
    request: Request,
    next: Next,
) -> Response {
    match request.headers().get(AUTHORIZATION) {
        Some(given) if is_same(given.as_bytes(), expected.as_bytes()) => next.run(request).await,
        _ => {
            let ask = [(WWW_AUTHENTICATE, "Basic realm=\"profiling\"")];
            (StatusCode::UNAUTHORIZED, ask).into_response()
        }
    }
}

/// Compares all bytes, so that the time taken does not reveal how many match.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let differ = one.iter().zip(other).fold(0, |differ, (a, b)| black_box(differ | (a ^ b)));
    one.len() == other.len() && differ == 0
}

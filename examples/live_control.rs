//! A small shop whose profiling is controlled at run time: it starts disabled.
//!
//! ```sh
//! cargo run --release --example live_control
//! ```
//!
//! prints commands to try. The shop and the operators' endpoint are two listeners; only the first would be reachable
//! by users.
#![allow(clippy::print_stdout, reason = "an example, run by hand")]

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use tokio::net::TcpListener;
use tracing::instrument;
use tracing::level_filters::LevelFilter;
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::prelude::*;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let profiling = ProfilingLayer::builder().rules("off".parse()?).with_env()?.build()?;
    let handle = profiling.handle();
    let _flush = handle.flush_on_drop();
    tracing_subscriber::registry()
        .with(tracing_subscriber::fmt::layer().with_filter(LevelFilter::INFO))
        .with(profiling)
        .init();

    let shop = Router::new().route("/", get(page));
    let admin = Router::new().nest("/profiling", tracing_profiling_server::router(&handle));
    let shop_listener = TcpListener::bind("127.0.0.1:0").await?;
    // No authentication: the port is reachable only from this machine.
    let admin_listener = TcpListener::bind("127.0.0.1:0").await?;
    let (shop_at, admin_at) = (shop_listener.local_addr()?, admin_listener.local_addr()?);
    println!(
        "curl -X PUT --data 50ms http://{admin_at}/profiling/rules
curl http://{shop_at}/
curl http://{admin_at}/profiling/profiles
curl http://{admin_at}/profiling
curl -X DELETE http://{admin_at}/profiling"
    );
    tokio::select! {
        ended = axum::serve(shop_listener, shop) => ended?,
        ended = axum::serve(admin_listener, admin) => ended?,
        ended = tokio::signal::ctrl_c() => ended?,
    }
    Ok(())
}

#[instrument]
async fn page() -> String {
    format!("The price is {}.\n", price())
}

fn price() -> u64 {
    let start = Instant::now();
    let mut sum = 0;
    while start.elapsed() < Duration::from_millis(200) {
        sum = (0..10_000_u64).fold(0, |sum, n| black_box(sum ^ (n * 31)));
    }
    sum
}

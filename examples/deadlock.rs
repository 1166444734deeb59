//! Two requests that wait for each other's lock forever: each leaves a profile while it hangs.
//!
//! `cargo run --release --example deadlock`

use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use tracing::{Instrument, info_span};
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::prelude::*;

struct Shop {
    stock: Mutex<u32>,
    prices: Mutex<u32>,
    both: Barrier,
}

#[inline(never)]
fn reserve(shop: &Shop) {
    let mut stock = shop.stock.lock().unwrap_or_else(|error| error.into_inner());
    shop.both.wait();
    *stock -= *shop.prices.lock().unwrap_or_else(|error| error.into_inner());
}

#[inline(never)]
fn discount(shop: &Shop) {
    let mut prices = shop.prices.lock().unwrap_or_else(|error| error.into_inner());
    shop.both.wait();
    *prices -= *shop.stock.lock().unwrap_or_else(|error| error.into_inner());
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (sender, reports) = mpsc::channel();
    let profiling = ProfilingLayer::builder()
        .rules("250ms|hung>2s".parse()?)
        .with_env()?
        .on_kept(move |_| _ = sender.send(()))
        .build()?;
    tracing_subscriber::registry().with(tracing_subscriber::fmt::layer()).with(profiling).init();

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?;
    let shop =
        Arc::new(Shop { stock: Mutex::new(7), prices: Mutex::new(5), both: Barrier::new(2) });
    for work in [reserve, discount] {
        let shop = Arc::clone(&shop);
        runtime.spawn(async move { work(&shop) }.instrument(info_span!("request")));
    }
    // The requests never end, but their profiles are exported.
    for _ in 0..2 {
        reports.recv_timeout(Duration::from_secs(60))?;
    }
    runtime.shutdown_background();
    Ok(())
}

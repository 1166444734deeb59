//! A route that is slow for one customer only. Most of its time is spent as in every request, so its profile alone misleads;
//! what it did more than typical requests names the cause.
//!
//! ```sh
//! cargo run --release --example typical
//! ```
#![allow(clippy::print_stdout, reason = "an example, run by hand")]

use std::error::Error;
use std::hint::black_box;
use std::sync::mpsc;
use std::time::Duration;

use cpu_time::ThreadTime;
use tracing::instrument;
use tracing::level_filters::LevelFilter;
use tracing_profiling::compare::{Quantity, SpentIn};
use tracing_profiling::profile::SampleKind;
use tracing_profiling::{Kept, ProfilingLayer};
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);
const CUSTOMERS: u64 = 150;
/// This one has ordered for years.
const REGULAR: u64 = 138;

fn main() -> Result<(), Box<dyn Error>> {
    let (sender, kept) = mpsc::channel();
    let profiling = ProfilingLayer::builder()
        .rules("[offers]=on_cpu>45ms".parse()?)
        .span_fields(["http.route", "customer"])
        // A service has thousands of requests: there, the default is enough.
        .references(2, 100.0)
        .on_kept(move |one| _ = sender.send(one.clone()))
        .with_env()?
        .build()?;
    let handle = profiling.handle();
    tracing_subscriber::registry()
        .with(tracing_subscriber::fmt::layer().with_filter(LevelFilter::INFO))
        .with(profiling)
        .init();

    for customer in 1..=CUSTOMERS {
        let history = if customer == REGULAR { 25 * MS } else { Duration::ZERO };
        offers("/offers", customer, history);
        // A shop has time between two requests.
        std::thread::sleep(5 * MS);
    }
    handle.shutdown(Duration::from_secs(60))?;
    let slow = kept.try_iter().find(|one| one.comparison().is_some());
    print(&slow.ok_or("no request was slow")?);
    Ok(())
}

#[instrument(fields(http.route = route), skip(route, history))]
fn offers(route: &str, customer: u64, history: Duration) {
    render_offers();
    rank_by_history(history);
}

/// What each request does, for 30 ms.
#[inline(never)]
fn render_offers() {
    let (start, mut page) = (ThreadTime::now(), 0_u64);
    while start.elapsed() < 30 * MS {
        let mut offer = 0;
        while offer < 5_000 {
            page = black_box(page ^ (offer * 31));
            offer += 1;
        }
    }
}

/// Compares each order with each other one.
#[inline(never)]
fn rank_by_history(time: Duration) {
    let (start, mut rank) = (ThreadTime::now(), 0_u64);
    while start.elapsed() < time {
        let mut order = 0;
        while order < 5_000 {
            rank = black_box(rank.rotate_left(3) ^ order);
            order += 1;
        }
    }
}

fn print(slow: &Kept) {
    let (Some(comparison), Some(span)) = (slow.comparison(), slow.spans.first()) else { return };
    if let Some(hotspot) = slow.hotspot(SampleKind::OnCpu) {
        println!("\nOf the CPU time of {}: {hotspot}.", span.facts.name());
    }
    let ms = |ns: f64| ns / 1e6;
    println!("Compared with {} typical requests:\n", comparison.references);
    println!("{:44} {:>8} {:>8} {:>8}  typical ones with as much", "", "this", "typical", "more");
    for row in comparison.rows.iter().take(4) {
        let what = match &row.quantity {
            Quantity::Wall(kind, SpentIn::Function(function)) => {
                format!("{kind:?} {}", function.name)
            }
            Quantity::Wall(kind, _) => format!("{kind:?}"),
            other => format!("{other:?}"),
        };
        println!(
            "{what:44} {:5.1} ms {:5.1} ms {:+5.1} ms  {} of {}",
            ms(row.value.value as f64),
            ms(row.value.typical as f64),
            ms(row.value.extra() as f64),
            row.as_extreme_in.unwrap_or(0),
            comparison.references,
        );
    }
}

//! Which leaf futures clone the waker on their live stack, what that stack shows, and how much of the idle time of kept
//! spans it explains. Prints two tables. Fails if fewer than `LEAST_PERCENT` of the kinds, or of the idle time, show the
//! function that awaits, or if a kind that is not in `MISSES` does not.

mod cases;
mod kept;
mod probe;
mod stack;
mod table;
mod watch;

use std::process::ExitCode;
use std::time::Duration;

use kept::{Explained, Host, percent};
use table::Row;
use tokio::runtime::{Builder, Runtime};

const LEAST_PERCENT: usize = 80;
/// The functions of the cases that are known to miss. They wake themselves and clone nothing.
const MISSES: [&str; 2] = ["case_yield_elsewhere", "case_smol_yield"];
/// The cases that are idle for too short a time to be kept.
const SHORT: [&str; 5] = [
    "case_yield_now",
    "case_budget",
    "case_yield_elsewhere",
    "case_sqlx_connect",
    "case_smol_yield",
];

fn main() -> ExitCode {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let results = [clones(&runtime), idle_times(&runtime)];
    if results == [true; 2] { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What stacks show at clones.
fn clones(runtime: &Runtime) -> bool {
    let rows: Vec<_> = cases::all().iter().map(|case| runtime.block_on(Row::new(case))).collect();
    println!(
        "The number of clones in each pending poll is in brackets. After 0, an earlier stack remains."
    );
    println!("What is seen is in the order of the clones, all polls together.\n");
    println!(
        "| leaf | first poll | later polls, same waker | later polls, new waker | what is seen |"
    );
    println!("|---|---|---|---|---|");
    rows.iter().for_each(|row| println!("{}", row.text()));
    println!(
        "\nWith the same waker in all polls, the last stack does not show what is awaited by then:\n"
    );
    for row in &rows {
        row.stale().iter().for_each(|stale| println!("- {}: {stale}", row.leaf));
    }

    let (hits, misses): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.is_hit());
    println!("\n{} of {} kinds hit", hits.len(), rows.len());
    let mut unexpected = misses.iter().filter(|row| !MISSES.contains(&row.function)).peekable();
    let passed = unexpected.peek().is_none() && hits.len() * 100 >= rows.len() * LEAST_PERCENT;
    unexpected.for_each(|row| println!("unexpected miss: {}", row.function));
    passed
}

/// What profiles show of idle times.
fn idle_times(runtime: &Runtime) -> bool {
    let host = Host::new();
    let cases = cases::all().into_iter().filter(|case| !SHORT.contains(&case.function));
    let rows: Vec<_> = cases.map(|case| runtime.block_on(host.explain(&case))).collect();
    println!("\n| leaf | idle | with its function | what is awaited |");
    println!("|---|---|---|---|");
    rows.iter().for_each(|row| println!("{}", row.text()));
    let sum = |time: fn(&Explained) -> Duration| rows.iter().map(time).sum::<Duration>();
    let share = percent(sum(|row| row.hit), sum(|row| row.idle));
    println!("\n{share:.1} % of the idle time of all");
    share >= LEAST_PERCENT as f64
}

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
    let rows: Vec<_> = cases.map(|case| runtime.block_on(host.explain(case))).collect();
    println!("\n| leaf | idle | with its function | what is awaited |");
    println!("|---|---|---|---|");
    rows.iter().for_each(|row| println!("{}", row.text()));
    let sum = |time: fn(&Explained) -> Duration| rows.iter().map(time).sum::<Duration>();
    let share = percent(sum(|row| row.hit), sum(|row| row.idle));
    println!("\n{share:.1} % of the idle time of all");
    share >= LEAST_PERCENT as f64
}

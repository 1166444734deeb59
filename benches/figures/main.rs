//! Every figure of `docs/performance.md`, one a line: `figure NAME VALUE UNIT`.
//!
//! `cargo bench --bench figures` prints them all; `-- hot sampling` prints those whose names begin
//! so. Differences and ratios are medians over interleaved rounds of one run.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a bench, run by hand"
)]

mod hot;
mod measure;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let is_wanted = |name: &str| {
        wanted.is_empty()
            || wanted.iter().any(|w| w.starts_with(name) || name.starts_with(w.as_str()))
    };
    for (name, run) in [("hot", hot::run as fn())] {
        if is_wanted(name) {
            run();
        }
    }
}

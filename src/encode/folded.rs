//! Folded stacks: a line a stack, as Brendan Gregg's `flamegraph.pl` and most viewers read them.

use std::collections::BTreeMap;

use super::frames::{Frame, frames};
use crate::profile::Profile;

/// A line for each stack: its frames from the outermost span to the innermost function, separated
/// by `;`, and after a space its time in nanoseconds: CPU time, or if the last frame is what it waited
/// for, as in `[futex 0x7f01]`, the time that it waited.
pub fn folded(profile: &Profile) -> String {
    let mut lines: BTreeMap<String, u64> = BTreeMap::new();
    for sample in profile.samples() {
        let names: Vec<String> = frames(profile, sample).iter().map(name).collect();
        let weight: u64 = sample.points.iter().map(|point| point.weight_ns).sum();
        *lines.entry(names.join(";")).or_default() += weight;
    }
    lines.into_iter().map(|(stack, weight)| format!("{stack} {weight}\n")).collect()
}

fn name(frame: &Frame) -> String {
    // What separates frames and samples may not stand in a name.
    frame.name.replace([';', '\n'], ":")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{checkout, waiting};
    use super::*;

    #[test]
    fn waits_end_in_what_they_waited_for() {
        let lines = folded(&waiting());
        assert!(
            lines.contains("GET /checkout;shop::reserve;[futex 0x7f01] 320000000\n"),
            "{lines}"
        );
    }

    #[test]
    fn a_line_for_each_stack_with_its_spans() {
        assert_eq!(
            folded(&checkout()),
            "GET /checkout;price all;shop::main;shop::price 10000000\n\
             GET /checkout;shop::main 5000000\n\
             GET /checkout;shop::main;shop::price 5000000\n"
        );
    }
}

//! Folded stacks: one line per stack, in the format of Brendan Gregg's `flamegraph.pl`, which most viewers can read.

use super::frames::{Frames, Path};
use crate::profile::Profile;

/// The maximum length of the text. Further stacks share one line.
const MOST_BYTES: usize = 32 * 1024 * 1024;

/// Encodes one line per stack: its frames from the outermost span to the innermost function, separated by `;`, then a
/// space and its time in nanoseconds. This is CPU time, or wait time if the last frame states what the thread waited
/// for, such as `[futex 0x7f01]`.
///
/// The text is limited to about 32 MiB. The time of all further stacks is in the line `[stacks left out]`.
pub fn folded(profile: &Profile) -> String {
    folded_within(profile, MOST_BYTES)
}

fn folded_within(profile: &Profile, most_bytes: usize) -> String {
    let frames = Frames::of(profile);
    let mut text = String::new();
    let mut left_out = 0_u64;
    let mut samples = frames.samples().iter().peekable();
    while let Some(path) = samples.next() {
        let weight_of = |path: &Path<'_>| -> u64 {
            path.sample.points.iter().map(|point| point.weight_ns).sum()
        };
        let mut weight = weight_of(path);
        let is_same = |other: &&Path<'_>| {
            let names = |path| frames.steps(path).map(|step| step.frame);
            names(path).eq(names(other))
        };
        while let Some(same) = samples.next_if(is_same) {
            weight += weight_of(same);
        }
        let begin = text.len();
        for step in frames.steps(path) {
            let name = frames.name(step.frame.name);
            // The separators must not occur in a name.
            text.extend(name.chars().map(|c| if [';', '\n'].contains(&c) { ':' } else { c }));
            text.push(';');
            if text.len() > most_bytes {
                break;
            }
        }
        if text.len() > most_bytes {
            text.truncate(begin);
            left_out += weight;
            continue;
        }
        text.pop();
        text.push_str(&format!(" {weight}\n"));
    }
    if left_out > 0 {
        text.push_str(&format!("[stacks left out] {left_out}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tests::{checkout, waiting};
    use super::*;

    #[test]
    fn the_last_frame_of_a_wait_is_what_it_waited_for() {
        let lines = folded(&waiting());
        assert!(
            lines.contains("GET /checkout;shop::reserve;[futex 0x7f01] 320000000\n"),
            "{lines}"
        );
    }

    #[test]
    fn each_stack_is_a_line_that_begins_with_its_spans() {
        assert_eq!(
            folded(&checkout()),
            "GET /checkout;price all;shop::main;shop::price 10000000\n\
             GET /checkout;shop::main 5000000\n\
             GET /checkout;shop::main;shop::price 5000000\n"
        );
    }

    #[test]
    fn stacks_that_do_not_fit_share_a_line() {
        assert_eq!(
            folded_within(&checkout(), 60),
            "GET /checkout;price all;shop::main;shop::price 10000000\n\
             [stacks left out] 10000000\n"
        );
    }
}

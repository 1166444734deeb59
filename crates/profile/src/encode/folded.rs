//! Folded stacks: one line per stack, in the format of Brendan Gregg's `flamegraph.pl`, which most viewers can read.

use super::frames::{Frames, Path};
use crate::profile::Profile;

/// The maximum length of the text. Further stacks share one line.
const MOST_BYTES: usize = 32 * 1024 * 1024;

/// Encodes one line per stack: its frames from the outermost span to the innermost function, separated by `;`, then a
/// space and its time in nanoseconds. This is CPU time, or wait time if the last frame states what the thread waited
/// for, such as `[futex 0x7f01]`, or the time of an await (`[await]`) or a scheduling delay (`[scheduling delay]`). Idle
/// time of the outermost kept spans that nothing explains is in `[idle: not explained]`.
///
/// The text is limited to about 32 MiB. The time of all further stacks is in the line `[stacks left out]`.
pub fn folded(profile: &Profile) -> String {
    folded_within(profile, MOST_BYTES)
}

fn folded_within(profile: &Profile, most_bytes: usize) -> String {
    let frames = Frames::of(profile);
    let mut text = String::new();
    let mut left_out = 0_u64;
    let mut paths = frames.paths().iter().peekable();
    while let Some(path) = paths.next() {
        let mut weight = path.weight_ns;
        let is_same = |other: &&Path| frames.steps(path).eq(frames.steps(other));
        while let Some(same) = paths.next_if(is_same) {
            weight += same.weight_ns;
        }
        let begin = text.len();
        for frame in frames.steps(path) {
            let name = frames.name(frame);
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
    use crate::profile::{Leaf, Link, Point, SampleKind};

    use super::super::tests::{awaiting, checkout, waiting, with_idle};
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
    fn awaits_and_delays_are_not_mixed_with_time_on_the_cpu() {
        let mut profile = awaiting();
        // The same code ran, too, and in another span of the same name.
        let awaited = profile.of_kind(SampleKind::Await).next().unwrap().clone();
        let other = Link { start_unix_ns: 7, ..Link::named("GET /checkout", None) };
        let other = Some(profile.add_link(other));
        let point = Point { time_unix_ns: 1_001, weight: 5_000_000, thread: None };
        for (kind, link) in [
            (SampleKind::OnCpu, awaited.link),
            (SampleKind::OnCpu, other),
            (SampleKind::Await, other),
        ] {
            profile.add_sample(kind, awaited.stack, link, point);
        }
        let sleep = "<tokio::time::sleep::Sleep as core::future::future::Future>::poll";
        let code = format!("GET /checkout;shop::fetch::{{{{closure}}}};{sleep}");
        let note = profile.add_leaf(Leaf::Unknown("awaiting: stack not copied"));
        let note = (profile.add_stack(Vec::new()), note);
        profile.add_sample_at(SampleKind::Await, note, awaited.link, point);
        let lines = folded(&profile);
        for expected in [
            "GET /checkout;[awaiting: stack not copied] 5000000\n".to_owned(),
            format!("{code} 10000000\n"),
            format!("{code};[await] 1185000000\n"),
            format!("{code};[scheduling delay behind report] 20000000\n"),
        ] {
            assert!(lines.contains(&expected), "{expected} in {lines}");
        }
        assert!(!lines.contains("[idle"), "{lines}");
    }

    #[test]
    fn idle_time_that_nothing_explains_is_a_frame_of_the_span() {
        let lines = folded(&with_idle(awaiting(), 1_300));
        // 20 ms on-CPU, 1.18 s of awaits and 20 ms of delay.
        assert!(lines.contains("GET /checkout;[idle: not explained] 80000000\n"), "{lines}");
        let sum: u64 = lines
            .lines()
            .map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap())
            .sum();
        assert_eq!(sum, 1_300_000_000, "wall time");
        // Less than a millisecond.
        assert!(!folded(&with_idle(awaiting(), 1_220)).contains("[idle"));
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

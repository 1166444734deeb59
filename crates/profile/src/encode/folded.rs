//! Folded stacks: one line per stack, in the format of Brendan Gregg's `flamegraph.pl`, which most viewers can read.

use std::collections::BTreeMap;

use crate::profile::{Leaf, Profile, Sample};

/// The maximum length of all stacks. Further ones share one line.
const MOST_BYTES: usize = 32 * 1024 * 1024;
/// The maximum number of nested spans in a line. If there are more, the innermost are used.
const MOST_SPANS: usize = 128;

/// Encodes one line per stack: its frames from the outermost span to the innermost function, separated by `;`, then a
/// space and its time in nanoseconds. This is CPU time, or wait time if the last frame states what the thread waited
/// for, such as `[futex 0x7f01]`, or the time of an await (`[await]`) or a scheduling delay (`[scheduling delay]`).
///
/// The text is limited to about 32 MiB. The time of all further stacks is in the line `[stacks left out]`.
pub fn folded(profile: &Profile) -> String {
    folded_within(profile, MOST_BYTES)
}

fn folded_within(profile: &Profile, most_bytes: usize) -> String {
    let (mut lines, mut left_out, mut bytes) = (BTreeMap::new(), 0, 0);
    for sample in profile.samples().iter().filter(|sample| sample.kind.is_time()) {
        let line = line_of(profile, sample, most_bytes);
        // Each stack has all of its time or none: there is never more room than before.
        if !lines.contains_key(&line) {
            if bytes + line.len() > most_bytes {
                left_out += sample.total();
                continue;
            }
            bytes += line.len();
        }
        *lines.entry(line).or_insert(0) += sample.total();
    }
    let mut text = String::new();
    // Each line is freed once it is written.
    for (line, ns) in lines {
        text.push_str(&line);
        text.push_str(&format!(" {ns}\n"));
    }
    if left_out > 0 {
        text.push_str(&format!("[stacks left out] {left_out}\n"));
    }
    text
}

/// The frames of a sample, up to some that do not fit.
fn line_of(profile: &Profile, sample: &Sample, most_bytes: usize) -> String {
    let spans = profile.span_path(sample.link);
    let mut line = String::new();
    spans
        .iter()
        .skip(spans.len().saturating_sub(MOST_SPANS))
        .for_each(|span| push(&mut line, span));
    let mut locations: Vec<_> = profile.stack(sample.stack).collect();
    while let Some(location) = locations.pop().filter(|_| line.len() <= most_bytes) {
        if location.lines.is_empty() {
            push(&mut line, &profile.module_offset(location));
        }
        let functions = location.lines.iter().rev();
        for function in functions.filter_map(|line| profile.function(line.function)) {
            push(&mut line, &function.name);
        }
    }
    if let Some(frame) = profile.leaf(sample.leaf).and_then(Leaf::mixed_frame) {
        push(&mut line, &frame);
    }
    line
}

/// Appends a frame. The separators must not occur in its name.
fn push(line: &mut String, frame: &str) {
    line.push_str(if line.is_empty() { "" } else { ";" });
    line.extend(frame.chars().map(|c| if [';', '\n'].contains(&c) { ':' } else { c }));
}

#[cfg(test)]
mod tests {
    use crate::profile::{Leaf, Link, Point, SampleKind};

    use super::super::tests::{awaiting, checkout, waiting};
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

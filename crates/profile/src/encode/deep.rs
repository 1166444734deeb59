//! Tests with profiles that are deeper than any thread's stack, or larger than what is drawn.

use std::thread;

use super::tests::{checkout, deep};
use super::{HtmlContext, folded, html, otlp, pprof};
use crate::profile::{
    FrameKind, Function, Line, Link, Location, MappingId, Point, Profile, ProfileId, SampleKind,
    SourceLine, Symbols,
};
use crate::redact::Redaction;

/// Keeps the lines of every location.
struct NoSymbols;

impl Symbols for NoSymbols {
    fn build_ids(&mut self, _: MappingId) -> Vec<(String, String)> {
        Vec::new()
    }
    fn lines(&mut self, _: &Location) -> Option<(FrameKind, Vec<SourceLine>)> {
        None
    }
}

/// Appends a character to all names.
fn renamed(profile: &Profile) -> Profile {
    let longer = Redaction::new().replace("(.)$", "$1'").unwrap();
    profile.symbolized(&mut NoSymbols, &longer, usize::MAX).profile
}

/// Runs `action` on a thread with a stack as small as the smallest that programs use.
fn with_small_stack<R: Send + 'static>(action: impl FnOnce() -> R + Send + 'static) -> R {
    thread::Builder::new().stack_size(96 * 1024).spawn(action).unwrap().join().unwrap()
}

fn encode_in_every_way(profile: &Profile) {
    assert!(html(profile, &HtmlContext::default()).ends_with("</html>\n"));
    assert!(folded(profile).ends_with('\n'));
    assert!(!pprof(profile).is_empty());
    assert!(!otlp(profile, &crate::profile::Resource::new()).is_empty());
}

/// `stacks` stacks of `frames` frames. The frames are three functions in varying order, each with `inlined` inlined
/// ones.
pub(super) fn alternating(stacks: u64, frames: u64, inlined: usize) -> Profile {
    let mut profile = Profile::new(ProfileId::for_test(4), 5);
    let mut random = 1_u64;
    let lines: Vec<Vec<Line>> = (0..3)
        .map(|function| {
            let mut line = |inlined: usize| {
                let name = format!("shop::part_{function}::inlined_{inlined}");
                let file = "/shop/src/parts.rs".to_owned();
                let function = Function { file, ..Function::named(&name) };
                Line { function: profile.add_function(function), line: 7, column: 1 }
            };
            (0..=inlined).map(&mut line).collect()
        })
        .collect();
    let link = profile.add_link(Link::named("request", None));
    for number in 0..stacks {
        let stack = (0..frames).map(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let address = (random >> 33) % 3;
            let lines = lines[address as usize].clone();
            let kind = FrameKind::Rust;
            profile.add_location(Location {
                mapping: None,
                address,
                kind,
                lines,
                is_inferred: false,
            })
        });
        let stack = stack.collect();
        let stack = profile.add_stack(stack);
        let point = Point { time_unix_ns: number, weight: 5, thread: None };
        profile.add_sample(SampleKind::OnCpu, stack, Some(link), point);
    }
    profile
}

#[test]
fn encoders_need_little_stack_for_deep_profiles() {
    for profile in [
        deep(20_000),
        alternating(20, 250, 16),
        alternating(20, 1_000, 8),
        alternating(20, 1_000, 24),
        alternating(2, 20_000, 0),
    ] {
        with_small_stack(move || {
            encode_in_every_way(&profile);
            encode_in_every_way(&renamed(&profile));
        });
    }
}

#[test]
fn deeply_nested_spans_need_little_stack() {
    let mut profile = checkout();
    let mut parent = None;
    for depth in 0..20_000 {
        let span = format!("span {depth}");
        parent = Some(profile.add_link(Link::named(span, parent)));
    }
    let stack = profile.samples()[0].stack;
    let point = Point { time_unix_ns: 1_050, weight: 5, thread: None };
    profile.add_sample(SampleKind::OnCpu, stack, parent, point);
    with_small_stack(move || {
        encode_in_every_way(&renamed(&profile));
    });
}

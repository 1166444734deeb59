//! Profiles with fewer symbols: none if they are disabled, and at most as many as the limit allows.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

use std::collections::HashSet;
use std::time::Duration;

use support::{HAS_STACKS, Setup, burn};
use tracing::info_span;
use tracing_profiling::Builder;
use tracing_profiling::encode;
use tracing_profiling::profile::{FrameKind, Location, Profile, SampleKind};

const MS: Duration = Duration::from_millis(1);

/// Two profiles of a function that runs and then sleeps, and their setup.
fn profile(set: impl FnOnce(Builder) -> Builder) -> Option<(Profile, Setup)> {
    let setup = Setup::with("0ms", set);
    for _ in 0..2 {
        setup.run(|| {
            let _span = info_span!("request").entered();
            burn(60 * MS);
            std::thread::sleep(60 * MS);
        });
    }
    HAS_STACKS.then(|| (setup.profiles()[0].clone(), setup))
}

/// The distinct locations in code.
fn locations(profile: &Profile) -> Vec<&Location> {
    let stacks = profile.samples().iter().map(|sample| sample.stack);
    let ids: HashSet<_> = stacks.flat_map(|stack| profile.location_ids(stack)).collect();
    let locations = ids.into_iter().filter_map(|id| profile.location(id));
    let is_code =
        |location: &&Location| matches!(location.kind, FrameKind::Rust | FrameKind::Native);
    locations.filter(is_code).collect()
}

/// The number of functions of the program's locations, and how many of them have a line.
fn named(profile: &Profile) -> (usize, usize) {
    let is_of_program = |location: &&Location| {
        let mapping = location.mapping.and_then(|id| profile.mapping(id));
        mapping.is_some_and(|mapping| mapping.file.starts_with("symbols-"))
    };
    let locations: Vec<_> = locations(profile).into_iter().filter(is_of_program).collect();
    assert!(!locations.is_empty());
    let lines = || locations.iter().flat_map(|location| &location.lines);
    (lines().count(), lines().filter(|line| line.line > 0).count())
}

#[test]
fn without_symbols_there_are_addresses_mappings_and_build_ids() {
    let Some((profile, setup)) = profile(|builder| builder.symbols(false)) else { return };
    assert_eq!(named(&profile), (0, 0));
    for location in locations(&profile) {
        let mapping = profile.mapping(location.mapping.unwrap()).unwrap();
        assert!((mapping.start..mapping.end).contains(&location.address));
        let is_known = |kind| mapping.build_ids.iter().any(|(known, _)| *known == kind);
        let is_vdso = mapping.file == "[vdso]";
        assert!(is_vdso || is_known("process.executable.build_id.htlhash"), "{mapping:?}");
    }
    let kept = &setup.kept()[0];
    let is_place = |name: &str| name.starts_with("symbols-") && name.contains("+0x");
    // The top function is a single address, which may be in a library, such as in a clock read.
    let top = &kept.hotspot(SampleKind::OnCpu).unwrap().functions[0].name;
    assert!(top.contains("+0x") || top == "[kernel]", "{top}");
    if let Some(longest) = &kept.waits.longest {
        assert!(is_place(&longest.function), "{longest:?}");
    }
    let folded = encode::folded(&profile);
    assert!(!folded.contains("burn") && folded.contains("symbols-"), "{folded}");
    assert_eq!(setup.handle.stats().profiles.symbols_over_limit, 0);
}

#[test]
fn debug_information_over_the_limit_leaves_functions_without_lines() {
    let Some((profile, setup)) = profile(|builder| builder.memory(8 << 20)) else { return };
    let (functions, lines) = named(&profile);
    assert!(functions > 0);
    // Other files may fit; the program's debug information is larger.
    assert_eq!(lines, 0);
    assert!(support::points_in(&profile, "burn") > 0);
    assert_eq!(setup.handle.stats().profiles.symbols_over_limit, 1, "once for both profiles");
    let (all, _setup) = self::profile(|builder| builder).unwrap();
    assert!(named(&all).1 > 0);
}

#[test]
fn with_little_memory_no_function_of_the_program_has_a_name() {
    let Some((profile, setup)) = profile(|builder| builder.memory(256 << 10)) else { return };
    assert!(profile.sample_count() > 0);
    assert_eq!(support::points_in(&profile, "burn"), 0);
    assert!(setup.handle.stats().profiles.symbols_over_limit > 0);
}

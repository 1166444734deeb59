//! How much stack is copied with each sample: what is needed.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

use std::hint::black_box;
use std::time::Duration;

use support::{Setup, burn, functions, has_perf, taken, taken_samples};
use tracing::info_span;
use tracing_profiling::Source;
use tracing_profiling::profile::{FrameKind, Profile, Sample};

const MS: Duration = Duration::from_millis(1);

/// These take more than 17 KiB of stack, and less than 31.
const FRAMES: u32 = 17;

#[inline(never)]
fn deep(frames: u32, time: Duration) {
    let mut taken = [0_u8; 1024];
    black_box(&mut taken);
    if frames > 0 {
        deep(frames - 1, time);
    } else {
        at_the_bottom(time);
    }
    taken[0] = 1;
    black_box(&mut taken);
}

#[inline(never)]
fn at_the_bottom(time: Duration) {
    burn(time);
    black_box(());
}

/// When each sample of `at_the_bottom` was taken, and whether its stack is whole.
fn deep_samples(profile: &Profile) -> Vec<(u64, bool)> {
    let is_deep = |sample: &&Sample| {
        functions(profile, sample).iter().any(|name| name.ends_with("::at_the_bottom"))
    };
    let samples = taken_samples(profile).filter(is_deep).flat_map(|sample| {
        let mut stack = profile.stack(sample.stack).iter();
        let is_cut = stack.any(|id| profile.location(*id).unwrap().kind == FrameKind::Remark);
        sample.points.iter().map(move |point| (point.time_unix_ns, !is_cut))
    });
    let mut samples: Vec<_> = samples.collect();
    samples.sort_unstable();
    samples
}

/// On one thread that stays in one span, so that nobody but the collector can see to it.
#[test]
fn a_deep_stack_after_many_shallow_ones_is_whole_soon() {
    if !has_perf() {
        return;
    }
    // However long that takes.
    let setup = Setup::with("0ms|hung=off", |builder| {
        builder.source(Source::Perf).rate(1000).samples_per_profile(1_000_000)
    });
    let cut = || setup.handle.stats().stacks_truncated;
    setup.run(|| {
        let _span = info_span!("one").entered();
        for round in 0.. {
            assert!(round < 200, "copies were not made smaller");
            burn(100 * MS);
            deep(FRAMES, 50 * MS);
            if cut() > 0 {
                break;
            }
        }
        // Another round, and it has been seen to.
        setup.flush();
        // On a busy machine many find the ring full.
        let (before, start) = (setup.handle.stats().samples_taken, std::time::Instant::now());
        while setup.handle.stats().samples_taken < before + 100 {
            deep(FRAMES, 100 * MS);
            assert!(start.elapsed() < support::PLENTY, "{:?}", setup.handle.stats());
        }
    });

    let [profile] = &setup.profiles()[..] else { panic!("one profile") };
    let deep = deep_samples(profile);
    let first_cut = deep.iter().position(|(_, is_whole)| !is_whole).unwrap();
    let last_cut = deep.iter().rposition(|(_, is_whole)| !is_whole).unwrap();
    assert!(deep[last_cut..].len() > 50, "{first_cut} to {last_cut} of {}", deep.len());

    // Counted, whatever their size.
    let counted = setup.kept()[0].spans[0].samples();
    let (taken, _) = taken(profile);
    let stats = setup.handle.stats();
    assert_eq!(stats.samples_taken, taken, "{stats:?}");
    // Those in the kernel are a little longer.
    assert!(counted >= taken && counted <= taken + taken / 20 + 1, "{counted} of {taken}");
}

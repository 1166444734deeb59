//! How much of the stack is copied with each sample.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

use std::hint::black_box;
use std::time::Duration;

use support::{Setup, burn, functions, has_perf, taken, taken_samples};
use tracing::info_span;
use tracing_profiling::Source;
use tracing_profiling::profile::{FrameKind, Profile, Sample};

const MS: Duration = Duration::from_millis(1);

/// These frames take more than 17 KiB of stack, and less than 31.
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

/// The number of samples of `at_the_bottom` with a complete stack, and with a cut one.
fn deep_samples(profile: &Profile) -> [usize; 2] {
    let is_deep = |sample: &&Sample| {
        functions(profile, sample).iter().any(|name| name.ends_with("::at_the_bottom"))
    };
    let mut counts = [0, 0];
    for sample in taken_samples(profile).filter(is_deep) {
        let mut stack = profile.stack(sample.stack);
        let is_cut = stack.any(|location| location.kind == FrameKind::Remark);
        counts[usize::from(is_cut)] += sample.points.len();
    }
    counts
}

#[test]
fn a_deep_stack_after_many_shallow_ones_is_complete() {
    if !has_perf() {
        return;
    }
    let setup = Setup::with("0ms|hung=off", |builder| {
        builder.source(Source::Perf).rate(1000).samples_per_profile(1_000_000)
    });
    setup.run(|| {
        let _span = info_span!("one").entered();
        burn(200 * MS);
        // On a busy machine many samples are lost to a full ring.
        let (before, start) = (setup.handle.stats().samples.taken, std::time::Instant::now());
        while setup.handle.stats().samples.taken < before + 100 {
            deep(FRAMES, 100 * MS);
            assert!(start.elapsed() < support::PLENTY, "{:?}", setup.handle.stats());
        }
    });

    let [profile] = &setup.profiles()[..] else { panic!("one profile") };
    let [whole, cut] = deep_samples(profile);
    assert!(whole > 50 && cut == 0, "{whole} complete, {cut} cut");

    // Counted one by one, including samples in the kernel, which have slightly more weight.
    let counted = setup.kept()[0].spans[0].samples();
    let (taken, _) = taken(profile);
    let stats = setup.handle.stats();
    assert_eq!(stats.samples.taken, taken, "{stats:?}");
    assert!(counted >= taken && counted <= taken + taken / 20 + 1, "{counted} of {taken}");
}

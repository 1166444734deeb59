//! Deep stacks with inlined frames, each different from the others.

use std::hint::black_box;
use std::time::Duration;

/// The state of a recursive walk.
pub(crate) struct Walk<'a> {
    frames_left: u32,
    random: u64,
    bottom: &'a mut dyn FnMut(),
}

/// Calls `bottom` below `frames` frames of three functions, in an order given by `seed`. Each frame has 8 or 24
/// functions inlined into it.
pub(crate) fn walk(frames: u32, seed: u64, inlined: Inlined, bottom: &mut dyn FnMut()) {
    let mut walk = Walk { frames_left: frames, random: seed.wrapping_mul(2) + 1, bottom };
    match inlined {
        Inlined::Eight => eight::next(&mut walk),
        Inlined::TwentyFour => twenty_four::next(&mut walk),
    }
}

/// How many functions are inlined into each frame.
#[allow(dead_code, reason = "not every user needs both")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Inlined {
    /// 8
    Eight,
    /// 24
    TwentyFour,
}

impl Walk<'_> {
    fn choose(&mut self) -> Option<u64> {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.frames_left = self.frames_left.checked_sub(1)?;
        Some((self.random >> 33) % 3)
    }
}

/// A chain of functions that each call the next, all inlined into the caller of the first.
macro_rules! inlined {
    ($last:ident) => {
        #[inline(always)]
        fn $last(walk: &mut Walk<'_>) {
            super::next(walk);
            black_box(());
        }
    };
    ($first:ident $second:ident $($rest:ident)*) => {
        #[inline(always)]
        fn $first(walk: &mut Walk<'_>) {
            $second(walk);
            black_box(());
        }
        inlined!($second $($rest)*);
    };
}

macro_rules! functions {
    ($name:ident $($inlined:ident)+) => {
        mod $name {
            use super::*;

            functions!(@ one $($inlined)+);
            functions!(@ two $($inlined)+);
            functions!(@ three $($inlined)+);

            #[inline(always)]
            pub(super) fn next(walk: &mut Walk<'_>) {
                match walk.choose() {
                    Some(0) => one::frame(walk),
                    Some(1) => two::frame(walk),
                    Some(_) => three::frame(walk),
                    None => (walk.bottom)(),
                }
            }
        }
    };
    (@ $name:ident $first:ident $($rest:ident)*) => {
        mod $name {
            use super::*;

            #[inline(never)]
            pub(super) fn frame(walk: &mut Walk<'_>) {
                $first(walk);
                black_box(());
            }

            inlined!($first $($rest)*);
        }
    };
}

// One fewer than stated: the function that chooses the next frame is inlined too.
functions!(eight i1 i2 i3 i4 i5 i6 i7);
functions!(
    twenty_four
    i1 i2 i3 i4 i5 i6 i7 i8 i9 i10 i11 i12 i13 i14 i15 i16 i17 i18 i19 i20 i21 i22 i23
);

/// Walks `stacks` different stacks, and spends `each` at the bottom of each.
pub(crate) fn walk_often(stacks: u64, frames: u32, inlined: Inlined, each: Duration) {
    for seed in 0..stacks {
        walk(frames, seed, inlined, &mut || {
            let start = std::time::Instant::now();
            while start.elapsed() < each {
                black_box(());
            }
        });
    }
}

//! Stacks that are hard to unwind and to draw.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Work that the compiler cannot remove.
#[inline(never)]
pub fn spin(time: Duration) -> u64 {
    let start = Instant::now();
    let mut sum = 1_u64;
    while start.elapsed() < time {
        for n in 0..1_000 {
            sum = black_box(sum.wrapping_mul(31).wrapping_add(n));
        }
    }
    sum
}

/// Each calls the next, and all are inlined: one frame represents 24 functions.
macro_rules! inlined {
    ($($name:ident -> $next:ident;)+) => {
        $(#[inline(always)]
        fn $name(call: impl FnOnce() -> u64) -> u64 {
            $next(call)
        })+
    };
}

inlined! {
    i1 -> i2;
    i2 -> i3;
    i3 -> i4;
    i4 -> i5;
    i5 -> i6;
    i6 -> i7;
    i7 -> i8;
    i8 -> i9;
    i9 -> i10;
    i10 -> i11;
    i11 -> i12;
    i12 -> i13;
    i13 -> i14;
    i14 -> i15;
    i15 -> i16;
    i16 -> i17;
    i17 -> i18;
    i18 -> i19;
    i19 -> i20;
    i20 -> i21;
    i21 -> i22;
    i22 -> i23;
    i23 -> i24;
}

#[inline(always)]
fn i24(call: impl FnOnce() -> u64) -> u64 {
    black_box(call())
}

macro_rules! alternating {
    ($($name:ident -> $next:ident;)+) => {
        $(#[inline(never)]
        pub fn $name(depth: u32, seed: u64) -> u64 {
            if depth == 0 {
                return spin(Duration::from_millis(2));
            }
            i1(|| $next(depth - 1, black_box(seed))) + 1
        })+
    };
}

alternating! {
    alternate -> second;
    second -> third;
    third -> alternate;
}

/// A different path for each number: each level calls one of two functions.
#[inline(never)]
pub fn path(number: u64, level: u32, depth: u32) -> u64 {
    if level == depth {
        return spin(Duration::from_micros(60));
    }
    // One mixed bit of it, since it has fewer bits than there are levels.
    let mixed = (number ^ u64::from(level)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let next = if mixed >> 63 == 0 { left } else { right };
    next(number, level + 1, depth) + 1
}

#[inline(never)]
fn left(number: u64, level: u32, depth: u32) -> u64 {
    i1(|| path(number, level, depth)) + 1
}

#[inline(never)]
fn right(number: u64, level: u32, depth: u32) -> u64 {
    i1(|| path(number, level, depth)) + 2
}

/// The symbol demangles to a C++ function of many arguments, each of a type that names the previous type twice.
#[unsafe(export_name = "_Z4bomb1a1bIS_S_E1cIS1_S1_E1dIS3_S3_E1eIS5_S5_E1fIS7_S7_E1gIS9_S9_E1hISB_SB_E1iISD_SD_E1jISF_SF_E1kISH_SH_E1lISJ_SJ_E1mISL_SL_E1nISN_SN_E1oISP_SP_E1pISR_SR_E1qIST_ST_E1rISV_SV_E1sISX_SX_E1tISZ_SZ_E1uIS11_S11_E1vIS13_S13_E1wIS15_S15_E1xIS17_S17_E1yIS19_S19_E1zIS1B_S1B_E1AIS1D_S1D_E1BIS1F_S1F_E1CIS1H_S1H_E1DIS1J_S1J_E1EIS1L_S1L_E1FIS1N_S1N_E1GIS1P_S1P_E")]
#[inline(never)]
pub extern "C" fn bomb(milliseconds: u64) -> u64 {
    let start = Instant::now();
    let mut sum = 1_u64;
    while start.elapsed() < Duration::from_millis(milliseconds) {
        for n in 0..1_000 {
            sum = black_box(sum.wrapping_mul(31).wrapping_add(n));
        }
    }
    sum
}

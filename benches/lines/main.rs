//! How many cache lines the hooks touch: distinct 64-byte lines of code and of data, and instructions, of one enter and
//! exit and of a whole span life, for a bare registry, this crate's layer, and that of tracing-opentelemetry.
//!
//! In a service the hooks run rarely and their lines are not in the cache, so that lines cost more than instructions. Unlike
//! times, these counts are repeatable.
//!
//! `cargo bench --bench lines` needs valgrind, whose tool lackey prints each instruction and each access to memory. `--
//! --list` also prints which functions of each kind have how many lines of code and data, and `-- --list ours` only those
//! of kinds that begin so.

#![allow(
    missing_docs,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a bench"
)]

mod trace;

use std::hint::black_box;
use std::sync::atomic::{AtomicU8, Ordering, compiler_fence};
use std::time::Duration;

use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::{Dispatch, Span};
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use trace::{Piece, Program};

const KINDS: [&str; 4] = ["bare", "ours", "ours_unmatched", "tracing_opentelemetry"];

/// Executions of each piece, of which a usual one counts.
const ROUNDS: u32 = 60;
const WARM_UP: u32 = 200;

/// The pieces that are traced. A write to its mark begins each, and ends the one before.
#[derive(Clone, Copy)]
enum Mark {
    Outside,
    Enter,
    Exit,
    New,
    FirstEnter,
    LastExit,
    Close,
}

const MARKS: usize = 7;

#[repr(C, align(64))]
struct Line(AtomicU8);

static AT: [Line; MARKS] = [const { Line(AtomicU8::new(0)) }; MARKS];

#[inline(always)]
fn begin(mark: Mark) {
    compiler_fence(Ordering::SeqCst);
    // A plain store.
    AT[mark as usize].0.store(1, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    match arguments.first().map(String::as_str) {
        Some("--child") => child(&arguments[1]),
        Some("--list") => compare(arguments.get(1).map_or("", String::as_str), true),
        _ => compare("", false),
    }
}

/// A traced program runs a thousand times as slowly, so that each hook would read the CPU clock, which falls due once a
/// millisecond. Therefore the clock by which the layer measures the rate of the time stamp counter, with a system call, is
/// slow here, too. This replaces the function of libc for the whole program.
#[unsafe(no_mangle)]
#[allow(unsafe_code, reason = "a function of libc")]
extern "C" fn syscall(
    call: libc::c_long,
    one: libc::c_long,
    two: libc::c_long,
    three: libc::c_long,
    four: libc::c_long,
    five: libc::c_long,
    six: libc::c_long,
) -> libc::c_long {
    const SLOWER: i64 = 200;
    let mut result: libc::c_long;
    // SAFETY: the caller passes what the system call needs.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "syscall", inlateout("rax") call => result, in("rdi") one, in("rsi") two, in("rdx") three,
            in("r10") four, in("r8") five, in("r9") six, lateout("rcx") _, lateout("r11") _, options(nostack)
        );
    }
    // SAFETY: the same.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!(
            "svc 0", in("x8") call, inlateout("x0") one => result, in("x1") two, in("x2") three,
            in("x3") four, in("x4") five, in("x5") six, options(nostack)
        );
    }
    if (-4095..0).contains(&result) {
        // SAFETY: the place is this thread's.
        unsafe { *libc::__errno_location() = -result as libc::c_int };
        return -1;
    }
    if call == libc::SYS_clock_gettime && one == libc::c_long::from(libc::CLOCK_MONOTONIC_RAW) {
        // SAFETY: the call has filled it.
        let time = unsafe { &mut *(two as *mut libc::timespec) };
        let ns = (time.tv_sec * 1_000_000_000 + time.tv_nsec) / SLOWER;
        (time.tv_sec, time.tv_nsec) = (ns / 1_000_000_000, ns % 1_000_000_000);
    }
    result
}

fn dispatch(kind: &str) -> Dispatch {
    match kind {
        // A registry closes spans only if it has a layer.
        "bare" => Dispatch::new(tracing_subscriber::registry().with(Identity::new())),
        "tracing_opentelemetry" => {
            let tracer = SdkTracerProvider::builder().build().tracer("bench");
            let layer = tracing_opentelemetry::layer().with_tracer(tracer);
            Dispatch::new(tracing_subscriber::registry().with(layer))
        }
        _ => {
            let rules = "matched=1000h|error".parse().expect("rules of this bench");
            // So low a rate that no sample falls into a piece; and spans stay young, however slow valgrind is.
            let builder = ProfilingLayer::builder()
                .rules(rules)
                .rate(1)
                .sampling_delay(Duration::from_secs(3600));
            let layer = builder.build().expect("threads");
            Dispatch::new(tracing_subscriber::registry().with(layer))
        }
    }
}

/// The traced process. It prints where its marks are, and waits until that has been read.
fn child(kind: &str) {
    println!("{}", AT.as_ptr().addr());
    _ = std::io::stdin().read_line(&mut String::new());
    let new: fn() -> Span = match kind {
        "ours_unmatched" => || tracing::info_span!(target: "unmatched", "hot"),
        _ => || tracing::info_span!(target: "matched", "hot"),
    };
    tracing::dispatcher::set_global_default(dispatch(kind)).expect("the first");
    let span = new();
    for round in 0..WARM_UP + ROUNDS {
        // The marks of the first rounds are ignored.
        let begin = |mark| begin(if round < WARM_UP { Mark::Outside } else { mark });
        begin(Mark::Enter);
        let entered = span.enter();
        begin(Mark::Exit);
        drop(entered);
        begin(Mark::Outside);
    }
    for round in 0..WARM_UP + ROUNDS {
        let begin = |mark| begin(if round < WARM_UP { Mark::Outside } else { mark });
        begin(Mark::New);
        let span = black_box(new());
        begin(Mark::FirstEnter);
        let entered = span.enter();
        begin(Mark::LastExit);
        drop(entered);
        begin(Mark::Close);
        drop(span);
        begin(Mark::Outside);
    }
    // Without its end, which takes long under valgrind.
    std::process::exit(0);
}

fn compare(wanted: &str, lists: bool) {
    for kind in KINDS.iter().filter(|kind| kind.starts_with(wanted)) {
        let program = Program::trace(kind, MARKS);
        for (name, marks) in [
            ("enter_exit", &[Mark::Enter, Mark::Exit][..]),
            ("span", &[Mark::New, Mark::FirstEnter, Mark::LastExit, Mark::Close]),
        ] {
            let pieces = marks.iter().map(|mark| program.usual(*mark as usize));
            let whole = pieces.fold(Piece::default(), Piece::and);
            let print = |what: &str, value: usize, unit: &str| {
                println!("figure lines.{name}.{kind}.{what} {value} {unit}");
            };
            print("instructions", whole.instructions, "count");
            print("code", whole.code.len(), "lines");
            print("data", whole.data.len(), "lines");
            if lists {
                program.list(&whole);
            }
        }
    }
}

//! Compares each function's share of the samples with its share of the thread's CPU clock,
//! while another process or thread takes the processor some thousand times a second.

use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tracing::info_span;
use tracing_profiling::profile::SampleKind;

use crate::Sampled;
use crate::clocks::cpu_ns;
use crate::support::{Setup, functions};

const RATE: u32 = 1_000;
const ROUND_NS: u64 = 1_200_000_000;
const MOST_OFF: f64 = 0.02;
/// Interrupts and the reads of the clock are in the thread's time, too.
const MOST_ELSEWHERE: f64 = 0.04;

/// Computes until the CPU clock has advanced by that.
macro_rules! burners {
    ($($name:ident)+) => {$(
        #[inline(never)]
        fn $name(for_ns: u64) -> u64 {
            let start_ns = cpu_ns();
            let mut x = black_box(stringify!($name)).len() as u64;
            while cpu_ns() - start_ns < for_ns {
                // Calls nothing, also without optimizations.
                let mut i = 0;
                while i < 800_000 {
                    x = (x ^ i) * 3 % 1_000_003;
                    i += 1;
                }
                x = black_box(x);
            }
            cpu_ns() - start_ns
        }
    )+};
}

burners!(burn_most burn_some);

/// Moves the calling thread to one of the processors that it may use.
fn go_to(number: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut processors = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    if let Some(processor) = processors.nth(number) {
        let mut one = CpuSet::new();
        one.set(processor);
        _ = sched_setaffinity(None, &one);
    }
}

/// Threads on two processors that wake each other until the process ends.
fn wake_each_other() {
    let (near, far) = UnixStream::pair().unwrap();
    let echo = |number, mut stream: UnixStream| {
        std::thread::spawn(move || {
            go_to(number);
            let mut byte = [0];
            while stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte)).is_ok() {}
        })
    };
    (&near).write_all(&[0]).unwrap();
    echo(0, near);
    echo(1, far);
}

pub(crate) fn scenario(sampled: Sampled) {
    let setup =
        Setup::with("1h,[root]=0ms", |builder| sampled.set(builder).rate(RATE).stack_bytes(2_048));
    wake_each_other();
    let (mut most_ns, mut some_ns) = (0, 0);
    tracing::dispatcher::with_default(&setup.dispatch, || {
        go_to(1);
        info_span!("root").in_scope(|| {
            while most_ns + some_ns < ROUND_NS {
                most_ns += burn_most(15_000_000);
                some_ns += burn_some(5_000_000);
            }
        });
    });
    setup.flush();
    let [profile] = setup.memory.take().try_into().unwrap();
    let (mut all, mut inside, mut elsewhere) = (0, [0; 2], 0);
    for sample in profile.of_kind(SampleKind::OnCpu) {
        let weight = sample.points.iter().map(|point| point.weight).sum::<u64>();
        let functions = functions(&profile, sample);
        let leaf = functions.first().copied().unwrap_or_default();
        println!("{:.2} ms {leaf}", weight as f64 / 1e6);
        all += weight;
        for (inside, name) in inside.iter_mut().zip(["burn_most", "burn_some"]) {
            *inside += if functions.iter().any(|it| it.ends_with(name)) { weight } else { 0 };
            elsewhere +=
                if functions.iter().skip(1).any(|it| it.ends_with(name)) { weight } else { 0 };
        }
    }
    let ran_ns = most_ns + some_ns;
    println!(
        "{:.1} of {:.1} ms; {:?}",
        all as f64 / 1e6,
        ran_ns as f64 / 1e6,
        setup.handle.stats()
    );
    // The root has run for a little longer.
    assert!(all <= ran_ns + ran_ns / 100, "samples of more than it ran");
    let elsewhere = elsewhere as f64 / all as f64;
    println!("{:.2} points are the kernel's", elsewhere * 100.0);
    assert!(elsewhere < MOST_ELSEWHERE, "{elsewhere}");
    for (inside, of_clock) in inside.into_iter().zip([most_ns, some_ns]) {
        let off = inside as f64 / all as f64 - of_clock as f64 / ran_ns as f64;
        println!("{:+.2} points", off * 100.0);
        assert!(off.abs() < MOST_OFF, "{off}");
    }
}

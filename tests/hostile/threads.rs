//! Threads that start and end, panic, and allocate.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tracing::info_span;

use crate::host::{Host, repeat_for};
use crate::support::{PLENTY, burn};

const MS: Duration = Duration::from_millis(1);

pub(crate) fn ten_thousand(host: &Host) {
    for _ in 0..1_250 {
        eight_short_threads();
    }
    // Timers of threads that have ended are deleted. A thread that is joined may not have ended yet.
    let start = Instant::now();
    while let Ok(timers) = std::fs::read_to_string("/proc/self/timers") {
        let timers = timers.lines().filter(|line| line.starts_with("ID:")).count();
        let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
        if timers <= 2 * threads {
            println!("{timers} timers, {threads} threads, {:?}", host.setup.handle.stats());
            break;
        }
        assert!(start.elapsed() < PLENTY, "{timers} timers are left of {threads} threads");
        std::thread::sleep(MS);
    }
}

pub(crate) fn eight_short_threads() {
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| info_span!("short").in_scope(|| burn(Duration::from_micros(20))));
        }
    });
}

/// Silences panics with the payload `OnPurpose`.
fn silence_panics_on_purpose() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !panic.payload().is::<OnPurpose>() {
            usual(panic);
        }
    }));
}

struct OnPurpose;

/// Panics inside spans, and is sampled during unwinding.
pub(crate) fn panics(_: &Host) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(silence_panics_on_purpose);

    struct BurnsWhenDropped;
    impl Drop for BurnsWhenDropped {
        fn drop(&mut self) {
            info_span!("unwinding").in_scope(|| burn(Duration::from_micros(100)));
        }
    }

    fn panic_below(depth: u32) {
        let _here = BurnsWhenDropped;
        if depth == 0 {
            std::panic::panic_any(OnPurpose);
        }
        panic_below(depth - 1);
    }

    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let caught = std::panic::catch_unwind(|| {
                        info_span!("panics").in_scope(|| panic_below(10));
                    });
                    assert!(caught.unwrap_err().is::<OnPurpose>());
                }
            });
        }
    });
}

/// Allocates, frees, and frees what another thread allocated.
pub(crate) fn allocate(threads: usize, rounds: usize) {
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..threads).map(|_| std::sync::mpsc::sync_channel::<Vec<Vec<u8>>>(4)).unzip();
    std::thread::scope(|scope| {
        let mut senders = senders;
        // Each thread sends to the next.
        senders.rotate_left(1);
        for (sender, receiver) in senders.into_iter().zip(receivers) {
            scope.spawn(move || {
                for round in 0..rounds {
                    let _span = info_span!("allocates").entered();
                    let size = |n: usize| (n * 37 + round * 101) % 5_000 + n % 7 * 10_000;
                    let mut blocks: Vec<_> = (0..200).map(|n| vec![1_u8; size(n)]).collect();
                    blocks.truncate(100);
                    // The other thread may have ended, or its channel may be full.
                    _ = sender.try_send(black_box(blocks));
                    drop(receiver.try_recv());
                }
            });
        }
    });
}

/// As much load as possible, with all threads sampled at the highest rate.
pub(crate) fn stress(_: &Host, time: Duration) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _span = info_span!("shallow").entered();
                    burn(Duration::from_micros(300));
                    info_span!("deep").in_scope(|| deep(300));
                    let blocks: Vec<_> = (0..200).map(|n| vec![1_u8; n * 50]).collect();
                    black_box(blocks);
                }
            });
        }
        repeat_for(time, || {
            eight_short_threads();
            allocate(2, 5);
        });
        stop.store(true, Ordering::Relaxed);
    });
}

#[inline(never)]
fn deep(depth: u32) {
    let frame = [depth; 64];
    black_box(&frame);
    if depth > 0 {
        deep(depth - 1);
    } else {
        burn(MS);
    }
    black_box(&frame);
}

//! What two threads take for the same work at the same time, against one: more, if they write the same cache lines.
//!
//! Each process has one subscriber, which is the global one: a scoped one is counted by each span, in a line that all
//! threads share.

use std::hint::{black_box, spin_loop};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use cpu_time::ThreadTime;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tracing::info_span;
use tracing_profiling::export::Memory;
use tracing_profiling::{ProfiledExt, ProfilingLayer};
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::measure::{child as start_child, figure, median};

/// The figures, and the rules of each.
const CASES: [(&str, &str); 4] = [
    ("detached_enter_exit", "10s|error"),
    // None is kept.
    ("percentile_close", "p99>1h"),
    ("value_rule_span", "[order{tenant=acme}]=10s"),
    ("first_clone", "10s|error"),
];
const PROCESSES: usize = 3;
const ROUNDS: usize = 15;
/// So few that both threads run until the end, if they do at the start.
const TIMES: u32 = 2_000;

pub(crate) fn run() {
    for (case, _) in CASES {
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..PROCESSES {
            for (number, kind) in ["bare", "ours"].iter().enumerate() {
                let printed = start_child(&format!("shared {kind} {case}"), &[]);
                let values = printed.split_whitespace().map(|ns| ns.parse().expect("a number"));
                for (times, ns) in times[2 * number..].iter_mut().zip(values) {
                    times.push(ns);
                }
            }
        }
        let [bare_one, bare_two, one, two] = times.each_ref().map(|times| median(times));
        let (one, two) = (one - bare_one, two - bare_two);
        figure(&format!("shared.{case}.added"), two, "ns");
        figure(&format!("shared.{case}.added_on_one_thread"), one, "ns");
        figure(&format!("shared.{case}.ratio_of_two_threads"), two / one, "x");
    }
}

/// Prints the nanoseconds on one thread and on each of two.
pub(crate) fn child() {
    let arguments: Vec<String> = std::env::args().collect();
    let [.., kind, case] = &arguments[..] else { panic!("{arguments:?}") };
    let (_, rules) = CASES.iter().find(|(name, _)| name == case).expect("a case");
    let registry = tracing_subscriber::registry();
    if kind == "ours" {
        let builder = ProfilingLayer::builder()
            .rules(rules.parse().expect("rules of this bench"))
            // Spans stay young, however long they are entered.
            .sampling_delay(Duration::from_secs(3600))
            .exporter(Memory::new());
        registry.with(builder.build().expect("threads")).init();
    } else {
        // A registry closes spans only if it has a layer.
        registry.with(Identity::new()).init();
    }
    let times = match case.as_str() {
        "detached_enter_exit" => {
            // Entered on this thread all the time.
            let connection = info_span!("connection").entered();
            compare(&|| {
                let span = info_span!(parent: &connection, "request");
                move || span.in_scope(|| black_box(()))
            })
        }
        "percentile_close" => compare(&|| || info_span!("request").in_scope(|| black_box(()))),
        "value_rule_span" => {
            compare(&|| || info_span!("order", tenant = "acme").in_scope(|| black_box(())))
        }
        _ => compare(&|| {
            let (span, waker) = (info_span!("request"), Waker::from(Arc::new(Task)));
            let is_wrapped = kind == "ours";
            move || span.in_scope(|| poll_once(&waker, is_wrapped))
        }),
    };
    println!("{} {}", times[0], times[1]);
    std::process::exit(0);
}

/// An executor's waker, with a reference count as most have.
struct Task;

impl Wake for Task {
    fn wake(self: Arc<Self>) {}
}

/// Clones the waker, with 8 KiB of stack between it and the wrapper.
#[derive(Default)]
struct Leaf {
    waker: Option<Waker>,
}

impl Future for Leaf {
    type Output = ();

    #[inline(never)]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut stack = [0_u8; 8 << 10];
        black_box(&mut stack);
        self.waker = Some(context.waker().clone());
        black_box(&mut stack);
        Poll::Pending
    }
}

#[inline(never)]
fn poll_once(waker: &Waker, is_wrapped: bool) {
    let mut context = Context::from_waker(waker);
    _ = match is_wrapped {
        true => black_box(pin!(Leaf::default().profiled()).poll(&mut context)),
        false => black_box(pin!(Leaf::default()).poll(&mut context)),
    };
}

/// Nanoseconds of an action on one thread, and on each of two, which do it at the same time. `new` makes the action of a
/// thread.
fn compare<A: FnMut()>(new: &(impl Fn() -> A + Sync)) -> [f64; 2] {
    let said = AtomicUsize::new(0);
    // The two threads answer each other, so that both run when this returns, whatever else the machine does.
    let meet = |number: usize, step: usize| {
        const ANSWERS: usize = 100;
        for word in (step * ANSWERS..(step + 1) * ANSWERS).filter(|word| word % 2 == number) {
            while said.load(Ordering::Acquire) != word {
                spin_loop();
            }
            said.store(word + 1, Ordering::Release);
        }
    };
    let on_thread = |number: usize| {
        pin_to(number);
        let mut action = new();
        let mut times = [const { Vec::new() }; 2];
        let mut step = 0;
        for _ in 0..ROUNDS {
            for (count, times) in times.iter_mut().enumerate() {
                meet(number, step);
                step += 1;
                if number <= count {
                    // Other programs of the machine do not count.
                    let start = ThreadTime::now();
                    for _ in 0..TIMES {
                        action();
                    }
                    times.push(start.elapsed().as_nanos() as f64 / f64::from(TIMES));
                }
            }
        }
        times
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| on_thread(1));
        let first = scope.spawn(|| on_thread(0)).join().expect("no panic");
        let second = second.join().expect("no panic");
        [median(&first[0]), median(&[&first[1][..], &second[1]].concat())]
    })
}

/// Each thread has a core of its own.
fn pin_to(number: usize) {
    let allowed = sched_getaffinity(None).expect("the cores");
    let core = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).nth(number);
    let mut one = CpuSet::new();
    one.set(core.expect("two cores"));
    sched_setaffinity(None, &one).expect("the core");
}

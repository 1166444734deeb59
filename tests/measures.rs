//! A rule on every measure that has a condition: with each source, with and without the allocator that counts, from the
//! start and set at run time. What a span had is counted independently, just inside and just outside of it.

#![cfg(all(target_os = "linux", not(tracing_profiling_unsupported)))]
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::hint::black_box;
use std::os::fd::AsFd as _;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use support::{Log, Setup, burn, has_perf, is_alone};
use tracing::{Dispatch, Instrument as _, Span, info_span};
use tracing_profiling::export::Memory;
use tracing_profiling::{
    Condition, Measure, ProfiledExt as _, ProfilingAllocator, ProfilingLayer, Reason, Rules,
    Source, Threshold, Unit,
};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::prelude::*;

/// Spans above the limit, and as many below it.
const SPANS: usize = 20;
const MS: Duration = Duration::from_millis(1);

thread_local! {
    /// Bytes and number of allocations.
    static ALLOCATED: Cell<[u64; 2]> = const { Cell::new([0; 2]) };
}

/// Counts for the test, and passes calls on to the profiling allocator if the child's test says so.
struct Switched(ProfilingAllocator<System>);

static IS_PROFILED: AtomicBool = AtomicBool::new(false);

#[global_allocator]
static ALLOCATOR: Switched = Switched(ProfilingAllocator::system());

// SAFETY: passes all calls on, in both cases to the allocator of the system in the end.
unsafe impl GlobalAlloc for Switched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let [bytes, number] = ALLOCATED.get();
        ALLOCATED.set([bytes + layout.size() as u64, number + 1]);
        // SAFETY: the contract is the caller's.
        unsafe {
            match IS_PROFILED.load(Ordering::Relaxed) {
                true => self.0.alloc(layout),
                false => System.alloc(layout),
            }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the contract is the caller's.
        unsafe {
            match IS_PROFILED.load(Ordering::Relaxed) {
                true => self.0.dealloc(block, layout),
                false => System.dealloc(block, layout),
            }
        }
    }
}

/// Makes a span, spends something in it, or little, and closes it. Returns what it certainly had, and had at most.
type Scenario = fn(make: &dyn Fn() -> Span, is_above: bool) -> [u64; 2];

/// The limit, and how spans exceed it. A new measure needs a scenario.
fn scenario(measure: Measure) -> (u64, Scenario) {
    match measure {
        Measure::Wall => (2_000_000, |make, is_above| {
            within(wall_ns, make, || std::thread::sleep(MS * if is_above { 3 } else { 0 }))
        }),
        Measure::LastExit => (2_000_000, last_exit),
        Measure::SubtreeOnCpu => (2_000_000, |make, is_above| {
            let elsewhere = Cell::new([0; 2]);
            let work = || {
                let parent = Span::current();
                let dispatch = tracing::dispatcher::get_default(Dispatch::clone);
                let child = || {
                    let make = || info_span!(parent: &parent, "child");
                    let burn = || _ = burn(MS * if is_above { 4 } else { 0 });
                    let run = || within(cpu_ns, &make, burn);
                    tracing::dispatcher::with_default(&dispatch, run)
                };
                elsewhere.set(std::thread::scope(|scope| scope.spawn(child).join().unwrap()));
            };
            let [least, most] = within(cpu_ns, make, work);
            let [least_elsewhere, most_elsewhere] = elsewhere.get();
            [least + least_elsewhere, most + most_elsewhere]
        }),
        Measure::OnCpu => (2_000_000, |make, is_above| {
            within(cpu_ns, make, || _ = burn(MS * if is_above { 4 } else { 0 }))
        }),
        Measure::OffCpu => (2_000_000, |make, is_above| {
            within(off_cpu_ns, make, || std::thread::sleep(MS * if is_above { 3 } else { 0 }))
        }),
        Measure::Runnable => (5_000_000, |make, is_above| {
            let blocked = times_blocked();
            let work = || _ = burn(MS * if is_above { 15 } else { 0 });
            let [least, most] = within(run_delay_ns, make, work);
            // Where the thread also was blocked, the value is a lower bound.
            [if times_blocked() == blocked { least } else { 0 }, most]
        }),
        Measure::MajorFaults => (10, |make, is_above| {
            let file = COLD_FILE.with(ColdFile::make_cold);
            within(major_faults, make, || file.read_pages(if is_above { 40 } else { 3 }))
        }),
        Measure::DiskRead => (100_000, |make, is_above| {
            let file = COLD_FILE.with(ColdFile::make_cold);
            within(disk_read, make, || file.read_pages(if is_above { 40 } else { 3 }))
        }),
        Measure::Idle => (2_000_000, idle),
        Measure::Await => (2_000_000, |make, is_above| awaits(make, is_above)[0]),
        Measure::SchedulingDelay => (2_000_000, |make, is_above| awaits(make, is_above)[1]),
        Measure::Awaits => (10, |make, is_above| {
            let (pending, mut left) = (if is_above { 40 } else { 3 }, 0);
            let awaited = std::future::poll_fn(|context| {
                _ = context.waker().clone();
                left += 1;
                if left > pending { Poll::Ready(()) } else { Poll::Pending }
            });
            let mut task = pin!(awaited.instrument(make()).profiled());
            while task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {}
            [pending; 2]
        }),
        Measure::Allocated => (100_000, |make, is_above| {
            within(|| ALLOCATED.get()[0], make, || allocate(if is_above { 200 } else { 50 }))
        }),
        Measure::Allocations => (100, |make, is_above| {
            within(|| ALLOCATED.get()[1], make, || allocate(if is_above { 200 } else { 50 }))
        }),
        other => panic!("{other:?} has a condition and no scenario"),
    }
}

/// By how much a span must be away from the limit. Two clocks differ a little, and the kernel writes its records some
/// microseconds before or after it switches them; faults and allocations are exact.
fn slack(measure: Measure) -> u64 {
    match (measure.unit(), measure) {
        (Unit::Nanoseconds, Measure::Runnable) => 2_500_000,
        (Unit::Nanoseconds, _) => 300_000,
        _ => 0,
    }
}

fn within(read: impl Fn() -> u64, make: &dyn Fn() -> Span, action: impl FnOnce()) -> [u64; 2] {
    let before = read();
    let entered = make().entered();
    let begun = read();
    action();
    let ended = read();
    drop(entered);
    [ended.saturating_sub(begun), read().saturating_sub(before)]
}

fn wall_ns() -> u64 {
    thread_local!(static START: Instant = Instant::now());
    START.with(Instant::elapsed).as_nanos() as u64
}

fn cpu_ns() -> u64 {
    cpu_time::ThreadTime::now().as_duration().as_nanos() as u64
}

/// Wall time less CPU time, read without a switch in between.
fn off_cpu_ns() -> u64 {
    loop {
        let (before, cpu, after) = (wall_ns(), cpu_ns(), wall_ns());
        if after - before < 50_000 {
            // So that it cannot go back.
            return (before + after) / 2 + 1_000_000_000 - cpu;
        }
    }
}

fn numbers(path: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(path).unwrap();
    text.split_whitespace().map(|number| number.parse().unwrap_or(0)).collect()
}

fn run_delay_ns() -> u64 {
    numbers("/proc/thread-self/schedstat")[1]
}

fn times_blocked() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

fn major_faults() -> u64 {
    numbers("/proc/thread-self/stat")[11]
}

fn disk_read() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes:"));
    line.unwrap().trim().parse().unwrap()
}

fn allocate(blocks: usize) {
    (0..blocks).for_each(|_| drop(black_box(Box::new([0_u8; 1_000]))));
}

fn last_exit(make: &dyn Fn() -> Span, is_above: bool) -> [u64; 2] {
    let before = wall_ns();
    let span = make();
    let made = wall_ns();
    let entered = span.entered();
    std::thread::sleep(MS * if is_above { 3 } else { 0 });
    let inside = wall_ns();
    let span = entered.exit();
    let left = wall_ns();
    std::thread::sleep(3 * MS);
    drop(span);
    [inside - made, left - before]
}

fn idle(make: &dyn Fn() -> Span, is_above: bool) -> [u64; 2] {
    let before = wall_ns();
    let span = make();
    let made = wall_ns();
    std::thread::sleep(MS * if is_above { 3 } else { 0 });
    let begins = wall_ns();
    let span = span.entered().exit();
    drop(span);
    [begins - made, wall_ns() - before]
}

/// A task that awaits for 3 ms, or is polled as much later than it was woken, or both. What it awaited, and its delay.
fn awaits(make: &dyn Fn() -> Span, is_above: bool) -> [[u64; 2]; 2] {
    let pause = || std::thread::sleep(MS * if is_above { 3 } else { 0 });
    let waker = RefCell::new(None::<Waker>);
    let awaited =
        std::future::poll_fn(|context| match waker.borrow_mut().replace(context.waker().clone()) {
            None => Poll::Pending,
            Some(_) => Poll::Ready(()),
        });
    let makes = wall_ns();
    let mut task = pin!(awaited.instrument(make()).profiled());
    let context = &mut Context::from_waker(Waker::noop());
    let before = wall_ns();
    assert!(task.as_mut().poll(context).is_pending());
    let waits = wall_ns();
    pause();
    let wakes = wall_ns();
    waker.borrow().as_ref().unwrap().wake_by_ref();
    let woken = wall_ns();
    pause();
    let polls = wall_ns();
    assert!(task.as_mut().poll(context).is_ready());
    // A long time before the first poll is a delay, too.
    [[wakes - waits, woken - before], [polls - woken, waits - makes + wall_ns() - wakes]]
}

thread_local!(static COLD_FILE: ColdFile = ColdFile::new());

/// A mapped file whose pages can be dropped, so that each is read from disk again.
#[derive(Clone, Copy)]
struct ColdFile {
    file: &'static std::fs::File,
    pages: *mut u8,
}

impl ColdFile {
    const PAGES: usize = 64;
    const SIZE: usize = Self::PAGES * 4_096;

    fn new() -> Self {
        let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        rustix::io::pwrite(&file, &vec![1; Self::SIZE], 0).unwrap();
        file.sync_all().unwrap();
        let (none, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
        // SAFETY: a new mapping.
        let pages =
            unsafe { rustix::mm::mmap(none, Self::SIZE, ProtFlags::READ, flags, file.as_fd(), 0) };
        Self { file: Box::leak(Box::new(file)), pages: pages.unwrap().cast() }
    }

    fn make_cold(&self) -> Self {
        for advice in [Advice::LinuxDontNeed, Advice::Random] {
            // SAFETY: the pages are those of the file, and are read again.
            unsafe { rustix::mm::madvise(self.pages.cast(), Self::SIZE, advice) }.unwrap();
        }
        rustix::fs::fadvise(self.file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        *self
    }

    fn read_pages(&self, count: usize) {
        for page in 0..count {
            // SAFETY: inside the mapping.
            assert_eq!(unsafe { self.pages.add(page * 4_096).read_volatile() }, 1);
        }
    }
}

/// Whether the kernel counts it here: a file in memory has no such faults, and some kernels have no `schedstat`.
fn is_counted(measure: Measure) -> bool {
    match measure {
        Measure::MajorFaults => {
            let before = major_faults();
            COLD_FILE.with(ColdFile::make_cold).read_pages(ColdFile::PAGES);
            major_faults() > before
        }
        Measure::DiskRead => {
            let is_known = std::fs::read_to_string("/proc/thread-self/io").is_ok();
            is_known && {
                let before = disk_read();
                COLD_FILE.with(ColdFile::make_cold).read_pages(ColdFile::PAGES);
                disk_read() > before
            }
        }
        Measure::Runnable => std::fs::read_to_string("/proc/thread-self/schedstat").is_ok(),
        _ => true,
    }
}

fn has_condition(measure: Measure) -> bool {
    // The limit of wall time has no name.
    !Condition::Above(measure, Threshold::Number(1)).to_string().starts_with('>')
}

/// A layer with that rule, and what it logs.
fn setup(rule: &Rules, source: Source, at_run_time: bool) -> (Setup, Log) {
    let (memory, kept, log) = (Memory::new(), Arc::new(Mutex::new(Vec::new())), Log::default());
    let received = Arc::clone(&kept);
    let first = if at_run_time { "off".parse().unwrap() } else { rule.clone() };
    let layer = ProfilingLayer::builder()
        .rules(first)
        .source(source)
        .rate(200)
        .cpu_budget(0)
        .references(0, 0.0)
        .exporter(memory.clone())
        .profiles_per_minute(1_000_000)
        .span_fields(["number"])
        .on_kept(move |one| received.lock().unwrap().push(one.clone()))
        .build()
        .unwrap();
    let handle = layer.handle();
    let writer = log.clone();
    let fmt = tracing_subscriber::fmt::layer().with_writer(move || writer.clone());
    let fmt = fmt.with_filter(LevelFilter::WARN);
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(fmt).with(layer));
    if at_run_time {
        handle.set_rules(rule.clone()).unwrap();
    }
    (Setup { handle, dispatch, memory, kept }, log)
}

/// Tries the rule on `SPANS` spans above and as many below the limit. Returns what is wrong.
fn wrong(measure: Measure, source: Source, at_run_time: bool, has_allocator: bool) -> Vec<String> {
    let (limit, scenario) = scenario(measure);
    let threshold = match measure.unit() {
        Unit::Nanoseconds => Threshold::Time(Duration::from_nanos(limit)),
        _ => Threshold::Number(limit),
    };
    // The layer that prints wants no span.
    let rule = format!("{}|level<=info", Condition::Above(measure, threshold));
    let rule: Rules = rule.parse().unwrap();
    let (setup, log) = setup(&rule, source, at_run_time);
    let [mut above, mut below] = [HashSet::new(), HashSet::new()];
    let mut tries = 0..;
    while above.len() < SPANS || below.len() < SPANS {
        let number: u64 = tries.next().unwrap();
        assert!(number < 2_000, "{rule}: {} above, {} below", above.len(), below.len());
        let is_above = above.len() < SPANS && (below.len() >= SPANS || number.is_multiple_of(2));
        let make = || info_span!("span", number);
        let [least, most] =
            tracing::dispatcher::with_default(&setup.dispatch, || scenario(&make, is_above));
        if least > limit + slack(measure) {
            above.insert(number);
        } else if most + slack(measure) <= limit {
            below.insert(number);
        }
    }
    setup.flush();
    let kept = setup.kept();
    let spans = kept.iter().flat_map(|kept| &kept.spans);
    let spans =
        spans.filter(|span| span.reasons().iter().any(|reason| reason == Reason::Above(measure)));
    let numbers = spans.flat_map(|span| span.fields().map(|(_, number)| number.parse().unwrap()));
    let kept: HashSet<u64> = numbers.collect();
    let is_of_allocations = matches!(measure, Measure::Allocated | Measure::Allocations);
    if is_of_allocations && !has_allocator {
        above.clear();
    }
    let how = format!("{rule}, {source:?}, at run time {at_run_time}");
    let mut wrong = Vec::new();
    let (missing, too_many) = (above.difference(&kept).count(), below.intersection(&kept).count());
    if missing > 0 || too_many > 0 {
        wrong.push(format!(
            "{how}: {missing} of {} not kept, {too_many} of {} kept",
            above.len(),
            below.len()
        ));
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    if log.contains("allocator") != (is_of_allocations && !has_allocator) {
        wrong.push(format!("{how}: {log}"));
    }
    wrong
}

/// Another thread takes a half of the only CPU that this one may use.
fn on_a_shared_cpu<R>(action: impl FnOnce() -> R) -> R {
    let allowed = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|number| allowed.is_set(*number)).unwrap());
    sched_setaffinity(None, &one).unwrap();
    let has_ended = Arc::new(AtomicBool::new(false));
    let ends = Arc::clone(&has_ended);
    let other = std::thread::spawn(move || while !ends.load(Ordering::Relaxed) {});
    let result = action();
    has_ended.store(true, Ordering::Relaxed);
    other.join().unwrap();
    sched_setaffinity(None, &allowed).unwrap();
    result
}

fn play(source: Source, has_allocator: bool) {
    IS_PROFILED.store(has_allocator, Ordering::Relaxed);
    let mut all = Vec::new();
    for measure in Measure::ALL.iter().copied().filter(|measure| has_condition(*measure)) {
        if !is_counted(measure) {
            println!("skipped: {measure:?} is not counted here");
            continue;
        }
        for at_run_time in [false, true] {
            let play = || wrong(measure, source, at_run_time, has_allocator);
            all.extend(match measure {
                Measure::Runnable => on_a_shared_cpu(play),
                _ => play(),
            });
        }
    }
    assert!(all.is_empty(), "{all:#?}");
}

macro_rules! tests {
    ($($name:ident $source:ident $has_allocator:literal;)+) => {
        $(#[test]
        fn $name() {
            if Source::$source == Source::Perf && !has_perf() {
                println!("skipped: perf events are refused here");
            } else if is_alone(stringify!($name)) {
                play(Source::$source, $has_allocator);
            }
        })+
    };
}

tests! {
    perf Perf false;
    perf_with_allocator Perf true;
    timer Timer false;
    timer_with_allocator Timer true;
    nothing None false;
    nothing_with_allocator None true;
}

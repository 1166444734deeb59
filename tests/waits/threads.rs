//! The dump of all threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tracing::info_span;
use tracing_profiling::{DumpedThread, ThreadActivity, ThreadDump};

use crate::support::{PLENTY, Setup, is_child, run_child};

const MS: Duration = Duration::from_millis(1);

fn find<'a>(dump: &'a ThreadDump, name: &str) -> &'a DumpedThread {
    dump.threads().iter().find(|thread| thread.name == name).unwrap()
}

/// Two locks that are taken in both orders.
struct Locks {
    stock: Mutex<u32>,
    prices: Mutex<u32>,
    both: Barrier,
}

#[inline(never)]
fn takes_stock_then_prices(locks: &Locks) {
    let mut stock = locks.stock.lock().unwrap();
    locks.both.wait();
    *stock += *locks.prices.lock().unwrap();
}

#[inline(never)]
fn takes_prices_then_stock(locks: &Locks) {
    let mut prices = locks.prices.lock().unwrap();
    locks.both.wait();
    *prices += *locks.stock.lock().unwrap();
}

/// Whether a thread is blocked in that lock: the futex is a part of it.
fn waits_for(thread: &DumpedThread, lock: &Mutex<u32>) -> bool {
    let call = thread.blocked_in.as_deref().unwrap_or_default();
    let Some(address) = call.strip_prefix("futex 0x") else { return false };
    let start = std::ptr::from_ref(lock).addr();
    (start..start + size_of_val(lock)).contains(&usize::from_str_radix(address, 16).unwrap())
}

/// Nothing ends the deadlock, so this runs in its own process.
fn deadlock() {
    let setup = Setup::new("1h");
    let locks = Locks { stock: Mutex::new(0), prices: Mutex::new(0), both: Barrier::new(2) };
    let locks: &'static Locks = Box::leak(Box::new(locks));
    let spawn = |name: &str, takes: fn(&Locks)| {
        let dispatch = setup.dispatch.clone();
        let take = move || {
            tracing::dispatcher::with_default(&dispatch, || {
                info_span!("request").in_scope(|| info_span!("book").in_scope(|| takes(locks)));
            });
        };
        thread::Builder::new().name(name.to_owned()).spawn(take).unwrap()
    };
    _ = spawn("first", takes_stock_then_prices);
    _ = spawn("second", takes_prices_then_stock);
    let start = Instant::now();
    let dump = loop {
        let dump = setup.handle.threads().unwrap();
        let named = |name: &str| dump.threads().iter().find(|thread| thread.name == name);
        if named("first").is_some_and(|it| waits_for(it, &locks.prices))
            && named("second").is_some_and(|it| waits_for(it, &locks.stock))
        {
            break dump;
        }
        assert!(start.elapsed() < PLENTY, "{dump}");
        thread::sleep(MS);
    };
    for (name, function) in
        [("first", "takes_stock_then_prices"), ("second", "takes_prices_then_stock")]
    {
        let found = find(&dump, name);
        assert_eq!(found.activity, ThreadActivity::Blocked);
        assert_eq!(found.spans, ["request", "book"]);
        let line = found.stack.iter().find(|line| line.contains(function)).unwrap();
        assert!(line.contains("(waits/threads.rs:"), "{line}");
        let heading = format!(
            "`{name}`, thread {}: blocked in {}, in the span request > book\n",
            found.tid,
            found.blocked_in.as_ref().unwrap()
        );
        assert!(dump.to_string().contains(&heading), "{heading}{dump}");
    }
    // They come first.
    assert!(dump.threads()[..2].iter().all(|thread| !thread.spans.is_empty()), "{dump}");
    std::process::exit(0);
}

#[test]
fn a_dump_of_a_deadlock_has_both_stacks_and_both_locks() {
    let test = "threads::a_dump_of_a_deadlock_has_both_stacks_and_both_locks";
    if is_child(test) {
        deadlock();
    }
    let output = run_child(test, &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_thread_that_runs_is_listed_without_a_stack() {
    let setup = Setup::new("1h");
    let (runs, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let dump = thread::scope(|scope| {
        let spin = || {
            while !is_over.load(Ordering::Relaxed) {
                runs.store(true, Ordering::Relaxed);
            }
        };
        thread::Builder::new().name("spins".to_owned()).spawn_scoped(scope, spin).unwrap();
        while !runs.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        let dump = setup.handle.threads();
        is_over.store(true, Ordering::Relaxed);
        dump.unwrap()
    });
    let spins = find(&dump, "spins");
    assert_eq!(spins.activity, ThreadActivity::Running);
    assert!(spins.stack.is_empty() && spins.blocked_in.is_none() && spins.spans.is_empty());
    let heading = format!("\n`spins`, thread {}: running\n", spins.tid);
    assert!(dump.to_string().contains(&heading), "{dump}");
}

/// Or counted, if there is no time for all.
#[test]
fn a_thousand_threads_are_listed() {
    const MANY: usize = 1_000;
    let setup = Setup::new("1h");
    let (begun, over) = (AtomicUsize::new(0), Mutex::new(()));
    let held = over.lock().unwrap();
    let wait = || {
        begun.fetch_add(1, Ordering::Relaxed);
        drop(over.lock().unwrap());
    };
    let dump = thread::scope(|scope| {
        for _ in 0..MANY {
            let thread = thread::Builder::new().name("many".to_owned()).stack_size(64 << 10);
            thread.spawn_scoped(scope, wait).unwrap();
        }
        // They have their names from here on.
        while begun.load(Ordering::Relaxed) < MANY {
            thread::sleep(MS);
        }
        let dump = setup.handle.threads();
        drop(held);
        dump.unwrap()
    });
    let many = dump.threads().iter().filter(|thread| thread.name == "many").count();
    assert!(many + dump.left_out >= MANY, "{many} of {MANY}, {} left out", dump.left_out);
}

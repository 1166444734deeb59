//! The dump of all threads.

#![allow(unsafe_code, reason = "starts a process that shares its memory, and locks mutexes of C")]

#[cfg(target_env = "gnu")]
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tracing::info_span;
use tracing_profiling::profile::{Leaf, SampleKind};
use tracing_profiling::{
    Builder, DumpedThread, Handle, ProfileKind, ProfileOptions, ThreadActivity, ThreadDump,
};

use crate::support::{PLENTY, Setup, is_child, run_child};
use crate::{Shown, sources};

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
                let request = info_span!("request", http.route = "/book/{id}");
                request.in_scope(|| info_span!("book").in_scope(|| takes(locks)));
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
        assert_eq!(found.spans, ["request{http.route=/book/{id}}", "book"]);
        let line = found.stack.iter().find(|line| line.contains(function)).unwrap();
        assert!(line.contains("(waits/threads.rs:"), "{line}");
        let heading = format!(
            "`{name}`, thread {}: blocked in {}, in the span request{{http.route=/book/{{id}}}} > book\n",
            found.tid,
            found.blocked_in.as_ref().unwrap()
        );
        assert!(dump.to_string().contains(&heading), "{heading}{dump}");
    }
    let [first, second] = ["first", "second"].map(|name| find(&dump, name));
    assert_eq!(dump.deadlocks.len(), 1, "{dump}");
    let deadlock = &dump.deadlocks[0];
    for other in [first, second] {
        let wait = format!(" waits for the lock of `{}` (thread {})", other.name, other.tid);
        assert!(deadlock.contains(&wait), "{deadlock}\n{wait}");
    }
    assert!(deadlock.starts_with("deadlock (inferred): ") && dump.to_string().contains(deadlock));
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

/// Takes a lock and waits for the next one, together with others that do the same in a circle.
#[inline(never)]
fn takes_one_and_the_next(locks: &[Mutex<u32>], number: usize, all: &Barrier) {
    let mut one = locks[number].lock().unwrap();
    all.wait();
    *one += *locks[(number + 1) % locks.len()].lock().unwrap();
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) {
    thread::Builder::new().name(name).spawn(run).unwrap();
}

/// Threads that wait in circles of different sizes, and threads that only look like that. Nothing ends most of it, so this
/// runs in its own process.
fn circles() {
    const CIRCLES: usize = 20;
    let setup = Setup::new("1h");
    for circle in 0..CIRCLES {
        let size = 2 + circle % 4;
        let locks: Arc<[Mutex<u32>]> = (0..size).map(|_| Mutex::new(0)).collect();
        let all = Arc::new(Barrier::new(size));
        for number in 0..size {
            let (locks, all) = (Arc::clone(&locks), Arc::clone(&all));
            spawn(format!("in{circle}_{number}"), move || {
                takes_one_and_the_next(&locks, number, &all)
            });
        }
    }
    // Two locks that a third thread holds, which waits for something else.
    for number in 0..5 {
        let locks = Arc::new([Mutex::new(0), Mutex::new(0)]);
        let (held, is_held) = mpsc::channel();
        let of_holder = Arc::clone(&locks);
        spawn(format!("out_holds{number}"), move || {
            let guards =
                [&of_holder[0], &of_holder[1]].map(|lock: &Mutex<u32>| lock.lock().unwrap());
            held.send(()).unwrap();
            loop {
                thread::park();
                assert_eq!(guards.len(), 2);
            }
        });
        is_held.recv().unwrap();
        for first in 0..2 {
            let locks = Arc::clone(&locks);
            spawn(format!("out_waits{number}_{first}"), move || {
                let [one, other] = [&locks[first], &locks[1 - first]];
                *one.lock().unwrap() += *other.lock().unwrap();
            });
        }
    }
    // Two threads that wait for messages of each other.
    let ((to_one, of_one), (to_other, of_other)) = (mpsc::channel::<u32>(), mpsc::channel::<u32>());
    for (to, of) in [(to_one, of_other), (to_other, of_one)] {
        spawn("out_idle".to_owned(), move || {
            of.iter().for_each(|message| to.send(message).unwrap())
        });
    }
    let start = Instant::now();
    let dump = loop {
        let dump = setup.handle.threads().unwrap();
        if dump.deadlocks.len() >= CIRCLES || start.elapsed() > PLENTY / 2 {
            break dump;
        }
        thread::sleep(10 * MS);
    };
    let mut right = 0;
    for circle in 0..CIRCLES {
        let size = 2 + circle % 4;
        let names = (0..size).map(|number| format!("`in{circle}_{number}` (thread"));
        let names: Vec<_> = names.collect();
        let is_of = |text: &&String| names.iter().any(|name| text.contains(name));
        let of_circle: Vec<_> = dump.deadlocks.iter().filter(is_of).collect();
        let is_right = |text: &&&String| {
            text.matches(" waits for the lock ").count() == size
                && names.iter().all(|name| text.contains(name))
                // The first one is also the last.
                && text.matches("` (thread ").count() == size + 1
        };
        right += usize::from(of_circle.len() == 1 && of_circle.iter().all(|text| is_right(&text)));
    }
    assert!(right * 100 >= 95 * CIRCLES, "{right}: {dump}");
    for _ in 0..10 {
        let dump = setup.handle.threads().unwrap();
        assert!(!dump.deadlocks.iter().any(|text| text.contains("`out")), "{dump}");
    }
    std::process::exit(0);
}

#[test]
fn threads_that_wait_in_a_circle_are_a_deadlock_and_others_are_not() {
    let test = "threads::threads_that_wait_in_a_circle_are_a_deadlock_and_others_are_not";
    if is_child(test) {
        circles();
    }
    let output = run_child(test, &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stdout));
}

/// A mutex of the C library.
#[cfg(target_env = "gnu")]
pub(crate) struct PthreadMutex(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: its functions may be called on any thread.
#[cfg(target_env = "gnu")]
unsafe impl Sync for PthreadMutex {}

#[cfg(target_env = "gnu")]
impl PthreadMutex {
    pub(crate) const fn new() -> Self {
        Self(UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER))
    }

    pub(crate) fn unlock(&self) {
        // SAFETY: the calling thread holds it.
        assert_eq!(unsafe { libc::pthread_mutex_unlock(self.0.get()) }, 0);
    }

    pub(crate) fn lock(&self) {
        // SAFETY: it is initialized, and never moved.
        assert_eq!(unsafe { libc::pthread_mutex_lock(self.0.get()) }, 0);
    }
}

/// In its own process, as above.
#[cfg(target_env = "gnu")]
fn pthread_circle() {
    static LOCKS: [PthreadMutex; 3] = [const { PthreadMutex::new() }; 3];
    let setup = Setup::new("1h");
    let all = Arc::new(Barrier::new(LOCKS.len()));
    for number in 0..LOCKS.len() {
        let all = Arc::clone(&all);
        spawn(format!("pthread{number}"), move || {
            LOCKS[number].lock();
            all.wait();
            LOCKS[(number + 1) % LOCKS.len()].lock();
        });
    }
    let start = Instant::now();
    let text = loop {
        let dump = setup.handle.threads().unwrap();
        if let [text] = dump.deadlocks.as_slice() {
            // In that one, a thread could be listed as it was before it asked for its second lock.
            let dump = setup.handle.threads().unwrap();
            for number in 0..LOCKS.len() {
                let [thread, next] = [number, (number + 1) % LOCKS.len()]
                    .map(|number| find(&dump, &format!("pthread{number}")));
                let call = thread.blocked_in.as_deref().unwrap_or_default();
                let holder = format!(", held by `{}` (thread {})", next.name, next.tid);
                assert!(call.ends_with(&holder), "{dump}");
            }
            break text.clone();
        }
        assert!(start.elapsed() < PLENTY, "{dump}");
        thread::sleep(10 * MS);
    };
    assert!(text.starts_with("deadlock: "), "who holds them is certain: {text}");
    let numbers: Vec<usize> = text
        .split("`pthread")
        .skip(1)
        .map(|rest| rest.split('`').next().unwrap().parse().unwrap())
        .collect();
    assert_eq!(numbers.len(), LOCKS.len() + 1, "{text}");
    assert!(numbers.windows(2).all(|two| two[1] == (two[0] + 1) % LOCKS.len()), "{text}");
    std::process::exit(0);
}

#[cfg(target_env = "gnu")]
#[test]
fn who_holds_a_mutex_of_glibc_is_certain() {
    let test = "threads::who_holds_a_mutex_of_glibc_is_certain";
    if is_child(test) {
        pthread_circle();
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
        // There may be many threads, of other tests.
        let start = Instant::now();
        let dump = loop {
            let dump = setup.handle.threads();
            let mut found = dump.iter().flat_map(ThreadDump::threads);
            if found.any(|it| it.name == "spins") || start.elapsed() >= PLENTY {
                break dump;
            }
        };
        is_over.store(true, Ordering::Relaxed);
        dump.unwrap()
    });
    let spins = find(&dump, "spins");
    assert_eq!(spins.activity, ThreadActivity::Running);
    assert!(spins.stack.is_empty() && spins.blocked_in.is_none() && spins.spans.is_empty());
    assert_eq!(spins.stack_age, None);
    let heading = format!("\n`spins`, thread {}: running, stack not known\n", spins.tid);
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
    assert_eq!(dump.to_string().matches("\n`many`, thread ").count(), many);
}

#[inline(never)]
fn spins_in_a_span(is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        std::hint::spin_loop();
    }
}

#[test]
fn a_thread_that_runs_in_a_span_has_the_stack_of_its_newest_sample() {
    for source in sources() {
        let builder = |builder: Builder| builder.source(source).sampling_delay(Duration::ZERO);
        let setup = Setup::with("1h", builder);
        let is_over = AtomicBool::new(false);
        let dump = thread::scope(|scope| {
            let spin = || {
                setup.run(|| {
                    info_span!("request").in_scope(|| {
                        info_span!("busy").in_scope(|| spins_in_a_span(&is_over));
                    });
                });
            };
            thread::Builder::new().name("spins".to_owned()).spawn_scoped(scope, spin).unwrap();
            let start = Instant::now();
            let found = loop {
                let dump = setup.handle.threads().unwrap();
                let mut threads = dump.threads().iter();
                // Where memory is short, it can be in a page fault.
                let runs = |it: &DumpedThread| it.activity == ThreadActivity::Running;
                if threads.any(|it| it.name == "spins" && runs(it) && !it.stack.is_empty()) {
                    break Ok(dump);
                }
                if start.elapsed() >= PLENTY {
                    break Err(dump);
                }
                thread::sleep(MS);
            };
            is_over.store(true, Ordering::Relaxed);
            found.unwrap()
        });
        let spins = find(&dump, "spins");
        assert_eq!((spins.activity, &spins.blocked_in), (ThreadActivity::Running, &None), "{dump}");
        assert_eq!(spins.spans, ["request", "busy"]);
        assert!(spins.stack.iter().any(|line| line.contains("spins_in_a_span")), "{dump}");
        let age = spins.stack_age.unwrap();
        let heading = format!("running, {age:.1?} ago in this stack, in the span request > busy\n");
        assert!(dump.to_string().contains(&heading), "{dump}");
    }
}

/// In the kernel's state D, in which no signal reaches it.
#[test]
fn a_thread_that_cannot_be_interrupted_is_listed_as_such() {
    static IS_OVER: AtomicBool = AtomicBool::new(false);
    let setup = Setup::new("1h");
    let dump = thread::scope(|scope| {
        let fork = || {
            // SAFETY: the child makes two system calls and reads a static until it exits; it does not return from here.
            unsafe {
                #[allow(deprecated, reason = "it is the state that is wanted")]
                if libc::vfork() == 0 {
                    while !IS_OVER.load(Ordering::Relaxed) {
                        libc::usleep(1_000);
                    }
                    libc::_exit(0);
                }
            }
        };
        thread::Builder::new().name("forks".to_owned()).spawn_scoped(scope, fork).unwrap();
        let start = Instant::now();
        let found = loop {
            let dump = setup.handle.threads().unwrap();
            let threads = dump.threads().iter().find(|it| it.name == "forks");
            if threads.is_some_and(|it| it.activity == ThreadActivity::Uninterruptible) {
                break Ok(dump);
            }
            if start.elapsed() >= PLENTY {
                break Err(dump);
            }
            thread::sleep(MS);
        };
        IS_OVER.store(true, Ordering::Relaxed);
        found.unwrap()
    });
    let call = find(&dump, "forks").blocked_in.as_deref();
    assert!(matches!(call, Some("vfork" | "clone")), "{call:?}");
}

/// `/proc` and names are read while they change.
#[test]
fn threads_that_start_and_end_during_a_dump_do_no_harm() {
    let setup = Setup::new("1h");
    let is_over = AtomicBool::new(false);
    let (release, waits) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let name = c"a\nb \xff) R (";
        let wait = move || {
            rustix::thread::set_name(name).unwrap();
            _ = waits.recv();
        };
        scope.spawn(wait);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                thread::spawn(|| ()).join().unwrap();
            }
        });
        let start = Instant::now();
        let mut complete = 0;
        while complete < 20 && start.elapsed() < PLENTY {
            let dump = setup.handle.threads().unwrap();
            let odd = dump.threads().iter().find(|it| it.name == "a\\nb \u{fffd}) R (");
            complete += usize::from(odd.is_some_and(|it| it.blocked_in.is_some()));
            // No name begins a line of its own.
            let headings = dump.to_string().matches("\n`").count();
            assert_eq!(headings, dump.threads().len(), "{dump}");
        }
        is_over.store(true, Ordering::Relaxed);
        drop(release);
        assert_eq!(complete, 20);
    });
}

#[test]
fn callers_at_the_same_time_all_get_a_dump() {
    let setup = Setup::new("1h");
    let together = Barrier::new(3);
    thread::scope(|scope| {
        let ask = || {
            together.wait();
            let dump = setup.handle.threads().unwrap();
            assert!(!dump.threads().is_empty(), "{dump}");
        };
        for _ in 0..3 {
            thread::Builder::new().name("asks".to_owned()).spawn_scoped(scope, ask).unwrap();
        }
    });
}

/// What a dump has where `/proc` shows only some of it.
pub(crate) fn check(handle: &Handle, shown: Shown) {
    let (release, waits) = mpsc::channel::<()>();
    let dump = thread::scope(|scope| {
        let wait = move || _ = waits.recv();
        thread::Builder::new().name("blocked".to_owned()).spawn_scoped(scope, wait).unwrap();
        let start = Instant::now();
        let found = loop {
            let dump = handle.threads();
            let mut threads = dump.iter().flat_map(ThreadDump::threads);
            let is_blocked =
                |it: &DumpedThread| it.name == "blocked" && it.activity == ThreadActivity::Blocked;
            if dump.is_err() || threads.any(is_blocked) {
                break Ok(dump);
            }
            if start.elapsed() >= PLENTY {
                break Err(dump);
            }
            thread::sleep(MS);
        };
        drop(release);
        found.unwrap()
    });
    assert_eq!(dump.is_err(), shown == Shown::Nothing);
    let duration = Duration::from_millis(100);
    let options = ProfileOptions { duration, ..ProfileOptions::of(ProfileKind::Wall) };
    let wall = handle.profile(options);
    assert_eq!(wall.is_err(), shown == Shown::Nothing, "{wall:?}");
    if let Ok(wall) = wall {
        // The threads of the harness wait.
        let is_known = |leaf: Option<&Leaf>| matches!(leaf, Some(Leaf::Blocked(_)));
        let waits =
            || wall.of_kind(SampleKind::OffCpu).map(|sample| is_known(wall.leaf(sample.leaf)));
        assert!(
            waits().any(|is_known| is_known == (shown != Shown::States)),
            "{shown:?}: {wall:?}"
        );
    }
    let Ok(dump) = dump else { return };
    let blocked = find(&dump, "blocked");
    let is_known = blocked.blocked_in.as_deref().is_some_and(|call| call.starts_with("futex 0x"));
    assert_eq!(is_known, shown != Shown::States, "{shown:?}: {dump}");
    assert_eq!(blocked.stack.is_empty(), shown == Shown::States, "{shown:?}: {dump}");
    if shown == Shown::States {
        let heading =
            format!("thread {}: blocked, the system does not tell in what\n", blocked.tid);
        assert!(dump.to_string().contains(&heading), "{dump}");
    }
}

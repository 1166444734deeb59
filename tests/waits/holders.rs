//! Who holds the lock that a thread waits for.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex, RwLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tracing::{Span, info_span};
use tracing_profiling::Builder;
use tracing_profiling::profile::{Leaf, LockHolder, Profile, Sample, SampleKind};

use crate::support::{PLENTY, Setup, burn, is_alone};
#[cfg(target_env = "gnu")]
use crate::threads::PthreadMutex;
use crate::{MS, sources};

/// Locks that one thread holds alone, with a condition variable of the first two.
#[derive(Default)]
struct Locks {
    mutex: Mutex<u64>,
    changed: Condvar,
    lot: parking_lot::Mutex<u64>,
    lot_changed: parking_lot::Condvar,
    rw: RwLock<u64>,
    lot_rw: parking_lot::RwLock<u64>,
    map: dashmap::DashMap<u64, u64>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Mutex,
    Lot,
    Write,
    Read,
    LotWrite,
    Map,
}

#[derive(Clone, Copy, Debug)]
enum While {
    Sleeps,
    Receives,
    Runs,
    Deep,
}

impl Locks {
    /// Runs `inside` while it holds the lock.
    #[inline(never)]
    fn hold(&self, kind: Kind, inside: impl FnOnce()) {
        match kind {
            Kind::Mutex => {
                let mut held = self.mutex.lock().unwrap();
                inside();
                *held += 1;
            }
            Kind::Lot => {
                let mut held = self.lot.lock();
                inside();
                *held += 1;
            }
            Kind::Write => {
                let mut held = self.rw.write().unwrap();
                inside();
                *held += 1;
            }
            Kind::Read => {
                let held = self.rw.read().unwrap();
                inside();
                drop(std::hint::black_box(held));
            }
            Kind::LotWrite => {
                let mut held = self.lot_rw.write();
                inside();
                *held += 1;
            }
            Kind::Map => {
                let mut held = self.map.entry(0).or_default();
                inside();
                *held += 1;
            }
        }
    }

    /// Takes it and gives it back, to read if it can be.
    #[inline(never)]
    fn take(&self, kind: Kind, reads: bool) {
        match kind {
            Kind::Write if reads => drop(self.rw.read().unwrap()),
            Kind::LotWrite if reads => drop(self.lot_rw.read()),
            Kind::Map if reads => drop(self.map.get(&0)),
            Kind::Read => *self.rw.write().unwrap() += 1,
            _ => self.hold(kind, || {}),
        }
    }

    /// Waits for it, for a condition variable of it if it has one.
    fn idle(&self, kind: Kind, is_over: &AtomicBool) {
        let go_on = || !is_over.load(Ordering::Acquire);
        match kind {
            Kind::Mutex => {
                let mut held = self.mutex.lock().unwrap();
                while go_on() {
                    held = self.changed.wait(held).unwrap();
                }
            }
            Kind::Lot => {
                let mut held = self.lot.lock();
                while go_on() {
                    self.lot_changed.wait(&mut held);
                }
            }
            Kind::Write | Kind::Read | Kind::LotWrite | Kind::Map => {
                self.hold(kind, || {});
                while go_on() {
                    thread::park();
                }
            }
        }
    }
}

#[inline(never)]
fn deep(levels: u32, time: Duration) -> u64 {
    let below = if levels == 0 {
        thread::sleep(time);
        1
    } else {
        deep(levels - 1, time)
    };
    std::hint::black_box(below) + 1
}

fn passes(how: While, time: Duration, end: &mpsc::Receiver<()>) {
    match how {
        While::Sleeps => thread::sleep(time),
        While::Receives => _ = end.recv_timeout(time),
        While::Runs => _ = burn(time),
        While::Deep => _ = deep(20, time),
    }
}

/// The holder of the longest wait for a lock in the span `checkout`; the inner option is none if that has no holder.
fn holder_in(profile: &Profile) -> Option<Option<LockHolder>> {
    let is_in_it = |sample: &&Sample| {
        sample.link.and_then(|link| profile.link(link)).is_some_and(|link| link.span == "checkout")
    };
    let waits = profile.of_kind(SampleKind::OffCpu).filter(is_in_it);
    let lengths = waits.filter_map(|sample| {
        let holder = match profile.leaf(sample.leaf)? {
            Leaf::BlockedBy(call, holder) if call.starts_with("futex") => Some(holder.clone()),
            Leaf::Blocked(call) if call.starts_with("futex") => None,
            _ => return None,
        };
        Some((sample.points.iter().map(|point| point.weight).sum::<u64>(), holder))
    });
    lengths.max_by_key(|(length, _)| *length).map(|(_, holder)| holder)
}

/// A thread that holds a lock, beside others that know it.
#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    how: While,
    reads: bool,
    idle: u64,
    others: u64,
    is_in_span: bool,
    notifies: bool,
    time: Duration,
}

impl Case {
    fn random(mut random: impl FnMut(u64) -> u64) -> Self {
        let kinds = [Kind::Mutex, Kind::Lot, Kind::Write, Kind::Read, Kind::LotWrite, Kind::Map];
        let kind = kinds[random(6) as usize];
        let how = [While::Sleeps, While::Receives, While::Runs, While::Deep][random(4) as usize];
        Self {
            kind,
            how,
            reads: random(2) == 0,
            idle: random(4),
            others: random(3),
            // What runs is seen by its samples, which are taken in spans.
            is_in_span: random(2) == 0 || matches!(how, While::Runs),
            notifies: random(2) == 0,
            time: MS * (80 + random(100) as u32),
        }
    }
}

/// A thread in a span waits for that lock. Returns who held it, if that was found.
fn holder(setup: &Setup, name: &str, case: Case) -> Option<LockHolder> {
    let Case { kind, how, reads, idle, others, is_in_span, notifies, time } = case;
    let locks = Arc::new(Locks::default());
    let is_over = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    let ready = Arc::new(Barrier::new(1 + idle as usize));
    for number in 0..idle {
        let (locks, is_over, ready) =
            (Arc::clone(&locks), Arc::clone(&is_over), Arc::clone(&ready));
        let idle = thread::Builder::new().name(format!("idle{number}"));
        threads.push(idle.spawn(move || {
            ready.wait();
            locks.idle(kind, &is_over);
        }));
    }
    ready.wait();
    thread::sleep(20 * MS);
    let (held, is_held) = mpsc::channel();
    let (end, ended) = mpsc::channel();
    let (of_holder, dispatch) = (Arc::clone(&locks), setup.dispatch.clone());
    threads.push(thread::Builder::new().name(name.to_owned()).spawn(move || {
        tracing::dispatcher::with_default(&dispatch, || {
            let span = is_in_span.then(|| info_span!("refill").entered());
            of_holder.hold(kind, || {
                held.send(()).unwrap();
                passes(how, time, &ended);
                if notifies {
                    of_holder.changed.notify_all();
                    of_holder.lot_changed.notify_all();
                }
            });
            drop(span);
        });
    }));
    is_held.recv().unwrap();
    for number in 0..others {
        let locks = Arc::clone(&locks);
        let other = thread::Builder::new().name(format!("other{number}"));
        threads.push(other.spawn(move || locks.take(kind, reads)));
    }
    setup.run(|| info_span!("checkout").in_scope(|| locks.take(kind, reads)));
    is_over.store(true, Ordering::Release);
    locks.changed.notify_all();
    locks.lot_changed.notify_all();
    drop(end);
    for thread in threads {
        let thread = thread.unwrap();
        while !thread.is_finished() {
            thread.thread().unpark();
            locks.changed.notify_all();
            locks.lot_changed.notify_all();
            thread::sleep(MS);
        }
        thread.join().unwrap();
    }
    let profiles = setup.memory.take();
    profiles.iter().find_map(holder_in).flatten()
}

#[test]
fn who_holds_a_lock_is_named_and_marked_as_inferred() {
    // Other tests have more threads at times than are searched.
    if !is_alone("holders::who_holds_a_lock_is_named_and_marked_as_inferred") {
        return;
    }
    const CASES: u64 = 50;
    for source in sources() {
        let new_setup = || Setup::with("0ms", |builder: Builder| builder.source(source));
        let mut setup = new_setup();
        let (mut right, mut missing, mut wrong) = (0, Vec::new(), Vec::new());
        let mut state = RandomState::new().hash_one("seed");
        println!("{source:?}: seed {state}");
        let mut next = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for number in 0..CASES {
            // Not to keep more spans than are allowed at once.
            if number % 10 == 0 {
                setup = new_setup();
            }
            let name = format!("holder{number}");
            let mut case = Case::random(&mut next);
            // On a loaded machine the collector may get no CPU during a wait.
            let found = (0..3).find_map(|_| {
                let found = holder(&setup, &name, case);
                case.time *= 4;
                found
            });
            match found {
                Some(found) if !found.is_inferred => panic!("{case:?}: {found}"),
                Some(found) if found.thread == name => right += 1,
                Some(found) => wrong.push(format!("{case:?}: {found}")),
                None => missing.push(format!("{case:?}: {:?}", setup.handle.stats().waits)),
            }
        }
        println!("{source:?}: {right} right, missing {missing:#?}, wrong {wrong:#?}");
        assert!(right * 100 >= 95 * CASES && wrong.is_empty(), "see above");
    }
}

/// A mutex of the C library states who holds it.
#[cfg(target_env = "gnu")]
#[test]
fn who_holds_a_mutex_of_glibc_is_not_inferred() {
    static LOCK: PthreadMutex = PthreadMutex::new();
    for source in sources() {
        let setup = Setup::with("0ms", |builder: Builder| builder.source(source));
        let found = crate::with_longer_waits(|time| {
            let (held, is_held) = mpsc::channel();
            let holder = thread::Builder::new().name("holder".to_owned()).spawn(move || {
                LOCK.lock();
                held.send(()).unwrap();
                thread::sleep(time);
                LOCK.unlock();
            });
            is_held.recv().unwrap();
            setup.run(|| {
                info_span!("checkout").in_scope(|| {
                    LOCK.lock();
                    LOCK.unlock();
                });
            });
            holder.unwrap().join().unwrap();
            setup.memory.take().iter().find_map(holder_in).flatten()
        });
        assert_eq!((found.thread.as_str(), found.is_inferred), ("holder", false), "{source:?}");
    }
}

/// What a thread holds until it may go on.
struct Stock {
    lock: Mutex<u64>,
    is_held: Barrier,
    is_named: AtomicBool,
}

#[inline(never)]
fn refills(stock: &Stock) {
    let mut held = stock.lock.lock().unwrap();
    stock.is_held.wait();
    while !stock.is_named.load(Ordering::Relaxed) {
        thread::sleep(MS);
    }
    *held += 1;
}

#[inline(never)]
fn reserves(stock: &Stock) {
    stock.is_held.wait();
    *stock.lock.lock().unwrap() += 1;
}

/// It keeps the lock until it is named.
#[test]
fn a_holder_is_named_with_its_route_and_function() {
    for source in sources() {
        let setup = Setup::with("0ms", |builder: Builder| builder.source(source));
        let spawn = |stock: Arc<Stock>, name: &str, span: fn() -> Span, runs: fn(&Stock)| {
            let dispatch = setup.dispatch.clone();
            let run = move || {
                let in_span = || span().in_scope(|| runs(&stock));
                tracing::dispatcher::with_default(&dispatch, in_span);
            };
            thread::Builder::new().name(name.to_owned()).spawn(run).unwrap()
        };
        let is_named = AtomicBool::new(false);
        let stock = Arc::new(Stock { lock: Mutex::new(0), is_held: Barrier::new(2), is_named });
        let refill = || info_span!("request", http.route = "/stock/{id}", user = "ada");
        let threads = [
            spawn(Arc::clone(&stock), "holder", refill, refills),
            spawn(Arc::clone(&stock), "reserving", || info_span!("checkout"), reserves),
        ];
        let start = Instant::now();
        let named = std::iter::repeat_with(|| {
            thread::sleep(MS);
            let stacks =
                setup.handle.open_spans(Duration::ZERO).unwrap().into_iter().map(|it| it.stack);
            stacks.flatten().find(|line| line.contains(", held by "))
        });
        let named = named.take_while(|_| start.elapsed() < PLENTY).find_map(|line| line);
        stock.is_named.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let named = named.expect("the holder is found");
        println!("{named}");
        assert!(named.contains(", held by `holder` (thread "), "{source:?}: {named}");
        let place =
            ") in `request{http.route=/stock/{id}}`, at waits::holders::refills (waits/holders.rs:";
        assert!(named.contains(place) && named.ends_with("), inferred]"), "{source:?}: {named}");
        setup.flush();
        let profiles = setup.profiles();
        let waited = profiles.iter().find(|profile| profile.name == "checkout").unwrap();
        let who =
            "[lock likely held by `request{http.route=/stock/{id}}` at waits::holders::refills (";
        assert!(waited.headline.contains(who), "{source:?}: {}", waited.headline);
    }
}

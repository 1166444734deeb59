//! Blocking system calls. A signal may interrupt them, and a program that never had a signal is not prepared for that.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, epoll};
use rustix::fs::Timespec;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketType};
use rustix::thread::{NanosleepRelativeResult, futex};
use tracing::info_span;

use crate::host::Host;
use crate::signals;
use crate::support::burn;

const MS: Duration = Duration::from_millis(1);

/// Blocks once for about the given time. Each has a time limit, or another thread that wakes it.
type Wait = Box<dyn FnMut(Duration) -> io::Result<()> + Send>;

/// The number of calls by name and result.
type Ends = BTreeMap<(&'static str, &'static str), u64>;

/// Each call blocks thousands of times for a millisecond, after a short burst of CPU time, and once for seconds.
pub(crate) fn all_calls(_: &Host) {
    wait_in_all_calls(2_000, Duration::from_secs(2));
}

pub(crate) fn wait_in_all_calls(rounds: u32, long: Duration) {
    let ends = Mutex::new(Ends::new());
    std::thread::scope(|scope| {
        for (name, wait) in waits() {
            let ends = &ends;
            scope.spawn(move || {
                let own = wait_often(name, wait, rounds, long);
                ends.lock().unwrap().extend(own);
            });
        }
    });
    let ends = ends.into_inner().unwrap();
    let is_interrupted = |end: &(&(&str, &str), &u64)| end.0.1 == INTERRUPTED;
    let interrupted: Vec<_> = ends.iter().filter(is_interrupted).collect();
    println!("results: {ends:?}");
    assert!(interrupted.is_empty(), "{interrupted:?}");
}

const INTERRUPTED: &str = "EINTR";

fn wait_often(name: &'static str, mut wait: Wait, rounds: u32, long: Duration) -> Ends {
    // `posix_spawn` blocks all signals on its thread. If its child ends in the meantime, the SIGCHLD goes to any other
    // thread, and a receive or send with a timeout on that thread returns `EINTR`, even without a handler and without
    // the layer.
    signals::block(libc::SIGCHLD);
    let mut ends = Ends::new();
    let mut wait_once = |limit| {
        let end = match wait(limit).map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) => "done",
            Err((_, error)) if error.kind() == io::ErrorKind::Interrupted => INTERRUPTED,
            // The time limit was reached, or the operation could not complete.
            Err((Some(libc::EAGAIN | libc::ETIMEDOUT | libc::EINPROGRESS), _)) => "not done",
            Err((_, error)) => panic!("{name}: {error}"),
        };
        *ends.entry((name, end)).or_default() += 1;
    };
    let _around = info_span!("waits often").entered();
    for round in 0..rounds {
        // Half of the calls are in a span of their own, which is entered just before the call.
        burn(Duration::from_micros(100));
        if round % 2 == 0 {
            info_span!("waits").in_scope(|| wait_once(MS));
        } else {
            wait_once(MS);
        }
    }
    info_span!("waits for long").in_scope(|| {
        burn(2 * MS);
        wait_once(long);
    });
    ends
}

/// A thread that calls `wake` some time after each request. If the other thread was interrupted before, it may have
/// ended by then.
struct Waker(mpsc::Sender<Duration>);

impl Waker {
    fn new(mut wake: impl FnMut() + Send + 'static) -> Self {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            for after in receiver {
                std::thread::sleep(after);
                wake();
            }
        });
        Self(sender)
    }

    fn wake_after(&self, time: Duration) {
        self.0.send(time).unwrap();
    }
}

fn timespec(time: Duration) -> Timespec {
    time.try_into().unwrap()
}

fn waits() -> Vec<(&'static str, Wait)> {
    vec![
        ("epoll_wait with a limit", epoll_wait(true)),
        ("epoll_wait", epoll_wait(false)),
        ("poll with a limit", poll(true)),
        ("poll", poll(false)),
        ("select with a limit", select()),
        ("nanosleep", sleep(rustix::thread::nanosleep)),
        (
            "clock_nanosleep",
            sleep(|time| {
                rustix::thread::clock_nanosleep_relative(rustix::thread::ClockId::Monotonic, time)
            }),
        ),
        ("futex with a limit", futex_with_limit()),
        ("futex", futex_until_woken()),
        ("sem_timedwait", semaphore(true)),
        ("sem_wait", semaphore(false)),
        ("read of a pipe", read_pipe()),
        ("recv with a limit", receive(true)),
        ("recv", receive(false)),
        ("send with a limit", send()),
        ("accept with a limit", accept()),
        ("connect with a limit, local", connect_locally()),
        ("connect with a limit, TCP", connect_by_tcp()),
    ]
}

/// A socket that becomes readable some time after each request to the waker.
fn readable() -> (OwnedFd, Waker) {
    let (near, mut far) = UnixStream::pair().unwrap();
    (near.into(), Waker::new(move || _ = far.write_all(&[1])))
}

fn take_one(from: &OwnedFd) -> io::Result<()> {
    assert_eq!(rustix::io::read(from, &mut [0_u8])?, 1);
    Ok(())
}

fn epoll_wait(has_limit: bool) -> Wait {
    let (file, waker) = readable();
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    epoll::add(&set, &file, epoll::EventData::new_u64(0), epoll::EventFlags::IN).unwrap();
    Box::new(move |time| {
        let mut events = Vec::with_capacity(1);
        let limit = timespec(time);
        if !has_limit {
            waker.wake_after(time);
        }
        let events = rustix::buffer::spare_capacity(&mut events);
        let found = epoll::wait(&set, events, has_limit.then_some(&limit))?;
        if found > 0 { take_one(&file) } else { Ok(()) }
    })
}

fn poll(has_limit: bool) -> Wait {
    let (file, waker) = readable();
    Box::new(move |time| {
        let limit = timespec(time);
        if !has_limit {
            waker.wake_after(time);
        }
        let mut files = [PollFd::new(&file, PollFlags::IN)];
        let found = rustix::event::poll(&mut files, has_limit.then_some(&limit))?;
        if found > 0 { take_one(&file) } else { Ok(()) }
    })
}

fn select() -> Wait {
    Box::new(|time| {
        let mut limit = libc::timeval {
            tv_sec: time.as_secs().try_into().unwrap(),
            tv_usec: time.subsec_micros().into(),
        };
        let none = std::ptr::null_mut();
        // SAFETY: there are no file sets, and `limit` is a local variable.
        match unsafe { libc::select(0, none, none, none, &raw mut limit) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    })
}

fn sleep(call: fn(&Timespec) -> NanosleepRelativeResult) -> Wait {
    Box::new(move |time| {
        let start = Instant::now();
        match call(&timespec(time)) {
            NanosleepRelativeResult::Ok => {
                assert!(start.elapsed() >= time, "slept only {:?}", start.elapsed());
                Ok(())
            }
            NanosleepRelativeResult::Interrupted(_) => Err(io::ErrorKind::Interrupted.into()),
            NanosleepRelativeResult::Err(error) => Err(error.into()),
        }
    })
}

fn futex_with_limit() -> Wait {
    let word = AtomicU32::new(0);
    Box::new(move |time| Ok(futex::wait(&word, futex::Flags::PRIVATE, 0, Some(&timespec(time)))?))
}

fn futex_until_woken() -> Wait {
    let word = Arc::new(AtomicU32::new(0));
    let woken = Arc::clone(&word);
    let waker = Waker::new(move || {
        woken.fetch_add(1, Ordering::Release);
        futex::wake(&woken, futex::Flags::PRIVATE, 1).unwrap();
    });
    Box::new(move |time| {
        let before = word.load(Ordering::Acquire);
        waker.wake_after(time);
        Ok(futex::wait(&word, futex::Flags::PRIVATE, before, None)?)
    })
}

/// A libc semaphore, which must not move.
struct Semaphore(std::cell::UnsafeCell<libc::sem_t>);

// SAFETY: semaphores may be used by several threads.
unsafe impl Sync for Semaphore {}
// SAFETY: it is pinned, and not bound to a thread.
unsafe impl Send for Semaphore {}

fn semaphore(has_limit: bool) -> Wait {
    // SAFETY: all zeros is a valid value, and the call below initializes it before it is used.
    let semaphore: Pin<Arc<Semaphore>> = Arc::pin(unsafe { std::mem::zeroed() });
    // SAFETY: it is pinned, and both users hold an `Arc` of it.
    assert_eq!(unsafe { libc::sem_init(semaphore.0.get(), 0, 0) }, 0);
    let posted = Pin::clone(&semaphore);
    let waker = Waker::new(move || {
        // SAFETY: as above.
        assert_eq!(unsafe { libc::sem_post(posted.0.get()) }, 0);
    });
    Box::new(move |time| {
        let result = if has_limit {
            let until = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let until = until.unwrap() + time;
            let until = libc::timespec {
                tv_sec: until.as_secs().try_into().unwrap(),
                tv_nsec: until.subsec_nanos().into(),
            };
            // SAFETY: as above; `until` is a local variable.
            unsafe { libc::sem_timedwait(semaphore.0.get(), &raw const until) }
        } else {
            waker.wake_after(time);
            // SAFETY: as above.
            unsafe { libc::sem_wait(semaphore.0.get()) }
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    })
}

fn read_pipe() -> Wait {
    let (mut reader, mut writer) = io::pipe().unwrap();
    let waker = Waker::new(move || _ = writer.write_all(&[1]));
    Box::new(move |time| {
        waker.wake_after(time);
        reader.read(&mut [0]).map(drop)
    })
}

fn receive(has_limit: bool) -> Wait {
    let (mut near, mut far) = UnixStream::pair().unwrap();
    let waker = Waker::new(move || _ = far.write_all(&[1]));
    Box::new(move |time| {
        if has_limit {
            near.set_read_timeout(Some(time))?;
        } else {
            waker.wake_after(time);
        }
        near.read(&mut [0]).map(drop)
    })
}

/// Sends to a peer that never reads.
fn send() -> Wait {
    let (mut near, far) = UnixStream::pair().unwrap();
    Box::new(move |time| {
        _ = &far;
        near.set_write_timeout(Some(time))?;
        near.write(&[0; 64 * 1024]).map(drop)
    })
}

/// Accepts on an address that no peer connects to.
fn accept() -> Wait {
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    // Binds it to a free abstract name.
    let nowhere = rustix::net::SocketAddrUnix::new_unnamed();
    rustix::net::bind(&listener, &nowhere).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    Box::new(move |time| {
        set_socket_timeout(&listener, Timeout::Recv, Some(time))?;
        Ok(rustix::net::accept(&listener).map(drop)?)
    })
}

/// Connects to a listener that never accepts and whose backlog is full.
fn connect_locally() -> Wait {
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let nowhere = rustix::net::SocketAddrUnix::new_unnamed();
    rustix::net::bind(&listener, &nowhere).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = rustix::net::getsockname(&listener).unwrap();
    let mut waiting = Vec::new();
    Box::new(move |time| {
        _ = &listener;
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
        set_socket_timeout(&socket, Timeout::Send, Some(time))?;
        rustix::net::connect(&socket, &address)?;
        waiting.push(socket);
        Ok(())
    })
}

/// The same by TCP: the kernel drops connection attempts beyond the backlog, and retries them.
fn connect_by_tcp() -> Wait {
    let listener = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&listener, &std::net::SocketAddrV4::new([127, 0, 0, 1].into(), 0)).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = rustix::net::getsockname(&listener).unwrap();
    let mut waiting = Vec::new();
    Box::new(move |time| {
        _ = &listener;
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        set_socket_timeout(&socket, Timeout::Send, Some(time))?;
        rustix::net::connect(&socket, &address)?;
        waiting.push(socket);
        Ok(())
    })
}

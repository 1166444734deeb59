//! Waiting for rings to fill, and being woken.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use super::ring::Ring;

/// What the collector sleeps on.
#[derive(Debug)]
pub(crate) struct Poller(Arc<Inner>);

/// Wakes the [`Poller`], and adds rings to it. Does nothing once there is none.
#[derive(Clone, Debug)]
pub(crate) struct Waker(Weak<Inner>);

#[derive(Debug)]
struct Inner {
    epoll: OwnedFd,
    event: OwnedFd,
    pending: AtomicBool,
}

/// What signal handlers write to. Never closed: a handler may be about to.
static TIMER_EVENT: OnceLock<OwnedFd> = OnceLock::new();

pub(super) fn timer_event() -> io::Result<RawFd> {
    if let Some(event) = TIMER_EVENT.get() {
        return Ok(event.as_raw_fd());
    }
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    Ok(TIMER_EVENT.get_or_init(|| event).as_raw_fd())
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &event, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self(Arc::new(Inner { epoll, event, pending: AtomicBool::new(false) })))
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker(Arc::downgrade(&self.0))
    }

    /// Sleeps until a ring has filled to its mark, a thread with a ring has ended, somebody
    /// called [`Waker::wake`], or the time is over; `None` waits for ever.
    ///
    /// Returns false if nothing but time has passed.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 16];
        // What exactly happened does not matter: a round looks at every thread. An interruption
        // is as good a reason to look as any.
        let woken = epoll::wait(&self.0.epoll, &mut events, timeout.as_ref());
        debug_assert!(matches!(woken, Ok(_) | Err(Errno::INTR)));
        // In this order, or the write of a `wake` between the two would be read away, and every
        // later one think that it need not write. And a swap: it reads what the last `wake` wrote
        // before it skipped its write.
        _ = rustix::io::read(&self.0.event, &mut [0; 8]);
        self.0.pending.swap(false, Ordering::SeqCst);
        woken.is_ok_and(|(happened, _)| !happened.is_empty())
    }
}

impl Waker {
    /// Ends the present or the next [`Poller::wait`]. Never blocks; a system call only if nobody
    /// has called it since the last one.
    pub(crate) fn wake(&self) {
        if let Some(inner) = self.0.upgrade()
            && !inner.pending.swap(true, Ordering::SeqCst)
        {
            _ = rustix::io::write(&inner.event, &1_u64.to_ne_bytes());
        }
    }

    /// Wakes the poller from now on when a ring that a timer fills has filled to its mark.
    pub(crate) fn watch_timers(&self) -> io::Result<()> {
        timer_event()?;
        let inner = self.0.upgrade().ok_or(io::ErrorKind::BrokenPipe)?;
        let Some(event) = TIMER_EVENT.get() else { return Ok(()) };
        let data = EventData::new_u64(2);
        // Edge-triggered: each write wakes all pollers, and nobody has to read what was written.
        match epoll::add(&inner.epoll, event, data, EventFlags::IN | EventFlags::ET) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes the poller from now on when `ring` has filled to its mark, and when its thread has
    /// ended. Ends when the ring is dropped.
    pub(crate) fn watch(&self, ring: &Ring) -> io::Result<()> {
        let inner = self.0.upgrade().ok_or(io::ErrorKind::BrokenPipe)?;
        // Edge-triggered: the event of a thread that has ended stays "hung up" until dropped.
        ring.with_event(|event| {
            let data = EventData::new_u64(1);
            Ok(epoll::add(&inner.epoll, event, data, EventFlags::IN | EventFlags::ET)?)
        })
    }
}

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
    /// Asked for by [`Waker::wake_soon`].
    soon: AtomicBool,
    broken: AtomicBool,
}

/// How long who is woken soon waits for more to do: a service in which thousands of spans are kept
/// each second would else have a context switch for each.
const SOON: Duration = Duration::from_millis(2);

/// What has happened.
const BY_EVENT: u64 = 0;
const BY_RING: u64 = 1;
const BY_TIMER: u64 = 2;

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
        epoll::add(&epoll, &event, EventData::new_u64(BY_EVENT), EventFlags::IN)?;
        Ok(Self(Arc::new(Inner {
            epoll,
            event,
            pending: AtomicBool::new(false),
            soon: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        })))
    }

    /// Whether it cannot wait any more: somebody has closed files that are not theirs.
    pub(crate) fn is_broken(&self) -> bool {
        self.0.broken.load(Ordering::Relaxed)
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker(Arc::downgrade(&self.0))
    }

    /// Sleeps until a ring has filled to its mark, a thread with a ring has ended, somebody
    /// called [`Waker::wake`], some time after a [`Waker::wake_soon`], or until the time is over;
    /// `None` waits for ever.
    ///
    /// Returns false if nothing but time has passed.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let Inner { epoll, event, pending, soon, broken } = &*self.0;
        let mut timeout = timeout;
        let mut is_soon = false;
        loop {
            let limit = timeout.and_then(|time| Timespec::try_from(time).ok());
            let mut events = [const { std::mem::MaybeUninit::uninit() }; 16];
            // What exactly happened does not matter: a round looks at every thread. An interruption
            // is as good a reason to look as any.
            let woken = epoll::wait(epoll, &mut events, limit.as_ref());
            if !matches!(woken, Ok(_) | Err(Errno::INTR)) {
                broken.store(true, Ordering::Relaxed);
                return true;
            }
            let is_by_event = |(happened, _): &(&mut [epoll::Event], _)| {
                happened.iter().all(|happened| happened.data.u64() == BY_EVENT)
            };
            let is_by_event = woken.as_ref().is_ok_and(is_by_event);
            let is_woken = woken.is_ok_and(|(happened, _)| !happened.is_empty());
            // In this order, or the write of a `wake` between the two would be read away, and every
            // later one think that it need not write. And swaps: they read what the last `wake`
            // wrote before it skipped its write.
            _ = rustix::io::read(event, &mut [0; 8]);
            let can_wait = is_woken && is_by_event && !is_soon;
            if can_wait && !pending.load(Ordering::SeqCst) && soon.load(Ordering::SeqCst) {
                is_soon = true;
                timeout = Some(timeout.map_or(SOON, |time| time.min(SOON)));
                continue;
            }
            // One of these alone, when time has passed just before: its write was read away.
            let is_asked =
                pending.swap(false, Ordering::SeqCst) | soon.swap(false, Ordering::SeqCst);
            return is_asked || is_woken;
        }
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

    /// The same, for what can wait a few milliseconds: a system call only if nobody has called it
    /// meanwhile.
    pub(crate) fn wake_soon(&self) {
        if let Some(inner) = self.0.upgrade()
            && !inner.soon.swap(true, Ordering::SeqCst)
        {
            _ = rustix::io::write(&inner.event, &1_u64.to_ne_bytes());
        }
    }

    /// Wakes the poller from now on when a ring that a timer fills has filled to its mark.
    pub(crate) fn watch_timers(&self) -> io::Result<()> {
        timer_event()?;
        let inner = self.0.upgrade().ok_or(io::ErrorKind::BrokenPipe)?;
        let Some(event) = TIMER_EVENT.get() else { return Ok(()) };
        let data = EventData::new_u64(BY_TIMER);
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
            let data = EventData::new_u64(BY_RING);
            Ok(epoll::add(&inner.epoll, event, data, EventFlags::IN | EventFlags::ET)?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    const NO_TIME: Option<Duration> = Some(Duration::ZERO);
    const PLENTY: Option<Duration> = Some(Duration::from_secs(60));

    #[test]
    fn whoever_is_woken_is_woken_once() {
        let poller = Poller::new().unwrap();
        let waker = poller.waker();
        assert!(!poller.wait(NO_TIME));
        for wakes in [
            [Waker::wake as fn(&Waker), Waker::wake],
            [Waker::wake_soon, Waker::wake_soon],
            [Waker::wake_soon, Waker::wake],
        ] {
            wakes.iter().for_each(|wake| wake(&waker));
            assert!(poller.wait(PLENTY));
            assert!(!poller.wait(NO_TIME));
        }
    }

    #[test]
    fn soon_is_not_at_once() {
        let poller = Poller::new().unwrap();
        let waker = poller.waker();
        let start = Instant::now();
        waker.wake_soon();
        assert!(poller.wait(PLENTY));
        // However busy the machine is.
        assert!(start.elapsed() >= SOON);
    }

    /// Each waits for the one before to be seen, and a wait may end in that very moment.
    #[test]
    fn no_wake_is_lost() {
        const EACH: u64 = 1_000;
        let poller = Poller::new().unwrap();
        let (asked, seen) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (waker, asked, seen) = (poller.waker(), &asked, &seen);
                scope.spawn(move || {
                    for round in 0..EACH {
                        let own = asked.fetch_add(1, Ordering::SeqCst) + 1;
                        match (round + thread) % 3 {
                            0 => waker.wake_soon(),
                            _ => waker.wake(),
                        }
                        let start = Instant::now();
                        while seen.load(Ordering::SeqCst) < own {
                            assert!(start.elapsed() < Duration::from_secs(60), "it was lost");
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let start = Instant::now();
            let mut timeouts = [0, 20, 50, 100].map(Duration::from_micros).into_iter().cycle();
            while seen.load(Ordering::SeqCst) < 3 * EACH {
                assert!(start.elapsed() < Duration::from_secs(120));
                if poller.wait(timeouts.next()) {
                    seen.store(asked.load(Ordering::SeqCst), Ordering::SeqCst);
                }
            }
        });
    }
}

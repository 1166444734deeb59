//! Sleeping, and being woken: by a futex, so that no file is written to that may not be ours any more.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::thread::futex::{self, Flags, Timespec};

use super::own_files::Files;

/// What the collector sleeps on.
#[derive(Debug)]
pub(crate) struct Poller(Arc<Wakeups>, Arc<Files>);

/// Wakes the [`Poller`]. Does nothing once there is none.
#[derive(Clone, Debug)]
pub(crate) struct Waker(Weak<Wakeups>);

#[derive(Debug)]
struct Wakeups {
    /// Moves with every call that must end a sleep.
    word: AtomicU32,
    pending: AtomicBool,
    /// Asked for by [`Waker::wake_soon`].
    soon: AtomicBool,
}

/// How long who is woken soon waits for more to do: a service in which thousands of spans are kept
/// each second would else have a context switch for each.
const SOON: Duration = Duration::from_millis(2);

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        let wakeups = Wakeups {
            word: AtomicU32::new(0),
            pending: AtomicBool::new(false),
            soon: AtomicBool::new(false),
        };
        Ok(Self(Arc::new(wakeups), Arc::new(Files::new()?)))
    }

    /// Files of ours are open as long as the poller lives, if nobody else closes them.
    pub(crate) fn files(&self) -> &Arc<Files> {
        &self.1
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker(Arc::downgrade(&self.0))
    }

    /// Sleeps until somebody called [`Waker::wake`], some time after a [`Waker::wake_soon`], or until the time is over; `None` waits for ever.
    ///
    /// Returns false if nothing but time has passed.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let Wakeups { word, pending, soon, .. } = &*self.0;
        let mut end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut is_soon = false;
        loop {
            // First: what is asked for after we have looked moves it, and then there is no sleep.
            let before = word.load(Ordering::SeqCst);
            if pending.swap(false, Ordering::SeqCst) {
                soon.store(false, Ordering::SeqCst);
                return true;
            }
            if !is_soon && soon.load(Ordering::SeqCst) {
                is_soon = true;
                let soon = Instant::now() + SOON;
                end = Some(end.map_or(soon, |end| end.min(soon)));
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return soon.swap(false, Ordering::SeqCst);
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            // However it ends: what has happened is looked at above.
            _ = futex::wait(word, Flags::PRIVATE, before, left.as_ref());
        }
    }
}

impl Waker {
    /// Ends the present or the next [`Poller::wait`]. Never blocks; a system call only if nobody
    /// has called it since the last one.
    pub(crate) fn wake(&self) {
        if let Some(wakeups) = self.0.upgrade()
            && !wakeups.pending.swap(true, Ordering::SeqCst)
        {
            wakeups.end_sleep();
        }
    }

    /// The same, for what can wait a few milliseconds: a system call only if nobody has called it
    /// meanwhile.
    pub(crate) fn wake_soon(&self) {
        if let Some(wakeups) = self.0.upgrade()
            && !wakeups.soon.swap(true, Ordering::SeqCst)
        {
            wakeups.end_sleep();
        }
    }
}

impl Wakeups {
    fn end_sleep(&self) {
        self.word.fetch_add(1, Ordering::SeqCst);
        _ = futex::wake(&self.word, Flags::PRIVATE, i32::MAX.cast_unsigned());
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

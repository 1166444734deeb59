//! Sleeping and waking. Uses a futex, since the program could have closed a file descriptor and reused its number.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::platform::{Files, futex_wait, futex_wake};

#[derive(Debug)]
pub struct Poller(Arc<Wakeups>, Arc<Files>);

/// Wakes the [`Poller`]. Does nothing once the poller is gone.
#[derive(Clone, Debug)]
pub struct Waker(Weak<Wakeups>);

#[derive(Debug, Default)]
pub(super) struct Wakeups {
    /// Changes with every call that must end a sleep.
    word: AtomicU32,
    pending: AtomicBool,
    /// Requested by [`Waker::wake_soon`].
    soon: AtomicBool,
}

/// How long a sleep continues after [`Waker::wake_soon`], to collect further wake-ups: otherwise a service with
/// thousands of kept spans per second would have a context switch for each.
const SOON: Duration = Duration::from_millis(2);

impl Poller {
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::default(), Arc::new(Files::new()?)))
    }

    /// Shows whether the layer's file descriptors are still its own. Valid as long as the poller lives.
    pub fn files(&self) -> &Arc<Files> {
        &self.1
    }

    pub fn waker(&self) -> Waker {
        Waker(Arc::downgrade(&self.0))
    }

    /// Sleeps until [`Waker::wake`], until some time after [`Waker::wake_soon`], or until the timeout; `None` for none.
    ///
    /// Returns false on a timeout.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let Wakeups { word, pending, soon, .. } = &*self.0;
        let mut end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut is_soon = false;
        loop {
            // Read first: a later request changes the word, so that the sleep ends at once.
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
            // The loop checks what happened, however the sleep ends.
            futex_wait(word, before, left);
        }
    }
}

impl Waker {
    /// For a signal handler, which must not free memory. `None` once the poller is gone.
    #[allow(dead_code, reason = "only Linux has such handlers")]
    pub(super) fn hold(&self) -> Option<Arc<Wakeups>> {
        self.0.upgrade()
    }

    /// Ends the current or the next [`Poller::wait`]. Never blocks. A system call only if it is the first since the last sleep.
    pub fn wake(&self) {
        self.0.upgrade().iter().for_each(|wakeups| wakeups.wake());
    }

    /// Like [`wake`](Self::wake), for events that can wait for some milliseconds. One system call at most per sleep.
    pub fn wake_soon(&self) {
        if let Some(wakeups) = self.0.upgrade()
            && !wakeups.soon.swap(true, Ordering::SeqCst)
        {
            wakeups.end_sleep();
        }
    }
}

impl Wakeups {
    pub(super) fn wake(&self) {
        if !self.pending.swap(true, Ordering::SeqCst) {
            self.end_sleep();
        }
    }

    fn end_sleep(&self) {
        self.word.fetch_add(1, Ordering::SeqCst);
        futex_wake(&self.word);
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
    fn several_wakes_end_one_wait() {
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
    fn wake_soon_waits_for_further_wakes() {
        let poller = Poller::new().unwrap();
        let waker = poller.waker();
        let start = Instant::now();
        waker.wake_soon();
        assert!(poller.wait(PLENTY));
        // This holds however busy the machine is.
        assert!(start.elapsed() >= SOON);
    }

    /// Each thread waits until its request is observed, and a sleep may end at that moment.
    #[test]
    fn no_wake_is_lost() {
        const EACH: u64 = 1_000;
        let poller = Poller::new().unwrap();
        let (requested, observed) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (waker, requested, observed) = (poller.waker(), &requested, &observed);
                scope.spawn(move || {
                    for round in 0..EACH {
                        let own = requested.fetch_add(1, Ordering::SeqCst) + 1;
                        match (round + thread) % 3 {
                            0 => waker.wake_soon(),
                            _ => waker.wake(),
                        }
                        let start = Instant::now();
                        while observed.load(Ordering::SeqCst) < own {
                            assert!(start.elapsed() < Duration::from_secs(60), "a wake was lost");
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let start = Instant::now();
            let mut timeouts = [0, 20, 50, 100].map(Duration::from_micros).into_iter().cycle();
            while observed.load(Ordering::SeqCst) < 3 * EACH {
                assert!(start.elapsed() < Duration::from_secs(120));
                if poller.wait(timeouts.next()) {
                    observed.store(requested.load(Ordering::SeqCst), Ordering::SeqCst);
                }
            }
        });
    }
}

//! The end of a layer's delivery, for which its handles wait even if the layer was dropped.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::job::FlushResult;
use super::reporter::Reporter;
use crate::error::{FlushError, FlushStage};
use crate::span::is_ignored;
use crate::sys::{self, Uncounted};

/// The exporting thread answers at the deadline, with what it could not deliver.
pub(crate) const ANSWERED_WITHIN: Duration = Duration::from_millis(20);

// Not the lock of `parking_lot`, as in `queue.rs`.
#[derive(Debug)]
pub(crate) struct Ending {
    answer: Mutex<Option<FlushResult>>,
    is_over: Condvar,
    /// Gone once it has reported everything.
    reporter: Weak<Reporter>,
    /// The fork generation of the process that delivers.
    made_in: u32,
}

impl Ending {
    pub(crate) fn new(reporter: Weak<Reporter>) -> Self {
        let made_in = sys::fork_generation();
        Self { answer: Mutex::default(), is_over: Condvar::new(), reporter, made_in }
    }

    /// Everything is delivered, or lost for this reason. Only the first answer counts.
    pub(super) fn set(&self, ended: FlushResult) {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(ended);
        self.is_over.notify_all();
    }

    /// Waits until everything is delivered and reported.
    pub(crate) fn wait(&self, deadline: Instant) -> FlushResult {
        // Its lock may be held forever there.
        if self.made_in != sys::fork_generation() {
            return Err(FlushError::Forked);
        }
        let _uncounted = Uncounted::begin();
        let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        let delivered = loop {
            if let Some(known) = &*answer {
                break known.clone();
            }
            if is_ignored() {
                return Err(FlushError::OwnThread);
            }
            let answered_by = deadline + ANSWERED_WITHIN;
            let left = answered_by.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(FlushError::Timeout(FlushStage::Collection));
            }
            let woken = self.is_over.wait_timeout(answer, left);
            (answer, _) = woken.unwrap_or_else(PoisonError::into_inner);
        };
        drop(answer);
        let is_reported = |reporter: Arc<Reporter>| is_ignored() || reporter.wait(deadline);
        if !self.reporter.upgrade().is_none_or(is_reported) {
            return delivered.and(Err(FlushError::Timeout(FlushStage::Reports)));
        }
        delivered
    }
}

/// Its thread may end in any way.
#[derive(Debug)]
pub(super) struct EndsWithThread(pub(super) Arc<Ending>);

impl Drop for EndsWithThread {
    fn drop(&mut self) {
        self.0.set(Err(FlushError::Ended));
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn the_first_answer_is_that_of_all_who_wait() {
        let ending = Arc::new(Ending::new(Weak::new()));
        let late = Err(FlushError::Timeout(FlushStage::Collection));
        assert_eq!(ending.wait(Instant::now()), late);
        let start = Instant::now();
        let wait = || ending.wait(start + Duration::from_secs(600));
        thread::scope(|scope| {
            let waiting = [scope.spawn(wait), scope.spawn(wait)];
            let lost = Err(FlushError::ProfilesLost(2));
            ending.set(lost.clone());
            drop(EndsWithThread(Arc::clone(&ending)));
            for one in waiting {
                assert_eq!(one.join().unwrap(), lost);
            }
            assert_eq!(ending.wait(Instant::now()), lost);
        });
        assert!(start.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_thread_that_fails_is_an_answer() {
        let ending = Arc::new(Ending::new(Weak::new()));
        drop(EndsWithThread(Arc::clone(&ending)));
        assert_eq!(ending.wait(Instant::now()), Err(FlushError::Ended));
    }

    #[test]
    fn a_thread_of_the_layer_does_not_wait_for_itself() {
        let ending = Arc::new(Ending::new(Weak::new()));
        let of_layer = Arc::clone(&ending);
        let deadline = Instant::now() + Duration::from_secs(60);
        let (answer, answered) = std::sync::mpsc::channel();
        let wait = move || answer.send(of_layer.wait(deadline)).unwrap();
        crate::span::spawn_ignored("ignored", wait).unwrap();
        assert_eq!(answered.recv().unwrap(), Err(FlushError::OwnThread));
    }
}

//! The end of a layer's delivery, for which its handles wait even if the layer was dropped.

use std::convert::Infallible;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};

use super::job::FlushResult;
use super::reporter::Reporter;
use crate::error::{FlushError, FlushStage};
use crate::span::is_ignored;
use crate::sys::{self, SuspendCounting};

/// The exporting thread answers at the deadline, with what it could not deliver.
pub(crate) const ANSWERED_WITHIN: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct ShutdownResult {
    /// Whether everything is delivered. None if the thread that delivers has failed.
    pub(super) answer: OnceLock<FlushResult>,
    /// Closed when that thread ends, in any way.
    is_over: Receiver<Infallible>,
    /// Gone once it has reported everything.
    reporter: Weak<Reporter>,
    /// The fork generation of the process that delivers.
    made_in: u32,
}

impl ShutdownResult {
    /// The second value is dropped by the thread that delivers, at its end.
    pub(crate) fn new(reporter: Weak<Reporter>) -> (Self, Sender<Infallible>) {
        let ((delivers, is_over), made_in) = (channel::bounded(0), sys::Forks::generation());
        (Self { answer: OnceLock::new(), is_over, reporter, made_in }, delivers)
    }

    pub(crate) fn wait(&self, deadline: Instant) -> FlushResult {
        // Locks may be held forever there.
        if self.made_in != sys::Forks::generation() {
            return Err(FlushError::Forked);
        }
        let _uncounted = SuspendCounting::begin();
        if is_ignored() && self.answer.get().is_none() {
            return Err(FlushError::OwnThread);
        }
        if self.is_over.recv_deadline(deadline + ANSWERED_WITHIN) == Err(RecvTimeoutError::Timeout)
        {
            return Err(FlushError::Timeout(FlushStage::Collection));
        }
        let delivered = self.answer.get().cloned().unwrap_or(Err(FlushError::Ended));
        let is_reported = |reporter: Arc<Reporter>| is_ignored() || reporter.wait(deadline);
        if !self.reporter.upgrade().is_none_or(is_reported) {
            return delivered.and(Err(FlushError::Timeout(FlushStage::Reports)));
        }
        delivered
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn the_first_answer_is_that_of_all_who_wait() {
        let (ending, delivers) = ShutdownResult::new(Weak::new());
        let late = Err(FlushError::Timeout(FlushStage::Collection));
        assert_eq!(ending.wait(Instant::now()), late);
        let start = Instant::now();
        let wait = || ending.wait(start + Duration::from_secs(600));
        thread::scope(|scope| {
            let waiting = [scope.spawn(wait), scope.spawn(wait)];
            let lost = Err(FlushError::ProfilesLost(2));
            ending.answer.set(lost.clone()).unwrap();
            drop(delivers);
            for one in waiting {
                assert_eq!(one.join().unwrap(), lost);
            }
            assert_eq!(ending.wait(Instant::now()), lost);
        });
        assert!(start.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_thread_that_fails_is_an_answer() {
        let (ending, delivers) = ShutdownResult::new(Weak::new());
        drop(delivers);
        assert_eq!(ending.wait(Instant::now()), Err(FlushError::Ended));
    }

    #[test]
    fn a_thread_of_the_layer_does_not_wait_for_itself() {
        let (of_layer, _delivers) = ShutdownResult::new(Weak::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        let (answer, answered) = std::sync::mpsc::channel();
        let wait = move || answer.send(of_layer.wait(deadline)).unwrap();
        crate::span::spawn_ignored("ignored", wait).unwrap();
        assert_eq!(answered.recv().unwrap(), Err(FlushError::OwnThread));
    }
}

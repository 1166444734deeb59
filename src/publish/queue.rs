//! A bounded queue to one thread, which may block forever: a thread that adds to it never waits.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

// Not the locks of `parking_lot`, whose table lists who waits: a forked child, without those, finds them in its copy.
#[derive(Debug)]
pub(super) struct Queue<T> {
    state: Mutex<QueueState<T>>,
    has_more: Condvar,
    is_done: Condvar,
    most: usize,
}

#[derive(Debug)]
struct QueueState<T> {
    /// Each with its size.
    items: VecDeque<(T, usize)>,
    size: usize,
    added: u64,
    done: u64,
    is_closed: bool,
}

impl<T> Queue<T> {
    pub(super) fn new(most: usize) -> Self {
        let items = VecDeque::new();
        let state = QueueState { items, size: 0, added: 0, done: 0, is_closed: false };
        let (has_more, is_done) = (Condvar::new(), Condvar::new());
        Self { state: Mutex::new(state), has_more, is_done, most }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an item, unless it has no room or the queue is closed. Returns whether it was added.
    pub(super) fn add(&self, item: T, size: usize) -> bool {
        let mut state = self.lock();
        // One that is larger than the whole queue fits into an empty one.
        let is_full = !state.items.is_empty() && state.size.saturating_add(size) > self.most;
        if is_full || state.is_closed {
            return false;
        }
        state.items.push_back((item, size));
        state.size += size;
        state.added += 1;
        drop(state);
        self.has_more.notify_one();
        true
    }

    /// Waits for the next item; the one before is done. `None` once the queue is closed and empty.
    pub(super) fn next(&self) -> Option<T> {
        let mut state = self.lock();
        state.done = state.added - state.items.len() as u64;
        self.is_done.notify_all();
        loop {
            if let Some((item, size)) = state.items.pop_front() {
                state.size -= size;
                return Some(item);
            }
            if state.is_closed {
                return None;
            }
            state = self.has_more.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().items.is_empty()
    }

    /// Ends the thread once it has done what was added before.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.has_more.notify_one();
    }

    /// Waits until everything that was added before is done. Returns whether it is.
    pub(super) fn wait(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        let added = state.added;
        while state.done < added {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let woken = self.is_done.wait_timeout(state, left);
            (state, _) = woken.unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    #[cfg(test)]
    pub(super) fn take_all(&self) -> Vec<T> {
        let mut state = self.lock();
        state.size = 0;
        state.done = state.added;
        state.items.drain(..).map(|(item, _)| item).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    const PLENTY: Duration = Duration::from_secs(60);

    #[test]
    fn it_holds_no_more_than_its_size_and_gives_what_it_holds_in_order() {
        for most in [1, 2, 7, 64] {
            let queue = Queue::new(most);
            assert_eq!((0..100).filter(|n| queue.add(*n, 1)).count(), most);
            let all: Vec<_> = (0..most).map_while(|_| queue.next()).collect();
            assert_eq!(all, (0..i32::try_from(most).unwrap()).collect::<Vec<_>>());
            assert!(queue.add(0, 1_000), "into an empty queue");
            assert!(!queue.add(0, 0) || most >= 1_000, "it is full");
            queue.close();
            assert!(!queue.add(0, 1), "it is closed");
            assert_eq!((queue.next(), queue.next()), (Some(0), None));
        }
    }

    #[test]
    fn a_wait_ends_when_all_that_came_before_is_done_or_at_its_deadline() {
        let queue = Arc::new(Queue::new(8));
        assert!(queue.wait(Instant::now()), "nothing was added");
        assert!(queue.add((), 1) && queue.add((), 1));
        assert!(!queue.wait(Instant::now()));
        assert!(queue.next().is_some() && queue.next().is_some());
        assert!(!queue.wait(Instant::now() + Duration::from_millis(1)), "the last one is not done");
        let thread = thread::spawn({
            let queue = Arc::clone(&queue);
            move || assert!(queue.next().is_none())
        });
        assert!(queue.wait(Instant::now() + PLENTY));
        queue.close();
        thread.join().unwrap();
    }
}

//! How many spans were created.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::utils::CachePadded;

/// The number of spans created, by thread.
#[derive(Debug, Default)]
pub(super) struct SpanCounts {
    threads: Vec<Arc<CachePadded<AtomicU64>>>,
    /// By threads that have ended.
    before: u64,
    /// At how many threads those that have ended are forgotten: twice as many as were left the last time.
    most: usize,
}

impl SpanCounts {
    pub(super) fn add(&mut self, thread: &Arc<CachePadded<AtomicU64>>) {
        const LEAST: usize = 64;
        if self.threads.len() >= self.most.max(LEAST) {
            self.forget_ended();
            self.most = 2 * self.threads.len();
        }
        self.threads.push(Arc::clone(thread));
    }

    pub(super) fn sum(&self) -> u64 {
        let threads = self.threads.iter().map(|thread| thread.load(Ordering::Relaxed));
        self.before + threads.sum::<u64>()
    }

    fn forget_ended(&mut self) {
        let before = &mut self.before;
        self.threads.retain(|seen| {
            let lives = Arc::strong_count(seen) > 1;
            *before += if lives { 0 } else { seen.load(Ordering::Relaxed) };
            lives
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each new thread looks at a bounded number of others, however many there are.
    #[test]
    fn ended_threads_are_forgotten_now_and_then_and_their_spans_still_count() {
        let mut counts = SpanCounts::default();
        let lives: Vec<_> =
            (0..100).map(|_| Arc::new(CachePadded::new(AtomicU64::new(1)))).collect();
        lives.iter().for_each(|thread| counts.add(thread));
        let (mut most, mut forgotten) = (0, 0);
        for _ in 0..10_000 {
            let before = counts.threads.len();
            counts.add(&Arc::new(CachePadded::new(AtomicU64::new(3))));
            most = most.max(counts.threads.len());
            forgotten += usize::from(counts.threads.len() <= before);
        }
        assert_eq!(counts.sum(), 100 + 3 * 10_000);
        assert!(most <= 2 * 101 + 1, "{most}");
        assert!(forgotten <= 10_000 / 99, "checked all of them {forgotten} times");
    }
}

//! What the handle asks of the collector.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Engine;
use super::command::{Command, HeapRequest, NoHeap, OpenRequest};
use crate::profile::Profile;
use crate::publish::{FlushRequest, OpenSpan, Questions};
use crate::sinks::HeapPart;
use crate::span::is_ignored;
use crate::sys;

/// How long the caller waits for the layer's threads.
const LONGEST: Duration = Duration::from_secs(10);
/// The same for a heap, whose symbols they read.
const LONGEST_OF_HEAP: Duration = Duration::from_secs(30);

impl Engine {
    /// Exports and reports what has been kept so far. Returns whether that was done before the deadline.
    pub(crate) fn flush(&self, deadline: Instant) -> bool {
        let Some((done, wait)) = self.commands.flushes.ask() else { return false };
        let waiting = FlushRequest { done, deadline };
        if !self.ask(Command::Flush(waiting)) {
            return false;
        }
        let is_delivered = wait.recv_deadline(deadline) == Ok(true);
        self.publish.reporter.wait(deadline) && is_delivered
    }

    /// The same as [`flush`](Self::flush) with that deadline, then reports what is lost and stops everything. Waits for
    /// that until `return_by`.
    pub(crate) fn shutdown(&self, deadline: Instant, return_by: Instant) -> bool {
        // Not limited: there is one.
        let Some((done, wait)) = Questions::default().ask() else { return false };
        let waiting = FlushRequest { done, deadline };
        if !self.ask(Command::Shutdown(Some(waiting))) {
            return false;
        }
        let is_delivered = wait.recv_deadline(return_by) == Ok(true);
        self.publish.reporter.wait(return_by) && is_delivered
    }

    /// Stops everything once the kept spans are exported, without waiting for that.
    pub(crate) fn shutdown_later(&self) {
        self.ask(Command::Shutdown(None));
    }

    fn ask(&self, command: Command) -> bool {
        let is_waited_for = !matches!(command, Command::Shutdown(None));
        // In a forked child no thread would answer, and the layer's own threads would wait for themselves.
        if !self.is_running() || (is_ignored() && is_waited_for) {
            return false;
        }
        let sent = self.commands.to_collector.send(command).is_ok();
        self.waker.wake();
        sent
    }

    /// The profiled spans that have been open for longer than that; `None` if the layer's threads do not answer in time.
    pub(crate) fn open_spans(&self, older_than: Duration) -> Option<Vec<OpenSpan>> {
        let (reply, wait) = self.commands.questions.ask()?;
        let deadline = Instant::now() + LONGEST;
        let asked = self.ask(Command::FindOpen(OpenRequest { older_than, reply }));
        wait.recv_deadline(deadline).ok().filter(|_| asked)
    }

    /// The profile of the live heap.
    pub(crate) fn heap_profile(&self, part: HeapPart) -> Result<Profile, NoHeap> {
        /// One at a time: each takes memory and the time of the layer's threads.
        static ASKING: Mutex<()> = Mutex::new(());
        if !self.is_heap_tracked() {
            return Err(NoHeap::NotTracked);
        }
        let deadline = Instant::now() + LONGEST_OF_HEAP;
        let _asking = ASKING.try_lock_until(deadline).ok_or(NoHeap::NoAnswer)?;
        let (reply, wait) = self.commands.questions.ask().ok_or(NoHeap::NoAnswer)?;
        let is_taken = Arc::new(AtomicBool::new(false));
        let request = HeapRequest { part, reply, is_taken: Arc::clone(&is_taken) };
        if !self.ask(Command::Heap(request)) {
            return Err(NoHeap::NoAnswer);
        }
        let profile = wait.recv_deadline(deadline).map_err(|_| NoHeap::NoAnswer)?;
        is_taken.store(true, Ordering::Relaxed);
        Ok(profile)
    }

    /// Whether the live heap is tracked.
    fn is_heap_tracked(&self) -> bool {
        self.copied.allocations.tracks_heap() && sys::counts_allocations()
    }

    /// Tracks the heap if no other layer does that any more. Once rules are off and all spans have closed, nothing else
    /// needs to know what is allocated.
    pub(crate) fn update_counting(&self) {
        if self.copied.allocations.can_claim_heap() {
            // Blocks are tracked only while all frees are counted.
            self.gate.set_counts_allocations(true);
            self.copied.allocations.claim_heap();
        }
        let is_counting = self.gate.counts_allocations() && !self.is_heap_tracked();
        if is_counting && self.callsites.are_off() && !self.spans.has_any_open() {
            self.gate.set_counts_allocations(false);
            // New rules may have been set in the meantime.
            if !self.callsites.are_off() {
                self.gate.set_counts_allocations(true);
            }
        }
    }
}

//! What the handler writes when a timer on the CPU time of the process expires, on whichever thread ran.
//!
//! Several threads can be in it at once, so there are a few rings, each of which one of them takes.
#![allow(
    unsafe_code,
    reason = "is called by a signal handler, and asks for the name of a thread without allocating"
)]

use std::ffi::c_int;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::calls::may;
use super::clock::thread_cpu_ns;
use super::context::RawRegisters;
use super::poll::HeldWaker;
use super::process_id;
use super::ring::{MOST_READ, RingMemory};
use super::thread::current_tid;
use super::thread_table::ThreadTable;
use crate::sys::types::{FilteredSyscall, IS_NO_CLOCK, ProcessLosses, SampleRequest};

/// More threads are rarely in the handler at once: it takes some 10 µs, and the timer expires at the kernel's ticks.
const RINGS: usize = 4;

/// The rings, and what the handler needs beside them.
#[derive(Debug)]
pub(super) struct ProcessRings {
    rings: Vec<ProcessRing>,
    pub(super) threads: ThreadTable,
    period_ns: u64,
    stack_bytes: u64,
    process: u32,
    /// Wakes the collector once a ring is half full.
    waker: HeldWaker,
    all_taken: AtomicU64,
    full: AtomicU64,
    unreadable: AtomicU64,
}

#[derive(Debug)]
struct ProcessRing {
    memory: RingMemory,
    /// By a handler, which is then the only writer.
    is_taken: AtomicBool,
}

enum RingOutcome {
    Written,
    Full,
    Unreadable,
}

impl ProcessRings {
    /// `request` has the time between samples, and the bytes of each ring and of the stack in each sample.
    pub(super) fn new(request: SampleRequest, waker: HeldWaker) -> io::Result<Self> {
        let ring = |_| {
            let memory = RingMemory::anonymous(request.ring_bytes)?;
            Ok(ProcessRing { memory, is_taken: AtomicBool::new(false) })
        };
        Ok(Self {
            rings: (0..RINGS).map(ring).collect::<io::Result<_>>()?,
            threads: ThreadTable::new(),
            period_ns: request.period_ns,
            stack_bytes: u64::from(request.stack_bytes),
            process: process_id(),
            waker,
            all_taken: AtomicU64::new(0),
            full: AtomicU64::new(0),
            unreadable: AtomicU64::new(0),
        })
    }

    pub(super) fn memories(&self) -> impl Iterator<Item = &RingMemory> {
        self.rings.iter().map(|ring| &ring.memory)
    }

    /// What was lost since the last call, in samples.
    pub(super) fn take_losses(&self) -> ProcessLosses {
        let take = |count: &AtomicU64| count.swap(0, Ordering::Relaxed);
        ProcessLosses {
            all_taken: take(&self.all_taken),
            full: take(&self.full),
            unreadable: take(&self.unreadable),
        }
    }

    /// What the handler calls.
    ///
    /// # Safety
    ///
    /// `rings` must point to such rings.
    pub(super) unsafe fn on_signal(
        rings: *const (),
        registers: &RawRegisters,
        sp: u64,
        overrun: c_int,
    ) {
        // SAFETY: the caller's.
        unsafe { &*rings.cast::<Self>() }.sample(registers, sp, overrun);
    }

    /// For the handler, on the thread that ran: writes a sample to the first ring that no other handler has taken.
    pub(super) fn sample(&self, registers: &RawRegisters, sp: u64, overrun: c_int) {
        let mut losses = &self.all_taken;
        for ring in &self.rings {
            // Acquire: what the last writer has written, it has written before.
            if ring.is_taken.swap(true, Ordering::Acquire) {
                continue;
            }
            let outcome = self.write(&ring.memory, registers, sp, overrun);
            ring.is_taken.store(false, Ordering::Release);
            match outcome {
                RingOutcome::Written => return,
                // Another one may have room.
                RingOutcome::Full => losses = &self.full,
                RingOutcome::Unreadable => {
                    losses = &self.unreadable;
                    break;
                }
            }
        }
        losses.fetch_add(1, Ordering::Relaxed);
    }

    /// The record of a timer's sample, and after it the thread's span and name.
    fn write(
        &self,
        memory: &RingMemory,
        registers: &RawRegisters,
        sp: u64,
        overrun: c_int,
    ) -> RingOutcome {
        let before_stack = 8 * (5 + registers.len() as u64);
        let after_stack = 8 * AFTER_STACK;
        let most = MOST_READ.min(self.stack_bytes) & !7;
        let mut writer = memory.writer();
        if !writer.has_room(before_stack + most + after_stack) {
            self.waker.wake();
            return RingOutcome::Full;
        }
        // A hook may have found that a filter would end the process at the call.
        let may_read = may(FilteredSyscall::ProcessVmReadv);
        let used = if may_read { writer.read_ahead(before_stack, sp, most) & !7 } else { 0 };
        if used == 0 {
            return RingOutcome::Unreadable;
        }
        let (tid, size) = (current_tid(), before_stack + used + after_stack);
        let span = self.threads.tick(tid);
        let [name, rest] = current_name();
        let ids = u64::from(tid) << 32 | u64::from(self.process);
        writer.begin_sample(size, ids, registers, used);
        writer.skip(used);
        writer.word(used);
        writer.word(self.weight(overrun));
        writer.word(span);
        writer.word(name);
        writer.word(rest);
        let is_half_full = writer.used() > memory.data_size() as u64 / 2;
        writer.publish();
        if is_half_full {
            self.waker.wake();
        }
        RingOutcome::Written
    }

    /// The thread's CPU clock, so that its samples add up to that. The signals alone do not: of the cores that run, the one
    /// whose tick comes first gets most of them. Where the clock cannot be read, the CPU time that the signal represents:
    /// timers on CPU time expire at the kernel's ticks, so that can be several periods.
    fn weight(&self, overrun: c_int) -> u64 {
        let clock_ns = may(FilteredSyscall::ClockGettime).then(thread_cpu_ns).flatten();
        let periods = || 1_u64.saturating_add(overrun.max(0) as u64);
        clock_ns.unwrap_or_else(|| self.period_ns.saturating_mul(periods()) | IS_NO_CLOCK)
    }
}

/// The words after the stack: its length, the weight, the span and the name.
const AFTER_STACK: u64 = 5;

/// The name of the calling thread, padded with zeros.
fn current_name() -> [u64; 2] {
    let mut name = [0_u64; 2];
    // SAFETY: the kernel writes 16 bytes there, and nothing else.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::context::RawRegisters;
    use super::super::poll::Poller;
    use super::*;

    const REGISTERS: RawRegisters = [9; size_of::<RawRegisters>() / 8];
    /// What the handler finds as the thread's stack.
    static STACK: [u64; 1_024] = [7; 1_024];

    fn rings(poller: &Poller) -> ProcessRings {
        let request = SampleRequest {
            period_ns: 5,
            stack_bytes: 4_096,
            ring_bytes: 1 << 16,
            ..SampleRequest::default()
        };
        ProcessRings::new(request, poller.waker().hold().unwrap()).unwrap()
    }

    fn sample(rings: &ProcessRings, overrun: c_int) {
        rings.sample(&REGISTERS, STACK.as_ptr().addr() as u64, overrun);
    }

    fn heads(rings: &ProcessRings) -> Vec<u64> {
        rings.memories().map(RingMemory::head).collect()
    }

    #[test]
    fn threads_that_are_sampled_at_once_write_to_rings_of_their_own() {
        let poller = Poller::new().unwrap();
        let rings = rings(&poller);
        sample(&rings, 0);
        let one = heads(&rings)[0];
        assert_eq!(heads(&rings), [one, 0, 0, 0]);
        // The first thread has not returned.
        rings.rings[0].is_taken.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| _ = scope.spawn(|| sample(&rings, 3)));
        assert_eq!(heads(&rings), [one, one, 0, 0]);
        let second = rings.memories().nth(1).unwrap();
        let word = |at: u64| {
            let mut bytes = [0; 8];
            second.copy(at, &mut bytes);
            u64::from_ne_bytes(bytes)
        };
        let clock_ns = word(one - 8 * 4);
        assert!(clock_ns > 0 && clock_ns & IS_NO_CLOCK == 0, "{clock_ns}");
        assert_eq!(word(one - 8 * 3), 0, "in no span");
        rings.rings.iter().for_each(|ring| ring.is_taken.store(true, Ordering::Relaxed));
        sample(&rings, 0);
        rings.rings.iter().for_each(|ring| ring.is_taken.store(false, Ordering::Relaxed));
        rings.sample(&REGISTERS, 8, 0);
        assert_eq!(heads(&rings), [one, one, 0, 0]);
        let lost = ProcessLosses { all_taken: 1, full: 0, unreadable: 1 };
        assert_eq!(rings.take_losses(), lost);
        assert_eq!(rings.take_losses(), ProcessLosses::default());
    }

    #[test]
    fn the_collector_is_woken_when_a_ring_is_half_full_and_samples_are_lost_when_all_are_full() {
        let poller = Poller::new().unwrap();
        let rings = rings(&poller);
        let wakes = || poller.wait(Some(Duration::ZERO));
        sample(&rings, 0);
        let one = heads(&rings)[0];
        let each = (1 << 16) / one;
        (1..each / 2).for_each(|_| sample(&rings, 0));
        assert!(!wakes(), "{:?}", heads(&rings));
        sample(&rings, 0);
        assert!(wakes());
        (0..each * RINGS as u64).for_each(|_| sample(&rings, 0));
        assert_eq!(heads(&rings), [each * one; RINGS]);
        assert_eq!(rings.take_losses().full, each / 2 + 1);
        let first = rings.memories().next().unwrap();
        first.release_to(first.head());
        sample(&rings, 0);
        assert_eq!(heads(&rings)[0], (each + 1) * one);
    }
}

//! Sampling all threads of the process with one timer.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::blocked::{cpu_ns_of, own_threads, status_of};
use super::clock::process_cpu_ns;
use super::poll::Waker;
use super::process_rings::ProcessRings;
use super::ring::RingMemory;
use super::signal::{lock_signal, unblock};
use super::thread::current_tid;
use super::timer::Timer;
use crate::sys::types::{ProcessLosses, PublishesSpan, SampleRequest, WhyRefused};

/// A timer on the CPU time of the process. Its signal goes to the process, and the kernel prefers the thread that runs
/// (since 6.4; before that, the first thread).
#[derive(Debug)]
pub(crate) struct ProcessTimer {
    rings: Arc<ProcessRings>,
    period_ns: u64,
    /// None once it has ended.
    timer: Mutex<Option<Timer>>,
}

/// The signal of such timers; 0 before the first one.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// How many there are.
static TIMERS: AtomicUsize = AtomicUsize::new(0);

/// Whether any thread of the process may get the signal of such a timer.
pub(crate) fn has_process_timer() -> bool {
    TIMERS.load(Ordering::Relaxed) > 0
}

/// Threads that block the signal and use a larger part of the CPU time make others get it that are asleep.
const MOST_BLOCKED: u64 = 50;
/// Less than this says nothing.
const LEAST_BLOCKED_NS: u64 = 100_000_000;

/// Why such a timer would harm the process as its threads are now: the handler's calls may end it on a thread with
/// other seccomp filters than the calling one, and a thread that blocks the signal passes it on. It may do so for a moment
/// only, for what must not be interrupted.
pub(crate) fn why_no_process_timer() -> Option<WhyRefused> {
    let own = status_of(current_tid())?;
    let (signal, mut blocked_ns) = (*lock_signal(), 0_u64);
    for tid in own_threads().unwrap_or_default() {
        let Some(status) = status_of(tid) else { continue };
        if status.filters != own.filters {
            return Some(WhyRefused::KilledBySeccomp);
        }
        if !status.is_of_layer && status.is_blocked_by_program(signal) {
            blocked_ns = blocked_ns.saturating_add(cpu_ns_of(tid).unwrap_or(0));
        }
    }
    let is_much =
        blocked_ns > LEAST_BLOCKED_NS && blocked_ns > process_cpu_ns().unwrap_or(0) / MOST_BLOCKED;
    is_much.then_some(WhyRefused::SignalBlocked)
}

/// Lets one of the layer's own threads be sampled as the others, if the process is: the kernel would send the signals of
/// its CPU time to another thread, which may be asleep.
pub(crate) fn admit_process_timer() {
    let signal = SIGNAL.load(Ordering::Relaxed);
    if signal != 0 {
        unblock(signal);
    }
}

impl ProcessTimer {
    /// Creates it. No signal is sent before [`start`](Self::start).
    pub(crate) fn open(request: SampleRequest, waker: &Waker) -> Result<Self, WhyRefused> {
        let waker = waker.hold().ok_or(WhyRefused::NotAsked)?;
        let rings = ProcessRings::new(request, waker).map_err(|_| WhyRefused::NoMemory)?;
        let rings = Arc::new(rings);
        let given = Arc::as_ptr(&rings).cast();
        let timer = Timer::of_process(request.signal, given, ProcessRings::on_signal)?;
        SIGNAL.store(timer.signal, Ordering::Relaxed);
        TIMERS.fetch_add(1, Ordering::Relaxed);
        Ok(Self { rings, period_ns: request.period_ns, timer: Mutex::new(Some(timer)) })
    }

    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        // Random, so that all points of a short time are equally likely to be sampled.
        let first_ns = 1 + RandomState::new().hash_one(self.period_ns) % self.period_ns.max(1);
        self.timer.lock().as_ref().map_or(Ok(()), |timer| timer.set(first_ns, self.period_ns))
    }

    /// The rings, which hold records as those of a timer, and after them the thread's span and name.
    pub(crate) fn rings(&self) -> impl Iterator<Item = &RingMemory> {
        self.rings.memories()
    }

    /// Samples have the span of this thread from now on. Returns false if there are too many threads.
    pub(crate) fn add_thread(&self, thread: Arc<dyn PublishesSpan>) -> bool {
        self.rings.threads.add(thread, || self.is_quiet())
    }

    pub(crate) fn forget_ended_threads(&self) {
        self.rings.threads.forget_ended(|| self.is_quiet());
    }

    fn is_quiet(&self) -> bool {
        self.timer.lock().as_ref().is_some_and(Timer::is_quiet)
    }

    /// What was lost since the last call.
    pub(crate) fn take_losses(&self) -> ProcessLosses {
        self.rings.take_losses()
    }

    /// Whether its signal has another handler by now.
    pub(crate) fn has_lost_signal(&self) -> bool {
        self.timer.lock().as_ref().is_some_and(Timer::has_lost_signal)
    }

    /// Ends the sampling. The records stay in the rings.
    pub(crate) fn stop(&self) {
        let Some(timer) = self.timer.lock().take() else { return };
        TIMERS.fetch_sub(1, Ordering::Relaxed);
        if !timer.end() {
            // A handler may still write to the rings.
            std::mem::forget(Arc::clone(&self.rings));
        }
    }
}

impl Drop for ProcessTimer {
    fn drop(&mut self) {
        // Timers are not copied into a forked child.
        if self.rings().all(|ring| ring.home().is_current()) {
            self.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32};
    use std::thread;

    use super::*;
    use crate::sys::signal_of_timers;

    #[test]
    #[cfg(target_env = "gnu")]
    fn a_thread_that_creates_others_blocks_no_signals() {
        // A signal is chosen.
        signal_of_timers(None).unwrap();
        let signal = *lock_signal();
        let (tid, is_over) = (AtomicU32::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                tid.store(current_tid(), Ordering::Relaxed);
                while !is_over.load(Ordering::Relaxed) {
                    thread::spawn(|| {}).join().unwrap();
                }
            });
            let status = || status_of(tid.load(Ordering::Relaxed)).unwrap_or_default();
            let mut seen = 0;
            while seen < 20 {
                let status = status();
                assert!(!status.is_blocked_by_program(signal), "{status:?}");
                seen += u32::from(status.blocks(signal));
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }
}

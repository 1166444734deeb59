//! Sampling threads with perf events.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::counters::{HardwareCounts, parse_group};
use super::record::{LEAST_STACK, Layout, Machine};
use super::switches::SwitchLog;
use crate::span::{Armed, Interval, Recording, ThreadSource, Usage};
use crate::stats::Counters;
use crate::sys::{
    self, Clock, HardwareCounters, KeptOn, NotReplaced, Position, Ring, SampleRequest, Waker,
    WhyRefused,
};

/// Opens perf events for threads.
#[derive(Debug)]
pub(super) struct Perf {
    request: SampleRequest,
    waker: Waker,
    counters: Arc<Counters>,
    /// That are open for threads, and those of events that have taken the place of another.
    files: AtomicU64,
    more_files: AtomicU64,
    most_files: u64,
    files_per_thread: u64,
    /// Why no thread at all can be sampled, if none can.
    refused: Option<WhyRefused>,
    kept_on: Mutex<Option<KeptOn>>,
    has_hardware: bool,
}

/// 256 records: a thread that was switched more often between two hooks has its off-CPU time
/// derived.
const SWITCH_RING_BYTES: usize = 4096;

/// Of the files that the process may open, the part that we may use is one in this.
const SHARE_OF_FILES: u64 = 8;
const FILES_PER_THREAD: u64 = 2;
const FILES_OF_HARDWARE: u64 = 4;

impl Perf {
    /// Tries out on the calling thread what this process is allowed.
    pub(super) fn new(mut request: SampleRequest, waker: Waker, counters: Arc<Counters>) -> Self {
        // First: what is opened after it need not wait.
        let kept_on = KeptOn::open().ok();
        let probe = |request| sys::open_sample_ring(request).map(drop);
        request.in_kernel = true;
        let mut probed = probe(request);
        if probed == Err(WhyRefused::NotAllowed) {
            request.in_kernel = false;
            probed = probe(request);
        }
        let refused = match probed {
            Err(why @ (WhyRefused::NotAllowed | WhyRefused::NotSupported)) => Some(why),
            // The rest may be otherwise by the time the first thread is armed.
            _ => None,
        };
        let has_hardware = refused.is_none() && HardwareCounters::open().is_ok();
        let files_per_thread = FILES_PER_THREAD + if has_hardware { FILES_OF_HARDWARE } else { 0 };
        let most_files = sys::open_file_limit() / SHARE_OF_FILES;
        Self {
            request,
            waker,
            counters,
            files: AtomicU64::new(0),
            more_files: AtomicU64::new(0),
            most_files: most_files.max(files_per_thread),
            files_per_thread,
            refused,
            kept_on: Mutex::new(kept_on),
            has_hardware,
        }
    }

    /// Whether there is room for one more thread; then it has it.
    fn take_files(&self) -> bool {
        let most = self.most_files - self.files_per_thread;
        let more = |files: u64| (files <= most).then(|| files + self.files_per_thread);
        self.files.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Why no thread at all can be sampled, if none can.
    pub(super) fn refused(&self) -> Option<WhyRefused> {
        self.refused
    }

    pub(super) fn sees_kernel(&self) -> bool {
        self.request.in_kernel
    }

    pub(super) fn has_hardware(&self) -> bool {
        self.has_hardware
    }

    /// Nothing will be opened any more. Files that may not be ours any more are not closed.
    pub(super) fn end(&self, are_ours: bool) {
        let kept_on = self.kept_on.lock().take();
        if !are_ours {
            std::mem::forget(kept_on);
        }
    }

    fn give_files(&self) {
        self.files.fetch_sub(self.files_per_thread, Ordering::Relaxed);
    }

    /// A recording's rings were given back; another event than its own wrote to them.
    pub(super) fn give_back(&self, had_another_event: bool) {
        self.more_files.fetch_sub(u64::from(had_another_event), Ordering::Relaxed);
        self.give_files();
    }

    /// See [`Sampler::set_stack_bytes`](super::Sampler::set_stack_bytes).
    pub(super) fn set_stack_bytes(
        &self,
        recording: &Recording,
        bytes: u32,
        between: impl FnOnce(u64),
    ) -> Result<(), NotReplaced> {
        let ring = recording.ring.as_ref().ok_or(NotReplaced::AsBefore)?;
        // Called by the collector alone, so nobody else changes these. Threads that are yet to be armed do
        // not have to stand back for them.
        let more = self.more_files.load(Ordering::Relaxed);
        let has_room = self.files.load(Ordering::Relaxed) + more < self.most_files;
        if bytes != self.request.stack_bytes && !has_room {
            return Err(NotReplaced::AsBefore);
        }
        let had = u64::from(ring.has_another_event());
        let set = ring.set_stack_bytes(recording.tid, self.request, bytes, between);
        let has = u64::from(ring.has_another_event());
        self.more_files.store(more + has - had, Ordering::Relaxed);
        set
    }

    fn open(&self) -> Result<(Arc<Ring>, Arc<Ring>), WhyRefused> {
        if let Some(why) = self.refused {
            return Err(why);
        }
        if !self.take_files() {
            return Err(WhyRefused::NoFiles);
        }
        let opened = self.open_both();
        if opened.is_err() {
            self.give_files();
        }
        opened
    }

    fn open_both(&self) -> Result<(Arc<Ring>, Arc<Ring>), WhyRefused> {
        let switches = sys::open_switch_ring(SWITCH_RING_BYTES)?;
        let mut request = self.request;
        let least = 2 * Machine::NATIVE.sample_size(request.stack_bytes);
        let samples = loop {
            match sys::open_sample_ring(request) {
                // What may be locked is nearly used up: a smaller ring loses samples sooner.
                Err(WhyRefused::NoLockedMemory) if request.ring_bytes as u64 / 2 >= least => {
                    request.ring_bytes /= 2;
                    request.wake_after_bytes /= 2;
                }
                // The thread, or by now the whole process, may do less than the one that tried.
                Err(WhyRefused::NotAllowed) if request.in_kernel => request.in_kernel = false,
                opened => break opened?,
            }
        };
        if self.waker.watch(&samples).is_err() {
            return Err(WhyRefused::NoFiles);
        }
        Ok((Arc::new(samples), Arc::new(switches)))
    }

    /// Begins to sample the calling thread.
    pub(super) fn arm(&self) -> Result<Armed, WhyRefused> {
        let (samples, switches) = self.open()?;
        let layout = Layout::of(&samples);
        let sample_size = layout.sample_size(self.request.stack_bytes);
        let recording = Recording::new(
            sys::current_tid(),
            Some(Arc::clone(&samples)),
            Some(Arc::clone(&switches)),
            self.request.period_ns,
            // The shortest there will be.
            sample_size.min(layout.sample_size(LEAST_STACK)),
        );
        let recording = Arc::new(recording.with_steps(sample_size));
        if self.has_hardware {
            *recording.hardware.lock() = HardwareCounters::open().ok();
        }
        let log = SwitchLog::new(Arc::clone(&switches), Arc::clone(&self.counters));
        Ok(Armed {
            recording: Some(Arc::clone(&recording)),
            samples: Position::of_ring(Arc::clone(&samples)),
            sample_size,
            switches: Position::of_ring(switches),
            follows_switches: true,
            may_retry: false,
            source: Box::new(PerfThread { samples, log, recording }),
        })
    }
}

/// One thread with its rings.
#[derive(Debug)]
struct PerfThread {
    samples: Arc<Ring>,
    log: SwitchLog,
    recording: Arc<Recording>,
}

impl ThreadSource for PerfThread {
    fn catch_up(&mut self, clock: &Clock) -> Interval {
        self.log.catch_up(clock)
    }

    fn cpu_ns(&mut self) -> Option<u64> {
        None
    }

    fn usage(&mut self) -> Usage {
        let hardware = self.recording.hardware.lock();
        let words = hardware.as_ref().and_then(|counters| counters.read().ok());
        let HardwareCounts { cycles, instructions, cache_misses } =
            words.and_then(|words| parse_group(&words)).unwrap_or_default();
        Usage { cycles, instructions, cache_misses, ..software_usage() }
    }

    fn set_period_ns(&mut self, period_ns: u64) -> io::Result<()> {
        self.samples.set_period_ns(period_ns)
    }
}

/// What the calling thread has used, as far as no hardware counts it.
pub(super) fn software_usage() -> Usage {
    let used = sys::thread_usage().unwrap_or_default();
    Usage {
        minor_faults: used.minor_faults,
        major_faults: used.major_faults,
        voluntary_switches: used.voluntary_switches,
        involuntary_switches: used.involuntary_switches,
        ..Usage::default()
    }
}

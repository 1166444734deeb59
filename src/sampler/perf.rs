//! Sampling threads with perf events.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::counters::{HardwareCounts, parse_group};
use super::record::{Layout, Machine, Record, Records};
use crate::span::{Armed, Recording, ThreadSource, Usage};
use crate::sys::{
    self, HardwareCounters, KeptOn, Position, Ring, SampleRequest, Waker, WhyRefused,
};

/// Opens perf events for threads.
#[derive(Debug)]
pub(super) struct Perf {
    request: SampleRequest,
    waker: Waker,
    /// That are open for threads.
    files: AtomicU64,
    most_files: u64,
    files_per_thread: u64,
    /// Why no thread at all can be sampled, if none can.
    refused: Option<WhyRefused>,
    kept_on: Mutex<Option<KeptOn>>,
    has_hardware: bool,
}

/// 256 records: whether a thread that is switched more often between two polls waits is asked of its CPU clock.
const SWITCH_RING_BYTES: usize = 4096;

/// Of the files that the process may open, the part that we may use is one in this.
const SHARE_OF_FILES: u64 = 8;
const FILES_PER_THREAD: u64 = 2;
const FILES_OF_HARDWARE: u64 = 4;

impl Perf {
    /// Tries out on the calling thread what this process is allowed.
    pub(super) fn new(mut request: SampleRequest, waker: Waker) -> Self {
        let probe = |request| sys::open_sample_ring(request).map(drop);
        request.in_kernel = true;
        let mut probed = probe(request);
        if probed == Err(WhyRefused::NotAllowed) {
            request.in_kernel = false;
            probed = probe(request);
        }
        let refused = match probed {
            Err(why) if why.is_for_good() => Some(why),
            // The rest may be otherwise by the time the first thread is armed.
            _ => None,
        };
        let has_hardware = refused.is_none() && HardwareCounters::open().is_ok();
        let files_per_thread = FILES_PER_THREAD + if has_hardware { FILES_OF_HARDWARE } else { 0 };
        let most_files = sys::open_file_limit() / SHARE_OF_FILES;
        Self {
            request,
            waker,
            files: AtomicU64::new(0),
            most_files: most_files.max(files_per_thread),
            files_per_thread,
            refused,
            kept_on: Mutex::new(None),
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

    /// Until the end, events are opened without a wait. On the calling thread, whose context switches this makes
    /// dearer.
    pub(super) fn keep_on(&self) {
        if self.refused.is_none() {
            *self.kept_on.lock() = KeptOn::open().ok();
        }
    }

    /// Nothing will be opened any more.
    pub(super) fn end(&self) {
        *self.kept_on.lock() = None;
    }

    /// A thread's rings were given back.
    pub(super) fn give_files(&self) {
        self.files.fetch_sub(self.files_per_thread, Ordering::Relaxed);
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
                }
                // The thread, or by now the whole process, may do less than the one that tried.
                Err(WhyRefused::NotAllowed) if request.in_kernel => request.in_kernel = false,
                opened => break opened?,
            }
        };
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
            sample_size,
        );
        let recording = Arc::new(recording.with_steps(sample_size));
        if self.has_hardware {
            *recording.hardware.lock() = HardwareCounters::open().ok();
        }
        Ok(Armed {
            recording: Some(Arc::clone(&recording)),
            samples: Position::of_ring(Arc::clone(&samples)),
            sample_size,
            may_retry: false,
            source: Box::new(PerfThread { samples, recording, waker: self.waker.clone() }),
        })
    }
}

/// One thread with its rings.
#[derive(Debug)]
struct PerfThread {
    samples: Arc<Ring>,
    recording: Arc<Recording>,
    waker: Waker,
}

impl Drop for PerfThread {
    fn drop(&mut self) {
        // Nothing else tells the collector that a thread has ended.
        self.waker.wake();
    }
}

impl ThreadSource for PerfThread {
    /// One by one: those that were taken in the kernel are longer than others, and there are records beside
    /// them. What lies there may have been read long ago, but is written over only by this thread's own samples.
    fn count_samples(&self, from: u64, until: u64) -> Option<u64> {
        let fits = |head: u64| head.saturating_sub(from) <= self.samples.data_size() as u64;
        if !fits(until) {
            return None;
        }
        let records = Records::between(&*self.samples, from, until);
        let samples = records.filter(|record| matches!(record, Ok(Record::Sample(_)))).count();
        fits(self.samples.head()).then_some(samples as u64)
    }

    fn wake_collector(&self) {
        self.waker.wake();
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

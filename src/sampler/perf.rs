//! Sampling threads with perf events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::arming::Arming;
use super::record::{Layout, Machine};
use crate::sys::{self, HardwareCounters, KeptOn, PerfRing, SampleRequest, SampleRing, WhyRefused};

/// Opens perf events for threads.
#[derive(Debug)]
pub(super) struct Perf {
    request: SampleRequest,
    /// The number of files open for threads.
    files: AtomicU64,
    most_files: u64,
    files_per_thread: u64,
    /// Why no thread can be sampled, if so.
    refused: Option<WhyRefused>,
    kept_on: Mutex<Option<KeptOn>>,
    has_hardware: bool,
}

/// 256 records. If a thread switches more often between two scans, its CPU clock decides whether it is blocked.
const SWITCH_RING_BYTES: usize = 4096;

/// The layer may use one in this many of the files that the process may open.
const SHARE_OF_FILES: u64 = 8;
const FILES_PER_THREAD: u64 = 2;
const FILES_OF_HARDWARE: u64 = 4;

impl Perf {
    /// Probes on the calling thread what this process is allowed to do.
    pub(super) fn new(mut request: SampleRequest) -> Self {
        let tid = sys::current_tid();
        let probe = |request| sys::open_sample_ring(request, tid)?.start();
        request.in_kernel = true;
        let mut probed = probe(request);
        if probed == Err(WhyRefused::NotAllowed) {
            request.in_kernel = false;
            probed = probe(request);
        }
        let refused = match probed {
            Err(why) if why.is_permanent() => Some(why),
            // Other reasons may no longer apply when the first thread is armed.
            _ => None,
        };
        let has_hardware = refused.is_none() && HardwareCounters::open().is_ok();
        let files_per_thread = FILES_PER_THREAD + if has_hardware { FILES_OF_HARDWARE } else { 0 };
        let most_files = sys::open_file_limit() / SHARE_OF_FILES;
        Self {
            request,
            files: AtomicU64::new(0),
            most_files: most_files.max(files_per_thread),
            files_per_thread,
            refused,
            kept_on: Mutex::new(None),
            has_hardware,
        }
    }

    /// Reserves the files of one more thread. Returns false if there is no room.
    fn take_files(&self) -> bool {
        let most = self.most_files - self.files_per_thread;
        let more = |files: u64| (files <= most).then(|| files + self.files_per_thread);
        self.files.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Why no thread can be sampled, if so.
    pub(super) fn refused(&self) -> Option<WhyRefused> {
        self.refused
    }

    pub(super) fn sees_kernel(&self) -> bool {
        self.request.in_kernel
    }

    pub(super) fn has_hardware(&self) -> bool {
        self.has_hardware
    }

    /// Holds an event open, so that further events are opened without a delay. It makes context switches of the calling
    /// thread more expensive.
    pub(super) fn keep_on(&self) {
        if self.refused.is_none() {
            *self.kept_on.lock() = KeptOn::open().ok();
        }
    }

    /// Closes that event: no more events will be opened.
    pub(super) fn end(&self) {
        *self.kept_on.lock() = None;
    }

    /// Releases the files of a thread whose rings were closed.
    pub(super) fn give_files(&self) {
        self.files.fetch_sub(self.files_per_thread, Ordering::Relaxed);
    }

    /// Opens the rings of thread `tid`. They are inactive until started.
    pub(super) fn open(&self, tid: u32, period_ns: u64) -> Result<Arming, WhyRefused> {
        if let Some(why) = self.refused {
            return Err(why);
        }
        if !self.take_files() {
            return Err(WhyRefused::NoFiles);
        }
        let opened = self.open_rings(tid, SampleRequest { period_ns, ..self.request });
        if opened.is_err() {
            self.give_files();
        }
        let (samples, switches) = opened?;
        let samples = Arc::new(SampleRing::Perf(samples));
        let sample_size = Layout::of(&samples).sample_size(self.request.stack_bytes);
        let arming = Arming::new(samples, period_ns, sample_size, sample_size);
        Ok(arming.with_switches(Some(Arc::new(switches))))
    }

    fn open_rings(
        &self,
        tid: u32,
        mut request: SampleRequest,
    ) -> Result<(PerfRing, PerfRing), WhyRefused> {
        let switches = sys::open_switch_ring(SWITCH_RING_BYTES, tid)?;
        let least = 2 * Machine::NATIVE.sample_size(request.stack_bytes);
        let samples = loop {
            match sys::open_sample_ring(request, tid) {
                // The limit of locked memory is nearly reached: a smaller ring loses samples sooner.
                Err(WhyRefused::NoLockedMemory) if request.ring_bytes as u64 / 2 >= least => {
                    request.ring_bytes /= 2;
                }
                // This thread, or by now the whole process, may be allowed less than the thread that probed.
                Err(WhyRefused::NotAllowed) if request.in_kernel => request.in_kernel = false,
                opened => break opened?,
            }
        };
        Ok((samples, switches))
    }
}

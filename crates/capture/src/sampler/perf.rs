//! Sampling threads with perf events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::quota::{Quota, Share};
use super::rate::Rate;
use super::record::Machine;
use super::session::SamplingSession;
use super::switches::SwitchRing;
use crate::sys::{self, PerfEvent, PerfRing, SampleRequest, SampleRing, WhyRefused};

#[derive(Debug)]
pub struct Perf {
    request: SampleRequest,
    files: Quota,
    locked_bytes: Quota,
    /// Why no thread can be sampled, if so.
    pub refused: Option<WhyRefused>,
    /// The last thread found no room within the limits of the process.
    is_full: AtomicBool,
    kept_alive: Mutex<Option<PerfEvent>>,
}

/// 256 records. If a thread switches more often between two scans, its CPU clock decides whether it is blocked.
const SWITCH_RING_BYTES: usize = 4096;

/// The layer may use one in this many of the files that the process may open, and of the memory that it may lock. The
/// program may come near to each of its limits: it must not fail there because of the layer.
const SHARE_OF_FILES: u64 = 32;
const SHARE_OF_LOCKED_MEMORY: u64 = 4;
const FILES_PER_THREAD: u64 = 2;

impl Perf {
    pub(super) fn new(mut request: SampleRequest, other: Option<u32>) -> Self {
        let tid = other.unwrap_or_else(sys::current_tid);
        let probe = |request| {
            sys::open_switch_ring(SWITCH_RING_BYTES, tid)?.start()?;
            sys::open_sample_ring(request, tid)?.start()
        };
        request.in_kernel = true;
        let mut probed = probe(request);
        if matches!(probed, Err(WhyRefused::NotAllowed(_))) {
            request.in_kernel = false;
            probed = probe(request);
        }
        let refused = match probed {
            _ if sys::is_in_time_namespace() => Some(WhyRefused::TimeNamespace),
            Err(why) if why.is_permanent() => Some(why),
            // Other reasons may no longer apply when the first thread is attached.
            _ => None,
        };
        Self {
            request,
            files: Quota::default(),
            locked_bytes: Quota::default(),
            refused,
            is_full: AtomicBool::new(false),
            kept_alive: Mutex::new(None),
        }
    }

    /// Opens a ring, if its memory may be locked.
    fn lock(
        &self,
        data_bytes: usize,
        open: impl FnOnce() -> Result<PerfRing, WhyRefused>,
    ) -> Result<(PerfRing, Share), WhyRefused> {
        let most =
            sys::locked_memory_limit().map_or(u64::MAX, |most| most / SHARE_OF_LOCKED_MEMORY);
        let share = self.locked_bytes.take(sys::bytes_of_ring(data_bytes), most);
        let share = share.ok_or(WhyRefused::NoLockedMemory)?;
        Ok((open()?, share))
    }

    /// Whether threads can be sampled, and the last one found room within the limits of the process.
    pub(super) fn has_room(&self) -> bool {
        self.refused.is_none() && !self.is_full.load(Ordering::Relaxed)
    }

    pub fn sees_kernel(&self) -> bool {
        self.request.in_kernel
    }

    /// Holds an event open, so that others are opened without a delay. Switches of the calling thread then cost more.
    pub(super) fn keep_alive(&self) {
        if self.refused.is_none() {
            *self.kept_alive.lock() = sys::open_keep_alive().ok();
        }
    }

    /// Closes that event: no more events will be opened.
    pub(super) fn end(&self) {
        *self.kept_alive.lock() = None;
    }

    /// Opens the rings of thread `tid`. They are inactive until started.
    pub(super) fn open(&self, tid: u32, rate: Rate) -> Result<SamplingSession, WhyRefused> {
        if let Some(why) = self.refused {
            return Err(why);
        }
        let opened = self.open_rings(tid, rate);
        let is_full = matches!(opened, Err(WhyRefused::NoFiles | WhyRefused::NoLockedMemory));
        self.is_full.store(is_full, Ordering::Relaxed);
        opened
    }

    fn open_rings(&self, tid: u32, rate: Rate) -> Result<SamplingSession, WhyRefused> {
        let request = SampleRequest { period_ns: rate.period_ns, ..self.request };
        let most_files = (sys::open_file_limit() / SHARE_OF_FILES).max(FILES_PER_THREAD);
        let files = self.files.take(FILES_PER_THREAD, most_files);
        let files = files.ok_or(WhyRefused::NoFiles)?;
        let (switches, of_switches) =
            self.lock(SWITCH_RING_BYTES, || sys::open_switch_ring(SWITCH_RING_BYTES, tid))?;
        let (samples, of_samples) = self.open_samples(tid, request)?;
        let samples = Arc::new(SampleRing::Perf(samples));
        let sample_size = Machine::NATIVE.sample_size(request.stack_bytes);
        let mut session = SamplingSession::new(Some(samples), rate, sample_size, sample_size);
        session.switches = Some(Arc::new(SwitchRing::new(switches)));
        session.shares = Mutex::new(vec![files, of_switches, of_samples]);
        Ok(session)
    }

    fn open_samples(
        &self,
        tid: u32,
        mut request: SampleRequest,
    ) -> Result<(PerfRing, Share), WhyRefused> {
        let least = 2 * Machine::NATIVE.sample_size(request.stack_bytes);
        loop {
            match self.lock(request.ring_bytes, || sys::open_sample_ring(request, tid)) {
                // The limit of locked memory is nearly reached: a smaller ring loses samples sooner.
                Err(WhyRefused::NoLockedMemory) if request.ring_bytes as u64 / 2 >= least => {
                    request.ring_bytes /= 2;
                }
                // This thread, or by now the whole process, may be allowed less than the thread that probed.
                Err(WhyRefused::NotAllowed(_)) if request.in_kernel => request.in_kernel = false,
                opened => return opened,
            }
        }
    }
}

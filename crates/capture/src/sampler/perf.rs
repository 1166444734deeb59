//! Sampling threads with perf events.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::rate::Rate;
use super::record::{Machine, Record, Records};
use super::session::SamplingSession;
use super::shares::{Share, Taken};
use super::switches::SwitchRing;
use crate::sys::{
    self, HardwareCounters, PerfEvent, PerfRing, SampleRequest, SampleRing, WhyRefused,
};

/// Opens perf events for threads.
#[derive(Debug)]
pub(super) struct Perf {
    request: SampleRequest,
    /// The number of files open for threads.
    files: Taken,
    files_per_thread: u64,
    /// The bytes of locked memory of all rings.
    locked_bytes: Taken,
    /// Why no thread can be sampled, if so.
    refused: Option<WhyRefused>,
    /// The last thread found no room within the limits of the process.
    is_full: AtomicBool,
    kept_on: Mutex<Option<PerfEvent>>,
    has_hardware: bool,
}

/// 256 records. If a thread switches more often between two scans, its CPU clock decides whether it is blocked.
const SWITCH_RING_BYTES: usize = 4096;

/// The layer may use one in this many of the files that the process may open, and of the memory that it may lock. The
/// program may come near to each of its limits: it must not fail there because of the layer.
const SHARE_OF_FILES: u64 = 32;
const SHARE_OF_LOCKED_MEMORY: u64 = 4;
const FILES_PER_THREAD: u64 = 2;
const FILES_OF_HARDWARE: u64 = 4;

impl Perf {
    /// Probes what this process is allowed to do.
    pub(super) fn new(mut request: SampleRequest, other: Option<u32>) -> Self {
        let tid = other.unwrap_or_else(sys::current_tid);
        let probe = |request| {
            sys::open_switch_ring(SWITCH_RING_BYTES, tid, 0)?.start()?;
            sys::open_sample_ring(request, tid)?.start()
        };
        request.in_kernel = true;
        let mut probed = probe(request);
        if matches!(probed, Err(WhyRefused::NotAllowed(_))) {
            request.in_kernel = false;
            probed = probe(request);
        }
        let refused = match probed {
            Err(why) if why.is_permanent() => Some(why),
            // Other reasons may no longer apply when the first thread is attached.
            _ => None,
        };
        if refused.is_none() {
            request.records_ahead_ns = records_ahead_ns().unwrap_or(0);
        }
        let has_hardware = refused.is_none() && HardwareCounters::open().is_ok();
        let files_per_thread = FILES_PER_THREAD + if has_hardware { FILES_OF_HARDWARE } else { 0 };
        Self {
            request,
            files: Taken::default(),
            files_per_thread,
            locked_bytes: Taken::default(),
            refused,
            is_full: AtomicBool::new(false),
            kept_on: Mutex::new(None),
            has_hardware,
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

    /// Why no thread can be sampled, if so.
    pub(super) fn refused(&self) -> Option<WhyRefused> {
        self.refused
    }

    /// Whether threads can be sampled, and the last one found room within the limits of the process.
    pub(super) fn has_room(&self) -> bool {
        self.refused.is_none() && !self.is_full.load(Ordering::Relaxed)
    }

    pub(super) fn sees_kernel(&self) -> bool {
        self.request.in_kernel
    }

    pub(super) fn has_hardware(&self) -> bool {
        self.has_hardware
    }

    /// Holds an event open, so that others open without a delay. It makes the thread's context switches dearer.
    pub(super) fn keep_on(&self) {
        if self.refused.is_none() {
            *self.kept_on.lock() = sys::keep_perf_on().ok();
        }
    }

    /// Closes that event: no more events will be opened.
    pub(super) fn end(&self) {
        *self.kept_on.lock() = None;
    }

    /// Opens the rings of thread `tid`. They are inactive until started.
    pub(super) fn open(&self, tid: u32, rate: Rate) -> Result<SamplingSession, WhyRefused> {
        if let Some(why) = self.refused {
            return Err(why);
        }
        let opened = self.open_rings(tid, rate.period_ns);
        let is_full = matches!(opened, Err(WhyRefused::NoFiles | WhyRefused::NoLockedMemory));
        self.is_full.store(is_full, Ordering::Relaxed);
        let (samples, switches, shares) = opened?;
        let samples = Arc::new(SampleRing::Perf(samples));
        let sample_size = Machine::NATIVE.sample_size(self.request.stack_bytes);
        let session = SamplingSession::new(samples, rate, sample_size, sample_size);
        let session = session.with_switches(Some(Arc::new(SwitchRing::new(switches))));
        Ok(session.with_shares(shares))
    }

    fn open_rings(
        &self,
        tid: u32,
        period_ns: u64,
    ) -> Result<(PerfRing, PerfRing, Vec<Share>), WhyRefused> {
        let request = SampleRequest { period_ns, ..self.request };
        let ahead_ns = request.records_ahead_ns;
        let most_files = (sys::open_file_limit() / SHARE_OF_FILES).max(self.files_per_thread);
        let files = self.files.take(self.files_per_thread, most_files);
        let files = files.ok_or(WhyRefused::NoFiles)?;
        let (switches, of_switches) = self
            .lock(SWITCH_RING_BYTES, || sys::open_switch_ring(SWITCH_RING_BYTES, tid, ahead_ns))?;
        let (samples, of_samples) = self.open_samples(tid, request)?;
        Ok((samples, switches, vec![files, of_switches, of_samples]))
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

/// By how much the clock of perf's records is ahead of this process': in a time namespace it has an offset, and records have
/// the time of the initial namespace. `None` if that cannot be measured.
fn records_ahead_ns() -> Option<i64> {
    let ring = sys::open_switch_ring(SWITCH_RING_BYTES, sys::current_tid(), 0).ok()?;
    let before = sys::monotonic_raw_ns();
    ring.start().ok()?;
    // The thread is switched out and in.
    std::thread::sleep(Duration::from_nanos(1));
    ring.pause();
    let after = sys::monotonic_raw_ns();
    let times = Records::between(&*ring, 0, ring.head()).filter_map(|record| match record {
        Ok(Record::SwitchOut { time_ns, .. } | Record::SwitchIn { time_ns }) => Some(time_ns),
        _ => None,
    });
    let times: Vec<_> = times.collect();
    ahead((*times.first()?, *times.last()?), (before, after))
}

/// The same, where the records from `first` to `last` were written between `before` and `after` by the own clock. Without a
/// namespace, it is exact; otherwise that leaves some microseconds.
fn ahead((first, last): (u64, u64), (before, after): (u64, u64)) -> Option<i64> {
    let difference = |recorded: u64, own: u64| recorded.wrapping_sub(own).cast_signed();
    let possible = difference(last, after)..=difference(first, before);
    // Records must not seem to be older than they are: a wait would begin before its span.
    let known = if possible.contains(&0) { 0 } else { *possible.start() };
    (!possible.is_empty()).then_some(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_records_is_exact_where_there_is_none_and_never_too_large() {
        const DAY: u64 = 86_400_000_000_000;
        let own = (1_000, 9_000);
        assert_eq!(ahead((3_000, 7_000), own), Some(0));
        let ahead_of = |own| ahead((3_000 + DAY, 7_000 + DAY), own);
        assert_eq!(ahead_of(own), Some(DAY.cast_signed() - 2_000));
        assert_eq!(
            ahead((3_000, 7_000), (1_000 + DAY, 9_000 + DAY)),
            Some(-DAY.cast_signed() - 2_000)
        );
        assert_eq!(ahead((0, 20_000), own), None, "no such records");
    }
}

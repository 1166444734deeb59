//! Arming threads with perf events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::counters::{HardwareCounts, parse_group};
use super::record::Machine;
use super::switches::SwitchLog;
use crate::span::{Armed, Interval, Recording, Source, ThreadSource, Usage};
use crate::stats::Counters;
use crate::sys::{
    self, Clock, HardwareCounters, KeptOn, Position, Ring, SampleRequest, Waker, WhyRefused,
};

/// Arms threads with perf events where that is allowed.
#[derive(Clone, Debug)]
pub(crate) struct PerfSource(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    request: SampleRequest,
    waker: Waker,
    counters: Arc<Counters>,
    new: Mutex<Vec<Arc<Recording>>>,
    /// Threads that hold rings.
    sampled: AtomicU64,
    most_sampled: u64,
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

impl PerfSource {
    /// Tries out on the calling thread what this process is allowed.
    pub(crate) fn new(mut request: SampleRequest, waker: Waker, counters: Arc<Counters>) -> Self {
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
        let files = FILES_PER_THREAD + if has_hardware { FILES_OF_HARDWARE } else { 0 };
        Self(Arc::new(Shared {
            request,
            waker,
            counters,
            new: Mutex::default(),
            sampled: AtomicU64::new(0),
            most_sampled: (sys::open_file_limit() / SHARE_OF_FILES / files).max(1),
            refused,
            kept_on: Mutex::new(kept_on),
            has_hardware,
        }))
    }

    /// Whether no thread at all can be sampled.
    pub(crate) fn is_refused(&self) -> bool {
        self.0.refused.is_some()
    }

    /// What runs here and what it cannot see, in one line.
    pub(crate) fn describe(&self, period_ns: u64) -> String {
        let shared = &*self.0;
        match shared.refused {
            Some(WhyRefused::NotSupported) => "source none: this system has no perf events; kept \
                spans have their times but no stacks"
                .to_owned(),
            Some(_) => "source none: perf_event_open is refused, so kept spans have their times \
                but no stacks; allow it on the host with `sysctl kernel.perf_event_paranoid=2`, in a \
                container with the capability PERFMON (`docker run --cap-add PERFMON`)"
                .to_owned(),
            None => {
                let kernel = if shared.request.in_kernel {
                    "time in the kernel is sampled at the user's call"
                } else {
                    "time in the kernel is not sampled (it needs CAP_PERFMON or \
                     kernel.perf_event_paranoid=1)"
                };
                let hardware = if shared.has_hardware { "counted" } else { "not available" };
                let rate = 1e9 / period_ns.max(1) as f64;
                format!(
                    "source perf: {rate:.0} samples a second of CPU time; {kernel}; hardware \
                     counters {hardware}; threads that wait have no stacks"
                )
            }
        }
    }

    /// Nothing will be opened any more.
    pub(crate) fn end(&self) {
        *self.0.kept_on.lock() = None;
    }

    /// The threads armed since the last call.
    pub(crate) fn take_new(&self) -> Vec<Arc<Recording>> {
        std::mem::take(&mut self.0.new.lock())
    }

    /// A recording is over and its ring is read: another thread may have the place.
    pub(crate) fn give_back(&self, recording: &Recording) {
        for ring in [&recording.ring, &recording.switches].into_iter().flatten() {
            ring.retire();
        }
        *recording.hardware.lock() = None;
        self.0.sampled.fetch_sub(1, Ordering::Relaxed);
        self.0.counters.threads_sampled.fetch_sub(1, Ordering::Relaxed);
    }

    fn open(&self) -> Result<(Arc<Ring>, Arc<Ring>), WhyRefused> {
        let shared = &*self.0;
        if let Some(why) = shared.refused {
            return Err(why);
        }
        if shared.sampled.fetch_add(1, Ordering::Relaxed) >= shared.most_sampled {
            shared.sampled.fetch_sub(1, Ordering::Relaxed);
            return Err(WhyRefused::NoFiles);
        }
        let opened = self.open_both();
        if opened.is_err() {
            shared.sampled.fetch_sub(1, Ordering::Relaxed);
        }
        opened
    }

    fn open_both(&self) -> Result<(Arc<Ring>, Arc<Ring>), WhyRefused> {
        let switches = sys::open_switch_ring(SWITCH_RING_BYTES)?;
        let mut request = self.0.request;
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
        if self.0.waker.watch(&samples).is_err() {
            return Err(WhyRefused::NoFiles);
        }
        Ok((Arc::new(samples), Arc::new(switches)))
    }

    fn note_refusal(&self, why: WhyRefused) -> bool {
        let counters = &self.0.counters;
        let counter = match why {
            WhyRefused::NotAllowed | WhyRefused::NotSupported => &counters.threads_refused_perf,
            WhyRefused::NoLockedMemory => &counters.threads_refused_locked_memory,
            WhyRefused::NoFiles => &counters.threads_refused_open_files,
            WhyRefused::Other(_) => &counters.threads_refused_other,
        };
        Counters::add(counter, 1);
        self.0.refused.is_none()
    }
}

impl Source for PerfSource {
    fn arm(&self, _clock: &Clock) -> Armed {
        let sample_size = Machine::NATIVE.sample_size(self.0.request.stack_bytes);
        match self.open() {
            Ok((samples, switches)) => {
                let recording = Arc::new(Recording::new(
                    sys::current_tid(),
                    Some(Arc::clone(&samples)),
                    Some(Arc::clone(&switches)),
                    self.0.request.period_ns,
                    sample_size,
                ));
                if self.0.has_hardware {
                    *recording.hardware.lock() = HardwareCounters::open().ok();
                }
                self.0.new.lock().push(Arc::clone(&recording));
                Counters::add(&self.0.counters.threads_sampled, 1);
                let log = SwitchLog::new(Arc::clone(&switches), Arc::clone(&self.0.counters));
                Armed {
                    recording: Some(Arc::clone(&recording)),
                    samples: Position::of_ring(Arc::clone(&samples)),
                    sample_size,
                    switches: Position::of_ring(switches),
                    follows_switches: true,
                    may_retry: false,
                    source: Box::new(PerfThread {
                        samples: Some(samples),
                        log: Some(log),
                        recording: Some(recording),
                    }),
                }
            }
            Err(why) => Armed {
                recording: None,
                samples: Position::fixed(),
                sample_size,
                switches: Position::fixed(),
                follows_switches: false,
                may_retry: self.note_refusal(why),
                source: Box::new(PerfThread { samples: None, log: None, recording: None }),
            },
        }
    }
}

/// One thread: with rings, or without and then with its CPU clock only.
#[derive(Debug)]
struct PerfThread {
    samples: Option<Arc<Ring>>,
    log: Option<SwitchLog>,
    recording: Option<Arc<Recording>>,
}

impl ThreadSource for PerfThread {
    fn catch_up(&mut self, clock: &Clock, now: u64) -> Interval {
        self.log.as_mut().map(|log| log.catch_up(clock, now)).unwrap_or_default()
    }

    fn cpu_ns(&mut self) -> Option<u64> {
        if self.log.is_some() { None } else { sys::thread_cpu_ns() }
    }

    fn usage(&mut self) -> Usage {
        let used = sys::thread_usage().unwrap_or_default();
        let words = self.recording.as_ref().and_then(|recording| {
            recording.hardware.lock().as_ref().and_then(|counters| counters.read().ok())
        });
        let HardwareCounts { cycles, instructions, cache_misses } =
            words.and_then(|words| parse_group(&words)).unwrap_or_default();
        Usage {
            minor_faults: used.minor_faults,
            major_faults: used.major_faults,
            voluntary_switches: used.voluntary_switches,
            involuntary_switches: used.involuntary_switches,
            cycles,
            instructions,
            cache_misses,
        }
    }

    fn set_period_ns(&mut self, period_ns: u64) -> bool {
        self.samples.as_ref().is_some_and(|ring| ring.set_period_ns(period_ns).is_ok())
    }
}

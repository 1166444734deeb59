//! What this process is allowed to do: each call that samples threads is made once.

use std::sync::mpsc;
use std::thread::JoinHandle;

use super::perf::Perf;
use super::source::Source;
use super::timer::Timers;
use crate::sys::{self, SampleRequest, WhyRefused};

/// Runs `probe` with the id of a thread that does nothing; without one if the system does not allow one more. The collector
/// samples threads other than its own, which the system may refuse, although a thread may do the same to itself.
fn with_other_thread<T>(probe: impl FnOnce(Option<u32>) -> T) -> T {
    let (send_tid, tid) = mpsc::channel();
    let (lives, end) = mpsc::channel::<()>();
    let run = move || {
        _ = send_tid.send(sys::current_tid());
        _ = end.recv();
    };
    let thread = sys::spawn("profiling-probe", run).ok();
    let probed = probe(thread.as_ref().and_then(|_| tid.recv().ok()));
    drop(lives);
    _ = thread.map(JoinHandle::join);
    probed
}

#[derive(Debug)]
pub struct Probed {
    pub perf: Option<Perf>,
    pub timers: Option<Timers>,
    /// Why no thread can have a timer, if that was probed and failed.
    pub timers_refused: Option<WhyRefused>,
    /// Why none could have one at the start, although that may change.
    pub timers_lacking: Option<WhyRefused>,
    pub is_traced: bool,
    pub unreadable: Unreadable,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Unreadable {
    pub own_cpu_time: Option<WhyRefused>,
    pub cpu_time_of_others: Option<WhyRefused>,
    pub usage: Option<WhyRefused>,
}

impl Probed {
    /// Probes on the calling thread and, as another one, on a thread of its own. Without that, no thread of the layer can be
    /// started either, and there will be no layer.
    pub(super) fn new(source: Source, request: SampleRequest) -> Self {
        with_other_thread(|other| Self::beside(other, source, request))
    }

    fn beside(other: Option<u32>, source: Source, request: SampleRequest) -> Self {
        let perf = matches!(source, Source::Auto | Source::Perf).then(|| Perf::new(request, other));
        let timers = matches!(source, Source::Auto | Source::Timer).then(|| {
            sys::note_claimed_signals();
            Timers::new(request)
        });
        let is_traced = source == Source::Auto && sys::is_traced();
        // No signal handler is installed if perf works.
        let needs_timers = perf.as_ref().is_none_or(|perf| perf.refused.is_some());
        let probed = timers.as_ref().zip(other).filter(|_| needs_timers);
        let why = probed.and_then(|(timers, other)| timers.probe(other).err());
        Self {
            perf,
            timers,
            timers_refused: why.filter(|why| why.is_permanent()),
            timers_lacking: why.filter(|why| !why.is_permanent()),
            is_traced,
            unreadable: Unreadable {
                own_cpu_time: sys::try_thread_cpu_ns().err(),
                cpu_time_of_others: other.and_then(|other| sys::try_cpu_ns_of(other).err()),
                usage: sys::try_thread_usage().err(),
            },
        }
    }

    pub(super) fn name(&self) -> &'static str {
        let otherwise = if self.may_have_timers() { "timer" } else { "none" };
        if self.has_perf() { "perf" } else { otherwise }
    }

    pub fn has_perf(&self) -> bool {
        self.perf.as_ref().is_some_and(|perf| perf.refused.is_none())
    }

    /// Why no thread can be sampled, if none can.
    pub fn refused(&self) -> Option<WhyRefused> {
        let of_perf = self.perf.as_ref().and_then(|perf| perf.refused);
        of_perf.or(self.timers_refused)
    }

    pub(super) fn may_have_timers(&self) -> bool {
        self.timers.is_some() && self.timers_refused.is_none()
    }
}

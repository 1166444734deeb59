//! Samples of threads that ran: from a record to the frames.

use crate::sampler::ThreadShared;
use crate::sampler::record::{Machine, RecordPlace, read_sample};
use crate::sys::{self, OsThread, SampleRing, Tag};
use crate::unwind::{ModuleAddress, UnwindEnd, Unwinder};

/// A sample of a thread that ran.
#[derive(Debug)]
pub struct Sample<'a> {
    /// What the thread had published at that moment.
    pub tag: Option<Tag>,
    pub thread: OsThread,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub time_ns: u64,
    /// The CPU time that it represents.
    pub weight_ns: u64,
    /// How many samples are lost because their signal was blocked.
    pub late: u64,
    /// The innermost first. May be taken.
    pub frames: &'a mut Vec<ModuleAddress>,
    pub end: UnwindEnd,
}

/// What no sample says.
#[derive(Clone, Copy, Debug)]
pub enum Loss {
    /// There was no room for that many samples.
    RingFull { tag: Option<Tag>, samples: u64 },
    /// The signal stack of a thread had no room for that many signals of timers.
    SignalStackFull { samples: u64 },
    /// The kernel paused sampling.
    Throttled,
    /// A record contradicts itself.
    Malformed,
}

/// Takes samples.
pub trait Sink {
    /// Announces that many samples of a thread, each of which represents at most that much CPU time.
    fn begin(&mut self, _tid: u32, _samples: usize, _max_ns: u64) {}
    /// Whether the next sample, with that tag, is of any use: others are not unwound.
    fn wants(&mut self, _tag: Option<Tag>) -> bool {
        true
    }
    /// Takes a sample.
    fn take(&mut self, sample: Sample<'_>);
    /// Counts what was lost.
    fn lose(&mut self, _loss: Loss) {}
}

/// Reads records and unwinds their stacks.
#[allow(missing_debug_implementations, reason = "the caches of the unwinder have none")]
pub struct Reader {
    pub unwinder: Unwinder,
    most_frames: usize,
    frames: Vec<ModuleAddress>,
    pid: u32,
}

/// Entries of a call chain from here on are not addresses but context markers, such as `PERF_CONTEXT_KERNEL`.
const FIRST_CONTEXT: u64 = u64::MAX - 4094;

impl Reader {
    pub fn new(most_frames: usize) -> Self {
        Self {
            unwinder: Unwinder::default(),
            most_frames,
            frames: Vec::new(),
            pid: sys::current_pid(),
        }
    }

    /// Reads a sample, if there is any use for it. It represents `more_ns` without samples, too.
    pub(super) fn read(
        &mut self,
        (ring, place): (&SampleRing, RecordPlace),
        (tag, thread, shared): (Option<Tag>, OsThread, &ThreadShared),
        (period_ns, more_ns): (u64, u64),
        is_switching: bool,
        sink: &mut impl Sink,
    ) {
        if !sink.wants(tag) {
            return;
        }
        let read = read_sample(&**ring, place, Machine::NATIVE);
        let Some(sample) = read.ok().filter(|sample| {
            // Of this thread: an event is opened by an id, which may since be that of another process's thread.
            (sample.pid, sample.tid) == (self.pid, thread.tid)
        }) else {
            return sink.lose(Loss::Malformed);
        };
        // If another library was loaded where the sample is, that is known from here on.
        if self.unwinder.is_outdated() {
            self.unwinder.refresh();
        }
        self.unwinder.own_stack = ThreadShared::own_stack(Some(shared));
        let frames = &mut self.frames;
        let word = |offset| sample.stack.word(offset);
        let end = self.unwinder.unwind(sample.registers, word, self.most_frames, frames);
        // If an interrupt was switching the thread, it has not called the functions of the kernel.
        if sample.in_kernel && !is_switching {
            let in_user_code = frames.len();
            let chain = sample.kernel_chain.iter().filter(|address| *address < FIRST_CONTEXT);
            frames.extend(chain.map(ModuleAddress::in_kernel));
            if frames.len() == in_user_code {
                frames.push(ModuleAddress::KERNEL);
            }
            frames.rotate_left(in_user_code);
        }
        let (weight_ns, late) = weight_of(sample.weight_ns, period_ns);
        let (time_ns, weight_ns) = (sample.time_ns, weight_ns.saturating_add(more_ns));
        sink.take(Sample { tag, thread, time_ns, weight_ns, late, frames, end });
    }
}

/// A sample of a timer represents at most this number of periods, or of ticks if these are longer.
const MAX_PERIODS: u64 = 16;

/// The weight of a sample, and how many others are lost with it. If the program blocked a timer's signal for long, it is
/// not known where the thread was most of that time: the sample then has the usual weight, and the rest is lost.
fn weight_of(stated_ns: Option<u64>, period_ns: u64) -> (u64, u64) {
    let Some(stated_ns) = stated_ns else { return (period_ns, 0) };
    if stated_ns <= max_sample_ns(period_ns) {
        return (stated_ns, 0);
    }
    let usual_ns = usual_ns(period_ns);
    (usual_ns, stated_ns / usual_ns - 1)
}

fn usual_ns(period_ns: u64) -> u64 {
    period_ns.max(sys::tick_ns().unwrap_or(0)).max(1)
}

pub(super) fn max_sample_ns(period_ns: u64) -> u64 {
    MAX_PERIODS.saturating_mul(usual_ns(period_ns))
}

//! A source that plays the kernel's part of a script.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::script::THREADS;
use crate::facts::Usage;
use crate::sampler::{
    AttachThreads, Rate, SamplingSession, SwitchRing, ThreadSetup, ThreadShared, ThreadSource,
};
use crate::sampler::{Periods, Sampler};
use crate::sys::{OsThread, PerfRing, SampleRing, WhyRefused};

/// How far each sample moves the position that hooks see.
const STEP: u64 = 64;
const RING_BYTES: usize = 1 << 16;
/// The size of the shortest record.
const SAMPLE_BYTES: u64 = 80;
/// The period of every second session. It differs from the wanted one, so that the session ends as soon as possible.
pub(super) const OTHER_PERIOD_NS: u64 = 5_000_000;
/// No system has a thread with such an id, so system calls for it fail.
const FIRST_TID: u32 = 0x7000_0000;

thread_local! {
    static THREAD: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Makes the calling thread the script's thread `number`.
pub(super) fn begin_thread(number: usize) {
    THREAD.set(number);
}

/// Writes rings and provides clocks.
#[derive(Clone, Debug)]
pub(super) struct Scripted(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    now: Arc<AtomicU64>,
    sampler: Sampler,
    has_switches: bool,
    next_tid: AtomicU64,
    threads: Mutex<[Thread; THREADS]>,
}

#[derive(Debug, Default)]
struct Thread {
    samples: u64,
    voluntary: u64,
    involuntary: u64,
    off_ns: u64,
    /// Since when the thread is switched out.
    out_ns: Option<u64>,
    sampled_thread: Option<Arc<ThreadShared>>,
    attached: Option<Rings>,
    sessions: u64,
}

#[derive(Debug)]
struct Rings {
    samples: Arc<SampleRing>,
    switches: Option<Arc<SwitchRing>>,
    period_ns: u64,
}

impl Scripted {
    pub(super) fn new(now: Arc<AtomicU64>, sampler: Sampler, has_switches: bool) -> Self {
        let threads = Mutex::default();
        let next_tid = AtomicU64::new(FIRST_TID.into());
        Self(Arc::new(Shared { now, sampler, has_switches, next_tid, threads }))
    }

    /// Releases the rings: the sampler and this hold each other.
    pub(super) fn end(&self) {
        *self.0.threads.lock() = Default::default();
    }

    /// The period at which the thread is sampled now.
    pub(super) fn period_ns(&self, thread: usize) -> u64 {
        let threads = self.0.threads.lock();
        threads[thread].attached.as_ref().map_or(0, |rings| rings.period_ns)
    }

    /// Writes a sample at the given instruction.
    pub(super) fn sample(&self, thread: usize, instruction: u64, weight_ns: Option<u64>) {
        let mut threads = self.0.threads.lock();
        let thread = &mut threads[thread];
        thread.samples += 1;
        let rings = thread.attached.as_ref().unwrap();
        let tid = thread.sampled_thread.as_ref().unwrap().tid();
        let mut words = vec![
            0,
            u64::from(tid) << 32 | u64::from(std::process::id()),
            self.0.now.load(Ordering::Relaxed),
            0,
            2,
        ];
        let stack_pointer = 1 << 40;
        if cfg!(target_arch = "aarch64") {
            words.extend([0, 0, stack_pointer, instruction]);
        } else {
            words.extend([0, stack_pointer, instruction]);
        }
        match weight_ns {
            // One word of stack, which is 0: there is no caller.
            Some(weight_ns) => words.extend([8, 0, 8, weight_ns]),
            None => words.push(0),
        }
        words.push(rings.samples.position());
        words[0] = 9 | 2 << 32 | (8 * words.len() as u64) << 48;
        let timer = rings.samples.timer().unwrap();
        assert!(timer.sample_scripted(&words), "the script has too many samples");
    }

    pub(super) fn switch_out(&self, thread: usize, preempted: bool) {
        let now = self.0.now.load(Ordering::Relaxed);
        let mut threads = self.0.threads.lock();
        let thread = &mut threads[thread];
        thread.out_ns = Some(now);
        *if preempted { &mut thread.involuntary } else { &mut thread.voluntary } += 1;
        let misc = 1 << 13 | if preempted { 1 << 14 } else { 0 };
        thread.write_switch(misc, now);
    }

    pub(super) fn switch_in(&self, thread: usize) {
        let now = self.0.now.load(Ordering::Relaxed);
        let mut threads = self.0.threads.lock();
        let thread = &mut threads[thread];
        thread.off_ns += now - thread.out_ns.take().unwrap();
        thread.write_switch(0, now);
    }

    /// Whether the thread is sampled.
    pub(super) fn is_attached(&self, thread: usize) -> bool {
        self.0.threads.lock()[thread].attached.is_some()
    }

    /// Removes the rings of threads that are no longer sampled.
    pub(super) fn let_go(&self) {
        for thread in self.0.threads.lock().iter_mut() {
            let is_sampled = |one: &Arc<ThreadShared>| !one.is_over() && one.last().ring.is_some();
            thread.attached.take_if(|_| !thread.sampled_thread.as_ref().is_some_and(is_sampled));
        }
    }

    /// Ends the thread. Its number then belongs to a new thread.
    pub(super) fn end_thread(&self, thread: usize) {
        self.0.threads.lock()[thread] = Thread::default();
    }
}

impl Thread {
    fn write_switch(&self, misc: u64, now: u64) {
        if let Some(ring) = self.attached.as_ref().and_then(|rings| rings.switches.as_ref()) {
            assert!(ring.write_scripted(&[14 | misc << 32 | 16 << 48, now]), "too many switches");
        }
    }
}

impl AttachThreads for Scripted {
    fn begin(&self) -> ThreadSetup {
        let shared = &*self.0;
        let tid = shared.next_tid.fetch_add(1, Ordering::Relaxed) as u32;
        let first = Arc::new(SamplingSession::none());
        let rate = Rate::of(Periods::USUAL.full_ns);
        let sampled_thread = Arc::new(ThreadShared::new(
            OsThread::new(tid, b""),
            Err(WhyRefused::NotAsked),
            rate,
            Arc::clone(&first),
        ));
        let number = THREAD.get();
        shared.threads.lock()[number].sampled_thread = Some(Arc::clone(&sampled_thread));
        shared.sampler.add_scripted(Arc::clone(&sampled_thread));
        let source = Box::new(ScriptedThread { number, scripted: self.clone() });
        ThreadSetup { sampled: Some((sampled_thread, first)), source }
    }

    fn attach(&self, sampled_thread: &ThreadShared) {
        let shared = &*self.0;
        let is_thread = |thread: &&mut Thread| {
            thread.sampled_thread.as_ref().is_some_and(|one| one.tid() == sampled_thread.tid())
        };
        sampled_thread.append_session(|last| {
            let samples = Arc::new(SampleRing::scripted(RING_BYTES, STEP).unwrap());
            let switches = || Arc::new(SwitchRing::new(PerfRing::scripted(RING_BYTES).unwrap()));
            let switches = shared.has_switches.then(switches);
            let mut threads = shared.threads.lock();
            let thread = threads.iter_mut().find(is_thread)?;
            assert!(last.ring.is_none(), "attached twice");
            thread.sessions += 1;
            let is_wanted = thread.sessions % 2 == 1;
            let period_ns =
                if is_wanted { sampled_thread.rate().period_ns } else { OTHER_PERIOD_NS };
            thread.attached = Some(Rings {
                samples: Arc::clone(&samples),
                switches: switches.clone(),
                period_ns,
            });
            let rate = Rate::of(period_ns);
            let mut session = SamplingSession::new(Some(samples), rate, STEP, SAMPLE_BYTES);
            session.switches = switches;
            shared.sampler.note_thread_sampled(&session);
            Some(session)
        });
    }
}

/// A thread of the script.
#[derive(Debug)]
struct ScriptedThread {
    number: usize,
    scripted: Scripted,
}

impl ThreadSource for ScriptedThread {
    fn return_to_scans(&self, thread: &Arc<ThreadShared>) {
        self.scripted.0.sampler.return_to_scans(thread);
    }

    fn cpu_ns(&mut self) -> Option<u64> {
        let shared = &*self.scripted.0;
        let off_ns = shared.threads.lock()[self.number].off_ns;
        Some(shared.now.load(Ordering::Relaxed) - off_ns)
    }

    fn usage(&mut self, _: Option<&SamplingSession>) -> Usage {
        let threads = self.scripted.0.threads.lock();
        let thread = &threads[self.number];
        Usage {
            // One page fault per sample.
            minor_faults: thread.samples,
            voluntary_switches: thread.voluntary,
            involuntary_switches: thread.involuntary,
            ..Usage::default()
        }
    }
}

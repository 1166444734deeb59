//! A profiler of all threads of the process.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::time::Duration;

use crate::drain::{DemandBudgets, Loss, ProcessThreads, Reader, Sink, Why};
use crate::sampler::{Periods, Sampler, Source, SourceSettings, ThreadCounters};
use crate::sys::{self, Clock, Poller, WhyRefused};
use crate::unwind::ModuleAddress;

/// How a [`Profiler`] samples.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// What takes the samples.
    pub source: Source,
    /// Samples per second of CPU time of each thread.
    pub hertz: u32,
    /// How many bytes of a stack are copied with each sample, at most 65,528.
    pub stack_bytes: u32,
    /// The most frames of a stack.
    pub max_frames: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { source: Source::Auto, hertz: 997, stack_bytes: 32 << 10, max_frames: 512 }
    }
}

/// Samples the threads of the process that run, until it is dropped. In the child of a fork, it does nothing.
#[allow(missing_debug_implementations, reason = "the caches of the unwinder have none")]
pub struct Profiler {
    sampler: Sampler,
    poller: Poller,
    clock: Clock,
    threads: ProcessThreads,
    budgets: DemandBudgets,
    reader: Reader,
    /// The fork generation in which it was made. A child shares its rings with the parent.
    made_in: u32,
}

impl Profiler {
    /// Probes what this process is allowed to do, and begins.
    ///
    /// # Errors
    ///
    /// If no file can be opened for wake-ups, or no thread can be sampled: the error says why.
    pub fn new(settings: Settings) -> io::Result<Self> {
        const RING_BYTES: usize = 256 << 10;
        sys::read_filters();
        sys::Forks::watch();
        let poller = Poller::new()?;
        let periods = Periods::of_rate(settings.hertz);
        let source = SourceSettings {
            source: settings.source,
            signal: None,
            stack_bytes: settings.stack_bytes,
            periods: Some(periods),
        };
        let sampler = Sampler::new(source, RING_BYTES, &poller.waker(), ThreadCounters::default());
        if sampler.is_refused() {
            let why = sampler.probed().refused().unwrap_or(WhyRefused::NotAsked);
            return Err(io::Error::other(why));
        }
        sampler.keep_alive();
        let mut threads = ProcessThreads::default();
        threads.set(Why::Process, Some(periods));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            sampler,
            poller,
            clock: Clock::default(),
            threads,
            budgets: DemandBudgets::new(processors),
            reader: Reader::new(settings.max_frames),
            made_in: sys::Forks::generation(),
        })
    }

    /// The source in use: `perf` or `timer`.
    pub fn source(&self) -> &'static str {
        self.sampler.name()
    }

    /// How many threads were and are sampled, and why others are not.
    pub fn counters(&self) -> &ThreadCounters {
        self.sampler.counters()
    }

    /// Sleeps until threads may have run that are not sampled yet, or for `timeout`. Then reads all samples before.
    pub fn poll(&mut self, timeout: Duration, sink: &mut impl Sink) {
        if !self.is_here() {
            return;
        }
        let until = self.threads.until_next().map_or(timeout, |next| next.min(timeout));
        self.poller.wait(Some(until));
        let now_ns = self.clock.raw_ns(self.clock.now());
        if self.threads.must_search(true) {
            let frequency = self.budgets.of(Why::Process).frequency(now_ns);
            let rate = Why::Process.rate(frequency, self.sampler.periods());
            let hooked = HashSet::new();
            _ = self.threads.search((Why::Process, rate), (&self.sampler, now_ns), &hooked);
        }
        _ = self.threads.check_signals(false);
        self.reader.unwinder.refresh();
        self.reader.unwinder.begin_reading();
        self.threads.drain((&mut self.reader, &self.sampler), sink, &mut self.budgets);
        self.reader.unwinder.end_reading();
        match self.sampler.take_missed_signals() {
            0 => {}
            samples => sink.lose(Loss::SignalStackFull { samples }),
        }
    }

    fn is_here(&self) -> bool {
        self.made_in == sys::Forks::generation() && self.poller.files().still_owned()
    }

    /// The file that a frame is in, and its address there, as symbol tables have it. `None` in the kernel and in no file.
    pub fn locate(&self, frame: ModuleAddress) -> Option<(&Path, u64)> {
        let module = self.reader.unwinder.modules().get(frame.module()?)?;
        Some((&module.file.as_ref().ok()?.path, frame.address()))
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        if self.is_here() {
            self.sampler.end();
            self.threads.give_back(&self.sampler);
        }
    }
}

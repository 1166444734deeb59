//! The threads that enter profiled spans: whether each is sampled, how far its records are read, and whether it is blocked.
//! While a profile of the process is made, also its other threads.

mod attachment;
mod cpu_times;
mod holder_search;
mod holders;
mod inspect;
mod locks;
mod reading_budget;
mod rivals;
mod run_delay;
mod sampled;
mod scan;
mod waits;

use std::collections::HashSet;
use std::num::NonZero;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use attachment::Timing;
pub(crate) use cpu_times::{CpuTime, Ran};
pub(crate) use inspect::{InspectedThread, inspect};
pub(crate) use locks::{BlockedThread, MAX_THREADS};
pub(crate) use sampled::SampledThread;
pub(crate) use waits::WaitingThread;

use reading_budget::ReadingBudget;
use rivals::Rivals;
use sampled::SampledThreads;
use scan::Schedule;
use waits::CaptureBudget;

use crate::budget::CpuBudget;
use crate::drain::{DemandBudgets, ProcessThreads, Why};
use crate::intake::Intake;
use crate::log::{LogEvent, LogKind};
use crate::sampler::{Periods, SamplingSession};
use crate::span::SpanKey;
use crate::stats::Counters;
use crate::sys;

/// A thread that was in no profiled span for this long is detached and forgotten.
const IDLE: Duration = Duration::from_secs(10);
/// How often signals, budgets and parked threads are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadSettings {
    pub(crate) timing: Timing,
    /// The share of one core that reading samples may take.
    pub(crate) cpu_percent: Option<u32>,
    pub(crate) waits: bool,
}

pub(crate) struct Threads {
    pub(crate) sampled: SampledThreads,
    pub(crate) rivals: Rivals,
    process: ProcessThreads,
    settings: ThreadSettings,
    schedule: Schedule,
    captures: CaptureBudget,
    attaching: CpuBudget,
    /// Of all threads together.
    budgets: DemandBudgets,
    reading: ReadingBudget,
    /// The CPU time of reading samples, which falls with the sampling rate.
    reading_ns: u64,
    /// The sampling sessions of threads that are over, and may still read them.
    ended_sessions: Vec<Arc<SamplingSession>>,
    /// Whether the next round can end a session.
    pub(crate) can_end: bool,
    /// [`IDLE`], except in tests.
    pub(crate) idle: Duration,
    checked: Instant,
    /// What was said last of each kind, and when. The event until it is logged.
    said: Vec<(LogKind, Instant, Option<LogEvent>)>,
}

impl Threads {
    pub(crate) fn new(settings: ThreadSettings) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self {
            sampled: SampledThreads::default(),
            rivals: Rivals::default(),
            process: ProcessThreads::default(),
            settings,
            schedule: Schedule::new(),
            captures: CaptureBudget::new(settings.timing.captures),
            attaching: settings.timing.attaching,
            budgets: DemandBudgets::new(processors),
            reading: ReadingBudget::new(settings.cpu_percent),
            reading_ns: 0,
            ended_sessions: Vec::new(),
            can_end: false,
            idle: IDLE,
            checked: Instant::now(),
            said: Vec::new(),
        }
    }

    /// Adds threads that are new, and looks again at those that are used again. Returns whether there are any.
    pub(crate) fn take_new(&mut self, intake: &Intake) -> bool {
        let (new, timing) = (intake.source.take_new(), self.settings.timing);
        let returned = intake.source.take_returned();
        let all = new.iter().chain(&returned);
        all.for_each(|thread| self.process.note_hook(thread.tid()));
        let has_new = self.sampled.bring_back(&returned) || !new.is_empty();
        self.sampled.extend(new.into_iter().map(|thread| SampledThread::new(thread, timing)));
        has_new
    }

    /// Samples all threads of the process from now on for that profile, with that CPU time between two samples; without it,
    /// ends that, and the present round has all samples.
    pub(crate) fn set_process(&mut self, why: Why, period_ns: Option<u64>) {
        // A higher rate falls to the usual low one as soon as it has used up its budget.
        let low_ns = |full_ns: u64| full_ns.max(Periods::USUAL.low_ns);
        self.process.set(why, period_ns.map(|ns| Periods { full_ns: ns, low_ns: low_ns(ns) }));
    }

    pub(crate) fn has_any(&self) -> bool {
        !self.sampled.is_empty() || self.process.is_any()
    }

    /// How long the collector may sleep for them, if it has to wake up.
    pub(crate) fn until_check(&self, intake: &Intake) -> Option<Duration> {
        let has_any = !self.sampled.is_empty() || self.sampled.has_parked();
        let idle = has_any.then_some(self.idle);
        // The signal of the timers must be checked regularly: the program may replace its handler.
        let signal = intake.source.has_timers().then_some(CHECK_INTERVAL);
        idle.into_iter().chain(signal).min()
    }

    /// The ids of the threads whose spans were past their sampling delay at the last scan.
    pub(crate) fn slow_tids(&self) -> impl Iterator<Item = u32> {
        let slow = self.sampled.iter().filter(|sampled| sampled.attachment.is_slow);
        slow.map(|sampled| sampled.thread().tid())
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = &WaitingThread> {
        self.sampled.iter().filter_map(SampledThread::waiting)
    }

    pub(crate) fn has_full_ring(&self) -> bool {
        self.sampled.iter().any(|sampled| sampled.cursor.is_half_full())
            || self.process.has_full_ring()
    }

    /// Drains every ring. Returns the spans that threads are in, and whether there are new threads. `least_age` is the
    /// shortest sampling delay.
    pub(crate) fn drain_all(
        &mut self,
        intake: &mut Intake,
        least_age: u64,
    ) -> (HashSet<SpanKey>, bool) {
        let may_unwind = self.has_any() || self.sampled.has_parked();
        intake.begin_reading(may_unwind);
        // All samples that were taken before are read, also those of threads that came in the meantime.
        let has_new = self.take_new(intake);
        // Read before draining, so that nothing can follow what is drained. And before the scan: a thread that
        // continues and ends after the scan is drained once more.
        self.sampled.iter_mut().for_each(SampledThread::note_over);
        _ = intake.own_cpu.lap();
        // Parks some of them.
        self.scan(intake, least_age);
        self.can_end = false;
        let mut entered = HashSet::new();
        intake.is_lowered = self.reading.times > 1.0;
        self.sampled.retain_mut(|sampled| {
            entered.extend(sampled.drain(intake));
            if sampled.was_over {
                sampled.charge(&mut self.budgets);
                self.ended_sessions.extend(sampled.cursor.give_back(&intake.source));
            }
            !sampled.was_over
        });
        let source = intake.source.clone();
        let (reader, mut sink) = intake.parts();
        self.process.drain((reader, &source), &mut sink, &mut self.budgets);
        if let Some(took) = intake.own_cpu.lap() {
            Counters::add(&intake.counters.sampling.collector_cpu_ns, took);
            self.reading_ns += took;
        }
        let missed = intake.source.take_missed_signals();
        if missed > 0 {
            Counters::add(&intake.counters.samples.dropped_signal_stack_full, missed);
        }
        // Ending sessions costs the same at any sampling rate, so it is not part of `reading`.
        let now_ns = intake.now_ns();
        let mut is_attached_again = false;
        for sampled in self.sampled.iter_mut() {
            is_attached_again |= sampled.end_session(now_ns, &intake.source);
        }
        if is_attached_again {
            self.scan_at_once();
        }
        self.ended_sessions.retain(|session| Arc::strong_count(session) > 1);
        (entered, has_new)
    }

    /// Checks what may have changed, and ends the sampling of threads that are not used. Returns whether another round must
    /// follow soon, which gives back what they have.
    pub(crate) fn maintain(&mut self, intake: &Intake, now: Instant) -> bool {
        let mut has_ended = false;
        if now.duration_since(self.checked) >= CHECK_INTERVAL.min(self.idle) {
            self.checked = now;
            has_ended = self.check_signals(intake);
            self.check_budget(intake);
            sys::read_filters();
            has_ended |= self.sampled.sweep(now, self.idle);
        }
        for sampled in self.sampled.iter_mut() {
            // Its ring is drained once more, in the next round, before it is given back.
            has_ended |= sampled.end_if_idle(now, self.idle);
        }
        has_ended
    }

    pub(crate) fn take_events(&mut self) -> Vec<LogEvent> {
        let said = self.said.iter_mut().filter_map(|(.., event)| event.take());
        said.chain(self.captures.unseen.take()).collect()
    }

    /// Logs an event, unless one of that kind was logged since.
    fn say(&mut self, event: LogEvent, since: Option<Instant>) {
        let is_said = |(kind, at, _): &(LogKind, Instant, _)| {
            *kind == event.kind && since.is_none_or(|since| *at > since)
        };
        if !self.said.iter().any(is_said) {
            self.said.retain(|(kind, ..)| *kind != event.kind);
            self.said.push((event.kind, Instant::now(), Some(event)));
        }
    }

    /// No thread is sampled from now on.
    pub(crate) fn end(&mut self, intake: &Intake) {
        // First: no thread is attached from here on.
        intake.source.end();
        self.take_new(intake);
        self.process.give_back(&intake.source);
        self.sampled.bring_all_back();
        for sampled in self.sampled.iter() {
            sampled.thread().end();
            let last = sampled.thread().last();
            intake.source.give_back(sampled.thread(), &last, last.from(), 0);
        }
    }
}

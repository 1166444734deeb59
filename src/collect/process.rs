//! Makes profiles of the process: that for which a caller waits, and one after each interval while that is wanted.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::assemble::ProfileInputs;
use crate::drain::Why;
use crate::engine::{Engine, ProcessRequest, ProfileKind};
use crate::intake::{Intake, SampledClocks};
use crate::log::{LogEvent, LogKind};
use crate::profile::ProfileId;
use crate::publish::{Asked, Job, UnnamedProfile};
use crate::report;
use crate::sinks::{ProcessSamples, StoredStack, Total};
use crate::span::SpanInfo;
use crate::stats::Counters;
use crate::sys;
use crate::threads::Threads;
use crate::watch::{WallObservations, WallScanner};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContinuousSettings {
    /// Samples per second of CPU time; 0 for none.
    pub(crate) rate: u32,
    pub(crate) interval: Duration,
}

/// In hertz.
pub(crate) const CONTINUOUS_RATES: RangeInclusive<u32> = 1..=1_000;

/// The rate in a text: `on`, `off`, or samples per second. `None` if it is something else.
pub(crate) fn continuous_rate(text: &str) -> Option<u32> {
    match text {
        "on" => Some(ContinuousSettings::USUAL_RATE),
        "off" => Some(0),
        rate => rate.parse().ok().filter(|rate| CONTINUOUS_RATES.contains(rate)),
    }
}

impl ContinuousSettings {
    /// Prime, so that it is in step with nothing, and low.
    pub(crate) const USUAL_RATE: u32 = 49;
    pub(crate) const OFF: Self = Self { rate: 0, interval: Duration::from_secs(60) };
}

#[derive(Clone, Copy)]
pub(super) struct ProfileWindow {
    until: Instant,
    /// When it began: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    began_ns: u64,
    /// The CPU time that the process had used by then.
    began_cpu_ns: Option<u64>,
}

impl ProfileWindow {
    fn begin(intake: &Intake, duration: Duration) -> Self {
        let (began_ns, began_cpu_ns) = (intake.now_ns(), sys::process_cpu_ns());
        Self { until: Instant::now() + duration, began_ns, began_cpu_ns }
    }

    fn until_end(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    fn used_cpu_ns(&self) -> Option<u64> {
        let cpu_ns = sys::process_cpu_ns().zip(self.began_cpu_ns);
        cpu_ns.map(|(now_ns, before_ns)| now_ns.saturating_sub(before_ns))
    }
}

pub(super) struct RunningProfile {
    request: ProcessRequest,
    window: ProfileWindow,
    /// The CPU time that the process has used in it, at its end.
    used_cpu_ns: Option<u64>,
    wall: Option<WallScanner>,
}

pub(crate) struct ProcessProfiler {
    /// The one for which a caller waits.
    running: Option<RunningProfile>,
    /// The present one of those after each interval, and its samples per second of CPU time.
    continuous: Option<(ProfileWindow, u32)>,
    interval: Duration,
    /// What the stacks of the heap have allocated until the present continuous profile.
    allocated: HashMap<StoredStack, Total>,
    pub(super) event: Option<LogEvent>,
}

impl RunningProfile {
    fn is_over(&self) -> bool {
        let is_over = match &self.wall {
            Some(wall) => wall.is_over(),
            None => self.window.until_end().is_zero(),
        };
        is_over || self.request.is_canceled()
    }

    /// The answer to the caller, if it waits.
    pub(super) fn finish(self, engine: &Engine, intake: &mut Intake) -> Option<Job> {
        if self.request.is_canceled() {
            *intake.sinks.requested() = None;
            return None;
        }
        note_open_roots(engine, intake.sinks.requested().as_mut()?);
        // Those that were not open any more have left their fields before.
        intake.sinks.set_root_fields(engine.commands.process.take_roots());
        let samples = intake.sinks.requested().take()?;
        let ProcessRequest { period_ns, reply, .. } = self.request;
        let id = ProfileId::random().unwrap_or(ProfileId::NONE);
        let (end_ns, period_ns, notes) = match self.wall {
            Some(wall) => {
                let observations = wall.observations;
                // What an observation represents, on average.
                let period_ns = samples.weight_ns / observations.found.max(1);
                (wall.added_until_ns, period_ns, Some(notes_of(observations)))
            }
            None => (intake.now_ns(), period_ns, None),
        };
        let cpu_ns = self.used_cpu_ns.filter(|_| notes.is_none());
        let (during, shown) = (self.window.began_ns..end_ns, (cpu_ns, notes));
        let inputs = inputs(engine, intake, period_ns);
        let unnamed = inputs.profile_of_process(id, &samples, during, shown).into();
        Some(Job::Reply { unnamed, asked: Asked::Profile(reply) })
    }
}

impl ProcessProfiler {
    pub(crate) fn new(interval: Duration) -> Self {
        let (running, continuous, event) = (None, None, None);
        Self { running, continuous, interval, allocated: HashMap::new(), event }
    }

    #[cfg(test)]
    pub(crate) fn until(&self) -> Option<Instant> {
        self.running.as_ref().map(|running| running.window.until)
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some() || self.continuous.is_some()
    }

    /// How long until a present profile ends, or until threads are to be observed for it.
    pub(super) fn until_next(&self) -> Option<Duration> {
        let requested = self.running.as_ref().map(|running| match &running.wall {
            Some(wall) => wall.until_next(),
            None => running.window.until_end(),
        });
        let continuous = self.continuous.as_ref().map(|(window, _)| window.until_end());
        requested.into_iter().chain(continuous).min()
    }

    /// Observes where threads are, if it is time. Returns whether that must go on at once.
    pub(super) fn observe(
        &mut self,
        engine: &Engine,
        intake: &mut Intake,
        threads: &Threads,
    ) -> bool {
        let wall = self.running.as_mut().and_then(|running| running.wall.as_mut());
        let Some(wall) = wall.filter(|wall| !wall.is_over()) else { return false };
        if wall.step(intake, threads)
            && let Some(samples) = &mut intake.sinks.wall
        {
            // While they are open: nothing registers a span in which its thread is not sampled.
            let roots = note_unknown_spans(engine, samples);
            note_fields(engine, samples, &roots);
        }
        wall.until_next().is_zero() || wall.is_over()
    }

    /// Begins the profile that is asked for, and returns the present one when it is time: this round reads its last samples.
    pub(super) fn check_requested(
        &mut self,
        (threads, intake): (&mut Threads, &mut Intake),
        asked: Option<ProcessRequest>,
    ) -> Option<RunningProfile> {
        if let Some(request) = asked.filter(|_| self.running.is_none()) {
            let is_wall = request.kind == ProfileKind::Wall;
            if is_wall {
                intake.sinks.wall = Some(ProcessSamples::new(0));
            } else {
                intake.sinks.process = Some(ProcessSamples::new(intake.now_ns()));
                threads.set_process(Why::Process, Some(request.period_ns));
            }
            let window = ProfileWindow::begin(intake, request.duration);
            let scanner = || WallScanner::new(request.period_ns, window.began_ns, window.until);
            let wall = is_wall.then(scanner);
            self.running = Some(RunningProfile { request, window, used_cpu_ns: None, wall });
        }
        let mut ended = self.running.take_if(|running| running.is_over())?;
        if ended.wall.is_none() {
            threads.set_process(Why::Process, None);
        }
        ended.used_cpu_ns = ended.window.used_cpu_ns();
        Some(ended)
    }

    /// Does so for continuous profiles.
    pub(super) fn check_continuous(
        &mut self,
        engine: &Engine,
        (threads, intake): (&mut Threads, &mut Intake),
        is_last: bool,
    ) -> Option<(ProfileWindow, u32)> {
        let wanted = match engine.callsites.are_off() || is_last {
            true => 0,
            false => engine.commands.process.continuous_rate.load(Relaxed),
        };
        let ended = self
            .continuous
            .take_if(|(window, rate)| *rate != wanted || window.until_end().is_zero());
        if ended.as_ref().is_some_and(|(_, rate)| *rate == wanted) {
            intake.clocks.forget_ended();
            self.continuous = Some((ProfileWindow::begin(intake, self.interval), wanted));
        } else if ended.is_some() {
            threads.set_process(Why::Continuous, None);
            // To begin again, if it is wanted.
            engine.waker.wake();
        } else if wanted > 0 && self.continuous.is_none() {
            if let Some(line) = report::source::no_continuous(&intake.source) {
                self.event = Some(LogEvent::warning(LogKind::ContinuousOff, line));
                // Until it is asked for again.
                let rate = &engine.commands.process.continuous_rate;
                _ = rate.compare_exchange(wanted, 0, Relaxed, Relaxed);
                return None;
            }
            intake.clocks = SampledClocks::now();
            threads.set_process(Why::Continuous, Some(1_000_000_000 / u64::from(wanted)));
            intake.sinks.continuous = Some(ProcessSamples::new(0));
            _ = intake.sinks.heap.allocated_since(&mut self.allocated);
            self.continuous = Some((ProfileWindow::begin(intake, self.interval), wanted));
        }
        ended
    }

    /// The continuous profile of a window that is over, whose samples have been read.
    pub(super) fn finish_continuous(
        &mut self,
        (ended, rate): (ProfileWindow, u32),
        engine: &Engine,
        intake: &mut Intake,
    ) -> Option<UnnamedProfile> {
        let cpu_ns = ended.used_cpu_ns();
        // The next one begins where this one ends.
        let now = ProfileWindow::begin(intake, self.interval);
        self.continuous.iter_mut().for_each(|(next, _)| *next = now);
        let next = self.continuous.is_some().then(|| ProcessSamples::new(0));
        let mut samples = std::mem::replace(&mut intake.sinks.continuous, next)?;
        _ = note_unknown_spans(engine, &mut samples);
        note_open_roots(engine, &mut samples);
        for (root, fields) in engine.commands.process.take_roots() {
            samples.set_fields(root, fields.clone());
            intake.sinks.set_root_fields(vec![(root, fields)]);
        }
        let heap = &intake.sinks.heap;
        let allocated = match engine.allocations.tracks_heap() {
            true => heap.allocated_since(&mut self.allocated),
            false => Vec::new(),
        };
        // A process that sleeps has nothing to show.
        if samples.weight_ns == 0 && allocated.is_empty() {
            return None;
        }
        let inputs = inputs(engine, intake, 1_000_000_000 / u64::from(rate.max(1)));
        let id = ProfileId::random().unwrap_or(ProfileId::NONE);
        let during = ended.began_ns..now.began_ns;
        let profile = inputs.continuous_profile(id, &samples, during, cpu_ns, (heap, allocated));
        Counters::add(&engine.counters.continuous.profiles, 1);
        Some(profile.into())
    }
}

pub(super) fn inputs<'a>(
    engine: &'a Engine,
    intake: &'a Intake,
    period_ns: u64,
) -> ProfileInputs<'a> {
    let Intake { sinks, reader, .. } = intake;
    let inputs = ProfileInputs::new(&engine.callsites, &sinks.store, &reader.unwinder);
    let unix_offset_ns = engine.spans.clock.unix_offset_ns();
    ProfileInputs { unix_offset_ns, period_ns, ..inputs }
}

/// Finds the spans, not registered, of samples whose threads have met no hook since. Returns their local roots.
fn note_unknown_spans(engine: &Engine, samples: &mut ProcessSamples) -> Vec<SpanInfo> {
    let unknown: HashSet<_> = samples.unknown_spans().collect();
    let mut roots = HashMap::new();
    for span in engine.spans.find_open(&unknown) {
        for (key, known) in engine.spans.describe(span.id, span.key).unwrap_or_default() {
            samples.set_known(key, known);
            roots.extend((known.root == key).then_some((key, known)));
        }
    }
    roots.into_values().collect()
}

fn note_open_roots(engine: &Engine, samples: &mut ProcessSamples) {
    let open: Vec<_> = samples.open_roots().collect();
    note_fields(engine, samples, &open);
}

fn note_fields(engine: &Engine, samples: &mut ProcessSamples, roots: &[SpanInfo]) {
    for known in roots.iter().filter(|known| engine.spans.is_open(known.id, known.root)) {
        samples.set_fields(known.root, engine.names.values_of(known.id).into_vec());
    }
}

fn notes_of(observations: WallObservations) -> Vec<String> {
    let WallObservations { scans, threads, visited, found, .. } = observations;
    let effective = observations.effective();
    let error = format!(
        "{found} observations of threads, in {scans} scans: a share p of the time has a standard error of \
         sqrt(p (1 - p) / {effective})"
    );
    let part = (visited < threads).then(|| {
        let percent = 100.0 * visited as f64 / threads as f64;
        format!(
            "to limit the cost, {percent:.1} % of the threads were visited at each scan, and represent the others"
        )
    });
    let left_out = "the thread that observes is left out".to_owned();
    [error].into_iter().chain(part).chain([left_out]).collect()
}

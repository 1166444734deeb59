//! Makes profiles of the process.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::assemble::ProfileInputs;
use crate::drain::Why;
use crate::engine::{Engine, ProcessRequest, ProfileKind};
use crate::intake::Intake;
use crate::profile::ProfileId;
use crate::publish::{Asked, Job};
use crate::sinks::ProcessSamples;
use crate::span::SpanInfo;
use crate::sys;
use crate::threads::Threads;
use crate::watch::{WallObservations, WallScanner};

/// The time that a profile of the process covers.
#[derive(Clone, Copy)]
pub(super) struct ProfileWindow {
    pub(super) until: Instant,
    /// When it began: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) began_ns: u64,
    /// The CPU time that the process had used by then.
    began_cpu_ns: Option<u64>,
}

impl ProfileWindow {
    pub(super) fn begin(intake: &Intake, duration: Duration) -> Self {
        let (began_ns, began_cpu_ns) = (intake.now_ns(), sys::process_cpu_ns());
        Self { until: Instant::now() + duration, began_ns, began_cpu_ns }
    }

    pub(super) fn until_end(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    pub(super) fn used_cpu_ns(&self) -> Option<u64> {
        let cpu_ns = sys::process_cpu_ns().zip(self.began_cpu_ns);
        cpu_ns.map(|(now_ns, before_ns)| now_ns.saturating_sub(before_ns))
    }
}

pub(crate) struct RunningProfile {
    request: ProcessRequest,
    window: ProfileWindow,
    /// The CPU time that the process has used in it, at its end.
    used_cpu_ns: Option<u64>,
    /// If it shows wall time.
    wall: Option<WallScanner>,
}

#[derive(Default)]
pub(crate) struct ProcessProfiler {
    running: Option<RunningProfile>,
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
        let inputs =
            ProfileInputs::new(&engine.callsites, &intake.sinks.store, &intake.reader.unwinder);
        let unix_offset_ns = intake.clock().unix_offset_ns();
        let ProcessRequest { period_ns, reply, .. } = self.request;
        let id = ProfileId::random().unwrap_or(ProfileId::NONE);
        let (end_ns, period_ns, notes) = match self.wall {
            Some(wall) => {
                let observations = wall.observations;
                // What an observation represents, on average.
                let period_ns = samples.weight_ns() / observations.found.max(1);
                (wall.added_until_ns, period_ns, Some(notes_of(observations)))
            }
            None => (intake.now_ns(), period_ns, None),
        };
        let inputs = ProfileInputs { unix_offset_ns, period_ns, ..inputs };
        let cpu_ns = self.used_cpu_ns.filter(|_| notes.is_none());
        let (during, shown) = (self.window.began_ns..end_ns, (cpu_ns, notes));
        let unnamed = inputs.profile_of_process(id, &samples, during, shown).into();
        Some(Job::Reply { unnamed, asked: Asked::Profile(reply) })
    }
}

impl ProcessProfiler {
    #[cfg(test)]
    pub(crate) fn until(&self) -> Option<Instant> {
        self.running.as_ref().map(|running| running.window.until)
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// How long until the present profile ends, or until threads are to be observed for it.
    pub(super) fn until_next(&self) -> Option<Duration> {
        let running = self.running.as_ref()?;
        let next = running.wall.as_ref().map(WallScanner::until_next);
        Some(next.unwrap_or_else(|| running.window.until_end()))
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
    pub(super) fn check(
        &mut self,
        asked: Option<ProcessRequest>,
        (threads, intake): (&mut Threads, &mut Intake),
    ) -> Option<RunningProfile> {
        if let Some(request) = asked.filter(|_| self.running.is_none()) {
            let is_wall = request.kind == ProfileKind::Wall;
            if is_wall {
                intake.sinks.wall = Some(ProcessSamples::new());
            } else {
                intake.sinks.process = Some(ProcessSamples::since(intake.now_ns()));
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
}

/// Finds the spans, not registered, of samples whose threads have met no hook since. Returns their local roots.
pub(super) fn note_unknown_spans(engine: &Engine, samples: &mut ProcessSamples) -> Vec<SpanInfo> {
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

pub(super) fn note_open_roots(engine: &Engine, samples: &mut ProcessSamples) {
    let open: Vec<_> = samples.open_roots().collect();
    note_fields(engine, samples, &open);
}

fn note_fields(engine: &Engine, samples: &mut ProcessSamples, roots: &[SpanInfo]) {
    for known in roots.iter().filter(|known| engine.spans.is_open(known.id, known.root)) {
        samples.set_fields(known.root, engine.names.values_of(known.id).into_vec());
    }
}

/// What a profile of wall time says about its precision.
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

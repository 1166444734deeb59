//! Makes profiles of the process.

use std::time::{Duration, Instant};

use crate::assemble::ProfileInputs;
use crate::engine::{Engine, ProcessRequest, RootFields};
use crate::intake::Intake;
use crate::keep::FieldValues;
use crate::profile::ProfileId;
use crate::publish::Job;
use crate::sinks::ProcessSamples;
use crate::span::SpanKey;
use crate::sys;
use crate::threads::Threads;

/// A profile of the process that is being made.
#[derive(Debug)]
pub(crate) struct RunningProfile {
    request: ProcessRequest,
    /// When it began: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    began_ns: u64,
    /// The CPU time that the process had used by then, and from then to the end.
    began_cpu_ns: Option<u64>,
    used_cpu_ns: Option<u64>,
}

/// Makes profiles of the process, one at a time.
#[derive(Debug, Default)]
pub(crate) struct ProcessProfiler {
    running: Option<RunningProfile>,
}

impl RunningProfile {
    fn until_end(&self) -> Duration {
        self.request.until.saturating_duration_since(Instant::now())
    }

    fn is_over(&self) -> bool {
        self.request.is_canceled() || self.until_end().is_zero()
    }
}

impl ProcessProfiler {
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// How long until the present profile ends.
    pub(super) fn until_end(&self) -> Option<Duration> {
        self.running.as_ref().map(RunningProfile::until_end)
    }

    /// Begins the profile that is asked for, and ends the present one when it is time. Returns that one, of which this round
    /// reads the last samples.
    pub(super) fn check(
        &mut self,
        asked: Option<ProcessRequest>,
        (threads, intake): (&mut Threads, &mut Intake),
    ) -> Option<RunningProfile> {
        if let Some(request) = asked.filter(|_| self.running.is_none()) {
            intake.sinks.process = Some(ProcessSamples::new());
            threads.begin_process(request.period_ns);
            threads.search_process(intake);
            let (began_ns, began_cpu_ns) = (intake.now_ns(), sys::process_cpu_ns());
            self.running =
                Some(RunningProfile { request, began_ns, began_cpu_ns, used_cpu_ns: None });
        }
        let mut ended = self.running.take_if(|running| running.is_over())?;
        threads.end_process();
        let cpu_ns = sys::process_cpu_ns().zip(ended.began_cpu_ns);
        ended.used_cpu_ns = cpu_ns.map(|(now_ns, before_ns)| now_ns.saturating_sub(before_ns));
        Some(ended)
    }
}

/// Notes what a round has shown of spans in which samples fell. Of `closed` local roots, all samples have been read.
pub(super) fn note_process_spans(intake: &mut Intake, closed: Vec<(SpanKey, RootFields)>) {
    intake.sinks.note_spans();
    intake.sinks.set_root_fields(closed);
}

/// Notes the fields of local roots that are still open.
pub(super) fn note_open_roots(engine: &Engine, samples: &mut ProcessSamples) {
    let open: Vec<_> = samples.open_roots().collect();
    for known in open.into_iter().filter(|known| engine.spans.is_open(known.id, known.root)) {
        let values = engine.with_dispatch(|dispatch| FieldValues::of(known.id, dispatch));
        let values = values.map(|value| engine.redaction.redact_span(value).into());
        samples.set_fields(known.root, values.into_vec());
    }
}

impl RunningProfile {
    /// The answer to the caller, if it waits.
    pub(super) fn finish(self, engine: &Engine, intake: &mut Intake) -> Option<Job> {
        let samples = intake.sinks.process.as_mut()?;
        if self.request.is_canceled() {
            intake.sinks.process = None;
            return None;
        }
        note_open_roots(engine, samples);
        // Those that were not open any more have left their fields before.
        intake.sinks.set_root_fields(engine.commands.process.take_roots());
        let samples = intake.sinks.process.take()?;
        let inputs = ProfileInputs::new(&engine.callsites, &intake.sinks.store, &intake.unwinder);
        let unix_offset_ns = intake.clock().unix_offset_ns();
        let ProcessRequest { period_ns, reply, .. } = self.request;
        let inputs = ProfileInputs { unix_offset_ns, period_ns, ..inputs };
        let id = ProfileId::random().unwrap_or(ProfileId::NONE);
        let (during, redaction) = (self.began_ns..intake.now_ns(), &*engine.redaction);
        let (profile, modules) =
            inputs.profile_of_process(id, (&samples, redaction), during, self.used_cpu_ns);
        Some(Job::Reply { profile: Box::new(profile), modules, reply })
    }
}

//! Makes the profiles of a process that is profiled continuously.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::process::{ProfileWindow, note_open_roots, note_unknown_spans};
use crate::assemble::ProfileInputs;
use crate::drain::Why;
use crate::engine::Engine;
use crate::intake::{Intake, SampledClocks};
use crate::log::{LogEvent, LogKind};
use crate::profile::ProfileId;
use crate::publish::UnnamedProfile;
use crate::report;
use crate::sinks::{ProcessSamples, StoredStack, Total};
use crate::stats::Counters;
use crate::threads::Threads;

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

/// Makes a profile of the process after each interval, while that is wanted.
pub(crate) struct ContinuousProfiler {
    interval: Duration,
    /// The present profile, and its samples per second of CPU time.
    window: Option<(ProfileWindow, u32)>,
    /// What the stacks of the heap have allocated until the present window.
    allocated: HashMap<StoredStack, Total>,
    pub(super) event: Option<LogEvent>,
}

impl ContinuousProfiler {
    pub(crate) fn new(interval: Duration) -> Self {
        Self { interval, window: None, allocated: HashMap::new(), event: None }
    }

    pub(super) fn until_end(&self) -> Option<Duration> {
        self.window.as_ref().map(|(window, _)| window.until_end())
    }

    pub(super) fn is_running(&self) -> bool {
        self.window.is_some()
    }

    /// Begins and ends profiles as it is wanted. Returns the one that ends, of which this round reads the last samples.
    pub(super) fn check(
        &mut self,
        engine: &Engine,
        (threads, intake): (&mut Threads, &mut Intake),
        is_last: bool,
    ) -> Option<(ProfileWindow, u32)> {
        let wanted = match engine.callsites.are_off() || is_last {
            true => 0,
            false => engine.commands.process.continuous_rate.load(Relaxed),
        };
        let ended =
            self.window.take_if(|(window, rate)| *rate != wanted || window.until_end().is_zero());
        if ended.as_ref().is_some_and(|(_, rate)| *rate == wanted) {
            intake.clocks.forget_ended();
            self.window = Some((ProfileWindow::begin(intake, self.interval), wanted));
        } else if ended.is_some() {
            threads.set_process(Why::Continuous, None);
            // To begin again, if it is wanted.
            engine.waker.wake();
        } else if wanted > 0 && self.window.is_none() {
            if let Some(line) = report::source::no_continuous(&intake.source) {
                self.event = Some(LogEvent::warning(LogKind::ContinuousOff, line));
                // Until it is asked for again.
                let rate = &engine.commands.process.continuous_rate;
                _ = rate.compare_exchange(wanted, 0, Relaxed, Relaxed);
                return None;
            }
            intake.clocks = SampledClocks::now();
            threads.set_process(Why::Continuous, Some(1_000_000_000 / u64::from(wanted)));
            intake.sinks.continuous = Some(ProcessSamples::new());
            _ = intake.sinks.heap.allocated_since(&mut self.allocated);
            self.window = Some((ProfileWindow::begin(intake, self.interval), wanted));
        }
        ended
    }

    /// The profile of a window that is over, whose samples have been read.
    pub(super) fn finish(
        &mut self,
        (ended, rate): (ProfileWindow, u32),
        engine: &Engine,
        intake: &mut Intake,
    ) -> Option<UnnamedProfile> {
        let cpu_ns = ended.used_cpu_ns();
        // The next one begins where this one ends.
        let now = ProfileWindow::begin(intake, self.interval);
        self.window.iter_mut().for_each(|(next, _)| *next = now);
        let next = self.is_running().then(ProcessSamples::new);
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
        if samples.weight_ns() == 0 && allocated.is_empty() {
            return None;
        }
        let inputs =
            ProfileInputs::new(&engine.callsites, &intake.sinks.store, &intake.reader.unwinder);
        let unix_offset_ns = intake.clock().unix_offset_ns();
        let period_ns = 1_000_000_000 / u64::from(rate.max(1));
        let inputs = ProfileInputs { unix_offset_ns, period_ns, ..inputs };
        let id = ProfileId::random().unwrap_or(ProfileId::NONE);
        let during = ended.began_ns..now.began_ns;
        let profile = inputs.continuous_profile(id, &samples, during, cpu_ns, (heap, &allocated));
        Counters::add(&engine.counters.continuous.profiles, 1);
        Some(profile.into())
    }
}

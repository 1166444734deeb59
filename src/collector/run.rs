//! The collector's loop.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender};

use super::build::{Builder, Built};
use super::command::{Command, Job};
use super::drain::{Drain, Sampled};
use super::engine::{Engine, Limits};
use super::pending::{Known, Pending, Stack};
use super::waits::{Captures, LOOK, Looker, Seen, next_look};
use crate::keep::Epoch;
use crate::otel::EndedSpan;
use crate::sampler::Sampler;
use crate::span::{LOOK_INTERVAL, Notice, SpanKey};
use crate::stats::Counters;
use crate::sys::{self, Poller};
use crate::unwind::Unwinder;

/// How long a kept span waits for its root to close, and for others of its tree to be kept too.
const LINGER: Duration = Duration::from_secs(2);
/// After how long without a profiled span a thread is disarmed.
const IDLE: Duration = Duration::from_secs(10);
const _: () = assert!(IDLE.as_secs() >= 2 * LOOK_INTERVAL.as_secs());
const WRONG_ORDER: &str = "the profiling layer comes after the one of tracing-opentelemetry, so \
    profiles and OpenTelemetry spans do not know of each other: add it before, as in \
    `.with(profiling).with(opentelemetry)`, or give the tracer provider a `Handle::span_processor`";
/// How often the clock's rate is measured anew.
const REFINE_INTERVAL: Duration = Duration::from_secs(1);

/// The thread that drains the rings.
pub(super) struct Collector {
    engine: Arc<Engine>,
    source: Sampler,
    poller: Poller,
    commands: Receiver<Command>,
    jobs: Sender<Job>,
    limits: Limits,
    base_period_ns: u64,
    unwinder: Unwinder,
    pending: Pending,
    sampled: Vec<Sampled>,
    round: u64,
    /// Spans that closed after the last round had begun.
    closed: Vec<SpanKey>,
    refined: Instant,
    introduced: bool,
    /// Who waits for the end.
    at_end: Vec<Sender<()>>,
    /// How soon somebody waits for a look.
    look_again: Option<Duration>,
    stack: Stack,
    /// A copy of one.
    stack_bytes: Vec<u8>,
    has_told_of_signal: bool,
    captures: Captures,
    /// With which thread the next look begins.
    first_look: usize,
    /// How soon it is, as far as the last one says.
    look_interval: Duration,
    /// When a thread was last seen in a profiled span: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    in_span_ns: u64,
}

/// What a round was asked to do besides.
#[derive(Default)]
struct Asked {
    acknowledge: Vec<Sender<()>>,
    everything: bool,
    end: bool,
}

impl Collector {
    pub(super) fn new(
        engine: Arc<Engine>,
        source: Sampler,
        poller: Poller,
        commands: Receiver<Command>,
        jobs: Sender<Job>,
        limits: Limits,
        base_period_ns: u64,
    ) -> Self {
        Self {
            engine,
            source,
            poller,
            commands,
            jobs,
            limits,
            base_period_ns,
            unwinder: Unwinder::default(),
            pending: Pending::new(limits.memory_bytes, limits.samples_per_profile),
            sampled: Vec::new(),
            round: 0,
            closed: Vec::new(),
            refined: Instant::now(),
            introduced: false,
            at_end: Vec::new(),
            look_again: None,
            stack: Stack::new(),
            stack_bytes: Vec::new(),
            has_told_of_signal: false,
            captures: Captures::new(),
            first_look: 0,
            look_interval: LOOK,
            in_span_ns: 0,
        }
    }

    pub(super) fn run(mut self) {
        let run = || while self.step() {};
        // Nothing here should panic; if it does, the host must not notice more than silence.
        let panicked = catch_unwind(AssertUnwindSafe(run)).is_err();
        self.engine.stop();
        self.hand_on(self.engine.end_meeting());
        // First: from then on no thread is armed.
        self.source.end();
        self.sampled.extend(self.source.take_new().into_iter().map(Sampled::new));
        for sampled in &self.sampled {
            sampled.recording.end();
            self.source.give_back(&sampled.recording);
        }
        if panicked {
            self.engine.with_dispatch(|| {
                tracing::error!(
                    target: "tracing_profiling",
                    "the collector has failed and profiling has ended; please report this"
                );
            });
        }
        _ = self.jobs.send(Job::Stop(self.at_end));
    }

    /// Sleeps until there is something to do, and does it. False when all has ended.
    fn step(&mut self) -> bool {
        let sleep = self.sleep();
        let start = Instant::now();
        loop {
            let left = sleep.map(|sleep| sleep.saturating_sub(start.elapsed()));
            let look = (!self.sampled.is_empty()).then(|| self.look_interval());
            let is_woken = self.poller.wait(left.into_iter().chain(look).min());
            if is_woken || sleep.is_some_and(|sleep| start.elapsed() >= sleep) {
                break;
            }
            self.look_at_waits();
        }
        loop {
            let (asked, again) = self.do_round();
            if asked.end {
                self.at_end = asked.acknowledge;
                return false;
            }
            for done in asked.acknowledge {
                _ = self.jobs.send(Job::Done(done));
            }
            if !again {
                return true;
            }
        }
    }

    /// How long until the next look at threads that may be waiting.
    fn look_interval(&self) -> Duration {
        // Where a look at a thread is a system call, all of them together may take 1 % of the time.
        const A_THREAD: Duration = Duration::from_micros(100);
        let by_clock = self.sampled.iter().filter(|sampled| sampled.is_looked_at_by_clock());
        let least = u32::try_from(by_clock.count()).map_or(LOOK, |count| A_THREAD * count);
        self.look_interval.max(least)
    }

    /// Looks for threads that wait inside a profiled span.
    fn look_at_waits(&mut self) {
        let start = sys::thread_cpu_ns();
        let clock = self.engine.spans.clock();
        let now_ns = clock.raw_ns(clock.now());
        let mut looker = Looker {
            unwinder: &mut self.unwinder,
            pending: &mut self.pending,
            counters: &self.engine.counters,
            most_frames: self.limits.frames_per_stack,
            stack_bytes: self.limits.stack_bytes,
            round: self.round,
            now_ns,
            bytes: &mut self.stack_bytes,
            captures: &mut self.captures,
        };
        // Not always the same first: there may not be time for all.
        let (later, first) = match self.sampled.len() {
            0 => self.sampled.split_at_mut(0),
            threads => self.sampled.split_at_mut(self.first_look % threads),
        };
        self.first_look = self.first_look.wrapping_add(7);
        let mut soonest = None;
        for sampled in first.iter_mut().chain(later) {
            let seen = sampled.look(&mut looker);
            let unchanged_ns = match seen {
                Seen::OutsideSpans => continue,
                Seen::Busy => 0,
                Seen::StillWaiting { waited_ns } => waited_ns,
            };
            let next = next_look(seen, unchanged_ns);
            soonest = Some(soonest.map_or(next, |soonest: Duration| soonest.min(next)));
        }
        if soonest.is_some() {
            self.in_span_ns = now_ns;
        }
        let idle_ns = now_ns.saturating_sub(self.in_span_ns);
        self.look_interval = soonest.unwrap_or_else(|| next_look(Seen::OutsideSpans, idle_ns));
        let end = sys::thread_cpu_ns();
        if let Some(took) = start.zip(end).and_then(|(start, end)| end.checked_sub(start)) {
            Counters::add(&self.engine.counters.draining_cpu_ns, took);
        }
    }

    /// Nothing to wait for means to sleep until somebody wakes us: a process in which no profiled
    /// span is open has no wake-ups of ours, once its threads are disarmed.
    fn sleep(&self) -> Option<Duration> {
        let linger = self.engine.keeper.next_ripe(LINGER);
        let idle = (!self.sampled.is_empty()).then_some(IDLE);
        // Whether the signal of timers is still ours must be asked.
        let signal = self.source.has_timers().then_some(REFINE_INTERVAL);
        linger.into_iter().chain(idle).chain(signal).chain(self.look_again).min()
    }

    /// One look at everything. Returns what was asked for, and whether another round must follow
    /// at once.
    ///
    /// What has closed before a round begins is complete when it ends: all its marks and samples
    /// were written before. So profiles are made only of epochs that are ended at the beginning.
    fn do_round(&mut self) -> (Asked, bool) {
        self.round += 1;
        let (ended, look_again) = self.engine.look_after_meeting();
        self.hand_on(ended);
        self.look_again = look_again;
        let asked = self.take_commands();
        let new = self.source.take_new();
        let has_new = !new.is_empty();
        self.sampled.extend(new.into_iter().map(Sampled::new));
        let mut closed = std::mem::take(&mut self.closed);
        closed.extend(self.take_notices());
        let epochs = self.end_epochs(&closed, asked.everything);

        let entered = self.drain_all();
        if has_new {
            // A thread that was just armed is about to enter a span.
            let clock = self.engine.spans.clock();
            self.in_span_ns = clock.raw_ns(clock.now());
            self.look_interval = LOOK;
        }
        // A span is made known before its first mark is written, so those that the marks just
        // read belong to are among these.
        let closed_since = self.take_notices();
        self.closed.extend(closed_since);

        for epoch in epochs {
            self.export(epoch);
        }
        for span in closed {
            self.engine.keeper.forget(span);
            self.pending.remove_root(span);
            self.pending.close(span);
        }
        let keeper = &self.engine.keeper;
        let given_up = self.pending.give_up_closed(|root| keeper.has_epoch(root));
        Counters::add(&self.engine.counters.samples_dropped_memory, given_up);
        keeper.set_memory_is_short(self.pending.is_short());
        self.housekeep(&entered);
        let again = self.closed.iter().any(|span| self.engine.keeper.has_epoch(*span));
        (asked, again)
    }

    /// What comes next may block or fail, which must hold up nothing here.
    fn hand_on(&self, ended: Vec<EndedSpan>) {
        if !ended.is_empty() {
            _ = self.jobs.send(Job::HandOn(ended));
        }
    }

    fn take_commands(&self) -> Asked {
        let mut asked = Asked::default();
        for command in self.commands.try_iter() {
            asked.everything = true;
            match command {
                Command::Flush(done) => asked.acknowledge.push(done),
                Command::Shutdown(done) => {
                    // What is promised from here on could not be kept.
                    self.engine.keeper.end();
                    asked.acknowledge.extend(done);
                    asked.end = true;
                }
            }
        }
        asked
    }

    /// Learns of spans; returns those that have closed.
    fn take_notices(&mut self) -> impl Iterator<Item = SpanKey> + use<> {
        let mut closed = Vec::new();
        while let Some(notice) = self.engine.spans.take_notice() {
            match notice {
                Notice::Opened { key, parent, root, id, plan } => {
                    self.pending.know(key, Known { parent, root, id, plan }, self.round);
                }
                Notice::Closed { key, ids } => {
                    self.pending.name(key, ids);
                    closed.push(key);
                }
            }
        }
        if self.engine.spans.lost_notice() {
            let is_open = |known: &Known, key| self.engine.spans.is_open(known.id, key);
            let spans = self.pending.known_spans();
            closed.extend(
                spans.iter().filter(|(key, known)| !is_open(known, *key)).map(|(key, _)| *key),
            );
        }
        closed.into_iter()
    }

    fn end_epochs(&mut self, closed: &[SpanKey], everything: bool) -> Vec<Epoch> {
        let linger = if everything { Duration::ZERO } else { LINGER };
        let ripe = self.engine.keeper.ripe(linger);
        let roots = closed.iter().copied().chain(ripe);
        let engine = Arc::clone(&self.engine);
        let end = |root| {
            engine.keeper.end_epoch(root, |epoch| {
                // All spans that are in it are known then.
                let closed_since = self.take_notices();
                self.closed.extend(closed_since);
                self.enclosing(epoch)
            })
        };
        roots.filter_map(end).collect()
    }

    /// The open spans around those of an epoch, with the samples that the epoch's profile takes
    /// from them: if they are kept later, they list this profile.
    fn enclosing(&self, epoch: &Epoch) -> Vec<(SpanKey, u64)> {
        let samples = epoch.kept.iter().map(|span| (span.key, span.samples)).collect();
        let is_open = |span: SpanKey| {
            let known = self.pending.get(span).and_then(|pending| pending.known);
            known.is_some_and(|known| self.engine.spans.is_open(known.id, span))
        };
        let enclosing = self.pending.enclosing(&samples).into_iter();
        enclosing.filter(|(span, _)| is_open(*span)).collect()
    }

    /// Reads every ring. Returns the spans that threads are in.
    fn drain_all(&mut self) -> HashSet<SpanKey> {
        if !self.sampled.is_empty() {
            self.unwinder.refresh();
        }
        // Asked before anything is read: then nothing comes after what is read. And before the look at
        // waits: a thread that goes on and ends after that look is read once more.
        let over: Vec<bool> =
            self.sampled.iter().map(|sampled| sampled.recording.is_over()).collect();
        self.look_at_waits();
        let mut over = over.into_iter();
        let start = sys::thread_cpu_ns();
        let mut entered = HashSet::new();
        let mut drain = Drain {
            unwinder: &mut self.unwinder,
            pending: &mut self.pending,
            counters: &self.engine.counters,
            most_frames: self.limits.frames_per_stack,
            round: self.round,
            stack: &mut self.stack,
        };
        self.sampled.retain_mut(|sampled| {
            let is_over = over.next().unwrap_or(false);
            entered.extend(sampled.drain(&mut drain));
            if is_over {
                self.source.give_back(&sampled.recording);
            }
            !is_over
        });
        let end = sys::thread_cpu_ns();
        if let Some(took) = start.zip(end).and_then(|(start, end)| end.checked_sub(start)) {
            Counters::add(&self.engine.counters.draining_cpu_ns, took);
        }
        entered
    }

    fn export(&mut self, mut epoch: Epoch) {
        for span in &mut epoch.kept {
            let known = self.pending.get(span.key).and_then(|pending| pending.ids);
            span.trace = span.trace.or(known);
        }
        let Some(id) = epoch.id else {
            _ = self.jobs.send(Job::Report(epoch.kept));
            return;
        };
        let builder = Builder {
            pending: &self.pending,
            modules: self.unwinder.modules(),
            callsites: &self.engine.callsites,
            unix_offset_ns: self.engine.spans.clock().unix_offset_ns(),
            period_ns: self.base_period_ns,
            most_samples: self.limits.samples_per_profile,
            hides_kernel: self.source.hides_kernel_alone(),
        };
        let Built { profile, modules, spans, thinned } = builder.build(id, &epoch);
        Counters::add(&self.engine.counters.samples_thinned, thinned);
        for span in spans {
            self.pending.clear(span);
        }
        let profile = Box::new(profile);
        _ = self.jobs.send(Job::Export { profile, modules, kept: epoch.kept });
    }

    /// Threads whose timer has a signal that was taken from us are armed anew, for another one.
    fn check_signals(&mut self) {
        let mut is_lost = false;
        for sampled in &self.sampled {
            let recording = &sampled.recording;
            if let Some(ring) = recording.ring.as_ref().filter(|ring| ring.has_lost_signal()) {
                ring.stop_timer();
                recording.end();
                is_lost = true;
            }
        }
        if !is_lost {
            return;
        }
        self.engine.waker.wake();
        if std::mem::replace(&mut self.has_told_of_signal, true) {
            return;
        }
        let line = "the program has installed a handler for the signal of our timers: from now on \
            they use another one";
        _ = self.jobs.send(Job::Say { line: line.to_owned(), is_warning: true });
    }

    fn housekeep(&mut self, entered: &HashSet<SpanKey>) {
        let now = Instant::now();
        if now.duration_since(self.refined) >= REFINE_INTERVAL {
            self.engine.spans.clock().refine();
            self.refined = now;
            self.check_signals();
        }
        for sampled in &mut self.sampled {
            // Its ring is read once more, in the next round, before it is given back.
            if sampled.end_if_idle(now, IDLE) {
                self.engine.waker.wake();
            }
        }
        // A span is made known when its first stretch ends, or never.
        let unknown = self.pending.remove_unknown(self.round.saturating_sub(1), entered);
        Counters::add(&self.engine.counters.samples_dropped_unknown_span, unknown);
        if self.engine.has_dispatch() && self.engine.must_warn_of_order() {
            _ = self.jobs.send(Job::Say { line: WRONG_ORDER.to_owned(), is_warning: true });
        }
        if !self.introduced && self.engine.has_dispatch() {
            self.introduced = true;
            let (line, is_warning) = self.engine.source_line.clone();
            _ = self.jobs.send(Job::Say { line, is_warning });
            if let Some(line) = self.engine.take_problem() {
                _ = self.jobs.send(Job::Say { line, is_warning: true });
            }
        }
    }
}

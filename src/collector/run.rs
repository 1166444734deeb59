//! The collector's loop.

use std::collections::HashSet;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender};

use super::budget::{ReadingBudget, Share};
use super::build::{Built, ProfileAssembler, ProfileInputs};
use super::command::Command;
use super::copied::{CopiedReader, ReadTarget, add_idle, new_sample};
use super::demand::DemandBudgets;
use super::drain::Drain;
use super::engine::Engine;
use super::heap::{Heap, HeapRequest, make_heap, update_counting};
use super::limits::Limits;
use super::logged::Logged;
use super::modules;
use super::open_spans::{OpenRequest, list_open};
use super::parked::SampledThreads;
use super::sampled::{SampledThread, fill_time};
use super::scan::passed;
use super::shed::Shed;
use super::sinks::Sinks;
use super::stack::Stack;
use super::store::Store;
use super::waits::{CaptureBudget, SCAN_INTERVAL};
use super::watchdog::Watchdog;
use crate::keep::Epoch;
use crate::log::{LogEvent, LogKind};
use crate::publish::{FlushRequest, Job, Room, report};
use crate::sampler::{Arming, Sampler, ThreadShared};
use crate::span::{SpanEvent, SpanInfo, SpanKey};
use crate::stats::Counters;
use crate::sys::{self, Poller};
use crate::unwind::Unwinder;

/// How long a kept span waits for its root to close, and for other spans of its tree to be kept.
const LINGER: Duration = Duration::from_secs(2);
/// A thread that was in no profiled span for this long is disarmed and forgotten.
const IDLE: Duration = Duration::from_secs(10);
/// How often the clock's rate is measured again.
const REFINE_INTERVAL: Duration = Duration::from_secs(1);

/// The collector's state.
pub(super) struct Collector {
    pub(super) engine: Arc<Engine>,
    pub(super) source: Sampler,
    poller: Poller,
    commands: Receiver<Command>,
    jobs: Sender<Job>,
    pub(super) limits: Limits,
    pub(super) unwinder: Unwinder,
    pub(super) sinks: Sinks,
    pub(super) sampled: SampledThreads,
    pub(super) round: u64,
    /// Spans that closed after the last round began.
    pub(super) closed: Vec<SpanKey>,
    refined: Instant,
    /// Callers that wait for the end.
    at_end: Vec<FlushRequest>,
    stack: Stack,
    /// A buffer for the copy of a blocked thread's stack.
    pub(super) stack_bytes: Vec<u8>,
    pub(super) captures: CaptureBudget,
    pub(super) copied: CopiedReader,
    pub(super) attaching: Share,
    /// Of all threads together.
    pub(super) budgets: DemandBudgets,
    /// Those of threads that are over, and may still read them.
    ended_armings: Vec<Arc<Arming>>,
    /// Whether the next round can end an arming.
    pub(super) can_end: bool,
    /// The thread at which the next scan starts.
    pub(super) first_scanned: usize,
    /// The interval until the next scan, as the last one determined it.
    pub(super) scan_interval: Duration,
    pub(super) scanned: Instant,
    /// Whether a hook may wake the collector for a scan, and when one last did.
    pub(super) hooks_wake: bool,
    pub(super) woken: Option<Instant>,
    /// [`IDLE`], except in tests.
    pub(super) idle: Duration,
    /// Whether the last scan found a thread in a profiled span.
    pub(super) is_in_span: bool,
    pub(super) watchdog: Watchdog,
    pub(super) reading: ReadingBudget,
    /// CPU time of reading samples, which falls with the sampling rate.
    pub(super) reading_ns: u64,
    /// Memory for profiles that have not been exported yet.
    room: Room,
    pub(super) logged: Logged,
    pub(super) shed: Shed,
}

/// The commands that a round has received.
#[derive(Default)]
struct RoundRequests {
    acknowledge: Vec<FlushRequest>,
    /// To be answered after the round.
    open_spans: Vec<OpenRequest>,
    heaps: Vec<HeapRequest>,
    everything: bool,
    end: bool,
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

impl Collector {
    pub(super) fn new(
        engine: Arc<Engine>,
        source: Sampler,
        poller: Poller,
        commands: Receiver<Command>,
        jobs: Sender<Job>,
        limits: Limits,
    ) -> Self {
        Self {
            engine,
            source,
            poller,
            commands,
            jobs,
            limits,
            unwinder: Unwinder::default(),
            sinks: Sinks {
                store: Store::new(
                    limits.memory_bytes,
                    limits.samples_per_profile,
                    limits.pending_spans,
                ),
                heap: Heap::default(),
            },
            reading: ReadingBudget::new(limits.cpu_percent),
            reading_ns: 0,
            room: Room::new(limits.export_bytes),
            logged: Logged::new(limits.pace.first_look),
            shed: Shed::new(limits.shed),
            sampled: SampledThreads::default(),
            round: 0,
            closed: Vec::new(),
            refined: Instant::now(),
            at_end: Vec::new(),
            stack: Stack::new(),
            stack_bytes: Vec::new(),
            captures: CaptureBudget::new(),
            copied: CopiedReader::new(limits.cpu_percent.is_some()),
            attaching: limits.pace.attaching,
            budgets: DemandBudgets::new(processors()),
            ended_armings: Vec::new(),
            can_end: false,
            first_scanned: 0,
            scan_interval: SCAN_INTERVAL,
            scanned: Instant::now(),
            hooks_wake: false,
            woken: None,
            idle: IDLE,
            is_in_span: false,
            watchdog: Watchdog::new(),
        }
    }

    /// Drops `begins` once all files that are needed from the start are open.
    pub(super) fn run(mut self, begins: Sender<()>) {
        let run = || {
            self.source.keep_on();
            self.check_load(Instant::now());
            drop(begins);
            let mut is_broken = false;
            while self.step() {
                // The program has closed the layer's files: makes the profiles that are due, then stops.
                if !self.poller.files().still_owned() && !std::mem::replace(&mut is_broken, true) {
                    self.engine.shutdown_later();
                }
            }
        };
        // Nothing here should panic. If it does, the program loses its profiles and nothing else.
        let panicked = catch_unwind(AssertUnwindSafe(run)).is_err();
        self.engine.stop();
        let is_broken = !self.poller.files().still_owned();
        // First: no thread is armed from here on.
        self.source.end();
        let new = self.source.take_new();
        self.adopt(new);
        self.sampled.bring_all_back();
        for sampled in self.sampled.iter() {
            sampled.thread().end();
            let last = sampled.thread().last();
            self.source.give_back(sampled.thread(), &last, last.from(), 0);
        }
        let why = match (panicked, is_broken) {
            (true, _) => Some((
                LogKind::Failed,
                "the collector has failed and profiling has ended; please report this",
            )),
            (false, true) => Some((
                LogKind::FilesClosed,
                "the program has closed the profiler's files (with `close_range` or similar), and profiling has \
                 ended: create the layer after that call",
            )),
            (false, false) => None,
        };
        if let Some((kind, message)) = why {
            self.engine.publish.reporter.log(LogEvent::error(kind, message));
        }
        _ = self.jobs.send(Job::Stop(std::mem::take(&mut self.at_end)));
    }

    /// Sleeps until there is work, and does it. Returns false at the end.
    fn step(&mut self) -> bool {
        let sleep = self.sleep();
        let start = Instant::now();
        loop {
            let left = sleep.map(|sleep| sleep.saturating_sub(start.elapsed()));
            let next =
                (!self.sampled.is_empty()).then(|| self.until_scan().min(fill_time(&self.sampled)));
            let longest = left.into_iter().chain(next).min();
            let is_woken = self.poller.wait(longest);
            self.note_present(longest.unwrap_or(Duration::MAX));
            let is_over = is_woken || sleep.is_some_and(|sleep| start.elapsed() >= sleep);
            let is_over = is_over || !self.poller.files().still_owned();
            let is_full = || self.sampled.iter().any(|sampled| sampled.cursor.is_half_full());
            let is_outdated = || !self.sampled.is_empty() && self.unwinder.is_outdated();
            if is_over || is_full() || is_outdated() {
                break;
            }
            if self.until_scan() > self.scan_interval() / 2 {
                continue;
            }
            self.scan_threads();
            let is_check_due =
                self.is_in_span && self.until_next_check().is_some_and(|left| left.is_zero());
            if is_check_due || self.can_end {
                break;
            }
        }
        self.do_rounds()
    }

    /// Runs rounds until there is no more work. Returns false at the end.
    pub(super) fn do_rounds(&mut self) -> bool {
        loop {
            let (asked, again) = self.do_round();
            for request in asked.open_spans {
                let unwinding = (&mut self.unwinder, self.limits.frames_per_stack);
                let job =
                    list_open(&self.engine, &self.sinks.store, &self.sampled, unwinding, request);
                _ = self.jobs.send(job);
            }
            for request in asked.heaps {
                let Sinks { store, heap } = &mut self.sinks;
                let inputs = ProfileInputs::new(&self.engine, store, &self.unwinder);
                let job = make_heap(heap, inputs, request);
                _ = self.jobs.send(job);
            }
            if asked.end {
                self.at_end = asked.acknowledge;
                return false;
            }
            for waiting in asked.acknowledge {
                _ = self.jobs.send(Job::Done(waiting));
            }
            if !again {
                return true;
            }
        }
    }

    /// Adds newly sampled threads.
    fn adopt(&mut self, new: Vec<Arc<ThreadShared>>) {
        let pace = self.limits.pace;
        let begin = |thread| SampledThread::new(thread, pace);
        self.sampled.extend(new.into_iter().map(begin));
    }

    /// How long to sleep, or `None` to sleep until woken. A process without an open profiled span has no wake-ups
    /// once its threads are disarmed.
    pub(super) fn sleep(&self) -> Option<Duration> {
        let linger = self.engine.admission.until_next_expiry(LINGER);
        let has_any = !self.sampled.is_empty() || self.sampled.has_parked();
        let idle = has_any.then_some(self.idle);
        // The signal of the timers must be checked regularly: the program may replace its handler.
        let signal = self.source.has_timers().then_some(REFINE_INTERVAL);
        // Open spans are checked only while a thread is in a span or a span is watched.
        let is_open = self.is_in_span || self.must_check_spans();
        let watchdog = self.until_next_check().filter(|_| is_open);
        let soonest = linger.into_iter().chain(idle).chain(signal).chain(self.logged.until_next());
        soonest.chain(watchdog).chain(self.engine.copied.awaits.until_room()).min()
    }

    /// Runs one round. Returns the commands, and whether another round must follow at once.
    ///
    /// A span that closes before a round begins is complete when it ends: all its intervals and samples have been
    /// written. Profiles are therefore made only of epochs that are ended at the beginning of the round.
    fn do_round(&mut self) -> (RoundRequests, bool) {
        self.round += 1;
        let asked = self.take_commands();
        let new = self.source.take_new();
        let has_returned = self.sampled.bring_back(&self.source.take_returned());
        let has_new = has_returned || !new.is_empty();
        self.adopt(new);
        let mut closed = std::mem::take(&mut self.closed);
        closed.extend(self.register_spans());
        self.sweep_plans();
        update_counting(&self.engine);
        let epochs = self.end_epochs(&closed, asked.everything);

        let entered = self.drain_all();
        self.read_copied_stacks();
        self.unwinder.end_reading();
        if has_new {
            // These threads are about to enter a span.
            self.scan_interval = SCAN_INTERVAL;
        }
        // A span is registered before its first interval is written, so these events include the spans of all
        // intervals that were just read.
        let closed_since = self.register_spans();
        self.closed.extend(closed_since);

        self.sinks.store.charge_refused();
        let clock = self.engine.spans.clock();
        self.source.check_losses(clock.raw_ns(clock.now()));
        for epoch in epochs {
            self.export(epoch);
        }
        for span in closed {
            self.engine.admission.forget(span);
            self.watchdog.forget(span);
            self.sinks.store.remove_root(span);
            self.sinks.store.close(span);
        }
        let admission = &self.engine.admission;
        let (given_up, by_memory) =
            self.sinks.store.evict_closed(|root| admission.has_permit(root));
        let counters = &self.engine.counters;
        let counter = match by_memory {
            true => &counters.samples.dropped_memory,
            false => &counters.samples.dropped_pending_spans_full,
        };
        Counters::add(counter, given_up);
        admission.set_memory_is_short(self.sinks.store.is_memory_short());
        self.maintain(&entered);
        let unreported = self.engine.counters.spans.kept_unreported.load(Ordering::Relaxed);
        let event = self.logged.unreported(unreported, asked.everything);
        self.log(event);
        self.check_open_spans();
        let again = self.closed.iter().any(|span| self.engine.admission.has_epoch(*span));
        (asked, again)
    }

    fn take_commands(&self) -> RoundRequests {
        let mut asked = RoundRequests::default();
        for command in self.commands.try_iter() {
            match command {
                Command::FindOpen(request) => asked.open_spans.push(request),
                Command::Heap(request) => asked.heaps.push(request),
                Command::Flush(waiting) => {
                    asked.everything = true;
                    asked.acknowledge.push(waiting);
                }
                Command::Shutdown(waiting) => {
                    asked.everything = true;
                    // A profile that is promised from here on could not be made.
                    self.engine.admission.end();
                    asked.acknowledge.extend(waiting);
                    asked.end = true;
                }
            }
        }
        asked
    }

    /// Registers spans. Returns those that have closed.
    fn register_spans(&mut self) -> impl Iterator<Item = SpanKey> + use<> {
        #[cfg(test)]
        super::model::inside_a_step();
        let mut closed = Vec::new();
        while let Some(event) = self.engine.spans.take_span_event() {
            match event {
                SpanEvent::Opened(key, known) => self.sinks.store.register(key, known, self.round),
                SpanEvent::Idle { key, since_ns, idle_ns } => {
                    if !add_idle(&mut self.sinks.store, key, since_ns, idle_ns, self.round) {
                        Counters::add(&self.engine.counters.awaits.dropped_pending_full, 1);
                    }
                }
                SpanEvent::Closed { key, ids, closed_ns } => {
                    self.sinks.store.note(key, |pending| {
                        pending.ids = ids.or(pending.ids);
                        pending.closed_ns = Some(closed_ns);
                    });
                    closed.push(key);
                }
            }
        }
        if self.engine.spans.take_lost_event() {
            let is_open = |known: &SpanInfo, key| self.engine.spans.is_open(known.id, key);
            let spans = self.sinks.store.registered_spans();
            closed.extend(
                spans.iter().filter(|(key, known)| !is_open(known, *key)).map(|(key, _)| *key),
            );
        }
        closed.into_iter()
    }

    fn end_epochs(&self, closed: &[SpanKey], everything: bool) -> Vec<Epoch> {
        let linger = if everything { Duration::ZERO } else { LINGER };
        let admission = &self.engine.admission;
        let expired = admission.expired_epochs(linger);
        let roots = closed.iter().copied().chain(expired);
        roots.filter_map(|root| admission.end_epoch(root)).collect()
    }

    /// Drains every ring. Returns the spans that threads are in.
    fn drain_all(&mut self) -> HashSet<SpanKey> {
        modules::refresh(&mut self.unwinder, &self.sampled, &self.sinks);
        // Read before draining, so that nothing can follow what is drained. And before the scan: a thread that
        // continues and ends after the scan is drained once more.
        let over: HashSet<usize> = self
            .sampled
            .iter()
            .filter(|sampled| sampled.thread().is_over())
            .map(SampledThread::address)
            .collect();
        // Parks some of them.
        self.scan_threads();
        self.can_end = false;
        let start = sys::thread_cpu_ns();
        let mut entered = HashSet::new();
        let mut drain = Drain {
            unwinder: &mut self.unwinder,
            sinks: &mut self.sinks,
            counters: &self.engine.counters,
            source: &self.source,
            most_frames: self.limits.frames_per_stack,
            round: self.round,
            pid: sys::process_id(),
            stack: &mut self.stack,
            is_lowered: self.reading.is_lowered(),
        };
        self.sampled.retain_mut(|sampled| {
            let is_over = over.contains(&sampled.address());
            entered.extend(sampled.drain(&mut drain));
            if is_over {
                sampled.charge(&mut self.budgets);
                self.ended_armings.extend(sampled.cursor.give_back(&self.source));
            }
            !is_over
        });
        if let Some(took) = passed(start, sys::thread_cpu_ns()) {
            Counters::add(&self.engine.counters.sampling.collector_cpu_ns, took);
            self.reading_ns += took;
        }
        // Ending armings costs the same at any sampling rate, so it is not part of `reading_ns`.
        let clock = self.engine.spans.clock();
        let now_ns = clock.raw_ns(clock.now());
        self.sampled.iter_mut().for_each(|sampled| sampled.end_arming(now_ns, &self.source));
        self.ended_armings.retain(|arming| Arc::strong_count(arming) > 1);
        entered
    }

    fn read_copied_stacks(&mut self) {
        let clock = self.engine.spans.clock();
        let mut target = ReadTarget {
            unwinder: &mut self.unwinder,
            sinks: &mut self.sinks,
            counters: &self.engine.counters,
            clock,
            most_frames: self.limits.frames_per_stack,
            round: self.round,
            now_ns: clock.raw_ns(clock.now()),
        };
        self.copied.read(&self.engine.copied, &mut target);
        self.engine.copied.awaits.make_room();
    }

    pub(super) fn export(&mut self, mut epoch: Epoch) {
        for span in &mut epoch.kept {
            // The ids come with the verdict or with the close event, which may arrive a moment later.
            self.sinks.store.note(span.key, |pending| {
                span.facts.trace = span.facts.trace.or(pending.ids);
                pending.ids = pending.ids.or(span.facts.trace);
            });
            if let (Some(to), Some(ids)) = (span.link.to, span.link.ids) {
                self.sinks.store.note(to, |pending| pending.ids = Some(ids));
            }
        }
        let Some(id) = epoch.id else {
            self.engine.publish.reporter.report(report::unexported(&epoch.kept));
            return;
        };
        let mut room = self.room.take();
        let is_snapshot = epoch.kept.iter().any(|span| span.facts.is_open);
        let (most_frames, clock) = (self.limits.frames_per_stack, self.engine.spans.clock());
        let opened_ns = epoch.kept.iter().map(|span| span.opened_ns).min().unwrap_or(0);
        // There are some only for snapshots.
        let present = self.copied.unwind_present(&mut self.unwinder, most_frames);
        let present = present.iter().map(|(span, at, it)| (*span, new_sample(*at, it, clock)));
        let waiting = self.sampled.iter().filter_map(SampledThread::waiting);
        let waiting = waiting.filter(|_| is_snapshot).map(|it| (it.span, it.so_far()));
        let inputs = ProfileInputs::new(&self.engine, &self.sinks.store, &self.unwinder);
        let (unix_offset_ns, period_ns) = (clock.unix_offset_ns(), self.source.periods().full_ns);
        let builder = ProfileAssembler {
            inputs: ProfileInputs { unix_offset_ns, period_ns, ..inputs },
            unfinished: waiting.chain(present).collect(),
            most_samples: self.limits.samples_per_profile,
            most_bytes: room.most_bytes,
            hides_kernel: self.source.hides_kernel_alone(opened_ns),
        };
        #[cfg(test)]
        super::model::inside_a_step();
        let Built { profile, modules, spans, downsampled, losses } = builder.build(id, &epoch);
        let (samples, stack_bytes) = (profile.sample_count(), self.limits.stack_bytes);
        let cut = self.logged.cut_stacks(&losses, samples, stack_bytes);
        self.log(cut);
        Counters::add(&self.engine.counters.samples.downsampled, downsampled);
        if !is_snapshot {
            spans.into_iter().for_each(|span| self.sinks.store.note_exported(span));
        }
        let profile = Box::new(profile);
        room.shrink(profile.bytes());
        let Epoch { kept, permit, .. } = epoch;
        _ = self.jobs.send(Job::Export { profile, modules, kept, room, permit });
    }

    /// Logs an event, if there is one.
    pub(super) fn log(&self, event: Option<LogEvent>) {
        event.into_iter().for_each(|event| self.engine.publish.reporter.log(event));
    }

    fn maintain(&mut self, entered: &HashSet<SpanKey>) {
        let now = Instant::now();
        if now.duration_since(self.refined) >= REFINE_INTERVAL {
            self.engine.spans.clock().refine();
            self.refined = now;
            self.check_signals();
            let armed = self.sampled.iter().map(|one| (one.thread(), &*one.cursor.arming));
            self.source.check_silence(armed);
            self.check_budget(now);
            sys::read_filters();
        }
        if self.sampled.sweep(now, self.idle) {
            self.engine.waker.wake();
        }
        for sampled in self.sampled.iter_mut() {
            // Its ring is drained once more, in the next round, before it is given back.
            if sampled.end_if_idle(now, self.idle) {
                self.engine.waker.wake();
            }
        }
        // A span is registered when its first interval ends, or never.
        let unknown = self.sinks.store.remove_unregistered(self.round.saturating_sub(1), entered);
        if unknown > 0 {
            Counters::add(&self.engine.counters.samples.dropped_unknown_span, unknown);
            self.source.note_loss();
        }
        for event in self.logged.due(&self.engine) {
            self.log(Some(event));
        }
    }
}

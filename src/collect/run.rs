//! The collector's loop.

use std::collections::{HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender};

use super::export::ProfileOutput;
use super::logged::Logged;
use super::process::ProcessProfiler;
use crate::engine::{Command, Engine, ProcessRequest};
use crate::intake::Intake;
use crate::keep::{KeptSpan, ProfileGroup};
use crate::log::{LogEvent, LogKind};
use crate::publish::{FlushRequest, Job, ShutdownDeadline};
use crate::span::SpanKey;
use crate::stats::Counters;
use crate::sys::Poller;
use crate::threads::Threads;
use crate::watch::{ThreadScan, Watchdog, list_open};

/// How long a kept span waits for its root to close, and for other spans of its tree to be kept.
const LINGER: Duration = Duration::from_secs(2);

pub(crate) struct Collector {
    pub(crate) engine: Arc<Engine>,
    pub(crate) poller: Poller,
    pub(crate) commands: Receiver<Command>,
    pub(crate) intake: Intake,
    pub(crate) threads: Threads,
    pub(crate) watchdog: Watchdog,
    pub(crate) output: ProfileOutput,
    pub(crate) logged: Logged,
    pub(crate) process: ProcessProfiler,
}

#[derive(Default)]
struct RoundRequests {
    acknowledge: Vec<FlushRequest>,
    /// To be answered after the round.
    questions: Vec<Command>,
    process: Option<ProcessRequest>,
    everything: bool,
    end: Option<ShutdownDeadline>,
}

impl Collector {
    /// Drops `begins` once all files that are needed from the start are open.
    pub(crate) fn run(mut self, begins: Sender<()>) {
        let run = || {
            _ = self.intake.own_cpu.lap();
            self.intake.source.keep_alive();
            self.watchdog.throttling.read(self.intake.now_ns(), true, std::iter::empty());
            self.watchdog.begin(self.intake.now_ns());
            self.log_findings();
            drop(begins);
            let mut is_broken = false;
            loop {
                if let Some(at_end) = self.step() {
                    return at_end;
                }
                // The program has closed the layer's files: makes the profiles that are due, then stops.
                if !self.poller.files().still_owned() && !std::mem::replace(&mut is_broken, true) {
                    self.engine.shutdown_later();
                }
            }
        };
        // Nothing here should panic. If it does, the program loses its profiles and nothing else.
        let at_end = catch_unwind(AssertUnwindSafe(run));
        self.engine.stop();
        let is_broken = !self.poller.files().still_owned();
        self.threads.end(&self.intake);
        let why = match (at_end.is_err(), is_broken) {
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
        self.log(why.map(|(kind, message)| LogEvent::error(kind, message)));
        self.output.send(Job::Stop(at_end.unwrap_or(ShutdownDeadline::FAILED)));
    }

    /// Sleeps until there is work, and does it. Returns at the end how it is to end.
    fn step(&mut self) -> Option<ShutdownDeadline> {
        let sleep = self.sleep();
        let start = Instant::now();
        loop {
            let left = sleep.map(|sleep| sleep.saturating_sub(start.elapsed()));
            let longest = left.into_iter().chain(self.threads.until_next()).min();
            let is_woken = self.poller.wait(longest);
            let slept = longest.unwrap_or(Duration::MAX);
            self.watchdog.note_present(self.intake.now_ns(), slept);
            let is_over = is_woken || sleep.is_some_and(|sleep| start.elapsed() >= sleep);
            let is_over = is_over || !self.poller.files().still_owned();
            let Self { threads, intake, .. } = self;
            threads.search_process(intake, false);
            let is_outdated = || threads.has_any() && intake.reader.unwinder.is_outdated();
            if is_over || threads.has_full_ring() || is_outdated() {
                break;
            }
            if !threads.must_scan() {
                continue;
            }
            // Sleeping and waking up takes CPU time, too.
            _ = intake.own_cpu.lap();
            threads.scan(intake, self.engine.callsites.least_age());
            self.watchdog.throttling.read(intake.now_ns(), false, threads.slow_tids());
            let until_check = self.watchdog.until_next_check(&self.engine.callsites);
            let is_check_due =
                threads.is_in_span() && until_check.is_some_and(|left| left.is_zero());
            let can_end = threads.can_end;
            self.log_findings();
            if is_check_due || can_end {
                break;
            }
        }
        self.do_rounds()
    }

    /// Runs rounds until there is no more work. Returns at the end how it is to end.
    pub(crate) fn do_rounds(&mut self) -> Option<ShutdownDeadline> {
        let (mut dumps, mut scan) = (VecDeque::new(), None);
        loop {
            let (asked, again) = self.do_round();
            let Self { engine, intake, threads, output, process, .. } = self;
            for question in asked.questions {
                match question {
                    Command::FindOpen { older_than, reply } => {
                        output.send(list_open(engine, intake, threads, (older_than, reply)));
                    }
                    Command::Heap(part, reply) => {
                        output.send_heap(&engine.callsites, intake, (part, reply));
                    }
                    Command::DumpThreads(reply) => dumps.push_back(reply),
                    _ => {}
                }
            }
            let next = || ThreadScan::begin(threads, dumps.pop_front()?);
            if let Some(mut begun) = scan.take().or_else(next) {
                match begun.step(engine, intake, threads) {
                    true => output.send(begun.finish(engine, intake)),
                    false => scan = Some(begun),
                }
                // Waits are found in the meantime, too.
                if threads.must_scan() {
                    _ = intake.own_cpu.lap();
                    threads.scan(intake, engine.callsites.least_age());
                }
            }
            let must_observe = process.observe(engine, intake, threads);
            _ = intake.own_cpu.lap();
            if let Some(end) = asked.end {
                // Those who wait for a flush then wait for the end.
                let flushes = asked.acknowledge.iter().map(|waiting| Some(waiting.deadline));
                return Some(flushes.map(ShutdownDeadline::until).fold(end, ShutdownDeadline::or));
            }
            asked.acknowledge.into_iter().for_each(|waiting| output.send(Job::Done(waiting)));
            if !again && !must_observe && scan.is_none() && dumps.is_empty() {
                return None;
            }
        }
    }

    /// How long to sleep, or `None` until woken: without an open span there are no wake-ups once threads are detached.
    pub(crate) fn sleep(&self) -> Option<Duration> {
        let Self { engine, threads, watchdog, .. } = self;
        let linger = engine.admission.until_next_expiry(LINGER);
        // Open spans are checked only while a thread is in a span or a span is watched.
        let is_open =
            threads.is_in_span() || !watchdog.polled.is_empty() || engine.spans.has_watched();
        let watchdog = watchdog.until_next_check(&engine.callsites).filter(|_| is_open);
        let soonest = linger.into_iter().chain(threads.until_check(&self.intake));
        let soonest = soonest.chain(self.logged.until_next()).chain(watchdog);
        soonest.chain(self.process.until_next()).chain(engine.awaits.until_room()).min()
    }

    /// Runs one round. Returns the commands, and whether another round must follow at once.
    ///
    /// A span that closes before a round begins is complete when it ends: all its intervals and samples have been
    /// written. Profiles are therefore made only of groups that are ended at the beginning of the round.
    fn do_round(&mut self) -> (RoundRequests, bool) {
        self.intake.round += 1;
        // Before any time is converted in it.
        self.intake.clock().refine();
        let mut asked = self.take_commands();
        let has_new = self.threads.take_new(&self.intake);
        // With those that have met a hook by now, which are not searched for.
        let Self { engine, intake, threads, process, .. } = self;
        let ended = process.check_continuous(engine, (threads, intake), asked.end.is_some());
        let answered = process.check_requested((threads, intake), asked.process.take());
        threads.search_process(intake, true);
        // Local roots that close before the last samples are read are wanted, too.
        let wants_roots = process.is_running() || answered.is_some() || ended.is_some();
        engine.commands.process.wants_roots.store(wants_roots, Ordering::Relaxed);
        let closed_roots = engine.commands.process.take_roots();
        let mut closed = std::mem::take(&mut self.intake.closed);
        closed.extend(self.intake.register_spans());
        self.engine.update_counting();
        let groups = self.end_groups(&closed, asked.everything);
        // A kept span is compared before it is a reference itself.
        let has_group = |span: &KeptSpan| self.engine.admission.has_group(span.root);
        let references = &self.engine.publish.references;
        let references = references.take_closed(&closed, asked.everything, has_group);

        let least_age = self.engine.callsites.least_age();
        let (entered, has_newer) = self.threads.drain_all(&mut self.intake, least_age);
        let now_ns = self.intake.now_ns();
        self.watchdog.throttling.read(now_ns, !groups.is_empty(), self.threads.slow_tids());
        self.log_findings();
        let Engine { awaits, allocations, .. } = &*self.engine;
        let is_over_budget = self.intake.read_copied(&awaits.inbox, &allocations.inbox);
        allocations.set_over_budget(is_over_budget);
        awaits.make_room();
        self.intake.reader.unwinder.end_reading();
        if !references.is_empty() {
            self.threads.scan_at_once();
        } else if has_new || has_newer {
            // These threads are about to enter a span.
            self.threads.scan_soon();
        }
        // A span is registered before its first interval is written, so all spans of those just read are among these.
        let closed_since = self.intake.register_spans();
        self.intake.closed.extend(closed_since);
        self.intake.sinks.note_spans();
        // Of these, all samples have been read.
        self.intake.sinks.set_root_fields(closed_roots);
        let Self { engine, intake, process, output, .. } = self;
        let answer = answered.and_then(|profile| profile.finish(engine, intake));
        answer.into_iter().for_each(|answer| output.send(answer));
        let profile = ended.and_then(|it| process.finish_continuous(it, engine, intake));
        profile.into_iter().for_each(|it| output.send_process(it, &engine.counters));
        engine.commands.process.wants_roots.store(process.is_running(), Ordering::Relaxed);
        let event = process.event.take();
        self.log(event);

        self.intake.source.check_losses(self.intake.now_ns());
        for group in groups {
            self.export(group);
        }
        // Afterwards, so that a span that is kept is not yet one of those that it is compared with.
        for reference in references {
            self.send_reference(reference);
        }
        let admission = &self.engine.admission;
        let store = &mut self.intake.sinks.store;
        for span in closed {
            admission.forget(span);
            self.watchdog.forget(span);
            store.remove_root(span);
            store.close(span);
        }
        let (given_up, by_memory) = store.evict_closed(|root| admission.has_reservation(root));
        let counters = &self.engine.counters;
        let counter = match by_memory {
            true => &counters.samples.dropped_memory,
            false => &counters.samples.dropped_pending_spans_full,
        };
        Counters::add(counter, given_up);
        admission.memory_is_short.store(store.is_memory_short(), Ordering::Relaxed);
        self.maintain(&entered);
        let unreported = self.engine.counters.spans.kept_unreported.load(Ordering::Relaxed);
        let event = self.logged.unreported(unreported, asked.everything);
        self.log(event);
        self.check_open_spans();
        let again = self.intake.closed.iter().any(|span| self.engine.admission.has_group(*span));
        (asked, again)
    }

    fn take_commands(&self) -> RoundRequests {
        let mut asked = RoundRequests::default();
        for command in self.commands.try_iter() {
            match command {
                // A caller asks for one at a time, unless it has given up waiting for the one before.
                Command::ProfileProcess(request) => asked.process = Some(request),
                Command::Flush(waiting) => {
                    asked.everything = true;
                    asked.acknowledge.push(waiting);
                }
                Command::Shutdown(deadline) => {
                    asked.everything = true;
                    // A profile that is promised from here on could not be made.
                    self.engine.admission.is_over.store(true, Ordering::Relaxed);
                    let last = ShutdownDeadline::until(deadline);
                    asked.end = Some(asked.end.map_or(last, |before| before.or(last)));
                }
                question => asked.questions.push(question),
            }
        }
        asked
    }

    fn end_groups(&self, closed: &[SpanKey], everything: bool) -> Vec<ProfileGroup> {
        let linger = if everything { Duration::ZERO } else { LINGER };
        let admission = &self.engine.admission;
        // A slow request has one profile, however many of its steps are kept.
        let is_due = |root: &SpanKey| {
            let known = self.intake.sinks.store.get(*root).and_then(|pending| pending.known);
            everything || !known.is_some_and(|it| self.intake.spans.is_slow_request(it.id, *root))
        };
        let expired = admission.expired_groups(linger).into_iter().filter(is_due);
        let roots = closed.iter().copied().chain(expired);
        roots.filter_map(|root| admission.end_group(root)).collect()
    }

    fn check_open_spans(&mut self) {
        let Self { engine, intake, threads, watchdog, .. } = self;
        if !watchdog.check_open_spans(engine, intake, threads) {
            return;
        }
        for snapshot in self.engine.admission.take_snapshots() {
            self.export(snapshot);
        }
        self.watchdog.present.clear();
    }

    fn maintain(&mut self, entered: &HashSet<SpanKey>) {
        if self.threads.maintain(&self.intake, Instant::now()) {
            self.engine.waker.wake();
        }
        self.log_findings();
        // A span is registered when its first interval ends, or never.
        let before = self.intake.round.saturating_sub(1);
        let unknown = self.intake.sinks.store.remove_unregistered(before, entered);
        if unknown > 0 {
            Counters::add(&self.engine.counters.samples.dropped_unknown_span, unknown);
            self.intake.source.note_loss();
        }
        let due = self.logged.due(&self.engine);
        self.log(due);
    }

    fn log_findings(&mut self) {
        let events = self.threads.take_events();
        self.log(events);
    }

    pub(super) fn log(&self, events: impl IntoIterator<Item = LogEvent>) {
        events.into_iter().for_each(|event| self.engine.publish.reporter.log(event));
    }
}

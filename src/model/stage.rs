//! Plays scripts for real: a registry with the layer, threads and the collector. Only the kernel and the clock are
//! simulated. One thing happens at a time.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel;
use parking_lot::Mutex;
use tracing::field::FieldSet;
use tracing::metadata::Kind as MetadataKind;
use tracing::span::EnteredSpan;
use tracing::subscriber::Interest;
use tracing::{Dispatch, Event, Level, Metadata, Span, callsite};

use super::oracle::{
    ChildSums, Place, Reported, ReportedProfile, ReportedSpan, START_NS, Times, name,
};
use super::script::{Kind, Step, THREADS, Under};
use super::source::{Scripted, begin_thread};
use crate::allocations::AllocationSettings;
use crate::collect::{Collector, ContinuousSettings};
use crate::engine::{Command, Engine, Gate, ProfileKind};
use crate::export::{ExportError, Exported, Exporter};
use crate::intake::IntakeSettings;
use crate::keep::{
    Callsites, Condition, ExporterHealth, Keep, KeptSpan, PlanSettings, ProfileAdmission, Rule,
    Rules, ShownFields,
};
use crate::profile::{Point, Profile, ProfileId, Sample, SampleKind};
use crate::publish::{FlushRequest, Job, LogItem, PendingReplies, PublishSettings, UnnamedProfile};
use crate::references::{ReferenceLimits, References};
use crate::sampler::{Sampler, Source, SourceSettings};
use crate::span::{SpanKey, Spans};
use crate::start::{Limits, Parts, build};
use crate::stats::{Counters, Stats};
use crate::sys::{Clock, Poller};
use crate::threads::{ThreadSettings, Timing};

const STATUS: &str = "otel.status_code";
/// Open spans get a snapshot after this time.
const OPEN_LIMIT: Duration = Duration::from_millis(50);

struct Site;

impl callsite::Callsite for Site {
    fn set_interest(&self, _: Interest) {}

    fn metadata(&self) -> &Metadata<'_> {
        error_metadata()
    }
}

/// Nothing is registered, so all callsites can be the same.
fn fields(names: &'static [&'static str]) -> FieldSet {
    FieldSet::new(names, callsite::Identifier(&Site))
}

fn error_metadata() -> &'static Metadata<'static> {
    static ERROR: LazyLock<Metadata<'static>> = LazyLock::new(|| {
        let fields = fields(&[]);
        Metadata::new("e", "model", Level::ERROR, None, None, None, fields, MetadataKind::EVENT)
    });
    &ERROR
}

/// Each span has its own callsite, so that its name identifies it.
fn metadata(span: usize, kind: Kind) -> &'static Metadata<'static> {
    type Known = HashMap<(usize, Kind), &'static Metadata<'static>>;
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let make = || {
        let name: &'static str = Box::leak(name(span).into_boxed_str());
        let fields = fields(if kind.has_status() { &[STATUS] } else { &[] });
        let level = Level::INFO;
        let metadata =
            Metadata::new(name, kind.name(), level, None, None, None, fields, MetadataKind::SPAN);
        &*Box::leak(Box::new(metadata))
    };
    KNOWN.lock().entry((span, kind)).or_insert_with(make)
}

fn rules() -> Rules {
    let rule = |kind: &Kind| {
        let mut keep = Keep::never();
        if let Some(threshold) = kind.threshold() {
            keep = keep.or_slower_than(Duration::from_nanos(threshold));
        }
        if kind.is_kept_on_error() {
            keep = keep.or_failed();
        }
        // Snapshots of open spans must not change what is reported when they close.
        if kind.is_profiled() {
            let is_open_for_long = kind.is_kept_on_error();
            let watchdog = if is_open_for_long { Condition::Open } else { Condition::Hung };
            keep = keep.or(watchdog(OPEN_LIMIT));
        }
        Rule::for_target(kind.name(), keep)
    };
    Rules::new(Kind::ALL.iter().map(rule))
}

/// The stage takes profiles before they reach the exporter.
struct Nowhere;

impl Exporter for Nowhere {
    fn export(&mut self, _: &Profile) -> Result<Exported, ExportError> {
        Ok(Exported::default())
    }
}

type Task = Box<dyn FnOnce(&mut Vec<(usize, EnteredSpan)>) + Send>;

/// A thread that runs one task at a time.
struct Worker {
    tasks: Sender<Task>,
    done: Receiver<()>,
    thread: JoinHandle<()>,
}

impl Worker {
    fn start(number: usize, dispatch: &Dispatch) -> Self {
        let (tasks, to_do) = mpsc::channel::<Task>();
        let (say_done, done) = mpsc::channel();
        let dispatch = dispatch.clone();
        let thread = std::thread::spawn(move || {
            begin_thread(number);
            let _guard = tracing::dispatcher::set_default(&dispatch);
            let mut entered = Vec::new();
            for task in to_do {
                task(&mut entered);
                _ = say_done.send(());
            }
        });
        Self { tasks, done, thread }
    }

    fn run(&self, task: impl FnOnce(&mut Vec<(usize, EnteredSpan)>) + Send + 'static) {
        self.tasks.send(Box::new(task)).unwrap();
        self.done.recv().expect("the thread has not panicked");
    }

    fn end(self) {
        drop(self.tasks);
        self.thread.join().unwrap();
    }
}

pub(super) struct Stage {
    now: Arc<AtomicU64>,
    scripted: Scripted,
    engine: Arc<Engine>,
    collector: Collector,
    commands: channel::Sender<Command>,
    jobs: channel::Receiver<Job>,
    dispatch: Dispatch,
    workers: [Option<Worker>; THREADS],
    held: Vec<Option<Span>>,
    profiles: HashMap<ProfileId, usize>,
    /// The script's numbers of profiled spans.
    keys: HashMap<SpanKey, usize>,
    /// The ids of profiles of open spans.
    snapshot_ids: HashMap<SpanKey, Vec<ProfileId>>,
    snapshots: Vec<Snapshot>,
}

/// A profile of open spans.
pub(super) struct Snapshot {
    pub(super) spans: Vec<usize>,
    /// The numbers of its samples.
    pub(super) samples: BTreeSet<usize>,
}

impl Stage {
    /// `subscriber` creates a subscriber with the layer.
    pub(super) fn new(
        has_switches: bool,
        is_late: bool,
        subscriber: impl FnOnce(Arc<Engine>) -> Dispatch,
    ) -> Self {
        let now = Arc::new(AtomicU64::new(START_NS));
        let counters = Arc::new(Counters::default());
        let poller = Poller::new().unwrap();
        let settings =
            SourceSettings { source: Source::None, signal: None, stack_bytes: 1024, periods: None };
        let sampler = Sampler::new(settings, 0, &poller.waker(), counters.threads.clone());
        let engine_source = sampler.clone();
        let scripted = Scripted::new(Arc::clone(&now), sampler.clone(), has_switches);
        let clock = Clock::by_hand(Arc::clone(&now));
        let source = Box::new(scripted.clone());
        let many = 1 << 20;
        let gate = Gate::new();
        gate.open();
        let none = ReferenceLimits::NONE;
        let references = References::new(none, Default::default(), Arc::clone(&counters));
        let (engine, mut collector, worker) = build(Parts {
            spans: Spans::new(clock, source, Arc::clone(&counters)).without_idle_reports(),
            callsites: Callsites::new(
                rules(),
                PlanSettings {
                    ticks_a_second: 1_000_000_000,
                    // Less than any step of the clock.
                    sampling_delay: Some(Duration::from_nanos(u64::from(is_late))),
                    long_after: Some(Duration::MAX),
                },
                ShownFields::default(),
                Arc::clone(&counters),
            ),
            admission: ProfileAdmission::new(many, ExporterHealth::new(true, false))
                .by_hand(Arc::clone(&now)),
            counters,
            source: sampler,
            poller,
            limits: Limits {
                memory: 128 << 20,
                samples_per_profile: many as usize,
                pending_spans: many as usize,
                threads: ThreadSettings {
                    // The collector spends real CPU time, while the clock is the script's.
                    timing: Timing::FASTEST,
                    cpu_percent: None,
                    waits: true,
                },
                intake: IntakeSettings {
                    frames_per_stack: 4,
                    stack_bytes: 1024,
                    has_budget: false,
                },
                allocations: AllocationSettings {
                    sample_bytes: 0,
                    stack_bytes: 1024,
                    tracks_heap: false,
                },
            },
            gate,
            unreached: Arc::default(),
            continuous: ContinuousSettings::OFF,
            publishing: PublishSettings {
                exporter: Box::new(Nowhere),
                problem: None,
                history: crate::history::HistorySettings::default(),
                on_kept: None,
                symbols: crate::symbols::SymbolSettings { names: false, most_bytes: 0 },
            },
            warnings: Vec::new(),
            names: crate::keep::SpanNames::default(),
            references,
        });
        collector.threads.idle = Duration::MAX;
        engine_source.set_scripted(Box::new(scripted.clone()));
        let dispatch = subscriber(Arc::clone(&engine));
        let workers = std::array::from_fn(|number| Some(Worker::start(number, &dispatch)));
        Self {
            now,
            scripted,
            commands: engine.commands.to_collector.clone(),
            engine,
            collector,
            jobs: worker.jobs,
            dispatch,
            workers,
            held: Vec::new(),
            profiles: HashMap::new(),
            keys: HashMap::new(),
            snapshot_ids: HashMap::new(),
            snapshots: Vec::new(),
        }
    }

    pub(super) fn period_ns(&self, thread: usize) -> u64 {
        self.scripted.period_ns(thread)
    }

    /// Which threads are sampled.
    pub(super) fn attached(&self) -> [bool; THREADS] {
        std::array::from_fn(|thread| self.scripted.is_attached(thread))
    }

    pub(super) fn stats(&self) -> Stats {
        self.engine.stats()
    }

    /// How long the collector would sleep now; `None` means until it is woken.
    pub(super) fn sleep(&self) -> Option<Duration> {
        self.collector.sleep()
    }

    /// The snapshots since the last call.
    pub(super) fn take_snapshots(&mut self) -> Vec<Snapshot> {
        std::mem::take(&mut self.snapshots)
    }

    /// The spans that are registered with the collector, or that will be in the next round because one inside them has
    /// closed.
    pub(super) fn known(&self) -> Vec<usize> {
        let is_known =
            |key| self.collector.intake.sinks.store.get(key).is_some_and(|it| it.known.is_some());
        let owners = self.engine.spans.owners_of_child_closes();
        let known = self.keys.iter().filter(|(key, _)| is_known(**key) || owners.contains(key));
        known.map(|(_, span)| *span).collect()
    }

    /// Plays a step. Returns the reports that it caused.
    pub(super) fn play(&mut self, step: &Step) -> Vec<Reported> {
        match *step {
            Step::Open { thread, span, kind, under } => self.open(thread, span, kind, under),
            Step::Enter { thread, span } => {
                let handle = self.handle(span);
                self.on(thread).run(move |entered| entered.push((span, handle.entered())));
            }
            Step::Exit { thread, span } => self.on(thread).run(move |entered| {
                let at = entered.iter().rposition(|(entered, _)| *entered == span).unwrap();
                drop(entered.remove(at));
            }),
            Step::Panic { thread } => self.on(thread).run(|entered| {
                let innermost = entered.pop();
                let unwind = AssertUnwindSafe(move || {
                    let _innermost = innermost;
                    // Unlike `panic!`, this prints nothing.
                    resume_unwind(Box::new(()));
                });
                assert!(catch_unwind(unwind).is_err());
            }),
            Step::Drop { thread, span } => {
                let handle = self.held[span].take();
                self.on(thread).run(move |_| drop(handle));
            }
            Step::Error { thread, span } => {
                let parent = span.map(|span| self.handle(span).id());
                self.on(thread).run(move |_| {
                    let metadata = error_metadata();
                    let values: [_; 0] = [];
                    let values = metadata.fields().value_set(&values);
                    match parent {
                        Some(parent) => Event::child_of(parent, metadata, &values),
                        None => Event::dispatch(metadata, &values),
                    }
                });
            }
            Step::Status { thread, span } => {
                let handle = self.handle(span);
                self.on(thread).run(move |_| {
                    handle.record(STATUS, "ERROR");
                });
            }
            Step::Sample { thread, number, weight_ns } => {
                self.scripted.sample(thread, instruction(number), weight_ns);
            }
            Step::Pass { ns } => _ = self.now.fetch_add(ns, Ordering::Relaxed),
            Step::SwitchOut { thread, preempted } => self.scripted.switch_out(thread, preempted),
            Step::SwitchIn { thread } => self.scripted.switch_in(thread),
            Step::Round { flush, detach } => {
                if flush {
                    let (done, _) = PendingReplies::default().ask().unwrap();
                    let waiting = FlushRequest { done, deadline: Instant::now() };
                    _ = self.commands.send(Command::Flush(waiting));
                }
                self.collector.threads.idle = if detach { Duration::ZERO } else { Duration::MAX };
                // Open spans are checked in each round, regardless of the real clock.
                if let Some(long_ago) = Instant::now().checked_sub(Duration::from_secs(600)) {
                    self.collector.watchdog.checked = long_ago;
                }
                assert!(self.collector.do_rounds().is_none());
                self.scripted.let_go();
                return self.reported();
            }
            Step::EndThread { thread } => {
                self.workers[thread].take().unwrap().end();
                self.scripted.end_thread(thread);
                self.workers[thread] = Some(Worker::start(thread, &self.dispatch));
            }
        }
        Vec::new()
    }

    /// Opens spans on a thread that are kept when they close, in turn. Returns whether it could, and was done
    /// before long.
    pub(super) fn closes(&self, thread: usize, spans: usize) -> impl Fn() -> bool + use<> {
        let tasks = self.on(thread).tasks.clone();
        move || {
            let (say_done, done) = mpsc::channel();
            let task: Task = Box::new(move |_: &mut Vec<(usize, EnteredSpan)>| {
                let metadata = metadata(0, Kind::Failing);
                let values: [_; 0] = [];
                for _ in 0..spans {
                    let values = metadata.fields().value_set(&values);
                    let span = Span::new_root(metadata, &values).entered();
                    let error = error_metadata();
                    let values: [_; 0] = [];
                    Event::dispatch(error, &error.fields().value_set(&values));
                    drop(span);
                }
                _ = say_done.send(());
            });
            _ = tasks.send(task);
            done.recv_timeout(Duration::from_secs(60)).is_ok()
        }
    }

    fn on(&self, thread: usize) -> &Worker {
        self.workers[thread].as_ref().unwrap()
    }

    fn handle(&self, span: usize) -> Span {
        self.held[span].clone().unwrap()
    }

    fn open(&mut self, thread: usize, span: usize, kind: Kind, under: Under<usize>) {
        let metadata = metadata(span, kind);
        let parent = match under {
            Under::Span(parent) => self.handle(parent).id(),
            _ => None,
        };
        let (give, take) = mpsc::channel();
        self.on(thread).run(move |_| {
            let values: [_; 0] = [];
            let values = metadata.fields().value_set(&values);
            _ = give.send(match under {
                Under::Current => Span::new(metadata, &values),
                Under::Nothing => Span::new_root(metadata, &values),
                Under::Span(_) => Span::child_of(parent, metadata, &values),
            });
        });
        let handle = take.recv().unwrap();
        let id = handle.id().unwrap().into_non_zero_u64();
        self.keys.extend(self.engine.spans.key_of(id).map(|key| (key, span)));
        self.held.push(Some(handle));
    }

    fn reported(&mut self) -> Vec<Reported> {
        let mut reported = Vec::new();
        while let Ok(job) = self.jobs.try_recv() {
            let Job::Export { unnamed: UnnamedProfile { profile, .. }, kept, .. } = job else {
                continue;
            };
            if kept[0].is_open() {
                assert!(kept.iter().all(KeptSpan::is_open), "closed spans in a snapshot");
                for span in kept.iter().filter(|span| span.profile == Ok(profile.id)) {
                    self.snapshot_ids.entry(span.key).or_default().push(profile.id);
                }
                let spans = kept.iter().map(|span| self.keys[&span.key]).collect();
                let samples = reported_profile(&profile, 0).samples.into_keys().collect();
                self.snapshots.push(Snapshot { spans, samples });
                continue;
            }
            reported.push(self.kept(&kept, Some(&profile)));
        }
        for item in self.engine.publish.reporter.take_log() {
            match item {
                LogItem::Kept(kept) if !kept.spans[0].is_open() => {
                    reported.push(self.kept(&kept.spans, None));
                }
                _ => {}
            }
        }
        reported
    }

    fn kept(&mut self, kept: &[KeptSpan], profile: Option<&Profile>) -> Reported {
        for span in kept {
            if let Ok(id) = span.profile {
                self.profiles.entry(id).or_insert(number(span.name()));
            }
        }
        let unknown = usize::MAX;
        for span in kept {
            let snapshots = self.snapshot_ids.remove(&span.key).unwrap_or_default();
            assert_eq!(span.earlier, snapshots, "of span {}", span.name());
        }
        let number_of = |id: &ProfileId| self.profiles.get(id).copied().unwrap_or(unknown);
        let reported = |span: &KeptSpan| ReportedSpan {
            span: self.keys.get(&span.key).copied().unwrap_or(unknown),
            reasons: span.reasons().to_string(),
            opened_ns: span.opened_ns,
            times: times(span),
            samples: span.samples.total(),
            silent_waits: 0,
            profile: span.profile.ok().as_ref().map(number_of),
            children: children(span),
        };
        let root = kept[0].root;
        assert!(kept.iter().all(|span| span.root == root), "spans of two roots in one profile");
        Reported {
            root: self.keys.get(&root).copied().unwrap_or(unknown),
            kept: kept.iter().map(reported).collect(),
            profile: profile.map(|profile| reported_profile(profile, number_of(&profile.id))),
        }
    }

    /// When the collector begins a profile of the process that was asked for a while ago, and when it ends.
    pub(super) fn profile_of_process(&mut self, duration: Duration) -> (Instant, Instant) {
        let (wall, period_ns) = (ProfileKind::Wall, 1_000_000_000);
        let asked = self.engine.begin_profile(wall, duration, period_ns).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let begins = Instant::now();
        assert!(self.collector.do_rounds().is_none());
        let until = self.collector.process.until().unwrap();
        drop(asked);
        (begins, until)
    }

    pub(super) fn end(self) {
        self.workers.into_iter().flatten().for_each(Worker::end);
        self.scripted.end();
    }
}

fn number(name: &str) -> usize {
    name.trim_start_matches('s').parse().unwrap()
}

/// No module contains this address.
fn instruction(number: usize) -> u64 {
    0x1000 + 16 * number as u64
}

fn children(span: &KeptSpan) -> ChildSums {
    let mut sums = ChildSums::default();
    assert!(!span.facts.children.are_incomplete);
    for of_name in &span.facts.children.totals {
        sums.count += of_name.count;
        sums.total_ns += of_name.total_ns;
        sums.longest_ns = sums.longest_ns.max(of_name.longest_ns);
    }
    sums
}

fn times(span: &KeptSpan) -> Times {
    let account = span.times();
    Times {
        wall_ns: account.wall_ns,
        on_cpu_ns: account.on_cpu_ns,
        error_ns: account.on_cpu_error_ns,
        off_cpu_ns: account.off_cpu_ns,
        idle_ns: account.idle_ns,
        other_ns: account.other_spans_ns,
        voluntary: account.usage.voluntary_switches,
        involuntary: account.usage.involuntary_switches,
        faults: account.usage.minor_faults,
    }
}

fn reported_profile(profile: &Profile, number: usize) -> ReportedProfile {
    let place = |sample: &Sample, point: &Point| Place {
        path: profile.span_path(sample.link).into_iter().map(str::to_owned).collect(),
        at_ns: point.time_unix_ns - profile.start_unix_ns,
        weight_ns: point.weight,
    };
    let (mut samples, mut waits) = (BTreeMap::new(), BTreeSet::new());
    for sample in profile.samples() {
        for point in &sample.points {
            let place = place(sample, point);
            let is_new = match sample.kind {
                SampleKind::OnCpu => {
                    let innermost = profile.stack(sample.stack).next().unwrap();
                    let number = (innermost.address.wrapping_sub(0x1000) / 16) as usize;
                    samples.insert(number, place).is_none()
                }
                _ => waits.insert(place),
            };
            assert!(is_new, "something is in a profile twice");
        }
    }
    ReportedProfile { number, duration_ns: profile.duration_ns, samples, waits }
}

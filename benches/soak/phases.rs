//! The phases of the load.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use tracing::instrument::WithSubscriber;
use tracing::{Dispatch, Instrument, dispatcher, error, info_span};
use tracing_profiling::{Handle, ProfilingLayer, Stats};
use tracing_subscriber::prelude::*;

use crate::counts::{Does, ReportedKept, Switched, Truth, Verdicts};
use crate::process::Usage;
use crate::resident::Resident;

type Phase = (&'static str, fn(&Stage, &Resident));

pub(crate) const PHASES: &[Phase] = &[
    ("idle", |stage, _| std::thread::sleep(stage.phase)),
    ("slow", |stage, _| stage.some_slow_spans()),
    ("flood", |stage, _| stage.a_flood()),
    ("visitors", |stage, _| stage.threads_that_come_and_go()),
    ("tasks", |stage, _| stage.tasks()),
    ("exporter", |stage, _| stage.an_exporter_that_fails()),
    ("always", Stage::all_are_kept),
    ("rules", Stage::rules_that_change),
    ("hanging", |stage, _| stage.spans_that_hang()),
    ("burst", |stage, _| stage.a_burst()),
];

/// The threshold of `late`.
pub(crate) const LATE_NS: u64 = 20_000_000;
/// How much the two clocks may differ at that threshold.
const CLOCKS_NS: u64 = LATE_NS / 500;
/// A limit that nothing exceeds unless it never happens.
const PLENTY: Duration = Duration::from_secs(120);
const MS: Duration = Duration::from_millis(1);
/// Threads of the burst.
const THREADS: usize = 512;
/// Tasks that are open at once.
const TASKS: u64 = 64;
/// One in this many spans fails in the flood.
const FLOOD_FAILS: u64 = 20_000;

const RULES: &str = "[request]=1h|error,[query]=1h|error=self,[late]=20ms|hung=off,[forced]=1h,\
    [visitor]=1h|error,[task]=1h|error,[step]=1h,[exported]=error,[always]=always|hung=off,\
    [hangs]=1h|hung>200ms,[stays]=1h|open>200ms,[burst]=1h|error,[long]=1h|hung=off,[part]=error";

/// The state that all phases share.
pub(crate) struct Stage {
    pub(crate) phase: Duration,
    pub(crate) dispatch: Dispatch,
    pub(crate) truth: Truth,
    handle: Handle,
    exporter: Switched,
    reported: Arc<Mutex<ReportedKept>>,
    problems: Mutex<Vec<String>>,
}

fn rules(toggled: &str) -> tracing_profiling::Rules {
    format!("{RULES},[toggled]={toggled}").parse().expect("rules")
}

impl Stage {
    pub(crate) fn new(phase: Duration, symbols: bool) -> Self {
        let (exporter, reported) = (Switched::default(), Arc::<Mutex<ReportedKept>>::default());
        let reports = Arc::clone(&reported);
        let layer = ProfilingLayer::builder()
            .rules(rules("error"))
            .exporter(exporter.clone())
            .symbols(symbols)
            // Every profile must be admitted.
            .profiles_per_minute(1_000_000)
            .on_kept(move |kept| reports.lock().expect("no panic").record(kept))
            .build()
            .expect("threads");
        let handle = layer.handle();
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
        let (truth, problems) = (Truth::default(), Mutex::default());
        Self { phase, dispatch, truth, handle, exporter, reported, problems }
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(crate) fn problems(&self) -> usize {
        self.problems.lock().expect("no panic").len()
    }

    pub(crate) fn take_problems(&self) -> Vec<String> {
        std::mem::take(&mut self.problems.lock().expect("no panic"))
    }

    fn problem(&self, what: String) {
        eprintln!("{what}");
        self.problems.lock().expect("no panic").push(what);
    }

    fn flush(&self) {
        if self.handle.flush(PLENTY).is_err() {
            self.problem("kept spans were not exported in time".to_owned());
        }
    }

    /// Runs the action on the current thread, with the layer.
    pub(crate) fn on_thread(&self, action: impl FnOnce()) {
        dispatcher::with_default(&self.dispatch, action);
    }

    fn together(&self, threads: u64, action: impl Fn(u64) + Sync) {
        std::thread::scope(|scope| {
            for number in 0..threads {
                let action = &action;
                scope.spawn(move || self.on_thread(|| action(number)));
            }
        });
    }

    /// At the end of a cycle, when all its work is over, waits until the number of threads is as before.
    pub(crate) fn end_cycle(&self, threads: usize, wrong: &mut Vec<String>) -> (String, Usage) {
        let start = Instant::now();
        // Rings of ended threads are released in the next rounds; the resident thread keeps its own.
        loop {
            self.flush();
            let stats = self.handle.stats();
            let is_over = stats.threads.sampled <= 1 && Usage::now().threads <= threads;
            if is_over || start.elapsed() > PLENTY {
                break;
            }
            std::thread::sleep(50 * MS);
        }
        let stats = self.handle.stats();
        let mut reported = self.reported.lock().expect("no panic");
        let mut taken = self.exporter.taken.lock();
        let found = reported.check(&self.truth, &stats, &mut taken);
        for what in &found {
            eprintln!("{what}");
        }
        wrong.extend(found);
        let lost: u64 = losses(&stats).iter().map(|(_, count)| count).sum();
        let summary = format!(
            "{} spans, {} kept, {} profiles, {} samples, {lost} lost and counted",
            self.truth.made(),
            reported.spans(),
            reported.profiles(),
            stats.samples.taken,
        );
        (summary, Usage::now())
    }

    pub(crate) fn print_figures(&self) {
        let stats = self.handle.stats();
        let reported = self.reported.lock().expect("no panic");
        println!("figure soak.spans {} count", self.truth.made());
        println!("figure soak.kept {} count", reported.spans());
        println!("figure soak.profiles {} count", reported.profiles());
        println!("figure soak.samples {} count", stats.samples.taken);
        for (name, count) in losses(&stats) {
            println!("figure soak.{name} {count} count");
        }
    }

    /// Some of these spans are slower than their rule allows. Spans that only the layer's clock sees as slow may or
    /// may not be kept.
    fn some_slow_spans(&self) {
        let start = Instant::now();
        self.together(3, |thread| {
            let (mut late, mut forced, mut round) = (Verdicts::default(), 0, thread);
            while start.elapsed() < self.phase {
                round += 1;
                let wait = [5, 15, 25, 40][round as usize % 4] * MS;
                let outer = Instant::now();
                let span = info_span!("late").entered();
                let inner = Instant::now();
                if round % 3 == 0 {
                    burn(wait);
                } else {
                    std::thread::sleep(wait);
                }
                let inner_ns = inner.elapsed().as_nanos() as u64;
                drop(span);
                let outer_ns = outer.elapsed().as_nanos() as u64;
                late.made += 1;
                late.least += u64::from(inner_ns > LATE_NS + CLOCKS_NS);
                late.most += u64::from(outer_ns > LATE_NS - CLOCKS_NS);
                let _span = info_span!("forced").entered();
                if round % 8 == 0 {
                    forced += 1;
                    if !self.handle.keep_current() {
                        self.problem("there was no span to keep".to_owned());
                    }
                }
            }
            self.truth.note_unsure("late", late);
            self.truth.note("forced", late.made, forced);
        });
    }

    fn a_flood(&self) {
        self.flood_for(self.phase, 2);
    }

    /// Creates spans as fast as these threads can.
    fn flood_for(&self, time: Duration, threads: u64) {
        let start = Instant::now();
        self.together(threads, |_| {
            let (mut made, mut failed, mut inside) = (0_u64, 0, 0);
            while start.elapsed() < time {
                for _ in 0..1_000 {
                    made += 1;
                    let fails = made % FLOOD_FAILS == 0;
                    // In turn in the inner span, too: then both have failed.
                    let fails_inside = fails && (made / FLOOD_FAILS).is_multiple_of(2);
                    failed += u64::from(fails);
                    inside += u64::from(fails_inside);
                    info_span!("unmatched").in_scope(|| {
                        let request = info_span!("request").entered();
                        info_span!("query").in_scope(|| {
                            if fails_inside {
                                error!("inside");
                            }
                        });
                        if fails && !fails_inside {
                            error!(parent: &*request, "oh");
                        }
                    });
                }
            }
            self.truth.note("request", made, failed);
            self.truth.note("query", made, inside);
        });
    }

    fn threads_that_come_and_go(&self) {
        let start = Instant::now();
        while start.elapsed() < self.phase {
            self.together(16, |number| {
                for _ in 0..5 {
                    info_span!("visitor").in_scope(|| burn(MS / 5));
                }
                let _failing = info_span!("visitor").entered();
                if number % 4 == 0 {
                    error!("oh");
                }
            });
            self.truth.note("visitor", 16 * 6, 4);
            std::thread::sleep(5 * MS);
        }
    }

    /// Tasks that migrate between threads.
    fn tasks(&self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_time()
            .build()
            .expect("a runtime");
        let (made, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let end = Instant::now() + self.phase;
        let tasks: Vec<_> = (0..TASKS)
            .map(|number| {
                let (made, failed) = (Arc::clone(&made), Arc::clone(&failed));
                let task = async move {
                    let mut round = number;
                    while Instant::now() < end {
                        round += 1;
                        let fails = round % 50 == 0;
                        one_task(fails).instrument(info_span!("task")).await;
                        made.fetch_add(1, Ordering::Relaxed);
                        failed.fetch_add(u64::from(fails), Ordering::Relaxed);
                        if round % 10 == 0 {
                            tokio::time::sleep(MS).await;
                        }
                    }
                };
                runtime.spawn(task.with_subscriber(self.dispatch.clone()))
            })
            .collect();
        runtime.block_on(async {
            for task in tasks {
                task.await.expect("no panic");
            }
        });
        drop(runtime);
        let (made, failed) = (made.load(Ordering::Relaxed), failed.load(Ordering::Relaxed));
        self.truth.note("task", made, failed);
        self.truth.note("step", made * STEPS, 0);
    }

    fn an_exporter_that_fails(&self) {
        self.exporter.set(Does::Fail);
        let start = Instant::now();
        self.together(2, |_| {
            let mut made = 0;
            while start.elapsed() < self.phase {
                failing(2 * MS);
                made += 1;
                std::thread::sleep(20 * MS);
            }
            self.truth.note("exported", made, made);
        });
        self.exporter.set(Does::Take);
        // Profiles that were reserved before the failure are delivered again.
        self.flush();
        let lost = || self.handle.stats().profiles.dropped_export_failed;
        let before = lost();
        self.exporter.set(Does::PanicOnce);
        self.together(1, |_| failing(50 * MS));
        self.truth.note("exported", 1, 1);
        // At a reduced rate there may be no sample, and so no profile.
        let (is_delivered, has_panicked) =
            (self.handle.flush(PLENTY).is_ok(), !self.exporter.is_to(Does::PanicOnce));
        let lost = lost() - before;
        if lost != u64::from(has_panicked) || is_delivered == has_panicked {
            self.problem(format!(
                "the exporter panicked: {has_panicked}, {lost} profiles were lost by that, and a \
                 flush returned {is_delivered}"
            ));
        }
        self.exporter.set(Does::Take);
        self.wait_for_trust();
    }

    /// A failed exporter is tried again only after a pause; until then no profile is admitted.
    fn wait_for_trust(&self) {
        let exported = || self.handle.stats().profiles.exported;
        let (start, before) = (Instant::now(), exported());
        while exported() == before {
            if start.elapsed() > PLENTY {
                return self.problem("an exporter that works again gets no profiles".to_owned());
            }
            self.together(1, |_| failing(50 * MS));
            self.truth.note("exported", 1, 1);
            _ = self.handle.flush(PLENTY);
        }
    }

    /// All spans are kept, so each sample is in a profile or counted. No other thread has spans in the meantime.
    fn all_are_kept(&self, resident: &Resident) {
        resident.quietly(|| {
            std::thread::sleep(20 * MS);
            self.flush();
            let (before, had) = (self.handle.stats(), self.exporter.taken.lock().samples);
            let start = Instant::now();
            let goal = AtomicU64::new(self.reported.lock().expect("no panic").kept_of("always"));
            self.together(4, |number| {
                let mut made = 0;
                while start.elapsed() < self.phase {
                    // At most as many at once as there are reservations.
                    let place = goal.fetch_add(1, Ordering::Relaxed);
                    self.wait_for("always", place.saturating_sub(12));
                    info_span!("always").in_scope(|| burn((5 + number as u32 * 5) * MS));
                    made += 1;
                }
                self.truth.note("always", made, made);
            });
            self.flush();
            let (after, has) = (self.handle.stats(), self.exporter.taken.lock().samples);
            let more = |of: fn(&Stats) -> u64| of(&after) - of(&before);
            let has_profiles = more(|stats| stats.spans.kept) == {
                more(|stats| stats.profiles.exported)
                    + more(|stats| stats.spans.no_profile_no_samples)
            };
            let taken = more(|stats| stats.samples.taken);
            let counted = has - had
                + more(|stats| stats.samples.downsampled)
                + more(|stats| stats.samples.dropped_memory)
                + more(|stats| stats.samples.dropped_pending_spans_full)
                + more(|stats| stats.samples.dropped_unknown_span);
            if !has_profiles || taken != counted {
                self.problem(format!(
                    "of {taken} samples {counted} are in profiles or counted: {before:?} {after:?}"
                ));
            }
        });
    }

    /// Waits until this many spans of that name were reported as kept.
    fn wait_for(&self, name: &str, count: u64) {
        let start = Instant::now();
        while self.reported.lock().expect("no panic").kept_of(name) < count {
            if start.elapsed() > PLENTY {
                return self.problem(format!("fewer than {count} `{name}` were kept"));
            }
            std::thread::sleep(MS);
        }
    }

    /// Spans are judged by the rules under which they were created, while other spans continue.
    fn rules_that_change(&self, resident: &Resident) {
        let (time, other) = (self.phase / 2, self.phase);
        std::thread::scope(|scope| {
            scope.spawn(|| self.flood_for(other, 1));
            self.on_thread(|| {
                let (start, mut made) = (Instant::now(), 0);
                while start.elapsed() < time {
                    self.handle.set_rules(rules("off")).expect("the layer exists");
                    let unmatched = info_span!("toggled").entered();
                    error!("before the rule");
                    self.handle.set_rules(rules("error")).expect("the layer exists");
                    let matched = info_span!("toggled").entered();
                    self.handle.set_rules(rules("off")).expect("the layer exists");
                    error!("in both");
                    drop((matched, unmatched));
                    made += 1;
                    std::thread::sleep(5 * MS);
                }
                self.handle.set_rules(rules("error")).expect("the layer exists");
                self.truth.note("toggled", made, made);
            });
        });
        resident.quietly(|| {
            self.handle.set_enabled(false).expect("disabled");
            self.on_thread(|| error!(parent: &info_span!("toggled"), "disabled"));
            self.handle.set_enabled(true).expect("the layer exists");
        });
    }

    /// Spans that are kept while they are open, and not again when they close.
    fn spans_that_hang(&self) {
        let goals = ["hangs", "stays"]
            .map(|name| self.reported.lock().expect("no panic").kept_of(name) + 2);
        self.together(2, |number| {
            let stays = info_span!("stays");
            let hangs = info_span!("hangs").entered();
            if number == 0 {
                burn(10 * MS);
            }
            self.wait_for("hangs", goals[0]);
            drop(hangs);
            self.wait_for("stays", goals[1]);
            drop(stays);
        });
        self.truth.note("hangs", 2, 2);
        self.truth.note("stays", 2, 2);
    }

    fn a_burst(&self) {
        let all_are_there = Barrier::new(THREADS);
        std::thread::scope(|scope| {
            for number in 0..THREADS {
                let all_are_there = &all_are_there;
                let run = move || {
                    self.on_thread(|| {
                        let _span = info_span!("burst").entered();
                        // These slots are reused later, so spans of a later thread with the same number need no more
                        // memory.
                        let open: Vec<_> = (0..TASKS).map(|_| info_span!("step")).collect();
                        all_are_there.wait();
                        drop(open);
                        burn(MS / 10);
                        if number % 4 == 0 {
                            error!("oh");
                        }
                    });
                };
                let thread = std::thread::Builder::new().stack_size(256 * 1024);
                thread.spawn_scoped(scope, run).expect("a thread");
            }
        });
        self.truth.note("burst", THREADS as u64, THREADS as u64 / 4);
        self.truth.note("step", THREADS as u64 * TASKS, 0);
    }
}

/// The counters of losses and of downsampling.
fn losses(stats: &Stats) -> Vec<(&'static str, u64)> {
    const PREFIXES: [&str; 10] = [
        "samples.dropped_",
        "samples.downsampled",
        "spans.kept_without",
        "spans.kept_exporter",
        "spans.no_profile_no_memory",
        "spans.kept_over",
        "waits.dropped_",
        "waits.switches_dropped",
        "profiles.dropped_",
        "threads.refused_",
    ];
    let is_loss = |name: &str| {
        PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || name == "sampling.rate_reduced"
    };
    stats.iter().filter(|(name, count)| *count > 0 && is_loss(name)).collect()
}

/// Steps per task.
const STEPS: u64 = 3;

async fn one_task(fails: bool) {
    for step in 0..STEPS {
        info_span!("step").in_scope(|| {
            spin(2_000);
            if fails && step == 1 {
                error!("oh");
            }
        });
        tokio::task::yield_now().await;
    }
}

fn failing(busy: Duration) {
    let _span = info_span!("exported").entered();
    burn(busy);
    error!("oh");
}

/// Uses that much CPU time.
pub(crate) fn burn(cpu: Duration) {
    let start = ThreadTime::now();
    while start.elapsed() < cpu {
        spin(5_000);
    }
}

#[inline(never)]
fn spin(rounds: u64) -> u64 {
    let mut x = 1_u64;
    let mut i = 0;
    while i < rounds {
        x = std::hint::black_box((x ^ i) * 3 % 1_000_003);
        i += 1;
    }
    x
}

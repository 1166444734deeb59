//! Scans of threads between rounds.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::Threads;
use super::attachment::Check;
use super::holder_search::search_holders;
use super::sampled::{PARK_AFTER, SampledThread};
use super::waits::{
    IDLE_SCAN_INTERVAL, SCAN_INTERVAL, ScanResult, Scanner, WAITING_SCAN_INTERVAL,
    WAITING_SCAN_INTERVAL_BY_CLOCK,
};
use crate::drain::Why;
use crate::intake::Intake;
use crate::log::{LogEvent, LogKind};
use crate::report;
use crate::stats::Counters;

/// A wake-up takes some 16 µs and scanning a thread 0.2 to 1 µs: together 1 % of a core or a little more.
const SOONEST: Duration = Duration::from_millis(1);
const SOONEST_OF_A_THREAD: Duration = Duration::from_micros(20);
/// How soon a ring may be read because half of it may be full.
const SOONEST_FULL: Duration = Duration::from_micros(250);
/// How long one scan may spend on attaching threads, which takes some 150 µs each.
const MAX_ATTACHING: Duration = Duration::from_millis(5);
/// How many threads may be attached again at another rate in one scan. More would not fit into [`MAX_ATTACHING`].
const MAX_CHANGING: usize = 16;

/// How often it is said that the rate is lowered, or that no more threads are sampled.
const SAY_INTERVAL: Duration = Duration::from_secs(60);

pub(super) struct Schedule {
    /// The thread at which the next scan starts.
    first: usize,
    /// The interval until the next scan, as the last one determined it.
    interval: Duration,
    scanned: Instant,
    /// Whether a hook may wake the collector for a scan, and when one last did.
    hooks_wake: bool,
    woken: Option<Instant>,
    is_in_span: bool,
}

impl Schedule {
    pub(super) fn new() -> Self {
        Self {
            first: 0,
            interval: SCAN_INTERVAL,
            scanned: Instant::now(),
            hooks_wake: false,
            woken: None,
            is_in_span: false,
        }
    }
}

impl Threads {
    /// Whether the last scan found a thread in a profiled span.
    pub(crate) fn is_in_span(&self) -> bool {
        self.schedule.is_in_span
    }

    /// Threads are about to enter a span.
    pub(crate) fn scan_soon(&mut self) {
        self.schedule.interval = SCAN_INTERVAL;
    }

    /// Threads may no longer have to be sampled.
    pub(crate) fn scan_at_once(&mut self) {
        self.schedule.interval = Duration::ZERO;
    }

    /// Whether a scan is due, or nearly so.
    pub(crate) fn must_scan(&self) -> bool {
        self.until_scan() <= self.scan_interval() / 2
    }

    /// How long until the next scan, or until a ring may be half full.
    pub(crate) fn until_next(&self) -> Option<Duration> {
        let is_any = !self.sampled.is_empty();
        // The kernel could wake the collector when half of a ring is full, but that takes a file, which may be closed.
        let fills = |one: &SampledThread| one.cursor.fill_time(one.waiting().is_some());
        let until_full = self.sampled.iter().filter_map(fills).min().map(|it| it.max(SOONEST_FULL));
        let until_scan = is_any.then(|| self.until_scan());
        until_scan.into_iter().chain(until_full).chain(self.process.until_next()).min()
    }

    /// Searches for threads of the process that have met no hook, if a profile of it is made and that is due, or soon due and
    /// this is a round.
    pub(crate) fn search_process(&mut self, intake: &mut Intake, is_round: bool) {
        if !self.process.must_search(is_round) {
            return;
        }
        let Some((why, periods)) = self.process.demand() else { return };
        let hooked: HashSet<u32> = self.sampled.iter().map(|one| one.thread().tid()).collect();
        let frequency = self.budgets.of(why).frequency(intake.now_ns());
        let rate = why.rate(frequency, periods).slowed(self.reading.times);
        if self.process.search((why, rate), (&intake.source, intake.now_ns()), &hooked) {
            self.scan_soon();
        }
        // It has a budget of its own.
        _ = intake.own_cpu.lap();
    }

    /// How long until the next scan for blocked threads.
    fn scan_interval(&self) -> Duration {
        // Where scanning a thread takes a system call, all scans together may take 1 % of the time.
        const A_THREAD: Duration = Duration::from_micros(100);
        let by_clock = self.sampled.iter().filter(|sampled| sampled.is_checked_by_clock());
        let least = u32::try_from(by_clock.count()).map_or(SCAN_INTERVAL, |count| A_THREAD * count);
        self.schedule.interval.max(least)
    }

    fn until_scan(&self) -> Duration {
        self.scan_interval().saturating_sub(self.schedule.scanned.elapsed())
    }

    /// Scans threads in profiled spans: whether the spans are past their sampling delay, and whether the threads are
    /// blocked.
    pub(crate) fn scan(&mut self, intake: &mut Intake, least_age: u64) {
        self.schedule.scanned = Instant::now();
        if std::mem::take(&mut self.schedule.hooks_wake) && !intake.spans.scans_rarely() {
            self.schedule.woken = Some(self.schedule.scanned);
        }
        let now = intake.clock().now();
        let now_ns = intake.clock().raw_ns(now);
        let mut until_wanted = Duration::MAX;
        let may_attach = self.attaching.has_budget(now_ns);
        let has_half = self.attaching.left_ns(now_ns) >= self.attaching.most_ns() / 2;
        let mut has_attached = false;
        self.sampled.iter_mut().for_each(|sampled| sampled.charge(&mut self.budgets));
        let mut check = Check {
            at: self.schedule.scanned,
            now,
            now_ns,
            may_attach,
            may_change: may_attach,
            times: self.reading.times,
            process: None,
            source: &intake.source,
        };
        let park_after = intake.clock().ticks(PARK_AFTER);
        let mut changing = 0;
        // Starts at a different thread each time, as there may not be time for all.
        let first = self.schedule.first.checked_rem(self.sampled.len()).unwrap_or(0);
        self.schedule.first = self.schedule.first.wrapping_add(7);
        let (later, sooner) = self.sampled.split_at_mut(first);
        for sampled in sooner.iter_mut().chain(later) {
            // The rings of other threads fill while threads are attached.
            check.may_attach = may_attach && self.schedule.scanned.elapsed() < MAX_ATTACHING;
            check.may_change = check.may_attach && changing < MAX_CHANGING;
            let is_idle = sampled.is_idle(now, park_after);
            let was_detached = sampled.attachment.is_detached();
            let process = self.process.demand_of(sampled.thread().tid(), is_idle);
            // The other half of the budget is for slow spans.
            let may_be = |why| why != Why::Continuous || !was_detached || has_half;
            check.process = process.filter(|(why, _)| may_be(*why));
            self.can_end |= sampled.check(&check, &mut self.budgets);
            has_attached |= was_detached && !sampled.attachment.is_detached();
            changing += usize::from(sampled.attachment.changes_rate());
            if sampled.is_newly_left_out(&check) {
                Counters::add(&intake.counters.threads.attach_deferred, 1);
            }
            if sampled.attachment.is_to_end(check.at) {
                until_wanted = Duration::ZERO;
            }
            if !sampled.attachment.is_for_spans() {
                let left = sampled.thread().samples_from().saturating_sub(now);
                // A wanted thread that could not be attached is checked again at the usual interval, or at once if only
                // this scan ran out of time.
                let is_known = left == 0 && (check.may_attach || !may_attach);
                let left = if is_known {
                    SCAN_INTERVAL
                } else {
                    Duration::from_nanos(intake.clock().ns(left))
                };
                until_wanted = until_wanted.min(left);
            }
        }
        // Attaching a thread costs the same at any sampling rate, so it does not count towards lowering the rate.
        if has_attached && let Some(took) = intake.own_cpu.lap() {
            self.attaching.spend(took);
        }
        let threads = u32::try_from(self.sampled.len()).unwrap_or(u32::MAX);
        let soonest_wanted =
            SOONEST.max(SOONEST_OF_A_THREAD.saturating_mul(threads)).min(SCAN_INTERVAL);
        let unwanted_scan = Duration::from_nanos(intake.clock().ns(least_age))
            .clamp(SCAN_INTERVAL, IDLE_SCAN_INTERVAL);
        let slow_threads = self.slow_tids().count() as u64;
        let mut scanner = Scanner {
            slow_threads,
            intake: &mut *intake,
            captures: &mut self.captures,
            waits: self.settings.waits,
            now_ns,
            is_starved: false,
        };
        let (later, sooner) = self.sampled.split_at_mut(first);
        let (mut soonest, mut is_in_span) = (None, false);
        for sampled in sooner.iter_mut().chain(later) {
            let result = sampled.scan(&mut scanner);
            is_in_span |= result != ScanResult::OutsideSpans;
            let hooked_ns = scanner.hooked_ns(sampled.thread());
            // A thread in no span may enter one at any time, and must be found before that is past its delay.
            let (shortest, outside_spans) = match sampled.is_unwanted() {
                true => (unwanted_scan, unwanted_scan),
                false => (SCAN_INTERVAL, IDLE_SCAN_INTERVAL),
            };
            let (unchanged_ns, longest) = match result {
                ScanResult::Busy => (0, SCAN_INTERVAL),
                ScanResult::StillWaiting { waited_ns } if sampled.is_checked_by_clock() => {
                    (waited_ns, WAITING_SCAN_INTERVAL_BY_CLOCK)
                }
                ScanResult::StillWaiting { waited_ns } => (waited_ns, WAITING_SCAN_INTERVAL),
                ScanResult::OutsideSpans => (now_ns.saturating_sub(hooked_ns), outside_spans),
            };
            // After a quarter of the time without a change.
            let next = Duration::from_nanos(unchanged_ns / 4);
            let next = next.clamp(shortest, longest.max(shortest));
            soonest = Some(soonest.map_or(next, |soonest: Duration| soonest.min(next)));
        }
        let is_starved = scanner.is_starved;
        self.rivals.note(is_starved, now_ns, &intake.counters);
        search_holders(&mut self.sampled, &mut self.captures, intake, now_ns);
        let next = soonest.unwrap_or(IDLE_SCAN_INTERVAL);
        self.schedule.is_in_span = is_in_span;
        self.sampled.park(|sampled| {
            let is_parked = sampled.is_parked(now, park_after);
            if is_parked {
                self.process.note_parked(sampled.thread().tid());
            }
            is_parked
        });
        let longest = self.settings.timing.longest_scan_interval;
        self.schedule.interval = next.min(until_wanted.max(soonest_wanted)).min(longest);
        self.let_hooks_wake(intake, may_attach);
        if let Some(took) = intake.own_cpu.lap() {
            Counters::add(&intake.counters.sampling.collector_cpu_ns, took);
        }
    }

    /// If the next scan is late, lets a thread that enters a span past its sampling delay wake the collector. Not while no
    /// thread may be attached. If a hook woke the collector within the last scan interval, scans early instead.
    fn let_hooks_wake(&mut self, intake: &Intake, may_attach: bool) {
        let is_late =
            may_attach && self.scan_interval() > SCAN_INTERVAL && !self.sampled.is_empty();
        let is_soon = self.schedule.woken.is_some_and(|woken| woken.elapsed() < SCAN_INTERVAL);
        if is_late && is_soon {
            self.schedule.interval = SCAN_INTERVAL;
        }
        self.schedule.hooks_wake = is_late && !is_soon;
        intake.spans.set_scans_rarely(self.schedule.hooks_wake);
    }

    pub(super) fn check_budget(&mut self, intake: &Intake) {
        let before = self.reading.times;
        let Some(times) = self.reading.update(intake.now_ns(), self.reading_ns) else {
            return;
        };
        intake.source.slow_down(times);
        if times < before {
            return;
        }
        Counters::add(&intake.counters.sampling.rate_reduced, 1);
        let percent = self.settings.cpu_percent.unwrap_or_default();
        self.say(report::lowered_rate(percent, times), Instant::now().checked_sub(SAY_INTERVAL));
    }

    /// Rearms threads whose timer's signal handler was replaced by the program, with another signal. While a debugger is
    /// attached, they get none. Returns whether there are any.
    pub(super) fn check_signals(&mut self, intake: &Intake) -> bool {
        let is_traced = intake.source.check_tracer();
        let mut has_lost_signal = self.process.check_signals(is_traced);
        let mut has_ended = false;
        for sampled in self.sampled.iter() {
            let timer = sampled.cursor.session.ring.as_ref().and_then(|ring| ring.timer());
            if let Some(timer) = timer.filter(|timer| is_traced || timer.has_lost_signal()) {
                has_lost_signal |= timer.has_lost_signal();
                timer.stop();
                sampled.cursor.pause();
                sampled.thread().end();
                has_ended = true;
            }
        }
        if has_lost_signal {
            // Once.
            self.say(LogEvent::warning(LogKind::SignalLost, report::LOST_SIGNAL), None);
        }
        has_ended
    }
}

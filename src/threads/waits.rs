//! Captures where threads wait inside profiled spans, for what, and for how long.
//!
//! Nothing runs on the waiting thread. Its switch records show that it is blocked, or where there are none its CPU
//! clock, which stands still. Its stack is read from outside, which is valid if the thread was not switched in during
//! the read. The length of a wait is measured, not counted in scans.

use std::io;
use std::time::Duration;

use super::holders::{HolderSearch, SEARCHES};
use crate::budget::{CpuBudget, passed};
use crate::drain::ThreadCursor;
use crate::intake::Intake;
use crate::log::{LogEvent, LogKind};
use crate::profile::SampleKind;
use crate::sampler::{SwitchRing, ThreadShared};
use crate::sinks::{NewSample, SHORTEST_WAIT, Stack, StackLeaf};
use crate::span::SpanKey;
use crate::stats::Counters;
use crate::sys::{self, Blocked, OsThread};
use crate::unwind::UnwindEnd;

/// The scan interval while a thread is in a profiled span and not known to be blocked. All waits longer than this and
/// [`SHORTEST_WAIT`] together are captured, and some of those in between. After a pause, all waits longer than
/// [`IDLE_SCAN_INTERVAL`] plus that.
pub(super) const SCAN_INTERVAL: Duration = Duration::from_millis(5);
/// The scan interval while no thread is in a profiled span, until threads are detached some seconds later.
pub(super) const IDLE_SCAN_INTERVAL: Duration = Duration::from_millis(20);
/// The scan interval while all threads in profiled spans are known to be blocked.
pub(super) const WAITING_SCAN_INTERVAL: Duration = Duration::from_millis(50);
/// The waiting scan interval without switch records. Ends of waits and starts of the next are known to half of that.
pub(super) const WAITING_SCAN_INTERVAL_BY_CLOCK: Duration = Duration::from_millis(6);

const _: () = assert!(SHORTEST_WAIT.as_nanos() == SwitchRing::SHORT_NS.end as u128);
/// A short wait that is captured represents this many others at most.
const MAX_SKIPPED: u64 = 256;

/// The kernel's clock and a converted reading of a counter differ by less.
const CLOCKS_DIFFER_NS: u64 = 1_000_000;

/// The CPU budget for capturing waits: 64 of some 50 µs at once, as of one lock, and 2 % of a core after that.
pub(super) const CAPTURES: CpuBudget = CpuBudget::new(2, 64 * A_CAPTURE_NS as i64);
/// The assumed cost where CPU time cannot be read.
const A_CAPTURE_NS: u64 = 50_000;

pub(crate) struct CaptureBudget {
    left: CpuBudget,
    /// For the search for holders of locks.
    pub(super) searches: CpuBudget,
    /// When the seccomp filters are to be read again.
    filters_due_ns: u64,
    /// The warning, until it is logged, that blocked threads cannot be inspected, so waits lack stacks or are missing.
    pub(super) unseen: Option<LogEvent>,
    has_noted_unseen: bool,
}

impl CaptureBudget {
    pub(super) fn new(left: CpuBudget) -> Self {
        Self { left, searches: SEARCHES, filters_due_ns: 0, unseen: None, has_noted_unseen: false }
    }

    fn has_half(&mut self, now_ns: u64) -> bool {
        self.left.left_ns(now_ns) > self.left.most_ns() / 2
    }

    /// A thread cannot be inspected. `is_blocked` is `None` if nothing else says whether it is blocked.
    fn note_unseen(&mut self, error: &io::Error, is_blocked: Option<bool>) {
        // A thread that has ended cannot be, either.
        if self.has_noted_unseen || Blocked::of(sys::current_tid()).is_ok() {
            return;
        }
        let what = match is_blocked {
            Some(_) => "waits have their length and no stack",
            None => "there are no waits in profiles, as nothing says which threads are blocked",
        };
        let why = match error.kind() {
            io::ErrorKind::PermissionDenied => {
                ": the program has changed its user, has file capabilities, or is not dumpable"
            }
            io::ErrorKind::NotFound => ": is /proc mounted, of this process' PID namespace?",
            _ => "",
        };
        let message = format!("{what}: cannot read /proc/self/task/TID/syscall ({error}){why}");
        self.unseen = Some(LogEvent::warning(LogKind::WaitsUnseen, message));
        self.has_noted_unseen = true;
    }

    /// Reads the seccomp filters, if that is due: it takes as long as a capture.
    pub(super) fn read_filters(&mut self, now_ns: u64) {
        if now_ns >= self.filters_due_ns {
            self.filters_due_ns = now_ns + 100_000_000;
            sys::read_filters();
        }
    }
}

pub(crate) struct Scanner<'a> {
    pub(crate) intake: &'a mut Intake,
    pub(crate) captures: &'a mut CaptureBudget,
    pub(crate) waits: bool,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) now_ns: u64,
    /// How many threads are in spans past their sampling delays.
    pub(super) slow_threads: u64,
    /// Whether a thread in a slow span waited for a CPU since its last scan.
    pub(super) is_starved: bool,
}

impl Scanner<'_> {
    /// When the thread's last hook ended: `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(super) fn hooked_ns(&self, thread: &ThreadShared) -> u64 {
        self.intake.clock().raw_ns(thread.last_hook_at())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScanResult {
    OutsideSpans,
    /// The thread is in one, and is not known to be blocked.
    Busy,
    /// The wait that was captured earlier continues.
    StillWaiting {
        waited_ns: u64,
    },
}

/// Finds out whether a thread is blocked in a profiled span, and since when.
#[derive(Default)]
pub(crate) struct BlockDetector {
    pub(super) waiting: Option<WaitingThread>,
    /// The last reading of the CPU clock, for a thread without switch records.
    last: Option<CpuReading>,
    /// The start of the last wait that was not captured because the budget was used up.
    left_out_since_ns: Option<u64>,
    /// The head of the switch ring when it was full. Until there are new records, the newest is not the last switch.
    full_at: Option<u64>,
    /// The short waits that were before the last hook or are represented by others, and when that hook was.
    represented: ([u64; 2], u64),
    /// At the last scan no span of the thread was past its sampling delay, or there was none yet.
    was_within_delay: bool,
}

/// A wait that has not ended.
pub(crate) struct WaitingThread {
    pub(crate) span: SpanKey,
    pub(crate) since_ns: u64,
    /// When it was last known to continue.
    lasted_until_ns: u64,
    proof: Proof,
    thread: OsThread,
    pub(crate) stack: Stack,
    pub(super) sought: HolderSearch,
    /// The time and number of short waits before it, which it represents.
    skipped: [u64; 2],
}

/// Something that does not change while a thread does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    /// The head of its switch ring.
    Switches(u64),
    /// The thread's CPU time, and the head of its switch ring, if it has one.
    Cpu(u64, Option<u64>),
}

#[derive(Clone, Copy, Debug)]
struct CpuReading {
    time_ns: u64,
    cpu_ns: u64,
    /// Since when the thread has not run, provided that it does not run before the next scan.
    idle_since_ns: u64,
    /// The span has passed its sampling delay since the previous scan, so there can have been shorter waits since the
    /// thread's clock was last read.
    passed_delay: bool,
}

impl BlockDetector {
    /// Of a thread that was attached before it could wait, or was not.
    pub(super) fn new(is_attached: bool) -> Self {
        Self { was_within_delay: !is_attached, ..Self::default() }
    }

    /// Captures a wait only if the thread `is_slow`: one of its spans is past its sampling delay. It was given a CPU `runs`
    /// times since the last scan, as far as is known.
    pub(crate) fn scan(
        &mut self,
        cursor: &ThreadCursor,
        is_slow: bool,
        mut runs: u64,
        scanner: &mut Scanner<'_>,
    ) -> ScanResult {
        if let Some(waiting) = &mut self.waiting {
            match waiting.end(cursor, runs, scanner) {
                None => {
                    waiting.lasted_until_ns = scanner.now_ns;
                    return ScanResult::StillWaiting { waited_ns: waiting.waited_ns() };
                }
                Some(ended) => self.finish(ended, scanner),
            }
            runs = 0;
        }
        if !scanner.waits {
            // The records are not needed.
            cursor.switches().into_iter().for_each(SwitchRing::skip);
        }
        let span = cursor.thread.span();
        self.was_within_delay |= !is_slow;
        let Some(span) = span.filter(|_| is_slow) else {
            if let Some(ring) = cursor.switches() {
                self.make_room(ring, &scanner.intake.counters);
            }
            self.last = None;
            return if span.is_some() { ScanResult::Busy } else { ScanResult::OutsideSpans };
        };
        // A wait inside a hook belongs to neither the previous nor the next span.
        if cursor.thread.is_in_hook() || !scanner.waits {
            return ScanResult::Busy;
        }
        let since = self.waits_since(cursor, runs, scanner);
        self.was_within_delay = false;
        if let Some((since_ns, proof, passed_delay)) = since {
            let waited_ns = scanner.now_ns.saturating_sub(since_ns);
            let skipped = self.skipped(cursor, scanner, waited_ns);
            if waited_ns + skipped[0] < SwitchRing::SHORT_NS.end {
                return ScanResult::Busy;
            }
            if scanner.captures.left.has_budget(scanner.now_ns) {
                let start = sys::thread_cpu_ns();
                let holds_others = passed_delay && has_waited_before(cursor, scanner, proof);
                self.waiting = capture(cursor, span, since_ns, proof, scanner);
                let took = passed(start, sys::thread_cpu_ns());
                scanner.captures.left.spend(took.unwrap_or(A_CAPTURE_NS));
                if let Some(waiting) = &mut self.waiting {
                    (waiting.stack.holds_others, waiting.skipped) = (holds_others, skipped);
                }
            } else if self.left_out_since_ns.replace(since_ns) != Some(since_ns) {
                Counters::add(&scanner.intake.counters.waits.dropped_over_budget, 1);
            }
        }
        ScanResult::Busy
    }

    /// Sampling was paused, so the newest switch record is not the last switch.
    pub(crate) fn skip_records(&mut self, cursor: &ThreadCursor, now_ns: u64) {
        self.full_at = cursor.switches().map(|ring| ring.head());
        self.begin_by_clock(cursor, now_ns);
    }

    /// Switches to the CPU clock: from now on there are no switch records. All waits until now have been scanned.
    pub(crate) fn begin_by_clock(&mut self, cursor: &ThreadCursor, now_ns: u64) {
        self.last = sys::cpu_ns_of(cursor.thread.tid()).map(|cpu_ns| CpuReading {
            time_ns: now_ns,
            cpu_ns,
            idle_since_ns: now_ns,
            passed_delay: false,
        });
    }

    pub(crate) fn end(&mut self, cursor: &ThreadCursor, scanner: &mut Scanner<'_>) {
        if let Some(waiting) = &self.waiting {
            let ended = waiting.end(cursor, 0, scanner);
            self.finish(ended.unwrap_or((waiting.lasted_until_ns, None)), scanner);
        }
    }

    fn finish(&mut self, (end_ns, clock): EndedWait, scanner: &mut Scanner<'_>) {
        let Some(mut waiting) = self.waiting.take() else { return };
        waiting.choose_holder(true);
        self.last = clock;
        let wait = waiting.until(end_ns);
        scanner.intake.add_wait(waiting.span, wait);
        let [skipped_ns, count] = waiting.skipped;
        if count > 0 {
            let is_short = SwitchRing::SHORT_NS.contains(&wait.weight);
            let [represented_ns, represented] = &mut self.represented.0;
            *represented_ns += skipped_ns + if is_short { wait.weight } else { 0 };
            *represented += count + u64::from(is_short);
        }
        // Each has the mean length, and none of them more than the longest.
        let (mean_ns, shown) = (skipped_ns / count.max(1), count.min(MAX_SKIPPED));
        for number in 1..=shown {
            let time_ns = wait.time_ns.saturating_sub(number * mean_ns);
            scanner.intake.add_wait(waiting.span, NewSample { time_ns, weight: mean_ns, ..wait });
        }
    }

    /// Removes all switch records but the newest.
    fn make_room(&mut self, ring: &SwitchRing, counters: &Counters) {
        if ring.is_full() {
            self.full_at = Some(ring.head());
        }
        Counters::add(&counters.waits.switches_dropped_ring_full, ring.make_room());
        self.full_at.take_if(|full_at| *full_at != ring.head());
    }

    /// If the thread is blocked: since when, the proof of that, and whether the time can include shorter waits.
    fn waits_since(
        &mut self,
        cursor: &ThreadCursor,
        runs: u64,
        scanner: &Scanner<'_>,
    ) -> Option<(u64, Proof, bool)> {
        let (now_ns, counters) = (scanner.now_ns, &scanner.intake.counters);
        // A wait lies within its span.
        let hooked_ns = scanner.hooked_ns(&cursor.thread);
        // A thread that was already blocked when it was attached has no record.
        if let Some(ring) = cursor.switches().filter(|ring| ring.head() > 0) {
            let out = ring.switched_out();
            self.make_room(ring, counters);
            if self.full_at.is_none() {
                self.last = None;
                // A preempted thread waits only for a CPU.
                let is_inside = |at_ns: u64| at_ns.saturating_add(CLOCKS_DIFFER_NS) >= hooked_ns;
                let out = out.filter(|out| !out.preempted && is_inside(out.time_ns))?;
                let since_ns = out.time_ns.max(hooked_ns);
                return Some((since_ns, Proof::Switches(out.position), false));
            }
            // There were more switches between two scans than the ring holds: uses the clock.
        }
        let cpu_ns = sys::cpu_ns_of(cursor.thread.tid())?;
        let hook = cursor.thread.synced();
        let last = self.last.filter(|last| last.time_ns >= hook.map_or(0, |(time_ns, _)| time_ns));
        let base = last.map(|last| (last.time_ns, last.cpu_ns)).or(hook);
        let (base_ns, base_cpu_ns) = base.unwrap_or((now_ns, cpu_ns));
        let stood_still = last.filter(|last| last.cpu_ns == cpu_ns);
        // If the thread ran in between, the off-CPU time is assumed to follow: of several waits, the mean.
        let off_ns =
            now_ns.saturating_sub(base_ns).saturating_sub(cpu_ns.saturating_sub(base_cpu_ns));
        let mean_ns = if last.is_some() { off_ns / (runs + 1) } else { off_ns };
        let (idle_since_ns, passed_delay) = match stood_still {
            Some(last) => (last.idle_since_ns, last.passed_delay),
            None => (now_ns.saturating_sub(mean_ns).max(hooked_ns), self.was_within_delay),
        };
        self.last = Some(CpuReading { time_ns: now_ns, cpu_ns, idle_since_ns, passed_delay });
        let records = cursor.switches().filter(|_| self.full_at.is_none());
        let proof = Proof::Cpu(cpu_ns, records.map(|ring| ring.head()));
        stood_still.map(|_| (idle_since_ns, proof, passed_delay))
    }

    /// The short waits since the last hook that no stack represents, their time and number: the present one, if it is short
    /// too, may be captured for them.
    fn skipped(
        &mut self,
        cursor: &ThreadCursor,
        scanner: &mut Scanner<'_>,
        waited_ns: u64,
    ) -> [u64; 2] {
        let Some(ring) = cursor.switches() else { return [0, 0] };
        let ([all_ns, all], hooked_ns) = (ring.short_waits(), scanner.hooked_ns(&cursor.thread));
        let ([represented_ns, represented], since_ns) = self.represented;
        if since_ns != hooked_ns || represented > all {
            // Some may have been before the hook, or in another session.
            self.represented = ([all_ns, all], hooked_ns);
        } else if waited_ns < SwitchRing::SHORT_NS.end && scanner.captures.has_half(scanner.now_ns)
        {
            return [all_ns.saturating_sub(represented_ns), all - represented];
        }
        [0, 0]
    }
}

/// When a wait ended, and the CPU clock reading that showed that, unless a hook has read the clock since.
type EndedWait = (u64, Option<CpuReading>);

impl WaitingThread {
    pub(crate) fn waited_ns(&self) -> u64 {
        self.so_far().weight
    }

    /// The likeliest holder, of those that were found.
    pub(super) fn choose_holder(&mut self, has_ended: bool) {
        let before = std::mem::replace(&mut self.stack.holder, self.sought.likeliest(has_ended));
        if before != self.stack.holder {
            self.stack.elsewhere = Vec::new();
        }
    }

    pub(crate) fn so_far(&self) -> NewSample<'_> {
        self.until(self.lasted_until_ns)
    }

    fn until(&self, end_ns: u64) -> NewSample<'_> {
        let (time_ns, thread, stack) = (self.since_ns, Some(self.thread), &self.stack);
        let weight = end_ns.saturating_sub(time_ns);
        NewSample { kind: SampleKind::OffCpu, time_ns, weight, thread, stack }
    }

    /// When the thread ran again, if it did.
    fn end(&self, cursor: &ThreadCursor, runs: u64, scanner: &Scanner<'_>) -> Option<EndedWait> {
        match self.proof {
            Proof::Switches(position) => {
                let ring = cursor.switches()?;
                (ring.head() != position)
                    .then(|| ring.switched_in_after(position).unwrap_or(self.lasted_until_ns))
                    .map(|at_ns| (at_ns, None))
            }
            Proof::Cpu(before, position) => {
                let now =
                    sys::cpu_ns_of(cursor.thread.tid()).map(|cpu_ns| (scanner.now_ns, cpu_ns));
                if now.is_some_and(|(_, cpu_ns)| cpu_ns == before) {
                    return None;
                }
                // The beginning of this wait has no record, but its end may have one.
                let recorded = cursor.switches().zip(position);
                let at_ns = recorded.and_then(|(ring, at)| ring.switched_in_after(at));
                if let Some(at_ns) = at_ns.filter(|at_ns| *at_ns > self.lasted_until_ns) {
                    return Some((at_ns, None));
                }
                // The wait is the off-CPU time since it was last known to continue, up to the last known hook.
                let hook =
                    cursor.thread.synced().filter(|(time_ns, _)| *time_ns > self.lasted_until_ns);
                let Some((until_ns, until_cpu_ns)) = hook.or(now) else {
                    return Some((self.lasted_until_ns, None));
                };
                let ran_ns = until_cpu_ns.saturating_sub(before);
                let off_ns = until_ns.saturating_sub(self.lasted_until_ns).saturating_sub(ran_ns);
                // When the thread ran in between is not known, so this wait, those after it, and the one in which it is
                // blocked again, each get the mean of the off-CPU time up to this reading.
                let waits_again = hook.is_none() && is_blocked(cursor.thread.tid());
                let ended = if hook.is_some() { 1 } else { runs.max(1) };
                let off_ns = off_ns / (ended + u64::from(waits_again));
                let next_ns = if waits_again { off_ns } else { 0 };
                let reading = CpuReading {
                    time_ns: until_ns,
                    cpu_ns: until_cpu_ns,
                    idle_since_ns: until_ns - next_ns,
                    passed_delay: false,
                };
                let clock = hook.is_none().then_some(reading);
                // The wait ended before the hook that counted it.
                let counted_ns = scanner.intake.clock().raw_ns(cursor.thread.claimed_at());
                let latest_ns = if counted_ns > self.since_ns { counted_ns } else { u64::MAX };
                Some(((self.lasted_until_ns + off_ns).min(latest_ns), clock))
            }
        }
    }
}

fn is_blocked(tid: u32) -> bool {
    let by_state = |_| OsThread::is_blocked(tid) == Some(true);
    Blocked::of(tid).map_or_else(by_state, |found| found.is_some())
}

fn still_holds(cursor: &ThreadCursor, proof: Proof) -> bool {
    match proof {
        Proof::Switches(position) => cursor.switches().is_some_and(|ring| ring.head() == position),
        Proof::Cpu(cpu_ns, _) => sys::cpu_ns_of(cursor.thread.tid()) == Some(cpu_ns),
    }
}

/// Whether a blocked thread was switched out before this wait since its clock was last read. That is known if it was read at
/// its last hook: what was before that is no part of the wait.
fn has_waited_before(cursor: &ThreadCursor, scanner: &Scanner<'_>, proof: Proof) -> bool {
    const SAME_HOOK_NS: u64 = 100_000;
    let hooked_ns = scanner.hooked_ns(&cursor.thread);
    let read = cursor.thread.synced().filter(|(ns, _)| ns + SAME_HOOK_NS >= hooked_ns);
    let before = read.and_then(|_| cursor.thread.synced_switches());
    let now = before.and_then(|_| OsThread::switches_of(cursor.thread.tid()));
    now > before.map(|before| before + 1) && still_holds(cursor, proof)
}

/// Announces the wait to the thread's next hook, which will count it, and then checks whether the thread is still
/// blocked. Returns whether it is; `None` if it has continued and no hook has counted the wait.
fn report_wait(cursor: &ThreadCursor, span: SpanKey, proof: Proof) -> Option<bool> {
    let before = cursor.thread.report_wait(span);
    let holds = still_holds(cursor, proof);
    (holds || !cursor.thread.retract_wait(span, before)).then_some(holds)
}

/// Captures where a thread is blocked. `None` if it has run again or waits only for a CPU.
fn capture(
    cursor: &ThreadCursor,
    span: SpanKey,
    since_ns: u64,
    proof: Proof,
    scanner: &mut Scanner<'_>,
) -> Option<WaitingThread> {
    let mut stack = Stack { end: UnwindEnd::Lost, ..Stack::new() };
    let mut sought = HolderSearch::default();
    scanner.captures.read_filters(scanner.now_ns);
    match Blocked::of(cursor.thread.tid()) {
        Ok(Some(Blocked { call, sp, pc })) => {
            stack.waited = Some(StackLeaf::In(call));
            sought = HolderSearch::of(call, cursor.thread.tid(), sp);
            let is_copied = scanner.intake.copy_blocked(sp);
            let holds = report_wait(cursor, span, proof)?;
            if holds {
                stack.holder = sought.likeliest(false);
            } else {
                sought = HolderSearch::default();
            }
            if holds && is_copied {
                scanner.intake.unwind_blocked(Some(&cursor.thread), (pc, sp), &mut stack);
            }
        }
        Ok(None) => return None,
        Err(error) => {
            // A thread that waits for a CPU does not run, either, which its clock alone does not tell apart.
            let is_blocked = match proof {
                Proof::Switches(_) => Some(true),
                Proof::Cpu(..) => OsThread::is_blocked(cursor.thread.tid()),
            };
            scanner.captures.note_unseen(&error, is_blocked);
            if is_blocked != Some(true) {
                return None;
            }
            report_wait(cursor, span, proof)?;
            stack.waited = Some(StackLeaf::Unknown);
            Counters::add(&scanner.intake.counters.waits.without_stack, 1);
        }
    }
    let (thread, lasted_until_ns) = (cursor.named, scanner.now_ns);
    let skipped = [0, 0];
    Some(WaitingThread { span, since_ns, lasted_until_ns, proof, thread, stack, sought, skipped })
}

//! Bringing the accounts up to date at a hook, after samples or time have passed.
//!
//! Samples belong to spans by position: a thread's ring head moves only when that thread is sampled. If it has moved
//! since the last hook, an interval of the ring is the span's that was innermost until then. So no clock and no
//! migration between processors can move a sample to a wrong span.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::account::LowerBounds;
use super::flags::{AGED, JUDGES_CPU, JUDGES_USAGE, REGISTERED, SAMPLED_ITSELF};
use super::inside::Inside;
use super::local::ThreadState;
use super::sample_counts::SampleCounts;
use super::segment::{AROUND, NESTED, READS_CPU, SUSPENDED, SWITCHED, Segment};
use super::slot::Slot;
use super::spans::{SpanEvent, SpanInfo};
use super::usage_read::{SwitchCounts, UsageRead};
use super::{RegistryId, SpanKey, Spans};
use crate::facts::Usage;
use crate::sampler::{SamplingSession, ThreadSetup, ThreadSource, ThreadUse};
use crate::stats::Counters;
use crate::sys::SuspendCounting;

/// The size of a sample without its stack, in bytes, on the architecture with the fewest registers: the least that the
/// kernel writes if it can copy no stack.
const LEAST_SAMPLE: u64 = 64;

impl Spans {
    /// Updates everything: whatever happened since the last hook belongs to the spans that are currently entered. If
    /// the thread was switched out after `now` was read, the update covers the time up to a later moment,
    /// `state.synced`, and the hook must not use an earlier time.
    #[cold]
    #[inline(never)]
    pub(super) fn sync_accounts(&self, state: &mut ThreadState, now: u64) {
        let _uncounted = SuspendCounting::begin();
        state.inside.move_sums(&self.table);
        // First: on a new thread, or one that was detached, there is nothing to update.
        if now >= state.deadline && self.scan(state, now) {
            return;
        }
        self.sync_samples(state, now);
        self.sync_cpu_time(state, now);
        self.register_captured_wait(state, now);
    }

    /// Like [`sync_accounts`](Self::sync_accounts), at an enter or exit of that span, with all that its rule judges.
    pub(super) fn sync_judged(&self, state: &mut ThreadState, slot: &Slot, now: u64) {
        if slot.flags() & JUDGES_USAGE != 0 {
            self.sync_usage(state, now);
        }
        self.sync_accounts(state, now);
    }

    /// A wait that the collector has captured counts as a sample of its span.
    fn register_captured_wait(&self, state: &ThreadState, now: u64) {
        let Some(key) = state.sampled.as_ref().and_then(|sampled| sampled.take_waited(now)) else {
            return;
        };
        // If the span is no longer entered, no profile has the wait.
        let span = state.entered().iter().find(|segment| segment.key == key.get());
        if let Some(slot) = span.and_then(|segment| segment.slot(&self.table)) {
            self.register_with_collector(&slot, SampleCounts::WAIT);
        }
    }

    /// Sets up sampling and clocks of this thread.
    fn begin(&self, state: &mut ThreadState) {
        let ThreadSetup { sampled, source } = self.source.begin();
        let (sampled, session) = sampled.unzip();
        if let Some(sampled) = &sampled {
            // The thread publishes its span at the end of the setup.
            sampled.begin_hook_in(state.top().map_or(0, |top| top.key));
        }
        state.sampled = sampled;
        state.source = Some(source);
        self.take_up(state, session, 0);
        state.sampled_ended_ns = 0;
        state.is_new = true;
        let Some(source) = &mut state.source else { return };
        let usage = source.usage(state.session.as_deref());
        let read = self.read_cpu(source.as_mut());
        state.cpu_unknown = read.is_none();
        let (cpu_ns, now) = read.unwrap_or_else(|| (0, self.clock.now()));
        state.cpu_ns = cpu_ns;
        state.read = UsageRead { usage, at: now, ..UsageRead::default() };
        self.note_synced(state, now, true);
        self.set_deadline(state, now);
    }

    /// Samples this thread from now on, if possible. What happened until now belongs to the spans that are entered.
    pub(super) fn arm_self(&self, state: &mut ThreadState, now: u64) {
        // If sampling was refused, the collector tries again.
        let Some(sampled) = state.sampled.as_ref().filter(|one| !one.is_refused()) else {
            return;
        };
        self.source.attach(sampled);
        if sampled.turn() == state.turn {
            return;
        }
        self.sync_samples(state, now);
        self.sync_cpu_time(state, now);
    }

    fn take_up(&self, state: &mut ThreadState, session: Option<Arc<SamplingSession>>, turn: u32) {
        let ended_ns = state.session.as_ref().map_or(0, |ended| ended.sampled_ns(0));
        state.sampled_ended_ns += ended_ns.saturating_sub(std::mem::take(&mut state.sampled_ns));
        state.samples = session.as_ref().map(|session| session.samples()).unwrap_or_default();
        state.from = 0;
        state.is_attached = session.as_ref().is_some_and(|session| session.ring.is_some());
        state.session = session;
        state.turn = turn;
        state.read.usage = state.read.usage.without_session();
        if let Some((source, session)) = state.source.as_ref().zip(state.session.as_ref()) {
            source.on_session_start(session);
        }
    }

    fn set_deadline(&self, state: &mut ThreadState, now: u64) {
        state.deadline = now.saturating_add(self.ticks.cpu_clock_interval);
    }

    /// All samples since the last hook belong to the span that was innermost, also those of sessions that began in
    /// between.
    fn sync_samples(&self, state: &mut ThreadState, now: u64) {
        self.sync_session(state, now);
        while let Some(next) = state.session.as_ref().and_then(|session| session.next()).cloned() {
            self.sync_usage(state, now);
            let turn = state.turn.wrapping_add(1);
            self.take_up(state, Some(next), turn);
            self.sync_usage(state, now);
            self.sync_session(state, now);
        }
    }

    fn sync_session(&self, state: &mut ThreadState, now: u64) {
        let Some(session) = &state.session else { return };
        let head = state.samples.load();
        let moved = head.saturating_sub(state.from);
        if moved == 0 {
            return;
        }
        // Records of lost samples are in the ring too; they are much smaller than a sample.
        let by_size = (moved / session.sample_size).max(u64::from(moved >= LEAST_SAMPLE));
        let counted = session.samples_left().or_else(|| session.count_samples(state.from, head));
        // Checked again: the ring in which they are counted may have been released in between.
        fence(Ordering::Acquire);
        let samples = session.samples_left().or(counted).unwrap_or(by_size);
        let mut span = state.top().and_then(|top| SpanKey::new(top.key)).filter(|_| samples > 0);
        let top = state.top().and_then(|top| top.slot(&self.table));
        // Checked before the samples are counted: a span must not get a profile id for samples that it will not have.
        let counts = SampleCounts::of_on_cpu(samples);
        let lost = if span.is_none() {
            None
        } else if !session.has_room() {
            Some(&self.counters.samples.dropped_intervals_full)
        } else if !top.is_some_and(|top| self.register_with_collector(&top, counts)) {
            Some(&self.counters.samples.dropped_span_events_full)
        } else {
            None
        };
        if let Some(lost) = lost {
            Counters::add(lost, samples);
            state.source.iter().for_each(|source| source.note_loss());
            span = None;
        }
        session.close_interval(span, head);
        state.from = head;
        self.sync_usage(state, now);
    }

    /// Reports a span and its ancestors to the collector, and adds `samples` to each of them.
    pub(super) fn register_with_collector(&self, slot: &Slot, samples: SampleCounts) -> bool {
        if !self.registers(slot) {
            return false;
        }
        slot.add_samples(samples);
        if samples.on_cpu > 0 {
            slot.set(SAMPLED_ITSELF);
        }
        self.for_ancestors(slot, |ancestor| {
            ancestor.add_samples(samples);
            true
        });
        true
    }

    /// Registers a span with its ancestors, unless they are registered. Returns false if the queue is full.
    pub(super) fn registers(&self, slot: &Slot) -> bool {
        slot.flags() & REGISTERED != 0 || self.report_opened_with_ancestors(slot)
    }

    /// Reports `Opened` for a span and its unreported ancestors, the outermost first, so that all ancestors of a
    /// registered span are registered.
    fn report_opened_with_ancestors(&self, slot: &Slot) -> bool {
        let _uncounted = SuspendCounting::begin();
        let mut unreported = Vec::new();
        unreported.extend(slot.id());
        self.for_ancestors(slot, |ancestor| {
            let is_unreported = ancestor.flags() & REGISTERED == 0;
            unreported.extend(ancestor.id().filter(|_| is_unreported));
            is_unreported
        });
        unreported.into_iter().rev().all(|id| {
            self.table.get(id).is_some_and(|slot| {
                let opened = self.known(&slot).map(|(key, known)| SpanEvent::Opened(key, known));
                let is_reported = opened.is_some_and(|it| self.span_events.push(it).is_ok());
                // Set after the report is queued: a thread that reads the flag relies on that.
                if is_reported {
                    slot.set(REGISTERED);
                }
                is_reported
            })
        })
    }

    pub(super) fn known(&self, slot: &Slot) -> Option<(SpanKey, SpanInfo)> {
        let parent = self.table.parent_of(slot).and_then(|parent| parent.key());
        let (id, root, plan) = (slot.id()?, SpanKey::new(slot.raw_root())?, slot.plan());
        let opened_ns = self.clock.raw_ns(slot.opened());
        Some((slot.key()?, SpanInfo { parent, root, id, plan, opened_ns }))
    }

    /// Visits the ancestors from the inside out until `visit` returns false. They are open, since the registry keeps a
    /// span as long as a child is open.
    pub(super) fn for_ancestors(&self, slot: &Slot, mut visit: impl FnMut(&Slot) -> bool) {
        let mut next = self.table.parent_of(slot);
        while let Some(slot) = next.filter(|slot| visit(slot)) {
            next = self.table.parent_of(&slot);
        }
    }

    /// Visits the ancestors at a hook, as far as that [reaches](Inside::set_reach). Returns how many were visited.
    pub(super) fn for_detached(
        &self,
        inside: &Inside,
        slot: &Slot,
        mut visit: impl FnMut(&Slot) -> bool,
    ) -> u32 {
        let (reach, mut visited) = (inside.reach.get(), 0);
        self.for_ancestors(slot, |ancestor| {
            if visited == reach {
                Counters::add(&self.counters.spans.ancestors_left_out, 1);
                return false;
            }
            visited += 1;
            visit(ancestor)
        });
        visited
    }

    fn sync_usage(&self, state: &mut ThreadState, now: u64) {
        let Some(source) = &mut state.source else { return };
        let usage = source.usage(state.session.as_deref());
        let since = usage.since(std::mem::replace(&mut state.read.usage, usage));
        let before = std::mem::replace(&mut state.read.at, now);
        state.read.recorded_ns += since.preempted_ns;
        self.count_usage_since(state, before, since);
        self.sync_run_delay(state);
    }

    fn count_usage_since(&self, state: &ThreadState, before: u64, since: Usage) {
        self.count_usage(state, |segment| {
            // The thread can have been preempted before the segment.
            let outside_ns = self.clock.ns(segment.runs_since().saturating_sub(before));
            Usage { preempted_ns: since.preempted_ns.saturating_sub(outside_ns), ..since }
        });
    }

    /// Adds usage to the spans that are not suspended.
    fn count_usage(&self, state: &ThreadState, usage: impl Fn(&Segment) -> Usage) {
        for segment in state.entered().iter().filter(|one| !one.has(SUSPENDED) && !one.has(NESTED))
        {
            let usage = usage(segment);
            if usage != Usage::default()
                && let Some(slot) = segment.slot(&self.table)
            {
                slot.counts().add_usage(usage);
            }
        }
    }

    /// For how long the thread waited for a CPU between the times at which the collector read that. It belongs to the spans
    /// that the thread was in all the time; where others began or ended in between, it is unknown.
    fn sync_run_delay(&self, state: &mut ThreadState) {
        let read = state.session.as_ref().and_then(|session| session.run_delay.get());
        for read in read.into_iter().flatten() {
            let before = state.read.run_delay;
            if before.is_some_and(|before| before.at >= read.at) {
                continue;
            }
            state.read.run_delay = Some(read);
            let Some(before) = before else { continue };
            let earlier_at = std::mem::replace(&mut state.read.run_delay_since, before.at);
            let run_delay_ns = read.ns.saturating_sub(before.ns);
            self.count_usage(state, |segment| {
                let since = segment.runs_since();
                if since > before.at {
                    return Usage::default();
                }
                // Up to when no delay was in progress. What the segment has of the time before ends in the same way.
                let from = if since <= earlier_at { before.ran_at } else { before.at };
                let run_delay_read_ns = self.clock.ns(read.ran_at.saturating_sub(from));
                Usage { run_delay_ns, run_delay_read_ns, ..Usage::default() }
            });
        }
    }

    /// Counts for how long the thread has waited for a CPU since the last call where that has no records. `now` is when the
    /// CPU clock was read.
    fn sync_switch_counts(&self, state: &mut ThreadState, now: u64) {
        let records = state.session.as_ref().is_some_and(|session| session.has_switch_records());
        let counts = SwitchCounts {
            at: now,
            cpu_ns: state.cpu_ns,
            usage: state.read.usage,
            recorded_ns: state.read.recorded_ns,
            records: records.then_some(state.turn),
        };
        let Some(before) = state.read.switches.replace(counts) else { return };
        let preempted_ns = counts.unrecorded_since(&before, &self.clock);
        self.count_usage_since(state, before.at, Usage { preempted_ns, ..Usage::default() });
    }

    /// Reads the CPU clock, and bounds the on-CPU time of every span since the last read.
    fn sync_cpu_time(&self, state: &mut ThreadState, began: u64) {
        let Some(source) = &mut state.source else { return };
        let Some((cpu_ns, now)) = self.read_cpu(source.as_mut()) else {
            state.cpu_unknown = true;
            state.pending.take().for_each(drop);
            state.synced = began;
            return;
        };
        let ran_ns = cpu_ns.saturating_sub(std::mem::replace(&mut state.cpu_ns, cpu_ns));
        let all_ns = state.session.as_ref().map_or(0, |session| session.sampled_ns(cpu_ns));
        let all_ns = all_ns.max(state.sampled_ns);
        let before_ns = std::mem::replace(&mut state.sampled_ns, all_ns);
        let ended_ns = std::mem::take(&mut state.sampled_ended_ns);
        let sampled_ns = (ended_ns + all_ns - before_ns).min(ran_ns);
        let synced = state.synced;
        let interval_ns = self.clock.ns(now.saturating_sub(synced));
        let bounds =
            |ticks| LowerBounds::of_part(self.clock.ns(ticks), interval_ns, ran_ns, sampled_ns);
        for segment in state.entered_mut() {
            segment.tally(bounds(segment.taken_since(synced, now)));
        }
        for part in state.pending.take() {
            let slot = self.table.find(part.id, part.key);
            if let Some((slot, key)) = slot.zip(SpanKey::new(part.key)) {
                slot.counts().add(key, bounds(part.ticks), true);
            }
        }
        if now.saturating_sub(state.read.at) > self.ticks.cpu_clock_interval {
            self.sync_usage(state, now);
        }
        let is_counted = state.read.at >= began;
        self.note_synced(state, now, is_counted);
    }

    /// The CPU clock was read at `now`, and if `is_counted` also what the system counts.
    fn note_synced(&self, state: &mut ThreadState, now: u64, is_counted: bool) {
        state.synced = now;
        if let Some(sampled) = &state.sampled {
            let Usage { voluntary_switches, involuntary_switches, .. } = state.read.usage;
            let switches = is_counted.then_some(voluntary_switches + involuntary_switches);
            sampled.note_synced(self.clock.raw_ns(now), state.cpu_ns, switches);
        }
        if is_counted {
            self.sync_switch_counts(state, now);
        }
    }

    /// The span of `top` is about to be innermost, or just was entered once more. Spans in which this thread is and that
    /// are not around it take no time from `now` on: their code does not run, although it is on the thread's stack. A
    /// thread of rayon steals a part of another request, or a task polls an executor. Returns whether that suspended or
    /// resumed any; `state.synced` may then be later than `now`.
    #[cold]
    pub(super) fn switch_to(&self, state: &mut ThreadState, top: &Slot, now: u64) -> bool {
        self.mark_around(state, top);
        let mut switching = state.entered().iter().filter(|segment| segment.must_switch());
        let is_any = switching.clone().next().is_some();
        if switching.any(|segment| self.must_read_cpu_of(state, segment, now)) {
            self.sync_accounts(state, now);
        }
        self.switch_marked(state, now.max(state.synced));
        is_any
    }

    /// The segment that did so has ended.
    #[cold]
    pub(super) fn switch_back(&self, state: &mut ThreadState, now: u64) {
        if let Some(top) = state.top().and_then(|top| top.slot(&self.table)) {
            self.mark_around(state, &top);
            self.switch_marked(state, now);
        }
    }

    /// Whether the CPU clock must be read before the innermost segment ends, because others will be resumed.
    pub(super) fn must_read_cpu_to_switch_back(&self, state: &ThreadState, now: u64) -> bool {
        let mut entered = state.entered().iter();
        state.top().is_some_and(|top| top.has(SWITCHED))
            && entered.any(|segment| self.must_read_cpu_of(state, segment, now))
    }

    /// Whether the CPU clock must be read before that segment is suspended or resumed.
    fn must_read_cpu_of(&self, state: &ThreadState, segment: &Segment, now: u64) -> bool {
        let judged = segment.slot(&self.table).map_or(0, |slot| slot.flags() & JUDGES_CPU);
        let aged = if segment.has(READS_CPU) { AGED } else { 0 };
        segment.must_be_exact(now) || self.must_read_cpu(state, judged | aged, now)
    }

    /// Marks the segments of that span and of its ancestors.
    fn mark_around(&self, state: &mut ThreadState, top: &Slot) {
        let (root, reach) = (top.raw_root(), state.inside.reach.get());
        let is_marked_once = |segment: &Segment| segment.root == root && !segment.has(NESTED);
        let segments = state.entered_mut();
        let mut left = segments.iter().filter(|segment| is_marked_once(segment)).count();
        if left == 0 {
            return;
        }
        let mut missed = 0;
        // Ancestors are almost always entered in order, so each is found right below the one before.
        let mut at = segments.len();
        let mut mark = |slot: &Slot| {
            let id =
                slot.id().filter(|_| slot.entered_since().is_some()).map_or(0, RegistryId::get);
            let is_it = |segment: &Segment| segment.id == id && !segment.has(NESTED);
            let (below, above) = segments.split_at(at);
            let found = below.iter().rposition(is_it);
            let found = found.or_else(|| Some(below.len() + above.iter().position(is_it)?));
            if let Some(segment) = found.and_then(|found| segments.get_mut(found)) {
                segment.set(AROUND);
                at = found.unwrap_or(at);
                left = left.saturating_sub(1);
            } else {
                missed += 1;
            }
            left > 0 && missed < reach
        };
        if mark(top) {
            self.for_ancestors(top, mark);
        }
    }

    /// Suspends and resumes segments, after [`mark_around`](Self::mark_around).
    fn switch_marked(&self, state: &mut ThreadState, now: u64) {
        let synced = state.synced;
        for segment in state.entered_mut() {
            let (must_switch, is_around) = (segment.must_switch(), segment.has(AROUND));
            segment.unset(AROUND);
            let slot = must_switch.then(|| segment.slot(&self.table)).flatten();
            let Some(slot) = slot else { continue };
            if is_around {
                slot.counts().resume(segment.resume(now, synced));
            } else {
                segment.suspend(now);
                slot.counts().suspend(now);
            }
        }
    }

    /// Reads the thread's CPU clock and the time, as close to the same moment as possible. An interrupt between the
    /// reads takes 10 to 30 µs, which the CPU clock includes; both are then read again.
    fn read_cpu(&self, source: &mut dyn ThreadSource) -> Option<(u64, u64)> {
        let before = self.clock.now();
        let (cpu_ns, now) = (source.cpu_ns()?, self.clock.now());
        if now.saturating_sub(before) <= self.ticks.cpu_clock_read {
            return Some((cpu_ns, now));
        }
        Some((source.cpu_ns()?, self.clock.now()))
    }

    /// The periodic checks, in which a thread detects that it was detached. Returns whether it was set up anew.
    fn scan(&self, state: &mut ThreadState, now: u64) -> bool {
        self.set_deadline(state, now);
        let is_outdated = state.source.as_ref().is_some_and(|source| source.is_outdated());
        let used = state
            .sampled
            .as_ref()
            .filter(|_| !is_outdated)
            .map_or(ThreadUse::Over, |one| one.note_used());
        match &state.sampled {
            Some(_) if used == ThreadUse::Used => false,
            Some(sampled) if used == ThreadUse::WasParked => {
                state.source.iter().for_each(|source| source.return_to_scans(sampled));
                false
            }
            None if state.source.is_some() => false,
            sampled => {
                sampled.iter().for_each(|sampled| sampled.end());
                // Covers the time until now, if the thread was set up before.
                self.sync_samples(state, now);
                self.sync_cpu_time(state, now);
                self.begin(state);
                true
            }
        }
    }
}

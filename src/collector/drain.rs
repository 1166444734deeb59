//! Drains one thread's ring.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;

use super::cursor::ThreadCursor;
use super::pending::{Added, NewSample, Pending};
use super::stack::Stack;
use crate::profile::SampleKind;
use crate::sampler::record::{Layout, Record, RecordPlace, Records, read_sample, stated_position};
use crate::sampler::{OpenInterval, Sampler, SpanInterval};
use crate::span::SpanKey;
use crate::stats::Counters;
use crate::sys::{self, MissedSignals, OsThread, SampleRing, TimerRing};
use crate::unwind::{ModuleAddress, UnwindEnd, Unwinder};

/// What draining reads and fills.
pub(super) struct Drain<'a> {
    pub(super) unwinder: &'a mut Unwinder,
    pub(super) pending: &'a mut Pending,
    pub(super) counters: &'a Counters,
    pub(super) source: &'a Sampler,
    pub(super) most_frames: usize,
    pub(super) round: u64,
    /// The kernel's id of this process.
    pub(super) pid: u32,
    pub(super) stack: &'a mut Stack,
    /// Whether the rate is lowered to stay within the CPU budget.
    pub(super) is_lowered: bool,
}

impl ThreadCursor {
    /// Reads everything in the ring. Returns the span that the thread is in.
    pub(super) fn drain(&mut self, drain: &mut Drain<'_>) -> Option<SpanKey> {
        let Some(ring) = self.arming.ring.clone() else { return self.thread.span() };
        // The order matters: see `ThreadShared::open_interval`.
        let head = ring.head();
        let open = self.thread.open_interval(&self.arming);
        while let Some(interval) = self.arming.take_interval() {
            self.intervals.push_back(interval);
        }
        if self.counted_from != open.from {
            (self.counted_from, self.counted) = (open.from, 0);
        }
        // The ring of a thread that is over is read for the last time.
        let is_over = self.thread.is_over();
        let mut end = head;
        for record in Records::between(&**ring, ring.tail(), head) {
            if let Ok(Record::Sample(place) | Record::Lost { place, .. }) = record
                && open.is_in_hook
                && !is_over
                && position_of(&ring, place) >= open.from
            {
                // Read again once the hook has published where the thread continues.
                end = place.position;
                drain.unwinder.leave_samples();
                break;
            }
            match record {
                Ok(Record::Sample(place)) => {
                    let position = position_of(&ring, place);
                    self.drained = position + self.arming.sample_size();
                    self.counted += u64::from(position >= self.counted_from);
                    self.uncharged += 1;
                    match owner(&mut self.intervals, open, position) {
                        Some(span) => {
                            let period_ns = self.arming.period_ns();
                            drain.sample(&ring, self.thread.thread, place, span, period_ns);
                        }
                        None => count(&drain.counters.samples.outside_spans, 1),
                    }
                    // Makes room for the next sample before this round has read all of them.
                    ring.release_to(place.position + u64::from(place.size));
                }
                Ok(Record::Lost { count: samples, place }) => {
                    let position = position_of(&ring, place);
                    count(&drain.counters.samples.dropped_ring_full, samples);
                    if let Some(span) = owner(&mut self.intervals, open, position) {
                        drain.pending.note(span, |pending| pending.losses.ring_full += samples);
                    }
                }
                Ok(Record::Throttled) => drain.lose(&drain.counters.sampling.throttled, 1),
                Ok(_) => {}
                Err(_) => drain.lose(&drain.counters.sampling.records_malformed, 1),
            }
        }
        ring.release_to(end);
        if ring.timer().is_none() {
            self.drained = end;
        }
        open.span
    }

    /// Counts the signals of its timer that were no samples since the last time. They leave no record, so they are taken
    /// for those of the span that the thread is in. Returns whether there were any.
    pub(super) fn count_missed(
        &self,
        span: Option<SpanKey>,
        pending: &mut Pending,
        counters: &Counters,
    ) -> bool {
        let timer = self.arming.ring.as_ref().and_then(|ring| ring.timer());
        let missed = timer.map(TimerRing::take_missed).unwrap_or_default();
        if missed == MissedSignals::default() {
            return false;
        }
        count(&counters.samples.dropped_alt_stack, missed.off_stack);
        count(&counters.samples.dropped_signal_stack_full, missed.without_room);
        if let Some(span) = span {
            pending.note(span, |pending| pending.losses.off_stack += missed.off_stack);
        }
        true
    }
}

/// The position of a record as the hooks of its thread see it.
fn position_of(ring: &SampleRing, place: RecordPlace) -> u64 {
    ring.timer().map_or(place.position, |ring| stated_position(&**ring, place))
}

fn count(counter: &AtomicU64, count: u64) {
    Counters::add(counter, count);
}

/// The span that a sample at `position` belongs to. Positions must not decrease: intervals before `position` are
/// dropped.
pub(super) fn owner(
    intervals: &mut VecDeque<SpanInterval>,
    open: OpenInterval,
    position: u64,
) -> Option<SpanKey> {
    while intervals.front().is_some_and(|interval| interval.to <= position) {
        intervals.pop_front();
    }
    if let Some(interval) = intervals.front().filter(|interval| interval.from <= position) {
        return Some(interval.span);
    }
    let is_open = open.from <= position;
    open.span.filter(|_| is_open)
}

/// Entries of a call chain from here on are not addresses but context markers, such as `PERF_CONTEXT_KERNEL`.
const FIRST_CONTEXT: u64 = u64::MAX - 4094;

impl Drain<'_> {
    /// Counts what no profile says.
    fn lose(&self, counter: &AtomicU64, lost: u64) {
        count(counter, lost);
        self.source.note_loss();
    }

    /// The weight of a sample, and how many others are lost with it. A timer states the weight. If the program
    /// blocked its signal for long, it is not known where the thread spent most of that time: the sample then has the
    /// usual weight and the rest is lost.
    fn weight_of(&self, stated_ns: Option<u64>, period_ns: u64) -> (u64, u64) {
        const TOO_MANY: u64 = 16;
        let Some(stated_ns) = stated_ns else { return (period_ns, 0) };
        let usual_ns = period_ns.max(sys::tick_ns().unwrap_or(0)).max(1);
        if stated_ns <= TOO_MANY * usual_ns {
            return (stated_ns, 0);
        }
        (usual_ns, stated_ns / usual_ns - 1)
    }

    fn sample(
        &mut self,
        ring: &SampleRing,
        thread: OsThread,
        place: RecordPlace,
        span: SpanKey,
        period_ns: u64,
    ) {
        let read = read_sample(&**ring, place, Layout::of(ring));
        let Some(sample) = read.ok().filter(|sample| {
            // Of this thread: an event is opened by an id, which may since be that of another process's thread.
            (sample.pid, sample.tid) == (self.pid, thread.tid)
        }) else {
            self.lose(&self.counters.sampling.records_malformed, 1);
            return;
        };
        // If another library was loaded where the sample is, that is known from here on.
        if self.unwinder.is_outdated() {
            self.unwinder.refresh();
        }
        self.stack.end = self.unwinder.unwind(
            sample.registers,
            |offset| sample.stack.word(offset),
            self.most_frames,
            &mut self.stack.frames,
        );
        if sample.in_kernel {
            let frames = &mut self.stack.frames;
            let in_user_code = frames.len();
            let chain = sample.kernel_chain.filter(|address| *address < FIRST_CONTEXT);
            frames.extend(chain.map(ModuleAddress::in_kernel));
            if frames.len() == in_user_code {
                frames.push(ModuleAddress::KERNEL);
            }
            frames.rotate_left(in_user_code);
        }
        let (period_ns, late) = self.weight_of(sample.weight_ns, period_ns);
        match self.stack.end {
            UnwindEnd::Root => {}
            UnwindEnd::Cut => count(&self.counters.stacks.truncated, 1),
            UnwindEnd::WithoutTables | UnwindEnd::Lost => {
                count(&self.counters.stacks.incomplete, 1)
            }
        }
        count(&self.counters.samples.taken, 1);
        let (kind, time_ns, weight) = (SampleKind::OnCpu, sample.time_ns, period_ns);
        let new = NewSample { kind, time_ns, weight, thread: Some(thread), stack: self.stack };
        match self.pending.add(span, new, self.round) {
            Added::Kept => {}
            Added::Downsampled(samples) => count(&self.counters.samples.downsampled, samples),
            Added::Lost => count(&self.counters.samples.dropped_memory, 1),
            Added::Refused => count(&self.counters.samples.dropped_pending_spans_full, 1),
        }
        if self.is_lowered {
            self.pending.note(span, |pending| pending.losses.lowered += 1);
        }
        if late > 0 {
            self.lose(&self.counters.samples.dropped_late, late);
            self.pending.note(span, |pending| pending.losses.late += late);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SpanKey = SpanKey::new(1).unwrap();
    const B: SpanKey = SpanKey::new(2).unwrap();

    fn interval(span: SpanKey, from: u64, to: u64) -> SpanInterval {
        SpanInterval { span, from, to }
    }

    fn owners(
        intervals: &[SpanInterval],
        open: Option<SpanKey>,
        from: u64,
        positions: &[u64],
    ) -> Vec<Option<SpanKey>> {
        let mut intervals: VecDeque<_> = intervals.iter().copied().collect();
        let open = OpenInterval { span: open, from, is_in_hook: false };
        positions.iter().map(|position| owner(&mut intervals, open, *position)).collect()
    }

    #[test]
    fn a_sample_belongs_to_the_interval_that_contains_its_position() {
        let intervals = [interval(A, 0, 32), interval(B, 64, 96)];
        let found = owners(&intervals, Some(A), 128, &[0, 16, 32, 64, 95, 96, 128, 999]);
        assert_eq!(found, [Some(A), Some(A), None, Some(B), Some(B), None, Some(A), Some(A)]);
    }

    #[test]
    fn a_closed_interval_wins_over_an_open_one_that_was_read_earlier() {
        // The open interval was read before the thread closed it: both have the same span.
        assert_eq!(owners(&[interval(A, 32, 64)], Some(A), 32, &[32, 64]), [Some(A), Some(A)]);
    }

    #[test]
    fn a_sample_outside_all_intervals_belongs_to_no_span() {
        assert_eq!(owners(&[], None, 0, &[0, 32]), [None, None]);
        assert_eq!(owners(&[], Some(A), 64, &[32]), [None]);
    }
}

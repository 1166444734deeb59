//! Drains one thread's ring.

use std::collections::VecDeque;

use super::cursor::ThreadCursor;
use super::reader::{Loss, Reader, Sink, max_sample_ns};
use crate::sampler::record::{Machine, Record, RecordPlace, Records, read_sample, stated_position};
use crate::sampler::{OpenInterval, TagInterval};
use crate::sys::{self, SampleRing, Tag};

impl ThreadCursor {
    /// Reads everything in the ring. Returns the tag that the thread has published.
    pub fn drain(&mut self, reader: &mut Reader, sink: &mut impl Sink) -> Option<Tag> {
        let Some(ring) = self.session.ring.clone() else { return self.thread.span() };
        // The order matters: see `ThreadShared::open_interval`.
        let head = ring.head();
        let open = self.thread.open_interval(&self.session);
        while let Some(interval) = self.session.take_interval() {
            self.intervals.push_back(interval);
        }
        if self.counted_from != open.from {
            (self.counted_from, self.counted) = (open.from, 0);
        }
        // The ring of a thread that is over is read for the last time.
        let is_over = self.thread.is_over();
        let mut end = head;
        let mut samples = Vec::new();
        for record in Records::between(&**ring, ring.tail(), head) {
            let Ok(Record::Sample(place) | Record::Lost { place, .. }) = record else { continue };
            if open.is_in_hook && !is_over && position_of(&ring, place) >= open.from {
                // Read again once the hook has published where the thread continues.
                end = place.position;
                reader.unwinder.has_left = true;
                break;
            }
            samples.extend(matches!(record, Ok(Record::Sample(_))).then_some(place));
        }
        let switching = self.switching(&ring, &samples, reader);
        let [weight_ns, weight_switching_ns] =
            self.weights(&ring, samples.len() as u64, switching.len() as u64);
        sink.begin(self.thread.tid(), samples.len(), max_sample_ns(self.session.rate.period_ns));
        for record in Records::between(&**ring, ring.tail(), end) {
            match record {
                Ok(Record::Sample(place)) => {
                    let position = position_of(&ring, place);
                    self.drained = position + self.session.sample_size;
                    self.counted += u64::from(position >= self.counted_from);
                    self.uncharged += 1;
                    let span = owner(&mut self.intervals, open, position);
                    let is_switching = switching.contains(&place.position);
                    let weight_ns = if is_switching { weight_switching_ns } else { weight_ns };
                    let more_ns = std::mem::take(&mut self.unsampled_ns);
                    let of = (span, self.named, &*self.thread);
                    reader.read((&ring, place), of, (weight_ns, more_ns), is_switching, sink);
                    // Makes room for the next sample before this round has read all of them.
                    ring.release_to(place.position + u64::from(place.size));
                }
                Ok(Record::Lost { count: samples, place }) => {
                    let position = position_of(&ring, place);
                    let tag = owner(&mut self.intervals, open, position);
                    sink.lose(Loss::RingFull { tag, samples });
                }
                Ok(Record::Throttled) => sink.lose(Loss::Throttled),
                Ok(_) => {}
                Err(_) => sink.lose(Loss::Malformed),
            }
        }
        ring.release_to(end);
        if ring.timer().is_none() {
            self.drained = end;
        }
        open.span
    }

    /// The positions of the samples that were taken while an interrupt switched the thread out or in: they are late, because
    /// perf's timer waited until interrupts were enabled again, and nothing that the thread called was running.
    fn switching(&self, ring: &SampleRing, samples: &[RecordPlace], reader: &Reader) -> Vec<u64> {
        let is_switching = |place: &&RecordPlace| {
            let sample = read_sample(&**ring, **place, Machine::NATIVE).ok();
            let sample = sample.filter(|sample| {
                sample.in_kernel && !reader.unwinder.is_in_system_call(sample.registers.pc)
            });
            let switches = self.switches().zip(sample);
            switches.is_some_and(|(switches, sample)| switches.has_switch_near(sample.time_ns))
        };
        samples.iter().filter(is_switching).map(|place| place.position).collect()
    }

    /// What each of the samples represents, and each of the `switching` ones.
    fn weights(&mut self, ring: &SampleRing, samples: u64, switching: u64) -> [u64; 2] {
        let period_ns = self.session.rate.period_ns;
        if ring.timer().is_some() || samples == 0 {
            return [period_ns; 2];
        }
        let sampled_ns = sys::cpu_ns_of(self.thread.tid()).map(|ns| self.session.sampled_ns(ns));
        let left_ns = sampled_ns.map_or(u64::MAX, |ns| ns.saturating_sub(self.represented_ns));
        let weights = weights(left_ns, period_ns, samples - switching, switching);
        let [weight_ns, switching_ns] = weights;
        self.represented_ns += weight_ns * (samples - switching) + switching_ns * switching;
        // What was lost is not made up for later.
        let known_ns = sampled_ns.unwrap_or(0).saturating_sub(period_ns);
        self.represented_ns = self.represented_ns.max(known_ns);
        weights
    }
}

/// The CPU time that each sample represents, and each one at a switch: a period, but all of them not more than `left_ns`.
///
/// perf's timer runs for longer than the thread's CPU clock: that of a thread to be preempted stops when another thread
/// is woken, perf's when the processor has switched. So what is too much belongs to the samples at switches.
fn weights(left_ns: u64, period_ns: u64, others: u64, switching: u64) -> [u64; 2] {
    let share = |ns: u64, count: u64| ns.checked_div(count).unwrap_or(0).clamp(1, period_ns.max(1));
    let other_ns = share(left_ns, others);
    [other_ns, share(left_ns.saturating_sub(other_ns * others), switching)]
}

/// The position of a record as the hooks of its thread see it.
fn position_of(ring: &SampleRing, place: RecordPlace) -> u64 {
    ring.timer().map_or(place.position, |ring| stated_position(&**ring, place))
}

/// The span that a sample at `position` belongs to. Positions must not decrease: intervals before it are dropped.
fn owner(intervals: &mut VecDeque<TagInterval>, open: OpenInterval, position: u64) -> Option<Tag> {
    while intervals.front().is_some_and(|interval| interval.to <= position) {
        intervals.pop_front();
    }
    if let Some(interval) = intervals.front().filter(|interval| interval.from <= position) {
        return Some(interval.span);
    }
    let is_open = open.from <= position;
    open.span.filter(|_| is_open)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Tag = Tag::new(1).unwrap();
    const B: Tag = Tag::new(2).unwrap();

    fn interval(span: Tag, from: u64, to: u64) -> TagInterval {
        TagInterval { span, from, to }
    }

    fn owners(
        intervals: &[TagInterval],
        open: Option<Tag>,
        from: u64,
        positions: &[u64],
    ) -> Vec<Option<Tag>> {
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

    #[test]
    fn samples_represent_what_the_thread_ran_and_those_at_switches_have_too_much() {
        const PERIOD: u64 = 1_000;
        let of = |left_ns, others, switching| weights(left_ns, PERIOD, others, switching);
        assert_eq!(of(u64::MAX, 7, 3), [PERIOD, PERIOD]);
        assert_eq!(of(10_500, 7, 3), [PERIOD, PERIOD]);
        // 400 ms of CPU time with 465 samples, 112 of them at switches.
        let [other, switching] = of(400 * PERIOD, 353, 112);
        assert_eq!((other, switching), (PERIOD, 47 * PERIOD / 112));
        // It is unknown which.
        assert_eq!(of(3_600, 4, 0), [900, 1]);
        assert_eq!(of(3_600, 4, 2), [900, 1]);
        assert_eq!(of(0, 4, 2), [1, 1]);
    }
}

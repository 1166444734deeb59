//! On-CPU and off-CPU time of a thread, from what the scheduler recorded.

use std::sync::Arc;

use super::record::{Record, Records};
use crate::span::Interval;
use crate::stats::Counters;
use crate::sys::{Clock, Ring};

/// A thread's own record of being switched off and onto a CPU.
///
/// On-CPU time is the kernel's: the event's `time_enabled` at the last switch-in, and the time
/// since then. Off-CPU time is the sum of the gaps between the records of switching out and in.
/// Neither is derived from the other, and neither takes a system call.
#[derive(Debug)]
pub(crate) struct SwitchLog {
    ring: Arc<Ring>,
    counters: Arc<Counters>,
    state: State,
    /// On-CPU time and moment at the last look.
    on_cpu_ns: u64,
    raw_ns: u64,
}

/// What the records have said so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct State {
    /// When the thread was last switched in.
    in_ns: Option<u64>,
    /// When it was switched out, if its return has not been read yet.
    out_ns: Option<u64>,
    off_cpu_ns: u64,
    voluntary: u64,
    involuntary: u64,
    lost: u64,
}

/// No record of this ring is longer.
const LONGEST_RECORD: u64 = 64;

impl State {
    fn read(&mut self, record: Record) {
        match record {
            Record::SwitchOut { time_ns, preempted } => {
                self.out_ns = Some(time_ns);
                if preempted {
                    self.involuntary += 1;
                } else {
                    self.voluntary += 1;
                }
            }
            Record::SwitchIn { time_ns } => {
                if let Some(out_ns) = self.out_ns.take() {
                    self.off_cpu_ns += time_ns.saturating_sub(out_ns);
                }
                self.in_ns = Some(time_ns);
            }
            Record::Lost { count, .. } => {
                self.lost += count;
                self.out_ns = None;
                self.in_ns = None;
            }
            Record::Sample(_) | Record::Throttled | Record::Other => {}
        }
    }
}

impl SwitchLog {
    pub(crate) fn new(ring: Arc<Ring>, counters: Arc<Counters>) -> Self {
        Self { ring, counters, state: State::default(), on_cpu_ns: 0, raw_ns: 0 }
    }

    /// What happened since the last call. Only for the ring's own thread.
    pub(crate) fn catch_up(&mut self, clock: &Clock) -> Interval {
        let before = self.state;
        let mut full = false;
        let (on_cpu_ns, now) = loop {
            let (tail, head) = (self.ring.tail(), self.ring.head());
            // A record for which there was no room is told of only once there is room again.
            full |= head.wrapping_sub(tail).saturating_add(LONGEST_RECORD)
                > self.ring.data_size() as u64;
            for record in Records::between(&*self.ring, tail, head) {
                match record {
                    Ok(record) => self.state.read(record),
                    Err(_) => Counters::add(&self.counters.records_malformed, 1),
                }
            }
            self.ring.release_to(head);
            if full {
                self.state.in_ns = None;
                self.state.out_ns = None;
            }
            let (total, now) = self.on_cpu_until_now(clock);
            // Else it was switched meanwhile: the kernel's sum is of a later switch than the records,
            // or the moment is.
            if self.ring.head() == head {
                break (total, now);
            }
        };
        let raw_ns = clock.raw_ns(now);
        let wall_ns = raw_ns.saturating_sub(self.raw_ns);
        let on_cpu_ns = on_cpu_ns
            .map_or(wall_ns, |total| {
                total.saturating_sub(std::mem::replace(&mut self.on_cpu_ns, total))
            })
            .min(wall_ns);
        self.raw_ns = raw_ns;

        let lost = self.state.lost - before.lost;
        Counters::add(&self.counters.switches_dropped_ring_full, lost);
        let off_cpu_ns = if full || lost > 0 {
            wall_ns.saturating_sub(on_cpu_ns)
        } else {
            self.state.off_cpu_ns - before.off_cpu_ns
        };
        Interval {
            until: now,
            on_cpu_ns,
            off_cpu_ns,
            voluntary_switches: self.state.voluntary - before.voluntary,
            involuntary_switches: self.state.involuntary - before.involuntary,
        }
    }

    /// The thread's on-CPU time, as the event counts it, and the moment up to which.
    fn on_cpu_until_now(&self, clock: &Clock) -> (Option<u64>, u64) {
        if let Some(in_ns) = self.state.in_ns {
            let at_switch_in = self.ring.time_enabled_at_switch_in();
            let now = clock.now();
            let since_ns = clock.raw_ns(now).saturating_sub(in_ns);
            return (at_switch_in.map(|total| total.saturating_add(since_ns)), now);
        }
        // Not switched since it was armed, or the record of it is lost: one system call.
        let total = self.ring.read_time_enabled().ok();
        (total, clock.now())
    }
}

/// That a thread was switched out, and has not been switched in since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SwitchedOut {
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) time_ns: u64,
    pub(crate) preempted: bool,
    /// Where the records end.
    pub(crate) position: u64,
}

/// The newest record, if it says that the thread was switched out. For any thread: nothing is taken
/// out of the ring.
pub(crate) fn switched_out(ring: &Ring) -> Option<SwitchedOut> {
    if is_full(ring) {
        return None;
    }
    let position = ring.head();
    let last = Records::between(ring, position.checked_sub(SWITCH_RECORD)?, position).next()?;
    let Ok(Record::SwitchOut { time_ns, preempted }) = last else { return None };
    (ring.head() == position).then_some(SwitchedOut { time_ns, preempted, position })
}

/// Whether there is no room for a further record: then the newest is not the last that happened.
pub(crate) fn is_full(ring: &Ring) -> bool {
    let tail = ring.tail();
    let used = ring.head().saturating_sub(tail);
    used.saturating_add(LONGEST_RECORD) > ring.data_size() as u64
}

/// When a thread that was switched out at `position` was switched in again. `None` if the record of
/// it is gone, or there is none.
pub(crate) fn switched_in_after(ring: &Ring, position: u64) -> Option<u64> {
    let head = ring.head();
    let mut records = Records::between(ring, position, head);
    let time_ns = records.find_map(|record| match record {
        Ok(Record::SwitchIn { time_ns }) => Some(time_ns),
        _ => None,
    });
    // What we have read was not written over meanwhile.
    let is_there = ring.head().checked_sub(position)? <= ring.data_size() as u64;
    time_ns.filter(|_| is_there)
}

/// Header and time.
const SWITCH_RECORD: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::record::Place;

    #[test]
    fn off_cpu_time_is_the_sum_of_the_gaps() {
        let mut state = State::default();
        for record in [
            Record::SwitchOut { time_ns: 100, preempted: false },
            Record::SwitchIn { time_ns: 150 },
            Record::SwitchOut { time_ns: 200, preempted: true },
            Record::SwitchIn { time_ns: 203 },
        ] {
            state.read(record);
        }
        assert_eq!(state.off_cpu_ns, 53);
        assert_eq!((state.voluntary, state.involuntary), (1, 1));
        assert_eq!(state.in_ns, Some(203));
    }

    #[test]
    fn a_gap_whose_beginning_was_lost_is_not_guessed() {
        let mut state = State::default();
        state.read(Record::SwitchOut { time_ns: 100, preempted: false });
        state.read(Record::Lost { count: 3, place: Place { position: 0, size: 24 } });
        state.read(Record::SwitchIn { time_ns: 900 });
        assert_eq!(state.off_cpu_ns, 0);
        assert_eq!(state.lost, 3);
        assert_eq!(state.in_ns, Some(900));
    }
}

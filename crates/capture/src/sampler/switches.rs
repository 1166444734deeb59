//! When a thread was switched out and in, as perf recorded it: the lengths of waits, and for how long it was preempted.

use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::record::{Record, Records};
use crate::sys::{PerfRing, RingMemory, WhyRefused};

#[derive(Debug)]
pub struct SwitchRing {
    ring: PerfRing,
    /// For how long the thread was preempted, as far as the records were read.
    preempted_ns: AtomicU64,
    /// For how long it was blocked in [short waits](Self::SHORT_NS), and their number.
    short_waits: [AtomicU64; 2],
    read: Mutex<ReadSwitches>,
}

#[derive(Debug, Default)]
struct ReadSwitches {
    until: u64,
    /// When the thread was switched out, and whether it was preempted, until it is switched in.
    out: Option<(u64, bool)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchedOut {
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub time_ns: u64,
    pub preempted: bool,
    /// The end of the records.
    pub position: u64,
}

impl Deref for SwitchRing {
    type Target = PerfRing;

    fn deref(&self) -> &PerfRing {
        &self.ring
    }
}

impl SwitchRing {
    /// Longer ones are captured one by one. A record comes up to 20 µs late, which is much of a short wait.
    pub const SHORT_NS: Range<u64> = 500_000..5_000_000;

    pub fn new(ring: PerfRing) -> Self {
        let (preempted_ns, short_waits) = (AtomicU64::new(0), [0, 0].map(AtomicU64::new));
        Self { ring, preempted_ns, short_waits, read: Mutex::default() }
    }

    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        // What happened while it was paused has no record.
        self.read();
        if let Some(mut read) = self.read.try_lock() {
            read.out = None;
        }
        self.ring.start()
    }

    pub(crate) fn retire(&self) {
        self.read();
        self.ring.retire();
    }

    /// For how long the thread was preempted, in nanoseconds. Only for the thread itself. Adds one, as 0 says unknown.
    pub(crate) fn preempted_ns(&self) -> u64 {
        self.read();
        self.preempted_ns.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// For how long the thread was blocked in short waits, in nanoseconds, and in how many, as far as the records were read.
    pub fn short_waits(&self) -> [u64; 2] {
        self.short_waits.each_ref().map(|sum| sum.load(Ordering::Relaxed))
    }

    fn add(&self, ns: u64, preempted: bool) {
        let [short_ns, count] = &self.short_waits;
        if preempted {
            self.preempted_ns.fetch_add(ns, Ordering::Relaxed);
        } else if Self::SHORT_NS.contains(&ns) {
            short_ns.fetch_add(ns, Ordering::Relaxed);
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reads the new records: the thread does so in hooks, the collector before it releases them. Neither waits for the
    /// other. Returns false if the other one is reading.
    fn read(&self) -> bool {
        let Some(mut read) = self.read.try_lock() else { return false };
        let head = self.head();
        for record in self.records(read.until, head) {
            let out = match record {
                Ok(Record::SwitchOut { time_ns, preempted }) => Some((time_ns, preempted)),
                Ok(Record::SwitchIn { time_ns }) => {
                    if let Some((at_ns, preempted)) = read.out {
                        self.add(time_ns.saturating_sub(at_ns), preempted);
                    }
                    None
                }
                // Records are missing.
                _ => None,
            };
            read.out = out;
        }
        read.until = head;
        true
    }

    fn records(&self, from: u64, until: u64) -> Records<'_, RingMemory> {
        Records::between(&***self, from, until)
    }

    /// The newest record, if it is a switch-out. Takes nothing out of the ring.
    pub fn switched_out(&self) -> Option<SwitchedOut> {
        if self.is_full() {
            return None;
        }
        let position = self.head();
        let last = self.records(position.checked_sub(SWITCH_RECORD)?, position).next()?;
        let Ok(Record::SwitchOut { time_ns, preempted }) = last else { return None };
        (self.head() == position).then_some(SwitchedOut { time_ns, preempted, position })
    }

    /// Whether the thread was preempted or switched in at about that time: also if the ring no longer has the records of
    /// that time, since then the thread has been switched more than 250 times.
    pub fn has_switch_near(&self, time_ns: u64) -> bool {
        let head = self.head();
        // What was released is there until it is overwritten.
        let from = head.saturating_sub(self.data_size() as u64 - LONGEST_RECORD);
        let mut is_oldest_left = from > 0;
        self.records(from, head).any(|record| {
            let (Ok(Record::SwitchOut { time_ns: at_ns, preempted: true })
            | Ok(Record::SwitchIn { time_ns: at_ns })) = record
            else {
                return false;
            };
            let is_later = std::mem::take(&mut is_oldest_left) && time_ns < at_ns;
            is_later || at_ns.abs_diff(time_ns) < NEAR_NS
        })
    }

    /// Whether there is no room for a further record. The newest record may then not be the last event.
    pub fn is_full(&self) -> bool {
        let used = self.head().saturating_sub(self.tail());
        used.saturating_add(LONGEST_RECORD) > self.data_size() as u64
    }

    /// When a thread that was switched out at `position` was switched in again. `None` if no record says so.
    pub fn switched_in_after(&self, position: u64) -> Option<u64> {
        let mut records = self.records(position, self.head());
        let time_ns = records.find_map(|record| match record {
            Ok(Record::SwitchIn { time_ns }) => Some(time_ns),
            _ => None,
        });
        // Checks that what was read was not overwritten.
        let is_there = self.head().checked_sub(position)? <= self.data_size() as u64;
        time_ns.filter(|_| is_there)
    }

    /// Releases all records but the newest. Returns how many were lost because the ring was full.
    pub fn make_room(&self) -> u64 {
        let (tail, head) = (self.tail(), self.head());
        let lost = self.records(tail, head).map(|record| match record {
            Ok(Record::Lost { count, .. }) => count,
            _ => 0,
        });
        let lost = lost.sum();
        // The thread may be reading them: then they stay until the next time.
        if !self.read() {
            return 0;
        }
        if head.saturating_sub(tail) > SWITCH_RECORD {
            self.release_to(head - SWITCH_RECORD);
        }
        lost
    }

    pub fn skip(&self) {
        let head = self.head();
        if self.read() {
            self.release_to(head);
        }
    }
}

/// The number of complete out-and-in switches between two positions, and where the last ends: half a switch may follow.
pub(crate) fn switches_between(from: u64, to: u64) -> (u64, u64) {
    let switches = to.saturating_sub(from) / (2 * SWITCH_RECORD);
    (switches, from + switches * 2 * SWITCH_RECORD)
}

/// An interrupt has switched the thread within this time, also on a virtual machine.
const NEAR_NS: u64 = 100_000;

/// Header and time.
const SWITCH_RECORD: u64 = 16;
/// No record of this ring is longer.
const LONGEST_RECORD: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> Option<SwitchRing> {
        PerfRing::scripted(1 << 12).ok().map(SwitchRing::new)
    }

    fn write(ring: &SwitchRing, misc: u64, time_ns: u64) {
        assert!(ring.write_scripted(&[14 | misc << 32 | 16 << 48, time_ns]));
    }

    const IN: u64 = 0;
    const PREEMPTED: u64 = 1 << 13 | 1 << 14;

    #[test]
    fn a_pause_is_no_preemption() {
        let Some(ring) = ring() else { return };
        write(&ring, PREEMPTED, 100);
        write(&ring, IN, 130);
        write(&ring, PREEMPTED, 200);
        // Paused: when the thread was switched in was not recorded.
        ring.start().unwrap();
        write(&ring, IN, 9_000);
        write(&ring, PREEMPTED, 10_000);
        write(&ring, IN, 10_005);
        // Each call adds one.
        assert_eq!([ring.preempted_ns(), ring.preempted_ns()], [30 + 5 + 1, 30 + 5 + 2]);
    }

    #[test]
    fn short_waits_are_added_up() {
        let Some(ring) = ring() else { return };
        for (misc, out_ns, in_ns) in [
            (1 << 13, 1_000, 2_000_000),
            (1 << 13, 3_000_000, 3_000_000 + SwitchRing::SHORT_NS.end),
            (PREEMPTED, 9_000_000, 9_500_000),
            (1 << 13, 10_000_000, 10_000_007),
            (1 << 13, 11_000_000, 11_000_000 + SwitchRing::SHORT_NS.start),
        ] {
            write(&ring, misc, out_ns);
            ring.make_room();
            write(&ring, IN, in_ns);
        }
        ring.make_room();
        assert_eq!(ring.short_waits(), [1_999_000 + SwitchRing::SHORT_NS.start, 2]);
    }

    #[test]
    fn what_is_near_a_switch_is_known_or_taken_for_granted_where_there_are_too_many() {
        let Some(ring) = ring() else { return };
        let near = |at_us: u64| ring.has_switch_near(at_us * 1_000);
        write(&ring, 1 << 13, 1_000_000);
        assert!(!near(1_000), "it was not preempted");
        write(&ring, IN, 5_000_000);
        write(&ring, PREEMPTED, 9_000_000);
        let expected = [false, true, true, false, false, true, true, false];
        assert_eq!([4_800, 4_950, 5_050, 5_200, 8_800, 8_950, 9_050, 9_200].map(near), expected);
        for at_us in 10_000..10_300 {
            ring.make_room();
            write(&ring, IN, at_us * 1_000);
        }
        assert_eq!(
            [1_000, 5_050, 9_500, 10_250, 10_500].map(near),
            [true, true, true, true, false]
        );
    }
}

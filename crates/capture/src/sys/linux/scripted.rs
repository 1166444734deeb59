//! Rings that a test fills, instead of the kernel or a signal handler.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::perf::PerfRing;
use super::ring::RingMemory;
use super::timer::{HandlerRing, TimerRing};
use crate::sys::SampleRing;
use crate::sys::types::{SampleRequest, ThreadStack};

impl RingMemory {
    /// Writes a record. Returns false and does nothing if there is no room.
    pub fn write_scripted(&self, words: &[u64]) -> bool {
        let mut writer = self.writer();
        let has_room = writer.has_room(8 * words.len() as u64);
        if has_room {
            words.iter().for_each(|word| writer.word(*word));
            writer.publish();
        }
        has_room
    }
}

impl PerfRing {
    pub fn scripted(data_size: usize) -> io::Result<Self> {
        Ok(Self { event: Mutex::new(None), memory: RingMemory::anonymous(data_size)? })
    }
}

impl SampleRing {
    /// The ring of a timer, of which the position moves by `step` per sample.
    pub fn scripted(data_size: usize, step: u64) -> io::Result<Self> {
        let request = SampleRequest { position_step: step, ..SampleRequest::default() };
        let memory = RingMemory::anonymous(data_size)?;
        let ring = Arc::new(HandlerRing::new(memory, request, (0, ThreadStack::ANY), None));
        Ok(Self::Timer(TimerRing { ring, timer: Mutex::new(None) }))
    }
}

impl TimerRing {
    /// Writes the record of a sample. Returns false and does nothing if there is no room.
    pub fn sample_scripted(&self, words: &[u64]) -> bool {
        let is_written = self.write_scripted(words);
        if is_written {
            self.move_scripted();
        }
        is_written
    }

    /// Moves the position as a sample does, without writing its record.
    pub fn move_scripted(&self) {
        self.ring.position.fetch_add(self.ring.step, Ordering::Release);
    }
}

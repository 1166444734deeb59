//! Rings that a test fills, instead of the kernel or a signal handler.

use std::sync::atomic::Ordering;

use super::ring::RingMemory;
use super::timer::TimerRing;

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

//! Rings that a test writes to, in the place of the kernel or of a signal handler.

use std::sync::atomic::Ordering;

use super::ring::RingMemory;
use super::timer::TimerRing;

impl RingMemory {
    /// Writes a record. False, and nothing else, if there is no room.
    pub(crate) fn write_scripted(&self, words: &[u64]) -> bool {
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
    /// Writes the record of a sample. False, and nothing else, if there is no room.
    pub(crate) fn sample_scripted(&self, words: &[u64]) -> bool {
        let is_written = self.write_scripted(words);
        if is_written {
            self.move_scripted();
        }
        is_written
    }

    /// Moves the position as a sample does, of which nobody reads the record.
    pub(crate) fn move_scripted(&self) {
        self.ring.position.fetch_add(self.ring.step, Ordering::Release);
    }
}

//! Rings that a test writes to, in the place of the kernel or of a signal handler.
#![allow(unsafe_code, reason = "writes to memory that is laid out as the kernel's")]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ring::Ring;
use super::sink::Sink;

impl Ring {
    /// A ring of ours without a timer. Its position moves by `step` at a time.
    pub(crate) fn scripted(data_size: usize, step: u64) -> io::Result<Self> {
        let ring = Self::of_ours(data_size, None)?;
        let sink = Sink {
            memory: ring.sink_memory(),
            stack_bytes: 0,
            wake_after_bytes: u64::MAX,
            wakes: ring.wakes(),
            period_ns: 0,
            ids: 0,
            counts_cpu: false,
            cpu_ns: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            position: AtomicU64::new(0),
            step,
        };
        // SAFETY: the place for it in the ring's first page, of which nobody else knows yet.
        unsafe { ring.sink().write(sink) };
        Ok(ring)
    }

    /// The position that hooks see now.
    pub(crate) fn scripted_position(&self) -> u64 {
        self.scripted_sink().position.load(Ordering::Relaxed)
    }

    /// Writes a record and moves the position. False, and nothing else, if there is no room.
    pub(crate) fn write_scripted(&self, words: &[u64]) -> bool {
        let sink = self.scripted_sink();
        let mut writer = sink.writer();
        if !writer.has_room(8 * words.len() as u64) {
            return false;
        }
        words.iter().for_each(|word| writer.word(*word));
        writer.publish();
        sink.position.fetch_add(sink.step, Ordering::Release);
        true
    }

    /// Moves the position as a sample does, of which nobody reads the record.
    pub(crate) fn move_scripted(&self) {
        let sink = self.scripted_sink();
        sink.position.fetch_add(sink.step, Ordering::Release);
    }

    fn scripted_sink(&self) -> &Sink {
        // SAFETY: written when the ring was made, and only atomics in it change.
        unsafe { self.sink().as_ref() }
    }
}

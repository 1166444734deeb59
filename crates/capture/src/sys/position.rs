//! The word that moves when a thread is sampled.
#![allow(
    unsafe_code,
    reason = "reads a word in a ring that the kernel writes; the only way to detect a sample without a system call"
)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ring::SampleRing;
use super::words::WORDS;

/// A counter that moves in program order of its own thread only: a kernel ring's `data_head`, or a timer ring's.
///
/// Reading it takes less than a nanosecond, so every span hook can check whether a sample fell since the last hook.
#[derive(Debug)]
pub struct Position {
    word: NonNull<AtomicU64>,
    /// Keeps it there.
    _owner: Option<Arc<SampleRing>>,
}

impl Default for Position {
    /// The position of a thread that is not sampled.
    fn default() -> Self {
        let word = (&raw const WORDS.never_moves).cast_mut();
        // SAFETY: the address of a static is not null.
        let word = unsafe { NonNull::new_unchecked(word) };
        Self { word, _owner: None }
    }
}

impl Position {
    /// The position of `ring`. For a kernel ring it is the number of bytes ever written.
    pub(crate) fn of_ring(ring: Arc<SampleRing>) -> Self {
        Self { word: NonNull::from(ring.position_word()), _owner: Some(ring) }
    }

    /// The current position. `Acquire`: the sample's record is visible afterwards.
    #[inline(always)]
    pub fn load(&self) -> u64 {
        // SAFETY: `word` points into memory that `_owner` keeps alive, or into a static. It is aligned and accessed
        // only atomically: here, and by the kernel with a plain 64-bit store.
        unsafe { self.word.as_ref() }.load(Ordering::Acquire)
    }
}

//! The word that moves when a thread is sampled.
#![allow(
    unsafe_code,
    reason = "reads a word in a ring that the kernel writes; the only way to see a sample without a system call"
)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ring::SampleRing;

/// A count that only its own thread moves, in program order: a kernel ring's `data_head`, or a
/// number of our own.
///
/// Reading it takes less than a nanosecond, which is what lets every span hook ask whether a
/// sample fell since the last hook.
#[derive(Debug)]
pub(crate) struct Position {
    word: NonNull<AtomicU64>,
    _owner: Owner,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for its lifetime, never read")]
enum Owner {
    Nobody,
    Ring(Arc<SampleRing>),
}

static NEVER_MOVES: AtomicU64 = AtomicU64::new(0);

impl Position {
    /// The position of a thread that is not sampled.
    pub(crate) const fn fixed() -> Self {
        let word = (&raw const NEVER_MOVES).cast_mut();
        // SAFETY: a static is nowhere near null.
        let word = unsafe { NonNull::new_unchecked(word) };
        Self { word, _owner: Owner::Nobody }
    }

    /// The position of `ring`: for one of the kernel's the number of bytes ever written to it.
    pub(crate) fn of_ring(ring: Arc<SampleRing>) -> Self {
        Self { word: NonNull::from(ring.position_word()), _owner: Owner::Ring(ring) }
    }

    /// The present position. `Acquire`: what the sample's record says is visible after it.
    #[inline(always)]
    pub(crate) fn load(&self) -> u64 {
        // SAFETY: `word` points into what `_owner` keeps alive (or into a static), is aligned,
        // and is only ever accessed atomically: by us here, by the kernel with a plain 64-bit
        // store.
        unsafe { self.word.as_ref() }.load(Ordering::Acquire)
    }
}

//! The words that all threads read all the time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::allocator::TakeSample;

/// Words that hooks, wrapped polls, allocations and frees read, and that hardly ever change.
///
/// One static with lines of its own: the linker places small statics of all crates side by side, and a word that others
/// write all the time would make each read of its neighbours slow. Of 128 bytes: processors fetch lines in pairs.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct CommonWords {
    /// The number of layers that profile spans. The child of a fork has none.
    pub(super) users: AtomicU32,
    pub(super) fork_generation: AtomicU32,
    /// See [`Position::default`](super::Position::default).
    pub(super) never_moves: AtomicU64,
    /// The number of active layers in the lower half, and in the upper half the number of changes that could make a span
    /// matter to futures that did not: rules were replaced, or a layer was started.
    pub awaits: AtomicU64,
    /// How often a collector has found that libraries were unloaded.
    pub unloads: AtomicU64,
    /// Whether frees look for sampled blocks.
    pub(super) tracks_blocks: AtomicBool,
    /// Whether the program's global allocator is a [`ProfilingAllocator`](super::ProfilingAllocator).
    pub(super) is_installed: AtomicBool,
    /// The bytes between two samples of allocations in the mean; 0 for none.
    pub(super) sample_bytes: AtomicU64,
    pub(super) take_sample: OnceLock<TakeSample>,
}

pub static WORDS: CommonWords = CommonWords {
    users: AtomicU32::new(0),
    fork_generation: AtomicU32::new(0),
    never_moves: AtomicU64::new(0),
    awaits: AtomicU64::new(0),
    unloads: AtomicU64::new(0),
    tracks_blocks: AtomicBool::new(false),
    is_installed: AtomicBool::new(false),
    sample_bytes: AtomicU64::new(0),
    take_sample: OnceLock::new(),
};

/// Forks of the process.
#[derive(Debug)]
pub struct Forks;

impl Forks {
    /// A number that is greater in a forked child than in its parent, once [`Self::watch`] was called.
    ///
    /// In a child neither the layer's threads nor its rings exist, and locks of threads that do not exist there may be held
    /// forever. Code that finds another number than its state was created under must not touch that state.
    ///
    /// A child made by a bare `clone` system call that shares no memory is not detected.
    #[inline(always)]
    pub fn generation() -> u32 {
        WORDS.fork_generation.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is read at each hook, poll and allocation, also by the platform, is in the one line.
    #[test]
    fn the_words_have_lines_of_their_own() {
        assert_eq!((size_of::<CommonWords>(), align_of::<CommonWords>()), (128, 128));
        let last =
            std::mem::offset_of!(CommonWords, take_sample) + size_of::<OnceLock<TakeSample>>();
        assert!(last <= 64, "one line, not two: {last}");
    }
}

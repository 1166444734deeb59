//! Sleeping at a word of memory.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex::{self, Flags, Timespec};

/// Sleeps for that time at most, until [`futex_wake`], unless the word has changed since then. It can end at any time.
pub(crate) fn futex_wait(word: &AtomicU32, before: u32, most: Option<Duration>) {
    let most = most.and_then(|most| Timespec::try_from(most).ok());
    _ = futex::wait(word, Flags::PRIVATE, before, most.as_ref());
}

pub(crate) fn futex_wake(word: &AtomicU32) {
    _ = futex::wake(word, Flags::PRIVATE, i32::MAX.cast_unsigned());
}

//! What the numbers in spans stand for.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use tracing::Metadata;

use super::Keep;
use super::fields::FieldRules;
use super::percentile::Sketch;
use crate::span::Plan;

/// What a rule means for the spans of a callsite.
#[derive(Debug)]
pub(crate) struct Callsite {
    pub(crate) metadata: &'static Metadata<'static>,
    pub(crate) keep: Keep,
    /// The number of the rule that decided. Each `#[profiled]` that says when to keep is one.
    pub(crate) rule: u32,
    pub(crate) plan: Plan,
    /// After so many nanoseconds without a break it hangs.
    pub(crate) hung_ns: Option<u64>,
    /// After so many nanoseconds it is open for too long.
    pub(crate) open_ns: Option<u64>,
    /// If values decide between this and others.
    pub(crate) fields: Option<Arc<FieldRules>>,
    /// If it takes the percentile of such spans to judge one.
    pub(crate) sketch: Option<Arc<Sketch>>,
    /// Spans so far, where one of so many is kept.
    pub(super) count: AtomicU32,
}

impl Callsite {
    /// Whether this span is the one of so many that is kept.
    pub(crate) fn is_the_one(&self) -> bool {
        let Some(number) = self.keep.one_in() else { return false };
        // Not the first one, which is none of many.
        self.count.fetch_add(1, Ordering::Relaxed) % number == number.get() - 1
    }
}

/// All of them, by their numbers. Nothing is ever taken out: an open span is judged by what its
/// number stood for when it was made.
#[derive(Debug)]
pub(super) struct Plans {
    /// Each twice as long as the one before.
    chunks: [OnceLock<Box<[OnceLock<Callsite>]>>; CHUNKS],
}

const CHUNKS: usize = 20;
const FIRST_CHUNK: usize = 64;

impl Plans {
    pub(super) const fn new() -> Self {
        Self { chunks: [const { OnceLock::new() }; CHUNKS] }
    }

    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<&Callsite> {
        let (chunk, at) = place(number);
        self.chunks.get(chunk)?.get()?.get(at)?.get()
    }

    /// Sets what a number stands for that is not in use. False if there are no more such numbers.
    pub(super) fn set(&self, number: u32, callsite: Callsite) -> bool {
        let (chunk, at) = place(number);
        let new = || (0..FIRST_CHUNK << chunk).map(|_| OnceLock::new()).collect();
        let place = self.chunks.get(chunk).and_then(|chunk| chunk.get_or_init(new).get(at));
        place.is_some_and(|place| place.set(callsite).is_ok())
    }
}

/// Chunk, and place in the chunk.
#[inline]
fn place(number: u32) -> (usize, usize) {
    let shifted = number as usize + FIRST_CHUNK;
    let chunk = (shifted.ilog2() - FIRST_CHUNK.ilog2()) as usize;
    (chunk, shifted - (FIRST_CHUNK << chunk))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_double_and_leave_no_gap() {
        let places = [0, 63, 64, 191, 192].map(place);
        assert_eq!(places, [(0, 0), (0, 63), (1, 0), (1, 127), (2, 0)]);
    }
}

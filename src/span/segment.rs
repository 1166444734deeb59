//! The segments that a thread is in, and those that have just ended.

use super::account::Tally;
use super::slot::Parent;
use super::{RegistryId, SpanKey};

/// One enter of a span on this thread. What most enters and exits touch comes first, in one line of cache.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Segment {
    pub(super) id: u64,
    pub(super) key: u64,
    pub(super) root: u64,
    pub(super) entered: u64,
    /// When this span or one of those around it is old, if the thread stays in it.
    pub(super) old_at: u64,
    /// Unmatched spans that had been entered since the segment below.
    pub(super) unmatched_below: u32,
    flags: u32,
    tally: Tally,
}

/// The span was entered on this thread already: its time is counted there.
pub(super) const NESTED: u32 = 1;
/// The thread was unwinding already: that panic is not of this span.
pub(super) const UNWINDING: u32 = 1 << 1;
/// It is one of a span that may be kept: the CPU clock is read more often.
pub(super) const READS_CPU: u32 = 1 << 2;
/// The thread is not in its parent: that one has to be told of its time.
pub(super) const APART: u32 = 1 << 3;
/// `tally` is in use; else it holds what an earlier segment left.
const TALLIED: u32 = 1 << 4;
/// Nobody says when the thread runs.
pub(super) const CPU_UNKNOWN: u32 = 1 << 5;

const _: () = assert!(std::mem::offset_of!(Segment, tally) <= 72);

/// Segments that have ended since the CPU clock was last read: at most one span for each place, so that a hook
/// finds it without a search.
#[derive(Debug)]
pub(super) struct PendingSegments([PendingSegment; PLACES]);

const PLACES: usize = 64;
/// Of the registry's ids: without how often the place was used before. It is given again only when the span
/// that had it is closed, and nobody asks for that any more.
const REGISTRY_PLACE: u64 = (1 << 51) - 1;

/// Segments of one span.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingSegment {
    pub(super) id: RegistryId,
    /// The span's [`SpanKey`] as a number; 0 if the place is free.
    pub(super) key: u64,
    /// Since the CPU clock was read or the segment began.
    pub(super) ticks: u64,
}

impl PendingSegment {
    const NONE: Self = Self { id: RegistryId::MIN, key: 0, ticks: 0 };
}

impl PendingSegments {
    pub(super) const NONE: Self = Self([PendingSegment::NONE; PLACES]);

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|part| part.key == 0)
    }

    /// The place of a span, and what is in it of that span. None if another one that is open has it.
    #[inline(always)]
    fn room(&mut self, id: RegistryId, key: u64) -> Option<(&mut PendingSegment, u64)> {
        // The registry's ids are dense on each thread.
        let part = self.0.get_mut((id.get() % PLACES as u64) as usize)?;
        let before = match part.key {
            0 => 0,
            same if same == key => part.ticks,
            // Of a span that is closed.
            _ if (part.id.get() ^ id.get()) & REGISTRY_PLACE == 0 => 0,
            _ => return None,
        };
        Some((part, before))
    }

    pub(super) fn has_room(&mut self, id: RegistryId, key: u64) -> bool {
        self.room(id, key).is_some()
    }

    /// Adds a segment that has ended, if there is room. Returns whether there was.
    #[inline(always)]
    pub(super) fn add(&mut self, PendingSegment { id, key, ticks }: PendingSegment) -> bool {
        let Some((part, before)) = self.room(id, key) else { return false };
        *part = PendingSegment { id, key, ticks: before + ticks };
        true
    }

    pub(super) fn take(&mut self) -> impl Iterator<Item = PendingSegment> {
        let parts = self.0.iter_mut().filter(|part| part.key != 0);
        parts.map(|part| std::mem::replace(part, PendingSegment::NONE))
    }

    pub(super) fn clear(&mut self) {
        *self = Self::NONE;
    }
}

impl Segment {
    /// For an enter: what an earlier segment left there is over.
    #[inline(always)]
    pub(super) fn set_flags(&mut self, flags: u32) {
        self.flags = flags;
    }

    pub(super) fn set(&mut self, flag: u32) {
        self.flags |= flag;
    }

    pub(super) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Whether there is more to say at its end than its length.
    #[inline(always)]
    pub(super) fn has_more(&self) -> bool {
        self.flags & !UNWINDING != 0
    }

    /// What was counted in it, if something was.
    pub(super) fn counted(&self) -> Option<&Tally> {
        self.has(TALLIED).then_some(&self.tally)
    }

    /// What a span that opens inside this one must know.
    #[inline(always)]
    pub(super) fn as_parent(&self) -> Option<Parent> {
        Some(Parent { id: RegistryId::new(self.id)?, root: SpanKey::new(self.root)? })
    }

    pub(super) fn tally(&mut self, tally: &Tally) {
        if !self.has(TALLIED) {
            self.set(TALLIED);
            self.tally = Tally::default();
        }
        self.tally.add(tally);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(id: u64, key: u64, ticks: u64) -> PendingSegment {
        PendingSegment { id: RegistryId::new(id).unwrap(), key, ticks }
    }

    #[test]
    fn a_span_in_the_place_of_a_closed_one_has_room() {
        let mut pending = PendingSegments::NONE;
        assert!(pending.add(part(1, 7, 10)) && pending.add(part(1, 7, 5)));
        // The same place of the registry, used once more.
        assert!(pending.add(part(1 | 1 << 51, 8, 3)));
        assert!(!pending.add(part(65, 9, 1)), "another one that is open");
        let left: Vec<_> = pending.take().map(|part| (part.key, part.ticks)).collect();
        assert_eq!(left, [(8, 3)]);
        assert!(pending.is_empty() && pending.add(part(65, 9, 1)));
    }
}

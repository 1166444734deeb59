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
    /// The key of the segment below; 0 if there is none.
    pub(super) key_below: u64,
    /// When this span or one of those around it is old, if the thread stays in it.
    pub(super) old_at: u64,
    /// The same of the segment below.
    pub(super) old_at_below: u64,
    /// Unmatched spans that had been entered since the segment below.
    pub(super) unmatched_below: u32,
    /// There is more to say at its end than its length.
    pub(super) has_more: bool,
    /// The span was entered on this thread already: its time is counted there.
    pub(super) is_nested: bool,
    /// The thread was unwinding already: that panic is not of this span.
    pub(super) was_unwinding: bool,
    /// It is one of a span that may be kept: the CPU clock is read more often.
    pub(super) is_old: bool,
    /// The thread is not in its parent: that one has to be told of its time.
    pub(super) is_apart: bool,
    /// `tally` is in use; else it holds what an earlier segment left.
    pub(super) is_tallied: bool,
    pub(super) tally: Tally,
}

const _: () = assert!(std::mem::offset_of!(Segment, tally) <= 72);

/// Segments that have ended since the CPU clock was last read: at most one span for each place, so that a hook
/// finds it without a search.
#[derive(Debug)]
pub(super) struct Unresolved {
    parts: [Part; UNRESOLVED],
    /// A bit for each place.
    used: u64,
}

const UNRESOLVED: usize = u64::BITS as usize;
/// Of the registry's ids: without how often the place was used before. It is given again only when the span
/// that had it is closed, and nobody asks for that any more.
const REGISTRY_PLACE: u64 = (1 << 51) - 1;

/// Segments of one span.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) id: RegistryId,
    /// The span's [`SpanKey`] as a number.
    pub(super) key: u64,
    /// Since the CPU clock was read or the segment began.
    pub(super) ticks: u64,
}

impl Unresolved {
    pub(super) const NONE: Self =
        Self { parts: [Part { id: RegistryId::MIN, key: 0, ticks: 0 }; UNRESOLVED], used: 0 };

    fn place(id: RegistryId) -> usize {
        // The registry's ids are dense on each thread.
        ((id.get() - 1) % UNRESOLVED as u64) as usize
    }

    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Whether a segment of that span can be added, and none of another one that is open is forgotten for it.
    #[inline(always)]
    pub(super) fn has_room(&self, id: RegistryId) -> bool {
        let place = Self::place(id);
        let is_same = |part: &Part| ((part.id.get() - 1) ^ (id.get() - 1)) & REGISTRY_PLACE == 0;
        self.used >> place & 1 == 0 || self.parts.get(place).is_some_and(is_same)
    }

    /// Adds a segment that has ended.
    #[inline(always)]
    pub(super) fn add(&mut self, Part { id, key, ticks }: Part) {
        let place = Self::place(id);
        if let Some(part) = self.parts.get_mut(place) {
            // Of another key: a span that is closed.
            let before =
                if self.used >> place & 1 == 1 && part.key == key { part.ticks } else { 0 };
            *part = Part { id, key, ticks: before + ticks };
            self.used |= 1 << place;
        }
    }

    pub(super) fn take(&mut self) -> impl Iterator<Item = Part> {
        let used = std::mem::take(&mut self.used);
        let parts = self.parts.iter().enumerate();
        parts.filter(move |(place, _)| used >> place & 1 == 1).map(|(_, part)| *part)
    }

    pub(super) fn clear(&mut self) {
        self.used = 0;
    }
}

impl Segment {
    /// What a span that opens inside this one must know.
    #[inline(always)]
    pub(super) fn as_parent(&self) -> Option<Parent> {
        Some(Parent { id: RegistryId::new(self.id)?, root: SpanKey::new(self.root)? })
    }

    pub(super) fn tally(&mut self, tally: &Tally) {
        if !self.is_tallied {
            self.is_tallied = true;
            self.has_more = true;
            self.tally = Tally::default();
        }
        self.tally.add(tally);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(id: u64, key: u64, ticks: u64) -> Part {
        Part { id: RegistryId::new(id).unwrap(), key, ticks }
    }

    #[test]
    fn a_span_in_the_place_of_a_closed_one_has_room() {
        let mut unresolved = Unresolved::NONE;
        unresolved.add(part(1, 7, 10));
        unresolved.add(part(1, 7, 5));
        // The same place of the registry, used once more.
        let next = part(1 | 1 << 51, 8, 3);
        assert!(unresolved.has_room(next.id));
        unresolved.add(next);
        assert!(!unresolved.has_room(RegistryId::new(65).unwrap()), "another one that is open");
        let left: Vec<_> = unresolved.take().map(|part| (part.key, part.ticks)).collect();
        assert_eq!(left, [(8, 3)]);
        assert!(unresolved.is_empty() && unresolved.has_room(RegistryId::new(65).unwrap()));
    }
}

//! The current segments of a thread, and those that have just ended.

use std::sync::atomic::{AtomicBool, Ordering};

use super::RegistryId;
use super::account::LowerBounds;
use super::slot::Parent;
use super::table::{SlotRef, SlotTable};

/// One enter of a span on this thread. The fields that most enters and exits touch come first, in one cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Segment {
    pub(super) id: u64,
    pub(super) key: u64,
    pub(super) root: u64,
    pub(super) entered: u64,
    /// When this span or one of its ancestors becomes old, if the thread stays in it.
    pub(super) samples_from: u64,
    /// The number of unmatched spans entered between the segment below and this one.
    pub(super) unmatched_below: u32,
    pub(super) flags: u32,
    /// How many ancestors its span has, or more.
    pub(super) depth: u32,
    gaps: Gaps,
    sure: LowerBounds,
}

/// When a segment was suspended: when the thread was in spans above it that are not inside its span. In ticks.
#[derive(Clone, Copy, Debug, Default)]
struct Gaps {
    /// When the current one began, or the last one ended.
    since: u64,
    /// For how long it was suspended before.
    all: u64,
    /// The part of that since the read of the CPU clock at `synced`.
    latest: u64,
    synced: u64,
}

/// The span was already entered on this thread; the earlier segment counts its time.
pub(super) const NESTED: u32 = 1;
/// The thread was already unwinding, so that panic did not begin in this span.
pub(super) const UNWINDING: u32 = 1 << 1;
/// The span may be kept, so the CPU clock is read more often.
pub(super) const READS_CPU: u32 = 1 << 2;
/// The thread is not in the span's parent, so this segment's time must be passed up to the ancestors.
pub(super) const DETACHED: u32 = 1 << 3;
/// `sure` is in use; otherwise it holds data of an earlier segment.
const TALLIED: u32 = 1 << 4;
/// The thread's CPU clock cannot be read.
pub(super) const CPU_UNKNOWN: u32 = 1 << 5;
/// The rule of an ancestor that the thread is not in judges the CPU time of this segment.
pub(super) const JUDGED_ABOVE: u32 = 1 << 6;
/// The span was idle for long before it was entered, and it is not known for what.
pub(super) const IDLE_BEFORE: u32 = 1 << 7;
/// The thread is in a span above it that is not inside its span, which therefore takes no time.
pub(super) const SUSPENDED: u32 = 1 << 8;
/// `gaps` are in use; otherwise they are those of an earlier segment.
const HAS_GAPS: u32 = 1 << 9;
/// The enter suspended or resumed segments below, so the exit has to check them.
pub(super) const SWITCHED: u32 = 1 << 10;
/// The segment's span is innermost or contains the one that is. Set only while segments are suspended and resumed.
pub(super) const AROUND: u32 = 1 << 11;
/// Above all flags is how many more times the span was entered while it was innermost already. That is no segment of its own.
const AGAIN: u32 = 1 << 16;

/// The number of ancestors from which on a span is one of the deepest.
pub(super) const DEEPEST: u32 = 256;
/// A thread was in such a span.
static HAS_DEEPEST: AtomicBool = AtomicBool::new(false);

#[inline]
pub(crate) fn has_deepest() -> bool {
    HAS_DEEPEST.load(Ordering::Relaxed)
}

const _: () = {
    assert!(std::mem::offset_of!(Segment, gaps) <= 56);
    assert!(size_of::<Segment>() <= 128);
};

/// Segments that have ended since the CPU clock was last read. Each entry holds one span, so a hook finds it without a
/// search. On the heap by itself, so that making a thread's state takes little of the thread's stack.
#[derive(Debug)]
pub(super) struct PendingSegments(Box<[PendingSegment; ENTRIES]>);

const ENTRIES: usize = 64;
/// The bits of a registry id without its generation. The registry reuses them only after the span has closed, and then
/// the pending time of that span is no longer needed.
const REGISTRY_SLOT: u64 = (1 << 51) - 1;

/// The ended segments of one span. Aligned so that it is in one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(super) struct PendingSegment {
    pub(super) id: RegistryId,
    /// The span's key as a number; 0 if the entry is free.
    pub(super) key: u64,
    /// Ticks of the segments since the last read of the CPU clock.
    pub(super) ticks: u64,
}

impl PendingSegment {
    const NONE: Self = Self { id: RegistryId::MIN, key: 0, ticks: 0 };
}

impl Default for PendingSegments {
    fn default() -> Self {
        let entries = vec![PendingSegment::NONE; ENTRIES].into_boxed_slice();
        Self(entries.try_into().unwrap_or_else(|_| Box::new([PendingSegment::NONE; ENTRIES])))
    }
}

impl PendingSegments {
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|part| part.key == 0)
    }

    /// The entry for a span, and the ticks already in it. `None` if another open span uses the entry.
    #[inline(always)]
    fn room(&mut self, id: RegistryId, key: u64) -> Option<(&mut PendingSegment, u64)> {
        // The registry's ids are dense on each thread.
        let part = self.0.get_mut((id.get() % ENTRIES as u64) as usize)?;
        let before = match part.key {
            0 => 0,
            same if same == key => part.ticks,
            // Of a closed span.
            _ if (part.id.get() ^ id.get()) & REGISTRY_SLOT == 0 => 0,
            _ => return None,
        };
        Some((part, before))
    }

    pub(super) fn has_room(&mut self, id: RegistryId, key: u64) -> bool {
        self.room(id, key).is_some()
    }

    /// Adds an ended segment if there is room. Returns whether there was.
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
}

impl Segment {
    pub(super) fn set(&mut self, flag: u32) {
        self.flags |= flag;
    }

    pub(super) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn unset(&mut self, flag: u32) {
        self.flags &= !flag;
    }

    /// Whether it has to be suspended or resumed, now that it is known which are [`AROUND`] the innermost span.
    pub(super) fn must_switch(&self) -> bool {
        !self.has(NESTED) && self.has(AROUND) == self.has(SUSPENDED)
    }

    pub(super) fn suspend(&mut self, now: u64) {
        let before = if self.has(HAS_GAPS) { self.gaps } else { Gaps::default() };
        self.gaps = Gaps { since: now, ..before };
        self.set(SUSPENDED | HAS_GAPS);
    }

    /// The CPU clock was last read at `synced`. Returns for how long the segment was suspended.
    pub(super) fn resume(&mut self, now: u64, synced: u64) -> u64 {
        let Gaps { since, all, .. } = self.gaps;
        let gap = self.current_gap(now).unwrap_or(0);
        let latest = self.latest_gaps(synced) + now.saturating_sub(since.max(synced));
        self.gaps = Gaps { since: now, all: all + gap, latest, synced };
        self.unset(SUSPENDED);
        gap
    }

    /// Since when it takes time without a gap, if it is not suspended.
    pub(super) fn runs_since(&self) -> u64 {
        if self.has(HAS_GAPS) { self.gaps.since } else { self.entered }
    }

    /// For how long it has been suspended, if it is.
    pub(super) fn current_gap(&self, now: u64) -> Option<u64> {
        self.has(SUSPENDED).then(|| now.saturating_sub(self.gaps.since))
    }

    /// For how long it was suspended, without the current gap, since the CPU clock was read at `synced`.
    fn latest_gaps(&self, synced: u64) -> u64 {
        let is_known = self.has(HAS_GAPS) && self.gaps.synced == synced;
        if is_known { self.gaps.latest } else { 0 }
    }

    /// Until when it took time.
    fn until(&self, now: u64) -> u64 {
        if self.has(SUSPENDED) { self.gaps.since } else { now }
    }

    /// The time that it took, in ticks.
    pub(super) fn taken(&self, now: u64) -> u64 {
        let gaps = if self.has(HAS_GAPS) { self.gaps.all } else { 0 };
        self.until(now).saturating_sub(self.entered).saturating_sub(gaps)
    }

    /// The part of that since the CPU clock was read at `synced`.
    pub(super) fn taken_since(&self, synced: u64, now: u64) -> u64 {
        let all = self.until(now).saturating_sub(self.entered.max(synced));
        all.saturating_sub(self.latest_gaps(synced))
    }

    /// Whether its on-CPU time must be known exactly when it ends: its ancestors get that time only once.
    pub(super) fn must_be_exact(&self, now: u64) -> bool {
        self.has(JUDGED_ABOVE) || (self.has(DETACHED) && self.samples_from <= now)
    }

    /// Whether its exit has to record more than its length.
    #[inline(always)]
    pub(super) fn has_more(&self) -> bool {
        self.flags & !UNWINDING != 0
    }

    /// The span is entered once more while it is innermost. False if that was too often.
    pub(super) fn enter_again(&mut self) -> bool {
        let more = self.flags.checked_add(AGAIN);
        self.flags = more.unwrap_or(self.flags);
        more.is_some()
    }

    /// The span is left once. False if it was not entered again.
    pub(super) fn leave_again(&mut self) -> bool {
        let less = self.flags.checked_sub(AGAIN);
        self.flags = less.unwrap_or(self.flags);
        less.is_some()
    }

    /// The certain times of the segment.
    pub(super) fn sure(&self) -> LowerBounds {
        if self.has(TALLIED) { self.sure } else { LowerBounds::default() }
    }

    /// Whether no span may be created in it that only this layer wants: the registry closes a span and those around it that
    /// only it kept open by recursion, which could take the thread's whole stack.
    pub(super) fn is_deepest(&self) -> bool {
        self.depth >= DEEPEST
    }

    /// The slot of its span.
    pub(super) fn slot<'a>(&self, table: &'a SlotTable) -> Option<SlotRef<'a>> {
        table.find(RegistryId::new(self.id)?, self.key)
    }

    #[inline(always)]
    pub(super) fn as_parent(&self) -> Option<Parent> {
        if self.is_deepest() {
            HAS_DEEPEST.store(true, Ordering::Relaxed);
        }
        Some(Parent { id: RegistryId::new(self.id)?, root: self.root })
    }

    pub(super) fn tally(&mut self, sure: LowerBounds) {
        self.sure = self.sure();
        self.sure.add(sure);
        self.set(TALLIED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(id: u64, key: u64, ticks: u64) -> PendingSegment {
        PendingSegment { id: RegistryId::new(id).unwrap(), key, ticks }
    }

    #[test]
    fn an_entry_of_a_closed_span_is_reused() {
        let mut pending = PendingSegments::default();
        assert!(pending.add(part(1, 7, 10)) && pending.add(part(1, 7, 5)));
        // The same registry slot, reused once.
        assert!(pending.add(part(1 | 1 << 51, 8, 3)));
        assert!(!pending.add(part(65, 9, 1)), "another span that is open");
        let left: Vec<_> = pending.take().map(|part| (part.key, part.ticks)).collect();
        assert_eq!(left, [(8, 3)]);
        assert!(pending.is_empty() && pending.add(part(65, 9, 1)));
    }
}

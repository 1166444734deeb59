//! Open spans, as the collector inspects them.

use std::collections::HashSet;
use std::sync::atomic::{Ordering, fence};

use super::close::SpanSnapshot;
use super::spans::SpanInfo;
use super::{OtherSpan, RegistryId, SpanKey, Spans};

/// An open profiled span at the moment of the scan. Its thread keeps running.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenSlot {
    pub(crate) id: RegistryId,
    pub(crate) key: SpanKey,
    pub(crate) plan: u64,
    /// For how long it has been open, in nanoseconds.
    pub(crate) open_ns: u64,
    /// For how long it has been entered without a break, if it is entered.
    pub(crate) entered_ns: Option<u64>,
}

impl Spans {
    pub(crate) fn has_any_open(&self) -> bool {
        let mut has_any = false;
        self.table.for_each(|_| has_any = true);
        has_any
    }

    /// A watched span is in its slot. Returns whether the collector must be woken: it only reads a word that all threads
    /// read, as long as the collector knows of one.
    pub(super) fn note_watched(&self) -> bool {
        // See `forget_watched`.
        fence(Ordering::SeqCst);
        !self.has_watched.load(Ordering::Relaxed) && !self.has_watched.swap(true, Ordering::Relaxed)
    }

    /// Whether the collector must check for how long an open span stays open.
    pub(crate) fn has_watched(&self) -> bool {
        self.has_watched.load(Ordering::Relaxed)
    }

    /// The collector looks at all open spans after this, and calls [`keep_watching`](Self::keep_watching) if it finds one
    /// that must be checked. It either finds the slot of a span, or that span's hook finds this.
    pub(crate) fn forget_watched(&self) {
        if self.has_watched() {
            self.has_watched.store(false, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    pub(crate) fn keep_watching(&self) {
        self.has_watched.store(true, Ordering::Relaxed);
    }

    /// Visits all open profiled spans. This scans all slots, at some nanoseconds each.
    pub(crate) fn for_each_open(&self, mut visit: impl FnMut(&OpenSlot)) {
        let now = self.clock.now();
        let since = |then: u64| self.clock.ns(now.saturating_sub(then));
        self.table.for_each(|slot| {
            let (Some(id), Some(key)) = (slot.id(), slot.key()) else { return };
            let open = OpenSlot {
                id,
                key,
                plan: slot.plan(),
                open_ns: since(slot.opened()),
                entered_ns: slot.entered_since().map(since),
            };
            fence(Ordering::Acquire);
            // Otherwise it closed during the reads, and the values are mixed.
            if slot.key() == Some(key) && slot.holds(id) {
                visit(&open);
            }
        });
    }

    pub(crate) fn find_open(&self, wanted: &HashSet<SpanKey>) -> Vec<OtherSpan> {
        let mut open = Vec::new();
        if !wanted.is_empty() {
            self.for_each_open(|&OpenSlot { id, key, plan, .. }| {
                open.extend(wanted.contains(&key).then_some(OtherSpan { id, key, plan }));
            });
        }
        open
    }

    /// Returns a span and its ancestors, the outermost first, or `None` if the span has closed.
    pub(crate) fn describe(
        &self,
        id: RegistryId,
        key: SpanKey,
    ) -> Option<Vec<(SpanKey, SpanInfo)>> {
        let mut around = Vec::new();
        let mut next = self.table.get(id);
        while let Some(slot) = next {
            around.push(self.known(&slot)?);
            next = self.table.parent_of(&slot);
        }
        fence(Ordering::Acquire);
        // Ancestors are open as long as the span is, so if it is still open, all of this is consistent.
        self.table.find(id, key.get())?;
        around.reverse();
        Some(around)
    }

    /// A span and those around it in its request, or `None` if it has closed. What was open for long when a span in it was
    /// opened, as a connection or `main`, contains requests.
    pub(crate) fn request_of(&self, id: RegistryId, key: SpanKey) -> Option<Vec<SpanKey>> {
        let slot = self.table.find(id, key.get())?;
        let (mut request, mut opened) = (vec![key], slot.opened());
        self.for_ancestors(&slot, |around| {
            let is_in = !around.is_open_for_long(opened);
            opened = around.opened();
            request.extend(around.key().filter(|_| is_in));
            is_in
        });
        fence(Ordering::Acquire);
        self.table.find(id, key.get())?;
        Some(request)
    }

    /// An open span as it would be judged if it closed now, without its current segments, whose CPU time only their
    /// threads know. The second value is for how long it has been entered without a break at that moment, without the
    /// time in which its thread was in other spans on its stack.
    pub(crate) fn as_closing(&self, id: RegistryId, key: SpanKey) -> Option<(SpanSnapshot, u64)> {
        let (slot, now) = (self.table.find(id, key.get())?, self.clock.now());
        let since = slot.entered_since().unwrap_or(now);
        let closing = self.closing(&slot, now)?;
        let segment = slot.taken_of(now.saturating_sub(since), now);
        fence(Ordering::Acquire);
        // Otherwise it closed during the reads, and the values are mixed.
        self.table.find(id, key.get())?;
        Some((closing, self.clock.ns(segment)))
    }
}

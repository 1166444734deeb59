//! Open spans, looked at by the collector.

use std::sync::atomic::{Ordering, fence};

use super::account::Account;
use super::slot::Slot;
use super::{RegistryId, SpanKey, Spans};

/// An open profiled span as the collector finds it. Its thread goes on meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenSpan {
    pub(crate) id: RegistryId,
    pub(crate) key: SpanKey,
    /// The number of its plan.
    pub(crate) plan: u64,
    /// Since when, in nanoseconds.
    pub(crate) open_ns: u64,
    /// For how long it is entered without a break, if it is entered.
    pub(crate) entered_ns: Option<u64>,
}

/// What is known of an open span, as [`Notice::Opened`](super::Notice::Opened) says it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Described {
    pub(crate) id: RegistryId,
    pub(crate) key: SpanKey,
    pub(crate) parent: Option<SpanKey>,
    pub(crate) root: SpanKey,
    pub(crate) plan: u64,
}

/// What was said of a span that is open still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Hung = 1,
    Open = 2,
}

impl Spans {
    /// Visits all open profiled spans: all that are in slots, which takes some nanoseconds each.
    pub(crate) fn look_at_open(&self, mut visit: impl FnMut(&OpenSpan)) {
        let now = self.clock.now();
        let since = |then: u64| self.clock.ns(now.saturating_sub(then));
        self.table.for_each(|slot| {
            let (Some(id), Some(key)) = (slot.id_to_look(), slot.key()) else { return };
            let open = OpenSpan {
                id,
                key,
                plan: slot.plan(),
                open_ns: since(slot.opened()),
                entered_ns: slot.entered_since().map(since),
            };
            fence(Ordering::Acquire);
            // Else it closed meanwhile, and this is a mixture.
            if slot.key() == Some(key) && slot.holds(id) {
                visit(&open);
            }
        });
    }

    /// Says of a span that is open that it hangs, or is open for too long. False if it was said
    /// before, or if the span has closed.
    pub(crate) fn tell_of(&self, id: RegistryId, key: SpanKey, told: Told) -> bool {
        self.open_slot(id, key).is_some_and(|slot| !slot.tell_of(key, told))
    }

    /// Whether that was said of a span.
    pub(crate) fn was_told_of(&self, id: RegistryId, key: SpanKey, told: Told) -> bool {
        self.open_slot(id, key).is_none_or(|slot| slot.was_told_of(key, told))
    }

    /// A span and those around it, the outermost first. `None` if the span has closed.
    pub(crate) fn describe(&self, id: RegistryId, key: SpanKey) -> Option<Vec<Described>> {
        let mut around = Vec::new();
        let mut next = Some(id);
        while let Some(slot) = next.and_then(|id| self.table.get(id)) {
            let parent = slot.parent().and_then(|parent| self.table.get(parent)?.key());
            around.push(Described {
                id: slot.id()?,
                key: slot.key()?,
                parent,
                root: slot.root()?,
                plan: slot.plan(),
            });
            next = slot.parent();
        }
        fence(Ordering::Acquire);
        // As long as it is open those around it are: so if it still is, all of this is true.
        self.open_slot(id, key)?;
        around.reverse();
        Some(around)
    }

    /// The samples that have fallen in an open span and inside it, as far as hooks have seen them.
    pub(crate) fn samples_of(&self, id: RegistryId, key: SpanKey) -> Option<u64> {
        Some(self.open_slot(id, key)?.samples())
    }

    /// The account of an open span: of all but the present segments, of which only the threads know where
    /// their time went; and for how long it is entered without a break, at that same moment.
    pub(crate) fn account_of(&self, id: RegistryId, key: SpanKey) -> Option<(Account, u64)> {
        let (slot, now) = (self.open_slot(id, key)?, self.clock.now());
        let since = slot.entered_since().unwrap_or(now);
        Some((slot.account(&self.clock, now), self.clock.ns(now.saturating_sub(since))))
    }

    fn open_slot(
        &self,
        id: RegistryId,
        key: SpanKey,
    ) -> Option<impl std::ops::Deref<Target = Slot>> {
        self.table.get(id).filter(|slot| slot.key() == Some(key))
    }
}

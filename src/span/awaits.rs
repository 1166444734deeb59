//! The idle time of spans whose futures report what they await.

use super::local::ThreadState;
use super::slot::{SampleCounts, Slot};
use super::{RegistryId, SpanKey, Spans};

/// The innermost span that a thread is in, which becomes idle when the thread leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InnermostSpan {
    /// The number of the layer.
    pub(crate) layer: u32,
    pub(crate) id: RegistryId,
    pub(crate) key: SpanKey,
    /// How many of its ancestors the thread leaves together with it.
    around: u32,
}

impl InnermostSpan {
    pub(super) fn of(state: &ThreadState) -> Option<Self> {
        let top = state.top()?;
        let entered = state.entered().iter().rev();
        let around = entered.take_while(|segment| !segment.is_detached()).count();
        Some(Self {
            layer: state.layer,
            id: RegistryId::new(top.id)?,
            key: SpanKey::new(top.key)?,
            around: u32::try_from(around).unwrap_or(u32::MAX),
        })
    }
}

/// A segment that has just ended on a thread, and was so long that it delayed whatever waited for the thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LongSegment {
    /// The number of the span's plan.
    pub(crate) plan: u64,
    /// In ticks.
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Spans {
    /// The number of the layer.
    pub(crate) fn layer(&self) -> u32 {
        self.layer
    }

    fn slot_of(&self, span: &InnermostSpan) -> Option<impl std::ops::Deref<Target = Slot>> {
        self.table.get(span.id).filter(|slot| slot.key() == Some(span.key))
    }

    /// Adds idle time that is explained, in ticks, to the accounts of a span and those that were left together with it.
    pub(crate) fn count_await(&self, span: &InnermostSpan, awaited: u64, delayed: u64) {
        let Some(slot) = self.slot_of(span) else { return };
        let (await_ns, delay_ns) = (self.clock.ns(awaited), self.clock.ns(delayed));
        slot.count_await(span.key.get(), await_ns, delay_ns);
        let mut around = span.around;
        self.for_ancestors(&slot, |ancestor| {
            around = around.saturating_sub(1);
            if around > 0 {
                ancestor.count_await(ancestor.raw_key(), await_ns, delay_ns);
            }
            around > 1
        });
    }

    /// Whether what the span awaited from `since` to `now`, in ticks, is worth a sample: if the span, or one around it,
    /// has been open for so long that a thread in it would be sampled. A span that is open for long (a connection,
    /// `main`) does not make others old.
    pub(crate) fn is_old_await(&self, span: &InnermostSpan, since: u64, now: u64) -> bool {
        let Some(slot) = self.slot_of(span) else { return false };
        let mut is_old = slot.is_old_after(now.saturating_sub(since));
        let mut check = |slot: &Slot| {
            is_old |=
                !slot.is_open_for_long(now) && slot.is_old_after(now - slot.opened().min(now));
            !is_old
        };
        if check(&slot) {
            self.for_ancestors(&slot, check);
        }
        is_old
    }

    /// Counts an await as a sample of its span. Returns false if the span has closed, or cannot be registered.
    pub(crate) fn report_await(&self, span: &InnermostSpan) -> bool {
        self.slot_of(span).is_some()
            && self.register_with_collector(span.id, SampleCounts { on_cpu: 0, waits: 1 })
    }
}

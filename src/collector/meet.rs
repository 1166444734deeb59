//! Closes of spans, brought together with the ends of their OpenTelemetry spans.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::engine::{Engine, FindOtel};
use crate::keep::KeptSpan;
use crate::otel::{
    Close, ClosingSpan, Ended, EndedSpan, Found, FoundClose, Meeting, Order, OtelSpan, SpanEnds,
    TOO_LONG,
};
use crate::span::{RegistryId, TraceIds, is_ignored};
use crate::sys;

impl Engine {
    /// The same where a processor sees OpenTelemetry's spans end, on this thread just before or in
    /// a moment.
    #[cold]
    pub(super) fn close_and_meet(&self, id: RegistryId, otel: FindOtel<'_>, meeting: &Meeting) {
        if meeting.is_direct() {
            self.close_with(id, otel, None);
            return;
        }
        let span = self.closing_span(id);
        match meeting.take(span.as_ref()) {
            Found::End(ended) => {
                ended.with(|data| {
                    self.close_with(id, &mut || Some(OtelSpan::Ended(data)), None);
                });
                return;
            }
            Found::OtherEnd(other) => self.hand_on_another(meeting, other),
            Found::OtherClose(other) => self.conclude(other, None),
            Found::Nothing => {}
        }
        let Some(span) = span.filter(|_| meeting.order() != Order::Theirs) else {
            self.close_with(id, otel, None);
            return;
        };
        let mut close = Close::new(span);
        self.close_with(id, otel, Some(&mut close));
        let is_plain = close.is_plain();
        if meeting.is_direct() {
            // Another thread has just found that out: no end will ask for this.
            self.conclude(close, None);
        } else if meeting.order() == Order::Unknown || !is_plain {
            meeting.leave_close(close);
            if !is_plain {
                self.watch(meeting);
            }
        }
    }

    fn closing_span(&self, id: RegistryId) -> Option<ClosingSpan> {
        let (opened, plan) = self.spans.opened(id)?;
        let metadata = self.callsites.get(plan)?.metadata;
        Some(ClosingSpan { metadata, opened })
    }

    /// A close whose end has come, or will not come.
    fn conclude(&self, close: Close, ids: Option<TraceIds>) {
        if let Some(key) = close.untold {
            self.spans.tell_closed(key, ids);
            self.waker.wake_soon();
        }
    }

    fn watch(&self, meeting: &Meeting) {
        if meeting.needs_watching() {
            self.waker.wake();
        }
    }

    /// Hands on a span whose close will not come.
    fn hand_on_another(&self, meeting: &Meeting, ended: EndedSpan) {
        let Some(ended) = ended.hand_on_unless_inside() else { return };
        match meeting.leave_late(ended) {
            Some(ended) => ended.hand_on(),
            None => self.watch(meeting),
        }
    }

    /// Ends what has waited too long for its other half. Returns what is to be handed on, and how
    /// soon to look again, if that must be.
    pub(super) fn look_after_meeting(&self) -> (Vec<EndedSpan>, Option<Duration>) {
        let Some(meeting) = self.meeting.get().filter(|meeting| meeting.is_watched()) else {
            return (Vec::new(), None);
        };
        // One for the moment in which they are nowhere.
        meeting.send_off(1);
        let (ended, closes) = meeting.give_up(TOO_LONG);
        meeting.send_off(ended.len());
        meeting.arrive();
        closes.into_iter().for_each(|close| self.conclude(close, None));
        (ended, meeting.is_watched().then_some(TOO_LONG))
    }

    /// Nothing waits any more. Returns what is to be handed on.
    pub(super) fn end_meeting(&self) -> Vec<EndedSpan> {
        let Some(meeting) = self.meeting.get() else { return Vec::new() };
        let ended = meeting.end();
        meeting.send_off(ended.len());
        ended
    }

    /// Hands on what [`look_after_meeting`](Self::look_after_meeting) gave.
    pub(super) fn hand_on_later(&self, ended: Vec<EndedSpan>) {
        for span in ended {
            // A processor is not ours.
            _ = catch_unwind(AssertUnwindSafe(|| span.hand_on()));
            if let Some(meeting) = self.meeting.get() {
                meeting.arrive();
            }
        }
    }

    /// From now on a processor will see OpenTelemetry's spans end.
    pub(crate) fn expect_ends(&self) {
        self.meeting.get_or_init(Meeting::default);
    }
}

impl SpanEnds for Engine {
    fn ended(&self, mut ended: Ended) {
        let meeting = self.meeting.get().filter(|meeting| !meeting.is_direct());
        let Some(meeting) = meeting.filter(|_| self.is_running()) else {
            ended.hand_on();
            return;
        };
        match meeting.take_close(&mut ended) {
            FoundClose::Same(mut close) => {
                let ids = ended.ids();
                let kept = close.kept.take().map(|kept| KeptSpan { trace: Some(ids), ..*kept });
                self.conclude(close, Some(ids));
                let attributes = kept.map(|kept| self.attributes.of(&kept)).unwrap_or_default();
                meeting.leave_said(ids.span, attributes.clone());
                ended.hand_on_with(attributes);
                return;
            }
            FoundClose::Said => {
                ended.hand_on();
                return;
            }
            FoundClose::Other(other) => self.conclude(other, None),
            FoundClose::Nothing => {}
        }
        if meeting.order() == Order::Ours {
            ended.hand_on();
            return;
        }
        let other = meeting.leave_ended(ended);
        self.watch(meeting);
        if let Some(other) = other {
            self.hand_on_another(meeting, other);
        }
    }

    fn hand_on(&self) {
        // In the child of a fork another thread may hold a lock for ever, and what waits is the
        // parent's.
        let meeting = self.meeting.get().filter(|_| self.made_in == sys::fork_generation());
        if let Some(meeting) = meeting.filter(|meeting| !meeting.is_direct()) {
            let (ended, closes) = meeting.give_up_for_flush();
            // Our thread may have looked while it was said that nothing is left.
            if meeting.is_watched() {
                self.waker.wake();
            }
            closes.into_iter().for_each(|close| self.conclude(close, None));
            ended.into_iter().for_each(EndedSpan::hand_on);
            // Those that the collector has given up just before. (Our own thread would wait for
            // itself.)
            if !is_ignored() {
                meeting.wait_for_arrivals(Duration::from_secs(1));
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.made_in == sys::fork_generation() {
            let ended = self.end_meeting();
            self.hand_on_later(ended);
        }
    }
}

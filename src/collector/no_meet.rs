//! Without a span processor nothing waits for the end of an OpenTelemetry span.

use std::time::Duration;

use super::engine::{Engine, FindOtel};
use crate::otel::{EndedSpan, Meeting};
use crate::span::RegistryId;

impl Engine {
    #[expect(clippy::unused_self, reason = "as where there is a processor")]
    pub(super) fn close_and_meet(&self, _: RegistryId, _: FindOtel<'_>, meeting: &Meeting) {
        match *meeting {}
    }

    #[expect(clippy::unused_self, reason = "as where there is a processor")]
    pub(super) fn look_after_meeting(&self) -> (Vec<EndedSpan>, Option<Duration>) {
        (Vec::new(), None)
    }

    #[expect(clippy::unused_self, reason = "as where there is a processor")]
    pub(super) fn end_meeting(&self) -> Vec<EndedSpan> {
        Vec::new()
    }

    #[expect(clippy::unused_self, reason = "as where there is a processor")]
    pub(super) fn hand_on_later(&self, _: Vec<EndedSpan>) {}
}

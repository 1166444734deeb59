//! Without the SDK of OpenTelemetry, no traces are held.

use crate::span::{InnermostSpan, TraceIds};
use crate::stats::TraceStats;

pub(crate) fn keep_trace(_: impl FnOnce() -> Option<TraceIds>) {}

pub(crate) fn keep_traces_begun_in(_: impl Fn(InnermostSpan) -> bool) {}

pub(crate) fn trace_stats() -> TraceStats {
    TraceStats::default()
}

//! Without the SDK of OpenTelemetry, no traces are held.

use crate::span::TraceIds;
use crate::stats::TraceStats;

pub(crate) const fn hold_traces() -> bool {
    false
}

pub(crate) fn keep_trace(_: TraceIds) {}

pub(crate) fn trace_stats() -> TraceStats {
    TraceStats::default()
}

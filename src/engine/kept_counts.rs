//! Counts kept spans.

use crate::facts::{Reasons, TimeBreakdown};
use crate::keep::{KeptSpan, NoProfile};
use crate::stats::Counters;

/// Counts a span that gets neither a profile nor a report.
pub(super) fn count_over_limit(
    counters: &Counters,
    account: &TimeBreakdown,
    reasons: Reasons,
    has_samples: bool,
) {
    let spans = &counters.spans;
    counters.add_kept(reasons);
    Counters::add(&spans.kept_on_cpu_ns, account.on_cpu_ns);
    Counters::add(&spans.kept_sampled_ns, account.sampled_ns);
    Counters::add(&spans.kept_unreported, 1);
    let why = match has_samples {
        true => &spans.kept_over_rate_limit,
        false => &spans.kept_without_samples,
    };
    Counters::add(why, 1);
}

pub(super) fn count(counters: &Counters, span: &KeptSpan) {
    counters.add_kept(span.facts.reasons);
    if !span.is_open() {
        Counters::add(&counters.spans.kept_on_cpu_ns, span.times().on_cpu_ns);
        Counters::add(&counters.spans.kept_sampled_ns, span.times().sampled_ns);
    }
    let without = match span.profile {
        Ok(_) => return,
        Err(
            NoProfile::NoSamples | NoProfile::SamplingUnavailable | NoProfile::ThreadsNotSampled,
        ) => &counters.spans.kept_without_samples,
        Err(NoProfile::RateLimit) => &counters.spans.kept_over_rate_limit,
        Err(NoProfile::ExporterBusy) => &counters.spans.kept_exporter_busy,
        Err(NoProfile::TreeFull) => &counters.spans.kept_tree_full,
        Err(NoProfile::ExporterFails) => &counters.spans.kept_exporter_fails,
        Err(NoProfile::NoMemory) => &counters.spans.kept_no_memory,
        Err(NoProfile::NoId) => &counters.spans.kept_without_id,
    };
    Counters::add(without, 1);
}

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
        true => &spans.no_profile_rate_limit,
        false => &spans.no_profile_no_samples,
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
        ) => &counters.spans.no_profile_no_samples,
        Err(NoProfile::RateLimit) => &counters.spans.no_profile_rate_limit,
        Err(NoProfile::ExporterBusy) => &counters.spans.no_profile_queue_full,
        Err(NoProfile::TreeFull) => &counters.spans.no_profile_too_many_spans,
        Err(NoProfile::ExporterFails) => &counters.spans.no_profile_exporter_fails,
        Err(NoProfile::NoMemory) => &counters.spans.no_profile_no_memory,
        Err(NoProfile::NoId) => &counters.spans.no_profile_no_id,
    };
    Counters::add(without, 1);
}

//! Counts kept spans, and finds those that are over their limit before anything else is done for them.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};

use super::engine::Engine;
use crate::facts::{Reason, Reasons};
use crate::keep::{Callsite, FieldValues, KeptSpan, NoProfile};
use crate::span::Closing;
use crate::stats::Counters;

/// Whether a kept span gets neither a profile nor a report, as far as that is certain. Counts it then.
pub(super) fn is_over_limit(
    engine: &Engine,
    closing: &Closing,
    callsite: &Callsite,
    reasons: Reasons,
) -> bool {
    // Whether its trace is exported decides first.
    if reasons.contains(Reason::Forced) || engine.otel.only_sampled_traces {
        return false;
    }
    let account = &closing.account;
    // What its future carries becomes samples if it is kept.
    let has_samples = closing.samples.total() > 0 || account.await_ns > 0 || account.delay_ns > 0;
    let name = || name_hash(engine, closing, callsite);
    let of = (callsite.rule, closing.root);
    let is_over = engine.admission.is_over_limit(of, has_samples, name);
    if is_over {
        let spans = &engine.counters.spans;
        engine.counters.add_kept(reasons);
        Counters::add(&spans.kept_on_cpu_ns, account.on_cpu_ns);
        Counters::add(&spans.kept_sampled_ns, account.sampled_ns);
        Counters::add(&spans.kept_unreported, 1);
        let why = match has_samples {
            true => &spans.no_profile_rate_limit,
            false => &spans.no_profile_no_samples,
        };
        Counters::add(why, 1);
    }
    is_over
}

/// A hash of a span's name and values, by which its limits are known.
pub(super) fn name_hash(engine: &Engine, closing: &Closing, callsite: &Callsite) -> u64 {
    let values = engine.inspect_values(closing, FieldValues::hash_of);
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    hasher.hash_one((callsite.metadata.name(), values))
}

pub(super) fn count(engine: &Engine, span: &KeptSpan) {
    let counters = &engine.counters;
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

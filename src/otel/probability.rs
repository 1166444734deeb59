//! Consistent probability sampling, as OpenTelemetry specifies it: the randomness of a trace, and the rejection threshold in
//! the `tracestate` of its spans. Both have 56 bits.

use opentelemetry::trace::SpanContext;
use opentelemetry_sdk::trace::SpanData;

/// The entry of OpenTelemetry: parts as `th:fd7;rv:00112233445566`.
const ENTRY: &str = "ot";
const DIGITS: usize = 14;

/// A part of the entry. Further digits of a number are 0.
fn part(entry: &str, name: &str) -> Option<u64> {
    let mut parts = entry.split(';').filter_map(|part| part.split_once(':'));
    let (_, digits) = parts.find(|(of, _)| *of == name)?;
    let is_number = (1..=DIGITS).contains(&digits.len())
        && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_number.then(|| u64::from_str_radix(&format!("{digits:0<DIGITS$}"), 16).ok()).flatten()
}

/// The randomness by which all services choose the same traces: what the caller has set, or the end of the trace's id.
pub(super) fn randomness_of(context: &SpanContext) -> u64 {
    let given = context.trace_state().get(ENTRY).and_then(|entry| part(entry, "rv"));
    given.unwrap_or_else(|| {
        u128::from_be_bytes(context.trace_id().to_bytes()) as u64 & (u64::MAX >> 8)
    })
}

/// A span that goes on with that threshold, if it is known: those like it go on that have at least that randomness. A higher
/// one that the caller has set remains. The span counts as sampled.
pub(super) fn with_threshold(mut span: SpanData, threshold: Option<u64>) -> SpanData {
    let context = &span.span_context;
    let mut state = context.trace_state().clone();
    if let Some(threshold) = threshold {
        let entry = state.get(ENTRY).unwrap_or_default();
        let threshold = threshold.max(part(entry, "th").unwrap_or(0));
        let digits = format!("{threshold:0DIGITS$x}");
        let digits = digits.trim_end_matches('0');
        let number = if digits.is_empty() { "0" } else { digits };
        let others = entry.split(';').filter(|part| !part.is_empty() && !part.starts_with("th:"));
        let parts = others.fold(format!("th:{number}"), |all, part| all + ";" + part);
        // It has no room for more.
        state = state.insert(ENTRY, parts).unwrap_or(state);
    }
    span.span_context = SpanContext::new(
        context.trace_id(),
        context.span_id(),
        context.trace_flags().with_sampled(true),
        context.is_remote(),
        state,
    );
    span
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_that_are_left_out_are_0_and_malformed_numbers_are_none() {
        let number = |entry| part(entry, "th");
        assert_eq!(number("th:0"), Some(0));
        assert_eq!(number("rv:1;th:c"), Some(0xc << 52));
        assert_eq!(number("th:fd70a3d70a3d71"), Some(0xfd_70a3_d70a_3d71));
        for malformed in ["", "th", "th:", "th:g", "th:+1", "th:0123456789abcde", "xth:1"] {
            assert_eq!(number(malformed), None, "{malformed}");
        }
    }
}

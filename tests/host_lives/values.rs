//! What the program writes in its fields, and its user in variables.

use std::fmt;

use tracing::field::Empty;
use tracing::info_span;
use tracing::level_filters::LevelFilter;
use tracing_profiling::export::Memory;
use tracing_profiling::{ProfilingLayer, Source};
use tracing_subscriber::prelude::*;

use super::{Lines, in_child};
use crate::support::PLENTY;

/// Opens a span when it is printed.
struct Opens;

impl fmt::Debug for Opens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _span = info_span!("resolve").entered();
        tracing::error!("in a span that no layer sees");
        f.write_str("error")
    }
}

/// With another layer after this one it would not: what a filter of `tracing-subscriber` has noted of a span does not survive
/// that its fields are printed before that filter's layer has seen it.
#[test]
fn a_value_may_open_a_span_when_it_is_printed_if_the_layer_is_last() {
    let test = "a_value_may_open_a_span_when_it_is_printed_if_the_layer_is_last";
    in_child(module_path!(), test, &[], || {
        let rules = "[request]=250ms|error,[request{tenant=error}]=always".parse().unwrap();
        let builder = ProfilingLayer::builder().rules(rules).source(Source::None);
        let memory = Memory::new();
        let layer = builder.exporter(memory.clone()).build().unwrap();
        let handle = layer.handle();
        let lines = tracing_subscriber::fmt::layer().with_writer(std::io::sink);
        let lines = lines.with_filter(LevelFilter::WARN);
        tracing_subscriber::registry().with(lines).with(layer).init();
        let spans = [
            info_span!("request", http.route = ?Opens, tenant = ?Opens),
            info_span!("request", otel.status_code = ?Opens),
            info_span!("request", http.route = Empty, tenant = Empty, otel.status_code = Empty),
        ];
        let [_, _, later] = &spans;
        for field in ["http.route", "tenant", "otel.status_code"] {
            later.record(field, tracing::field::debug(Opens));
        }
        spans.iter().for_each(|span| span.in_scope(|| ()));
        drop(spans);
        handle.flush(PLENTY).unwrap();
        assert_eq!(handle.stats().spans.kept, 3);
    });
}

fn from_env(test: &str, variables: &[(&str, &str)], is_on: bool, part: &str) {
    in_child(module_path!(), test, variables, || {
        let dir = tempfile::tempdir().unwrap();
        std::env::set_current_dir(&dir).unwrap();
        let layer = ProfilingLayer::from_env().unwrap();
        let (handle, lines) = (layer.handle(), Lines::default());
        tracing_subscriber::registry().with(lines.clone()).with(layer).init();
        info_span!("request").in_scope(|| tracing::error!("failed"));
        handle.flush(PLENTY).unwrap();
        assert_eq!((handle.is_enabled(), handle.stats().spans.kept), (is_on, u64::from(is_on)));
        let lines = lines.0.lock().unwrap();
        let said = lines.iter().filter(|line| line.contains("reason=malformed")).count();
        assert!(said == 1 && lines.iter().any(|line| line.contains(part)), "{lines:?}");
    });
}

#[test]
fn a_misspelt_value_is_said_and_the_rest_applies() {
    let variables = [("TRACING_PROFILING_RATE", "often"), ("TRACING_PROFILING_SOURCE", "none")];
    let test = "a_misspelt_value_is_said_and_the_rest_applies";
    from_env(test, &variables, true, "TRACING_PROFILING_RATE cannot be used, so it has no effect");
}

#[test]
fn with_misspelt_rules_profiling_is_off() {
    let (test, variables) =
        ("with_misspelt_rules_profiling_is_off", [("TRACING_PROFILING", "250ms|eror")]);
    from_env(test, &variables, false, "TRACING_PROFILING cannot be used, so profiling is off");
}

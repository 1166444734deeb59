//! The layer's counters as OpenTelemetry metrics.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use opentelemetry::metrics::{Meter, MeterProvider};
use opentelemetry_sdk::metrics::data::{AggregatedMetrics, MetricData};
use opentelemetry_sdk::metrics::{InMemoryMetricExporter, PeriodicReader, SdkMeterProvider};
use support::{HAS_STACKS, PLENTY, Setup, burn};
use tracing::info_span;
use tracing_profiling::{Handle, Reason};

struct Meters {
    exporter: InMemoryMetricExporter,
    provider: SdkMeterProvider,
}

/// The unit of each metric, and its values by attributes.
type Found = BTreeMap<String, (String, BTreeMap<String, f64>)>;

impl Meters {
    fn of(handle: &Handle) -> Self {
        Self::with(|meter| handle.register_metrics(meter))
    }

    fn with(register: impl FnOnce(&Meter)) -> Self {
        let exporter = InMemoryMetricExporter::default();
        // Metrics are collected only by `force_flush`.
        let reader = PeriodicReader::builder(exporter.clone()).with_interval(PLENTY * 60);
        let provider = SdkMeterProvider::builder().with_reader(reader.build()).build();
        register(&provider.meter("test"));
        Self { exporter, provider }
    }

    fn collect(&self) -> Found {
        self.exporter.reset();
        self.provider.force_flush().unwrap();
        let finished = self.exporter.get_finished_metrics().unwrap();
        let scopes = finished.iter().flat_map(|metrics| metrics.scope_metrics());
        let values = |metric: &opentelemetry_sdk::metrics::data::Metric| match metric.data() {
            AggregatedMetrics::U64(data) => values(data, |value| value as f64),
            AggregatedMetrics::F64(data) => values(data, |value| value),
            AggregatedMetrics::I64(_) => panic!("{} is signed", metric.name()),
        };
        scopes
            .flat_map(|scope| scope.metrics())
            .map(|metric| {
                assert!(!metric.description().is_empty());
                (metric.name().to_owned(), (metric.unit().to_owned(), values(metric)))
            })
            .collect()
    }
}

fn values<T: Copy>(data: &MetricData<T>, value: impl Fn(T) -> f64) -> BTreeMap<String, f64> {
    let named = |attributes: Vec<&opentelemetry::KeyValue>, value| {
        let mut names: Vec<_> =
            attributes.iter().map(|each| format!("{}={}", each.key, each.value)).collect();
        names.sort();
        (names.join(","), value)
    };
    match data {
        MetricData::Sum(sum) => {
            assert!(sum.is_monotonic());
            let points = sum.data_points();
            points.map(|p| named(p.attributes().collect(), value(p.value()))).collect()
        }
        MetricData::Gauge(gauge) => {
            let points = gauge.data_points();
            points.map(|p| named(p.attributes().collect(), value(p.value()))).collect()
        }
        _ => panic!("a histogram"),
    }
}

/// All requests are counted, also those that no threshold and no chance selects.
#[test]
fn what_all_requests_of_a_route_take_is_exported_as_metrics() {
    let shown = ["http.route", "customer", "uri"];
    let setup = Setup::with("1h", |builder| builder.span_fields(shown));
    let before = Meters::of(&setup.handle);
    assert!(!before.collect().contains_key("tracing_profiling.route.requests"));
    let meters = Meters::with(|meter| setup.handle.register_route_metrics(meter));
    let mut wall = Duration::ZERO;
    setup.run(|| {
        for customer in 0..30_u64 {
            let route = if customer % 3 == 0 { "/long" } else { "/short" };
            let start = std::time::Instant::now();
            let uri = format!("{route}/{customer}");
            let request = info_span!("request", http.route = route, customer, uri).entered();
            // Of a child, nothing is counted.
            info_span!("child", http.route = "/child").in_scope(|| burn(Duration::from_millis(1)));
            drop(request);
            wall += start.elapsed();
        }
        // Without a template, paths are one.
        for number in 0..3_u64 {
            info_span!("plain", uri = format!("/{number}")).in_scope(|| ());
        }
    });
    let found = meters.collect();
    let all = |name: &str| &found[&format!("tracing_profiling.route.{name}")];
    let (unit, requests) = all("requests");
    let route = |route: &str| format!("http.route={route},span.name=request");
    let expected =
        [(route("/long"), 10.0), (route("/short"), 20.0), ("span.name=plain,uri=/{}".into(), 3.0)];
    assert_eq!((unit.as_str(), requests), ("{request}", &BTreeMap::from(expected)));
    let sum = |name: &str| all(name).1.values().sum::<f64>();
    assert_eq!(all("wall").0, "s");
    assert!(sum("wall") <= wall.as_secs_f64() && sum("wall") >= 0.030, "{found:?}");
    if HAS_STACKS {
        let busy = sum("on_cpu") + sum("off_cpu");
        assert!(sum("on_cpu") >= 0.029 && busy <= sum("wall") + 0.001, "{found:?}");
    }
    // Counters go on.
    setup.run(|| info_span!("plain", uri = "/7").in_scope(|| ()));
    let again = meters.collect();
    assert_eq!(again["tracing_profiling.route.requests"].1["span.name=plain,uri=/{}"], 4.0);
}

#[test]
fn routes_that_clients_invent_are_one_series_beyond_the_limit() {
    let setup = Setup::with("1h", |builder| builder.span_fields(["http.route"]));
    let meters = Meters::with(|meter| setup.handle.register_route_metrics(meter));
    setup.run(|| {
        for number in 0..3_000 {
            info_span!("request", http.route = number).in_scope(|| ());
        }
    });
    let found = meters.collect();
    let requests = &found["tracing_profiling.route.requests"].1;
    assert_eq!(requests["otel.metric.overflow=true"], 2_000.0);
    assert_eq!((requests.len(), requests.values().sum::<f64>()), (1_001, 3_000.0));
}

#[test]
fn counters_are_exported_as_metrics() {
    let setup = Setup::new("0ms|error");
    let meters = Meters::of(&setup.handle);
    setup.run(|| {
        info_span!("slow").in_scope(|| burn(Duration::from_millis(60)));
        info_span!("fails").in_scope(|| tracing::error!("on purpose"));
    });
    let found = meters.collect();
    let stats = setup.handle.stats();
    let one = |name: &str| found[&format!("tracing_profiling.{name}")].1[""];
    assert_eq!(one("spans.seen"), 2.0);
    assert_eq!(one("samples.taken"), stats.samples.taken as f64);
    assert_eq!(one("profiles.exported"), stats.profiles.exported as f64);
    let cpu_s = one("collector.cpu_time");
    // The collector continues in the meantime.
    assert!(cpu_s <= stats.sampling.collector_cpu_ns as f64 / 1e9, "{cpu_s}");
    assert_eq!(cpu_s > 0.0, HAS_STACKS);
    assert!(one("threads.sampled") <= 1.0);
    assert!(one("threads.unsampled") <= 1.0);

    let kept = &found["tracing_profiling.spans.kept"].1;
    assert_eq!(kept.len(), Reason::all().count());
    assert_eq!((kept["reason=latency"], kept["reason=error"]), (2.0, 1.0));
    let dropped = &found["tracing_profiling.profiles.dropped"].1;
    assert_eq!(dropped["cause=export_failed"], 0.0);
    let dropped = found["tracing_profiling.traces.dropped"].1.keys().collect::<Vec<_>>();
    assert_eq!(dropped, ["cause=at_shutdown", "cause=ordinary", "cause=over_bound"]);

    let units: Vec<_> = found.iter().map(|(name, (unit, _))| (name.as_str(), &**unit)).collect();
    assert_eq!(
        units,
        [
            ("tracing_profiling.collector.cpu_time", "s"),
            ("tracing_profiling.profiles.dropped", "{profile}"),
            ("tracing_profiling.profiles.exported", "{profile}"),
            ("tracing_profiling.samples.lost", "{sample}"),
            ("tracing_profiling.samples.taken", "{sample}"),
            ("tracing_profiling.spans.allocated", "By"),
            ("tracing_profiling.spans.allocations", "{allocation}"),
            ("tracing_profiling.spans.freed", "By"),
            ("tracing_profiling.spans.frees", "{free}"),
            ("tracing_profiling.spans.kept", "{span}"),
            ("tracing_profiling.spans.seen", "{span}"),
            ("tracing_profiling.threads.sampled", "{thread}"),
            ("tracing_profiling.threads.unsampled", "{thread}"),
            ("tracing_profiling.traces.dropped", "{span}"),
            ("tracing_profiling.traces.held", "{span}"),
            ("tracing_profiling.traces.passed", "{span}"),
        ]
    );
}

#[test]
fn every_lost_sample_has_a_cause() {
    let setup = Setup::with("0ms", |builder| builder.samples_per_profile(2).rate(1000));
    let meters = Meters::of(&setup.handle);
    setup.run(|| info_span!("long").in_scope(|| burn(Duration::from_millis(100))));
    let before = setup.handle.stats();
    let found = meters.collect();
    let lost = &found["tracing_profiling.samples.lost"].1;
    let stats = setup.handle.stats();
    for ((name, least), (_, most)) in before.iter().zip(stats.iter()) {
        let Some(name) = name.strip_prefix("samples_") else { continue };
        if ["taken", "outside_spans"].contains(&name) {
            continue;
        }
        let cause = name.strip_prefix("dropped_").unwrap_or(name);
        let count = lost[&format!("cause={cause}")];
        assert!((least as f64..=most as f64).contains(&count), "{cause}: {count}");
    }
    assert_eq!(lost["cause=downsampled"], stats.samples.downsampled as f64);
    assert_eq!(stats.samples.downsampled > 0, HAS_STACKS);
}

#[test]
fn a_layer_that_is_off_has_zeros() {
    let setup = Setup::new("off");
    let meters = Meters::of(&setup.handle);
    setup.run(|| info_span!("any").in_scope(|| ()));
    let found = meters.collect();
    assert_eq!(found.len(), 16);
    assert!(found.values().all(|(_, values)| values.values().all(|value| *value == 0.0)));
}

#[test]
fn metrics_do_not_keep_the_layer_alive() {
    let Setup { handle, dispatch, .. } = Setup::new("0ms");
    let meters = Meters::of(&handle);
    assert!(!meters.collect().is_empty());
    assert!(handle.is_enabled());
    drop(dispatch);
    // While another test registers a callsite, `tracing` also holds the subscribers of others.
    let start = std::time::Instant::now();
    while handle.set_rules("0ms".parse().unwrap()).is_ok() {
        assert!(start.elapsed() < PLENTY, "the layer is dropped");
        std::thread::yield_now();
    }
    let found = meters.collect();
    assert!(found.values().all(|(_, values)| values.is_empty()), "{found:?}");
}

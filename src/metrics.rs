//! The counters in `Stats` as OpenTelemetry metrics.

use opentelemetry::KeyValue;
use opentelemetry::metrics::Meter;

use crate::facts::{Reason, Unit};
use crate::handle::Handle;
use crate::references::{RouteTotal, SUMMED};
use crate::stats::Stats;

/// The name, unit and description of a metric, and its values.
struct Instrument {
    name: &'static str,
    unit: &'static str,
    about: &'static str,
    numbers: Numbers,
}

#[derive(Clone, Copy)]
enum Numbers {
    One(fn(&Stats) -> u64),
    /// One value for each value of this attribute.
    Each(&'static str, fn(&Stats) -> Vec<(&'static str, u64)>),
}

macro_rules! instruments {
    ($($name:literal, $unit:literal, $about:literal, $numbers:expr;)*) => {
        &[$(Instrument { name: concat!("tracing_profiling.", $name), unit: $unit, about: $about, numbers: $numbers }),*]
    };
}

const COUNTERS: &[Instrument] = instruments! {
    "spans.seen", "{span}", "Created spans that a rule matches", Numbers::One(|stats| stats.spans.seen);
    "spans.kept", "{span}", "Spans that were kept; one that was kept for several reasons counts for each",
        Numbers::Each("reason", |stats| {
            Reason::all().map(|reason| (reason.as_str(), stats.kept_for(reason))).collect()
        });
    "samples.taken", "{sample}", "Samples that fell in a profiled span and were unwound",
        Numbers::One(|stats| stats.samples.taken);
    "samples.lost", "{sample}", "Samples that were lost or left out", Numbers::Each("cause", samples_lost);
    "spans.allocated", "By", "Bytes that closed spans have allocated, if the program has a `ProfilingAllocator`",
        Numbers::One(|stats| stats.allocations.allocated_bytes);
    "spans.freed", "By", "Bytes that closed spans have freed", Numbers::One(|stats| stats.allocations.freed_bytes);
    "spans.allocations", "{allocation}", "Allocations of closed spans",
        Numbers::One(|stats| stats.allocations.allocations);
    "spans.frees", "{free}", "Frees of closed spans", Numbers::One(|stats| stats.allocations.frees);
    "profiles.exported", "{profile}", "Profiles that the exporter accepted",
        Numbers::One(|stats| stats.profiles.exported);
    "profiles.dropped", "{profile}", "Profiles that could not be exported",
        Numbers::Each("cause", |stats| with_prefix(stats, "profiles.dropped_").collect());
    "traces.passed", "{span}", "Spans that each `KeptTraces` of the process passed on",
        Numbers::One(|stats| stats.traces.passed);
    "traces.dropped", "{span}", "Spans that they dropped, most of them of ordinary traces",
        Numbers::Each("cause", |stats| {
            let ordinary = ("ordinary", stats.traces.dropped);
            with_prefix(stats, "traces.dropped_").chain([ordinary]).collect()
        });
};

const GAUGES: &[Instrument] = instruments! {
    "threads.sampled", "{thread}", "Threads that are currently sampled", Numbers::One(|stats| stats.threads.sampled);
    "threads.unsampled", "{thread}", "Threads in old spans that could not be sampled",
        Numbers::One(|stats| stats.threads.unsampled);
    "traces.held", "{span}", "Spans that each `KeptTraces` of the process currently holds",
        Numbers::One(|stats| stats.traces.held);
};

impl Handle {
    /// Registers the numbers of [`stats`](Self::stats) as OpenTelemetry metrics: observable counters, and gauges of
    /// threads and of held spans. They are read whenever the meter's provider collects. Call this once per meter. Needs the feature
    /// `metrics`.
    ///
    /// | metric | unit | attribute | what it is |
    /// |---|---|---|---|
    /// | `tracing_profiling.spans.seen` | `{span}` | | [`SpanStats::seen`](crate::SpanStats::seen) |
    /// | `tracing_profiling.spans.kept` | `{span}` | `reason` | [`Stats::kept_for`]; a span that was kept for several reasons counts for each |
    /// | `tracing_profiling.samples.taken` | `{sample}` | | [`SampleStats::taken`](crate::SampleStats::taken) |
    /// | `tracing_profiling.samples.lost` | `{sample}` | `cause` | each `dropped_*` of [`SampleStats`](crate::SampleStats), without that prefix, and `downsampled` |
    /// | `tracing_profiling.spans.allocated`, `.freed` | `By` | | [`AllocationStats::allocated_bytes`](crate::AllocationStats::allocated_bytes) and `freed_bytes` |
    /// | `tracing_profiling.spans.allocations` | `{allocation}` | | [`AllocationStats::allocations`](crate::AllocationStats::allocations) |
    /// | `tracing_profiling.spans.frees` | `{free}` | | [`AllocationStats::frees`](crate::AllocationStats::frees) |
    /// | `tracing_profiling.profiles.exported` | `{profile}` | | [`ProfileStats::exported`](crate::ProfileStats::exported) |
    /// | `tracing_profiling.profiles.dropped` | `{profile}` | `cause` | each `dropped_*` of [`ProfileStats`](crate::ProfileStats), without that prefix |
    /// | `tracing_profiling.traces.passed` | `{span}` | | [`TraceStats::passed`](crate::TraceStats::passed) |
    /// | `tracing_profiling.traces.dropped` | `{span}` | `cause` | `ordinary`, and each `dropped_*` of [`TraceStats`](crate::TraceStats), without that prefix |
    /// | `tracing_profiling.collector.cpu_time` | `s` | | [`SamplingStats::collector_cpu_ns`](crate::SamplingStats::collector_cpu_ns) |
    /// | `tracing_profiling.threads.sampled` (gauge) | `{thread}` | | [`ThreadStats::sampled`](crate::ThreadStats::sampled) |
    /// | `tracing_profiling.threads.unsampled` (gauge) | `{thread}` | | [`ThreadStats::unsampled`](crate::ThreadStats::unsampled) |
    /// | `tracing_profiling.traces.held` (gauge) | `{span}` | | [`TraceStats::held`](crate::TraceStats::held) |
    ///
    /// This does not keep the layer alive. After the layer is dropped, nothing is reported.
    ///
    /// ```
    /// use tracing_profiling::ProfilingLayer;
    ///
    /// # fn main() -> Result<(), tracing_profiling::Error> {
    /// let profiling = ProfilingLayer::from_env()?;
    /// profiling.handle().register_metrics(&opentelemetry::global::meter("tracing-profiling"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn register_metrics(&self, meter: &Meter) {
        macro_rules! register {
            ($instruments:ident, $kind:ident) => {
                for instrument in $instruments {
                    let (handle, numbers) = (self.clone(), instrument.numbers);
                    let builder = meter.$kind(instrument.name).with_unit(instrument.unit);
                    let builder = builder.with_description(instrument.about);
                    let builder = builder.with_callback(move |observer| {
                        handle.observe(numbers, |value, with| observer.observe(value, with));
                    });
                    builder.build();
                }
            };
        }
        register!(COUNTERS, u64_observable_counter);
        register!(GAUGES, u64_observable_gauge);
        let handle = self.clone();
        meter
            .f64_observable_counter("tracing_profiling.collector.cpu_time")
            .with_unit("s")
            .with_description("CPU time spent on reading and unwinding samples")
            .with_callback(move |observer| {
                let numbers = Numbers::One(|stats| stats.sampling.collector_cpu_ns);
                handle.observe(numbers, |ns, with| observer.observe(ns as f64 / 1e9, with));
            })
            .build();
    }

    /// Registers what all requests of each route take as OpenTelemetry counters, from now on. A request is a profiled span
    /// that is inside no other, or inside one that is open for long, such as a connection; its route is its name and, as
    /// attributes, those of its shown fields that name a route. Beyond 1,000 routes, requests of others count as one, with
    /// `otel.metric.overflow`. Call this once per meter. Needs the feature `metrics`. Each request then costs up to a
    /// microsecond more.
    ///
    /// | metric | unit | what it is |
    /// |---|---|---|
    /// | `tracing_profiling.route.requests` | `{request}` | those that have closed |
    /// | `tracing_profiling.route.wall`, `.on_cpu`, `.off_cpu`, `.await`, `.scheduling_delay` | `s` | the sum of that [`Measure`](crate::Measure) |
    /// | `tracing_profiling.route.allocated` | `By` | the same, if the program has a [`ProfilingAllocator`](crate::ProfilingAllocator) |
    pub fn register_route_metrics(&self, meter: &Meter) {
        self.with_references(|references| references.totals.turn_on());
        let handle = self.clone();
        meter
            .u64_observable_counter("tracing_profiling.route.requests")
            .with_unit("{request}")
            .with_description("Requests that have closed")
            .with_callback(move |observer| {
                for total in handle.route_totals() {
                    observer.observe(total.requests, &attributes_of(&total));
                }
            })
            .build();
        for (place, measure) in SUMMED.into_iter().enumerate() {
            macro_rules! register {
                ($kind:ident, $unit:literal, $sum:expr) => {{
                    let (handle, sum) = (self.clone(), $sum);
                    let builder = meter
                        .$kind(format!("tracing_profiling.route.{}", measure.name()))
                        .with_unit($unit)
                        .with_description(format!(
                            "The sum over all requests: {}",
                            measure.row().words
                        ));
                    let builder = builder.with_callback(move |observer| {
                        for total in handle.route_totals() {
                            let total_sum = total.sums.get(place).copied().unwrap_or(0);
                            observer.observe(sum(total_sum), &attributes_of(&total));
                        }
                    });
                    builder.build();
                }};
            }
            match measure.unit() {
                Unit::Nanoseconds => register!(f64_observable_counter, "s", |ns| ns as f64 / 1e9),
                _ => register!(u64_observable_counter, "By", |bytes: u64| bytes),
            }
        }
    }

    /// Also begins to add them up, if the layer's threads were started since.
    fn route_totals(&self) -> Vec<RouteTotal> {
        let totals = self.with_references(|references| {
            references.totals.turn_on();
            references.totals.read()
        });
        totals.unwrap_or_default()
    }

    /// Passes the current numbers to `report`, unless the layer is dropped: counters that fall to 0 look like a restart.
    fn observe(&self, numbers: Numbers, report: impl Fn(u64, &[KeyValue])) {
        if !self.has_layer() {
            return;
        }
        let stats = self.stats();
        match numbers {
            Numbers::One(number) => report(number(&stats), &[]),
            Numbers::Each(attribute, numbers) => {
                for (value, number) in numbers(&stats) {
                    report(number, &[KeyValue::new(attribute, value)]);
                }
            }
        }
    }
}

fn attributes_of(total: &RouteTotal) -> Vec<KeyValue> {
    match &total.route {
        Some(route) => {
            let (span, fields) = &**route;
            let fields = fields.iter().map(|(name, value)| KeyValue::new(*name, value.clone()));
            [KeyValue::new("span.name", span.clone())].into_iter().chain(fields).collect()
        }
        None => vec![KeyValue::new("otel.metric.overflow", true)],
    }
}

/// The number of lost samples by cause. All counters of samples that are not excluded here count, so that new ones do.
fn samples_lost(stats: &Stats) -> Vec<(&'static str, u64)> {
    const NOT_LOST: [&str; 2] = ["taken", "outside_spans"];
    let samples = with_prefix(stats, "samples.").filter(|(name, _)| !NOT_LOST.contains(name));
    samples.map(|(name, count)| (name.strip_prefix("dropped_").unwrap_or(name), count)).collect()
}

/// The counters with this prefix, by the rest of their names.
fn with_prefix(
    stats: &Stats,
    prefix: &'static str,
) -> impl Iterator<Item = (&'static str, u64)> + use<> {
    stats.iter().filter_map(move |(name, value)| Some((name.strip_prefix(prefix)?, value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_of_lost_samples_is_a_cause() {
        let lost: Vec<_> =
            samples_lost(&Stats::default()).iter().map(|(cause, _)| *cause).collect();
        for (name, _) in Stats::default().iter() {
            if let Some(cause) = name.strip_prefix("samples.dropped_") {
                assert!(lost.contains(&cause), "{name}");
            }
        }
        assert!(lost.contains(&"downsampled"));
        assert!(!lost.contains(&"taken"));
        assert!(lost.len() > 8, "{lost:?}");
    }
}

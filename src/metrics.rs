//! The counters in `Stats` as OpenTelemetry metrics.

use std::borrow::Cow;

use opentelemetry::KeyValue;
use opentelemetry::metrics::Meter;

use crate::facts::{Reason, Unit};
use crate::handle::Handle;
use crate::references::{RouteTotal, SUMMED};
use crate::stats::Stats;

/// The values of a metric, each with its attributes.
type Numbers = Vec<(u64, Vec<KeyValue>)>;

/// The name, unit and description of a metric, and its values.
type Instrument = (&'static str, &'static str, &'static str, fn(&Stats) -> Numbers);

macro_rules! instruments {
    ($($name:literal, $unit:literal, $about:literal, $numbers:expr;)*) => {
        &[$(($name, $unit, $about, $numbers)),*]
    };
}

const COUNTERS: &[Instrument] = instruments! {
    "spans.seen", "{span}", "Created spans that a rule matches", |stats| one(stats.spans.seen);
    "spans.kept", "{span}", "Spans that were kept; one that was kept for several reasons counts for each",
        |stats| each("reason", Reason::all().map(|reason| (reason.as_str(), stats.kept_for(reason))));
    "samples.taken", "{sample}", "Samples that fell in a profiled span and were unwound",
        |stats| one(stats.samples.taken);
    "samples.lost", "{sample}", "Samples that were lost or left out", |stats| each("cause", samples_lost(stats));
    "spans.allocated", "By", "Bytes that closed spans have allocated, if the program has a `ProfilingAllocator`",
        |stats| one(stats.allocations.allocated_bytes);
    "spans.freed", "By", "Bytes that closed spans have freed", |stats| one(stats.allocations.freed_bytes);
    "spans.allocations", "{allocation}", "Allocations of closed spans", |stats| one(stats.allocations.allocations);
    "spans.frees", "{free}", "Frees of closed spans", |stats| one(stats.allocations.frees);
    "profiles.exported", "{profile}", "Profiles that the exporter accepted", |stats| one(stats.profiles.exported);
    "profiles.dropped", "{profile}", "Profiles that could not be exported",
        |stats| each("cause", with_prefix(stats, "profiles.dropped_"));
    "traces.passed", "{span}", "Spans that each `KeptTraces` of the process passed on", |stats| one(stats.traces.passed);
    "traces.dropped", "{span}", "Spans that they dropped, most of them of ordinary traces", |stats| {
        let ordinary = ("ordinary", stats.traces.dropped);
        each("cause", with_prefix(stats, "traces.dropped_").chain([ordinary]))
    };
    "collector.cpu_time", "s", "CPU time spent on reading and unwinding samples",
        |stats| one(stats.sampling.collector_cpu_ns);
};

const GAUGES: &[Instrument] = instruments! {
    "threads.sampled", "{thread}", "Threads that are currently sampled", |stats| one(stats.threads.sampled);
    "threads.unsampled", "{thread}", "Threads in old spans that could not be sampled",
        |stats| one(stats.threads.unsampled);
    "traces.held", "{span}", "Spans that each `KeptTraces` of the process currently holds",
        |stats| one(stats.traces.held);
};

fn one(number: u64) -> Numbers {
    vec![(number, Vec::new())]
}

/// One value for each value of an attribute.
fn each(
    attribute: &'static str,
    numbers: impl IntoIterator<Item = (&'static str, u64)>,
) -> Numbers {
    let with = |(value, number)| (number, vec![KeyValue::new(attribute, value)]);
    numbers.into_iter().map(with).collect()
}

/// A metric whose values `read` returns; those in seconds, as nanoseconds.
fn register(
    meter: &Meter,
    (name, unit, is_gauge): (&str, &'static str, bool),
    about: impl Into<Cow<'static, str>>,
    read: impl Fn() -> Numbers + Send + Sync + 'static,
) {
    let name = format!("tracing_profiling.{name}");
    macro_rules! build {
        ($kind:ident, $value:expr) => {{
            let (value, builder) = ($value, meter.$kind(name).with_unit(unit));
            let builder = builder.with_description(about).with_callback(move |observer| {
                let numbers = read().into_iter();
                numbers.for_each(|(number, with)| observer.observe(value(number), &with));
            });
            builder.build();
        }};
    }
    match unit {
        "s" => build!(f64_observable_counter, |ns: u64| ns as f64 / 1e9),
        _ if is_gauge => build!(u64_observable_gauge, |number: u64| number),
        _ => build!(u64_observable_counter, |number: u64| number),
    }
}

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
        for (instruments, is_gauge) in [(COUNTERS, false), (GAUGES, true)] {
            for &(name, unit, about, numbers) in instruments {
                let handle = self.clone();
                // Not once the layer is dropped: counters that fall to 0 look like a restart.
                let stats = move || handle.has_layer().then(|| handle.stats());
                let read = move || stats().as_ref().map(numbers).unwrap_or_default();
                register(meter, (name, unit, is_gauge), about, read);
            }
        }
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
        let requests = move || handle.route_totals(|total| total.requests);
        let about = "Requests that have closed";
        register(meter, ("route.requests", "{request}", false), about, requests);
        for (place, measure) in SUMMED.into_iter().enumerate() {
            let handle = self.clone();
            let sum = move |total: &RouteTotal| total.sums.get(place).copied().unwrap_or(0);
            let name = format!("route.{}", measure.name());
            let unit = if measure.unit() == Unit::Nanoseconds { "s" } else { "By" };
            let about = format!("The sum over all requests: {}", measure.row().words);
            register(meter, (&name, unit, false), about, move || handle.route_totals(sum));
        }
    }

    /// Also begins to add them up, if the layer's threads were started since.
    fn route_totals(&self, number: impl Fn(&RouteTotal) -> u64) -> Numbers {
        let totals = self.with_references(|references| {
            references.totals.turn_on();
            references.totals.read()
        });
        let totals = totals.unwrap_or_default();
        totals.iter().map(|total| (number(total), attributes_of(total))).collect()
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

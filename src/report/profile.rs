//! Describes kept spans in the title, notes and attributes of a profile, and the collector's own log events.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Duration;

use tracing::Metadata;

use super::format::{MeasuredValue, Ns, is_vague, nanoseconds};
use crate::facts::{Facts, Measure};
use crate::keep::{Kept, KeptSpan, ProfileGroup};
use crate::log::{LogEvent, LogKind};
use crate::profile::{
    Attribute, Awaits, Hotspot, Profile, Resource, SampleKind, Symbolized, Value, WaitSite, Waits,
    capped,
};
use crate::sinks::Losses;
use crate::span::SpanKey;
use crate::sys::FilteredSyscall;
use crate::text::ShortBytes;

pub(crate) const WORTH_REPORTING: u64 = 1_000_000;
/// All waits of this length are captured, and some shorter ones.
pub(crate) const WAIT_NS: u64 = 10_000_000;
const OWN_ATTRIBUTES: &str = "profile.";
/// How many spans have a note of their own above the picture, or a name in a log line.
const MOST_NOTED: usize = 4;

/// Sets a profile's name, title, notes and attributes. `topmost` has the kept spans that are inside no other.
pub(crate) fn describe(
    profile: &mut Profile,
    group: &ProfileGroup,
    topmost: &[SpanKey],
    losses: &Losses,
) {
    let kept = outermost_first(&group.kept);
    let Some(first) = kept.first() else { return };
    profile.name = capped(&first.facts.name()).into_owned();
    profile.title = match topmost.len().saturating_sub(1) {
        0 => format!("{} · kept: {}", profile.name, first.reasons()),
        beside => format!("{} and {beside} more · kept: {}", profile.name, first.reasons()),
    };
    if first.is_open() {
        profile.title.push_str(" · still open");
    }
    if let Some(deadlock) = kept.iter().find_map(|span| span.facts.deadlock.as_ref()) {
        profile.title.push_str(" · deadlock");
        profile.notes.push(capped(deadlock).into_owned());
    }
    for measure in Measure::ALL {
        if let Some(value) = measure.titled(&first.facts) {
            _ = write!(
                profile.title,
                " · {} {}",
                MeasuredValue(*measure, value),
                measure.row().words
            );
        }
    }
    if *losses != Losses::default() {
        _ = write!(profile.title, " · {}", losses_in_words(losses));
    }
    let of_topmost = kept.iter().filter(|span| topmost.contains(&span.key));
    let is_known = of_topmost.clone().all(|span| !span.times().is_cpu_time_unknown);
    let on_cpu_ns: u64 = of_topmost.clone().map(|span| span.times().subtree_on_cpu_ns).sum();
    for KeptSpan { facts, .. } in kept.iter().take(MOST_NOTED) {
        profile.notes.push(format!("{}: {}", capped(&facts.name()), split(facts)));
    }
    if kept.len() > MOST_NOTED {
        profile.notes.push(format!("and {} more kept spans", kept.len() - MOST_NOTED));
    }
    let count = profile.sample_count();
    let s = if count == 1 { "" } else { "s" };
    let mut samples = format!("{count} sample{s}");
    match profile.uniform_weight_ns() {
        Some(weight_ns) => _ = write!(samples, ", one every {} of CPU time", Ns(weight_ns)),
        None if count > 0 => samples.push_str(", taken at more than one rate"),
        None => {}
    }
    let error_ns = of_topmost.clone().map(|span| span.times().subtree_on_cpu_error_ns).sum();
    let known_ns = (is_known && !is_vague(on_cpu_ns, error_ns)).then_some(on_cpu_ns);
    let unsampled = |span: &KeptSpan| span.facts.get(Measure::Unsampled).unwrap_or(0);
    let unsampled_ns = of_topmost.map(unsampled).sum();
    let coverage = coverage(profile.total(SampleKind::OnCpu), known_ns, unsampled_ns, losses);
    _ = write!(samples, ": {coverage}");
    profile.notes.push(samples);
    profile.losses = losses.all().map(|(_, count, what)| counted(count, what)).collect();
    profile.attributes = attributes(first, losses);
}

/// The machine that the process ran on: `machine: linux 6.1.0 amd64 AMD EPYC, 2 CPUs, memory limit 512 MB`.
pub(crate) fn machine(resource: &Resource) -> Option<String> {
    let value = |key| resource.get(key).map(ToString::to_string);
    let words = ["os.type", "os.version", "host.arch", "host.cpu.model.name"];
    let mut machine = words.into_iter().filter_map(value).collect::<Vec<_>>().join(" ");
    let number = |key| resource.get(key).and_then(|value| value.to_string().parse().ok());
    if let Some(cpus) = number("profile.machine.cpus") {
        _ = write!(machine, ", {cpus} CPUs");
    }
    if let Some(bytes) = number("profile.machine.memory_bytes") {
        _ = write!(machine, ", memory limit {}", ShortBytes(bytes));
    }
    (!machine.is_empty()).then(|| format!("machine: {machine}"))
}

/// Adds what was lost in symbolization.
pub(crate) fn describe_symbolized(symbolized: &mut Symbolized) {
    let Symbolized { profile, downsampled, shortened } = symbolized;
    for (key, count, what) in [
        ("profile.samples_downsampled", *downsampled, "samples downsampled to fit into memory"),
        ("profile.stacks_shortened", *shortened, "stacks without the deeper callers"),
    ] {
        if count == 0 {
            continue;
        }
        let lost = counted(count as u64, what);
        _ = write!(profile.title, " · {lost}");
        profile.losses.push(lost);
        let more = i64::try_from(count).unwrap_or(i64::MAX);
        let known = profile.attributes.iter_mut().find(|attribute| attribute.key == key);
        match known.map(|attribute| &mut attribute.value) {
            Some(Value::Int(count)) => *count = count.saturating_add(more),
            _ => profile.attributes.push(Attribute { key, value: Value::Int(more) }),
        }
    }
}

/// Adds for how long the threads of a symbolized profile waited, and where they blocked an async executor.
pub(crate) fn describe_waits(profile: &mut Profile, waits: &Waits) {
    if waits.count == 0 {
        return;
    }
    let ns = |time: Duration| Value::Int(i64::try_from(time.as_nanos()).unwrap_or(i64::MAX));
    profile.attributes.push(Attribute { key: "profile.waits_ns", value: ns(waits.total) });
    if let Some(wait_site) = &waits.in_async {
        let blocked = Ns(nanoseconds(waits.in_async_total));
        profile
            .notes
            .push(format!("blocks an async executor: {blocked} in {}", at_site(wait_site)));
        let (key, value) = ("profile.blocked_in_async_ns", ns(waits.in_async_total));
        profile.attributes.push(Attribute { key, value });
    }
}

/// Where a thread waited, and for what.
pub(crate) fn at_site(WaitSite { function, location: place, call, .. }: &WaitSite) -> String {
    let place = if place.is_empty() { String::new() } else { format!(" ({place})") };
    format!("{function}{place} {call}")
}

/// Precedes the awaits of a profile. They are those of all of its spans, and not comparable with one span's times.
pub(crate) const AWAITS_OF_ALL: &str = "awaits of all spans";

/// What was awaited, where most of it was, and the scheduling delay; the longer of both first.
pub(crate) fn awaited(
    Awaits { total, delay, delayed_by, .. }: &Awaits,
    often: &str,
    hotspot: Option<&Hotspot>,
) -> String {
    let mut parts = Vec::new();
    if !total.is_zero() {
        let place = hotspot.map_or_else(String::new, |hotspot| format!(", {hotspot}"));
        parts.push((total, format!("{} awaiting{often}{place}", Ns(nanoseconds(*total)))));
    }
    // Not `0 %`.
    if *delay > *total / 200 {
        let behind =
            delayed_by.as_ref().map_or_else(String::new, |span| format!(" behind `{span}`"));
        parts.push((delay, format!("{} scheduling delay{behind}", Ns(nanoseconds(*delay)))));
    }
    parts.sort_by_key(|(time, _)| Reverse(*time));
    parts.into_iter().map(|(_, part)| part).collect::<Vec<_>>().join("; ")
}

/// `1 sample lost`, of `samples lost`.
fn counted(count: u64, what: &str) -> String {
    let (things, how) = what.split_once("s ").unwrap_or((what, ""));
    format!("{count} {things}{} {how}", if count == 1 { "" } else { "s" })
}

fn losses_in_words(losses: &Losses) -> String {
    let list = losses.all().map(|(_, count, what)| counted(count, what));
    match list.collect::<Vec<_>>() {
        none if none.is_empty() => "nothing lost".to_owned(),
        list => list.join(", "),
    }
}

/// How much of the on-CPU time the samples represent. Time may be missing without a lost sample: the thread had just
/// started, or was switched out before its next sample.
fn coverage(weight_ns: u64, on_cpu_ns: Option<u64>, unsampled_ns: u64, losses: &Losses) -> String {
    let weight = Ns(weight_ns);
    let Some(on_cpu_ns) = on_cpu_ns else {
        return format!("{weight} on-CPU; {}", losses_in_words(losses));
    };
    let share = 100.0 * weight_ns as f64 / on_cpu_ns.max(1) as f64;
    let missing_ns = on_cpu_ns.saturating_sub(weight_ns).saturating_sub(unsampled_ns);
    let is_nothing_lost = *losses == Losses::default();
    let losses = match is_nothing_lost && missing_ns > WORTH_REPORTING.max(on_cpu_ns / 10) {
        true => format!("no sample lost, and none was taken in the other {}", Ns(missing_ns)),
        false => losses_in_words(losses),
    };
    // More is possible, as a sample represents the time before it.
    let share = if weight_ns > on_cpu_ns { String::new() } else { format!(" ({share:.0} %)") };
    let young = match unsampled_ns >= WORTH_REPORTING {
        true => format!("{} of it not sampled; ", Ns(unsampled_ns)),
        false => String::new(),
    };
    format!("{weight} of {} on-CPU{share}; {young}{losses}", Ns(on_cpu_ns))
}

fn attributes(span: &KeptSpan, losses: &Losses) -> Vec<Attribute> {
    let facts = &span.facts;
    let (reasons, name) = (facts.reasons.to_string(), capped(&facts.span).into_owned());
    let mut attributes = vec![
        Attribute { key: "profile.reason", value: reasons.into() },
        Attribute { key: "profile.span.name", value: name.into() },
    ];
    attributes.extend(Measure::major().filter_map(|measure| {
        let value = Value::of_number(measure.notable(facts)?);
        Some(Attribute { key: measure.attribute(), value })
    }));
    // No key may be there twice, and a field of the program could have the name of an attribute of the layer.
    let shown = facts.fields.iter().filter(|(key, _)| !key.starts_with(OWN_ATTRIBUTES));
    let shown = shown.map(|(key, value)| Attribute { key, value: Value::String(value.clone()) });
    attributes.extend(shown);
    let losses = losses.all().filter(|(key, ..)| !key.is_empty());
    attributes
        .extend(losses.map(|(key, count, _)| Attribute { key, value: Value::of_number(count) }));
    if span.is_open() {
        attributes.push(Attribute { key: "profile.span.open", value: Value::Bool(true) });
    }
    if let Some(is_sampled) = span.facts.trace.map(|ids| ids.is_sampled) {
        let value = Value::Bool(is_sampled);
        attributes.push(Attribute { key: "profile.trace_sampled", value });
    }
    attributes
}

/// Sorts spans by start, and the longest first. Those about which the profile says nothing come last: a span that fails
/// at once and a slow one can have the same profile.
pub(crate) fn outermost_first(kept: &[KeptSpan]) -> Vec<KeptSpan> {
    let mut kept = kept.to_vec();
    let is_explained =
        |span: &KeptSpan| span.samples.total() > 0 || span.times().off_cpu_ns >= WAIT_NS;
    kept.sort_by_key(|span| (!is_explained(span), span.opened_ns, u64::MAX - span.times().wall_ns));
    kept
}

pub(crate) fn unexported(kept: &[KeptSpan]) -> Kept {
    let mut spans = outermost_first(kept);
    for span in &mut spans {
        span.facts.is_topmost = !kept.iter().any(|other| span.around.contains(&other.key));
    }
    Kept { spans, ..Kept::default() }
}

pub(crate) fn unreported(count: u64) -> LogEvent {
    let (spans, have) = if count == 1 { ("span", "has") } else { ("spans", "have") };
    let message = format!(
        "kept {count} more {spans} without a profile, which {have} no log line: too many at once (see \
         `stats.spans.kept_unreported`)"
    );
    LogEvent { count: Some(count), ..LogEvent::info(LogKind::Unreported, message) }
}

pub(crate) const NOT_COUNTED: &str = "a rule has `alloc>` or `allocs>`, but allocations are not counted, so it keeps \
    nothing for them: add `#[global_allocator] static ALLOCATOR: tracing_profiling::ProfilingAllocator = \
    tracing_profiling::ProfilingAllocator::system();` to the program, or remove the condition from TRACING_PROFILING";

pub(crate) const PERCENTILES_SHARED: &str = "spans of one name have too many routes for a percentile of each, so some are \
    compared with all of that name: show fewer values in TRACING_PROFILING_SPAN_FIELDS, such as `http.route`";

pub(crate) const HEAP_NOT_TRACKED: &str = "TRACING_PROFILING_HEAP is on, but the live heap cannot be tracked: add \
    `#[global_allocator] static ALLOCATOR: tracing_profiling::ProfilingAllocator = \
    tracing_profiling::ProfilingAllocator::system();` to the program";

pub(crate) const TOO_DEEP: &str = "some spans have hundreds of others around them, and are profiled only in part (see \
    `stats.spans.declined_too_deep` and `ancestors_left_out`): is a guard of `Span::enter` held over an `.await`?";

pub(crate) const NOTHING_SEEN: &str = "no span that a rule matches has been created yet. If there were requests: a \
    server of axum or tonic needs `.layer(tracing_profiling::tower::AwaitsLayer::new())` (feature `tower`), as \
    tower-http's `TraceLayer` creates its spans at level DEBUG, other code `#[tracing::instrument]`; an `EnvFilter` that \
    is not attached to the layer that prints hides spans from all layers; or TRACING_PROFILING names other targets";

/// The log event about spans that no other layer wants, with rules that name the first one. A warning if there are no
/// others.
pub(crate) fn declined(
    (spans, rules): &(Vec<&Metadata<'_>>, String),
    is_nothing_seen: bool,
) -> Option<LogEvent> {
    let name =
        |span: &&Metadata<'_>| format!("`{}` ({}, {})", span.name(), span.level(), span.target());
    let named: Vec<_> = spans.iter().take(MOST_NOTED).map(name).collect();
    let more = match spans.len().saturating_sub(MOST_NOTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let message = format!(
        "not profiled, because the filters of all other layers hide them: {}{more}. Let a filter have them, or name them \
         in a directive: TRACING_PROFILING='{rules}'",
        named.join(", ")
    );
    let event = match is_nothing_seen {
        true => LogEvent::warning(LogKind::Declined, message),
        false => LogEvent::info(LogKind::Declined, message),
    };
    let count = u64::try_from(spans.len()).ok().filter(|count| *count > 0);
    count.map(|count| LogEvent { count: Some(count), ..event })
}

pub(crate) const LOST_SIGNAL: &str = "the program has installed a handler for the signal of the profiler's \
    timers: they use another signal from now on";

pub(crate) const SMALL_SIGNAL_STACK: &str = "threads whose alternate signal stack (`sigaltstack`) is too small for a \
    timer's signal are not sampled: give it 16 KiB, or allow perf";

pub(crate) fn lowered_rate(percent: u32, times: f64) -> LogEvent {
    let message = format!(
        "reading samples took more than {percent} % of a core: the sampling rate is reduced to {:.0} % \
         until it takes less, and profiles made in the meantime state that \
         (TRACING_PROFILING_CPU_BUDGET sets the percentage)",
        (100.0 / times).max(1.0)
    );
    LogEvent {
        variable: Some("TRACING_PROFILING_CPU_BUDGET".into()),
        limit: Some(percent.into()),
        ..LogEvent::warning(LogKind::Throttled, message)
    }
}

/// The log event of a profile with many stacks that are not complete, because only a part of the memory was copied.
pub(crate) fn cut_stacks(losses: &Losses, samples: usize, stack_bytes: usize) -> Option<LogEvent> {
    const FEW: usize = 10;
    let is_usual = losses.cut >= FEW as u64 && losses.cut > samples as u64 / 2;
    is_usual.then(|| {
        let message = format!(
            "{} of {samples} stacks were longer than the {stack_bytes} bytes that are copied of each, so they lack \
             their outermost callers, not the functions that ran: TRACING_PROFILING_STACK_BYTES can be up to 65448",
            losses.cut
        );
        LogEvent {
            variable: Some("TRACING_PROFILING_STACK_BYTES".into()),
            count: Some(losses.cut),
            limit: u64::try_from(stack_bytes).ok(),
            ..LogEvent::info(LogKind::StacksCut, message)
        }
    })
}

/// The log event of system calls at which a seccomp filter kills the process, if there are more than before.
pub(crate) fn forbidden_calls(known: &mut usize) -> Option<LogEvent> {
    let calls: Vec<_> = FilteredSyscall::forbidden().collect();
    if std::mem::replace(known, calls.len()) >= calls.len() {
        return None;
    }
    let names: Vec<_> = calls.iter().map(|call| call.name()).collect();
    let missing: BTreeSet<_> = calls.iter().map(|call| without(*call)).collect();
    let message = format!(
        "a seccomp filter ends this process at {}, so the profiler does not call it and lacks: {}; allow it, or \
         let the filter refuse it (`SystemCallFilter=` and `SystemCallErrorNumber=EPERM` of systemd)",
        names.join(", "),
        missing.into_iter().collect::<Vec<_>>().join(", "),
    );
    let event = LogEvent::warning(LogKind::CallsForbidden, message);
    Some(LogEvent { value: Some(names.join(",")), ..event })
}

fn without(call: FilteredSyscall) -> &'static str {
    match call {
        FilteredSyscall::PerfEventOpen => "the perf source",
        FilteredSyscall::TimerCreate
        | FilteredSyscall::TimerSettime
        | FilteredSyscall::TimerDelete => "the timer source",
        FilteredSyscall::ProcessVmReadv => "the stacks of waits, unless /proc/self/mem can be read",
        FilteredSyscall::ClockGettime => "on-CPU and off-CPU times, the CPU budget",
        FilteredSyscall::Getrusage => "page faults and context switches",
        FilteredSyscall::MemfdCreate => "separate files of debug information",
    }
}

/// Wall time and its parts, and what belongs to it.
fn split(facts: &Facts) -> String {
    let beside = facts.beside().into_iter().map(|text| format!("; {text}"));
    facts.split().to_string() + &beside.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::TimeBreakdown;
    use crate::profile::Hotspots;

    fn split(times: &TimeBreakdown) -> String {
        super::split(&Facts { times: *times, ..Facts::default() })
    }

    fn kept(times: TimeBreakdown) -> KeptSpan {
        let mut span = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 0);
        span.facts.times = times;
        span
    }

    #[test]
    fn a_span_without_a_profile_is_topmost_if_it_is_inside_no_kept_one() {
        let span = |number, around: &[SpanKey]| {
            let key = SpanKey::new(number).unwrap();
            KeptSpan { around: around.to_vec(), ..KeptSpan::for_test(key, SpanKey::MIN, 0) }
        };
        let inside = [3, 1].map(|number| SpanKey::new(number).unwrap());
        let kept = unexported(&[span(4, &inside), span(1, &[]), span(2, &[SpanKey::MAX])]);
        let topmost = kept.spans.iter().filter(|span| span.facts.is_topmost);
        assert_eq!(topmost.map(|span| span.key.get()).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn the_error_of_on_cpu_time_is_stated() {
        let account = |on_cpu_error_ns| TimeBreakdown {
            wall_ns: 9_000,
            on_cpu_ns: 9_000,
            on_cpu_error_ns,
            ..TimeBreakdown::default()
        };
        let whole = "wall 9.00 µs = 9.00 µs on-CPU (100 %)";
        assert_eq!(
            split(&account(7_000)),
            format!("{whole}; 7.00 µs possible error of on-CPU time")
        );
        assert_eq!(split(&account(80)), whole);
    }

    #[test]
    fn on_cpu_time_of_spans_on_other_threads_is_stated() {
        let on_cpu_ns = 1_000_000;
        let account = |more_ns| TimeBreakdown {
            wall_ns: on_cpu_ns,
            on_cpu_ns,
            subtree_on_cpu_ns: on_cpu_ns + more_ns,
            ..TimeBreakdown::default()
        };
        let whole = "wall 1.00 ms = 1.00 ms on-CPU (100 %)";
        let inside = "151 ms on-CPU with child spans";
        assert_eq!(split(&account(150_000_000)), format!("{whole}; {inside}"));
        assert_eq!(split(&account(1_999)), whole);
    }

    #[test]
    fn a_field_with_the_name_of_an_attribute_is_left_out() {
        let mut span = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 0);
        span.facts.fields = vec![("profile.reason", "x".into()), ("method", "GET".into())];
        let attributes = attributes(&span, &Losses::default());
        let keys: Vec<_> = attributes.iter().map(|attribute| attribute.key).collect();
        let distinct: BTreeSet<_> = keys.iter().collect();
        assert!(distinct.len() == keys.len() && keys.contains(&"method"), "{keys:?}");
    }

    #[test]
    fn on_cpu_time_without_samples_is_stated() {
        let none = Losses::default();
        let text = |weight_ns, losses| coverage(weight_ns, Some(264_000_000), 0, losses);
        assert_eq!(
            text(84_700_000, &none),
            "84.7 ms of 264 ms on-CPU (32 %); no sample lost, and none was taken in the other 179 ms"
        );
        assert_eq!(text(250_000_000, &none), "250 ms of 264 ms on-CPU (95 %); nothing lost");
        assert_eq!(text(300_000_000, &none), "300 ms of 264 ms on-CPU; nothing lost");
        // Too little for a sample.
        let mostly_waiting = coverage(0, Some(301_000), 0, &none);
        assert_eq!(mostly_waiting, "0 ns of 301 µs on-CPU (0 %); nothing lost");
        assert_eq!(coverage(84_700_000, None, 0, &none), "84.7 ms on-CPU; nothing lost");
        let downsampled = Losses { downsampled: 3, ..none };
        assert_eq!(
            text(84_700_000, &downsampled),
            "84.7 ms of 264 ms on-CPU (32 %); 3 samples downsampled"
        );
        let young = coverage(250_000_000, Some(264_000_000), 12_500_000, &none);
        let expected = "250 ms of 264 ms on-CPU (95 %); 12.5 ms of it not sampled; nothing lost";
        assert_eq!(young, expected);
    }

    #[test]
    fn idle_time_is_split_if_a_part_of_it_is_explained() {
        let text = |await_ms: u64, delay_ms: u64| {
            let account = TimeBreakdown {
                wall_ns: 1_250_000_000,
                on_cpu_ns: 50_000_000,
                idle_ns: 1_200_000_000,
                await_ns: await_ms * 1_000_000,
                delay_ns: delay_ms * 1_000_000,
                ..TimeBreakdown::default()
            };
            let text = split(&account);
            text.strip_prefix("wall 1.25 s = 50.0 ms on-CPU (4 %) + ").unwrap().to_owned()
        };
        assert_eq!(text(0, 0), "1.20 s unexplained idle (96 %)");
        assert_eq!(text(1_180, 20), "1.18 s await (94 %) + 20.0 ms scheduling delay (2 %)");
        assert_eq!(text(1_200, 0), "1.20 s await (96 %)");
        assert_eq!(
            text(1_000, 20),
            "1.00 s await (80 %) + 20.0 ms scheduling delay (2 %) + 180 ms unexplained idle (14 %)"
        );
        let account = TimeBreakdown { idle_ns: 9, await_ns: 7, ..TimeBreakdown::default() };
        let attributes = attributes(&kept(account), &Losses::default());
        let value = |key| attributes.iter().find(|one| one.key == key).map(|one| &one.value);
        assert_eq!(value("profile.await_ns"), Some(&Value::Int(7)));
        assert_eq!(value("profile.scheduling_delay_ns"), None);
    }

    #[test]
    fn time_in_other_spans_on_the_stack_is_a_part_of_its_own() {
        let account = TimeBreakdown {
            wall_ns: 601_000_000,
            on_cpu_ns: 50_000_000,
            idle_ns: 1_000_000,
            other_spans_ns: 550_000_000,
            ..TimeBreakdown::default()
        };
        let rest = "1.00 ms unexplained idle (0 %) + 550 ms other spans on its stack (92 %)";
        assert_eq!(split(&account), format!("wall 601 ms = 50.0 ms on-CPU (8 %) + {rest}"));
        let unknown = split(&account.without_cpu_time());
        assert_eq!(unknown, format!("wall 601 ms = {rest} + 50.0 ms not measured (8 %)"));
        let attributes = attributes(&kept(account), &Losses::default());
        let other = attributes.iter().find(|one| one.key == "profile.other_spans_ns").unwrap();
        assert_eq!(other.value, Value::Int(550_000_000));
    }

    #[test]
    fn a_text_says_what_was_awaited() {
        let ms = Duration::from_millis;
        let text = |awaits: &Awaits, share: Option<f64>| {
            let hotspots = share.map(Hotspots::of_awaits_for_test).unwrap_or_default();
            awaited(awaits, "", hotspots.of(SampleKind::Await))
        };
        let awaits = Awaits::for_test(ms(1_180));
        let place = "shop::fetch (src/upstream.rs:41) at tokio::time::sleep";
        assert_eq!(text(&awaits, Some(1.0)), format!("1.18 s awaiting, 100 % in {place}"));
        let mut awaits = Awaits { delay: ms(20), ..awaits };
        let part = format!("1.18 s awaiting, 25 % in {place}");
        assert_eq!(text(&awaits, Some(0.25)), format!("{part}; 20.0 ms scheduling delay"));
        awaits.delayed_by = Some("report".to_owned());
        let part = format!("{part}; 20.0 ms scheduling delay behind `report`");
        assert_eq!(text(&awaits, Some(0.25)), part);
        awaits.delay = Duration::ZERO;
        assert_eq!(text(&awaits, None), "1.18 s awaiting");
        let delay = Awaits { delay: ms(20), ..Awaits::default() };
        assert_eq!(text(&delay, None), "20.0 ms scheduling delay");
    }

    #[test]
    fn unknown_cpu_time_is_neither_zero_nor_all() {
        let account =
            TimeBreakdown { wall_ns: 400_000_000, idle_ns: 1_000, ..TimeBreakdown::default() };
        let account = TimeBreakdown { on_cpu_ns: 400_000_000, ..account }.without_cpu_time();
        let text = "wall 400 ms = 400 ms not measured (100 %)";
        assert_eq!(split(&account), text);
    }

    #[test]
    fn a_line_says_what_to_do_about_cut_stacks() {
        let line = |cut, samples| cut_stacks(&Losses { cut, ..Losses::default() }, samples, 32_768);
        assert_eq!([line(0, 400), line(200, 400), line(9, 9)], [const { None }; 3]);
        let event = line(201, 400).unwrap();
        assert_eq!((event.count, event.limit), (Some(201), Some(32_768)));
        let text = event.message;
        assert!(text.starts_with("201 of 400 stacks were longer than the 32768 bytes"), "{text}");
        assert!(text.contains("TRACING_PROFILING_STACK_BYTES"), "{text}");
    }

    #[test]
    fn the_machine_is_a_note() {
        let resource = Resource::new().with("os.type", "linux").with("os.version", "6.1.0");
        let resource = resource.with("profile.machine.cpus", 2);
        assert_eq!(machine(&resource).as_deref(), Some("machine: linux 6.1.0, 2 CPUs"));
        let resource = resource.with("profile.machine.memory_bytes", 512_000_000);
        assert!(machine(&resource).unwrap().ends_with(", 2 CPUs, memory limit 512 MB"));
        assert_eq!(machine(&Resource::new()), None);
    }

    #[test]
    fn losses_are_named_one_by_one() {
        assert_eq!(losses_in_words(&Losses::default()), "nothing lost");
        let losses = Losses { lost: 3, cut: 1, ..Losses::default() };
        assert_eq!(
            losses_in_words(&losses),
            "3 stacks dropped for lack of memory, 1 stack cut short"
        );
    }
}

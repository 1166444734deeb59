//! What a list of reports shows of one.

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::json::{Object, Plain};
use crate::profile::{Profile, ProfiledSpan, WaitSite};

/// The summary of a profile, as a JSON object.
pub(super) fn of(profile: &Profile) -> String {
    let mut json = Vec::new();
    // Writing to memory does not fail.
    _ = write(profile, &mut json);
    String::from_utf8(json).unwrap_or_default()
}

fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<()> {
    let unnamed = ProfiledSpan { name: profile.name.clone(), ..ProfiledSpan::default() };
    let span = profile.spans.first().unwrap_or(&unnamed);
    let times = &span.times;
    Object::write(out, |summary| {
        summary.member("id", profile.id.to_string())?;
        summary.member("name", &span.name)?;
        summary.member("span", &span.span)?;
        summary.object("fields", |fields| {
            span.fields.iter().try_for_each(|(name, value)| fields.member(name, value))
        })?;
        summary.member("reasons", &span.reasons)?;
        summary.member("rule", &span.rule)?;
        summary.member("time", time(span.start().unwrap_or(profile.start())))?;
        for (name, ns) in [
            ("wall_ms", times.wall_ns),
            ("on_cpu_ms", times.on_cpu_ns),
            ("off_cpu_ms", times.off_cpu_ns),
            ("idle_ms", times.idle_ns),
            ("await_ms", times.await_ns),
            ("delay_ms", times.delay_ns),
            ("other_spans_ms", times.other_spans_ns),
        ] {
            summary.member(name, ms(ns))?;
        }
        if let Some(all) = times.allocations {
            summary.member("allocated_bytes", Plain(all.allocated_bytes))?;
            summary.member("allocations", Plain(all.allocations))?;
        }
        summary.member("cpu_known", Plain(!times.is_cpu_time_unknown))?;
        summary.member("samples", Plain(profile.sample_count()))?;
        if let Some((top, share)) = profile.top_function() {
            summary.member("top", top)?;
            summary.member("top_share", (share * 1e3).round() / 1e3)?;
        }
        if let Some(wait) = profile.waits().longest {
            summary.member("longest_wait", site(&wait))?;
            let ns = u64::try_from(wait.waited.as_nanos()).unwrap_or(u64::MAX);
            summary.member("longest_wait_ms", ms(ns))?;
        }
        let (trace, id) = super::data::texts(span.ids);
        summary.member("trace_id", trace)?;
        summary.member("span_id", id)?;
        summary.member("open", Plain(span.is_open))
    })
}

/// Milliseconds with three digits after the point.
fn ms(ns: u64) -> f64 {
    (ns as f64 / 1e3).round() / 1e3
}

fn site(wait: &WaitSite) -> String {
    let WaitSite { function, location, call, .. } = wait;
    match location.is_empty() {
        true => format!("{function} {call}"),
        false => format!("{function} ({location}) {call}"),
    }
}

/// Clamped to years with four digits, which are all that the format can represent.
fn time(time: SystemTime) -> String {
    const LAST: Duration = Duration::from_secs(253_402_300_799);
    let time = time.clamp(UNIX_EPOCH, UNIX_EPOCH + LAST);
    humantime::format_rfc3339_millis(time).to_string()
}

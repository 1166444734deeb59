//! What was probably meant by a condition that does not parse.

use std::time::Duration;

use crate::facts::{Measure, Unit};

/// Other words for conditions, and the condition to write.
const WORDS: [(&[&str], &str); 3] = [
    (&["errors", "err", "fail", "failed", "failure"], "error"),
    (&["never", "none", "disabled", "false", "no"], "off"),
    (&["all", "true", "on", "yes"], "always"),
];

/// Levels, as in a filter of `tracing-subscriber`.
const LEVELS: [&str; 4] = ["trace", "debug", "info", "warn"];

/// Other words for what a condition judges, and the condition's own.
const JUDGED: [(&[&str], &str); 10] = [
    (&["cpu", "on-cpu", "oncpu", "cpu_time"], "on_cpu>"),
    (&["own-on-cpu", "own_cpu", "self_cpu"], "own_on_cpu>"),
    (&["off-cpu", "offcpu", "blocked", "wait", "waits"], "off_cpu>"),
    (&["preempted", "run_delay", "steal", "waiting"], "runnable>"),
    (&["idle_time"], "idle>"),
    (&["awaiting", "awaits", "async"], "await>"),
    (&["scheduling_delay", "scheduling"], "delay>"),
    (&["allocated", "allocated_bytes", "bytes", "memory"], "alloc>"),
    (&["allocations"], "allocs>"),
    (&["", "latency", "wall", "wall_time", "duration", "elapsed", "time"], ""),
];

/// Says how to write the condition at byte `at` of the rules, if its meaning can be guessed.
pub(super) fn likely_fix(text: &str, at: usize) -> Option<String> {
    let (before, _) = text.split_at_checked(at)?;
    // The `=` of `>=` and `<=` belongs to the condition.
    let starts = |(at, character): &(usize, char)| match character {
        ',' | '|' => true,
        '=' => !before.get(..*at).is_some_and(|before| before.ends_with(['>', '<'])),
        _ => false,
    };
    let start = before.char_indices().rev().find(starts).map_or(0, |(at, _)| at + 1);
    let condition = text.get(start..)?.split([',', '|']).next()?.trim();
    fix(condition)
}

fn fix(condition: &str) -> Option<String> {
    let lower = condition.to_ascii_lowercase();
    if let Some((_, word)) = WORDS.iter().find(|(others, _)| others.contains(&lower.as_str())) {
        return Some(format!("unknown condition `{lower}`: write `{word}`"));
    }
    if LEVELS.contains(&lower.as_str()) {
        return Some(format!("`{lower}` is a level: write `250ms|error|level<={lower}`"));
    }
    let Some((judged, limit)) = condition.split_once('>') else {
        let (problem, limit) = fixed_limit(condition)?;
        return Some(format!("{problem}: write `{limit}`"));
    };
    let (judged, lower) = (judged.trim(), judged.trim().to_ascii_lowercase());
    let (limit, has_equals) = match limit.trim().strip_prefix('=') {
        Some(limit) => (limit.trim(), true),
        None => (limit.trim(), false),
    };
    let known = JUDGED.iter().find(|(others, _)| others.contains(&lower.as_str()));
    let name = known.map_or_else(|| format!("{lower}>"), |(_, name)| (*name).to_owned());
    let measure = name.strip_suffix('>').and_then(Measure::judged_by);
    let is_condition = measure.is_some()
        || ["", "hung>", "open>"].contains(&name.as_str())
        || name
            .strip_prefix('p')
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    if !is_condition {
        return None;
    }
    let wrong_limit = match measure.map(Measure::unit) {
        Some(Unit::Bytes) => fixed_size(limit),
        Some(Unit::Count) => fixed_count(limit),
        _ => fixed_limit(limit),
    };
    let problem = match (known, &wrong_limit) {
        (Some((_, "")), _) => "the limit of wall time has no name",
        (Some(_), _) => "unknown condition",
        (None, Some((problem, _))) => problem,
        (None, None) if has_equals => "`>=` is not supported",
        (None, None) if lower != judged => "conditions are in lower case",
        (None, None) => return None,
    };
    let limit = wrong_limit.map_or_else(|| limit.to_owned(), |(_, limit)| limit);
    Some(format!("{problem}: write `{name}{limit}`"))
}

/// What is wrong with a size, and how to write it.
fn fixed_size(size: &str) -> Option<(&'static str, String)> {
    let number = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = size.strip_prefix(number)?;
    let known = ["B", "KB", "MB", "GB", "KiB", "MiB", "GiB"];
    let (begins, number) = (unit.to_ascii_uppercase(), number.trim());
    let meant = known.into_iter().find(|known| {
        let known = known.to_ascii_uppercase();
        !begins.is_empty() && (known == begins || known.trim_end_matches('B') == begins)
    });
    if let Some((whole, part)) = number.split_once('.') {
        let number: f64 = format!("{whole}.{part}").parse().ok()?;
        let (one, smaller) = crate::text::bytes(&format!("1{}", meant?)).zip(Some("B"))?;
        return Some(("sizes are whole numbers", format!("{:.0}{smaller}", number * one as f64)));
    }
    let is_other = meant.filter(|meant| *meant != unit)?;
    Some(("unknown unit", format!("{number}{is_other}")))
}

/// The same for a number of allocations.
fn fixed_count(count: &str) -> Option<(&'static str, String)> {
    let number = count.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let zeros = match count.strip_prefix(number)?.to_ascii_lowercase().as_str() {
        "k" => "000",
        "m" => "000000",
        _ => return None,
    };
    number.parse::<u64>().ok()?;
    Some(("a number has no unit", format!("{number}{zeros}")))
}

/// What is wrong with a limit, and how to write it.
fn fixed_limit(limit: &str) -> Option<(&'static str, String)> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    if is_number(limit) {
        return Some(("missing unit", format!("{limit}ms")));
    }
    let unit = limit.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let number = limit.strip_suffix(unit)?;
    if let Some((whole, part)) = number.split_once('.')
        && is_number(part)
        && (whole.is_empty() || is_number(whole))
    {
        let unit = humantime::parse_duration(&format!("1{}", unit.trim())).ok()?;
        let time = Duration::try_from_secs_f64(unit.as_secs_f64() * number.parse::<f64>().ok()?);
        // Without the rounding error.
        let nanos = u64::try_from((time.ok()?.as_nanos() + 500) / 1_000 * 1_000).ok()?;
        let time = humantime::format_duration(Duration::from_nanos(nanos)).to_string();
        return Some(("durations are whole numbers", time.replace(' ', "")));
    }
    let lower = limit.to_ascii_lowercase();
    let is_meant = lower != limit && humantime::parse_duration(&lower).is_ok();
    is_meant.then_some(("units are in lower case", lower))
}

#[cfg(test)]
mod tests {
    use crate::keep::Rules;

    /// The first line of the error, without its beginning.
    fn problem(text: &str) -> String {
        let error = text.parse::<Rules>().unwrap_err().to_string();
        let line = error.lines().next().unwrap();
        line.strip_prefix("cannot read the profiling rules: ").unwrap().to_owned()
    }

    #[test]
    fn an_error_says_what_to_write_instead() {
        for (text, expected) in [
            ("250", "missing unit: write `250ms`"),
            ("error|250", "missing unit: write `250ms`"),
            ("shop=250, hyper=off", "missing unit: write `250ms`"),
            ("shop::cart[checkout{tenant=acme}]=250", "missing unit: write `250ms`"),
            ("p99>20", "missing unit: write `p99>20ms`"),
            ("on_cpu>100", "missing unit: write `on_cpu>100ms`"),
            ("0.5s", "durations are whole numbers: write `500ms`"),
            ("error|1.5m", "durations are whole numbers: write `1m30s`"),
            (".1ms", "durations are whole numbers: write `100us`"),
            ("hung>2.5s", "durations are whole numbers: write `hung>2s500ms`"),
            ("250MS", "units are in lower case: write `250ms`"),
            ("latency>250ms", "the limit of wall time has no name: write `250ms`"),
            (">250ms", "the limit of wall time has no name: write `250ms`"),
            ("latency>=250", "the limit of wall time has no name: write `250ms`"),
            ("cpu>100ms", "unknown condition: write `on_cpu>100ms`"),
            ("own_cpu>1s", "unknown condition: write `own_on_cpu>1s`"),
            ("preempted>50ms", "unknown condition: write `runnable>50ms`"),
            ("awaits>1", "unknown condition: write `await>1ms`"),
            ("scheduling_delay>50ms", "unknown condition: write `delay>50ms`"),
            ("alloc>100M", "unknown unit: write `alloc>100MB`"),
            ("alloc>1.5gb", "sizes are whole numbers: write `alloc>1500000000B`"),
            ("alloc>=100MB", "`>=` is not supported: write `alloc>100MB`"),
            ("alloc>=1000000", "`>=` is not supported: write `alloc>1000000`"),
            ("allocs>=1000", "`>=` is not supported: write `allocs>1000`"),
            ("allocs>1M", "a number has no unit: write `allocs>1000000`"),
            ("allocated>1MB", "unknown condition: write `alloc>1MB`"),
            ("allocations>1000", "unknown condition: write `allocs>1000`"),
            ("ON_CPU>80%", "conditions are in lower case: write `on_cpu>80%`"),
            ("on_cpu>=100ms", "`>=` is not supported: write `on_cpu>100ms`"),
            ("250ms|errors", "unknown condition `errors`: write `error`"),
            ("shop=info", "`info` is a level: write `250ms|error|level<=info`"),
            ("shop=debug,250ms", "`debug` is a level: write `250ms|error|level<=debug`"),
            ("shop=never", "unknown condition `never`: write `off`"),
        ] {
            assert_eq!(problem(text), expected, "{text}");
            let written = expected.rsplit('`').nth(1).unwrap();
            assert!(written.parse::<Rules>().is_ok(), "{written}");
        }
    }

    #[test]
    fn what_cannot_be_guessed_is_not() {
        for text in [
            "fast",
            "shop=",
            "250ms|",
            "on_cpu>fast",
            "p100",
            "1..5s",
            "1.5x",
            "[x{a=1]=1s",
            "frees>10",
            "alloc>18446744073709551615GB",
            "alloc>50%",
            "allocs>10MB",
            "allocs>1e6",
        ] {
            assert!(problem(text).starts_with("expected "), "{text}: {}", problem(text));
        }
        assert!(problem("alloc>50%").starts_with("expected a size"));
        assert!(problem("allocs>10MB").starts_with("expected a number of allocations"));
        assert!(problem("allocs>1e6").starts_with("expected a number of allocations"));
    }
}

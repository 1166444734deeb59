//! What is said of kept spans: in a profile's title, in its attributes, and in the log.

use std::fmt::{self, Display, Write};

use crate::keep::{Epoch, Kept, KeptSpan};
use crate::profile::{Attribute, Names, Profile, Value, Waiter, Waits};
use crate::span::{Account, SpanKey};

/// What a profile lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Losses {
    /// Samples of which only the CPU time is left.
    pub(super) lost: u64,
    /// Samples of which nothing is left.
    pub(super) missing: u64,
    /// Samples that found the ring of one of its threads full, around it if not in it.
    pub(super) ring_full: u64,
    /// Samples for which others stand.
    pub(super) thinned: u64,
    /// Stacks whose outermost frames were not copied.
    pub(super) cut: u64,
    /// Stacks that could not be unwound to their end.
    pub(super) incomplete: u64,
    /// Samples that were taken at a lower rate, because there were too many to read.
    pub(super) lowered: u64,
}

/// What is shorter is in no line of text.
const WORTH_SAYING: u64 = 1_000_000;
/// Spans that are named one by one above a picture.
const MOST_NOTED: usize = 4;

/// Gives a profile its name, title, notes and attributes. Of the kept spans, those in `topmost` are
/// inside no other.
pub(super) fn describe(
    profile: &mut Profile,
    epoch: &Epoch,
    topmost: &[SpanKey],
    losses: &Losses,
    names: &dyn Names,
) {
    let kept = outermost_first(&epoch.kept);
    let Some(first) = kept.first() else { return };
    profile.name = names.span(first.name()).into_owned();
    profile.title = match topmost.len().saturating_sub(1) {
        0 => format!("{} · kept: {}", profile.name, first.reasons()),
        beside => format!("{} and {beside} beside it · kept: {}", profile.name, first.reasons()),
    };
    if first.is_open() {
        profile.title.push_str(" · open still");
    }
    if *losses != Losses::default() {
        _ = write!(profile.title, " · {}", losses_in_words(losses));
    }
    let of_topmost = kept.iter().filter(|span| topmost.contains(&span.key));
    let on_cpu_ns = of_topmost.map(|span| span.account.on_cpu_ns).sum();
    for span in kept.iter().take(MOST_NOTED) {
        profile.notes.push(format!("{}: {}", names.span(span.name()), Split(&span.account)));
    }
    if kept.len() > MOST_NOTED {
        profile.notes.push(format!("and {} more kept spans", kept.len() - MOST_NOTED));
    }
    let count = profile.sample_count();
    let mut samples = plural(count);
    match profile.uniform_weight_ns() {
        Some(weight_ns) => _ = write!(samples, ", one every {} of CPU time", Ns(weight_ns)),
        None if count > 0 => samples.push_str(", taken at more than one rate"),
        None => {}
    }
    _ = write!(samples, ": {} of {} on-CPU", Ns(profile.weight_ns()), Ns(on_cpu_ns));
    _ = write!(samples, "; {}", losses_in_words(losses));
    profile.notes.push(samples);
    profile.attributes = attributes(first, &profile.name, losses);
}

/// Says of a profile with symbols where its threads waited.
pub(super) fn describe_waits(profile: &mut Profile, kept: &Kept) {
    let waits = &kept.waits;
    if waits.count == 0 {
        return;
    }
    let off_cpu_ns = kept.spans.first().map_or(0, |span| span.account.off_cpu_ns);
    let mut note = format!("{} seen: {}", plural_waits(waits.count), Ns(waits.total_ns));
    // Of waits on other threads this account knows nothing.
    if waits.total_ns <= off_cpu_ns {
        _ = write!(note, " of {} off-CPU", Ns(off_cpu_ns));
    }
    if let Some(waiter) = &waits.longest {
        _ = write!(note, "; {} in {}", Ns(waiter.waited_ns), Who(waiter));
    }
    profile.notes.push(note);
    let ns = |value: u64| Value::Int(i64::try_from(value).unwrap_or(i64::MAX));
    profile.attributes.push(Attribute { key: "profile.waits_ns", value: ns(waits.total_ns) });
    if let Some(waiter) = &waits.in_async {
        let blocked = Ns(waits.in_async_ns);
        profile.notes.push(format!("blocks an async executor: {blocked} in {}", Who(waiter)));
        let (key, value) = ("profile.blocked_in_async_ns", ns(waits.in_async_ns));
        profile.attributes.push(Attribute { key, value });
    }
}

/// Who waited where and for what.
struct Who<'a>(&'a Waiter);

impl Display for Who<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Waiter { function, place, call, .. } = self.0;
        write!(f, "{function}")?;
        if !place.is_empty() {
            write!(f, " ({place})")?;
        }
        write!(f, " {call}")
    }
}

fn plural_waits(waits: usize) -> String {
    if waits == 1 { "1 wait".to_owned() } else { format!("{waits} waits") }
}

fn losses_in_words(losses: &Losses) -> String {
    let mut words = Vec::new();
    for (count, what) in [
        (losses.lost, "stacks given up for want of memory"),
        (losses.missing, "samples lost before they were read"),
        (losses.ring_full, "samples in or before it lost to a full ring"),
        (losses.thinned, "samples thinned out"),
        (losses.cut, "stacks cut short"),
        (losses.incomplete, "stacks not unwound to their end"),
        (losses.lowered, "samples at a lowered rate"),
    ] {
        if count > 0 {
            words.push(format!("{count} {what}"));
        }
    }
    if words.is_empty() { "nothing lost".to_owned() } else { words.join(", ") }
}

fn attributes(span: &KeptSpan, name: &str, losses: &Losses) -> Vec<Attribute> {
    let int = |value: u64| Value::Int(i64::try_from(value).unwrap_or(i64::MAX));
    let account = &span.account;
    let mut attributes = vec![
        Attribute { key: "profile.reason", value: Value::String(span.reasons().to_string()) },
        Attribute { key: "profile.span.name", value: Value::String(name.to_owned()) },
        Attribute { key: "profile.wall_ns", value: int(account.wall_ns) },
        Attribute { key: "profile.on_cpu_ns", value: int(account.on_cpu_ns) },
        Attribute { key: "profile.on_cpu_error_ns", value: int(account.on_cpu_error_ns) },
        Attribute { key: "profile.off_cpu_ns", value: int(account.off_cpu_ns) },
        Attribute { key: "profile.idle_ns", value: int(account.idle_ns) },
    ];
    for (key, count) in [
        ("profile.samples_lost_memory", losses.lost),
        ("profile.samples_lost", losses.missing),
        ("profile.samples_lost_ring_full", losses.ring_full),
        ("profile.samples_thinned", losses.thinned),
        ("profile.stacks_truncated", losses.cut),
        ("profile.stacks_incomplete", losses.incomplete),
        ("profile.samples_at_lowered_rate", losses.lowered),
    ] {
        if count > 0 {
            attributes.push(Attribute { key, value: int(count) });
        }
    }
    if span.is_open() {
        attributes.push(Attribute { key: "profile.span.open", value: Value::Bool(true) });
    }
    if account.after_last_exit_ns >= WORTH_SAYING {
        let (key, value) = ("profile.after_last_exit_ns", int(account.after_last_exit_ns));
        attributes.push(Attribute { key, value });
    }
    if let Some(is_sampled) = span.trace_is_sampled() {
        let value = Value::Bool(is_sampled);
        attributes.push(Attribute { key: "profile.trace_sampled", value });
    }
    attributes
}

/// Spans as they lie inside each other: those that began first, and of those the longest.
pub(super) fn outermost_first(kept: &[KeptSpan]) -> Vec<KeptSpan> {
    let mut kept = kept.to_vec();
    kept.sort_by_key(|span| (span.opened_ns, u64::MAX - span.account.wall_ns));
    kept
}

/// The line that goes to the log.
pub(super) fn line(kept: &Kept, names: &dyn Names) -> String {
    let Some(first) = kept.spans.first() else {
        return String::new();
    };
    let open = if first.is_open() { ", open still" } else { "" };
    let mut line = format!("kept `{}` ({}{open}", names.span(first.name()), first.reasons());
    let others: Vec<_> = kept.spans.iter().skip(1).map(|span| names.span(span.name())).collect();
    if let Some((name, others)) = others.split_first() {
        _ = write!(line, "; with `{name}`");
        if !others.is_empty() {
            _ = write!(line, " and {} more", others.len());
        }
    }
    _ = write!(line, "): {}", Split(&first.account));
    match &kept.profile {
        Some(_) => _ = write!(line, "; {}", plural(kept.samples)),
        None => {
            let why = kept.spans.iter().find_map(|span| span.profile().err());
            _ = match why {
                Some(why) => write!(line, "; no profile: {why}"),
                None => write!(line, "; no profile: it could not be exported"),
            };
        }
    }
    if let Some((function, share)) = &kept.top_function {
        _ = write!(line, ", {:.0} % in {function}", share * 100.0);
    }
    if let Some(waiter) = &kept.waits.longest {
        let Waits { count, total_ns, .. } = kept.waits;
        let (waits, total) = (plural_waits(count), Ns(total_ns));
        _ = write!(line, ", {waits} of {total}, longest in {}", Who(waiter));
    }
    if let Some(waiter) = &kept.waits.in_async {
        let blocked = Ns(kept.waits.in_async_ns);
        _ = write!(line, "; blocks an async executor for {blocked}");
        if kept.waits.longest.as_ref() != Some(waiter) {
            _ = write!(line, " in {}", Who(waiter));
        }
    }
    if let Some((trace, span)) = first.trace_ids() {
        _ = write!(line, "; trace {trace}, span {span}");
    }
    if let Some(file) = kept.files.first() {
        _ = write!(line, "; {}", file.display());
    }
    line
}

fn plural(samples: usize) -> String {
    if samples == 1 { "1 sample".to_owned() } else { format!("{samples} samples") }
}

/// Wall time and its parts, in words.
struct Split<'a>(&'a Account);

impl Display for Split<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Account {
            wall_ns,
            on_cpu_ns,
            on_cpu_error_ns,
            off_cpu_ns,
            idle_ns,
            after_last_exit_ns,
            ..
        } = *self.0;
        write!(f, "wall {} = on-CPU {}", Ns(wall_ns), Ns(on_cpu_ns))?;
        if on_cpu_error_ns > 0 {
            write!(f, " (± {})", Ns(on_cpu_error_ns))?;
        }
        write!(f, " + off-CPU {} + idle {}", Ns(off_cpu_ns), Ns(idle_ns))?;
        if after_last_exit_ns >= WORTH_SAYING.max(wall_ns / 10) {
            write!(f, " (of it {} after its last exit)", Ns(after_last_exit_ns))?;
        }
        if on_cpu_ns.saturating_add(off_cpu_ns).saturating_add(idle_ns)
            > wall_ns + wall_ns / 10 + WORTH_SAYING
        {
            f.write_str(" (on several threads at once)")?;
        }
        Ok(())
    }
}

/// A length of time with three digits.
pub(super) struct Ns(pub(super) u64);

impl Display for Ns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0;
        let (value, unit) = match ns {
            0..1_000 => return write!(f, "{ns} ns"),
            1_000..1_000_000 => (ns as f64 / 1e3, "µs"),
            1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
            _ => (ns as f64 / 1e9, "s"),
        };
        let digits = if value >= 100.0 {
            0
        } else if value >= 10.0 {
            1
        } else {
            2
        };
        write!(f, "{value:.digits$} {unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::ProfileId;
    use crate::redact::Redaction;

    fn kept() -> Kept {
        let mut span = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 258);
        span.account.wall_ns = 1_312_000_000;
        span.account.on_cpu_ns = 1_290_000_000;
        span.account.off_cpu_ns = 12_000_000;
        span.account.idle_ns = 10_000_000;
        span.reasons = [crate::keep::Reason::Latency].into_iter().collect();
        span.profile = Ok(ProfileId::for_test(1));
        Kept {
            spans: vec![span],
            profile: Some(ProfileId::for_test(1)),
            samples: 258,
            top_function: Some(("shop::render".to_owned(), 0.97)),
            waits: Waits::default(),
            files: vec!["profiles/x.svg".into()],
        }
    }

    #[test]
    fn lengths_have_three_digits() {
        let lengths = [0, 999, 1_000, 12_345, 999_900, 1_312_000_000, 250_000_000];
        let texts: Vec<_> = lengths.into_iter().map(|ns| Ns(ns).to_string()).collect();
        assert_eq!(texts, ["0 ns", "999 ns", "1.00 µs", "12.3 µs", "1000 µs", "1.31 s", "250 ms"]);
    }

    #[test]
    fn one_line_says_what_why_and_where() {
        assert_eq!(
            line(&kept(), &Redaction::new()),
            "kept `test` (latency): wall 1.31 s = on-CPU 1.29 s + off-CPU 12.0 ms + idle 10.0 ms; \
             258 samples, 97 % in shop::render; profiles/x.svg"
        );
    }

    #[test]
    fn without_a_profile_the_line_says_why() {
        let mut kept = kept();
        kept.profile = None;
        kept.top_function = None;
        kept.files.clear();
        kept.spans[0].profile = Err(crate::keep::NoProfile::NoSamples);
        assert!(line(&kept, &Redaction::new()).ends_with("; no profile: no sample fell in it"));
    }

    #[test]
    fn what_is_not_sure_is_said() {
        let account = Account { on_cpu_ns: 100, on_cpu_error_ns: 7, ..Account::default() };
        assert!(Split(&account).to_string().contains("on-CPU 100 ns (± 7 ns) +"));
    }

    #[test]
    fn losses_are_named_one_by_one() {
        assert_eq!(losses_in_words(&Losses::default()), "nothing lost");
        let losses = Losses { lost: 3, cut: 2, ..Losses::default() };
        assert_eq!(
            losses_in_words(&losses),
            "3 stacks given up for want of memory, 2 stacks cut short"
        );
    }
}

//! The log events of kept spans.

use std::cmp::Reverse;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use super::format::{Allocated, Ns, is_vague, nanoseconds};
use super::kept_fields::{Fields, NEARLY_ALL};
use super::profile::{AWAITS_OF_ALL, WAIT_NS, WORTH_REPORTING, at_site, awaited};
use super::starved::{starved, waited_for_cpu};
use crate::compare::{Quantity, TimeKind};
use crate::facts::{ChildOrder, ChildTotals, Measure, TimeBreakdown};
use crate::keep::{Kept, KeptSpan, NoProfile};
use crate::log::{LogEvent, LogKind};
use crate::profile::{
    Awaits, BriefPart, ComparedSummary, Hotspot, ProfileId, SampleKind, SlowerIn, Waits, capped,
};
use crate::text::ms;

/// Nothing is said of the coverage of a span that ran for less than some samples represent.
pub(crate) const LONG_NS: u64 = 10_000_000;

/// On a busy machine, the collector itself may be late by less.
const LEAST_STOP_NS: u64 = 1_000_000_000;

/// The kept spans of one profile that have events of their own.
const MOST_EVENTS: usize = 8;

/// What took this many times as long as typical ones spent most of its time in what they did not.
const MANY_TIMES: f64 = 2.0;

/// The characters of a line for people, beyond which a reason is left to the report.
const MOST_CHARS: usize = 200;

/// Logs a profile: a line for people about its first span and about others that are inside no kept one, one for each name,
/// and for each span an event at DEBUG whose fields have everything.
pub(crate) fn log(kept: &Kept) {
    let Some((first, others)) = kept.spans.split_first() else { return };
    let mut said = vec![first.facts.name()];
    log_span(first, kept, true, &message(first, kept));
    for span in others.iter().take(MOST_EVENTS - 1) {
        if span.facts.is_topmost && !said.contains(&span.facts.name()) {
            said.push(span.facts.name());
            let is_in = match span.profile {
                Ok(_) if kept.profile.is_some() => {
                    Some(format!("in the profile of `{}`", first.facts.name()))
                }
                Ok(_) => None,
                Err(why) => Some(format!("no profile: {}", without_profile(why, span))),
            };
            let said = joined([error_of(span, span.error.as_ref()), is_in]);
            let said = said.map_or_else(String::new, |said| format!(": {said}"));
            log_span(span, kept, false, &fitting(head(span) + &said));
        }
        Fields::log(|| Fields::of(span, kept, false));
    }
}

fn log_span(span: &KeptSpan, kept: &Kept, is_first: bool, message: &str) {
    let profile = profile_of(span, kept, is_first);
    tracing::info!(
        target: "tracing_profiling",
        parent: None,
        span = display(&span.facts.span),
        reason = display(span.reasons()),
        wall_ms = ms(span.times().wall_ns),
        spans = Some(kept.spans.len()).filter(|spans| is_first && *spans > 1),
        trace_id = span.facts.ids().map(|(trace, _)| display(trace)),
        profile_id = profile.map(display),
        file = kept.files.first().filter(|_| profile.is_some()).map(|file| display(file.display())),
        "{message}"
    );
    if is_first {
        Fields::log(|| Fields::of(span, kept, true));
    }
}

/// Detects that the names of kept spans do not tell requests apart, although a field could.
#[derive(Debug, Default)]
pub(crate) struct NameHint {
    /// The only name so far, and how many spans had it.
    name: Option<String>,
    spans: usize,
    is_over: bool,
}

impl NameHint {
    /// The kept spans after which the log says so.
    const SPANS: usize = 5;
    /// Fields that differ between requests.
    const TELLING: &str = "http.route route matched_path otel.name url.path http.target path uri";

    /// The log event, once, when it is due.
    pub(crate) fn event(&mut self, kept: &Kept) -> Option<LogEvent> {
        if self.is_over {
            return None;
        }
        for span in &kept.spans {
            let name = span.facts.name();
            self.spans += 1;
            self.is_over |= *self.name.get_or_insert_with(|| name.clone()) != name;
        }
        let span = kept.spans.first().filter(|_| !self.is_over && self.spans >= Self::SPANS)?;
        self.is_over = true;
        let fields = span.metadata.fields();
        let is_shown = |name: &&str| span.fields().any(|(shown, _)| shown == *name);
        let mut unshown = Self::TELLING.split(' ').filter(|name| !is_shown(name));
        let field = unshown.find(|name| fields.field(name).is_some())?;
        let mut shown: Vec<_> = span.fields().map(|(name, _)| name).collect();
        shown.push(field);
        let shown = shown.join(",");
        let message = format!(
            "all {} kept spans are named `{}`: TRACING_PROFILING_SPAN_FIELDS={shown} also shows the values of their field \
             `{field}`, in the log and in profiles",
            self.spans,
            span.facts.name(),
        );
        Some(LogEvent {
            variable: Some("TRACING_PROFILING_SPAN_FIELDS".into()),
            value: Some(shown),
            count: u64::try_from(self.spans).ok(),
            ..LogEvent::info(LogKind::AmbiguousNames, message)
        })
    }
}

/// The profile that the event refers to. The first span's event is that of the profile; another span may have none.
pub(crate) fn profile_of(span: &KeptSpan, kept: &Kept, has_profile: bool) -> Option<ProfileId> {
    span.profile().ok().or_else(|| kept.profile.filter(|_| has_profile))
}

/// What was kept. The fields have the rest.
fn head(span: &KeptSpan) -> String {
    let open = if span.is_open() { ", still open" } else { "" };
    format!("kept `{}`{open}", span.facts.name())
}

/// What was kept, what explains most of its time, and why there is no profile: whole, or where that is too long in brief.
fn message(first: &KeptSpan, kept: &Kept) -> String {
    let no_profile = kept.profile.is_none().then(|| {
        match kept.spans.iter().find_map(|span| span.profile().err()) {
            Some(why) => format!("no profile: {}", without_profile(why, first)),
            None => "no profile: it could not be exported".to_owned(),
        }
    });
    let (whole, said, is_all) = line(first, kept, no_profile.as_deref());
    if is_all && !is_long(&whole) {
        return whole;
    }
    let coverage = kept.coverage.filter(|_| kept.hotspot(SampleKind::OnCpu).is_none());
    // Of an error, what it says is worth more than its place; a panic has both.
    let is_error_said = matches!(&first.error, Some((said, false)) if !said.is_empty());
    let brief = |parts: &[BriefPart]| {
        let brief = Kept { hotspots: kept.hotspots.brief(parts), coverage, ..kept.clone() };
        let mut first = first.clone();
        first.facts.error_at.take_if(|_| is_error_said);
        // The report has the ids of the threads.
        let is_of_id = |c: char| c.is_ascii_digit() || c == ')';
        let parts = |text: Arc<str>| {
            text.split(" (thread ").map(|it| it.trim_start_matches(is_of_id)).collect::<String>()
        };
        first.facts.deadlock = first.facts.deadlock.map(|text| parts(text).into());
        let (line, said, _) = line(&first, &brief, no_profile.as_deref());
        (line.replace(", 100 % in ", " in "), said)
    };
    let mut best = (whole, said);
    // Beside an error it matters less what was awaited.
    let has_leaves = |parts: &&[BriefPart]| parts.contains(&BriefPart::Leaf) || is_error_said;
    for parts in BriefPart::LEVELS.into_iter().filter(has_leaves) {
        let shorter = brief(parts);
        // Beside code that is named, a lesser reason is worth no path.
        let is_more =
            shorter.1 > best.1 && (parts.contains(&BriefPart::Crate) || !best.0.contains(" in "));
        if is_long(&best.0) || is_more {
            best = shorter;
        }
    }
    fitting(best.0)
}

/// Says the reasons that fit, of which the first one always does: the more one explains, the earlier it stands. How many
/// these are, and whether they are all.
fn line(first: &KeptSpan, kept: &Kept, no_profile: Option<&str>) -> (String, usize, bool) {
    let (mut line, mut said, mut is_all) = (head(first), 0, true);
    let reasons = reasons(first, kept, first.error.as_ref()).into_iter();
    for reason in reasons.chain(no_profile.map(str::to_owned)) {
        let longer = format!("{line}{}{reason}", if said == 0 { ": " } else { "; " });
        match said > 0 && is_long(&longer) {
            true => is_all = false,
            false => (line, said) = (longer, said + 1),
        }
    }
    (line, said, is_all)
}

fn is_long(text: &str) -> bool {
    text.chars().count() > MOST_CHARS
}

/// What is too long loses the end of the span's name if that is long, else its own.
fn fitting(short: String) -> String {
    let over = short.chars().count().saturating_sub(MOST_CHARS);
    let name = short.split('`').nth(1).map_or(0, |name| name.chars().count());
    let at = if name / 2 > over { "kept `".len() + name - over - 1 } else { MOST_CHARS - 1 };
    let rest = || short.chars().skip(at + over + 1);
    if over > 0 { short.chars().take(at).chain(['…']).chain(rest()).collect() } else { short }
}

/// What explains most of the time of a span, the larger part first. Empty if nothing does.
pub(crate) fn headline(first: &KeptSpan, kept: &Kept) -> String {
    reasons(first, kept, None).join("; ")
}

/// Where the first `ERROR` event in a span was logged, or the panic was, and what it says if that may be said.
fn error_of(span: &KeptSpan, said: Option<&(Arc<str>, bool)>) -> Option<String> {
    match (said.filter(|(said, _)| !said.is_empty()), &span.facts.error_at) {
        (Some((said, is_panic)), Some(place)) => {
            let what = if *is_panic { "panicked" } else { "logged" };
            Some(format!("error \"{said}\", {what} at {place}"))
        }
        (Some((said, _)), None) => Some(format!("error \"{said}\"")),
        (None, place) => place.as_ref().map(|place| format!("error at {place}")),
    }
}

/// `error`: what the first `ERROR` event in it says, if that may be said.
fn reasons(first: &KeptSpan, kept: &Kept, error: Option<&(Arc<str>, bool)>) -> Vec<String> {
    let times = first.times();
    let compared = kept.compared.as_ref().filter(|compared| compared.is_of(&first.facts));
    let many = first.facts.children.many_in(times.wall_ns).map(many_children);
    let waited_ns = blocked_ns(first, kept);
    // A thread waited for others of the span, which ran in that time.
    let is_for_own = waited_ns / 2 <= times.subtree_on_cpu_ns
        && waited_ns + times.subtree_on_cpu_ns > times.wall_ns + times.wall_ns / 10;
    let mut parts = [
        (times.subtree_on_cpu_ns, on_cpu(first, kept)),
        (times.idle_ns, idle(first, kept)),
        (if is_for_own { 0 } else { waited_ns }, waits(kept, waited_ns)),
        (first.facts.get(Measure::Runnable).unwrap_or(0), starved(&first.facts)),
        (first.times().off_cpu_ns, unseen(first, kept)),
    ];
    parts.sort_by_key(|(ns, _)| Reverse(*ns));
    let mut parts = parts.into_iter().filter_map(|(_, part)| part);
    let unknown = times.is_cpu_time_unknown.then(|| "on-CPU unknown".to_owned());
    // What explains its time stands beside the error.
    let error =
        error_of(first, error).and_then(|error| match (&kept.awaits.before_error, parts.next()) {
            (Some(place), next) if next.as_ref().is_none_or(|next| next.contains("likely in")) => {
                Some(format!("{error}, after an await in {place}"))
            }
            (_, next) => joined([Some(error), next]),
        });
    let answered = answered(first).and_then(|answered| joined([Some(answered), parts.next()]));
    let deadlock = first.facts.deadlock.as_deref().map(|text| capped(text).into_owned());
    let allocated = allocated(first, kept);
    let is_why = first.reasons().are_of_allocations();
    let (why, last) = if is_why { (allocated, None) } else { (None, allocated) };
    // If it took many times as long, what explains most of its time is also what it did more.
    let typical = compared.and_then(ComparedSummary::times);
    let explains = typical.is_some_and(|times| times < MANY_TIMES);
    let typical = compared.and_then(|compared| against_typical(compared, explains));
    let (before, after) = if explains { (typical, None) } else { (None, typical) };
    let reasons = before.into_iter().chain(many).chain(parts);
    let reasons = error.into_iter().chain(answered).chain(unknown).chain(why).chain(reasons);
    deadlock.into_iter().chain(reasons).chain(after).chain(last).collect()
}

/// When the request was answered, if long before: what is said besides is what went on, as a task that it has spawned.
fn answered(span: &KeptSpan) -> Option<String> {
    let ready_ns = span.answered_ns.filter(|_| !span.is_open())?;
    let wall_ns = span.times().wall_ns;
    let more_ns = wall_ns.saturating_sub(ready_ns);
    let is_long = more_ns >= LONG_NS && more_ns > wall_ns / 2;
    let (ready, more) = (Ns(ready_ns), Ns(more_ns));
    is_long.then(|| format!("its response was ready after {ready}, {more} before its end"))
}

/// In which functions it ran, and of how little of that there are samples.
fn on_cpu(first: &KeptSpan, kept: &Kept) -> Option<String> {
    let (times, ran_ns) = (first.times(), first.times().subtree_on_cpu_ns);
    let is_known = !times.is_cpu_time_unknown && !is_vague(ran_ns, times.subtree_on_cpu_error_ns);
    let wanted_ns = ran_ns + waited_for_cpu(&first.facts).unwrap_or(0);
    // A few samples of a span that mostly waited for something else would explain nothing.
    if is_known && wanted_ns <= times.wall_ns / 10 {
        return None;
    }
    let hotspot = kept.hotspot(SampleKind::OnCpu);
    let own = hotspot.map(|hotspot| {
        // Foreign code on a thread of its own, or with callers that are not known.
        let is_foreign = hotspot.functions.iter().all(|function| function.location.is_empty());
        let awaiting = kept.awaits.mostly_in.as_ref().filter(|_| is_foreign);
        let awaiting = awaiting.filter(|(_, time)| nanoseconds(*time) >= ran_ns / 2);
        let by = awaiting.map(|(place, _)| format!(", awaited in {place}{}", often(first, kept)));
        let allocating = kept.hotspot(SampleKind::AllocatedBytes).and_then(|of| of.place());
        let allocating = allocating.filter(|_| is_foreign);
        let by = by.or(allocating.map(|place| format!(", which allocates in {place}")));
        format!("{hotspot}{}", by.unwrap_or_default())
    });
    // Many short awaits, as of queries, take CPU time.
    let awaited = kept
        .hotspot(SampleKind::Await)
        .filter(|awaited| hotspot.is_some_and(|hotspot| hotspot.names() == awaited.names()));
    let often = awaited.map_or_else(String::new, |_| often(first, kept));
    let inside = Some(Ns(times.inside_on_cpu_ns())).filter(|Ns(ns)| *ns >= WORTH_REPORTING);
    let inside = inside.map(|ns| format!(" ({ns} of it in spans on other threads)"));
    // The share is that of all spans of the profile.
    let others = kept.spans.iter().skip(1).any(|span| span.facts.is_topmost);
    let of = if others { "; of all spans:" } else { "," };
    let ran = format!("{} on-CPU{often}{}{of} ", Ns(ran_ns), inside.unwrap_or_default());
    let hotspot = own.map(|hotspot| if is_known { ran + &hotspot } else { hotspot });
    // As of threads that ran for less than a sampling interval.
    let uncovered = kept.coverage.filter(|_| is_known && ran_ns >= LONG_NS);
    let uncovered = uncovered.filter(|share| *share < NEARLY_ALL).map(|share| match share {
        0.0 => "no sample of its on-CPU time".to_owned(),
        _ => format!("the samples represent {:.0} % of the on-CPU time", (share * 100.0).max(1.0)),
    });
    joined([hotspot, uncovered])
}

/// How much of its waits it was blocked. A wait lasts until its thread runs again, and may have waited for a CPU by then.
fn blocked_ns(first: &KeptSpan, kept: &Kept) -> u64 {
    let (times, waited_ns) = (first.times(), nanoseconds(kept.waits.total));
    let are_own = kept.spans.len() == 1 && times.covers_subtree();
    match waited_for_cpu(&first.facts).filter(|_| are_own) {
        Some(runnable_ns) => waited_ns.min(times.off_cpu_ns.saturating_sub(runnable_ns)),
        None => waited_ns,
    }
}

/// In which functions its threads were blocked, for that time in all.
fn waits(kept: &Kept, blocked_ns: u64) -> Option<String> {
    let Waits { count, total, in_async, in_async_total, .. } = &kept.waits;
    let hotspot = kept.hotspot(SampleKind::OffCpu).filter(|_| blocked_ns > 0);
    let blocking = in_async.as_ref().filter(|_| blocked_ns > 0).map(|site| {
        let named = hotspot.map_or_else(String::new, Hotspot::names);
        // In a long line the function is without its crate.
        let is_there = named == site.function || site.function.ends_with(&format!("::{named}"));
        let place = if is_there { String::new() } else { format!(" in {}", at_site(site)) };
        let time = Ns(nanoseconds(*in_async_total).min(blocked_ns));
        (is_there, format!("{time} blocking its executor{place}"))
    });
    // All of it was in the place that is named anyway.
    let is_all = in_async_total.as_secs_f64() >= total.as_secs_f64() * 0.95;
    match (hotspot, blocking) {
        (Some(hotspot), Some((true, blocking))) if is_all => Some(format!("{blocking}, {hotspot}")),
        (hotspot, blocking) => {
            // Not their number: some may have been elsewhere.
            let time = Ns(blocked_ns);
            let waits =
                if *count == 1 { format!("1 wait of {time}") } else { format!("{time} blocked") };
            let waited = hotspot.map(|hotspot| format!("{waits}, {hotspot}"));
            joined([waited, blocking.map(|(_, text)| text)])
        }
    }
}

/// What is known of most of its time if that was off-CPU and no stack shows where.
fn unseen(first: &KeptSpan, kept: &Kept) -> Option<String> {
    let TimeBreakdown { wall_ns, off_cpu_ns, on_cpu_error_ns, usage, .. } = *first.times();
    let is_most = |ns| ns >= WAIT_NS && ns > wall_ns / 2;
    let stopped_ns = first.stopped_ns;
    if stopped_ns >= LEAST_STOP_NS && is_most(stopped_ns) {
        let stopped = Ns(stopped_ns);
        return Some(format!("the process was stopped or the machine paused for {stopped}"));
    }
    let (seen, seen_ns) = match kept.hotspot(SampleKind::OffCpu) {
        Some(_) => (kept.waits.count as u64, nanoseconds(kept.waits.total)),
        None => (0, 0),
    };
    let runnable_ns = first.facts.get(Measure::Runnable).unwrap_or(0);
    let unseen_ns = off_cpu_ns.saturating_sub(seen_ns.saturating_add(runnable_ns));
    let count = usage.voluntary_switches.saturating_sub(seen);
    if !is_most(unseen_ns) || is_vague(off_cpu_ns, on_cpu_error_ns) || count == 0 {
        return None;
    }
    let mean_ns = unseen_ns / count;
    let why = if mean_ns < WAIT_NS { "too short for stacks" } else { "without a stack" };
    let share = 100.0 * unseen_ns as f64 / wall_ns as f64;
    let waits = if count == 1 { "wait" } else { "waits" };
    Some(format!("{count} {waits} of {}, {why}: {share:.0} % of its time", Ns(mean_ns)))
}

fn allocated(first: &KeptSpan, kept: &Kept) -> Option<String> {
    let all = first.times().allocations.as_ref()?;
    let is_worth_saying = Allocated(all).is_much() || first.reasons().are_of_allocations();
    let hotspot = kept.hotspot(SampleKind::AllocatedBytes);
    let others = kept.spans.iter().skip(1).any(|span| span.facts.is_topmost);
    let of = if others { " of all spans" } else { "" };
    let place =
        hotspot.map_or_else(String::new, |hotspot| format!("; allocated bytes{of}: {hotspot}"));
    is_worth_saying.then(|| format!("{}{place}", Allocated(all)))
}

fn joined(parts: [Option<String>; 2]) -> Option<String> {
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// How many times as long as typical ones it took, and if that explains it, where most of that is. Nothing by chance.
fn against_typical(compared: &ComparedSummary, explains: bool) -> Option<String> {
    let slower_ns = compared.slower_ns?;
    let (times, median_ns) = (compared.times()?, compared.median_wall_ns?);
    let mut text = format!("{times} × its typical {}", Ns(median_ns));
    if let Some((place, extra_ns)) =
        compared.slower_in.as_ref().filter(|_| explains).and_then(place)
    {
        let share = extra_ns as f64 / slower_ns.max(1) as f64;
        _ = match share {
            0.9.. => write!(text, "; the rest is {place}"),
            0.5.. => write!(text, "; most of the rest is {place}"),
            _ => write!(text, "; {} of the rest is {place}", Ns(extra_ns)),
        };
    }
    Some(text)
}

/// Where the largest difference is, as a part of a sentence, and how large it is.
fn place(slower_in: &SlowerIn) -> Option<(String, u64)> {
    let SlowerIn { quantity, extra_ns } = slower_in;
    let text = quantity.to_string();
    let place = match quantity {
        Quantity::Wall(TimeKind::Unmeasured, _) => return None,
        // On-CPU is what is expected.
        Quantity::Wall(TimeKind::OnCpu, _) => text.replacen("on-CPU in ", "in ", 1),
        Quantity::Wall(TimeKind::Await, _) => text.replacen("await", "awaiting", 1),
        Quantity::Wall(TimeKind::OtherSpans, _) => format!("in {text}"),
        _ => text,
    };
    Some((place, *extra_ns))
}

/// Many child spans of one name: `214 × query, 1.90 s in turn`.
fn many_children(many: &ChildTotals) -> String {
    let (name, order) = (many.name.as_deref().unwrap_or_default(), many.order());
    let open = match order {
        ChildOrder::InTurn => String::new(),
        _ => format!(" ({})", Ns(many.open_ns)),
    };
    format!("{} × `{name}`, {} {order}{open}", many.count, Ns(many.total_ns))
}

/// How many times it was pending in all, if that is often and all awaits are its own.
fn often(first: &KeptSpan, kept: &Kept) -> String {
    let are_own = kept.awaits.are_of_topmost && kept.spans.len() == 1;
    let awaits = Measure::Awaits.notable(&first.facts).filter(|_| are_own);
    awaits.map_or_else(String::new, |awaits| format!(" (pending {awaits} times)"))
}

/// What explains idle time, if that is much. Awaits are compared with it only if all of them are the span's own.
fn idle(first: &KeptSpan, kept: &Kept) -> Option<String> {
    let TimeBreakdown { wall_ns, idle_ns, .. } = *first.times();
    let awaits: &Awaits = &kept.awaits;
    if awaits.is_empty() || idle_ns <= wall_ns / 10 {
        return None;
    }
    let all = nanoseconds(awaits.total + awaits.delay);
    let are_own = awaits.are_of_topmost && kept.spans.len() == 1;
    // Short awaits are sampled, each for 10 ms, so their sum has an error.
    let are_at_once = are_own && all > idle_ns + idle_ns / 10 + 2 * LONG_NS;
    let longest = if are_own { first.times().idle() } else { Duration::MAX };
    let (total, delay) = match are_at_once && first.times().explained_idle_ns() > 0 {
        true => (first.times().awaiting(), first.times().scheduling_delay()),
        false => (awaits.total, awaits.delay),
    };
    let total = total.min(longest);
    let mut awaits = Awaits { total, delay: delay.min(longest - total), ..awaits.clone() };
    let (hotspot, idle) = (kept.hotspot(SampleKind::Await), format!("idle {}", Ns(idle_ns)));
    // Of what is at the same time, a part has no such share of the time.
    if let Some(part) = hotspot.filter(|it| are_at_once && it.share() < Some(NEARLY_ALL)) {
        awaits.total = Duration::ZERO;
        let of = format!("{idle}; awaits of several futures at once: {part}");
        return joined([Some(of), Some(awaited(&awaits, "", None)).filter(|it| !it.is_empty())]);
    }
    let is_all = nanoseconds(awaits.total + awaits.delay) >= idle_ns / 10 * 9;
    let awaited = awaited(&awaits, &often(first, kept), hotspot);
    Some(match are_own {
        true if is_all => awaited,
        true => format!("{idle}: {awaited}"),
        false => format!("{idle}; {AWAITS_OF_ALL}: {awaited}"),
    })
}

pub(crate) fn without_profile(why: NoProfile, span: &KeptSpan) -> String {
    let TimeBreakdown { wall_ns, off_cpu_ns, on_cpu_error_ns, idle_ns, other_spans_ns, .. } =
        *span.times();
    let explained_ns = span.times().explained_idle_ns();
    let off_cpu_ns = if is_vague(off_cpu_ns, on_cpu_error_ns) { 0 } else { off_cpu_ns };
    let is_mostly = |ns| why == NoProfile::NoSamples && ns >= WAIT_NS && ns > wall_ns / 2;
    if is_mostly(explained_ns) {
        format!("it awaited for {}, but no await was sampled", Ns(explained_ns))
    } else if is_mostly(idle_ns) {
        format!(
            "it was in no thread for {} (of a future, `AwaitsLayer` or `.profiled()` shows where)",
            Ns(idle_ns)
        )
    } else if is_mostly(other_spans_ns) {
        format!("for {} its thread was in other spans on its stack", Ns(other_spans_ns))
    } else if is_mostly(off_cpu_ns) {
        format!("it was off-CPU for {}, in no wait with a stack", Ns(off_cpu_ns))
    } else {
        why.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{OwnFunction, SpentIn};
    use crate::facts::Allocations;
    use crate::facts::Reason;
    use crate::profile::{Compared, Hotspots, WaitSite};
    use crate::span::SpanKey;

    fn kept() -> Kept {
        let mut span = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 258);
        span.facts.times.wall_ns = 1_312_000_000;
        span.facts.times.on_cpu_ns = 1_290_000_000;
        span.facts.times.off_cpu_ns = 12_000_000;
        span.facts.times.idle_ns = 10_000_000;
        span.facts.times.sampled_ns = span.facts.times.on_cpu_ns - 12_500_000;
        span.facts.times.subtree_on_cpu_ns = span.facts.times.on_cpu_ns;
        span.facts.times.subtree_sampled_ns = span.facts.times.sampled_ns;
        span.facts.reasons = [Reason::Above(Measure::Wall)].into_iter().collect();
        span.profile = Ok(ProfileId::for_test(1));
        Kept {
            spans: vec![span],
            profile: Some(ProfileId::for_test(1)),
            samples: 258,
            hotspots: Hotspots::for_test("shop::render", 0.97),
            coverage: Some(0.99),
            waits: Waits::default(),
            awaits: Awaits::default(),
            compared: None,
            files: vec!["profiles/x.html".into()],
        }
    }

    fn line(kept: &Kept) -> String {
        message(&kept.spans[0], kept)
    }

    #[test]
    fn a_message_states_what_was_kept_and_why() {
        let mut kept = kept();
        let expected = "kept `test`: 1.29 s on-CPU, 97 % in shop::render";
        assert_eq!(line(&kept), expected);
        kept.spans[0].facts.fields = vec![("method", "GET".into()), ("http.route", "/a".into())];
        let expected = "kept `GET /a`: 1.29 s";
        assert!(line(&kept).starts_with(expected), "{}", line(&kept));
    }

    #[test]
    fn a_message_begins_with_the_many_child_spans_that_explain_most_of_the_time() {
        let mut kept = kept();
        let mut set = |count, total_ns, open_ns| {
            let name = Some("query".to_owned());
            let totals = vec![ChildTotals { name, count, total_ns, longest_ns: 1, open_ns }];
            kept.spans[0].facts.children.totals = totals;
            line(&kept)
        };
        let in_turn = set(214, 1_200_000_000, 1_200_000_000);
        let expected = "kept `test`: 214 × `query`, 1.20 s in turn; 1.29 s on-CPU, 97 %";
        assert!(in_turn.starts_with(expected), "{in_turn}");
        let at_once = set(80, 5_000_000_000, 700_000_000);
        let expected = "kept `test`: 80 × `query`, 5.00 s at the same time (700 ms); 1.29 s";
        assert!(at_once.starts_with(expected), "{at_once}");
        let few = set(10, 1_200_000_000, 1_200_000_000);
        assert!(few.starts_with("kept `test`: 1.29 s on-CPU"), "{few}");
    }

    #[test]
    fn a_message_says_which_time_was_on_other_threads_and_what_a_share_is_of() {
        let mut kept = kept();
        kept.spans[0].facts.times.on_cpu_ns = 90_000_000;
        let mut other = KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 3);
        kept.spans.push(other.clone());
        let text = line(&kept);
        assert!(text.ends_with(" on other threads), 97 % in shop::render"), "{text}");
        other.facts.is_topmost = true;
        kept.spans.push(other);
        let text = line(&kept);
        let expected = ": 1.29 s on-CPU (1.20 s of it in spans on other threads); of all spans: 97 % in shop::render";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn a_message_says_of_how_little_there_are_samples() {
        let mut kept = kept();
        kept.coverage = Some(0.49);
        kept.hotspots = Hotspots::for_test("shop::render", 0.3);
        let expected =
            ": 1.29 s on-CPU, 30 % in shop::render; the samples represent 49 % of the on-CPU time";
        assert!(line(&kept).ends_with(expected), "{}", line(&kept));
        kept.coverage = Some(0.64);
        assert!(line(&kept).ends_with("the samples represent 64 % of the on-CPU time"));
        kept.coverage = Some(0.9);
        assert!(line(&kept).ends_with(" 30 % in shop::render"), "{}", line(&kept));
        let long = Hotspots::for_test(&format!("shop::{}", "r".repeat(150)), 0.3);
        let short = std::mem::replace(&mut kept.hotspots, long);
        kept.coverage = Some(0.64);
        assert!(line(&kept).ends_with("rrr"), "{}", line(&kept));
        kept.hotspots = short;
        kept.coverage = Some(0.001);
        assert!(line(&kept).ends_with("the samples represent 1 % of the on-CPU time"));
        (kept.coverage, kept.hotspots) = (Some(0.0), Hotspots::default());
        let text = line(&kept);
        assert_eq!(text, "kept `test`: no sample of its on-CPU time");
        // A span that mostly waited.
        kept.spans[0].facts.times.subtree_on_cpu_ns = 1_000_000;
        assert!(!line(&kept).contains("on-CPU time"), "{}", line(&kept));
    }

    #[test]
    fn a_message_leaves_to_the_report_what_would_make_it_long() {
        let mut kept = kept();
        let allocations =
            Allocations { allocated_bytes: 1 << 30, allocations: 7, ..Default::default() };
        kept.spans[0].facts.times.allocations = Some(allocations);
        assert!(line(&kept).contains("; allocated 1.07 GB"), "{}", line(&kept));
        let function = "r".repeat(154);
        kept.hotspots = Hotspots::for_test(&function, 0.97);
        assert_eq!(line(&kept), format!("kept `test`: 1.29 s on-CPU, 97 % in {function}"));
        assert!(headline(&kept.spans[0], &kept).contains("allocated 1.07 GB"));
    }

    #[test]
    fn a_message_that_a_span_waited_for_a_cpu_names_what_it_ran_in_short() {
        let mut kept = kept();
        kept.spans[0].facts.times.usage.run_delay_ns = 1_300_000_000;
        kept.spans[0].facts.times.off_cpu_ns = 1_300_000_000;
        kept.hotspots = Hotspots::for_test(&format!("{}render", "library::".repeat(20)), 0.97);
        let expected = "kept `test`: 1.30 s waiting for a CPU; 1.29 s on-CPU, 97 % in library::library::render";
        assert_eq!(line(&kept), expected);
    }

    #[test]
    fn a_message_without_a_profile_states_the_reason() {
        let mut kept = kept();
        kept.profile = None;
        kept.hotspots = Hotspots::default();
        kept.files.clear();
        kept.spans[0].profile = Err(NoProfile::NoSamples);
        assert!(line(&kept).ends_with(": no profile: no sample fell in it"), "{}", line(&kept));
        let account = &mut kept.spans[0].facts.times;
        (account.on_cpu_ns, account.idle_ns) = (1_000, account.wall_ns - 1_000);
        let text = line(&kept);
        assert!(
            text.ends_with(": no profile: it was in no thread for 1.31 s (of a future, `AwaitsLayer` or `.profiled()` shows where)"),
            "{text}"
        );
        // Its future is polled through `Profiled`, and is no longer said to be in no thread.
        kept.spans[0].facts.times.await_ns = 1_300_000_000;
        let text = line(&kept);
        assert!(
            text.ends_with(": no profile: it awaited for 1.30 s, but no await was sampled"),
            "{text}"
        );
        let account = &mut kept.spans[0].facts.times;
        account.await_ns = 0;
        (account.off_cpu_ns, account.idle_ns) = (account.idle_ns, 0);
        let text = line(&kept);
        assert!(
            text.ends_with(": no profile: it was off-CPU for 1.31 s, in no wait with a stack"),
            "{text}"
        );
        let account = &mut kept.spans[0].facts.times;
        (account.off_cpu_ns, account.other_spans_ns) = (0, account.off_cpu_ns);
        let text = line(&kept);
        assert!(
            text.ends_with(": no profile: for 1.31 s its thread was in other spans on its stack"),
            "{text}"
        );
        let account = &mut kept.spans[0].facts.times;
        account.other_spans_ns = 0;
        // Before its first enter.
        (account.wall_ns, account.off_cpu_ns, account.idle_ns) = (1_600_000, 0, 1_500_000);
        assert!(line(&kept).ends_with(": no profile: no sample fell in it"));
    }

    #[test]
    fn a_message_says_what_is_known_of_waits_that_no_stack_shows() {
        const MS: u64 = 1_000_000;
        let mut kept = kept();
        kept.hotspots = Hotspots::default();
        let times = &mut kept.spans[0].facts.times;
        (times.wall_ns, times.subtree_on_cpu_ns, times.idle_ns) = (420 * MS, MS, 0);
        let mut of = |off_ms: u64, switches, waits, runnable_ms: u64, stopped_ms: u64| {
            let facts = &mut kept.spans[0].facts;
            facts.times.off_cpu_ns = off_ms * MS;
            facts.times.usage.voluntary_switches = switches;
            facts.times.usage.run_delay_ns = runnable_ms * MS;
            kept.spans[0].stopped_ns = stopped_ms * MS;
            kept.waits =
                Waits { count: waits, total: Duration::from_millis(380), ..Waits::default() };
            line(&kept)
        };
        let short = "kept `test`: 200 waits of 2.00 ms, too short for stacks: 95 % of its time";
        assert_eq!(of(400, 200, 0, 0, 0), short);
        // The waits are known, but not where they were.
        assert_eq!(
            of(400, 1, 1, 0, 0),
            "kept `test`: 1 wait of 400 ms, without a stack: 95 % of its time"
        );
        assert_eq!(of(200, 200, 0, 0, 0), "kept `test`", "half of it");
        assert_eq!(of(400, 200, 0, 390, 0), "kept `test`: 390 ms waiting for a CPU");
        assert_eq!(of(400, 0, 0, 0, 0), "kept `test`", "it never waited");
        assert_eq!(of(400, 200, 0, 0, 900), short, "the collector was late");
        kept.spans[0].facts.times.wall_ns = 14_300 * MS;
        kept.spans[0].stopped_ns = 14_000 * MS;
        let stopped = "kept `test`: the process was stopped or the machine paused for 14.0 s";
        assert_eq!(line(&kept), stopped);
    }

    #[test]
    fn what_explains_the_time_of_a_span_that_failed_stands_beside_its_error() {
        let mut kept = kept();
        let facts = &mut kept.spans[0].facts;
        (facts.error_at, facts.span) = (Some("src/error.rs:31".to_owned()), "a".repeat(150).into());
        let line = line(&kept);
        assert!(
            line.contains(": error at src/error.rs:31; 1.29 s on-CPU, 97 % in shop::r"),
            "{line}"
        );
    }

    #[test]
    fn what_was_awaited_before_an_error_is_said_if_nothing_else_is_certain() {
        let mut kept = kept();
        kept.spans[0].facts.error_at = Some("src/error.rs:31".to_owned());
        kept.awaits.before_error = Some("shop::fetch (src/upstream.rs:41)".to_owned());
        assert!(
            line(&kept).contains(": error at src/error.rs:31; 1.29 s on-CPU"),
            "{}",
            line(&kept)
        );
        kept.hotspots = Hotspots::default();
        let said = "kept `test`: error at src/error.rs:31, after an await in shop::fetch (src/upstream.rs:41)";
        assert_eq!(line(&kept), said);
    }

    /// The profile leaves the process.
    #[test]
    fn only_the_log_has_what_an_error_says() {
        let mut kept = kept();
        kept.spans[0].error = Some(("no offers: timed out".into(), false));
        let said = line(&kept);
        assert!(said.starts_with("kept `test`: error \"no offers: timed out\"; 1.29 s"), "{said}");
        kept.spans[0].facts.error_at = Some("src/error.rs:31".to_owned());
        let said = line(&kept);
        assert!(
            said.contains(": error \"no offers: timed out\", logged at src/error.rs:31; 1.29"),
            "{said}"
        );
        kept.spans[0].error = Some(("no offers".into(), true));
        let panicked = ": error \"no offers\", panicked at src/error.rs:31; 1.29";
        assert!(line(&kept).contains(panicked), "{}", line(&kept));
        assert!(headline(&kept.spans[0], &kept).starts_with("error at src/error.rs:31; "));
    }

    #[test]
    fn foreign_code_is_shown_with_the_function_that_awaits_it() {
        let mut kept = kept();
        kept.hotspots = Hotspots::for_test("sqlite3VdbeExec", 0.7);
        let mut said = |ms| {
            let place = "shop::fetch (src/upstream.rs:41)".to_owned();
            kept.awaits.mostly_in = Some((place, Duration::from_millis(ms)));
            headline(&kept.spans[0], &kept)
        };
        let ran = "1.29 s on-CPU, 70 % in sqlite3VdbeExec";
        assert_eq!(said(700), format!("{ran}, awaited in shop::fetch (src/upstream.rs:41)"));
        assert_eq!(said(600), ran, "it awaited something else before");
        kept.hotspots.locate_for_test("src/render.rs:7");
        assert!(!headline(&kept.spans[0], &kept).contains("awaited"), "its own code");
    }

    #[test]
    fn foreign_code_whose_callers_are_unknown_is_shown_with_what_allocates_in_it() {
        let mut kept = kept();
        let mut allocated = Hotspots::for_test("shop::matches", 0.9);
        allocated.locate_for_test("src/search.rs:3");
        let foreign = Hotspots::for_test("regex::build", 0.9);
        kept.hotspots = foreign.and_for_test(SampleKind::AllocatedBytes, allocated);
        let said = "1.29 s on-CPU, 90 % in regex::build, which allocates in shop::matches (src/search.rs:3)";
        assert_eq!(headline(&kept.spans[0], &kept), said);
    }

    #[test]
    fn many_awaits_stand_beside_the_time_that_they_take() {
        let mut kept = kept();
        kept.awaits = Awaits::for_test(Duration::from_millis(9));
        kept.spans[0].facts.times.awaits = 5_506;
        let said = |function: &str| {
            let mut kept = kept.clone();
            let awaited = Hotspots::for_test(function, 1.0);
            kept.hotspots = kept.hotspots.and_for_test(SampleKind::Await, awaited);
            headline(&kept.spans[0], &kept)
        };
        assert_eq!(
            said("shop::render"),
            "1.29 s on-CPU (pending 5506 times), 97 % in shop::render"
        );
        assert_eq!(said("shop::fetch"), "1.29 s on-CPU, 97 % in shop::render");
    }

    #[test]
    fn a_number_of_waits_is_that_at_the_place_that_is_named() {
        let mut kept = kept();
        kept.spans[0].facts.times.subtree_on_cpu_ns = 1_000_000;
        let wait = Hotspots::for_test("shop::assign", 1.0);
        kept.hotspots = Hotspots::default().and_for_test(SampleKind::OffCpu, wait);
        let mut said = |count| {
            let total = Duration::from_millis(1_250);
            kept.waits = Waits { count, total, ..Waits::default() };
            line(&kept)
        };
        let there = "100 % in shop::assign";
        assert_eq!(said(30), format!("kept `test`: 1.25 s blocked, {there}"), "29 elsewhere?");
        assert_eq!(said(1), format!("kept `test`: 1 wait of 1.25 s, {there}"));
    }

    #[test]
    fn a_wait_is_not_also_said_to_be_for_a_cpu() {
        const MS: u64 = 1_000_000;
        let mut kept = kept();
        let times = &mut kept.spans[0].facts.times;
        (times.wall_ns, times.idle_ns, times.off_cpu_ns) = (1_189 * MS, 0, 1_076 * MS);
        (times.on_cpu_ns, times.subtree_on_cpu_ns) = (113 * MS, 113 * MS);
        times.usage.run_delay_ns = 490 * MS;
        let wait = Hotspots::for_test("shop::sign", 1.0);
        kept.hotspots = Hotspots::default().and_for_test(SampleKind::OffCpu, wait);
        let total = Duration::from_millis(730);
        let site = WaitSite {
            function: "shop::sign".to_owned(),
            location: String::new(),
            call: "[sync to disk]".to_owned(),
            waited: total,
        };
        let in_async = Some(site);
        kept.waits = Waits { count: 70, total, longest: None, in_async, in_async_total: total };
        let said = "586 ms blocking its executor, 100 % in shop::sign; 490 ms waiting for a CPU";
        assert_eq!(line(&kept), format!("kept `test`: {said}"));
        kept.spans[0].facts.times.usage.run_delay_ns = 0;
        assert!(line(&kept).contains(": 730 ms blocking"), "{}", line(&kept));
        kept.spans[0].facts.times.usage.run_delay_ns = 1_076 * MS;
        assert_eq!(line(&kept), "kept `test`: 1.08 s waiting for a CPU");
    }

    #[test]
    fn a_long_line_leaves_out_callees_and_callers_before_a_reason() {
        let mut kept = kept();
        let times = &mut kept.spans[0].facts.times;
        times.usage.run_delay_ns = 1_300_000_000;
        times.off_cpu_ns = 1_300_000_000;
        kept.hotspots = Hotspots::for_test("clinic::charts::serialize", 0.93);
        kept.hotspots.locate_for_test("src/charts.rs:12");
        kept.hotspots.nest_for_test("clinic::charts::render", "core::ptr::copy_nonoverlapping");
        let function =
            "clinic::charts::serialize (src/charts.rs:12, called by clinic::charts::render)";
        let callee = "53 % of that in core::ptr::copy_nonoverlapping";
        let waited = "kept `test`: 1.30 s waiting for a CPU";
        assert_eq!(line(&kept), format!("{waited}; 1.29 s on-CPU, 93 % in {function}, {callee}"));
        // The report has what part of that was sampled.
        kept.coverage = Some(0.6);
        assert_eq!(line(&kept), format!("{waited}; 1.29 s on-CPU, 93 % in {function}, {callee}"));
        kept.coverage = None;
        // The lesser part of a line that names code.
        let allocated_bytes = 1 << 30;
        let allocations =
            Allocations { allocated_bytes, allocations: 7_000_000_000_000, ..Default::default() };
        kept.spans[0].facts.times.allocations = Some(allocations);
        let short = function.replace(", called by clinic::charts::render", "");
        let allocated = "allocated 1.07 GB in 7,000,000,000,000 allocations, freed 0 B";
        let said = format!("{waited}; 1.29 s on-CPU, 93 % in {short}; {allocated}");
        assert_eq!(line(&kept), said);
    }

    #[test]
    fn a_wait_for_other_threads_of_the_span_comes_last() {
        let mut kept = kept();
        let wait = Hotspots::for_test("shop::all", 1.0);
        kept.hotspots = kept.hotspots.clone().and_for_test(SampleKind::OffCpu, wait);
        let mut said = |waited_ms| {
            let total = Duration::from_millis(waited_ms);
            kept.waits = Waits { count: 1, total, ..Waits::default() };
            headline(&kept.spans[0], &kept)
        };
        let (ran, waited) = ("1.29 s on-CPU, 97 % in shop::render", "100 % in shop::all");
        assert_eq!(said(1_305), format!("{ran}; 1 wait of 1.30 s, {waited}"));
        // There is not enough of that to say so.
        assert_eq!(said(2_900), format!("1 wait of 2.90 s, {waited}; {ran}"));
    }

    #[test]
    fn spans_of_one_name_that_a_field_could_tell_apart_are_noted_once() {
        let metadata = |span: fn() -> tracing::Span| {
            let subscriber = tracing_subscriber::registry();
            tracing::subscriber::with_default(subscriber, || span().metadata().unwrap())
        };
        let request = metadata(|| tracing::info_span!("request", method = "GET", uri = "/a"));
        let plain = metadata(|| tracing::info_span!("request", method = "GET"));
        let other = metadata(|| tracing::info_span!("other", uri = "/a"));
        let line_after = |metadata: &[&'static tracing::Metadata<'static>]| {
            let mut hint = NameHint::default();
            let lines = metadata.iter().filter_map(|metadata| {
                let mut kept = kept();
                kept.spans[0].metadata = metadata;
                let facts = &mut kept.spans[0].facts;
                facts.span = metadata.name().into();
                facts.fields = vec![("method", "GET".into())];
                Some(hint.event(&kept)?.message)
            });
            lines.collect::<Vec<_>>()
        };
        assert!(line_after(&[request; 4]).is_empty());
        let lines = line_after(&[request; 20]);
        let [line] = lines.as_slice() else { panic!("{lines:?}") };
        assert_eq!(
            line,
            "all 5 kept spans are named `request{method=GET}`: TRACING_PROFILING_SPAN_FIELDS=method,uri also shows the \
             values of their field `uri`, in the log and in profiles"
        );
        assert!(line_after(&[plain; 20]).is_empty(), "nothing could tell them apart");
        let mut mixed = vec![request; 3];
        mixed.push(other);
        mixed.extend([request; 20]);
        assert!(line_after(&mixed).is_empty());
    }

    #[test]
    fn a_message_says_what_a_span_awaited() {
        let ms = std::time::Duration::from_millis;
        let mut kept = kept();
        let account = &mut kept.spans[0].facts.times;
        account.wall_ns = 1_210_000_000;
        (account.idle_ns, account.subtree_on_cpu_ns) = (1_200_000_000, 9_000_000);
        kept.awaits = Awaits {
            delay: ms(20),
            delayed_by: Some("report".to_owned()),
            ..Awaits::for_test(ms(1_180))
        };
        kept.hotspots = Hotspots::of_awaits_for_test(1.0);
        let awaited = "1.18 s awaiting, 100 % in shop::fetch (src/upstream.rs:41) at tokio::time::sleep; \
                       20.0 ms scheduling delay behind `report`";
        let head = "kept `test`: idle 1.20 s";
        assert_eq!(line(&kept), format!("kept `test`: {awaited}"));
        kept.awaits.total = ms(900);
        assert!(line(&kept).starts_with(&format!("{head}: 900 ms awaiting, 100 %")), "not all");
        for (awaits, often) in [(49, ""), (812, " (pending 812 times)")] {
            kept.spans[0].facts.times.awaits = awaits;
            let said = line(&kept);
            assert!(said.contains(&format!(" awaiting{often}, 100 % in shop::fetch")), "{said}");
        }
        kept.spans[0].facts.times.awaits = 0;
        // Samples of short awaits are estimates, and no more than its idle time.
        kept.awaits = Awaits { total: ms(1_230), ..kept.awaits };
        let part = awaited.replace("1.18 s", "1.20 s").split(';').next().unwrap().to_owned();
        assert_eq!(line(&kept), format!("kept `test`: {part}"), "all of it");
        // Two futures that are polled at once await for no longer than the span does.
        kept.awaits = Awaits { total: ms(2_360), ..kept.awaits };
        assert_eq!(line(&kept), format!("kept `test`: {part}"));
        let times = &mut kept.spans[0].facts.times;
        (times.await_ns, times.delay_ns) = (1_150_000_000, 30_000_000);
        let known = "1.15 s awaiting, 100 % in shop::fetch (src/upstream.rs:41) at tokio::time::sleep; 30.0 ms";
        assert!(line(&kept).contains(known), "{}", line(&kept));
        kept.hotspots = Hotspots::of_awaits_for_test(0.5);
        let half = "50 % in shop::fetch (src/upstream.rs:41) at tokio::time::sleep; 30.0 ms scheduling delay behind `report`";
        let said = format!("{head}; awaits of several futures at once: {half}");
        assert_eq!(line(&kept), said, "half of both is no half of the time");
        kept.hotspots = Hotspots::of_awaits_for_test(1.0);
        kept.awaits.total = ms(1_180);
        // The awaits of others are not a part of its own idle time.
        let all = format!("{head}; awaits of all spans: {awaited}");
        kept.awaits.are_of_topmost = false;
        assert_eq!(line(&kept), all);
        kept.awaits.are_of_topmost = true;
        kept.spans.push(KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 3));
        assert_eq!(line(&kept), all);
        kept.spans[0].facts.times.idle_ns = 100_000_000;
        assert!(!line(&kept).contains("idle"), "{}", line(&kept));
    }

    #[test]
    fn a_long_line_has_both_sides_of_a_deadlock_and_what_an_error_says() {
        let mut kept = kept();
        let [a, b] = ["`GET /staff/swap/{id}/{role}`", "`GET /calendar/of/{ward}`"];
        let facts = &mut kept.spans[0].facts;
        let said = |[of_a, of_b]: [&str; 2]| {
            let waits = "waits for the lock of";
            format!("deadlock: {a}{of_a} {waits} {b}{of_b}, which {waits} {a}{of_a}")
        };
        facts.deadlock = Some(said([" (thread 17989)", " (thread 17990)"]).into());
        let expected = format!("kept `test`: {}; 1.29 s on-CPU", said(["", ""]));
        assert!(line(&kept).starts_with(&expected), "{}", line(&kept));
        let facts = &mut kept.spans[0].facts;
        (facts.deadlock, facts.error_at) = (None, Some("src/error.rs:31".to_owned()));
        let error = "e".repeat(140);
        for (is_panic, place) in [(false, ""), (true, ", panicked at src/error.rs:31")] {
            kept.spans[0].error = Some((error.as_str().into(), is_panic));
            let expected = format!("kept `test`: error \"{error}\"{place}");
            assert!(line(&kept).starts_with(&expected), "{}", line(&kept));
            assert!(!line(&kept).contains("logged at"));
        }
    }

    #[test]
    fn what_an_error_says_is_worth_more_than_where_and_what_was_awaited() {
        let mut kept = kept();
        let times = &mut kept.spans[0].facts.times;
        (times.wall_ns, times.idle_ns, times.subtree_on_cpu_ns) =
            (1_210_000_000, 1_200_000_000, 9_000_000);
        kept.awaits = Awaits::for_test(Duration::from_millis(1_180));
        kept.hotspots = Hotspots::of_awaits_for_test(1.0);
        kept.hotspots.nest_for_test("shop::keys::sign", "tokio::time::sleep");
        let error = "e".repeat(115);
        kept.spans[0].error = Some((error.as_str().into(), false));
        let awaited = "1.18 s awaiting in shop::fetch (called by keys::sign)";
        assert_eq!(line(&kept), format!("kept `test`: error \"{error}\"; {awaited}"));
    }

    #[test]
    fn a_line_that_is_still_too_long_is_cut() {
        let line = |name: &str, function: &str| {
            let place = format!("{function} (src/a.rs:1) at tokio::Notified");
            fitting(format!("kept `{name}`: 752 ms awaiting, 100 % in {place}"))
        };
        assert!(line("GET /", "shop::a").ends_with(" at tokio::Notified"));
        let long_name = line(&"/dose".repeat(40), "shop::a");
        let end = "…`: 752 ms awaiting, 100 % in shop::a (src/a.rs:1) at tokio::Notified";
        assert!(long_name.ends_with(end), "{long_name}");
        let endless = line("a", &"m".repeat(300));
        assert!(endless.ends_with("m…"), "{endless}");
        assert_eq!([long_name, endless].map(|line| line.chars().count()), [MOST_CHARS; 2]);
    }

    #[test]
    fn one_sample_of_short_awaits_is_not_of_several_futures() {
        let mut kept = kept();
        let account = &mut kept.spans[0].facts.times;
        (account.wall_ns, account.idle_ns, account.subtree_on_cpu_ns) =
            (5_000_000, 4_190_000, 100_000);
        kept.awaits = Awaits::for_test(Duration::from_millis(10));
        kept.hotspots = Hotspots::of_awaits_for_test(1.0);
        let expected = "kept `test`: 4.19 ms awaiting, 100 % in shop::fetch";
        assert!(line(&kept).starts_with(expected), "{}", line(&kept));
    }

    #[test]
    fn a_message_has_no_time_whose_error_is_as_large() {
        let mut kept = kept();
        let account = &mut kept.spans[0].facts.times;
        account.wall_ns = 14_200_000_000;
        account.subtree_on_cpu_ns = 7_090_000_000;
        account.subtree_on_cpu_error_ns = 7_090_000_001;
        let text = line(&kept);
        assert_eq!(text, "kept `test`: 97 % in shop::render");
        kept.spans[0].facts.times.subtree_on_cpu_error_ns = 7_000_000_000;
        assert!(line(&kept).contains("7.09 s on-CPU"), "{}", line(&kept));
        let span = &mut kept.spans[0];
        let account = &mut span.facts.times;
        (account.off_cpu_ns, account.on_cpu_error_ns) = (14_000_000_000, 14_000_000_000);
        let text = without_profile(NoProfile::NoSamples, &kept.spans[0]);
        assert_eq!(text, NoProfile::NoSamples.to_string());
    }

    #[test]
    fn a_span_without_a_profile_refers_to_none() {
        let mut kept = kept();
        let id = ProfileId::for_test(7);
        (kept.profile, kept.spans[0].profile) = (Some(id), Err(NoProfile::NoMemory));
        let span = &kept.spans[0];
        assert_eq!(
            [true, false].map(|is_first| profile_of(span, &kept, is_first)),
            [Some(id), None]
        );
        kept.spans[0].profile = Ok(id);
        assert_eq!(profile_of(&kept.spans[0], &kept, false), Some(id));
    }

    #[test]
    fn a_message_says_how_a_span_differs_from_typical_ones() {
        let compared_with = |references| {
            let mut kept = kept();
            let mut summary = Compared::for_test(references).summary();
            kept.spans[0].facts.span = "GET /checkout".into();
            kept.compared = Some(summary.clone());
            let first = line(&kept);
            let Some(slower_in) = summary.slower_in.as_mut() else { return vec![first] };
            (slower_in.extra_ns, slower_in.quantity) = (600_000_000, of(TimeKind::Await));
            summary.times_typical = Some(1.9);
            kept.compared = Some(summary.clone());
            let second = line(&kept);
            let slower_in = summary.slower_in.as_mut().unwrap();
            slower_in.extra_ns = 212_000_000;
            slower_in.quantity = Quantity::Wall(TimeKind::UnexplainedIdle, SpentIn::Unknown);
            summary.times_typical = Some(1.44);
            kept.compared = Some(summary);
            let third = line(&kept);
            kept.spans[0].facts.span = "GET /other".into();
            vec![first, second, third, line(&kept)]
        };
        let rest = "1.29 s on-CPU, 97 % in shop::render";
        let head = "kept `GET /checkout`: 1.9 × its typical 98.0 ms";
        let expected = [
            format!("kept `GET /checkout`: {rest}; 12 × its typical 98.0 ms"),
            format!("{head}; most of the rest is awaiting in shop::fetch (src/a.rs:9); {rest}"),
            format!(
                "kept `GET /checkout`: 1.4 × its typical 98.0 ms; 212 ms of the rest is unexplained idle; {rest}"
            ),
            format!("kept `GET /other`: {rest}"),
        ];
        assert_eq!(compared_with(200), expected);
        assert_eq!(compared_with(9), [format!("kept `GET /checkout`: {rest}")]);

        fn of(kind: TimeKind) -> Quantity {
            let function =
                OwnFunction { name: "shop::fetch".into(), file: "src/a.rs".into(), line: 9 };
            Quantity::Wall(kind, SpentIn::Function(Arc::new(function)))
        }
    }

    #[test]
    fn a_message_names_no_function_of_a_span_that_mostly_waited() {
        let mut kept = kept();
        kept.samples = 1;
        kept.spans[0].facts.times.subtree_on_cpu_ns = 1_000_000;
        assert!(!line(&kept).contains("shop::render"));
    }
}

//! Sums up the awaits and scheduling delays of a profile.

use std::collections::HashMap;
use std::time::Duration;

use super::code_origin::{CodeOrigin, crate_of, crate_of_file};
use super::leaf::Leaf;
use super::model::Profile;
use super::sample::{Sample, SampleKind};
use super::waits::{SourceFunction, UNKNOWN, own_number};

/// The weight of an await that represents others, each shorter than this.
pub(crate) const SAMPLED_AWAIT_NS: u64 = 10_000_000;

/// The outermost frame of what was awaited last before an error was logged.
pub const BEFORE_ERROR: &str = "[awaited before the error]";

/// The sum of a profile's awaits and scheduling delays: estimates, as samples of 10 ms represent shorter ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Awaits {
    /// The total duration of all awaits.
    pub total: Duration,
    /// The total scheduling delay, in which futures had been woken and not been polled yet.
    pub delay: Duration,
    /// The span that was on the executor's thread for most of the scheduling delay, as far as that is known.
    pub delayed_by: Option<String>,
    /// All of them are of one span that is inside no other in the profile.
    pub are_of_topmost: bool,
    /// The function of the program in which nearly all of it was, and for how long, with threads in its span or not.
    pub mostly_in: Option<(String, Duration)>,
    /// The function that awaited something last before an error was logged, with file and line, if a single one did.
    pub before_error: Option<String>,
}

impl Awaits {
    /// Whether there are neither awaits nor scheduling delays, but for what only shows where.
    pub fn is_empty(&self) -> bool {
        self.total < Duration::from_micros(1) && self.delay.is_zero()
    }
}

pub(super) fn sum(profile: &Profile) -> Awaits {
    let awaits = profile.without_joins(SampleKind::Await);
    let total_ns = awaits.into_iter().map(Sample::total).sum();
    Awaits {
        total: Duration::from_nanos(total_ns),
        delay: Duration::from_nanos(profile.total(SampleKind::Delay)),
        delayed_by: delayed_by(profile),
        are_of_topmost: are_of_topmost(profile),
        mostly_in: mostly_in(profile),
        before_error: before_error(profile),
    }
}

fn place_of_program(profile: &Profile, sample: &Sample) -> String {
    profile.place_of_program(&profile.code_of(profile.location_ids(sample.stack)))
}

fn mostly_in(profile: &Profile) -> Option<(String, Duration)> {
    let mut places: HashMap<String, u64> = HashMap::new();
    let kinds = [SampleKind::Await, SampleKind::Delay].into_iter();
    for sample in kinds.flat_map(|kind| profile.without_joins(kind)) {
        let entered_ms = match profile.leaf(sample.leaf) {
            Some(Leaf::AwaitingWhileEntered(ms)) => ms * sample.points.len() as u64,
            _ => 0,
        };
        let place = place_of_program(profile, sample);
        *places.entry(place).or_default() += sample.total() + entered_ms * 1_000_000;
    }
    let all: u64 = places.values().sum();
    let (place, ns) = places.into_iter().find(|(_, ns)| *ns > all / 10 * 9)?;
    (!place.is_empty()).then_some((place, Duration::from_nanos(ns)))
}

fn before_error(profile: &Profile) -> Option<String> {
    let is_noted = |sample: &&Sample| {
        let outermost = profile.stack(sample.stack).last();
        let function = outermost.and_then(|it| profile.function(it.lines.first()?.function));
        function.is_some_and(|function| function.name == BEFORE_ERROR)
    };
    let noted = profile.of_kind(SampleKind::Await).filter(is_noted);
    let mut places = noted.map(|sample| place_of_program(profile, sample));
    let place = places.next().filter(|place| !place.is_empty())?;
    places.all(|other| other == place).then_some(place)
}

fn delayed_by(profile: &Profile) -> Option<String> {
    let mut spans: HashMap<Option<&String>, u64> = HashMap::new();
    for sample in profile.of_kind(SampleKind::Delay) {
        let behind = match profile.leaf(sample.leaf) {
            Some(Leaf::Delayed { behind }) => behind.as_ref(),
            _ => None,
        };
        *spans.entry(behind).or_default() += sample.total();
    }
    let all: u64 = spans.values().sum();
    let most = spans.into_iter().find(|(span, ns)| span.is_some() && *ns > all / 2);
    most.and_then(|(span, _)| span.cloned())
}

fn are_of_topmost(profile: &Profile) -> bool {
    let kinds = [SampleKind::Await, SampleKind::Delay];
    let mut links = kinds.into_iter().flat_map(|kind| profile.of_kind(kind)).map(|s| s.link);
    let Some(Some(first)) = links.next() else { return false };
    links.all(|link| link == Some(first))
        && profile.link(first).is_some_and(|link| link.parent.is_none())
}

/// The name of the innermost function of the program, or what kind of function it is: line tables have no path of one
/// that is inlined. Its file and line follow.
pub(crate) fn own_name(own: &str) -> String {
    let name = without_generics(own);
    match shortened(&name) {
        short if !short.is_empty() => short,
        _ if own.is_empty() => UNKNOWN.to_owned(),
        _ if own.starts_with("{async_fn#") => "async fn".to_owned(),
        _ if own.starts_with("{async_block#") => "async block".to_owned(),
        _ => own.to_owned(),
    }
}

/// What the innermost function of the program calls.
pub(super) fn called(frames: &[SourceFunction<'_>]) -> String {
    let callee = own_number(frames).checked_sub(1).and_then(|number| frames.get(number));
    callee.map(future_of).unwrap_or_default().replace("::poison::", "::")
}

/// What the innermost function of the program awaits: the future that it polls or, if that only polls another one
/// (`Pin`, `PollFn`), that one. If that waits for a place in a pool, the pool; if for a name's addresses, what resolves it.
pub(super) fn awaited(frames: &[SourceFunction<'_>]) -> String {
    let inner = frames.iter().take(own_number(frames)).rev();
    let futures = inner.map(|frame| (frame.origin, future_of(frame)));
    let futures: Vec<_> = futures.filter(|(_, name)| !name.is_empty()).collect();
    let is_telling = |(origin, name): &&(CodeOrigin, String)| {
        let forwards = matches!(origin, CodeOrigin::Std | CodeOrigin::Instrumentation);
        !forwards && crate_of(name).is_some()
    };
    let pool = futures.iter().find(|(_, name)| name.contains("::Pool::"));
    let dns = futures.iter().rfind(|(_, name)| name.contains("::dns"));
    let telling = pool.or(dns).or_else(|| futures.iter().find(is_telling)).or(futures.first());
    telling.map(|(_, name)| name.clone()).unwrap_or_default()
}

/// The future that a function polls: its type, or the module that it is in if the name is not complete.
fn future_of(frame: &SourceFunction<'_>) -> String {
    let name = without_generics(frame.name);
    let Some(module) = module_of(frame) else { return shortened(&name) };
    match crate_of(&name) {
        Some(of) if module.split("::").next() == Some(of) => shortened(&name),
        // The code of a macro is in a function of its user.
        Some(_) => module,
        None if name.starts_with("poll") || name.starts_with(['{', '<']) => module,
        None => format!("{module}::{name}"),
    }
}

/// The module of a dependency's source file: `tokio::time::sleep`, or `tokio::select!` if a macro is defined there.
fn module_of(frame: &SourceFunction<'_>) -> Option<String> {
    if matches!(frame.origin, CodeOrigin::Own | CodeOrigin::Foreign | CodeOrigin::Library) {
        return None;
    }
    let name = crate_of_file(frame.file)?;
    let (_, path) = frame.file.rsplit_once("/src/")?;
    let path = path.strip_suffix(".rs")?;
    let path = path.strip_suffix("/mod").unwrap_or(path);
    Some(match path.rsplit_once("macros/") {
        Some((_, of)) => format!("{name}::{of}!"),
        None if path == "lib" => name,
        None => format!("{name}::{}", path.replace('/', "::")),
    })
}

/// A function's path without type parameters, closures, and the method that polls: `X` for `<X as Future>::poll`,
/// `shop::fetch` for `shop::fetch::{{closure}}`. The name has no generics any more.
fn shortened(name: &str) -> String {
    let (of, method) = match name.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        Some((of, method)) => (of.split(" as ").next().unwrap_or_default(), method),
        None => ("", name),
    };
    let of = of.trim_start_matches(['&', '*']).trim_start_matches("mut ");
    let parts = method.split("::").filter(|part| !part.is_empty() && !part.starts_with('{'));
    let mut parts: Vec<_> = Some(of).filter(|of| !of.is_empty()).into_iter().chain(parts).collect();
    let is_poll = |last: &&str| match of.is_empty() {
        true => ["poll", "poll_next"].contains(last),
        false => last.starts_with("poll"),
    };
    if parts.last().is_some_and(is_poll) {
        parts.pop();
    }
    parts.join("::")
}

/// A name without the contents of `<...>`, except of one that it begins with.
fn without_generics(name: &str) -> String {
    let mut plain = String::new();
    let (mut depth, mut last) = (0, ' ');
    for (at, character) in name.char_indices() {
        let opens = character == '<';
        // Not the arrow of a function's type.
        let closes = character == '>' && last != '-';
        last = character;
        if opens && at > 0 {
            depth += 1;
        }
        if depth == 0 {
            plain.push(character);
        }
        if closes && depth > 0 {
            depth -= 1;
        }
    }
    plain.replace("::::", "::").trim_end_matches("::").to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::code_origin::OwnCode;
    use super::*;
    use crate::profile::{
        FrameKind, Function, Line, Link, LinkId, Location, LocationId, Point, ProfileId,
    };

    const MS: u64 = 1_000_000;

    fn code(profile: &mut Profile, name: &str, file: &str, line: u32) -> LocationId {
        let function = Function { file: file.to_owned(), ..Function::named(name) };
        let lines = vec![Line { function: profile.add_function(function), line, column: 0 }];
        let (kind, address) = (FrameKind::Rust, 0);
        profile.add_location(Location { mapping: None, address, kind, lines, is_inferred: false })
    }

    const TOKIO: &str = "tokio-1.54.1/src/time/sleep.rs";

    /// What waits for an upstream at that line of `shop::upstream::fetch`.
    fn fetch(profile: &mut Profile, line: u32) -> Vec<LocationId> {
        [
            ("tokio::time::sleep::Sleep::poll_elapsed", TOKIO, 431),
            ("<tokio::time::sleep::Sleep as core::future::future::Future>::poll", TOKIO, 457),
            ("shop::upstream::fetch::{{closure}}", "shop/src/upstream.rs", line),
            ("<tracing_profiling::Profiled<F> as core::future::future::Future>::poll", "", 0),
        ]
        .map(|(name, file, line)| code(profile, name, file, line))
        .to_vec()
    }

    fn add(
        profile: &mut Profile,
        kind: SampleKind,
        stack: Vec<LocationId>,
        link: Option<LinkId>,
        ms: u64,
    ) {
        let stack = profile.add_stack(stack);
        let point = Point { time_unix_ns: 1, weight: ms * MS, thread: None };
        profile.add_sample(kind, stack, link, point);
    }

    fn empty() -> Profile {
        Profile::new(ProfileId::for_test(1), 1)
    }

    /// The function, location and future of the longest await, and its length.
    fn longest(profile: &Profile) -> Option<([String; 3], u64)> {
        let site = profile.longest_site(SampleKind::Await, |_| true)?;
        let ns = u64::try_from(site.waited.as_nanos()).unwrap();
        Some(([site.function, site.location, site.call], ns))
    }

    #[test]
    fn the_longest_await_has_its_function_line_and_future() {
        let mut profile = empty();
        for (line, ms) in [(41, 700), (43, 300), (41, 480)] {
            let stack = fetch(&mut profile, line);
            add(&mut profile, SampleKind::Await, stack, None, ms);
        }
        let note = profile.add_remark("[stack not copied]");
        add(&mut profile, SampleKind::Await, vec![note], None, 520);
        profile.classify();
        let awaits = profile.awaits();
        assert_eq!(awaits.total, Duration::from_secs(2));
        let site = ["shop::upstream::fetch", "src/upstream.rs:41", "tokio::time::sleep::Sleep"];
        assert_eq!(longest(&profile), Some((site.map(str::to_owned), 1_180 * MS)));
        assert_eq!((awaits.delay, awaits.delayed_by), (Duration::ZERO, None));
    }

    #[test]
    fn the_blocker_is_the_span_behind_which_most_of_the_delay_was() {
        for (unknown_ms, delayed_by) in [(9, Some("report")), (11, None)] {
            let mut profile = empty();
            for (behind, ms) in
                [(Some("report"), 30), (Some("cart"), 40), (Some("report"), 20), (None, unknown_ms)]
            {
                let stack = fetch(&mut profile, 41);
                let leaf = profile.add_leaf(Leaf::Delayed { behind: behind.map(str::to_owned) });
                let place = (profile.add_stack(stack), leaf);
                let point = Point { time_unix_ns: 1, weight: ms * MS, thread: None };
                profile.add_sample_at(SampleKind::Delay, place, None, point);
            }
            let awaits = profile.awaits();
            let all = Duration::from_millis(90 + unknown_ms);
            assert_eq!((awaits.total, awaits.delay), (Duration::ZERO, all));
            assert_eq!(awaits.delayed_by.as_deref(), delayed_by);
            assert_eq!(longest(&profile), None, "delays are no awaits");
        }
    }

    #[test]
    fn awaits_of_one_span_are_distinguished_from_those_of_several() {
        let are_of_topmost = |spans: &[&str]| {
            let mut profile = empty();
            let outer = profile.add_link(Link::named("request", None));
            for span in spans {
                let link = match *span {
                    "request" => outer,
                    inner => profile.add_link(Link::named(inner, Some(outer))),
                };
                let stack = fetch(&mut profile, 41);
                add(&mut profile, SampleKind::Await, stack, Some(link), 10);
            }
            profile.awaits().are_of_topmost
        };
        assert!(are_of_topmost(&["request", "request"]));
        assert!(!are_of_topmost(&["request", "query"]) && !are_of_topmost(&["query"]));
        assert!(!are_of_topmost(&[]));
    }

    fn frames<'a>(frames: &[(&'a str, &'a str)]) -> Vec<SourceFunction<'a>> {
        let frame = |&(name, file): &(&'a str, &'a str)| {
            let function = Function { file: file.to_owned(), ..Function::named(name) };
            let mut frame = SourceFunction::default();
            (frame.name, frame.file) = (name, file);
            frame.origin = OwnCode::for_test().origin(&function, false);
            frame
        };
        frames.iter().map(frame).collect()
    }

    /// As symbols of a build without optimizations show them.
    #[test]
    fn what_is_awaited_is_the_future_that_the_program_polls() {
        let own = ("shop::upstream::fetch::{{closure}}", "shop/src/upstream.rs");
        let core = "/rustc/library/core/src/future/poll_fn.rs";
        for (inner, expected) in [
            (
                &[("<tokio::net::tcp::TcpStream as tokio::io::AsyncRead>::poll_read", "")][..],
                "tokio::net::tcp::TcpStream",
            ),
            (
                &[("tokio::sync::mpsc::bounded::Receiver<T>::recv::{{closure}}", "")],
                "tokio::sync::mpsc::bounded::Receiver::recv",
            ),
            (
                &[(
                    "<&mut tokio::sync::oneshot::Receiver<fn() -> T> as core::future::future::Future>::poll",
                    "",
                )],
                "tokio::sync::oneshot::Receiver",
            ),
            (
                &[(
                    "<sqlx_core::pool::Pool<DB>>::acquire::<_>::{closure#0}",
                    "sqlx-core-0.8.6/src/pool/mod.rs",
                )],
                "sqlx_core::pool::Pool::acquire",
            ),
            // These only poll another future.
            (
                &[
                    (
                        "<reqwest::async_impl::client::Pending as core::future::future::Future>::poll",
                        "reqwest-0.12.9/src/async_impl/client.rs",
                    ),
                    ("<core::pin::Pin<P> as core::future::future::Future>::poll", ""),
                    ("<F as core::future::future::Future>::poll", ""),
                    (
                        "<tracing::instrument::Instrumented<T> as core::future::future::Future>::poll",
                        "",
                    ),
                ],
                "reqwest::async_impl::client::Pending",
            ),
            (
                &[
                    ("<tokio::sync::notify::Notified as core::future::future::Future>::poll", ""),
                    (
                        "shop::upstream::fetch::{{closure}}::{{closure}}",
                        "tokio-1.54.1/src/macros/select.rs",
                    ),
                    (
                        "<core::future::poll_fn::PollFn<F> as core::future::future::Future>::poll",
                        core,
                    ),
                ],
                "tokio::select!",
            ),
            (
                &[(
                    "<core::future::pending::Pending<T> as core::future::future::Future>::poll",
                    "",
                )],
                "core::future::pending::Pending",
            ),
            (
                &[
                    ("<tokio::sync::batch_semaphore::Acquire as Future>::poll", ""),
                    (
                        "sqlx_core::pool::Pool<DB>::acquire::{{closure}}",
                        "sqlx-core-0.8.6/src/pool/mod.rs",
                    ),
                    (
                        "sqlx_core::query::Query<DB,A>::execute::{{closure}}",
                        "sqlx-core-0.8.6/src/query.rs",
                    ),
                ],
                "sqlx_core::pool::Pool::acquire",
            ),
            (
                &[
                    ("<tokio::runtime::task::join::JoinHandle<T> as Future>::poll", ""),
                    (
                        "<hyper_util::client::legacy::connect::dns::GaiFuture as Future>::poll",
                        "hyper-util-0.1.20/src/client/legacy/connect/dns.rs",
                    ),
                    (
                        "<reqwest::dns::gai::GaiResolver as Resolve>::resolve::{{closure}}",
                        "reqwest-0.12.28/src/dns/gai.rs",
                    ),
                    (
                        "<reqwest::async_impl::client::Pending as core::future::future::Future>::poll",
                        "reqwest-0.12.28/src/async_impl/client.rs",
                    ),
                ],
                "hyper_util::client::legacy::connect::dns::GaiFuture",
            ),
            (&[], ""),
        ] {
            let stack = [inner, &[own]].concat();
            assert_eq!(awaited(&frames(&stack)), expected, "{stack:?}");
        }
    }

    /// As line tables of an optimized build show them: inlined functions have only the last part of their name.
    #[test]
    fn inlined_functions_are_named_by_their_module() {
        let own = [
            ("shop::upstream::fetch::{async_fn#0}", "shop/src/upstream.rs"),
            ("poll<shop::upstream::fetch::{async_fn_env#0}>", "shop/src/main.rs"),
        ];
        for (inner, expected) in [
            (&[("poll_elapsed", TOKIO), ("poll", TOKIO)][..], "tokio::time::sleep"),
            (
                &[("{async_fn#0}<u32>", "tokio-1.54.1/src/sync/mpsc/bounded.rs")],
                "tokio::sync::mpsc::bounded",
            ),
            (
                &[
                    ("poll", "tokio-1.54.1/src/sync/notify.rs"),
                    ("{closure#0}", "tokio-1.54.1/src/macros/select.rs"),
                    (
                        "poll<(), shop::upstream::fetch::{async_fn#0}::{closure_env#0}>",
                        "/rustc/library/core/src/future/poll_fn.rs",
                    ),
                ],
                "tokio::select!",
            ),
            (
                &[("recv<u32>", "/home/me/.cargo/registry/src/i/async-channel-2.3.1/src/lib.rs")],
                "async_channel::recv",
            ),
            (
                &[("poll<u32>", "/rustc/library/core/src/future/pending.rs")],
                "core::future::pending",
            ),
        ] {
            let stack = [inner, &own].concat();
            assert_eq!(awaited(&frames(&stack)), expected, "{stack:?}");
        }
        for (name, expected) in [
            ("shop::upstream::fetch::{async_fn#0}", "shop::upstream::fetch"),
            ("shop::cart::{async_fn#0}::{async_block#0}", "shop::cart"),
            ("shop::{impl#0}::total::{async_fn#1}<u8>", "shop::total"),
            ("{async_fn#0}", "async fn"),
            ("{async_block#0}", "async block"),
            ("shop::poll_orders::{{closure}}", "shop::poll_orders"),
            ("<shop::Queue<T> as core::future::future::Future>::poll", "shop::Queue"),
            ("", UNKNOWN),
        ] {
            assert_eq!(own_name(name), expected);
        }
    }
}

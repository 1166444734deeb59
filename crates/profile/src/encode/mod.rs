//! Encodes profiles. Pure: does no input or output.

mod brief;
mod compared;
#[cfg(all(feature = "otlp", feature = "pprof"))]
#[cfg(test)]
mod deep;
#[cfg(feature = "firefox")]
mod firefox;
mod folded;
mod html;
mod json;
mod markdown;
#[cfg(feature = "otlp")]
mod otlp;
#[cfg(feature = "pprof")]
mod pprof;
#[cfg(feature = "pprof")]
mod pprof_messages;
#[cfg(all(feature = "otlp", feature = "pprof"))]
#[cfg(test)]
mod roundtrip;
#[cfg(any(feature = "otlp", feature = "pprof"))]
mod tables;

pub use compared::{compared_row, compared_value};
#[cfg(feature = "firefox")]
pub use firefox::firefox;
pub use folded::folded;
pub use html::{HtmlContext, KeptSummary, TEXTS_SCRIPT, html};
pub use json::{joined, json_summary, known};
pub use markdown::markdown;
/// The messages of OTLP Profiles, in the version that [`otlp`](fn@otlp) writes.
#[cfg(feature = "otlp")]
pub use opentelemetry_proto::tonic::profiles::v1development as otlp_messages;
#[cfg(feature = "otlp")]
pub use otlp::{otlp, otlp_message};
#[cfg(feature = "pprof")]
pub use pprof::{pprof, pprof_of_threads, pprof_showing};

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, TimeBreakdown};
    use crate::profile::{
        FrameKind, Function, Leaf, Line, Link, LinkId, Location, LocationId, Mapping, Point,
        Profile, ProfileId, SampleKind,
    };

    const PERIOD: u64 = 5_000_000;

    fn function(
        profile: &mut Profile,
        address: u64,
        name: &str,
        file: &str,
        line: u32,
    ) -> LocationId {
        let mapping = profile.add_mapping(Mapping {
            file: "/usr/bin/shop".into(),
            start: 0x1000,
            end: 0x9000,
            file_offset: 0x1000,
            build_ids: vec![("process.executable.build_id.gnu".into(), "abcd".into())],
        });
        let function = Function { file: file.to_owned(), ..Function::named(name) };
        let line = Line { function: profile.add_function(function), line, column: 0 };
        profile.add_location(Location {
            mapping: Some(mapping),
            address,
            kind: FrameKind::Rust,
            lines: vec![line],
            is_inferred: false,
        })
    }

    fn link(profile: &mut Profile, span: &str, parent: Option<LinkId>) -> LinkId {
        profile.add_link(Link::named(span, parent))
    }

    /// A request with an inner span: one sample in `main`, and three in `price`, two of them in the inner span.
    pub(super) fn checkout() -> Profile {
        let mut profile = Profile::new(ProfileId::for_test(1), PERIOD);
        profile.title = "GET /checkout <slow>".to_owned();
        profile.notes = vec!["4 samples & no losses".to_owned()];
        profile.start_unix_ns = 1_000;
        profile.duration_ns = 100;
        let price = function(&mut profile, 0x1010, "shop::price", "/shop/src/price.rs", 7);
        let main = function(&mut profile, 0x1020, "shop::main", "/shop/src/main.rs", 3);
        let inner_stack = profile.add_stack(vec![price, main]);
        let outer_stack = profile.add_stack(vec![main]);
        let request = link(&mut profile, "GET /checkout", None);
        let inner = link(&mut profile, "price all", Some(request));
        for (stack, link, time_unix_ns) in [
            (inner_stack, inner, 1_010),
            (inner_stack, inner, 1_020),
            (inner_stack, request, 1_030),
            (outer_stack, request, 1_099),
        ] {
            let point = Point { time_unix_ns, weight: PERIOD, thread: None };
            profile.add_sample(SampleKind::OnCpu, stack, Some(link), point);
        }
        profile.classify();
        profile
    }

    /// `checkout`, with a function that waits for a lock twice.
    pub(super) fn waiting() -> Profile {
        let mut profile = checkout();
        let reserve = function(&mut profile, 0x1040, "shop::reserve", "/shop/src/stock.rs", 9);
        let reserve = Location { is_inferred: true, ..profile.location(reserve).unwrap().clone() };
        let reserve = profile.add_location(reserve);
        let wait = profile.add_leaf(Leaf::Blocked("futex 0x7f01".to_owned()));
        let place = (profile.add_stack(vec![reserve]), wait);
        let request = link(&mut profile, "GET /checkout", None);
        for (time_unix_ns, weight_ns) in [(1_005, 300_000_000), (1_050, 20_000_000)] {
            let point = Point { time_unix_ns, weight: weight_ns, thread: None };
            profile.add_sample_at(SampleKind::OffCpu, place, Some(request), point);
        }
        profile.classify();
        profile
    }

    /// `checkout`, with a function that awaits twice, and is not polled at once after the first time.
    pub(super) fn awaiting() -> Profile {
        let mut profile = checkout();
        let sleep = "<tokio::time::sleep::Sleep as core::future::future::Future>::poll";
        let sleep = function(&mut profile, 0x1060, sleep, "tokio-1.54.1/src/time/sleep.rs", 457);
        let fetch = "shop::fetch::{{closure}}";
        let fetch = function(&mut profile, 0x1050, fetch, "/shop/src/upstream.rs", 41);
        let stack = profile.add_stack(vec![sleep, fetch]);
        let awaits = profile.add_leaf(Leaf::Awaiting);
        let delays = profile.add_leaf(Leaf::Delayed { behind: Some("report".to_owned()) });
        let request = link(&mut profile, "GET /checkout", None);
        for (kind, leaf, time_unix_ns, weight_ns) in [
            (SampleKind::Await, awaits, 1_002, 900_000_000),
            (SampleKind::Delay, delays, 1_040, 20_000_000),
            (SampleKind::Await, awaits, 1_060, 280_000_000),
        ] {
            let point = Point { time_unix_ns, weight: weight_ns, thread: None };
            profile.add_sample_at(kind, (stack, leaf), Some(request), point);
        }
        profile.classify();
        profile
    }

    /// A profile of `awaiting`, with a kept request of that wall time, which is idle but for the samples.
    pub(super) fn with_idle(mut profile: Profile, wall_ms: u64) -> Profile {
        let wall_ns = wall_ms * 1_000_000;
        let times = TimeBreakdown {
            wall_ns,
            on_cpu_ns: profile.total(SampleKind::OnCpu),
            idle_ns: wall_ns - profile.total(SampleKind::OnCpu),
            await_ns: profile.total(SampleKind::Await),
            delay_ns: profile.total(SampleKind::Delay),
            ..TimeBreakdown::default()
        };
        let span = "GET /checkout".into();
        profile.spans = vec![Facts { span, times, is_topmost: true, ..Facts::default() }];
        profile
    }

    /// One sample of a stack with that depth: `f0` calls `f1`, which calls `f2` and so on.
    pub(super) fn deep(depth: u64) -> Profile {
        let mut profile = Profile::new(ProfileId::for_test(3), PERIOD);
        let mut stack: Vec<_> = (0..depth)
            .map(|i| function(&mut profile, 0x1000 + i, &format!("f{i}"), "", 0))
            .collect();
        stack.reverse();
        let stack = profile.add_stack(stack);
        let link = link(&mut profile, "request", None);
        let point = Point { time_unix_ns: 1, weight: PERIOD, thread: None };
        profile.add_sample(SampleKind::OnCpu, stack, Some(link), point);
        profile
    }

    /// Two samples, one with a weight of 5 ms and one of 1.3 ms.
    pub(super) fn mixed_rates() -> Profile {
        let mut profile = Profile::new(ProfileId::for_test(2), PERIOD);
        let main = function(&mut profile, 0x1020, "shop::main", "/shop/src/main.rs", 3);
        let stack = profile.add_stack(vec![main]);
        for (time_unix_ns, weight_ns) in [(1, PERIOD), (2, 1_300_000)] {
            profile.add_sample(
                SampleKind::OnCpu,
                stack,
                None,
                Point { time_unix_ns, weight: weight_ns, thread: None },
            );
        }
        profile
    }
}

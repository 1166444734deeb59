//! A strategy for arbitrary profiles.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::ids::{SpanId, TraceId};
use crate::profile::{
    FrameKind, Function, Line, Link, Location, LocationId, Mapping, Point, Profile, ProfileId,
    SampleKind,
};

const PERIOD: u64 = 5_000_000;
const START: u64 = 1_700_000_000_000_000_000;
const DURATION: u64 = 1_000;

/// There are only few names and locations, so that some are equal.
#[derive(Clone, Debug)]
struct Place {
    what: usize,
    mapping: Option<u64>,
    address: u64,
    /// Function, file, line.
    lines: Vec<(u32, u32, u32)>,
    is_inferred: bool,
}

#[derive(Clone, Debug)]
struct Taken {
    kind: SampleKind,
    stack: Vec<usize>,
    link: Option<usize>,
    time: u64,
    weight: u64,
}

fn place() -> impl Strategy<Value = Place> {
    let lines = vec((0..5_u32, 0..3_u32, 0..4_u32), 0..4);
    let mapping = proptest::option::of(0..3_u64);
    (0..4_usize, mapping, 0..6_u64, lines, any::<bool>()).prop_map(
        |(what, mapping, address, lines, is_inferred)| Place {
            what,
            mapping,
            address,
            lines,
            is_inferred,
        },
    )
}

fn taken(weights: impl Strategy<Value = u64>) -> impl Strategy<Value = Taken> {
    let stack = vec(0..100_usize, 0..6);
    let link = proptest::option::of(0..100_usize);
    // As many on-CPU samples as others.
    let kind = (0..14_usize).prop_map(|kind| SampleKind::ALL.get(kind).copied());
    let kind = kind.prop_map(|kind| kind.unwrap_or(SampleKind::OnCpu));
    (kind, stack, link, 0..DURATION, weights, 1..1_000_000_u64).prop_map(
        |(kind, stack, link, time, weight, duration)| {
            let weight = if kind == SampleKind::OnCpu { weight } else { duration };
            Taken { kind, stack, link, time, weight }
        },
    )
}

/// Spans: the name, the parent, and whether they have ids.
type Spans = Vec<(u32, Option<usize>, Option<u8>)>;

/// Samples with the same weight, with multiples of it, or with arbitrary weights.
pub(super) fn any_profile() -> impl Strategy<Value = Profile> {
    let same = Just(PERIOD).boxed();
    let multiple = (1..4_u64).prop_map(|times| times * PERIOD).boxed();
    let any = (1..3 * PERIOD).boxed();
    let spans =
        vec((0..3_u32, proptest::option::of(0..100_usize), proptest::option::of(1..3_u8)), 0..5);
    let of = |weights| vec(taken(weights), 0..30);
    let samples = prop_oneof![of(same), of(multiple), of(any)];
    (vec(place(), 1..12), spans, samples)
        .prop_map(|(places, spans, samples)| made(&places, &spans, &samples))
}

fn made(places: &[Place], spans: &Spans, samples: &[Taken]) -> Profile {
    let mut profile = Profile::new(ProfileId::for_test(7), PERIOD);
    (profile.start_unix_ns, profile.duration_ns) = (START, DURATION);
    let locations: Vec<_> = places.iter().map(|place| location(&mut profile, place)).collect();
    let mut links = Vec::new();
    for (name, parent, id) in spans {
        let parent = parent.and_then(|parent| links.get(parent % links.len().max(1)).copied());
        let ids = id.map(|id| (TraceId::from_bytes([id; 16]), SpanId::from_bytes([id; 8])));
        let link = Link::named(format!("span {name}"), parent);
        links.push(profile.add_link(Link { ids, linked: ids, ..link }));
    }
    for sample in samples {
        let stack = sample.stack.iter().map(|place| locations[place % locations.len()]).collect();
        let stack = profile.add_stack(stack);
        let link = sample.link.and_then(|link| links.get(link % links.len().max(1)).copied());
        let point =
            Point { time_unix_ns: START + sample.time, weight: sample.weight, thread: None };
        profile.add_sample(sample.kind, stack, link, point);
    }
    profile
}

fn location(profile: &mut Profile, place: &Place) -> LocationId {
    let kind =
        [FrameKind::Rust, FrameKind::Native, FrameKind::Kernel, FrameKind::Remark][place.what];
    if kind == FrameKind::Remark {
        return profile.add_remark(&format!("[remark {}]", place.address));
    }
    let mapping = place.mapping.filter(|_| kind != FrameKind::Kernel).map(|number| {
        let build_ids = [("gnu", "abcd"), ("htlhash", "0123")].into_iter().take(number as usize);
        let build_id = |(kind, id): (&str, &str)| {
            (format!("process.executable.build_id.{kind}"), format!("{id}{number}"))
        };
        profile.add_mapping(Mapping {
            file: format!("lib{number}.so"),
            start: number * 0x1000,
            end: (number + 1) * 0x1000,
            file_offset: number,
            build_ids: build_ids.map(build_id).collect(),
        })
    });
    let lines = place.lines.iter().map(|(function, file, line)| {
        let function = Function {
            name: format!("shop::f{function}"),
            system_name: format!("_ZN{function}E"),
            file: ["", "src/a.rs", "src/b.rs"][*file as usize].to_owned(),
        };
        Line { function: profile.add_function(function), line: *line, column: line * 2 }
    });
    let lines = lines.collect();
    let address = place.mapping.unwrap_or(0) * 0x1000 + place.address;
    let is_inferred = place.is_inferred;
    profile.add_location(Location { mapping, address, kind, lines, is_inferred })
}

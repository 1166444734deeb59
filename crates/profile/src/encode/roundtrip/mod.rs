//! Round trips from a profile to OTLP and back, and on to pprof and back. The samples stay the same, except for what a
//! format cannot represent. The decoders exist only for these tests.

mod generated;
mod read_otlp;
mod read_pprof;

use std::collections::BTreeMap;

use proptest::prelude::*;

use self::generated::any_profile;
use super::{otlp, pprof};
use crate::ids::{SpanId, TraceId};
use crate::profile::{FrameKind, Function, Leaf, Location, Profile, Resource, Sample, SampleKind};

/// File, start, end, offset and build ids.
type InFile = (String, u64, u64, u64, Vec<(String, String)>);

/// A frame, without indices of tables.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Frame {
    mapping: Option<InFile>,
    address: u64,
    kind: &'static str,
    /// Name, the linker's name, file, line and column.
    lines: Vec<(String, String, String, u32, u32)>,
    is_inferred: bool,
}

/// A [`SampleKind`], which has no order.
type Kind = u8;

/// What identifies a sample.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    kind: Kind,
    stack: Vec<Frame>,
    ids: Option<(String, String)>,
    /// The innermost span's name.
    span: Option<String>,
}

/// The weights of a sample by time.
type Times = BTreeMap<u64, u64>;

fn frame(profile: &Profile, location: &Location) -> Frame {
    let mapping = location.mapping.and_then(|id| profile.mapping(id)).cloned();
    let line = |line: &crate::profile::Line| {
        let Function { name, system_name, file } = profile.function(line.function).unwrap().clone();
        (name, system_name, file, line.line, line.column)
    };
    Frame {
        mapping: mapping.map(|m| (m.file, m.start, m.end, m.file_offset, m.build_ids)),
        address: location.address,
        kind: match location.kind {
            FrameKind::Rust => "rust",
            FrameKind::Native => "native",
            FrameKind::Kernel => "kernel",
            // Formats only state that it is not code.
            FrameKind::Remark => "",
        },
        lines: location.lines.iter().map(line).collect(),
        is_inferred: location.is_inferred,
    }
}

fn key(profile: &Profile, sample: &Sample) -> Key {
    let link = sample.link.and_then(|id| profile.link(id));
    let text = |(trace, span): (TraceId, SpanId)| (trace.to_string(), span.to_string());
    let leaf = profile.leaf(sample.leaf).and_then(Leaf::frame).map(|name| Frame {
        mapping: None,
        address: 0,
        kind: "",
        lines: vec![(name.clone(), name, String::new(), 0, 0)],
        is_inferred: false,
    });
    let code = profile.stack(sample.stack).map(|location| frame(profile, location));
    Key {
        kind: sample.kind as Kind,
        stack: leaf.into_iter().chain(code).collect(),
        ids: link.and_then(|link| link.ids).map(text),
        span: link.map(|link| link.span.clone()),
    }
}

/// All samples of a profile, as far as a format distinguishes them.
fn samples(profile: &Profile, forget: impl Fn(&mut Key)) -> BTreeMap<Key, Times> {
    let mut samples: BTreeMap<Key, Times> = BTreeMap::new();
    for sample in profile.samples() {
        let mut key = key(profile, sample);
        forget(&mut key);
        let times = samples.entry(key).or_default();
        for point in &sample.points {
            *times.entry(point.time_unix_ns).or_default() += point.weight;
        }
    }
    samples
}

/// Only the sums of the samples.
fn sums(samples: BTreeMap<Key, Times>, is_of: impl Fn(&Key) -> bool) -> BTreeMap<Key, u64> {
    let sums = samples.into_iter().filter(|(key, _)| is_of(key));
    sums.map(|(key, times)| (key, times.values().sum())).collect()
}

/// pprof has one build id per mapping, without its kind. Frames have no kind, and a linker's name that equals the name
/// is left out.
fn as_in_pprof(key: &mut Key) {
    for frame in &mut key.stack {
        (frame.kind, frame.is_inferred) = ("", false);
        // A linker's name that equals the name is left out.
        for (name, linkers, ..) in &mut frame.lines {
            if linkers.is_empty() {
                linkers.clone_from(name);
            }
        }
        if let Some((.., build_ids)) = &mut frame.mapping {
            build_ids.truncate(1);
            build_ids.iter_mut().for_each(|(kind, _)| kind.clear());
        }
    }
    // A span without a name has no label.
    key.span = key.span.take().filter(|span| !span.is_empty());
}

fn roundtrip_by_otlp(profile: &Profile) -> Profile {
    read_otlp::read(&otlp(profile, &Resource::new()))
}

fn counts(profile: &Profile) -> (usize, [u64; 8]) {
    (profile.sample_count(), SampleKind::ALL.map(|kind| profile.total(kind)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn by_otlp(profile in any_profile()) {
        let back = roundtrip_by_otlp(&profile);
        let (before, after) = (samples(&profile, |_| {}), samples(&back, |_| {}));
        // Waits, and CPU time without arbitrary weights, keep their times. All others keep their sums.
        let has_times = |key: &Key| {
            let of_cpu = profile.unit_weight_ns().is_some() && key.kind == SampleKind::OnCpu as Kind;
            of_cpu || key.kind == SampleKind::OffCpu as Kind
        };
        let timed = |samples: BTreeMap<Key, Times>| {
            samples.into_iter().filter(|(key, _)| has_times(key)).collect::<BTreeMap<_, _>>()
        };
        prop_assert_eq!(timed(before.clone()), timed(after.clone()));
        prop_assert_eq!(sums(before, |_| true), sums(after, |_| true));
        prop_assert_eq!((profile.start_unix_ns, profile.duration_ns), (back.start_unix_ns, back.duration_ns));
        prop_assert_eq!(profile.id, back.id);
    }

    #[test]
    fn by_pprof(profile in any_profile()) {
        let back = read_pprof::read(&pprof(&profile));
        prop_assert_eq!(
            sums(samples(&profile, as_in_pprof), |_| true),
            sums(samples(&back, as_in_pprof), |_| true)
        );
        let ((count, ..), (count_back, ..)) = (counts(&profile), counts(&back));
        prop_assert_eq!(count, count_back);
        prop_assert_eq!((profile.start_unix_ns, profile.duration_ns), (back.start_unix_ns, back.duration_ns));
    }

    #[test]
    fn by_otlp_and_then_by_pprof(profile in any_profile()) {
        let back = read_pprof::read(&pprof(&roundtrip_by_otlp(&profile)));
        prop_assert_eq!(
            sums(samples(&profile, as_in_pprof), |_| true),
            sums(samples(&back, as_in_pprof), |_| true)
        );
    }
}

#[test]
fn the_profiles_of_the_other_tests() {
    use super::tests::{awaiting, checkout, deep, mixed_rates, waiting};
    for mut profile in [checkout(), waiting(), awaiting(), mixed_rates(), deep(60)] {
        profile.duration_ns = 100;
        let back = roundtrip_by_otlp(&profile);
        let all = |profile: &Profile| sums(samples(profile, |_| {}), |_| true);
        assert_eq!(all(&profile), all(&back));
        let back = read_pprof::read(&pprof(&profile));
        let all = |profile: &Profile| sums(samples(profile, as_in_pprof), |_| true);
        assert_eq!(all(&profile), all(&back));
        assert_eq!(counts(&profile), counts(&back));
    }
}

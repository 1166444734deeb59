//! Decodes an OTLP message.

use std::collections::BTreeMap;

use opentelemetry_proto::tonic::common::v1::any_value;
use prost::Message;

use crate::encode::otlp_messages as proto;
use crate::ids::{SpanId, TraceId};
use crate::profile::{
    FrameKind, Function, Leaf, Line, Link, LinkId, Location, LocationId, Mapping, MappingId, Point,
    Profile, ProfileId, SampleKind, StackId,
};

pub(super) fn read(bytes: &[u8]) -> Profile {
    let data = proto::ProfilesData::decode(bytes).unwrap();
    let dictionary = data.dictionary.unwrap();
    let profiles = &data.resource_profiles[0].scope_profiles[0].profiles;
    let first = &profiles[0];
    let id = ProfileId::from_bytes(first.profile_id.as_slice().try_into().unwrap());
    let kind = &dictionary.string_table[first.sample_type.unwrap().type_strindex as usize];
    let of_name = |of: &SampleKind| of.value_type()[0] == kind.as_str();
    let id = SampleKind::ALL.into_iter().find(of_name).map_or(id, |kind| kind.id_of(id));
    let mut reader = Reader { dictionary, profile: Profile::new(id, first.period.unsigned_abs()) };
    reader.profile.start_unix_ns = first.time_unix_nano;
    reader.profile.duration_ns = first.duration_nano;
    for profile in profiles {
        reader.add(profile);
    }
    reader.profile
}

struct Reader {
    dictionary: proto::ProfilesDictionary,
    profile: Profile,
}

impl Reader {
    fn add(&mut self, profile: &proto::Profile) {
        let kind = profile.sample_type.unwrap();
        let kind = (self.string(kind.type_strindex), self.string(kind.unit_strindex));
        let range = profile.time_unix_nano..profile.time_unix_nano + profile.duration_nano;
        for sample in &profile.samples {
            let stack = self.stack(sample.stack_index);
            let link = self.link(sample);
            assert!(sample.timestamps_unix_nano.iter().all(|time| range.contains(time)));
            assert!(sample.timestamps_unix_nano.is_sorted());
            let values = sample.values.iter().map(|value| value.unsigned_abs());
            let times = sample.timestamps_unix_nano.iter().copied();
            let (kind, points): (_, Vec<(u64, u64)>) = match (kind.0.as_str(), kind.1.as_str()) {
                ("samples", "count") if sample.values.is_empty() => {
                    let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
                    times.for_each(|time| *counts.entry(time).or_default() += 1);
                    let period = profile.period.unsigned_abs();
                    let points = counts.into_iter().map(|(time, count)| (time, count * period));
                    (SampleKind::OnCpu, points.collect())
                }
                ("samples", "count") => {
                    assert_eq!((profile.period, values.len()), (1, 1));
                    let points = values.map(|ns| (profile.time_unix_nano, ns));
                    (SampleKind::OnCpu, points.collect())
                }
                other => {
                    let kind = match other {
                        ("off_cpu", "nanoseconds") => SampleKind::OffCpu,
                        ("await", "nanoseconds") => SampleKind::Await,
                        ("scheduling_delay", "nanoseconds") => SampleKind::Delay,
                        ("alloc_space", "bytes") => SampleKind::AllocatedBytes,
                        ("alloc_objects", "count") => SampleKind::Allocations,
                        ("inuse_space", "bytes") => SampleKind::InUseBytes,
                        ("inuse_objects", "count") => SampleKind::InUseBlocks,
                        other => panic!("{other:?}"),
                    };
                    let points = match kind {
                        SampleKind::OffCpu => {
                            assert_eq!(times.len(), values.len());
                            times.zip(values).collect()
                        }
                        _ => values.map(|value| (profile.time_unix_nano, value)).collect(),
                    };
                    (kind, points)
                }
            };
            for (time_unix_ns, weight_ns) in points {
                let point = Point { time_unix_ns, weight: weight_ns, thread: None };
                // The stack has all that is known.
                let leaf = self.profile.add_leaf(Leaf::Ran);
                self.profile.add_sample_at(kind, (stack, leaf), link, point);
            }
        }
    }

    fn string(&self, index: i32) -> String {
        self.dictionary.string_table[index as usize].clone()
    }

    fn attribute(&self, index: i32) -> (String, any_value::Value) {
        let attribute = &self.dictionary.attribute_table[index as usize];
        let value = attribute.value.clone().unwrap().value.unwrap();
        (self.string(attribute.key_strindex), value)
    }

    fn stack(&mut self, index: i32) -> StackId {
        let stack = self.dictionary.stack_table[index as usize].clone();
        let locations = stack.location_indices.iter().map(|index| self.location(*index)).collect();
        self.profile.add_stack(locations)
    }

    fn location(&mut self, index: i32) -> LocationId {
        assert_ne!(index, 0);
        let location = self.dictionary.location_table[index as usize].clone();
        let (mut kind, mut is_inferred) = (FrameKind::Remark, false);
        for index in &location.attribute_indices {
            match self.attribute(*index) {
                (key, any_value::Value::StringValue(text)) if key == "profile.frame.type" => {
                    kind = match text.as_str() {
                        "rust" => FrameKind::Rust,
                        "kernel" => FrameKind::Kernel,
                        _ => FrameKind::Native,
                    };
                }
                (key, any_value::Value::BoolValue(is_so)) if key == "profile.frame.inferred" => {
                    is_inferred = is_so;
                }
                other => panic!("{other:?}"),
            }
        }
        let lines = location.lines.iter().map(|line| {
            let function = self.dictionary.function_table[line.function_index as usize];
            let [name, system_name, file] =
                [function.name_strindex, function.system_name_strindex, function.filename_strindex]
                    .map(|index| self.string(index));
            let function = self.profile.add_function(Function { name, system_name, file });
            Line { function, line: line.line as u32, column: line.column as u32 }
        });
        let lines = lines.collect();
        let mapping = self.mapping(location.mapping_index);
        let address = location.address;
        self.profile.add_location(Location { mapping, address, kind, lines, is_inferred })
    }

    fn mapping(&mut self, index: i32) -> Option<MappingId> {
        let mapping = self.dictionary.mapping_table[index as usize].clone();
        let build_ids =
            mapping.attribute_indices.iter().map(|index| match self.attribute(*index) {
                (key, any_value::Value::StringValue(id)) => (key, id),
                other => panic!("{other:?}"),
            });
        let build_ids = build_ids.collect();
        let file = self.string(mapping.filename_strindex);
        (index != 0).then(|| {
            self.profile.add_mapping(Mapping {
                file,
                start: mapping.memory_start,
                end: mapping.memory_limit,
                file_offset: mapping.file_offset,
                build_ids,
            })
        })
    }

    fn link(&mut self, sample: &proto::Sample) -> Option<LinkId> {
        let link = &self.dictionary.link_table[sample.link_index as usize];
        let ids = (sample.link_index != 0).then(|| {
            let trace = TraceId::from_bytes(link.trace_id.as_slice().try_into().unwrap());
            let span = SpanId::from_bytes(link.span_id.as_slice().try_into().unwrap());
            (trace, span)
        });
        let span = sample.attribute_indices.iter().map(|index| match self.attribute(*index) {
            (key, any_value::Value::StringValue(name)) if key == "span.name" => name,
            other => panic!("{other:?}"),
        });
        let span = span.max()?;
        Some(self.profile.add_link(Link { ids, linked: ids, ..Link::named(span, None) }))
    }
}

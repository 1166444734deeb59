//! Decodes a pprof file.

use std::collections::HashMap;
use std::io::Read;

use flate2::read::GzDecoder;
use prost::Message;

use super::super::pprof_messages as proto;
use crate::profile::{
    FrameKind, Function, Leaf, Line, Link, LinkId, Location, LocationId, Mapping, MappingId, Point,
    Profile, ProfileId, SampleKind,
};

pub(super) fn read(bytes: &[u8]) -> Profile {
    let mut plain = Vec::new();
    GzDecoder::new(bytes).read_to_end(&mut plain).unwrap();
    let message = proto::Profile::decode(plain.as_slice()).unwrap();
    let mut profile = Profile::new(ProfileId::for_test(7), message.period.unsigned_abs());
    profile.start_unix_ns = message.time_nanos.unsigned_abs();
    profile.duration_ns = message.duration_nanos.unsigned_abs();
    let mut reader = Reader { message: message.clone(), profile, kinds: Vec::new() };
    let types: Vec<_> = message.sample_type.iter().map(|kind| reader.string(kind.r#type)).collect();
    let kind = |name: &String| match name.as_str() {
        "samples" => None,
        "cpu" => Some(SampleKind::OnCpu),
        "off_cpu" => Some(SampleKind::OffCpu),
        "await" => Some(SampleKind::Await),
        "scheduling_delay" => Some(SampleKind::Delay),
        "alloc_space" => Some(SampleKind::AllocatedBytes),
        "alloc_objects" => Some(SampleKind::Allocations),
        "inuse_space" => Some(SampleKind::InUseBytes),
        "inuse_objects" => Some(SampleKind::InUseBlocks),
        other => panic!("{other}"),
    };
    reader.kinds = types.iter().map(kind).collect();
    for sample in &message.sample {
        reader.add(sample);
    }
    reader.profile
}

struct Reader {
    message: proto::Profile,
    profile: Profile,
    /// Of the values; `None` for the number of samples.
    kinds: Vec<Option<SampleKind>>,
}

impl Reader {
    fn string(&self, index: i64) -> String {
        self.message.string_table[index as usize].clone()
    }

    fn add(&mut self, sample: &proto::Sample) {
        let stack = sample.location_id.iter().map(|id| self.location(*id)).collect();
        let stack = self.profile.add_stack(stack);
        let link = self.link(&sample.label);
        assert_eq!(sample.value.len(), self.kinds.len());
        let values: Vec<_> = self.kinds.iter().copied().zip(sample.value.clone()).collect();
        let count = values.iter().find(|(kind, _)| kind.is_none()).map_or(0, |(_, count)| *count);
        // Times are not encoded: all are set to the start.
        let time_unix_ns = self.profile.start_unix_ns;
        let mut add = |kind, weight: i64| {
            let point = Point { time_unix_ns, weight: weight.unsigned_abs(), thread: None };
            // The stack has all that is known.
            let leaf = self.profile.add_leaf(Leaf::Ran);
            self.profile.add_sample_at(kind, (stack, leaf), link, point);
        };
        let with_kinds = values.iter().filter_map(|(kind, value)| Some(((*kind)?, *value)));
        let with_kinds: Vec<_> = with_kinds.filter(|(_, value)| *value > 0).collect();
        if count == 0 {
            assert!(with_kinds.len() == 1 || with_kinds.iter().all(|(kind, _)| !kind.is_time()));
            for (kind, weight) in with_kinds {
                assert_ne!(kind, SampleKind::OnCpu);
                add(kind, weight);
            }
            return;
        }
        let [(kind, weight)] = with_kinds[..] else { panic!("{values:?}") };
        assert_eq!(kind, SampleKind::OnCpu);
        let cpu = weight;
        for number in 0..count {
            let rest = if number == 0 { cpu % count } else { 0 };
            add(SampleKind::OnCpu, cpu / count + rest);
        }
    }

    fn link(&mut self, labels: &[proto::Label]) -> Option<LinkId> {
        let labels = labels.iter().map(|label| (self.string(label.key), self.string(label.str)));
        let labels: HashMap<_, _> = labels.collect();
        assert!(labels.keys().all(|key| ["span_name", "trace_id", "span_id"].contains(&&**key)));
        let id = |key| labels.get(key).map(String::as_str);
        let ids = id("trace_id")
            .zip(id("span_id"))
            .map(|(trace, span)| (trace.parse().unwrap(), span.parse().unwrap()));
        let span = labels.get("span_name").cloned().unwrap_or_default();
        (!labels.is_empty()).then(|| self.profile.add_link(Link { ids, ..Link::named(span, None) }))
    }

    fn location(&mut self, id: u64) -> LocationId {
        let location = self.message.location[id as usize - 1].clone();
        assert_eq!(location.id, id);
        let lines = location.line.iter().map(|line| {
            let function = self.message.function[line.function_id as usize - 1];
            let [name, system_name, file] =
                [function.name, function.system_name, function.filename]
                    .map(|index| self.string(index));
            let function = self.profile.add_function(Function { name, system_name, file });
            Line { function, line: line.line as u32, column: line.column as u32 }
        });
        let lines: Vec<_> = lines.collect();
        let mapping = self.mapping(location.mapping_id, !lines.is_empty());
        let (address, kind) = (location.address, FrameKind::Native);
        self.profile.add_location(Location { mapping, address, kind, lines, is_inferred: false })
    }

    fn mapping(&mut self, id: u64, has_lines: bool) -> Option<MappingId> {
        let mapping = *self.message.mapping.get((id as usize).checked_sub(1)?).unwrap();
        // Otherwise pprof would search for the file.
        assert!(mapping.has_functions || !has_lines);
        let build_id = self.string(mapping.build_id);
        let build_ids = Some(build_id).filter(|id| !id.is_empty()).into_iter();
        let file = self.string(mapping.filename);
        Some(self.profile.add_mapping(Mapping {
            file,
            start: mapping.memory_start,
            end: mapping.memory_limit,
            file_offset: mapping.file_offset,
            build_ids: build_ids.map(|id| (String::new(), id)).collect(),
        }))
    }
}

//! OTLP Profiles, as of opentelemetry-proto v1.10 and v1.11.
//!
//! `docs/otlp.md` lists the rules that the comments in the protocol state, and those that receivers were found to
//! require.

use std::collections::HashMap;
use std::mem::take;

use indexmap::{IndexMap, IndexSet};
use opentelemetry_proto::tonic::common::v1::{
    AnyValue, ArrayValue, InstrumentationScope, KeyValue, any_value,
};
use opentelemetry_proto::tonic::resource::v1::Resource as ProtoResource;
use prost::Message;

use super::otlp_messages as proto;
use super::tables::{CodeOrLeaf, Tables, UsedLocation, number, signed};
use crate::ids::{SpanId, TraceId};
use crate::profile::{
    Attribute, FrameKind, Function, FunctionId, LeafId, Link, LocationId, MappingId, Point,
    Profile, ProfileId, Resource, SampleKind, StackId, Value,
};

/// Encodes a binary `ProfilesData`. The bytes are also a valid `ExportProfilesServiceRequest`.
///
/// A profile in OTLP has samples of one type. On-CPU samples are therefore one profile, with the id of `profile`. Others
/// have a [`SampleKind::id_of`] it: waits are of the type `off_cpu` in nanoseconds, each with its start and duration.
/// Awaits (`await`) and scheduling delays (`scheduling_delay`) have a sum in nanoseconds for each stack, and allocations
/// are two profiles, of bytes (`alloc_space`) and numbers (`alloc_objects`).
///
/// On-CPU samples of a span are counted (`samples`): each is a period. If all represent the same CPU time or multiples of
/// it, each is a timestamp, or several equal ones; otherwise their sum, with a period of 1 ns. Those of a process are CPU
/// time (`cpu` in nanoseconds).
pub fn otlp(profile: &Profile, resource: &Resource) -> Vec<u8> {
    otlp_message(profile, resource).encode_to_vec()
}

/// The message before encoding.
pub fn otlp_message(profile: &Profile, resource: &Resource) -> proto::ProfilesData {
    let mut dictionary = Dictionary::new(profile);
    let mut kinds: Vec<_> = SampleKind::ALL.into_iter().collect();
    kinds.retain(|kind| profile.of_kind(*kind).next().is_some());
    if kinds.is_empty() {
        kinds.push(SampleKind::OnCpu);
    }
    let profiles = kinds.into_iter().map(|kind| match kind {
        SampleKind::OnCpu => encode_on_cpu(profile, &mut dictionary),
        kind => encode_weights(profile, kind, &mut dictionary),
    });
    let profiles = profiles.collect();
    let scope = InstrumentationScope {
        name: "tracing-profiling".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let scope_profiles = proto::ScopeProfiles {
        scope: Some(scope),
        profiles,
        // The conventions for what is not our own.
        schema_url: resource.schema_url().unwrap_or_default().to_owned(),
    };
    let resource_profiles = proto::ResourceProfiles {
        resource: Some(encode_resource(resource)),
        scope_profiles: vec![scope_profiles],
        schema_url: resource.schema_url().unwrap_or_default().to_owned(),
    };
    proto::ProfilesData {
        resource_profiles: vec![resource_profiles],
        dictionary: Some(dictionary.finish()),
    }
}

/// One sample for each stack, link and name of the innermost span, with its points in order of time.
fn merge(
    profile: &Profile,
    kind: SampleKind,
    dictionary: &mut Dictionary<'_>,
) -> Vec<(proto::Sample, Vec<Point>)> {
    let mut places: HashMap<(i32, i32, Vec<i32>), usize> = HashMap::new();
    let mut samples: Vec<(proto::Sample, Vec<Point>)> = Vec::new();
    for sample in profile.of_kind(kind) {
        let stack_index = dictionary.stack(sample.stack, sample.leaf);
        let span = sample.link.and_then(|id| profile.link(id));
        let link_index = dictionary.link(span);
        for point in &sample.points {
            let thread = point.thread.and_then(|id| profile.thread(id));
            // Names and no ids, since receivers make a series of each value.
            let names = [
                ("span.name", span.map(|span| &span.span)),
                ("thread.name", thread.map(|thread| &thread.name)),
            ];
            let attributes = names.into_iter().filter_map(|(key, name)| {
                let name = name.filter(|name| !name.is_empty() || key == "span.name")?;
                Some(dictionary.attribute(key, &Value::from(name.as_str())))
            });
            let mut attribute_indices: Vec<_> = attributes.collect();
            if profile.is_of_process() {
                for (key, value) in span.into_iter().flat_map(|span| &span.fields) {
                    attribute_indices.push(dictionary.attribute(key, &Value::from(value.as_str())));
                }
            }
            let key = (stack_index, link_index, attribute_indices.clone());
            let place = *places.entry(key).or_insert_with(|| {
                let sample = proto::Sample {
                    stack_index,
                    link_index,
                    attribute_indices,
                    ..proto::Sample::default()
                };
                samples.push((sample, Vec::new()));
                samples.len() - 1
            });
            if let Some((_, points)) = samples.get_mut(place) {
                points.push(*point);
            }
        }
    }
    for (_, points) in &mut samples {
        points.sort_unstable_by_key(|point| point.time_unix_ns);
    }
    samples
}

/// Encodes samples that have weights, of a type in a unit.
///
/// Waits are events, each with its time. Pyroscope 2.2.1 refuses profiles of other types with a sample that has several
/// values, or whose period is 0.
fn encode_weights(
    profile: &Profile,
    kind: SampleKind,
    dictionary: &mut Dictionary<'_>,
) -> proto::Profile {
    let has_times = kind == SampleKind::OffCpu;
    let samples = merge(profile, kind, dictionary).into_iter();
    let samples = samples.map(|(sample, points)| {
        let weights = points.iter().map(|point| point.weight);
        match has_times {
            true => proto::Sample {
                timestamps_unix_nano: points.iter().map(|point| point.time_unix_ns).collect(),
                values: weights.map(signed).collect(),
                ..sample
            },
            false => proto::Sample { values: vec![signed(weights.sum())], ..sample },
        }
    });
    proto::Profile {
        samples: samples.collect(),
        sample_type: Some(dictionary.value_type(kind.value_type())),
        // Values are not multiples of a period. But Parca rejects a profile without this type, and if it has stored one with
        // an empty type, it does not answer queries any more.
        period_type: Some(dictionary.value_type(kind.value_type())),
        period: i64::from(!has_times),
        ..encode_common(profile, kind.id_of(profile.id), dictionary)
    }
}

fn encode_common(
    profile: &Profile,
    id: ProfileId,
    dictionary: &mut Dictionary<'_>,
) -> proto::Profile {
    let attributes = profile.attributes.iter();
    proto::Profile {
        attribute_indices: attributes
            .map(|Attribute { key, value }| dictionary.attribute(key, value))
            .collect(),
        time_unix_nano: profile.start_unix_ns,
        duration_nano: profile.duration_ns,
        profile_id: id.to_bytes().to_vec(),
        ..proto::Profile::default()
    }
}

fn encode_on_cpu(profile: &Profile, dictionary: &mut Dictionary<'_>) -> proto::Profile {
    let is_of_process = profile.is_of_process();
    let weight = profile.unit_weight_ns().filter(|_| !is_of_process);
    let samples = merge(profile, SampleKind::OnCpu, dictionary).into_iter();
    let samples = samples.map(|(sample, points)| match weight {
        Some(unit) => {
            let times = points.iter().flat_map(|point| {
                let count = usize::try_from(point.weight / unit).unwrap_or(1);
                std::iter::repeat_n(point.time_unix_ns, count)
            });
            proto::Sample { timestamps_unix_nano: times.collect(), ..sample }
        }
        None => {
            let sum = points.iter().map(|point| point.weight).sum();
            proto::Sample { values: vec![signed(sum)], ..sample }
        }
    });
    let cpu = SampleKind::OnCpu.value_type();
    // Profilers of processes send CPU time. Of spans, receivers are asked for one type.
    let (sample_type, otherwise) =
        if is_of_process { (cpu, profile.period_ns) } else { (["samples", "count"], 1) };
    let sample_type = dictionary.value_type(sample_type);
    let period_type = dictionary.value_type(cpu);
    proto::Profile {
        sample_type: Some(sample_type),
        samples: samples.collect(),
        period_type: Some(period_type),
        period: signed(weight.unwrap_or(otherwise).max(1)),
        ..encode_common(profile, profile.id, dictionary)
    }
}

/// The tables, with only the entries that are used. The first entry of each is the zero value, which means "none".
struct Dictionary<'a> {
    tables: Tables<'a>,
    stacks: IndexSet<(StackId, Option<LeafId>)>,
    links: IndexSet<(TraceId, SpanId)>,
    /// By key and value.
    attributes: IndexMap<(i32, Vec<u8>), proto::KeyValueAndUnit>,
}

fn index(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// A table with these entries after the zero value.
fn table<T: Default>(entries: impl Iterator<Item = T>) -> Vec<T> {
    std::iter::once(T::default()).chain(entries).collect()
}

impl<'a> Dictionary<'a> {
    fn new(profile: &'a Profile) -> Self {
        Self {
            tables: Tables::new(profile),
            stacks: IndexSet::new(),
            links: IndexSet::new(),
            attributes: IndexMap::new(),
        }
    }

    fn finish(mut self) -> proto::ProfilesDictionary {
        let stacks = take(&mut self.stacks).into_iter();
        let stack_table = table(stacks.map(|(stack, leaf)| self.encode_stack(stack, leaf)));
        let locations = take(&mut self.tables.locations).into_iter();
        let location_table = table(locations.map(|entry| self.encode_location(entry)));
        let functions = take(&mut self.tables.functions).into_iter();
        let function_table = table(functions.map(|entry| self.encode_function(entry)));
        let mappings = take(&mut self.tables.mappings).into_iter();
        let mapping_table = table(mappings.map(|id| self.encode_mapping(id)));
        let link_table = table(self.links.iter().map(|(trace, span)| proto::Link {
            trace_id: trace.to_bytes().to_vec(),
            span_id: span.to_bytes().to_vec(),
        }));
        proto::ProfilesDictionary {
            mapping_table,
            location_table,
            function_table,
            link_table,
            string_table: self.tables.strings.into_iter().collect(),
            attribute_table: table(self.attributes.into_values()),
            stack_table,
        }
    }

    fn string(&mut self, string: &str) -> i32 {
        index(self.tables.string(string))
    }

    fn value_type(&mut self, [kind, unit]: [&str; 2]) -> proto::ValueType {
        proto::ValueType { type_strindex: self.string(kind), unit_strindex: self.string(unit) }
    }

    fn attribute(&mut self, key: &str, value: &Value) -> i32 {
        let value = encode_value(value);
        let key_strindex = self.string(key);
        let unit_strindex = self.string(if key.ends_with("_ns") { "ns" } else { "" });
        let entry = self.attributes.entry((key_strindex, value.encode_to_vec()));
        let index = index(entry.index() + 1);
        let value = Some(value);
        entry.or_insert(proto::KeyValueAndUnit { key_strindex, value, unit_strindex });
        index
    }

    fn encode_function(&mut self, entry: CodeOrLeaf<FunctionId>) -> proto::Function {
        let Function { name, system_name, file } = self.tables.function(entry);
        proto::Function {
            name_strindex: self.string(&name),
            system_name_strindex: self.string(&system_name),
            filename_strindex: self.string(&file),
            start_line: 0,
        }
    }

    fn encode_mapping(&mut self, id: MappingId) -> proto::Mapping {
        let Some(mapping) = self.tables.profile.mapping(id) else {
            return proto::Mapping::default();
        };
        let build_ids = mapping.build_ids.iter();
        let attribute_indices =
            build_ids.map(|(kind, id)| self.attribute(kind, &Value::String(id.clone()))).collect();
        proto::Mapping {
            memory_start: mapping.start,
            memory_limit: mapping.end,
            file_offset: mapping.file_offset,
            filename_strindex: self.string(&mapping.file),
            attribute_indices,
        }
    }

    fn encode_location(&mut self, entry: CodeOrLeaf<LocationId>) -> proto::Location {
        let UsedLocation { code, lines, mapping } = self.tables.location(entry);
        let frame_type = code.and_then(|code| match code.kind {
            FrameKind::Rust => Some("rust"),
            FrameKind::Native => Some("native"),
            FrameKind::Kernel => Some("kernel"),
            FrameKind::Remark => None,
        });
        let frame_type =
            frame_type.map(|kind| self.attribute("profile.frame.type", &Value::from(kind)));
        let inferred = code.filter(|code| code.is_inferred);
        let inferred =
            inferred.map(|_| self.attribute("profile.frame.inferred", &Value::Bool(true)));
        let lines = lines.into_iter().map(|(function, line, column)| proto::Line {
            function_index: index(function),
            line,
            column,
        });
        proto::Location {
            lines: lines.collect(),
            mapping_index: index(mapping),
            address: code.map_or(0, |code| code.address),
            attribute_indices: frame_type.into_iter().chain(inferred).collect(),
        }
    }

    fn encode_stack(&mut self, id: StackId, leaf: Option<LeafId>) -> proto::Stack {
        let frames = self.tables.frames(id, leaf).into_iter();
        proto::Stack { location_indices: frames.map(index).collect() }
    }

    fn stack(&mut self, id: StackId, leaf: LeafId) -> i32 {
        index(number(&mut self.stacks, (id, self.tables.not_shown(leaf))))
    }

    fn link(&mut self, span: Option<&Link>) -> i32 {
        let linked = span.and_then(|span| span.linked);
        linked.map_or(0, |linked| index(number(&mut self.links, linked)))
    }
}

fn encode_resource(resource: &Resource) -> ProtoResource {
    let attributes = resource.attributes().map(|(key, value)| KeyValue {
        key: key.to_owned(),
        value: Some(encode_value(value)),
        ..KeyValue::default()
    });
    ProtoResource { attributes: attributes.collect(), ..ProtoResource::default() }
}

fn encode_value(value: &Value) -> AnyValue {
    let value = match value {
        Value::String(text) => any_value::Value::StringValue(text.clone()),
        Value::Int(number) => any_value::Value::IntValue(*number),
        Value::Double(number) => any_value::Value::DoubleValue(*number),
        Value::Bool(truth) => any_value::Value::BoolValue(*truth),
        Value::Array(values) => {
            let values = values.iter().map(encode_value).collect();
            any_value::Value::ArrayValue(ArrayValue { values })
        }
    };
    AnyValue { value: Some(value) }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{awaiting, checkout, mixed_rates, waiting};
    use super::*;
    use crate::ids::{SpanId, TraceId};
    use crate::profile::{ProfileScope, ProfiledThread};

    fn decode(profile: &Profile) -> proto::ProfilesData {
        let resource = Resource::new().with("service.name", "shop");
        proto::ProfilesData::decode(otlp(profile, &resource).as_slice()).unwrap()
    }

    fn only_profile(data: &proto::ProfilesData) -> &proto::Profile {
        &data.resource_profiles[0].scope_profiles[0].profiles[0]
    }

    #[test]
    fn the_first_entry_of_each_table_is_the_zero_value() {
        let dictionary = decode(&checkout()).dictionary.unwrap();
        assert_eq!(dictionary.string_table[0], "");
        assert_eq!(dictionary.function_table[0], proto::Function::default());
        assert_eq!(dictionary.mapping_table[0], proto::Mapping::default());
        assert_eq!(dictionary.location_table[0], proto::Location::default());
        assert_eq!(dictionary.stack_table[0], proto::Stack::default());
        assert_eq!(dictionary.link_table[0], proto::Link::default());
        assert_eq!(dictionary.attribute_table[0], proto::KeyValueAndUnit::default());
    }

    /// As the agents that profile processes send it.
    #[test]
    fn a_profile_of_the_process_is_cpu_time_with_the_labels_of_threads_and_local_roots() {
        let mut profile = Profile::new(ProfileId::for_test(1), 5);
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        let fields = vec![("local_root", "GET".to_owned()), ("http.route", "/cart".to_owned())];
        let root = profile.add_link(Link { fields, ..Link::named("GET".to_owned(), None) });
        let worker = ProfiledThread { name: "worker".to_owned(), tid: 7 };
        let worker = profile.add_thread(worker);
        for (kind, link, weight) in [
            (SampleKind::OnCpu, Some(root), 20),
            (SampleKind::OnCpu, None, 10),
            (SampleKind::AllocatedBytes, None, 64),
            (SampleKind::Allocations, None, 2),
        ] {
            let thread = (kind == SampleKind::OnCpu).then_some(worker);
            profile.add_sample(kind, stack, link, Point { time_unix_ns: 1, weight, thread });
        }
        profile.scope = ProfileScope::Process;
        let data = decode(&profile);
        let dictionary = data.dictionary.as_ref().unwrap();
        let string = |index: i32| dictionary.string_table[index as usize].as_str();
        let value_type = |of: Option<proto::ValueType>| {
            of.map(|of| (string(of.type_strindex), string(of.unit_strindex)))
        };
        let labels = |sample: &proto::Sample| {
            let attributes = sample.attribute_indices.iter();
            let attributes = attributes.map(|index| &dictionary.attribute_table[*index as usize]);
            let labels = attributes.map(|one| {
                let value = one.value.clone().and_then(|value| value.value);
                let Some(any_value::Value::StringValue(value)) = value else { panic!("{one:?}") };
                (string(one.key_strindex), value)
            });
            labels.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>()
        };
        let profiles = &data.resource_profiles[0].scope_profiles[0].profiles;
        let found: Vec<_> = profiles
            .iter()
            .map(|one| {
                let samples = one.samples.iter().map(|sample| (labels(sample), &*sample.values));
                let samples: Vec<_> = samples.collect();
                (value_type(one.sample_type).unwrap(), samples)
            })
            .collect();
        let text = |labels: &[&str]| labels.iter().map(|label| (*label).to_owned()).collect();
        let in_root: Vec<String> =
            text(&["span.name=GET", "thread.name=worker", "local_root=GET", "http.route=/cart"]);
        let outside: Vec<String> = text(&["thread.name=worker"]);
        assert_eq!(
            found[0],
            (("cpu", "nanoseconds"), vec![(in_root, &[20][..]), (outside, &[10][..])])
        );
        let [_, (space, _), (objects, _)] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!([*space, *objects], [("alloc_space", "bytes"), ("alloc_objects", "count")]);
        assert_eq!(value_type(profiles[0].period_type), Some(("cpu", "nanoseconds")));
        assert_eq!(profiles[0].period, 5);
    }

    #[test]
    fn times_have_their_unit_and_all_attributes_their_schema() {
        let mut profile = checkout();
        profile.attributes = vec![
            Attribute { key: "profile.wall_ns", value: Value::Int(7) },
            Attribute { key: "profile.reason", value: Value::from("latency") },
        ];
        let resource = Resource::new().with_schema_url("https://a");
        let data = otlp_message(&profile, &resource);
        let dictionary = data.dictionary.unwrap();
        let string = |index: i32| dictionary.string_table[index as usize].as_str();
        let attributes = dictionary.attribute_table.iter();
        let units = attributes.map(|one| (string(one.key_strindex), string(one.unit_strindex)));
        let units: HashMap<_, _> = units.collect();
        assert_eq!((units["profile.wall_ns"], units["profile.reason"]), ("ns", ""));
        let of_resource = &data.resource_profiles[0];
        let urls = [&of_resource.schema_url, &of_resource.scope_profiles[0].schema_url];
        assert_eq!(urls, ["https://a", "https://a"]);
    }

    #[test]
    fn samples_of_one_rate_are_timestamps_that_count() {
        let data = decode(&checkout());
        let dictionary = data.dictionary.as_ref().unwrap();
        let profile = only_profile(&data);
        let sample_type = profile.sample_type.unwrap();
        let name = |index: i32| dictionary.string_table[index as usize].as_str();
        assert_eq!(name(sample_type.type_strindex), "samples");
        assert_eq!(name(sample_type.unit_strindex), "count");
        assert_eq!(name(profile.period_type.unwrap().type_strindex), "cpu");
        assert_eq!(profile.period, 5_000_000);
        let times: Vec<_> =
            profile.samples.iter().flat_map(|s| s.timestamps_unix_nano.clone()).collect();
        assert_eq!(times.len(), 4);
        assert!(profile.samples.iter().all(|sample| sample.values.is_empty()));
        let range = profile.time_unix_nano..profile.time_unix_nano + profile.duration_nano;
        assert!(times.iter().all(|time| range.contains(time)));
    }

    #[test]
    fn samples_of_several_rates_are_counted_in_nanoseconds() {
        let data = decode(&mixed_rates());
        let dictionary = data.dictionary.as_ref().unwrap();
        let profile = only_profile(&data);
        let kind = profile.sample_type.unwrap().type_strindex;
        // As those of one rate: Grafana asks for the spans of one type.
        assert_eq!((&*dictionary.string_table[kind as usize], profile.period), ("samples", 1));
        assert!(profile.samples.iter().all(|sample| sample.timestamps_unix_nano.is_empty()));
        let sum: i64 = profile.samples.iter().flat_map(|sample| &sample.values).sum();
        assert_eq!(sum, 6_300_000);
    }

    #[test]
    fn a_sample_with_a_multiple_weight_is_repeated() {
        let mut profile = checkout();
        let sample = profile.samples()[0].clone();
        let point = Point { time_unix_ns: 1_040, weight: 3 * profile.period_ns, thread: None };
        profile.add_sample(SampleKind::OnCpu, sample.stack, sample.link, point);
        let data = decode(&profile);
        let encoded = only_profile(&data);
        let times = encoded.samples.iter().flat_map(|sample| &sample.timestamps_unix_nano);
        assert_eq!(times.clone().count(), 4 + 3);
        assert_eq!(times.filter(|time| **time == 1_040).count(), 3);
        assert_eq!(encoded.period, 5_000_000);
    }

    #[test]
    fn waits_are_a_second_profile() {
        let profile = waiting();
        let data = decode(&profile);
        let dictionary = data.dictionary.as_ref().unwrap();
        let name = |index: i32| dictionary.string_table[index as usize].as_str();
        let [on_cpu, off_cpu] = &data.resource_profiles[0].scope_profiles[0].profiles[..] else {
            panic!("two profiles");
        };
        assert_eq!(on_cpu.profile_id, profile.id.to_bytes());
        assert_eq!(off_cpu.profile_id, SampleKind::OffCpu.id_of(profile.id).to_bytes());
        assert_ne!(on_cpu.profile_id, off_cpu.profile_id);
        let kind = off_cpu.sample_type.unwrap();
        assert_eq!(
            (name(kind.type_strindex), name(kind.unit_strindex)),
            ("off_cpu", "nanoseconds")
        );
        // Parca supports neither an absent nor an empty type.
        assert_eq!((off_cpu.period_type, off_cpu.period), (Some(kind), 0));
        let [sample] = &off_cpu.samples[..] else { panic!("one sample") };
        assert_eq!(sample.values, [300_000_000, 20_000_000]);
        assert_eq!(sample.timestamps_unix_nano, [1_005, 1_050]);
        let stack = &dictionary.stack_table[sample.stack_index as usize].location_indices;
        let functions: Vec<_> = stack
            .iter()
            .map(|location| {
                let location = &dictionary.location_table[*location as usize];
                let attributes = location.attribute_indices.iter();
                let keys = attributes.map(|attribute| {
                    name(dictionary.attribute_table[*attribute as usize].key_strindex)
                });
                let function = location.lines[0].function_index as usize;
                let is_inferred = keys.into_iter().any(|key| key == "profile.frame.inferred");
                (name(dictionary.function_table[function].name_strindex), is_inferred)
            })
            .collect();
        assert_eq!(functions, [("[futex 0x7f01]", false), ("shop::reserve", true)]);
    }

    #[test]
    fn awaits_and_scheduling_delays_are_profiles_of_their_own() {
        let mut profile = awaiting();
        let data = decode(&profile);
        let dictionary = data.dictionary.as_ref().unwrap();
        let name = |index: i32| dictionary.string_table[index as usize].as_str();
        let profiles = &data.resource_profiles[0].scope_profiles[0].profiles;
        let of = |profile: &proto::Profile| {
            let kind = profile.sample_type.unwrap();
            // Pyroscope refuses a period of 0, and samples with several values.
            assert_eq!((profile.period_type, profile.period), (Some(kind), 1));
            assert!(profile.samples.iter().all(|sample| sample.values.len() == 1));
            assert_eq!(name(kind.unit_strindex), "nanoseconds");
            let samples = profile.samples.iter();
            let values: Vec<_> = samples.flat_map(|sample| sample.values.clone()).collect();
            let id: [u8; 16] = profile.profile_id.as_slice().try_into().unwrap();
            (name(kind.type_strindex), ProfileId::from_bytes(id), values)
        };
        let awaits = ("await", SampleKind::Await.id_of(profile.id), vec![1_180_000_000]);
        let delays = ("scheduling_delay", SampleKind::Delay.id_of(profile.id), vec![20_000_000]);
        let encoded: Vec<_> = profiles.iter().skip(1).map(of).collect();
        assert_eq!(encoded, [awaits.clone(), delays]);
        // The same alone.
        profile.keep_only(SampleKind::Await);
        let data = decode(&profile);
        let [alone] = &data.resource_profiles[0].scope_profiles[0].profiles[..] else {
            panic!("one profile");
        };
        assert_eq!(alone.profile_id, awaits.1.to_bytes());
    }

    #[test]
    fn waits_alone_have_the_same_id_as_beside_samples() {
        let mut profile = waiting();
        profile.keep_only(SampleKind::OffCpu);
        let data = decode(&profile);
        let profiles = &data.resource_profiles[0].scope_profiles[0].profiles;
        assert_eq!(profiles.len(), 1);
        assert_eq!(profiles[0].profile_id, SampleKind::OffCpu.id_of(profile.id).to_bytes());
    }

    #[test]
    fn samples_name_their_thread() {
        let mut profile = checkout();
        let threads = [("a", 1), ("b", 2), ("b", 3)]
            .map(|(name, tid)| profile.add_thread(ProfiledThread { name: name.to_owned(), tid }));
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        for (time_unix_ns, thread) in (1_050..).zip(threads.map(Some).into_iter().chain([None])) {
            let point = Point { time_unix_ns, weight: profile.period_ns, thread };
            profile.add_sample(SampleKind::OnCpu, stack, None, point);
        }
        let data = decode(&profile);
        let dictionary = data.dictionary.as_ref().unwrap();
        let names = only_profile(&data).samples.iter().rev().take(3).map(|sample| {
            let attributes = sample.attribute_indices.iter().map(|index| {
                let attribute = &dictionary.attribute_table[*index as usize];
                let key = &dictionary.string_table[attribute.key_strindex as usize];
                let value = attribute.value.as_ref().unwrap().value.clone().unwrap();
                (key.as_str(), value)
            });
            (attributes.collect::<Vec<_>>(), sample.timestamps_unix_nano.len())
        });
        let named =
            |name: &str| vec![("thread.name", any_value::Value::StringValue(name.to_owned()))];
        let expected = [(vec![], 1), (named("b"), 2), (named("a"), 1)];
        assert_eq!(names.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn samples_link_to_what_was_decided_and_name_their_innermost_span() {
        let ids = |byte| Some((TraceId::from_bytes([7; 16]), SpanId::from_bytes([byte; 8])));
        let mut profile = checkout();
        let stack = profile.samples()[0].stack;
        for (name, own, time_unix_ns) in
            [("query", 2, 1_001), ("query", 3, 1_002), ("render", 4, 1_003)]
        {
            let link = Link { ids: ids(own), linked: ids(1), ..Link::named(name, None) };
            let link = profile.add_link(link);
            let point = Point { time_unix_ns, weight: profile.period_ns, thread: None };
            profile.add_sample(SampleKind::OnCpu, stack, Some(link), point);
        }
        let data = decode(&profile);
        let dictionary = data.dictionary.as_ref().unwrap();
        let linked = only_profile(&data).samples.iter().filter(|sample| sample.link_index != 0);
        let found: Vec<_> = linked
            .map(|sample| {
                let link = &dictionary.link_table[sample.link_index as usize];
                let [attribute] = sample.attribute_indices[..] else { panic!("one attribute") };
                let attribute = &dictionary.attribute_table[attribute as usize];
                let key = &dictionary.string_table[attribute.key_strindex as usize];
                let name = attribute.value.clone().and_then(|value| value.value);
                let Some(any_value::Value::StringValue(name)) = name else { panic!("a text") };
                let times = sample.timestamps_unix_nano.len();
                (link.span_id.clone(), key.clone(), name, times)
            })
            .collect();
        let sample =
            |name: &str, times| (vec![1; 8], "span.name".to_owned(), name.to_owned(), times);
        // Spans of the same name and link are not distinguished.
        assert_eq!(found, [sample("query", 2), sample("render", 1)]);
    }

    #[test]
    fn spans_without_ids_have_no_link() {
        let data = decode(&checkout());
        let profile = only_profile(&data);
        assert_eq!(profile.samples.len(), 3);
        assert!(profile.samples.iter().all(|sample| sample.link_index == 0));
    }

    #[test]
    fn locations_have_their_function_line_kind_and_mapping() {
        let data = decode(&checkout());
        let dictionary = data.dictionary.as_ref().unwrap();
        let location = &dictionary.location_table[1];
        let function = dictionary.function_table[location.lines[0].function_index as usize];
        let name = |index: i32| dictionary.string_table[index as usize].as_str();
        assert_eq!(name(function.name_strindex), "shop::price");
        assert_eq!(name(function.filename_strindex), "/shop/src/price.rs");
        assert_eq!(location.lines[0].line, 7);
        let kind = &dictionary.attribute_table[location.attribute_indices[0] as usize];
        assert_eq!(name(kind.key_strindex), "profile.frame.type");
        let mapping = &dictionary.mapping_table[location.mapping_index as usize];
        assert!(
            mapping.memory_start <= location.address && location.address < mapping.memory_limit
        );
    }
}

//! A real profile, written by the directory store and read back: the rules of `docs/otlp.md`.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

mod support;

use std::collections::HashSet;
use std::fs;
use std::hash::Hash;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::collector::profiles::v1development::ExportProfilesServiceRequest;
use opentelemetry_proto::tonic::profiles::v1development as proto;
use prost::Message;
use support::{HAS_STACKS, Setup, burn};
use tracing::info_span;
use tracing_profiling::Directory;
use tracing_profiling::Resource;

const MS: Duration = Duration::from_millis(1);

/// The OTLP data of a span with a child span, and the file's bytes; `None` without samples.
fn written() -> Option<(proto::ProfilesData, Vec<u8>)> {
    let directory = tempfile::tempdir().unwrap();
    let resource = Resource::new().with("service.name", "shop");
    let store = Directory::new(directory.path());
    let setup = Setup::with("0ms", |builder| builder.resource(resource).exporter(store));
    setup.run(|| {
        let _outer = info_span!("outer").entered();
        burn(60 * MS);
        info_span!("inner").in_scope(|| burn(60 * MS));
    });
    if !HAS_STACKS {
        return None;
    }
    let files = &setup.kept()[0].files;
    let otlp = files.iter().find(|file| file.extension().is_some_and(|e| e == "otlp")).unwrap();
    let bytes = fs::read(otlp).unwrap();
    Some((proto::ProfilesData::decode(bytes.as_slice()).unwrap(), bytes))
}

fn profile(data: &proto::ProfilesData) -> &proto::Profile {
    &data.resource_profiles[0].scope_profiles[0].profiles[0]
}

/// All indices into each table.
#[derive(Default)]
struct References {
    strings: HashSet<i32>,
    functions: HashSet<i32>,
    mappings: HashSet<i32>,
    locations: HashSet<i32>,
    stacks: HashSet<i32>,
    links: HashSet<i32>,
    attributes: HashSet<i32>,
}

impl References {
    fn of(data: &proto::ProfilesData) -> Self {
        let mut all = Self::default();
        let dictionary = data.dictionary.as_ref().unwrap();
        // On a busy machine there is a wait, too.
        for profile in &data.resource_profiles[0].scope_profiles[0].profiles {
            for value_type in [profile.sample_type, profile.period_type].into_iter().flatten() {
                all.strings.extend([value_type.type_strindex, value_type.unit_strindex]);
            }
            all.attributes.extend(&profile.attribute_indices);
            for sample in &profile.samples {
                all.stacks.insert(sample.stack_index);
                all.links.insert(sample.link_index);
                all.attributes.extend(&sample.attribute_indices);
            }
        }
        for stack in &dictionary.stack_table {
            all.locations.extend(&stack.location_indices);
        }
        for location in &dictionary.location_table {
            all.mappings.insert(location.mapping_index);
            all.attributes.extend(&location.attribute_indices);
            all.functions.extend(location.lines.iter().map(|line| line.function_index));
        }
        for mapping in &dictionary.mapping_table {
            all.strings.insert(mapping.filename_strindex);
            all.attributes.extend(&mapping.attribute_indices);
        }
        for function in &dictionary.function_table {
            let proto::Function { name_strindex, system_name_strindex, filename_strindex, .. } =
                *function;
            all.strings.extend([name_strindex, system_name_strindex, filename_strindex]);
        }
        for attribute in &dictionary.attribute_table {
            all.strings.extend([attribute.key_strindex, attribute.unit_strindex]);
        }
        all
    }
}

/// Asserts that each entry of a table except the first is used, and that no index is out of range.
fn assert_used(name: &str, used: &HashSet<i32>, length: usize) {
    let mut used: Vec<_> = used.iter().copied().filter(|index| *index != 0).collect();
    used.sort_unstable();
    let all: Vec<_> = (1..i32::try_from(length).unwrap()).collect();
    assert_eq!(used, all, "{name}");
}

fn assert_distinct<T: Eq + Hash>(name: &str, values: impl IntoIterator<Item = T>) {
    let mut seen = HashSet::new();
    assert!(values.into_iter().all(|value| seen.insert(value)), "{name}");
}

#[test]
fn tables_begin_with_the_zero_value_and_have_no_orphans_or_duplicates() {
    let Some((data, _)) = written() else { return };
    let used = References::of(&data);
    let dictionary = data.dictionary.unwrap();
    let proto::ProfilesDictionary {
        mapping_table,
        location_table,
        function_table,
        link_table,
        string_table,
        attribute_table,
        stack_table,
    } = dictionary;
    assert_eq!(mapping_table[0], proto::Mapping::default());
    assert_eq!(location_table[0], proto::Location::default());
    assert_eq!(function_table[0], proto::Function::default());
    assert_eq!(link_table[0], proto::Link::default());
    assert_eq!(string_table[0], "");
    assert_eq!(attribute_table[0], proto::KeyValueAndUnit::default());
    assert_eq!(stack_table[0], proto::Stack::default());

    assert_used("strings", &used.strings, string_table.len());
    assert_used("functions", &used.functions, function_table.len());
    assert_used("mappings", &used.mappings, mapping_table.len());
    assert_used("locations", &used.locations, location_table.len());
    assert_used("stacks", &used.stacks, stack_table.len());
    assert_used("links", &used.links, link_table.len());
    assert_used("attributes", &used.attributes, attribute_table.len());

    assert_distinct("strings", &string_table);
    assert_distinct("functions", &function_table);
    assert_distinct("mappings", &mapping_table);
    assert_distinct("locations", location_table.iter().map(Message::encode_to_vec));
    assert_distinct("stacks", &stack_table);
    assert_distinct("links", &link_table);
    assert_distinct("attributes", attribute_table.iter().map(Message::encode_to_vec));
}

#[test]
fn samples_are_timestamps_inside_the_profile() {
    let Some((data, _)) = written() else { return };
    let profile = profile(&data);
    let range = profile.time_unix_nano..profile.time_unix_nano + profile.duration_nano;
    assert_distinct(
        "samples",
        profile.samples.iter().map(|s| (s.stack_index, s.link_index, &s.attribute_indices)),
    );
    let unit = profile.sample_type.as_ref().unwrap().unit_strindex as usize;
    assert_eq!(data.dictionary.as_ref().unwrap().string_table[unit], "count");
    // Each sample is a timestamp, or where they represent different times, as of a thread that was preempted, nanoseconds.
    let are_times = profile.period > 1;
    assert!(!profile.samples.is_empty());
    for sample in &profile.samples {
        let (values, times) = (sample.values.as_slice(), &sample.timestamps_unix_nano);
        match are_times {
            true => assert!(values.is_empty() && !times.is_empty(), "{sample:?}"),
            false => {
                assert!(matches!(values, [value] if *value > 0) && times.is_empty(), "{sample:?}")
            }
        }
        assert!(times.iter().all(|time| range.contains(time)));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let age = now.saturating_sub(Duration::from_nanos(profile.time_unix_nano));
    assert!(age < Duration::from_secs(600), "{age:?}");
    assert!(profile.period > 0);
    assert_eq!(profile.profile_id.len(), 16);
    assert!(profile.original_payload_format.is_empty() && profile.original_payload.is_empty());
}

#[test]
fn functions_lines_and_files_have_names() {
    let Some((data, _)) = written() else { return };
    let dictionary = data.dictionary.as_ref().unwrap();
    let string = |index: i32| dictionary.string_table[index as usize].as_str();
    for function in dictionary.function_table.iter().skip(1) {
        let names =
            [function.name_strindex, function.system_name_strindex, function.filename_strindex];
        assert!(names.into_iter().any(|index| index != 0));
    }
    let burn = dictionary
        .function_table
        .iter()
        .position(|function| string(function.name_strindex) == "otlp::support::burn")
        .unwrap();
    let function = dictionary.function_table[burn];
    assert!(string(function.filename_strindex).ends_with("tests/support/mod.rs"));
    assert_ne!(string(function.system_name_strindex), string(function.name_strindex));
    let lines = dictionary.location_table.iter().flat_map(|location| &location.lines);
    // The compiler assigns line 0 to instructions without a source line.
    let lines: Vec<_> =
        lines.filter(|line| line.function_index as usize == burn && line.line != 0).collect();
    assert!(!lines.is_empty());
    let source = include_str!("support/mod.rs");
    let start = source.lines().position(|line| line.contains("fn burn(")).unwrap() as i64;
    for line in lines {
        assert!((start..start + 15).contains(&line.line), "{line:?} {start}");
    }
    for mapping in dictionary.mapping_table.iter().skip(1) {
        let keys: Vec<_> = mapping
            .attribute_indices
            .iter()
            .map(|index| string(dictionary.attribute_table[*index as usize].key_strindex))
            .collect();
        assert!(
            keys.iter().any(|key| key.starts_with("process.executable.build_id.")),
            "{} has {keys:?}",
            string(mapping.filename_strindex)
        );
    }
    for location in dictionary.location_table.iter().skip(1) {
        let mapping = &dictionary.mapping_table[location.mapping_index as usize];
        let is_inside = (mapping.memory_start..mapping.memory_limit).contains(&location.address);
        assert!(is_inside || location.mapping_index == 0);
    }
}

#[test]
fn the_file_is_also_a_request_and_has_a_resource() {
    let Some((data, bytes)) = written() else {
        return;
    };
    let request = ExportProfilesServiceRequest::decode(bytes.as_slice()).unwrap();
    assert_eq!(request.resource_profiles, data.resource_profiles);
    assert_eq!(request.encode_to_vec(), bytes);
    let resource = data.resource_profiles[0].resource.as_ref().unwrap();
    assert!(resource.attributes.iter().any(|a| a.key == "service.name" && a.key_strindex == 0));
    let scope = data.resource_profiles[0].scope_profiles[0].scope.as_ref().unwrap();
    assert_eq!(scope.name, "tracing-profiling");
}

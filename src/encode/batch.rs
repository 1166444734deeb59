//! Several messages of OTLP as one.

use std::collections::HashMap;

use opentelemetry_proto::tonic::profiles::v1development as proto;
use prost::Message;

/// All profiles of these messages in one, with one dictionary: nothing is in there twice, and nothing
/// that no profile needs, if that is so in each of them. Profiles of equal resources stand together.
pub(crate) fn merge(
    messages: impl IntoIterator<Item = proto::ProfilesData>,
) -> proto::ProfilesData {
    let mut tables = Tables::new();
    let mut merged: Vec<proto::ResourceProfiles> = Vec::new();
    for message in messages {
        let indices = tables.add(message.dictionary.unwrap_or_default());
        for mut of_resource in message.resource_profiles {
            for of_scope in &mut of_resource.scope_profiles {
                of_scope.profiles.iter_mut().for_each(|profile| indices.apply(profile));
            }
            match merged.last_mut() {
                Some(last) if is_alike(last, &of_resource) => append(last, of_resource),
                _ => merged.push(of_resource),
            }
        }
    }
    proto::ProfilesData { resource_profiles: merged, dictionary: Some(tables.into_message()) }
}

fn is_alike(one: &proto::ResourceProfiles, other: &proto::ResourceProfiles) -> bool {
    one.resource == other.resource && one.schema_url == other.schema_url
}

fn append(to: &mut proto::ResourceProfiles, of_resource: proto::ResourceProfiles) {
    for of_scope in of_resource.scope_profiles {
        match to.scope_profiles.last_mut() {
            Some(last)
                if last.scope == of_scope.scope && last.schema_url == of_scope.schema_url =>
            {
                last.profiles.extend(of_scope.profiles);
            }
            _ => to.scope_profiles.push(of_scope),
        }
    }
}

/// A table, and where each entry stands, by its bytes.
struct Table<T> {
    entries: Vec<T>,
    places: HashMap<Vec<u8>, i32>,
}

impl<T: Message + Default> Table<T> {
    /// With nothing but the zero value.
    fn new() -> Self {
        Self { entries: vec![T::default()], places: HashMap::from([(Vec::new(), 0)]) }
    }

    fn add(&mut self, entry: T) -> i32 {
        let entries = &mut self.entries;
        *self.places.entry(entry.encode_to_vec()).or_insert_with(|| {
            entries.push(entry);
            i32::try_from(entries.len() - 1).unwrap_or(i32::MAX)
        })
    }

    fn add_all(&mut self, entries: Vec<T>, map: impl Fn(T) -> T) -> Places {
        Places(entries.into_iter().map(|entry| self.add(map(entry))).collect())
    }
}

/// Where the entries of a table have gone.
struct Places(Vec<i32>);

impl Places {
    fn of(&self, index: i32) -> i32 {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        self.0.get(index).copied().unwrap_or(0)
    }

    fn of_all(&self, indices: &[i32]) -> Vec<i32> {
        indices.iter().map(|index| self.of(*index)).collect()
    }
}

/// The dictionary, until it is whole.
struct Tables {
    strings: Table<String>,
    attributes: Table<proto::KeyValueAndUnit>,
    functions: Table<proto::Function>,
    mappings: Table<proto::Mapping>,
    locations: Table<proto::Location>,
    links: Table<proto::Link>,
    stacks: Table<proto::Stack>,
}

/// What became of the indices of one message that profiles themselves have.
struct Indices {
    strings: Places,
    attributes: Places,
    links: Places,
    stacks: Places,
}

impl Tables {
    fn new() -> Self {
        Self {
            strings: Table::new(),
            attributes: Table::new(),
            functions: Table::new(),
            mappings: Table::new(),
            locations: Table::new(),
            links: Table::new(),
            stacks: Table::new(),
        }
    }

    fn add(&mut self, dictionary: proto::ProfilesDictionary) -> Indices {
        let strings = self.strings.add_all(dictionary.string_table, |string| string);
        let attributes =
            self.attributes.add_all(dictionary.attribute_table, |entry| proto::KeyValueAndUnit {
                key_strindex: strings.of(entry.key_strindex),
                unit_strindex: strings.of(entry.unit_strindex),
                ..entry
            });
        let functions =
            self.functions.add_all(dictionary.function_table, |entry| proto::Function {
                name_strindex: strings.of(entry.name_strindex),
                system_name_strindex: strings.of(entry.system_name_strindex),
                filename_strindex: strings.of(entry.filename_strindex),
                ..entry
            });
        let mappings = self.mappings.add_all(dictionary.mapping_table, |entry| proto::Mapping {
            filename_strindex: strings.of(entry.filename_strindex),
            attribute_indices: attributes.of_all(&entry.attribute_indices),
            ..entry
        });
        let line = |line: &proto::Line| proto::Line {
            function_index: functions.of(line.function_index),
            ..*line
        };
        let locations =
            self.locations.add_all(dictionary.location_table, |entry| proto::Location {
                mapping_index: mappings.of(entry.mapping_index),
                lines: entry.lines.iter().map(line).collect(),
                attribute_indices: attributes.of_all(&entry.attribute_indices),
                ..entry
            });
        let links = self.links.add_all(dictionary.link_table, |entry| entry);
        let stacks = self.stacks.add_all(dictionary.stack_table, |entry| proto::Stack {
            location_indices: locations.of_all(&entry.location_indices),
        });
        Indices { strings, attributes, links, stacks }
    }

    fn into_message(self) -> proto::ProfilesDictionary {
        proto::ProfilesDictionary {
            mapping_table: self.mappings.entries,
            location_table: self.locations.entries,
            function_table: self.functions.entries,
            link_table: self.links.entries,
            string_table: self.strings.entries,
            attribute_table: self.attributes.entries,
            stack_table: self.stacks.entries,
        }
    }
}

impl Indices {
    fn apply(&self, profile: &mut proto::Profile) {
        let types = [&mut profile.sample_type, &mut profile.period_type];
        for kind in types.into_iter().flatten() {
            kind.type_strindex = self.strings.of(kind.type_strindex);
            kind.unit_strindex = self.strings.of(kind.unit_strindex);
        }
        profile.attribute_indices = self.attributes.of_all(&profile.attribute_indices);
        for sample in &mut profile.samples {
            sample.stack_index = self.stacks.of(sample.stack_index);
            sample.link_index = self.links.of(sample.link_index);
            sample.attribute_indices = self.attributes.of_all(&sample.attribute_indices);
        }
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry_sdk::Resource;

    use super::*;
    use crate::encode::otlp_message;
    use crate::encode::tests::{checkout, deep, waiting};

    fn message(profile: &crate::profile::Profile) -> proto::ProfilesData {
        otlp_message(profile, &Resource::builder_empty().with_service_name("shop").build())
    }

    /// Each sample as its names, and what else does not depend on the dictionary.
    fn readable(data: &proto::ProfilesData) -> Vec<(Vec<u8>, Vec<String>)> {
        let tables = data.dictionary.as_ref().unwrap();
        let string = |index: i32| tables.string_table[index as usize].as_str();
        let location = |index: &i32| {
            let location = &tables.location_table[*index as usize];
            let attributes: Vec<_> = location
                .attribute_indices
                .iter()
                .map(|index| string(tables.attribute_table[*index as usize].key_strindex))
                .collect();
            let file =
                string(tables.mapping_table[location.mapping_index as usize].filename_strindex);
            let line = location.lines[0];
            let function = tables.function_table[line.function_index as usize];
            let name = string(function.name_strindex);
            format!("{name} {} {file} {attributes:?}", line.line)
        };
        let sample = |sample: &proto::Sample| {
            let stack = &tables.stack_table[sample.stack_index as usize];
            let stack: Vec<_> = stack.location_indices.iter().map(location).collect();
            let link = &tables.link_table[sample.link_index as usize];
            format!("{stack:?} {link:?} {:?} {:?}", sample.values, sample.timestamps_unix_nano)
        };
        let profiles = data
            .resource_profiles
            .iter()
            .flat_map(|of_resource| &of_resource.scope_profiles)
            .flat_map(|of_scope| &of_scope.profiles);
        let profile = |profile: &proto::Profile| {
            let kind = string(profile.sample_type.unwrap().type_strindex).to_owned();
            let samples = profile.samples.iter().map(sample);
            (profile.profile_id.clone(), std::iter::once(kind).chain(samples).collect())
        };
        profiles.map(profile).collect()
    }

    #[test]
    fn merged_profiles_say_what_they_said_alone() {
        let alone = [message(&checkout()), message(&deep(5)), message(&waiting())];
        let expected: Vec<_> = alone.iter().flat_map(readable).collect();
        let merged = merge(alone);
        assert_eq!(readable(&merged), expected);
        assert_eq!(merged.resource_profiles.len(), 1);
        assert_eq!(merged.resource_profiles[0].scope_profiles.len(), 1);
    }

    #[test]
    fn nothing_is_in_the_dictionary_twice() {
        let one = message(&waiting());
        let twice = merge([one.clone(), one.clone()]);
        assert_eq!(twice.dictionary, merge([one.clone()]).dictionary);
        let tables = one.dictionary.unwrap();
        let merged = twice.dictionary.unwrap();
        assert_eq!(merged.string_table.len(), tables.string_table.len());
        assert_eq!(merged.location_table.len(), tables.location_table.len());
        assert_eq!(merged.stack_table[0], proto::Stack::default());
    }

    #[test]
    fn resources_that_differ_stay_apart() {
        let other = otlp_message(&deep(2), &Resource::builder_empty().build());
        assert_eq!(merge([message(&checkout()), other]).resource_profiles.len(), 2);
    }
}

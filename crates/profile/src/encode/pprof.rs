//! pprof, the format of `go tool pprof` and many viewers.

use std::collections::HashMap;
use std::mem::take;
use std::time::UNIX_EPOCH;

use prost::Message;

use super::pprof_messages as proto;
use super::tables::{Tables, UsedLocation, signed};
use crate::profile::{
    DumpedThread, Function, LinkId, Point, Profile, ProfileScope, Sample, SampleKind, ThreadDump,
};
use crate::text::gzip;

/// Encodes a gzipped pprof file. Its values are the number of samples, their CPU time in nanoseconds, the times of waits,
/// awaits and scheduling delays in nanoseconds (`-sample_index=off_cpu`, `await` and `scheduling_delay`), and the bytes
/// and number of allocations (`alloc_space`, `alloc_objects`). The default is the first one of these, after the number of
/// samples, that is not 0. A profile in which nothing but memory has samples has the four values of a heap profile of Go:
/// `alloc_objects`, `alloc_space`, `inuse_objects` and `inuse_space`, and the default is `inuse_space` if anything is in use. Each sample has its span's name as the label `span_name`, and
/// `trace_id` and `span_id` if the span has them. In a profile of the process, `thread_name` is a label, too; one of its wall
/// time has the number of observations and `wall` in nanoseconds. The fields that identify the nearest kept span around it are labels,
/// too. The profile's attributes and notes are comments.
pub fn pprof(profile: &Profile) -> Vec<u8> {
    pprof_showing(profile, None)
}

/// Like [`pprof`], but the default is `shown`, if there is one.
pub fn pprof_showing(profile: &Profile, shown: Option<SampleKind>) -> Vec<u8> {
    gzip(&Encoder::new(profile).encode(shown).encode_to_vec())
}

/// Encodes a dump of all threads as a gzipped pprof file, with one sample for each thread. Its value is 1, and its labels are
/// `thread` (the name), `tid`, `state`, `span_name`, if it is in a profiled span, and `stack_age`, if it runs and has the
/// stack of its newest sample. What a thread is blocked in is its innermost frame.
pub fn pprof_of_threads(dump: &ThreadDump) -> Vec<u8> {
    gzip(&Encoder::new(dump.stacks()).encode_threads(dump).encode_to_vec())
}

struct Encoder<'a> {
    profile: &'a Profile,
    message: proto::Profile,
    tables: Tables<'a>,
}

impl<'a> Encoder<'a> {
    fn new(profile: &'a Profile) -> Self {
        Self { profile, message: proto::Profile::default(), tables: Tables::new(profile) }
    }

    fn encode(mut self, shown: Option<SampleKind>) -> proto::Profile {
        let profile = self.profile;
        let has_samples = |kind: &SampleKind| profile.of_kind(*kind).next().is_some();
        let is_heap = is_heap(profile);
        let is_wall = profile.scope == ProfileScope::ProcessWall;
        let kinds = if is_wall { vec![SampleKind::OnCpu] } else { kinds_of(profile, is_heap) };
        let type_of = |kind: SampleKind| match kind.value_type() {
            [_, unit] if is_wall => ["wall", unit],
            value_type => value_type,
        };
        let values: Vec<_> = kinds.iter().map(|kind| self.value_type(type_of(*kind))).collect();
        let count = (!is_heap).then(|| self.value_type(["samples", "count"]));
        self.message.sample_type = count.into_iter().chain(values.iter().copied()).collect();
        let usual = || match has_samples(&SampleKind::InUseBytes) {
            true => Some(SampleKind::InUseBytes),
            false => SampleKind::ALL.into_iter().find(has_samples),
        };
        let of_none = if is_heap { SampleKind::InUseBytes } else { SampleKind::OnCpu };
        let shown = shown.or_else(usual).unwrap_or(of_none);
        self.message.default_sample_type = self.string(type_of(shown)[0]);
        (self.message.period_type, self.message.period) = match is_heap {
            // Each sample says what it represents.
            true => (Some(self.value_type(["space", "bytes"])), 0),
            false => {
                // A point of a profile of the process can be several samples.
                let uniform_ns = profile.uniform_weight_ns().filter(|_| !profile.is_of_process());
                let period = uniform_ns.unwrap_or(profile.period_ns);
                (values.first().copied(), signed(period))
            }
        };
        self.message.time_nanos = signed(profile.start_unix_ns);
        // That of a moment is 1, so that it contains its samples.
        let duration_ns = Some(profile.duration_ns).filter(|duration_ns| *duration_ns > 1);
        self.message.duration_nanos = signed(duration_ns.unwrap_or(0));
        // Readers take the first mapping for the executable, even if all samples are in libraries.
        if let Some(program) = profile.first_mapping() {
            self.tables.mappings.insert(program);
        }
        // Readers of heap profiles expect all values of a stack in one sample.
        let mut of_stacks: HashMap<_, usize> = HashMap::new();
        let samples = profile.samples().iter();
        let samples = samples.flat_map(|sample| {
            by_thread(profile, sample).into_iter().map(move |of_thread| (sample, of_thread))
        });
        for (sample, (thread, weight, points)) in samples {
            let place = (sample.stack, sample.leaf, sample.link);
            let known = of_stacks.get(&place).filter(|_| is_heap);
            let value = kinds.iter().position(|kind| *kind == sample.kind);
            if let (Some(known), Some(value)) = (known, value) {
                let known = self.message.sample.get_mut(*known);
                let value = known.and_then(|known| known.value.get_mut(value));
                _ = value.map(|value| *value += signed(weight));
                continue;
            }
            of_stacks.insert(place, self.message.sample.len());
            // Only on-CPU samples count as samples: the others are measured. Waits of wall time are observed, too.
            let kind = if is_wall { SampleKind::OnCpu } else { sample.kind };
            // One point of a continuous profile, or of wall time, can be many samples.
            let period_ns = profile.period_ns.max(1);
            let periods =
                if is_wall { (weight + period_ns / 2) / period_ns } else { weight / period_ns };
            let points = if profile.is_of_process() { points.max(periods) } else { points };
            let count = if kind == SampleKind::OnCpu { points } else { 0 };
            let count = (!is_heap).then(|| signed(count));
            let encoded = proto::Sample {
                location_id: self.frames(sample),
                value: count
                    .into_iter()
                    .chain(kinds.iter().map(|of_value| match *of_value == kind {
                        true => signed(weight),
                        false => 0,
                    }))
                    .collect(),
                label: self.labels(thread, sample.link),
            };
            self.message.sample.push(encoded);
        }
        let mut comments = vec![profile.title.clone()];
        comments.extend(Some(&profile.headline).filter(|it| !it.is_empty()).cloned());
        comments.extend(profile.notes.iter().cloned());
        comments.push(format!("profile.id={}", profile.id));
        let attributes = profile.attributes.iter();
        comments.extend(attributes.map(|of| format!("{}={}", of.key, of.value)));
        self.message.comment = comments.iter().map(|comment| self.string(comment)).collect();
        self.finish()
    }

    fn encode_threads(mut self, dump: &ThreadDump) -> proto::Profile {
        let threads = self.value_type(["threads", "count"]);
        self.message.sample_type = vec![threads];
        self.message.default_sample_type = threads.r#type;
        (self.message.period_type, self.message.period) = (Some(threads), 1);
        let time = dump.time.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.message.time_nanos = i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
        if let Some(program) = self.profile.first_mapping() {
            self.tables.mappings.insert(program);
        }
        for (thread, sample) in dump.samples() {
            let DumpedThread { name, tid, activity, spans, stack_age, .. } = thread;
            let mut label = vec![self.label("thread", name), self.label("tid", &tid.to_string())];
            label.push(self.label("state", activity.as_str()));
            label.extend(spans.last().map(|span| self.label("span_name", span)));
            label.extend(stack_age.map(|age| self.label("stack_age", &format!("{age:.1?}"))));
            let (location_id, value) = (self.frames(sample), vec![1]);
            self.message.sample.push(proto::Sample { location_id, value, label });
        }
        self.finish()
    }

    fn finish(mut self) -> proto::Profile {
        for (entry, id) in take(&mut self.tables.locations).into_iter().zip(1..) {
            let UsedLocation { code, lines, mapping } = self.tables.location(entry);
            let lines = lines.into_iter().map(|(function, line, column)| proto::Line {
                function_id: function as u64,
                line,
                column,
            });
            self.message.location.push(proto::Location {
                id,
                mapping_id: mapping as u64,
                address: code.map_or(0, |code| code.address),
                line: lines.collect(),
            });
        }
        for (entry, id) in take(&mut self.tables.functions).into_iter().zip(1..) {
            let Function { name, system_name, file } = self.tables.function(entry);
            // pprof treats a name that equals the linker's as mangled, and removes text in `<>` from it.
            let linkers = if system_name == name { "" } else { system_name.as_str() };
            let encoded = proto::Function {
                id,
                name: self.string(&name),
                system_name: self.string(linkers),
                filename: self.string(&file),
            };
            self.message.function.push(encoded);
        }
        for (entry, id) in take(&mut self.tables.mappings).into_iter().zip(1..) {
            let Some(mapping) = self.profile.mapping(entry) else { continue };
            let mut code = self
                .message
                .location
                .iter()
                .filter(|location| location.mapping_id == id)
                .peekable();
            // Otherwise pprof would symbolize the file again. Nothing needs symbols in an executable without samples.
            let has_names = id == 1 && code.peek().is_none() || code.any(|at| !at.line.is_empty());
            let build_id = mapping.build_ids.first().map_or("", |(_, id)| id.as_str());
            let encoded = proto::Mapping {
                id,
                memory_start: mapping.start,
                memory_limit: mapping.end,
                file_offset: mapping.file_offset,
                filename: self.string(&mapping.file),
                build_id: self.string(build_id),
                has_functions: has_names,
                has_filenames: has_names,
                has_line_numbers: has_names,
                has_inline_frames: has_names,
            };
            self.message.mapping.push(encoded);
        }
        self.message.string_table = self.tables.strings.into_iter().collect();
        self.message
    }

    /// The locations of a sample, the innermost first.
    fn frames(&mut self, sample: &Sample) -> Vec<u64> {
        let leaf = self.tables.not_shown(sample.leaf);
        self.tables.frames(sample.stack, leaf).into_iter().map(|number| number as u64).collect()
    }

    fn string(&mut self, string: &str) -> i64 {
        self.tables.string(string) as i64
    }

    fn value_type(&mut self, [kind, unit]: [&str; 2]) -> proto::ValueType {
        proto::ValueType { r#type: self.string(kind), unit: self.string(unit) }
    }

    fn labels(&mut self, thread: Option<&str>, link: Option<LinkId>) -> Vec<proto::Label> {
        let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let mut labels: Vec<_> =
            thread.into_iter().map(|name| label("thread_name", name)).collect();
        if let Some(link) = link.and_then(|id| self.profile.link(id)) {
            // Profiles that were decoded from a format without span names have empty ones.
            if !link.span.is_empty() {
                labels.push(label("span_name", &link.span));
            }
            if let Some((trace_id, span_id)) = link.ids {
                labels.push(label("trace_id", &trace_id.to_string()));
                labels.push(label("span_id", &span_id.to_string()));
            }
            // A key that occurs twice counts a sample twice, and Pyroscope reads a dot as `_`.
            let is_same = |a: &str, b: &str| a.replace('.', "_") == b.replace('.', "_");
            for (field, value) in self.profile.fields_around(link) {
                let key = label_key(field);
                if !labels.iter().any(|(known, _)| is_same(known, &key)) {
                    labels.push((key, value.clone()));
                }
            }
        }
        labels.iter().map(|(key, value)| self.label(key, value)).collect()
    }

    fn label(&mut self, key: &str, value: &str) -> proto::Label {
        proto::Label { key: self.string(key), str: self.string(value) }
    }
}

/// What a sample represents, and how many points it has: in a profile of the process by the names of its threads, and
/// otherwise of all threads together.
fn by_thread<'a>(profile: &'a Profile, sample: &Sample) -> Vec<(Option<&'a str>, u64, u64)> {
    let name_of = |point: &Point| {
        let thread = point.thread.filter(|_| profile.is_of_process())?;
        profile.thread(thread).map(|thread| thread.name.as_str()).filter(|name| !name.is_empty())
    };
    let mut threads: Vec<(Option<&str>, u64, u64)> = Vec::new();
    for point in &sample.points {
        let name = name_of(point);
        match threads.iter_mut().find(|(known, ..)| *known == name) {
            Some((_, weight, points)) => {
                *weight += point.weight;
                *points += 1;
            }
            None => threads.push((name, point.weight, 1)),
        }
    }
    threads
}

/// The key of a label for a field. Pyroscope refuses files with other characters in it, or a digit at its begin.
fn label_key(field: &str) -> String {
    let mapped = field.chars().map(|c| match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '_' | '.' => c,
        _ => '_',
    });
    let before = field.starts_with(|c: char| c.is_ascii_digit()).then_some('_');
    before.into_iter().chain(mapped).collect()
}

/// Whether a profile is that of the live heap: what was in use at a moment, also if that is nothing.
fn is_heap(profile: &Profile) -> bool {
    let has_times = profile.samples().iter().any(|sample| sample.kind.is_time());
    let is_in_use = |kind: SampleKind| profile.of_kind(kind).next().is_some();
    !has_times && (profile.is_of_moment() || IN_USE.into_iter().any(is_in_use))
}

const IN_USE: [SampleKind; 2] = [SampleKind::InUseBlocks, SampleKind::InUseBytes];

/// What a file has values of: for the live heap the four of Go, in their order, and otherwise times and allocations, also
/// those of which there are none: pprof merges only files with the same values. What is in use is added where a profile
/// that was built by hand has it beside times.
fn kinds_of(profile: &Profile, is_heap: bool) -> Vec<SampleKind> {
    if is_heap {
        return [[SampleKind::Allocations, SampleKind::AllocatedBytes], IN_USE].concat();
    }
    let has_samples = |kind: &SampleKind| profile.of_kind(*kind).next().is_some();
    let kinds = SampleKind::ALL.into_iter();
    kinds.filter(|kind| !IN_USE.contains(kind) || has_samples(kind)).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::super::tests::{awaiting, checkout, waiting};
    use super::*;
    use crate::ids::{SpanId, TraceId};
    use crate::profile::{
        FrameKind, Leaf, Line, Link, Location, Mapping, ProfiledThread, ThreadActivity,
    };

    fn decode(profile: &Profile) -> proto::Profile {
        decoded(&pprof(profile))
    }

    fn decoded(file: &[u8]) -> proto::Profile {
        let mut bytes = Vec::new();
        GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
        proto::Profile::decode(bytes.as_slice()).unwrap()
    }

    #[test]
    fn each_thread_of_a_dump_is_a_sample_with_labels() {
        let mut stacks = Profile::new(crate::profile::ProfileId::NONE, 0);
        let function = stacks.add_remark("shop::reserve");
        let stack = stacks.add_stack(vec![function]);
        let lock = stacks.add_leaf(Leaf::Blocked("futex 0x7f01".to_owned()));
        for (name, tid) in [("one", 7), ("two", 8)] {
            let thread = Some(stacks.add_thread(ProfiledThread { name: name.to_owned(), tid }));
            let point = Point { time_unix_ns: 0, weight: 1, thread };
            stacks.add_sample_at(SampleKind::OffCpu, (stack, lock), None, point);
        }
        let thread = |tid, spans: &[&str]| DumpedThread {
            name: String::new(),
            tid,
            activity: ThreadActivity::Blocked,
            blocked_in: None,
            spans: spans.iter().map(|span| (*span).to_owned()).collect(),
            stack: [].into(),
            stack_age: (tid == 8).then_some(std::time::Duration::from_millis(12)),
        };
        let threads = vec![thread(7, &["request", "query"]), thread(8, &[])];
        let message = decoded(&pprof_of_threads(&ThreadDump::new(threads).with_stacks(stacks)));
        let string = |index: i64| message.string_table[index as usize].as_str();
        let types = message.sample_type.iter().map(|it| (string(it.r#type), string(it.unit)));
        assert_eq!(types.collect::<Vec<_>>(), [("threads", "count")]);
        let samples = message.sample.iter().map(|sample| {
            let labels = sample.label.iter().map(|label| (string(label.key), string(label.str)));
            (sample.value.clone(), labels.collect::<Vec<_>>())
        });
        let blocked = ("state", "blocked");
        assert_eq!(
            samples.collect::<Vec<_>>(),
            [
                (vec![1], vec![("thread", "one"), ("tid", "7"), blocked, ("span_name", "query")]),
                (vec![1], vec![("thread", "two"), ("tid", "8"), blocked, ("stack_age", "12.0ms")]),
            ]
        );
        let frames = message.sample[0].location_id.iter().map(|id| {
            let location = message.location.iter().find(|location| location.id == *id).unwrap();
            let function = message.function.iter().find(|it| it.id == location.line[0].function_id);
            string(function.unwrap().name)
        });
        assert_eq!(frames.collect::<Vec<_>>(), ["[futex 0x7f01]", "shop::reserve"]);
    }

    #[test]
    fn counts_samples_and_cpu_time_and_names_their_spans() {
        let message = decode(&checkout());
        let name = |index: i64| message.string_table[index as usize].as_str();
        let mut samples: Vec<_> = message
            .sample
            .iter()
            .map(|sample| (name(sample.label[0].str), sample.value.clone()))
            .collect();
        samples.sort();
        assert_eq!(
            samples,
            [
                ("GET /checkout", vec![1, 5_000_000, 0, 0, 0, 0, 0]),
                ("GET /checkout", vec![1, 5_000_000, 0, 0, 0, 0, 0]),
                ("price all", vec![2, 10_000_000, 0, 0, 0, 0, 0]),
            ]
        );
        assert_eq!(name(message.sample[0].label[0].key), "span_name");
        assert_eq!(name(message.default_sample_type), "cpu");
        assert!(message.comment.iter().any(|c| name(*c).starts_with("profile.id=0101")));
    }

    #[test]
    fn the_fields_of_the_kept_span_around_a_sample_are_labels() {
        let mut profile = Profile::new(crate::profile::ProfileId::for_test(1), 5);
        let fields = vec![("http.route", "/cart/{id}".to_owned())];
        let request = profile.add_link(Link { fields, ..Link::named("request", None) });
        let query = profile.add_link(Link::named("query", Some(request)));
        let other = profile.add_link(Link::named("other", None));
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        for link in [request, query, other] {
            let point = Point { time_unix_ns: 1_001, weight: 5, thread: None };
            profile.add_sample(SampleKind::OnCpu, stack, Some(link), point);
        }
        let message = decode(&profile);
        let string = |index: i64| message.string_table[index as usize].as_str();
        let labels = message.sample.iter().map(|sample| {
            let labels = sample.label.iter().map(|label| (string(label.key), string(label.str)));
            labels.collect::<Vec<_>>()
        });
        let route = ("http.route", "/cart/{id}");
        assert_eq!(
            labels.collect::<Vec<_>>(),
            [
                vec![("span_name", "request"), route],
                vec![("span_name", "query"), route],
                vec![("span_name", "other")],
            ]
        );
    }

    #[test]
    fn a_profile_of_the_process_has_the_names_of_threads() {
        let mut profile = Profile::new(crate::profile::ProfileId::for_test(1), 5);
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        for (tid, name) in [(1, "worker"), (2, "worker"), (3, "main"), (4, "")] {
            let thread = Some(profile.add_thread(ProfiledThread { name: name.to_owned(), tid }));
            let point = Point { time_unix_ns: 1, weight: 5, thread };
            profile.add_sample(SampleKind::OnCpu, stack, None, point);
        }
        let samples = |profile: &Profile| {
            let message = decode(profile);
            let string = |index: i64| message.string_table[index as usize].clone();
            let samples = message.sample.iter().map(|sample| {
                let labels =
                    sample.label.iter().map(|label| (string(label.key), string(label.str)));
                (labels.collect::<Vec<_>>(), sample.value[0], sample.value[1])
            });
            samples.collect::<Vec<_>>()
        };
        assert_eq!(samples(&profile), [(vec![], 4, 20)]);
        profile.scope = ProfileScope::Process;
        let label = |name: &str| vec![("thread_name".to_owned(), name.to_owned())];
        assert_eq!(
            samples(&profile),
            [(label("worker"), 2, 10), (label("main"), 1, 5), (vec![], 1, 5)]
        );
    }

    #[test]
    fn wall_time_is_one_value_whether_threads_ran_or_were_blocked() {
        let mut profile = Profile::new(crate::profile::ProfileId::for_test(1), 10);
        profile.scope = ProfileScope::ProcessWall;
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        let thread = Some(profile.add_thread(ProfiledThread { name: "a".to_owned(), tid: 1 }));
        for (kind, weight) in [(SampleKind::OnCpu, 12), (SampleKind::OffCpu, 48)] {
            let point = Point { time_unix_ns: 1, weight, thread };
            profile.add_sample(kind, stack, None, point);
        }
        let message = decoded(&pprof_showing(&profile, Some(SampleKind::OnCpu)));
        let string = |index: i64| message.string_table[index as usize].as_str();
        let types = message.sample_type.iter();
        let types: Vec<_> = types.map(|it| (string(it.r#type), string(it.unit))).collect();
        assert_eq!(types, [("samples", "count"), ("wall", "nanoseconds")]);
        assert_eq!((string(message.default_sample_type), message.period), ("wall", 10));
        let values: Vec<_> = message.sample.iter().map(|sample| sample.value.clone()).collect();
        assert_eq!(values, [[1, 12], [5, 48]]);
    }

    #[test]
    fn no_label_occurs_twice_and_fields_have_keys_that_pyroscope_takes() {
        let labels = |ids, names: &[&'static str]| {
            let mut profile = Profile::new(crate::profile::ProfileId::for_test(1), 5);
            let fields = names.iter().map(|name| (*name, format!("value of {name}"))).collect();
            let link = profile.add_link(Link { fields, ids, ..Link::named("request", None) });
            let remark = profile.add_remark("x");
            let stack = profile.add_stack(vec![remark]);
            let point = Point { time_unix_ns: 1_001, weight: 5, thread: None };
            profile.add_sample(SampleKind::OnCpu, stack, Some(link), point);
            let message = decode(&profile);
            let string = |index: i64| message.string_table[index as usize].clone();
            let labels = message.sample[0].label.iter();
            labels.map(|label| (string(label.key), string(label.str))).collect::<Vec<_>>()
        };
        let ids = (TraceId::from_bytes([1; 16]), SpanId::from_bytes([2; 8]));
        let own = ["span_name", "span.name", "trace_id", "span_id", "span-id", "trace.id"];
        let expected = [
            ("span_name", "request".to_owned()),
            ("trace_id", ids.0.to_string()),
            ("span_id", ids.1.to_string()),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value));
        assert_eq!(labels(Some(ids), &own), expected, "the layer's own labels go first");
        let fields =
            ["request-id", "request_id", "request.id", "naïve", "9lives", "a:b", "http.route", "é"];
        let keys: Vec<_> = labels(None, &fields).into_iter().skip(1).collect();
        let expected = [
            ("request_id", "request-id"),
            ("na_ve", "naïve"),
            ("_9lives", "9lives"),
            ("a_b", "a:b"),
            ("http.route", "http.route"),
            ("_", "é"),
        ];
        let expected = expected.map(|(key, field)| (key.to_owned(), format!("value of {field}")));
        assert_eq!(keys, expected);
    }

    #[test]
    fn waits_and_awaits_have_their_own_values() {
        let values = |profile: &Profile| {
            let message = decode(profile);
            let values = message.sample.iter().map(|sample| sample.value.clone());
            values.filter(|values| values[0] == 0).collect::<Vec<_>>()
        };
        assert_eq!(values(&waiting()), [[0, 0, 320_000_000, 0, 0, 0, 0]]);
        let awaits = [[0, 0, 0, 1_180_000_000, 0, 0, 0], [0, 0, 0, 0, 20_000_000, 0, 0]];
        assert_eq!(values(&awaiting()), awaits);
        let default = |mut profile: Profile, kind| {
            profile.keep_only(kind);
            let message = decode(&profile);
            message.string_table[message.default_sample_type as usize].clone()
        };
        assert_eq!(default(waiting(), SampleKind::OffCpu), "off_cpu");
        assert_eq!(default(awaiting(), SampleKind::Await), "await");
        assert_eq!(default(awaiting(), SampleKind::Delay), "scheduling_delay");
        let kinds = decode(&awaiting());
        let string = |index: i64| kinds.string_table[index as usize].as_str();
        let kinds: Vec<_> = kinds.sample_type.iter().map(|kind| string(kind.r#type)).collect();
        assert_eq!(
            kinds,
            [
                "samples",
                "cpu",
                "off_cpu",
                "await",
                "scheduling_delay",
                "alloc_space",
                "alloc_objects",
            ]
        );
    }

    fn of_kinds(kinds: &[SampleKind]) -> Profile {
        let mut profile = Profile::new(crate::profile::ProfileId::for_test(1), 512);
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        for (kind, weight) in kinds.iter().zip(1..) {
            let point = Point { time_unix_ns: 1, weight, thread: None };
            profile.add_sample(*kind, stack, None, point);
        }
        profile
    }

    /// What Go's `profile.Merge` compares: the types of the values, in order, and of the period.
    fn compared(message: &proto::Profile) -> Vec<(&str, &str)> {
        let string = |index: i64| message.string_table[index as usize].as_str();
        let types = message.sample_type.iter().chain(&message.period_type);
        types.map(|kind| (string(kind.r#type), string(kind.unit))).collect()
    }

    #[test]
    fn files_of_any_kinds_can_be_merged() {
        let in_spans: Vec<_> =
            SampleKind::ALL.into_iter().filter(|kind| !IN_USE.contains(kind)).collect();
        let all = decode(&of_kinds(&in_spans));
        assert_eq!(compared(&all).len(), 8);
        for subset in 0_u32..1 << in_spans.len() {
            let kinds: Vec<_> = (0..in_spans.len())
                .filter(|bit| subset & (1 << bit) != 0)
                .map(|bit| in_spans[bit])
                .collect();
            let message = decode(&of_kinds(&kinds));
            assert_eq!(compared(&message), compared(&all), "{kinds:?}");
            let samples = message.sample.iter().map(|sample| sample.value.len());
            assert_eq!(samples.collect::<Vec<_>>(), vec![7; kinds.len()], "{kinds:?}");
        }
        // A live heap with the next one, in which nothing is in use.
        let heap = |kinds: &[SampleKind]| {
            let mut profile = of_kinds(kinds);
            profile.set_moment(1);
            decode(&profile)
        };
        let full = heap(&[[SampleKind::Allocations, SampleKind::AllocatedBytes], IN_USE].concat());
        for kinds in [&[][..], &[SampleKind::Allocations], &[SampleKind::InUseBytes]] {
            assert_eq!(compared(&heap(kinds)), compared(&full), "{kinds:?}");
        }
    }

    #[test]
    fn a_heap_profile_has_the_values_of_go() {
        let make = |kinds: &[SampleKind]| {
            let mut profile = of_kinds(kinds);
            profile.set_moment(1);
            decode(&profile)
        };
        let allocated = [SampleKind::AllocatedBytes, SampleKind::Allocations];
        let in_use = [SampleKind::InUseBytes, SampleKind::InUseBlocks];
        for (kinds, default) in [
            ([allocated, in_use].concat(), "inuse_space"),
            (allocated.to_vec(), "alloc_space"),
            (Vec::new(), "inuse_space"),
        ] {
            let message = make(&kinds);
            let string = |index: i64| message.string_table[index as usize].as_str();
            let types = message.sample_type.iter();
            let types: Vec<_> =
                types.map(|kind| (string(kind.r#type), string(kind.unit))).collect();
            assert_eq!(
                types,
                [
                    ("alloc_objects", "count"),
                    ("alloc_space", "bytes"),
                    ("inuse_objects", "count"),
                    ("inuse_space", "bytes")
                ]
            );
            assert_eq!(string(message.default_sample_type), default);
            let period = message.period_type.unwrap();
            assert_eq!((string(period.r#type), string(period.unit)), ("space", "bytes"));
            assert_eq!(message.period, 0);
            // All of a stack in one sample.
            let values: Vec<_> = message.sample.iter().map(|sample| sample.value.clone()).collect();
            match kinds.len() {
                4 => assert_eq!(values, [[2, 1, 4, 3]]),
                2 => assert_eq!(values, [[2, 1, 0, 0]]),
                _ => assert!(values.is_empty()),
            }
        }
    }

    #[test]
    fn the_executable_is_the_first_mapping_even_without_samples() {
        let mut profile = Profile::new(crate::profile::ProfileId::for_test(1), 5);
        let files = ["/opt/shop", "libc.so.6"].map(str::to_owned);
        let [_, libc] =
            files.map(|file| profile.add_mapping(Mapping { file, ..Mapping::default() }));
        let function = profile.add_function(Function::named("nanosleep"));
        let location = profile.add_location(Location {
            mapping: Some(libc),
            address: 1,
            kind: FrameKind::Native,
            lines: vec![Line { function, line: 0, column: 0 }],
            is_inferred: false,
        });
        let stack = profile.add_stack(vec![location]);
        let point = Point { time_unix_ns: 1_001, weight: 5, thread: None };
        profile.add_sample(SampleKind::OffCpu, stack, None, point);
        let message = decode(&profile);
        let files: Vec<_> = message
            .mapping
            .iter()
            .map(|m| (m.id, message.string_table[m.filename as usize].as_str()))
            .collect();
        assert_eq!(files, [(1, "/opt/shop"), (2, "libc.so.6")]);
        assert_eq!(message.location[0].mapping_id, 2);
        // Otherwise pprof would search for the executable to find names in it.
        assert!(message.mapping.iter().all(|mapping| mapping.has_functions));
    }

    #[test]
    fn a_linker_name_that_equals_the_name_is_left_out() {
        let mut profile = checkout();
        let name = "<shop::Cart as core::fmt::Debug>::fmt";
        let functions = [name, "_RNvXCs_4shop"]
            .map(|linkers| Function { system_name: linkers.to_owned(), ..Function::named(name) });
        let lines = functions.map(|function| Line {
            function: profile.add_function(function),
            line: 1,
            column: 0,
        });
        let kind = FrameKind::Rust;
        let location = profile.add_location(Location {
            mapping: None,
            address: 1,
            kind,
            lines: lines.to_vec(),
            is_inferred: false,
        });
        let stack = profile.add_stack(vec![location]);
        let point = Point { time_unix_ns: 1_001, weight: 5, thread: None };
        profile.add_sample(SampleKind::OnCpu, stack, None, point);
        let message = decode(&profile);
        let string = |index: i64| message.string_table[index as usize].as_str();
        let linkers: Vec<_> = message
            .function
            .iter()
            .map(|function| (string(function.name), string(function.system_name)))
            .filter(|(name, _)| name.starts_with('<'))
            .collect();
        assert_eq!(linkers, [(name, ""), (name, "_RNvXCs_4shop")]);
        assert!(message.function.iter().all(|f| f.name != f.system_name));
    }

    #[test]
    fn every_id_refers_to_an_entry() {
        let message = decode(&checkout());
        for sample in &message.sample {
            assert!(!sample.location_id.is_empty());
            for id in &sample.location_id {
                let location = &message.location[*id as usize - 1];
                assert_eq!(location.id, *id);
                assert!(location.mapping_id as usize <= message.mapping.len());
                for line in &location.line {
                    assert_eq!(
                        message.function[line.function_id as usize - 1].id,
                        line.function_id
                    );
                }
            }
        }
    }
}

//! The processed format of the Firefox Profiler.

use std::collections::HashMap;

use fxprof_processed_profile::{
    CategoryColor, CategoryHandle, CpuDelta, Frame, FrameFlags, FrameInfo, MarkerFieldFlags,
    MarkerFieldFormat, MarkerTiming, ProcessHandle, Profile as FirefoxProfile, SamplingInterval,
    StackHandle, StaticSchemaMarker, StaticSchemaMarkerField, StringHandle, ThreadHandle,
    Timestamp,
};

use crate::profile::{
    FrameKind, Leaf, Link, Location, Profile, Resource, Sample, SampleKind, ThreadId, Value,
};
use crate::text::gzip_json;

/// Encodes a gzipped profile for <https://profiler.firefox.com> and samply (`samply load FILE`).
///
/// Each thread is a track with its samples and waits. A wait is a sample that weighs as much as the samples that would
/// have been taken in its time, and a marker with its length. Awaits and scheduling delays are the same in the track
/// `awaits`. The track `spans` has a marker for each span. The format has no lines for functions without an address, so
/// the markers of waits and awaits name the line, and nothing else does. Allocations are left out; see [`html`](super::html) and
/// [`pprof`](super::pprof) for lines.
///
/// The format is defined in the Firefox Profiler's `docs-developer/processed-profile-format.md`.
pub fn firefox(profile: &Profile, resource: &Resource) -> Vec<u8> {
    let mut encoder = Encoder::new(profile, resource);
    encoder.add_spans();
    encoder.add_points();
    gzip_json(&encoder.encoded)
}

struct Encoder<'a> {
    profile: &'a Profile,
    encoded: FirefoxProfile,
    process: ProcessHandle,
    spans: ThreadHandle,
    tracks: HashMap<Track, ThreadHandle>,
    categories: Categories,
}

/// What samples are shown on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Track {
    Thread(Option<ThreadId>),
    /// No thread was in what is shown here.
    Awaits,
}

struct Categories {
    rust: CategoryHandle,
    native: CategoryHandle,
    kernel: CategoryHandle,
    blocked: CategoryHandle,
    span: CategoryHandle,
}

impl Categories {
    fn of(&self, kind: FrameKind) -> CategoryHandle {
        match kind {
            FrameKind::Rust => self.rust,
            FrameKind::Native => self.native,
            FrameKind::Kernel => self.kernel,
            FrameKind::Remark => CategoryHandle::OTHER,
        }
    }
}

/// A span, or a wait or an await, with a time and a text.
struct TextMarker<const IS_WAIT: bool> {
    name: StringHandle,
    text: StringHandle,
    category: CategoryHandle,
}

impl<const IS_WAIT: bool> StaticSchemaMarker for TextMarker<IS_WAIT> {
    const UNIQUE_MARKER_TYPE_NAME: &'static str = if IS_WAIT { "Wait" } else { "Span" };
    const CHART_LABEL: Option<&'static str> = Some("{marker.name} {marker.data.text}");
    const TABLE_LABEL: Option<&'static str> = Some("{marker.name} {marker.data.text}");
    const FIELDS: &'static [StaticSchemaMarkerField] = &[StaticSchemaMarkerField {
        key: "text",
        label: if IS_WAIT { "In" } else { "About" },
        format: MarkerFieldFormat::String,
        flags: MarkerFieldFlags::SEARCHABLE,
    }];

    fn name(&self, _: &mut FirefoxProfile) -> StringHandle {
        self.name
    }

    fn category(&self, _: &mut FirefoxProfile) -> CategoryHandle {
        self.category
    }

    fn string_field_value(&self, _: u32) -> StringHandle {
        self.text
    }

    fn number_field_value(&self, _: u32) -> f64 {
        0.0
    }
}

impl<'a> Encoder<'a> {
    fn new(profile: &'a Profile, resource: &Resource) -> Self {
        let service = resource.get("service.name");
        let service = service.map_or_else(|| "process".to_owned(), ToString::to_string);
        let product = format!("{service}: {}", profile.name);
        let interval = SamplingInterval::from_nanos(profile.period_ns.max(1));
        let mut encoded = FirefoxProfile::new(&product, profile.start().into(), interval);
        // All names are known: the viewer must not look for symbols.
        encoded.set_symbolicated(true);
        let pid = match resource.get("process.pid") {
            Some(Value::Int(pid)) => u32::try_from(*pid).unwrap_or(0),
            _ => 0,
        };
        let begin = Timestamp::from_nanos_since_reference(0);
        let process = encoded.add_process(&service, pid, begin);
        encoded.set_process_end_time(
            process,
            Timestamp::from_nanos_since_reference(profile.duration_ns),
        );
        let spans = encoded.add_thread(process, pid, begin, false);
        encoded.set_thread_name(spans, "spans");
        encoded.add_initial_visible_thread(spans);
        let categories = Categories {
            rust: encoded.add_category("Rust", CategoryColor::Orange),
            native: encoded.add_category("Native", CategoryColor::Green),
            kernel: encoded.add_category("Kernel", CategoryColor::Red),
            blocked: encoded.add_category("Blocked", CategoryColor::Blue),
            span: encoded.add_category("Span", CategoryColor::Purple),
        };
        Self { profile, encoded, process, spans, tracks: HashMap::new(), categories }
    }

    fn time(&self, unix_ns: u64) -> Timestamp {
        Timestamp::from_nanos_since_reference(unix_ns.saturating_sub(self.profile.start_unix_ns))
    }

    fn add_spans(&mut self) {
        let profile = self.profile;
        let end_unix_ns = profile.start_unix_ns + profile.duration_ns;
        for (_, link) in profile.links() {
            let end = if link.end_unix_ns == 0 { end_unix_ns } else { link.end_unix_ns };
            let timing = MarkerTiming::Interval(self.time(link.start_unix_ns), self.time(end));
            let marker = TextMarker::<false> {
                name: self.encoded.intern_string(&link.span),
                text: self.encoded.intern_string(&about(link)),
                category: self.categories.span,
            };
            self.encoded.add_marker(self.spans, timing, marker);
        }
    }

    /// Adds all samples and waits in order of time, as the format requires for each thread.
    fn add_points(&mut self) {
        let profile = self.profile;
        let points = |sample: &'a Sample| sample.points.iter().map(move |point| (sample, point));
        let samples = profile.samples().iter().filter(|sample| sample.kind.is_time());
        let mut rows: Vec<_> = samples.flat_map(points).collect();
        rows.sort_by_key(|(_, point)| point.time_unix_ns);
        let mut stacks = HashMap::new();
        for (sample, point) in rows {
            let track = match sample.kind {
                SampleKind::Await | SampleKind::Delay => Track::Awaits,
                _ => Track::Thread(point.thread),
            };
            let thread = self.track(track);
            let stack = *stacks
                .entry((thread, sample.stack, sample.leaf))
                .or_insert_with(|| self.stack(thread, sample));
            let period_ns = profile.period_ns.max(1);
            let weight = ((point.weight + period_ns / 2) / period_ns).max(1);
            let ran_ns = if sample.kind == SampleKind::OnCpu { point.weight } else { 0 };
            self.encoded.add_sample(
                thread,
                self.time(point.time_unix_ns),
                stack,
                CpuDelta::from_nanos(ran_ns),
                i32::try_from(weight).unwrap_or(i32::MAX),
            );
            let place = profile.place_of(sample);
            if let Some((place, leaf)) = place.zip(self.leaf(sample)) {
                let marker = TextMarker::<true> {
                    name: self.encoded.intern_string(&leaf),
                    text: self.encoded.intern_string(&place),
                    category: self.categories.blocked,
                };
                let end = self.time(point.time_unix_ns + point.weight);
                let timing = MarkerTiming::Interval(self.time(point.time_unix_ns), end);
                let marker = self.encoded.add_marker(thread, timing, marker);
                self.encoded.set_marker_stack(thread, marker, stack);
            }
        }
    }

    fn track(&mut self, track: Track) -> ThreadHandle {
        if let Some(known) = self.tracks.get(&track) {
            return *known;
        }
        let (name, tid) = match track {
            Track::Thread(id) => {
                let thread = id.and_then(|id| self.profile.thread(id));
                thread.map_or(("unknown thread", 0), |thread| (&thread.name, thread.tid))
            }
            Track::Awaits => ("awaits", 0),
        };
        let begin = Timestamp::from_nanos_since_reference(0);
        let handle = self.encoded.add_thread(self.process, tid, begin, false);
        self.encoded.set_thread_name(handle, name);
        self.encoded.add_initial_visible_thread(handle);
        if self.tracks.is_empty() {
            self.encoded.add_initial_selected_thread(handle);
        }
        self.tracks.insert(track, handle);
        handle
    }

    fn stack(&mut self, thread: ThreadHandle, sample: &Sample) -> Option<StackHandle> {
        let mut locations: Vec<_> = self.profile.stack(sample.stack).collect();
        locations.reverse();
        let mut frames: Vec<_> =
            locations.into_iter().flat_map(|location| self.frames(location)).collect();
        frames.extend(self.leaf(sample).map(|leaf| FrameInfo {
            frame: Frame::Label(self.encoded.intern_string(&leaf)),
            category_pair: self.categories.blocked.into(),
            flags: FrameFlags::empty(),
        }));
        self.encoded.intern_stack_frames(thread, frames.into_iter())
    }

    fn leaf(&self, sample: &Sample) -> Option<String> {
        self.profile.leaf(sample.leaf).and_then(Leaf::mixed_frame)
    }

    /// The frames of a location, with the outermost function first.
    fn frames(&mut self, location: &Location) -> Vec<FrameInfo> {
        let profile = self.profile;
        let names = location.lines.iter().rev().filter_map(|line| profile.function(line.function));
        let mut names: Vec<_> = names.map(|function| function.name.clone()).collect();
        if names.is_empty() {
            names.push(profile.module_offset(location));
        }
        let category_pair = self.categories.of(location.kind).into();
        let frame = |name: String| FrameInfo {
            frame: Frame::Label(self.encoded.intern_string(&name)),
            category_pair,
            flags: FrameFlags::empty(),
        };
        names.into_iter().map(frame).collect()
    }
}

/// What a span's marker says besides its name.
fn about(link: &Link) -> String {
    let mut about: Vec<_> =
        link.fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
    about.extend(link.ids.map(|(_, span)| format!("span {span}")));
    about.join(" ")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use serde_json::Value as Json;

    use super::super::tests::{awaiting, waiting};
    use super::*;
    use crate::profile::ProfiledThread;

    fn decode(profile: &Profile) -> Json {
        let resource = Resource::new().with("service.name", "shop").with("process.pid", 7);
        let bytes = firefox(profile, &resource);
        let mut json = String::new();
        flate2::read::GzDecoder::new(bytes.as_slice()).read_to_string(&mut json).unwrap();
        serde_json::from_str(&json).unwrap()
    }

    fn strings<'a>(thread: &'a Json, indexes: &'a Json) -> Vec<&'a str> {
        let names = thread["stringArray"].as_array().unwrap();
        let indexes = indexes.as_array().unwrap().iter();
        indexes.map(|index| names[index.as_u64().unwrap() as usize].as_str().unwrap()).collect()
    }

    #[test]
    fn threads_spans_and_waits_have_names() {
        let mut profile = waiting();
        let thread = profile.add_thread(ProfiledThread { name: "worker".to_owned(), tid: 42 });
        profile.set_thread_of_all(thread);
        let json = decode(&profile);
        let threads = json["threads"].as_array().unwrap();
        let names: Vec<_> = threads.iter().map(|thread| thread["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["spans", "worker"]);
        assert_eq!(threads[1]["tid"], "42");
        let markers = |thread: &Json| {
            let names = strings(thread, &thread["markers"]["name"]);
            names.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(markers(&threads[0]), ["GET /checkout", "price all"]);
        assert_eq!(markers(&threads[1]), ["[futex 0x7f01]"; 2]);
        let functions = strings(&threads[1], &threads[1]["funcTable"]["name"]);
        assert!(functions.contains(&"shop::price") && functions.contains(&"[futex 0x7f01]"));
    }

    #[test]
    fn awaits_and_delays_are_a_track_with_markers() {
        let json = decode(&awaiting());
        let threads = json["threads"].as_array().unwrap();
        let awaits = threads.iter().find(|thread| thread["name"] == "awaits").unwrap();
        let markers = strings(awaits, &awaits["markers"]["name"]);
        let texts = awaits["markers"]["data"].as_array().unwrap().iter();
        let place = "shop::fetch (src/upstream.rs:41) at tokio::time::sleep::Sleep";
        let all = awaits["stringArray"].as_array().unwrap();
        let is_place = |data: &Json| all[data["text"].as_u64().unwrap() as usize] == place;
        assert!(texts.clone().all(is_place), "{:?}", texts.collect::<Vec<_>>());
        assert_eq!(markers, ["[await]", "[scheduling delay behind report]", "[await]"]);
        let weights = awaits["samples"]["weight"].as_array().unwrap().iter();
        let weights: Vec<_> = weights.map(|weight| weight.as_i64().unwrap()).collect();
        assert_eq!(weights, [180, 4, 56]);
        assert!(strings(awaits, &awaits["funcTable"]["name"]).contains(&"[await]"));
    }

    #[test]
    fn a_wait_weighs_as_much_as_the_samples_of_its_time() {
        let json = decode(&waiting());
        let thread = &json["threads"][1];
        assert_eq!(thread["name"], "unknown thread");
        let weights = thread["samples"]["weight"].as_array().unwrap().iter();
        let weights: Vec<_> = weights.map(|weight| weight.as_i64().unwrap()).collect();
        // In order of time: waits of 300 and 20 ms among samples of 5 ms each.
        assert_eq!(weights, [60, 1, 1, 1, 4, 1]);
    }
}

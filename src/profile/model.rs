//! The tables of a profile, and its samples.

use std::collections::HashMap;
use std::fmt;

use super::ProfileBuilder;
use super::rebuild::SourceLine;
use super::table::{Table, handle};
use crate::ids::{ProfileId, SpanId, TraceId};

handle! {
    /// The place of a [`Function`].
    FunctionId
}
handle! {
    /// The place of a [`Mapping`].
    MappingId
}
handle! {
    /// The place of a [`Location`].
    LocationId
}
handle! {
    /// A stack: the place of its innermost call.
    StackId
}
handle! {
    /// The place of a [`Link`].
    LinkId
}

/// A function of the source code.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Function {
    /// As a programmer writes it.
    pub name: String,
    /// As the linker knows it.
    pub system_name: String,
    /// The source file; empty if unknown.
    pub file: String,
}

impl Function {
    /// One of which only the name is known.
    pub(crate) fn named(name: &str) -> Self {
        Self { name: name.to_owned(), system_name: name.to_owned(), file: String::new() }
    }
}

/// A line of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Line {
    /// The function that the line belongs to.
    pub function: FunctionId,
    /// Counted from 1; 0 if unknown.
    pub line: u32,
    /// Counted from 1; 0 if unknown.
    pub column: u32,
}

/// A file of code: the program or a library.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Mapping {
    /// Its path.
    pub file: String,
    /// The first address of its code, as the file states addresses.
    pub start: u64,
    /// The end of its code.
    pub end: u64,
    /// Where `start` lies in the file.
    pub file_offset: u64,
    /// Names of the very file, by the kind of build id as OpenTelemetry names it.
    pub build_ids: Vec<(String, String)>,
}

/// What kind of code a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FrameKind {
    /// Rust.
    Rust,
    /// Compiled from another language, or unknown.
    Native,
    /// The operating system's.
    Kernel,
    /// What a thread waited for.
    Wait,
    /// Not code, but a remark of ours on what is missing.
    Remark,
}

/// A place in the code: an address, and after symbolization the lines that it stands for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Location {
    /// The file of code; `None` if unknown.
    pub mapping: Option<MappingId>,
    /// The address as the file states it. For a caller it is inside the call instruction.
    pub address: u64,
    /// What kind of code it is.
    pub kind: FrameKind,
    /// The functions inlined there, the innermost first, and last the one that was not.
    pub lines: Vec<Line>,
    /// It was found by looking for a likely return address, since of a thread that waits not all
    /// registers are known. The same goes for all outer locations of the stack.
    pub is_inferred: bool,
}

/// A call on a stack. Stacks with the same callers share these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct StackNode {
    caller: StackId,
    location: LocationId,
}

impl StackId {
    /// No call at all.
    const EMPTY: Self = Self(u32::MAX);
}

/// The span that a sample belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Link {
    /// The span's name.
    pub span: String,
    /// The enclosing span of this profile.
    pub parent: Option<LinkId>,
    /// The ids under which the span is exported, if it is.
    pub ids: Option<(TraceId, SpanId)>,
}

/// What a sample says of its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SampleKind {
    /// It ran.
    OnCpu,
    /// It waited.
    OffCpu,
}

/// One time that a sample was taken, or that a thread waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Point {
    /// Nanoseconds since the Unix epoch; of a wait, its beginning.
    pub time_unix_ns: u64,
    /// In nanoseconds: on-CPU, the time that it stands for; off-CPU, how long the wait was.
    pub weight_ns: u64,
}

/// All times at which one stack was found in one span.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sample {
    /// The stack.
    pub stack: StackId,
    /// The span.
    pub link: Option<LinkId>,
    /// Whether the thread ran or waited.
    pub kind: SampleKind,
    /// In the order of time.
    pub points: Vec<Point>,
}

/// A value of an [`Attribute`], or of one of a [`Resource`](super::Resource).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Text.
    String(String),
    /// A whole number.
    Int(i64),
    /// A number.
    Double(f64),
    /// Yes or no.
    Bool(bool),
    /// Several of one kind.
    Array(Vec<Self>),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::String(text) => f.write_str(text),
            Self::Int(number) => write!(f, "{number}"),
            Self::Double(number) => write!(f, "{number}"),
            Self::Bool(truth) => write!(f, "{truth}"),
            Self::Array(values) => {
                f.write_str("[")?;
                for (number, value) in values.iter().enumerate() {
                    write!(f, "{}{value}", if number == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
        }
    }
}

macro_rules! value_from {
    ($($from:ty => $kind:ident),+) => {
        $(
            impl From<$from> for Value {
                fn from(value: $from) -> Self {
                    Self::$kind(value.into())
                }
            }
        )+
    };
}

impl<T: Into<Self>> From<Vec<T>> for Value {
    fn from(values: Vec<T>) -> Self {
        Self::Array(values.into_iter().map(Into::into).collect())
    }
}

value_from! { &str => String, String => String, i32 => Int, u32 => Int, i64 => Int, f64 => Double, bool => Bool }

/// Something said of the profile as a whole.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Attribute {
    /// Its name.
    pub key: &'static str,
    /// Its value.
    pub value: Value,
}

/// Samples of one kept span, or of several that share a local root.
#[derive(Clone, Debug)]
pub struct Profile {
    /// The id that the spans' `profile.id` names.
    pub id: ProfileId,
    /// What it is of: a span's name.
    pub name: String,
    /// What it shows, in one line.
    pub title: String,
    /// What else should stand above a picture of it, a line each.
    pub notes: Vec<String>,
    /// When it begins, in nanoseconds since the Unix epoch.
    pub start_unix_ns: u64,
    /// How long it is. Every sample's time is at least the start and less than the end.
    pub duration_ns: u64,
    /// The CPU time between two samples at the rate that was asked for.
    pub period_ns: u64,
    /// Said of all of it.
    pub attributes: Vec<Attribute>,
    samples: Vec<Sample>,
    places: HashMap<(StackId, Option<LinkId>, SampleKind), usize>,
    functions: Table<FunctionId, Function>,
    mappings: Table<MappingId, Mapping>,
    locations: Table<LocationId, Location>,
    stacks: Table<StackId, StackNode>,
    links: Table<LinkId, Link>,
    /// What samples take.
    bytes: usize,
}

/// What a sample takes with its place in the map, and as much room for its points as the first one makes.
const BYTES_A_SAMPLE: usize = 256;

impl Profile {
    /// Builds a profile by hand, to test an exporter with: one of that name, with an id of ones, which begins at the
    /// Unix epoch.
    pub fn builder(name: impl Into<String>) -> ProfileBuilder {
        ProfileBuilder::new(name.into())
    }

    /// A profile without samples.
    pub(crate) fn new(id: ProfileId, period_ns: u64) -> Self {
        Self {
            id,
            name: String::new(),
            title: String::new(),
            notes: Vec::new(),
            start_unix_ns: 0,
            duration_ns: 0,
            period_ns,
            attributes: Vec::new(),
            samples: Vec::new(),
            places: HashMap::new(),
            functions: Table::default(),
            mappings: Table::default(),
            locations: Table::default(),
            stacks: Table::default(),
            links: Table::default(),
            bytes: 0,
        }
    }

    /// What is said of all of it, without samples.
    pub(super) fn without_samples(&self) -> Self {
        Self {
            name: self.name.clone(),
            title: self.title.clone(),
            notes: self.notes.clone(),
            start_unix_ns: self.start_unix_ns,
            duration_ns: self.duration_ns,
            attributes: self.attributes.clone(),
            ..Self::new(self.id, self.period_ns)
        }
    }

    /// What it takes in memory, roughly.
    pub(crate) fn bytes(&self) -> usize {
        let tables = self.functions.bytes() + self.mappings.bytes() + self.locations.bytes();
        self.bytes + tables + self.stacks.bytes() + self.links.bytes()
    }

    pub(crate) fn add_function(&mut self, function: Function) -> FunctionId {
        let Function { name, system_name, file } = &function;
        let bytes = name.len() + system_name.len() + file.len();
        self.functions.add(function, bytes)
    }

    pub(crate) fn add_mapping(&mut self, mapping: Mapping) -> MappingId {
        let bytes = mapping.file.len();
        self.mappings.add(mapping, bytes)
    }

    /// The file of code that was added first: the program itself, whether a sample fell in it or not.
    pub(crate) fn first_mapping(&self) -> Option<MappingId> {
        self.mappings.iter().next().map(|(id, _)| id)
    }

    pub(crate) fn add_location(&mut self, location: Location) -> LocationId {
        let bytes = size_of_val(location.lines.as_slice());
        self.locations.add(location, bytes)
    }

    /// A frame that is not code but a remark of ours.
    pub(crate) fn add_remark(&mut self, remark: &str) -> LocationId {
        self.add_named(remark, FrameKind::Remark)
    }

    /// A frame that says what a thread waited for.
    pub(crate) fn add_wait(&mut self, call: &str) -> LocationId {
        self.add_named(call, FrameKind::Wait)
    }

    fn add_named(&mut self, name: &str, kind: FrameKind) -> LocationId {
        let function = self.add_function(Function::named(name));
        let lines = vec![Line { function, line: 0, column: 0 }];
        self.add_location(Location { mapping: None, address: 0, kind, lines, is_inferred: false })
    }

    /// Adds a stack, the innermost location first.
    pub(crate) fn add_stack(&mut self, stack: Vec<LocationId>) -> StackId {
        stack.into_iter().rev().fold(StackId::EMPTY, |caller, location| {
            self.stacks.add(StackNode { caller, location }, 0)
        })
    }

    pub(crate) fn add_link(&mut self, link: Link) -> LinkId {
        let bytes = link.span.len();
        self.links.add(link, bytes)
    }

    /// Adds a sample. Samples of one stack in one span become one, with a point each.
    pub(crate) fn add_sample(
        &mut self,
        kind: SampleKind,
        stack: StackId,
        link: Option<LinkId>,
        point: Point,
    ) {
        self.bytes += size_of::<Point>();
        let place = *self.places.entry((stack, link, kind)).or_insert_with(|| {
            self.bytes += BYTES_A_SAMPLE;
            self.samples.push(Sample { stack, link, kind, points: Vec::new() });
            self.samples.len() - 1
        });
        if let Some(sample) = self.samples.get_mut(place) {
            let later = sample.points.partition_point(|p| p.time_unix_ns <= point.time_unix_ns);
            sample.points.insert(later, point);
        }
    }

    /// All samples, one for each stack and span.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// All locations, in the order of their ids.
    pub(crate) fn locations(&self) -> impl Iterator<Item = (LocationId, &Location)> {
        self.locations.iter()
    }

    /// All functions, in the order of their ids.
    pub(crate) fn functions(&self) -> impl Iterator<Item = (FunctionId, &Function)> {
        self.functions.iter()
    }

    /// All links, in the order of their ids.
    pub(crate) fn links(&self) -> impl Iterator<Item = (LinkId, &Link)> {
        self.links.iter()
    }

    #[cfg(test)]
    pub(crate) fn keep_only(&mut self, kind: SampleKind) {
        self.samples.retain(|sample| sample.kind == kind);
    }

    /// The samples of one kind.
    pub fn of_kind(&self, kind: SampleKind) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.kind == kind)
    }

    pub(super) fn points(&self, kind: SampleKind) -> impl Iterator<Item = &Point> {
        self.of_kind(kind).flat_map(|sample| &sample.points)
    }

    /// The number of times that a running thread was sampled.
    pub fn sample_count(&self) -> usize {
        self.points(SampleKind::OnCpu).count()
    }

    /// The number of waits.
    pub fn wait_count(&self) -> usize {
        self.points(SampleKind::OffCpu).count()
    }

    /// The CPU time that the samples stand for, in nanoseconds.
    pub fn weight_ns(&self) -> u64 {
        self.points(SampleKind::OnCpu).map(|point| point.weight_ns).sum()
    }

    /// The time of all waits together, in nanoseconds.
    pub fn waited_ns(&self) -> u64 {
        self.points(SampleKind::OffCpu).map(|point| point.weight_ns).sum()
    }

    /// Makes all waits together that long, each shorter by the same part.
    pub(crate) fn shorten_waits(&mut self, total_ns: u64) {
        let before_ns = u128::from(self.waited_ns()).max(1);
        let waits = self.samples.iter_mut().filter(|sample| sample.kind == SampleKind::OffCpu);
        for point in waits.flat_map(|sample| &mut sample.points) {
            let weight_ns = u128::from(point.weight_ns) * u128::from(total_ns) / before_ns;
            point.weight_ns = u64::try_from(weight_ns).unwrap_or(point.weight_ns);
        }
    }

    /// The CPU time that each sample stands for, in nanoseconds, if it is the same for all.
    pub fn uniform_weight_ns(&self) -> Option<u64> {
        let mut weights = self.points(SampleKind::OnCpu).map(|point| point.weight_ns);
        let first = weights.next()?;
        weights.all(|weight| weight == first).then_some(first)
    }

    /// What a sample stands for at most, in nanoseconds of CPU time.
    pub(crate) fn largest_weight_ns(&self) -> u64 {
        self.points(SampleKind::OnCpu).map(|point| point.weight_ns).max().unwrap_or(0)
    }

    /// The CPU time of which each sample stands for a multiple, in nanoseconds: that of the least. `None` if
    /// there is no such time, or a sample stands for more than a thousand, or all of them for very many.
    #[cfg(any(test, feature = "otlp"))]
    pub(crate) fn unit_weight_ns(&self) -> Option<u64> {
        const MOST: u64 = 1_000;
        /// Of all together, each of which is a timestamp in OTLP.
        const MOST_OF_ALL: u64 = 200_000;
        let weights = || self.points(SampleKind::OnCpu).map(|point| point.weight_ns);
        let unit = weights().min().filter(|unit| *unit > 0)?;
        let is_multiple = weights().all(|weight| weight % unit == 0 && weight / unit <= MOST);
        let are_few = weights().map(|weight| weight / unit).sum::<u64>() <= MOST_OF_ALL;
        (is_multiple && are_few).then_some(unit)
    }

    /// A function, if the id is of this profile.
    pub fn function(&self, id: FunctionId) -> Option<&Function> {
        self.functions.get(id)
    }

    /// A mapping, if the id is of this profile.
    pub fn mapping(&self, id: MappingId) -> Option<&Mapping> {
        self.mappings.get(id)
    }

    /// A location, if the id is of this profile.
    pub fn location(&self, id: LocationId) -> Option<&Location> {
        self.locations.get(id)
    }

    /// The locations of a stack, the innermost first; none if the id is of another profile.
    pub fn stack(&self, id: StackId) -> impl Iterator<Item = &Location> {
        self.location_ids(id).filter_map(|id| self.location(id))
    }

    /// The same by their ids.
    pub fn location_ids(&self, stack: StackId) -> impl Iterator<Item = LocationId> {
        let next = |node: &&StackNode| self.stacks.get(node.caller);
        std::iter::successors(self.stacks.get(stack), next).map(|node| node.location)
    }

    /// The lines of a location with their functions.
    pub(super) fn source_lines(&self, location: &Location) -> Vec<SourceLine> {
        let source = |Line { function, line, column }: &Line| {
            let function = self.function(*function)?.clone();
            Some(SourceLine { function, line: *line, column: *column })
        };
        location.lines.iter().filter_map(source).collect()
    }

    /// A link, if the id is of this profile.
    pub fn link(&self, id: LinkId) -> Option<&Link> {
        self.links.get(id)
    }

    /// The names of a link's spans, the outermost first.
    pub fn span_path(&self, link: Option<LinkId>) -> Vec<&str> {
        let links = std::iter::successors(link.and_then(|id| self.link(id)), |link| {
            link.parent.and_then(|id| self.link(id))
        });
        let mut path: Vec<_> = links.map(|link| link.span.as_str()).collect();
        path.reverse();
        path
    }

    /// What a location without lines is called: the file of code and the address in it, as in
    /// `shop+0x1a2b`.
    pub fn place_in_code(&self, location: &Location) -> String {
        let file = location.mapping.and_then(|id| self.mapping(id));
        let address = location.address;
        match file.and_then(|mapping| mapping.file.rsplit('/').next()) {
            Some(file) => format!("{file}+{address:#x}"),
            None => format!("{address:#x}"),
        }
    }

    /// The function that most CPU time was spent in itself, and its share of all, from 0 to 1.
    /// What was inlined into a function belongs to it: `wrapping_mul` would help nobody. Where
    /// functions have no names, it is a place in the code.
    pub fn top_function(&self) -> Option<(String, f64)> {
        let mut own: HashMap<Result<&str, LocationId>, u64> = HashMap::new();
        for sample in self.of_kind(SampleKind::OnCpu) {
            let Some(leaf) = self.location_ids(sample.stack).next() else { continue };
            let outermost = self.location(leaf).and_then(|leaf| leaf.lines.last());
            let function = outermost.and_then(|line| self.function(line.function));
            let weight: u64 = sample.points.iter().map(|point| point.weight_ns).sum();
            *own.entry(function.map(|function| &*function.name).ok_or(leaf)).or_default() += weight;
        }
        let (top, weight) = own.into_iter().max_by_key(|(top, weight)| (*weight, *top))?;
        let name = match top {
            Ok(name) => name.to_owned(),
            Err(place) => self.place_in_code(self.location(place)?),
        };
        Some((name, weight as f64 / self.weight_ns().max(1) as f64))
    }

    /// One of so many points of each kind, with its sample: it stands for those that are left out, so that the
    /// sums stay right.
    pub(super) fn thinned_points(&self, every: usize) -> Vec<(&Sample, Point)> {
        let mut taken = Vec::new();
        for kind in [SampleKind::OnCpu, SampleKind::OffCpu] {
            let total = self.points(kind).count();
            let points = self.of_kind(kind).flat_map(|s| s.points.iter().map(move |p| (s, p)));
            let mut skipped_ns = 0;
            for (number, (sample, Point { time_unix_ns, weight_ns })) in (1..).zip(points) {
                skipped_ns += weight_ns;
                if number % every.max(1) == 0 || number == total {
                    let weight_ns = std::mem::take(&mut skipped_ns);
                    taken.push((sample, Point { time_unix_ns: *time_unix_ns, weight_ns }));
                }
            }
        }
        taken
    }

    /// The same with one of so many points of each kind.
    #[cfg(feature = "_otlp")]
    pub(crate) fn thinned(&self, every: usize) -> Self {
        let mut thinned = self.clone();
        (thinned.samples, thinned.places) = (Vec::new(), HashMap::new());
        for (sample, point) in self.thinned_points(every) {
            thinned.add_sample(sample.kind, sample.stack, sample.link, point);
        }
        thinned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        Profile::new(ProfileId::for_test(1), 10)
    }

    fn point(time_unix_ns: u64) -> Point {
        Point { time_unix_ns, weight_ns: 10 }
    }

    fn named(profile: &mut Profile, name: &str) -> Line {
        let function = profile.add_function(Function::named(name));
        Line { function, line: 1, column: 0 }
    }

    #[test]
    fn samples_with_the_same_stack_and_span_are_merged_in_order_of_time() {
        let mut profile = profile();
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        let link = profile.add_link(Link { span: "a".into(), parent: None, ids: None });
        for time in [30, 10, 20] {
            profile.add_sample(SampleKind::OnCpu, stack, Some(link), point(time));
        }
        profile.add_sample(SampleKind::OnCpu, stack, None, point(5));
        let times = |i: usize| {
            profile.samples()[i].points.iter().map(|p| p.time_unix_ns).collect::<Vec<_>>()
        };
        assert_eq!(profile.samples().len(), 2);
        assert_eq!(times(0), [10, 20, 30]);
        assert_eq!(times(1), [5]);
        assert_eq!(profile.sample_count(), 4);
        assert_eq!(profile.weight_ns(), 40);
    }

    #[test]
    fn weights_are_uniform_only_if_all_are_equal() {
        let mut profile = profile();
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        assert_eq!(profile.uniform_weight_ns(), None);
        profile.add_sample(SampleKind::OnCpu, stack, None, point(1));
        profile.add_sample(SampleKind::OnCpu, stack, None, point(2));
        assert_eq!(profile.uniform_weight_ns(), Some(10));
        profile.add_sample(
            SampleKind::OnCpu,
            stack,
            None,
            Point { time_unix_ns: 3, weight_ns: 11 },
        );
        assert_eq!(profile.uniform_weight_ns(), None);
    }

    #[test]
    fn the_top_function_includes_what_is_inlined_into_it() {
        let mut profile = profile();
        let (busy, idle) = (named(&mut profile, "busy"), named(&mut profile, "idle"));
        let inlined = profile.add_location(Location {
            mapping: None,
            address: 1,
            kind: FrameKind::Rust,
            lines: vec![idle, busy],
            is_inferred: false,
        });
        let other = profile.add_location(Location {
            mapping: None,
            address: 2,
            kind: FrameKind::Rust,
            lines: vec![idle],
            is_inferred: false,
        });
        let hot = profile.add_stack(vec![inlined, other]);
        let cold = profile.add_stack(vec![other]);
        for time in 0..3 {
            profile.add_sample(SampleKind::OnCpu, hot, None, point(time));
        }
        profile.add_sample(SampleKind::OnCpu, cold, None, point(9));
        assert_eq!(profile.top_function(), Some(("busy".to_owned(), 0.75)));
    }

    #[test]
    fn a_span_path_begins_with_the_outermost_span() {
        let mut profile = profile();
        let outer = profile.add_link(Link { span: "request".into(), parent: None, ids: None });
        let inner = profile.add_link(Link { span: "query".into(), parent: Some(outer), ids: None });
        assert_eq!(profile.span_path(Some(inner)), ["request", "query"]);
        assert!(profile.span_path(None).is_empty());
    }
}

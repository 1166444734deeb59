//! The tables and samples of a profile.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::attribute::Attribute;
use super::builder::ProfileBuilder;
use super::code_origin::CodeOrigin;
use super::leaf::{Leaf, LeafId, LeafMark};
use super::rebuild::SourceLine;
use super::sample::{Point, ProfileScope, Sample, SampleKind, StackId};
use super::sample_list::SampleList;
use super::spans::{Link, LinkId, ProfiledThread, ThreadId};
use super::table::{BYTES_BESIDE, Table, TableId, handle};
use crate::compare::Comparison;
use crate::facts::Facts;
use crate::ids::ProfileId;

handle! {
    /// The index of a [`Function`].
    FunctionId
}
handle! {
    /// The index of a [`Mapping`].
    MappingId
}
handle! {
    /// The index of a [`Location`].
    LocationId
}

/// A function in the source code.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Function {
    /// The name as it is written in the source.
    pub name: String,
    /// The linker's name.
    pub system_name: String,
    /// The source file; empty if unknown.
    pub file: String,
}

impl Function {
    /// A function of which only the name is known.
    pub fn named(name: &str) -> Self {
        Self { name: name.to_owned(), system_name: name.to_owned(), file: String::new() }
    }
}

/// A line of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Line {
    /// The function that contains the line.
    pub function: FunctionId,
    /// Counted from 1; 0 if unknown.
    pub line: u32,
    /// Counted from 1; 0 if unknown.
    pub column: u32,
}

/// A mapped file of code: the executable or a library.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// The path of the file.
    pub file: String,
    /// The first address of its code, as an address in the file.
    pub start: u64,
    /// The end address of its code.
    pub end: u64,
    /// The file offset of `start`.
    pub file_offset: u64,
    /// The build ids of the file, with the kind as OpenTelemetry names it.
    pub build_ids: Vec<(String, String)>,
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FrameKind {
    /// Rust code.
    Rust,
    /// Code in another language, or in an unknown one.
    Native,
    /// Code of the operating system.
    Kernel,
    /// Not code, but a note about what is missing.
    Remark,
}

/// A location in the code: an address, and after symbolization its source lines.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// The mapped file; `None` if unknown.
    pub mapping: Option<MappingId>,
    /// The address in the file. For a caller, it is inside the call instruction.
    pub address: u64,
    /// What kind of code it is.
    pub kind: FrameKind,
    /// The functions inlined there, the innermost first, followed by the function that contains them.
    pub lines: Vec<Line>,
    /// Whether it was found by scanning for a likely return address, because not all registers of a blocked thread are
    /// known. All outer locations of the stack are then inferred, too.
    pub is_inferred: bool,
}

/// A call on a stack. Stacks with the same callers share these nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct StackNode {
    caller: StackId,
    location: LocationId,
}

/// What samples refer to.
#[derive(Clone, Debug, Default)]
struct ProfileTables {
    functions: Table<FunctionId, Function>,
    origins: HashMap<FunctionId, CodeOrigin>,
    mappings: Vec<Mapping>,
    locations: Table<LocationId, Location>,
    leaf_marks: HashMap<LeafMark, LocationId>,
    stacks: Table<StackId, StackNode>,
    leaves: Table<LeafId, Leaf>,
    links: Table<LinkId, Link>,
    threads: Table<ThreadId, ProfiledThread>,
}

/// Samples of one kept span, or of several that share a local root.
#[derive(Clone, Debug)]
pub struct Profile {
    /// The id to which the attribute `profile.id` of the spans refers.
    pub id: ProfileId,
    /// The name of the span that it shows.
    pub name: String,
    /// A one-line summary.
    pub title: String,
    /// What explains most of the time of the first kept span, in one line; empty if nothing does.
    pub headline: String,
    /// Further lines to show above a picture of it.
    pub notes: Vec<String>,
    /// The kept spans that it explains, the outermost first.
    pub spans: Vec<Facts>,
    /// What it lacks, in words: lost samples, incomplete stacks.
    pub losses: Vec<String>,
    /// In nanoseconds since 1970.
    pub start_unix_ns: u64,
    /// From its begin to its end.
    pub duration_ns: u64,
    /// The CPU time between two samples of a thread.
    pub period_ns: u64,
    /// Attributes of the whole profile.
    pub attributes: Vec<Attribute>,
    /// What its samples are of.
    pub scope: ProfileScope,
    /// The outermost kept span against typical ones, if there are any.
    pub compared: Option<Arc<Compared>>,
    samples: SampleList,
    tables: ProfileTables,
}

impl Profile {
    /// Builds a profile by hand, to test an exporter. It has the given name and an id of ones, and begins at the Unix
    /// epoch.
    pub fn builder(name: impl Into<String>) -> ProfileBuilder {
        ProfileBuilder::new(name.into())
    }

    /// A profile without samples.
    pub fn new(id: ProfileId, period_ns: u64) -> Self {
        Self {
            id,
            name: String::new(),
            title: String::new(),
            headline: String::new(),
            notes: Vec::new(),
            spans: Vec::new(),
            losses: Vec::new(),
            start_unix_ns: 0,
            duration_ns: 0,
            period_ns,
            attributes: Vec::new(),
            scope: ProfileScope::Spans,
            compared: None,
            samples: SampleList::default(),
            tables: ProfileTables::default(),
        }
    }

    /// A copy without samples and tables.
    pub(super) fn without_samples(&self) -> Self {
        Self {
            name: self.name.clone(),
            title: self.title.clone(),
            headline: self.headline.clone(),
            notes: self.notes.clone(),
            spans: self.spans.clone(),
            losses: self.losses.clone(),
            start_unix_ns: self.start_unix_ns,
            duration_ns: self.duration_ns,
            attributes: self.attributes.clone(),
            scope: self.scope,
            compared: self.compared.clone(),
            ..Self::new(self.id, self.period_ns)
        }
    }

    /// Whether it shows all threads of the process, in spans or not.
    pub fn is_of_process(&self) -> bool {
        self.scope != ProfileScope::Spans
    }

    /// What it shows is true at that moment.
    pub fn set_moment(&mut self, unix_ns: u64) {
        (self.start_unix_ns, self.duration_ns) = (unix_ns, 1);
        let points = self.samples.iter_mut().flat_map(|sample| &mut sample.points);
        points.for_each(|point| point.time_unix_ns = unix_ns);
    }

    /// Whether it shows a moment and not an interval.
    #[cfg(feature = "pprof")]
    pub(crate) fn is_of_moment(&self) -> bool {
        self.duration_ns == 1
    }

    /// The approximate memory use of the profile.
    pub fn bytes(&self) -> usize {
        let ProfileTables { functions, mappings, locations, stacks, links, threads, .. } =
            &self.tables;
        let of_mapping = |of: &Mapping| size_of::<Mapping>() + of.file.len() + BYTES_BESIDE;
        let mappings = mappings.iter().map(of_mapping).sum::<usize>();
        let code = functions.bytes() + mappings + locations.bytes() + stacks.bytes();
        self.samples.bytes() + code + self.tables.leaves.bytes() + links.bytes() + threads.bytes()
    }

    /// Adds a function, unless it has it.
    pub fn add_function(&mut self, function: Function) -> FunctionId {
        let Function { name, system_name, file } = &function;
        let bytes = name.len() + system_name.len() + file.len();
        self.tables.functions.add(function, bytes)
    }

    /// Adds a mapping, unless it has it.
    pub fn add_mapping(&mut self, mapping: Mapping) -> MappingId {
        let known = self.mappings().find(|(_, known)| **known == mapping).map(|(id, _)| id);
        known.unwrap_or_else(|| self.add_distinct_mapping(mapping))
    }

    /// Adds a mapping even if it looks like another with other functions: that of a file that was replaced.
    pub fn add_distinct_mapping(&mut self, mapping: Mapping) -> MappingId {
        let id = MappingId::new(self.tables.mappings.len() as u32);
        self.tables.mappings.push(mapping);
        id
    }

    fn mappings(&self) -> impl Iterator<Item = (MappingId, &Mapping)> {
        (0..).map(MappingId::new).zip(&self.tables.mappings)
    }

    /// The mapping that was added first. This is the executable, even if no sample fell in it.
    pub(crate) fn first_mapping(&self) -> Option<MappingId> {
        self.mappings().next().map(|(id, _)| id)
    }

    /// Adds a location, unless it has it.
    pub fn add_location(&mut self, location: Location) -> LocationId {
        let bytes = size_of_val(location.lines.as_slice());
        self.tables.locations.add(location, bytes)
    }

    /// Adds a frame that is not code but a note.
    pub fn add_remark(&mut self, remark: &str) -> LocationId {
        self.add_named(FrameKind::Remark, remark)
    }

    pub(super) fn add_named(&mut self, kind: FrameKind, name: &str) -> LocationId {
        let function = self.add_function(Function::named(name));
        let lines = vec![Line { function, line: 0, column: 0 }];
        self.add_location(Location { mapping: None, address: 0, kind, lines, is_inferred: false })
    }

    /// Adds a frame that is neither code nor a note. Only profiles without symbols have it.
    pub fn add_leaf_mark(&mut self, mark: LeafMark) -> LocationId {
        let location = self.add_remark(mark.as_str());
        *self.tables.leaf_marks.entry(mark).or_insert(location)
    }

    pub(super) fn leaf_mark(&self, mark: LeafMark) -> Option<LocationId> {
        self.tables.leaf_marks.get(&mark).copied()
    }

    /// Adds a stack, with the innermost location first.
    pub fn add_stack(&mut self, stack: Vec<LocationId>) -> StackId {
        stack.into_iter().rev().fold(StackId::EMPTY, |caller, location| {
            self.tables.stacks.add(StackNode { caller, location }, 0)
        })
    }

    /// The caller of each stack, if it has one, and its innermost location, in order of the ids. Callers come first.
    pub(crate) fn stack_nodes(&self) -> impl Iterator<Item = (Option<StackId>, LocationId)> {
        let caller = |node: &StackNode| (node.caller != StackId::EMPTY).then_some(node.caller);
        self.tables.stacks.iter().map(move |(_, node)| (caller(node), node.location))
    }

    /// Adds a leaf, unless it has it.
    pub fn add_leaf(&mut self, leaf: Leaf) -> LeafId {
        let bytes = match &leaf {
            Leaf::Blocked(text)
            | Leaf::Delayed { behind: Some(text) }
            | Leaf::AwaitingOneOf { others: text, .. } => text.len(),
            Leaf::BlockedBy(..) | Leaf::AwaitingUntil { .. } => leaf.to_string().len(),
            _ => 0,
        };
        self.tables.leaves.add(leaf, bytes)
    }

    /// Adds a link, unless it has it.
    pub fn add_link(&mut self, link: Link) -> LinkId {
        let bytes = link.bytes();
        self.tables.links.add(link, bytes)
    }

    /// Adds a thread, unless it has it.
    pub fn add_thread(&mut self, thread: ProfiledThread) -> ThreadId {
        let bytes = thread.name.len();
        self.tables.threads.add(thread, bytes)
    }

    /// Adds a sample of which nothing but its kind is known beyond its stack.
    pub fn add_sample(
        &mut self,
        kind: SampleKind,
        stack: StackId,
        link: Option<LinkId>,
        point: Point,
    ) {
        let leaf = self.add_leaf(Leaf::of(kind));
        self.add_sample_at(kind, (stack, leaf), link, point);
    }

    /// Adds a sample. Samples with the same stack, leaf and span become one, with a point each.
    pub fn add_sample_at(
        &mut self,
        kind: SampleKind,
        (stack, leaf): (StackId, LeafId),
        link: Option<LinkId>,
        point: Point,
    ) {
        self.samples.add((stack, leaf, link, kind), point);
    }

    /// Adds to what the samples at that place have together, without a time or a thread.
    pub(super) fn add_weight(&mut self, kind: SampleKind, place: (StackId, LeafId), weight: u64) {
        self.samples.add_weight((place.0, place.1, None, kind), weight);
    }

    /// All samples, one for each stack and span.
    pub fn samples(&self) -> &[Sample] {
        self.samples.list()
    }

    /// All locations, in order of their ids.
    pub fn locations(&self) -> impl Iterator<Item = (LocationId, &Location)> {
        self.tables.locations.iter()
    }

    /// All functions, in order of their ids.
    pub fn functions(&self) -> impl Iterator<Item = (FunctionId, &Function)> {
        self.tables.functions.iter()
    }

    /// All leaves, in order of their ids.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = (LeafId, &Leaf)> {
        self.tables.leaves.iter()
    }

    /// All links, in order of their ids.
    pub(crate) fn links(&self) -> impl Iterator<Item = (LinkId, &Link)> {
        self.tables.links.iter()
    }

    /// All threads, in order of their ids.
    pub fn threads(&self) -> impl Iterator<Item = (ThreadId, &ProfiledThread)> {
        self.tables.threads.iter()
    }

    #[cfg(test)]
    pub(crate) fn set_thread_of_all(&mut self, thread: ThreadId) {
        let points = self.samples.iter_mut().flat_map(|sample| &mut sample.points);
        points.for_each(|point| point.thread = Some(thread));
    }

    #[cfg(test)]
    pub(crate) fn keep_only(&mut self, kind: SampleKind) {
        self.samples.keep_only(kind);
    }

    /// The samples of one kind.
    pub fn of_kind(&self, kind: SampleKind) -> impl Iterator<Item = &Sample> {
        self.samples.list().iter().filter(move |sample| sample.kind == kind)
    }

    pub(super) fn points(&self, kind: SampleKind) -> impl Iterator<Item = &Point> {
        self.of_kind(kind).flat_map(|sample| &sample.points)
    }

    /// When it starts.
    pub fn start(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_nanos(self.start_unix_ns)
    }

    /// The duration of the profile. Every sample's time is at least the start and less than the end.
    pub fn duration(&self) -> Duration {
        Duration::from_nanos(self.duration_ns)
    }

    /// The CPU time between two samples at the requested rate.
    pub fn period(&self) -> Duration {
        Duration::from_nanos(self.period_ns)
    }

    /// The number of samples of running threads.
    pub fn sample_count(&self) -> usize {
        self.points(SampleKind::OnCpu).count()
    }

    /// The number of waits.
    pub fn wait_count(&self) -> usize {
        self.points(SampleKind::OffCpu).count()
    }

    /// The number of points of all kinds.
    pub fn point_count(&self) -> usize {
        self.samples.list().iter().map(|sample| sample.points.len()).sum()
    }

    /// The CPU time that all samples represent.
    pub fn weight(&self) -> Duration {
        Duration::from_nanos(self.total(SampleKind::OnCpu))
    }

    /// The total duration of all waits.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.total(SampleKind::OffCpu))
    }

    /// The total weight of the samples of one kind.
    pub fn total(&self, kind: SampleKind) -> u64 {
        self.points(kind).map(|point| point.weight).sum()
    }

    /// Scales the durations of all waits to a total of `total_ns`.
    pub fn shorten_waits(&mut self, total_ns: u64) {
        let before_ns = u128::from(self.total(SampleKind::OffCpu)).max(1);
        let waits = self.samples.iter_mut().filter(|sample| sample.kind == SampleKind::OffCpu);
        for point in waits.flat_map(|sample| &mut sample.points) {
            let weight_ns = u128::from(point.weight) * u128::from(total_ns) / before_ns;
            point.weight = u64::try_from(weight_ns).unwrap_or(point.weight);
        }
    }

    /// The CPU time that each sample represents, in nanoseconds, if it is the same for all.
    pub fn uniform_weight_ns(&self) -> Option<u64> {
        let mut weights = self.points(SampleKind::OnCpu).map(|point| point.weight);
        let first = weights.next()?;
        weights.all(|weight| weight == first).then_some(first)
    }

    /// The largest CPU time that a sample represents, in nanoseconds.
    pub fn largest_weight_ns(&self) -> u64 {
        self.points(SampleKind::OnCpu).map(|point| point.weight).max().unwrap_or(0)
    }

    /// The CPU time, in nanoseconds, of which every sample has a multiple: the smallest weight. `None` if there is no
    /// such time, if a sample has more than 1,000 times as much, or if the multiples add up to more than 200,000.
    #[cfg(any(test, feature = "otlp"))]
    pub(crate) fn unit_weight_ns(&self) -> Option<u64> {
        const MOST: u64 = 1_000;
        /// For the sum of all multiples, each of which is a timestamp in OTLP.
        const MOST_OF_ALL: u64 = 200_000;
        let weights = || self.points(SampleKind::OnCpu).map(|point| point.weight);
        let unit = weights().min().filter(|unit| *unit > 0)?;
        let is_multiple = weights().all(|weight| weight % unit == 0 && weight / unit <= MOST);
        let are_few = weights().map(|weight| weight / unit).sum::<u64>() <= MOST_OF_ALL;
        (is_multiple && are_few).then_some(unit)
    }

    /// The function with this id. Ids are valid only in their own profile.
    pub fn function(&self, id: FunctionId) -> Option<&Function> {
        self.tables.functions.get(id)
    }

    /// Whose code a function is, which is known when all names are.
    pub(crate) fn origin(&self, id: FunctionId) -> CodeOrigin {
        self.tables.origins.get(&id).copied().unwrap_or_default()
    }

    /// Several functions can have the same name after redaction.
    pub(super) fn set_origin(&mut self, id: FunctionId, origin: CodeOrigin) {
        let known = self.tables.origins.entry(id).or_insert(origin);
        *known = origin.min(*known);
    }

    /// The mapping with this id. Ids are valid only in their own profile.
    pub fn mapping(&self, id: MappingId) -> Option<&Mapping> {
        self.tables.mappings.get(id.number() as usize)
    }

    /// The location with this id. Ids are valid only in their own profile.
    pub fn location(&self, id: LocationId) -> Option<&Location> {
        self.tables.locations.get(id)
    }

    /// The locations of a stack, with the innermost first. Empty if there is no such stack.
    pub fn stack(&self, id: StackId) -> impl Iterator<Item = &Location> {
        self.location_ids(id).filter_map(|id| self.location(id))
    }

    /// The ids of a stack's locations, with the innermost first.
    pub fn location_ids(&self, stack: StackId) -> impl Iterator<Item = LocationId> {
        let next = |node: &&StackNode| self.tables.stacks.get(node.caller);
        std::iter::successors(self.tables.stacks.get(stack), next).map(|node| node.location)
    }

    /// The leaf with this id. Ids are valid only in their own profile.
    pub fn leaf(&self, id: LeafId) -> Option<&Leaf> {
        self.tables.leaves.get(id)
    }

    /// The lines of a location, with their functions.
    pub(super) fn source_lines(&self, location: &Location) -> Vec<SourceLine> {
        let source = |Line { function, line, column }: &Line| {
            let function = self.function(*function)?.clone();
            Some(SourceLine { function, line: *line, column: *column })
        };
        location.lines.iter().filter_map(source).collect()
    }

    /// The link with this id. Ids are valid only in their own profile.
    pub fn link(&self, id: LinkId) -> Option<&Link> {
        self.tables.links.get(id)
    }

    /// The thread with this id. Ids are valid only in their own profile.
    pub fn thread(&self, id: ThreadId) -> Option<&ProfiledThread> {
        self.tables.threads.get(id)
    }

    /// The fields that identify the nearest kept span: that of the link, or one around it.
    #[cfg(feature = "pprof")]
    pub(crate) fn fields_around<'a>(&'a self, link: &'a Link) -> &'a [(&'static str, String)] {
        let around = |link: &&'a Link| link.parent.and_then(|parent| self.link(parent));
        let mut links = std::iter::successors(Some(link), around);
        links.find(|link| !link.fields.is_empty()).map_or(&[], |link| &link.fields)
    }

    /// The names of a link's spans, with the outermost first.
    pub fn span_path(&self, link: Option<LinkId>) -> Vec<&str> {
        let around = |link: &&Link| self.link(link.parent?);
        let links = std::iter::successors(link.and_then(|id| self.link(id)), around);
        let mut path: Vec<_> = links.map(|link| link.span.as_str()).collect();
        path.reverse();
        path
    }

    /// The name of a location without lines: the file and the address in it, as in `shop+0x1a2b`.
    pub fn module_offset(&self, location: &Location) -> String {
        let (file, address) = (location.mapping.and_then(|id| self.mapping(id)), location.address);
        match file.and_then(|mapping| mapping.file.rsplit('/').next()) {
            Some(file) => format!("{file}+{address:#x}"),
            None => format!("{address:#x}"),
        }
    }

    /// A copy with one in `every` points of each kind.
    #[cfg(feature = "otlp")]
    pub fn downsampled(&self, every: usize) -> Self {
        let mut downsampled = self.clone();
        downsampled.samples = SampleList::default();
        for (sample, point) in self.downsampled_points(every) {
            let place = (sample.stack, sample.leaf);
            downsampled.add_sample_at(sample.kind, place, sample.link, point);
        }
        downsampled
    }
}

/// A kept span of a profile against the reference spans of its cohort.
#[derive(Clone, Debug)]
pub struct Compared {
    /// The name of the cohort: that of its spans, with the fields that name the route.
    pub cohort: String,
    /// The name of the kept span, with its shown fields.
    pub span: String,
    /// The span against them.
    pub comparison: Arc<Comparison>,
    /// What the mean of the last 200 to 400 reference spans did, by stack: without times, threads and spans.
    pub typical: Arc<Profile>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        Profile::new(ProfileId::for_test(1), 10)
    }

    fn point(time_unix_ns: u64) -> Point {
        Point { time_unix_ns, weight: 10, thread: None }
    }

    #[test]
    fn equal_mappings_can_have_entries_of_their_own() {
        let mut profile = Profile::new(ProfileId::for_test(1), 5);
        let ids = [0; 3].map(|_| profile.add_distinct_mapping(Mapping::default()));
        assert_eq!(profile.mappings().map(|(id, _)| id).collect::<Vec<_>>(), ids);
        assert_eq!(profile.add_mapping(Mapping::default()), ids[0]);
    }

    #[test]
    fn samples_with_the_same_stack_and_span_are_merged_in_order_of_time() {
        let mut profile = profile();
        let remark = profile.add_remark("x");
        let stack = profile.add_stack(vec![remark]);
        let link = profile.add_link(Link::named("a", None));
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
        assert_eq!(profile.total(SampleKind::OnCpu), 40);
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
            Point { time_unix_ns: 3, weight: 11, thread: None },
        );
        assert_eq!(profile.uniform_weight_ns(), None);
    }

    #[test]
    fn a_span_path_begins_with_the_outermost_span() {
        let mut profile = profile();
        let outer = profile.add_link(Link::named("request", None));
        let inner = profile.add_link(Link::named("query", Some(outer)));
        assert_eq!(profile.span_path(Some(inner)), ["request", "query"]);
        assert!(profile.span_path(None).is_empty());
    }
}

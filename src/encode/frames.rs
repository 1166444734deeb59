//! Samples as names, for formats without spans, addresses or inlining. Each name is stored once. The frames of a stack
//! are iterated rather than collected, because inlining makes stacks of thousands of frames.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;

use crate::profile::{
    AWAIT, FrameKind, Function, Link, LinkId, LocationId, Profile, Sample, SampleKind, TableId,
    unexplained_idle,
};

/// What a box of a flame graph shows. Ordered by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Frame {
    pub(super) name: NameId,
    /// `None` for a span.
    pub(super) kind: Option<FrameKind>,
}

/// The number of a name, in the order of the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NameId(u32);

impl NameId {
    pub(super) fn number(self) -> usize {
        self.0 as usize
    }
}

/// The location of a frame: file and line, or the mapped file. Empty if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place<'a> {
    file: &'a str,
    /// 0 if unknown.
    line: u32,
    is_inferred: bool,
}

impl Place<'_> {
    pub(super) fn is_known(&self) -> bool {
        !self.file.is_empty()
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        f.write_str(if self.is_inferred { " (inferred)" } else { "" })
    }
}

/// A frame of a stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step<'a> {
    pub(super) frame: Frame,
    pub(super) place: Place<'a>,
}

/// What a sample adds to each of its frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BoxShare {
    pub(super) weight_ns: u64,
    /// The samples, waits, awaits and scheduling delays, in the order of [`SampleKind::TIMES`].
    pub(super) counts: [usize; 4],
}

impl BoxShare {
    fn of(sample: &Sample) -> Self {
        let count = |kind| if kind == sample.kind { sample.points.len() } else { 0 };
        let weight_ns = sample.points.iter().map(|point| point.weight).sum();
        Self { weight_ns, counts: SampleKind::TIMES.map(count) }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.weight_ns += other.weight_ns;
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
    }
}

/// A sample, or idle time that nothing explains, with its spans and locations from the outermost.
pub(super) struct Path {
    pub(super) share: BoxShare,
    links: Vec<LinkId>,
    locations: Vec<LocationId>,
    /// The innermost frame, if it is no location.
    end: Option<Frame>,
}

/// Idle time of a span that nothing in its profile explains.
const UNEXPLAINED: &str = "[idle: not explained]";

/// The frames of a profile in which time was spent.
pub(super) struct Frames<'a> {
    profile: &'a Profile,
    names: Vec<Cow<'a, str>>,
    /// The names of the profile's functions, of its spans, and of its locations without functions.
    of_functions: Vec<NameId>,
    of_links: Vec<NameId>,
    of_locations: Vec<NameId>,
    sorted: Vec<Path>,
}

/// The maximum number of nested spans in a path. If there are more, the innermost are used.
const MOST_SPANS: usize = 128;

impl<'a> Frames<'a> {
    pub(super) fn of(profile: &'a Profile) -> Self {
        let functions = || profile.functions().map(|(_, function)| Cow::from(&function.name));
        let links = || profile.links().map(|(_, link)| Cow::from(&link.span));
        let locations = || {
            profile.locations().map(|(_, location)| match location.lines[..] {
                [] => Cow::from(profile.module_offset(location)),
                _ => Cow::default(),
            })
        };
        let others = [AWAIT, UNEXPLAINED].map(Cow::from);
        let mut names: Vec<_> =
            functions().chain(links()).chain(locations()).chain(others.clone()).collect();
        names.sort_unstable();
        names.dedup();
        let number = |name| NameId(names.binary_search(&name).map_or(0, |place| place as u32));
        let [awaits, unexplained] = others.map(number);
        let of_functions = functions().map(number).collect();
        let of_links = links().map(number).collect();
        let of_locations = locations().map(number).collect();
        let sorted = Vec::new();
        let mut new = Self { profile, names, of_functions, of_links, of_locations, sorted };
        let awaits = Frame { name: awaits, kind: Some(FrameKind::Wait) };
        let unexplained = Frame { name: unexplained, kind: Some(FrameKind::Remark) };
        let times = profile.samples().iter().filter(|sample| sample.kind.is_time());
        let samples = times.map(|sample| new.path(sample, awaits));
        let mut paths: Vec<_> = samples.chain(idle(profile, unexplained)).collect();
        paths.sort_by(|a, b| new.compare(a, b));
        new.sorted = paths;
        new
    }

    /// All names, in order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|name| &**name)
    }

    pub(super) fn name(&self, id: NameId) -> &str {
        self.names.get(id.number()).map_or("", |name| name)
    }

    /// All samples, and idle time that nothing explains. Those with the same callers are adjacent.
    pub(super) fn paths(&self) -> &[Path] {
        &self.sorted
    }

    fn path(&self, sample: &Sample, awaits: Frame) -> Path {
        let around = |link: &LinkId| self.profile.link(*link)?.parent;
        let links = std::iter::successors(sample.link, around).take(MOST_SPANS);
        let (mut links, mut locations): (Vec<_>, Vec<_>) =
            (links.collect(), self.profile.location_ids(sample.stack).collect());
        links.reverse();
        locations.reverse();
        let end = self.profile.ends_in_code(sample).then_some(awaits);
        let end = end.filter(|_| sample.kind == SampleKind::Await);
        Path { share: BoxShare::of(sample), links, locations, end }
    }

    /// The spans of a sample from the outermost, then its functions, including inlined ones.
    pub(super) fn steps(&self, path: &Path) -> impl Iterator<Item = Step<'a>> {
        let spans = path.links.iter().map(|link| {
            let frame = Frame { name: named(&self.of_links, *link), kind: None };
            Step { frame, place: Place::default() }
        });
        let end = path.end.map(|frame| Step { frame, place: Place::default() });
        spans.chain(path.locations.iter().flat_map(|id| self.of_location(*id))).chain(end)
    }

    /// The frames of a location, with the outermost function first.
    fn of_location(&self, id: LocationId) -> impl Iterator<Item = Step<'a>> {
        let location = self.profile.location(id).into_iter();
        location.flat_map(move |location| {
            let kind = Some(location.kind);
            let is_inferred = location.is_inferred && !location.lines.is_empty();
            let mapping = location.mapping.and_then(|mapping| self.profile.mapping(mapping));
            let file = mapping.map_or("", |mapping| &mapping.file);
            let in_code = Place { file, line: 0, is_inferred };
            let unnamed = location.lines.is_empty().then(|| Step {
                frame: Frame { name: named(&self.of_locations, id), kind },
                place: in_code,
            });
            let named = location.lines.iter().rev().filter_map(move |line| {
                let Function { file, .. } = self.profile.function(line.function)?;
                let frame = Frame { name: named(&self.of_functions, line.function), kind };
                let in_source = Place { file, line: line.line, is_inferred };
                Some(Step { frame, place: if file.is_empty() { in_code } else { in_source } })
            });
            unnamed.into_iter().chain(named)
        })
    }

    fn compare(&self, a: &Path, b: &Path) -> Ordering {
        let frames = |path| self.steps(path).map(|step| step.frame);
        match (a.links == b.links, a.locations == b.locations) {
            (true, true) => a.end.cmp(&b.end),
            _ => frames(a).cmp(frames(b)),
        }
    }
}

/// The idle time of each span that nothing explains, below the span.
fn idle(profile: &Profile, frame: Frame) -> impl Iterator<Item = Path> {
    unexplained_idle(profile).into_iter().filter_map(move |(span, weight_ns)| {
        let is_it = |link: &Link| link.parent.is_none() && link.span == span;
        let (link, _) = profile.links().find(|(_, link)| is_it(link))?;
        let share = BoxShare { weight_ns, ..BoxShare::default() };
        Some(Path { share, links: vec![link], locations: Vec::new(), end: Some(frame) })
    })
}

fn named<H: TableId>(names: &[NameId], id: H) -> NameId {
    names.get(id.number() as usize).copied().unwrap_or(NameId(0))
}

//! Samples as names, for formats without spans, addresses or inlining. Each name is stored once. The frames of a stack
//! are iterated rather than collected, because inlining makes stacks of thousands of frames.

use std::borrow::Cow;
use std::cmp::Ordering;

use crate::profile::{Link, LinkId, LocationId, Profile, Sample, TableId, unexplained_idle};

/// The number of a name, in the order of the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NameId(u32);

impl NameId {
    pub(super) fn number(self) -> usize {
        self.0 as usize
    }
}

/// A sample, or idle time that nothing explains, with its spans and locations from the outermost.
pub(super) struct Path {
    pub(super) weight_ns: u64,
    links: Vec<LinkId>,
    locations: Vec<LocationId>,
    /// The innermost frame, if it is no location.
    end: Option<NameId>,
}

/// Idle time of a span that nothing in its profile explains.
const UNEXPLAINED: &str = "[idle: not explained]";

/// The frames of a profile in which time was spent.
pub(super) struct Frames<'a> {
    profile: &'a Profile,
    names: Vec<Cow<'a, str>>,
    /// The names of the profile's functions, of its spans, of its locations without functions, and of what its stacks do
    /// not show.
    of_functions: Vec<NameId>,
    of_links: Vec<NameId>,
    of_locations: Vec<NameId>,
    of_leaves: Vec<Option<NameId>>,
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
        let leaves = || profile.leaves().map(|(_, leaf)| leaf.mixed_frame().map(Cow::from));
        let others = leaves().flatten().chain([UNEXPLAINED.into()]);
        let mut names: Vec<_> =
            functions().chain(links()).chain(locations()).chain(others).collect();
        names.sort_unstable();
        names.dedup();
        let number = |name| NameId(names.binary_search(&name).map_or(0, |place| place as u32));
        let unexplained = number(UNEXPLAINED.into());
        let of_leaves = leaves().map(|leaf| leaf.map(number)).collect();
        let of_functions = functions().map(number).collect();
        let of_links = links().map(number).collect();
        let of_locations = locations().map(number).collect();
        let sorted = Vec::new();
        let mut new =
            Self { profile, names, of_functions, of_links, of_locations, of_leaves, sorted };
        let times = profile.samples().iter().filter(|sample| sample.kind.is_time());
        let samples = times.map(|sample| new.path(sample));
        let mut paths: Vec<_> = samples.chain(idle(profile, unexplained)).collect();
        paths.sort_by(|a, b| new.compare(a, b));
        new.sorted = paths;
        new
    }

    pub(super) fn name(&self, id: NameId) -> &str {
        self.names.get(id.number()).map_or("", |name| name)
    }

    /// All samples, and idle time that nothing explains. Those with the same callers are adjacent.
    pub(super) fn paths(&self) -> &[Path] {
        &self.sorted
    }

    fn path(&self, sample: &Sample) -> Path {
        let around = |link: &LinkId| self.profile.link(*link)?.parent;
        let links = std::iter::successors(sample.link, around).take(MOST_SPANS);
        let (mut links, mut locations): (Vec<_>, Vec<_>) =
            (links.collect(), self.profile.location_ids(sample.stack).collect());
        links.reverse();
        locations.reverse();
        let end = self.of_leaves.get(sample.leaf.number() as usize).copied().flatten();
        let weight_ns = sample.points.iter().map(|point| point.weight).sum();
        Path { weight_ns, links, locations, end }
    }

    /// The spans of a sample from the outermost, then its functions, including inlined ones.
    pub(super) fn steps(&self, path: &Path) -> impl Iterator<Item = NameId> {
        let spans = path.links.iter().map(|link| named(&self.of_links, *link));
        spans.chain(path.locations.iter().flat_map(|id| self.of_location(*id))).chain(path.end)
    }

    /// The frames of a location, with the outermost function first.
    fn of_location(&self, id: LocationId) -> impl Iterator<Item = NameId> {
        let location = self.profile.location(id).into_iter();
        location.flat_map(move |location| {
            let unnamed = location.lines.is_empty().then(|| named(&self.of_locations, id));
            let lines = location.lines.iter().rev();
            let named = lines.map(move |line| named(&self.of_functions, line.function));
            unnamed.into_iter().chain(named)
        })
    }

    fn compare(&self, a: &Path, b: &Path) -> Ordering {
        match (a.links == b.links, a.locations == b.locations) {
            (true, true) => a.end.cmp(&b.end),
            _ => self.steps(a).cmp(self.steps(b)),
        }
    }
}

/// The idle time of each span that nothing explains, below the span.
fn idle(profile: &Profile, frame: NameId) -> impl Iterator<Item = Path> {
    unexplained_idle(profile).into_iter().filter_map(move |(span, weight_ns)| {
        let is_it = |link: &Link| link.parent.is_none() && link.span == span;
        let (link, _) = profile.links().find(|(_, link)| is_it(link))?;
        Some(Path { weight_ns, links: vec![link], locations: Vec::new(), end: Some(frame) })
    })
}

fn named<H: TableId>(names: &[NameId], id: H) -> NameId {
    names.get(id.number() as usize).copied().unwrap_or(NameId(0))
}

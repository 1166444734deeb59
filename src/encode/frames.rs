//! Samples as those formats see them that know no spans, addresses or inlining: names. Each stands here
//! once, and a stack is the numbers of its names, one after the other and never all at once: what is inlined
//! makes stacks of thousands.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;

use crate::profile::{FrameKind, LinkId, Location, LocationId, Profile, Sample, StringId};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum BoxKind {
    Span,
    Rust,
    Native,
    Kernel,
    Wait,
    Remark,
}

/// What a box of a flame graph shows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Frame<'a> {
    pub(super) name: Cow<'a, str>,
    pub(super) kind: BoxKind,
}

/// The number of a [`Frame`]: in the order of their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct FrameId(u32);

/// Where in its function a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Place {
    Unknown,
    /// File and line.
    Source {
        file: StringId,
        line: u32,
        is_inferred: bool,
    },
    /// The file of code, of this location.
    Code {
        location: LocationId,
        is_inferred: bool,
    },
}

/// A frame of a stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) frame: FrameId,
    pub(super) place: Place,
}

/// The frames of a profile.
pub(super) struct Frames<'a> {
    profile: &'a Profile,
    frames: Vec<Frame<'a>>,
    /// The outermost function first.
    of_locations: HashMap<LocationId, Vec<Step>>,
    /// The outermost span first.
    of_links: HashMap<LinkId, Vec<Step>>,
    /// The samples in the order of their frames, so that those with the same callers stand together.
    sorted: Vec<&'a Sample>,
}

/// Spans inside each other that are shown: of more the innermost.
const MOST_SPANS: usize = 128;

impl<'a> Frames<'a> {
    pub(super) fn of(profile: &'a Profile) -> Self {
        let mut new = Self {
            profile,
            frames: Vec::new(),
            of_locations: HashMap::new(),
            of_links: HashMap::new(),
            sorted: profile.samples().iter().collect(),
        };
        let mut numbers = HashMap::new();
        for sample in profile.samples() {
            for id in profile.stack(sample.stack) {
                if !new.of_locations.contains_key(id)
                    && let Some(location) = profile.location(*id)
                {
                    let steps = of_location(profile, *id, location, &mut numbers);
                    new.of_locations.insert(*id, steps);
                }
            }
            if let Some(link) = sample.link {
                let path = || of_link(profile, link, &mut numbers);
                new.of_links.entry(link).or_insert_with(path);
            }
        }
        let mut frames: Vec<_> = numbers.into_iter().collect();
        frames.sort_unstable();
        let mut sorted = vec![FrameId(0); frames.len()];
        for ((_, number), new) in frames.iter().zip(0..) {
            if let Some(place) = sorted.get_mut(*number as usize) {
                *place = FrameId(new);
            }
        }
        for step in new.of_locations.values_mut().chain(new.of_links.values_mut()).flatten() {
            step.frame = sorted.get(step.frame.0 as usize).copied().unwrap_or(step.frame);
        }
        new.frames = frames.into_iter().map(|(frame, _)| frame).collect();
        let mut samples = std::mem::take(&mut new.sorted);
        samples.sort_by(|a, b| new.compare(a, b));
        new.sorted = samples;
        new
    }

    pub(super) fn frame(&self, id: FrameId) -> Option<&Frame<'a>> {
        self.frames.get(id.0 as usize)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = FrameId> + use<> {
        (0..self.frames.len() as u32).map(FrameId)
    }

    /// All samples, those with the same callers together.
    pub(super) fn samples(&self) -> &[&'a Sample] {
        &self.sorted
    }

    /// The spans of a sample from the outside in, then its functions, the inlined ones too.
    pub(super) fn steps(&self, sample: &Sample) -> impl Iterator<Item = Step> {
        let spans = sample.link.and_then(|link| self.of_links.get(&link)).into_iter().flatten();
        let locations = self.profile.stack(sample.stack).iter().rev();
        let functions = locations.filter_map(|id| self.of_locations.get(id)).flatten();
        spans.chain(functions).copied()
    }

    fn compare(&self, a: &Sample, b: &Sample) -> Ordering {
        let frames = |sample| self.steps(sample).map(|step| step.frame);
        match (a.link == b.link, a.stack == b.stack) {
            (true, true) => Ordering::Equal,
            _ => frames(a).cmp(frames(b)),
        }
    }

    /// File and line, or the file of code; empty if unknown.
    pub(super) fn place(&self, place: Place) -> String {
        let (text, is_inferred) = match place {
            Place::Unknown => return String::new(),
            Place::Source { file, line, is_inferred } => {
                let file = self.profile.string(file);
                let text = if line == 0 { file.to_owned() } else { format!("{file}:{line}") };
                (text, is_inferred)
            }
            Place::Code { location, is_inferred } => {
                let mapping = self.profile.location(location).and_then(|location| location.mapping);
                let mapping = mapping.and_then(|mapping| self.profile.mapping(mapping));
                (mapping.map_or(String::new(), |mapping| mapping.file.clone()), is_inferred)
            }
        };
        if is_inferred { format!("{text} (inferred)") } else { text }
    }
}

type FrameNumbers<'a> = HashMap<Frame<'a>, u32>;

fn number<'a>(numbers: &mut FrameNumbers<'a>, name: Cow<'a, str>, kind: BoxKind) -> FrameId {
    let next = numbers.len() as u32;
    FrameId(*numbers.entry(Frame { name, kind }).or_insert(next))
}

fn of_link<'a>(profile: &'a Profile, link: LinkId, numbers: &mut FrameNumbers<'a>) -> Vec<Step> {
    let path = std::iter::successors(profile.link(link), |link| profile.link(link.parent?));
    let path = path.take(MOST_SPANS).map(|link| {
        let frame = number(numbers, Cow::Borrowed(&link.span), BoxKind::Span);
        Step { frame, place: Place::Unknown }
    });
    let mut path: Vec<_> = path.collect();
    path.reverse();
    path
}

fn of_location<'a>(
    profile: &'a Profile,
    id: LocationId,
    location: &Location,
    numbers: &mut FrameNumbers<'a>,
) -> Vec<Step> {
    let kind = match location.kind {
        FrameKind::Rust => BoxKind::Rust,
        FrameKind::Native => BoxKind::Native,
        FrameKind::Kernel => BoxKind::Kernel,
        FrameKind::Wait => BoxKind::Wait,
        FrameKind::Remark => BoxKind::Remark,
    };
    let is_inferred = location.is_inferred && !location.lines.is_empty();
    let in_code = match location.mapping {
        Some(_) => Place::Code { location: id, is_inferred },
        None => Place::Unknown,
    };
    if location.lines.is_empty() {
        let frame = number(numbers, profile.place_in_code(location).into(), kind);
        return vec![Step { frame, place: in_code }];
    }
    let steps = location.lines.iter().rev().filter_map(|line| {
        let function = profile.function(line.function)?;
        let frame = number(numbers, profile.string(function.name).into(), kind);
        let place = match profile.string(function.file) {
            "" => in_code,
            _ => Place::Source { file: function.file, line: line.line, is_inferred },
        };
        Some(Step { frame, place })
    });
    steps.collect()
}

//! Samples merged by their common callers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use crate::encode::frames::{Frame, Frames, NameId, Place};
use crate::profile::{Sample, SampleKind};

/// A box.
#[derive(Debug)]
pub(super) struct Node<'a> {
    /// How many are around it.
    pub(super) depth: usize,
    pub(super) what: What,
    pub(super) share: BoxShare,
    /// Where the function spent most time, itself or in what it called.
    pub(super) places: Vec<Place<'a>>,
    /// Time of all samples that are drawn to the left of it.
    pub(super) begin_ns: u64,
}

/// What a box stands for.
#[derive(Debug)]
pub(super) enum What {
    Frame(Frame),
    /// Calls that follow each other.
    Folded(Vec<Frame>),
}

/// What samples add to each of their boxes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BoxShare {
    pub(super) weight_ns: u64,
    pub(super) samples: usize,
    pub(super) waits: usize,
}

impl BoxShare {
    fn of(sample: &Sample) -> Self {
        let weight_ns = sample.points.iter().map(|point| point.weight_ns).sum();
        let points = sample.points.len();
        match sample.kind {
            SampleKind::OnCpu => Self { weight_ns, samples: points, waits: 0 },
            SampleKind::OffCpu => Self { weight_ns, samples: 0, waits: points },
        }
    }

    fn add(&mut self, other: Self) {
        self.weight_ns += other.weight_ns;
        self.samples += other.samples;
        self.waits += other.waits;
    }
}

/// All boxes that are drawn, and nothing of those that are not. Flat, and walked without recursion: stacks are
/// as deep as the program likes.
#[derive(Debug)]
pub(super) struct Tree<'a> {
    /// Each after the one that it is in, and in the order of their names, so that a picture does not depend on
    /// chance.
    pub(super) boxes: Vec<Node<'a>>,
    /// How many boxes are wide enough, and have no room.
    pub(super) left_out: usize,
}

/// Places shown for one function.
const MOST_PLACES: usize = 3;
/// Of the frames that all samples of a span share, the innermost ones that are shown.
const SHARED_SHOWN: usize = 12;

/// Which boxes are drawn.
#[derive(Clone, Copy)]
pub(super) struct DrawnBoxes<'a> {
    /// Narrower boxes are not.
    pub(super) narrowest_ns: u64,
    /// What they may take together,
    pub(super) most_bytes: usize,
    /// and what each does, by its name.
    pub(super) bytes: &'a dyn Fn(NameId) -> usize,
}

/// A box while the samples in it are walked through.
struct Open<'a> {
    frame: Frame,
    share: BoxShare,
    begin_ns: u64,
    places: HashMap<Place<'a>, u64>,
}

/// Walks through all boxes, and tells of each when all is known of it: of the inner ones first. The number is
/// that of the boxes around it.
fn walk<'a>(
    frames: &Frames<'a>,
    with_places: bool,
    mut close: impl FnMut(usize, Open<'a>),
) -> BoxShare {
    let mut open: Vec<Open<'a>> = Vec::new();
    let mut total = BoxShare::default();
    for path in frames.samples() {
        let share = BoxShare::of(path.sample);
        let mut depth = 0;
        for step in frames.steps(path) {
            if open.get(depth).is_none_or(|open| open.frame != step.frame) {
                while open.len() > depth {
                    open.pop().into_iter().for_each(|last| close(open.len(), last));
                }
                open.push(Open {
                    frame: step.frame,
                    share: BoxShare::default(),
                    begin_ns: total.weight_ns,
                    places: HashMap::new(),
                });
            }
            if let Some(open) = open.get_mut(depth) {
                open.share.add(share);
                if with_places && step.place.is_known() {
                    *open.places.entry(step.place).or_default() += share.weight_ns;
                }
            }
            depth += 1;
        }
        // A sample that ends here stands to the left of those that go on.
        while open.len() > depth {
            open.pop().into_iter().for_each(|last| close(open.len(), last));
        }
        total.add(share);
    }
    while let Some(last) = open.pop() {
        close(open.len(), last);
    }
    total
}

impl<'a> Tree<'a> {
    /// The tree of a profile, without a root: the outermost boxes stand for all of it together.
    pub(super) fn of(frames: &Frames<'a>, room: DrawnBoxes<'_>) -> Self {
        let first_left_out = first_left_out(frames, room);
        let mut boxes: Vec<Node<'a>> = Vec::new();
        let mut left_out = 0;
        let all = walk(frames, true, |depth, open| {
            let Open { frame, share, begin_ns, mut places } = open;
            if share.weight_ns < room.narrowest_ns {
                return;
            }
            // One around a box that is drawn is drawn: it is no narrower and lies further out.
            if first_left_out.is_some_and(|first| rank(share, depth) >= first) {
                left_out += 1;
                return;
            }
            let mut heaviest: Vec<_> = places.drain().collect();
            heaviest.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
            heaviest.truncate(MOST_PLACES);
            let places = heaviest.into_iter().map(|(place, _)| place).collect();
            boxes.push(Node { depth, what: What::Frame(frame), share, places, begin_ns });
        });
        boxes.sort_by_key(|node| (node.begin_ns, node.depth));
        Self { boxes: fold_shared(boxes, all.weight_ns), left_out }
    }
}

/// Puts one box in the place of the outer frames that all samples share, in a span or below what they share
/// otherwise: what the runtime calls before it comes to the span is the same for every span, and would fill a
/// screen.
fn fold_shared(boxes: Vec<Node<'_>>, all_ns: u64) -> Vec<Node<'_>> {
    let mut drawn = Vec::new();
    // Of the boxes around the next one, from the outside in.
    let mut around_ns = vec![all_ns];
    let mut rest = boxes.into_iter();
    while let Some(Node { depth, share, begin_ns, .. }) = rest.as_slice().first() {
        let (depth, share, begin_ns) = (*depth, *share, *begin_ns);
        around_ns.truncate(depth + 1);
        let is_shared = |(node, depth): &(&Node<'_>, usize)| {
            node.depth == *depth
                && around_ns.last() == Some(&node.share.weight_ns)
                && !matches!(node.what, What::Frame(Frame { kind: None, .. }))
        };
        let shared = rest.as_slice().iter().zip(depth..).take_while(is_shared).count();
        let Some(count) = shared.checked_sub(SHARED_SHOWN).filter(|count| *count > 1) else {
            around_ns.push(share.weight_ns);
            drawn.extend(rest.next());
            continue;
        };
        let names = rest.by_ref().take(count).filter_map(|node| match node.what {
            What::Frame(frame) => Some(frame),
            What::Folded(_) => None,
        });
        let what = What::Folded(names.collect());
        drawn.push(Node { depth, what, share, places: Vec::new(), begin_ns });
        let below = rest.as_slice().iter().take_while(|node| node.depth > depth).count();
        let moved = rest.by_ref().take(below);
        drawn.extend(moved.map(|node| Node { depth: node.depth + 1 - count, ..node }));
    }
    drawn
}

/// Which box has room first: the widest, and of those the outermost.
type Rank = (Reverse<u64>, usize);

fn rank(share: BoxShare, depth: usize) -> Rank {
    (Reverse(share.weight_ns), depth)
}

/// The first boxes that there is no room for.
fn first_left_out(frames: &Frames<'_>, room: DrawnBoxes<'_>) -> Option<Rank> {
    let mut by_rank: BTreeMap<Rank, usize> = BTreeMap::new();
    let mut bytes = 0;
    walk(frames, false, |depth, open| {
        if open.share.weight_ns < room.narrowest_ns {
            return;
        }
        let more = (room.bytes)(open.frame.name);
        *by_rank.entry(rank(open.share, depth)).or_default() += more;
        bytes += more;
        // What comes after the first is none of its concern.
        while let Some(last) = by_rank.last_entry()
            && bytes - last.get() > room.most_bytes
        {
            bytes -= last.remove();
        }
    });
    let (last, _) = by_rank.last_key_value().filter(|_| bytes > room.most_bytes)?;
    Some(*last)
}

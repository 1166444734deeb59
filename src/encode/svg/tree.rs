//! Samples merged by their common callers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use crate::encode::frames::{BoxShare, Frame, Frames, NameId, Place};

/// A box.
#[derive(Debug)]
pub(super) struct Node<'a> {
    /// The number of boxes around it.
    pub(super) depth: usize,
    pub(super) what: What,
    pub(super) share: BoxShare,
    /// The locations in the function, or in its callees, with the most time.
    pub(super) places: Vec<Place<'a>>,
    /// The time of all samples drawn to its left.
    pub(super) begin_ns: u64,
}

/// What a box represents.
#[derive(Debug)]
pub(super) enum What {
    Frame(Frame),
    /// Consecutive calls.
    Folded(Vec<Frame>),
}

/// The boxes that are drawn. Flat, and traversed without recursion, because stacks can be arbitrarily deep.
#[derive(Debug)]
pub(super) struct Tree<'a> {
    /// Each box comes after the one that contains it, and siblings are in order of their names, so that a picture is
    /// deterministic.
    pub(super) boxes: Vec<Node<'a>>,
    /// The number of boxes that are wide enough but do not fit.
    pub(super) left_out: usize,
}

/// The maximum number of locations shown for a function.
const MOST_PLACES: usize = 3;
/// The innermost frames that are shown of those that all samples of a span share.
const SHARED_SHOWN: usize = 12;

/// Which boxes are drawn.
#[derive(Clone, Copy)]
pub(super) struct DrawnBoxes<'a> {
    /// Narrower boxes are not drawn.
    pub(super) narrowest_ns: u64,
    /// The maximum size of all boxes.
    pub(super) most_bytes: usize,
    /// The size of a box, by its name.
    pub(super) bytes: &'a dyn Fn(NameId) -> usize,
}

/// A box whose samples are being traversed.
struct Open<'a> {
    frame: Frame,
    share: BoxShare,
    begin_ns: u64,
    places: HashMap<Place<'a>, u64>,
}

/// Traverses all boxes and calls `close` for each when it is complete, inner boxes first. The number is that of the
/// boxes around it.
fn walk<'a>(
    frames: &Frames<'a>,
    with_places: bool,
    mut close: impl FnMut(usize, Open<'a>),
) -> BoxShare {
    let mut open: Vec<Open<'a>> = Vec::new();
    let mut total = BoxShare::default();
    for path in frames.paths() {
        let share = path.share;
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
        // A sample that ends here is drawn to the left of those that continue.
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
    /// Builds the tree of a profile. It has no root; the outermost boxes together represent the profile.
    pub(super) fn of(frames: &Frames<'a>, room: DrawnBoxes<'_>) -> Self {
        let first_left_out = first_left_out(frames, room);
        let mut boxes: Vec<Node<'a>> = Vec::new();
        let mut left_out = 0;
        let all = walk(frames, true, |depth, open| {
            let Open { frame, share, begin_ns, mut places } = open;
            if share.weight_ns < room.narrowest_ns {
                return;
            }
            // Boxes around a drawn box are drawn, because they are no narrower and further out.
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

/// Replaces the outer frames that all samples share, in a span or outside spans, with one box. What the runtime calls
/// before it reaches a span is the same for every span and would fill a screen.
fn fold_shared(boxes: Vec<Node<'_>>, all_ns: u64) -> Vec<Node<'_>> {
    let mut drawn = Vec::new();
    // Times of the boxes around the next one, from the outermost.
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

/// Precedence of boxes: the widest first, then the outermost.
type Rank = (Reverse<u64>, usize);

fn rank(share: BoxShare, depth: usize) -> Rank {
    (Reverse(share.weight_ns), depth)
}

/// The rank of the first box that does not fit.
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
        // Boxes after the first one that does not fit are irrelevant.
        while let Some(last) = by_rank.last_entry()
            && bytes - last.get() > room.most_bytes
        {
            bytes -= last.remove();
        }
    });
    let (last, _) = by_rank.last_key_value().filter(|_| bytes > room.most_bytes)?;
    Some(*last)
}

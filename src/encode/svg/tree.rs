//! Samples merged by their common callers.

use std::collections::{BTreeMap, HashMap};

use crate::encode::frames::{BoxKind, FrameId, Frames, Place};
use crate::profile::{Sample, SampleKind};

/// A box.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) what: What,
    pub(super) share: BoxShare,
    /// In the order of their names, so that a picture does not depend on chance.
    pub(super) children: Vec<NodeId>,
    /// Where the function spent most time, itself or in what it called.
    pub(super) places: Vec<Place>,
    /// Time of all samples that are drawn to the left of it.
    pub(super) begin_ns: u64,
}

/// What a box stands for.
#[derive(Debug)]
pub(super) enum What {
    All,
    Frame(FrameId),
    /// Calls that follow each other.
    Folded(Vec<FrameId>),
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

/// The place of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeId(usize);

/// All boxes that are drawn, and nothing of those that are not. Flat, and walked without recursion: stacks are
/// as deep as the program likes.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Vec<Node>,
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
    /// and what each does, by the frame's number.
    pub(super) bytes: &'a dyn Fn(FrameId) -> usize,
}

/// A box while the samples in it are walked through.
struct Open {
    frame: FrameId,
    share: BoxShare,
    begin_ns: u64,
    places: HashMap<Place, u64>,
}

/// Walks through all boxes, and tells of each when all is known of it: of the inner ones first. The number is
/// that of the boxes around it.
fn walk(frames: &Frames<'_>, with_places: bool, mut close: impl FnMut(usize, Open)) -> BoxShare {
    let mut open: Vec<Open> = Vec::new();
    let mut total = BoxShare::default();
    for sample in frames.samples() {
        let share = BoxShare::of(sample);
        let mut depth = 0;
        for step in frames.steps(sample) {
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
                if with_places && step.place != Place::Unknown {
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

impl Tree {
    /// The tree of a profile; its root stands for all of it and is not shown.
    pub(super) fn of(frames: &Frames<'_>, room: DrawnBoxes<'_>) -> Self {
        let Drawn { narrowest_ns, most_levels } = Drawn::within(frames, room);
        let mut closed: Vec<(usize, Node)> = Vec::new();
        let mut left_out = 0;
        let root = walk(frames, true, |depth, open| {
            let Open { frame, share, begin_ns, mut places } = open;
            // One around a box that is drawn is drawn: it is no narrower and lies further out.
            let is_drawn = share.weight_ns > narrowest_ns
                || share.weight_ns == narrowest_ns && depth < most_levels;
            if !is_drawn {
                left_out += usize::from(share.weight_ns >= room.narrowest_ns);
                return;
            }
            let mut heaviest: Vec<_> = places.drain().collect();
            heaviest.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
            heaviest.truncate(MOST_PLACES);
            let places = heaviest.into_iter().map(|(place, _)| place).collect();
            let (what, children) = (What::Frame(frame), Vec::new());
            closed.push((depth, Node { what, share, children, places, begin_ns }));
        });
        closed.sort_by_key(|(depth, node)| (node.begin_ns, *depth));
        let root = Node {
            what: What::All,
            share: root,
            children: Vec::new(),
            places: Vec::new(),
            begin_ns: 0,
        };
        let mut tree = Self { nodes: vec![root], left_out };
        // The boxes that the next one can be in, from the outside in.
        let mut around = vec![NodeId(0)];
        for (depth, node) in closed {
            around.truncate(depth + 1);
            let id = NodeId(tree.nodes.len());
            if let Some(parent) = around.last().and_then(|parent| tree.nodes.get_mut(parent.0)) {
                parent.children.push(id);
            }
            tree.nodes.push(node);
            around.push(id);
        }
        tree.fold_shared(frames);
        tree
    }

    pub(super) fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.0)
    }

    pub(super) fn root(&self) -> NodeId {
        NodeId(0)
    }

    /// The boxes that are drawn, each with how many are around it, and after those around it.
    pub(super) fn drawn(&self) -> impl Iterator<Item = (usize, &Node)> {
        let children = |id| self.node(id).map_or(&[][..], |node| &node.children).iter().rev();
        let mut next: Vec<_> = children(self.root()).map(|id| (0, *id)).collect();
        std::iter::from_fn(move || {
            let (depth, id) = next.pop()?;
            next.extend(children(id).map(|id| (depth + 1, *id)));
            Some((depth, self.node(id)?))
        })
    }

    fn kind(&self, frames: &Frames<'_>, id: NodeId) -> BoxKind {
        match self.node(id).map(|node| &node.what) {
            Some(What::Frame(frame)) => frames.frame(*frame).map_or(BoxKind::Remark, |f| f.kind),
            _ => BoxKind::Remark,
        }
    }

    /// Below a span, folds the outer frames that all of its samples share into one box: what the
    /// runtime calls before it comes to the span is the same for every span, and would fill a
    /// screen.
    fn fold_shared(&mut self, frames: &Frames<'_>) {
        let mut next = vec![self.root()];
        while let Some(id) = next.pop() {
            let Some(node) = self.node(id) else { continue };
            let is_span = |id: NodeId| self.kind(frames, id) == BoxKind::Span;
            let is_around_spans = node.children.iter().any(|child| is_span(*child));
            if is_span(id) && !is_around_spans || node.children.len() == 1 {
                let shared = self.shared_below(frames, id);
                if let Some(count) = shared.len().checked_sub(SHARED_SHOWN).filter(|n| *n > 1) {
                    self.fold(id, shared.get(..count).unwrap_or_default());
                    continue;
                }
            }
            next.extend(&node.children);
        }
    }

    /// The frames that follow each other before the samples part.
    fn shared_below(&self, frames: &Frames<'_>, id: NodeId) -> Vec<NodeId> {
        let mut shared = Vec::new();
        let mut last = id;
        while let Some(node) = self.node(last)
            && let [only] = node.children[..]
            && self.kind(frames, only) != BoxKind::Span
            && self.node(only).is_some_and(|only| only.share.weight_ns == node.share.weight_ns)
        {
            shared.push(only);
            last = only;
        }
        shared
    }

    /// Puts one box in the place of the next frames.
    fn fold(&mut self, id: NodeId, shared: &[NodeId]) {
        let names = shared.iter().filter_map(|id| match self.node(*id)?.what {
            What::Frame(frame) => Some(frame),
            _ => None,
        });
        let what = What::Folded(names.collect());
        let last = shared.last().and_then(|last| self.nodes.get_mut(last.0));
        let children = last.map(|last| std::mem::take(&mut last.children)).unwrap_or_default();
        let new = NodeId(self.nodes.len());
        if let Some(node) = self.nodes.get_mut(id.0) {
            node.children = vec![new];
            let Node { share, begin_ns, .. } = *node;
            self.nodes.push(Node { what, share, children, places: Vec::new(), begin_ns });
        }
    }
}

/// Boxes for which there is room.
struct Drawn {
    /// All that are wider are drawn,
    narrowest_ns: u64,
    /// and of those of just that width as many levels.
    most_levels: usize,
}

impl Drawn {
    fn within(frames: &Frames<'_>, room: DrawnBoxes<'_>) -> Self {
        let mut by_weight: BTreeMap<u64, usize> = BTreeMap::new();
        walk(frames, false, |_, open| {
            if open.share.weight_ns >= room.narrowest_ns {
                let bytes = by_weight.entry(open.share.weight_ns).or_default();
                *bytes = bytes.saturating_add((room.bytes)(open.frame));
            }
        });
        let mut rest = room.most_bytes;
        let full = by_weight.into_iter().rev().find(|(_, bytes)| match rest.checked_sub(*bytes) {
            Some(left) => {
                rest = left;
                false
            }
            None => true,
        });
        let Some((narrowest_ns, _)) = full else {
            return Self { narrowest_ns: room.narrowest_ns, most_levels: usize::MAX };
        };
        let mut by_level: BTreeMap<usize, usize> = BTreeMap::new();
        walk(frames, false, |depth, open| {
            if open.share.weight_ns == narrowest_ns {
                *by_level.entry(depth).or_default() += (room.bytes)(open.frame);
            }
        });
        let full = by_level.into_iter().find(|(_, bytes)| match rest.checked_sub(*bytes) {
            Some(left) => {
                rest = left;
                false
            }
            None => true,
        });
        Self { narrowest_ns, most_levels: full.map_or(usize::MAX, |(level, _)| level) }
    }
}

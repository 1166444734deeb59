//! Samples merged by their common callers.

use std::collections::HashMap;

use crate::encode::frames::{Frame, Kind, frames};
use crate::profile::{Profile, Sample, SampleKind};

/// A box, and those below it.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) weight_ns: u64,
    pub(super) samples: usize,
    pub(super) waits: usize,
    /// In the order of their names, so that a picture does not depend on chance.
    pub(super) children: Vec<Node>,
    /// Time by place in the source.
    places: HashMap<String, u64>,
    /// The names of the frames that this box stands for, if it stands for several.
    pub(super) folded: Vec<String>,
}

/// What a sample adds to each of its boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Share {
    weight_ns: u64,
    samples: usize,
    waits: usize,
}

impl Share {
    fn of(sample: &Sample) -> Self {
        let weight_ns = sample.points.iter().map(|point| point.weight_ns).sum();
        let points = sample.points.len();
        match sample.kind {
            SampleKind::OnCpu => Self { weight_ns, samples: points, waits: 0 },
            SampleKind::OffCpu => Self { weight_ns, samples: 0, waits: points },
        }
    }
}

/// Places shown for one function.
const MOST_PLACES: usize = 3;
/// Of the frames that all samples of a span share, the innermost ones that are shown.
const SHARED_SHOWN: usize = 12;

impl Node {
    /// The tree of a profile; its root stands for all of it and is not shown.
    pub(super) fn of(profile: &Profile) -> Self {
        let mut stacks: Vec<(Vec<Frame>, Share)> = profile
            .samples()
            .iter()
            .map(|sample| (frames(profile, sample), Share::of(sample)))
            .collect();
        stacks.sort();
        let mut root = Self::new(String::new(), Kind::Remark);
        for (frames, share) in stacks {
            root.add(&frames, share);
        }
        root.sort();
        root.fold_shared();
        root
    }

    /// Below a span, folds the outer frames that all of its samples share into one box: what the
    /// runtime calls before it comes to the span is the same for every span, and would fill a
    /// screen.
    fn fold_shared(&mut self) {
        let is_around_spans = self.children.iter().any(|child| child.kind == Kind::Span);
        if self.kind == Kind::Span && !is_around_spans || self.children.len() == 1 {
            let shared = self.shared_below();
            if let Some(folded) = shared.checked_sub(SHARED_SHOWN).filter(|folded| *folded > 1) {
                self.fold(folded);
                return;
            }
        }
        self.children.iter_mut().for_each(Self::fold_shared);
    }

    /// How many frames follow each other before the samples part.
    fn shared_below(&self) -> usize {
        match self.children.as_slice() {
            [only] if only.kind != Kind::Span && only.weight_ns == self.weight_ns => {
                1 + only.shared_below()
            }
            _ => 0,
        }
    }

    /// Puts one box in the place of the next `count` frames.
    fn fold(&mut self, count: usize) {
        let mut names = Vec::with_capacity(count);
        let mut below = std::mem::take(&mut self.children);
        for _ in 0..count {
            let Some(node) = below.pop() else { break };
            names.push(node.name);
            below = node.children;
        }
        let mut folded = Self::new(format!("… {count} outer calls"), Kind::Remark);
        folded.weight_ns = self.weight_ns;
        folded.samples = self.samples;
        folded.waits = self.waits;
        folded.children = below;
        folded.folded = names;
        self.children.push(folded);
    }

    fn new(name: String, kind: Kind) -> Self {
        Self {
            name,
            kind,
            weight_ns: 0,
            samples: 0,
            waits: 0,
            children: Vec::new(),
            places: HashMap::new(),
            folded: Vec::new(),
        }
    }

    fn add(&mut self, frames: &[Frame], share: Share) {
        let mut node = self;
        node.take(share);
        for frame in frames {
            node = node.child(frame);
            node.take(share);
            if !frame.place.is_empty() {
                *node.places.entry(frame.place.clone()).or_default() += share.weight_ns;
            }
        }
    }

    fn take(&mut self, share: Share) {
        self.weight_ns += share.weight_ns;
        self.samples += share.samples;
        self.waits += share.waits;
    }

    fn child(&mut self, frame: &Frame) -> &mut Self {
        let is_it = |child: &Self| child.name == frame.name && child.kind == frame.kind;
        let at = self.children.iter().position(is_it).unwrap_or_else(|| {
            self.children.push(Self::new(frame.name.clone(), frame.kind));
            self.children.len() - 1
        });
        #[expect(clippy::indexing_slicing, reason = "found or pushed just above")]
        &mut self.children[at]
    }

    fn sort(&mut self) {
        self.children.sort_by(|a, b| a.name.cmp(&b.name));
        self.children.iter_mut().for_each(Self::sort);
    }

    /// Rows that the tree takes.
    pub(super) fn depth(&self) -> usize {
        self.children.iter().map(|child| 1 + child.depth()).max().unwrap_or(0)
    }

    /// The places in which the function spent most time, itself or in what it called.
    pub(super) fn heaviest_places(&self) -> Vec<&str> {
        let mut places: Vec<_> = self.places.iter().collect();
        places.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        places.into_iter().take(MOST_PLACES).map(|(place, _)| place.as_str()).collect()
    }
}

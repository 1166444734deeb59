//! What the samples of a profile link to in OTLP.

use std::collections::{HashMap, HashSet};

use super::pending::Pending;
use crate::ids::{SpanId, TraceId};
use crate::keep::Epoch;
use crate::span::{SpanKey, TraceIds};

type Ids = Option<(TraceId, SpanId)>;

/// The links of an epoch's samples.
///
/// Samples link to what was decided when the innermost kept span around them was kept, since an attribute of that span
/// names those ids. If no ids were known then, they link to the outermost span whose ids are known by now, up to the
/// one that they should link to.
pub(super) struct Links<'a> {
    pending: &'a Pending,
    /// What was decided for kept spans, if it was.
    decided: HashMap<SpanKey, Ids>,
    /// The spans that samples should link to; none if each sample links to its innermost span.
    targets: HashSet<SpanKey>,
    /// By the innermost span of a sample.
    linked: HashMap<SpanKey, Ids>,
}

impl<'a> Links<'a> {
    pub(super) fn new(pending: &'a Pending, epoch: &Epoch) -> Self {
        let kept = || epoch.kept.iter().filter(|span| span.link.to.is_some());
        let decided = kept().filter(|span| span.link.ids.is_some());
        Self {
            pending,
            decided: decided.map(|span| (span.key, pair(span.link.ids))).collect(),
            targets: kept().filter_map(|span| span.link.to).collect(),
            linked: HashMap::new(),
        }
    }

    /// The ids under which a span is exported.
    pub(super) fn ids_of(&self, span: SpanKey) -> Ids {
        pair(self.pending.get(span)?.ids)
    }

    /// What the samples whose innermost span is `span` link to.
    pub(super) fn of_samples_in(&mut self, span: SpanKey) -> Ids {
        if self.targets.is_empty() {
            return self.ids_of(span);
        }
        let mut undecided = Vec::new();
        let mut link = None;
        for span in std::iter::once(span).chain(self.pending.ancestors(span)) {
            let known = self.linked.get(&span).or_else(|| self.decided.get(&span));
            if let Some(known) = known {
                link = *known;
                break;
            }
            undecided.push(span);
            if self.targets.contains(&span) {
                break;
            }
        }
        for span in undecided.into_iter().rev() {
            link = link.or_else(|| self.ids_of(span));
            self.linked.insert(span, link);
        }
        link
    }
}

fn pair(ids: Option<TraceIds>) -> Ids {
    ids.map(|ids| (ids.trace, ids.span))
}

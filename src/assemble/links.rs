//! What the samples of a profile link to in OTLP.

use std::collections::HashMap;

use crate::ids::{SpanId, TraceId};
use crate::keep::{ProfileGroup, SpanLink};
use crate::sinks::Store;
use crate::span::{SpanKey, TraceIds};

/// Of deeper trees, only the innermost spans count.
const MOST_AROUND: usize = 256;

type Ids = Option<(TraceId, SpanId)>;

/// The links of a group's samples.
///
/// Samples link to what was decided when the innermost kept span around them was kept, since an attribute of that span
/// names those ids. If no ids were known then, they link to the outermost span whose ids are known by now, up to the
/// one that they should link to.
pub(crate) struct Links<'a> {
    pending: &'a Store,
    /// By the kept span, without those that were kept while they were open.
    kept: HashMap<SpanKey, &'a SpanLink>,
    /// What was decided for the innermost kept span around a span, if ids were known then.
    decided: HashMap<SpanKey, Ids>,
}

impl<'a> Links<'a> {
    pub(crate) fn new(pending: &'a Store, group: &'a ProfileGroup) -> Self {
        let kept = group.kept.iter().filter(|span| span.link.to.is_some());
        let kept = kept.map(|span| (span.key, &span.link)).collect();
        Self { pending, kept, decided: HashMap::new() }
    }

    pub(crate) fn ids_of(&self, span: SpanKey) -> Ids {
        pair(self.pending.get(span)?.ids)
    }

    /// What the samples whose innermost span is `span` link to.
    pub(crate) fn of_samples_in(&mut self, span: SpanKey) -> Ids {
        match self.kept.is_empty() {
            true => self.ids_of(span),
            false => self.decided_around(span).or_else(|| self.outermost_known(span)),
        }
    }

    fn around(&self, span: SpanKey) -> impl Iterator<Item = SpanKey> + use<'a> {
        std::iter::once(span).chain(self.pending.ancestors(span))
    }

    fn decided_around(&mut self, span: SpanKey) -> Ids {
        let (mut passed, mut found) = (Vec::new(), None);
        for span in self.around(span) {
            let known = self.decided.get(&span).copied();
            let decided = || pair(self.kept.get(&span)?.ids);
            passed.push(span);
            if let Some(known) = known.or_else(|| decided().map(Some)) {
                found = known;
                break;
            }
        }
        self.decided.extend(passed.into_iter().map(|span| (span, found)));
        found
    }

    fn outermost_known(&self, span: SpanKey) -> Ids {
        let (mut last, mut known) = (None, None);
        for span in self.around(span).take(MOST_AROUND) {
            last = last.or_else(|| self.kept.get(&span)?.to);
            known = self.ids_of(span).or(known);
            if last == Some(span) {
                break;
            }
        }
        known
    }
}

fn pair(ids: Option<TraceIds>) -> Ids {
    ids.map(|ids| (ids.trace, ids.span))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::KeptSpan;
    use crate::span::{RegistryId, SpanInfo};

    fn key(number: u64) -> SpanKey {
        SpanKey::new(number).unwrap()
    }

    fn ids(number: u8) -> TraceIds {
        let trace = TraceId::from_bytes([9; 16]);
        TraceIds { trace, span: SpanId::from_bytes([number; 8]), is_sampled: true }
    }

    /// 1 { 2 { 3 { 4 } } }, in which the ids of the given spans are known.
    fn nested(known: &[u8]) -> Store {
        let mut pending = Store::new(1 << 20, 100, 100);
        for number in 1..=4 {
            let parent = SpanKey::new(number - 1);
            let info =
                SpanInfo { parent, root: key(1), id: RegistryId::MIN, plan: 0, opened_ns: 0 };
            pending.register(key(number), info, 0);
        }
        for number in known {
            pending.note(key(u64::from(*number)), |span| span.ids = Some(ids(*number)));
        }
        pending
    }

    /// A kept span, and what was decided that its samples link to.
    fn kept(span: u64, to: Option<u64>, known: Option<u8>) -> KeptSpan {
        let (to, ids) = (to.map(key), known.map(ids));
        let link = SpanLink { to, ids, ..SpanLink::default() };
        KeptSpan { link, ..KeptSpan::for_test(key(span), key(1), 1) }
    }

    /// The numbers of the spans that the samples of span 1, 2 and so on link to; 0 for none.
    fn links(pending: &Store, kept: Vec<KeptSpan>) -> [u8; 4] {
        let group = ProfileGroup::for_test(key(1), kept);
        let of = |links: &mut Links<'_>, number| {
            let link = links.of_samples_in(key(number));
            link.map_or(0, |(_, span)| span.to_bytes()[0])
        };
        let mut inwards = Links::new(pending, &group);
        let inwards = [1, 2, 3, 4].map(|number| of(&mut inwards, number));
        let mut outwards = Links::new(pending, &group);
        let mut outwards = [4, 3, 2, 1].map(|number| of(&mut outwards, number));
        outwards.reverse();
        assert_eq!(inwards, outwards);
        inwards
    }

    #[test]
    fn samples_link_to_what_was_decided_for_the_innermost_kept_span() {
        let pending = nested(&[1, 2, 3, 4]);
        assert_eq!(links(&pending, vec![kept(3, Some(1), Some(1))]), [1, 1, 1, 1]);
        // A stream in a connection that is kept, too.
        let kept = vec![kept(3, Some(2), Some(2)), kept(1, Some(1), Some(1))];
        assert_eq!(links(&pending, kept), [1, 1, 2, 2]);
    }

    #[test]
    fn samples_link_to_the_outermost_span_whose_ids_are_known() {
        let is_hidden = |known: &[u8]| links(&nested(known), vec![kept(4, Some(2), None)]);
        // Not beyond the second, which they should link to.
        assert_eq!(is_hidden(&[1, 2, 3])[3], 2);
        assert_eq!(is_hidden(&[1, 3, 4])[3], 3);
        assert_eq!(is_hidden(&[1, 4])[3], 4);
        assert_eq!(is_hidden(&[1])[3], 0);
        // The span around it is kept, and its ids are known.
        let around = vec![kept(4, Some(3), None), kept(3, Some(3), Some(3))];
        assert_eq!(links(&nested(&[]), around)[3], 3);
    }

    #[test]
    fn samples_link_to_their_innermost_span_if_nothing_else_was_decided() {
        assert_eq!(links(&nested(&[1, 3, 4]), vec![kept(1, None, Some(1))]), [1, 0, 3, 4]);
    }
}

//! What was kept recently, for `Handle::router`.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::keep::Kept;
use crate::profile::ComparedSummary;
use crate::report::kept_event::{Without, headline};

/// How many kept spans are remembered.
const MOST: usize = 1_000;

/// A kept span, and what the log says of it.
#[derive(Clone, Debug)]
pub(crate) struct RecentlyKept {
    /// With one span: the first one.
    pub(crate) kept: Kept,
    /// What explains most of its time.
    pub(crate) headline: String,
    /// Why there is no profile, if there is none.
    pub(crate) no_profile: Option<String>,
}

/// The kept spans that were reported last, the newest last.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<VecDeque<RecentlyKept>>);

impl Recent {
    pub(super) fn add(&self, kept: &Kept) {
        let Some(first) = kept.spans.first() else { return };
        let why = first.profile().err().filter(|_| kept.profile.is_none());
        let new = RecentlyKept {
            headline: headline(first, kept),
            no_profile: why.map(|why| Without(why, first).to_string()),
            kept: Kept {
                spans: vec![first.clone()],
                profile: kept.profile,
                samples: kept.samples,
                hotspots: kept.hotspots.clone(),
                coverage: kept.coverage,
                waits: kept.waits.clone(),
                awaits: kept.awaits.clone(),
                compared: kept.compared.as_ref().map(ComparedSummary::without_rows),
                files: kept.files.clone(),
            },
        };
        let mut recent = self.0.lock();
        if recent.len() == MOST {
            recent.pop_front();
        }
        recent.push_back(new);
    }

    /// The newest first.
    pub(crate) fn list(&self) -> Vec<RecentlyKept> {
        self.0.lock().iter().rev().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::KeptSpan;
    use crate::profile::Compared;
    use crate::report;
    use crate::span::SpanKey;

    #[test]
    fn what_is_remembered_of_a_comparison_has_no_rows() {
        let mut kept = report::unexported(&[KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 1)]);
        kept.compared = Some(Compared::for_test(200).summary());
        assert!(kept.comparison().is_some());
        let recent = Recent::default();
        recent.add(&kept);
        let known = recent.list().remove(0).kept;
        assert_eq!(known.comparison(), None);
        assert_eq!(known.compared.and_then(|compared| compared.times()), Some(12.0));
    }
}

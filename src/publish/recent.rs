//! What was kept recently.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::keep::Kept;
use crate::profile::ComparedSummary;
use crate::references::cohort_of;
use crate::report::kept_event::{headline, without_profile};

const MOST: usize = 1_000;

/// A kept span, and what the log says of it; see [`Handle::recently_kept`](crate::Handle::recently_kept).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RecentlyKept {
    /// The id of the profile, or without one a name that no other kept span has, in this process or in an earlier one.
    pub id: String,
    /// With one span, the first one, and without the rows of its comparison.
    pub kept: Kept,
    /// The [`Route::name`](crate::Route::name) of that span.
    pub route: String,
    /// What explains most of its time.
    pub headline: String,
    /// Why there is no profile, if there is none.
    pub no_profile: Option<String>,
}

/// The kept spans that were reported last, the newest last.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    last: Mutex<VecDeque<RecentlyKept>>,
    /// Whether the list was asked for.
    is_wanted: AtomicBool,
    added: AtomicU64,
}

impl Recent {
    pub(super) fn add(&self, kept: &Kept) {
        let is_wanted = self.is_wanted.load(Ordering::Relaxed);
        let Some(first) = kept.spans.first().filter(|_| is_wanted) else { return };
        let why = first.profile().err().filter(|_| kept.profile.is_none());
        let number = self.added.fetch_add(1, Ordering::Relaxed);
        let id = kept.profile.map_or_else(
            || format!("span-{:x}-{number}", first.facts.start_unix_ns),
            |id| id.to_string(),
        );
        let new = RecentlyKept {
            id,
            route: cohort_of(&first.facts),
            headline: headline(first, kept),
            no_profile: why.map(|why| without_profile(why, first)),
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
        let mut recent = self.last.lock();
        if recent.len() == MOST {
            recent.pop_front();
        }
        recent.push_back(new);
    }

    pub(crate) fn list(&self) -> Vec<RecentlyKept> {
        self.is_wanted.store(true, Ordering::Relaxed);
        self.last.lock().iter().rev().cloned().collect()
    }

    pub(crate) fn find(&self, id: &str) -> Option<RecentlyKept> {
        self.last.lock().iter().rev().find(|known| known.id == id).cloned()
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
    fn a_span_that_is_kept_again_without_a_profile_has_another_id() {
        let kept = report::unexported(&[KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 1)]);
        let recent = Recent::default();
        recent.add(&kept);
        assert!(recent.list().is_empty(), "it was not asked for");
        (0..2).for_each(|_| recent.add(&kept));
        let list = recent.list();
        assert!(list[0].id != list[1].id && list.iter().all(|known| known.id.starts_with("span-")));
    }

    #[test]
    fn what_is_remembered_of_a_comparison_has_no_rows() {
        let mut kept = report::unexported(&[KeptSpan::for_test(SpanKey::MIN, SpanKey::MIN, 1)]);
        kept.compared = Some(Compared::for_test(200).summary());
        assert!(kept.comparison().is_some());
        let recent = Recent::default();
        _ = recent.list();
        recent.add(&kept);
        let known = recent.list().remove(0).kept;
        assert_eq!(known.comparison(), None);
        assert_eq!(known.compared.and_then(|compared| compared.times()), Some(12.0));
    }
}

//! What is counted of the spans inside a kept span.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::facts::{ChildTotals, Children};
use crate::sinks::{ChildTimes, Store};
use crate::span::SpanKey;

/// The names that are listed. The times of all others are added up.
const MOST_NAMES: usize = 16;

/// What is counted in a span that opened then. `name_of` returns the redacted name of the spans of a plan.
pub(crate) fn children_of(
    store: &Store,
    (span, opened_ns): (SpanKey, u64),
    name_of: impl Fn(u64) -> Option<String>,
) -> Children {
    let are_incomplete = store.child_lost_ns > opened_ns;
    let Some(ledger) = store.get(span).and_then(|pending| pending.children.as_ref()) else {
        return Children { are_incomplete, ..Children::default() };
    };
    // Several callsites, and several rules of one, can have the same name.
    let (mut by_name, mut others) = (BTreeMap::new(), ledger.others.clone());
    for (plan, times) in &ledger.by_plan {
        match name_of(*plan) {
            Some(name) => by_name.entry(name).or_insert_with(ChildTimes::default).merge(times),
            None => others.merge(times),
        }
    }
    let mut names: Vec<_> = by_name.into_iter().collect();
    names.sort_by_key(|(_, times)| Reverse(times.total_ns));
    let rest = names.split_off(names.len().min(MOST_NAMES));
    rest.iter().for_each(|(_, times)| others.merge(times));
    let mut totals: Vec<_> =
        names.into_iter().map(|(name, times)| totals(Some(name), &times)).collect();
    totals.extend((others.count > 0).then(|| self::totals(None, &others)));
    Children {
        totals,
        are_incomplete: ledger.has_lost || are_incomplete,
        from_ns: ledger.from_ns.saturating_sub(opened_ns),
    }
}

fn totals(name: Option<String>, times: &ChildTimes) -> ChildTotals {
    ChildTotals {
        name,
        count: times.count,
        total_ns: times.total_ns,
        longest_ns: times.longest_ns,
        open_ns: times.open_ns(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sinks::ClosedChild;

    const SPAN: SpanKey = SpanKey::new(5).unwrap();

    /// The name of every second plan is that of the one before. That of plan 99 is not known any more.
    fn name(plan: u64) -> Option<String> {
        (plan != 99).then(|| format!("name{}", plan / 2))
    }

    fn store(children: impl IntoIterator<Item = (u64, u64, u64)>) -> Store {
        let mut store = Store::new(1 << 20, 100, 100);
        for (plan, opened_ns, closed_ns) in children {
            let child = ClosedChild { plan, opened_ns, closed_ns, from_ns: opened_ns };
            assert!(store.add_child(SPAN, child, 1));
        }
        store
    }

    #[test]
    fn plans_of_one_name_are_one() {
        let store = store([(2, 10, 15), (3, 12, 20), (2, 30, 31), (99, 8, 9)]);
        let children = children_of(&store, (SPAN, 3), name);
        let [named, other] = children.totals.as_slice() else { panic!("{children:?}") };
        let expected = ChildTotals {
            name: Some("name1".to_owned()),
            count: 3,
            total_ns: 14,
            longest_ns: 8,
            open_ns: 11,
        };
        assert_eq!(*named, expected);
        assert_eq!((&other.name, other.count, other.total_ns), (&None, 1, 1));
        assert_eq!(children.from_ns, 5);
        assert!(!children.are_incomplete);
    }

    #[test]
    fn sixteen_names_are_listed_and_the_rest_is_added_up() {
        let store = store((0..100).map(|n| (2 * n, 1_000 * n, 1_000 * n + n + 1)));
        let children = children_of(&store, (SPAN, 0), name);
        let names: Vec<_> = children.totals.iter().filter_map(|it| it.name.clone()).collect();
        // Of those that the ledger counts by themselves.
        let expected: Vec<_> = (48..64).rev().map(|n| format!("name{n}")).collect();
        assert_eq!(names, expected);
        let [.., rest] = children.totals.as_slice() else { panic!("{children:?}") };
        assert_eq!((&rest.name, rest.count), (&None, 84));
        let all: u64 = children.totals.iter().map(|it| it.total_ns).sum();
        assert_eq!(all, (1..=100).sum::<u64>());
        assert_eq!(rest.open_ns, rest.total_ns);
    }

    #[test]
    fn it_is_said_if_some_may_be_missing() {
        let mut store = store([(2, 10, 15)]);
        let is_incomplete =
            |store: &Store, opened_ns| children_of(store, (SPAN, opened_ns), name).are_incomplete;
        store.child_lost_ns = 20;
        assert!(is_incomplete(&store, 19));
        assert!(!is_incomplete(&store, 20), "lost before it opened");
        let mut small = Store::new(1, 100, 100);
        let child = ClosedChild { plan: 2, opened_ns: 1, closed_ns: 2, from_ns: 0 };
        assert!(!small.add_child(SPAN, child, 1), "no memory");
        assert_eq!(children_of(&small, (SPAN, 0), name), Children::default());
    }
}

//! The last reference spans of a cohort.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::breakdown::{Breakdown, Quantity};
use super::totals::MAX_QUANTITIES;

/// How many reference spans of a cohort are kept.
pub(crate) const MAX_REFERENCES: usize = 200;

/// The breakdowns of the last reference spans of a cohort, each at most 1,100 bytes, with each quantity stored once.
#[derive(Clone, Debug, Default)]
pub struct ReferenceSet {
    spans: VecDeque<ReferenceSpan>,
    /// The quantities of all spans, and of some that have gone.
    quantities: BTreeSet<Arc<Quantity>>,
}

#[derive(Clone, Debug)]
struct ReferenceSpan {
    wall_ns: u64,
    values: Box<[(Arc<Quantity>, u64)]>,
}

impl ReferenceSet {
    /// Adds a span. The oldest one of more than 200 goes.
    pub fn push(&mut self, breakdown: &Breakdown) {
        if self.spans.len() >= MAX_REFERENCES {
            self.spans.pop_front();
        }
        let amounts = breakdown.amounts().iter();
        let values = amounts.map(|amount| (self.known(&amount.quantity), amount.value)).collect();
        self.spans.push_back(ReferenceSpan { wall_ns: breakdown.wall_ns(), values });
        if self.quantities.len() > MAX_QUANTITIES {
            self.shrink();
        }
    }

    fn known(&mut self, quantity: &Quantity) -> Arc<Quantity> {
        let known = self.quantities.get(quantity).cloned();
        known.unwrap_or_else(|| {
            let new = Arc::new(quantity.clone());
            self.quantities.insert(Arc::clone(&new));
            new
        })
    }

    /// Forgets quantities that no span has any more. If too many are in use, those of the class that has most of them are
    /// added to that of others: the half of which there is least.
    fn shrink(&mut self) {
        let mut sums: BTreeMap<Arc<Quantity>, u128> = BTreeMap::new();
        for (quantity, value) in self.spans.iter().flat_map(|span| &span.values) {
            *sums.entry(Arc::clone(quantity)).or_default() += u128::from(*value);
        }
        self.quantities = sums.keys().cloned().collect();
        if self.quantities.len() <= MAX_QUANTITIES {
            return;
        }
        let mut by_class: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (quantity, sum) in
            sums.into_iter().filter(|(quantity, _)| quantity.rest() != **quantity)
        {
            by_class.entry(quantity.class()).or_default().push((Reverse(sum), quantity));
        }
        let mut largest = by_class.into_values().max_by_key(Vec::len).unwrap_or_default();
        largest.sort_unstable();
        for (_, small) in largest.split_off(largest.len() / 2) {
            self.quantities.remove(&small);
            self.known(&small.rest());
        }
        for span in &mut self.spans {
            let mut values: BTreeMap<Arc<Quantity>, u64> = BTreeMap::new();
            for (quantity, value) in &span.values {
                let known = self.quantities.get(quantity);
                let known = known.or_else(|| self.quantities.get(&quantity.rest()));
                let sum = values.entry(Arc::clone(known.unwrap_or(quantity))).or_default();
                *sum = sum.saturating_add(*value);
            }
            span.values = values.into_iter().collect();
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.spans.len()
    }

    pub(super) fn walls_ns(&self) -> impl Iterator<Item = u64> + '_ {
        self.spans.iter().map(|span| span.wall_ns)
    }

    /// The mean wall time; 0 without spans.
    pub fn mean_wall_ns(&self) -> u64 {
        let sum: u128 = self.walls_ns().map(u128::from).sum();
        u64::try_from(sum / (self.len() as u128).max(1)).unwrap_or(u64::MAX)
    }

    /// Each quantity, with the values of the spans that have any of it.
    pub(super) fn values(&self) -> HashMap<&Quantity, Vec<u64>> {
        let mut values: HashMap<&Quantity, Vec<u64>> = HashMap::new();
        for (quantity, value) in self.spans.iter().flat_map(|span| &span.values) {
            values.entry(quantity).or_default().push(*value);
        }
        values
    }

    /// The memory that it takes, without the texts of the quantities, in bytes.
    #[cfg(any(test, feature = "_test"))]
    pub fn bytes(&self) -> usize {
        let of_span = |span: &ReferenceSpan| size_of_val(span) + size_of_val(&*span.values);
        let of_quantity = size_of::<Arc<Quantity>>() + size_of::<Quantity>();
        self.spans.iter().map(of_span).sum::<usize>() + self.quantities.len() * of_quantity
    }
}

impl<'a> FromIterator<&'a Breakdown> for ReferenceSet {
    fn from_iter<I: IntoIterator<Item = &'a Breakdown>>(breakdowns: I) -> Self {
        let mut set = Self::default();
        breakdowns.into_iter().for_each(|breakdown| set.push(breakdown));
        set
    }
}

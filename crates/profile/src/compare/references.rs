//! The last reference spans of a cohort.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::breakdown::{Amount, Breakdown, Quantity};
use super::totals::MOST_QUANTITIES;

/// How many reference spans of a cohort are kept.
pub(crate) const MOST_REFERENCES: usize = 200;

/// The breakdowns of the last reference spans of a cohort. Each takes at most some 700 bytes, and each quantity is stored
/// once.
#[derive(Clone, Debug, Default)]
pub struct ReferenceSet {
    spans: VecDeque<ReferenceSpan>,
    quantities: Vec<KnownQuantity>,
    by_quantity: HashMap<Quantity, u16>,
    /// Those that no span has any more.
    unused: Vec<u16>,
}

#[derive(Clone, Debug)]
struct KnownQuantity {
    quantity: Quantity,
    /// Of all spans that have it.
    sum: u128,
    spans: usize,
}

/// Two arrays, since pairs would have to be aligned.
#[derive(Clone, Debug)]
struct ReferenceSpan {
    wall_ns: u64,
    ids: Box<[u16]>,
    values: Box<[u64]>,
}

impl ReferenceSpan {
    fn new(wall_ns: u64, values: BTreeMap<u16, u64>) -> Self {
        let (ids, values): (Vec<_>, Vec<_>) = values.into_iter().unzip();
        Self { wall_ns, ids: ids.into(), values: values.into() }
    }

    fn values(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        self.ids.iter().copied().zip(self.values.iter().copied())
    }
}

impl ReferenceSet {
    /// Adds a span. The oldest one of more than 200 goes.
    pub(crate) fn push(&mut self, breakdown: &Breakdown) {
        if self.spans.len() >= MOST_REFERENCES {
            self.remove_oldest();
        }
        let mut values: BTreeMap<u16, u64> = BTreeMap::new();
        for Amount { quantity, value, .. } in breakdown.amounts() {
            // Before others of this span are added: room is made in those that are complete.
            let Some(id) = self.id_of(quantity, *value, &mut values) else { continue };
            let sum = values.entry(id).or_default();
            *sum = sum.saturating_add(*value);
        }
        for (id, value) in &values {
            if let Some(known) = self.quantities.get_mut(usize::from(*id)) {
                known.sum += u128::from(*value);
                known.spans += 1;
            }
        }
        self.spans.push_back(ReferenceSpan::new(breakdown.wall_ns(), values));
    }

    fn remove_oldest(&mut self) {
        let Some(span) = self.spans.pop_front() else { return };
        for (id, value) in span.values() {
            let Some(known) = self.quantities.get_mut(usize::from(id)) else { continue };
            known.sum = known.sum.saturating_sub(value.into());
            known.spans = known.spans.saturating_sub(1);
            if known.spans == 0 {
                self.by_quantity.remove(&known.quantity);
                self.unused.push(id);
            }
        }
    }

    /// The number of a quantity, or of that of others.
    fn id_of(
        &mut self,
        quantity: &Quantity,
        value: u64,
        adding: &mut BTreeMap<u16, u64>,
    ) -> Option<u16> {
        if let Some(id) = self.by_quantity.get(quantity) {
            return Some(*id);
        }
        let rest = quantity.rest();
        let is_rest = rest == *quantity;
        if !is_rest
            && self.by_quantity.len() >= MOST_QUANTITIES
            && !self.make_room(quantity, value, adding)
        {
            return self.id_of(&rest, value, adding);
        }
        let known = KnownQuantity { quantity: quantity.clone(), sum: 0, spans: 0 };
        let id = match self.unused.pop() {
            Some(id) => {
                *self.quantities.get_mut(usize::from(id))? = known;
                id
            }
            None => {
                let id = u16::try_from(self.quantities.len()).ok()?;
                self.quantities.push(known);
                id
            }
        };
        self.by_quantity.insert(quantity.clone(), id);
        Some(id)
    }

    /// Adds the smallest quantity of the class to that of others, if all spans together have less of it than `value`.
    fn make_room(&mut self, than: &Quantity, value: u64, adding: &mut BTreeMap<u16, u64>) -> bool {
        let of_class = self.by_quantity.iter().filter(|(quantity, id)| {
            quantity.is_of_class(than) && quantity.rest() != **quantity && !adding.contains_key(id)
        });
        let sum = |id: u16| self.quantities.get(usize::from(id)).map_or(0, |known| known.sum);
        let smallest = of_class.map(|(quantity, id)| (sum(*id), quantity, *id)).min();
        let Some((sum, quantity, id)) = smallest else { return false };
        if sum >= value.into() {
            return false;
        }
        let (quantity, rest) = (quantity.clone(), quantity.rest());
        let Some(to) = self.id_of(&rest, 0, adding) else { return false };
        let mut moved_spans = 0;
        for span in &mut self.spans {
            let mut values: BTreeMap<_, _> = span.values().collect();
            let Some(moved) = values.remove(&id) else { continue };
            moved_spans += usize::from(!values.contains_key(&to));
            let sum = values.entry(to).or_default();
            *sum = sum.saturating_add(moved);
            *span = ReferenceSpan::new(span.wall_ns, values);
        }
        if let Some(known) = self.quantities.get_mut(usize::from(to)) {
            known.sum += sum;
            known.spans += moved_spans;
        }
        self.by_quantity.remove(&quantity);
        self.unused.push(id);
        true
    }

    /// How many spans there are.
    pub(crate) fn len(&self) -> usize {
        self.spans.len()
    }

    pub(super) fn walls_ns(&self) -> impl Iterator<Item = u64> + '_ {
        self.spans.iter().map(|span| span.wall_ns)
    }

    /// Each quantity, with the values of the spans that have any of it.
    pub(super) fn values(&self) -> HashMap<&Quantity, Vec<u64>> {
        let mut values = vec![Vec::new(); self.quantities.len()];
        for (id, value) in self.spans.iter().flat_map(ReferenceSpan::values) {
            if let Some(of) = values.get_mut(usize::from(id)) {
                of.push(value);
            }
        }
        let known = self.quantities.iter().zip(values);
        known.filter(|(_, of)| !of.is_empty()).map(|(known, of)| (&known.quantity, of)).collect()
    }

    /// The memory that it takes, without the texts of the quantities, in bytes.
    #[cfg(any(test, feature = "_test"))]
    pub fn bytes(&self) -> usize {
        let of_span = size_of::<ReferenceSpan>();
        let each = size_of::<u16>() + size_of::<u64>();
        let spans: usize = self.spans.iter().map(|span| of_span + span.ids.len() * each).sum();
        let of_quantity = size_of::<KnownQuantity>() + size_of::<(Quantity, u16)>();
        spans + self.quantities.len() * of_quantity
    }
}

impl<'a> FromIterator<&'a Breakdown> for ReferenceSet {
    fn from_iter<I: IntoIterator<Item = &'a Breakdown>>(breakdowns: I) -> Self {
        let mut set = Self::default();
        breakdowns.into_iter().for_each(|breakdown| set.push(breakdown));
        set
    }
}

//! The sums of many spans: of an hour, of a version of the service, or over a longer time.

use std::collections::BTreeMap;

use super::breakdown::{Amount, Breakdown, Quantity};
use super::estimate::Moments;

/// Quantities beside those of others. More are added to those.
pub(super) const MOST_QUANTITIES: usize = 256;

/// The sums of the breakdowns of many spans. They can be stored and merged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpanTotals {
    spans: u64,
    /// Its sum is that of all quantities of wall time.
    wall: Moments,
    quantities: BTreeMap<Quantity, Moments>,
}

impl SpanTotals {
    /// Sums that were stored. The sum of all wall times is that of its quantities.
    pub fn of_stored(
        spans: u64,
        wall: Moments,
        quantities: impl IntoIterator<Item = (Quantity, Moments)>,
    ) -> Self {
        let quantities: BTreeMap<_, _> = quantities.into_iter().collect();
        Self { spans, wall: Moments { sum: sum_of_wall(&quantities), ..wall }, quantities }
    }

    pub(crate) fn add(&mut self, breakdown: &Breakdown) {
        self.spans = self.spans.saturating_add(1);
        self.wall.add(breakdown.wall_ns());
        // Several amounts of one span can be of others: their sum is one value.
        let mut values: BTreeMap<Quantity, u64> = BTreeMap::new();
        for Amount { quantity, value, .. } in breakdown.amounts() {
            let sum = values.entry(self.known(quantity)).or_default();
            *sum = sum.saturating_add(*value);
        }
        for (quantity, value) in values {
            self.quantities.entry(quantity).or_default().add(value);
        }
    }

    /// Adds those of other spans, such as of the hour before, or of another process.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.spans = self.spans.saturating_add(other.spans);
        self.wall.merge(&other.wall);
        for (quantity, moments) in &other.quantities {
            let known = self.known(quantity);
            self.quantities.entry(known).or_default().merge(moments);
        }
    }

    /// The quantity under which an amount is added.
    fn known(&self, quantity: &Quantity) -> Quantity {
        let has_room = || self.quantities.len() < MOST_QUANTITIES;
        if self.quantities.contains_key(quantity) || has_room() {
            quantity.clone()
        } else {
            quantity.rest()
        }
    }

    /// Halves the weight of all spans. Means stay as they are, to within a unit. What few spans had, and none lately, is
    /// added to that of others, which makes room.
    pub(crate) fn halve(&mut self) {
        let (from, to) = (self.spans, self.spans / 2);
        self.spans = to;
        for (quantity, moments) in std::mem::take(&mut self.quantities) {
            let moments = moments.scaled(to, from);
            let quantity = if moments.present > 0 { quantity } else { quantity.rest() };
            if moments.sum > 0 {
                self.quantities.entry(quantity).or_default().merge(&moments);
            }
        }
        // Rounded in parts, and the sum of these.
        self.wall = Moments { sum: sum_of_wall(&self.quantities), ..self.wall.scaled(to, from) };
    }

    /// How many spans they are of.
    pub fn spans(&self) -> u64 {
        self.spans
    }

    pub fn wall(&self) -> &Moments {
        &self.wall
    }

    pub fn quantities(&self) -> impl Iterator<Item = (&Quantity, &Moments)> {
        self.quantities.iter()
    }

    pub(super) fn moments(&self, quantity: &Quantity) -> Moments {
        self.quantities.get(quantity).copied().unwrap_or_default()
    }
}

fn sum_of_wall(quantities: &BTreeMap<Quantity, Moments>) -> u128 {
    quantities.iter().filter(|(quantity, _)| quantity.is_wall()).map(|(_, of)| of.sum).sum()
}

//! The sums of many spans: of an hour, of a version of the service, or over a longer time.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::breakdown::{Amount, Breakdown, LARGEST, Quantity};
use super::estimate::Moments;

/// Quantities beside those of others. More are added to those.
pub(super) const MAX_QUANTITIES: usize = 256;

/// The sums of the breakdowns of many spans. They can be stored and merged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpanTotals {
    spans: u64,
    /// The wall times of the spans, whose sum is that of all quantities of wall time.
    wall: Moments,
    #[serde(serialize_with = "to_pairs", deserialize_with = "of_pairs")]
    quantities: BTreeMap<Quantity, Moments>,
}

/// Names in JSON are texts.
fn to_pairs<S: Serializer>(of: &BTreeMap<Quantity, Moments>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(of)
}

fn of_pairs<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<Quantity, Moments>, D::Error> {
    let pairs = Vec::<(Quantity, Moments)>::deserialize(from)?;
    Ok(pairs.into_iter().collect())
}

impl SpanTotals {
    /// Whether spans can have these sums, which were stored.
    pub fn are_possible(&self) -> bool {
        let of_wall = self.quantities.iter().filter(|(quantity, _)| quantity.is_wall());
        let sum_of_wall = of_wall.fold(0, |sum: u128, (_, of)| sum.saturating_add(of.sum));
        let most = u128::from(self.spans) * u128::from(LARGEST);
        let is_possible =
            |of: &Moments| of.sum <= most && of.present <= self.spans && of.squares >= 0.0;
        self.quantities.len() <= 4 * MAX_QUANTITIES
            && self.quantities.values().chain([&self.wall]).all(is_possible)
            && self.wall.sum == sum_of_wall
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
        let has_room = || self.quantities.len() < MAX_QUANTITIES;
        if self.quantities.contains_key(quantity) || has_room() {
            quantity.clone()
        } else {
            quantity.rest()
        }
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

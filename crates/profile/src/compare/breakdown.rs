//! Where the time of one span went.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::facts::TimeKind;
use crate::facts::format::place_of;

/// A function of the program's own code.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OwnFunction {
    /// The name of the function, as it is written in the source.
    pub name: String,
    /// The source file of the function; empty if unknown.
    pub file: String,
    /// The line that waits; 0 if unknown, and for functions that ran.
    pub line: u32,
}

/// The innermost own function of the stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpentIn {
    /// An own function, with what it called in dependencies and in the system.
    Function(Arc<OwnFunction>),
    /// There is no stack, or no own function in it.
    Unknown,
    /// Small amounts of several functions.
    Others,
}

/// What is compared. Wall times are in nanoseconds and together are the wall time of the span; all else is beside it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Nanoseconds of wall time.
    Wall(TimeKind, SpentIn),
    /// Nanoseconds of CPU time on other threads.
    OtherThreads(SpentIn),
    /// What it allocated, in bytes.
    AllocatedBytes,
    /// The number of child spans of a name; `None` for several names.
    ChildSpans(Option<Arc<str>>),
    /// The total of their wall times, in nanoseconds.
    ChildTime(Option<Arc<str>>),
}

impl Quantity {
    const UNMEASURED: Self = Self::Wall(TimeKind::Unmeasured, SpentIn::Unknown);

    /// Whether it is a part of the wall time.
    pub fn is_wall(&self) -> bool {
        matches!(self, Self::Wall(..))
    }

    pub(crate) fn words(&self) -> &'static str {
        match self {
            Self::Wall(kind, _) => kind.words(),
            Self::OtherThreads(_) => "on-CPU on other threads",
            Self::AllocatedBytes => "allocated",
            Self::ChildSpans(_) => "child spans",
            Self::ChildTime(_) => "time in child spans",
        }
    }

    /// The unit of its values: `ns`, `bytes` or `count`.
    pub fn unit(&self) -> &'static str {
        match self {
            Self::AllocatedBytes => "bytes",
            Self::ChildSpans(_) => "count",
            _ => "ns",
        }
    }

    /// What the time was spent in; `None` of what has no function.
    pub fn spent_in(&self) -> Option<&SpentIn> {
        match self {
            Self::Wall(_, spent_in) | Self::OtherThreads(spent_in) => Some(spent_in),
            _ => None,
        }
    }

    /// Whether it is of the spans inside the compared one.
    pub fn is_of_children(&self) -> bool {
        matches!(self, Self::ChildSpans(_) | Self::ChildTime(_))
    }

    /// What small amounts of it are added to.
    pub(crate) fn rest(&self) -> Self {
        match self {
            Self::Wall(kind, _) => Self::Wall(*kind, SpentIn::Others),
            Self::OtherThreads(_) => Self::OtherThreads(SpentIn::Others),
            Self::AllocatedBytes => Self::AllocatedBytes,
            Self::ChildSpans(_) => Self::ChildSpans(None),
            Self::ChildTime(_) => Self::ChildTime(None),
        }
    }

    /// Amounts of a class can be compared with each other. The number of the class, and how many of it are kept.
    pub(super) fn class(&self) -> (u8, usize) {
        match self {
            Self::Wall(..) => (0, 32),
            Self::OtherThreads(_) => (1, 8),
            Self::AllocatedBytes => (2, 1),
            Self::ChildSpans(_) => (3, 8),
            Self::ChildTime(_) => (4, 8),
        }
    }
}

/// `blocked in shop::reserve (src/stock.rs:41)`.
impl Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())?;
        if let Some(SpentIn::Function(function)) = self.spent_in() {
            let OwnFunction { name, file, line } = &**function;
            write!(f, " in {name}")?;
            if *line > 0 {
                write!(f, " ({})", place_of(file, *line))?;
            }
        }
        match self {
            Self::ChildSpans(Some(name)) | Self::ChildTime(Some(name)) => write!(f, " `{name}`"),
            _ => Ok(()),
        }
    }
}

/// The samples by which an amount is known; none if it was counted or measured. Of times, only how they are split is
/// uncertain: the total of each kind of time is known by the account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sampled {
    /// How many.
    pub samples: u64,
    /// What they represent together, in the unit of the quantity.
    pub total: u64,
}

/// How much there was of a quantity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Amount {
    /// What it is an amount of.
    pub quantity: Quantity,
    /// In the unit of the quantity.
    pub value: u64,
    /// How it is known.
    pub sampled: Sampled,
}

impl Amount {
    /// An amount that was counted or measured.
    pub fn exact(quantity: Quantity, value: u64) -> Self {
        Self { quantity, value, sampled: Sampled::default() }
    }
}

#[derive(Default)]
pub(crate) struct AmountSums(BTreeMap<Quantity, (u64, Sampled)>);

impl AmountSums {
    pub(crate) fn add(&mut self, Amount { quantity, value, sampled }: Amount) {
        let (sum, known) = self.0.entry(quantity).or_default();
        *sum = sum.saturating_add(value).min(LARGEST);
        known.samples = known.samples.saturating_add(sampled.samples);
        known.total = known.total.saturating_add(sampled.total);
    }

    /// Makes some amounts sum to a total. If they are more, each is reduced in proportion; if they are less, `rest` is
    /// added.
    pub(crate) fn fit(&mut self, total: u64, is_it: impl Fn(&Quantity) -> bool, rest: Quantity) {
        let sum: u128 =
            self.0.iter().filter(|(of, _)| is_it(of)).map(|(_, of)| u128::from(of.0)).sum();
        let reduced = |value: u64| match sum > u128::from(total) {
            true => u64::try_from(u128::from(value) * u128::from(total) / sum).unwrap_or(value),
            false => value,
        };
        let mut left = total;
        for (_, (value, sampled)) in self.0.iter_mut().filter(|(of, _)| is_it(of)) {
            (*value, sampled.total) = (reduced(*value), reduced(sampled.total));
            left = left.saturating_sub(*value);
        }
        // Of amounts that were reduced, less than one each.
        self.add(Amount::exact(rest, left));
    }

    /// The amounts that are not 0.
    pub(crate) fn into_amounts(self) -> impl Iterator<Item = Amount> {
        let amounts = self.0.into_iter().filter(|(_, (value, _))| *value > 0);
        amounts.map(|(quantity, (value, sampled))| Amount { quantity, value, sampled })
    }
}

/// Where the time of one span went. The amounts of wall time sum to its wall time exactly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breakdown {
    wall_ns: u64,
    /// In the order of the quantities, which are all different. None is 0.
    amounts: Vec<Amount>,
}

/// 292 years: differences fit into 64 bits, too.
pub(super) const LARGEST: u64 = i64::MAX as u64;

impl Breakdown {
    /// A breakdown of that wall time. Amounts of the same quantity are added up, and small ones beyond those that are
    /// kept are added to that of others. Wall time that is in no amount is unmeasured; if the amounts exceed the wall
    /// time, because clocks differ, each is reduced in proportion. Wall time and amounts above 292 years count as that.
    pub fn new(wall_ns: u64, amounts: impl IntoIterator<Item = Amount>) -> Self {
        let mut sums = AmountSums::default();
        amounts.into_iter().for_each(|amount| sums.add(amount));
        let wall_ns = wall_ns.min(LARGEST);
        sums.fit(wall_ns, Quantity::is_wall, Quantity::UNMEASURED);
        let mut amounts: Vec<_> = sums.into_amounts().collect();
        // Stable, so that of equal ones the first quantities are kept.
        amounts.sort_by_key(|amount| (amount.quantity.class(), Reverse(amount.value)));
        let mut kept = AmountSums::default();
        let (mut class, mut left) = (None, 0);
        for mut amount in amounts {
            let (number, most) = amount.quantity.class();
            if class.replace(number) != Some(number) {
                left = most;
            }
            if left == 0 {
                amount.quantity = amount.quantity.rest();
            }
            left = left.saturating_sub(1);
            kept.add(amount);
        }
        Self { wall_ns, amounts: kept.into_amounts().collect() }
    }

    pub(crate) fn wall_ns(&self) -> u64 {
        self.wall_ns
    }

    pub(crate) fn amounts(&self) -> &[Amount] {
        &self.amounts
    }

    pub(crate) fn value(&self, quantity: &Quantity) -> u64 {
        self.find(quantity).map_or(0, |amount| amount.value)
    }

    fn find(&self, quantity: &Quantity) -> Option<&Amount> {
        let at = self.amounts.binary_search_by(|amount| amount.quantity.cmp(quantity));
        at.ok().and_then(|at| self.amounts.get(at))
    }

    /// The variance of a value by sampling.
    ///
    /// The samples of a kind of time are spread over its functions: the share of a function is a binomial proportion, to
    /// which one sample inside and one outside are added, so that none of a few samples is not certainty (Agresti and
    /// Coull). Samples at regular intervals vary less.
    pub(super) fn sampling_variance(&self, quantity: &Quantity) -> f64 {
        let of_rest = quantity.rest();
        let of_kind = self.amounts.iter().filter(|amount| amount.quantity.rest() == of_rest);
        let numbers =
            |amount: &Amount| (amount.sampled.samples as f64, amount.sampled.total as f64);
        let (all_samples, all) = of_kind
            .map(numbers)
            .fold((0.0, 0.0), |(samples, all), (more, of_more)| (samples + more, all + of_more));
        if all_samples == 0.0 {
            return 0.0;
        }
        let (samples, of_samples) = self.find(quantity).map(numbers).unwrap_or_default();
        let weight = if samples > 0.0 { of_samples / samples } else { all / all_samples };
        if *quantity == Quantity::AllocatedBytes {
            // Their total is not known otherwise.
            return (samples + 1.0) * weight * weight;
        }
        let share = (samples + 1.0) / (all_samples + 2.0);
        all * weight * share * (1.0 - share)
    }
}

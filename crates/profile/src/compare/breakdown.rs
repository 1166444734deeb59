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

/// How an amount is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Measured {
    /// Counted or measured.
    #[default]
    Exact,
    /// By samples, each of which represents `weight`. Of times, only how they are split is uncertain: the total of each
    /// kind of time is known by the account.
    Sampled {
        /// How many.
        samples: u64,
        /// What each represents, in the unit of the quantity.
        weight: u64,
    },
}

impl Measured {
    fn and(self, other: Self) -> Self {
        let (Self::Sampled { samples: one, weight: of_one }, Self::Sampled { samples, weight }) =
            (self, other)
        else {
            return if self == Self::Exact { other } else { self };
        };
        let (of_one, of_other) =
            (u128::from(one) * u128::from(of_one), u128::from(samples) * u128::from(weight));
        let total = of_one.saturating_add(of_other);
        let samples = one.saturating_add(samples);
        let weight = total.div_ceil(u128::from(samples).max(1));
        Self::Sampled { samples, weight: u64::try_from(weight).unwrap_or(u64::MAX) }
    }

    /// The samples, and what they represent together.
    fn sampled(self) -> (f64, f64) {
        match self {
            Self::Exact => (0.0, 0.0),
            Self::Sampled { samples, weight } => (samples as f64, samples as f64 * weight as f64),
        }
    }
}

/// How much there was of a quantity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Amount {
    /// What it is an amount of.
    pub quantity: Quantity,
    /// In the unit of the quantity.
    pub value: u64,
    /// How it is known.
    pub measured: Measured,
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
        let mut sums = AmountSums::new();
        for Amount { quantity, value, measured } in amounts {
            add(&mut sums, quantity, (value, measured));
        }
        let wall_ns = wall_ns.min(LARGEST);
        fill(&mut sums, wall_ns);
        let mut amounts: Vec<_> = sums.into_iter().filter(|(_, (value, _))| *value > 0).collect();
        // Stable, so that of equal ones the first quantities are kept.
        amounts.sort_by_key(|(quantity, (value, _))| (quantity.class(), Reverse(*value)));
        let mut kept = AmountSums::new();
        let (mut class, mut left) = (None, 0);
        for (quantity, amount) in amounts {
            let (number, most) = quantity.class();
            if class.replace(number) != Some(number) {
                left = most;
            }
            let is_kept = left > 0;
            left = left.saturating_sub(1);
            add(&mut kept, if is_kept { quantity } else { quantity.rest() }, amount);
        }
        let amount = |(quantity, (value, measured))| Amount { quantity, value, measured };
        Self { wall_ns, amounts: kept.into_iter().map(amount).collect() }
    }

    pub(crate) fn wall_ns(&self) -> u64 {
        self.wall_ns
    }

    pub(crate) fn amounts(&self) -> &[Amount] {
        &self.amounts
    }

    /// The amount of a quantity; 0 if there is none.
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
        let add = |sum: (f64, f64), one: (f64, f64)| (sum.0 + one.0, sum.1 + one.1);
        let (all_samples, all) =
            of_kind.map(|amount| amount.measured.sampled()).fold((0.0, 0.0), add);
        if all_samples == 0.0 {
            return 0.0;
        }
        let own = self.find(quantity).map(|amount| amount.measured.sampled()).unwrap_or_default();
        let (samples, of_samples) = own;
        let weight = if samples > 0.0 { of_samples / samples } else { all / all_samples };
        if *quantity == Quantity::AllocatedBytes {
            // Their total is not known otherwise.
            return (samples + 1.0) * weight * weight;
        }
        let share = (samples + 1.0) / (all_samples + 2.0);
        all * weight * share * (1.0 - share)
    }
}

type AmountSums = BTreeMap<Quantity, (u64, Measured)>;

fn add(sums: &mut AmountSums, quantity: Quantity, (value, measured): (u64, Measured)) {
    let sum = sums.entry(quantity).or_insert((0, measured));
    if sum.0 > 0 {
        sum.1 = sum.1.and(measured);
    }
    sum.0 = sum.0.saturating_add(value).min(LARGEST);
}

/// Makes the amounts of wall time sum to that.
fn fill(sums: &mut AmountSums, wall_ns: u64) {
    let of_wall = sums.iter().filter(|(quantity, _)| quantity.is_wall());
    let sum_ns: u128 = of_wall.map(|(_, (ns, _))| u128::from(*ns)).sum();
    let mut left_ns = wall_ns;
    for (_, (ns, _)) in sums.iter_mut().filter(|(quantity, _)| quantity.is_wall()) {
        if sum_ns > u128::from(wall_ns) {
            let reduced_ns = u128::from(*ns) * u128::from(wall_ns) / sum_ns;
            *ns = u64::try_from(reduced_ns).unwrap_or(*ns);
        }
        left_ns = left_ns.saturating_sub(*ns);
    }
    if left_ns > 0 {
        // Of amounts that were reduced, less than a nanosecond each.
        add(sums, Quantity::UNMEASURED, (left_ns, Measured::Exact));
    }
}

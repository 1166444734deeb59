//! The compiled rules behind the numbers in spans.
//!
//! A span keeps its number when rules are replaced, and hooks read without a lock, so compiled rules stay, up to a cap.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tracing::Metadata;

use super::fields::FieldRules;
use super::percentile::WallHistograms;
use super::{Condition, Keep};
use crate::facts::format::nanoseconds;
use crate::redact::Redaction;
use crate::span::Plan;

/// A rule, as all callsites that it decides for use it.
#[derive(Debug)]
pub(crate) struct CompiledRule {
    /// Equal rules have the same id. Each `#[profiled]` with conditions is a rule.
    pub(crate) id: u64,
    pub(crate) keep: Box<Keep>,
    /// Nanoseconds without an exit after which a span hangs.
    pub(crate) hung_ns: Option<u64>,
    /// Nanoseconds after which a span is open for too long.
    pub(crate) open_ns: Option<u64>,
    /// The conditions as text, redacted, once a span met one of them.
    text: OnceLock<Arc<str>>,
}

impl CompiledRule {
    pub(super) fn new(id: u64, keep: Box<Keep>) -> Self {
        let hung_ns = keep.hung_limit().map(nanoseconds);
        let open_ns = keep.conditions().find_map(|condition| match condition {
            Condition::Open(limit) => Some(nanoseconds(limit)),
            _ => None,
        });
        Self { id, keep, hung_ns, open_ns, text: OnceLock::new() }
    }

    pub(crate) fn text(&self, names: &Redaction) -> Arc<str> {
        let text = || names.redact_span(&self.keep.to_string()).into();
        Arc::clone(self.text.get_or_init(text))
    }
}

/// What a rule means for the spans of a callsite.
#[derive(Debug)]
pub(crate) struct Callsite {
    pub(crate) plan: Plan,
    pub(crate) metadata: &'static Metadata<'static>,
    /// See [`ShownFields::of`](super::ShownFields::of).
    pub(crate) shown_fields: u64,
    pub(crate) rule: Arc<CompiledRule>,
    /// Present if values select between this plan and others.
    pub(super) fields: Option<Arc<FieldRules>>,
    /// The histograms of all spans of this rule and name, if it has a percentile.
    pub(super) histograms: Option<Arc<WallHistograms>>,
}

impl Callsite {
    /// By chance, so that threads with few spans have their share.
    pub(crate) fn is_chosen(&self) -> bool {
        let one_in = self.rule.keep.one_in().map(|number| u128::from(number.get()));
        one_in.is_some_and(|number| (u128::from(random()) * number) >> u64::BITS == 0)
    }
}

thread_local! {
    /// 0 before the first number.
    pub(crate) static RANDOM: Cell<u64> = const { Cell::new(0) };
}

/// Another random number each time, of which the first bits are to be used: a linear congruential generator. No two threads
/// wait for a cache line.
#[inline]
pub(crate) fn random() -> u64 {
    #[cold]
    fn seed() -> u64 {
        RandomState::new().hash_one(())
    }
    let state = match RANDOM.get() {
        0 => seed(),
        state => state,
    };
    let next = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
    RANDOM.set(next);
    next
}

/// The compiled rules by number. They live as long as the layer, so that hooks read them without a lock.
#[derive(Debug)]
pub(super) struct Plans {
    /// Each has twice as many places as the one before it.
    blocks: [Block; BLOCKS],
    /// The shortest time, in nanoseconds, after which an open span may have to be kept, by the rules so far; `u64::MAX` if none.
    pub(super) least_limit_ns: AtomicU64,
    /// The shortest `sampling_delay`, in ticks, except of plans that sample from the enter.
    pub(super) least_age: AtomicU64,
}

type Block = OnceLock<Box<[OnceLock<Callsite>]>>;

const FIRST_BLOCK: u64 = 64;
const BLOCKS: usize = 24;

impl Plans {
    pub(super) fn new() -> Self {
        let [least_limit_ns, least_age] = [AtomicU64::new(u64::MAX), AtomicU64::new(u64::MAX)];
        Self { blocks: Default::default(), least_limit_ns, least_age }
    }

    #[inline(always)]
    fn place(&self, number: u64) -> Option<(&Block, u64, usize)> {
        let place = number.saturating_add(FIRST_BLOCK);
        let block = place.ilog2() - FIRST_BLOCK.ilog2();
        let len = FIRST_BLOCK << block;
        Some((self.blocks.get(block as usize)?, len, (place - len) as usize))
    }

    #[inline(always)]
    pub(super) fn get(&self, number: u64) -> Option<&Callsite> {
        let (block, _, at) = self.place(number)?;
        block.get()?.get(at)?.get()
    }

    pub(super) fn insert(&self, callsite: Callsite) {
        let Callsite { plan, rule, .. } = &callsite;
        for limit_ns in rule.hung_ns.into_iter().chain(rule.open_ns) {
            self.least_limit_ns.fetch_min(limit_ns, Ordering::Relaxed);
        }
        if plan.sampling_delay > 0 && !rule.keep.is_never() {
            self.least_age.fetch_min(plan.sampling_delay, Ordering::Relaxed);
        }
        let Some((block, len, at)) = self.place(plan.number) else { return };
        let block = block.get_or_init(|| (0..len).map(|_| OnceLock::new()).collect());
        _ = block.get(at).map(|place| place.set(callsite));
    }
}

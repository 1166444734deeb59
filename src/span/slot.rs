//! One open profiled span.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::account::{AllocationSums, Counts, InsideTime, Sums};
use super::flags::{
    AGED, ALLOCATED, ALWAYS_JUDGED, CHOSEN, COUNTED, CPU_UNKNOWN, FAILED, FORCED, HAS_SAMPLES,
    HAS_SUMS, IN_USE, IS_COUNTED, JUDGES_ALLOCATIONS, JUDGES_SUBTREE, KEEP_ON_ERROR, OF_PLAN,
    ON_OTHERS, REFERENCE, REGISTERED,
};
use super::sample_counts::SampleCounts;
use super::{Plan, RegistryId, SpanKey};
use crate::facts::{Allocations, TimeBreakdown};
use crate::sys::Clock;

/// An unaged span has no known on-CPU time in the worst case. This limits the unknown time to about a hundredth of the
/// rule's threshold.
const AGED_SHARE: u64 = 64;

/// Written by the hooks of all threads that the span is on. A slot belongs to one span from [`open`](Self::open) to
/// [`release`](Self::release): the registry reuses an id only after every layer has seen the span close.
///
/// The fields that most hooks touch come first, in two cache lines. A hook touches those behind them only if a flag says
/// that they are in use.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Slot {
    /// 0 if the slot is free.
    id: AtomicU64,
    key: AtomicU64,
    root: AtomicU64,
    /// For how long the thread that opened the span has been in it. Only that thread writes it, so no locked
    /// instruction is needed, which would take longer than the rest of a hook.
    owner_ticks: AtomicU64,
    last_exit: AtomicU64,
    /// Ticks after which the span may have to be kept: slightly less than the rule's threshold.
    pub(super) judge_after: AtomicU64,
    flags: AtomicU32,
    /// The thread that opened the span.
    owner: AtomicU32,
    /// How many times the owner is currently in the span.
    owner_entered: AtomicU32,
    /// How many times all other threads together are currently in the span.
    others_entered: AtomicU32,

    opened: AtomicU64,
    idle: AtomicU64,
    /// Since when the span has been entered without a break, if it is entered.
    entered_since: AtomicU64,
    parent: AtomicU64,
    /// For how much longer it must be entered to become old, including descendants on other threads. If two threads
    /// leave at once, one subtraction can be lost; the span then becomes old slightly later.
    delay_left: AtomicU64,
    sampling_delay: AtomicU64,
    /// From then on the span counts as one that is open for long.
    long_at: AtomicU64,
    plan: AtomicU64,

    /// For how long the other threads have been in the span.
    other_ticks: AtomicU64,
    /// [`SampleCounts`].
    samples: Sums<4>,
    /// What is known of the field values on which the span's rule depends, if any.
    pub(super) matched: AtomicU64,
    counts: Counts,
    allocations: AllocationSums,
}

const _: () = {
    assert!(std::mem::offset_of!(Slot, opened) == 64);
    assert!(std::mem::offset_of!(Slot, other_ticks) == 128);
    assert!(size_of::<Slot>() == 384);
};

/// The part of a parent's slot that a new child span needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parent {
    pub(crate) id: RegistryId,
    /// The local root's [`SpanKey`] as a number.
    pub(crate) root: u64,
}

impl Slot {
    #[inline(always)]
    pub(crate) fn holds(&self, id: RegistryId) -> bool {
        self.id.load(Ordering::Acquire) == id.get()
    }

    #[inline(always)]
    pub(crate) fn is_free(&self) -> bool {
        self.id.load(Ordering::Acquire) == 0
    }

    #[inline(always)]
    pub(crate) fn open(
        &self,
        id: RegistryId,
        key: SpanKey,
        now: u64,
        owner: u32,
        plan: &Plan,
        parent: Option<Parent>,
    ) {
        // The collector may read concurrently: it must not see these stores before the previous span's release.
        fence(Ordering::Release);
        // Another thread can have counted something late, for the span before.
        if self.flags() & IN_USE != 0 {
            self.clear();
        }
        self.key.store(key.get(), Ordering::Relaxed);
        self.opened.store(now, Ordering::Relaxed);
        self.owner_ticks.store(0, Ordering::Relaxed);
        self.owner_entered.store(0, Ordering::Relaxed);
        self.others_entered.store(0, Ordering::Relaxed);
        self.owner.store(owner, Ordering::Relaxed);
        self.last_exit.store(now, Ordering::Relaxed);
        self.idle.store(0, Ordering::Relaxed);
        self.judge_after.store(plan.judge_after, Ordering::Relaxed);
        self.flags.store(plan.flags, Ordering::Relaxed);
        self.plan.store(plan.number, Ordering::Relaxed);
        self.set_allocation_limits(plan);
        self.set_age(plan, now);
        let (parent, root) = match parent {
            Some(parent) => (parent.id.get(), parent.root),
            None => (0, key.get()),
        };
        self.parent.store(parent, Ordering::Relaxed);
        self.root.store(root, Ordering::Relaxed);
        // A thread that finds the id sees all stores above.
        self.id.store(id.get(), Ordering::Release);
    }

    #[inline(always)]
    pub(crate) fn release(&self) {
        if self.flags() & IN_USE != 0 {
            self.clear();
        }
        self.id.store(0, Ordering::Release);
    }

    /// Clears what the flags say is in use.
    #[inline(never)]
    fn clear(&self) {
        let flags = self.flags.fetch_and(!IN_USE, Ordering::Relaxed);
        if flags & COUNTED != 0 {
            self.counts.clear();
        }
        if flags & ALLOCATED != 0 {
            self.allocations.clear();
        }
        if flags & HAS_SAMPLES != 0 {
            self.samples.clear();
        }
        if flags & ON_OTHERS != 0 {
            self.other_ticks.store(0, Ordering::Relaxed);
        }
    }

    /// The thread `thread` enters the span. Returns for how long it was not entered; `None` if it was already entered.
    ///
    /// If the owner and another thread enter an unentered span within the same few nanoseconds, both can count the idle
    /// time before; [`account`](Self::account) caps the sum.
    #[inline(always)]
    pub(crate) fn enter(&self, now: u64, thread: u32) -> Option<u64> {
        let was_entered = if self.owner.load(Ordering::Relaxed) == thread {
            let before = self.owner_entered.load(Ordering::Relaxed);
            self.owner_entered.store(before.wrapping_add(1), Ordering::Release);
            before | self.others_entered.load(Ordering::Acquire)
        } else {
            self.set_once(ON_OTHERS);
            // Acquire: pairs with `exit`, so that `last_exit` is that of the previous exit.
            let before = self.others_entered.fetch_add(1, Ordering::AcqRel);
            before | self.owner_entered.load(Ordering::Acquire)
        };
        if was_entered != 0 {
            return None;
        }
        let gap = now.saturating_sub(self.last_exit.load(Ordering::Relaxed));
        self.idle.store(self.idle.load(Ordering::Relaxed).wrapping_add(gap), Ordering::Relaxed);
        self.entered_since.store(now, Ordering::Relaxed);
        Some(gap)
    }

    /// The thread `thread` leaves the span after `ticks` in it.
    #[inline(always)]
    pub(crate) fn exit(&self, now: u64, ticks: u64, thread: u32) {
        self.last_exit.store(now, Ordering::Relaxed);
        // Time first: a thread that finds the span not entered must see all of its time.
        if self.owner.load(Ordering::Relaxed) == thread {
            let before = self.owner_ticks.load(Ordering::Relaxed);
            self.owner_ticks.store(before.wrapping_add(ticks), Ordering::Relaxed);
            let before = self.owner_entered.load(Ordering::Relaxed);
            self.owner_entered.store(before.wrapping_sub(1), Ordering::Release);
        } else {
            self.other_ticks.fetch_add(ticks, Ordering::Relaxed);
            self.others_entered.fetch_sub(1, Ordering::AcqRel);
        }
        self.use_up_delay(ticks);
    }

    /// For how long the span has been entered, without the current segments.
    #[inline(always)]
    fn ticks(&self) -> u64 {
        let owner = self.owner_ticks.load(Ordering::Relaxed);
        match self.flags() & ON_OTHERS {
            0 => owner,
            _ => owner.wrapping_add(self.other_ticks.load(Ordering::Relaxed)),
        }
    }

    #[inline(always)]
    fn set_allocation_limits(&self, plan: &Plan) {
        if plan.flags & JUDGES_ALLOCATIONS != 0 {
            let [bytes, allocations] = &self.allocations.limits;
            bytes.store(plan.judge_above_bytes, Ordering::Relaxed);
            allocations.store(plan.judge_above_allocations, Ordering::Relaxed);
        }
    }

    fn set_age(&self, plan: &Plan, opened: u64) {
        self.sampling_delay.store(plan.sampling_delay, Ordering::Relaxed);
        self.delay_left.store(plan.sampling_delay, Ordering::Relaxed);
        self.long_at.store(opened.saturating_add(plan.long_after), Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn is_open_for_long(&self, now: u64) -> bool {
        now > self.long_at.load(Ordering::Relaxed)
    }

    /// When the span becomes old if it is entered from `now` on. A span that has been open for long (a connection,
    /// `main`) starts young at each enter.
    #[inline(always)]
    pub(crate) fn samples_from(&self, now: u64) -> u64 {
        self.samples_from_after(now, 0)
    }

    /// Like [`samples_from`](Self::samples_from), for a span that is `more` ticks older than it knows.
    #[inline(always)]
    pub(super) fn samples_from_after(&self, now: u64, more: u64) -> u64 {
        let delay_left = match self.is_open_for_long(now) {
            true => self.delay_when_long(),
            false => self.delay_left.load(Ordering::Relaxed).saturating_sub(more),
        };
        now.saturating_add(delay_left)
    }

    /// The sampling delay of a span that is open for long. For a reference, such as a connection, about that of its rule.
    pub(super) fn delay_when_long(&self) -> u64 {
        match self.flags() & REFERENCE {
            0 => self.sampling_delay(),
            _ => {
                let long_after = self.long_at.load(Ordering::Relaxed).saturating_sub(self.opened());
                (long_after / 200).min(self.judge_after.load(Ordering::Relaxed) / 20)
            }
        }
    }

    /// The span was entered for `ticks`, or a descendant was on a thread that is not in the span.
    #[inline(always)]
    pub(crate) fn use_up_delay(&self, ticks: u64) {
        let delay_left = self.delay_left.load(Ordering::Relaxed).saturating_sub(ticks);
        self.delay_left.store(delay_left, Ordering::Relaxed);
        let total = self.ticks();
        if total >= self.judge_after.load(Ordering::Relaxed) / AGED_SHARE {
            self.set_once(AGED);
        }
    }

    pub(super) fn sampling_delay(&self) -> u64 {
        self.sampling_delay.load(Ordering::Relaxed)
    }

    /// Whether it is old at `now`, also by the time for which it has been entered without a break.
    pub(super) fn is_old(&self, now: u64) -> bool {
        let segment = self.entered_since().map(|since| now.saturating_sub(since));
        match self.is_open_for_long(now) {
            true => segment.is_some_and(|ticks| ticks >= self.delay_when_long()),
            false => self.delay_left.load(Ordering::Relaxed) <= segment.unwrap_or(0),
        }
    }

    /// Samples every thread that enters the span.
    pub(crate) fn attach_at_enter(&self) {
        self.sampling_delay.store(0, Ordering::Relaxed);
        self.delay_left.store(0, Ordering::Relaxed);
    }

    /// Whether threads in the span are sampled from their enter on.
    pub(crate) fn arms_at_enter(&self) -> bool {
        self.sampling_delay() == 0
    }

    /// What threads that are or were in the span add to.
    pub(crate) fn counts(&self) -> &Counts {
        self.set_once(COUNTED);
        &self.counts
    }

    /// Adds what the thread `thread` has allocated, whose innermost span this is.
    pub(crate) fn count_own_allocations(&self, more: Allocations, thread: u32) {
        self.set_once(ALLOCATED);
        if self.owner.load(Ordering::Relaxed) == thread {
            self.allocations.of_owner.add_alone(more.counts());
        } else {
            self.allocations.of_others.add(more.counts());
        }
    }

    /// Adds what a span inside has allocated, which closes.
    pub(crate) fn count_allocations_inside(&self, more: Allocations) {
        self.set_once(ALLOCATED);
        self.allocations.inside.add(more.counts());
    }

    /// What was allocated in it and in spans inside it that have closed, if anything was.
    #[inline(always)]
    pub(crate) fn allocations(&self) -> Option<Allocations> {
        (self.flags() & ALLOCATED != 0).then(|| self.allocations.all())
    }

    /// A thread that is not in this span was in a descendant.
    pub(crate) fn note_inside(&self) {
        // With other threads, a span can have more on-CPU time than wall time.
        let judged = if self.flags() & JUDGES_SUBTREE == 0 { 0 } else { ALWAYS_JUDGED };
        self.set_once(COUNTED | judged);
    }

    /// Adds segments of descendants, on threads that are not in this span.
    pub(crate) fn count_inside(&self, time: InsideTime) {
        self.note_inside();
        self.counts.inside.add(time);
    }

    /// The part of the `ticks` until `now`, in which the span was entered without a break, in which its thread was not in
    /// others on its stack.
    pub(super) fn taken_of(&self, ticks: u64, now: u64) -> u64 {
        let suspended = self.counts.suspended(now);
        if suspended == 0 {
            return ticks;
        }
        let wall = now.saturating_sub(self.opened());
        let before = self.ticks() + self.idle.load(Ordering::Relaxed) + suspended;
        ticks.min(wall.saturating_sub(before))
    }

    /// The span's [`SpanKey`] as a number.
    #[inline(always)]
    pub(crate) fn raw_key(&self) -> u64 {
        self.key.load(Ordering::Relaxed)
    }

    /// The [`SpanKey`] of the local root, the topmost profiled ancestor or the span itself, as a number.
    #[inline(always)]
    pub(crate) fn raw_root(&self) -> u64 {
        self.root.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(crate) fn key(&self) -> Option<SpanKey> {
        SpanKey::new(self.key.load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(crate) fn id(&self) -> Option<RegistryId> {
        // Later reads of the slot return values of that span or of a later one.
        RegistryId::new(self.id.load(Ordering::Acquire))
    }

    #[inline(always)]
    pub(crate) fn plan(&self) -> u64 {
        self.plan.load(Ordering::Relaxed)
    }

    /// When the span was created, in ticks.
    #[inline(always)]
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(crate) fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    /// Sets flags and returns the previous ones.
    #[inline(always)]
    pub(crate) fn set(&self, flags: u32) -> u32 {
        self.flags.fetch_or(flags, Ordering::Relaxed)
    }

    pub(super) fn unset(&self, flags: u32) {
        self.flags.fetch_and(!flags, Ordering::Relaxed);
    }

    /// Sets flags that are usually set already. Does not write then, since threads on other processors may read the
    /// flags all the time.
    #[inline(always)]
    pub(crate) fn set_once(&self, flags: u32) {
        if self.flags() & flags != flags {
            self.set(flags);
        }
    }

    /// Gives the span another plan. Returns the previous flags.
    pub(crate) fn replan(&self, plan: &Plan, matched: u64) -> u32 {
        self.matched.store(matched, Ordering::Relaxed);
        self.plan.store(plan.number, Ordering::Relaxed);
        self.judge_after.store(plan.judge_after, Ordering::Relaxed);
        self.set_allocation_limits(plan);
        if self.flags() & (FORCED | CHOSEN | REFERENCE) == 0 {
            let [before, left] =
                [&self.sampling_delay, &self.delay_left].map(|age| age.load(Ordering::Relaxed));
            self.set_age(plan, self.opened());
            self.use_up_delay(before.saturating_sub(left));
        }
        // `ALWAYS_JUDGED` is kept, since it may have been set for another reason than the plan.
        let change = |flags: u32| {
            let has_inside = flags & COUNTED != 0 && plan.flags & JUDGES_SUBTREE != 0;
            let suspect = if has_inside { ALWAYS_JUDGED } else { 0 };
            Some(flags & (!OF_PLAN | ALWAYS_JUDGED) | plan.flags | suspect)
        };
        let before = self.flags.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
        before.unwrap_or_else(|flags| flags)
    }

    /// Since when the span has been entered without a break, in ticks; `None` if it is not entered.
    pub(crate) fn entered_since(&self) -> Option<u64> {
        let entered = self.owner_entered.load(Ordering::Acquire)
            | self.others_entered.load(Ordering::Acquire);
        (entered != 0).then(|| self.entered_since.load(Ordering::Relaxed))
    }

    /// For how long no thread was in the span until `now`, in ticks.
    pub(super) fn idle_until(&self, now: u64) -> u64 {
        let last_gap = self.last_gap(now);
        self.idle.load(Ordering::Relaxed).saturating_add(last_gap)
    }

    /// The part of that since the last exit.
    fn last_gap(&self, now: u64) -> u64 {
        match self.entered_since() {
            Some(_) => 0,
            None => now.saturating_sub(self.last_exit()),
        }
    }

    /// When a thread last left the span, in ticks; its creation if none has.
    pub(super) fn last_exit(&self) -> u64 {
        self.last_exit.load(Ordering::Relaxed)
    }

    /// Whether the span is or was entered.
    pub(super) fn was_entered(&self) -> bool {
        let last_exit = self.last_exit.load(Ordering::Relaxed);
        last_exit != self.opened() || self.entered_since().is_some()
    }

    /// The parent's id as a number, or 0.
    #[inline(always)]
    pub(crate) fn raw_parent(&self) -> u64 {
        self.parent.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(crate) fn parent(&self) -> Option<RegistryId> {
        RegistryId::new(self.parent.load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(crate) fn as_parent(&self) -> Option<Parent> {
        Some(Parent { id: self.id()?, root: self.raw_root() })
    }

    pub(crate) fn add_samples(&self, samples: SampleCounts) {
        self.set_once(HAS_SAMPLES);
        self.samples.add(samples.counts());
    }

    pub(crate) fn samples(&self) -> SampleCounts {
        match self.flags() & HAS_SAMPLES {
            0 => SampleCounts::default(),
            _ => SampleCounts::from_counts(self.samples.get()),
        }
    }

    /// Whether a span that closes now certainly needs no more than a [`release`](Self::release): it is not half as long as
    /// a slow one, which can count in one around it, and has no flag that may matter.
    #[inline(always)]
    pub(crate) fn closes_plainly(&self, now: u64) -> bool {
        let wall = now.saturating_sub(self.opened.load(Ordering::Relaxed));
        self.flags() & (REGISTERED | ALWAYS_JUDGED | FAILED | ALLOCATED | HAS_SUMS | IS_COUNTED)
            == 0
            && wall <= self.judge_after.load(Ordering::Relaxed) / 2
    }

    /// Whether a span that closes now needs more than a [`release`](Self::release).
    #[inline(always)]
    pub(crate) fn must_be_judged(&self, now: u64) -> bool {
        let flags = self.flags.load(Ordering::Relaxed);
        let failed = flags & (FAILED | KEEP_ON_ERROR) == FAILED | KEEP_ON_ERROR;
        let judges_allocations = ALLOCATED | JUDGES_ALLOCATIONS;
        let wall = now.saturating_sub(self.opened.load(Ordering::Relaxed));
        failed
            || flags & (REGISTERED | ALWAYS_JUDGED) != 0
            || wall > self.judge_after.load(Ordering::Relaxed)
            || (flags & judges_allocations == judges_allocations
                && self.allocations.exceed_limits())
    }

    pub(crate) fn account(&self, clock: &Clock, now: u64) -> TimeBreakdown {
        let opened = self.opened.load(Ordering::Relaxed);
        let last_gap = self.last_gap(now);
        let wall = now.saturating_sub(opened);
        let owner = self.owner_ticks.load(Ordering::Relaxed);
        let entered_ticks = self.ticks();
        let idle = self.idle.load(Ordering::Relaxed).saturating_add(last_gap);
        let idle = idle.min(wall.saturating_sub(owner));
        let key = self.key().unwrap_or(SpanKey::MIN);
        let account = self.counts.account(clock, key, wall, entered_ticks, idle);
        let allocations = Allocations::are_counted();
        let account = TimeBreakdown {
            after_last_exit_ns: clock.ns(last_gap),
            other_spans_ns: clock.ns(self.counts.suspended(now)),
            own_allocations: allocations.then(|| self.allocations.own()),
            allocations: allocations.then(|| self.allocations.all()),
            ..account
        };
        match self.flags() & CPU_UNKNOWN {
            0 => account,
            _ => account.without_cpu_time(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Usage;

    const OWNER: u32 = 1;
    const OTHER: u32 = 2;

    fn open() -> Slot {
        let slot = Slot::default();
        let plan = Plan {
            number: 3,
            judge_after: 1_000,
            sampling_delay: 50,
            long_after: 10_000,
            flags: KEEP_ON_ERROR,
            ..Plan::default()
        };
        slot.open(RegistryId::new(9).unwrap(), SpanKey::new(77).unwrap(), 100, OWNER, &plan, None);
        slot
    }

    #[test]
    fn a_root_is_its_own_root() {
        let slot = open();
        assert!(slot.holds(RegistryId::new(9).unwrap()));
        assert_eq!(slot.parent(), None);
        assert_eq!(slot.raw_root(), 77);
        assert_eq!(slot.as_parent().unwrap().root, 77);
    }

    #[test]
    fn time_between_segments_is_idle() {
        for (first, second) in [(OWNER, OWNER), (OTHER, OTHER), (OWNER, OTHER), (OTHER, OWNER)] {
            let slot = open();
            assert_eq!(slot.enter(150, first), Some(50));
            slot.exit(200, 50, first);
            assert_eq!(slot.enter(260, second), Some(60));
            slot.exit(300, 40, second);
            let account = slot.account(&Clock::nanoseconds(), 310);
            let entered_ns = account.on_cpu_ns + account.off_cpu_ns;
            assert_eq!((account.idle_ns, entered_ns), (50 + 60 + 10, 90));
            assert_eq!(account.wall_ns, 210);
        }
    }

    #[test]
    fn segments_at_once_add_up_and_are_not_idle() {
        for (first, second) in [(OWNER, OTHER), (OTHER, OWNER), (OTHER, 3)] {
            let slot = open();
            assert!(slot.enter(110, first).is_some());
            assert!(slot.enter(120, second).is_none());
            slot.exit(150, 40, first);
            slot.exit(160, 40, second);
            assert!(slot.enter(170, first).is_some());
            slot.exit(175, 5, first);
            let account = slot.account(&Clock::nanoseconds(), 175);
            let entered_ns = account.on_cpu_ns + account.off_cpu_ns;
            assert_eq!((account.idle_ns, entered_ns), (10 + 10, 85));
        }
    }

    #[test]
    fn entered_without_a_break_as_long_as_one_thread_is_in_it() {
        let slot = open();
        assert_eq!(slot.entered_since(), None);
        slot.enter(150, OWNER);
        assert!(slot.enter(160, OTHER).is_none());
        slot.exit(1_000, 840, OTHER);
        assert_eq!(slot.entered_since(), Some(150));
        slot.exit(1_010, 860, OWNER);
        assert_eq!(slot.entered_since(), None);
        slot.enter(1_020, OTHER);
        assert_eq!(slot.entered_since(), Some(1_020));
    }

    /// Covers the maximum number of threads, and more nested enters on one thread than occur in practice.
    #[test]
    fn a_span_stays_entered_for_any_number_of_enters() {
        // More than 8 and 16 bits can count. Miri would take hours for the larger ones.
        let many = [255, 256, 257, 300, 4_096, 65_536, 70_000];
        for times in many.into_iter().filter(|times| !cfg!(miri) || *times <= 300) {
            for is_owner in [true, false] {
                let slot = open();
                let thread = |number: u32| if is_owner { OWNER } else { OTHER + number };
                for number in 0..times {
                    assert_eq!(slot.enter(150, thread(number)).is_none(), number > 0);
                    assert_eq!(slot.entered_since(), Some(150), "{number}");
                }
                let account = slot.account(&Clock::nanoseconds(), 400);
                assert_eq!((account.idle_ns, account.after_last_exit_ns), (50, 0));
                for number in 0..times {
                    assert_eq!(slot.entered_since(), Some(150), "{number}");
                    slot.exit(200, 1, thread(number));
                }
                assert_eq!(slot.entered_since(), None);
                let TimeBreakdown { on_cpu_ns, off_cpu_ns, .. } =
                    slot.account(&Clock::nanoseconds(), 200);
                assert_eq!(on_cpu_ns + off_cpu_ns, u64::from(times));
            }
        }
    }

    #[test]
    fn suspect_when_slow_failed_or_registered() {
        let slot = open();
        assert!(!slot.must_be_judged(1_100));
        assert!(slot.must_be_judged(1_101));
        slot.set(FAILED);
        assert!(slot.must_be_judged(100));

        let slot = open();
        slot.set(REGISTERED);
        assert!(slot.must_be_judged(100));
    }

    #[test]
    fn suspect_when_it_has_allocated_more_than_its_rule_allows() {
        let some = |allocated_bytes, allocations| Allocations {
            allocated_bytes,
            allocations,
            ..Allocations::default()
        };
        let plan = Plan { flags: JUDGES_ALLOCATIONS, judge_after: 1_000, ..Plan::default() };
        let limits = [(100, u64::MAX), (u64::MAX, 5)];
        let slots = limits.map(|(judge_above_bytes, judge_above_allocations)| {
            let slot = open();
            slot.replan(&Plan { judge_above_bytes, judge_above_allocations, ..plan }, 0);
            slot
        });
        let are_suspect = || slots.each_ref().map(|slot| slot.must_be_judged(100));
        slots.iter().for_each(|slot| slot.count_own_allocations(some(60, 4), OWNER));
        slots.iter().for_each(|slot| slot.count_allocations_inside(some(40, 1)));
        assert_eq!(are_suspect(), [false, false]);
        slots[0].count_allocations_inside(some(1, 0));
        slots[1].count_own_allocations(some(0, 1), OTHER);
        assert_eq!(are_suspect(), [true, true]);
        // No rule asks any more.
        slots.iter().for_each(|slot| _ = slot.replan(&Plan { flags: 0, ..plan }, 0));
        assert_eq!(are_suspect(), [false, false]);
    }

    #[test]
    fn a_change_of_rule_keeps_the_age_of_a_span() {
        let slot = open();
        slot.enter(110, OWNER);
        slot.exit(140, 30, OWNER);
        assert_eq!(slot.samples_from(200), 220);
        let plan = Plan { judge_after: 9, sampling_delay: 80, long_after: 500, ..Plan::default() };
        slot.replan(&plan, 0);
        assert_eq!(slot.samples_from(200), 250);
        slot.replan(&Plan { sampling_delay: 10, ..plan }, 0);
        assert_eq!(
            (slot.samples_from(200), slot.samples_from(601)),
            (200, 611),
            "open for long: as new"
        );
    }

    #[test]
    fn a_released_slot_is_clean() {
        let slot = open();
        slot.counts().add_usage(Usage { minor_faults: 5, ..Usage::default() });
        let clock = Clock::nanoseconds();
        assert_eq!(slot.account(&clock, 100).usage.minor_faults, 5);
        slot.release();
        assert!(slot.is_free());
        assert_eq!(slot.account(&clock, 100).usage.minor_faults, 0);
    }
}

//! The flags of a span's slot.

/// The span or a descendant failed.
pub(crate) const FAILED: u32 = 1;
/// The collector knows the span: a sample fell in it or in a descendant.
pub(crate) const REGISTERED: u32 = 1 << 1;
/// `counts` is not all zero.
pub(crate) const COUNTED: u32 = 1 << 2;
/// Keep the span if it failed.
pub(crate) const KEEP_ON_ERROR: u32 = 1 << 3;
/// The span has been entered for 1/64 of its rule's threshold, so the CPU clock is read more often.
pub(crate) const AGED: u32 = 1 << 4;
/// The span has the field that sets its OpenTelemetry status.
pub(crate) const HAS_STATUS: u32 = 1 << 5;
/// The span must be judged in any case.
pub(crate) const ALWAYS_JUDGED: u32 = 1 << 6;
/// The values of the span's fields decide which rule it has.
pub(crate) const HAS_FIELDS: u32 = 1 << 7;
/// The collector checks for how long the span stays open.
pub(crate) const WATCHED: u32 = 1 << 8;
/// The span itself failed, not only a descendant.
pub(crate) const FAILED_ITSELF: u32 = 1 << 9;
/// The program requested that the span be kept.
pub(crate) const FORCED: u32 = 1 << 10;
/// The span was chosen by a one-in-n rule.
pub(crate) const CHOSEN: u32 = 1 << 11;
/// A one-in-n rule applies to the span.
pub(crate) const ONE_IN: u32 = 1 << 12;
/// An on-CPU sample fell in the span itself, not only in a descendant.
pub(crate) const SAMPLED_ITSELF: u32 = 1 << 13;
/// A thread was in the span whose CPU clock cannot be read.
pub(crate) const CPU_UNKNOWN: u32 = 1 << 14;
/// The span's rule judges CPU times, so its threads' CPU clocks are read at each enter and exit.
pub(crate) const JUDGES_CPU: u32 = 1 << 15;
/// The span has fields whose values are shown.
pub(crate) const SHOWS_FIELDS: u32 = 1 << 16;
/// The span's rule judges the CPU time of its subtree, so that also holds for child spans that run elsewhere.
pub(crate) const JUDGES_SUBTREE: u32 = 1 << 17;
/// The span's rule judges what it allocates.
pub(crate) const JUDGES_ALLOCATIONS: u32 = 1 << 18;
/// `allocations` is not all zero.
pub(crate) const ALLOCATED: u32 = 1 << 19;
/// `samples` are those of the span.
pub(crate) const HAS_SAMPLES: u32 = 1 << 20;
/// A thread was in the span that had not opened it, so `other_ticks` is in use.
pub(crate) const ON_OTHERS: u32 = 1 << 21;
/// Threads have times of descendants that are not in `counts` yet.
pub(crate) const HAS_SUMS: u32 = 1 << 22;
/// A wrapped future is in the span, which explains its idle time.
pub(crate) const OBSERVED: u32 = 1 << 23;
/// The span is a reference: not zero. It is one more than the power of one half that is the probability with which it
/// was chosen.
pub(crate) const REFERENCE: u32 = 0x1f << REFERENCE_SHIFT;
pub(crate) const REFERENCE_SHIFT: u32 = 24;
/// The span's rule judges what the system counts for threads, so that is also read at each enter and exit.
pub(crate) const JUDGES_USAGE: u32 = 1 << 29;
/// The span is a request that is added up with others of its route.
pub(crate) const ADDED_UP: u32 = 1 << 30;
/// The span is inside one whose child spans are counted, and counts when it closes.
pub(crate) const IS_COUNTED: u32 = 1 << 31;
/// The flags that say which of the fields are in use that are not set when a span opens.
pub(crate) const IN_USE: u32 = COUNTED | ALLOCATED | HAS_SAMPLES | ON_OTHERS;
/// The flags that come from the span's plan.
pub(crate) const OF_PLAN: u32 = KEEP_ON_ERROR
    | HAS_STATUS
    | ALWAYS_JUDGED
    | HAS_FIELDS
    | WATCHED
    | ONE_IN
    | JUDGES_CPU
    | JUDGES_SUBTREE
    | JUDGES_ALLOCATIONS
    | JUDGES_USAGE
    | SHOWS_FIELDS;

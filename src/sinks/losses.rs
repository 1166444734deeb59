//! What a profile lacks.

use crate::unwind::UnwindEnd;

/// What a profile lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Losses {
    /// Samples whose stacks were dropped: only their CPU time is left.
    pub(crate) lost: u64,
    /// Samples that were lost completely.
    pub(crate) missing: u64,
    /// Samples that were lost to a full ring, in the profile's spans or before them.
    pub(crate) ring_full: u64,
    /// Samples that were merged into others.
    pub(crate) downsampled: u64,
    /// Stacks whose outermost frames were not copied.
    pub(crate) cut: u64,
    /// Stacks that could not be unwound to their end.
    pub(crate) incomplete: u64,
    /// Samples taken at a rate that the CPU budget had lowered.
    pub(crate) lowered: u64,
    /// Samples that came too late to represent all the time since the previous one.
    pub(crate) late: u64,
    /// Stacks whose outermost callers are on another stack.
    pub(crate) off_stack: u64,
    /// Samples of spans inside that were too many to tell apart: they are shown together in the span around them.
    pub(crate) folded: u64,
}

impl Losses {
    /// Adds how the stack of a sample ended.
    pub(crate) fn add_end(&mut self, end: UnwindEnd) {
        match end {
            UnwindEnd::Root => {}
            UnwindEnd::Cut => self.cut += 1,
            UnwindEnd::OtherStack => self.off_stack += 1,
            _ => self.incomplete += 1,
        }
    }
}

impl std::ops::AddAssign for Losses {
    fn add_assign(&mut self, more: Self) {
        self.lost += more.lost;
        self.missing += more.missing;
        self.ring_full += more.ring_full;
        self.downsampled += more.downsampled;
        self.cut += more.cut;
        self.incomplete += more.incomplete;
        self.lowered += more.lowered;
        self.late += more.late;
        self.off_stack += more.off_stack;
        self.folded += more.folded;
    }
}

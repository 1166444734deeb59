//! The stack of a thread at one moment.

use crate::sys::Call;
use crate::unwind::{ModuleAddress, UnwindEnd};

/// An unwound stack, innermost frame first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stack {
    pub(super) frames: Vec<ModuleAddress>,
    pub(super) end: UnwindEnd,
    /// The stack of another leaf that the future may have awaited, if there is one.
    pub(super) other: Vec<ModuleAddress>,
    /// The first frame that is inferred rather than certain.
    pub(super) inferred_from: Option<usize>,
    /// What the thread was blocked in, if it was blocked.
    pub(super) waited: Option<Waited>,
    /// The span grew old during this wait, whose time may therefore include shorter waits before it.
    pub(super) holds_others: bool,
}

/// What a thread was blocked in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Waited {
    In(Call),
    /// The system does not allow us to read it.
    Unknown,
    /// Not a thread, but a future that was woken and not polled; with the plan of the span that was on the thread.
    Scheduling(Option<u64>),
    /// A future that is not observed.
    NotObserved,
    /// A future, of whose stack there is no copy.
    NotCopied,
}

impl Stack {
    /// An empty stack.
    pub(super) fn new() -> Self {
        Self {
            frames: Vec::new(),
            other: Vec::new(),
            end: UnwindEnd::Root,
            inferred_from: None,
            waited: None,
            holds_others: false,
        }
    }

    /// The memory that the stack takes in its tables.
    pub(super) fn bytes(&self) -> usize {
        (self.frames.len() + self.other.len()) * size_of::<ModuleAddress>() + 96
    }
}

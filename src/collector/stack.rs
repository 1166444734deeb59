//! What is held of a thread at one moment.

use crate::sys::Call;
use crate::unwind::{ModuleAddress, UnwindEnd};

/// A stack as it was unwound, the innermost frame first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stack {
    pub(super) frames: Vec<ModuleAddress>,
    pub(super) end: UnwindEnd,
    /// The first frame that is likely rather than certain.
    pub(super) inferred_from: Option<usize>,
    /// If it is that of a thread that waited: for what.
    pub(super) waited: Option<Waited>,
    /// It waited so when its span grew old: shorter waits before it may be in its time.
    pub(super) holds_others: bool,
}

/// What a thread waited in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Waited {
    In(Call),
    /// The system does not let us see.
    Somewhere,
}

impl Stack {
    /// A stack of which nothing is known yet.
    pub(super) fn new() -> Self {
        Self {
            frames: Vec::new(),
            end: UnwindEnd::Root,
            inferred_from: None,
            waited: None,
            holds_others: false,
        }
    }

    /// What the stack takes in its tables.
    pub(super) fn bytes(&self) -> usize {
        self.frames.len() * size_of::<ModuleAddress>() + 96
    }
}

//! The stack of a thread at one moment.

use std::collections::HashMap;
use std::sync::Arc;

use crate::sys::{Call, OsThread};
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
    /// An allocation, of whose stack there is no copy.
    AllocationNotCopied,
    /// Not one stack, but those for which there is no memory.
    OtherStacks,
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

    /// All frames in it.
    pub(super) fn all_frames(&self) -> impl Iterator<Item = &[ModuleAddress]> {
        [self.frames.as_slice(), self.other.as_slice()].into_iter()
    }

    /// The memory that the stack takes in its tables.
    pub(super) fn bytes(&self) -> usize {
        (self.frames.len() + self.other.len()) * size_of::<ModuleAddress>() + 96
    }
}

/// The distinct stacks of a span, and the threads with samples or waits of it.
#[derive(Debug, Default)]
pub(super) struct Stacks {
    by_number: Vec<Arc<Stack>>,
    numbers: HashMap<Arc<Stack>, u32>,
    threads: Vec<OsThread>,
    thread_numbers: HashMap<OsThread, u32>,
}

/// The memory of a thread in a list and in a map.
const BYTES_A_THREAD: usize = 2 * size_of::<OsThread>() + 16;

impl Stacks {
    pub(super) fn get(&self, number: u32) -> Option<&Stack> {
        self.by_number.get(number as usize).map(AsRef::as_ref)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Stack> {
        self.by_number.iter().map(AsRef::as_ref)
    }

    pub(super) fn thread(&self, number: u32) -> Option<OsThread> {
        self.threads.get(number as usize).copied()
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.by_number.len()
    }

    pub(super) fn bytes(&self) -> usize {
        let stacks = self.by_number.iter().map(|stack| stack.bytes()).sum::<usize>();
        stacks + self.threads.len() * BYTES_A_THREAD
    }

    pub(super) fn cost(&self, stack: &Stack) -> usize {
        if self.numbers.contains_key(stack) { 0 } else { stack.bytes() }
    }

    pub(super) fn thread_cost(&self, thread: OsThread) -> usize {
        if self.thread_numbers.contains_key(&thread) { 0 } else { BYTES_A_THREAD }
    }

    pub(super) fn add_thread(&mut self, thread: OsThread) -> u32 {
        *self.thread_numbers.entry(thread).or_insert_with(|| {
            self.threads.push(thread);
            self.threads.len() as u32 - 1
        })
    }

    pub(super) fn add(&mut self, stack: &Stack) -> u32 {
        if let Some(number) = self.numbers.get(stack) {
            return *number;
        }
        let number = self.by_number.len() as u32;
        let stack = Arc::new(stack.clone());
        self.by_number.push(Arc::clone(&stack));
        self.numbers.insert(stack, number);
        number
    }
}

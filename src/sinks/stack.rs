//! The stack of a thread at one moment.

use crate::sys::{Call, OsThread};
use crate::unwind::{ModuleAddress, UnwindEnd};

#[derive(Clone, Debug, Default)]
pub(crate) struct Stack {
    pub(crate) frames: Vec<ModuleAddress>,
    pub(crate) end: UnwindEnd,
    /// The stacks of other leaves that the future awaited at the same time, the last first, and how each ended.
    pub(crate) others: Vec<(Vec<ModuleAddress>, UnwindEnd)>,
    /// Where the holder of the lock was, or what woke the future; empty if that is not known.
    pub(crate) elsewhere: Vec<ModuleAddress>,
    /// Which leaf woke the task, if that is known: 0 is the one of `frames`.
    pub(crate) woke: Option<usize>,
    /// The first frame that is inferred rather than certain.
    pub(crate) inferred_from: Option<usize>,
    pub(crate) waited: Option<StackLeaf>,
    pub(crate) holder: Option<Holder>,
    /// The span grew old during this wait, whose time therefore includes shorter waits before it.
    pub(crate) holds_others: bool,
    /// The leaf was awaited last before an error was logged.
    pub(crate) is_before_error: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) thread: OsThread,
    /// The [number](crate::keep::SpanNames::number_of) of its span's name, or [`NO_SPAN`](Self::NO_SPAN).
    pub(crate) span: u64,
    /// Otherwise the lock states it.
    pub(crate) is_inferred: bool,
}

impl Holder {
    /// The holder was in no span, or its span is not known.
    pub(crate) const NO_SPAN: u64 = u64::MAX;

    /// Who holds the lock for which thread `tid` waits, if the lock states it.
    pub(crate) fn stated_by(call: Call, tid: u32) -> Option<Self> {
        // The thread itself if it has the lock by now.
        let owner = call.lock_owner().filter(|owner| *owner != tid)?;
        let thread = OsThread::of(owner);
        Some(Self { thread, span: Self::NO_SPAN, is_inferred: false })
    }
}

/// What a thread was blocked in, or why that or its stack is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StackLeaf {
    In(Call),
    /// The system does not allow us to read it.
    Unknown,
    /// Nothing: the thread ran, and its stack is not known.
    Running,
    /// Not a thread, but a future that was woken and not polled.
    Scheduling,
    /// Like [`Scheduling`](Self::Scheduling), with the number of the name of the span that was on the thread.
    SchedulingBehind(u64),
    /// A future that was woken once the span with that number of a name left the thread.
    AwaitingUntil(u64),
    /// A future that was woken in the span with that number of a name.
    WokenIn(u64),
    /// A future, while threads were in its span for that many milliseconds.
    WhileEntered(u64),
    /// One of that many leaves that a future awaited at the same time.
    OneOf(u32),
    /// Not a thread, but a future or closure that an executor had not begun to run.
    NotBegun,
    /// A future that is not observed.
    NotObserved,
    /// A future, of whose stack there is no copy.
    NotCopied,
    /// An allocation, of whose stack there is no copy.
    AllocationNotCopied,
    /// Not one stack, but those for which there is no memory.
    OtherStacks,
    /// CPU time of the process in which no sample was taken.
    NotSampled,
}

/// A part of a stack as it is stored: 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StackEntry {
    /// The thread that held the lock of the next leaf, after both halves of its name and the number of its span's.
    Holder {
        tid: u32,
        is_inferred: bool,
    },
    HolderName([u8; 8]),
    HolderSpan(u64),
    StackLeaf(StackLeaf),
    Code(ModuleAddress),
    Inferred(ModuleAddress),
    /// How it ended, unless that is [`UnwindEnd::Root`].
    End(UnwindEnd),
    /// What follows is the stack of another leaf.
    OtherLeaf,
    /// What follows is the stack of the holder, or of what woke the future.
    Elsewhere,
    /// What follows is the stack of the leaf that woke the task.
    WokenLeaf,
    HoldsOthers,
    BeforeError,
}

const _: () = assert!(size_of::<StackEntry>() == 16);

impl StackEntry {
    pub(crate) fn code(self) -> Option<ModuleAddress> {
        match self {
            Self::Code(address) | Self::Inferred(address) => Some(address),
            _ => None,
        }
    }
}

impl Stack {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// All of it, the innermost first.
    pub(crate) fn entries(&self) -> impl DoubleEndedIterator<Item = StackEntry> + Clone {
        let inferred_from = self.inferred_from.unwrap_or(usize::MAX).min(self.frames.len());
        let (certain, inferred) = self.frames.split_at(inferred_from);
        let before_error = self.is_before_error.then_some(StackEntry::BeforeError);
        let ended = move |end: UnwindEnd| {
            let end = (end != UnwindEnd::Root).then_some(StackEntry::End(end));
            end.into_iter().chain(before_error)
        };
        let holder = self.holder.map(|Holder { thread, span, is_inferred }| {
            let [begin, end] = thread.halves_of_name().map(StackEntry::HolderName);
            let holder = StackEntry::Holder { tid: thread.tid, is_inferred };
            [begin, end, StackEntry::HolderSpan(span), holder]
        });
        let waited = self.waited.map(StackEntry::StackLeaf);
        let waited = holder.into_iter().flatten().chain(waited);
        let woke = self.woke.filter(|_| !self.others.is_empty());
        let is_woken = move |leaf| (woke == Some(leaf)).then_some(StackEntry::WokenLeaf);
        let others = self.others.iter().enumerate().flat_map(move |(number, (frames, end))| {
            std::iter::once(StackEntry::OtherLeaf)
                .chain(is_woken(number + 1))
                .chain(frames.iter().copied().map(StackEntry::Code))
                .chain(ended(*end))
        });
        let is_of = self.holder.is_some()
            || matches!(self.waited, Some(StackLeaf::WokenIn(_) | StackLeaf::AwaitingUntil(_)));
        let elsewhere = self.elsewhere.iter().copied().map(StackEntry::Code);
        let elsewhere = std::iter::once(StackEntry::Elsewhere).chain(elsewhere);
        let elsewhere = elsewhere.filter(move |_| is_of && !self.elsewhere.is_empty());
        waited
            .chain(is_woken(0))
            .chain(certain.iter().copied().map(StackEntry::Code))
            .chain(inferred.iter().copied().map(StackEntry::Inferred))
            .chain(ended(self.end))
            .chain(others)
            .chain(elsewhere)
            .chain(self.holds_others.then_some(StackEntry::HoldsOthers))
    }
}

//! What a sample shows beyond the code on its stack.

use std::borrow::Cow;
use std::fmt;

use super::sample::SampleKind;
use super::table::handle;

handle! {
    /// The index of a [`Leaf`].
    LeafId
}

/// What was going on where the stack of a sample ends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Leaf {
    /// The thread ran.
    Ran,
    /// The thread was blocked in this: `sleep`, `read`, `page fault`, `futex 0x7f…` with the address of the lock, `futex of
    /// shop::STOCK` if it is in a static. Empty if unknown.
    Blocked(String),
    /// The thread was blocked as in [`Blocked`](Self::Blocked), by a lock that the given thread held.
    BlockedBy(String, LockHolder),
    /// The future waited for what its stack shows.
    Awaiting,
    /// The future waited for several things at the same time, as in `select!` and `join!`. The one that woke it has all
    /// the time; if it is not known which one did, all have equal parts of it.
    AwaitingOneOf {
        /// How many with different stacks.
        count: u32,
        /// What most of the others awaited; empty if that is unknown.
        others: String,
    },
    /// The future waited for what its stack shows, until another span did something.
    AwaitingUntil {
        /// The span, which is of another request if it woke the future. `None` if that was in none.
        span: Option<String>,
        /// Whether it woke it: said of locks, semaphores, channels and pools. Otherwise it had been on the thread that polled
        /// the future for most of the time, and left it just before: it woke it, or kept the thread from seeing that.
        woke: bool,
        /// The innermost function of the program that woke it, with file and line; empty if unknown.
        at: String,
    },
    /// The future waited for what its stack shows, while threads were in its span for that many milliseconds besides.
    AwaitingWhileEntered(u64),
    /// The future had been woken, and its executor had other things to do.
    Delayed {
        /// The span that was on the executor's thread, if it is known.
        behind: Option<String>,
    },
    /// The thread allocated, or what it had allocated was in use.
    Allocated,
    /// What was going on is not known, and why.
    Unknown(&'static str),
}

/// The thread that held a lock for which another one waited.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LockHolder {
    /// The name of the thread; empty if it had none.
    pub thread: String,
    /// The id of the thread.
    pub tid: u32,
    /// The span that it was in, if it is known.
    pub span: Option<String>,
    /// The innermost function of the program that it was in when it was found, with file and line; empty if unknown.
    pub at: String,
    /// Whether the holder is uncertain: the thread had the address of the lock on its stack, and has run since if the
    /// wait has ended. Only mutexes of glibc state who holds them. In a long wait, several may have held it in turn.
    pub is_inferred: bool,
}

/// `` `worker-3` (thread 7) in `report`, at shop::refill (shop/main.rs:12), inferred ``.
impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { thread, tid, span, at, is_inferred } = self;
        match thread.is_empty() {
            true => write!(f, "thread {tid}")?,
            false => write!(f, "`{thread}` (thread {tid})")?,
        }
        span.iter().try_for_each(|span| write!(f, " in `{span}`"))?;
        write!(f, "{}{at}", if at.is_empty() { "" } else { ", at " })?;
        f.write_str(if *is_inferred { ", inferred" } else { "" })
    }
}

impl Leaf {
    /// What the thread was blocked in, with who held the lock; `None` if nothing is known of the wait but its length.
    pub(super) fn blocked_in(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Blocked(call) if !call.is_empty() => Some(call.into()),
            Self::BlockedBy(call, holder) => Some(format!("{call}, held by {holder}").into()),
            _ => None,
        }
    }

    /// In a sentence, who held the lock: ``lock likely held by thread `worker-3` at shop::refill (shop/main.rs:12)``.
    pub(super) fn held_by(&self) -> Option<String> {
        let Self::BlockedBy(call, LockHolder { thread, tid, span, at, is_inferred }) = self else {
            return None;
        };
        let variable = call.strip_prefix("futex of ").map(|name| format!(" {name}"));
        let likely = if *is_inferred { "likely " } else { "" };
        let who = match (span, thread.as_str()) {
            (Some(span), _) => format!("`{span}`"),
            (None, "") => format!("thread {tid}"),
            (None, thread) => format!("thread `{thread}`"),
        };
        let at = if at.is_empty() { String::new() } else { format!(" at {at}") };
        Some(format!("lock{} {likely}held by {who}{at}", variable.unwrap_or_default()))
    }

    /// In a sentence, what another span or function did before the future went on: ``shop::refill (shop/main.rs:12) in
    /// `GET /a` woke it``.
    pub(super) fn until(&self) -> Option<String> {
        let Self::AwaitingUntil { span, woke, at } = self else { return None };
        let span = span.as_ref().map(|span| format!("`{span}`")).unwrap_or_default();
        let within = if at.is_empty() || span.is_empty() { "" } else { " in " };
        let did = if *woke { "woke it" } else { "left the thread" };
        Some(format!("{at}{within}{span} {did}"))
    }

    /// The leaf of a sample of which only the kind is known.
    pub(super) fn of(kind: SampleKind) -> Self {
        match kind {
            SampleKind::OnCpu => Self::Ran,
            SampleKind::OffCpu => Self::Blocked(String::new()),
            SampleKind::Await => Self::Awaiting,
            SampleKind::Delay => Self::Delayed { behind: None },
            _ => Self::Allocated,
        }
    }

    /// The innermost frame in formats that have only frames and do not mix kinds; `None` if the code is all.
    pub(crate) fn frame(&self) -> Option<String> {
        self.mixed_frame().filter(|_| *self != Self::Awaiting)
    }

    /// The innermost frame in formats that mix kinds of samples; `None` if the leaf has no text.
    pub(crate) fn mixed_frame(&self) -> Option<String> {
        Some(self.to_string()).filter(|frame| !frame.is_empty())
    }
}

/// A frame between the stacks of several leaves, before symbolization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeafMark {
    /// The stack of another leaf follows.
    Other,
    /// The stack of the holder of a lock follows, or of what woke the task.
    Elsewhere,
    /// The leaf whose stack follows woke the task.
    Woken,
}

impl LeafMark {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Other => "[or]",
            Self::Elsewhere => "[elsewhere]",
            Self::Woken => "[woken by]",
        }
    }
}

/// In brackets: `[sleep]`, `[await]`, `[scheduling delay behind report]`. Empty if the code on the stack is all.
impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ran | Self::Allocated => Ok(()),
            Self::Blocked(call) if call.is_empty() => Ok(()),
            Self::Blocked(call) => write!(f, "[{call}]"),
            Self::BlockedBy(call, holder) => write!(f, "[{call}, held by {holder}]"),
            Self::Awaiting => f.write_str("[await]"),
            Self::AwaitingOneOf { count, others } => {
                let at = if others.is_empty() { "" } else { ", others at " };
                write!(f, "[await, one of {count} at the same time{at}{others}]")
            }
            Self::AwaitingUntil { .. } => {
                let until = self.until().unwrap_or_default();
                write!(f, "[await, until {}]", until.replace('`', ""))
            }
            Self::AwaitingWhileEntered(ms) => {
                write!(f, "[await, threads were in the span for {ms} ms]")
            }
            Self::Delayed { behind: None } => f.write_str("[scheduling delay]"),
            Self::Delayed { behind: Some(span) } => write!(f, "[scheduling delay behind {span}]"),
            Self::Unknown(why) => write!(f, "[{why}]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_says_who_held_a_lock_without_addresses() {
        let holder = LockHolder {
            thread: "db".to_owned(),
            tid: 7,
            span: Some("GET /a".to_owned()),
            at: "shop::refill (shop/main.rs:12)".to_owned(),
            is_inferred: true,
        };
        let said_of = |call: &str, holder: &LockHolder| {
            Leaf::BlockedBy(call.to_owned(), holder.clone()).held_by().unwrap()
        };
        let said = |holder: &LockHolder| said_of("futex 0x7f00", holder);
        let text = "lock likely held by `GET /a` at shop::refill (shop/main.rs:12)";
        assert_eq!(said(&holder), text);
        let outside = LockHolder { span: None, ..holder.clone() };
        assert!(said(&outside).starts_with("lock likely held by thread `db` at shop"));
        let (thread, at) = (String::new(), String::new());
        let unknown = LockHolder { thread, at, span: None, is_inferred: false, ..holder };
        assert_eq!(said(&unknown), "lock held by thread 7");
        assert_eq!(said_of("futex of shop::STOCK", &unknown), "lock shop::STOCK held by thread 7");
        assert_eq!(Leaf::Blocked("futex 0x7f00".to_owned()).held_by(), None);
    }
}

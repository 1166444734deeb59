//! Finds out where a thread of the process is.
//!
//! As for waits, nothing runs on an inspected thread. What is read of it is valid if it did not run in the meantime, by its
//! CPU clock.

use std::time::Duration;

use crate::intake::Intake;
use crate::profile::{SampleKind, ThreadActivity};
use crate::sampler::ThreadShared;
use crate::sinks::{Holder, Stack, StackEntry, StackLeaf, Store, StoredSample};
use crate::span::SpanKey;
use crate::sys::{self, Blocked, Call, OsThread};
use crate::unwind::UnwindEnd;

pub(crate) struct InspectedThread {
    pub(crate) thread: OsThread,
    pub(crate) activity: ThreadActivity,
    pub(crate) span: Option<SpanKey>,
    pub(crate) stack: Stack,
    /// The CPU time that it had used by then.
    pub(crate) cpu_ns: Option<u64>,
    /// The thread was blocked, but not all the time that the inspection took.
    has_moved: bool,
}

/// How often a thread is inspected that wakes up while it is.
const MAX_TRIES: usize = 3;

/// Inspects a thread until it is found running or in one wait, or too often; `None` if it has ended.
pub(crate) fn inspect(
    intake: &mut Intake,
    shared: Option<&ThreadShared>,
    tid: u32,
) -> Option<InspectedThread> {
    let mut found = inspect_once(intake, shared, tid)?;
    for _ in 1..MAX_TRIES {
        if found.has_moved {
            found = inspect_once(intake, shared, tid)?;
        }
    }
    Some(found)
}

fn inspect_once(
    intake: &mut Intake,
    shared: Option<&ThreadShared>,
    tid: u32,
) -> Option<InspectedThread> {
    let cpu_ns = sys::cpu_ns_of(tid);
    let (state, thread) = (OsThread::state_of(tid)?, OsThread::of(tid));
    let span = shared.and_then(ThreadShared::span);
    let mut stack = Stack::new();
    let by_state = match state {
        b'Z' | b'X' | b'x' => return None,
        b'S' => ThreadActivity::Blocked,
        b'D' => ThreadActivity::Uninterruptible,
        b'T' | b't' => ThreadActivity::Stopped,
        _ => ThreadActivity::Running,
    };
    let (mut activity, mut has_moved) = (ThreadActivity::Running, false);
    // Of this thread, the system would say that it is in the call that asks.
    let blocked = if tid == sys::current_tid() { Ok(None) } else { Blocked::of(tid) };
    match blocked {
        Ok(Some(Blocked { call, sp, pc })) => {
            let is_copied = intake.copy_blocked(sp);
            has_moved = cpu_ns.is_none() || sys::cpu_ns_of(tid) != cpu_ns;
            if !has_moved {
                // Its state was read while it still ran, or woke up for a moment.
                let is_known = by_state != ThreadActivity::Running;
                activity = if is_known { by_state } else { ThreadActivity::Blocked };
                // A thread that was stopped outside of a system call looks like one in a page fault.
                let is_stopped = activity == ThreadActivity::Stopped && call == Call::PageFault;
                stack.waited = (!is_stopped).then_some(StackLeaf::In(call));
                stack.holder = Holder::stated_by(call, tid).filter(|_| !is_stopped);
                stack.end = UnwindEnd::Lost;
                if is_copied {
                    intake.unwind_blocked(shared, (pc, sp), &mut stack);
                }
            }
        }
        Ok(None) => {}
        // It has ended, or the system does not allow it.
        Err(_) if sys::cpu_ns_of(tid).is_none() => return None,
        Err(_) => {
            activity = by_state;
            stack.waited = Some(StackLeaf::Unknown);
        }
    }
    if activity == ThreadActivity::Running {
        stack.waited = Some(StackLeaf::Running);
    }
    Some(InspectedThread { thread, activity, span, stack, cpu_ns, has_moved })
}

impl InspectedThread {
    /// Returns the thread's stack; if it runs, that of its newest sample, if any, and how long ago that was taken.
    pub(crate) fn stack(&self, intake: &Intake) -> (Vec<StackEntry>, Option<Duration>) {
        let store = &intake.sinks.store;
        let span = self.span.filter(|_| self.activity == ThreadActivity::Running);
        match span.and_then(|span| newest_sample(store, span, self.thread.tid)) {
            Some(sample) => {
                let age_ns = intake.now_ns().saturating_sub(sample.time_ns);
                let frames = store.tables.stacks.frames(sample.stack).collect();
                (frames, Some(Duration::from_nanos(age_ns)))
            }
            None => (self.stack.entries().collect(), None),
        }
    }
}

/// The newest sample of a thread in a span that it is in, or in one around that.
fn newest_sample(store: &Store, span: SpanKey, tid: u32) -> Option<StoredSample> {
    let of_thread = |span| {
        let samples = store.get(span)?.samples(SampleKind::OnCpu).iter().copied();
        samples.rev().find(|it| store.tables.thread(it).is_some_and(|thread| thread.tid == tid))
    };
    let spans = std::iter::once(span).chain(store.ancestors(span));
    spans.filter_map(of_thread).max_by_key(|sample| sample.time_ns)
}

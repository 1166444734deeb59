//! What callers ask the collector for, and wait for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Engine;
use super::command::{Command, HeapRequest};
use super::process::{CancelProfile, ProcessRequest, ProfileKind, RunningRequest, StartedProfile};
use crate::error::ProfileError;
use crate::profile::{Profile, ThreadDump};
use crate::publish::{OpenSpan, Question};
use crate::sinks::HeapPart;
use crate::span::is_ignored;
use crate::sys::{self, Uncounted};

/// How long the caller waits for the layer's threads.
const LONGEST: Duration = Duration::from_secs(10);
/// The same for a heap or all threads, whose symbols they read.
const LONGEST_OF_ALL: Duration = Duration::from_secs(30);

/// Why a caller gets no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    /// The layer does not run.
    Off,
    HeapNotTracked,
    /// The system does not list the threads of the process.
    NotListed,
    /// The layer's threads did not answer in time.
    Late,
}

/// Asks the collector, and waits for the answer until a deadline.
fn answer<T>(
    engine: &Engine,
    deadline: Instant,
    command: impl FnOnce(Question<T>) -> Command,
) -> Result<T, NoAnswer> {
    let _uncounted = Uncounted::begin();
    let (reply, wait) = engine.commands.questions.ask().ok_or(NoAnswer::Late)?;
    // A question that cannot be sent is dropped, which ends the wait.
    engine.ask(command(reply));
    wait.recv_deadline(deadline).map_err(|_| NoAnswer::Late)
}

/// The profiled spans that have been open for longer than that.
pub(crate) fn open_spans(engine: &Engine, older_than: Duration) -> Result<Vec<OpenSpan>, NoAnswer> {
    answer(engine, Instant::now() + LONGEST, |reply| Command::FindOpen { older_than, reply })
}

/// The profile of the live heap.
pub(crate) fn heap_profile(engine: &Engine, part: HeapPart) -> Result<Profile, NoAnswer> {
    /// One at a time: each takes memory and the time of the layer's threads.
    static ASKING: Mutex<()> = Mutex::new(());
    if !is_heap_tracked(engine) {
        return Err(NoAnswer::HeapNotTracked);
    }
    let _uncounted = Uncounted::begin();
    let deadline = Instant::now() + LONGEST_OF_ALL;
    let _asking = ASKING.try_lock_until(deadline).ok_or(NoAnswer::Late)?;
    let is_taken = Arc::new(AtomicBool::new(false));
    let taken = Arc::clone(&is_taken);
    let request = |reply| Command::Heap(HeapRequest { part, reply, is_taken: taken });
    let profile = answer(engine, deadline, request)?;
    is_taken.store(true, Ordering::Relaxed);
    Ok(profile)
}

/// Where all threads of the process are.
pub(crate) fn all_threads(engine: &Engine) -> Result<ThreadDump, NoAnswer> {
    let dump = answer(engine, Instant::now() + LONGEST_OF_ALL, Command::DumpThreads)?;
    dump.ok_or(NoAnswer::NotListed)
}

const NOT_LISTED: &str = "the system does not list the threads of the process in /proc/self/task";

/// Begins to sample or to observe all threads of the process.
pub(crate) fn begin_process_profile(
    engine: &Engine,
    kind: ProfileKind,
    duration: Duration,
    period_ns: u64,
) -> Result<(CancelProfile, StartedProfile), ProfileError> {
    if is_ignored() {
        return Err(ProfileError::OwnThread);
    }
    match kind {
        ProfileKind::Cpu if engine.source.sampler.is_refused() => {
            return Err(ProfileError::Unavailable(engine.source.describe()));
        }
        ProfileKind::Wall if sys::own_threads().is_err() => {
            return Err(ProfileError::Unavailable(NOT_LISTED.to_owned()));
        }
        ProfileKind::Cpu | ProfileKind::Wall => {}
    }
    let _uncounted = Uncounted::begin();
    let requests = &engine.commands.process;
    let running = RunningRequest::begin(&requests.is_running).ok_or(ProfileError::Busy)?;
    let asked = engine.commands.questions.ask().ok_or(ProfileError::NoAnswer);
    let (reply, answer) = asked?;
    let until = Instant::now() + duration;
    let is_canceled = Arc::new(AtomicBool::new(false));
    let cancel = CancelProfile::new(&is_canceled, &engine.waker);
    let request = ProcessRequest { kind, period_ns, duration, reply, is_canceled };
    if !engine.ask(Command::ProfileProcess(request)) {
        return Err(ProfileError::Ended);
    }
    // In the order in which they are dropped.
    Ok((cancel, StartedProfile::new(answer, until, running)))
}

/// Whether the live heap is tracked.
fn is_heap_tracked(engine: &Engine) -> bool {
    engine.allocations.tracks_heap() && sys::counts_allocations()
}

/// Tracks the heap if no other layer does that any more. Once rules are off and all spans have closed, nothing else
/// needs to know what is allocated.
pub(crate) fn update_counting(engine: &Engine) {
    if engine.allocations.can_claim_heap() {
        // Blocks are tracked only while all frees are counted.
        engine.gate.set_counts_allocations(true);
        engine.allocations.claim_heap();
    }
    let is_counting = engine.gate.counts_allocations() && !is_heap_tracked(engine);
    if is_counting && engine.callsites.are_off() && !engine.spans.has_any_open() {
        engine.gate.set_counts_allocations(false);
        // New rules may have been set in the meantime.
        if !engine.callsites.are_off() {
            engine.gate.set_counts_allocations(true);
        }
    }
}

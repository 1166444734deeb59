//! Finds out where all threads of the process are, for a caller.
//!
//! As for waits, nothing runs on an inspected thread. What is read of it is valid if it did not run in the meantime, by its
//! CPU clock.

use std::collections::{HashMap, HashSet, VecDeque};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::assemble::ProfileInputs;
use crate::engine::Engine;
use crate::intake::Intake;
use crate::profile::{DumpedThread, ProfileId, SampleKind, ThreadActivity, ThreadDump};
use crate::publish::{Job, Question};
use crate::sampler::ThreadShared;
use crate::sinks::{Stack, StackEntry, StackLeaf, StackTree, Store, StoredSample, StoredStack};
use crate::span::{RegistryId, SpanKey};
use crate::sys::{self, Blocked, Call, OsThread};
use crate::text::beginning;
use crate::threads::{SampledThread, Threads};
use crate::unwind::UnwindEnd;

/// Threads that were not reached within this CPU time are left out: there are more than ten thousands.
const MOST_CPU: Duration = Duration::from_secs(2);
/// The same for the wall time, of a machine that is busy.
const LONGEST: Duration = Duration::from_secs(5);
/// The memory for stacks. Further threads have none.
const MOST_BYTES: usize = 4 << 20;
/// Rings are read after each step, so that none is full.
const STEP: Duration = Duration::from_millis(5);
/// How often a thread is inspected that runs.
const MOST_TRIES: u32 = 4;
/// The pause before all that is left is tried again.
const PAUSE: Duration = Duration::from_millis(1);

/// A dump of all threads until it is complete.
#[derive(Debug)]
pub(crate) struct ThreadScan {
    left: VecDeque<LeftThread>,
    found: Vec<FoundThread>,
    stacks: StackTree<StackEntry>,
    begun: Instant,
    cpu_left: Duration,
    reply: Question<Option<ThreadDump>>,
}

/// A thread that must be inspected, for the first time or again.
#[derive(Debug)]
struct LeftThread {
    tid: u32,
    tries: u32,
    last: Option<FoundThread>,
}

/// A thread at one moment.
#[derive(Debug)]
struct FoundThread {
    thread: OsThread,
    activity: ThreadActivity,
    span: Option<SpanKey>,
    /// The names of that span and of those around it, the outermost first.
    spans: Vec<String>,
    /// `None` if there was no memory for it.
    stack: Option<StoredStack>,
    /// How long ago it was in that stack, if that is of a sample.
    stack_age: Option<Duration>,
}

impl ThreadScan {
    /// Lists the threads; `None` if that is not possible, and answered.
    pub(crate) fn begin(threads: &Threads, reply: Question<Option<ThreadDump>>) -> Option<Self> {
        let Ok(mut tids) = sys::own_threads() else {
            reply.send(None);
            return None;
        };
        // Those in spans first, in case that there is no time for all.
        let in_spans: HashSet<u32> =
            sampled(threads).filter(|it| it.span().is_some()).map(ThreadShared::tid).collect();
        tids.sort_by_key(|tid| !in_spans.contains(tid));
        let left = tids.into_iter().map(|tid| LeftThread { tid, tries: 0, last: None });
        let (left, found, stacks) = (left.collect(), Vec::new(), StackTree::default());
        Some(Self { left, found, stacks, begun: Instant::now(), cpu_left: MOST_CPU, reply })
    }

    /// Inspects some threads. Returns whether that was all.
    pub(crate) fn step(&mut self, engine: &Engine, intake: &mut Intake, threads: &Threads) -> bool {
        // The system calls that follow are unusual, and this thread may have a filter by now.
        sys::read_filters();
        let cpu_before = sys::thread_cpu_ns();
        let by_tid: HashMap<u32, &ThreadShared> =
            sampled(threads).map(|thread| (thread.tid(), thread)).collect();
        if self.left.iter().all(|left| left.tries > 0) {
            sleep(PAUSE);
        }
        let until = Instant::now() + STEP;
        let mut inspected = Vec::new();
        while Instant::now() < until
            && let Some(LeftThread { tid, tries, .. }) = self.left.pop_front()
        {
            if let Some((found, stack)) = inspect(intake, by_tid.get(&tid).copied(), tid) {
                inspected.push((tries + 1, found, stack));
            }
        }
        name_spans(engine, inspected.iter_mut().map(|(_, found, _)| found));
        for (tries, found, stack) in inspected {
            if found.activity == ThreadActivity::Running && tries < MOST_TRIES {
                let tid = found.thread.tid;
                self.left.push_back(LeftThread { tid, tries, last: Some(found) });
            } else {
                self.add(intake, found, &stack);
            }
        }
        let spent =
            sys::thread_cpu_ns().zip(cpu_before).map(|(now, then)| now.saturating_sub(then));
        self.cpu_left = self.cpu_left.saturating_sub(spent.map_or(STEP, Duration::from_nanos));
        self.left.is_empty() || self.cpu_left.is_zero() || self.begun.elapsed() >= LONGEST
    }

    /// Adds a thread with its stack. One that runs has that of its newest sample, if it has any.
    fn add(&mut self, intake: &Intake, mut found: FoundThread, stack: &Stack) {
        let left = MOST_BYTES.saturating_sub(self.stacks.bytes());
        let store = &intake.sinks.store;
        let runs = found.activity == ThreadActivity::Running;
        let sample = found.span.filter(|_| runs);
        let sample = sample.and_then(|span| newest_sample(store, span, found.thread.tid));
        found.stack = match sample {
            Some(sample) => {
                let age_ns = intake.now_ns().saturating_sub(sample.time_ns);
                found.stack_age = Some(Duration::from_nanos(age_ns));
                let entries: Vec<_> = store.tables.stacks.frames(sample.stack).collect();
                self.stacks.add_within(entries.into_iter(), left)
            }
            None => self.stacks.add_within(stack.entries(), left),
        };
        self.found.push(found);
    }

    /// The dump, for symbolization.
    pub(crate) fn finish(mut self, engine: &Engine, intake: &Intake) -> Job {
        let mut left_out = 0;
        let running = Stack { waited: Some(StackLeaf::Running), ..Stack::new() };
        for left in std::mem::take(&mut self.left) {
            match left.last {
                Some(found) => self.add(intake, found, &running),
                None => left_out += 1,
            }
        }
        let Self { mut found, stacks: tree, reply, .. } = self;
        found.sort_by_key(|found| (found.spans.is_empty(), found.thread.tid));
        let stacks = found.iter().zip(0..).map(|(found, number)| {
            let entries: Vec<_> = match found.stack {
                Some(stack) => tree.frames(stack).collect(),
                None => vec![StackEntry::StackLeaf(StackLeaf::OtherStacks)],
            };
            (entries.into_iter(), number, vec![(SampleKind::OffCpu, 1)])
        });
        let inputs = ProfileInputs::new(&engine.callsites, &intake.sinks.store, &intake.unwinder);
        let (stacks, modules) = inputs.profile_of_stacks(ProfileId::NONE, stacks);
        let threads = found.into_iter().map(|found| DumpedThread {
            name: engine.redaction.redact_span(&found.thread.name()).into_owned(),
            tid: found.thread.tid,
            activity: found.activity,
            blocked_in: None,
            spans: found.spans,
            stack: [].into(),
            stack_age: found.stack_age,
        });
        let mut dump = ThreadDump::new(threads.collect(), stacks);
        (dump.left_out, dump.awaiting) = (left_out, engine.awaits.count_pending());
        engine.spans.for_each_open(|slot| {
            dump.idle_spans += usize::from(slot.entered_ns.is_none());
        });
        Job::DumpThreads { dump, modules, reply }
    }
}

/// The threads that may be in spans.
fn sampled(threads: &Threads) -> impl Iterator<Item = &ThreadShared> {
    let all = threads.sampled.iter().map(SampledThread::thread);
    // The id of one that is over may be that of another thread by now.
    all.filter(|thread| !thread.is_over())
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

/// Where a thread is; `None` if it has ended.
fn inspect(
    intake: &mut Intake,
    shared: Option<&ThreadShared>,
    tid: u32,
) -> Option<(FoundThread, Stack)> {
    let before = sys::cpu_ns_of(tid);
    let (thread, state) = sys::thread_and_state(tid).ok()?;
    let span = shared.and_then(ThreadShared::span);
    let mut stack = Stack::new();
    let by_state = match state {
        b'Z' | b'X' | b'x' => return None,
        b'S' => ThreadActivity::Blocked,
        b'D' => ThreadActivity::Uninterruptible,
        b'T' | b't' => ThreadActivity::Stopped,
        _ => ThreadActivity::Running,
    };
    let mut activity = ThreadActivity::Running;
    // Of this thread, the system would say that it is in the call that asks.
    let blocked = if tid == sys::current_tid() { Ok(None) } else { sys::blocked(tid) };
    match blocked {
        Ok(Some(Blocked { call, sp, pc })) => {
            let is_copied = intake.copy_blocked(sp);
            if before.is_some() && sys::cpu_ns_of(tid) == before {
                // Its state was read while it still ran, or woke up for a moment.
                let is_known = by_state != ThreadActivity::Running;
                activity = if is_known { by_state } else { ThreadActivity::Blocked };
                // A thread that was stopped outside of a system call looks like one in a page fault.
                let is_stopped = activity == ThreadActivity::Stopped && call == Call::PageFault;
                stack.waited = (!is_stopped).then_some(StackLeaf::In(call));
                stack.end = UnwindEnd::Lost;
                if is_copied {
                    intake.unwind_blocked(pc, sp, &mut stack);
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
    let spans = Vec::new();
    Some((FoundThread { thread, activity, span, spans, stack: None, stack_age: None }, stack))
}

/// Names the spans that threads are in, as far as these are still open.
fn name_spans<'a>(engine: &Engine, found: impl Iterator<Item = &'a mut FoundThread>) {
    let in_spans: Vec<_> = found.filter(|found| found.span.is_some()).collect();
    if in_spans.is_empty() {
        return;
    }
    let wanted: HashSet<SpanKey> = in_spans.iter().filter_map(|found| found.span).collect();
    let mut ids: HashMap<SpanKey, RegistryId> = HashMap::new();
    engine.spans.for_each_open(|slot| {
        if wanted.contains(&slot.key) {
            ids.insert(slot.key, slot.id);
        }
    });
    for found in in_spans {
        let around = found.span.and_then(|key| engine.spans.describe(*ids.get(&key)?, key));
        let around = around.unwrap_or_default().into_iter();
        found.spans = around.map(|(_, span)| name_of(engine, span.plan)).collect();
    }
}

fn name_of(engine: &Engine, plan: u64) -> String {
    let callsite = engine.callsites.get(plan);
    let name = callsite.as_ref().map_or("", |callsite| beginning(callsite.metadata.name()));
    engine.redaction.redact_span(name).into_owned()
}

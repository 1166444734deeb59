//! Finds out where all threads of the process are, for a caller.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::deadlock::Deadlock;
use super::wall_scan::STEP;
use crate::assemble::ProfileInputs;
use crate::engine::Engine;
use crate::intake::Intake;
use crate::profile::{DumpedThread, ProfileId, SampleKind, ThreadDump};
use crate::publish::{Asked, Job, Reply};
use crate::sinks::{StackEntry, StackLeaf, StackTree, StoredStack};
use crate::sys::{self, OsThread};
use crate::text::escaped;
use crate::threads::{InspectedThread, Threads, inspect};

/// Threads that were not reached within this time are left out: there are more than ten thousands.
const LONGEST: Duration = Duration::from_secs(5);
/// The memory for stacks. Further threads have none.
const MAX_BYTES: usize = 4 << 20;

pub(crate) struct ThreadScan {
    left: VecDeque<u32>,
    found: Vec<FoundThread>,
    stacks: StackTree<StackEntry>,
    begun: Instant,
    reply: Reply<Option<ThreadDump>>,
}

struct FoundThread {
    thread: OsThread,
    /// `None` if there was no memory for it.
    stack: Option<StoredStack>,
    /// Without its name and stack.
    shown: DumpedThread,
}

impl ThreadScan {
    /// Lists the threads; `None` if that is not possible, and answered.
    pub(crate) fn begin(threads: &Threads, reply: Reply<Option<ThreadDump>>) -> Option<Self> {
        let Ok(mut tids) = sys::own_threads() else {
            reply.send(None);
            return None;
        };
        // Those in spans first, in case that there is no time for all.
        let sampled = threads.sampled.by_tid();
        let is_in_span =
            |tid: &u32| sampled.get(tid).is_some_and(|it| it.thread().span().is_some());
        tids.sort_by_cached_key(|tid| !is_in_span(tid));
        let (left, found, stacks) = (tids.into(), Vec::new(), StackTree::default());
        Some(Self { left, found, stacks, begun: Instant::now(), reply })
    }

    /// Inspects some threads. Returns whether that was all.
    pub(crate) fn step(&mut self, engine: &Engine, intake: &mut Intake, threads: &Threads) -> bool {
        sys::read_filters();
        let (sampled, until) = (threads.sampled.by_tid(), Instant::now() + STEP);
        let mut inspected: Vec<InspectedThread> = Vec::new();
        while Instant::now() < until
            && let Some(tid) = self.left.pop_front()
        {
            inspected.extend(inspect(intake, sampled.get(&tid).map(|it| it.thread()), tid));
        }
        let in_spans = inspected.iter().filter_map(|found| found.span).collect();
        let open = engine.spans.find_open(&in_spans);
        for found in inspected {
            let (stack, stack_age) = found.stack(intake);
            let InspectedThread { thread, activity, span, .. } = found;
            // As far as they are still open, the outermost first.
            let open = open.iter().find(|open| span == Some(open.key));
            let around = open.and_then(|open| engine.spans.describe(open.id, open.key));
            let around = around.unwrap_or_default().into_iter();
            let spans = around.map(|(key, known)| engine.name_of(known.span(key))).collect();
            let left = MAX_BYTES.saturating_sub(self.stacks.bytes());
            let stored = self.stacks.add_within(stack.into_iter(), left);
            let shown = DumpedThread {
                name: String::new(),
                tid: thread.tid,
                activity,
                blocked_in: None,
                spans,
                stack: [].into(),
                stack_age,
            };
            self.found.push(FoundThread { thread, stack: stored, shown });
        }
        self.left.is_empty() || self.begun.elapsed() >= LONGEST
    }

    pub(crate) fn finish(self, engine: &Engine, intake: &Intake) -> Job {
        let Self { mut found, stacks: tree, reply, left, .. } = self;
        found.sort_by_key(|found| (found.shown.spans.is_empty(), found.thread.tid));
        let stacks = found.iter().map(|found| {
            let entries: Vec<_> = match found.stack {
                Some(stack) => tree.frames(stack).collect(),
                None => vec![StackEntry::StackLeaf(StackLeaf::OtherStacks)],
            };
            (entries.into_iter(), (Some(found.thread), None), vec![(SampleKind::OffCpu, 1)])
        });
        let inputs =
            ProfileInputs::new(&engine.callsites, &intake.sinks.store, &intake.reader.unwinder);
        let unnamed = inputs.profile_of_stacks(ProfileId::NONE, stacks).into();
        let names = |tid: u32| {
            let name = OsThread::of(tid).name();
            format!("`{}` (thread {tid})", escaped(&engine.names.redaction.redact_span(&name)))
        };
        let deadlocks = Deadlock::find_all().iter().map(|it| it.in_words(names)).collect();
        let mut dump = ThreadDump::new(found.into_iter().map(|found| found.shown).collect());
        dump.deadlocks = deadlocks;
        (dump.left_out, dump.awaiting) = (left.len(), engine.awaits.count_pending());
        engine.spans.for_each_open(|slot| {
            dump.idle_spans += usize::from(slot.entered_ns.is_none());
        });
        Job::Reply { unnamed, asked: Asked::Threads(dump, reply) }
    }
}

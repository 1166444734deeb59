//! Where all threads of the process are at one moment.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::leaf::Leaf;
use super::model::Profile;
use super::sample::Sample;
use crate::ids::ProfileId;
use crate::text::escaped;

/// Where all threads of the process are, from `Handle::threads`.
///
/// The [`Display`](fmt::Display) form is a text with all of the dump, in which threads with the same stack share it.
#[derive(Clone, Debug)]
pub struct ThreadDump {
    /// When it was made.
    pub time: SystemTime,
    /// The number of further threads, for which there was no time.
    pub left_out: usize,
    /// The number of `Profiled` futures in open spans that are awaiting. These are no threads:
    /// `Handle::open_spans` has them.
    pub awaiting: usize,
    /// The number of open profiled spans that no thread is in.
    pub idle_spans: usize,
    /// Threads that wait for locks of each other, in words, if there are at most 1,000 threads. Who holds a mutex of glibc
    /// is certain; holders of others are inferred from addresses on stacks, and marked so.
    pub deadlocks: Vec<String>,
    threads: Vec<DumpedThread>,
    /// A point for each thread.
    #[cfg_attr(not(feature = "pprof"), allow(dead_code, reason = "only pprof has samples"))]
    stacks: Box<Profile>,
}

/// A thread of the process, wherever it was created.
#[derive(Clone, Debug)]
pub struct DumpedThread {
    /// The name of the thread for the system, of at most 15 bytes, with control characters escaped.
    pub name: String,
    /// The kernel's id of it.
    pub tid: u32,
    /// What it does.
    pub activity: ThreadActivity,
    /// What it is blocked in: `sleep`, `read`, or `futex 0x7f…` with the address that it waits at. With the locks of `std`
    /// and of pthreads, that is in the lock; parking_lot has one for each thread. Mutexes of glibc also have the thread that
    /// holds them. `None` if it is not blocked, or if the
    /// system does not tell.
    pub blocked_in: Option<String>,
    /// The names of the innermost profiled span that it is in and of those around it, the outermost first.
    pub spans: Vec<String>,
    /// The functions that it is in with their files and lines, the innermost first. A running thread has those of its newest
    /// sample. Empty if they are not known, as those of a running thread that is not sampled.
    pub stack: Arc<[String]>,
    /// How long ago a running thread was in `stack`. `None` for other threads: they are there now.
    pub stack_age: Option<Duration>,
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ThreadActivity {
    /// The thread runs, or waits for a CPU.
    Running,
    /// The thread is blocked in a system call or in a page fault.
    Blocked,
    /// The thread is blocked where no signal can interrupt it: usually it waits for a disk.
    Uninterruptible,
    /// By a signal or a debugger.
    Stopped,
}

impl ThreadActivity {
    const ALL: [Self; 4] = [Self::Blocked, Self::Uninterruptible, Self::Running, Self::Stopped];

    /// In lower case, as in the text and in labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Blocked => "blocked",
            Self::Uninterruptible => "uninterruptible",
            Self::Stopped => "stopped",
        }
    }
}

impl ThreadDump {
    /// Of these threads, now, without names and stacks.
    pub fn new(threads: Vec<DumpedThread>) -> Self {
        let (time, stacks) = (SystemTime::now(), Box::new(Profile::new(ProfileId::NONE, 0)));
        let deadlocks = Vec::new();
        Self { time, left_out: 0, awaiting: 0, idle_spans: 0, deadlocks, threads, stacks }
    }

    /// The threads: those in profiled spans first.
    pub fn threads(&self) -> &[DumpedThread] {
        &self.threads
    }

    /// Adds names and stacks: those of a profile that has a point for each thread.
    pub fn with_stacks(self, stacks: Profile) -> Self {
        let Self { mut threads, .. } = self;
        let (samples, mut in_words) = (by_thread(&stacks), HashMap::new());
        for thread in &mut threads {
            let Some((name, sample)) = samples.get(&thread.tid) else { continue };
            let words = || stacks.calls_in_words(sample.stack).into();
            let stack: &Arc<[String]> = in_words.entry(sample.stack).or_insert_with(words);
            (thread.name, thread.stack) = ((*name).to_owned(), Arc::clone(stack));
            thread.blocked_in =
                stacks.leaf(sample.leaf).and_then(Leaf::blocked_in).map(Cow::into_owned);
        }
        Self { threads, stacks: Box::new(stacks), ..self }
    }

    #[cfg(feature = "pprof")]
    pub(crate) fn stacks(&self) -> &Profile {
        &self.stacks
    }

    /// Each thread with its stack, which is a sample of [`Self::stacks`].
    #[cfg(feature = "pprof")]
    pub(crate) fn samples(&self) -> impl Iterator<Item = (&DumpedThread, &Sample)> {
        let samples = by_thread(&self.stacks);
        self.threads.iter().filter_map(move |thread| Some((thread, samples.get(&thread.tid)?.1)))
    }

    fn by_stack(&self) -> Vec<Vec<&DumpedThread>> {
        let mut groups: Vec<Vec<&DumpedThread>> = Vec::new();
        let mut places: HashMap<&[String], usize> = HashMap::new();
        for thread in &self.threads {
            let place = *places.entry(&thread.stack).or_insert(groups.len());
            match groups.get_mut(place) {
                Some(group) => group.push(thread),
                None => groups.push(vec![thread]),
            }
        }
        groups
    }
}

/// The names of threads and their samples, by the ids of the threads.
fn by_thread(stacks: &Profile) -> HashMap<u32, (&str, &Sample)> {
    let named = stacks.samples().iter().flat_map(|sample| {
        let threads = sample.points.iter().filter_map(|point| stacks.thread(point.thread?));
        threads.map(move |thread| (thread.tid, (&*thread.name, sample)))
    });
    named.collect()
}

impl fmt::Display for ThreadDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = |counts: &[(&str, usize)]| -> Vec<_> {
            let counts = counts.iter().filter(|(_, count)| *count > 0);
            counts.map(|(what, count)| format!("{count} {what}")).collect()
        };
        let count = |activity| self.threads.iter().filter(|it| it.activity == activity).count();
        let counts = ThreadActivity::ALL.map(|activity| (activity.as_str(), count(activity)));
        let left_out = ("left out for lack of time", self.left_out);
        let parts = counted(&[counts.as_slice(), &[left_out]].concat());
        let colon = if parts.is_empty() { "" } else { ": " };
        writeln!(f, "{} threads{colon}{}", self.threads.len() + self.left_out, parts.join(", "))?;
        self.deadlocks.iter().try_for_each(|deadlock| writeln!(f, "{deadlock}"))?;
        for threads in self.by_stack() {
            writeln!(f)?;
            threads.iter().try_for_each(|thread| writeln!(f, "{}", thread.heading()))?;
            threads.first().map_or(Ok(()), |thread| thread.write_stack(f))?;
        }
        // The last line says where else to search.
        let others =
            counted(&[("open spans", self.idle_spans), ("awaiting futures", self.awaiting)]);
        if others.is_empty() {
            return Ok(());
        }
        writeln!(f, "\n{} are in no thread: GET /open lists them", others.join(" and "))
    }
}

impl DumpedThread {
    /// The line above its stack.
    fn heading(&self) -> String {
        let Self { name, tid, activity, blocked_in, spans, stack, stack_age } = self;
        let mut line = format!("`{}`, thread {tid}: {}", escaped(name), activity.as_str());
        match (activity, blocked_in, stack_age) {
            (_, Some(call), _) => line += &format!(" in {}", escaped(call)),
            (_, _, Some(age)) => line += &format!(", {age:.1?} ago in this stack"),
            (ThreadActivity::Running, ..) => line += ", stack not known",
            _ if stack.is_empty() => line += ", the system does not tell in what",
            _ => {}
        }
        if !spans.is_empty() {
            line += &format!(", in the span {}", escaped(&spans.join(" > ")));
        }
        line
    }

    fn write_stack(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stack.iter().try_for_each(|function| writeln!(f, "    {}", escaped(function)))
    }
}

impl fmt::Display for DumpedThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.heading())?;
        self.write_stack(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Point, ProfiledThread, SampleKind, StackId};

    /// Two threads that wait for one lock, two that run, and one of which nothing is known.
    fn five() -> ThreadDump {
        let mut stacks = Profile::new(ProfileId::NONE, 0);
        let function = stacks.add_remark("shop::reserve");
        let stack = stacks.add_stack(vec![function]);
        let lock = stacks.add_leaf(Leaf::Blocked("futex 0x7f01".to_owned()));
        let ran = stacks.add_leaf(Leaf::Ran);
        let runs = stacks.add_leaf(Leaf::Unknown("running: stack not known"));
        let hidden = stacks.add_leaf(Leaf::Unknown("waiting: location unknown"));
        let empty = StackId::EMPTY;
        let places = [(stack, lock), (empty, runs), (stack, lock), (stack, ran), (empty, hidden)];
        let names = ["worker-1", "worker-2", "a\nb", "worker-3", "worker-4"];
        for (tid, (name, place)) in (7..).zip(names.into_iter().zip(places)) {
            let thread = Some(stacks.add_thread(ProfiledThread { name: name.to_owned(), tid }));
            let point = Point { time_unix_ns: 0, weight: 1, thread };
            stacks.add_sample_at(SampleKind::OffCpu, place, None, point);
        }
        let thread = |tid, activity, spans: &[&str]| DumpedThread {
            name: String::new(),
            tid,
            activity,
            blocked_in: None,
            spans: spans.iter().map(|span| (*span).to_owned()).collect(),
            stack: [].into(),
            stack_age: (tid == 10).then_some(Duration::from_micros(12_345)),
        };
        let threads = vec![
            thread(7, ThreadActivity::Blocked, &["request", "query"]),
            thread(8, ThreadActivity::Running, &["request"]),
            thread(9, ThreadActivity::Uninterruptible, &[]),
            thread(10, ThreadActivity::Running, &[]),
            thread(11, ThreadActivity::Blocked, &[]),
        ];
        ThreadDump::new(threads).with_stacks(stacks)
    }

    #[test]
    fn the_text_has_each_thread_and_what_is_no_thread() {
        let mut dump = five();
        let threads = "\n\
            `worker-1`, thread 7: blocked in futex 0x7f01, in the span request > query\n\
            `a\\nb`, thread 9: uninterruptible in futex 0x7f01\n\
            `worker-3`, thread 10: running, 12.3ms ago in this stack\n    shop::reserve\n\n\
            `worker-2`, thread 8: running, stack not known, in the span request\n\
            `worker-4`, thread 11: blocked, the system does not tell in what\n";
        let counts = "2 blocked, 1 uninterruptible, 2 running";
        assert_eq!(dump.to_string(), format!("5 threads: {counts}\n{threads}"));
        (dump.left_out, dump.idle_spans) = (2, 5);
        let counts = format!("7 threads: {counts}, 2 left out for lack of time");
        let rest = "5 open spans are in no thread: GET /open lists them\n";
        assert_eq!(dump.to_string(), format!("{counts}\n{threads}\n{rest}"));
        dump.awaiting = 64;
        let rest =
            "\n\n5 open spans and 64 awaiting futures are in no thread: GET /open lists them\n";
        assert!(dump.to_string().ends_with(rest), "{dump}");
    }
}

//! Where all threads of the process are at one moment.

use std::fmt;
use std::time::SystemTime;

use super::model::Profile;
#[cfg(feature = "pprof")]
use super::sample::Sample;
use crate::text::escaped;

/// Where all threads of the process are, from [`Handle::threads`](crate::Handle::threads).
///
/// Its [`Display`](fmt::Display) form is a text with all of it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ThreadDump {
    /// When it was made.
    pub time: SystemTime,
    /// The number of further threads, for which there was no time.
    pub left_out: usize,
    /// The number of [`Profiled`](crate::Profiled) futures in open spans that are awaiting. These are no threads:
    /// [`Handle::open_spans`](crate::Handle::open_spans) has them.
    pub awaiting: usize,
    /// The number of open profiled spans that no thread is in.
    pub idle_spans: usize,
    threads: Vec<DumpedThread>,
    /// A point for each thread, whose time is the thread's number.
    stacks: Box<Profile>,
}

/// A thread of the process, wherever it was created.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DumpedThread {
    /// Its name for the system, of at most 15 bytes.
    pub name: String,
    /// The kernel's id of it.
    pub tid: u32,
    /// What it does.
    pub activity: ThreadActivity,
    /// What it is blocked in: `sleep`, `read`, `futex 0x7f…` with the address of the lock.
    pub blocked_in: Option<String>,
    /// The names of the innermost profiled span that it is in and of those around it, the outermost first.
    pub spans: Vec<String>,
    /// The functions that it is in with their files and lines, the innermost first. Empty if they are not known, as those
    /// of a running thread.
    pub stack: Vec<String>,
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ThreadActivity {
    /// It runs, or waits for a CPU.
    Running,
    /// It is blocked in a system call or in a page fault.
    Blocked,
    /// The same, where no signal can interrupt it: usually it waits for a disk.
    Uninterruptible,
    /// By a signal or a debugger.
    Stopped,
}

impl ThreadActivity {
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
    /// Of these threads. `stacks` has a point for each, whose time is its number.
    pub(crate) fn new(threads: Vec<DumpedThread>, stacks: Profile) -> Self {
        let (time, stacks) = (SystemTime::now(), Box::new(stacks));
        Self { time, left_out: 0, awaiting: 0, idle_spans: 0, threads, stacks }
    }

    /// The threads: those in profiled spans first.
    pub fn threads(&self) -> &[DumpedThread] {
        &self.threads
    }

    /// The same with the names of functions; `None` if `symbolize` fails.
    pub(crate) fn symbolized(
        self,
        symbolize: impl FnOnce(Box<Profile>) -> Option<Profile>,
    ) -> Option<Self> {
        let Self { time, left_out, awaiting, idle_spans, mut threads, stacks } = self;
        let stacks = Box::new(symbolize(stacks)?);
        for sample in stacks.samples() {
            let (blocked_in, stack) =
                (stacks.blocked_in(sample), stacks.calls_in_words(sample.stack));
            for point in &sample.points {
                if let Some(place) = number(point.time_unix_ns)
                    && let Some(thread) = threads.get_mut(place)
                {
                    thread.stack.clone_from(&stack);
                    if thread.activity != ThreadActivity::Running {
                        thread.blocked_in = blocked_in.map(str::to_owned);
                    }
                }
            }
        }
        Some(Self { time, left_out, awaiting, idle_spans, threads, stacks })
    }

    /// The stacks of all threads.
    #[cfg(feature = "pprof")]
    pub(crate) fn stacks(&self) -> &Profile {
        &self.stacks
    }

    /// Each thread with its stack, which is a sample of [`Self::stacks`].
    #[cfg(feature = "pprof")]
    pub(crate) fn with_stacks(&self) -> impl Iterator<Item = (&DumpedThread, &Sample)> {
        let samples = self.stacks.samples().iter();
        let points =
            samples.flat_map(|sample| sample.points.iter().map(move |point| (point, sample)));
        points.filter_map(move |(point, sample)| {
            Some((self.threads.get(number(point.time_unix_ns)?)?, sample))
        })
    }
}

fn number(time: u64) -> Option<usize> {
    usize::try_from(time).ok()
}

impl fmt::Display for ThreadDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} threads", self.threads.len() + self.left_out)?;
        for thread in &self.threads {
            write!(f, "\n{thread}")?;
        }
        if self.left_out > 0 {
            writeln!(f, "\nthere was no time for {} of them", self.left_out)?;
        }
        // The last line says where else to search.
        match (self.awaiting, self.idle_spans) {
            (0, 0) => Ok(()),
            (0, spans) => writeln!(f, "\n{spans} open spans are in no thread: GET /open"),
            (futures, _) => writeln!(f, "\n{futures} futures are awaiting: GET /open"),
        }
    }
}

impl fmt::Display for DumpedThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, tid, activity, blocked_in, spans, stack } = self;
        write!(f, "`{}`, thread {tid}: {}", escaped(name), activity.as_str())?;
        if let Some(call) = blocked_in {
            write!(f, " in {}", escaped(call))?;
        }
        if !spans.is_empty() {
            write!(f, ", in the span {}", escaped(&spans.join(" > ")))?;
        }
        writeln!(f)?;
        stack.iter().try_for_each(|function| writeln!(f, "    {}", escaped(function)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Leaf, Point, ProfileId, SampleKind, StackId};

    /// Two threads that wait for one lock, and one that runs.
    fn three() -> ThreadDump {
        let mut stacks = Profile::new(ProfileId::NONE, 0);
        let function = stacks.add_remark("shop::reserve");
        let stack = stacks.add_stack(vec![function]);
        let lock = stacks.add_leaf(Leaf::Blocked("futex 0x7f01".to_owned()));
        let runs = stacks.add_leaf(Leaf::Unknown("running: stack not known"));
        for (number, place) in [(0, (stack, lock)), (1, (StackId::EMPTY, runs)), (2, (stack, lock))]
        {
            let point = Point { time_unix_ns: number, weight: 1, thread: None };
            stacks.add_sample_at(SampleKind::OffCpu, place, None, point);
        }
        let thread = |name: &str, tid, activity, spans: &[&str]| DumpedThread {
            name: name.to_owned(),
            tid,
            activity,
            blocked_in: None,
            spans: spans.iter().map(|span| (*span).to_owned()).collect(),
            stack: Vec::new(),
        };
        let threads = vec![
            thread("worker-1", 7, ThreadActivity::Blocked, &["request", "query"]),
            thread("worker-2", 8, ThreadActivity::Running, &["request"]),
            thread("a\nb", 9, ThreadActivity::Uninterruptible, &[]),
        ];
        ThreadDump::new(threads, stacks).symbolized(|stacks| Some(*stacks)).unwrap()
    }

    #[test]
    fn the_text_has_each_thread_and_what_is_no_thread() {
        let mut dump = three();
        let threads = "\n\
            `worker-1`, thread 7: blocked in futex 0x7f01, in the span request > query\n    shop::reserve\n\n\
            `worker-2`, thread 8: running, in the span request\n\n\
            `a\\nb`, thread 9: uninterruptible in futex 0x7f01\n    shop::reserve\n";
        assert_eq!(dump.to_string(), format!("3 threads\n{threads}"));
        (dump.left_out, dump.idle_spans) = (2, 5);
        let rest = "there was no time for 2 of them\n\n5 open spans are in no thread: GET /open\n";
        assert_eq!(dump.to_string(), format!("5 threads\n{threads}\n{rest}"));
        dump.awaiting = 64;
        assert!(dump.to_string().ends_with("\n\n64 futures are awaiting: GET /open\n"));
    }
}

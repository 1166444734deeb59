//! Which threads of the process ran while a thread in a slow span waited for a CPU.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::cpu_times::{CpuTime, CpuTimes};
use crate::stats::Counters;
use crate::sys;

/// The threads are listed and their clocks read this often, or as often as 1 % of the time allows.
const MIN_INTERVAL: Duration = Duration::from_millis(20);
const SHARE: u32 = 100;
/// Without a thread that waits for a CPU for this long, the readings are forgotten.
const QUIET: Duration = Duration::from_secs(3);
/// Of a process with more threads, nothing is known. Their readings take some 800 bytes each.
const MAX_THREADS: usize = 1_024;

/// The CPU times of all threads of the process, while one of them waits for a CPU.
#[derive(Default)]
pub(crate) struct Rivals {
    /// With their names: they may have ended when a span is exported.
    threads: HashMap<u32, (String, CpuTimes)>,
    /// When they were last read, and how long that took.
    read: Option<(Instant, Duration)>,
}

/// Threads whose names differ at most in the digits at their end.
#[derive(Default)]
pub(crate) struct Rival {
    name: String,
    threads: usize,
    pub(crate) on_cpu_ns: u64,
}

impl Rival {
    /// ``6 threads `indexer-*` ``
    pub(crate) fn words(&self, redacted: impl Fn(&str) -> String) -> String {
        let Self { name, threads, .. } = self;
        let common = name.trim_end_matches(|c: char| c.is_ascii_digit());
        match threads {
            1 => format!("the thread `{}`", redacted(name)),
            _ if common == name => format!("{threads} threads `{}`", redacted(name)),
            _ => format!("{threads} threads `{}*`", redacted(common)),
        }
    }
}

impl Rivals {
    /// Reads all clocks, if that is due: `is_starved` if a thread has waited for a CPU since the last call.
    pub(super) fn note(&mut self, is_starved: bool, now_ns: u64, counters: &Counters) {
        let since = self.read.map(|(read, took)| (read.elapsed(), took));
        if !is_starved {
            if since.is_some_and(|(since, _)| since > QUIET) {
                *self = Self::default();
            }
            return;
        }
        if since.is_some_and(|(since, took)| since < MIN_INTERVAL.max(took * SHARE)) {
            return;
        }
        let begun = Instant::now();
        let listed = sys::own_threads().unwrap_or_default();
        Counters::add(&counters.threads.unlisted, u64::from(listed.is_empty()));
        let listed = if listed.len() <= MAX_THREADS { listed } else { Vec::new() };
        let listed: HashSet<u32> = listed.into_iter().collect();
        self.threads.retain(|tid, _| listed.contains(tid));
        for tid in listed {
            if let Some(cpu_ns) = sys::cpu_ns_of(tid) {
                let time = CpuTime { time_ns: now_ns, cpu_ns, sampled_ns: 0 };
                let new = || (sys::OsThread::of(tid).name(), CpuTimes::default());
                self.threads.entry(tid).or_insert_with(new).1.note(time);
            }
        }
        self.read = Some((Instant::now(), begun.elapsed()));
    }

    /// The threads of one name that ran for longest together between two times, without those in `own`.
    pub(crate) fn between(&self, from_ns: u64, to_ns: u64, own: &HashSet<u32>) -> Option<Rival> {
        let mut by_name: HashMap<String, Rival> = HashMap::new();
        let others = self.threads.iter().filter(|(tid, _)| !own.contains(tid));
        for (name, times) in others.map(|(_, thread)| thread) {
            let on_ns = times.between(from_ns, to_ns).on_ns;
            if on_ns > 0 && !name.is_empty() {
                let common = name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
                let all = by_name.entry(common).or_default();
                (all.threads, all.on_cpu_ns) = (all.threads + 1, all.on_cpu_ns + on_ns);
                all.name.clone_from(name);
            }
        }
        by_name.into_values().max_by_key(|rival| rival.on_cpu_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_one_name_are_counted_together() {
        let words = |name: &str, threads| {
            Rival { name: name.to_owned(), threads, on_cpu_ns: 1 }.words(str::to_owned)
        };
        assert_eq!(words("indexer-3", 6), "6 threads `indexer-*`");
        assert_eq!(words("indexer-3", 1), "the thread `indexer-3`");
        assert_eq!(words("tokio-rt-worker", 2), "2 threads `tokio-rt-worker`");
    }

    #[test]
    fn the_one_that_ran_for_longest_is_found_unless_it_has_no_name_or_is_in_the_span() {
        let mut rivals = Rivals::default();
        for (tid, name, ran_ns) in [(1, "indexer", 80), (2, "", 90), (3, "other", 70)] {
            for (time_ns, cpu_ns) in [(0, 0), (100, 5), (200, 5 + ran_ns)] {
                let time = CpuTime { time_ns, cpu_ns, sampled_ns: 0 };
                let new = || (name.to_owned(), CpuTimes::default());
                rivals.threads.entry(tid).or_insert_with(new).1.note(time);
            }
        }
        let found = |own: &[u32]| {
            let found = rivals.between(100, 200, &own.iter().copied().collect());
            found.map(|found| (found.name, found.on_cpu_ns))
        };
        assert_eq!(found(&[]), Some(("indexer".to_owned(), 80)));
        assert_eq!(found(&[1]), Some(("other".to_owned(), 70)));
        assert_eq!(found(&[1, 3]), None);
    }
}

//! What the waits of a profile come to.

use std::collections::HashMap;

use super::model::{FrameKind, Profile, Sample, SampleKind};

/// The waits of a profile, in sum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waits {
    /// How many there are.
    pub count: usize,
    /// How long they were together, in nanoseconds.
    pub total_ns: u64,
    /// The function that waited longest in sum.
    pub longest: Option<Waiter>,
    /// The function that waited longest while an async task was being polled: it kept a thread of the
    /// executor from other tasks. (Inside `spawn_blocking` and `block_in_place` it may.)
    pub in_async: Option<Waiter>,
    /// The time of all such waits, in nanoseconds.
    pub in_async_ns: u64,
}

/// A function that waited.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// Its name: the innermost function that is not of the standard library or a runtime.
    pub function: String,
    /// What for: `[futex 0x7f…]` with the address of the lock, `[sleep]`, `[read]`. Of several, what it
    /// waited for longest.
    pub call: String,
    /// How long in sum, in nanoseconds.
    pub waited_ns: u64,
}

impl Profile {
    /// What the waits come to; names are known after symbolization.
    pub fn waits(&self) -> Waits {
        let mut waits =
            Waits { count: self.wait_count(), total_ns: self.waited_ns(), ..Waits::default() };
        let (mut all, mut in_async) = (Sums::default(), Sums::default());
        for sample in self.of_kind(SampleKind::OffCpu) {
            let waited_ns = sample.points.iter().map(|point| point.weight_ns).sum();
            let (call, functions) = self.call_and_functions(sample);
            let function = waiter(&functions).unwrap_or("an unknown function");
            all.add(function, call, waited_ns);
            if blocks_a_task(&functions) {
                waits.in_async_ns += waited_ns;
                in_async.add(function, call, waited_ns);
            }
        }
        waits.longest = all.longest();
        waits.in_async = in_async.longest();
        waits
    }

    /// What a wait is for, and its functions from the inside out, inlined ones too.
    fn call_and_functions(&self, sample: &Sample) -> (&str, Vec<&str>) {
        let (mut call, mut functions) = ("", Vec::new());
        for location in self.stack(sample.stack).iter().filter_map(|id| self.location(*id)) {
            let names = location.lines.iter().filter_map(|line| self.function(line.function));
            let mut names = names.map(|function| self.string(function.name));
            match location.kind {
                FrameKind::Wait => call = names.next().unwrap_or_default(),
                FrameKind::Remark | FrameKind::Kernel => {}
                FrameKind::Rust | FrameKind::Native => functions.extend(names),
            }
        }
        (call, functions)
    }
}

/// Time by function and call.
#[derive(Default)]
struct Sums<'a>(HashMap<&'a str, HashMap<&'a str, u64>>);

impl<'a> Sums<'a> {
    fn add(&mut self, function: &'a str, call: &'a str, waited_ns: u64) {
        *self.0.entry(function).or_default().entry(call).or_default() += waited_ns;
    }

    fn longest(self) -> Option<Waiter> {
        let longest =
            self.0.into_iter().max_by_key(|(name, calls)| (calls.values().sum::<u64>(), *name));
        let (function, calls) = longest?;
        let waited_ns = calls.values().sum();
        let (call, _) = calls.into_iter().max_by_key(|(call, ns)| (*ns, *call))?;
        Some(Waiter { function: function.to_owned(), call: call.to_owned(), waited_ns })
    }
}

/// Crates whose functions wait on behalf of others.
const PLUMBING: [&str; 18] = [
    "std",
    "core",
    "alloc",
    "parking_lot",
    "parking_lot_core",
    "lock_api",
    "crossbeam",
    "crossbeam_channel",
    "crossbeam_utils",
    "tokio",
    "mio",
    "rustix",
    "libc",
    "nix",
    "futures",
    "futures_util",
    "futures_core",
    "tracing",
];

/// The innermost function that is somebody's own.
fn waiter<'a>(functions: &[&'a str]) -> Option<&'a str> {
    let is_own = |name: &&&str| crate_of(name).is_some_and(|of| !PLUMBING.contains(&of));
    // Without Rust in it: whatever is innermost.
    functions.iter().find(is_own).or_else(|| functions.first()).copied()
}

/// The crate that a Rust function's path begins with: of `<A as B>::f` that is the one of `A`.
fn crate_of(name: &str) -> Option<&str> {
    let name = name.trim_start_matches(['<', '&', '(', '[', '*']);
    let name = name.strip_prefix("mut ").or_else(|| name.strip_prefix("dyn ")).unwrap_or(name);
    let (first, _) = name.split_once("::")?;
    let is_name = first.chars().all(|c| c.is_alphanumeric() || c == '_');
    is_name.then_some(first)
}

/// Whether an executor was polling a task, which had not said that it would block.
fn blocks_a_task(functions: &[&str]) -> bool {
    for name in functions {
        if name.contains("BlockingTask") || name.contains("block_in_place") {
            return false;
        }
        let polls =
            ["Future>::poll", "Future::poll", "task::raw::poll", "poll_future", "async_task::raw"];
        if polls.iter().any(|part| name.contains(part)) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Point, ProfileId};

    fn wait(profile: &mut Profile, call: &str, functions: &[&str], waited_ns: u64) {
        let mut stack = vec![profile.add_wait(call)];
        for (address, name) in (1..).zip(functions) {
            let line = profile.name_alone(name);
            stack.push(profile.add_location(crate::profile::Location {
                mapping: None,
                address,
                kind: FrameKind::Rust,
                lines: vec![line],
                is_inferred: false,
            }));
        }
        let stack = profile.add_stack(stack);
        let point = Point { time_unix_ns: 1, weight_ns: waited_ns };
        profile.add_sample(SampleKind::OffCpu, stack, None, point);
    }

    #[test]
    fn names_the_function_that_waited_longest_and_what_for() {
        let mut profile = Profile::new(ProfileId::for_test(1), 1);
        let lock = ["syscall", "std::sys::futex::futex_wait", "shop::reserve", "shop::main"];
        wait(&mut profile, "[futex 0x10]", &lock, 30);
        wait(&mut profile, "[futex 0x20]", &lock, 40);
        wait(&mut profile, "[sleep]", &["nanosleep", "shop::nap", "shop::main"], 60);
        let waits = profile.waits();
        assert_eq!((waits.count, waits.total_ns), (3, 130));
        let longest = waits.longest.unwrap();
        assert_eq!(longest.function, "shop::reserve");
        assert_eq!((longest.call.as_str(), longest.waited_ns), ("[futex 0x20]", 70));
        assert_eq!((waits.in_async, waits.in_async_ns), (None, 0));
    }

    #[test]
    fn tells_tasks_that_block_from_threads_that_may() {
        let task = [
            "clock_nanosleep",
            "std::thread::sleep",
            "shop::legacy::{{closure}}",
            "<tracing::instrument::Instrumented<T> as core::future::future::Future>::poll",
            "tokio::runtime::task::raw::poll",
        ];
        assert!(blocks_a_task(&task));
        assert_eq!(waiter(&task), Some("shop::legacy::{{closure}}"));
        let pool = [
            "clock_nanosleep",
            "shop::export",
            "<tokio::runtime::blocking::task::BlockingTask<T> as core::future::future::Future>::poll",
            "tokio::runtime::task::raw::poll",
        ];
        assert!(!blocks_a_task(&pool));
        let in_place =
            ["read", "tokio::task::blocking::block_in_place", "tokio::runtime::task::raw::poll"];
        assert!(!blocks_a_task(&in_place));
        let parked =
            ["futex_wait", "tokio::runtime::park::CachedParkThread::block_on", "shop::main"];
        assert!(!blocks_a_task(&parked));
    }

    #[test]
    fn crates_are_read_from_paths() {
        for (name, expected) in [
            ("shop::f", Some("shop")),
            ("<std::net::TcpStream as std::io::Read>::read", Some("std")),
            ("<&mut shop::X as core::fmt::Write>::f", Some("shop")),
            ("nanosleep", None),
        ] {
            assert_eq!(crate_of(name), expected, "{name}");
        }
    }
}

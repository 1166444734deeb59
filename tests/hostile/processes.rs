//! Processes that fork, exec, and abort while they are sampled.

use std::ffi::CString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::ptr;
use std::time::Duration;

use tracing::info_span;

use crate::host::{Host, sampled};
use crate::support::burn;

const MS: Duration = Duration::from_millis(1);

/// The lines of a thread's `status` that survive an exec.
fn inherited() -> Vec<String> {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let inherited = |line: &&str| line.starts_with("SigBlk:") || line.starts_with("SigPnd:");
    status.lines().filter(inherited).map(str::to_owned).collect()
}

/// Fork and exec in a loop, with the standard library and by hand.
pub(crate) fn fork_and_exec(_: &Host) {
    // The child of the fork may not allocate, so everything it needs is made here. The shell that it executes checks
    // that it inherits the blocked signals of this thread and no others.
    let lines = inherited();
    let is_as_before = |line: &String| format!("grep -qx '{line}' /proc/self/status");
    let script: Vec<_> = lines.iter().map(is_as_before).collect();
    let arguments = ["/bin/sh", "-c", &script.join(" && ")].map(|text| CString::new(text).unwrap());
    let pointers: Vec<_> = arguments.iter().map(|a| a.as_ptr()).chain([ptr::null()]).collect();
    for _ in 0..40 {
        let _span = info_span!("fork and exec").entered();
        burn(MS);
        assert!(Command::new("/bin/true").status().unwrap().success());
        burn(MS);
        // SAFETY: the child calls nothing but `execv` and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the strings and the array are null-terminated, and live until the exec.
            unsafe {
                libc::execv(pointers[0], pointers.as_ptr());
                libc::_exit(127);
            }
        }
        assert_eq!(wait_for(child), 0, "{lines:?}");
    }
}

/// Fork without exec: the child continues to use spans, without the layer's threads.
pub(crate) fn fork(host: &Host) {
    fork_with(host, false);
}

/// The same with threads in the child. No other thread of the parent may start or end at the same time: it could hold a
/// lock of the registry, and the child would wait for that forever.
pub(crate) fn fork_and_spawn(host: &Host) {
    fork_with(host, true);
}

fn fork_with(_: &Host, spawn: bool) {
    if cfg!(tracing_profiling_unsupported) {
        println!("skipped: the stubs do not disable the layer in the child of a fork");
        return;
    }
    // Callsites register behind a lock of `tracing`, so they do that before the fork.
    let use_spans = || {
        for _ in 0..20 {
            info_span!("in a process").in_scope(|| burn(Duration::from_micros(500)));
        }
    };
    use_spans();
    for _ in 0..40 {
        let _span = info_span!("fork").entered();
        burn(MS);
        // SAFETY: the child runs only code of this test and ends with `_exit`. That code takes no lock that another
        // thread of the parent could hold, except the allocator's, which glibc handles.
        let child = unsafe { libc::fork() };
        if child == 0 {
            use_spans();
            let ended = !spawn || std::thread::spawn(use_spans).join().is_ok();
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(!ended)) };
        }
        assert_eq!(wait_for(child), 0);
    }
}

/// Returns the wait status of a child. The assertion covers that `waitpid` is not interrupted.
fn wait_for(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: `child` is our child, and `status` a local variable.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child, "{}", std::io::Error::last_os_error());
    status
}

/// A process that executes itself repeatedly while its threads are sampled. A signal that is pending at that moment
/// must not reach the new program, which has no handler for it.
pub(crate) fn exec_in_place() {
    const ROUNDS: &str = "ROUNDS_LEFT";
    let left = std::env::var(ROUNDS).map_or(20, |left| left.parse::<u32>().unwrap());
    sampled(|_| {
        if left > 0 {
            let _span = info_span!("exec").entered();
            burn(20 * MS);
            let error = Command::new(std::env::current_exe().unwrap())
                .args(std::env::args_os().skip(1))
                .env(ROUNDS, (left - 1).to_string())
                .exec();
            panic!("{error}");
        }
    });
}

/// Never returns.
pub(crate) fn abort_in_the_panic_hook() {
    // Leave no core file behind.
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).unwrap();
    std::panic::set_hook(Box::new(|_| std::process::abort()));
    sampled(|host| {
        info_span!("kept").in_scope(|| burn(20 * MS));
        host.setup.flush();
        assert!(host.setup.handle.stats().spans.kept > 0);
        info_span!("panics").in_scope(|| panic!("on purpose"));
    });
}

//! Processes that are made, become others, and end, while they are sampled.

use std::ffi::CString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::ptr;
use std::time::Duration;

use tracing::info_span;

use crate::host::{Host, sampled};
use crate::support::burn;

const MS: Duration = Duration::from_millis(1);

/// The lines of a thread's `status` that a program inherits when it is executed.
fn inherited() -> Vec<String> {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let inherited = |line: &&str| line.starts_with("SigBlk:") || line.starts_with("SigPnd:");
    status.lines().filter(inherited).map(str::to_owned).collect()
}

/// Fork and exec in a loop, by the standard library and by hand.
pub(crate) fn fork_and_exec(_: &Host) {
    // The child of the fork may not allocate, so all that it needs is made here. It becomes a
    // program that finds what this one blocks to be blocked, and no more.
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
            // SAFETY: strings and an array that end with a null, and live until the exec.
            unsafe {
                libc::execv(pointers[0], pointers.as_ptr());
                libc::_exit(127);
            }
        }
        assert_eq!(wait_for(child), 0, "{lines:?}");
    }
}

/// Fork without exec: the child goes on with spans of a layer that is not there any more.
pub(crate) fn fork(host: &Host) {
    fork_with(host, false);
}

/// The same with threads in the child. Only where no other thread of the parent starts or ends
/// meanwhile: it could hold a lock of the registry's, which the child then waits for for ever.
pub(crate) fn fork_and_spawn(host: &Host) {
    fork_with(host, true);
}

fn fork_with(_: &Host, spawn: bool) {
    if cfg!(tracing_profiling_unsupported) {
        println!("skipped: the stubs do not shut the layer in the child of a fork");
        return;
    }
    // Callsites register themselves behind a lock of `tracing`: before the fork, then.
    let use_spans = || {
        for _ in 0..20 {
            info_span!("in a process").in_scope(|| burn(Duration::from_micros(500)));
        }
    };
    use_spans();
    for _ in 0..40 {
        let _span = info_span!("fork").entered();
        burn(MS);
        // SAFETY: the child runs code of this test only, which touches no lock that another thread
        // of the parent could hold but the allocator's, which glibc handles, and ends with `_exit`.
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

/// The status of a child that ended. That this is not interrupted is part of what is tested.
fn wait_for(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: waits for our own child; the pointer is to our own integer.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child, "{}", std::io::Error::last_os_error());
    status
}

/// A process that becomes itself again and again while its threads are sampled. A signal that is
/// on its way at that moment must not reach the new program, which has no handler for it.
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
    // No file for the developer to find.
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

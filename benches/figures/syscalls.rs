//! System calls in a segment without a sample or a context switch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use tracing::{dispatcher, info_span};

use crate::measure::{Setup, figure};

/// Runs under a filter that refuses all system calls of the measuring thread: each raises a signal that is counted.
/// The layer samples once per second, so that hardly any sample falls.
pub(crate) fn child() {
    const SEGMENTS: u64 = 200_000;
    let trapped = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(libc::SIGSYS, Arc::clone(&trapped)).expect("a handler");
    let setup = Setup::new("10s|error", |builder| builder.rate(1));
    let segments_with_calls = Arc::new(AtomicU64::new(u64::MAX));
    let result = Arc::clone(&segments_with_calls);
    let measure = move || {
        dispatcher::with_default(&setup.dispatch, || {
            let span = info_span!("hot");
            // Attaches the thread.
            span.in_scope(|| ());
            deny_everything();
            let mut with_calls = 0;
            for _ in 0..SEGMENTS {
                span.in_scope(|| ());
                with_calls += u64::from(trapped.swap(false, Ordering::SeqCst));
            }
            result.store(with_calls, Ordering::SeqCst);
            // This thread cannot exit, which would be a system call.
            loop {
                std::hint::spin_loop();
            }
        })
    };
    std::thread::spawn(measure);
    while segments_with_calls.load(Ordering::SeqCst) == u64::MAX {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let with_calls = segments_with_calls.load(Ordering::SeqCst);
    figure("hot.enter_exit.syscalls", with_calls as f64 / SEGMENTS as f64, "count");
    std::process::exit(0);
}

fn deny_everything() {
    let allowed = BTreeMap::from([(libc::SYS_rt_sigreturn, Vec::new())]);
    let architecture = std::env::consts::ARCH.try_into().expect("a supported architecture");
    let filter =
        SeccompFilter::new(allowed, SeccompAction::Trap, SeccompAction::Allow, architecture);
    let program: BpfProgram = filter.expect("a filter").try_into().expect("a program");
    apply_filter(&program).expect("the kernel accepts the filter");
}

//! Threads with small stacks live, also where they hit a callsite first. Each case has a process
//! of its own.

#![cfg(all(target_os = "linux", not(tracing_profiling_unsupported)))]
#![allow(clippy::unwrap_used, unsafe_code, reason = "a test")]

use std::process::Command;

use tracing::level_filters::LevelFilter;
use tracing_profiling::export::Memory;
use tracing_profiling::{ProfilingLayer, Source};
use tracing_subscriber::prelude::*;

extern "C" fn run(_: *mut libc::c_void) -> *mut libc::c_void {
    let _span = tracing::info_span!("small", http.route = "/cart", user = 7).entered();
    std::ptr::null_mut()
}

extern "C" fn run_attribute(_: *mut libc::c_void) -> *mut libc::c_void {
    // As `#[profiled(threshold = "7ns", on_error)]` writes it.
    let _span =
        tracing::info_span!("small", "tracing_profiling threshold_ns=7 on_error" = 0).entered();
    std::ptr::null_mut()
}

fn join(run: extern "C" fn(*mut libc::c_void) -> *mut libc::c_void) {
    // SAFETY: the attributes are initialized, and the thread is joined.
    unsafe {
        let (mut attributes, mut thread) = (std::mem::zeroed(), std::mem::zeroed());
        assert_eq!(libc::pthread_attr_init(&raw mut attributes), 0);
        let bytes = std::env::var("SMALL_STACK_KIB")
            .map_or(libc::PTHREAD_STACK_MIN, |kib| kib.parse::<usize>().unwrap() << 10);
        assert_eq!(libc::pthread_attr_setstacksize(&raw mut attributes, bytes), 0);
        let argument = std::ptr::null_mut();
        assert_eq!(libc::pthread_create(&raw mut thread, &raw const attributes, run, argument), 0);
        assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
    }
}

#[test]
fn a_thread_with_a_small_stack_hits_a_callsite_first() {
    const TEST: &str = "a_thread_with_a_small_stack_hits_a_callsite_first";
    if let Ok(case) = std::env::var("CHILD") {
        let lines = tracing_subscriber::fmt::layer().with_writer(std::io::sink);
        let Some((rules, other)) = case.split_once(' ') else {
            // Without this layer.
            tracing_subscriber::registry().with(lines).init();
            join(run);
            join(run_attribute);
            return;
        };
        let builder = ProfilingLayer::builder().rules(rules.parse().unwrap()).source(Source::None);
        let layer = builder.exporter(Memory::new()).build().unwrap();
        let handle = layer.handle();
        let lines = lines.with_filter(other.parse::<LevelFilter>().unwrap());
        tracing_subscriber::registry().with(lines).with(layer).init();
        join(run);
        join(run_attribute);
        assert_eq!(handle.stats().spans.seen, if other == "info" { 2 } else { 1 });
        return;
    }
    // Without optimization, frames are larger: 16 suffice until a span closes that is judged, which takes 7 KiB.
    let kib = if cfg!(debug_assertions) { "24" } else { "16" };
    let rules = "250ms,[{user=7}]=1s|error info";
    for case in ["none", "250ms|error info", "250ms|error warn", rules, "p99 info"] {
        let test = std::env::current_exe().unwrap();
        let output = Command::new(test)
            .args(["--exact", TEST])
            .env("CHILD", case)
            .env("SMALL_STACK_KIB", kib)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{case}: {}\n{text}", output.status);
    }
}

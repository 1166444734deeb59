//! The memory that a million open spans leave in use.

use std::fs;

use tracing::{Dispatch, Span, info_span};
use tracing_profiling::Source;
use tracing_profiling::export::Memory;

use super::{Host, MS, in_child};

const SPANS: usize = 1_000_000;

fn resident_bytes() -> usize {
    let text = fs::read_to_string("/proc/self/statm").unwrap();
    4096 * text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
}

/// By how many bytes the process has grown after a million spans were open at once, and while they were open.
fn left_by_many_spans(dispatch: &Dispatch) -> (usize, usize) {
    tracing::dispatcher::with_default(dispatch, || {
        info_span!("first").in_scope(|| {});
        let before = resident_bytes();
        let mut spans: Vec<Span> = Vec::with_capacity(SPANS);
        spans.extend((0..SPANS).map(|_| info_span!("one of many")));
        let open = resident_bytes() - before;
        drop(spans);
        std::thread::sleep(100 * MS);
        (resident_bytes().saturating_sub(before), open)
    })
}

#[test]
fn a_million_open_spans_leave_little_behind() {
    in_child(module_path!(), "a_million_open_spans_leave_little_behind", &[], || {
        let (mut bare, mut profiled) = (0, 0);
        let dir = tempfile::tempdir().unwrap();
        for (name, left) in [("bare", &mut bare), ("profiled", &mut profiled)] {
            let file = dir.path().join(name);
            super::alone(|| {
                let host = (name == "profiled").then(|| {
                    Host::with(Source::None, Memory::new(), |builder| {
                        builder.rules("1h".parse().unwrap())
                    })
                });
                let registry = || Dispatch::new(tracing_subscriber::registry());
                let dispatch = host.as_ref().map_or_else(registry, |host| host.dispatch.clone());
                let (left, open) = left_by_many_spans(&dispatch);
                println!("{name}: {} KiB open, {} KiB left", open >> 10, left >> 10);
                fs::write(&file, left.to_string()).unwrap();
            });
            *left = fs::read_to_string(&file).unwrap().parse().unwrap();
        }
        const ALLOWED: usize = 32 << 20;
        assert!(
            profiled < bare + ALLOWED,
            "{} MiB, including {} MiB of the registry",
            profiled >> 20,
            bare >> 20
        );
    });
}

/// Made by a program rather than written in it.
const LONG_NAME: &str = match std::str::from_utf8(&[b'x'; 200_000]) {
    Ok(name) => name,
    Err(_) => "",
};

#[test]
fn a_long_name_of_a_span_is_cut_wherever_it_is_shown() {
    in_child(module_path!(), "a_long_name_of_a_span_is_cut_wherever_it_is_shown", &[], || {
        let memory = Memory::new();
        let host = Host::new(Source::Auto, memory.clone());
        tracing::dispatcher::with_default(&host.dispatch, || {
            let _span = info_span!(LONG_NAME).entered();
            _ = crate::support::burn(30 * MS);
        });
        host.handle.flush(crate::support::PLENTY).unwrap();
        let lines = host.lines_with("xxxx");
        // The line, and the event at DEBUG.
        let lengths: Vec<_> = lines.iter().map(String::len).collect();
        assert!(lengths.len() == 2 && lengths.iter().all(|length| *length < 8_000), "{lengths:?}");
        for profile in memory.profiles() {
            assert!(format!("{profile:?}").len() < 200_000, "the profile has the whole name");
        }
    });
}

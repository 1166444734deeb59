//! The `/proc` files about threads: where they are blocked, and which seccomp filters they have.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    tracing_profiling::fuzzing::proc_texts(text);
});

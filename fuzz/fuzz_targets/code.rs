//! Machine code of arbitrary bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tracing_profiling::fuzzing::code(bytes);
});

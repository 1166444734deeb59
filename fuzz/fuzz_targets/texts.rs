//! Texts of the kernel's, and names of the linker's, with every byte made up.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tracing_profiling::fuzzing::texts(bytes);
});

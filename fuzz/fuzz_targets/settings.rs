//! Rules, patterns, and the environment variables that hold them and others.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    tracing_profiling::fuzzing::rules_and_patterns(text);
    tracing_profiling::fuzzing::environment(text);
});

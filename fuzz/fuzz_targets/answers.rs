//! Responses of an OTLP receiver, by HTTP and by gRPC.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tracing_profiling::fuzzing::answers(bytes);
});

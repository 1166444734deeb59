//! What a receiver of OTLP answers, by HTTP and by gRPC.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tracing_profiling::fuzzing::answers(bytes);
});

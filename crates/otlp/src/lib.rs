//! Sends profiles to an OpenTelemetry Collector or another receiver of OTLP Profiles, over gRPC or HTTP.
//! `tracing-profiling` re-exports this crate under its features `otlp-grpc`, `otlp-http` and `otlp-tls-*`.

#![forbid(unsafe_code)]

mod answer;
mod builder;
mod exporter;
#[cfg(all(fuzzing, feature = "grpc", feature = "http"))]
mod fuzzing;
#[cfg(feature = "grpc")]
mod grpc;
#[cfg(feature = "http")]
mod http;
mod protocol;
mod settings;
#[cfg(feature = "tls")]
mod tls;
mod transport;

pub use builder::OtlpBuilder;
pub use exporter::OtlpExporter;
#[cfg(all(fuzzing, feature = "grpc", feature = "http"))]
pub use fuzzing::fuzz_answers;
pub use settings::{Compression, Protocol};

//! Profiles over the network: OTLP over gRPC or HTTP.

mod exporter;
#[cfg(all(fuzzing, feature = "otlp-grpc", feature = "otlp-http"))]
mod fuzzing;
#[cfg(feature = "otlp-grpc")]
mod grpc;
#[cfg(feature = "otlp-http")]
mod http;
mod protocol;
mod settings;
#[cfg(feature = "otlp-tls")]
mod tls;
mod transport;

pub use exporter::OtlpExporter;
#[cfg(all(fuzzing, feature = "otlp-grpc", feature = "otlp-http"))]
pub use fuzzing::fuzz_answers;
pub(crate) use settings::has_endpoint;
pub use settings::{Compression, OtlpBuilder, Protocol};

/// The `user-agent` of requests.
const USER_AGENT: &str = concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION"));

//! Profiles over the network: OTLP by gRPC or HTTP.

mod exporter;
#[cfg(feature = "otlp-grpc")]
mod grpc;
#[cfg(feature = "otlp-http")]
mod http;
mod queue;
mod sender;
mod settings;
#[cfg(feature = "otlp-tls")]
mod tls;
mod transport;

pub use exporter::OtlpExporter;
pub(crate) use settings::has_endpoint;
pub use settings::{Compression, OtlpBuilder, Protocol};

/// What servers are told that we are.
const USER_AGENT: &str = concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION"));

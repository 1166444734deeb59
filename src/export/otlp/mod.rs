//! Profiles over the network: OTLP over gRPC or HTTP.

mod exporter;
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
pub(crate) use settings::has_endpoint;
pub use settings::{Compression, OtlpBuilder, Protocol};

/// Fuzzes the answers of servers: the first byte is the status, the second the length of the header.
#[cfg(all(fuzzing, feature = "otlp-grpc", feature = "otlp-http"))]
pub fn fuzz_answers(bytes: &[u8]) {
    let [status, length, rest @ ..] = bytes else { return };
    let (header, body) = rest.split_at(usize::from(*length).min(rest.len()));
    http::fuzz(*status, header, body);
    grpc::fuzz(*status, header, body);
}

/// The `user-agent` of requests.
const USER_AGENT: &str = concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION"));

//! Exporters.

#[cfg(feature = "_otlp")]
#[doc(inline)]
pub use tracing_profiling_otlp::{Compression, OtlpBuilder, OtlpExporter, Protocol};
#[doc(inline)]
pub use tracing_profiling_profile::export::*;

//! What a profile of spans is: its model, what it says, the formats it is written in, and where it goes.

#![forbid(unsafe_code)]

mod breakdown;
pub mod compare;
pub mod encode;
pub mod export;
pub mod facts;
pub mod ids;
#[cfg(feature = "opentelemetry-sdk")]
mod otel;
pub mod profile;
pub mod redact;
#[cfg(any(test, feature = "_test"))]
mod testing;
#[doc(hidden)]
pub mod text;

//! The ids of traces, spans and profiles.

use std::fmt;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash};
use std::str::FromStr;

/// The error for a malformed id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {digits} hexadecimal digits")]
pub struct InvalidId {
    digits: usize,
}

/// A hash that is the same in all of a process.
pub fn hash_of(value: impl Hash) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(value)
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $bytes:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name([u8; $bytes]);

        impl $name {
            /// Creates an id from its bytes, most significant first.
            pub const fn from_bytes(bytes: [u8; $bytes]) -> Self {
                Self(bytes)
            }

            /// The bytes of the id, most significant first.
            pub const fn to_bytes(self) -> [u8; $bytes] {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            /// Parses the format that [`Display`](fmt::Display) prints.
            ///
            /// # Errors
            ///
            /// If the text does not consist of exactly as many hexadecimal digits as the id has.
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let is_whole = text.len() == 2 * $bytes;
                let is_hex = is_whole && text.bytes().all(|digit| digit.is_ascii_hexdigit());
                let number = u128::from_str_radix(text, 16).ok().filter(|_| is_hex);
                let number = number.ok_or(InvalidId { digits: 2 * $bytes })?;
                let mut bytes = [0; $bytes];
                bytes.copy_from_slice(&number.to_be_bytes()[16 - $bytes..]);
                Ok(Self(bytes))
            }
        }
    };
}

id! {
    /// The id of a trace: 16 bytes, printed as 32 hexadecimal digits.
    TraceId, 16
}

id! {
    /// The id of an exported span: 8 bytes, printed as 16 hexadecimal digits.
    SpanId, 8
}

id! {
    /// The id of a profile, which is also the attribute `profile.id` of its spans: 16 bytes, printed as 32 hexadecimal
    /// digits. The ids of a layer's profiles are random and not zero.
    ProfileId, 16
}

impl ProfileId {
    /// The id of a profile that is not exported.
    pub const NONE: Self = Self([0; 16]);

    /// A random id.
    ///
    /// # Errors
    ///
    /// If the system returns no random bytes.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        bytes[0] |= u8::from(bytes == [0; 16]);
        Ok(Self(bytes))
    }

    /// Another id, with these of its last bits inverted.
    pub(crate) fn inverted(self, bits: u8) -> Self {
        let mut bytes = self.0;
        bytes[15] ^= bits;
        // For the only id that would become 0.
        bytes[14] ^= u8::from(bytes == [0; 16]);
        Self(bytes)
    }
}

macro_rules! convert {
    ($($name:ident)+) => {
        $(
            #[cfg(feature = "opentelemetry")]
            impl From<opentelemetry::$name> for $name {
                fn from(id: opentelemetry::$name) -> Self {
                    Self::from_bytes(id.to_bytes())
                }
            }

            #[cfg(feature = "opentelemetry")]
            impl From<$name> for opentelemetry::$name {
                fn from(id: $name) -> Self {
                    Self::from_bytes(id.to_bytes())
                }
            }
        )+
    };
}

convert! { TraceId SpanId }

/// The ids under which OpenTelemetry exports a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceIds {
    /// The id of its trace.
    pub trace: TraceId,
    /// The id of the span.
    pub span: SpanId,
    /// Whether the trace is exported at all.
    pub is_sampled: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip() {
        let trace = TraceId::from_bytes(std::array::from_fn(|n| n as u8 * 17));
        assert_eq!(trace.to_string(), "00112233445566778899aabbccddeeff");
        assert_eq!(trace.to_string().parse::<TraceId>().unwrap(), trace);
        let span = SpanId::from_bytes([0xab; 8]);
        assert_eq!(format!("{span:?}"), "SpanId(abababababababab)");
        assert_eq!("ABABABABABABABAB".parse::<SpanId>().unwrap(), span);
    }

    #[test]
    fn two_random_ids_differ() {
        assert_ne!(ProfileId::random().unwrap(), ProfileId::random().unwrap());
    }

    #[test]
    fn a_malformed_id_is_an_error_that_states_the_format() {
        for text in [
            "",
            "ab",
            "abababababababag",
            "ababababababababab",
            "+babababababababa",
            "äbababababababa",
        ] {
            let error = text.parse::<SpanId>().unwrap_err();
            assert!(error.to_string().contains("16 hexadecimal digits"), "{error}");
        }
    }
}

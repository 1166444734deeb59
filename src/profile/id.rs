//! The identity of a profile.

use std::fmt;

/// What a span's `profile.id` attribute and the profile itself carry: 16 bytes, not all 0,
/// written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProfileId([u8; 16]);

impl ProfileId {
    /// A random id.
    ///
    /// # Errors
    ///
    /// If the system gives no random bytes.
    pub(crate) fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)?;
        bytes[0] |= u8::from(bytes == [0; 16]);
        Ok(Self(bytes))
    }

    /// The id of the off-CPU part where a format has one profile for each kind of sample: OTLP. There
    /// the last bit is turned, unless the profile has nothing but that part.
    #[must_use]
    pub fn of_off_cpu(self) -> Self {
        let mut bytes = self.0;
        bytes[15] ^= 1;
        // Of the one id that would become 0.
        bytes[14] ^= u8::from(bytes == [0; 16]);
        Self(bytes)
    }

    /// The bytes as they are exported.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    #[cfg(test)]
    pub(crate) const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    #[cfg(test)]
    pub(crate) const fn for_test(byte: u8) -> Self {
        Self([byte; 16])
    }
}

impl fmt::Display for ProfileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ProfileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProfileId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_as_thirty_two_digits() {
        assert_eq!(ProfileId([10; 16]).to_string(), "0a".repeat(16));
    }

    #[test]
    fn two_random_ids_differ() {
        assert_ne!(ProfileId::random().unwrap(), ProfileId::random().unwrap());
    }
}

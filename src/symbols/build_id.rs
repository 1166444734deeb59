//! Build ids of object files.

use std::fs::File;
use std::io;
#[cfg(feature = "otlp")]
use std::io::{Read, Seek, SeekFrom};

#[cfg(feature = "otlp")]
use sha2::{Digest, Sha256};

/// Only OTLP needs it.
#[cfg(not(feature = "otlp"))]
#[expect(clippy::unnecessary_wraps, reason = "as with OTLP")]
pub(super) fn hash(_: &File) -> io::Result<Option<String>> {
    Ok(None)
}

/// The hash that OpenTelemetry's conventions call `htlhash`: the first 16 bytes of the SHA-256 of a file's first 4096
/// bytes, its last 4096 bytes, and its length (8 bytes, big-endian), in hexadecimal. A file shorter than 4096 bytes is
/// hashed completely both times.
///
/// <https://opentelemetry.io/docs/specs/semconv/registry/attributes/process/>
#[cfg(feature = "otlp")]
pub(super) fn hash(mut file: &File) -> io::Result<Option<String>> {
    const PART: u64 = 4096;
    let length = file.metadata()?.len();
    let mut hash = Sha256::new();
    let mut part = Vec::with_capacity(PART as usize);
    Read::by_ref(&mut file).take(PART).read_to_end(&mut part)?;
    hash.update(&part);
    file.seek(SeekFrom::Start(length.saturating_sub(PART)))?;
    part.clear();
    Read::by_ref(&mut file).take(PART).read_to_end(&mut part)?;
    hash.update(&part);
    hash.update(length.to_be_bytes());
    let digest = hash.finalize();
    Ok(Some(hex(digest.get(..16).unwrap_or_default())))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(feature = "otlp")]
#[cfg(test)]
mod tests {
    use super::*;

    fn hash_of(bytes: &[u8]) -> String {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, bytes).unwrap();
        file.rewind().unwrap();
        hash(&file).unwrap().unwrap()
    }

    fn by_definition(first: &[u8], last: &[u8], length: u64) -> String {
        let all = [first, last, &length.to_be_bytes()].concat();
        hex(&Sha256::digest(all)[..16])
    }

    #[test]
    fn hashes_beginning_end_and_length() {
        let bytes: Vec<u8> = (0..10_000_u32).map(|i| i as u8).collect();
        assert_eq!(hash_of(&bytes), by_definition(&bytes[..4096], &bytes[10_000 - 4096..], 10_000));
    }

    #[test]
    fn a_short_file_is_hashed_completely_both_times() {
        assert_eq!(hash_of(b"abc"), by_definition(b"abc", b"abc", 3));
        assert_eq!(hash_of(b"abc").len(), 32);
    }
}

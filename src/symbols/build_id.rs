//! Build ids of object files.

use std::fs::File;
use std::io;
#[cfg(feature = "otlp")]
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

#[cfg(feature = "otlp")]
use sha2::{Digest, Sha256};

use super::sections::build_id_of;
use crate::unwind::Module;

/// Checks that the file can be read. Only OTLP needs its [`htlhash`].
#[cfg(not(feature = "otlp"))]
pub(super) fn hash(path: &Path) -> io::Result<Option<String>> {
    File::open(path).map(|_| None)
}

#[cfg(feature = "otlp")]
pub(super) fn hash(path: &Path) -> io::Result<Option<String>> {
    htlhash(path).map(Some)
}

/// The hash that OpenTelemetry's conventions call `htlhash`: the first 16 bytes of the SHA-256 of a file's first 4096
/// bytes, its last 4096 bytes, and its length (8 bytes, big-endian), in hexadecimal. A file shorter than 4096 bytes is
/// hashed completely both times.
///
/// <https://opentelemetry.io/docs/specs/semconv/registry/attributes/process/>
#[cfg(feature = "otlp")]
fn htlhash(path: &Path) -> io::Result<String> {
    const PART: u64 = 4096;
    let mut file = File::open(path)?;
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
    Ok(hex(digest.get(..16).unwrap_or_default()))
}

/// Whether the file is still the one that was loaded. Without a build id this is unknown and assumed. The path of the
/// executable always leads to the right file.
pub(super) fn is_loaded_file(module: &Module) -> bool {
    match &module.build_id {
        Some(id) if !module.is_program() => {
            let on_disk = File::open(module.path()).and_then(|file| build_id_of(&file));
            on_disk.is_ok_and(|found| found.as_ref() == Some(id))
        }
        _ => true,
    }
}

/// Two digits per byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(feature = "otlp")]
#[cfg(test)]
mod tests {
    use super::*;

    fn hash_of(bytes: &[u8]) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        htlhash(file.path()).unwrap()
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

    #[test]
    fn a_missing_file_is_an_error() {
        assert!(htlhash(Path::new("/nowhere/at/all")).is_err());
    }
}

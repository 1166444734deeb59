//! The symbols that distributions leave in stripped files (Fedora, RHEL and theirs in all): the section `.gnu_debugdata`
//! is an ELF file, compressed with xz, whose symbol table has the functions that `.dynsym` lacks.
//!
//! <https://sourceware.org/gdb/current/onlinedocs/gdb.html/MiniDebugInfo.html>

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;

use lzma_rust2::XzReader;

use super::sections::{ReadAt, Sections};
use crate::sys;

/// Decompresses that part of a file to a file in memory. It and its decompression take at most `most_bytes` each.
/// Returns its length, too.
pub(super) fn extract(file: &File, part: &Range<u64>, most_bytes: u64) -> io::Result<(File, u64)> {
    let length = part.end - part.start;
    if length > most_bytes {
        return Err(too_large(most_bytes));
    }
    let compressed = file.read(part.start, length)?;
    let mut to = sys::memory_file()?;
    let bytes = decompress(&compressed, &mut to, most_bytes)?;
    if Sections::of(&to)?.sizes.symbols == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it has no symbol table"));
    }
    Ok((to, bytes))
}

/// Decompresses at most `most_bytes`, and returns how many they are.
pub(super) fn decompress(xz: &[u8], to: &mut impl Write, most_bytes: u64) -> io::Result<u64> {
    // The file states how much memory it takes. An allocation that fails would end the process.
    let most_kib = u32::try_from(most_bytes >> 10).unwrap_or(u32::MAX).min(MAX_KIB);
    let mut reader =
        XzReader::new_mem_limit(xz, false, most_kib).take(most_bytes.saturating_add(1));
    let bytes = io::copy(&mut reader, to).map_err(|error| match error.kind() {
        io::ErrorKind::OutOfMemory => too_large(most_bytes),
        _ => error,
    })?;
    if bytes > most_bytes {
        return Err(too_large(most_bytes));
    }
    Ok(bytes)
}

/// What `xz -9` takes, rounded up.
const MAX_KIB: u32 = 80 << 10;

fn too_large(most_bytes: u64) -> io::Error {
    let left = most_bytes >> 20;
    let text = format!("it takes more than the {left} MiB that TRACING_PROFILING_MEMORY leaves");
    io::Error::new(io::ErrorKind::FileTooLarge, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "symbols\n" by `xz`.
    const XZ: &[u8] = &[
        0xfd, 0x37, 0x7a, 0x58, 0x5a, 0x00, 0x00, 0x04, 0xe6, 0xd6, 0xb4, 0x46, 0x02, 0x00, 0x21,
        0x01, 0x10, 0x00, 0x00, 0x00, 0xa8, 0x70, 0x8e, 0x86, 0x01, 0x00, 0x07, 0x73, 0x79, 0x6d,
        0x62, 0x6f, 0x6c, 0x73, 0x0a, 0x00, 0x01, 0x59, 0x77, 0x0b, 0xc9, 0x79, 0x8a, 0x7a, 0x00,
        0x01, 0x20, 0x08, 0xbb, 0x19, 0xd9, 0xbb, 0x1f, 0xb6, 0xf3, 0x7d, 0x01, 0x00, 0x00, 0x00,
        0x00, 0x04, 0x59, 0x5a,
    ];

    #[test]
    fn the_memory_of_the_decompression_is_limited() {
        let mut content = Vec::new();
        assert_eq!(decompress(XZ, &mut content, 2 << 20).unwrap(), 8);
        assert_eq!(content, b"symbols\n");
        // It states that it takes 1 MiB.
        let error = decompress(XZ, &mut io::sink(), 1 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }

    proptest::proptest! {
        #[test]
        fn damaged_bytes_are_an_error_or_read_without_harm(
            changes in proptest::collection::vec((0..XZ.len(), proptest::num::u8::ANY), 1..8)
        ) {
            let mut bytes = XZ.to_vec();
            changes.into_iter().for_each(|(at, byte)| bytes[at] = byte);
            _ = decompress(&bytes, &mut io::sink(), 1 << 24);
        }
    }
}

//! What tells a library from another one in its place: some of what is in memory as it is in the file.

use std::hash::{DefaultHasher, Hasher};
use std::io;

use crate::sys::{LoadedModule, MappedPart, read_own_memory};

/// Headers, dynamic symbols, code and unwind tables: of each read-only part of the file the same number of bytes, in pieces
/// that are spread evenly. Of the program, which is never replaced, it is no code: a debugger may have changed that.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileContent {
    /// Offsets in the file, and lengths.
    parts: Vec<(u64, u64)>,
    /// Of each part.
    most_bytes: u64,
    hash: u64,
}

const PIECE: u64 = 4 << 10;
/// Beside a build id, which a linker script can set, too.
const MAX_WITH_BUILD_ID: u64 = 32 << 10;
/// Of a library without a build id: all of most.
const MAX_WITHOUT_BUILD_ID: u64 = 8 << 20;
/// What a debugger needs can be stripped from a file while it is loaded, and this header says where that is.
const ELF_HEADER: u64 = 64;

impl FileContent {
    pub(super) fn of(module: &LoadedModule, is_program: bool, has_build_id: bool) -> Option<Self> {
        let most_bytes =
            if is_program || has_build_id { MAX_WITH_BUILD_ID } else { MAX_WITHOUT_BUILD_ID };
        let (mut parts, mut hasher) = (Vec::new(), DefaultHasher::new());
        for part @ MappedPart { addresses, file_offset } in &module.loaded {
            let is_read_only =
                module.read_only.iter().any(|read_only| read_only.contains(&addresses.start));
            if !is_read_only || (is_program && module.code.contains(part)) {
                continue;
            }
            let skipped = ELF_HEADER.saturating_sub(*file_offset);
            let start = addresses.start.checked_add(skipped)?;
            let length = addresses.end.saturating_sub(start);
            for (at, length) in pieces(length, most_bytes) {
                let at = start.checked_add(at)?;
                hasher.write(&read_own_memory(at..at + length).ok()?);
            }
            parts.push((file_offset + skipped, length));
        }
        (!parts.is_empty()).then(|| Self { parts, most_bytes, hash: hasher.finish() })
    }

    /// Whether a file has it, of which `read` reads at most a number of bytes at an offset.
    pub fn is_that_of_file(&self, mut read: impl FnMut(u64, u64) -> io::Result<Vec<u8>>) -> bool {
        let mut hasher = DefaultHasher::new();
        for (offset, length) in &self.parts {
            for (at, length) in pieces(*length, self.most_bytes) {
                match read(offset.saturating_add(at), length) {
                    Ok(bytes) => hasher.write(&bytes),
                    Err(_) => return false,
                }
            }
        }
        hasher.finish() == self.hash
    }
}

fn pieces(length: u64, most_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let step = (length / (most_bytes / PIECE)).max(PIECE);
    let number = length.div_ceil(step);
    (0..number).map(move |i| (i * step, PIECE.min(length - i * step)))
}

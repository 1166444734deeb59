//! What identifies the content of a file that has no build id: some of what is in memory as it is in the file.

use std::hash::{DefaultHasher, Hasher};
use std::io;

use crate::sys::{LoadedModule, MappedPart, read_own_memory};

/// Headers, the dynamic symbols, and the index of the unwind tables, which has the place of each function; of each, the
/// first [`MOST`] bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileContent {
    /// Offsets in the file, and lengths.
    parts: Vec<(u64, u64)>,
    hash: u64,
}

const MOST: u64 = 64 << 10;
/// What a debugger needs can be stripped from a file while it is loaded, and this header says where that is.
const ELF_HEADER: u64 = 64;

impl FileContent {
    /// Reads it from memory.
    pub(super) fn of(module: &LoadedModule) -> Option<Self> {
        let is_unchanged = |part: &&MappedPart| {
            let start = part.addresses.start;
            module.read_only.iter().any(|addresses| addresses.contains(&start))
        };
        let first = module.loaded.iter().filter(is_unchanged).min_by_key(|part| part.file_offset);
        let index = module.eh_frame_hdr.iter().filter(is_unchanged);
        let mut parts = Vec::new();
        let mut hasher = DefaultHasher::new();
        for MappedPart { addresses, file_offset } in first.into_iter().chain(index) {
            let skipped = ELF_HEADER.saturating_sub(*file_offset);
            let start = addresses.start.checked_add(skipped)?;
            let length = addresses.end.saturating_sub(start).min(MOST);
            hasher.write(&read_own_memory(start..start + length).ok()?);
            parts.push((file_offset + skipped, length));
        }
        (!parts.is_empty()).then(|| Self { parts, hash: hasher.finish() })
    }

    /// Whether a file has it, of which `read` reads at most a number of bytes at an offset.
    pub(crate) fn is_that_of_file(
        &self,
        mut read: impl FnMut(u64, u64) -> io::Result<Vec<u8>>,
    ) -> bool {
        let mut hasher = DefaultHasher::new();
        for (offset, length) in &self.parts {
            match read(*offset, *length) {
                Ok(bytes) => hasher.write(&bytes),
                Err(_) => return false,
            }
        }
        hasher.finish() == self.hash
    }
}

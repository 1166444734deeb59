//! Opens symbol files so that blazesym can map them safely. If a mapped file is overwritten in place, accesses can end
//! the process. Blazesym therefore only gets files for which that is no additional risk, which are the executable and
//! its libraries as they are already mapped, and copies of all others.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use flate2::Crc;

use super::hex;
use super::sections::{ReadAt, Sections};
use crate::sys;
use crate::unwind::Module;

/// How much is read of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Detail {
    /// Functions, lines and inlined functions.
    All,
    /// Only the symbol table.
    Functions,
    Nothing,
}

/// A file from which symbols are read.
#[derive(Debug)]
pub(super) struct SymbolFile {
    /// Needed until blazesym has opened it.
    pub(super) file: File,
    pub(super) detail: Detail,
    /// The size of the symbols, or of the copy.
    pub(super) bytes: u64,
    pub(super) lacks: Option<Lack>,
}

/// Why symbols are incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// They are too large; their size in bytes.
    TooLarge(u64),
    /// They have an unsupported compression.
    Compressed,
}

impl SymbolFile {
    /// Opens the symbols of a module, with at most `free` bytes.
    pub(super) fn open(module: &Module, free: u64) -> io::Result<Self> {
        let file = File::open(module.path())?;
        let sections = Sections::of(&file)?;
        let mut lacks = None;
        if let Some((name, checksum)) = &sections.link {
            let candidates = candidates(module, name);
            let mut linked = candidates.iter().filter_map(|path| {
                // Skips files that are endless or block.
                if !path.metadata().ok()?.is_file() {
                    return None;
                }
                let file = File::open(path).ok()?;
                let sections = Sections::of(&file).ok()?;
                Self::of(&file, &sections, free, false, Some(*checksum)).ok()
            });
            match linked.next() {
                Some(source) if source.detail != Detail::Nothing => return Ok(source),
                // The file itself can still contain the functions' names.
                Some(source) => lacks = source.lacks,
                None => {}
            }
        }
        let is_mapped = module.is_program() || is_mapped(&file, module)?;
        let source = Self::of(&file, &sections, free, is_mapped, None)?;
        Ok(Self { lacks: lacks.or(source.lacks), ..source })
    }

    fn of(
        file: &File,
        sections: &Sections,
        free: u64,
        is_mapped: bool,
        checksum: Option<u32>,
    ) -> io::Result<Self> {
        let sizes = sections.sizes;
        let is_copied = !is_mapped || !sections.leading_elsewhere.is_empty();
        let length = file.metadata()?.len();
        let held = |bytes: u64| if is_copied { bytes.max(length) } else { bytes };
        let (all, symbols) = (held(sizes.all()), held(sizes.symbols));
        let (detail, bytes, lacks) = match sections.is_unreadable {
            false if all <= free => (Detail::All, all, None),
            false if symbols <= free => (Detail::Functions, symbols, Some(Lack::TooLarge(all))),
            true if symbols <= free => (Detail::Functions, symbols, Some(Lack::Compressed)),
            _ => (Detail::Nothing, 0, Some(Lack::TooLarge(all))),
        };
        let file = match detail {
            Detail::Nothing => file.try_clone()?,
            _ if is_copied => copy(file, sections, free, checksum)?,
            _ => file.try_clone()?,
        };
        Ok(Self { file, detail, bytes, lacks })
    }
}

/// Whether a file is the one that the loader has mapped.
fn is_mapped(file: &File, module: &Module) -> io::Result<bool> {
    let identity = sys::identity(file)?;
    Ok(sys::mapped_file(module.loaded_at(module.start)) == Some(identity))
}

/// Copies a file into memory, without its references to other files.
fn copy(file: &File, sections: &Sections, most: u64, checksum: Option<u32>) -> io::Result<File> {
    const PART: u64 = 1 << 20;
    let mut copy = sys::memory_file()?;
    let (mut offset, mut crc) = (0, Crc::new());
    loop {
        let part = file.read(offset, PART)?;
        if part.is_empty() {
            break;
        }
        offset += part.len() as u64;
        // The file can grow while it is read.
        if offset > most {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        crc.update(&part);
        copy.write_all(&part)?;
    }
    if checksum.is_some_and(|checksum| checksum != crc.sum()) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    for name in &sections.leading_elsewhere {
        if *name < offset {
            // The empty name.
            copy.seek(SeekFrom::Start(*name))?;
            copy.write_all(&[0; 4])?;
        }
    }
    Ok(copy)
}

/// Where the separate debug file of a module can be.
fn candidates(module: &Module, name: &str) -> Vec<PathBuf> {
    let path = module.path().canonicalize().unwrap_or_else(|_| module.path().to_owned());
    let dir = path.parent().unwrap_or(Path::new("/"));
    let below = dir.strip_prefix("/").unwrap_or(dir);
    let id = module.build_id.as_deref().map(hex).unwrap_or_default();
    let mut files = Vec::new();
    let everywhere = ["/usr/lib/debug", "/lib/debug"].map(Path::new);
    if let Some((first, rest)) = id.split_at_checked(2) {
        let by_id = everywhere.iter().map(|debug| debug.join(".build-id").join(first));
        files.extend(by_id.map(|dir| dir.join(format!("{rest}.debug"))));
    }
    files.extend([dir.join(name), dir.join(".debug").join(name)]);
    files.extend(
        everywhere.iter().flat_map(|debug| [debug.join(below).join(name), debug.join(name)]),
    );
    files.retain(|file| *file != path);
    files
}

#[cfg(test)]
mod tests {
    #[cfg(not(tracing_profiling_unsupported))]
    use super::*;

    /// Copies are memory files, which only Linux has.
    #[test]
    #[cfg(not(tracing_profiling_unsupported))]
    fn a_copy_has_no_references_and_its_checksum_is_verified() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|i| i as u8).collect();
        file.write_all(&bytes).unwrap();
        let sections = Sections { leading_elsewhere: vec![100, 5_000_000], ..Sections::default() };
        let mut crc = Crc::new();
        crc.update(&bytes);
        let copied = copy(&file, &sections, 3_000_000, Some(crc.sum())).unwrap();
        let mut expected = bytes;
        expected[100..104].fill(0);
        assert_eq!(copied.read(0, u64::MAX).unwrap(), expected);
        assert!(copy(&file, &sections, 3_000_000, Some(1)).is_err());
        assert!(copy(&file, &sections, 2_999_999, None).is_err());
        // Truncating the file does not truncate the copy.
        file.set_len(0).unwrap();
        assert_eq!(copied.metadata().unwrap().len(), 3_000_000);
    }
}

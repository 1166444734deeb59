//! Opens symbol files so that blazesym can map them safely. If a mapped file is overwritten in place, accesses can end
//! the process. Blazesym therefore gets the executable itself, to which the kernel allows no write while it runs,
//! and copies of what it needs of all other files.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::slice;

use flate2::Crc;

use super::module_file::{self, LoadedFile};
use super::sections::{ReadAt, Sections, Supplement, SymbolContent};
use super::{SymbolProblem, embedded, hex};
use crate::sys;
use crate::unwind::Module;

/// How much is read of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Detail {
    #[default]
    Nothing,
    /// Only the symbol table.
    Functions,
    /// Functions, lines and inlined functions.
    All,
}

#[derive(Debug)]
pub(super) struct SymbolFile {
    /// Needed until blazesym has opened it.
    pub(super) file: File,
    pub(super) detail: Detail,
    /// The supplementary file of its debug information.
    pub(super) supplement: Option<File>,
    /// The symbols that were embedded in it, which it does not have itself.
    pub(super) embedded: Option<File>,
    /// The size of all symbols, or of the copies.
    pub(super) bytes: u64,
    pub(super) lacks: Vec<SymbolProblem>,
    pub(super) content: SymbolContent,
}

#[derive(Clone, Copy, Debug)]
enum Origin<'a> {
    /// The program's, to which the kernel allows no write.
    Protected,
    /// The file of a module, which can be overwritten.
    Overwritable(&'a Module),
    /// A separate debug file that must have this checksum.
    Linked(u32),
    /// A supplementary debug file.
    Supplement,
}

impl Origin<'_> {
    fn is_mapped(self) -> bool {
        let Self::Overwritable(module) = self else { return matches!(self, Self::Protected) };
        let file = module.file.as_ref();
        file.is_ok_and(|file| matches!(sys::MappedFile::now(file.identity), Ok(Some(_))))
    }
}

impl SymbolFile {
    /// Opens the symbols of a module, with at most `free` bytes. The number makes the path unique that leads to a
    /// supplementary file.
    pub(super) fn open(module: &Module, free: u64, number: usize) -> Result<Self, SymbolProblem> {
        let LoadedFile { file, is_protected } = module_file::open_loaded(module)?;
        let unreadable = |error: io::Error| SymbolProblem::Unreadable(error.to_string());
        let sections = Sections::of(&file).map_err(unreadable)?;
        let mut lacks = Vec::new();
        if let Some((name, checksum)) = &sections.link {
            let candidates = candidates(module, name);
            let mut linked = candidates.iter().filter_map(|path| {
                let file = module_file::open(path).ok()?;
                let sections = Sections::of(&file).ok()?;
                let mut source =
                    Self::of(&file, &sections, free, Origin::Linked(*checksum)).ok()?;
                source.add_supplement(path, &sections, free, number);
                Some(source)
            });
            match linked.next() {
                Some(source) if source.detail != Detail::Nothing => return Ok(source),
                // The file itself can still contain the functions' names.
                Some(source) => lacks = source.lacks,
                None => {}
            }
        }
        let origin = if is_protected { Origin::Protected } else { Origin::Overwritable(module) };
        let mut source = Self::of(&file, &sections, free, origin).map_err(unreadable)?;
        let path = module.file.as_ref().map_or(&module.loader_name, |file| &file.path);
        source.add_supplement(path, &sections, free, number);
        source.add_embedded(&file, &sections, free);
        if !lacks.is_empty() {
            source.lacks = lacks;
        }
        Ok(source)
    }

    /// Adds the symbols that are embedded in the file. Without them, those of the file are there all the same.
    fn add_embedded(&mut self, file: &File, sections: &Sections, free: u64) {
        let Some(part) = sections.embedded.as_ref().filter(|_| self.detail != Detail::Nothing)
        else {
            return;
        };
        match embedded::extract(file, part, free.saturating_sub(self.bytes)) {
            Ok((file, bytes)) => {
                self.embedded = Some(file);
                self.content.has_functions = true;
                self.bytes += bytes;
            }
            Err(error) => self.lacks.push(SymbolProblem::EmbeddedUnreadable(error.to_string())),
        }
    }

    /// Adds the supplementary file. Without it, the names and lines that are not in it are there all the same.
    fn add_supplement(&mut self, path: &Path, sections: &Sections, free: u64, number: usize) {
        let Some(link) = sections.supplement.as_ref().filter(|_| self.detail == Detail::All) else {
            return;
        };
        let free = free.saturating_sub(self.bytes);
        let found = supplement(link, path, free).and_then(|(file, bytes)| {
            let content = link.leading_to(&sys::path_of_open(&file, number).to_string_lossy());
            let (mut copy, at) = (&self.file, self.file.metadata()?.len());
            copy.seek(SeekFrom::Start(at))?;
            copy.write_all(&content)?;
            // Name, kind and flags of the section are before these.
            let place = [at.to_le_bytes(), (content.len() as u64).to_le_bytes()].concat();
            for (offset, bytes) in [(0, link.name.as_slice()), (8, &[0; 8]), (24, &place)] {
                copy.seek(SeekFrom::Start(link.header + offset))?;
                copy.write_all(bytes)?;
            }
            Ok((file, bytes))
        });
        match found {
            Ok((file, bytes)) => {
                self.supplement = Some(file);
                // Entries of both are read another time.
                self.bytes = (self.bytes + bytes).saturating_mul(2);
            }
            Err(error) => self.lacks.push(SymbolProblem::SupplementUnreadable(error.to_string())),
        }
    }

    fn of(file: &File, sections: &Sections, free: u64, origin: Origin<'_>) -> io::Result<Self> {
        let sizes = sections.sizes;
        let is_altered = !sections.hidden.is_empty();
        let is_copied = is_altered || !matches!(origin, Origin::Protected);
        let length = file.metadata()?.len();
        let only_symbols = in_order(&sections.symbol_parts, &[], length);
        let everything = in_order(&sections.symbol_parts, &sections.other_parts, length);
        let held = |bytes: u64, parts: &[Range<u64>]| match origin {
            // It is read completely.
            Origin::Linked(_) => bytes.max(length),
            _ if is_copied => bytes.max(parts.iter().map(|part| part.end - part.start).sum()),
            _ => bytes,
        };
        let all = held(sizes.all(), &everything);
        let symbols = held(sizes.symbols, &only_symbols);
        let too_large = SymbolProblem::TooLarge { bytes: all, is_own: true };
        let (detail, bytes, lack) = match sections.is_unreadable {
            false if all <= free => (Detail::All, all, None),
            false if symbols <= free => (Detail::Functions, symbols, Some(too_large)),
            true if symbols <= free => {
                (Detail::Functions, symbols, Some(SymbolProblem::Compressed))
            }
            _ => (Detail::Nothing, 0, Some(too_large)),
        };
        let (lacks, content) = (Vec::from_iter(lack), sections.content.clone());
        let (supplement, embedded) = (None, None);
        let of = |file| Self { file, detail, supplement, embedded, bytes, lacks, content };
        if detail == Detail::Nothing || !is_copied {
            return file.try_clone().map(of);
        }
        let parts = if detail == Detail::All { everything } else { only_symbols };
        let file = match (sys::memory_file(), origin) {
            (Ok(to), Origin::Linked(checksum)) => {
                let whole = 0..length;
                if copy(file, &to, slice::from_ref(&whole), &parts)? != checksum {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                to
            }
            (Ok(to), _) => {
                copy(file, &to, &parts, &parts)?;
                to
            }
            // Names are worth more than the protection against a library that is overwritten while it is mapped. Without
            // debug information, blazesym follows no links to other files.
            (Err(error), origin) if origin.is_mapped() => {
                let mut source = file.try_clone().map(of)?;
                if is_altered {
                    source.detail = Detail::Functions;
                    source.lacks.push(SymbolProblem::DebugUnreadable(error.to_string()));
                }
                return Ok(source);
            }
            (Err(error), _) => return Err(error),
        };
        if !matches!(origin, Origin::Supplement) {
            hide(&file, &sections.hidden)?;
        }
        Ok(of(file))
    }
}

/// The parts of a file of that length, without overlaps.
fn in_order(some: &[Range<u64>], others: &[Range<u64>], length: u64) -> Vec<Range<u64>> {
    let mut parts: Vec<_> = some.iter().chain(others).cloned().collect();
    parts.sort_unstable_by_key(|part| part.start);
    let mut end = 0;
    for part in &mut parts {
        part.start = part.start.max(end);
        part.end = part.end.min(length).max(part.start);
        end = part.end;
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// Reads some parts of a file, and copies others, which lie in these, to the same places of another one. Returns the
/// checksum of what was read.
fn copy(from: &File, mut to: &File, read: &[Range<u64>], kept: &[Range<u64>]) -> io::Result<u32> {
    const MOST: u64 = 1 << 20;
    let mut crc = Crc::new();
    // Where nothing is copied, there are zeros, which take no memory.
    to.set_len(from.metadata()?.len())?;
    for part in read {
        let mut at = part.start;
        while at < part.end {
            let bytes = from.read(at, MOST.min(part.end - at))?;
            if bytes.is_empty() {
                // The file has become shorter.
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            crc.update(&bytes);
            let end = at + bytes.len() as u64;
            for kept in kept.iter().filter(|kept| kept.start < end && at < kept.end) {
                let (start, end) = (kept.start.max(at), kept.end.min(end));
                let inside = (start - at) as usize..(end - at) as usize;
                to.seek(SeekFrom::Start(start))?;
                to.write_all(bytes.get(inside).unwrap_or_default())?;
            }
            at = end;
        }
    }
    Ok(crc.sum())
}

/// Gives sections of a copy the empty name.
fn hide(mut copy: &File, names: &[u64]) -> io::Result<()> {
    let length = copy.metadata()?.len();
    for name in names.iter().filter(|name| **name < length) {
        copy.seek(SeekFrom::Start(*name))?;
        copy.write_all(&[0; 4])?;
    }
    Ok(())
}

/// A copy of the supplementary file of the debug file at that path, and its size.
fn supplement(link: &Supplement, path: &Path, free: u64) -> io::Result<(File, u64)> {
    // The path can be relative to the debug file, which can be found by a symbolic link.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut files = vec![path.parent().unwrap_or(Path::new("/")).join(&link.path)];
    files.extend(by_build_id(&hex(link.build_id().unwrap_or_default())));
    let mut error = None;
    for path in &files {
        let found = module_file::open(path).and_then(|file| {
            let sections = Sections::of(&file)?;
            if !link.is(&file, &sections)? {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it is another one"));
            }
            let source = SymbolFile::of(&file, &sections, free, Origin::Supplement)?;
            if source.detail != Detail::All {
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is too large"));
            }
            Ok((source.file, source.bytes))
        });
        match found {
            Ok(found) => return Ok(found),
            Err(found) => _ = error.get_or_insert(found),
        }
    }
    Err(error.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
}

/// Where the debug file with a build id can be.
fn by_build_id(id: &str) -> Vec<PathBuf> {
    let Some((first, rest)) = id.split_at_checked(2) else { return Vec::new() };
    let dirs = DEBUG_DIRS.iter().map(|debug| Path::new(debug).join(".build-id").join(first));
    dirs.map(|dir| dir.join(format!("{rest}.debug"))).collect()
}

const DEBUG_DIRS: [&str; 2] = ["/usr/lib/debug", "/lib/debug"];

/// Where the separate debug file of a module can be.
fn candidates(module: &Module, name: &str) -> Vec<PathBuf> {
    let path = module.file.as_ref().map_or(&module.loader_name, |file| &file.path);
    let dir = path.parent().unwrap_or(Path::new("/"));
    let below = dir.strip_prefix("/").unwrap_or(dir);
    let id = module.build_id.as_deref().map(hex).unwrap_or_default();
    let mut files = by_build_id(&id);
    let everywhere = DEBUG_DIRS.map(Path::new);
    files.extend([dir.join(name), dir.join(".debug").join(name)]);
    files.extend(
        everywhere.iter().flat_map(|debug| [debug.join(below).join(name), debug.join(name)]),
    );
    files.retain(|file| file != path);
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(length: u32) -> (File, Vec<u8>) {
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..length).map(|i| (i * 7 / 5) as u8 | 1).collect();
        file.write_all(&bytes).unwrap();
        (file, bytes)
    }

    #[test]
    fn a_copy_has_only_what_is_kept_and_a_checksum_of_all_that_was_read() {
        let (file, bytes) = numbers(3_000_000);
        let mut crc = Crc::new();
        crc.update(&bytes);
        let kept = [5..64, 1_000_000..1_200_000, 1_200_000..2_500_001];
        let mut expected = vec![0; bytes.len()];
        for part in &kept {
            let part = part.start as usize..part.end as usize;
            expected[part.clone()].copy_from_slice(&bytes[part]);
        }
        let whole = 0..3_000_000;
        let to = tempfile::tempfile().unwrap();
        assert_eq!(copy(&file, &to, slice::from_ref(&whole), &kept).unwrap(), crc.sum());
        assert_eq!(to.read(0, u64::MAX).unwrap(), expected);
        let to = tempfile::tempfile().unwrap();
        copy(&file, &to, &kept, &kept).unwrap();
        assert_eq!(to.read(0, u64::MAX).unwrap(), expected);
        // Truncating the file does not truncate the copy.
        file.set_len(0).unwrap();
        assert_eq!(to.metadata().unwrap().len(), 3_000_000);
        // A file that has become shorter.
        file.set_len(2_999_999).unwrap();
        assert!(copy(&file, &to, slice::from_ref(&whole), &kept).is_err());
    }

    #[test]
    fn a_copy_has_no_hidden_sections() {
        let (file, mut bytes) = numbers(300);
        hide(&file, &[100, 5_000_000]).unwrap();
        bytes[100..104].fill(0);
        assert_eq!(file.read(0, u64::MAX).unwrap(), bytes);
    }

    #[test]
    fn parts_that_overlap_or_leave_the_file_are_cut() {
        let parts = in_order(&[50..90, 0..10, 5..20], &[60..70, 85..u64::MAX, 200..300], 100);
        assert_eq!(parts, [0..10, 10..20, 50..90, 90..100]);
        let reversed = std::ops::Range { start: 7, end: 3 };
        assert_eq!(in_order(&[], &[u64::MAX..u64::MAX, reversed], 100), []);
        assert_eq!(in_order(&[0..64, 3..5], &[], 0), []);
    }
}

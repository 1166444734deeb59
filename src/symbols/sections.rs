//! The section headers of an object file, checked before its symbols are read. Nothing is mapped here, and the content
//! of the file is not trusted.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use crate::unwind::build_id_in;

/// The size of a file's symbols after decompression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) debug: u64,
    /// Symbol tables.
    pub(super) symbols: u64,
}

impl Sizes {
    pub(super) fn all(self) -> u64 {
        self.debug.saturating_add(self.symbols)
    }
}

/// What the section headers contain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sections {
    pub(super) sizes: Sizes,
    /// The name of the separate debug file, and its checksum.
    pub(super) link: Option<(String, u32)>,
    /// Offsets of the names of sections that refer to other files.
    pub(super) leading_elsewhere: Vec<u64>,
    /// The debug information has an unsupported compression, such as zstd.
    pub(super) is_unreadable: bool,
    /// Where headers, symbol tables and names are in the file.
    pub(super) symbol_parts: Vec<Range<u64>>,
    /// Where everything else is that is not loaded.
    pub(super) other_parts: Vec<Range<u64>>,
}

/// More sections than any program has.
const MOST_SECTIONS: u64 = 4096;
const MOST_NAMES: u64 = 1 << 20;
/// More notes than any program has.
const MOST_NOTES: u64 = 64 * 1024;
const HEADER_BYTES: u64 = 64;
const SHT_NOBITS: u64 = 8;
const SHF_ALLOC: u64 = 2;
const SHF_COMPRESSED: u64 = 0x800;
const COMPRESSED_BY_ZLIB: u64 = 1;
const PT_NOTE: u64 = 4;
const SYMBOL_TABLES: [&[u8]; 4] = [b".symtab", b".strtab", b".dynsym", b".dynstr"];
const LEADING_ELSEWHERE: [&[u8]; 3] = [b".gnu_debuglink", b".gnu_debugaltlink", b".debug_sup"];

/// A source of a file's bytes.
pub(crate) trait ReadAt {
    /// Reads at most `most` bytes at an offset.
    fn read(&self, offset: u64, most: u64) -> io::Result<Vec<u8>>;
}

impl ReadAt for File {
    fn read(&self, offset: u64, most: u64) -> io::Result<Vec<u8>> {
        let (mut bytes, mut file) = (Vec::new(), self);
        file.seek(SeekFrom::Start(offset))?;
        file.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

impl ReadAt for [u8] {
    fn read(&self, offset: u64, most: u64) -> io::Result<Vec<u8>> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.get(offset..));
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        Ok(rest.unwrap_or_default().iter().take(most).copied().collect())
    }
}

impl Sections {
    /// Parses a 64-bit little-endian ELF file, the only kind on platforms with stacks.
    pub(super) fn of(file: &(impl ReadAt + ?Sized)) -> io::Result<Self> {
        let header = file.read(0, HEADER_BYTES)?;
        let mut sections = Self::default();
        let is_whole = header.len() as u64 == HEADER_BYTES;
        if !is_whole || !header.starts_with(b"\x7fELF\x02\x01") {
            return Ok(sections);
        }
        let (table, entry) = (number(&header, 0x28, 8), number(&header, 0x3a, 2));
        let count = number(&header, 0x3c, 2).min(MOST_SECTIONS);
        let place = |index: u64| table.saturating_add(index.saturating_mul(entry));
        let section = |index: u64| file.read(place(index), HEADER_BYTES);
        let names = section(number(&header, 0x3e, 2))?;
        let (names_at, names_size) = (number(&names, 0x18, 8), number(&names, 0x20, 8));
        let names = file.read(names_at, names_size.min(MOST_NAMES))?;
        let part = |start: u64, size: u64| start..start.saturating_add(size);
        let segments_size = number(&header, 0x36, 2) * number(&header, 0x38, 2);
        sections.symbol_parts = vec![
            part(0, HEADER_BYTES),
            part(number(&header, 0x20, 8), segments_size),
            part(table, count * entry),
            part(names_at, names_size),
        ];
        for index in 0..count {
            let section = section(index)?;
            let name = text(&names, number(&section, 0, 4));
            let (offset, mut size) = (number(&section, 0x18, 8), number(&section, 0x20, 8));
            if number(&section, 4, 4) == SHT_NOBITS {
                continue;
            }
            let flags = number(&section, 8, 8);
            if SYMBOL_TABLES.contains(&name) {
                sections.symbol_parts.push(part(offset, size));
            } else if flags & SHF_ALLOC == 0 {
                sections.other_parts.push(part(offset, size));
            }
            let is_debug = name.starts_with(b".debug_") || name.starts_with(b".zdebug_");
            if flags & SHF_COMPRESSED != 0 {
                // A separate header states the compression and the decompressed size.
                let compressed = file.read(offset, 16)?;
                sections.is_unreadable |=
                    is_debug && number(&compressed, 0, 4) != COMPRESSED_BY_ZLIB;
                size = number(&compressed, 8, 8);
            }
            let sizes = &mut sections.sizes;
            if is_debug {
                sizes.debug = sizes.debug.saturating_add(size);
            } else if SYMBOL_TABLES.contains(&name) {
                sizes.symbols = sizes.symbols.saturating_add(size);
            }
            if name == b".gnu_debuglink" {
                sections.link = parse_link(&file.read(offset, size.min(4096))?);
            }
            if LEADING_ELSEWHERE.contains(&name) {
                sections.leading_elsewhere.push(place(index));
            }
        }
        Ok(sections)
    }
}

/// Parses a name, padded with zeros to a multiple of 4 bytes, and a checksum.
fn parse_link(link: &[u8]) -> Option<(String, u32)> {
    let name = text(link, 0);
    let checksum = link.get((name.len() + 1).next_multiple_of(4)..)?.first_chunk()?;
    let name = std::str::from_utf8(name).ok().filter(|name| !name.is_empty())?;
    Some((name.to_owned(), u32::from_le_bytes(*checksum)))
}

/// The GNU build id of a file.
pub(super) fn build_id_of(file: &(impl ReadAt + ?Sized)) -> io::Result<Option<Vec<u8>>> {
    let header = file.read(0, HEADER_BYTES)?;
    let (table, entry) = (number(&header, 0x20, 8), number(&header, 0x36, 2));
    for index in 0..number(&header, 0x38, 2).min(MOST_SECTIONS) {
        let segment = file.read(table.saturating_add(index * entry), HEADER_BYTES)?;
        if number(&segment, 0, 4) == PT_NOTE {
            let length = number(&segment, 0x20, 8).min(MOST_NOTES);
            let notes = file.read(number(&segment, 8, 8), length)?;
            if let Some(id) = build_id_in(&notes) {
                return Ok(Some(id));
            }
        }
    }
    Ok(None)
}

/// A little-endian number of up to 8 bytes; missing bytes are 0.
fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    let digits = bytes.get(at..).unwrap_or_default().iter().take(length).rev();
    digits.fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The text up to a zero byte.
fn text(bytes: &[u8], at: u64) -> &[u8] {
    let at = usize::try_from(at).unwrap_or(usize::MAX);
    let rest = bytes.get(at..).unwrap_or_default();
    rest.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_has_debug_information_and_a_symbol_table() {
        let file = File::open(std::env::current_exe().unwrap()).unwrap();
        let Sections { sizes, link, is_unreadable, .. } = Sections::of(&file).unwrap();
        let length = file.metadata().unwrap().len();
        assert!(sizes.symbols > 100_000, "{sizes:?}");
        assert!(sizes.debug > sizes.symbols, "{sizes:?}");
        assert!(sizes.all() < 4 * length, "{sizes:?}");
        assert_eq!((link, is_unreadable), (None, false));
    }

    #[test]
    fn other_files_have_no_sections() {
        for bytes in [&b""[..], b"\x7fELF", b"hello", b"\x7fELF\x02\x01"] {
            assert_eq!(Sections::of(bytes).unwrap(), Sections::default());
            assert_eq!(build_id_of(bytes).unwrap(), None);
        }
    }

    #[test]
    fn a_link_has_a_name_and_a_checksum() {
        assert_eq!(parse_link(b"a.debug\0\x01\x02\0\0"), Some(("a.debug".into(), 0x201)));
        assert_eq!(parse_link(b"ab\0\0\x01\0\0\0"), Some(("ab".into(), 1)));
        for damaged in
            [&b""[..], b"\0\0\0\0\x01\0\0\0", b"ab", b"ab\0\0\x01", b"\xff\0\0\0\0\0\0\0"]
        {
            assert_eq!(parse_link(damaged), None);
        }
    }

    proptest::proptest! {
        #[test]
        fn broken_headers_are_read_without_harm(
            rest in proptest::collection::vec(proptest::num::u8::ANY, 0..400)
        ) {
            let bytes = [b"\x7fELF\x02\x01".as_slice(), &rest].concat();
            _ = Sections::of(bytes.as_slice());
            _ = build_id_of(bytes.as_slice());
        }
    }
}

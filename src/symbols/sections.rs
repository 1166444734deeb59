//! The section headers of an object file, checked before its symbols are read. Nothing is mapped here, and the content
//! of the file is not trusted.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use flate2::read::ZlibDecoder;
use gimli::{DwarfSections, EndianSlice, LittleEndian, Reader as _, constants as dwarf};

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

/// What a file has symbols of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SymbolContent {
    /// The file has a symbol table, not only what it exports.
    pub(super) has_functions: bool,
    pub(super) has_lines: bool,
    /// A part of the debug information is in other files (`.dwo`, `.dwp`).
    pub(super) is_split: bool,
    /// Addresses of the procedure linkage table, whose jumps to other modules have no symbols.
    pub(super) linkage_table: Range<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sections {
    pub(super) sizes: Sizes,
    /// The name of the separate debug file, and its checksum.
    pub(super) link: Option<(String, u32)>,
    /// The supplementary debug file.
    pub(super) supplement: Option<Supplement>,
    /// Offsets of the names of sections that blazesym must not see: those that refer to other files, and `embedded`.
    pub(super) hidden: Vec<u64>,
    /// Where further symbols are in the file, compressed with xz. They are of no use to a file with a symbol table.
    pub(super) embedded: Option<Range<u64>>,
    /// Debug sections are compressed in another way than by zlib.
    pub(super) is_unreadable: bool,
    pub(super) content: SymbolContent,
    /// Where headers, symbol tables and names are in the file.
    pub(super) symbol_parts: Vec<Range<u64>>,
    /// Where everything else is that is not loaded.
    pub(super) other_parts: Vec<Range<u64>>,
}

/// More sections than any program has.
const MAX_SECTIONS: u64 = 4096;
/// Parts of the procedure linkage table are not further apart.
const MAX_ALIGNMENT: u64 = 64;
const MAX_NAMES: u64 = 1 << 20;
/// More notes than any program has.
const MAX_NOTES: u64 = 64 * 1024;
const HEADER_BYTES: u64 = 64;
const SHT_NOBITS: u64 = 8;
const SHF_ALLOC: u64 = 2;
const SHF_COMPRESSED: u64 = 0x800;
const COMPRESSED_BY_ZLIB: u64 = 1;
const COMPRESSION_HEADER_BYTES: usize = 24;
const MAX_LINK: u64 = 4096;
/// In `.debug_sup`, after a version and whether the file is a supplementary one.
const SUP_PATH: usize = 3;
const MAX_ABBREVIATIONS: u64 = 1 << 20;
const PT_NOTE: u64 = 4;
const SYMBOL_TABLES: [&[u8]; 4] = [b".symtab", b".strtab", b".dynsym", b".dynstr"];
const LEADING_ELSEWHERE: [&[u8]; 3] = [b".gnu_debuglink", b".gnu_debugaltlink", b".debug_sup"];
const EMBEDDED: &[u8] = b".gnu_debugdata";
/// The first symbol is never one.
const ONE_SYMBOL: u64 = 24;

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

#[derive(Clone, Debug, PartialEq, Eq)]
struct Section {
    name: Vec<u8>,
    name_at: u64,
    /// Where the header is in the file.
    header: u64,
    kind: u64,
    flags: u64,
    address: u64,
    content: Range<u64>,
}

impl Section {
    /// All headers, and where they, their names and those of segments are in a 64-bit little-endian ELF file, the only kind
    /// on platforms with stacks.
    fn all(file: &(impl ReadAt + ?Sized)) -> io::Result<(Vec<Self>, Vec<Range<u64>>)> {
        let header = file.read(0, HEADER_BYTES)?;
        let is_whole = header.len() as u64 == HEADER_BYTES;
        if !is_whole || !header.starts_with(b"\x7fELF\x02\x01") {
            return Ok((Vec::new(), Vec::new()));
        }
        let (table, entry) = (number(&header, 0x28, 8), number(&header, 0x3a, 2));
        let count = number(&header, 0x3c, 2).min(MAX_SECTIONS);
        let place = |index: u64| table.saturating_add(index.saturating_mul(entry));
        let names = file.read(place(number(&header, 0x3e, 2)), HEADER_BYTES)?;
        let (names_at, names_size) = (number(&names, 0x18, 8), number(&names, 0x20, 8));
        let names = file.read(names_at, names_size.min(MAX_NAMES))?;
        let segments_size = number(&header, 0x36, 2) * number(&header, 0x38, 2);
        let parts = vec![
            part(0, HEADER_BYTES),
            part(number(&header, 0x20, 8), segments_size),
            part(table, count * entry),
            part(names_at, names_size),
        ];
        let read = |index: u64| {
            let bytes = file.read(place(index), HEADER_BYTES)?;
            let name_at = number(&bytes, 0, 4);
            Ok(Self {
                name: text(&names, name_at).to_vec(),
                name_at,
                header: place(index),
                kind: number(&bytes, 4, 4),
                flags: number(&bytes, 8, 8),
                address: number(&bytes, 0x10, 8),
                content: part(number(&bytes, 0x18, 8), number(&bytes, 0x20, 8)),
            })
        };
        Ok(((0..count).map(read).collect::<io::Result<_>>()?, parts))
    }

    fn is_compressed(&self) -> bool {
        self.flags & SHF_COMPRESSED != 0
    }

    /// At most that many bytes of the content, decompressed.
    fn read(&self, file: &(impl ReadAt + ?Sized), most: u64) -> io::Result<Vec<u8>> {
        let length = self.content.end - self.content.start;
        let stored = file.read(self.content.start, length.min(most))?;
        if !self.is_compressed() {
            return Ok(stored);
        }
        let zlib = stored.get(COMPRESSION_HEADER_BYTES..).unwrap_or_default();
        let mut inflated = Vec::new();
        // What was read up to an error is enough.
        _ = ZlibDecoder::new(zlib).take(most).read_to_end(&mut inflated);
        Ok(inflated)
    }
}

fn part(start: u64, size: u64) -> Range<u64> {
    start..start.saturating_add(size)
}

/// The content of the sections of a file with debug information, at most `most` bytes of each.
pub(super) fn dwarf_of(file: &File, most: u64) -> io::Result<DwarfSections<Vec<u8>>> {
    let (all, _) = Section::all(file)?;
    DwarfSections::load(|id| {
        match all.iter().find(|section| section.name == id.name().as_bytes()) {
            Some(section) if section.kind != SHT_NOBITS => section.read(file, most),
            _ => Ok(Vec::new()),
        }
    })
}

impl Sections {
    pub(super) fn of(file: &(impl ReadAt + ?Sized)) -> io::Result<Self> {
        let mut sections = Self::default();
        let (all, parts) = Section::all(file)?;
        sections.symbol_parts = parts;
        let (mut embedded, mut abbreviations, mut has_addresses) = (None, None, false);
        for section in &all {
            let name = section.name.as_slice();
            let mut size = section.content.end - section.content.start;
            if name.starts_with(b".plt") || name == b".iplt" {
                let (part, table) =
                    (part(section.address, size), &mut sections.content.linkage_table);
                // Its parts follow each other.
                if table.is_empty() {
                    *table = part;
                } else if !part.is_empty() && part.start.abs_diff(table.end) < MAX_ALIGNMENT {
                    table.end = part.end.max(table.end);
                }
            }
            // Of a separate debug file, this is all that is not symbols.
            if section.kind == SHT_NOBITS {
                continue;
            }
            if name == EMBEDDED {
                embedded = Some(section);
                continue;
            }
            let content = &mut sections.content;
            content.has_functions |= name == b".symtab" && size > ONE_SYMBOL;
            content.has_lines |= name == b".debug_line" && size > 0;
            has_addresses |= name == b".debug_addr";
            if SYMBOL_TABLES.contains(&name) {
                sections.symbol_parts.push(section.content.clone());
            } else if section.flags & SHF_ALLOC == 0 {
                sections.other_parts.push(section.content.clone());
            }
            let is_old = name.starts_with(b".zdebug_");
            let is_debug = is_old || name.starts_with(b".debug_");
            sections.is_unreadable |= is_old;
            if name == b".debug_abbrev" {
                abbreviations = Some(section);
            }
            if section.is_compressed() {
                // A separate header states the compression and the decompressed size.
                let compressed = file.read(section.content.start, 16)?;
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
            if !LEADING_ELSEWHERE.contains(&name) {
                continue;
            }
            sections.hidden.push(section.header);
            let link = section.read(file, MAX_LINK)?;
            if name == b".gnu_debuglink" {
                sections.link = parse_link(&link);
            } else {
                sections.supplement = Supplement::of(section, &link);
            }
        }
        if let Some(section) = embedded.filter(|_| !sections.content.has_functions) {
            sections.embedded = Some(section.content.clone());
            sections.hidden.push(section.header);
        }
        // Units in parts have their addresses in a section of its own. Each unit of a large program has its own table, and
        // the first ones are enough.
        if let Some(section) = abbreviations.filter(|_| has_addresses) {
            let abbreviations = section.read(file, MAX_ABBREVIATIONS)?;
            sections.content.is_split = name_other_files(&abbreviations).unwrap_or(false);
        }
        Ok(sections)
    }
}

/// The supplementary file, to which `dwz -m` moves what debug information of several files has in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Supplement {
    /// Where the header of the section is that names it, and the first bytes of that header.
    pub(super) header: u64,
    pub(super) name: [u8; 4],
    pub(super) path: String,
    /// What comes before the path in the section (`.debug_sup` of DWARF 5; nothing in `.gnu_debugaltlink`), and after it:
    /// its build id or checksum.
    before: Vec<u8>,
    id: Vec<u8>,
}

impl Supplement {
    fn of(section: &Section, link: &[u8]) -> Option<Self> {
        let path_at = if section.name == b".debug_sup" { SUP_PATH } else { 0 };
        let (before, rest) = link.split_at_checked(path_at)?;
        let path = text(rest, 0);
        let id = rest.get(path.len() + 1..).filter(|id| !id.is_empty())?.to_vec();
        let path = std::str::from_utf8(path).ok()?.to_owned();
        let name = (section.name_at as u32).to_le_bytes();
        Some(Self { header: section.header, name, path, before: before.to_vec(), id })
    }

    /// The content of the section for a file at another path.
    pub(super) fn leading_to(&self, path: &str) -> Vec<u8> {
        [&self.before, path.as_bytes(), b"\0", &self.id].concat()
    }

    /// Whether a file with these sections is this one.
    pub(super) fn is(&self, file: &File, sections: &Sections) -> io::Result<bool> {
        if let Some(own) = sections.supplement.as_ref().filter(|_| !self.before.is_empty()) {
            // It has a link to itself without a path.
            return Ok(own.id == self.id && own.path.is_empty());
        }
        // It has no segments.
        let (all, _) = Section::all(file)?;
        let note = all.iter().find(|section| section.name == b".note.gnu.build-id");
        let notes = note.map(|note| note.read(file, MAX_NOTES)).transpose()?;
        Ok(notes.is_some_and(|notes| build_id_in(&notes).as_ref() == Some(&self.id)))
    }

    pub(super) fn build_id(&self) -> Option<&[u8]> {
        self.before.is_empty().then_some(&self.id)
    }
}

/// Whether units name a file that has the rest of their debug information, judging by `.debug_abbrev`: tables of entries,
/// each ended by a zero.
fn name_other_files(abbreviations: &[u8]) -> gimli::Result<bool> {
    let mut rest = EndianSlice::new(abbreviations, LittleEndian);
    while !rest.is_empty() {
        if rest.read_uleb128()? == 0 {
            continue;
        }
        let tag = dwarf::DwTag(rest.read_uleb128_u16()?);
        let _has_children = rest.read_u8()?;
        let is_unit = [dwarf::DW_TAG_compile_unit, dwarf::DW_TAG_skeleton_unit].contains(&tag);
        loop {
            let attribute = dwarf::DwAt(rest.read_uleb128_u16()?);
            let form = dwarf::DwForm(rest.read_uleb128_u16()?);
            let is_name = [dwarf::DW_AT_dwo_name, dwarf::DW_AT_GNU_dwo_name].contains(&attribute);
            if is_unit && is_name {
                return Ok(true);
            }
            if form == dwarf::DW_FORM_implicit_const {
                rest.read_sleb128()?;
            }
            if (attribute.0, form.0) == (0, 0) {
                break;
            }
        }
    }
    Ok(false)
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
    for index in 0..number(&header, 0x38, 2).min(MAX_SECTIONS) {
        let segment = file.read(table.saturating_add(index * entry), HEADER_BYTES)?;
        if number(&segment, 0, 4) == PT_NOTE {
            let length = number(&segment, 0x20, 8).min(MAX_NOTES);
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
        let Sections { sizes, link, is_unreadable, content, .. } = Sections::of(&file).unwrap();
        let length = file.metadata().unwrap().len();
        assert!(sizes.symbols > 100_000, "{sizes:?}");
        assert!(sizes.debug > sizes.symbols, "{sizes:?}");
        assert!(sizes.all() < 4 * length, "{sizes:?}");
        assert_eq!((link, is_unreadable), (None, false));
        assert!(content.has_functions && content.has_lines && !content.is_split);
        // The program calls functions of the C library.
        let table = content.linkage_table;
        assert!(!table.is_empty() && (table.end - table.start) % 8 == 0, "{table:?}");
    }

    #[test]
    fn other_files_have_no_sections() {
        for bytes in [&b""[..], b"\x7fELF", b"hello", b"\x7fELF\x02\x01"] {
            assert_eq!(Sections::of(bytes).unwrap(), Sections::default());
            assert_eq!(build_id_of(bytes).unwrap(), None);
        }
    }

    #[test]
    fn units_that_are_split_name_other_files() {
        let unit = |tag: u8, attributes: &[u8]| [&[1, tag, 1], attributes, &[0, 0, 0]].concat();
        // A producer and a number within the abbreviation; of DWARF 5; of GNU for DWARF 4.
        let usual = unit(0x11, &[0x25, 0x0e, 0x3b, 0x21, 0x80, 0x01]);
        let skeleton = unit(0x4a, &[0x25, 0x0e, 0x76, 0x25]);
        let older = unit(0x11, &[0xb0, 0x42, 0x0e]);
        let other = unit(0x2e, &[0x76, 0x25]);
        for (tables, expected) in [
            ([&usual, &usual], Ok(false)),
            ([&usual, &skeleton], Ok(true)),
            ([&usual, &older], Ok(true)),
            ([&usual, &other], Ok(false)),
        ] {
            assert_eq!(name_other_files(&tables.map(Vec::as_slice).concat()), expected);
        }
        assert_eq!(name_other_files(b""), Ok(false));
        assert!(name_other_files(&usual[..4]).is_err());
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

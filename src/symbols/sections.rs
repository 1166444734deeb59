//! How large a file's symbols are, before they are read.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes of a file's symbols, as many as there are after decompression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sizes {
    /// Debug information, also that in a file of its own.
    pub(super) debug: u64,
    /// Symbol tables.
    pub(super) symbols: u64,
}

/// More sections than a program has.
const MOST_SECTIONS: u64 = 4096;
const MOST_NAMES: u64 = 1 << 20;
const HEADER_BYTES: u64 = 64;
const SHT_NOBITS: u64 = 8;
const SHF_COMPRESSED: u64 = 0x800;
const SYMBOL_TABLES: [&[u8]; 4] = [b".symtab", b".strtab", b".dynsym", b".dynstr"];

impl Sizes {
    pub(super) fn all(self) -> u64 {
        self.debug.saturating_add(self.symbols)
    }

    /// Of an ELF file of 64 bits, little-endian, as it is on all systems that have stacks.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let header = read(&file, 0, HEADER_BYTES)?;
        let mut sizes = Self::default();
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return Ok(sizes);
        }
        let (table, entry) = (number(&header, 0x28, 8), number(&header, 0x3a, 2));
        let count = number(&header, 0x3c, 2).min(MOST_SECTIONS);
        let section = |index: u64| {
            read(&file, table.saturating_add(index.saturating_mul(entry)), HEADER_BYTES)
        };
        let names = section(number(&header, 0x3e, 2))?;
        let names = read(&file, number(&names, 0x18, 8), number(&names, 0x20, 8).min(MOST_NAMES))?;
        for index in 0..count {
            let section = section(index)?;
            let name = text(&names, number(&section, 0, 4));
            let (offset, mut size) = (number(&section, 0x18, 8), number(&section, 0x20, 8));
            if number(&section, 4, 4) == SHT_NOBITS {
                continue;
            }
            if number(&section, 8, 8) & SHF_COMPRESSED != 0 {
                // A header of its own says what it is decompressed to.
                size = number(&read(&file, offset, 16)?, 8, 8);
            }
            if name.starts_with(b".debug_") || name.starts_with(b".zdebug_") {
                sizes.debug = sizes.debug.saturating_add(size);
            } else if SYMBOL_TABLES.contains(&name) {
                sizes.symbols = sizes.symbols.saturating_add(size);
            } else if name == b".gnu_debuglink" {
                let link = read(&file, offset, size.min(4096))?;
                let elsewhere = linked(path, &String::from_utf8_lossy(text(&link, 0)));
                sizes.debug = sizes.debug.saturating_add(elsewhere);
            }
        }
        Ok(sizes)
    }
}

/// The size of the file in which a file's debug information is, if that is where it can be.
fn linked(path: &Path, name: &str) -> u64 {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder = path.parent().unwrap_or(Path::new("/"));
    let below = folder.strip_prefix("/").unwrap_or(folder);
    let mut files = vec![folder.join(name), folder.join(".debug").join(name)];
    let id = blazesym::helper::read_elf_build_id(&path).ok().flatten();
    let id = id.map(|id| super::hex(&id)).unwrap_or_default();
    for debug in ["/usr/lib/debug", "/lib/debug"].map(Path::new) {
        files.extend([debug.join(name), debug.join(below).join(name)]);
        if let Some((first, rest)) = id.split_at_checked(2) {
            files.push(debug.join(".build-id").join(first).join(format!("{rest}.debug")));
        }
    }
    // Of several, which one is taken is not ours to say: the largest is the safe one to think of.
    let size = |file: &PathBuf| fs::metadata(file).ok().map(|metadata| metadata.len());
    files.iter().filter_map(size).max().unwrap_or(0)
}

fn read(mut file: &File, offset: u64, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(offset))?;
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A little-endian number of up to 8 bytes; what is not there is 0.
fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    let digits = bytes.get(at..).unwrap_or_default().iter().take(length).rev();
    digits.fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// What is there up to a zero.
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
        let path = std::env::current_exe().unwrap();
        let sizes = Sizes::of(&path).unwrap();
        let length = fs::metadata(&path).unwrap().len();
        assert!(sizes.symbols > 100_000, "{sizes:?}");
        assert!(sizes.debug > sizes.symbols, "{sizes:?}");
        assert!(sizes.all() < 4 * length, "{sizes:?}");
    }

    #[test]
    fn what_is_no_program_has_none() {
        for bytes in [&b""[..], b"\x7fELF", b"hello", b"\x7fELF\x02\x01"] {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), bytes).unwrap();
            assert_eq!(Sizes::of(file.path()).unwrap(), Sizes::default());
        }
        assert!(Sizes::of(Path::new("/nowhere/at/all")).is_err());
    }

    #[test]
    fn debug_information_beside_the_file_counts() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".debug")).unwrap();
        fs::write(folder.path().join(".debug/shop.debug"), [0; 500]).unwrap();
        assert_eq!(linked(&folder.path().join("shop"), "shop.debug"), 500);
        assert_eq!(linked(&folder.path().join("shop"), "other.debug"), 0);
    }

    proptest::proptest! {
        #[test]
        fn broken_headers_are_read_without_harm(
            rest in proptest::collection::vec(proptest::num::u8::ANY, 0..400)
        ) {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), [b"\x7fELF\x02\x01".as_slice(), &rest].concat()).unwrap();
            _ = Sizes::of(file.path());
        }
    }
}

//! Names of the kernel's functions, if `/proc/kallsyms` shows their addresses.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::sys;

#[derive(Debug, Default)]
pub(super) struct KernelNames {
    /// The names of the functions in the current profile, by address.
    functions: HashMap<u64, String>,
    table: Option<KernelTable>,
}

/// How long a table is valid for entries that can change: modules, BPF programs, and whether addresses are visible at
/// all.
const READ_AGAIN: Duration = Duration::from_secs(60);

impl KernelNames {
    /// Looks up all addresses of a profile at once. The table has 100,000 lines and more, and the kernel takes some 50
    /// ms to write it. It is therefore cached if it has at most `most_bytes`.
    pub(super) fn learn(&mut self, addresses: &[u64], most_bytes: u64) {
        self.functions.clear();
        let wanted = || addresses.iter().copied().filter(|address| *address != 0);
        if wanted().next().is_none() {
            return;
        }
        let is_good = |table: &KernelTable| {
            table.read.elapsed() < READ_AGAIN || wanted().all(|address| table.is_lasting(address))
        };
        // Without memory for the table, there are no names.
        if sys::address_space_left().is_some_and(|left| left < 4 * ROOM as u64) {
            return;
        }
        // The next read may succeed.
        let read = || kernel_symbols().and_then(KernelTable::parse).ok();
        self.table = self.table.take().filter(is_good).or_else(read);
        let Some(table) = &self.table else { return };
        let name = |address| Some((address, table.function(address)?.to_owned()));
        self.functions.extend(wanted().filter_map(name));
        if table.bytes() > most_bytes {
            self.table = None;
        }
    }

    /// The function's name; `[kernel]` if it is unknown.
    pub(super) fn function(&self, address: u64) -> String {
        self.functions.get(&address).map_or_else(|| "[kernel]".to_owned(), String::clone)
    }

    /// The memory that is held.
    pub(super) fn bytes(&self) -> u64 {
        self.table.as_ref().map_or(0, KernelTable::bytes)
    }
}

/// The kernel's functions and their addresses, as documented in proc_kallsyms(5).
fn kernel_symbols() -> io::Result<impl BufRead> {
    Ok(BufReader::with_capacity(1 << 16, File::open("/proc/kallsyms")?))
}

/// The content of `/proc/kallsyms`. (Its format: proc_kallsyms(5), and nm(1) for the types.)
#[derive(Debug)]
pub(super) struct KernelTable {
    /// Sorted by address. Other symbols are kept only to know where a function ends.
    symbols: Vec<Symbol>,
    /// Each name ends with a line feed.
    names: String,
    /// The range of the built-in code, which never changes; empty if unknown.
    built_in: Range<u64>,
    read: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    address: u64,
    /// The offset of its name.
    name: u32,
    kind: SymbolKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SymbolKind {
    Function,
    /// In a module, BPF program or trampoline.
    OfModule,
    Other,
}

/// How far from its start an address is attributed to a function of a module. The table does not state where functions
/// end, and there may be code without symbols between two modules.
const FARTHEST: u64 = 4096;

/// Large enough that allocators map it separately and unmap it at once. Otherwise temporary megabytes would leave holes
/// in the heap. Unused parts take no memory.
const ROOM: usize = 33 * 1024 * 1024;

impl KernelTable {
    pub(super) fn parse(mut lines: impl BufRead) -> io::Result<Self> {
        // If the reservation fails, the vectors grow as usual; so they do where the address space is limited.
        let (mut symbols, mut names) = (Vec::new(), String::new());
        if sys::address_space_left().is_none() {
            _ = symbols.try_reserve_exact(ROOM / size_of::<Symbol>());
            _ = names.try_reserve_exact(ROOM);
        }
        let mut table = Self { symbols, names, built_in: 0..0, read: Instant::now() };
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? != 0 {
            if let Ok(line) = std::str::from_utf8(&line) {
                table.add(line);
            }
            line.clear();
        }
        // Of several symbols at one address, keep the first function.
        let order =
            |symbol: &Symbol| (symbol.address, symbol.kind == SymbolKind::Other, symbol.name);
        table.symbols.sort_unstable_by_key(order);
        table.symbols.dedup_by_key(|symbol| symbol.address);
        table.symbols.dedup_by(|one, before| [one.kind, before.kind] == [SymbolKind::Other; 2]);
        table.symbols.shrink_to_fit();
        table.names.shrink_to_fit();
        Ok(table)
    }

    /// Parses `ffffffff81000000 T schedule`, followed by ` [name]` for a module. The address is zero for readers
    /// without permission to see addresses.
    fn add(&mut self, line: &str) {
        let mut words = line.split_ascii_whitespace();
        let (Some(address), Some(kind), Some(name)) = (words.next(), words.next(), words.next())
        else {
            return;
        };
        let address = u64::from_str_radix(address, 16).unwrap_or(0);
        let Ok(place) = u32::try_from(self.names.len()) else { return };
        if address == 0 {
            return;
        }
        let kind = match (kind, words.next()) {
            ("T" | "t" | "W" | "w", None) => SymbolKind::Function,
            ("T" | "t" | "W" | "w", Some(_)) => SymbolKind::OfModule,
            _ => SymbolKind::Other,
        };
        match (kind, name) {
            (SymbolKind::Function, "_stext") => self.built_in.start = address,
            (SymbolKind::Function, "_etext") => self.built_in.end = address,
            _ => {}
        }
        self.symbols.push(Symbol { address, name: place, kind });
        if kind != SymbolKind::Other {
            self.names.push_str(name);
            self.names.push('\n');
        }
    }

    /// Whether the code at that address never changes.
    fn is_lasting(&self, address: u64) -> bool {
        self.built_in.start > 0 && self.built_in.contains(&address)
    }

    pub(super) fn function(&self, address: u64) -> Option<&str> {
        let after = self.symbols.partition_point(|symbol| symbol.address <= address);
        let symbol = self.symbols.get(after.checked_sub(1)?)?;
        let is_inside = match symbol.kind {
            SymbolKind::Function => self.built_in.is_empty() || self.built_in.contains(&address),
            SymbolKind::OfModule => address - symbol.address < FARTHEST,
            SymbolKind::Other => false,
        };
        let name = self.names.get(symbol.name as usize..).filter(|_| is_inside)?;
        name.split('\n').next()
    }

    fn bytes(&self) -> u64 {
        (size_of_val(&*self.symbols) + self.names.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_kernel_function_is_named_kernel() {
        let mut names = KernelNames::default();
        names.learn(&[0, 4096], u64::MAX);
        assert_eq!(names.function(0), "[kernel]");
        assert_eq!(names.function(4096), "[kernel]");
    }

    #[test]
    fn names_functions_if_the_system_shows_their_addresses() {
        let Ok(lines) = kernel_symbols() else { return };
        let mut lines = lines.lines().map(Result::unwrap);
        let Some(line) = lines.find(|line| line.ends_with(" T schedule")) else { return };
        let (address, name) = line.split_once(" T ").unwrap();
        let address = u64::from_str_radix(address, 16).unwrap();
        if address == 0 {
            return;
        }
        let mut names = KernelNames::default();
        names.learn(&[address + 1], u64::MAX);
        assert_eq!(names.function(address + 1), name);
        assert!(names.table.as_ref().unwrap().is_lasting(address + 1));
        let bytes = names.bytes();
        assert!((100_000..100_000_000).contains(&bytes), "{bytes}");
        // The names are available even if the table may not be cached.
        names.learn(&[address + 2], bytes - 1);
        assert_eq!((names.function(address + 2).as_str(), names.bytes()), (name, 0));
        assert_eq!(names.function(address + 1), "[kernel]", "it belongs to another profile");
    }

    const TABLE: &[u8] = b"\
        ffffffff81000000 T _stext\n\
        ffffffff81000040 d a_table_in_between\n\
        ffffffff81000040 T do_it\n\
        ffffffff81000040 t do_it_too\n\
        ffffffff81000080 d some_data\n\
        \xff is no text\n\
        ffffffff81000100 W weak\n\
        ffffffff81000200 T _etext\n\
        ffffffff82000000 t only_at_the_start_of_the_system\n\
        0000000000000000 T hidden\n\
        ffffffffc0000000 t of_a_module\t[module]\n\
        ffffffffc0100000 t of_another\t[other]\n\
        ffffffffc0200000 t _etext\t[other]\n";

    #[test]
    fn a_function_goes_from_its_start_to_the_next_symbol() {
        let table = KernelTable::parse(TABLE).unwrap();
        for (address, name) in [
            (0xffff_ffff_80ff_ffff, None),
            (0xffff_ffff_8100_0040, Some("do_it")),
            (0xffff_ffff_8100_007f, Some("do_it")),
            (0xffff_ffff_8100_0080, None),
            (0xffff_ffff_8100_0100, Some("weak")),
            (0xffff_ffff_8100_0200, None),
            (0xffff_ffff_8200_0010, None),
            (0xffff_ffff_c000_0010, Some("of_a_module")),
            (0xffff_ffff_c000_1000, None),
            (0xffff_ffff_c010_0010, Some("of_another")),
        ] {
            assert_eq!(table.function(address), name, "{address:x}");
        }
    }

    #[test]
    fn only_built_in_code_never_changes() {
        let table = KernelTable::parse(TABLE).unwrap();
        assert!(table.is_lasting(0xffff_ffff_8100_0100));
        assert!(!table.is_lasting(0xffff_ffff_c000_0010));
        let hidden = KernelTable::parse(&b"0000000000000000 T _stext\n"[..]).unwrap();
        assert!(!hidden.is_lasting(0xffff_ffff_8100_0100), "addresses may become visible");
    }
}

//! Names of the kernel's functions, if `/proc/kallsyms` shows their addresses.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufRead, BufReader};

/// The names of the functions in the current profile, by address.
#[derive(Debug, Default)]
pub(super) struct KernelNames(HashMap<u64, String>);

impl KernelNames {
    /// Looks up all addresses of a profile at once: the table has 100,000 lines and more, takes megabytes, and the kernel
    /// takes some 50 ms to write it.
    pub(super) fn learn(&mut self, addresses: impl IntoIterator<Item = u64>) {
        let mut wanted = addresses.into_iter().filter(|address| *address != 0).peekable();
        let table = wanted.peek().and_then(|_| kernel_symbols().ok());
        // The next read may succeed.
        let names = table.and_then(|table| names_in(table, wanted).ok());
        self.0 = names.unwrap_or_default();
    }

    /// The function's name; `[kernel]` if it is unknown.
    pub(super) fn function(&self, address: u64) -> String {
        self.0.get(&address).map_or_else(|| "[kernel]".to_owned(), String::clone)
    }
}

/// The kernel's functions and their addresses, as documented in proc_kallsyms(5).
fn kernel_symbols() -> io::Result<impl BufRead> {
    Ok(BufReader::with_capacity(1 << 16, File::open("/proc/kallsyms")?))
}

#[derive(Default)]
struct Symbol {
    address: u64,
    kind: SymbolKind,
    name: String,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum SymbolKind {
    Function,
    /// In a module, BPF program or trampoline.
    OfModule,
    /// Only shows where a function ends.
    #[default]
    Other,
}

/// How far from its start an address is attributed to a function of a module. The table does not state where functions
/// end, and there may be code without symbols between two modules.
const FARTHEST: u64 = 4096;

/// The names of the functions at these addresses in the content of `/proc/kallsyms`. (Its format: proc_kallsyms(5), and
/// nm(1) for the types.)
pub(super) fn names_in(
    mut lines: impl BufRead,
    addresses: impl Iterator<Item = u64>,
) -> io::Result<HashMap<u64, String>> {
    // The last symbol up to each address, if there is one after the address before that.
    let mut last: BTreeMap<_, _> = addresses.map(|address| (address, Symbol::default())).collect();
    // The range of the built-in code; empty if unknown.
    let mut built_in = 0..0;
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line)? != 0 {
        if let Some((address, kind, name)) = std::str::from_utf8(&line).ok().and_then(symbol_in) {
            match (kind, name) {
                (SymbolKind::Function, "_stext") => built_in.start = address,
                (SymbolKind::Function, "_etext") => built_in.end = address,
                _ => {}
            }
            if let Some((_, known)) = last.range_mut(address..).next() {
                // Of several symbols at one address, the first function.
                let is_other = known.kind == SymbolKind::Other && kind != SymbolKind::Other;
                if address > known.address || address == known.address && is_other {
                    (known.address, known.kind) = (address, kind);
                    name.clone_into(&mut known.name);
                }
            }
        }
        line.clear();
    }
    let (mut names, mut symbol) = (HashMap::new(), Symbol::default());
    for (address, later) in last {
        if later.address > symbol.address {
            symbol = later;
        }
        let is_inside = match symbol.kind {
            SymbolKind::Function => built_in.is_empty() || built_in.contains(&address),
            SymbolKind::OfModule => address - symbol.address < FARTHEST,
            SymbolKind::Other => false,
        };
        if is_inside {
            names.insert(address, symbol.name.clone());
        }
    }
    Ok(names)
}

/// Parses `ffffffff81000000 T schedule`, followed by ` [name]` for a module. The address is zero for readers without
/// permission to see addresses.
fn symbol_in(line: &str) -> Option<(u64, SymbolKind, &str)> {
    let mut words = line.split_ascii_whitespace();
    let (address, kind, name) = (words.next()?, words.next()?, words.next()?);
    let address = u64::from_str_radix(address, 16).ok().filter(|address| *address != 0)?;
    let kind = match (kind, words.next()) {
        ("T" | "t" | "W" | "w", None) => SymbolKind::Function,
        ("T" | "t" | "W" | "w", Some(_)) => SymbolKind::OfModule,
        _ => SymbolKind::Other,
    };
    Some((address, kind, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_kernel_function_is_named_kernel() {
        let mut names = KernelNames::default();
        names.learn([0, 4096]);
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
        names.learn([address + 1]);
        assert_eq!(names.function(address + 1), name);
        names.learn([address + 2]);
        assert_eq!(names.function(address + 2), name);
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
        let functions = [
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
        ];
        let together = names_in(TABLE, functions.iter().map(|(address, _)| *address)).unwrap();
        for (address, name) in functions {
            let alone = names_in(TABLE, [address].into_iter()).unwrap();
            for names in [&together, &alone] {
                assert_eq!(names.get(&address).map(String::as_str), name, "{address:x}");
            }
        }
    }
}

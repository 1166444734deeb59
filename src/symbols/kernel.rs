//! Names of the kernel's functions, where `/proc/kallsyms` gives their addresses.

use std::collections::HashMap;

use blazesym::MaybeDefault;
use blazesym::symbolize::source::{Kernel, Source};
use blazesym::symbolize::{Input, Symbolizer};

/// The functions of addresses that were asked for.
#[derive(Debug, Default)]
pub(super) struct KernelNames {
    /// `None` for those that have no name: most users may not know the kernel's addresses.
    functions: HashMap<u64, Option<String>>,
}

impl KernelNames {
    /// Looks up those that are new, all at once: the table has 100,000 lines and more, and is read
    /// anew each time, and given back, since its file never looks the same twice to a cache.
    pub(super) fn learn(&mut self, addresses: &[u64]) {
        let is_new = |address: &u64| *address != 0 && !self.functions.contains_key(address);
        let new: Vec<u64> = addresses.iter().copied().filter(is_new).collect();
        if new.is_empty() {
            return;
        }
        // Its debug information, where that is installed at all, takes seconds to read.
        let kernel = Source::Kernel(Kernel { vmlinux: MaybeDefault::None, ..Kernel::default() });
        let symbolizer = Symbolizer::new();
        let found = symbolizer.symbolize(&kernel, Input::AbsAddr(&new)).unwrap_or_default();
        let mut names = found.into_iter().map(|symbol| symbol.into_sym());
        for address in new {
            let name = names.next().flatten().map(|symbol| symbol.name.into_owned());
            self.functions.insert(address, name);
        }
    }

    /// The function's name; `[kernel]` if it is not known.
    pub(super) fn function(&self, address: u64) -> String {
        let known = self.functions.get(&address).and_then(Option::clone);
        known.unwrap_or_else(|| "[kernel]".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_names_it_is_the_kernel() {
        let mut names = KernelNames::default();
        names.learn(&[0, 4096]);
        assert_eq!(names.function(0), "[kernel]");
        assert_eq!(names.function(4096), "[kernel]");
    }

    #[test]
    fn names_functions_where_the_system_says_their_addresses() {
        let table = std::fs::read_to_string("/proc/kallsyms").unwrap_or_default();
        let mut symbols = table.lines().filter_map(|line| line.split_once(" T "));
        let Some((address, name)) = symbols.find(|(_, name)| *name == "schedule") else { return };
        let address = u64::from_str_radix(address, 16).unwrap();
        if address == 0 {
            return;
        }
        let start = std::time::Instant::now();
        let mut names = KernelNames::default();
        names.learn(&[address + 1]);
        eprintln!("{:?}", start.elapsed());
        assert_eq!(names.function(address + 1), name);
    }
}

//! Parsers of outside bytes, for the fuzz targets.

use super::kernel::KernelTable;
use super::names::demangle;
use super::sections::{Sections, build_id_of};
use crate::profile::LONGEST_NAME;

/// Reads `bytes` as a file of code.
pub(crate) fn elf(bytes: &[u8]) {
    _ = Sections::of(bytes);
    _ = build_id_of(bytes);
}

/// Reads `bytes` as the kernel's list of functions, and looks one up.
pub(crate) fn kernel(bytes: &[u8], address: u64) {
    if let Ok(table) = KernelTable::parse(bytes) {
        _ = table.function(address);
    }
}

/// Reads `symbol` as a mangled name.
pub(crate) fn name(symbol: &str) {
    assert!(demangle(symbol).0.len() <= LONGEST_NAME);
}

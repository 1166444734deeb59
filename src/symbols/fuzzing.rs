//! Parsers of untrusted bytes, for the fuzz targets.

use std::io;

use super::embedded::decompress;
use super::kernel::KernelTable;
use super::names::demangle;
use super::sections::{Sections, build_id_of};
use crate::profile::LONGEST_NAME;

/// Parses `bytes` as an object file, and as embedded symbols.
pub(crate) fn elf(bytes: &[u8]) {
    _ = decompress(bytes, &mut io::sink(), 1 << 20);
    _ = Sections::of(bytes);
    _ = build_id_of(bytes);
}

/// Parses `bytes` as the kernel's symbol table, and looks up a function.
pub(crate) fn kernel(bytes: &[u8], address: u64) {
    if let Ok(table) = KernelTable::parse(bytes) {
        _ = table.function(address);
    }
}

/// Demangles `symbol`.
pub(crate) fn name(symbol: &str) {
    assert!(demangle(symbol).0.len() <= LONGEST_NAME);
}

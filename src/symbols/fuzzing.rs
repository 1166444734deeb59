//! Parsers of untrusted bytes, for the fuzz targets.

use std::io;

use super::embedded::decompress;
use super::names::demangle;
use super::sections::{Sections, build_id_of};
use crate::profile::LONGEST_NAME;

/// Parses `bytes` as an object file, and as embedded symbols.
pub(crate) fn elf(bytes: &[u8]) {
    _ = decompress(bytes, &mut io::sink(), 1 << 20);
    _ = Sections::of(bytes);
    _ = build_id_of(bytes);
}

/// Demangles `symbol`.
pub(crate) fn name(symbol: &str) {
    assert!(demangle(symbol).0.len() <= LONGEST_NAME);
}

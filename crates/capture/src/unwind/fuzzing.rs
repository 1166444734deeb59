//! Parsers of external bytes, for the fuzz targets.

use super::calls::{aarch64_call, x86_64_calls, x86_64_jumps, x86_64_saved_frames};
use super::modules::build_id_in;
use super::tables::frames_start;

/// Parses `bytes` as notes and as the header of unwind tables.
pub(crate) fn tables(bytes: &[u8], address: u64) {
    if let Some(id) = build_id_in(bytes) {
        assert!(id.len() <= bytes.len());
    }
    _ = frames_start(bytes, address);
}

/// Decodes code as calls, jumps and a prologue.
pub(crate) fn code(bytes: [u8; 32], address: u64) {
    let [call @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = bytes;
    _ = x86_64_calls(call, address);
    _ = aarch64_call(call, address);
    assert!(x86_64_jumps(&bytes, address).count() < bytes.len());
    _ = x86_64_saved_frames(&bytes);
}

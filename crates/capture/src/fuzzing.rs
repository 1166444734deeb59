//! Parsers of external bytes, for the fuzz targets in `fuzz/`. Compiled only for these.

use crate::sampler::record::{Machine, Record, Records, read_sample, stated_position};
use crate::sys;
use crate::unwind::fuzzing as unwind;

/// Parses `bytes` as a ring of each machine. Returns the number of records.
pub fn records(bytes: &[u8]) -> usize {
    let mut count = 0;
    for record in Records::between(bytes, 0, bytes.len() as u64).flatten() {
        count += 1;
        let (Record::Sample(place) | Record::Lost { place, .. }) = record else { continue };
        stated_position(bytes, place);
        for machine in [Machine::X86_64, Machine::Aarch64] {
            let Ok(sample) = read_sample(bytes, place, machine) else { continue };
            let stack = sample.stack;
            assert!(stack.length() < u64::from(place.size));
            assert!(stack.word(stack.length()).is_none());
            assert!(sample.kernel_chain.iter().count() < usize::from(place.size) / 8);
        }
    }
    count
}

/// Parses `bytes` as notes and as the header of unwind tables.
pub fn tables(bytes: &[u8], address: u64) {
    unwind::tables(bytes, address);
}

/// Parses `bytes` as code, and as calls in it.
pub fn code(bytes: &[u8]) {
    let address = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
    bytes.as_chunks().0.iter().for_each(|code| unwind::code(*code, address));
}

/// Parses a line of `/proc/self/maps`.
pub fn map(line: &[u8]) {
    _ = sys::parse_map(line);
}

/// Parses `text` as the kernel's texts about threads. Returns whether each of the two was understood.
pub fn proc_texts(text: &str) -> (bool, bool) {
    sys::read_proc_texts(text)
}

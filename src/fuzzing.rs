//! What the fuzz targets in `fuzz/` call; compiled for them alone.

use crate::sampler::record::{Machine, Record, Records, read_sample};

/// Reads `bytes` as a ring of either machine. Returns how many records were found.
pub fn records(bytes: &[u8]) -> usize {
    let mut count = 0;
    for record in Records::between(bytes, 0, bytes.len() as u64).flatten() {
        count += 1;
        if let Record::Sample(place) = record {
            for machine in [Machine::X86_64, Machine::Aarch64] {
                let Ok(sample) = read_sample(bytes, place, machine) else { continue };
                let stack = sample.stack;
                assert!(stack.length() < u64::from(place.size));
                assert!(stack.word(stack.length()).is_none());
            }
        }
    }
    count
}

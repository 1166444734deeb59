//! What the fuzz targets in `fuzz/` call; compiled for them alone.

use crate::sampler::record::{Layout, Machine, Record, Records, read_sample, said_position};

/// Reads `bytes` as a ring of either machine, with call chains of the kernel and without. Returns how
/// many records were found.
pub fn records(bytes: &[u8]) -> usize {
    let mut count = 0;
    for record in Records::between(bytes, 0, bytes.len() as u64).flatten() {
        count += 1;
        let (Record::Sample(place) | Record::Lost { place, .. }) = record else { continue };
        said_position(bytes, place);
        for machine in [Machine::X86_64, Machine::Aarch64] {
            for has_kernel_chain in [false, true] {
                let layout = Layout { machine, has_kernel_chain };
                let Ok(sample) = read_sample(bytes, place, layout) else { continue };
                let stack = sample.stack;
                assert!(stack.length() < u64::from(place.size));
                assert!(stack.word(stack.length()).is_none());
                assert!(sample.kernel_chain.count() < usize::from(place.size) / 8);
            }
        }
    }
    count
}

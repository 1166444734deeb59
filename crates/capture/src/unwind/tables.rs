//! The locations of unwind tables in memory.

use std::ops::{Deref, Range};
use std::sync::Arc;

use gimli::UnwindSection as _;

use super::rules::{TableFrames, TableRow};
use crate::sys::{LoadedModule, program_memory, read_own_memory};

#[derive(Clone, Debug)]
pub enum TableBytes {
    /// Of the program itself, which is never unloaded.
    Program(&'static [u8]),
    /// A copy, since a library can be unloaded at any time.
    Copy(Arc<[u8]>),
}

impl Deref for TableBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Program(bytes) => bytes,
            Self::Copy(bytes) => bytes,
        }
    }
}

impl Default for TableBytes {
    fn default() -> Self {
        Self::Program(&[])
    }
}

impl TableBytes {
    fn of(addresses: Range<u64>) -> Option<Self> {
        match program_memory(addresses.clone()) {
            Some(bytes) => Some(Self::Program(bytes)),
            None => read_own_memory(addresses).ok().map(|bytes| Self::Copy(bytes.into())),
        }
    }
}

/// `.eh_frame_hdr` and `.eh_frame`, with their addresses in memory.
#[derive(Clone, Debug)]
pub(crate) struct UnwindTables {
    pub(crate) header: TableBytes,
    pub(crate) header_addresses: Range<u64>,
    pub(crate) frames: TableBytes,
    pub(crate) frames_addresses: Range<u64>,
}

impl UnwindTables {
    /// The tables of a module, if it has any.
    ///
    /// Only the header's length is known in advance. `.eh_frame` is assumed to extend to the end of its segment: what follows
    /// the section is never read, since the header's index has the location of each entry.
    pub(crate) fn of(module: &LoadedModule) -> Option<Self> {
        let header_addresses = module.eh_frame_hdr.as_ref()?.addresses.clone();
        // A damaged file may state any address.
        let is_inside = |segment: &&Range<u64>| {
            segment.start <= header_addresses.start && header_addresses.end <= segment.end
        };
        let segments = || module.loaded.iter().map(|part| &part.addresses);
        segments().find(is_inside)?;
        let header = TableBytes::of(header_addresses.clone())?;
        let start = frames_start(&header, header_addresses.start)?;
        let segment = segments().find(|segment| segment.contains(&start))?;
        let frames_addresses = start..segment.end;
        let frames = TableBytes::of(frames_addresses.clone())?;
        Some(Self { header, header_addresses, frames, frames_addresses })
    }

    pub(crate) fn function_start(&self, address: u64) -> Option<u64> {
        self.with_entry(address, |_, _, entry| Some(entry.initial_address()))
    }

    /// Uses the row for an address in memory, if there is one.
    pub(super) fn with_row<T>(
        &self,
        address: u64,
        context: &mut gimli::UnwindContext<usize>,
        with: impl FnOnce(&TableRow, (&TableFrames<'_>, gimli::Encoding)) -> T,
    ) -> Option<T> {
        self.with_entry(address, |frames, bases, entry| {
            let row = entry.unwind_info_for_address(frames, bases, context, address).ok()?;
            Some(with(row, (frames, entry.cie().encoding())))
        })
    }

    fn with_entry<T>(
        &self,
        address: u64,
        with: impl for<'a> FnOnce(&TableFrames<'a>, &gimli::BaseAddresses, &TableEntry<'a>) -> Option<T>,
    ) -> Option<T> {
        let bases = gimli::BaseAddresses::default()
            .set_eh_frame_hdr(self.header_addresses.start)
            .set_eh_frame(self.frames_addresses.start);
        let header = gimli::EhFrameHdr::new(&self.header, gimli::NativeEndian)
            .parse(&bases, size_of::<usize>() as u8)
            .ok()?;
        let mut frames = gimli::EhFrame::new(&self.frames, gimli::NativeEndian);
        frames.set_address_size(size_of::<usize>() as u8);
        let entry = header.table()?.fde_for_address(
            &frames,
            &bases,
            address,
            gimli::EhFrame::cie_from_offset,
        );
        with(&frames, &bases, &entry.ok()?)
    }
}

type TableEntry<'a> = gimli::FrameDescriptionEntry<gimli::EndianSlice<'a, gimli::NativeEndian>>;

/// The address of `.eh_frame` in an `.eh_frame_hdr` at `address`.
pub(super) fn frames_start(header: &[u8], address: u64) -> Option<u64> {
    let bases = gimli::BaseAddresses::default().set_eh_frame_hdr(address);
    let parsed = gimli::EhFrameHdr::new(header, gimli::NativeEndian)
        .parse(&bases, size_of::<usize>() as u8)
        .ok()?;
    match parsed.eh_frame_ptr() {
        gimli::Pointer::Direct(start) => Some(start),
        gimli::Pointer::Indirect(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::MappedPart;
    use crate::unwind::unwinder::tests::code;

    #[test]
    fn finds_frames_by_an_offset_from_the_header() {
        // Version 1; pointer relative to itself, signed 4 bytes; a count of 4 bytes; a table relative to the header;
        // pointer 0x1000; count 0.
        let header = [1, 0x1b, 0x03, 0x3b, 0x00, 0x10, 0, 0, 0, 0, 0, 0];
        assert_eq!(frames_start(&header, 0x40_0000), Some(0x40_0000 + 4 + 0x1000));
    }

    #[test]
    fn a_header_with_a_huge_length_is_not_read() {
        for size in [1_u64 << 24, 1 << 40, 1 << 47, u64::MAX - 0x10_1000] {
            let start = 0x10_1000;
            let mut module = code(0x10_0000..0x20_0000);
            let addresses = start..start + size;
            module.eh_frame_hdr = Some(MappedPart { addresses, file_offset: 0x1000 });
            assert!(UnwindTables::of(&module).is_none());
        }
    }

    #[test]
    fn a_malformed_header_has_no_frames() {
        assert_eq!(frames_start(&[], 0), None);
        assert_eq!(frames_start(&[2, 0x1b, 3, 0x3b, 0, 0, 0, 0], 0), None);
        assert_eq!(frames_start(&[1, 0xff, 0xff, 0xff], 0), None);
        assert_eq!(frames_start(&[1, 0x1b], 0), None);
    }
}

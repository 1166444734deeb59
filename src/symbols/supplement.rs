//! Names of functions that are in a supplementary debug file. Blazesym reads strings of it, but no entries.
//!
//! `dwz -m` moves there what the debug information of several files has in common: of functions in headers all but the
//! addresses.

use std::fs::File;
use std::io;
use std::ops::Range;

use gimli::{
    AttributeValue, DebugInfoOffset, Dwarf, DwarfSections, EndianSlice, LittleEndian,
    constants as dwarf,
};

use super::sections::dwarf_of;

/// The debug information of a file and of its supplementary file.
#[derive(Debug)]
pub(super) struct SupplementedNames {
    own: DwarfSections<Vec<u8>>,
    supplement: DwarfSections<Vec<u8>>,
    units: Vec<(Range<u64>, DebugInfoOffset)>,
}

type Bytes<'a> = EndianSlice<'a, LittleEndian>;
type DwarfUnit<'a> = gimli::Unit<Bytes<'a>>;
type DwarfEntry<'a> = gimli::DebuggingInformationEntry<Bytes<'a>>;

/// A name is not further away.
const MAX_REFERENCES: usize = 16;

impl SupplementedNames {
    /// Reads both, of each section at most `most_bytes`.
    pub(super) fn read(own: &File, supplement: &File, most_bytes: u64) -> io::Result<Self> {
        let (own, supplement) = (dwarf_of(own, most_bytes)?, dwarf_of(supplement, most_bytes)?);
        let mut read = Self { own, supplement, units: Vec::new() };
        read.units = read.find_units().map_err(io::Error::other)?;
        Ok(read)
    }

    fn dwarf(&self) -> Dwarf<Bytes<'_>> {
        let slice = |bytes| EndianSlice::new(bytes, LittleEndian);
        self.own.borrow_with_sup(Some(&self.supplement), |bytes: &Vec<u8>| slice(bytes))
    }

    fn find_units(&self) -> gimli::Result<Vec<(Range<u64>, DebugInfoOffset)>> {
        let (dwarf, mut found) = (self.dwarf(), Vec::new());
        let mut units = dwarf.units();
        while let Some(header) = units.next()? {
            let Some(offset) = header.debug_info_offset() else { continue };
            let mut ranges = dwarf.unit_ranges(&dwarf.unit(header)?)?;
            while let Some(range) = ranges.next()? {
                found.push((range.begin..range.end, offset));
            }
        }
        Ok(found)
    }

    /// The names of the function at an address and of those that are inlined there, the outermost first.
    pub(super) fn at(&self, address: u64) -> gimli::Result<Vec<Option<String>>> {
        let Some((_, unit)) = self.units.iter().find(|(range, _)| range.contains(&address)) else {
            return Ok(Vec::new());
        };
        let dwarf = self.dwarf();
        let header = dwarf.debug_info.header_from_offset(*unit)?;
        functions_at(&dwarf, &dwarf.unit(header)?, address)
    }
}

fn functions_at(
    dwarf: &Dwarf<Bytes<'_>>,
    unit: &DwarfUnit<'_>,
    address: u64,
) -> gimli::Result<Vec<Option<String>>> {
    let (mut names, mut is_passed) = (Vec::new(), false);
    let mut entries = unit.entries();
    loop {
        if is_passed {
            entries.next_sibling()?;
        } else if !entries.next_entry()? {
            return Ok(names);
        }
        is_passed = false;
        let Some(entry) = entries.current() else { continue };
        if ![dwarf::DW_TAG_subprogram, dwarf::DW_TAG_inlined_subroutine].contains(&entry.tag()) {
            continue;
        }
        let mut ranges = dwarf.die_ranges(unit, entry)?;
        is_passed = true;
        while let Some(range) = ranges.next()? {
            is_passed &= !(range.begin..range.end).contains(&address);
        }
        if !is_passed {
            names.push(name_of(dwarf, unit, entry, MAX_REFERENCES)?);
        }
    }
}

/// The name that the linker knows, if there is one, of an entry or of what it refers to.
fn name_of(
    dwarf: &Dwarf<Bytes<'_>>,
    unit: &DwarfUnit<'_>,
    entry: &DwarfEntry<'_>,
    references: usize,
) -> gimli::Result<Option<String>> {
    for name in [dwarf::DW_AT_linkage_name, dwarf::DW_AT_MIPS_linkage_name, dwarf::DW_AT_name] {
        if let Some(value) = entry.attr_value(name)
            && let Ok(name) = dwarf.attr_string(unit, value)
        {
            return Ok(Some(name.to_string_lossy().into_owned()));
        }
    }
    let references = references.checked_sub(1);
    let to = [dwarf::DW_AT_abstract_origin, dwarf::DW_AT_specification];
    let to = to.into_iter().find_map(|to| entry.attr_value(to));
    let Some((references, to)) = references.zip(to) else { return Ok(None) };
    let (dwarf, offset) = match to {
        AttributeValue::UnitRef(offset) => {
            return name_of(dwarf, unit, &unit.entry(offset)?, references);
        }
        AttributeValue::DebugInfoRef(offset) => (dwarf, offset),
        AttributeValue::DebugInfoRefSup(offset) => match dwarf.sup() {
            Some(supplement) => (supplement, offset),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    let mut units = dwarf.units();
    while let Some(header) = units.next()? {
        if let Some(offset) = offset.to_unit_offset(&header) {
            let unit = dwarf.unit(header)?;
            return name_of(dwarf, &unit, &unit.entry(offset)?, references);
        }
    }
    Ok(None)
}

//! The files mapped into the process.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;

use crate::sys::types::FileIdentity;

/// The file that is mapped at an address of this process.
pub(crate) fn mapped_file(address: u64) -> Option<FileIdentity> {
    let maps = BufReader::new(File::open("/proc/self/maps").ok()?);
    maps.split(b'\n').map_while(Result::ok).find_map(|line| {
        let (addresses, file) = parse(std::str::from_utf8(&line).ok()?)?;
        addresses.contains(&address).then_some(file)
    })
}

/// The executable mappings of this process.
pub(crate) fn executable_mappings() -> std::io::Result<Vec<Range<u64>>> {
    let maps = BufReader::new(File::open("/proc/self/maps")?);
    let lines = maps.split(b'\n').map_while(Result::ok);
    Ok(lines.filter_map(|line| parse_executable(&line)).collect())
}

/// Parses a line of it, whose name may be any bytes, if the mapping is executable.
fn parse_executable(line: &[u8]) -> Option<Range<u64>> {
    let mut words = line.split(|byte| *byte == b' ');
    let addresses = std::str::from_utf8(words.next()?).ok()?;
    words.next()?.get(2).filter(|access| **access == b'x')?;
    let (start, end) = addresses.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some(hex(start)?..hex(end)?)
}

/// Parses a line of proc_pid_maps(5): `7f0000000000-7f0000001000 r-xp 00001000 08:02 135522  /usr/lib/x.so`.
pub(crate) fn parse(line: &str) -> Option<(std::ops::Range<u64>, FileIdentity)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (_access, _offset) = (words.next()?, words.next()?);
    let (major, minor) = words.next()?.split_once(':')?;
    let inode = words.next()?.parse().ok()?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let device = |text| u32::from_str_radix(text, 16).ok();
    let device = rustix::fs::makedev(device(major)?, device(minor)?);
    Some((hex(start)?..hex(end)?, FileIdentity { device, inode }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn reads_the_lines_of_maps() {
        let line =
            "55d0b2a01000-55d0b2a05000 r-xp 00002000 fd:01 12345    /opt/a program (deleted)";
        let (addresses, file) = parse(line).unwrap();
        assert_eq!(addresses, 0x55d0_b2a0_1000..0x55d0_b2a0_5000);
        assert_eq!((file.device, file.inode), (rustix::fs::makedev(0xfd, 1), 12345));
        for line in ["", "1-2", "1-2 r 0 0 0", "x-y r-xp 0 fd:01 1", "1-2 r-xp 0 fd:01 x", "ä-ö r"]
        {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn code_is_in_executable_mappings() {
        let line = b"7f00-7f80 r-xp 00000000 00:00 0   /opt/\xff x";
        assert_eq!(parse_executable(line), Some(0x7f00..0x7f80));
        for line in [&b"7f00-7f80 rw-p 00000000 00:00 0"[..], b"", b"7f00 r-xp", b"7f00-7f80"] {
            assert_eq!(parse_executable(line), None);
        }
        let mappings = executable_mappings().unwrap();
        let is_code = |address: u64| mappings.iter().any(|mapping| mapping.contains(&address));
        assert!(is_code(code_is_in_executable_mappings as *const () as u64));
        assert!(!is_code((&raw const mappings) as u64));
    }

    #[test]
    fn this_program_is_mapped_where_it_runs() {
        let file = mapped_file(this_program_is_mapped_where_it_runs as *const () as u64).unwrap();
        let metadata = std::fs::metadata(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(file.inode, metadata.ino());
        assert_eq!(mapped_file(0), None);
    }
}

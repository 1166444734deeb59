//! The files mapped into the process.

use std::fs::File;
use std::io::{BufRead, BufReader};

use crate::sys::types::FileIdentity;

/// The file that is mapped at an address of this process.
pub(crate) fn mapped_file(address: u64) -> Option<FileIdentity> {
    let maps = BufReader::new(File::open("/proc/self/maps").ok()?);
    maps.split(b'\n').map_while(Result::ok).find_map(|line| {
        let (addresses, file) = parse(std::str::from_utf8(&line).ok()?)?;
        addresses.contains(&address).then_some(file)
    })
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
    fn this_program_is_mapped_where_it_runs() {
        let file = mapped_file(this_program_is_mapped_where_it_runs as *const () as u64).unwrap();
        let metadata = std::fs::metadata(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(file.inode, metadata.ino());
        assert_eq!(mapped_file(0), None);
    }
}

//! The mappings of the process, and the files that they are of.
#![allow(unsafe_code, reason = "maps a file, to see which one it is")]

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

use super::files::identity;
use crate::sys::types::{FileIdentity, LoadedModule, MappedFile, MappedPart};

/// A line of proc_pid_maps(5): `7f0000000000-7f0000001000 r-xp 00001000 08:02 135522  /usr/lib/x.so`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MapLine<'a> {
    addresses: Range<u64>,
    is_executable: bool,
    offset: u64,
    identity: FileIdentity,
    path: &'a [u8],
}

impl<'a> MapLine<'a> {
    pub(super) fn parse(line: &'a [u8]) -> Option<Self> {
        let mut words = line.splitn(6, |byte| *byte == b' ');
        let mut word = || std::str::from_utf8(words.next()?).ok();
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end) = word()?.split_once('-')?;
        let is_executable = word()?.as_bytes().get(2) == Some(&b'x');
        let offset = hex(word()?)?;
        let (major, minor) = word()?.split_once(':')?;
        let inode = word()?.parse().ok()?;
        let device = |text| u32::from_str_radix(text, 16).ok();
        let device = rustix::fs::makedev(device(major)?, device(minor)?);
        let path = words.next().unwrap_or_default().trim_ascii_start();
        let identity = FileIdentity { device, inode };
        Some(Self { addresses: hex(start)?..hex(end)?, is_executable, offset, identity, path })
    }

    fn is_of_file(&self) -> bool {
        self.identity.inode != 0
    }

    /// Whether a part of a file begins in this mapping, where it should.
    fn has(&self, part: &MappedPart) -> bool {
        let start = part.addresses.start;
        let offset = start.wrapping_sub(self.addresses.start).wrapping_add(self.offset);
        self.is_of_file() && self.addresses.contains(&start) && offset == part.file_offset
    }

    pub(super) fn file(&self) -> MappedFile {
        const DELETED: &[u8] = b" (deleted)";
        // The kernel escapes only this byte.
        let mut path = Vec::with_capacity(self.path.len());
        let mut rest = self.path;
        while let Some((first, others)) = rest.split_first() {
            let escaped = rest.strip_prefix(b"\\012");
            path.push(if escaped.is_some() { b'\n' } else { *first });
            rest = escaped.unwrap_or(others);
        }
        // Unless it is a part of the name.
        let inode = |path: &[u8]| Some(std::fs::metadata(OsStr::from_bytes(path)).ok()?.ino());
        let is_deleted = path.ends_with(DELETED) && inode(&path) != Some(self.identity.inode);
        if is_deleted {
            path.truncate(path.len() - DELETED.len());
        }
        let path = PathBuf::from(OsString::from_vec(path));
        MappedFile { path, is_deleted, identity: self.identity }
    }
}

/// Calls `each` for each mapping, by address, until it returns false.
///
/// The kernel holds the lock of the process's memory while it writes a page of them, and releases it in between.
fn visit(mut each: impl FnMut(&MapLine<'_>) -> bool) -> io::Result<()> {
    let mut maps = BufReader::with_capacity(1 << 16, File::open("/proc/self/maps")?);
    let mut line = Vec::new();
    while maps.read_until(b'\n', &mut line)? > 0 {
        let parsed = MapLine::parse(line.trim_ascii_end());
        if parsed.is_some_and(|mapping| !each(&mapping)) {
            break;
        }
        line.clear();
    }
    Ok(())
}

/// All mappings, or those of code.
pub fn mappings(only_code: bool) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    visit(|mapping| {
        let is_wanted = mapping.is_executable || !only_code;
        found.extend(is_wanted.then(|| mapping.addresses.clone()));
        true
    })?;
    Ok(found)
}

/// Finds which files are mapped where modules are.
pub(super) fn module_files(modules: &[LoadedModule]) -> io::Result<Vec<Option<MappedFile>>> {
    // Code may have been copied to anonymous memory, as for large pages. The rest is still mapped.
    let is_code = |module: &LoadedModule, part| module.code.contains(part);
    let parts = modules.iter().enumerate().flat_map(|(number, module)| {
        module.loaded.iter().map(move |part| (part, number, is_code(module, part)))
    });
    let mut parts: Vec<_> = parts.collect();
    parts.sort_by_key(|(part, ..)| part.addresses.start);
    let mut files = vec![None; modules.len()];
    let mut parts = parts.into_iter().peekable();
    visit(|mapping| {
        while let Some((part, number, is_code)) =
            parts.next_if(|(part, ..)| part.addresses.start < mapping.addresses.end)
        {
            if let Some(file) = files.get_mut(number)
                && mapping.has(part)
                && (is_code || file.is_none())
            {
                *file = Some(mapping.file());
            }
        }
        true
    })?;
    Ok(files)
}

pub(super) fn file_at(address: u64) -> Option<MappedFile> {
    let mut found = None;
    let is_read = visit(|mapping| {
        if mapping.is_of_file() && mapping.addresses.contains(&address) {
            found = Some(mapping.file());
        }
        mapping.addresses.end <= address
    });
    is_read.ok().and(found)
}

impl MappedFile {
    /// A file as it is mapped now, if it is, and a link to it that needs privileges.
    pub fn now(file: FileIdentity) -> io::Result<Option<(Self, PathBuf)>> {
        let mut found = None;
        visit(|mapping| {
            if mapping.identity == file {
                let Range { start, end } = mapping.addresses;
                let link = format!("/proc/self/map_files/{start:x}-{end:x}");
                found = Some((mapping.file(), PathBuf::from(link)));
            }
            found.is_none()
        })?;
        Ok(found)
    }

    /// Whether mappings of this file have that identity. On overlayfs and btrfs, they can have another than the file itself.
    pub fn is_mapped_as(file: &File, expected: FileIdentity) -> bool {
        let is_equal = identity(file).is_ok_and(|identity| identity == expected);
        is_equal || identity_when_mapped(file) == Some(expected)
    }
}

fn identity_when_mapped(file: &File) -> Option<FileIdentity> {
    const LENGTH: usize = 1;
    let access = ProtFlags::empty();
    // SAFETY: the kernel chooses the address of the new mapping, so no other memory is affected. It is never accessed.
    let mapped = unsafe {
        rustix::mm::mmap(ptr::null_mut(), LENGTH, access, MapFlags::PRIVATE, file, 0).ok()?
    };
    let found = file_at(mapped.addr() as u64);
    // SAFETY: the mapping from above, to which there is no reference. If the kernel refuses, it stays.
    _ = unsafe { rustix::mm::munmap(mapped, LENGTH) };
    Some(found?.identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_lines_of_maps() {
        let line =
            b"55d0b2a01000-55d0b2a05000 r-xp 00002000 fd:01 12345    /opt/a program (deleted)";
        let mapping = MapLine::parse(line).unwrap();
        assert_eq!(mapping.addresses, 0x55d0_b2a0_1000..0x55d0_b2a0_5000);
        assert!(mapping.is_executable && mapping.offset == 0x2000);
        let file = mapping.file();
        assert_eq!((file.path, file.is_deleted), (PathBuf::from("/opt/a program"), true));
        let identity = FileIdentity { device: rustix::fs::makedev(0xfd, 1), inode: 12345 };
        assert_eq!(file.identity, identity);
        for line in ["", "1-2", "1-2 r 0 0 0", "x-y r-xp 0 fd:01 1", "1-2 r-xp 0 fd:01 x", "ä-ö r"]
        {
            assert_eq!(MapLine::parse(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn a_path_can_be_any_bytes() {
        for (shown, path, is_deleted) in [
            (&b"/opt/\xff x"[..], &b"/opt/\xff x"[..], false),
            (b"/a\\012b", b"/a\nb", false),
            (b"/a\\b", b"/a\\b", false),
            (b"/memfd:x (deleted)", b"/memfd:x", true),
            (b"", b"", false),
        ] {
            let line = [b"7f00-7f80 r--p 00000000 fd:01 7   ", shown].concat();
            let file = MapLine::parse(&line).unwrap().file();
            assert_eq!((file.path.as_os_str().as_bytes(), file.is_deleted), (path, is_deleted));
        }
    }

    #[test]
    fn a_name_can_end_as_that_of_a_deleted_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a\nb (deleted)");
        let inode = std::fs::File::create(&path).unwrap().metadata().unwrap().ino();
        let shown = path.to_str().unwrap().replace('\n', "\\012");
        let file = |inode: u64| {
            let line = format!("7f00-7f80 r--p 00000000 fd:01 {inode}   {shown}");
            let file = MapLine::parse(line.as_bytes()).unwrap().file();
            (file.path, file.is_deleted)
        };
        assert_eq!(file(inode), (path, false));
        // Another file of that name.
        assert_eq!(file(inode + 1), (dir.path().join("a\nb"), true));
    }

    #[test]
    fn code_is_in_executable_mappings() {
        let mappings = mappings(true).unwrap();
        let is_code = |address: u64| mappings.iter().any(|mapping| mapping.contains(&address));
        assert!(is_code(code_is_in_executable_mappings as *const () as u64));
        assert!(!is_code((&raw const mappings) as u64));
    }

    #[test]
    fn this_program_is_mapped_where_it_runs() {
        let found = file_at(this_program_is_mapped_where_it_runs as *const () as u64).unwrap();
        let path = std::env::current_exe().unwrap();
        assert_eq!((&found.path, found.is_deleted), (&path, false));
        let file = File::open(&path).unwrap();
        assert!(MappedFile::is_mapped_as(&file, found.identity));
        assert_eq!(identity_when_mapped(&file), Some(found.identity));
        assert_eq!(MappedFile::now(found.identity).unwrap().unwrap().0.path, path);
        let other = File::open("/proc/self/exe").unwrap();
        assert!(MappedFile::is_mapped_as(&other, found.identity));
        assert!(!MappedFile::is_mapped_as(&tempfile::tempfile().unwrap(), found.identity));
        assert_eq!(file_at(0), None);
        let none = FileIdentity { inode: u64::MAX, ..found.identity };
        assert!(MappedFile::now(none).unwrap().is_none());
    }
}

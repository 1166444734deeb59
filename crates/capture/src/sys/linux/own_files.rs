//! Detects whether the program has closed the layer's file descriptors.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::process::{Resource, getrlimit};

type Identity = (u64, u64);

/// A file of the layer. A program that closes descriptors it does not own (`close_range`, when it becomes a daemon) closes
/// this as well, and its number may then belong to another file, which is neither used nor closed here.
#[derive(Debug)]
pub(super) struct OwnFile {
    /// Present until the value is dropped.
    file: Option<OwnedFd>,
    /// Unique to this file.
    identity: Identity,
    find: fn(BorrowedFd<'_>) -> Option<Identity>,
}

impl OwnFile {
    /// `find` is what tells it from others; `None` if that fails.
    pub(super) fn new(file: OwnedFd, find: fn(BorrowedFd<'_>) -> Option<Identity>) -> Option<Self> {
        let identity = find(file.as_fd())?;
        Some(Self { file: Some(file), identity, find })
    }

    /// The file, if the descriptor still refers to it.
    pub(super) fn get(&self) -> io::Result<BorrowedFd<'_>> {
        let file = self.file.as_ref().map(AsFd::as_fd);
        let own = file.filter(|file| (self.find)(*file) == Some(self.identity));
        own.ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if self.get().is_err() {
            std::mem::forget(self.file.take());
        }
    }
}

fn identity(file: BorrowedFd<'_>) -> Option<Identity> {
    let status = rustix::fs::fstat(file).ok()?;
    Some((status.st_dev, status.st_ino))
}

/// Represents all file descriptors of a layer by one end of a pipe, without the other.
#[derive(Debug)]
pub struct Files(OwnFile);

impl Files {
    pub(crate) fn new() -> io::Result<Self> {
        let (canary, _) = io::pipe()?;
        let canary = OwnFile::new(canary.into(), identity).ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self(canary))
    }

    /// Takes one system call.
    pub fn still_owned(&self) -> bool {
        self.0.get().is_ok()
    }
}

/// A file of the kernel that stays open to be read again and again, which takes 1.5 µs, and a fifth of opening it each
/// time.
#[derive(Debug)]
pub struct KernelFile(OwnFile);

impl KernelFile {
    /// Fails with [`QuotaExceeded`](io::ErrorKind::QuotaExceeded) if few descriptors are left for the program.
    pub fn open_at(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if is_scarce(file.as_fd()) {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        Ok(Self(OwnFile::new(file.into(), identity).ok_or(io::ErrorKind::Unsupported)?))
    }

    /// Reads the text of the file, which must be no longer than `bytes`.
    pub fn text<'a>(&self, bytes: &'a mut [u8]) -> io::Result<&'a str> {
        let length = rustix::io::pread(self.0.get()?, &mut *bytes, 0)?;
        let text = bytes.get(..length).and_then(|text| std::str::from_utf8(text).ok());
        text.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Whether the number of a file that was just opened shows that most may be open. The rest are for the program.
pub(super) fn is_scarce(file: BorrowedFd<'_>) -> bool {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    u64::from(file.as_raw_fd().unsigned_abs()) >= most / 4 * 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_program_is_not_read_or_closed() {
        let mut bytes = [0; 64];
        let path = Path::new("/proc/self/stat");
        assert!(KernelFile::open_at(path).unwrap().text(&mut bytes).is_ok());
        let program = File::open(path).unwrap();
        let number = program.as_raw_fd();
        // As if the program had closed the layer's file and got the number for another.
        let file = Some(program.into());
        let file = KernelFile(OwnFile { file, identity: (0, 0), find: identity });
        let error = file.text(&mut bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        drop(file);
        assert!(Path::new(&format!("/proc/self/fd/{number}")).exists(), "still open");
    }
}

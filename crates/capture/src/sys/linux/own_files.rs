//! Detects whether the program has closed the layer's file descriptors.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

/// Represents all file descriptors of a layer. A program that closes descriptors it does not own (`close_range`, when
/// it becomes a daemon) closes these as well, and their numbers may then belong to other files.
///
/// The descriptor that represents them is one end of a pipe, without the other.
#[derive(Debug)]
pub struct Files(KernelFile);

fn identity(file: impl AsFd) -> Option<(u64, u64)> {
    let status = rustix::fs::fstat(file).ok()?;
    Some((status.st_dev, status.st_ino))
}

impl Files {
    pub(crate) fn new() -> io::Result<Self> {
        let (canary, _) = io::pipe()?;
        KernelFile::new(OwnedFd::from(canary).into()).map(Self)
    }

    /// Takes one system call.
    pub fn still_owned(&self) -> bool {
        self.0.is_own()
    }
}

/// A file of the kernel that stays open to be read again and again, which takes 1.5 µs, and a fifth of opening it each
/// time. Each read checks that the program has not closed it: its number may belong to another file by then.
#[derive(Debug)]
pub struct KernelFile {
    /// Present until the value is dropped.
    file: Option<File>,
    /// Unique to this file.
    identity: (u64, u64),
}

impl KernelFile {
    fn new(file: File) -> io::Result<Self> {
        let identity = identity(&file).ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self { file: Some(file), identity })
    }

    /// Fails with [`QuotaExceeded`](io::ErrorKind::QuotaExceeded) if few descriptors are left for the program.
    pub fn open_at(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if is_scarce(file.as_fd()) {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        Self::new(file)
    }

    /// Reads the text of the file, which must be no longer than `bytes`.
    pub fn text<'a>(&self, bytes: &'a mut [u8]) -> io::Result<&'a str> {
        let file = self.file.as_ref().filter(|_| self.is_own()).ok_or(io::ErrorKind::BrokenPipe)?;
        let length = file.read_at(bytes, 0)?;
        let text = bytes.get(..length).and_then(|text| std::str::from_utf8(text).ok());
        text.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn is_own(&self) -> bool {
        self.file.as_ref().and_then(identity) == Some(self.identity)
    }
}

impl Drop for KernelFile {
    fn drop(&mut self) {
        if !self.is_own() {
            // The number belongs to another file.
            std::mem::forget(self.file.take());
        }
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
        let file = KernelFile { file: Some(program), identity: (0, 0) };
        let error = file.text(&mut bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        drop(file);
        assert!(Path::new(&format!("/proc/self/fd/{number}")).exists(), "still open");
    }
}

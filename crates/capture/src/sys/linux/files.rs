//! Opening files that may be anything, and files in memory.

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::calls::may;
use crate::sys::types::{FileIdentity, FilteredSyscall};

/// A path that leads to an open file, different for each number.
pub fn path_of_open(file: &File, number: usize) -> PathBuf {
    let again = "../fd/".repeat(number);
    PathBuf::from(format!("/proc/self/fd/{again}{}", file.as_raw_fd()))
}

pub(super) fn identity(file: &File) -> io::Result<FileIdentity> {
    let metadata = file.metadata()?;
    Ok(FileIdentity { device: metadata.dev(), inode: metadata.ino() })
}

pub fn memory_file() -> io::Result<File> {
    const NAME: &CStr = c"tracing-profiling";
    use rustix::fs::{MemfdFlags, memfd_create};
    if !may(FilteredSyscall::MemfdCreate) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Newer kernels can require the flag (`vm.memfd_noexec`), and those before 6.3 do not know it.
    let file = match memfd_create(NAME, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(NAME, flags),
        file => file,
    };
    Ok(file?.into())
}

/// Opens a file for reading that must not be waited for, as for the writer of a FIFO, and follows links.
pub fn open_without_waiting(path: &Path) -> io::Result<File> {
    open_with(path, OFlags::empty())
}

fn open_with(path: &Path, more: OFlags) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | more;
    OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// Opens the regular file at that path for reading, if there is one. Follows no links, and blocks on no FIFO or device.
pub fn open_regular(path: &Path) -> io::Result<Option<File>> {
    match open_with(path, OFlags::NOFOLLOW) {
        Ok(file) => Ok(file.metadata()?.is_file().then_some(file)),
        Err(error) if is_no_file(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the path does not exist, or is a link or a socket.
fn is_no_file(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| [Errno::NOENT, Errno::LOOP, Errno::NXIO].contains(&errno))
}

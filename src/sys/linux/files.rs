//! Files that only their owner may read, and what the kernel says of itself.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

#[cfg(feature = "axum")]
use rustix::fs::OFlags;

use super::calls::may;
use crate::sys::types::{FileIdentity, Unusual};

/// Makes a new file of mode 0600. Fails if there is one: it could be a link to somebody else's.
pub(crate) fn create_private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Whether files can be made in this directory, and it has some room.
pub(crate) fn check_writable(directory: &Path) -> io::Result<()> {
    use rustix::fs::{Access, AtFlags, CWD, accessat, statvfs};
    // With the trailing dot, a file that is no directory is an error.
    let inside = directory.join(".");
    if may(Unusual::Faccessat) {
        accessat(CWD, &inside, Access::WRITE_OK | Access::EXEC_OK, AtFlags::empty())?;
    }
    if !may(Unusual::Statfs) {
        return Ok(());
    }
    let file_system = statvfs(&inside)?;
    // Systems without blocks (`/proc`) say nothing of room.
    let has_blocks = file_system.f_blocks > 0;
    if has_blocks && file_system.f_bavail.saturating_mul(file_system.f_frsize) < LEAST_ROOM {
        return Err(io::ErrorKind::StorageFull.into());
    }
    Ok(())
}

/// Room for the three files of a profile.
const LEAST_ROOM: u64 = 1024 * 1024;

/// Makes a directory, and those above it, of mode 0700; nothing happens if it is there.
pub(crate) fn create_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// A path that leads to a file as long as it is open, another one for each number.
pub(crate) fn path_of_open(file: &File, number: usize) -> PathBuf {
    let again = "../fd/".repeat(number);
    PathBuf::from(format!("/proc/self/fd/{again}{}", file.as_raw_fd()))
}

/// Which file it is.
pub(crate) fn identity(file: &File) -> io::Result<FileIdentity> {
    let metadata = file.metadata()?;
    Ok(FileIdentity { device: metadata.dev(), inode: metadata.ino() })
}

/// A file in memory that has no name.
pub(crate) fn memory_file() -> io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    if !may(Unusual::MemfdCreate) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(memfd_create("tracing-profiling", MemfdFlags::CLOEXEC)?.into())
}

/// The kernel's functions and their addresses, as proc_kallsyms(5) says.
pub(crate) fn kernel_symbols() -> io::Result<impl BufRead> {
    Ok(BufReader::with_capacity(1 << 16, File::open("/proc/kallsyms")?))
}

/// Opens a file to read it, if that is what lies at that path: nothing is followed, and nothing that
/// has no end is waited for.
#[cfg(feature = "axum")]
pub(crate) fn open_regular(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path);
    match opened {
        Ok(file) => Ok(file.metadata()?.is_file().then_some(file)),
        Err(error) if is_no_file(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether there is nothing, or a link, or a socket.
#[cfg(feature = "axum")]
fn is_no_file(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| [Errno::NOENT, Errno::LOOP, Errno::NXIO].contains(&errno))
}

//! Files that only their owner may read, and files of the kernel.

use std::ffi::CStr;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::calls::may;
use crate::sys::types::{FileIdentity, FilteredSyscall};

/// Creates a file of mode 0600. Fails if the path exists: it could be a link to another file.
pub fn create_private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Whether some space is left in this directory, as far as the system says so.
pub fn check_room(directory: &Path) -> io::Result<()> {
    if !may(FilteredSyscall::Statfs) {
        return Ok(());
    }
    let file_system = match rustix::fs::statvfs(directory) {
        Ok(file_system) => file_system,
        Err(error) => return Ok(unless_refused(error)?),
    };
    // File systems without blocks (`/proc`) report no free space.
    let has_blocks = file_system.f_blocks > 0;
    if has_blocks && file_system.f_bavail.saturating_mul(file_system.f_frsize) < LEAST_ROOM {
        return Err(io::ErrorKind::StorageFull.into());
    }
    Ok(())
}

/// An error that says nothing of the directory, but that the call itself is refused, as by a seccomp filter or a sandbox, is
/// none. (A directory that cannot be changed is noticed when the first file is written.)
fn unless_refused(error: Errno) -> Result<(), Errno> {
    const REFUSED: [Errno; 4] = [Errno::NOSYS, Errno::PERM, Errno::INVAL, Errno::OPNOTSUPP];
    if REFUSED.contains(&error) { Ok(()) } else { Err(error) }
}

/// Space for the three files of a profile.
const LEAST_ROOM: u64 = 1024 * 1024;

/// Creates a directory and its parents with mode 0700. Does nothing if the directory exists.
pub fn create_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// A path that leads to an open file, different for each number.
pub fn path_of_open(file: &File, number: usize) -> PathBuf {
    let again = "../fd/".repeat(number);
    PathBuf::from(format!("/proc/self/fd/{again}{}", file.as_raw_fd()))
}

/// The identity of a file.
pub(super) fn identity(file: &File) -> io::Result<FileIdentity> {
    let metadata = file.metadata()?;
    Ok(FileIdentity { device: metadata.dev(), inode: metadata.ino() })
}

/// A file in memory.
pub fn memory_file() -> io::Result<File> {
    named_memory_file(c"tracing-profiling")
}

/// A file in memory, with a name for `/proc`.
pub(super) fn named_memory_file(name: &CStr) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    if !may(FilteredSyscall::MemfdCreate) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Newer kernels can require that it is not executable (`vm.memfd_noexec`). Those before 6.3 do not know the flag.
    let file = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(name, flags),
        file => file,
    };
    Ok(file?.into())
}

/// The kernel's functions and their addresses, as documented in proc_kallsyms(5).
pub fn kernel_symbols() -> io::Result<impl BufRead> {
    Ok(BufReader::with_capacity(1 << 16, File::open("/proc/kallsyms")?))
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

//! The files of modules, all of which are opened here.
//!
//! The path of a module says what it was called when it was loaded. What is there later can be anything, with any content:
//! a FIFO, a device, a file of the kernel, or under `/proc/self/fd` whatever has the number now.

use std::fs::{File, Metadata};
use std::io;
use std::path::Path;

use super::sections::build_id_of;
use crate::sys;
use crate::unwind::Module;

/// Opens a regular file to read. Nothing else is even opened, since that alone can have an effect: it lets a program go on
/// that waits for a reader of a FIFO, and starts some devices.
pub(super) fn open(path: &Path) -> io::Result<File> {
    check(&path.metadata()?)?;
    // Another one can be there by now.
    let file = sys::open_without_waiting(path)?;
    check(&file.metadata()?)?;
    Ok(file)
}

fn check(file: &Metadata) -> io::Result<()> {
    if !file.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    // Those of the kernel state no length. Reading one may wait, or take what is read from others (`/proc/kmsg`).
    if file.len() == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is empty"));
    }
    Ok(())
}

/// Opens the file of a module; `None` if it is not the one that was loaded. Without a build id this is unknown and assumed.
/// The path of the executable always leads to the right file.
pub(super) fn open_loaded(module: &Module) -> io::Result<Option<File>> {
    let file = open(module.path())?;
    let is_loaded = match &module.build_id {
        Some(id) if !module.is_program() => {
            build_id_of(&file).is_ok_and(|found| found.as_ref() == Some(id))
        }
        _ => true,
    };
    Ok(is_loaded.then_some(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_with_content_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |path: &Path| open(path).unwrap_err().to_string();
        assert_eq!(refused(dir.path()), "it is not a regular file");
        let path = dir.path().join("file");
        assert_eq!(open(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(&path, "").unwrap();
        assert_eq!(refused(&path), "it is empty");
        std::fs::write(&path, "content").unwrap();
        assert_eq!(open(&path).unwrap().metadata().unwrap().len(), 7);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_no_file_is_not_opened() {
        use std::os::unix::fs::symlink;
        use std::os::unix::net::UnixListener;
        use std::process::Command;

        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let refused = |path: &Path| open(path).unwrap_err().to_string();
        assert!(Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
        let _socket = UnixListener::bind(at("socket")).unwrap();
        let (pipe, mut to_pipe) = io::pipe().unwrap();
        io::Write::write_all(&mut to_pipe, b"bytes of the program").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&pipe);
        let pipe_path = format!("/proc/self/fd/{number}");
        for path in ["/dev/zero", "/dev/null", "/dev/tty", &pipe_path] {
            assert_eq!(refused(Path::new(path)), "it is not a regular file", "{path}");
            symlink(path, at("link")).unwrap();
            assert_eq!(refused(&at("link")), "it is not a regular file", "{path}");
            std::fs::remove_file(at("link")).unwrap();
        }
        assert_eq!(refused(&at("fifo")), "it is not a regular file");
        assert_eq!(refused(&at("socket")), "it is not a regular file");
        for path in ["/proc/self/maps", "/proc/kmsg", "/proc/self/environ"] {
            assert_eq!(refused(Path::new(path)), "it is empty", "{path}");
        }
        drop(to_pipe);
        assert_eq!(io::read_to_string(pipe).unwrap(), "bytes of the program");
        // A number that leads to a file.
        let file = File::open(std::env::current_exe().unwrap()).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        assert!(open(Path::new(&format!("/proc/self/fd/{number}"))).is_ok());
        assert!(open(Path::new("/proc/self/exe")).is_ok());
    }
}

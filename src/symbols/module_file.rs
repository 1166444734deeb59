//! The files of modules, all of which are opened here.
//!
//! The file of a module is the one that the kernel has mapped at its code. Its path is only a place to look for it: what is
//! there later can be anything, with any content: a FIFO, a device, a file of the kernel, or under `/proc/self/fd` whatever
//! has the number now.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::path::Path;

use super::SymbolProblem;
use super::sections::{ReadAt, build_id_of};
use crate::sys::{self, MappedFile, NoFile};
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
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    // Those of the kernel state no length. Reading one may wait, or take what is read from others (`/proc/kmsg`).
    if file.len() == 0 {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is empty"));
    }
    Ok(())
}

#[derive(Debug)]
pub(super) struct LoadedFile {
    pub(super) file: File,
    /// The kernel allows no write to it, since the process was started by it.
    pub(super) is_protected: bool,
}

const EXECUTABLE: &str = "/proc/self/exe";
const HIDDEN: &str = "it is not at its path any more (moved, or hidden by `chroot` or a mount)";

pub(super) fn open_loaded(module: &Module) -> Result<LoadedFile, SymbolProblem> {
    let mapped = module.file.as_ref().map_err(|why| match why {
        NoFile::Unreadable(error) => SymbolProblem::Mappings(error.clone()),
        NoFile::NotRead => {
            SymbolProblem::Unreadable("the program loads libraries too often".to_owned())
        }
        NoFile::NotMapped => SymbolProblem::Unreadable("its code comes from no file".to_owned()),
    })?;
    let (mut refused, mut is_other_there) = (None, false);
    let mut open_at = |path: &Path| match open(path) {
        Ok(file) if is_loaded(&file, module, mapped) => Some(file),
        Ok(_) => {
            is_other_there = true;
            None
        }
        Err(error) => {
            let is_elsewhere =
                [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::InvalidInput]
                    .contains(&error.kind());
            refused = refused.take().or_else(|| (!is_elsewhere).then_some(error));
            None
        }
    };
    // Nothing else is the program if it was started by the loader (`/lib64/ld-linux-x86-64.so.2 ./program`).
    if module.is_program
        && let Some(file) = open_at(Path::new(EXECUTABLE))
    {
        return Ok(LoadedFile { file, is_protected: true });
    }
    let known = [&mapped.path, &module.loader_name];
    if let Some(file) = known.into_iter().find_map(|path| open_at(path)) {
        return Ok(LoadedFile { file, is_protected: false });
    }
    let now = MappedFile::now(mapped.identity);
    let paths = now.iter().flatten().flat_map(|(now, link)| [&now.path, link]);
    let mut found = paths.filter_map(|path| open(path).ok());
    if let Some(file) = found.find(|file| is_loaded(file, module, mapped)) {
        return Ok(LoadedFile { file, is_protected: false });
    }
    let is_still_there = !mapped.is_deleted && !is_other_there;
    Err(match (refused, &now) {
        (Some(error), _) if !mapped.is_deleted => SymbolProblem::Unreadable(error.to_string()),
        (_, Err(_)) if is_still_there => SymbolProblem::Unreadable(HIDDEN.to_owned()),
        (_, Ok(Some((now, _)))) if is_still_there && !now.is_deleted => {
            SymbolProblem::Unreadable(HIDDEN.to_owned())
        }
        _ => SymbolProblem::Replaced,
    })
}

/// Whether a file is that of a module, and has the same content.
fn is_loaded(file: &File, module: &Module, mapped: &MappedFile) -> bool {
    let is_its_id = |id| build_id_of(file).is_ok_and(|found| found.as_ref() == Some(id));
    let has_content = || match &module.content {
        // Where its code was changed in memory, the build id must do.
        Some(content) if module.build_id.is_none() || !module.is_loaded() => {
            content.is_that_of_file(|offset, most| file.read(offset, most))
        }
        _ => true,
    };
    let is_it = || module.build_id.as_ref().is_none_or(is_its_id) && has_content();
    MappedFile::is_mapped_as(file, mapped.identity) && is_it()
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

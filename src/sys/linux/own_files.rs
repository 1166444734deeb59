//! Whether files of ours still are.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Stands for all files of a layer. A program that closes files that are not its own (`close_range`, as it
/// becomes a daemon) closes these as well, and can have others under their numbers then.
#[derive(Debug)]
pub(crate) struct Files {
    /// Of no use, and known to nobody else. There until it is dropped.
    canary: Option<OwnedFd>,
    /// Which no other file has.
    identity: (u64, u64),
}

fn identity(file: impl AsFd) -> Option<(u64, u64)> {
    let status = rustix::fs::fstat(file).ok()?;
    Some((status.st_dev, status.st_ino))
}

impl Files {
    pub(super) fn new() -> io::Result<Self> {
        // One end of a pipe, without the other.
        let (canary, _) = io::pipe()?;
        let identity = identity(&canary).ok_or(io::ErrorKind::Unsupported)?;
        Ok(Self { canary: Some(canary.into()), identity })
    }

    /// One system call.
    pub(crate) fn are_ours(&self) -> bool {
        self.canary.as_ref().and_then(identity) == Some(self.identity)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        if !self.are_ours() {
            // The number is somebody else's.
            std::mem::forget(self.canary.take());
        }
    }
}

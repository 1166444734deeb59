//! Detects whether the program has closed the layer's file descriptors.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Represents all file descriptors of a layer. A program that closes descriptors it does not own (`close_range`, when
/// it becomes a daemon) closes these as well, and their numbers may then belong to other files.
#[derive(Debug)]
pub(crate) struct Files {
    /// Not used otherwise. Present until the value is dropped.
    canary: Option<OwnedFd>,
    /// Unique to this file.
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

    /// Takes one system call.
    pub(crate) fn still_owned(&self) -> bool {
        self.canary.as_ref().and_then(identity) == Some(self.identity)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        if !self.still_owned() {
            // The number belongs to another file.
            std::mem::forget(self.canary.take());
        }
    }
}

//! Where profiles go.

mod directory;
mod memory;
#[cfg(feature = "_otlp")]
mod otlp;
mod remote;
mod resource;
#[cfg(feature = "axum")]
mod stored;

use std::fmt;
use std::path::{Path, PathBuf};

use crate::profile::Profile;

pub use directory::Directory;
pub use memory::Memory;
#[cfg(all(fuzzing, feature = "otlp-grpc", feature = "otlp-http"))]
pub use otlp::fuzz_answers;
#[cfg(feature = "_otlp")]
pub(crate) use otlp::has_endpoint;
#[cfg(feature = "_otlp")]
pub use otlp::{Compression, OtlpBuilder, OtlpExporter, Protocol};
#[cfg(any(test, feature = "_otlp"))]
pub(crate) use remote::Encoded;
pub(crate) use remote::{Answer, Never, QueueLimits, Remote};
#[cfg(feature = "axum")]
pub(crate) use stored::{StoredFile, list_stored, read_stored};

/// Takes the profiles of kept spans.
///
/// An exporter runs on a thread of its own: it may block, and nothing but later profiles waits
/// for it. All signals are blocked there but those of faults, which threads that it starts inherit.
/// Only [`export`](Self::export) must be there: queue, retries and what is said of losses are not its business.
pub trait Exporter: Send {
    /// Exports one profile. What fails is kept in memory and given again: when [`check`] finds nothing
    /// wrong, at ever longer intervals for an hour. Then it is lost, and counted.
    ///
    /// [`check`]: Self::check
    ///
    /// # Errors
    ///
    /// If the profile could not be exported. The message goes to the log, so it should say what
    /// the user can do.
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError>;

    /// Whether a profile could be exported now, as far as that can be told without one. Asked when
    /// the layer is made, and again from time to time after something failed. Until all is well
    /// again, kept spans get no profile, and so no id that leads nowhere. It must not use the layer's
    /// [`Handle`](crate::Handle), which may wait for it.
    ///
    /// # Errors
    ///
    /// What is wrong; the message goes to the log, as that of [`export`](Self::export).
    fn check(&mut self) -> Result<(), ExportError> {
        Ok(())
    }

    /// Whether it has files or sockets open from one profile to the next. A program that closes all files
    /// (`close_range`) has closed them, and can have others under their numbers: such an exporter is
    /// not called again then, and not dropped.
    fn keeps_files(&self) -> bool {
        true
    }

    /// The folder in which a [`Directory`] keeps the profiles, if that is where they go: there they
    /// can be found again, as by `Handle::router`. Asked once, when the layer is made.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// What sends its requests, if it sends from a thread of its own.
    #[doc(hidden)]
    fn remote(&mut self) -> Option<&mut dyn Remote> {
        None
    }
}

/// What became of a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exported {
    /// The files that were written, the one to look at first in front.
    pub files: Vec<PathBuf>,
}

impl Exported {
    /// The profile is in these files; the one to look at comes first.
    pub fn to_files(files: Vec<PathBuf>) -> Self {
        Self { files }
    }
}

/// That profile can never be exported, and others may be.
#[derive(Debug)]
pub(crate) struct Hopeless(pub(crate) String);

impl std::error::Error for Hopeless {}

impl fmt::Display for Hopeless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a profile could not be exported.
pub type ExportError = Box<dyn std::error::Error + Send + Sync>;

//! Where profiles go.

mod directory;
mod memory;

use std::path::PathBuf;

use crate::profile::Profile;

pub use directory::Directory;
pub use memory::Memory;

/// Takes the profiles of kept spans.
///
/// An exporter runs on a thread of its own: it may block, and nothing but later profiles waits
/// for it.
pub trait Exporter: Send {
    /// Takes one profile. What fails is kept in memory and given again: when [`check`] finds nothing
    /// wrong, at ever longer intervals for some minutes. Then it is lost, and counted.
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
    /// again, kept spans get no profile, and so no id that leads nowhere.
    ///
    /// # Errors
    ///
    /// What is wrong; the message goes to the log, as that of [`export`](Self::export).
    fn check(&mut self) -> Result<(), ExportError> {
        Ok(())
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

/// Why a profile could not be exported.
pub type ExportError = Box<dyn std::error::Error + Send + Sync>;

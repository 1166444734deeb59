//! Where profiles go: the trait that exporters have, files in a directory, and memory.

mod directory;
mod format;
mod memory;
#[doc(hidden)]
pub mod remote;
mod resource;
#[doc(hidden)]
pub mod stored;
#[doc(hidden)]
pub mod typical;

use std::path::{Path, PathBuf};

use crate::encode::HtmlContext;
use crate::profile::Profile;
use crate::text::shortened;

pub use directory::Directory;
#[doc(hidden)]
pub use directory::{OF_PROCESS, stem};
pub use format::Format;
pub use memory::Memory;
#[doc(hidden)]
pub use remote::Remote;
#[doc(hidden)]
pub use resource::of_process;
pub use resource::resource_from_env;

/// Exports the profiles of kept spans.
///
/// An exporter runs on its own thread. It may block; only later profiles wait for it. All signals except those of
/// faults are blocked on that thread, and threads that it starts inherit this. Only [`export`](Self::export) is
/// required: the layer does the queueing and the retries, and reports losses.
pub trait Exporter: Send {
    /// Exports one profile. If that fails, the profile stays in memory and is exported again when [`check`] succeeds,
    /// at increasing intervals for an hour. After that it is dropped and counted.
    ///
    /// [`check`]: Self::check
    ///
    /// # Errors
    ///
    /// If the profile could not be exported. The message is logged, so it should tell the user what to do.
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError>;

    /// Checks whether a profile could be exported now, as far as that is possible without one. Called when the layer is
    /// built, and from time to time after a failure. Until it succeeds again, kept spans get no profile and therefore
    /// no `profile.id`. It must not use the layer's `Handle`, which may wait for it.
    ///
    /// # Errors
    ///
    /// Describes the problem. The message is logged, like that of [`export`](Self::export).
    fn check(&mut self) -> Result<(), ExportError> {
        Ok(())
    }

    /// Whether files or sockets stay open between profiles. A program that closes all file descriptors (`close_range`)
    /// closes them as well, and their numbers may be reused. Such an exporter is then neither called again nor dropped.
    fn keeps_files(&self) -> bool {
        true
    }

    /// The directory in which a [`Directory`] stores the profiles, if there is one. `tracing-profiling-server` and others find
    /// them there. Called once, when the layer is built.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// One that sends over a network. An exporter around it sends each profile on its own.
    #[doc(hidden)]
    fn remote(&mut self) -> Option<&mut dyn Remote> {
        None
    }

    /// Gives the exporter the layer's resource and the links of reports. Called once, before
    /// [`check`](Self::check): when the layer starts, which is later if it is built with rules that keep nothing. It must not use
    /// the layer's handle. An exporter around another one passes it on.
    fn set_context(&mut self, context: &HtmlContext) {
        _ = context;
    }
}

/// The result of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exported {
    /// The files that were written; the first one is the best to start with.
    pub files: Vec<PathBuf>,
}

impl Exported {
    /// The profile was written to these files; the first one is the best to start with.
    pub fn to_files(files: Vec<PathBuf>) -> Self {
        Self { files }
    }
}

/// This profile can never be exported, but others may be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
#[doc(hidden)]
pub struct Unexportable(pub String);

/// Why a profile could not be exported.
pub type ExportError = Box<dyn std::error::Error + Send + Sync>;

/// A setting of an exporter, in code or in a variable, that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is `{value}`: {problem}")]
pub struct InvalidSetting {
    /// What it is called.
    pub name: &'static str,
    value: String,
    problem: String,
}

impl InvalidSetting {
    /// The value is not what is expected.
    pub fn new(name: &'static str, value: &str, expected: &str) -> Self {
        Self::unusable(name, value, format_args!("expected {expected}"))
    }

    /// The value cannot be used because of that problem.
    pub fn unusable(name: &'static str, value: &str, problem: impl std::fmt::Display) -> Self {
        Self { name, value: shortened(value), problem: problem.to_string() }
    }
}

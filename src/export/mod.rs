//! Exporters.

mod directory;
mod format;
mod memory;
#[cfg(feature = "_otlp")]
mod otlp;
#[cfg_attr(
    not(any(test, feature = "_otlp")),
    allow(dead_code, reason = "there is no exporter that sends without a feature for it")
)]
mod remote;
mod resource;
#[cfg(feature = "axum")]
mod stored;
mod typical;

use std::path::{Path, PathBuf};

use crate::encode::HtmlContext;
use crate::profile::Profile;

pub use directory::Directory;
#[cfg(feature = "axum")]
pub(crate) use directory::OF_PROCESS;
pub(crate) use directory::stem;
pub use format::Format;
pub use memory::Memory;
#[cfg(all(fuzzing, feature = "otlp-grpc", feature = "otlp-http"))]
pub use otlp::fuzz_answers;
#[cfg(feature = "_otlp")]
pub(crate) use otlp::has_endpoint;
#[cfg(feature = "_otlp")]
pub use otlp::{Compression, OtlpBuilder, OtlpExporter, Protocol};
pub(crate) use remote::{Answer, QueueLimits, RefusedScope, Remote};
pub(crate) use resource::of_process;
pub use resource::resource_from_env;
#[cfg(feature = "axum")]
pub(crate) use stored::{
    StoredFile, brief_of, list_stored, profile_id_of, read_stored, span_of, summary_of,
};
pub(crate) use typical::{TypicalFile, TypicalFiles, read_typical};

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
    /// no `profile.id`. It must not use the layer's [`Handle`](crate::Handle), which may wait for it.
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

    /// The directory in which a [`Directory`] stores the profiles, if there is one. `Handle::router` and others find
    /// them there. Called once, when the layer is built.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// One of this crate that sends over a network. An exporter around it sends each profile on its own.
    #[doc(hidden)]
    fn remote(&mut self) -> Option<&mut dyn Remote> {
        None
    }

    /// Gives the exporter the layer's [resource](crate::Builder::resource) and the links of reports. Called once, before
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
pub(crate) struct Unexportable(pub(crate) String);

/// Why a profile could not be exported.
pub type ExportError = Box<dyn std::error::Error + Send + Sync>;

//! All that is ever asked of the two threads.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crossbeam::channel::Sender;

use super::room::TakenRoom;
use crate::keep::KeptSpan;
use crate::profile::{MappingId, Profile};
use crate::unwind::Module;

/// Who waits for something to be done, until when.
#[derive(Debug)]
pub(super) struct FlushRequest {
    /// Is told whether all of it was.
    pub(super) done: Sender<bool>,
    pub(super) deadline: Instant,
}

/// Asked of the collector.
#[derive(Debug)]
pub(super) enum Command {
    /// Export what has been kept until now, then say so.
    Flush(FlushRequest),
    /// The same, then end.
    Shutdown(Option<FlushRequest>),
}

impl Command {
    /// Whether whoever asks waits for it to be done.
    pub(super) fn is_waited_for(&self) -> bool {
        matches!(self, Self::Flush(_) | Self::Shutdown(Some(_)))
    }
}

/// Asked of the exporting thread.
#[derive(Debug)]
pub(super) enum Job {
    /// Say this in the log.
    Say { line: String, is_warning: bool },
    /// Symbolize and export.
    Export {
        profile: Box<Profile>,
        modules: HashMap<MappingId, Arc<Module>>,
        kept: Vec<KeptSpan>,
        room: TakenRoom,
    },
    /// Say that these were kept and have no profile.
    Report(Vec<KeptSpan>),
    /// Everything before this is done.
    Done(FlushRequest),
    /// End, and then say so.
    Stop(Vec<FlushRequest>),
}

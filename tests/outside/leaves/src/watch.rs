use std::future::Future;

use tracing::{Instrument as _, info_span};
use tracing_profiling::ProfiledExt as _;

use crate::probe::Probe;

/// How the future of a case is watched.
#[derive(Clone)]
pub enum Watch {
    Probe(Probe),
    /// In a profiled span.
    Profiled,
}

impl Watch {
    pub async fn run(self, future: impl Future<Output = ()> + Send + 'static) {
        match self {
            Self::Probe(probe) => probe.watch(future).await,
            Self::Profiled => future.instrument(info_span!("case")).profiled().await,
        }
    }
}

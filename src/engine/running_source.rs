//! The source of samples that is in use, and what became of it.

use crate::facts::TimeBreakdown;
use crate::keep::NoProfile;
use crate::log::LogEvent;
use crate::sampler::Sampler;

/// The source of samples that is in use.
#[derive(Debug)]
pub(crate) struct RunningSource {
    /// Describes it and what it cannot see; a warning if that is less than was requested.
    pub(crate) line: LogEvent,
    pub(crate) sampler: Sampler,
}

impl RunningSource {
    /// Describes it as it is now.
    pub(crate) fn describe(&self) -> String {
        let found = &self.line.message;
        self.sampler.unsampled().map_or_else(|| found.clone(), |why| format!("{found}; {why}"))
    }

    /// Why a span has no samples.
    pub(crate) fn without_samples(&self, account: &TimeBreakdown) -> NoProfile {
        if self.sampler.is_refused() {
            NoProfile::SamplingUnavailable
        } else if self.sampler.is_silent()
            || account.has_no_sampled_time() && self.sampler.unsampled().is_some()
        {
            NoProfile::ThreadsNotSampled
        } else {
            NoProfile::NoSamples
        }
    }
}

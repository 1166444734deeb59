//! What is reported about kept spans.

use std::path::PathBuf;
use std::sync::Arc;

use tracing::Metadata;

use crate::compare::Comparison;
use crate::facts::{Facts, Reasons, TimeBreakdown};
use crate::profile::{Awaits, ComparedSummary, Hotspot, Hotspots, ProfileId, SampleKind, Waits};
use crate::span::{SampleCounts, SpanKey, TraceIds};
use crate::text::beginning;

/// Spans of one local root that were kept together, and their profile.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Kept {
    /// The spans, the outermost first.
    pub spans: Vec<KeptSpan>,
    /// The profile, if it was exported.
    pub profile: Option<ProfileId>,
    /// The number of samples in the profile.
    pub samples: usize,
    pub(crate) hotspots: Hotspots,
    /// The share of the on-CPU time that its samples represent, from 0 to 1; see
    /// [`Profile::coverage`](crate::profile::Profile::coverage). Of threads that ran for less than the time between two
    /// samples there is little, and of threads that were not sampled nothing.
    pub coverage: Option<f64>,
    /// What it waited for, as far as waits were captured: waits of 10 ms and more, and some shorter ones.
    pub waits: Waits,
    /// What it awaited while it was in no thread, and how long it had been woken and was not polled: of all spans of the
    /// profile whose futures are polled through `Profiled`. [`TimeBreakdown::awaiting`] is a span's own time.
    pub awaits: Awaits,
    pub(crate) compared: Option<ComparedSummary>,
    /// The files that were written; the first one is the best to start with.
    pub files: Vec<PathBuf>,
}

impl Kept {
    /// The own function that holds most of the profile's samples of a kind: of CPU time, waits, awaits or allocated bytes.
    /// `None` if there are none.
    pub fn hotspot(&self, kind: SampleKind) -> Option<&Hotspot> {
        self.hotspots.of(kind)
    }

    /// The outermost of the spans against typical ones of its name and route: what it spent its time in that they did
    /// not. `None` if there are no reference spans of its cohort yet; see
    /// [`Builder::references`](crate::Builder::references).
    pub fn comparison(&self) -> Option<&Comparison> {
        self.compared.as_ref()?.comparison.as_deref()
    }
}

pub(crate) type OnKept = Box<dyn Fn(&Kept) + Send>;

/// A span that was kept.
#[derive(Clone, Debug)]
pub struct KeptSpan {
    pub(crate) key: SpanKey,
    pub(crate) root: SpanKey,
    pub(crate) metadata: &'static Metadata<'static>,
    /// Everything that is known of it. Texts are redacted.
    pub facts: Facts,
    /// What the first `ERROR` event in it says, redacted, or the status of its response, and whether it reports a panic. For the log alone.
    pub(crate) error: Option<(Arc<str>, bool)>,
    /// Equal rules have the same id.
    pub(crate) rule: u64,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) opened_ns: u64,
    /// When the response of its request was ready, after its creation; `None` if it is none of a server with
    /// [`AwaitsLayer`](crate::tower::AwaitsLayer).
    pub(crate) answered_ns: Option<u64>,
    /// For how long the process was stopped while it was open, or the machine paused; known when it is exported.
    pub(crate) stopped_ns: u64,
    pub(crate) samples: SampleCounts,
    pub(crate) link: SpanLink,
    pub(crate) profile: Result<ProfileId, NoProfile>,
    pub(crate) earlier: Vec<ProfileId>,
    /// The spans around it, from the inside out.
    pub(crate) around: Vec<SpanKey>,
}

/// What the samples in a kept span link to, unless they are in an inner one that was kept before.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpanLink {
    /// The span; `None` if each sample links to its innermost span.
    pub(crate) to: Option<SpanKey>,
    /// The ids under which that span is exported, or the span itself if `to` is `None`.
    pub(crate) ids: Option<TraceIds>,
    /// The profile has on-CPU samples of the span that link to `ids`.
    pub(crate) has_on_cpu: bool,
    /// The spans around `to`.
    pub(crate) outside: Vec<SpanKey>,
    /// When it was decided which spans are open for long, in ticks.
    pub(crate) at: u64,
}

impl KeptSpan {
    /// The span's name, or the first 1,024 bytes of a longer one.
    pub fn name(&self) -> &'static str {
        beginning(self.metadata.name())
    }

    /// The span's target.
    pub fn target(&self) -> &'static str {
        self.metadata.target()
    }

    /// The values of its fields that identify it, after redaction: those of
    /// [`Builder::span_fields`](crate::Builder::span_fields), as they were when it closed.
    pub fn fields(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.facts.fields.iter().map(|(name, value)| (*name, value.as_str()))
    }

    /// Why it was kept.
    pub fn reasons(&self) -> Reasons {
        self.facts.reasons
    }

    /// Whether it was kept while open, because it hung or was open for too long. Its account then covers the time until
    /// then, and its trace ids are not known yet. It is judged again when it closes, and the profile that it gets then
    /// contains all samples of this one.
    pub fn is_open(&self) -> bool {
        self.facts.is_open
    }

    /// Where its time went.
    pub fn times(&self) -> &TimeBreakdown {
        &self.facts.times
    }

    /// The number of samples, waits and awaits in it and in the spans inside it. Its own idle time that no
    /// [`Profiled`](crate::Profiled) explains, which its profile may show, is no reason for a profile and not counted.
    pub fn samples(&self) -> u64 {
        self.samples.total()
    }

    /// The id of its profile, or why it has none.
    pub fn profile(&self) -> Result<ProfileId, NoProfile> {
        self.profile
    }

    /// The profiles that were made of it while it was open, because it hung or was open for too long. Its own profile
    /// has all their samples that are still held.
    pub fn earlier_profiles(&self) -> &[ProfileId] {
        &self.earlier
    }
}

/// Why a kept span has no profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoProfile {
    /// No sample fell in it: it was blocked, it was too short, or its thread could not be sampled.
    #[error("no sample fell in it")]
    NoSamples,
    /// The system does not allow sampling; the first log line states why.
    #[error("sampling is unavailable")]
    SamplingUnavailable,
    /// The span's threads could not be sampled; the log and [`Handle::source`](crate::Handle::source) state why.
    #[error("its threads were not sampled; an earlier line says why")]
    ThreadsNotSampled,
    /// The span's rule has reached its limit of profiles per minute, for spans of its name and values or as a whole.
    #[error("over the rate limit of its rule")]
    RateLimit,
    /// Too many profiles wait for export.
    #[error("too many profiles wait to be exported")]
    ExporterBusy,
    /// 1,024 spans of the same local root were kept and not exported. Their profile has its samples if it is inside one.
    #[error("too many spans of its tree were kept already")]
    TreeFull,
    /// The exporter currently fails; the log states why.
    #[error("profiles cannot be exported at present")]
    ExporterFails,
    /// The memory for samples is currently used up.
    #[error("the memory for samples is used up")]
    NoMemory,
    /// The system returned no random bytes for an id.
    #[error("no random bytes for its id")]
    NoId,
}

#[cfg(test)]
impl KeptSpan {
    pub(crate) fn for_test(key: SpanKey, root: SpanKey, samples: u64) -> Self {
        let subscriber = tracing_subscriber::registry();
        let metadata = tracing::subscriber::with_default(subscriber, || {
            tracing::info_span!("test").metadata().unwrap()
        });
        Self {
            key,
            root,
            metadata,
            facts: Facts { span: "test".into(), ..Facts::default() },
            error: None,
            rule: 0,
            opened_ns: 0,
            answered_ns: None,
            stopped_ns: 0,
            samples: SampleCounts::of_on_cpu(samples),
            link: SpanLink::default(),
            profile: Err(NoProfile::NoSamples),
            earlier: Vec::new(),
            around: Vec::new(),
        }
    }
}

//! The verdicts that must result, those that `on_kept` reported, and the counters of the layer.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use tracing_profiling::export::{ExportError, Exported, Exporter};
use tracing_profiling::profile::{FrameKind, Profile, SampleKind};
use tracing_profiling::{Kept, NoProfile, ProfileId, Stats};

/// Verdicts on the spans of one name.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Verdicts {
    pub(crate) made: u64,
    /// Spans that must be kept.
    pub(crate) least: u64,
    /// Spans that may be kept: more than `least` where only the layer's own clock decides.
    pub(crate) most: u64,
}

/// Verdicts by name.
#[derive(Debug, Default)]
pub(crate) struct Truth(Mutex<BTreeMap<&'static str, Verdicts>>);

impl Truth {
    /// Adds spans that were made, and how many of them must be kept.
    pub(crate) fn note(&self, name: &'static str, made: u64, kept: u64) {
        self.note_unsure(name, Verdicts { made, least: kept, most: kept });
    }

    pub(crate) fn note_unsure(&self, name: &'static str, more: Verdicts) {
        let mut all = self.0.lock();
        let verdicts = all.entry(name).or_default();
        verdicts.made += more.made;
        verdicts.least += more.least;
        verdicts.most += more.most;
    }

    pub(crate) fn made(&self) -> u64 {
        self.0.lock().values().map(|verdicts| verdicts.made).sum()
    }
}

/// What `on_kept` reported.
#[derive(Debug, Default)]
pub(crate) struct ReportedKept {
    /// By name.
    kept: BTreeMap<&'static str, u64>,
    /// Spans with reasons that their rule does not give, and other impossible reports.
    pub(crate) wrong: Vec<String>,
    spans: u64,
    profiles: u64,
    /// Profiles that were reserved, and later reported as lost.
    lost: u64,
    without: BTreeMap<&'static str, u64>,
    /// Profile ids of this cycle.
    ids: HashSet<ProfileId>,
}

/// The reasons for which spans of each name are kept.
const REASONS: &[(&str, &str)] = &[
    ("request", "error"),
    ("query", "error"),
    ("late", "latency"),
    ("forced", "forced"),
    ("visitor", "error"),
    ("task", "error"),
    ("exported", "error"),
    ("always", "always"),
    ("toggled", "error"),
    ("hangs", "hung"),
    ("stays", "open"),
    ("burst", "error"),
    ("part", "error"),
];

/// Why a span has no profile, and the counter of that reason.
fn number_of(why: NoProfile) -> &'static str {
    match why {
        NoProfile::NoSamples | NoProfile::SamplingUnavailable | NoProfile::ThreadsNotSampled => {
            "spans.no_profile_no_samples"
        }
        NoProfile::RateLimit => "spans.no_profile_rate_limit",
        NoProfile::ExporterBusy => "spans.no_profile_queue_full",
        NoProfile::TreeFull => "spans.no_profile_too_many_spans",
        NoProfile::ExporterFails => "spans.no_profile_exporter_fails",
        NoProfile::NoMemory => "spans.no_profile_no_memory",
        NoProfile::NoId => "spans.no_profile_no_id",
        other => panic!("{other:?} is new"),
    }
}

const WITHOUT: [&str; 7] = [
    "spans.no_profile_no_samples",
    "spans.no_profile_rate_limit",
    "spans.no_profile_queue_full",
    "spans.no_profile_too_many_spans",
    "spans.no_profile_exporter_fails",
    "spans.no_profile_no_memory",
    "spans.no_profile_no_id",
];

impl ReportedKept {
    pub(crate) fn record(&mut self, kept: &Kept) {
        let mut promised = None;
        for span in &kept.spans {
            let (name, reasons) = (span.name(), span.reasons().to_string());
            *self.kept.entry(name).or_default() += 1;
            self.spans += 1;
            if !REASONS.contains(&(name, reasons.as_str())) {
                self.wrong.push(format!("`{name}` was kept for {reasons}"));
            }
            match span.profile() {
                Ok(id) => promised = Some(id),
                Err(why) => *self.without.entry(number_of(why)).or_default() += 1,
            }
            if name == "late" && span.times().wall().as_nanos() <= super::phases::LATE_NS.into() {
                self.wrong.push(format!("`late` was kept with {:?}", span.times()));
            }
        }
        match (promised, kept.profile) {
            (Some(promised), Some(id)) if promised == id => {
                self.profiles += 1;
                if !self.ids.insert(id) {
                    self.wrong.push(format!("profile {id} was reported twice"));
                }
            }
            (Some(_), None) => self.lost += 1,
            (None, None) => {}
            (promised, profile) => {
                self.wrong
                    .push(format!("{promised:?} was reserved, but the profile is {profile:?}"));
            }
        }
    }

    pub(crate) fn kept_of(&self, name: &str) -> u64 {
        self.kept.get(name).copied().unwrap_or(0)
    }

    pub(crate) fn spans(&self) -> u64 {
        self.spans
    }

    pub(crate) fn profiles(&self) -> u64 {
        self.profiles
    }

    /// Returns all inconsistencies, after a flush.
    pub(crate) fn check(
        &mut self,
        truth: &Truth,
        stats: &Stats,
        exported: &mut Taken,
    ) -> Vec<String> {
        let mut wrong = std::mem::take(&mut self.wrong);
        for (name, Verdicts { least, most, .. }) in truth.0.lock().iter() {
            let found = self.kept_of(name);
            if found < *least || found > *most {
                wrong.push(format!("{found} `{name}` were kept, not {least} to {most}"));
            }
        }
        let mut same = vec![
            ("spans.seen", stats.spans.seen, truth.made()),
            ("spans.kept", stats.spans.kept, self.spans),
            ("profiles.exported", stats.profiles.exported, self.profiles),
            ("profiles that the exporter has", exported.profiles, self.profiles),
            ("profiles.dropped_export_failed", stats.profiles.dropped_export_failed, self.lost),
            ("sampling.records_malformed", stats.sampling.records_malformed, 0),
            ("profiles.symbols_over_limit", stats.profiles.symbols_over_limit, 0),
        ];
        let numbers: BTreeMap<_, _> = stats.iter().collect();
        for name in WITHOUT {
            same.push((name, numbers[name], self.without.get(name).copied().unwrap_or(0)));
        }
        for (what, found, expected) in same {
            if found != expected {
                wrong.push(format!("{what}: {found}, not {expected}"));
            }
        }
        if self.ids != exported.ids {
            wrong.push("the reported profiles are not the exported ones".to_owned());
        }
        self.ids.clear();
        exported.ids.clear();
        wrong
    }
}

/// What the exporter has received.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    profiles: u64,
    /// Profile ids of this cycle.
    ids: HashSet<ProfileId>,
    /// Samples with a stack, in all profiles.
    pub(crate) samples: u64,
}

/// An exporter whose behaviour can be switched, and that stores nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Switched {
    does: Arc<AtomicU8>,
    pub(crate) taken: Arc<Mutex<Taken>>,
}

/// The behaviour of the exporter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Does {
    Take,
    Fail,
    PanicOnce,
}

impl Switched {
    pub(crate) fn set(&self, does: Does) {
        self.does.store(does as u8, Ordering::SeqCst);
    }

    pub(crate) fn is_to(&self, does: Does) -> bool {
        self.does.load(Ordering::SeqCst) == does as u8
    }

    fn fails(&self) -> Result<(), ExportError> {
        if self.is_to(Does::Fail) { Err("on purpose".into()) } else { Ok(()) }
    }
}

impl Exporter for Switched {
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        self.fails()?;
        let (once, take) = (Does::PanicOnce as u8, Does::Take as u8);
        if self.does.compare_exchange(once, take, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            // Unlike `panic!` this prints nothing.
            std::panic::resume_unwind(Box::new("on purpose"));
        }
        let mut taken = self.taken.lock();
        taken.profiles += 1;
        taken.ids.insert(profile.id);
        taken.samples += samples(profile);
        Ok(Exported::default())
    }

    fn check(&mut self) -> Result<(), ExportError> {
        self.fails()
    }
}

/// The recorded samples: without placeholders for lost samples and for time known to have been spent in the kernel.
fn samples(profile: &Profile) -> u64 {
    let is_taken = |stack| {
        let kinds: Vec<_> = profile.stack(stack).map(|location| location.kind).collect();
        kinds != [FrameKind::Kernel] && kinds.iter().any(|kind| *kind != FrameKind::Remark)
    };
    let taken = profile.of_kind(SampleKind::OnCpu).filter(|sample| is_taken(sample.stack));
    taken.map(|sample| sample.points.len() as u64).sum()
}

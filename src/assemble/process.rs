//! Builds the profile of the process.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::build::ProfileInputs;
use super::tables::{SpanDetail, Tables};
use crate::profile::{Link, LinkId, MappingId, Profile, ProfileId, SampleKind, capped};
use crate::redact::Redaction;
use crate::sinks::{ProcessSamples, StackEntry, StackLeaf};
use crate::span::{SpanInfo, SpanKey};
use crate::unwind::Module;

/// The label with the name of a sample's local root.
const LOCAL_ROOT: &str = "local_root";
/// Of more samples of a stack and span, each point is several.
const MOST_POINTS: u64 = 4_096;

impl ProfileInputs<'_> {
    /// The profile of the process `during` that time, in nanoseconds of `CLOCK_MONOTONIC_RAW`, in which it used `cpu_ns`
    /// of CPU time, without symbols, and the modules that symbolization needs.
    pub(crate) fn profile_of_process(
        self,
        id: ProfileId,
        (samples, redaction): (&ProcessSamples, &Redaction),
        during: Range<u64>,
        cpu_ns: Option<u64>,
    ) -> (Profile, HashMap<MappingId, Arc<Module>>) {
        let mut tables = Tables::new(self, id, None, SpanDetail::All);
        let mut links = ProcessLinks { inputs: self, samples, redaction, known: HashMap::new() };
        let kind = SampleKind::OnCpu;
        for (stack, place, total) in samples.totals() {
            let link = place.span.and_then(|span| links.link(span, &mut tables.profile));
            let (stack, _) = tables.stack(stack);
            let thread = samples.thread(place);
            let points = total.count.clamp(1, MOST_POINTS);
            let each = total.weight / points;
            for point in 0..points {
                let rest = if point == 0 { total.weight - each * points } else { 0 };
                tables.add(kind, during.start, each + rest, thread, stack, link);
            }
        }
        // Up to one sample more or less at each end is normal.
        let unsampled_ns = cpu_ns.unwrap_or(0).saturating_sub(samples.weight_ns());
        if unsampled_ns > 2 * self.period_ns {
            let stack = std::iter::once(StackEntry::StackLeaf(StackLeaf::NotSampled));
            let (stack, _) = tables.stack(stack);
            tables.add(kind, during.start, unsampled_ns, None, stack, None);
        }
        let Tables { mut profile, modules, .. } = tables;
        profile.name = "process".to_owned();
        profile.title = "CPU time of all threads of the process".to_owned();
        profile.start_unix_ns = self.unix_ns(during.start);
        // More than that of a moment, and all samples are before its end.
        profile.duration_ns = during.end.saturating_sub(during.start).max(2);
        profile.is_of_process = true;
        (profile, modules)
    }
}

/// The links of samples, by their innermost span.
struct ProcessLinks<'a> {
    inputs: ProfileInputs<'a>,
    samples: &'a ProcessSamples,
    redaction: &'a Redaction,
    known: HashMap<SpanKey, Option<LinkId>>,
}

impl ProcessLinks<'_> {
    /// The link of a span, inside that of its local root.
    fn link(&mut self, span: SpanKey, profile: &mut Profile) -> Option<LinkId> {
        if let Some(known) = self.known.get(&span) {
            return *known;
        }
        let link = self.new_link(span, profile);
        self.known.insert(span, link);
        link
    }

    fn new_link(&mut self, key: SpanKey, profile: &mut Profile) -> Option<LinkId> {
        let span = self.samples.span(key)?;
        let known = span.known?;
        let is_root = known.root == key;
        let parent = if is_root { None } else { self.link(known.root, profile) };
        let name = self.name_of(known)?;
        let mut fields = Vec::new();
        if is_root {
            fields.push((LOCAL_ROOT, self.redaction.redact_span(&name).into_owned()));
            fields.extend(span.fields.iter().cloned());
        }
        let ids = span.ids.map(|ids| (ids.trace, ids.span));
        let start_unix_ns = self.inputs.unix_ns(known.opened_ns);
        let link = Link { ids, linked: ids, fields, start_unix_ns, ..Link::named(name, parent) };
        Some(profile.add_link(link))
    }

    fn name_of(&self, known: SpanInfo) -> Option<String> {
        let callsite = self.inputs.callsites.get(known.plan)?;
        Some(capped(callsite.metadata.name()).into_owned())
    }
}

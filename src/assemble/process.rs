//! Builds the profile of the process.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::build::ProfileInputs;
use super::tables::{SpanDetail, Tables};
use crate::keep::DEFAULT_FIELDS;
use crate::profile::{
    Link, LinkId, MappingId, Profile, ProfileId, ProfileScope, SampleKind, capped,
};
use crate::sinks::{Heap, ProcessSamples, StackEntry, StackLeaf, StoredStack, Total};
use crate::span::SpanKey;
use crate::unwind::Module;

/// The label with the name of a sample's local root.
const LOCAL_ROOT: &str = "local_root";
/// Of more samples of a stack and span, each point is several; and of more in all.
const MOST_POINTS: u64 = 4_096;
const MOST_POINTS_OF_ALL: u64 = 100_000;

/// What further samples have is one sample: Pyroscope accepts 16,000 of each kind by default.
const MOST_SAMPLES: usize = 16_000 - 2;

impl<'a> ProfileInputs<'a> {
    /// The profile of the process `during` that time, in nanoseconds of `CLOCK_MONOTONIC_RAW`, in which it used `cpu_ns`
    /// of CPU time, without symbols, and the modules that symbolization needs. Or one of wall time, with these notes, and a
    /// point for all observations of a stack, thread name and span.
    pub(crate) fn profile_of_process(
        self,
        id: ProfileId,
        samples: &ProcessSamples,
        during: Range<u64>,
        (cpu_ns, of_wall): (Option<u64>, Option<Vec<String>>),
    ) -> (Profile, HashMap<MappingId, Arc<Module>>) {
        let (time, most_points) =
            if of_wall.is_some() { ("wall time", 1) } else { ("CPU time", MOST_POINTS) };
        let mut tables = self.tables_of_process(id, samples, during.start, (true, most_points));
        tables.add_unsampled(samples, during.start, cpu_ns);
        let title = format!("{time} of all threads of the process");
        let (mut profile, modules) = tables.finish_process(&title, during);
        if let Some(notes) = of_wall {
            (profile.scope, profile.notes) = (ProfileScope::ProcessWall, notes);
        }
        (profile, modules)
    }

    /// The continuous profile of the process `during` that time, by stack, thread name, and the name and fields of the
    /// local root. `allocated` has what the stacks of a heap have allocated in that time.
    pub(crate) fn continuous_profile(
        self,
        id: ProfileId,
        samples: &ProcessSamples,
        during: Range<u64>,
        cpu_ns: Option<u64>,
        (heap, mut allocated): (&Heap, Vec<(StoredStack, Total)>),
    ) -> (Profile, HashMap<MappingId, Arc<Module>>) {
        let mut tables = self.tables_of_process(id, samples, during.start, (false, 1));
        tables.add_unsampled(samples, during.start, cpu_ns);
        allocated.sort_by_key(|(_, total)| Reverse(total.weight));
        let mut others = Total::default();
        for (number, (stack, total)) in allocated.into_iter().enumerate() {
            if number >= MOST_SAMPLES {
                others.add(total);
                continue;
            }
            let (stack, _) = tables.stack(heap.stacks().frames(stack));
            for (kind, weight) in amounts(total) {
                tables.add(kind, during.start, weight, None, stack, None);
            }
        }
        for (kind, weight) in amounts(others) {
            tables.add_leaf(kind, StackLeaf::OtherStacks, during.start, weight);
        }
        tables.finish_process("CPU time of the process", during)
    }

    /// All samples by stack and thread name, and by their span if that `is_one` of its own in the profile; otherwise by
    /// what all spans in such local roots have in common. Each has at most that many points.
    fn tables_of_process(
        self,
        id: ProfileId,
        samples: &ProcessSamples,
        time_ns: u64,
        (is_one, most_points): (bool, u64),
    ) -> Tables<'a> {
        let mut tables = Tables::new(self, id, None, SpanDetail::All);
        let mut links = ProcessLinks { inputs: self, samples, is_one, known: HashMap::new() };
        let totals = samples.totals_by(|span| links.link(span, &mut tables.profile));
        let most_points = (MOST_POINTS_OF_ALL / totals.len().max(1) as u64).clamp(1, most_points);
        let mut others = Total::default();
        for (number, (stack, place, link, total)) in totals.into_iter().enumerate() {
            if number >= MOST_SAMPLES && !is_one {
                others.add(total);
                continue;
            }
            let (stack, _) = tables.stack(samples.stacks().frames(stack));
            let kind = if place.is_blocked { SampleKind::OffCpu } else { SampleKind::OnCpu };
            let points = total.count.clamp(1, most_points);
            let each = total.weight / points;
            for point in 0..points {
                let rest = if point == 0 { total.weight - each * points } else { 0 };
                tables.add(kind, time_ns, each + rest, place.thread, stack, link);
            }
        }
        tables.add_leaf(SampleKind::OnCpu, StackLeaf::OtherStacks, time_ns, others.weight);
        tables
    }
}

fn amounts(total: Total) -> [(SampleKind, u64); 2] {
    [(SampleKind::AllocatedBytes, total.weight), (SampleKind::Allocations, total.count)]
}

impl Tables<'_> {
    fn add_leaf(&mut self, kind: SampleKind, leaf: StackLeaf, time_ns: u64, weight: u64) {
        if weight > 0 {
            let (stack, _) = self.stack(std::iter::once(StackEntry::StackLeaf(leaf)));
            self.add(kind, time_ns, weight, None, stack, None);
        }
    }

    fn add_unsampled(&mut self, samples: &ProcessSamples, time_ns: u64, cpu_ns: Option<u64>) {
        // Up to one sample more or less at each end is normal.
        let unsampled_ns = cpu_ns.unwrap_or(0).saturating_sub(samples.weight_ns);
        if unsampled_ns > 2 * self.profile.period_ns {
            self.add_leaf(SampleKind::OnCpu, StackLeaf::NotSampled, time_ns, unsampled_ns);
        }
    }

    fn finish_process(
        self,
        title: &str,
        during: Range<u64>,
    ) -> (Profile, HashMap<MappingId, Arc<Module>>) {
        let start_unix_ns = self.builder.unix_ns(during.start);
        let Self { mut profile, modules, .. } = self;
        profile.name = "process".to_owned();
        profile.title = title.to_owned();
        profile.start_unix_ns = start_unix_ns;
        // More than that of a moment, and all samples are before its end.
        profile.duration_ns = during.end.saturating_sub(during.start).max(2);
        profile.scope = ProfileScope::Process;
        (profile, modules)
    }
}

/// The links of samples, by their innermost span.
struct ProcessLinks<'a> {
    inputs: ProfileInputs<'a>,
    samples: &'a ProcessSamples,
    /// Whether spans have links of their own, inside those of their local roots. Otherwise all in roots with one name
    /// and the same fields have one.
    is_one: bool,
    known: HashMap<SpanKey, Option<LinkId>>,
}

impl ProcessLinks<'_> {
    fn link(&mut self, span: SpanKey, profile: &mut Profile) -> Option<LinkId> {
        if let Some(known) = self.known.get(&span) {
            return *known;
        }
        let root = self.samples.span(span).and_then(|span| span.known).map(|known| known.root);
        let link = match root.filter(|root| !self.is_one && *root != span) {
            Some(root) => self.link(root, profile),
            None => self.new_link(span, profile),
        };
        self.known.insert(span, link);
        link
    }

    fn new_link(&mut self, key: SpanKey, profile: &mut Profile) -> Option<LinkId> {
        let is_one = self.is_one;
        let span = self.samples.span(key)?;
        let known = span.known?;
        let is_root = known.root == key;
        let parent = if is_root { None } else { self.link(known.root, profile) };
        let name = capped(self.inputs.callsites.name_of(known.plan)?);
        let mut fields = Vec::new();
        if is_root {
            fields.push((LOCAL_ROOT, self.inputs.span_name(known.plan)?));
            // A receiver makes a series of each value, so the continuous profile has only fields with few.
            let shown = |name: &&str| is_one || DEFAULT_FIELDS.contains(name);
            fields.extend(span.fields.iter().filter(|(name, _)| shown(name)).cloned());
        }
        // Only what all such spans have in common, unless it is that of one span.
        let ids = span.ids.filter(|_| is_one).map(|ids| (ids.trace, ids.span));
        let start_unix_ns = if is_one { self.inputs.unix_ns(known.opened_ns) } else { 0 };
        let link = Link { ids, linked: ids, fields, start_unix_ns, ..Link::named(name, parent) };
        Some(profile.add_link(link))
    }
}

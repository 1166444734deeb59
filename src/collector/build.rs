//! From pending samples to a profile.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::pending::{Pending, PendingSample, PendingSpan, Stack};
use super::report;
use crate::keep::{Callsites, Epoch};
use crate::profile::{
    FrameKind, Link, LinkId, Location, LocationId, Mapping, MappingId, Point, Profile, ProfileId,
    StackId,
};
use crate::span::SpanKey;
use crate::symbols::hex;
use crate::unwind::{End, Frame, Module, Modules};

/// What a profile is built from.
pub(super) struct Builder<'a> {
    pub(super) pending: &'a Pending,
    pub(super) modules: &'a Modules,
    pub(super) callsites: &'a Callsites,
    /// What makes a Unix time of `CLOCK_MONOTONIC_RAW`.
    pub(super) unix_offset_ns: i128,
    pub(super) period_ns: u64,
    pub(super) most_samples: usize,
}

/// A profile without symbols, and what it takes to get them.
pub(super) struct Built {
    pub(super) profile: Profile,
    pub(super) modules: HashMap<MappingId, Arc<Module>>,
    /// The spans whose samples it has.
    pub(super) spans: Vec<SpanKey>,
}

impl Builder<'_> {
    /// The profile of an epoch: what fell in its spans and in the spans inside them.
    pub(super) fn build(&self, id: ProfileId, epoch: &Epoch) -> Built {
        let kept: HashSet<SpanKey> = epoch.kept.iter().map(|span| span.key).collect();
        let is_inside = |span: &SpanKey| {
            kept.contains(span) || self.pending.ancestors(*span).any(|above| kept.contains(&above))
        };
        let of_root = self.pending.of_root(epoch.root).iter();
        let spans: Vec<SpanKey> = of_root.filter(|span| is_inside(span)).copied().collect();

        let total: usize =
            spans.iter().filter_map(|s| self.pending.get(*s)).map(|s| s.samples.len()).sum();
        let mut tables = Tables {
            profile: Profile::new(id, self.period_ns),
            modules: HashMap::new(),
            mappings: HashMap::new(),
            locations: HashMap::new(),
            links: HashMap::new(),
            builder: self,
        };
        let mut losses = report::Losses {
            every: total.div_ceil(self.most_samples).max(1),
            ..report::Losses::default()
        };
        let mut number = 0_usize;
        for span in &spans {
            let Some(pending) = self.pending.get(*span) else {
                continue;
            };
            let link = tables.link(*span, &is_inside);
            losses.lost += pending.lost;
            losses.thinned += pending.thinned;
            losses.ring_full += pending.ring_full;
            for sample in &pending.samples {
                let Some(stack) = pending.stack(sample) else {
                    continue;
                };
                number += 1;
                losses.cut += u64::from(stack.end == End::Cut);
                losses.incomplete += u64::from(stack.end == End::Lost);
                if number.is_multiple_of(losses.every) {
                    tables.add(sample, stack, link, losses.every as u64);
                } else {
                    losses.thinned += 1;
                }
            }
            tables.add_lost(pending, link);
        }
        let Tables { mut profile, modules, .. } = tables;
        self.place_in_time(&mut profile, epoch);
        report::describe(&mut profile, epoch, &losses);
        Built { profile, modules, spans }
    }

    fn unix_ns(&self, raw_ns: u64) -> u64 {
        u64::try_from(i128::from(raw_ns) + self.unix_offset_ns).unwrap_or(0)
    }

    /// From the first kept span's beginning to the last one's end, and in any case so that each
    /// sample lies inside.
    fn place_in_time(&self, profile: &mut Profile, epoch: &Epoch) {
        let kept = &epoch.kept;
        let begins = kept.iter().map(|span| self.unix_ns(span.opened_ns));
        let ends = kept.iter().map(|span| self.unix_ns(span.opened_ns + span.account.wall_ns));
        let points = || profile.samples().iter().flat_map(|sample| &sample.points);
        let first = begins.chain(points().map(|p| p.time_unix_ns)).min().unwrap_or(0);
        let last = ends.chain(points().map(|p| p.time_unix_ns + 1)).max().unwrap_or(0);
        (profile.start_unix_ns, profile.duration_ns) = (first, last - first);
    }
}

/// Spans inside each other that a profile shows.
const DEEPEST: usize = 128;

/// The profile's tables, found from our own numbers.
struct Tables<'a> {
    profile: Profile,
    modules: HashMap<MappingId, Arc<Module>>,
    mappings: HashMap<crate::unwind::ModuleId, MappingId>,
    locations: HashMap<Frame, LocationId>,
    links: HashMap<SpanKey, LinkId>,
    builder: &'a Builder<'a>,
}

impl Tables<'_> {
    fn add(&mut self, sample: &PendingSample, stack: &Stack, link: Option<LinkId>, times: u64) {
        let stack = self.stack(stack);
        let point = Point {
            time_unix_ns: self.builder.unix_ns(sample.time_ns),
            weight_ns: u64::from(sample.weight_ns) * times,
        };
        self.profile.add_sample(stack, link, point);
    }

    /// What is left of samples for which there was no memory.
    fn add_lost(&mut self, pending: &PendingSpan, link: Option<LinkId>) {
        if pending.lost == 0 {
            return;
        }
        let remark = self.profile.add_remark("[stacks given up: memory budget used up]");
        let stack = self.profile.add_stack(vec![remark]);
        let time_unix_ns = self.builder.unix_ns(pending.last_ns);
        self.profile.add_sample(stack, link, Point { time_unix_ns, weight_ns: pending.lost_ns });
    }

    fn stack(&mut self, stack: &Stack) -> StackId {
        let mut locations: Vec<_> =
            stack.frames.iter().map(|frame| self.location(*frame)).collect();
        match stack.end {
            End::Root => {}
            End::Cut => locations.push(self.profile.add_remark("[callers not copied]")),
            End::Lost => locations.push(self.profile.add_remark("[callers not found]")),
        }
        self.profile.add_stack(locations)
    }

    fn location(&mut self, frame: Frame) -> LocationId {
        if let Some(known) = self.locations.get(&frame) {
            return *known;
        }
        let mapping = frame.module().and_then(|id| self.mapping(id));
        let kind = FrameKind::Native;
        let location = Location { mapping, address: frame.address(), kind, lines: Vec::new() };
        let id = self.profile.add_location(location);
        self.locations.insert(frame, id);
        id
    }

    fn mapping(&mut self, id: crate::unwind::ModuleId) -> Option<MappingId> {
        if let Some(known) = self.mappings.get(&id) {
            return Some(*known);
        }
        let module = self.builder.modules.get(id)?;
        let gnu = |id: &Vec<u8>| ("process.executable.build_id.gnu".to_owned(), hex(id));
        let mapping = self.profile.add_mapping(Mapping {
            file: module.name.clone(),
            start: module.start,
            end: module.end,
            file_offset: module.file_offset,
            build_ids: module.build_id.iter().map(gnu).collect(),
        });
        self.modules.insert(mapping, Arc::clone(module));
        self.mappings.insert(id, mapping);
        Some(mapping)
    }

    /// The link of a span, and those of all around it. Without recursion, and not deeper than
    /// [`DEEPEST`]: trees of spans can be thousands deep, and what follows is drawn by recursion.
    fn link(&mut self, span: SpanKey, is_inside: &impl Fn(&SpanKey) -> bool) -> Option<LinkId> {
        if let Some(known) = self.links.get(&span) {
            return Some(*known);
        }
        let around = self.builder.pending.ancestors(span).take_while(is_inside);
        let mut path: Vec<_> = std::iter::once(span).chain(around).collect();
        path.reverse();
        // Of a deeper path the spans between the outermost and the innermost are left out.
        let left_out = path.len().saturating_sub(DEEPEST);
        path.drain(1..1 + left_out);
        let mut parent = None;
        for span in path {
            let link = match self.links.get(&span) {
                Some(link) => *link,
                None => {
                    let known = self.builder.pending.get(span)?.known?;
                    let callsite = self.builder.callsites.callsite(known.plan)?;
                    let name = callsite.metadata.name().to_owned();
                    let link = self.profile.add_link(Link { span: name, parent, ids: None });
                    // Those in the middle have another place in paths that are not cut.
                    if left_out == 0 || parent.is_none() {
                        self.links.insert(span, link);
                    }
                    link
                }
            };
            parent = Some(link);
        }
        parent
    }
}

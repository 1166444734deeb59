//! Makes profiles and sends them to the threads that publish.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use crossbeam::channel::Sender;

use super::process::inputs;
use super::run::Collector;
use crate::assemble::{BuiltProfile, ProfileAssembler, ProfileInputs, children_of};
use crate::budget::passed;
use crate::facts::format::Ns;
use crate::intake::{Intake, new_sample};
use crate::keep::{Callsites, KeptSpan, ProfileGroup};
use crate::profile::{Profile, ProfileId};
use crate::publish::{Asked, Job, MemoryBudget, Reply, UnnamedProfile};
use crate::references::{ClosedReference, MAX_PROFILE_BYTES};
use crate::report;
use crate::report::starved::waited_for_cpu;
use crate::sinks::{HeapPart, Sinks};
use crate::stats::Counters;
use crate::sys;
use crate::text::escaped;

pub(crate) struct ProfileOutput {
    jobs: Sender<Job>,
    room: MemoryBudget,
    /// Memory for profiles of the process, which take nothing from those of kept spans.
    room_of_process: MemoryBudget,
    most_samples: usize,
}

impl ProfileOutput {
    pub(crate) fn new(jobs: Sender<Job>, export_bytes: usize, most_samples: usize) -> Self {
        let (room, room_of_process) =
            (MemoryBudget::new(export_bytes), MemoryBudget::new(export_bytes));
        Self { jobs, room, room_of_process, most_samples }
    }

    /// Sends a profile of the process, unless the one before is still on its way, as when the exporter hangs.
    pub(super) fn send_process(&self, unnamed: UnnamedProfile, counters: &Counters) {
        if !self.room_of_process.is_free() {
            return Counters::add(&counters.continuous.dropped_export_failed, 1);
        }
        let mut room = self.room_of_process.take();
        room.shrink(unnamed.profile.bytes());
        self.send(Job::Export { unnamed, kept: Vec::new(), room, reservation: None });
    }

    pub(super) fn send(&self, job: Job) {
        _ = self.jobs.send(job);
    }

    /// Makes the profile of the live heap, which is empty if it is not tracked.
    pub(super) fn send_heap(
        &self,
        callsites: &Callsites,
        intake: &mut Intake,
        (part, reply): (HeapPart, Reply<Profile>),
    ) {
        let Sinks { store, heap, .. } = &mut intake.sinks;
        let id = ProfileId::random().unwrap_or(ProfileId::NONE);
        let weights = heap.weights(part).into_iter();
        let weights =
            weights.map(|(stack, weights)| (heap.stacks().frames(stack), (None, None), weights));
        let inputs = ProfileInputs::new(callsites, store, &intake.reader.unwinder);
        let mut unnamed = UnnamedProfile::from(inputs.profile_of_stacks(id, weights));
        let profile = &mut unnamed.profile;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        profile.set_moment(u64::try_from(now.as_nanos()).unwrap_or(0));
        profile.name = "heap".to_owned();
        profile.title = match part {
            HeapPart::All => "What is in use, and all that was allocated".to_owned(),
            HeapPart::Growth => "What has grown since the last request".to_owned(),
        };
        self.send(Job::Reply { unnamed, asked: Asked::Profile(reply) });
    }
}

impl Collector {
    pub(super) fn export(&mut self, mut group: ProfileGroup) {
        let store = &mut self.intake.sinks.store;
        for span in &mut group.kept {
            // The ids come with the verdict or with the close event, which may arrive a moment later.
            store.note(span.key, |pending| {
                span.facts.trace = span.facts.trace.or(pending.ids);
                pending.ids = pending.ids.or(span.facts.trace);
            });
            if let (Some(to), Some(ids)) = (span.link.to, span.link.ids) {
                store.note(to, |pending| pending.ids = Some(ids));
            }
            let closed_ns = span.opened_ns.saturating_add(span.facts.times.wall_ns);
            span.facts.starved.throttled =
                self.watchdog.throttling.between(span.opened_ns, closed_ns);
            span.stopped_ns = self.watchdog.stopped_ns(span.opened_ns, closed_ns);
        }
        self.set_children(&mut group.kept);
        let Some(id) = group.id else {
            self.engine.publish.reporter.report(report::unexported(&group.kept));
            return;
        };
        let mut room = self.output.room.take();
        let (built, is_snapshot) = self.assemble(id, &mut group, room.most_bytes);
        let BuiltProfile { profile, modules, spans, downsampled, losses } = built;
        let samples = profile.sample_count();
        let cut = report::cut_stacks(&losses, samples, self.intake.settings.stack_bytes);
        let cut = cut.filter(|line| self.logged.is_first(line.kind));
        self.log(cut);
        Counters::add(&self.engine.counters.samples.downsampled, downsampled);
        if !is_snapshot {
            let store = &mut self.intake.sinks.store;
            spans.into_iter().for_each(|span| store.note_exported(span));
        }
        let own = profile.threads().map(|(_, thread)| thread.tid).collect();
        self.set_rivals(&mut group.kept, &own);
        room.shrink(profile.bytes());
        let ProfileGroup { kept, reservation, .. } = group;
        let unnamed = UnnamedProfile::from((profile, modules));
        self.output.send(Job::Export { unnamed, kept, room, reservation });
    }

    /// Sets who ran while the outermost span waited for a CPU, beside its `own` threads.
    fn set_rivals(&self, kept: &mut [KeptSpan], own: &HashSet<u32>) {
        let Some(KeptSpan { facts, opened_ns, .. }) = kept.first_mut() else { return };
        let Some(waited_ns) = waited_for_cpu(facts) else { return };
        let closed_ns = opened_ns.saturating_add(facts.times.wall_ns);
        let rival = self.threads.rivals.between(*opened_ns, closed_ns, own);
        // What ran for less did not keep it from a CPU.
        let rival = rival.filter(|rival| rival.on_cpu_ns >= waited_ns / 2);
        let redaction = &self.engine.names.redaction;
        facts.starved.rivals = rival.map(|rival| {
            let words = rival.words(|name| escaped(&redaction.redact_span(name)).to_string());
            format!("{words}, which ran for {}", Ns(rival.on_cpu_ns))
        });
    }

    fn set_children(&self, kept: &mut [KeptSpan]) {
        let (engine, store) = (&self.engine, &self.intake.sinks.store);
        for span in kept {
            let name_of = |plan| engine.name_by(plan);
            span.facts.children = children_of(store, (span.key, span.opened_ns), name_of);
        }
    }

    /// Makes the profile of a reference span, of which nothing is exported.
    pub(super) fn send_reference(&mut self, reference: ClosedReference) {
        let references = Arc::clone(&self.engine.publish.references);
        let Some(on_way) = references.begin() else { return };
        let began_ns = sys::thread_cpu_ns();
        let mut group = ProfileGroup::of_reference(reference.span);
        self.set_children(&mut group.kept);
        let (built, _) = self.assemble(ProfileId::NONE, &mut group, MAX_PROFILE_BYTES);
        let Some(span) = group.kept.pop() else { return };
        let spent_ns = passed(began_ns, sys::thread_cpu_ns()).unwrap_or(0);
        self.output.send(Job::Reference {
            unnamed: UnnamedProfile::from((built.profile, built.modules)),
            reference: Box::new(ClosedReference { span, spent_ns, ..reference }),
            now_ns: self.intake.now_ns(),
            on_way,
        });
    }

    /// Makes the profile of a group, and returns whether it is of spans that are open.
    fn assemble(
        &mut self,
        id: ProfileId,
        group: &mut ProfileGroup,
        most_bytes: usize,
    ) -> (BuiltProfile, bool) {
        let is_snapshot = group.kept.iter().any(|span| span.facts.is_open);
        let clock = &self.engine.spans.clock;
        let opened_ns = group.kept.iter().map(|span| span.opened_ns).min().unwrap_or(0);
        // There are some only for snapshots.
        let present = self.intake.unwind_present(&self.watchdog.present);
        let present = present.iter().map(|(span, at, it)| (*span, new_sample(*at, it, clock)));
        let source = &self.intake.source;
        let waiting =
            self.threads.waiting().filter(|_| is_snapshot).map(|it| (it.span, it.so_far()));
        let inputs = inputs(&self.engine, &self.intake, source.periods().full_ns);
        for span in &mut group.kept {
            // The same in the profile and in what is reported.
            span.facts.start_unix_ns = inputs.unix_ns(span.opened_ns);
        }
        let builder = ProfileAssembler {
            inputs,
            unfinished: waiting.chain(present).collect(),
            most_samples: self.output.most_samples,
            most_bytes,
            hides_kernel: source.hides_kernel_alone(opened_ns),
        };
        #[cfg(test)]
        crate::intake::inside::inside_a_step();
        (builder.build(id, group), is_snapshot)
    }
}

//! The way of samples: records and copies of stacks come in, are unwound, and go to those that want them.

mod clocks;
mod copied;

use std::sync::Arc;

pub(crate) use clocks::SampledClocks;
use clocks::share_of;
use copied::copied_budgets;
pub(crate) use copied::new_sample;

use crate::budget::{CpuBudget, passed};
use crate::drain::{Loss, Reader, Sample, Sink};
use crate::profile::SampleKind;
use crate::sampler::{Sampler, ThreadShared};
use crate::sinks::{Added, ClosedChild, NewSample, Sinks, Stack};
use crate::span::{ChildClose, SpanEvent, SpanInfo, SpanKey, Spans};
use crate::stats::Counters;
use crate::sys::{self, Clock};
use crate::unwind::UnwindEnd;

#[derive(Clone, Copy, Debug)]
pub(crate) struct IntakeSettings {
    pub(crate) frames_per_stack: usize,
    pub(crate) stack_bytes: usize,
    /// Whether unwinding has a budget of CPU time.
    pub(crate) has_budget: bool,
}

/// The thread's CPU clock, read where one piece of work ends and the next begins, as each reading is a system call.
#[derive(Debug, Default)]
pub(crate) struct OwnCpu {
    pub(crate) last_ns: Option<u64>,
}

impl OwnCpu {
    /// The CPU time since the last reading, which is for no budget if that is ignored. `None` if the clock cannot be read.
    pub(crate) fn lap(&mut self) -> Option<u64> {
        let now_ns = sys::thread_cpu_ns();
        passed(std::mem::replace(&mut self.last_ns, now_ns), now_ns)
    }
}

pub(crate) struct Intake {
    pub(crate) spans: Arc<Spans>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) source: Sampler,
    pub(crate) settings: IntakeSettings,
    pub(crate) reader: Reader,
    pub(crate) sinks: Sinks,
    pub(crate) round: u64,
    /// Spans that closed after the round began.
    pub(crate) closed: Vec<SpanKey>,
    /// Whether the rate is lowered to stay within the CPU budget.
    pub(crate) is_lowered: bool,
    pub(crate) own_cpu: OwnCpu,
    /// While the process is profiled continuously.
    pub(crate) clocks: SampledClocks,
    stack: Stack,
    /// A buffer for the copy of a blocked thread's stack.
    bytes: Vec<u8>,
    /// For unwinding the samples of awaits and of allocations.
    for_copied: [CpuBudget; 2],
}

impl Intake {
    pub(crate) fn new(
        (spans, counters, source): (Arc<Spans>, Arc<Counters>, Sampler),
        sinks: Sinks,
        settings: IntakeSettings,
    ) -> Self {
        Self {
            spans,
            counters,
            source,
            settings,
            reader: Reader::new(settings.frames_per_stack),
            sinks,
            round: 0,
            closed: Vec::new(),
            is_lowered: false,
            own_cpu: OwnCpu::default(),
            clocks: SampledClocks::default(),
            stack: Stack::new(),
            bytes: Vec::new(),
            for_copied: copied_budgets(settings.has_budget),
        }
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.spans.clock
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.clock().raw_ns(self.clock().now())
    }

    /// Updates the list of libraries, if stacks may be unwound soon.
    pub(crate) fn begin_reading(&mut self, may_unwind: bool) {
        if may_unwind {
            self.reader.unwinder.refresh();
        }
        self.reader.unwinder.begin_reading();
    }

    /// Registers spans. Returns those that have closed.
    pub(crate) fn register_spans(&mut self) -> Vec<SpanKey> {
        #[cfg(test)]
        inside::inside_a_step();
        let mut closed = Vec::new();
        while let Some(event) = self.spans.take_span_event() {
            let store = &mut self.sinks.store;
            match event {
                SpanEvent::Opened(key, known) => store.register(key, known, self.round),
                SpanEvent::Idle { key, since_ns, idle_ns, cause } => {
                    self.add_idle(key, since_ns, idle_ns, cause);
                }
                SpanEvent::Closed { key, ids, closed_ns } => {
                    store.note(key, |pending| {
                        pending.ids = ids.or(pending.ids);
                        pending.closed_ns = Some(closed_ns);
                    });
                    closed.push(key);
                }
            }
        }
        self.add_children();
        if self.spans.take_lost_event() {
            let is_open = |known: &SpanInfo, key| self.spans.is_open(known.id, key);
            let spans = self.sinks.store.registered_spans();
            closed.extend(
                spans.iter().filter(|(key, known)| !is_open(known, *key)).map(|(key, _)| *key),
            );
        }
        closed
    }

    /// Adds child spans that have closed to the spans that count them, if these have not closed before.
    fn add_children(&mut self) {
        let clock = &self.spans.clock;
        let (mut counted, mut dropped) = (0, 0);
        for ChildClose { owner, plan, opened, closed, from } in self.spans.take_child_closes() {
            let [opened_ns, closed_ns, from_ns] = [opened, closed, from].map(|at| clock.raw_ns(at));
            let child = ClosedChild { plan, opened_ns, closed_ns, from_ns };
            let is_counted = self.sinks.store.add_child(owner, child, self.round);
            counted += u64::from(is_counted);
            dropped += u64::from(!is_counted);
        }
        Counters::add(&self.counters.children.counted, counted);
        Counters::add(&self.counters.children.dropped_memory, dropped);
        if self.spans.take_lost_child() || dropped > 0 {
            self.sinks.store.child_lost_ns = self.now_ns();
        }
    }

    /// What reads samples, and what takes them.
    pub(crate) fn parts(&mut self) -> (&mut Reader, SampleSink<'_>) {
        let Self { reader, sinks, counters, source, clocks, round, is_lowered, stack, .. } = self;
        let (round, is_lowered, continuous_ns) = (*round, *is_lowered, None);
        let sink =
            SampleSink { sinks, counters, source, clocks, round, is_lowered, stack, continuous_ns };
        (reader, sink)
    }

    pub(crate) fn add_wait(&mut self, span: SpanKey, wait: NewSample<'_>) {
        let is_kept = self.sinks.store.add(span, wait, self.round) == Added::Kept;
        let waits = &self.counters.waits;
        Counters::add(if is_kept { &waits.captured } else { &waits.dropped_memory }, 1);
    }

    /// Copies the stack of a blocked thread of this process. Returns whether that was possible.
    pub(crate) fn copy_blocked(&mut self, sp: u64) -> bool {
        sys::read_own_stack(sp, self.settings.stack_bytes, &mut self.bytes).is_ok()
    }

    pub(crate) fn unwind_blocked(
        &mut self,
        thread: Option<&ThreadShared>,
        (pc, sp): (u64, u64),
        stack: &mut Stack,
    ) {
        // The thread may be blocked in a library that was loaded since the last round.
        self.reader.unwinder.refresh();
        let bytes = &*self.bytes;
        let word = |offset: u64| {
            let rest = bytes.get(usize::try_from(offset).ok()?..)?;
            rest.first_chunk().map(|word| u64::from_ne_bytes(*word))
        };
        let (most_frames, frames) = (self.settings.frames_per_stack, &mut stack.frames);
        self.reader.unwinder.own_stack = ThreadShared::own_stack(thread);
        (stack.end, stack.inferred_from) =
            self.reader.unwinder.unwind_blocked(pc, sp, word, most_frames, frames);
    }
}

/// Takes the samples of threads that ran.
pub(crate) struct SampleSink<'a> {
    sinks: &'a mut Sinks,
    counters: &'a Counters,
    source: &'a Sampler,
    clocks: &'a mut SampledClocks,
    round: u64,
    is_lowered: bool,
    stack: &'a mut Stack,
    /// What each sample of the thread represents in the continuous profile, if that is known.
    continuous_ns: Option<u64>,
}

impl Sink for SampleSink<'_> {
    fn begin(&mut self, tid: u32, samples: usize, max_ns: u64) {
        let is_any = samples > 0 && self.sinks.continuous.is_some();
        let ran_ns = is_any.then(|| self.clocks.ran_ns(tid)).flatten();
        let share_ns = |ran_ns| share_of(ran_ns, samples, max_ns);
        self.continuous_ns = ran_ns.and_then(share_ns);
    }

    fn wants(&mut self, tag: Option<SpanKey>) -> bool {
        let is_wanted = self.sinks.wants(tag);
        Counters::add(&self.counters.samples.outside_spans, u64::from(!is_wanted));
        is_wanted
    }

    fn take(&mut self, sample: Sample<'_>) {
        let Sample { tag, thread, time_ns, weight_ns: weight, late, frames, end } = sample;
        std::mem::swap(&mut self.stack.frames, frames);
        self.stack.end = end;
        let Counters { samples, stacks, continuous, .. } = self.counters;
        match end {
            UnwindEnd::Root => {}
            UnwindEnd::Cut => Counters::add(&stacks.truncated, 1),
            UnwindEnd::OtherStack => Counters::add(&stacks.on_other_stacks, 1),
            _ => Counters::add(&stacks.incomplete, 1),
        }
        Counters::add(&samples.taken, 1);
        Counters::add(&continuous.taken, u64::from(self.sinks.continuous.is_some()));
        let kind = SampleKind::OnCpu;
        let new = NewSample { kind, time_ns, weight, thread: Some(thread), stack: self.stack };
        match self.sinks.add_ran(tag, new, self.continuous_ns, self.round) {
            None | Some(Added::Kept) => {}
            Some(Added::Downsampled(count)) => Counters::add(&samples.downsampled, count),
            Some(Added::Lost) => Counters::add(&samples.dropped_memory, 1),
            Some(Added::Refused) => Counters::add(&samples.dropped_pending_spans_full, 1),
        }
        if late > 0 {
            Counters::add(&samples.dropped_late, late);
            self.source.note_loss();
        }
        if let Some(span) = tag {
            self.sinks.store.note(span, |pending| {
                pending.losses.lowered += u64::from(self.is_lowered);
                pending.losses.late += late;
            });
        }
    }

    fn lose(&mut self, loss: Loss) {
        let counter = match loss {
            Loss::RingFull { tag, samples } => {
                Counters::add(&self.counters.samples.dropped_ring_full, samples);
                if let Some(span) = tag {
                    self.sinks.store.note(span, |pending| pending.losses.ring_full += samples);
                }
                return;
            }
            Loss::SignalStackFull { samples } => {
                return Counters::add(&self.counters.samples.dropped_signal_stack_full, samples);
            }
            Loss::Throttled => &self.counters.sampling.throttled,
            Loss::Malformed => &self.counters.sampling.records_malformed,
        };
        Counters::add(counter, 1);
        self.source.note_loss();
    }
}

/// What the model does while the collector is in the middle of something.
#[cfg(test)]
pub(crate) mod inside {
    use std::cell::RefCell;

    pub(crate) type Inside = Box<dyn FnMut()>;

    thread_local! {
        pub(crate) static INSIDE: RefCell<Option<Inside>> = const { RefCell::new(None) };
    }

    /// Called by the collector inside its steps.
    pub(crate) fn inside_a_step() {
        let inside = INSIDE.with_borrow_mut(Option::take);
        if let Some(mut inside) = inside {
            inside();
            INSIDE.set(Some(inside));
        }
    }
}

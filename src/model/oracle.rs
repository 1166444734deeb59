//! Computes the expected reports by evaluating the whole record each time. Slow, and meant to be obvious.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::script::{Kind, Step, THREADS, Under};

/// The report of spans that were kept together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reported {
    pub(super) root: usize,
    /// In the order in which they closed.
    pub(super) kept: Vec<ReportedSpan>,
    pub(super) profile: Option<ReportedProfile>,
}

/// A kept span. A profile has the number of the first span that was promised it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportedSpan {
    pub(super) span: usize,
    pub(super) reasons: String,
    pub(super) opened_ns: u64,
    pub(super) times: Times,
    pub(super) samples: u64,
    /// Waits that are counted, too, if the thread's time was read for another span in between.
    pub(super) silent_waits: u64,
    pub(super) profile: Option<usize>,
    pub(super) children: ChildSums,
}

/// The spans inside one that have closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ChildSums {
    pub(super) count: u64,
    pub(super) total_ns: u64,
    pub(super) longest_ns: u64,
}

/// An account without the values that this source does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) wall_ns: u64,
    pub(super) on_cpu_ns: u64,
    /// The error bound of on-CPU and off-CPU time.
    pub(super) error_ns: u64,
    pub(super) off_cpu_ns: u64,
    pub(super) idle_ns: u64,
    /// The span was entered, and its thread was in another span that is not inside it.
    pub(super) other_ns: u64,
    pub(super) voluntary: u64,
    pub(super) involuntary: u64,
    pub(super) faults: u64,
}

impl Times {
    /// Possible if the span was entered on two threads at once.
    pub(super) fn is_more_than_wall(&self) -> bool {
        self.on_cpu_ns + self.off_cpu_ns + self.idle_ns + self.other_ns > self.wall_ns
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportedProfile {
    pub(super) number: usize,
    pub(super) duration_ns: u64,
    /// By sample number.
    pub(super) samples: BTreeMap<usize, Place>,
    /// Start times are relative to the beginning of the profile.
    pub(super) waits: BTreeSet<Place>,
}

/// Where a sample or wait is in a profile.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// The spans that contain it, outermost first.
    pub(super) path: Vec<String>,
    /// Relative to the beginning of the profile.
    pub(super) at_ns: u64,
    pub(super) weight_ns: u64,
}

/// The name of a span on the stage.
pub(super) fn name(span: usize) -> String {
    format!("s{span}")
}

#[derive(Debug)]
struct Span {
    kind: Kind,
    /// The parent according to the registry.
    parent: Option<usize>,
    opened_ns: u64,
    closed_ns: u64,
    /// The program can still enter the span, or use it as a parent.
    is_held: bool,
    is_open: bool,
    has_failed: bool,
    /// The span was registered with the collector while it was open.
    is_known: bool,
}

/// An interval in which nothing happens.
#[derive(Debug)]
struct Slice {
    from_ns: u64,
    ns: u64,
    threads: [ThreadThen; THREADS],
}

#[derive(Clone, Debug, Default)]
struct ThreadThen {
    entered: Vec<usize>,
    is_out: bool,
}

/// A context switch.
#[derive(Debug)]
struct Switch {
    entered: Vec<usize>,
    preempted: bool,
}

/// A sample or a wait.
#[derive(Debug)]
struct Event {
    /// Samples have a number, waits have none.
    number: Option<usize>,
    span: Option<usize>,
    entered: Vec<usize>,
    time_ns: u64,
    weight_ns: u64,
    /// A wait of which the thread was not notified, because it was notified of another one at the same time.
    is_silent: bool,
}

#[derive(Debug, Default)]
struct Thread {
    /// Spans in the order in which they were entered. A span can occur twice.
    entered: Vec<usize>,
    /// Of each, whether it was the innermost one already. Then neither this enter nor its exit is a change.
    are_again: Vec<bool>,
    is_attached: bool,
    out: Option<Out>,
    /// The thread has waited, and has not entered or left a profiled span since.
    has_unreported_wait: bool,
}

#[derive(Debug)]
struct Out {
    since_ns: u64,
    preempted: bool,
    is_recorded: bool,
    was_seen: bool,
}

/// Spans of one root that were kept together and are not reported yet.
#[derive(Debug)]
struct ProfileGroup {
    root: usize,
    since_ns: u64,
    kept: Vec<ReportedSpan>,
}

#[derive(Debug)]
pub(super) struct Oracle {
    pub(super) now_ns: u64,
    has_switches: bool,
    spans: Vec<Span>,
    threads: [Thread; THREADS],
    slices: Vec<Slice>,
    switches: Vec<Switch>,
    events: Vec<Event>,
    groups: Vec<ProfileGroup>,
    pub(super) samples_inside: u64,
    pub(super) samples_outside: u64,
    pub(super) spans_kept: u64,
}

pub(super) const START_NS: u64 = 1_000_000_000;
const LINGER_NS: u64 = 2_000_000_000;
/// Waits that are shorter than this at the collector's scan are not captured.
const SHORTEST_WAIT_NS: u64 = 5_000_000;

impl Oracle {
    pub(super) fn new(has_switches: bool) -> Self {
        Self {
            now_ns: START_NS,
            has_switches,
            spans: Vec::new(),
            threads: Default::default(),
            slices: Vec::new(),
            switches: Vec::new(),
            events: Vec::new(),
            groups: Vec::new(),
            samples_inside: 0,
            samples_outside: 0,
            spans_kept: 0,
        }
    }

    pub(super) fn span_count(&self) -> usize {
        self.spans.len()
    }

    /// The numbers of the next samples.
    pub(super) fn next_samples(&self, count: u8) -> Range<usize> {
        let before = self.events.iter().filter(|event| event.number.is_some()).count();
        before..before + usize::from(count)
    }

    /// The spans that the program can still use.
    pub(super) fn held(&self) -> Vec<usize> {
        (0..self.spans.len()).filter(|span| self.spans[*span].is_held).collect()
    }

    pub(super) fn kind(&self, span: usize) -> Kind {
        self.spans[span].kind
    }

    pub(super) fn is_open(&self, span: usize) -> bool {
        self.spans[span].is_open
    }

    pub(super) fn entered(&self, thread: usize) -> &[usize] {
        &self.threads[thread].entered
    }

    /// Whether the span is unmatched and a profiled one was entered after it. Leaving it at that point is a known
    /// limitation: the hooks only count unmatched spans and cannot report them apart.
    pub(super) fn is_unmatched_below(&self, thread: usize, span: usize) -> bool {
        let entered = self.entered(thread);
        let at = entered.iter().rposition(|entered| *entered == span).unwrap_or(0);
        !self.spans[span].kind.is_profiled() && self.innermost_profiled(&entered[at..]).is_some()
    }

    pub(super) fn is_attached(&self, thread: usize) -> bool {
        self.threads[thread].is_attached
    }

    /// Sets which threads are sampled now.
    pub(super) fn set_attached(&mut self, attached: [bool; THREADS]) {
        for (thread, is_attached) in self.threads.iter_mut().zip(attached) {
            thread.is_attached = is_attached;
        }
    }

    /// Whether there is nothing left to report.
    pub(super) fn is_done(&self) -> bool {
        self.groups.is_empty() && self.spans.iter().all(|span| !span.is_open)
    }

    /// Records a step. Returns the reports that are due.
    pub(super) fn play(&mut self, step: &Step, period_ns: u64) -> Vec<Reported> {
        match *step {
            Step::Open { thread, kind, under, .. } => {
                let parent = match under {
                    Under::Current => self.current(thread),
                    Under::Nothing => None,
                    Under::Span(parent) => Some(parent),
                };
                self.spans.push(Span {
                    kind,
                    parent,
                    opened_ns: self.now_ns,
                    closed_ns: 0,
                    is_held: true,
                    is_open: true,
                    has_failed: false,
                    is_known: false,
                });
            }
            Step::Enter { thread, span } => {
                let is_profiled = self.spans[span].kind.is_profiled();
                let thread = &mut self.threads[thread];
                let is_again = is_profiled && thread.entered.last() == Some(&span);
                thread.entered.push(span);
                thread.are_again.push(is_again);
                thread.has_unreported_wait &= !is_profiled || is_again;
            }
            Step::Exit { thread, span } => self.leave(thread, span),
            Step::Panic { thread } => {
                if let Some(span) = self.threads[thread].entered.last().copied() {
                    if self.spans[span].kind.is_profiled() {
                        self.fail_at(span);
                    }
                    self.leave(thread, span);
                }
            }
            Step::Drop { span, .. } => {
                self.spans[span].is_held = false;
                self.close_what_can_be();
            }
            Step::Error { thread, span } => {
                if let Some(span) = span.or_else(|| self.current(thread)) {
                    self.fail_at(span);
                }
            }
            Step::Status { span, .. } => self.fail_at(span),
            Step::Sample { thread, number, weight_ns } => {
                let entered = self.threads[thread].entered.clone();
                let span = self.innermost_profiled(&entered);
                *if span.is_some() {
                    &mut self.samples_inside
                } else {
                    &mut self.samples_outside
                } += 1;
                self.events.push(Event {
                    number: Some(number),
                    span,
                    entered,
                    time_ns: self.now_ns,
                    weight_ns: weight_ns.unwrap_or(period_ns),
                    is_silent: false,
                });
            }
            Step::Pass { ns } => {
                let then = |thread: &Thread| ThreadThen {
                    entered: thread.entered.clone(),
                    is_out: thread.out.is_some(),
                };
                let threads = std::array::from_fn(|thread| then(&self.threads[thread]));
                self.slices.push(Slice { from_ns: self.now_ns, ns, threads });
                self.now_ns += ns;
            }
            Step::SwitchOut { thread, preempted } => {
                let thread = &mut self.threads[thread];
                self.switches.push(Switch { entered: thread.entered.clone(), preempted });
                thread.out = Some(Out {
                    since_ns: self.now_ns,
                    preempted,
                    is_recorded: thread.is_attached && self.has_switches,
                    was_seen: false,
                });
            }
            Step::SwitchIn { thread } => self.switch_in(thread),
            Step::Round { flush, .. } => return self.round(flush),
            Step::EndThread { thread } => self.threads[thread] = Thread::default(),
        }
        Vec::new()
    }

    /// The current span according to the registry. Entering a span again does not change it.
    fn current(&self, thread: usize) -> Option<usize> {
        let entered = &self.threads[thread].entered;
        let is_first = |at: &usize| !entered[..*at].contains(&entered[*at]);
        (0..entered.len()).rev().find(is_first).map(|at| entered[at])
    }

    /// The profiled span that was entered last.
    fn innermost_profiled(&self, entered: &[usize]) -> Option<usize> {
        entered.iter().rev().copied().find(|span| self.spans[*span].kind.is_profiled())
    }

    fn leave(&mut self, thread: usize, span: usize) {
        let is_profiled = self.spans[span].kind.is_profiled();
        let thread = &mut self.threads[thread];
        let at = thread.entered.iter().rposition(|entered| *entered == span).unwrap();
        thread.entered.remove(at);
        let was_again = thread.are_again.remove(at);
        thread.has_unreported_wait &= !is_profiled || was_again;
        self.close_what_can_be();
    }

    /// The span and its ancestors, innermost first.
    fn path_up(&self, span: usize) -> Vec<usize> {
        std::iter::successors(Some(span), |span| self.spans[*span].parent).collect()
    }

    /// Without unmatched spans.
    fn profiled_up(&self, span: usize) -> Vec<usize> {
        let up = self.path_up(span).into_iter();
        up.filter(|span| self.spans[*span].kind.is_profiled()).collect()
    }

    fn root_of(&self, span: usize) -> usize {
        *self.profiled_up(span).last().unwrap()
    }

    fn is_inside(&self, span: usize, outer: usize) -> bool {
        self.profiled_up(span).contains(&outer)
    }

    fn fail_at(&mut self, span: usize) {
        for span in self.profiled_up(span) {
            self.spans[span].has_failed = true;
        }
    }

    /// A span closes when the program does not hold it, no thread is in it and no child of it is open.
    fn close_what_can_be(&mut self) {
        let can_close = |this: &Self, span: &usize| {
            let is_entered = this.threads.iter().any(|thread| thread.entered.contains(span));
            let has_child =
                this.spans.iter().any(|child| child.is_open && child.parent == Some(*span));
            this.spans[*span].is_open && !this.spans[*span].is_held && !is_entered && !has_child
        };
        while let Some(span) = (0..self.spans.len()).find(|span| can_close(self, span)) {
            self.spans[span].is_open = false;
            self.spans[span].closed_ns = self.now_ns;
            if self.spans[span].kind.is_profiled() {
                self.judge(span);
            }
        }
    }

    fn judge(&mut self, span: usize) {
        let Span { kind, has_failed, opened_ns, .. } = self.spans[span];
        let times = self.times(span);
        let is_slow = kind.threshold().is_some_and(|threshold| times.wall_ns > threshold);
        let is_failed = kind.is_kept_on_error() && has_failed;
        let reasons = match (is_slow, is_failed) {
            (false, false) => return,
            (true, false) => "latency",
            (false, true) => "error",
            (true, true) => "latency|error",
        };
        self.spans_kept += 1;
        let inside = self.events.iter().filter(|event| self.fell_inside(event, span));
        let (silent, counted): (Vec<_>, Vec<_>) = inside.partition(|event| event.is_silent);
        let (samples, silent_waits) = (counted.len() as u64, silent.len() as u64);
        let root = self.root_of(span);
        let at = self.groups.iter().position(|group| group.root == root).unwrap_or_else(|| {
            self.groups.push(ProfileGroup { root, since_ns: self.now_ns, kept: Vec::new() });
            self.groups.len() - 1
        });
        let promised = self.groups[at].kept.iter().find_map(|kept| kept.profile);
        let profile = (samples > 0).then(|| promised.unwrap_or(span));
        let reasons = reasons.to_owned();
        let children = self.children(span);
        let reported = ReportedSpan {
            span,
            reasons,
            opened_ns,
            times,
            samples,
            silent_waits,
            profile,
            children,
        };
        self.groups[at].kept.push(reported);
    }

    /// The spans inside a local root, which have closed before it. Others have none: no span is open for long here.
    fn children(&self, root: usize) -> ChildSums {
        let is_inside = |span: &usize| {
            *span != root && self.spans[*span].kind.is_profiled() && self.root_of(*span) == root
        };
        let mut children = ChildSums::default();
        for span in (0..self.spans.len()).filter(is_inside) {
            let Span { opened_ns, closed_ns, .. } = self.spans[span];
            children.count += 1;
            children.total_ns += closed_ns - opened_ns;
            children.longest_ns = children.longest_ns.max(closed_ns - opened_ns);
        }
        children
    }

    /// Registers spans with the collector, for any reason.
    pub(super) fn note_known(&mut self, spans: &[usize]) {
        spans.iter().for_each(|span| self.spans[*span].is_known = true);
    }

    /// The samples inside the spans.
    pub(super) fn samples_in(&self, spans: &[usize]) -> BTreeSet<usize> {
        let fell_inside = |event: &&Event| spans.iter().any(|span| self.fell_inside(event, *span));
        self.events.iter().filter(fell_inside).filter_map(|event| event.number).collect()
    }

    fn fell_inside(&self, event: &Event, outer: usize) -> bool {
        event.span.is_some_and(|span| self.is_inside(span, outer))
    }

    fn times(&self, span: usize) -> Times {
        let mut times = Times::default();
        let opened_ns = self.spans[span].opened_ns;
        for slice in self.slices.iter().filter(|slice| slice.from_ns >= opened_ns) {
            times.wall_ns += slice.ns;
            let mut is_entered = false;
            for thread in slice.threads.iter().filter(|thread| thread.entered.contains(&span)) {
                is_entered = true;
                let part = match (self.runs_in(&thread.entered, span), thread.is_out) {
                    (false, _) => &mut times.other_ns,
                    (true, true) => &mut times.off_cpu_ns,
                    (true, false) => &mut times.on_cpu_ns,
                };
                *part += slice.ns;
            }
            if !is_entered {
                times.idle_ns += slice.ns;
            }
        }
        for switch in self.switches.iter().filter(|switch| switch.entered.contains(&span)) {
            *if switch.preempted { &mut times.involuntary } else { &mut times.voluntary } += 1;
        }
        let samples = self.events.iter().filter(|event| event.number.is_some());
        times.faults = samples.filter(|sample| self.runs_in(&sample.entered, span)).count() as u64;
        times
    }

    /// Whether a thread that has entered these spans runs code of that one: whether the innermost is inside it.
    fn runs_in(&self, entered: &[usize], span: usize) -> bool {
        let innermost = self.innermost_profiled(entered);
        entered.contains(&span)
            && innermost.is_some_and(|innermost| self.is_inside(innermost, span))
    }

    fn switch_in(&mut self, thread: usize) {
        let Some(out) = self.threads[thread].out.take() else { return };
        if !out.was_seen {
            return;
        }
        let entered = self.threads[thread].entered.clone();
        let is_silent = std::mem::replace(&mut self.threads[thread].has_unreported_wait, true);
        self.events.push(Event {
            number: None,
            span: self.innermost_profiled(&entered),
            entered,
            time_ns: out.since_ns,
            weight_ns: self.now_ns - out.since_ns,
            is_silent,
        });
    }

    fn round(&mut self, flush: bool) -> Vec<Reported> {
        let mut reported = Vec::new();
        for mut group in std::mem::take(&mut self.groups) {
            let is_expired = self.now_ns - group.since_ns >= LINGER_NS;
            // If a root has no samples, is not kept and was not in a snapshot, the collector is not notified when it
            // closes. There is no profile in that case, so the report can wait.
            let sampled = self.events.iter().any(|event| self.fell_inside(event, group.root));
            let is_kept = group.kept.iter().any(|kept| kept.span == group.root);
            let Span { is_open, is_known, kind, opened_ns, .. } = self.spans[group.root];
            let is_closed = !is_open && (sampled || is_kept || is_known);
            let is_slow = kind.threshold().is_some_and(|ns| self.now_ns - opened_ns > ns);
            // The samples that this round reads are too late for it.
            let is_slow_request = is_open && is_slow && is_known;
            if is_slow_request && is_expired && !flush {
                group.since_ns = self.now_ns;
                self.groups.push(group);
            } else if is_expired || is_closed || flush {
                reported.push(self.report(group));
            } else {
                self.groups.push(group);
            }
        }
        let now_ns = self.now_ns;
        for thread in 0..THREADS {
            let is_inside = self.innermost_profiled(&self.threads[thread].entered).is_some();
            let thread = &mut self.threads[thread];
            if let Some(out) = &mut thread.out {
                let is_long = now_ns - out.since_ns >= SHORTEST_WAIT_NS;
                out.was_seen |= is_long && is_inside && !out.preempted && out.is_recorded;
            }
        }
        reported
    }

    fn report(&self, group: ProfileGroup) -> Reported {
        let ProfileGroup { root, kept, .. } = group;
        let Some(number) = kept.iter().find_map(|kept| kept.profile) else {
            return Reported { root, kept, profile: None };
        };
        let is_in_profile = |span: usize| kept.iter().any(|kept| self.is_inside(span, kept.span));
        let begin_ns = kept.iter().map(|kept| kept.opened_ns).min().unwrap();
        let end_ns = kept.iter().map(|kept| kept.opened_ns + kept.times.wall_ns).max().unwrap();
        let (mut samples, mut waits) = (BTreeMap::new(), BTreeSet::new());
        let mut last_ns = 0;
        for event in &self.events {
            let Some(span) = event.span.filter(|span| is_in_profile(*span)) else { continue };
            let mut path: Vec<_> =
                self.profiled_up(span).into_iter().filter(|span| is_in_profile(*span)).collect();
            path.reverse();
            last_ns = last_ns.max(event.time_ns + 1);
            let place = Place {
                path: path.into_iter().map(name).collect(),
                at_ns: event.time_ns - begin_ns,
                weight_ns: event.weight_ns,
            };
            match event.number {
                Some(number) => assert!(samples.insert(number, place).is_none()),
                None => assert!(waits.insert(place)),
            }
        }
        let duration_ns = end_ns.max(last_ns) - begin_ns;
        Reported {
            root,
            kept,
            profile: Some(ReportedProfile { number, duration_ns, samples, waits }),
        }
    }
}

//! What a profile and the account of a span say of where its time went.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::compare::{
    Amount, AmountSums, Breakdown, OwnFunction, Quantity, Sampled, SpentIn, TimeKind,
};
use crate::facts::Facts;
use crate::profile::{LinkId, Point, Profile, SAMPLED_AWAIT_NS, Sample, SampleKind};

impl Breakdown {
    /// The breakdown of a span of a profile whose functions have names.
    ///
    /// How much time of each kind there was is known by the account, exactly but for its error. Which functions it was spent
    /// in is known by the samples in the span and in spans inside it. What has no samples, such as the CPU time before
    /// the thread was sampled and waits that were too short, is in unknown functions. Samples that exceed the account, such
    /// as awaits of several futures at once, are reduced in proportion. How long a thread waited for a
    /// CPU is known as far as [`Measure::Runnable`](crate::facts::Measure::Runnable) is.
    ///
    /// The samples of spans inside it can be of other threads, which the samples do not say. If the account has such CPU
    /// time, those threads count as its own that have samples of the span itself.
    pub fn of(profile: &Profile, facts: &Facts) -> Self {
        let (times, split) = (&facts.times, facts.split());
        let mut sums = AmountSums::default();
        add_samples(profile, facts, &mut sums);
        let is_elsewhere = |of: &Quantity| matches!(of, Quantity::OtherThreads(_));
        let unknown = Quantity::OtherThreads(SpentIn::Unknown);
        sums.fit(times.inside_on_cpu_ns(), is_elsewhere, unknown);
        for kind in TimeKind::ALL.iter().copied().filter(|kind| *kind != TimeKind::Unmeasured) {
            let is_of = |of: &Quantity| matches!(of, Quantity::Wall(known, _) if *known == kind);
            sums.fit(split.of(kind), is_of, Quantity::Wall(kind, SpentIn::Unknown));
        }
        if let Some(allocated) = &times.allocations {
            sums.add(Amount::exact(Quantity::AllocatedBytes, allocated.allocated_bytes));
        }
        // Of a reference span, none would count as no children.
        for children in &facts.children.totals {
            let name: Option<Arc<str>> = children.name.as_deref().map(Arc::from);
            sums.add(Amount::exact(Quantity::ChildSpans(name.clone()), children.count));
            sums.add(Amount::exact(Quantity::ChildTime(name), children.total_ns));
        }
        Self::new(times.wall_ns, sums.into_amounts())
    }
}

/// Adds the samples in a span and in the spans inside it, by function.
fn add_samples(profile: &Profile, facts: &Facts, sums: &mut AmountSums) {
    let mut inside = BTreeSet::new();
    let mut own: Option<LinkId> = None;
    // Links follow those of the spans around them.
    for (id, link) in profile.links() {
        let is_it =
            own.is_none() && link.span == facts.span && link.start_unix_ns == facts.start_unix_ns;
        if is_it {
            own = Some(id);
        }
        if is_it || link.parent.is_some_and(|parent| inside.contains(&parent)) {
            inside.insert(id);
        }
    }
    let is_inside = |sample: &&Sample| sample.link.is_some_and(|link| inside.contains(&link));
    let samples: Vec<_> = profile.samples().iter().filter(is_inside).collect();
    let points =
        samples.iter().filter(|sample| sample.link == own).flat_map(|sample| &sample.points);
    // The threads that certainly were in the span.
    let threads: BTreeSet<_> = points.filter_map(|point| point.thread).collect();
    let covers_subtree = facts.times.covers_subtree();
    for sample in samples {
        let kind = match sample.kind {
            SampleKind::OnCpu => TimeKind::OnCpu,
            SampleKind::OffCpu => TimeKind::OffCpu,
            SampleKind::Await => TimeKind::Await,
            SampleKind::Delay => TimeKind::SchedulingDelay,
            _ => continue,
        };
        let function = function_of(profile, sample);
        for Point { weight, thread, .. } in &sample.points {
            let is_own = covers_subtree || thread.is_some_and(|thread| threads.contains(&thread));
            let (quantity, is_sampled) = match kind {
                TimeKind::OnCpu if !is_own => (Quantity::OtherThreads(function.clone()), true),
                TimeKind::OffCpu if !is_own => continue,
                TimeKind::OnCpu => (Quantity::Wall(kind, function.clone()), true),
                TimeKind::OffCpu => (Quantity::Wall(kind, function.clone()), false),
                _ => (Quantity::Wall(kind, function.clone()), *weight == SAMPLED_AWAIT_NS),
            };
            let samples = u64::from(is_sampled);
            let sampled = Sampled { samples, total: weight * samples };
            sums.add(Amount { quantity, value: *weight, sampled });
        }
    }
}

fn function_of(profile: &Profile, sample: &Sample) -> SpentIn {
    let Some((name, file, line)) = profile.own_function(sample) else {
        return SpentIn::Unknown;
    };
    // A thread that runs is on another line with each sample. Each line that waits does so for something else.
    let line = if sample.kind == SampleKind::OnCpu { 0 } else { line };
    SpentIn::Function(Arc::new(OwnFunction { name, file: file.to_owned(), line }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Allocations;
    use crate::facts::{ChildTotals, Children, TimeBreakdown, Usage};
    use crate::profile::{
        FrameKind, Function, Leaf, Line, Link, Location, ProfileId, ProfiledThread, ThreadId,
    };

    const MS: u64 = 1_000_000;

    /// A profile of `request`, with a thread of it and another one.
    struct Scenario {
        profile: Profile,
        request: LinkId,
        query: LinkId,
        threads: [ThreadId; 2],
    }

    impl Scenario {
        fn new() -> Self {
            let mut profile = Profile::new(ProfileId::for_test(1), 1);
            let link = |start_unix_ns, link| Link { start_unix_ns, ..link };
            profile.add_link(link(3, Link::named("request", None)));
            let request = profile.add_link(link(7, Link::named("request", None)));
            let query = profile.add_link(link(8, Link::named("query", Some(request))));
            let thread = |name: &str| ProfiledThread { name: name.to_owned(), tid: 1 };
            let threads = ["one", "two"].map(|name| profile.add_thread(thread(name)));
            Self { profile, request, query, threads }
        }

        /// Samples of some milliseconds each in a dependency that an own function called.
        fn add(&mut self, kind: SampleKind, link: LinkId, thread: usize, name: &str, ms: &[u64]) {
            let frames =
                [("serde::to_string", "serde-1.0.1/src/ser.rs"), (name, "shop/src/shop.rs")];
            let stack = frames.map(|(name, file)| {
                let function = Function { file: file.to_owned(), ..Function::named(name) };
                let function = self.profile.add_function(function);
                let lines = vec![Line { function, line: 41, column: 0 }];
                let (kind, address) = (FrameKind::Rust, 0);
                let location = Location { mapping: None, address, kind, lines, is_inferred: false };
                self.profile.add_location(location)
            });
            let place = (self.profile.add_stack(stack.to_vec()), self.profile.add_leaf(Leaf::Ran));
            for (time_unix_ns, ms) in (1..).zip(ms) {
                let thread = self.threads.get(thread).copied();
                let point = Point { time_unix_ns, weight: ms * MS, thread };
                self.profile.add_sample_at(kind, place, Some(link), point);
            }
        }

        fn breakdown(&mut self, times: TimeBreakdown) -> Breakdown {
            self.profile.classify();
            let facts =
                Facts { span: "request".into(), times, start_unix_ns: 7, ..Facts::default() };
            Breakdown::of(&self.profile, &facts)
        }
    }

    fn wall(kind: TimeKind, name: &str, line: u32) -> Quantity {
        Quantity::Wall(kind, own(name, line))
    }

    fn own(name: &str, line: u32) -> SpentIn {
        let (name, file) = (name.to_owned(), "shop/src/shop.rs".to_owned());
        SpentIn::Function(Arc::new(OwnFunction { name, file, line }))
    }

    fn times(on_cpu: u64, off_cpu: u64, idle: u64) -> TimeBreakdown {
        TimeBreakdown {
            wall_ns: (on_cpu + off_cpu + idle) * MS,
            on_cpu_ns: on_cpu * MS,
            subtree_on_cpu_ns: on_cpu * MS,
            off_cpu_ns: off_cpu * MS,
            idle_ns: idle * MS,
            ..TimeBreakdown::default()
        }
    }

    /// The amounts with their values in milliseconds.
    fn amounts(breakdown: &Breakdown) -> Vec<(Quantity, u64, Sampled)> {
        let amounts = breakdown.amounts().iter();
        amounts.map(|of| (of.quantity.clone(), of.value / MS, of.sampled)).collect()
    }

    #[test]
    fn each_kind_of_time_is_split_by_own_function() {
        let mut scenario = Scenario::new();
        let (request, query) = (scenario.request, scenario.query);
        scenario.add(SampleKind::OnCpu, request, 0, "shop::render", &[1, 1, 1]);
        scenario.add(SampleKind::OnCpu, query, 0, "shop::query", &[1]);
        scenario.add(SampleKind::OffCpu, request, 0, "shop::reserve", &[30]);
        scenario.add(SampleKind::Await, query, 9, "shop::query", &[60, 10]);
        scenario.add(SampleKind::Delay, query, 9, "shop::query", &[15]);
        let breakdown = scenario.breakdown(TimeBreakdown {
            wall_ns: 170 * MS,
            await_ns: 70 * MS,
            delay_ns: 20 * MS,
            other_spans_ns: 10 * MS,
            allocations: Some(Allocations { allocated_bytes: 5 * MS, ..Allocations::default() }),
            usage: Usage { preempted_ns: 3 * MS, ..Usage::default() },
            ..times(6, 34, 120)
        });
        let sampled = |samples, ms| Sampled { samples, total: ms * MS };
        let unknown = |kind| Quantity::Wall(kind, SpentIn::Unknown);
        let exact = Sampled::default();
        let expected = vec![
            (wall(TimeKind::OnCpu, "shop::query", 0), 1, sampled(1, 1)),
            (wall(TimeKind::OnCpu, "shop::render", 0), 3, sampled(3, 3)),
            (unknown(TimeKind::OnCpu), 2, exact),
            (wall(TimeKind::OffCpu, "shop::reserve", 41), 30, exact),
            (unknown(TimeKind::OffCpu), 1, exact),
            (unknown(TimeKind::Runnable), 3, exact),
            (wall(TimeKind::Await, "shop::query", 41), 70, sampled(1, 10)),
            (wall(TimeKind::SchedulingDelay, "shop::query", 41), 15, exact),
            (unknown(TimeKind::SchedulingDelay), 5, exact),
            (unknown(TimeKind::UnexplainedIdle), 30, exact),
            (unknown(TimeKind::OtherSpans), 10, exact),
            (Quantity::AllocatedBytes, 5, exact),
        ];
        assert_eq!(amounts(&breakdown), expected);
    }

    #[test]
    fn child_spans_are_beside_the_wall_time() {
        let scenario = Scenario::new();
        let totals = |name: Option<&str>, count, total_ns| ChildTotals {
            name: name.map(str::to_owned),
            count,
            total_ns,
            ..ChildTotals::default()
        };
        let totals = vec![totals(Some("query"), 214, 30 * MS), totals(None, 2, 7 * MS)];
        let children = Children { totals, ..Children::default() };
        let facts = Facts { times: times(0, 30, 0), children, ..Facts::default() };
        let breakdown = Breakdown::of(&scenario.profile, &facts);
        assert_eq!(breakdown.wall_ns(), 30 * MS);
        let values = |name: Option<&str>| {
            let name: Option<Arc<str>> = name.map(Arc::from);
            let (spans, time) = (Quantity::ChildSpans(name.clone()), Quantity::ChildTime(name));
            [spans, time].map(|quantity| breakdown.value(&quantity))
        };
        assert_eq!((values(Some("query")), values(None)), ([214, 30 * MS], [2, 7 * MS]));
    }

    #[test]
    fn samples_above_the_account_are_reduced() {
        let mut scenario = Scenario::new();
        let request = scenario.request;
        // Of three futures at once.
        for name in ["shop::a", "shop::b", "shop::c"] {
            scenario.add(SampleKind::Await, request, 9, name, &[100]);
        }
        let times = TimeBreakdown { await_ns: 100 * MS, ..times(0, 0, 100) };
        let breakdown = scenario.breakdown(times);
        let each: Vec<_> = breakdown.amounts().iter().map(|amount| amount.value).collect();
        assert_eq!(each, [33_333_333, 33_333_333, 33_333_333, 1]);
    }

    #[test]
    fn work_on_other_threads_and_other_spans_is_not_wall_time() {
        let mut scenario = Scenario::new();
        let (request, query) = (scenario.request, scenario.query);
        scenario.add(SampleKind::OnCpu, request, 0, "shop::render", &[1, 1]);
        scenario.add(SampleKind::OnCpu, query, 0, "shop::query", &[1]);
        scenario.add(SampleKind::OnCpu, query, 1, "shop::query", &[1, 1, 1, 1]);
        scenario.add(SampleKind::OffCpu, query, 1, "shop::query", &[50]);
        let (other, _) = scenario.profile.links().next().unwrap();
        scenario.add(SampleKind::OnCpu, other, 0, "shop::other", &[500]);
        let breakdown =
            scenario.breakdown(TimeBreakdown { subtree_on_cpu_ns: 8 * MS, ..times(3, 40, 0) });
        assert_eq!(breakdown.wall_ns(), 43 * MS);
        let value = |quantity| breakdown.value(&quantity) / MS;
        assert_eq!(value(wall(TimeKind::OnCpu, "shop::render", 0)), 2);
        assert_eq!(value(wall(TimeKind::OnCpu, "shop::query", 0)), 1);
        assert_eq!(value(Quantity::Wall(TimeKind::OffCpu, SpentIn::Unknown)), 40);
        assert_eq!(value(Quantity::OtherThreads(own("shop::query", 0))), 4);
        assert_eq!(value(Quantity::OtherThreads(SpentIn::Unknown)), 1);
        assert_eq!(breakdown.amounts().len(), 5);
    }

    #[test]
    fn without_a_cpu_clock_the_busy_time_is_unmeasured() {
        let mut scenario = Scenario::new();
        scenario.add(SampleKind::OnCpu, scenario.request, 0, "shop::render", &[1, 1]);
        let breakdown = scenario.breakdown(times(60, 0, 40).without_cpu_time());
        let unknown = |kind| Quantity::Wall(kind, SpentIn::Unknown);
        let expected = vec![
            (unknown(TimeKind::UnexplainedIdle), 40, Sampled::default()),
            (unknown(TimeKind::Unmeasured), 60, Sampled::default()),
        ];
        assert_eq!(amounts(&breakdown), expected);
    }
}

//! Which log events of its own the collector has logged, and when.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::facts::Allocations;
use crate::log::{LogEvent, LogKind};
use crate::report;
use crate::stats::Counters;

/// At most one line in this time states how many kept spans have none.
const UNREPORTED_INTERVAL: Duration = Duration::from_secs(10);

pub(crate) struct Logged {
    /// The system calls that were reported because a seccomp filter kills the process at them.
    forbidden_calls: usize,
    said: Vec<LogKind>,
    /// The generation of the rules that were last checked for conditions on allocations.
    checked_rules: Option<u64>,
    /// The kept spans without a report that were counted in the log, and when the first one since then was noticed.
    unreported: u64,
    unreported_since: Option<Instant>,
    /// How long after a subscriber is first seen to check whether any span was created.
    look_after: Option<Duration>,
    first_look: Option<Instant>,
}

impl Logged {
    pub(crate) fn new(first_look: Duration) -> Self {
        Self {
            forbidden_calls: 0,
            said: Vec::new(),
            checked_rules: None,
            unreported: 0,
            unreported_since: None,
            look_after: Some(first_look),
            // The collector may not be woken when there is a subscriber.
            first_look: Instant::now().checked_add(first_look),
        }
    }

    pub(super) fn is_first(&mut self, kind: LogKind) -> bool {
        let is_first = !self.said.contains(&kind);
        self.said.extend(is_first.then_some(kind));
        is_first
    }

    /// How long until a line may be due that nothing else wakes the collector for.
    pub(super) fn until_next(&self) -> Option<Duration> {
        let unreported = self.unreported_since.map(|since| since + UNREPORTED_INTERVAL);
        let next = unreported.into_iter().chain(self.first_look).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// The events that are due. None as long as there is no subscriber.
    pub(super) fn due(&mut self, engine: &Engine) -> Vec<LogEvent> {
        let mut events = Vec::new();
        let now = Instant::now();
        if !engine.publish.reporter.has_dispatch() {
            self.first_look.take_if(|due| *due <= now);
            return events;
        }
        if let Some(after) = self.look_after.take() {
            self.first_look = now.checked_add(after);
        }
        let is_first_look = self.first_look.take_if(|due| *due <= now).is_some();
        events.extend(report::forbidden_calls(&mut self.forbidden_calls));
        let not_linked = engine.unreached.take_warning();
        events.extend(not_linked.map(|line| LogEvent::warning(LogKind::NotLinked, line)));
        if self.is_first(LogKind::Source) {
            events.push(engine.source.line.clone());
        }
        events.append(&mut engine.warnings.lock());
        let generation = Some(engine.callsites.generation());
        // Rules that are being replaced count in a moment, and wake the collector then.
        let is_counting = engine.gate.counts_allocations() || engine.callsites.are_off();
        if is_counting
            && std::mem::replace(&mut self.checked_rules, generation) != generation
            && !Allocations::are_counted()
        {
            for (is_wanted, text) in [
                (engine.callsites.judge_allocations(), report::NOT_COUNTED),
                (engine.allocations.wants_heap(), report::HEAP_NOT_TRACKED),
            ] {
                let warning = || LogEvent::warning(LogKind::NotCounted, text);
                events.extend(is_wanted.then(warning));
            }
        }
        let Counters { threads, spans, rules, .. } = &*engine.counters;
        let refused = threads.refused_signal_stack.load(Ordering::Relaxed);
        // It counts attempts, not threads.
        if refused > 0 && self.is_first(LogKind::SignalStackSmall) {
            let (kind, text) = (LogKind::SignalStackSmall, report::SMALL_SIGNAL_STACK);
            events.push(LogEvent::warning(kind, text));
        }
        let too_deep = [&spans.declined_too_deep, &spans.ancestors_left_out];
        let shared = [&rules.percentiles_shared];
        for (kind, counted, text) in [
            (LogKind::TooDeep, &too_deep[..], report::TOO_DEEP),
            (LogKind::PercentilesShared, &shared[..], report::PERCENTILES_SHARED),
        ] {
            let count = counted.iter().map(|count| count.load(Ordering::Relaxed)).sum();
            if count > 0 && self.is_first(kind) {
                events.push(LogEvent { count: Some(count), ..LogEvent::warning(kind, text) });
            }
        }
        if let Some(why) = engine.source.sampler.unsampled()
            && self.is_first(LogKind::ThreadsUnsampled)
        {
            let text = report::source::unsampled(why);
            events.push(LogEvent::warning(LogKind::ThreadsUnsampled, text));
        }
        let is_nothing_seen = engine.spans.seen() == 0;
        if self.first_look.is_none()
            && engine.counters.rules.declined.load(Ordering::Relaxed) > 0
            && self.is_first(LogKind::Declined)
        {
            events.extend(report::declined(&engine.callsites.declined(), is_nothing_seen));
        } else if is_first_look && is_nothing_seen {
            events.push(LogEvent::info(LogKind::NothingSeen, report::NOTHING_SEEN));
        }
        events
    }

    /// How many kept spans have no line of their own, if that is due. `total` counts all of them.
    pub(super) fn unreported(&mut self, total: u64, is_flush: bool) -> Option<LogEvent> {
        let more = total - self.unreported;
        if more == 0 {
            return None;
        }
        let since = self.unreported_since.get_or_insert_with(Instant::now);
        if !is_flush && since.elapsed() < UNREPORTED_INTERVAL {
            return None;
        }
        (self.unreported, self.unreported_since) = (total, None);
        Some(report::unreported(more))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing::Dispatch;
    use tracing::level_filters::LevelFilter;
    use tracing_subscriber::layer::Context;
    use tracing_subscriber::prelude::*;
    use tracing_subscriber::reload;

    use super::*;
    use crate::layer::ProfilingLayer;
    use crate::threads::Timing;

    /// Collects messages.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<String>>>);

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Lines {
        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
                if field.name() == "message" {
                    self.0.lock().push(format!("{value:?}"));
                }
            });
        }
    }

    /// The collector wakes for it by itself.
    #[test]
    fn that_there_was_no_span_is_in_the_log() {
        let lines = Lines::default();
        let mut builder = ProfilingLayer::builder();
        builder.timing = Timing { first_look: Duration::from_secs(1), ..Timing::USUAL };
        let layer = builder.build().unwrap();
        let dispatch =
            Dispatch::new(tracing_subscriber::registry().with(lines.clone()).with(layer));
        let start = Instant::now();
        let is_there = |line: &String| line.contains("no span that a rule matches");
        while !lines.0.lock().iter().any(is_there) {
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", lines.0.lock());
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(dispatch);
    }

    /// In a process of its own: the callsite has the interest of all layers.
    #[test]
    fn spans_that_no_other_layer_wants_are_profiled_only_by_name() {
        if !tracing_profiling_capture::testing::is_alone(
            "collect::logged::tests::spans_that_no_other_layer_wants_are_profiled_only_by_name",
        ) {
            return;
        }
        let (filter, other) = reload::Layer::new(LevelFilter::WARN);
        let lines = Lines::default().with_filter(filter);
        let layer = ProfilingLayer::builder().build().unwrap();
        let handle = layer.handle();
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(lines).with(layer));
        let engine = dispatch.downcast_ref::<ProfilingLayer>().unwrap().engine().unwrap();
        let mut logged = Logged::new(Duration::ZERO);
        let mut line = || {
            let events = logged.due(engine);
            events.into_iter().find(|event| event.kind == LogKind::Declined)
        };
        tracing::dispatcher::with_default(&dispatch, || {
            let seen = || {
                drop(tracing::info_span!("only ours"));
                engine.spans.seen()
            };
            assert_eq!((seen(), seen()), (0, 0));
            let said = line().unwrap();
            assert_eq!((said.level, said.count), (LevelFilter::WARN, Some(1)));
            let name = "`only ours` (INFO, tracing_profiling::collect::logged::tests)";
            assert!(said.message.contains(name), "{}", said.message);
            assert_eq!(line(), None);
            // What the line says.
            let named = said.message.rsplit('\'').nth(1).unwrap().parse().unwrap();
            let usual = handle.rules();
            handle.set_rules(named).unwrap();
            assert_eq!(seen(), 1);
            handle.set_rules("250ms|level<=info".parse().unwrap()).unwrap();
            assert_eq!(seen(), 2);
            handle.set_rules(usual).unwrap();
            assert_eq!(seen(), 2);
            other.reload(LevelFilter::INFO).unwrap();
            assert_eq!(seen(), 3);
            other.reload(LevelFilter::WARN).unwrap();
            assert_eq!(seen(), 3);
            drop(tracing::info_span!("attribute", "tracing_profiling" = tracing::field::Empty));
            assert_eq!((seen(), handle.stats().rules.declined), (4, 3));
        });
    }

    /// Also if the subscriber comes late. In a process of its own, which has had none before.
    #[test]
    fn a_line_says_that_there_was_no_span() {
        if !tracing_profiling_capture::testing::is_alone(
            "collect::logged::tests::a_line_says_that_there_was_no_span",
        ) {
            return;
        }
        for has_span in [false, true] {
            let layer = ProfilingLayer::builder().build().unwrap();
            let mut logged = Logged::new(Duration::ZERO);
            let mut looks = |layer: &ProfilingLayer| {
                let events = logged.due(layer.engine().unwrap());
                events.iter().filter(|event| event.kind == LogKind::NothingSeen).count()
            };
            // From the first one on, a layer has the process's subscriber.
            if !has_span {
                assert_eq!(looks(&layer), 0, "there is no subscriber");
            }
            let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer));
            let layer = dispatch.downcast_ref::<ProfilingLayer>().unwrap();
            if has_span {
                tracing::dispatcher::with_default(&dispatch, || tracing::info_span!("a span"));
            }
            assert_eq!([looks(layer), looks(layer)], [usize::from(!has_span), 0]);
        }
    }
}

//! Spans inside each other without end.

use tokio::task::{LocalSet, spawn_local, yield_now};
use tracing::info_span;
use tracing::level_filters::LevelFilter;
use tracing_profiling::export::Memory;
use tracing_profiling::{ProfilingLayer, Source};
use tracing_subscriber::prelude::*;

use super::{Lines, in_child};
use crate::support::PLENTY;

const STEPS: u64 = 8_000;

/// The registry closes spans inside each other by recursion, which would take the whole stack. A service that shows only
/// warnings has no such spans without this layer.
#[test]
fn guards_that_are_held_over_awaits_do_not_take_the_whole_stack() {
    let test = "guards_that_are_held_over_awaits_do_not_take_the_whole_stack";
    in_child(module_path!(), test, &[], || {
        let builder = ProfilingLayer::builder().rules("[wrong]=1h".parse().unwrap());
        let layer = builder.source(Source::None).exporter(Memory::new()).build().unwrap();
        let (handle, lines) = (layer.handle(), Lines::default());
        let shown = lines.clone().with_filter(LevelFilter::WARN);
        tracing_subscriber::registry().with(shown).with(layer).init();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let task = || async {
                for _ in 0..STEPS {
                    let span = info_span!("wrong");
                    let _entered = span.enter();
                    yield_now().await;
                }
            };
            let tasks: Vec<_> = (0..10).map(|_| spawn_local(task())).collect();
            for task in tasks {
                task.await.unwrap();
            }
        });
        let spans = handle.stats().spans;
        assert_eq!(spans.seen + spans.declined_too_deep, 10 * STEPS);
        assert!(spans.seen > 256 && spans.declined_too_deep > 0, "{spans:?}");
        handle.flush(PLENTY).unwrap();
        let lines = lines.0.lock().unwrap();
        let said: Vec<_> =
            lines.iter().filter(|line| line.contains("held over an `.await`")).collect();
        assert_eq!(said.len(), 1, "{lines:?}");
    });
}

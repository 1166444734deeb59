//! No await is shown at another function or leaf than its own, however the tasks migrate.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, join, select};
use tokio::runtime::Builder;
use tokio::sync::{Notify, Semaphore};
use tracing::instrument::Instrumented;
use tracing::{Instrument, Span, info_span};
use tracing_profiling::ProfiledExt;
use tracing_profiling::profile::{Profile, Sample, SampleKind};

use crate::leaf::Event;
use crate::support::{Setup, functions};
use crate::{MS, with_subscriber};

/// What one task waits for, and the spans in which it does so.
struct Leaves {
    notify: Notify,
    permits: Semaphore,
    event: Event,
    spans: [Span; 4],
}

async fn wait_sleep(_: &Leaves) {
    tokio::time::sleep(3 * MS).await;
}

async fn wait_notify(leaves: &Leaves) {
    leaves.notify.notified().await;
}

async fn wait_permit(leaves: &Leaves) {
    leaves.permits.acquire().await.unwrap().forget();
}

async fn wait_event(leaves: &Leaves) {
    leaves.event.wait().await;
}

impl Leaves {
    fn new() -> Self {
        Self {
            notify: Notify::new(),
            permits: Semaphore::new(0),
            event: Event::default(),
            spans: [
                info_span!("wait_sleep"),
                info_span!("wait_notify"),
                info_span!("wait_permit"),
                info_span!("wait_event"),
            ],
        }
    }

    fn happen(&self) {
        self.notify.notify_one();
        if self.permits.available_permits() == 0 {
            self.permits.add_permits(1);
        }
        self.event.happen();
    }

    /// The future is boxed, because a function that is inlined into another keeps its line in a release build, but not
    /// its name.
    fn is<'a>(
        &self,
        leaf: usize,
        wait: impl Future<Output = ()> + Send + 'a,
    ) -> Instrumented<BoxFuture<'a, ()>> {
        wait.boxed().instrument(self.spans[leaf].clone())
    }
}

/// Its name, the function, and a span of that name.
type Function =
    (&'static str, fn(Arc<Leaves>, Arc<AtomicBool>) -> BoxFuture<'static, ()>, fn() -> Span);

macro_rules! functions {
    ($($name:ident)*) => {
        $(async fn $name(it: Arc<Leaves>, stop: Arc<AtomicBool>) {
            // The name keeps the compiler from merging the functions.
            let mut round = std::hint::black_box(stringify!($name)).len();
            while !stop.load(Ordering::Relaxed) {
                round += 1;
                match round % 6 {
                    0 => it.is(0, wait_sleep(&it)).await,
                    1 => it.is(1, wait_notify(&it)).await,
                    2 => it.is(2, wait_permit(&it)).await,
                    3 => it.is(3, wait_event(&it)).await,
                    4 => _ = join(it.is(3, wait_event(&it)), it.is(0, wait_sleep(&it))).await,
                    _ => {
                        let (notify, sleep) = (it.is(1, wait_notify(&it)), it.is(0, wait_sleep(&it)));
                        select(pin!(notify), pin!(sleep)).await;
                    }
                }
            }
        })*
        const FUNCTIONS: &[Function] = &[$((
            stringify!($name),
            |it, stop| Box::pin($name(it, stop)),
            || info_span!(stringify!($name)),
        )),*];
    };
}

functions! {
    f00 f01 f02 f03 f04 f05 f06 f07 f08 f09 f10 f11 f12 f13 f14 f15
    f16 f17 f18 f19 f20 f21 f22 f23 f24 f25 f26 f27 f28 f29 f30 f31
    f32 f33 f34 f35 f36 f37 f38 f39 f40 f41 f42 f43 f44 f45 f46 f47
    f48 f49 f50 f51 f52 f53 f54 f55 f56 f57 f58 f59 f60 f61 f62 f63
}

/// Whether the stack is that of the span: of its function and leaf, and of no others. `None` without a stack.
fn is_right(profile: &Profile, sample: &Sample) -> Option<bool> {
    let names = functions(profile, sample);
    if names.iter().all(|name| name.starts_with('[')) {
        return None;
    }
    let path = profile.span_path(sample.link);
    let part = |is_it: &dyn Fn(&str) -> bool| {
        let parts = names.iter().flat_map(|name| name.split("::"));
        let mut found: Vec<_> = parts.filter(|part| is_it(part)).collect();
        found.dedup();
        found
    };
    let function = part(&|name| FUNCTIONS.iter().any(|(function, ..)| *function == name));
    let leaf = part(&|name| name.starts_with("wait_"));
    Some(path.len() == 3 && path[0] == "root" && function == path[1..2] && leaf == path[2..])
}

#[test]
fn awaits_are_shown_at_their_own_function_and_leaf() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let enough = number("PROFILING_TEST_AWAITS").unwrap_or(300);
    let setup = Setup::with("1h,[root]=0ms|hung=off", |builder| {
        builder.samples_per_profile(usize::MAX).memory(4 << 30)
    });
    let stop = Arc::new(AtomicBool::new(false));
    let runtime = {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(4);
        with_subscriber(&setup, builder)
    };
    setup.run(|| {
        let root = info_span!("root");
        let mut leaves = Vec::new();
        let tasks = FUNCTIONS.iter().map(|(_, function, span)| {
            let span = root.in_scope(span);
            let it = Arc::new(span.in_scope(Leaves::new));
            leaves.push(Arc::clone(&it));
            runtime.spawn(function(it, Arc::clone(&stop)).instrument(span).profiled())
        });
        let tasks: Vec<_> = tasks.collect();
        let captured = || {
            let awaits = setup.handle.stats().awaits;
            // A sample that was not unwound can be captured as an await and as a delay.
            awaits.captured.saturating_sub(2 * awaits.dropped_over_budget)
        };
        let mut pause = 20 * MS;
        while captured() < enough {
            let dropped = setup.handle.stats().awaits.dropped_over_budget;
            std::thread::sleep(pause);
            leaves.iter().for_each(|it| it.happen());
            // More often, and unwinding would exceed its budget; on a busy machine already now.
            if setup.handle.stats().awaits.dropped_over_budget > dropped {
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
        stop.store(true, Ordering::Relaxed);
        for task in tasks {
            while !task.is_finished() {
                std::thread::sleep(MS);
                leaves.iter().for_each(|it| it.happen());
            }
        }
        drop(root);
    });
    println!("{:?}", setup.handle.stats().awaits);
    let profile = &setup.profiles()[0];
    let (mut right, mut without, mut wrong) = (0, 0, Vec::new());
    for sample in profile.samples() {
        if !matches!(sample.kind, SampleKind::Await | SampleKind::Delay) {
            continue;
        }
        match is_right(profile, sample) {
            Some(true) => right += sample.points.len() as u64,
            None => without += sample.points.len(),
            Some(false) => wrong.push((profile.span_path(sample.link), functions(profile, sample))),
        }
    }
    println!("{right} right, {without} without a stack, {} wrong", wrong.len());
    assert!(wrong.is_empty(), "{:#?}", &wrong[..wrong.len().min(5)]);
    // A stack that was not unwound can be that of an await and of a delay.
    assert!(right >= enough / 10 * 9, "{right} right, {without} without a stack");
}

//! The cost of the wrapper that shows what futures await.

use std::hint::black_box;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use tracing::{Dispatch, dispatcher, info_span};
use tracing_profiling::{ProfiledExt, ProfilingLayer};
use tracing_subscriber::prelude::*;

use crate::allocator;
use crate::measure::{added, child, figure, interleave, median, time_each};

/// An executor's waker, with a reference count as most have.
struct Task;

impl Wake for Task {
    fn wake(self: Arc<Self>) {}
}

/// Always pending.
#[derive(Default)]
struct Leaf {
    waker: Option<Waker>,
    /// It clones the waker in each poll, as most leaves do after a wake-up.
    clones: bool,
    /// With some stack between it and the wrapper.
    is_deep: bool,
}

const STACK: usize = 8 << 10;

impl Leaf {
    #[inline(never)]
    fn register(&mut self, context: &Context<'_>) {
        let waker = context.waker();
        if self.clones || !self.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            self.waker = Some(waker.clone());
        }
    }

    #[inline(never)]
    fn register_deep(&mut self, context: &Context<'_>) {
        let mut stack = [0_u8; STACK];
        black_box(&mut stack);
        self.register(context);
        black_box(&mut stack);
    }
}

impl Future for Leaf {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        match self.is_deep {
            true => self.register_deep(context),
            false => self.register(context),
        }
        Poll::Pending
    }
}

fn poll_each(mut future: Pin<&mut impl Future>, count: u32) -> f64 {
    let waker = Waker::from(Arc::new(Task));
    let mut context = Context::from_waker(&waker);
    time_each(count, || _ = black_box(future.as_mut().poll(&mut context)))
}

/// Nanoseconds per poll of one future.
fn later(new: impl Fn() -> Leaf, is_wrapped: bool) -> f64 {
    match is_wrapped {
        true => poll_each(pin!(new().profiled()), 20_000),
        false => poll_each(pin!(new()), 20_000),
    }
}

/// Nanoseconds per future that is polled once and dropped.
fn first(is_wrapped: bool) -> f64 {
    let waker = Waker::from(Arc::new(Task));
    let mut context = Context::from_waker(&waker);
    let new = || Leaf { is_deep: true, ..Leaf::default() };
    time_each(5_000, || match is_wrapped {
        true => _ = black_box(pin!(new().profiled()).poll(&mut context)),
        false => _ = black_box(pin!(new()).poll(&mut context)),
    })
}

fn dispatch() -> Dispatch {
    let rules = "matched=10s|error".parse().expect("rules of this bench");
    let layer = ProfilingLayer::builder().rules(rules).build().expect("threads");
    Dispatch::new(tracing_subscriber::registry().with(layer))
}

pub(crate) fn run() {
    let dispatch = dispatch();
    let _default = dispatcher::set_default(&dispatch);
    let span = info_span!(target: "matched", "awaits");
    let cloning = || Leaf { clones: true, is_deep: true, ..Leaf::default() };
    let times = span.in_scope(|| {
        interleave(
            41,
            &mut [
                &mut || later(Leaf::default, false),
                &mut || later(Leaf::default, true),
                &mut || later(cloning, false),
                &mut || later(cloning, true),
                &mut || first(false),
                &mut || first(true),
            ],
        )
    });
    figure("await.poll_added", added(&times[0], &times[1]), "ns");
    figure("await.clone_added", added(&times[2], &times[3]), "ns");
    figure("await.first_clone_added", added(&times[4], &times[5]), "ns");
    let outside = interleave(
        41,
        &mut [&mut || later(Leaf::default, false), &mut || later(Leaf::default, true)],
    );
    figure("await.unmatched_poll_added", added(&outside[0], &outside[1]), "ns");
    print!("{}", child("awaits_off", &[]));
    let mut future = pin!(cloning().profiled());
    let allocations = span.in_scope(|| {
        poll_each(future.as_mut(), 1);
        allocator::allocations(|| _ = poll_each(future.as_mut(), 1_000))
    });
    // One is of the executor's waker.
    figure("await.allocations_after_first_poll", allocations as f64 - 1.0, "count");
}

/// In a process of its own, without a layer.
pub(crate) fn off() {
    let times = interleave(
        41,
        &mut [&mut || later(Leaf::default, false), &mut || later(Leaf::default, true)],
    );
    figure("await.off_poll_added", added(&times[0], &times[1]), "ns");
    figure("await.off_poll", median(&times[0]), "ns");
}

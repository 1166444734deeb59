//! Each kind of executor, and each way around it.

use std::future::Future;
use std::hint::black_box;
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::{LocalSet, block_in_place, spawn_blocking};
use tracing::{Instrument as _, Span, info_span};
use tracing_profiling::ProfiledExt as _;

#[derive(Clone, Copy, Debug)]
pub enum Truth {
    /// Tasks of an executor cannot run in the meantime.
    Blocks,
    /// The same, of an executor that is not recognized.
    BlocksUnseen,
    /// Nothing but the thread itself waits, or it is not known whether other tasks do.
    MayBlock,
}
use Truth::{Blocks, BlocksUnseen, MayBlock};

pub struct Case {
    pub name: &'static str,
    pub truth: Truth,
    pub run: fn(Duration),
}

const fn case(name: &'static str, truth: Truth, run: fn(Duration)) -> Case {
    Case { name, truth, run }
}

pub const CASES: [Case; 26] = [
    case("a task of a worker", Blocks, |time| several().block_on(spawned(waits(time)))),
    case("a task of the only worker", Blocks, |time| workers(1).block_on(spawned(waits(time)))),
    case("a wrapped task of a worker", Blocks, |time| {
        several().block_on(spawned(waits(time).profiled()));
    }),
    case("a part of a task of a worker", Blocks, |time| {
        several().block_on(spawned(async move { span().in_scope(|| wait(time)) }));
    }),
    case("block_on of futures in a worker", Blocks, |time| {
        several().block_on(spawned(async move {
            futures::executor::block_on(waits(time));
        }));
    }),
    case("a task of a worker, after block_in_place", Blocks, |time| {
        several().block_on(spawned(async move {
            block_in_place(|| black_box(()));
            waits(time).await;
        }));
    }),
    case("a task of current_thread", Blocks, |time| alone().block_on(spawned(waits(time)))),
    case("a task of LocalSet", Blocks, |time| {
        LocalSet::new().block_on(&alone(), async move {
            tokio::task::spawn_local(waits(time)).await.unwrap();
        });
    }),
    case("a task of async-executor", Blocks, |time| {
        let executor = async_executor::Executor::new();
        let task = executor.spawn(waits(time));
        futures_lite::future::block_on(executor.run(task));
    }),
    case("a task of LocalPool of futures", BlocksUnseen, |time| {
        use futures::task::LocalSpawnExt as _;
        let mut pool = futures::executor::LocalPool::new();
        pool.spawner().spawn_local(waits(time)).unwrap();
        pool.run();
    }),
    case("spawn_blocking", MayBlock, |time| several().block_on(in_pool(move || wait(time)))),
    case("spawn_blocking that returns a box", MayBlock, |time| {
        several().block_on(async move {
            let span = span();
            spawn_blocking(move || span.in_scope(|| waits_for_box(time))).await.unwrap();
        });
    }),
    case("block_in_place", MayBlock, |time| {
        several().block_on(spawned(async move { block_in_place(|| wait(time)) }.instrument(span())));
    }),
    case("block_in_place around a span", MayBlock, |time| {
        several().block_on(spawned(async move {
            block_in_place(|| span().in_scope(|| wait(time)));
        }));
    }),
    case("block_in_place twice", MayBlock, |time| {
        several().block_on(spawned(async move {
            block_in_place(|| block_in_place(|| span().in_scope(|| wait(time))));
        }));
    }),
    case("block_in_place of a wrapped task", MayBlock, |time| {
        let waits = async move { block_in_place(|| wait(time)) };
        several().block_on(spawned(waits.instrument(span()).profiled()));
    }),
    case("Handle::block_on in block_in_place", MayBlock, |time| {
        several().block_on(spawned(async move {
            block_in_place(|| Handle::current().block_on(waits(time)));
        }));
    }),
    case("Handle::block_on in spawn_blocking", MayBlock, |time| {
        several().block_on(in_pool(move || Handle::current().block_on(waits(time).profiled())));
    }),
    case("block_on of a runtime with workers", MayBlock, |time| several().block_on(waits(time))),
    case("block_on of current_thread, alone", MayBlock, |time| alone().block_on(waits(time))),
    case("run_until of LocalSet, alone", MayBlock, |time| {
        LocalSet::new().block_on(&alone(), waits(time));
    }),
    case("block_on of futures on its own thread", MayBlock, |time| {
        on_thread(move || futures::executor::block_on(waits(time)));
    }),
    case("block_on of futures-lite", MayBlock, |time| {
        on_thread(move || futures_lite::future::block_on(waits(time)));
    }),
    case("unblock of smol", MayBlock, |time| {
        let span = span();
        let waits = blocking::unblock(move || span.in_scope(|| wait(time)));
        futures_lite::future::block_on(waits);
    }),
    case("spawn of rayon", MayBlock, |time| {
        let (sender, receiver) = std::sync::mpsc::channel();
        rayon::spawn(move || {
            span().in_scope(|| wait(time));
            sender.send(()).unwrap();
        });
        receiver.recv().unwrap();
    }),
    case("a future that is dropped with its runtime", MayBlock, |time| {
        struct Slow(Duration);
        impl Drop for Slow {
            fn drop(&mut self) {
                span().in_scope(|| wait(self.0));
            }
        }
        let runtime = alone();
        let slow = Slow(time);
        runtime.spawn(async move {
            let _slow = slow;
            std::future::pending::<()>().await;
        });
        runtime.block_on(tokio::task::yield_now());
    }),
];

fn span() -> Span {
    info_span!("case")
}

#[inline(never)]
fn wait(time: Duration) {
    thread::sleep(time);
    // No tail call.
    black_box(());
}

#[inline(never)]
fn waits_for_box(time: Duration) -> Box<u64> {
    wait(time);
    Box::new(black_box(7))
}

fn waits(time: Duration) -> impl Future<Output = ()> + Send {
    async move { wait(time) }.instrument(span())
}

async fn spawned(future: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(future).await.unwrap();
}

async fn in_pool(run: impl FnOnce() + Send + 'static) {
    let span = span();
    spawn_blocking(move || span.in_scope(run)).await.unwrap();
}

fn on_thread(run: impl FnOnce() + Send + 'static) {
    thread::spawn(run).join().unwrap();
}

fn workers(number: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(number).enable_all().build().unwrap()
}

fn several() -> Runtime {
    workers(2)
}

fn alone() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

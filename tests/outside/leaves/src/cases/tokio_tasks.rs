use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet, spawn_blocking, yield_now};
use tokio::time::sleep;

use super::{Case, WAIT, cases, soon};

pub fn cases() -> Vec<Case> {
    let mut cases = cases! {
        "tokio `JoinHandle`": case_join_handle(tokio::spawn(sleep(WAIT)));
        "tokio `JoinSet::join_next`": case_join_set(join_set());
        "tokio `spawn_blocking`": case_spawn_blocking();
        "tokio `join!` of sleeps": case_join();
        "tokio `join!` of channels, the last is ready first": case_join_channels(sends_late(), sends_soon());
        "tokio `select!`": case_select();
        "tokio `select!` in a loop, with a branch that stays": case_select_loop();
        "tokio `yield_now` in a task of tokio": case_yield_now();
        "tokio's cooperation budget is used up": case_budget(full_channel());
    };
    cases.push(Case {
        leaf: "tokio `yield_now` in another executor",
        function: "case_yield_elsewhere",
        run: |watch| {
            Box::pin(async move {
                let executor =
                    move || futures::executor::block_on(watch.run(case_yield_elsewhere()));
                std::thread::spawn(executor).join().unwrap();
            })
        },
    });
    cases
}

async fn case_join_handle(task: JoinHandle<()>) {
    task.await.unwrap();
}

async fn case_join_set(mut set: JoinSet<()>) {
    set.join_next().await.unwrap().unwrap();
}

async fn case_spawn_blocking() {
    spawn_blocking(|| std::thread::sleep(WAIT)).await.unwrap();
}

async fn case_join() {
    tokio::join!(child_short(), child_long());
}

async fn case_join_channels(late: oneshot::Receiver<()>, soon: oneshot::Receiver<()>) {
    tokio::join!(child_late_channel(late), child_channel(soon));
}

async fn case_select() {
    tokio::select! {
        () = child_short() => {}
        () = child_long() => {}
    }
}

async fn case_select_loop() {
    let long = child_long();
    tokio::pin!(long);
    loop {
        tokio::select! {
            biased;
            () = &mut long => break,
            () = child_short() => {}
        }
    }
}

async fn case_yield_now() {
    yield_now().await;
}

async fn case_yield_elsewhere() {
    yield_now().await;
}

async fn case_budget(mut receiver: mpsc::Receiver<()>) {
    while receiver.recv().await.is_some() {}
}

async fn child_short() {
    sleep(WAIT).await;
}

async fn child_long() {
    sleep(WAIT * 5 / 2).await;
}

async fn child_channel(receiver: oneshot::Receiver<()>) {
    receiver.await.unwrap();
}

async fn child_late_channel(receiver: oneshot::Receiver<()>) {
    receiver.await.unwrap();
}

fn sends_soon() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    soon(async move { sender.send(()) });
    receiver
}

fn sends_late() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    soon(async move {
        sleep(WAIT).await;
        sender.send(())
    });
    receiver
}

fn join_set() -> JoinSet<()> {
    let mut set = JoinSet::new();
    set.spawn(sleep(WAIT));
    set
}

/// More messages than a task may receive in one poll.
fn full_channel() -> mpsc::Receiver<()> {
    let (sender, receiver) = mpsc::channel(1_000);
    while sender.try_send(()).is_ok() {}
    receiver
}

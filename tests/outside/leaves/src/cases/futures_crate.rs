use std::sync::Arc;

use futures::channel::{mpsc, oneshot};
use futures::future::{BoxFuture, Shared, join_all};
use futures::lock::Mutex;
use futures::pin_mut;
use futures::prelude::*;
use futures::stream::{FuturesUnordered, iter};
use tokio::time::sleep;

use super::{Case, WAIT, cases, soon};

pub fn cases() -> Vec<Case> {
    cases! {
        "futures `mpsc` next": case_futures_mpsc_next(mpsc_that_sends());
        "futures `mpsc` send": case_futures_mpsc_send(full_mpsc());
        "futures `oneshot`": case_futures_oneshot(oneshot_that_sends());
        "futures `Mutex::lock`": case_futures_mutex(locked().await);
        "futures `join!`": case_futures_join();
        "futures `select!`": case_futures_select();
        "futures `join_all` of 3": case_join_all(3);
        "futures `join_all` of 40": case_join_all_of_many(40);
        "`FuturesUnordered`": case_unordered();
        "futures `buffered` stream": case_buffered();
        "futures `buffer_unordered` stream": case_buffer_unordered();
        "futures `Shared`": case_shared(child_leaf().boxed().shared());
    }
}

async fn case_futures_mpsc_next(mut receiver: mpsc::Receiver<()>) {
    receiver.next().await.unwrap();
}

async fn case_futures_mpsc_send(mut sender: mpsc::Sender<()>) {
    sender.send(()).await.unwrap();
}

async fn case_futures_oneshot(receiver: oneshot::Receiver<()>) {
    receiver.await.unwrap();
}

async fn case_futures_mutex(mutex: Arc<Mutex<()>>) {
    drop(mutex.lock().await);
}

async fn case_futures_join() {
    futures::join!(child_leaf(), child_long());
}

async fn case_futures_select() {
    let (short, long) = (child_leaf().fuse(), child_long().fuse());
    pin_mut!(short, long);
    futures::select! {
        () = short => {}
        () = long => {}
    }
}

async fn case_join_all(count: usize) {
    join_all((0..count).map(|_| child_leaf())).await;
}

async fn case_join_all_of_many(count: usize) {
    join_all((0..count).map(|_| child_leaf())).await;
}

async fn case_unordered() {
    let mut futures: FuturesUnordered<_> = (0..3).map(|_| child_leaf()).collect();
    while futures.next().await.is_some() {}
}

async fn case_buffered() {
    iter(0..4).map(|_| child_leaf()).buffered(2).collect::<Vec<_>>().await;
}

async fn case_buffer_unordered() {
    iter(0..4).map(|_| child_leaf()).buffer_unordered(2).collect::<Vec<_>>().await;
}

async fn case_shared(shared: Shared<BoxFuture<'static, ()>>) {
    shared.await;
}

async fn child_leaf() {
    sleep(WAIT).await;
}

async fn child_long() {
    sleep(WAIT * 5 / 2).await;
}

fn mpsc_that_sends() -> mpsc::Receiver<()> {
    let (mut sender, receiver) = mpsc::channel(1);
    soon(async move { sender.send(()).await });
    receiver
}

fn full_mpsc() -> mpsc::Sender<()> {
    let (mut sender, mut receiver) = mpsc::channel(1);
    while sender.try_send(()).is_ok() {}
    soon(async move { while receiver.next().await.is_some() {} });
    sender
}

fn oneshot_that_sends() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    soon(async move { sender.send(()) });
    receiver
}

async fn locked() -> Arc<Mutex<()>> {
    let mutex = Arc::new(Mutex::new(()));
    let guard = mutex.clone().lock_owned().await;
    soon(async move { drop(guard) });
    mutex
}

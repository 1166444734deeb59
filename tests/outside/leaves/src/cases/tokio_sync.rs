use std::sync::Arc;

use tokio::sync::{Barrier, Mutex, Notify, RwLock, Semaphore, broadcast, mpsc, oneshot, watch};

use super::{Case, cases, soon};

pub fn cases() -> Vec<Case> {
    cases! {
        "tokio `mpsc` recv": case_mpsc_recv(mpsc_that_sends());
        "tokio `mpsc` send": case_mpsc_send(full_mpsc());
        "tokio unbounded `mpsc` recv": case_unbounded_recv(unbounded_that_sends());
        "tokio `oneshot`": case_oneshot(oneshot_that_sends());
        "tokio `broadcast` recv": case_broadcast_recv(broadcast_that_sends());
        "tokio `watch` changed": case_watch_changed(watch_that_changes());
        "tokio `Mutex::lock`": case_mutex(locked().await);
        "tokio `RwLock::read`": case_rwlock_read(locked_for_writing().await);
        "tokio `RwLock::write`": case_rwlock_write(locked_for_reading().await);
        "tokio `Semaphore::acquire`": case_semaphore(acquired().await);
        "tokio `Notify`": case_notify(notified());
        "tokio `Barrier`": case_barrier(barrier());
    }
}

async fn case_mpsc_recv(mut receiver: mpsc::Receiver<()>) {
    receiver.recv().await.unwrap();
}

async fn case_mpsc_send(sender: mpsc::Sender<()>) {
    sender.send(()).await.unwrap();
}

async fn case_unbounded_recv(mut receiver: mpsc::UnboundedReceiver<()>) {
    receiver.recv().await.unwrap();
}

async fn case_oneshot(receiver: oneshot::Receiver<()>) {
    receiver.await.unwrap();
}

async fn case_broadcast_recv(mut receiver: broadcast::Receiver<()>) {
    receiver.recv().await.unwrap();
}

async fn case_watch_changed(mut receiver: watch::Receiver<()>) {
    receiver.changed().await.unwrap();
}

async fn case_mutex(mutex: Arc<Mutex<()>>) {
    drop(mutex.lock().await);
}

async fn case_rwlock_read(lock: Arc<RwLock<()>>) {
    drop(lock.read().await);
}

async fn case_rwlock_write(lock: Arc<RwLock<()>>) {
    drop(lock.write().await);
}

async fn case_semaphore(semaphore: Arc<Semaphore>) {
    drop(semaphore.acquire().await.unwrap());
}

async fn case_notify(notify: Arc<Notify>) {
    notify.notified().await;
}

async fn case_barrier(barrier: Arc<Barrier>) {
    barrier.wait().await;
}

fn mpsc_that_sends() -> mpsc::Receiver<()> {
    let (sender, receiver) = mpsc::channel(1);
    soon(async move { sender.send(()).await });
    receiver
}

fn full_mpsc() -> mpsc::Sender<()> {
    let (sender, mut receiver) = mpsc::channel(1);
    sender.try_send(()).unwrap();
    soon(async move { while receiver.recv().await.is_some() {} });
    sender
}

fn unbounded_that_sends() -> mpsc::UnboundedReceiver<()> {
    let (sender, receiver) = mpsc::unbounded_channel();
    soon(async move { sender.send(()) });
    receiver
}

fn oneshot_that_sends() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    soon(async move { sender.send(()) });
    receiver
}

fn broadcast_that_sends() -> broadcast::Receiver<()> {
    let (sender, receiver) = broadcast::channel(1);
    soon(async move { sender.send(()) });
    receiver
}

fn watch_that_changes() -> watch::Receiver<()> {
    let (sender, receiver) = watch::channel(());
    soon(async move { sender.send(()) });
    receiver
}

async fn locked() -> Arc<Mutex<()>> {
    let mutex = Arc::new(Mutex::new(()));
    let guard = mutex.clone().lock_owned().await;
    soon(async move { drop(guard) });
    mutex
}

async fn locked_for_writing() -> Arc<RwLock<()>> {
    let lock = Arc::new(RwLock::new(()));
    let guard = lock.clone().write_owned().await;
    soon(async move { drop(guard) });
    lock
}

async fn locked_for_reading() -> Arc<RwLock<()>> {
    let lock = Arc::new(RwLock::new(()));
    let guard = lock.clone().read_owned().await;
    soon(async move { drop(guard) });
    lock
}

async fn acquired() -> Arc<Semaphore> {
    let semaphore = Arc::new(Semaphore::new(1));
    let permit = semaphore.clone().acquire_owned().await.unwrap();
    soon(async move { drop(permit) });
    semaphore
}

fn notified() -> Arc<Notify> {
    let notify = Arc::new(Notify::new());
    let notifying = notify.clone();
    soon(async move { notifying.notify_one() });
    notify
}

fn barrier() -> Arc<Barrier> {
    let barrier = Arc::new(Barrier::new(2));
    let other = barrier.clone();
    soon(async move { other.wait().await });
    barrier
}

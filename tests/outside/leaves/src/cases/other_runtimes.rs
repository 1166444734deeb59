use std::sync::Arc;

use event_listener::{Event, EventListener};
use futures::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Case, WAIT, cases, soon};

pub fn cases() -> Vec<Case> {
    cases! {
        "async-channel recv": case_async_channel_recv(async_channel_that_sends());
        "async-channel send": case_async_channel_send(full_async_channel());
        "flume recv": case_flume_recv(flume_that_sends());
        "flume send": case_flume_send(full_flume());
        "async-lock `Mutex`": case_async_lock_mutex(locked().await);
        "async-lock `RwLock`": case_async_lock_rwlock(locked_for_writing().await);
        "async-lock `Semaphore`": case_async_lock_semaphore(acquired().await);
        "event-listener": case_event_listener(event_to_come());
        "futures-timer `Delay`": case_futures_timer();
        "smol `Timer`": case_smol_timer();
        "smol `TcpStream` read": case_smol_tcp_read(smol_tcp().await);
        "smol `unblock`": case_smol_unblock();
        "smol `Task`": case_smol_task();
        "smol `yield_now`": case_smol_yield();
        "async-std `sleep`": case_async_std_sleep();
        "async-std `TcpStream` read": case_async_std_tcp_read(async_std_tcp().await);
        "async-std `JoinHandle`": case_async_std_join_handle();
    }
}

async fn case_async_channel_recv(receiver: async_channel::Receiver<()>) {
    receiver.recv().await.unwrap();
}

async fn case_async_channel_send(sender: async_channel::Sender<()>) {
    sender.send(()).await.unwrap();
}

async fn case_flume_recv(receiver: flume::Receiver<()>) {
    receiver.recv_async().await.unwrap();
}

async fn case_flume_send(sender: flume::Sender<()>) {
    sender.send_async(()).await.unwrap();
}

async fn case_async_lock_mutex(mutex: Arc<async_lock::Mutex<()>>) {
    drop(mutex.lock().await);
}

async fn case_async_lock_rwlock(lock: Arc<async_lock::RwLock<()>>) {
    drop(lock.read().await);
}

async fn case_async_lock_semaphore(semaphore: Arc<async_lock::Semaphore>) {
    drop(semaphore.acquire().await);
}

async fn case_event_listener(listener: EventListener) {
    listener.await;
}

async fn case_futures_timer() {
    futures_timer::Delay::new(WAIT).await;
}

async fn case_smol_timer() {
    smol::Timer::after(WAIT).await;
}

async fn case_smol_tcp_read(mut stream: smol::net::TcpStream) {
    stream.read_exact(&mut [0]).await.unwrap();
}

async fn case_smol_unblock() {
    smol::unblock(|| std::thread::sleep(WAIT)).await;
}

async fn case_smol_task() {
    smol::spawn(smol::Timer::after(WAIT)).await;
}

async fn case_smol_yield() {
    smol::future::yield_now().await;
}

async fn case_async_std_sleep() {
    async_std::task::sleep(WAIT).await;
}

async fn case_async_std_tcp_read(mut stream: async_std::net::TcpStream) {
    stream.read_exact(&mut [0]).await.unwrap();
}

async fn case_async_std_join_handle() {
    async_std::task::spawn(async_std::task::sleep(WAIT)).await;
}

fn async_channel_that_sends() -> async_channel::Receiver<()> {
    let (sender, receiver) = async_channel::bounded(1);
    soon(async move { sender.send(()).await });
    receiver
}

fn full_async_channel() -> async_channel::Sender<()> {
    let (sender, receiver) = async_channel::bounded(1);
    sender.try_send(()).unwrap();
    soon(async move { while receiver.recv().await.is_ok() {} });
    sender
}

fn flume_that_sends() -> flume::Receiver<()> {
    let (sender, receiver) = flume::bounded(1);
    soon(async move { sender.send(()) });
    receiver
}

fn full_flume() -> flume::Sender<()> {
    let (sender, receiver) = flume::bounded(1);
    sender.send(()).unwrap();
    soon(async move { while receiver.recv_async().await.is_ok() {} });
    sender
}

async fn locked() -> Arc<async_lock::Mutex<()>> {
    let mutex = Arc::new(async_lock::Mutex::new(()));
    let guard = mutex.lock_arc().await;
    soon(async move { drop(guard) });
    mutex
}

async fn locked_for_writing() -> Arc<async_lock::RwLock<()>> {
    let lock = Arc::new(async_lock::RwLock::new(()));
    let guard = lock.write_arc().await;
    soon(async move { drop(guard) });
    lock
}

async fn acquired() -> Arc<async_lock::Semaphore> {
    let semaphore = Arc::new(async_lock::Semaphore::new(1));
    let permit = semaphore.acquire_arc().await;
    soon(async move { drop(permit) });
    semaphore
}

fn event_to_come() -> EventListener {
    let event = Event::new();
    let listener = event.listen();
    soon(async move { event.notify(1) });
    listener
}

async fn smol_tcp() -> smol::net::TcpStream {
    let listener = smol::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stream = smol::net::TcpStream::connect(address).await.unwrap();
    let (mut other, _) = listener.accept().await.unwrap();
    soon(async move { other.write_all(&[1]).await });
    stream
}

async fn async_std_tcp() -> async_std::net::TcpStream {
    let listener = async_std::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stream = async_std::net::TcpStream::connect(address).await.unwrap();
    let (mut other, _) = listener.accept().await.unwrap();
    soon(async move { other.write_all(&[1]).await });
    stream
}

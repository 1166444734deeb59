use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket, UnixStream};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

use super::{Case, WAIT, cases, soon};

pub fn cases() -> Vec<Case> {
    cases! {
        "tokio `TcpStream` read": case_tcp_read(tcp_that_sends().await);
        "tokio `TcpStream` read, after a read that was dropped": case_tcp_read_again(tcp_that_sends().await);
        "tokio `TcpStream` write": case_tcp_write(full_tcp().await);
        "tokio `TcpListener::accept`": case_tcp_accept(listener().await);
        "tokio `TcpStream::connect`": case_tcp_connect(busy_server());
        "tokio `UnixStream` read": case_unix_read(unix_that_sends());
        "tokio `UdpSocket::recv`": case_udp_recv(udp_that_gets_one().await);
        "tokio `duplex` read": case_duplex_read(duplex_that_sends());
        "tokio `fs::read`": case_fs_read(fifo());
        "tokio process `wait`": case_process_wait(child_process());
        "tokio process `output`": case_process_output(sleep_command());
        "tokio `signal`": case_signal(signal_to_come());
    }
}

async fn case_tcp_read(mut stream: TcpStream) {
    stream.read_u8().await.unwrap();
}

async fn case_tcp_read_again(mut stream: TcpStream) {
    timeout(WAIT / 2, child_first_read(&mut stream)).await.unwrap_err();
    child_second_read(&mut stream).await;
}

async fn child_first_read(stream: &mut TcpStream) {
    stream.read_u8().await.unwrap();
}

async fn child_second_read(stream: &mut TcpStream) {
    stream.read_u8().await.unwrap();
}

async fn case_tcp_write(mut stream: TcpStream) {
    stream.write_u8(1).await.unwrap();
}

async fn case_tcp_accept(listener: TcpListener) {
    listener.accept().await.unwrap();
}

async fn case_tcp_connect(address: SocketAddr) {
    TcpStream::connect(address).await.unwrap();
}

async fn case_unix_read(mut stream: UnixStream) {
    stream.read_u8().await.unwrap();
}

async fn case_udp_recv(socket: UdpSocket) {
    socket.recv(&mut [0]).await.unwrap();
}

async fn case_duplex_read(mut stream: DuplexStream) {
    stream.read_u8().await.unwrap();
}

async fn case_fs_read(path: PathBuf) {
    tokio::fs::read(path).await.unwrap();
}

async fn case_process_wait(mut child: Child) {
    child.wait().await.unwrap();
}

async fn case_process_output(mut command: Command) {
    command.output().await.unwrap();
}

async fn case_signal(mut signal: Signal) {
    signal.recv().await;
}

async fn listener() -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    soon(TcpStream::connect(listener.local_addr().unwrap()));
    listener
}

async fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (stream, listener.accept().await.unwrap().0)
}

async fn tcp_that_sends() -> TcpStream {
    let (stream, mut other) = tcp_pair().await;
    soon(async move { other.write_u8(1).await });
    stream
}

async fn full_tcp() -> TcpStream {
    let (stream, mut other) = tcp_pair().await;
    while stream.writable().await.is_ok() && stream.try_write(&[0; 65_536]).is_ok() {}
    soon(async move { tokio::io::copy(&mut other, &mut tokio::io::sink()).await });
    stream
}

/// It accepts only after a while, and its queue is full, so that the kernel drops the first attempt to connect and
/// repeats it after a second.
fn busy_server() -> SocketAddr {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let connect = || std::net::TcpStream::connect_timeout(&address, Duration::from_millis(50));
    let queued: Vec<_> = std::iter::from_fn(|| connect().ok()).collect();
    soon(async move {
        let _queued = queued;
        while listener.accept().await.is_ok() {}
    });
    address
}

fn unix_that_sends() -> UnixStream {
    let (stream, mut other) = UnixStream::pair().unwrap();
    soon(async move { other.write_u8(1).await });
    stream
}

async fn udp_that_gets_one() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    soon(async move { UdpSocket::bind("127.0.0.1:0").await.unwrap().send_to(&[1], address).await });
    socket
}

fn duplex_that_sends() -> DuplexStream {
    let (stream, mut other) = tokio::io::duplex(1);
    soon(async move { other.write_u8(1).await });
    stream
}

/// A file whose reader waits for its writer.
fn fifo() -> PathBuf {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let written = path.clone();
    soon(async move {
        tokio::fs::write(written, [1]).await.unwrap();
        drop(directory);
    });
    path
}

fn sleep_command() -> Command {
    let mut command = Command::new("sleep");
    command.arg(WAIT.as_secs_f32().to_string());
    command
}

fn child_process() -> Child {
    sleep_command().spawn().unwrap()
}

fn signal_to_come() -> Signal {
    let signal = signal(SignalKind::user_defined1()).unwrap();
    let kill = format!("kill -USR1 {}", std::process::id());
    soon(async move { Command::new("sh").args(["-c", &kill]).status().await });
    signal
}

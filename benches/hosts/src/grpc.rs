//! Unary calls of tonic over loopback, in turn; client and server are on one thread.

use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::Done;

pub(crate) fn run() {
    let done = Done::default();
    let (run, is_running) = watch::channel(false);
    let calls = Calls { done: done.clone(), is_running };
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(calls.make())
    });
    println!("0");
    done.answer(|line| _ = run.send(line == "run"));
}

struct Calls {
    done: Done,
    is_running: watch::Receiver<bool>,
}

impl Calls {
    async fn make(mut self) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its number");
        // It serves as long as the reporter lives.
        let (_reporter, service) = tonic_health::server::health_reporter();
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let server = Server::builder().add_service(service).serve_with_incoming(incoming);
        tokio::spawn(server);
        let channel = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        let mut client = HealthClient::new(channel.connect().await.expect("a connection"));
        while self.is_running.wait_for(|is_running| *is_running).await.is_ok() {
            let request = HealthCheckRequest { service: String::new() };
            client.check(request).await.expect("an answer");
            self.done.count();
        }
    }
}

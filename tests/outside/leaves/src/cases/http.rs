use std::net::SocketAddr;

use futures::FutureExt as _;
use futures::stream::{BoxStream, StreamExt as _};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::{Case, WAIT, cases};

pub fn cases() -> Vec<Case> {
    cases! {
        "hyper-util's legacy client: response": case_hyper_response(http_server().await);
        "hyper: body of a response": case_hyper_body(http_response().await);
        "reqwest: response": case_reqwest_send(http_server().await);
        "reqwest: body of a response": case_reqwest_body(reqwest_response().await);
        "tonic: unary call": case_tonic_unary(grpc_client().await);
        "tonic: message of a stream": case_tonic_stream(grpc_stream().await);
    }
}

async fn case_hyper_response(url: String) {
    hyper_client().get(url.parse().unwrap()).await.unwrap();
}

async fn case_hyper_body(response: hyper::Response<hyper::body::Incoming>) {
    response.into_body().collect().await.unwrap();
}

async fn case_reqwest_send(url: String) {
    reqwest::get(url).await.unwrap();
}

async fn case_reqwest_body(response: reqwest::Response) {
    response.bytes().await.unwrap();
}

async fn case_tonic_unary(mut client: HealthClient<Channel>) {
    client.check(HealthCheckRequest::default()).await.unwrap();
}

async fn case_tonic_stream(mut stream: tonic::Streaming<HealthCheckResponse>) {
    stream.message().await.unwrap();
}

fn hyper_client() -> Client<hyper_util::client::legacy::connect::HttpConnector, Empty<Bytes>> {
    Client::builder(TokioExecutor::new()).build_http()
}

async fn http_response() -> hyper::Response<hyper::body::Incoming> {
    hyper_client().get(http_server().await.parse().unwrap()).await.unwrap()
}

async fn reqwest_response() -> reqwest::Response {
    reqwest::get(http_server().await).await.unwrap()
}

/// Sends the head of each response late, and its body later.
async fn http_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream));
        }
    });
    url
}

async fn answer(mut stream: TcpStream) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await.unwrap());
    }
    sleep(WAIT).await;
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n").await.unwrap();
    sleep(WAIT).await;
    stream.write_all(b"1").await.unwrap();
}

async fn grpc_client() -> HealthClient<Channel> {
    let address = free_address().await;
    tokio::spawn(Server::builder().add_service(HealthServer::new(Slow)).serve(address));
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    loop {
        if let Ok(channel) = endpoint.connect().await {
            return HealthClient::new(channel);
        }
        sleep(WAIT).await;
    }
}

async fn grpc_stream() -> tonic::Streaming<HealthCheckResponse> {
    grpc_client().await.watch(HealthCheckRequest::default()).await.unwrap().into_inner()
}

async fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

struct Slow;

#[tonic::async_trait]
impl Health for Slow {
    type WatchStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;

    async fn check(
        &self,
        _: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        sleep(WAIT).await;
        Ok(Response::new(HealthCheckResponse::default()))
    }

    async fn watch(
        &self,
        _: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let message = sleep(WAIT).map(|()| Ok(HealthCheckResponse::default()));
        Ok(Response::new(message.into_stream().boxed()))
    }
}

//! Sends one request and returns the answer.

use std::fmt;
use std::time::Duration;

use bytes::buf::Chain;
use bytes::{Buf, Bytes};
use http::header::{HeaderMap, HeaderValue, USER_AGENT};
use http::{Method, Request, Uri};
use http_body_util::Full;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, ResponseFuture};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::timeout_at;
use tracing_profiling_profile::export::InvalidSetting;
use tracing_profiling_profile::export::remote::Answer;
use tracing_profiling_profile::text::gzip;

use crate::answer::{no_answer, single_line, whole};
use crate::protocol::{DEVELOPMENT_VERSION, DEVELOPMENT_VERSION_HEADER};
use crate::settings::{Compression, Protocol, Settings};

#[cfg(feature = "tls")]
use hyper_rustls::HttpsConnector;
#[cfg(feature = "tls")]
use rustls::ClientConfig;
#[cfg(not(feature = "tls"))]
type ClientConfig = std::convert::Infallible;

const AGENT: &str = concat!("tracing-profiling/", env!("CARGO_PKG_VERSION"));

/// A connection to the server: protobuf in a request of HTTP, or of gRPC, which differs in the headers, the frame of the
/// message, and where the answer is.
///
/// For gRPC, tonic's transport cannot be used without TLS while a crate in the program enables its TLS feature.
pub(crate) struct Transport {
    protocol: Protocol,
    client: HttpClient,
    tls: Option<ClientConfig>,
    uri: Uri,
    headers: HeaderMap,
    compression: Compression,
    timeout: Duration,
}

/// A message after what precedes it, which stay apart: messages are large.
type Body = Full<Chain<Bytes, Bytes>>;

impl Transport {
    pub(crate) fn new(mut settings: Settings) -> Result<Self, InvalidSetting> {
        #[cfg(feature = "tls")]
        let tls = crate::tls::client_config(&settings)?;
        #[cfg(not(feature = "tls"))]
        let tls = None;
        let headers = &mut settings.headers;
        headers.entry(USER_AGENT).or_insert(HeaderValue::from_static(AGENT));
        headers.insert(DEVELOPMENT_VERSION_HEADER, HeaderValue::from_static(DEVELOPMENT_VERSION));
        let is_gzip = settings.compression == Compression::Gzip;
        match settings.protocol {
            #[cfg(feature = "grpc")]
            Protocol::Grpc => crate::grpc::add_headers(headers, is_gzip, settings.timeout),
            #[cfg(feature = "http")]
            Protocol::HttpProtobuf => crate::http::add_headers(headers, is_gzip),
            // Settings exist only for enabled protocols.
            #[cfg(not(all(feature = "grpc", feature = "http")))]
            _ => {}
        }
        let Settings { protocol, uri, headers, compression, timeout, .. } = settings;
        #[cfg(feature = "grpc")]
        let uri = if protocol == Protocol::Grpc { crate::grpc::uri_of_method(uri) } else { uri };
        let client = client(protocol, tls.as_ref());
        Ok(Self { protocol, client, tls, uri, headers, compression, timeout })
    }

    /// Sends a message and waits for the answer until the timeout.
    pub(crate) async fn send(&mut self, message: Bytes) -> Answer {
        let deadline = tokio::time::Instant::now() + self.timeout;
        let sent = (self.client)(self.request(message));
        let answer = match timeout_at(deadline, sent).await {
            Err(_) => None,
            Ok(Err(error)) => Some(no_answer(whole(&error))),
            Ok(Ok(response)) => {
                let (head, body) = response.into_parts();
                match self.protocol {
                    #[cfg(feature = "grpc")]
                    Protocol::Grpc => {
                        let received = timeout_at(deadline, crate::grpc::Received::read(body));
                        received.await.ok().map(|received| crate::grpc::answer(&head, received))
                    }
                    #[cfg(feature = "http")]
                    Protocol::HttpProtobuf => {
                        let body = timeout_at(deadline, crate::http::read(body)).await;
                        Some(crate::http::answer(&head, &body.unwrap_or_default()))
                    }
                    #[cfg(not(all(feature = "grpc", feature = "http")))]
                    _ => None,
                }
            }
        };
        let answer = answer.unwrap_or_else(|| {
            // The connection may be dead without an error.
            self.client = client(self.protocol, self.tls.as_ref());
            no_answer(format!("no answer in {:?}", self.timeout))
        });
        single_line(answer)
    }

    fn request(&self, message: Bytes) -> Request<Body> {
        let is_gzip = self.compression == Compression::Gzip;
        let message = if is_gzip { Bytes::from(gzip(&message)) } else { message };
        let prefix = match self.protocol {
            #[cfg(feature = "grpc")]
            Protocol::Grpc => crate::grpc::prefix(is_gzip, message.len()),
            _ => Bytes::new(),
        };
        let mut request = Request::new(Full::new(prefix.chain(message)));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        request
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("protocol", &self.protocol).finish_non_exhaustive()
    }
}

/// A client that connects on first use, and again after the connection is lost.
type HttpClient = Box<dyn Fn(Request<Body>) -> ResponseFuture + Send + Sync>;

fn client(protocol: Protocol, tls: Option<&ClientConfig>) -> HttpClient {
    let mut builder = Client::builder(TokioExecutor::new());
    builder.pool_timer(TokioTimer::new());
    #[cfg(feature = "grpc")]
    builder.http2_only(protocol == Protocol::Grpc);
    let mut http = HttpConnector::new();
    http.enforce_http(tls.is_none());
    #[cfg(feature = "tls")]
    if let Some(config) = tls {
        let client = builder.build(HttpsConnector::from((http, config.clone())));
        return Box::new(move |request| client.request(request));
    }
    _ = protocol;
    let client = builder.build(http);
    Box::new(move |request| client.request(request))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use http_body_util::BodyExt;

    use super::*;
    use crate::OtlpExporter;

    fn request(protocol: Protocol, message: Bytes) -> Request<Body> {
        let builder = OtlpExporter::builder().protocol(protocol).compression(Compression::None);
        let exporter = builder.build_with(&|_| Ok(None)).unwrap();
        exporter.transport.unwrap().request(message)
    }

    #[test]
    fn an_uncompressed_message_is_not_copied() {
        for (protocol, prefix) in [
            #[cfg(feature = "http")]
            (Protocol::HttpProtobuf, b"".as_slice()),
            #[cfg(feature = "grpc")]
            (Protocol::Grpc, [0, 0, 0, 0x10, 1].as_slice()),
        ] {
            let message = Bytes::from(vec![7; 0x1001]);
            let mut body = request(protocol, message.clone()).into_body();
            let frame = body.frame().now_or_never().unwrap().unwrap().unwrap();
            let data = frame.into_data().unwrap();
            assert_eq!(data.first_ref(), prefix, "{protocol:?}");
            assert_eq!(data.last_ref(), &message);
            assert_eq!(data.last_ref().as_ptr(), message.as_ptr(), "{protocol:?}");
        }
    }
}

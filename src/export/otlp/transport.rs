//! Sends one request and returns the answer.

use std::error::Error as StdError;
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

use super::protocol::{
    DEVELOPMENT_VERSION, DEVELOPMENT_VERSION_HEADER, ExportProfilesServiceResponse,
};
use super::settings::{Compression, Protocol, Settings};
use crate::error::Error;
use crate::export::{Answer, RefusedScope};
use crate::text::{disturbs, gzip};

#[cfg(feature = "otlp-tls")]
use hyper_rustls::HttpsConnector;
#[cfg(feature = "otlp-tls")]
use rustls::ClientConfig;
#[cfg(not(feature = "otlp-tls"))]
type ClientConfig = std::convert::Infallible;

/// The maximum number of bytes that are read of an answer.
pub(super) const MOST_ANSWER_BYTES: usize = 64 * 1024;
/// The maximum number of characters that are shown of a server's message.
pub(super) const MOST_SHOWN_CHARS: usize = 400;

impl Answer {
    /// No answer was received.
    pub(super) fn no_answer(problem: String) -> Self {
        Self::NotNow { after: None, problem }
    }

    /// The receiver calls the request invalid. If it does not know the version of the format, it will accept no profile
    /// until one of both is updated; the protocol forbids to try another version.
    pub(super) fn invalid(problem: String) -> Self {
        if !problem.to_ascii_lowercase().contains(DEVELOPMENT_VERSION_HEADER) {
            return Self::Refused { what: RefusedScope::Request, problem };
        }
        let problem = format!(
            "{problem}; this release of tracing-profiling sends version {DEVELOPMENT_VERSION}: update it, or the receiver"
        );
        Self::Refused { what: RefusedScope::All, problem }
    }

    /// Makes the texts safe for a log, because a server can return anything.
    pub(super) fn single_line(self) -> Self {
        match self {
            Self::Accepted { message } => Self::Accepted { message: shown(&message) },
            Self::NotNow { after, problem } => Self::NotNow { after, problem: shown(&problem) },
            Self::Refused { what, problem } => Self::Refused { what, problem: shown(&problem) },
        }
    }

    pub(super) fn accepted(response: ExportProfilesServiceResponse) -> Self {
        let partial = response.partial_success.unwrap_or_default();
        let message = partial.error_message;
        match partial.rejected_profiles {
            ..=0 => Self::Accepted { message },
            // The receiver counts a profile's samples and waits as two profiles.
            _ => Self::Refused { what: RefusedScope::Request, problem: message },
        }
    }
}

/// A connection to the server: protobuf in a request of HTTP, or of gRPC, which differs in the headers, the frame of the
/// message, and where the answer is.
///
/// For gRPC, tonic's transport cannot be used without TLS while a crate in the program enables its TLS feature.
pub(super) struct Transport {
    protocol: Protocol,
    client: HttpClient,
    tls: Option<ClientConfig>,
    uri: Uri,
    headers: HeaderMap,
    compression: Compression,
    timeout: Duration,
    /// The server's address, for display.
    pub(super) endpoint: String,
}

/// A message after what precedes it, which stay apart: messages are large.
type Body = Full<Chain<Bytes, Bytes>>;

impl Transport {
    /// Does not connect yet.
    pub(super) fn new(mut settings: Settings) -> Result<Self, Error> {
        #[cfg(feature = "otlp-tls")]
        let tls = super::tls::client_config(&settings)?;
        #[cfg(not(feature = "otlp-tls"))]
        let tls = None;
        let endpoint = settings.shown_endpoint();
        let headers = &mut settings.headers;
        headers.entry(USER_AGENT).or_insert(HeaderValue::from_static(super::USER_AGENT));
        headers.insert(DEVELOPMENT_VERSION_HEADER, HeaderValue::from_static(DEVELOPMENT_VERSION));
        let is_gzip = settings.compression == Compression::Gzip;
        match settings.protocol {
            #[cfg(feature = "otlp-grpc")]
            Protocol::Grpc => super::grpc::add_headers(headers, is_gzip, settings.timeout),
            #[cfg(feature = "otlp-http")]
            Protocol::HttpProtobuf => super::http::add_headers(headers, is_gzip),
            // Unreachable: settings exist only for enabled protocols.
            #[cfg(not(all(feature = "otlp-grpc", feature = "otlp-http")))]
            other => {
                return Err(Error::unusable("the protocol", &format!("{other:?}"), "not there"));
            }
        }
        let Settings { protocol, uri, headers, compression, timeout, .. } = settings;
        #[cfg(feature = "otlp-grpc")]
        let uri = if protocol == Protocol::Grpc { super::grpc::uri_of_method(uri) } else { uri };
        let client = HttpClient::new(protocol, tls.as_ref());
        Ok(Self { protocol, client, tls, uri, headers, compression, timeout, endpoint })
    }

    /// Sends a message and waits for the answer until the timeout.
    pub(super) async fn send(&mut self, message: Bytes) -> Answer {
        let deadline = tokio::time::Instant::now() + self.timeout;
        let sent = self.client.request(self.request(message));
        let answer = match timeout_at(deadline, sent).await {
            Err(_) => None,
            Ok(Err(error)) => Some(Answer::no_answer(whole(&error))),
            Ok(Ok(response)) => {
                let (head, body) = response.into_parts();
                match self.protocol {
                    #[cfg(feature = "otlp-grpc")]
                    Protocol::Grpc => {
                        let received = timeout_at(deadline, super::grpc::Received::read(body));
                        received.await.ok().map(|received| super::grpc::answer(&head, received))
                    }
                    #[cfg(feature = "otlp-http")]
                    Protocol::HttpProtobuf => {
                        let body = timeout_at(deadline, super::http::read(body)).await;
                        Some(super::http::answer(&head, &body.unwrap_or_default()))
                    }
                    #[cfg(not(all(feature = "otlp-grpc", feature = "otlp-http")))]
                    _ => None,
                }
            }
        };
        let answer = answer.unwrap_or_else(|| {
            // The connection may be dead without an error.
            self.client = HttpClient::new(self.protocol, self.tls.as_ref());
            Answer::no_answer(format!("no answer in {:?}", self.timeout))
        });
        answer.single_line()
    }

    fn request(&self, message: Bytes) -> Request<Body> {
        let is_gzip = self.compression == Compression::Gzip;
        let message = if is_gzip { Bytes::from(gzip(&message)) } else { message };
        let prefix = match self.protocol {
            #[cfg(feature = "otlp-grpc")]
            Protocol::Grpc => super::grpc::prefix(is_gzip, message.len()),
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
        f.debug_struct("Transport").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// A client that connects on first use, and again after the connection is lost.
enum HttpClient {
    Plain(Client<HttpConnector, Body>),
    #[cfg(feature = "otlp-tls")]
    Tls(Client<HttpsConnector<HttpConnector>, Body>),
}

impl HttpClient {
    fn new(protocol: Protocol, tls: Option<&ClientConfig>) -> Self {
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new());
        #[cfg(feature = "otlp-grpc")]
        builder.http2_only(protocol == Protocol::Grpc);
        let mut http = HttpConnector::new();
        http.enforce_http(tls.is_none());
        #[cfg(feature = "otlp-tls")]
        if let Some(config) = tls {
            return Self::Tls(builder.build(HttpsConnector::from((http, config.clone()))));
        }
        _ = protocol;
        Self::Plain(builder.build(http))
    }

    fn request(&self, request: Request<Body>) -> ResponseFuture {
        match self {
            Self::Plain(client) => client.request(request),
            #[cfg(feature = "otlp-tls")]
            Self::Tls(client) => client.request(request),
        }
    }
}

/// A single line of bounded length.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !disturbs(*c)).take(MOST_SHOWN_CHARS).collect()
}

/// An error with all its sources.
pub(super) fn whole(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let cause = error.to_string();
        // Some errors repeat their source.
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        next = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use http_body_util::BodyExt;

    use super::*;
    use crate::export::OtlpExporter;

    fn request(protocol: Protocol, message: Bytes) -> Request<Body> {
        let builder = OtlpExporter::builder().protocol(protocol).compression(Compression::None);
        let exporter = builder.build_with(&|_| Ok(None)).unwrap();
        exporter.transport.unwrap().request(message)
    }

    #[test]
    fn an_uncompressed_message_is_not_copied() {
        for (protocol, prefix) in
            [(Protocol::HttpProtobuf, b"".as_slice()), (Protocol::Grpc, &[0, 0, 0, 0x10, 1])]
        {
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

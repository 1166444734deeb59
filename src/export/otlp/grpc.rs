//! OTLP over gRPC.

use std::error::Error as StdError;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{BufMut, Bytes};
use http::header::HeaderMap;
use http::uri::{PathAndQuery, Uri};
use http_body::Frame;
use hyper_util::client::legacy::Client;
use parking_lot::Mutex;
use prost::Message;
use tonic::body::Body;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::{BoxFuture, Service};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::protocol::{ExportProfilesServiceResponse, GRPC_METHOD};
use super::settings::{Compression, Settings};
use super::transport::{Connector, MOST_ANSWER_BYTES, whole};
use crate::export::{Answer, RefusedScope};

/// A server that speaks gRPC.
///
/// Uses the same client as HTTP rather than tonic's transport, which can be used without TLS only while no crate in the
/// program enables tonic's TLS feature.
pub(super) struct Grpc {
    pub(super) client: Client<Connector, Body>,
    origin: Uri,
    headers: HeaderMap,
    compression: Compression,
}

impl Grpc {
    pub(super) fn new(settings: Settings, client: Client<Connector, Body>) -> Self {
        let Settings { uri: origin, headers, compression, .. } = settings;
        Self { client, origin, headers, compression }
    }

    pub(super) async fn send(&self, encoded: Bytes, timeout: Duration) -> Answer {
        let message = Arc::default();
        let client = Apart { client: self.client.clone(), message: Arc::clone(&message) };
        let mut service = tonic::client::Grpc::with_origin(client, self.origin.clone());
        if self.compression == Compression::Gzip {
            service = service.send_compressed(CompressionEncoding::Gzip);
        }
        let mut request = tonic::Request::new(encoded);
        *request.metadata_mut() = MetadataMap::from_headers(self.headers.clone());
        request.set_timeout(timeout);
        // Always succeeds: the client connects on first use.
        _ = service.ready().await;
        let path = PathAndQuery::from_static(GRPC_METHOD);
        let status = match service.server_streaming(request, path, Encoded).await {
            Ok(response) => response.into_inner().message().await.map(drop),
            Err(status) => Err(status),
        };
        match status {
            Ok(()) => Answer::accepted(read(&message.lock())),
            Err(status) => answer(&status),
        }
    }
}

/// A client that separates the message of an answer, so that tonic handles only the status. For a message that is
/// malformed or too long, tonic would report a failed request, as if the server had failed.
struct Apart {
    client: Client<Connector, Body>,
    message: Arc<Mutex<Vec<u8>>>,
}

impl Service<http::Request<Body>> for Apart {
    type Response = http::Response<StatusAlone>;
    type Error = hyper_util::client::legacy::Error;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (response, message) = (self.client.request(request), Arc::clone(&self.message));
        Box::pin(async move {
            let mut response = response.await?;
            // It describes the message, which tonic does not receive.
            response.headers_mut().remove("grpc-encoding");
            Ok(response.map(|body| StatusAlone { body: Body::new(body), message }))
        })
    }
}

/// An answer without its message.
struct StatusAlone {
    body: Body,
    message: Arc<Mutex<Vec<u8>>>,
}

impl http_body::Body for StatusAlone {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            let frame = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => frame,
                end => return Poll::Ready(end),
            };
            let data = match frame.into_data() {
                Ok(data) => data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            };
            let mut message = self.message.lock();
            let room = MOST_ANSWER_BYTES.saturating_sub(message.len());
            message.extend(data.iter().take(room));
        }
    }
}

/// Parses a message: the compression flag, the length, and the content. A malformed one is ignored, because only the
/// status counts.
fn read(message: &[u8]) -> ExportProfilesServiceResponse {
    let Some(([0, length @ ..], rest)) = message.split_first_chunk::<5>() else {
        return ExportProfilesServiceResponse::default();
    };
    let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
    let message = rest.get(..length).unwrap_or_default();
    ExportProfilesServiceResponse::decode(message).unwrap_or_default()
}

/// Requests that are already encoded.
struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, encoded: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(encoded);
        Ok(())
    }
}

impl Decoder for Encoded {
    type Item = ();
    type Error = Status;

    /// There are no messages.
    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        Ok(None)
    }
}

fn answer(status: &Status) -> Answer {
    let problem = || match status.message() {
        "" => status.code().to_string(),
        message => format!("{}: {message}", status.code()),
    };
    // The error is local, not the server's.
    if let Some(source) = status.source() {
        return Answer::no_answer(whole(source));
    }
    let info = status.get_details_retry_info();
    match status.code() {
        Code::ResourceExhausted if info.is_none() => {
            Answer::Refused { what: RefusedScope::Request, problem: problem() }
        }
        Code::Cancelled
        | Code::DeadlineExceeded
        | Code::ResourceExhausted
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unavailable
        | Code::DataLoss => {
            let after = info.and_then(|info| info.retry_delay).filter(|after| !after.is_zero());
            Answer::NotNow { after, problem: problem() }
        }
        Code::NotFound | Code::PermissionDenied | Code::Unauthenticated | Code::Unimplemented => {
            Answer::Refused { what: RefusedScope::All, problem: problem() }
        }
        Code::InvalidArgument => Answer::invalid(problem()),
        _ => Answer::Refused { what: RefusedScope::Request, problem: problem() },
    }
}

#[cfg(fuzzing)]
pub(super) fn fuzz(status: u8, header: &[u8], body: &[u8]) {
    let message = String::from_utf8_lossy(header).into_owned();
    let details = Bytes::copy_from_slice(body);
    let status = Status::with_details(Code::from(i32::from(status)), message, details);
    answer(&status).single_line().check();
    Answer::accepted(read(body)).single_line().check();
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn codes_are_retried_as_the_specification_requires() {
        for (code, is_retried) in [
            (Code::Cancelled, true),
            (Code::Unknown, false),
            (Code::InvalidArgument, false),
            (Code::DeadlineExceeded, true),
            (Code::NotFound, false),
            (Code::AlreadyExists, false),
            (Code::PermissionDenied, false),
            (Code::ResourceExhausted, false),
            (Code::FailedPrecondition, false),
            (Code::Aborted, true),
            (Code::OutOfRange, true),
            (Code::Unimplemented, false),
            (Code::Internal, false),
            (Code::Unavailable, true),
            (Code::DataLoss, true),
            (Code::Unauthenticated, false),
        ] {
            let answer = answer(&Status::new(code, "why"));
            assert_eq!(matches!(answer, Answer::NotNow { after: None, .. }), is_retried, "{code}");
            let Answer::Refused { what, .. } = answer else { continue };
            let wants_nothing = matches!(
                code,
                Code::NotFound
                    | Code::PermissionDenied
                    | Code::Unauthenticated
                    | Code::Unimplemented
            );
            assert_eq!(what == RefusedScope::All, wants_nothing, "{code}");
        }
    }

    #[test]
    fn a_receiver_of_another_version_gets_no_more_profiles() {
        let supported =
            "invalid or unsupported otlp-profiles-development-version: supported version is 2";
        let answer = answer(&Status::invalid_argument(supported));
        let Answer::Refused { what: RefusedScope::All, problem } = answer else {
            panic!("{answer:?}")
        };
        assert!(problem.contains(supported) && problem.contains("sends version 1"), "{problem}");
    }

    #[test]
    fn the_retry_delay_of_a_server_is_used() {
        let delay = Duration::from_millis(1500);
        for (code, delay) in [(Code::ResourceExhausted, delay), (Code::Unavailable, delay)] {
            let details = ErrorDetails::with_retry_info(Some(delay));
            let status = Status::with_error_details(code, "busy", details);
            let Answer::NotNow { after, .. } = answer(&status) else { panic!("{code}") };
            assert_eq!(after, Some(delay));
        }
    }

    #[test]
    fn a_malformed_response_is_ignored() {
        let nothing = ExportProfilesServiceResponse::default();
        for message in [
            b"".as_slice(),
            b"\0\0\0",
            b"\0\0\0\0\0",
            b"\0\0\0\0\x09\x0a",
            b"\0\0\0\0\x02\xff\xff",
            b"\x01\0\0\0\x02\x0a\0",
        ] {
            assert_eq!(read(message), nothing, "{message:?}");
        }
        let partial = read(b"\0\0\0\0\x04\x0a\x02\x08\x07").partial_success.unwrap();
        assert_eq!(partial.rejected_profiles, 7);
    }

    #[test]
    fn a_transport_error_is_not_an_answer_of_the_server() {
        let refused = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "refused");
        let mut status = Status::unknown("transport error");
        status.set_source(std::sync::Arc::new(refused));
        assert!(matches!(answer(&status), Answer::NotNow { .. }));
    }
}

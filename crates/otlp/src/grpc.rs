//! OTLP over gRPC.

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, TE};
use http::response::Parts;
use http::uri::{PathAndQuery, Uri};
use http::{HeaderName, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt;
use prost::Message;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use tracing_profiling_profile::export::remote::{Answer, RefusedScope};

use crate::answer::{MOST_ANSWER_BYTES, accepted, invalid, no_answer, whole};
use crate::protocol::{ExportProfilesServiceResponse, GRPC_METHOD};

const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

pub(crate) fn add_headers(headers: &mut HeaderMap, is_gzip: bool, timeout: Duration) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(TE, HeaderValue::from_static("trailers"));
    if is_gzip {
        headers.insert(GRPC_ENCODING, HeaderValue::from_static("gzip"));
    }
    // In milliseconds, with at most 8 digits.
    let timeout = HeaderValue::from_str(&format!("{}m", timeout.as_millis().max(1)));
    _ = timeout.map(|timeout| headers.insert(GRPC_TIMEOUT, timeout));
}

/// The method below the path of the receiver.
pub(crate) fn uri_of_method(base: Uri) -> Uri {
    let path = base.path().trim_end_matches('/');
    let path = PathAndQuery::try_from(format!("{path}{GRPC_METHOD}"));
    let mut parts = base.clone().into_parts();
    parts.path_and_query = path.ok();
    Uri::from_parts(parts).unwrap_or(base)
}

/// What precedes a message: the compression flag and its length.
pub(crate) fn prefix(is_gzip: bool, length: usize) -> Bytes {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    [&[u8::from(is_gzip)], &length.to_be_bytes()[..]].concat().into()
}

/// What a server has sent until it ended.
#[derive(Default)]
pub(crate) struct Received {
    /// The beginning of it, if it is long.
    body: Vec<u8>,
    trailers: Option<HeaderMap>,
    /// Why it is not all.
    problem: Option<String>,
}

impl Received {
    /// Reads an answer to its end, where the status is.
    pub(crate) async fn read<B>(mut body: B) -> Self
    where
        B: http_body::Body<Data = Bytes> + Unpin,
        B::Error: Error + 'static,
    {
        let mut received = Self::default();
        while let Some(frame) = body.frame().await {
            match frame.map(Frame::into_data) {
                Ok(Ok(data)) => {
                    let room = MOST_ANSWER_BYTES.saturating_sub(received.body.len());
                    received.body.extend(data.iter().take(room));
                }
                Ok(Err(frame)) => received.trailers = frame.into_trailers().ok(),
                Err(error) => {
                    received.problem = Some(whole(&error));
                    // The body of HTTP/2 would return the same error forever.
                    break;
                }
            }
        }
        received
    }
}

pub(crate) fn answer(head: &Parts, received: Received) -> Answer {
    let Received { body, trailers, problem } = received;
    // The answer to a request that fails at once has the status in its headers.
    let stated = [Some(&head.headers), trailers.as_ref()];
    let stated = stated.into_iter().flatten().find_map(Status::from_header_map);
    match (stated, problem) {
        (None, Some(problem)) => no_answer(problem),
        (None, None) => failure(&unstated(head.status)),
        (Some(status), _) if status.code() == Code::Ok => accepted(read(&body)),
        (Some(status), _) => failure(&status),
    }
}

/// The status of an answer that states none, as gRPC defines it.
fn unstated(status: StatusCode) -> Status {
    let code = match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502 | 503 | 504 => Code::Unavailable,
        _ => Code::Unknown,
    };
    Status::new(code, format!("no grpc-status, and the HTTP status {status}"))
}

/// Parses a message: the compression flag, the length, and the content. A malformed one is ignored, because only the
/// status counts.
pub(crate) fn read(message: &[u8]) -> ExportProfilesServiceResponse {
    let Some(([0, length @ ..], rest)) = message.split_first_chunk::<5>() else {
        return ExportProfilesServiceResponse::default();
    };
    let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
    let message = rest.get(..length).unwrap_or_default();
    ExportProfilesServiceResponse::decode(message).unwrap_or_default()
}

pub(crate) fn failure(status: &Status) -> Answer {
    let problem = || match status.message() {
        "" => status.code().to_string(),
        message => format!("{}: {message}", status.code()),
    };
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
        Code::InvalidArgument => invalid(problem()),
        _ => Answer::Refused { what: RefusedScope::Request, problem: problem() },
    }
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
            let answer = failure(&Status::new(code, "why"));
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
        let answer = failure(&Status::invalid_argument(supported));
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
            let Answer::NotNow { after, .. } = failure(&status) else { panic!("{code}") };
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

    /// An answer of HTTP 200 with these values of `grpc-status`.
    fn answer_with(header: Option<&'static str>, trailer: Option<&'static str>) -> Answer {
        let headers = |status: &'static str| {
            let status = HeaderValue::from_static(status);
            HeaderMap::from_iter([(HeaderName::from_static("grpc-status"), status)])
        };
        let mut response = http::Response::new(());
        *response.headers_mut() = header.map(headers).unwrap_or_default();
        let received = Received { trailers: trailer.map(headers), ..Received::default() };
        answer(&response.into_parts().0, received)
    }

    #[test]
    fn only_a_stated_success_is_one() {
        for (header, trailer) in [(Some("0"), None), (None, Some("0"))] {
            let answer = answer_with(header, trailer);
            assert!(matches!(answer, Answer::Accepted { .. }), "{answer:?}");
        }
        for (header, trailer) in [(Some("14"), None), (None, Some("14"))] {
            let answer = answer_with(header, trailer);
            assert!(matches!(answer, Answer::NotNow { .. }), "{answer:?}");
        }
        let Answer::Refused { what: RefusedScope::Request, problem } = answer_with(None, None)
        else {
            panic!("nothing is stated")
        };
        assert!(problem.contains("no grpc-status"), "{problem}");
    }

    #[test]
    fn there_is_one_timeout() {
        let mut headers = HeaderMap::from_iter([(GRPC_TIMEOUT, HeaderValue::from_static("1H"))]);
        add_headers(&mut headers, false, Duration::from_secs(2));
        let values: Vec<_> = headers.get_all(GRPC_TIMEOUT).iter().collect();
        assert_eq!(values, ["2000m"]);
    }
}

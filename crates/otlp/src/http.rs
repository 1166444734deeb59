//! OTLP over HTTP, with protobuf in the body.

use std::error::Error;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::StatusCode;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use http::response::Parts;
use http_body_util::{BodyExt, Collected, Limited};
use prost::Message;
use tracing_profiling_profile::export::remote::{Answer, RefusedScope};

use crate::answer::{MOST_ANSWER_BYTES, accepted, invalid};
use crate::protocol::ExportProfilesServiceResponse;

pub(crate) const PROTOBUF: HeaderValue = HeaderValue::from_static("application/x-protobuf");

pub(crate) fn add_headers(headers: &mut HeaderMap, is_gzip: bool) {
    headers.insert(CONTENT_TYPE, PROTOBUF);
    if is_gzip {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
}

/// The body of an answer. The status is sufficient: a body that is too long or incomplete is ignored.
pub(crate) async fn read(
    body: impl http_body::Body<Error: Into<Box<dyn Error + Send + Sync>>>,
) -> Bytes {
    let body = Limited::new(body, MOST_ANSWER_BYTES).collect().await;
    body.map(Collected::to_bytes).unwrap_or_default()
}

pub(crate) fn answer(head: &Parts, body: &[u8]) -> Answer {
    match head.status.is_success() {
        true => accepted(ExportProfilesServiceResponse::decode(body).unwrap_or_default()),
        false => failure(head.status, &head.headers, body),
    }
}

pub(crate) fn failure(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Answer {
    let problem = match server_message(headers, body) {
        server_message if server_message.is_empty() => status.to_string(),
        server_message => format!("{status}: {server_message}"),
    };
    match status.as_u16() {
        429 | 502 | 503 | 504 => {
            let after = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
            let after = after.and_then(|text| retry_after(text, SystemTime::now()));
            Answer::NotNow { after, problem }
        }
        400 => invalid(problem),
        // Redirections; who may send, where to, and what.
        300..400 | 401..=405 | 407 | 410 | 415 | 501 => {
            Answer::Refused { what: RefusedScope::All, problem }
        }
        _ => Answer::Refused { what: RefusedScope::Request, problem },
    }
}

/// Seconds, or a date that is in the future.
fn retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    httpdate::parse_http_date(text.trim()).ok()?.duration_since(now).ok()
}

/// The message in the body: that of a `google.rpc.Status`, or text.
fn server_message(headers: &HeaderMap, body: &[u8]) -> String {
    #[derive(Clone, PartialEq, Message)]
    struct Status {
        #[prost(string, tag = "2")]
        message: String,
    }
    let text = if headers.get(CONTENT_TYPE) == Some(&PROTOBUF) {
        Status::decode(body).unwrap_or_default().message
    } else {
        String::from_utf8_lossy(body).into_owned()
    };
    text.lines().next().unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(status: u16, after: Option<&'static str>) -> Answer {
        let mut headers = HeaderMap::new();
        if let Some(after) = after {
            headers.insert(RETRY_AFTER, HeaderValue::from_static(after));
        }
        failure(StatusCode::from_u16(status).unwrap(), &headers, b"why\nnot")
    }

    #[test]
    fn codes_are_retried_as_the_specification_requires() {
        for status in [429, 502, 503, 504] {
            let Answer::NotNow { after: None, problem } = of(status, None) else {
                panic!("{status}")
            };
            assert!(problem.ends_with(": why"), "{problem}");
        }
        for (expected, statuses) in [
            (RefusedScope::All, [302, 401, 404, 407, 410, 501].as_slice()),
            (RefusedScope::Request, &[400, 409, 413, 422, 500, 505]),
        ] {
            for status in statuses {
                let Answer::Refused { what, .. } = of(*status, Some("1")) else {
                    panic!("{status}")
                };
                assert_eq!(what, expected, "{status}");
            }
        }
    }

    #[test]
    fn a_receiver_of_another_version_gets_no_more_profiles() {
        let body = b"unsupported OTLP-Profiles-Development-Version";
        let answer = |status| failure(status, &HeaderMap::new(), body);
        let Answer::Refused { what, problem } = answer(StatusCode::BAD_REQUEST) else {
            panic!("it is refused")
        };
        assert_eq!(what, RefusedScope::All);
        assert!(problem.contains("update it, or the receiver"), "{problem}");
        let Answer::Refused { what, .. } = answer(StatusCode::CONFLICT) else { panic!("as well") };
        assert_eq!(what, RefusedScope::Request);
    }

    #[test]
    fn retry_after_is_used() {
        let Answer::NotNow { after, .. } = of(503, Some("7")) else { panic!("not now") };
        assert_eq!(after, Some(Duration::from_secs(7)));
        let now = httpdate::parse_http_date("Sat, 21 Nov 2026 08:51:00 GMT").unwrap();
        let after = |text| retry_after(text, now);
        assert_eq!(after("Sat, 21 Nov 2026 08:51:30 GMT"), Some(Duration::from_secs(30)));
        assert_eq!(after("Sat, 21 Nov 2026 08:50:00 GMT"), None);
        assert_eq!(after("soon"), None);
    }

    #[test]
    fn a_status_in_the_body_is_read() {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, PROTOBUF);
        // Field 1: the code 3. Field 2: the message.
        assert_eq!(server_message(&headers, b"\x08\x03\x12\x07no room"), "no room");
    }
}

//! Fuzzes the answers of servers.

use bytes::Bytes;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use prost::Message;
use tonic::{Code, Status};
use tracing_profiling_profile::export::remote::Answer;
use tracing_profiling_profile::text::disturbs;

use crate::answer::{MOST_SHOWN_CHARS, accepted, single_line};
use crate::protocol::ExportProfilesServiceResponse;
use crate::{grpc, http as web};

/// The first byte is the status, the second the length of the header.
pub fn fuzz_answers(bytes: &[u8]) {
    let [status, length, rest @ ..] = bytes else { return };
    let (header, body) = rest.split_at(usize::from(*length).min(rest.len()));
    fuzz_http(*status, header, body);
    fuzz_grpc(*status, header, body);
}

/// Checks that the texts fit into one log line.
fn check(answer: Answer) {
    let (Answer::Accepted { message: text }
    | Answer::NotNow { problem: text, .. }
    | Answer::Refused { problem: text, .. }) = single_line(answer);
    assert!(!text.contains(disturbs) && text.chars().count() <= MOST_SHOWN_CHARS);
}

fn fuzz_grpc(status: u8, header: &[u8], body: &[u8]) {
    let message = String::from_utf8_lossy(header).into_owned();
    let details = Bytes::copy_from_slice(body);
    let status = Status::with_details(Code::from(i32::from(status)), message, details);
    check(grpc::failure(&status));
    check(accepted(grpc::read(body)));
}

fn fuzz_http(status: u8, header: &[u8], body: &[u8]) {
    let Ok(status) = StatusCode::from_u16(100 + u16::from(status) * 2) else { return };
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(header) {
        headers.insert(RETRY_AFTER, value.clone());
        headers.insert(CONTENT_TYPE, if header.is_empty() { web::PROTOBUF } else { value });
    }
    check(web::failure(status, &headers, body));
    let response = ExportProfilesServiceResponse::decode(body).unwrap_or_default();
    check(accepted(response));
}

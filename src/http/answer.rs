//! What answers are made of.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use serde_json::{Map, Value};

pub(super) const HTML: &str = "text/html; charset=utf-8";

/// An error response.
pub(super) type Failure = (StatusCode, String);

pub(super) fn object<V: Into<Value>>(
    members: impl IntoIterator<Item = (&'static str, V)>,
) -> Value {
    let members = members.into_iter().map(|(name, value)| (name.to_owned(), value.into()));
    Value::Object(members.collect::<Map<_, _>>())
}

/// Clamped to years with four digits, which are all that the format can represent.
pub(super) fn time(time: SystemTime) -> String {
    const LAST: Duration = Duration::from_secs(253_402_300_799);
    let time = time.clamp(UNIX_EPOCH, UNIX_EPOCH + LAST);
    humantime::format_rfc3339_millis(time).to_string()
}

pub(super) fn not_found() -> Failure {
    (StatusCode::NOT_FOUND, "nothing is known of it".to_owned())
}

/// The directory of profiles cannot be read.
pub(super) fn unreadable(error: io::Error) -> Failure {
    let problem = format!("cannot read the directory of profiles: {error}");
    (StatusCode::INTERNAL_SERVER_ERROR, problem)
}

//! What answers are made of.

use std::io;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;
use tokio::sync::{Semaphore, oneshot};

use tracing_profiling::ProfileError;
use tracing_profiling_capture::sys::spawn;
pub(crate) use tracing_profiling_profile::text::rfc3339 as time;

pub(crate) const HTML: &str = "text/html; charset=utf-8";

/// An error response.
pub(crate) type Failure = (StatusCode, String);

/// Runs work that may block on a lock or a file without blocking other tasks. It has its own threads: a request may
/// want to know why the runtime's pool of blocking threads is full.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    static THREADS: Semaphore = Semaphore::const_new(16);
    let place = THREADS.acquire().await.map_err(internal)?;
    let (done, result) = oneshot::channel();
    let work = move || {
        let _place = place;
        // Fails if the client went away.
        _ = done.send(work());
    };
    spawn("profiling-http", work).map_err(internal)?;
    result.await.map_err(internal)?
}

pub(crate) fn internal(error: impl std::fmt::Display) -> Failure {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

pub(crate) fn not_now(error: impl std::fmt::Display) -> Failure {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

pub(crate) fn bad_request(problem: impl std::fmt::Display) -> Failure {
    (StatusCode::BAD_REQUEST, problem.to_string())
}

pub(crate) fn not_found() -> Failure {
    (StatusCode::NOT_FOUND, "nothing is known of it".to_owned())
}

/// The directory of profiles cannot be read.
pub(crate) fn unreadable(error: io::Error) -> Failure {
    let problem = format!("cannot read the directory of profiles: {error}");
    (StatusCode::INTERNAL_SERVER_ERROR, problem)
}

/// The layer does not say what was asked.
pub(crate) fn no_answer(why: ProfileError) -> Failure {
    let status = match why {
        ProfileError::HeapNotTracked => StatusCode::NOT_FOUND,
        ProfileError::Unavailable(_) => StatusCode::INTERNAL_SERVER_ERROR,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, why.to_string())
}

/// The value of a name in a query, decoded.
pub(crate) fn value_in(query: Option<&str>, wanted: &str) -> Option<String> {
    let mut pairs = query?.split('&').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == wanted)?;
    let value = value.replace('+', " ");
    Some(percent_decode_str(&value).decode_utf8_lossy().into_owned())
}

/// Whether the first `debug=...` of a query is a number other than 0.
pub(crate) fn is_text(query: Option<&str>) -> bool {
    let debug = value_in(query, "debug").and_then(|value| value.parse().ok());
    debug.is_some_and(|debug: i64| debug != 0)
}

/// Not as a content encoding: readers of pprof expect it to be compressed.
pub(crate) fn pprof_file(name: &str, bytes: Vec<u8>) -> Response {
    let file = format!("attachment; filename=\"{name}.pb.gz\"");
    let of_type = [(header::CONTENT_TYPE, "application/octet-stream")];
    (of_type, [(header::CONTENT_DISPOSITION, file)], bytes).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debug_other_than_0_asks_for_text() {
        for query in ["debug=1", "debug=2", "seconds=1&debug=1", "debug=-1"] {
            assert!(is_text(Some(query)), "{query}");
        }
        for query in ["", "debug", "debug=", "debug=0", "debug=x", "debug=0&debug=1", "undebug=1"] {
            assert!(!is_text(Some(query)), "{query}");
        }
    }
}

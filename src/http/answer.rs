//! What answers are made of.

use std::io;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::sync::{Semaphore, oneshot};

use crate::engine::NoAnswer;
use crate::sys;
pub(super) use crate::text::rfc3339 as time;

pub(super) const HTML: &str = "text/html; charset=utf-8";

/// An error response.
pub(super) type Failure = (StatusCode, String);

/// Runs work that may block on a lock or a file without blocking other tasks. It has its own threads: a request may
/// want to know why the runtime's pool of blocking threads is full.
pub(super) async fn blocking<T: Send + 'static>(
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
    sys::spawn("profiling-http", work).map_err(internal)?;
    result.await.map_err(internal)?
}

pub(super) fn internal(error: impl std::fmt::Display) -> Failure {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

pub(super) fn not_now(error: impl std::fmt::Display) -> Failure {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

pub(super) fn not_found() -> Failure {
    (StatusCode::NOT_FOUND, "nothing is known of it".to_owned())
}

/// The directory of profiles cannot be read.
pub(super) fn unreadable(error: io::Error) -> Failure {
    let problem = format!("cannot read the directory of profiles: {error}");
    (StatusCode::INTERNAL_SERVER_ERROR, problem)
}

pub(super) fn no_answer(why: NoAnswer) -> Failure {
    let (status, text) = match why {
        NoAnswer::Off => {
            (StatusCode::SERVICE_UNAVAILABLE, "profiling was never enabled, or has ended")
        }
        NoAnswer::HeapNotTracked => (
            StatusCode::NOT_FOUND,
            "the live heap is not tracked. That takes TRACING_PROFILING_HEAP=on, \
             TRACING_PROFILING_ALLOC_SAMPLE_INTERVAL not 0, `tracing_profiling::ProfilingAllocator` as the program's \
             `#[global_allocator]`, and profiling that was not off from the start",
        ),
        NoAnswer::NotListed => (
            StatusCode::INTERNAL_SERVER_ERROR,
            "the threads of the process cannot be listed: is this Linux, and is /proc mounted?",
        ),
        NoAnswer::Late => {
            (StatusCode::SERVICE_UNAVAILABLE, "the profiler's threads did not answer in time")
        }
    };
    (status, text.to_owned())
}

/// Not as a content encoding: readers of pprof expect it to be compressed.
pub(super) fn pprof_file(name: &str, bytes: Vec<u8>) -> Response {
    let file = format!("attachment; filename=\"{name}.pb.gz\"");
    let of_type = [(header::CONTENT_TYPE, "application/octet-stream")];
    (of_type, [(header::CONTENT_DISPOSITION, file)], bytes).into_response()
}

//! The live heap in the format that Go's `net/http/pprof` serves.

use axum::extract::{OriginalUri, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{Failure, blocking};
use crate::encode::pprof;
use crate::handle::Handle;
use crate::profile::Profile;

pub(super) async fn in_use(
    State(handle): State<Handle>,
    OriginalUri(uri): OriginalUri,
) -> Result<Response, Failure> {
    let is_growth = wants_growth(uri.query().unwrap_or_default())?;
    let profile = move || match is_growth {
        true => handle.heap_growth(),
        false => handle.heap_profile(),
    };
    blocking(move || encoded(profile())).await
}

pub(super) async fn allocated(State(handle): State<Handle>) -> Result<Response, Failure> {
    let profile = move || handle.heap_profile().map(|profile| profile.without_in_use());
    blocking(move || encoded(profile())).await
}

/// Whether a query has `growth=true`. Others are for parameters that Go's server has: `debug`, `gc`, `seconds`.
fn wants_growth(query: &str) -> Result<bool, Failure> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    match pairs.find(|(name, _)| *name == "growth") {
        None | Some((_, "false")) => Ok(false),
        Some((_, "true")) => Ok(true),
        Some(_) => Err((StatusCode::BAD_REQUEST, "`growth` must be `true` or `false`".to_owned())),
    }
}

fn encoded(profile: Option<Profile>) -> Result<Response, Failure> {
    let profile = profile.ok_or_else(|| {
        let problem = "the live heap is not tracked: set TRACING_PROFILING_HEAP=on, and \
            `tracing_profiling::ProfilingAllocator` as the program's `#[global_allocator]`";
        (StatusCode::NOT_FOUND, problem.to_owned())
    })?;
    // Not as a content encoding: readers of pprof expect it to be compressed.
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream"),
        (header::CONTENT_DISPOSITION, "attachment; filename=\"heap.pb.gz\""),
    ];
    Ok((headers, pprof(&profile)).into_response())
}

//! The live heap in the format that Go's `net/http/pprof` serves.

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::answer::{Failure, no_answer};
use super::{Routed, slow};
use crate::encode::pprof_showing;
use crate::handle::Handle;
use crate::profile::SampleKind;
use crate::sinks::HeapPart;

pub(super) async fn in_use(State(routed): State<Routed>) -> Result<Response, Failure> {
    slow(routed, |handle| encoded(handle, HeapPart::All, SampleKind::InUseBytes)).await
}

pub(super) async fn allocated(State(routed): State<Routed>) -> Result<Response, Failure> {
    slow(routed, |handle| encoded(handle, HeapPart::All, SampleKind::AllocatedBytes)).await
}

/// Not a `GET`, since the next one has only what has grown since this one.
pub(super) async fn growth(State(routed): State<Routed>) -> Result<Response, Failure> {
    slow(routed, |handle| encoded(handle, HeapPart::Growth, SampleKind::InUseBytes)).await
}

fn encoded(handle: &Handle, part: HeapPart, shown: SampleKind) -> Result<Response, Failure> {
    let profile = handle.heap_part(part).map_err(no_answer)?;
    // Not as a content encoding: readers of pprof expect it to be compressed.
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream"),
        (header::CONTENT_DISPOSITION, "attachment; filename=\"heap.pb.gz\""),
    ];
    Ok((headers, pprof_showing(&profile, Some(shown))).into_response())
}

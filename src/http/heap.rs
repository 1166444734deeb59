//! The live heap in the format that Go's `net/http/pprof` serves.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::answer::Failure;
use super::{Routed, slow};
use crate::encode::pprof_showing;
use crate::engine::NoHeap;
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
    let profile = handle.heap_part(part).map_err(|problem| match problem {
        NoHeap::NotTracked => {
            let text = "the live heap is not tracked. That takes TRACING_PROFILING_HEAP=on, \
                TRACING_PROFILING_ALLOC_SAMPLE_INTERVAL not 0, `tracing_profiling::ProfilingAllocator` as the program's `#[global_allocator]`, and profiling that \
                was not off from the start";
            (StatusCode::NOT_FOUND, text.to_owned())
        }
        NoHeap::NoAnswer => {
            let text = "the profiler's threads did not answer in time";
            (StatusCode::SERVICE_UNAVAILABLE, text.to_owned())
        }
    })?;
    // Not as a content encoding: readers of pprof expect it to be compressed.
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream"),
        (header::CONTENT_DISPOSITION, "attachment; filename=\"heap.pb.gz\""),
    ];
    Ok((headers, pprof_showing(&profile, Some(shown))).into_response())
}

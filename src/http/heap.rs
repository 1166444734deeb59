//! The live heap in the format that Go's `net/http/pprof` serves.

use std::sync::mpsc::channel;
use std::time::Duration;

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::answer::{Failure, no_answer, pprof_file};
use super::routes::value_in;
use super::threads::is_text;
use super::{Routed, blocking, slow};
use crate::encode::{heap_text, pprof_showing};
use crate::handle::Handle;
use crate::profile::SampleKind;
use crate::sinks::HeapPart;

/// As in Go, with `seconds` what has grown in that time, and with `debug` the text of all.
pub(super) async fn in_use(
    State(routed): State<Routed>,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    let query = query.unwrap_or_default();
    let is_text = is_text(&query);
    let part = match value_in(&query, "seconds").map(|text| text.parse::<u64>()) {
        None => HeapPart::All,
        Some(Ok(seconds @ 1..=600)) if !is_text => {
            let waiting = routed.waiting.take()?;
            slow(routed.clone(), |handle| handle.heap_part(HeapPart::Growth).map_err(no_answer))
                .await?;
            // If the client goes away, this future is dropped, and the wait ends.
            let (_waits, is_gone) = channel::<()>();
            let wait = move || Ok((is_gone.recv_timeout(Duration::from_secs(seconds)), waiting));
            _ = blocking(wait).await?;
            HeapPart::Growth
        }
        _ => {
            let problem = "`seconds` is from 1 to 600, and not together with `debug`";
            return Err((StatusCode::BAD_REQUEST, problem.to_owned()));
        }
    };
    slow(routed, move |handle| match is_text {
        true => Ok(heap_text(&handle.heap_part(part).map_err(no_answer)?).into_response()),
        false => encoded(handle, part, SampleKind::InUseBytes),
    })
    .await
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
    Ok(pprof_file("heap", pprof_showing(&profile, Some(shown))))
}

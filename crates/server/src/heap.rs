//! The live heap in the format that Go's `net/http/pprof` serves.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::mpsc::channel;
use std::time::Duration;

use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};

use tracing_profiling::profile::{Function, Profile, SampleKind};
use tracing_profiling::{Handle, ProfileError};
use tracing_profiling_profile::encode::pprof_showing;
use tracing_profiling_profile::facts::format::place_of;

use super::{Routed, blocking, slow, take_place};
use crate::answer::{Failure, bad_request, is_text, no_answer, pprof_file, value_in};

type Read = fn(&Handle) -> Result<Profile, ProfileError>;

/// As in Go, with `seconds` what has grown in that time, and with `debug` the text of all.
pub(crate) async fn in_use(
    State(routed): State<Routed>,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    let is_text = is_text(query.as_deref());
    let read: Read = match value_in(query.as_deref(), "seconds").map(|text| text.parse::<u64>()) {
        None => Handle::heap_profile,
        Some(Ok(seconds @ 1..=600)) if !is_text => {
            let waiting = take_place(&routed.waiting)?;
            slow(routed.clone(), |handle| handle.heap_growth().map_err(no_answer)).await?;
            // If the client goes away, this future is dropped, and the wait ends.
            let (_waits, is_gone) = channel::<()>();
            let wait = move || Ok((is_gone.recv_timeout(Duration::from_secs(seconds)), waiting));
            _ = blocking(wait).await?;
            Handle::heap_growth
        }
        _ => {
            let problem = "`seconds` is from 1 to 600, and not together with `debug`";
            return Err(bad_request(problem));
        }
    };
    slow(routed, move |handle| match is_text {
        true => Ok(text_of(&read(handle).map_err(no_answer)?).into_response()),
        false => encoded(handle, read, SampleKind::InUseBytes),
    })
    .await
}

pub(crate) async fn allocated(State(routed): State<Routed>) -> Result<Response, Failure> {
    slow(routed, |handle| encoded(handle, Handle::heap_profile, SampleKind::AllocatedBytes)).await
}

/// Not a `GET`, since the next one has only what has grown since this one.
pub(crate) async fn growth(State(routed): State<Routed>) -> Result<Response, Failure> {
    slow(routed, |handle| encoded(handle, Handle::heap_growth, SampleKind::InUseBytes)).await
}

/// The text of Go's with `debug=1`: for each stack, the one with the most in use first, the blocks and bytes in use and, in
/// brackets, allocated, its addresses and functions. The rate says that nothing is to be scaled.
fn text_of(profile: &Profile) -> String {
    use SampleKind::{AllocatedBytes, Allocations, InUseBlocks, InUseBytes};
    const KINDS: [SampleKind; 4] = [InUseBlocks, InUseBytes, Allocations, AllocatedBytes];
    let text = |[blocks, bytes, allocations, allocated]: [u64; 4]| {
        format!("{blocks}: {bytes} [{allocations}: {allocated}]")
    };
    let mut stacks: HashMap<_, [u64; 4]> = HashMap::new();
    for sample in profile.samples() {
        let values = KINDS.iter().zip(stacks.entry(sample.stack).or_default());
        values
            .filter(|(kind, _)| **kind == sample.kind)
            .for_each(|(_, sum)| *sum += sample.total());
    }
    let mut stacks: Vec<_> = stacks.into_iter().collect();
    stacks.sort_by_key(|(_, [_, bytes, ..])| Reverse(*bytes));
    let all = text(KINDS.map(|kind| profile.total(kind)));
    let mut out = format!("heap profile: {all} @ heap/2\n");
    for (stack, values) in stacks {
        _ = write!(out, "{} @", text(values));
        let locations = || profile.stack(stack).filter(|location| location.address > 0);
        locations().for_each(|location| _ = write!(out, " {:#x}", location.address));
        for (at, line) in locations().flat_map(|it| it.lines.iter().map(|line| (it.address, line)))
        {
            let Some(Function { name, file, .. }) = profile.function(line.function) else {
                continue;
            };
            _ = write!(out, "\n#\t{at:#x}\t{name}\t{}", place_of(file, line.line));
        }
        out.push_str("\n\n");
    }
    out
}

fn encoded(handle: &Handle, read: Read, shown: SampleKind) -> Result<Response, Failure> {
    let profile = read(handle).map_err(no_answer)?;
    Ok(pprof_file("heap", pprof_showing(&profile, Some(shown))))
}

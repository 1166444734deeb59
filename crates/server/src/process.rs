//! Profiles of the process, as Go's `net/http/pprof` serves them.

use std::time::Duration;

use axum::extract::{OriginalUri, State};
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse, Response};

use tracing_profiling::encode::{HtmlContext, html};
use tracing_profiling::profile::SampleKind;
use tracing_profiling::{Handle, ProfileError, ProfileKind, ProfileOptions};
use tracing_profiling_profile::encode::pprof_showing;

use crate::answer::{Failure, HTML, bad_request, blocking, internal, pprof_file, value_in};

/// Marks an error for `go tool pprof`, which then shows its text.
const X_GO_PPROF: HeaderName = HeaderName::from_static("x-go-pprof");

pub(crate) async fn answer(
    State(handle): State<Handle>,
    OriginalUri(uri): OriginalUri,
    kind: ProfileKind,
) -> Response {
    let query = uri.query();
    let is_report = value_in(query, "format").as_deref() == Some("html");
    match encoded(handle, kind, query, is_report).await {
        Ok(bytes) if is_report => ([(header::CONTENT_TYPE, HTML)], bytes).into_response(),
        Ok(bytes) => pprof_file("profile", bytes),
        Err((status, problem)) => {
            let headers = [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (X_GO_PPROF, "1")];
            (status, headers, format!("{problem}\n")).into_response()
        }
    }
}

async fn encoded(
    handle: Handle,
    kind: ProfileKind,
    query: Option<&str>,
    is_report: bool,
) -> Result<Vec<u8>, Failure> {
    if is_report && kind == ProfileKind::Wall {
        let problem =
            "there is no report of wall time: ask without `format=html`, for `go tool pprof`";
        return Err(bad_request(problem));
    }
    let options = options(kind, query)?;
    let not_enabled = move |error| not_enabled(kind, error);
    let begin = move || handle.begin_profile(options).map_err(not_enabled);
    // If the client goes away, this future is dropped, and the profile ends.
    let started = blocking(begin).await?;
    let _cancel = started.canceler();
    let encode = move || {
        let profile = started.wait().map_err(not_enabled)?;
        Ok(match is_report {
            true => html(&profile, &HtmlContext::default()).into_bytes(),
            false => pprof_showing(&profile, Some(SampleKind::OnCpu)),
        })
    };
    blocking(encode).await
}

fn not_enabled(kind: ProfileKind, error: ProfileError) -> Failure {
    match error {
        ProfileError::OutOfRange => bad_request(error),
        _ if kind == ProfileKind::Wall => {
            internal(format!("Could not observe all threads: {error}"))
        }
        _ => internal(format!("Could not enable CPU profiling: {error}")),
    }
}

/// The duration and rate of a query. As in Go, `seconds` that are no positive number are 30.
fn options(kind: ProfileKind, query: Option<&str>) -> Result<ProfileOptions, Failure> {
    let usual = ProfileOptions::of(kind);
    let seconds = value_in(query, "seconds").and_then(|text| text.parse::<u64>().ok());
    let seconds = seconds.filter(|seconds| *seconds > 0);
    let rate = value_in(query, "hz").map_or(Ok(usual.rate), |text| text.parse::<u32>());
    let rate = rate.map_err(|_| bad_request("`hz` must be a number of samples per second"))?;
    let duration = seconds.map_or(usual.duration, Duration::from_secs);
    Ok(ProfileOptions { duration, rate, ..usual })
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    #[test]
    fn seconds_are_read_as_go_does() {
        let read = |query: &str| {
            let options = options(ProfileKind::Cpu, Some(query));
            options.map(|of| (of.duration.as_secs(), of.rate))
        };
        for (query, seconds, rate) in [
            ("", 30, 100),
            ("seconds=5", 5, 100),
            ("debug=0&seconds=7&hz=250", 7, 250),
            ("seconds=0", 30, 100),
            ("seconds=-5", 30, 100),
            ("seconds=1.5", 30, 100),
            ("seconds=", 30, 100),
        ] {
            assert_eq!(read(query), Ok((seconds, rate)), "{query}");
        }
        let wall = |query: &str| options(ProfileKind::Wall, Some(query)).map(|of| of.rate);
        assert_eq!((wall("seconds=5"), wall("hz=50")), (Ok(20), Ok(50)));
        let refused = read("hz=many").unwrap_err();
        assert_eq!(refused.0, StatusCode::BAD_REQUEST);
    }
}

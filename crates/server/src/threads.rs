//! All threads of the process, as Go's `net/http/pprof` serves goroutines.

use axum::response::{IntoResponse, Response};

use tracing_profiling::Handle;
use tracing_profiling::encode::pprof_of_threads;

use crate::answer::{Failure, no_answer, pprof_file, value_in};

/// As text if the query asks for that, and otherwise as a profile.
pub(crate) fn answer(handle: &Handle, query: &str) -> Result<Response, Failure> {
    let dump = handle.threads().map_err(no_answer)?;
    Ok(match is_text(query) {
        true => dump.to_string().into_response(),
        false => pprof_file("threads", pprof_of_threads(&dump)),
    })
}

/// Whether the first `debug=...` of a query is a number other than 0.
pub(crate) fn is_text(query: &str) -> bool {
    let debug = value_in(query, "debug").and_then(|value| value.parse().ok());
    debug.is_some_and(|debug: i64| debug != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debug_other_than_0_asks_for_text() {
        for query in ["debug=1", "debug=2", "seconds=1&debug=1", "debug=-1"] {
            assert!(is_text(query), "{query}");
        }
        for query in ["", "debug", "debug=", "debug=0", "debug=x", "debug=0&debug=1", "undebug=1"] {
            assert!(!is_text(query), "{query}");
        }
    }
}

//! The switch of the continuous profile.

use axum::extract::State;
use axum::http::StatusCode;

use tracing_profiling::{Builder, Handle};

use crate::answer::{Failure, not_now};

/// The rate of the continuous profile, as text.
pub(crate) async fn get(State(handle): State<Handle>) -> String {
    match handle.continuous() {
        0 => "off".to_owned(),
        rate => rate.to_string(),
    }
}

pub(crate) async fn put(State(handle): State<Handle>, body: String) -> Result<String, Failure> {
    let rate = match body.trim() {
        "on" => Some(Builder::USUAL_CONTINUOUS_RATE),
        "off" => Some(0),
        rate => rate.parse().ok().filter(|rate| (1..=1_000).contains(rate)),
    };
    let rate = rate.ok_or_else(|| {
        let expected = "the body must be `on`, `off`, or samples per second, from 1 to 1000";
        (StatusCode::BAD_REQUEST, expected.to_owned())
    })?;
    handle.set_continuous(rate).map_err(not_now)?;
    Ok(get(State(handle)).await)
}

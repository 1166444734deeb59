//! The switch of the continuous profile.

use axum::extract::State;
use axum::http::StatusCode;

use super::answer::{Failure, not_now};
use crate::collect::continuous_rate;
use crate::handle::Handle;

/// The rate of the continuous profile, as text.
pub(super) async fn get(State(handle): State<Handle>) -> String {
    match handle.continuous() {
        0 => "off".to_owned(),
        rate => rate.to_string(),
    }
}

pub(super) async fn put(State(handle): State<Handle>, body: String) -> Result<String, Failure> {
    let rate = continuous_rate(body.trim()).ok_or_else(|| {
        let expected = "the body must be `on`, `off`, or samples per second, from 1 to 1000";
        (StatusCode::BAD_REQUEST, expected.to_owned())
    })?;
    handle.set_continuous(rate).map_err(not_now)?;
    Ok(get(State(handle)).await)
}

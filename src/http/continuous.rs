//! The switch of the continuous profile.

use axum::extract::State;
use axum::http::StatusCode;

use crate::handle::Handle;
use crate::sampler::continuous_rate;

/// The rate of the continuous profile, as text.
pub(super) async fn get(State(handle): State<Handle>) -> String {
    match handle.continuous() {
        0 => "off".to_owned(),
        rate => rate.to_string(),
    }
}

pub(super) async fn put(
    State(handle): State<Handle>,
    body: String,
) -> Result<String, (StatusCode, String)> {
    let rate = continuous_rate(body.trim()).ok_or_else(|| {
        let expected = "the body must be `on`, `off`, or samples per second, from 1 to 1000";
        (StatusCode::BAD_REQUEST, expected.to_owned())
    })?;
    let set = handle.set_continuous(rate);
    set.map_err(|error| (StatusCode::SERVICE_UNAVAILABLE, error.to_string()))?;
    Ok(get(State(handle)).await)
}

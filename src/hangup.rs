//! Reloads the rules on SIGHUP.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::config::rules_of_env;
use crate::control::Control;
use crate::engine::spawn;
use crate::error::Error;
use crate::log::{LogEvent, LogKind};
use crate::sys::Hangups;

/// Starts the thread that waits for the signal.
///
/// # Errors
///
/// If the system refuses to start it.
pub(crate) fn reload_on_hangup(control: &Arc<Control>) -> Result<(), Error> {
    let (mut hangups, end) = Hangups::new().map_err(Error::thread)?;
    let weak = Arc::downgrade(control);
    spawn("profiling-rules", move || {
        while hangups.wait() {
            let Some(control) = weak.upgrade() else { return };
            // The subscriber may be user code.
            _ = catch_unwind(AssertUnwindSafe(|| reload(&control)));
        }
    })?;
    control.set_hangups(Some(end));
    Ok(())
}

fn reload(control: &Arc<Control>) {
    let reloaded = rules_of_env().and_then(|rules| control.reload(rules));
    let Err(error) = reloaded else { return control.log_rules("SIGHUP") };
    let message = format!("SIGHUP: the rules stay as they are: {error}");
    control.log(LogEvent {
        error: Some(error.to_string()),
        ..LogEvent::warning(LogKind::ReloadFailed, message)
    });
}

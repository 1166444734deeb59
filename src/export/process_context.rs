//! Publishes which process this is, for profilers of the host.

use crate::encode;
use crate::log::{LogEvent, LogKind};
use crate::profile::Resource;
use crate::sys::{self, Unpublished};

/// The most that the OpenTelemetry eBPF profiler reads.
const MOST_BYTES: usize = 64 * 1024;

/// Publishes the resource as the process context. Returns the warning if that fails.
pub(crate) fn publish_context(resource: &Resource) -> Option<LogEvent> {
    let payload = encode::process_context(resource);
    let bytes = payload.len();
    let why = if bytes > MOST_BYTES {
        format!(
            "the resource has {bytes} bytes, and profilers read at most {MOST_BYTES}: shorten its attributes"
        )
    } else {
        match sys::publish_process_context(payload) {
            Ok(()) => return None,
            Err(Unpublished::Taken) => {
                "another library of this process has published one: turn one of both off".to_owned()
            }
            Err(Unpublished::Failed("memfd_create", error)) => format!(
                "memfd_create is refused ({error}), and this kernel does not name other memory: allow memfd_create in \
                 the seccomp profile"
            ),
            Err(Unpublished::Failed(call, error)) => format!("{call} is refused: {error}"),
        }
    };
    let message = format!(
        "the process context is not published: {why}; profilers of the host do not know which service this is"
    );
    Some(LogEvent { error: Some(why), ..LogEvent::warning(LogKind::ContextUnpublished, message) })
}

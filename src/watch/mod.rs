//! Spans that are open: those that hang or stay open for too long, and the list of them for a caller.

mod open_spans;
mod watchdog;

pub(crate) use open_spans::list_open;
pub(crate) use watchdog::Watchdog;

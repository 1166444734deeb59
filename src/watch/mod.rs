//! Spans that are open: those that hang or stay open for too long, and the list of them for a caller. And where all threads
//! are, in spans or not: once, or again and again.

mod deadlock;
mod open_spans;
mod thread_scan;
mod throttling;
mod wall_scan;
mod watchdog;

pub(crate) use open_spans::list_open;
pub(crate) use thread_scan::ThreadScan;
pub(crate) use wall_scan::{WallObservations, WallScanner};
pub(crate) use watchdog::Watchdog;

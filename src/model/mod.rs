//! Tests the layer against a model.
//!
//! Scripts are generated: spans on threads, samples, waits, errors, passing time and rounds of the collector. Each
//! script runs twice: on the [`stage`], where everything but the kernel and the clock is real, and through the
//! [`oracle`], which records everything and evaluates the whole record for each question. Both must report the same
//! kept spans and profiles.
//!
//! The oracle fixes two definitions. A span that is entered on two threads at once has the time of both, so on-CPU +
//! off-CPU + idle time can exceed wall time. A span that is entered twice on one thread counts once. While a thread is in a
//! span that is not inside another one that it has entered, the other one has neither on-CPU nor off-CPU time.
//!
//! `.ci/mutations` shows that these tests find errors.

mod oracle;
mod script;
mod source;
mod stage;
mod tests;

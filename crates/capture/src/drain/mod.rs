//! Reading what threads were sampled for: cursors, samples by tag, and the threads of the whole process.

mod cursor;
mod demand;
mod process;
mod reader;
mod records;

pub use cursor::ThreadCursor;
pub use demand::{Cost, Demand, DemandBudgets, Why};
pub use process::ProcessThreads;
pub use reader::{Loss, Reader, Sample, Sink};

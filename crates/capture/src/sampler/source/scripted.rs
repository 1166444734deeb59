//! A script of a test in place of the sources.

use std::sync::Arc;

use super::{AttachThreads, Sampler, ThreadShared};

impl Sampler {
    pub fn set_scripted(&self, scripted: Box<dyn AttachThreads>) {
        _ = self.0.scripted.set(scripted);
    }

    /// Adds a thread that a test has set up.
    pub fn add_scripted(&self, thread: Arc<ThreadShared>) {
        self.0.new.lock().push(thread);
    }
}

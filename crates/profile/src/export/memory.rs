//! Profiles kept in memory, for tests.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{ExportError, Exported, Exporter};
use crate::profile::Profile;

/// Keeps all profiles in memory; clones share them. Intended for tests: it never drops profiles.
#[derive(Clone, Debug, Default)]
pub struct Memory(Arc<Mutex<Vec<Profile>>>);

impl Memory {
    /// An exporter without profiles.
    pub fn new() -> Self {
        Self::default()
    }

    /// The profiles so far, in the order of export.
    pub fn profiles(&self) -> Vec<Profile> {
        self.0.lock().clone()
    }

    /// Removes and returns the profiles so far.
    pub fn take(&self) -> Vec<Profile> {
        std::mem::take(&mut self.0.lock())
    }
}

impl Exporter for Memory {
    fn keeps_files(&self) -> bool {
        false
    }

    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        self.0.lock().push(profile.clone());
        Ok(Exported::default())
    }
}

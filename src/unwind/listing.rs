//! When the list of loaded modules is read.

use std::time::{Duration, Instant};

use crate::sys::{LoadedModule, loaded_modules, module_generation, thread_cpu_ns};

/// Reading the mappings of the process may take a tenth of the time: some have ten thousands, and load libraries often.
const PAUSE: u32 = 10;
/// It may take half a second of CPU time before that.
const AHEAD: Duration = Duration::from_secs(5);
/// If they cannot be read.
const LONG_PAUSE: Duration = Duration::from_secs(1);

/// What was read last.
#[derive(Debug, Default)]
pub(super) struct ModuleListing {
    generation: Option<u64>,
    /// How often a library had been unloaded.
    unloads: Option<u64>,
    /// Whether the files of the modules were found out.
    has_files: bool,
    /// Until when the mappings may not be read again, apart from what is allowed ahead.
    read_until: Option<Instant>,
}

/// The modules that are loaded.
pub(super) struct ChangedModules {
    pub(super) modules: Vec<LoadedModule>,
    /// Whether others were unloaded.
    pub(super) has_unloaded: bool,
}

impl ModuleListing {
    /// Whether a library was loaded or unloaded since it was read.
    pub(super) fn is_outdated(&self) -> bool {
        self.generation.is_some_and(|generation| generation != module_generation())
    }

    /// Reads it if there was a change.
    pub(super) fn read(&mut self) -> Option<ChangedModules> {
        let now = Instant::now();
        let may_read = self.read_until.is_none_or(|until| until <= now + AHEAD);
        let is_known = self.generation == Some(module_generation());
        if is_known && (self.has_files || !may_read) {
            return None;
        }
        let start = thread_cpu_ns();
        let list = loaded_modules(may_read);
        if may_read {
            let took = thread_cpu_ns().zip(start).map(|(now, start)| now.saturating_sub(start));
            let from = self.read_until.map_or(now, |until| until.max(now));
            self.read_until = Some(match list.has_files {
                true => from + Duration::from_nanos(took.unwrap_or(0)) * PAUSE,
                false => now + AHEAD + LONG_PAUSE,
            });
        }
        let unloads = self.unloads.replace(list.unloads);
        (self.generation, self.has_files) = (Some(list.generation), list.has_files);
        let has_unloaded = unloads.is_some_and(|before| before != list.unloads);
        Some(ChangedModules { modules: list.modules, has_unloaded })
    }
}

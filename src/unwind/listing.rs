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
    /// How often libraries had been loaded and unloaded.
    loads: Option<(u64, u64)>,
    /// Whether the files of the modules were found out.
    has_files: bool,
    /// Until when the mappings may not be read again, apart from what is allowed ahead.
    read_until: Option<Instant>,
}

/// The modules that are loaded.
pub(super) struct ChangedModules {
    pub(super) modules: Vec<LoadedModule>,
    /// The first that may have been loaded since others were unloaded.
    pub(super) first_new: usize,
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
        let before = self.loads.replace((list.loads, list.unloads));
        (self.generation, self.has_files) = (Some(list.generation), list.has_files);
        let first_new = match before {
            // As many as were loaded are at the end of the loader's list, less those that are gone again.
            Some((loads, unloads)) if unloads != list.unloads => {
                let loaded = usize::try_from(list.loads.wrapping_sub(loads)).unwrap_or(usize::MAX);
                list.listed.saturating_sub(loaded)
            }
            _ => list.modules.len(),
        };
        Some(ChangedModules { modules: list.modules, first_new })
    }
}

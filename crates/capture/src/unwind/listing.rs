//! When the list of loaded modules is read.
//!
//! Other code at the same address is another module. What was loaded since the reading before counts as no code for
//! samples that may be older.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::sys::{
    LoadedModule, ModuleList, ModuleLoads, WORDS, address_in_libc, loaded_modules, module_loads,
    thread_cpu_ns,
};

/// Reading the mappings of the process may take a tenth of the time: some have ten thousands, and load libraries often.
const PAUSE: u32 = 10;
/// Reading the mappings may take half a second of CPU time before that.
const AHEAD: Duration = Duration::from_secs(5);
/// If they cannot be read.
const LONG_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct ModuleListing {
    loads: Option<ModuleLoads>,
    /// How often libraries were found to be unloaded.
    unloads: u64,
    /// The loads before all samples that are not yet read.
    before_samples: ModuleLoads,
    /// The loads before all samples that will not yet be read when this reading of samples ends.
    before_others: ModuleLoads,
    has_files: bool,
    /// Until when the mappings may not be read again, apart from what is allowed ahead.
    read_until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct ChangedModules {
    pub(super) modules: Vec<LoadedModule>,
    /// The first that may be where another one was when samples were taken that are not yet read.
    pub(super) first_new: usize,
    /// The first that may be where another one was since the list was read last.
    pub(super) first_again: usize,
    /// Whether the former holds of samples that are taken after the reading of samples began.
    pub(super) is_for_later: bool,
    /// How often libraries were found to be unloaded, including this time.
    pub(super) unloads: u64,
    /// How many of them the loader lists, completely.
    pub(super) listed: usize,
}

#[cfg(test)]
impl ChangedModules {
    /// Modules of which none is where another one was.
    pub(super) fn of(modules: Vec<LoadedModule>) -> Self {
        let (first_new, first_again) = (usize::MAX, usize::MAX);
        let listed = modules.len();
        Self { modules, first_new, first_again, is_for_later: true, unloads: 0, listed }
    }
}

impl ModuleListing {
    /// `loads` are those before all samples.
    pub(super) fn new(loads: ModuleLoads) -> Self {
        Self {
            loads: None,
            unloads: 0,
            before_samples: loads,
            before_others: loads,
            has_files: false,
            read_until: None,
        }
    }

    /// Whether a library was loaded or unloaded since it was read.
    pub(super) fn is_outdated(&self) -> bool {
        self.loads.is_some_and(|loads| loads != module_loads())
    }

    /// Whether one was unloaded since then: what was read of those that are listed may be of others.
    pub(super) fn has_unloaded(&self) -> bool {
        self.loads.is_some_and(|loads| loads.unloaded != module_loads().unloaded)
    }

    /// Reads it if there was a change.
    pub(super) fn read(&mut self) -> Option<ChangedModules> {
        let now = Instant::now();
        let may_read = self.read_until.is_none_or(|until| until <= now + AHEAD);
        let is_known = self.loads == Some(module_loads());
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
        Some(self.note(list))
    }

    fn note(&mut self, list: ModuleList) -> ChangedModules {
        let ModuleList { loads, modules, listed, has_files } = list;
        let last = self.loads.unwrap_or(self.before_samples);
        if loads.unloaded != last.unloaded {
            self.unloads = WORDS.unloads.fetch_add(1, Ordering::AcqRel) + 1;
        }
        (self.loads, self.has_files) = (Some(loads), has_files);
        // What the loader lists up to the C library was loaded when the program started, and stays.
        let libc = address_in_libc();
        let has_libc = |module: &LoadedModule| {
            module.code.iter().any(|segment| segment.addresses.contains(&libc))
        };
        let staying = modules.iter().take(listed).position(has_libc).map_or(0, |at| at + 1);
        let first_after = |before: ModuleLoads| {
            if loads.unloaded == before.unloaded {
                return modules.len();
            }
            // As many as were loaded are at the end of the loader's list, less those that are gone again.
            let loaded = loads.loaded.wrapping_sub(before.loaded);
            listed.saturating_sub(usize::try_from(loaded).unwrap_or(usize::MAX)).max(staying)
        };
        ChangedModules {
            first_new: first_after(self.before_samples),
            first_again: first_after(last),
            is_for_later: loads.unloaded != self.before_others.unloaded,
            unloads: self.unloads,
            listed,
            modules,
        }
    }

    /// The reading of all samples that were taken until now begins, after these loads.
    pub(super) fn begin_reading(&mut self, loads: ModuleLoads) {
        self.before_others = loads;
    }

    /// All of them have been read.
    pub(super) fn end_reading(&mut self) {
        self.before_samples = self.before_others;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind::unwinder::tests::code;

    /// The first module that may be where another one was, in a list of ten.
    fn first_new(listing: &mut ModuleListing, loaded: u64, unloaded: u64) -> usize {
        let modules = vec![code(0x1000..0x2000); 10];
        let loads = ModuleLoads { loaded, unloaded };
        listing.note(ModuleList { loads, modules, listed: 10, has_files: true }).first_new
    }

    fn listing() -> ModuleListing {
        ModuleListing::new(ModuleLoads { loaded: 10, unloaded: 2 })
    }

    #[test]
    fn what_was_loaded_after_another_was_unloaded_is_new() {
        let listing = &mut listing();
        assert_eq!(first_new(listing, 12, 2), 10, "nothing was unloaded");
        assert_eq!(first_new(listing, 13, 3), 7);
        assert_eq!(first_new(listing, 90, 80), 0, "all may be");
    }

    #[test]
    #[cfg(not(tracing_profiling_unsupported))]
    fn what_is_listed_up_to_the_c_library_stays() {
        let libc = address_in_libc();
        let mut modules = vec![code(0x1000..0x2000); 10];
        modules[6] = code(libc..libc + 1);
        let loads = ModuleLoads { loaded: 90, unloaded: 80 };
        let list = ModuleList { loads, modules, listed: 10, has_files: true };
        let changed = listing().note(list);
        assert_eq!((changed.first_new, changed.first_again), (7, 7));
        // As this program has it.
        let list = loaded_modules(false);
        let is_it =
            |module: &LoadedModule| module.code.iter().any(|it| it.addresses.contains(&libc));
        assert!(list.modules.iter().take(list.listed).any(is_it), "{:?}", list.modules);
    }

    #[test]
    fn what_was_unloaded_before_the_first_list_is_not_hidden() {
        assert_eq!(first_new(&mut listing(), 12, 3), 8);
    }

    #[test]
    fn a_list_that_is_read_in_between_does_not_hide_what_was_unloaded() {
        let listing = &mut listing();
        // Unloaded, then read, although no samples are read, then another one is loaded.
        assert_eq!(first_new(listing, 10, 3), 10);
        assert_eq!(first_new(listing, 11, 3), 9);
        listing.begin_reading(ModuleLoads { loaded: 11, unloaded: 3 });
        // Samples that are being read are of either.
        assert_eq!(first_new(listing, 11, 3), 9);
        listing.end_reading();
        assert_eq!(first_new(listing, 12, 3), 10);
        assert_eq!(first_new(listing, 13, 4), 8);
    }

    #[test]
    fn what_was_unloaded_when_no_samples_were_left_is_forgotten() {
        let listing = &mut listing();
        // No list is read.
        listing.begin_reading(ModuleLoads { loaded: 90, unloaded: 82 });
        listing.end_reading();
        assert_eq!(first_new(listing, 91, 82), 10);
    }

    #[test]
    fn each_time_that_libraries_were_unloaded_is_noted_once() {
        let listing = &mut listing();
        let note = |listing: &mut ModuleListing, unloaded| {
            let loads = ModuleLoads { loaded: 10, unloaded };
            listing.note(ModuleList { loads, modules: Vec::new(), listed: 0, has_files: true })
        };
        assert_eq!(note(listing, 2).unloads, 0);
        let first = note(listing, 3);
        assert!(first.unloads > 0 && first.is_for_later);
        assert_eq!(note(listing, 3).unloads, first.unloads);
        listing.begin_reading(ModuleLoads { loaded: 10, unloaded: 3 });
        assert!(!note(listing, 3).is_for_later);
        assert!(note(listing, 4).unloads > first.unloads);
    }
}

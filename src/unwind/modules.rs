//! The program and its libraries, in a form that remains valid after they are unloaded.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::rules::{TableFrames, TableRow};
use super::tables::{TableBytes, UnwindTables};
use crate::sys::{LoadedModule, program_memory, read_own_memory};

/// A code file that is or was loaded.
#[derive(Debug)]
pub(crate) struct Module {
    /// The path to read the file from. For the program itself it is `/proc/self/exe`, which works even if the file was
    /// deleted or replaced.
    path: PathBuf,
    /// The displayed name.
    pub(crate) name: String,
    /// The GNU build id.
    pub(crate) build_id: Option<Vec<u8>>,
    /// Its code, as addresses in the file.
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// The offset of `start` in the file.
    pub(crate) file_offset: u64,
    /// The vDSO is not a file: the kernel maps it, and never moves it.
    pub(crate) is_vdso: bool,
    /// The load bias when it was first found.
    bias: u64,
}

/// A number that a [`Module`] keeps until it is [forgotten](Modules::forget).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ModuleId(u16);

/// A code address, independent of where its module is loaded: 16 bits of module, 48 bits of address in the file. Module
/// 0 is unknown; the address is then one in memory. The highest module number is the kernel, whose addresses have all
/// higher bits set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ModuleAddress(u64);

const ADDRESS_BITS: u32 = 48;
const ADDRESS: u64 = (1 << ADDRESS_BITS) - 1;
const IN_KERNEL: u64 = 0xffff;

impl ModuleAddress {
    pub(crate) fn new(module: Option<ModuleId>, address: u64) -> Self {
        let module = module.map_or(0, |id| u64::from(id.0));
        Self(module << ADDRESS_BITS | (address & ADDRESS))
    }

    /// An unknown address in the kernel.
    pub(crate) const KERNEL: Self = Self(IN_KERNEL << ADDRESS_BITS);

    pub(crate) fn in_kernel(address: u64) -> Self {
        Self(IN_KERNEL << ADDRESS_BITS | (address & ADDRESS))
    }

    /// An address in the kernel; 0 if unknown.
    pub(crate) fn kernel_address(self) -> Option<u64> {
        let is_in_kernel = self.0 >> ADDRESS_BITS == IN_KERNEL;
        let address = if self == Self::KERNEL { 0 } else { self.0 | !ADDRESS };
        is_in_kernel.then_some(address)
    }

    pub(crate) fn module(self) -> Option<ModuleId> {
        let number = (self.0 >> ADDRESS_BITS) as u16;
        (number != 0 && u64::from(number) != IN_KERNEL).then_some(ModuleId(number))
    }

    pub(crate) fn address(self) -> u64 {
        self.0 & ADDRESS
    }
}

/// Modules that were found, and the addresses of those that are currently loaded.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    /// By number, from 1 on; `None` where one was forgotten.
    all: Vec<Option<Arc<Module>>>,
    numbers: HashMap<ModuleFile, ModuleId>,
    free: Vec<ModuleId>,
    program: Option<ModuleId>,
    /// Sorted by their starts.
    loaded: Vec<Loaded>,
    /// How many were needed when some were forgotten last.
    needed: usize,
}

/// Path, build id and addresses in the file.
type ModuleFile = (PathBuf, Option<Vec<u8>>, u64, u64);

/// The highest number is the kernel's.
const MOST: usize = IN_KERNEL as usize - 1;
/// With fewer modules than that, none is forgotten.
const FEW: usize = 1_024;

#[derive(Clone, Debug)]
struct Loaded {
    start: u64,
    end: u64,
    bias: u64,
    id: ModuleId,
    /// The parts that are executable.
    segments: Vec<Range<u64>>,
    /// The same bytes that framehop has, which does not provide the starts of functions.
    tables: Option<UnwindTables>,
    /// The code from `start` on. Only for the program, which is never unloaded; libraries are read by system calls.
    code: Option<&'static [u8]>,
}

/// A change of the loaded modules, for the unwinder.
pub(super) enum ModuleChange {
    Added(framehop::Module<TableBytes>),
    /// The start of its code in memory.
    Removed(u64),
}

impl Modules {
    /// Updates the modules from the loader's list.
    pub(super) fn update(&mut self, list: &[LoadedModule]) -> Vec<ModuleChange> {
        let mut changes = Vec::new();
        let mut loaded = Vec::new();
        for (i, listed) in list.iter().enumerate() {
            let Some((start, end)) = code_range(listed) else {
                continue;
            };
            let old = self.loaded.binary_search_by_key(&start, |old| old.start).ok();
            let old = old.and_then(|at| self.loaded.get(at));
            let unchanged = old
                .filter(|old| old.end == end && old.bias == listed.bias)
                .filter(|old| self.is_same(old.id, listed));
            let entry = match unchanged {
                Some(old) => old.clone(),
                None => {
                    let is_changed = old.is_some();
                    let Some(id) = self.number(listed, i == 0, start, end) else {
                        continue;
                    };
                    if is_changed {
                        changes.push(ModuleChange::Removed(start));
                    }
                    let tables = UnwindTables::of(listed);
                    let module = framehop_module(listed, start, end, tables.clone());
                    changes.push(ModuleChange::Added(module));
                    let code = program_memory(start..end);
                    let segments = listed.code.iter().map(|code| code.addresses.clone()).collect();
                    Loaded { start, end, bias: listed.bias, id, segments, tables, code }
                }
            };
            loaded.push(entry);
        }
        loaded.sort_by_key(|entry| entry.start);
        let gone =
            |old: &&Loaded| loaded.binary_search_by_key(&old.start, |entry| entry.start).is_err();
        changes.extend(self.loaded.iter().filter(gone).map(|old| ModuleChange::Removed(old.start)));
        self.loaded = loaded;
        changes
    }

    /// The frame of an address in memory.
    pub(super) fn frame(&self, address: u64) -> ModuleAddress {
        match self.loaded_at(address) {
            Some(entry) => ModuleAddress::new(Some(entry.id), address.wrapping_sub(entry.bias)),
            None => ModuleAddress::new(None, address),
        }
    }

    pub(super) fn is_code(&self, address: u64) -> bool {
        self.segment(address).is_some()
    }

    /// The executable segment that contains this address.
    pub(super) fn segment(&self, address: u64) -> Option<Range<u64>> {
        let segments = &self.loaded_at(address)?.segments;
        segments.iter().find(|segment| segment.contains(&address)).cloned()
    }

    /// The bytes at these addresses of a segment.
    pub(super) fn bytes(&self, addresses: Range<u64>) -> Option<Cow<'static, [u8]>> {
        let entry = self.loaded_at(addresses.start)?;
        let Some(code) = entry.code else {
            return read_own_memory(addresses).ok().map(Cow::Owned);
        };
        let offset = |address: u64| usize::try_from(address.checked_sub(entry.start)?).ok();
        code.get(offset(addresses.start)?..offset(addresses.end)?).map(Cow::Borrowed)
    }

    /// Uses the row of the unwind tables for this address, if there is one.
    pub(super) fn with_row<T>(
        &self,
        address: u64,
        context: &mut gimli::UnwindContext<usize>,
        with: impl FnOnce(&TableRow, (&TableFrames<'_>, gimli::Encoding)) -> T,
    ) -> Option<T> {
        self.loaded_at(address)?.tables.as_ref()?.with_row(address, context, with)
    }

    /// The start in memory of the function that contains this address.
    pub(super) fn function_start(&self, address: u64) -> Option<u64> {
        self.loaded_at(address)?.tables.as_ref()?.function_start(address)
    }

    /// Whether this is code without unwind tables while other code has them: in a static program, or in musl's loader,
    /// which is its C library. A module without any tables can have been built for frame pointers.
    pub(super) fn is_beside_tables(&self, address: u64) -> bool {
        let Some(entry) = self.loaded_at(address) else {
            return false;
        };
        match &entry.tables {
            Some(tables) => tables.function_start(address).is_none(),
            None => self.get(entry.id).is_some_and(|module| module.name.contains("/ld-musl-")),
        }
    }

    fn loaded_at(&self, address: u64) -> Option<&Loaded> {
        let after = self.loaded.partition_point(|entry| entry.start <= address);
        let found = after.checked_sub(1).and_then(|at| self.loaded.get(at));
        found.filter(|entry| address < entry.end)
    }

    /// A module, whether it is still loaded or not, unless it was forgotten.
    pub(crate) fn get(&self, id: ModuleId) -> Option<&Arc<Module>> {
        self.all.get(usize::from(id.0).checked_sub(1)?)?.as_ref()
    }

    /// The program itself.
    pub(crate) fn program(&self) -> Option<ModuleId> {
        self.program
    }

    /// Whether enough are known that it is worth to look for those to forget.
    pub(crate) fn is_many(&self) -> bool {
        let many = self.needed.saturating_mul(2).clamp(FEW, MOST - FEW);
        self.numbers.len() >= many
    }

    /// Forgets the modules that are not loaded, except for some. Their numbers are given to others.
    pub(crate) fn forget(&mut self, except: &HashSet<ModuleId>) {
        let loaded: HashSet<_> = self.loaded.iter().map(|entry| entry.id).collect();
        let is_needed = |id: &ModuleId| [&loaded, except].iter().any(|needed| needed.contains(id));
        let (all, free) = (&mut self.all, &mut self.free);
        self.numbers.retain(|_, id| {
            let is_kept = is_needed(id) || self.program == Some(*id);
            if !is_kept && let Some(module) = all.get_mut(usize::from(id.0).wrapping_sub(1)) {
                *module = None;
                free.push(*id);
            }
            is_kept
        });
        self.needed = self.numbers.len();
    }

    fn is_same(&self, id: ModuleId, listed: &LoadedModule) -> bool {
        // The loader can map another library at the same address; comparing the notes is a cheap check.
        self.get(id).is_some_and(|module| {
            (listed.path == module.path || listed.path.as_os_str().is_empty())
                && build_id(listed) == module.build_id
        })
    }

    /// The number of a file, which is the same however often and wherever it is loaded.
    fn number(
        &mut self,
        listed: &LoadedModule,
        is_program: bool,
        start: u64,
        end: u64,
    ) -> Option<ModuleId> {
        let module = describe(listed, is_program, start, end);
        let file = module.file();
        if let Some(known) = self.numbers.get(&file) {
            return Some(*known);
        }
        let id = match self.free.pop() {
            Some(id) => id,
            None if self.all.len() < MOST => {
                self.all.push(None);
                ModuleId(u16::try_from(self.all.len()).ok()?)
            }
            None => return None,
        };
        if module.is_program() {
            self.program.get_or_insert(id);
        }
        *self.all.get_mut(usize::from(id.0).checked_sub(1)?)? = Some(Arc::new(module));
        self.numbers.insert(file, id);
        Some(id)
    }
}

/// Copies memory without creating a reference, since a library can be unloaded at any time.
pub(super) fn memory<const LENGTH: usize>(address: u64) -> Option<[u8; LENGTH]> {
    let end = address.checked_add(LENGTH as u64)?;
    read_own_memory(address..end).ok()?.try_into().ok()
}

fn code_range(module: &LoadedModule) -> Option<(u64, u64)> {
    let start = module.code.iter().map(|segment| segment.addresses.start).min()?;
    let end = module.code.iter().map(|segment| segment.addresses.end).max()?;
    (start < end).then_some((start, end))
}

fn describe(listed: &LoadedModule, is_program: bool, start: u64, end: u64) -> Module {
    let is_vdso = listed.path.to_string_lossy().contains("linux-vdso");
    // The loader has no name for the program; in a static program, musl uses this path.
    let is_unnamed = listed.path.as_os_str().is_empty() || listed.path == Path::new(PROGRAM);
    let (path, name) = if is_program && is_unnamed {
        let name = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("[program]"));
        (PathBuf::from(PROGRAM), name.to_string_lossy().into_owned())
    } else if is_vdso {
        (listed.path.clone(), "[vdso]".to_owned())
    } else {
        (listed.path.clone(), listed.path.to_string_lossy().into_owned())
    };
    let first = listed.code.iter().min_by_key(|segment| segment.addresses.start);
    Module {
        path,
        name,
        build_id: build_id(listed),
        start: start.wrapping_sub(listed.bias),
        end: end.wrapping_sub(listed.bias),
        file_offset: first.map_or(0, |segment| segment.file_offset),
        is_vdso,
        bias: listed.bias,
    }
}

const PROGRAM: &str = "/proc/self/exe";

impl Module {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn is_program(&self) -> bool {
        self.path == Path::new(PROGRAM)
    }

    /// The address in memory of an address in the file, for a module that never moves.
    pub(crate) fn loaded_at(&self, address: u64) -> u64 {
        address.wrapping_add(self.bias)
    }

    fn file(&self) -> ModuleFile {
        (self.path.clone(), self.build_id.clone(), self.start, self.end)
    }
}

fn framehop_module(
    listed: &LoadedModule,
    start: u64,
    end: u64,
    tables: Option<UnwindTables>,
) -> framehop::Module<TableBytes> {
    let mut sections = framehop::ExplicitModuleSectionInfo::default();
    if let Some(tables) = tables {
        let stated = |addresses: std::ops::Range<u64>| {
            addresses.start.wrapping_sub(listed.bias)..addresses.end.wrapping_sub(listed.bias)
        };
        sections.eh_frame_hdr_svma = Some(stated(tables.header_addresses));
        sections.eh_frame_hdr = Some(tables.header);
        sections.eh_frame_svma = Some(stated(tables.frames_addresses));
        sections.eh_frame = Some(tables.frames);
    }
    framehop::Module::new(
        listed.path.to_string_lossy().into_owned(),
        start..end,
        listed.bias,
        sections,
    )
}

/// The GNU build id among a module's notes, read from memory.
fn build_id(module: &LoadedModule) -> Option<Vec<u8>> {
    const MAX_NOTE_BYTES: u64 = 64 * 1024;
    let notes = module.notes.iter().filter(|notes| notes.end - notes.start <= MAX_NOTE_BYTES);
    notes
        .filter_map(|notes| read_own_memory(notes.clone()).ok())
        .find_map(|bytes| build_id_in(&bytes))
}

/// Parses ELF notes: the lengths of name and description and a type, 4 bytes each, then name and description, each
/// padded to 4 bytes.
pub(crate) fn build_id_in(notes: &[u8]) -> Option<Vec<u8>> {
    const NT_GNU_BUILD_ID: u32 = 3;
    let mut rest = notes;
    loop {
        let (header, after) = rest.split_first_chunk::<12>()?;
        let [n0, n1, n2, n3, d0, d1, d2, d3, k0, k1, k2, k3] = *header;
        let name_size = u32::from_ne_bytes([n0, n1, n2, n3]) as usize;
        let description_size = u32::from_ne_bytes([d0, d1, d2, d3]) as usize;
        let kind = u32::from_ne_bytes([k0, k1, k2, k3]);
        let name = after.get(..name_size)?;
        let after = after.get(name_size.checked_next_multiple_of(4)?..)?;
        let description = after.get(..description_size)?;
        if kind == NT_GNU_BUILD_ID && name == b"GNU\0" {
            return Some(description.to_vec());
        }
        rest = after.get(description_size.checked_next_multiple_of(4)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::{CodeSegment, loaded_modules};

    fn library(path: &str, at: u64) -> LoadedModule {
        LoadedModule {
            path: path.into(),
            bias: at,
            code: vec![CodeSegment { addresses: at + 0x1000..at + 0x2000, file_offset: 0x1000 }],
            loaded: std::iter::once(at..at + 0x3000).collect(),
            read_only: Vec::new(),
            eh_frame_hdr: None,
            notes: Vec::new(),
        }
    }

    fn path_of(modules: &Modules, address: u64) -> Option<&str> {
        let module = modules.get(modules.frame(address).module()?)?;
        module.path.to_str()
    }

    #[test]
    fn a_frame_names_its_module_and_the_address_in_the_file() {
        let mut modules = Modules::default();
        modules.update(&[library("/a.so", 0x10_0000), library("/b.so", 0x20_0000)]);
        let frame = modules.frame(0x20_1234);
        assert_eq!(frame.address(), 0x1234);
        assert_eq!(path_of(&modules, 0x20_1234), Some("/b.so"));
        assert_eq!(path_of(&modules, 0x10_1fff), Some("/a.so"));
        assert_eq!(path_of(&modules, 0x10_2000), None);
        assert_eq!(modules.frame(0x10_2000).address(), 0x10_2000);
        assert_eq!(path_of(&modules, 0), None);
    }

    #[test]
    fn a_library_loaded_again_elsewhere_is_the_same_module() {
        let mut modules = Modules::default();
        modules.update(&[library("/a.so", 0x10_0000)]);
        let before = modules.frame(0x10_1234);
        assert_eq!(modules.update(&[]).len(), 1);
        assert_eq!(modules.frame(0x10_1234).module(), None);
        modules.update(&[library("/a.so", 0x70_0000)]);
        assert_eq!(modules.frame(0x70_1234), before);
        assert_eq!(modules.get(before.module().unwrap()).unwrap().path(), Path::new("/a.so"));
    }

    #[test]
    fn another_library_at_the_same_address_is_another_module() {
        let mut modules = Modules::default();
        modules.update(&[library("/a.so", 0x10_0000)]);
        let before = modules.frame(0x10_1234);
        assert_eq!(modules.update(&[library("/b.so", 0x10_0000)]).len(), 2);
        assert_ne!(modules.frame(0x10_1234), before);
        assert_eq!(path_of(&modules, 0x10_1234), Some("/b.so"));
    }

    #[test]
    fn modules_that_come_and_go_are_forgotten_unless_a_stack_has_them() {
        let mut modules = Modules::default();
        let mut held = Vec::new();
        for number in 0..70_000_u32 {
            let name = format!("/{number}.so");
            modules.update(&[library("/always.so", 0x10_0000), library(&name, 0x70_0000)]);
            let frame = modules.frame(0x70_1234);
            assert_eq!(frame.kernel_address(), None, "{number}");
            assert_eq!(path_of(&modules, 0x70_1234), Some(name.as_str()));
            if number % 1_000 == 7 {
                held.push((frame.module().unwrap(), name));
            }
            if modules.is_many() {
                modules.forget(&held.iter().map(|(id, _)| *id).collect());
            }
        }
        assert!(modules.all.len() < 2 * FEW, "{}", modules.all.len());
        for (id, name) in &held {
            assert_eq!(modules.get(*id).unwrap().path(), Path::new(name));
        }
        assert_eq!(path_of(&modules, 0x10_1234), Some("/always.so"));
    }

    #[test]
    fn no_module_has_the_number_of_the_kernel() {
        let mut modules = Modules::default();
        let list: Vec<_> = (0..66_000_u64)
            .map(|number| library(&format!("/{number}.so"), (number + 1) << 16))
            .collect();
        modules.update(&list);
        let mut unknown = 0;
        for (number, listed) in list.iter().enumerate() {
            let frame = modules.frame(listed.bias + 0x1234);
            assert_eq!(frame.kernel_address(), None, "{number}");
            match frame.module() {
                Some(id) => assert_eq!(modules.get(id).unwrap().path(), listed.path),
                None => unknown += 1,
            }
        }
        assert_eq!(unknown, list.len() - MOST);
        // Those that are gone leave their numbers to others.
        modules.update(&list[MOST..]);
        modules.forget(&HashSet::new());
        modules.update(&list[MOST..]);
        let last = list.last().unwrap();
        assert_eq!(path_of(&modules, last.bias + 0x1234), last.path.to_str());
    }

    #[test]
    fn an_unchanged_list_causes_no_change() {
        let mut modules = Modules::default();
        let list = loaded_modules().modules;
        assert!(!modules.update(&list).is_empty() || cfg!(tracing_profiling_unsupported));
        assert!(modules.update(&list).is_empty());
    }

    #[test]
    fn finds_a_build_id_after_other_notes() {
        let mut notes = Vec::new();
        for (name, kind, description) in [
            (&b"XYZ\0"[..], 3_u32, &[9_u8; 5][..]),
            (b"GNU\0", 1, &[8; 4]),
            (b"GNU\0", 3, &[7; 20]),
        ] {
            notes.extend((name.len() as u32).to_ne_bytes());
            notes.extend((description.len() as u32).to_ne_bytes());
            notes.extend(kind.to_ne_bytes());
            notes.extend(name);
            notes.extend(description);
            notes.resize(notes.len().next_multiple_of(4), 0);
        }
        assert_eq!(build_id_in(&notes), Some(vec![7; 20]));
        for length in 0..notes.len() - 20 {
            assert_eq!(build_id_in(&notes[..length]), None);
        }
    }
}

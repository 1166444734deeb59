//! The program and its libraries, in a form that remains valid after they are unloaded.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::content::FileContent;
use super::listing::ChangedModules;
use super::rules::{TableFrames, TableRow};
use super::tables::{TableBytes, UnwindTables};
use crate::sys::{
    FileIdentity, LoadedModule, MappedFile, MappedPart, NoFile, program_memory, read_own_memory,
};

/// A code file that is or was loaded.
#[derive(Debug)]
pub struct Module {
    /// A number that no other module has or had.
    pub serial: u64,
    pub name: String,
    /// The file that was mapped at its code when it was found.
    pub file: Result<MappedFile, NoFile>,
    /// What the loader calls it.
    pub loader_name: PathBuf,
    pub is_program: bool,
    pub build_id: Option<Vec<u8>>,
    /// Of a library, and of a program without a build id.
    pub content: Option<FileContent>,
    pub start: u64,
    pub end: u64,
    /// The offset of `start` in the file.
    pub file_offset: u64,
    /// The vDSO is not a file: the kernel maps it, and never moves it.
    pub is_vdso: bool,
    /// The load bias when it was first found.
    bias: u64,
    is_loaded: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModuleId(u16);

/// A code address, independent of where its module is loaded: 16 bits of module, 48 bits of address in the file. Module
/// 0 is unknown; the address is then one in memory. The highest module number is the kernel, whose addresses have all
/// higher bits set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModuleAddress(u64);

const ADDRESS_BITS: u32 = 48;
const ADDRESS: u64 = (1 << ADDRESS_BITS) - 1;
const IN_KERNEL: u64 = 0xffff;

impl ModuleAddress {
    pub fn new(module: Option<ModuleId>, address: u64) -> Self {
        let module = module.map_or(0, |id| u64::from(id.0));
        Self(module << ADDRESS_BITS | (address & ADDRESS))
    }

    /// An unknown address in the kernel.
    pub const KERNEL: Self = Self(IN_KERNEL << ADDRESS_BITS);

    pub fn in_kernel(address: u64) -> Self {
        Self(IN_KERNEL << ADDRESS_BITS | (address & ADDRESS))
    }

    /// An address in the kernel; 0 if unknown.
    pub fn kernel_address(self) -> Option<u64> {
        let is_in_kernel = self.0 >> ADDRESS_BITS == IN_KERNEL;
        let address = if self == Self::KERNEL { 0 } else { self.0 | !ADDRESS };
        is_in_kernel.then_some(address)
    }

    pub fn module(self) -> Option<ModuleId> {
        let number = (self.0 >> ADDRESS_BITS) as u16;
        (number != 0 && u64::from(number) != IN_KERNEL).then_some(ModuleId(number))
    }

    pub fn address(self) -> u64 {
        self.0 & ADDRESS
    }
}

/// Modules that were found, and the addresses of those that are currently loaded.
#[derive(Debug, Default)]
pub struct Modules {
    /// By number, from 1 on.
    all: Vec<Arc<Module>>,
    numbers: HashMap<ModuleKey, ModuleId>,
    program: Option<ModuleId>,
    /// Sorted by their starts.
    loaded: Vec<Loaded>,
    /// Code that was loaded where other code may have been when samples were taken that are being read.
    contested: Vec<Range<u64>>,
    /// Contested code for samples that are taken after that reading began.
    contested_later: Vec<Range<u64>>,
    /// The highest number of unloads [since](Loaded::since) which a module is there.
    newest: u64,
    /// The number of unloads before a stack was copied that is being unwound, if modules are newer than that.
    copied_after: Option<u64>,
}

/// What makes a file loaded again the same module.
#[derive(Debug, PartialEq, Eq, Hash)]
struct ModuleKey {
    name: String,
    file: Option<FileIdentity>,
    build_id: Option<Vec<u8>>,
    content: Option<FileContent>,
    code: Range<u64>,
}

/// The highest number is the kernel's. Of what is loaded beyond that, frames are addresses.
const MAX_MODULES: usize = IN_KERNEL as usize - 1;

#[derive(Clone, Debug)]
struct Loaded {
    start: u64,
    end: u64,
    bias: u64,
    id: ModuleId,
    segments: Vec<MappedPart>,
    eh_frame_hdr: Option<MappedPart>,
    /// The module was not unloaded while its tables were read.
    is_certain: bool,
    /// The tables that framehop has, too, which does not provide the starts of functions.
    tables: Option<UnwindTables>,
    /// The code from `start` on. Only for the program, which is never unloaded; libraries are read by system calls.
    code: Option<&'static [u8]>,
    /// After that number of unloads, no other one was there.
    since: u64,
    /// The loader lists it: it is completely mapped.
    is_listed: bool,
}

impl Loaded {
    /// Whether one that is listed is in the same place, and was read completely.
    fn is_here(&self, listed: &LoadedModule) -> bool {
        self.is_certain
            && self.bias == listed.bias
            && self.segments == listed.code
            && self.eh_frame_hdr == listed.eh_frame_hdr
    }
}

pub(super) enum ModuleChange {
    Added(framehop::Module<TableBytes>),
    /// The start of its code in memory.
    Removed(u64),
}

/// Adds contested code, which may be there already.
fn contest(contested: &mut Vec<Range<u64>>, more: Vec<Range<u64>>) {
    contested.extend(more);
    contested.sort_unstable_by_key(|code| (code.start, code.end));
    contested.dedup();
}

impl Modules {
    /// Updates the modules from the list of those that are loaded. From `first_new` on, they may have been loaded where
    /// others were unloaded, and it is not known of samples from before in which of the two they are: that code is
    /// [contested](Self::is_contested). This includes those that were there before, which may have been loaded again.
    pub(super) fn update(&mut self, changed: &ChangedModules) -> Vec<ModuleChange> {
        let ChangedModules { modules: list, first_new, first_again, unloads, .. } = changed;
        let mut changes = Vec::new();
        let (mut loaded, mut contested) = (Vec::new(), Vec::new());
        let is_first = self.loaded.is_empty();
        for (i, listed) in list.iter().enumerate() {
            let Some((start, end)) = code_range(listed) else {
                continue;
            };
            let old = self.loaded.binary_search_by_key(&start, |old| old.start).ok();
            let old = old.and_then(|at| self.loaded.get(at));
            let mut module = describe(listed, i == 0, start, end);
            let is_library = !module.is_program && !module.is_vdso;
            if i >= *first_new && is_library {
                contested.push(start..end);
            }
            // Since the last list, another one may have been there; or since one was unloaded, if it was not listed.
            let is_new = i >= *first_again || (old.is_none() && !is_first);
            let since = match old {
                _ if is_new && is_library => *unloads,
                old => old.map_or(0, |old| old.since),
            };
            // Otherwise, nothing can have replaced it.
            let old_here = old.filter(|old| old.is_here(listed));
            let known = old_here.filter(|_| !is_new).and_then(|old| self.get(old.id));
            module.content = match known {
                Some(known) => known.content.clone(),
                // It would get no number: its content, up to 8 MiB, is not read in vain each time.
                None if old_here.is_none() && self.all.len() >= MAX_MODULES => continue,
                None => module.read_content(listed),
            };
            let entry = match old_here.filter(|old| self.is_same(old, &module)) {
                Some(old) => Loaded { since, ..old.clone() },
                None => {
                    let is_changed = old.is_some();
                    let Some(id) = self.number(module) else {
                        continue;
                    };
                    if is_changed {
                        changes.push(ModuleChange::Removed(start));
                    }
                    let tables = UnwindTables::of(listed);
                    let module = framehop_module(listed, start, end, tables.clone());
                    changes.push(ModuleChange::Added(module));
                    let code = program_memory(start..end);
                    Loaded {
                        start,
                        end,
                        bias: listed.bias,
                        id,
                        segments: listed.code.clone(),
                        eh_frame_hdr: listed.eh_frame_hdr.clone(),
                        is_certain: false,
                        tables,
                        code,
                        since,
                        is_listed: i < changed.listed,
                    }
                }
            };
            loaded.push(entry);
        }
        loaded.sort_by_key(|entry| entry.start);
        let gone =
            |old: &&Loaded| loaded.binary_search_by_key(&old.start, |entry| entry.start).is_err();
        changes.extend(self.loaded.iter().filter(gone).map(|old| ModuleChange::Removed(old.start)));
        for (entries, is_loaded) in [(&self.loaded, false), (&loaded, true)] {
            let modules = entries.iter().filter_map(|entry| self.get(entry.id));
            modules.for_each(|module| module.is_loaded.store(is_loaded, Ordering::Relaxed));
        }
        self.newest = loaded.iter().map(|entry| entry.since).max().unwrap_or(0);
        self.loaded = loaded;
        let before =
            if changed.is_for_later { &mut self.contested_later } else { &mut self.contested };
        contest(before, contested);
        changes
    }

    pub(super) fn frame(&self, address: u64) -> ModuleAddress {
        match self.loaded_at(address) {
            Some(entry) => ModuleAddress::new(Some(entry.id), address.wrapping_sub(entry.bias)),
            None => ModuleAddress::new(None, address),
        }
    }

    /// Nothing was unloaded while the last update was made. What the loader does not list may not be completely mapped.
    pub(super) fn confirm(&mut self, is_whole: bool) {
        let certain = self.loaded.iter_mut().filter(|entry| is_whole || entry.is_listed);
        certain.for_each(|entry| entry.is_certain = true);
    }

    /// Libraries were unloaded during each update: what was read may be of another one.
    pub(super) fn contest_uncertain(&mut self) {
        let is_library = |entry: &&Loaded| {
            let module = self.get(entry.id);
            module.is_none_or(|module| !module.is_program && !module.is_vdso)
        };
        let uncertain = self.loaded.iter().filter(|entry| !entry.is_certain).filter(is_library);
        let uncertain: Vec<_> = uncertain.map(|entry| entry.start..entry.end).collect();
        contest(&mut self.contested_later, uncertain);
    }

    /// Whether an address is in contested code, which is taken for no code.
    pub(super) fn is_contested(&self, address: u64) -> bool {
        let is_newer = |copied_after: u64| {
            self.listed_at(address).is_some_and(|entry| entry.since > copied_after)
        };
        // There are few, and mostly none.
        let mut contested = self.contested.iter().chain(&self.contested_later);
        contested.any(|code| code.contains(&address)) || self.copied_after.is_some_and(is_newer)
    }

    /// A stack is unwound that was copied after that number of unloads, or no longer. Returns whether that is a change.
    pub(super) fn set_copied_after(&mut self, unloads: Option<u64>) -> bool {
        let unloads = unloads.filter(|unloads| *unloads < self.newest);
        std::mem::replace(&mut self.copied_after, unloads) != unloads
    }

    /// The reading of all samples that were taken until now begins.
    pub(super) fn begin_reading(&mut self) {
        contest(&mut self.contested, std::mem::take(&mut self.contested_later));
    }

    /// All of them have been read. Returns whether there is less contested code.
    pub(super) fn end_reading(&mut self) -> bool {
        !std::mem::take(&mut self.contested).is_empty()
    }

    pub(super) fn is_code(&self, address: u64) -> bool {
        self.segment(address).is_some()
    }

    pub(super) fn segment(&self, address: u64) -> Option<Range<u64>> {
        let segments = &self.loaded_at(address)?.segments;
        let mut segments = segments.iter().map(|segment| &segment.addresses);
        segments.find(|segment| segment.contains(&address)).cloned()
    }

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
            None => self
                .get(entry.id)
                .is_some_and(|module| module.loader_name.to_string_lossy().contains("/ld-musl-")),
        }
    }

    fn loaded_at(&self, address: u64) -> Option<&Loaded> {
        if self.is_contested(address) { None } else { self.listed_at(address) }
    }

    fn listed_at(&self, address: u64) -> Option<&Loaded> {
        let after = self.loaded.partition_point(|entry| entry.start <= address);
        let found = after.checked_sub(1).and_then(|at| self.loaded.get(at));
        found.filter(|entry| address < entry.end)
    }

    /// A module, whether it is still loaded or not.
    pub fn get(&self, id: ModuleId) -> Option<&Arc<Module>> {
        self.all.get(usize::from(id.0).checked_sub(1)?)
    }

    pub fn program(&self) -> Option<ModuleId> {
        self.program
    }

    /// Whether what is loaded is what was loaded there before. The loader can map another library at the same address.
    fn is_same(&self, old: &Loaded, module: &Module) -> bool {
        self.get(old.id).is_some_and(|known| {
            let is_same_file = match (&known.file, &module.file) {
                // Also another one if it was moved: its inode may have been used again.
                (Ok(known), Ok(found)) => {
                    (known.identity, &known.path) == (found.identity, &found.path)
                }
                (Err(_), Ok(_)) => false,
                (_, Err(_)) => known.loader_name == module.loader_name,
            };
            is_same_file && known.build_id == module.build_id && known.content == module.content
        })
    }

    /// The number of a module, which is the same however often and wherever its file is loaded.
    fn number(&mut self, module: Module) -> Option<ModuleId> {
        let key = module.key();
        if let Some(known) = self.numbers.get(&key) {
            return Some(*known);
        }
        if self.all.len() >= MAX_MODULES {
            return None;
        }
        let serial = self.all.len() as u64 + 1;
        let id = ModuleId(u16::try_from(serial).ok()?);
        if module.is_program {
            self.program = Some(id);
        }
        self.all.push(Arc::new(Module { serial, ..module }));
        self.numbers.insert(key, id);
        Some(id)
    }
}

fn code_range(module: &LoadedModule) -> Option<(u64, u64)> {
    let start = module.code.iter().map(|segment| segment.addresses.start).min()?;
    let end = module.code.iter().map(|segment| segment.addresses.end).max()?;
    (start < end).then_some((start, end))
}

fn describe(listed: &LoadedModule, is_program: bool, start: u64, end: u64) -> Module {
    let path = listed.file.as_ref().map_or(&listed.loader_name, |file| &file.path);
    let name = match path.to_string_lossy() {
        _ if listed.is_vdso => "[vdso]".to_owned(),
        // The loader has no name for it.
        name if is_program && name.is_empty() => "[program]".to_owned(),
        name => name.into_owned(),
    };
    let first = listed.code.iter().min_by_key(|segment| segment.addresses.start);
    Module {
        serial: 0,
        name,
        file: listed.file.clone(),
        loader_name: listed.loader_name.clone(),
        is_program,
        content: None,
        build_id: build_id(listed),
        start: start.wrapping_sub(listed.bias),
        end: end.wrapping_sub(listed.bias),
        file_offset: first.map_or(0, |segment| segment.file_offset),
        is_vdso: listed.is_vdso,
        bias: listed.bias,
        is_loaded: AtomicBool::new(true),
    }
}

impl Module {
    /// Whether it was loaded when that was last checked.
    pub fn is_loaded(&self) -> bool {
        self.is_loaded.load(Ordering::Relaxed)
    }

    /// The address in memory of an address in the file, for a module that never moves.
    pub fn loaded_at(&self, address: u64) -> u64 {
        address.wrapping_add(self.bias)
    }

    /// The address in the file of an address in memory, if it has not moved since it was first found.
    pub fn in_file(&self, in_memory: u64) -> u64 {
        in_memory.wrapping_sub(self.bias)
    }

    fn read_content(&self, listed: &LoadedModule) -> Option<FileContent> {
        let (is_program, has_build_id) = (self.is_program, self.build_id.is_some());
        let is_known = self.is_vdso || (is_program && has_build_id);
        (!is_known).then(|| FileContent::of(listed, is_program, has_build_id))?
    }

    fn key(&self) -> ModuleKey {
        ModuleKey {
            name: self.name.clone(),
            file: self.file.as_ref().ok().map(|file| file.identity),
            build_id: self.build_id.clone(),
            content: self.content.clone(),
            code: self.start..self.end,
        }
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
    framehop::Module::new(String::new(), start..end, listed.bias, sections)
}

fn build_id(module: &LoadedModule) -> Option<Vec<u8>> {
    const MAX_NOTE_BYTES: u64 = 64 * 1024;
    let notes = module.notes.iter().filter(|notes| notes.end - notes.start <= MAX_NOTE_BYTES);
    notes
        .filter_map(|notes| read_own_memory(notes.clone()).ok())
        .find_map(|bytes| build_id_in(&bytes))
}

/// Parses ELF notes: lengths of name and description and a type, 4 bytes each, then both, padded to 4 bytes.
pub fn build_id_in(notes: &[u8]) -> Option<Vec<u8>> {
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
    use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};

    use crate::sys::loaded_modules;

    fn library(path: &str, at: u64) -> LoadedModule {
        let part = |start, end| MappedPart { addresses: at + start..at + end, file_offset: start };
        let inode = BuildHasherDefault::<DefaultHasher>::default().hash_one(path);
        let identity = FileIdentity { device: 1, inode };
        LoadedModule {
            file: Ok(MappedFile { path: path.into(), is_deleted: false, identity }),
            loader_name: PathBuf::new(),
            is_vdso: false,
            bias: at,
            code: vec![part(0x1000, 0x2000)],
            loaded: vec![part(0, 0x3000)],
            read_only: Vec::new(),
            eh_frame_hdr: None,
            notes: Vec::new(),
        }
    }

    fn changed(list: &[LoadedModule], first_new: usize) -> ChangedModules {
        let first_again = first_new;
        ChangedModules { first_new, first_again, ..ChangedModules::of(list.to_vec()) }
    }

    /// Modules that do not change while they are read.
    #[derive(Default)]
    struct Confirmed(Modules);

    impl Confirmed {
        fn update(&mut self, list: &[LoadedModule], first_new: usize) -> Vec<ModuleChange> {
            let changes = self.0.update(&changed(list, first_new));
            self.0.confirm(true);
            changes
        }
    }

    impl std::ops::Deref for Confirmed {
        type Target = Modules;

        fn deref(&self) -> &Modules {
            &self.0
        }
    }

    impl std::ops::DerefMut for Confirmed {
        fn deref_mut(&mut self) -> &mut Modules {
            &mut self.0
        }
    }

    #[test]
    fn what_was_unloaded_while_it_was_read_is_read_again() {
        let mut modules = Modules::default();
        let list = [library("/a.so", 0x10_0000)];
        let list = changed(&list, usize::MAX);
        assert_eq!(modules.update(&list).len(), 1);
        assert_eq!(modules.update(&list).len(), 2);
        modules.confirm(true);
        assert!(modules.update(&list).is_empty());
    }

    fn path_of(modules: &Modules, address: u64) -> Option<&str> {
        let module = modules.get(modules.frame(address).module()?)?;
        Some(&module.name)
    }

    #[test]
    fn a_frame_names_its_module_and_the_address_in_the_file() {
        let mut modules = Confirmed::default();
        modules.update(&[library("/a.so", 0x10_0000), library("/b.so", 0x20_0000)], usize::MAX);
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
        let mut modules = Confirmed::default();
        modules.update(&[library("/a.so", 0x10_0000)], usize::MAX);
        let before = modules.frame(0x10_1234);
        assert_eq!(modules.update(&[], usize::MAX).len(), 1);
        assert_eq!(modules.frame(0x10_1234).module(), None);
        modules.update(&[library("/a.so", 0x70_0000)], usize::MAX);
        assert_eq!(modules.frame(0x70_1234), before);
        assert_eq!(modules.get(before.module().unwrap()).unwrap().name, "/a.so");
    }

    #[test]
    fn another_library_at_the_same_address_is_another_module() {
        let mut modules = Confirmed::default();
        modules.update(&[library("/a.so", 0x10_0000)], usize::MAX);
        let before = modules.frame(0x10_1234);
        assert_eq!(modules.update(&[library("/b.so", 0x10_0000)], usize::MAX).len(), 2);
        assert_ne!(modules.frame(0x10_1234), before);
        assert_eq!(path_of(&modules, 0x10_1234), Some("/b.so"));
    }

    #[test]
    fn another_file_of_the_same_name_is_another_module() {
        let mut modules = Confirmed::default();
        let old = library("/a.so", 0x10_0000);
        modules.update(std::slice::from_ref(&old), usize::MAX);
        let before = modules.frame(0x10_1234);
        let mut new = old.clone();
        new.file.as_mut().unwrap().identity.inode += 1;
        assert_eq!(modules.update(std::slice::from_ref(&new), usize::MAX).len(), 2);
        let after = modules.frame(0x10_1234);
        assert_ne!(after, before);
        let serial = |at: ModuleAddress| modules.get(at.module().unwrap()).unwrap().serial;
        assert_ne!(serial(after), serial(before));
        modules.update(&[old], usize::MAX);
        assert_eq!(modules.frame(0x10_1234), before, "its file again");
    }

    #[test]
    fn code_that_may_have_replaced_other_code_is_in_no_module_for_a_while() {
        let mut modules = Confirmed::default();
        let list = |others: &[u64]| -> Vec<_> {
            let others = others.iter().map(|at| library("/a.so", *at));
            std::iter::once(library("/program", 0x50_0000)).chain(others).collect()
        };
        modules.update(&list(&[0x10_0000]), usize::MAX);
        // Although one is there as before, another one may have been in between.
        modules.update(&list(&[0x10_0000, 0x20_0000]), 0);
        assert_eq!(path_of(&modules, 0x10_1234), None);
        assert!(modules.is_contested(0x20_1234) && !modules.is_code(0x20_1234));
        assert_eq!(path_of(&modules, 0x50_1234), Some("/program"));
        modules.begin_reading();
        modules.update(&list(&[0x10_0000, 0x20_0000, 0x30_0000]), 3);
        assert!(modules.end_reading());
        assert_eq!(path_of(&modules, 0x10_1234), Some("/a.so"));
        assert_eq!(path_of(&modules, 0x30_1234), None);
        modules.begin_reading();
        assert!(modules.end_reading());
        assert_eq!(path_of(&modules, 0x30_1234), Some("/a.so"));
        modules.begin_reading();
        assert!(!modules.end_reading());
    }

    #[test]
    fn what_was_read_while_libraries_came_and_went_is_contested() {
        let mut modules = Modules::default();
        let list =
            changed(&[library("/program", 0x50_0000), library("/a.so", 0x10_0000)], usize::MAX);
        modules.update(&list);
        modules.contest_uncertain();
        assert_eq!(path_of(&modules, 0x10_1234), None);
        assert_eq!(path_of(&modules, 0x50_1234), Some("/program"));
        modules.update(&list);
        modules.confirm(true);
        modules.contest_uncertain();
        modules.begin_reading();
        modules.end_reading();
        assert_eq!(path_of(&modules, 0x10_1234), Some("/a.so"));
    }

    #[test]
    fn what_is_contested_now_stays_so_until_all_samples_are_read_and_not_longer() {
        let mut modules = Modules::default();
        let list = [library("/program", 0x50_0000), library("/a.so", 0x10_0000)];
        let during = ChangedModules { is_for_later: false, ..changed(&list, 0) };
        modules.begin_reading();
        modules.update(&during);
        modules.confirm(true);
        assert!(modules.is_contested(0x10_1234));
        assert!(modules.end_reading() && !modules.is_contested(0x10_1234));
    }

    #[test]
    fn a_stack_that_was_copied_before_is_not_in_what_was_loaded_since() {
        let mut modules = Modules::default();
        let list = |unloads| {
            let list = [library("/program", 0x50_0000), library("/a.so", 0x10_0000)];
            ChangedModules { unloads, ..changed(&list, usize::MAX) }
        };
        let expected = |modules: &mut Modules, copied_after, at_a| {
            assert!(modules.set_copied_after(Some(copied_after)) || at_a == Some("/a.so"));
            assert_eq!(path_of(modules, 0x10_1234), at_a, "after {copied_after}");
            assert_eq!(path_of(modules, 0x50_1234), Some("/program"));
            modules.set_copied_after(None);
            assert_eq!(path_of(modules, 0x10_1234), Some("/a.so"));
        };
        // The first list: what has been loaded since one was unloaded.
        modules.update(&ChangedModules { first_again: 1, ..list(3) });
        modules.confirm(true);
        expected(&mut modules, 2, None);
        expected(&mut modules, 3, Some("/a.so"));
        // Something else was unloaded.
        modules.update(&list(4));
        expected(&mut modules, 3, Some("/a.so"));
        // It may have been this one.
        modules.update(&ChangedModules { first_again: 1, ..list(5) });
        expected(&mut modules, 4, None);
        expected(&mut modules, 5, Some("/a.so"));
    }

    #[test]
    fn a_file_that_was_deleted_or_is_not_known_for_a_while_is_the_same_module() {
        let mut modules = Confirmed::default();
        let found = library("/a.so", 0x10_0000);
        modules.update(std::slice::from_ref(&found), usize::MAX);
        let before = modules.frame(0x10_1234);
        let mut deleted = found.clone();
        deleted.file.as_mut().unwrap().is_deleted = true;
        for why in [None, Some(NoFile::NotRead), Some(NoFile::Unreadable(String::new()))] {
            let listed =
                LoadedModule { file: why.map_or(deleted.file.clone(), Err), ..deleted.clone() };
            assert!(modules.update(&[listed], usize::MAX).is_empty());
            assert_eq!(modules.frame(0x10_1234), before);
        }
        // One that was not known at first is another one when it is.
        let unknown = |at| LoadedModule { file: Err(NoFile::NotRead), ..library("/c.so", at) };
        modules.update(&[unknown(0x20_0000)], usize::MAX);
        let before = modules.frame(0x20_1234);
        modules.update(&[library("/c.so", 0x20_0000)], usize::MAX);
        assert_ne!(modules.frame(0x20_1234), before);
        assert_eq!(path_of(&modules, 0x20_1234), Some("/c.so"));
    }

    #[test]
    fn no_module_has_the_number_of_the_kernel() {
        let mut modules = Confirmed::default();
        let list: Vec<_> = (0..66_000_u64)
            .map(|number| library(&format!("/{number}.so"), (number + 1) << 16))
            .collect();
        modules.update(&list, usize::MAX);
        let mut unknown = 0;
        for (number, listed) in list.iter().enumerate() {
            let frame = modules.frame(listed.bias + 0x1234);
            assert_eq!(frame.kernel_address(), None, "{number}");
            match frame.module() {
                Some(id) => assert_eq!(modules.get(id).unwrap().name, format!("/{number}.so")),
                None => unknown += 1,
            }
        }
        assert_eq!(unknown, list.len() - MAX_MODULES);
    }

    #[test]
    fn an_unchanged_list_causes_no_change() {
        let mut modules = Confirmed::default();
        let list = loaded_modules(true).modules;
        assert!(
            !modules.update(&list, usize::MAX).is_empty() || cfg!(tracing_profiling_unsupported)
        );
        assert!(modules.update(&list, usize::MAX).is_empty());
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

//! Symbolization with blazesym.
//!
//! The memory of blazesym has no limit of its own, so sizes of sections are read before a file is opened, and one that
//! does not fit is opened without its debug information, or not at all.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use blazesym::symbolize::source::{Elf, Process};
use blazesym::symbolize::{self as found, CodeInfo, Input, Sym};
use blazesym::{Pid, symbolize};

use super::kernel::KernelNames;
use super::module_file::{self, LoadedFile};
use super::names::{demangle, is_qualified, is_rust_file};
use super::sections::{Sections, SymbolContent};
use super::source::{Detail, SymbolFile};
use super::supplement::SupplementedNames;
use super::{Missing, SymbolProblem, SymbolSettings, build_id};
use crate::profile::{
    FrameKind, Function, LINKAGE, Location, MappingId, Profile, SourceLine, Symbolized, Symbols,
    capped,
};
use crate::redact::Redaction;
use crate::sys;
use crate::unwind::Module;

/// Symbolizes profiles, and caches what it has read.
///
/// The symbolizer's memory grows with the debug information that was used: blazesym maps it and parses the parts that
/// are needed. The size of each file is therefore checked first, and a file that does not fit is not opened. The
/// symbolizer should be dropped when it has not been used for a while.
#[derive(Debug)]
pub(crate) struct Symbolizer {
    settings: SymbolSettings,
    blazesym: symbolize::Symbolizer,
    /// What is read of the file of each module, by its serial number, and the total size.
    opened: HashMap<u64, Opened>,
    held_bytes: u64,
    /// How many files were opened.
    paths: usize,
    /// By serial number, for the current profile: a file can be replaced between profiles.
    files: HashMap<u64, FileState>,
    missing: Vec<Missing>,
    kernel: KernelNames,
}

/// A file that blazesym has opened, by the paths that it was opened by.
#[derive(Clone, Debug, Default)]
struct Opened {
    path: PathBuf,
    detail: Detail,
    embedded: Option<PathBuf>,
    /// The names that blazesym does not find, since they are in a supplementary file.
    supplemented: Option<Rc<SupplementedNames>>,
    content: SymbolContent,
    /// How much is held of it.
    bytes: u64,
    /// When the module's file was last changed.
    modified: Option<SystemTime>,
    module: Weak<Module>,
}

impl Opened {
    fn is_held(&self) -> bool {
        !self.path.as_os_str().is_empty()
    }

    fn is_gone(&self) -> bool {
        self.module.upgrade().is_none_or(|module| !module.is_loaded())
    }
}

/// Of more modules that are not loaded any more, nothing is held: each takes a descriptor.
const MAX_GONE: usize = 16;

#[derive(Clone, Debug, Default)]
struct FileState {
    name: String,
    is_usable: bool,
    /// An address had no function.
    has_unnamed: bool,
    modified: Option<SystemTime>,
    build_ids: Vec<(String, String)>,
}

/// How many files a note of a profile names.
const MAX_NOTED: usize = 4;

/// The address space that mapped symbols leave for other memory.
const LEFT_FOR_PROGRAM: u64 = 16 << 20;

impl Symbolizer {
    pub(crate) fn new(settings: SymbolSettings) -> Self {
        Self {
            settings,
            opened: HashMap::new(),
            held_bytes: 0,
            paths: 0,
            // Linker names are exported, too. Blazesym must not search for other files, nor reload files that it has
            // opened.
            blazesym: symbolize::Symbolizer::builder()
                .enable_demangling(false)
                .enable_auto_reload(false)
                .set_debug_dirs(Some([""; 0]))
                .build(),
            files: HashMap::new(),
            missing: Vec::new(),
            kernel: KernelNames::default(),
        }
    }

    /// The profile with functions, files and lines, all with redacted names, and with as many samples as fit into
    /// `most_bytes`.
    pub(crate) fn symbolize(
        &mut self,
        profile: &Profile,
        modules: &HashMap<MappingId, Arc<Module>>,
        redaction: &Redaction,
        most_bytes: usize,
    ) -> Symbolized {
        self.files.clear();
        self.opened.retain(|_, opened| opened.is_held() || !opened.is_gone());
        if self.settings.names {
            let in_kernel = profile.locations().filter(|(_, at)| at.kind == FrameKind::Kernel);
            let addresses: Vec<_> = in_kernel.map(|(_, location)| location.address).collect();
            let free = self.settings.most_bytes.saturating_sub(self.held_bytes);
            self.kernel.learn(&addresses, free);
        }
        let symbols = &mut WithModules { symbolizer: self, modules };
        let mut symbolized = profile.symbolized(symbols, redaction, most_bytes);
        symbolized.profile.notes.extend(self.notes(redaction));
        symbolized
    }

    /// What the files of the current profile lack.
    fn notes(&self, redaction: &Redaction) -> Vec<String> {
        let of = |is_it: fn(&FileState, &Opened) -> bool, what: &str| {
            let files = self.files.iter().filter(|(key, state)| {
                self.opened.get(*key).is_some_and(|opened| is_it(state, opened))
            });
            let names = files.map(|(_, state)| redaction.redact_module(&state.name));
            let names: BTreeSet<_> = names.collect();
            let more = names.len().saturating_sub(MAX_NOTED);
            let mut text = names.into_iter().take(MAX_NOTED).collect::<Vec<_>>().join(", ");
            if more > 0 {
                _ = write!(text, " and {more} more files");
            }
            (!text.is_empty()).then(|| format!("{text}: {what}"))
        };
        let split = of(
            |_, opened| opened.content.is_split,
            "without inlined functions, since the debug information is split (`split-debuginfo`)",
        );
        let unnamed = of(
            |state, opened| {
                state.has_unnamed
                    && opened.detail != Detail::Nothing
                    && !opened.content.has_functions
            },
            "without a symbol table, so only functions that are exported have names",
        );
        split.into_iter().chain(unnamed).collect()
    }

    fn note(&mut self, module: &Module, lack: SymbolProblem) {
        let is_of_file =
            !matches!(lack, SymbolProblem::LineTables { .. } | SymbolProblem::Mappings(_));
        let missing = Missing { file: is_of_file.then(|| module.name.clone()), lack };
        if !self.missing.contains(&missing) {
            self.missing.push(missing);
        }
    }

    pub(crate) fn take_missing(&mut self) -> Vec<Missing> {
        std::mem::take(&mut self.missing)
    }

    /// Whether much is held of modules that are not loaded any more. Blazesym drops nothing of it alone.
    pub(crate) fn holds_what_is_gone(&self) -> bool {
        let gone = self.opened.values().filter(|opened| opened.is_held() && opened.is_gone());
        let (number, bytes) = gone.fold((0, 0), |(n, bytes), opened| (n + 1, bytes + opened.bytes));
        number > MAX_GONE || bytes > self.settings.most_bytes / 4
    }

    fn file(&mut self, module: &Module) -> FileState {
        if let Some(state) = self.files.get(&module.serial) {
            return state.clone();
        }
        let state = self.inspect(module);
        self.files.insert(module.serial, state.clone());
        state
    }

    /// How a file's symbols are read. Decided when they are first needed.
    fn opened(&mut self, module: &Arc<Module>) -> Opened {
        if let Some(known) = self.opened.get(&module.serial) {
            return known.clone();
        }
        let opened = self.open(module);
        self.opened.insert(module.serial, opened.clone());
        opened
    }

    fn open(&mut self, module: &Arc<Module>) -> Opened {
        let nothing = Opened {
            modified: self.files.get(&module.serial).and_then(|state| state.modified),
            module: Arc::downgrade(module),
            ..Opened::default()
        };
        let held = self.held_bytes.saturating_add(self.kernel.bytes());
        let left = sys::address_space_left();
        // Symbols are mapped, and the parsed data takes about as much again.
        let memory_left = crate::facts::memory_left().into_iter().chain(left).min();
        let most_bytes = memory_left.unwrap_or(u64::MAX) / 4;
        let allowed = self.settings.most_bytes.saturating_sub(held);
        let free = allowed.min(most_bytes);
        let source = match SymbolFile::open(module, free, self.paths) {
            Ok(source) => source,
            Err(lack) => {
                self.note(module, lack);
                return nothing;
            }
        };
        // Blazesym maps all of the file. What is left must do for the parsed data, and for the program.
        let bytes = source.file.metadata().map_or(0, |metadata| metadata.len());
        if left.is_some_and(|left| bytes > (left - left / 4).saturating_sub(LEFT_FOR_PROGRAM)) {
            let error =
                format!("its {} MiB do not fit into the address space (`ulimit -v`)", bytes >> 20);
            self.note(module, SymbolProblem::Unreadable(error));
            return nothing;
        }
        let mut content = source.content;
        if source.detail == Detail::All && content.is_split {
            self.note(module, SymbolProblem::Split);
        }
        if source.detail == Detail::All && module.is_program && !content.has_lines {
            let is_stripped = !content.has_functions;
            self.note(module, SymbolProblem::LineTables { is_stripped });
        }
        for mut lack in source.lacks {
            if let SymbolProblem::TooLarge { bytes, is_own } = &mut lack {
                *is_own = *bytes > allowed;
            }
            self.note(module, lack);
        }
        self.held_bytes += source.bytes;
        // The number makes the paths unique, because descriptors are reused.
        let path_of = |file| sys::path_of_open(file, self.paths);
        let (path, mut detail) = (path_of(&source.file), source.detail);
        let mut embedded = source.embedded.as_ref().map(path_of);
        self.paths += 1;
        // Opened now, while the paths lead to the files. Blazesym keeps them open and does not use the paths again.
        if detail == Detail::All
            && let Err(error) = self.look_up(&path, detail, 0)
        {
            self.note(module, SymbolProblem::DebugUnreadable(error.to_string()));
            detail = Detail::Functions;
        }
        if detail == Detail::Functions
            && let Err(error) = self.look_up(&path, detail, 0)
        {
            self.note(module, SymbolProblem::Unreadable(error.to_string()));
            detail = Detail::Nothing;
        }
        if let Some(path) = &embedded
            && let Err(error) = self.look_up(path, Detail::Functions, 0)
        {
            self.note(module, SymbolProblem::EmbeddedUnreadable(error.to_string()));
            (embedded, content.has_functions) = (None, false);
        }
        let supplement = source.supplement.filter(|_| detail == Detail::All);
        let supplemented = supplement.and_then(|supplement| {
            let read = SupplementedNames::read(&source.file, &supplement, most_bytes);
            let lack = |error: io::Error| SymbolProblem::SupplementUnreadable(error.to_string());
            read.map_err(|error| self.note(module, lack(error))).ok().map(Rc::new)
        });
        Opened { path, detail, embedded, supplemented, content, bytes: source.bytes, ..nothing }
    }

    fn look_up(
        &self,
        path: &Path,
        detail: Detail,
        address: u64,
    ) -> blazesym::Result<Option<Sym<'static>>> {
        if detail == Detail::Nothing {
            return Ok(None);
        }
        let mut elf = Elf::new(path);
        elf.debug_syms = detail == Detail::All;
        let source = found::source::Source::Elf(elf);
        let found = self.blazesym.symbolize_single(&source, Input::VirtOffset(address))?;
        Ok(found.into_sym().map(Sym::into_owned))
    }

    /// The symbol in the tables that the linker has made. Those of the file come first: where embedded ones have no
    /// sizes, they would seem to extend over the functions of `.dynsym`.
    fn in_tables(&self, opened: &Opened, address: u64) -> Option<Sym<'static>> {
        let detail = opened.detail.min(Detail::Functions);
        let own = self.in_table(&opened.path, detail, address);
        own.or_else(|| self.in_table(opened.embedded.as_ref()?, Detail::Functions, address))
    }

    /// The function in one of them, although there may be marks or symbols without name between its beginning and the address.
    fn in_table(&self, path: &Path, detail: Detail, address: u64) -> Option<Sym<'static>> {
        let mut symbol = self.look_up(path, detail, address).ok()??;
        let is_function = |symbol: &Sym<'_>| !symbol.name.is_empty() && !is_mark(&symbol.name);
        if is_function(&symbol) {
            return Some(symbol);
        }
        for _ in 0..MAX_MARKS {
            symbol = self.look_up(path, detail, symbol.addr.checked_sub(1)?).ok()??;
            if is_function(&symbol) {
                // Without a size, it may end anywhere.
                let end = symbol.addr.saturating_add(symbol.size? as u64);
                return (address < end).then_some(symbol);
            }
        }
        None
    }

    fn inspect(&mut self, module: &Module) -> FileState {
        let name = module.name.clone();
        let mut state = FileState { name, is_usable: true, ..FileState::default() };
        if module.is_vdso {
            return state;
        }
        let opened = self.opened.get(&module.serial);
        let mut is_outdated = false;
        let hash = module_file::open_loaded(module).and_then(|LoadedFile { file, .. }| {
            let unreadable = |error: io::Error| SymbolProblem::Unreadable(error.to_string());
            state.modified = file.metadata().and_then(|metadata| metadata.modified()).ok();
            // Symbol tables are not in memory, so a file that differs only there is the same module.
            is_outdated = opened.is_some_and(|opened| opened.modified != state.modified)
                && Sections::of(&file).is_ok_and(|sections| sections.sizes.all() > 0);
            build_id::hash(&file).map_err(unreadable)
        });
        if is_outdated {
            self.opened.remove(&module.serial);
        }
        match hash {
            Ok(hash) => {
                let named = |hash| ("process.executable.build_id.htlhash".to_owned(), hash);
                state.build_ids.extend(hash.map(named));
            }
            Err(lack) => {
                self.note(module, lack);
                state.is_usable = false;
            }
        }
        if !self.settings.names {
            // Missing names do not matter if none were requested.
            self.missing.clear();
        }
        state
    }

    /// The name of the variable at an address in memory: of a symbol that says where it ends.
    fn variable(&mut self, module: &Arc<Module>, in_memory: u64) -> Option<String> {
        if !self.settings.names || !self.file(module).is_usable {
            return None;
        }
        let address = module.in_file(in_memory);
        let opened = self.opened(module);
        let symbol = self.in_tables(&opened, address)?;
        let end = symbol.addr.saturating_add(symbol.size? as u64);
        (address < end).then(|| demangle(&symbol.name).0)
    }

    pub(crate) fn find(&mut self, module: &Arc<Module>, address: u64) -> Option<Sym<'static>> {
        if !self.settings.names || !self.file(module).is_usable {
            return None;
        }
        if module.is_vdso {
            let mut process = Process::new(Pid::Slf);
            // Blazesym must not look for files by itself.
            (process.perf_map, process.map_files) = (false, false);
            let process = found::source::Source::Process(process);
            let in_memory = module.loaded_at(address);
            let found = self.blazesym.symbolize_single(&process, Input::AbsAddr(in_memory));
            return found.ok()?.into_sym().map(Sym::into_owned);
        }
        let opened = self.opened(module);
        if opened.content.linkage_table.contains(&address) {
            return None;
        }
        if opened.detail != Detail::All {
            return self.in_tables(&opened, address);
        }
        let symbol = self.look_up(&opened.path, Detail::All, address).unwrap_or_else(|error| {
            self.note(module, SymbolProblem::DebugUnreadable(error.to_string()));
            None
        });
        let Some(mut symbol) = symbol else { return self.in_tables(&opened, address) };
        if is_mark(&symbol.name) {
            // Its line is that of the address all the same.
            let mut function = self.in_tables(&opened, address)?;
            function.code_info = symbol.code_info;
            return Some(function);
        }
        // Line tables alone contain only the last part of a function's path. The symbol table contains all of it,
        // except for inlined functions.
        if !is_qualified(&symbol.name)
            && let Some(linkers) = self.in_tables(&opened, address)
            && (symbol.name.is_empty() || is_qualified(&linkers.name))
        {
            symbol.name = linkers.name;
        }
        named(symbol, || {
            let names = opened.supplemented.as_ref()?.at(address);
            let lack = |error: gimli::Error| SymbolProblem::SupplementUnreadable(error.to_string());
            names.map_err(|error| self.note(module, lack(error))).ok()
        })
    }
}

/// A symbol with the names that it lacks, the outermost first. Functions that have none are left out: what they do is shown
/// in the functions that they are inlined in.
fn named(
    mut symbol: Sym<'static>,
    names: impl FnOnce() -> Option<Vec<Option<String>>>,
) -> Option<Sym<'static>> {
    let mut inlined = std::mem::take(&mut symbol.inlined).into_vec();
    if symbol.name.is_empty() || inlined.iter().any(|function| function.name.is_empty()) {
        let names = names().filter(|names| names.len() == inlined.len() + 1).unwrap_or_default();
        let inner = inlined.iter_mut().map(|function| &mut function.name);
        for (known, name) in std::iter::once(&mut symbol.name).chain(inner).zip(names) {
            if let Some(name) = name.filter(|_| known.is_empty()) {
                *known = name.into();
            }
        }
        inlined.retain(|function| !function.name.is_empty());
    }
    if symbol.name.is_empty() {
        let outermost = (!inlined.is_empty()).then(|| inlined.remove(0))?;
        (symbol.name, symbol.code_info) = (outermost.name, outermost.code_info.map(Box::new));
    }
    symbol.inlined = inlined.into();
    Some(symbol)
}

/// A function has two marks for each place with data in its code.
const MAX_MARKS: usize = 64;

/// Whether a symbol is a mapping symbol of the ABIs of ARM and RISC-V, which marks the beginning of code or data: `$x`, `$d`,
/// `$x.` with anything after that.
fn is_mark(name: &str) -> bool {
    let mark = name.strip_prefix('$').unwrap_or_default();
    let (kind, _) = mark.split_once('.').unwrap_or((mark, ""));
    kind == "d" || kind.starts_with('x')
}

struct WithModules<'a> {
    symbolizer: &'a mut Symbolizer,
    modules: &'a HashMap<MappingId, Arc<Module>>,
}

impl Symbols for WithModules<'_> {
    fn build_ids(&mut self, mapping: MappingId) -> Vec<(String, String)> {
        let module = self.modules.get(&mapping);
        module.map(|module| self.symbolizer.file(module).build_ids).unwrap_or_default()
    }

    fn lines(&mut self, location: &Location) -> Option<(FrameKind, Vec<SourceLine>)> {
        let unlocated = |kind, name: &str| {
            let function = Function::named(&capped(name));
            Some((kind, vec![SourceLine { function, line: 0, column: 0 }]))
        };
        let Self { symbolizer, modules } = self;
        let address = location.address;
        if location.kind == FrameKind::Kernel {
            return unlocated(FrameKind::Kernel, &symbolizer.kernel.function(address));
        }
        let module = modules.get(&location.mapping?)?;
        if let Some(symbol) = symbolizer.find(module, address) {
            return Some(lines_of(&symbol));
        }
        // The last symbol before the procedure linkage table can have no size, and would seem to extend over it.
        let opened = symbolizer.opened.get(&module.serial);
        if opened.is_some_and(|opened| opened.content.linkage_table.contains(&address)) {
            return unlocated(FrameKind::Native, LINKAGE);
        }
        if let Some(state) = symbolizer.files.get_mut(&module.serial) {
            state.has_unnamed = true;
        }
        None
    }

    fn variable(&mut self, address: u64) -> Option<String> {
        let loaded = self.modules.values().filter(|module| module.is_loaded() && !module.is_vdso);
        loaded.into_iter().find_map(|module| self.symbolizer.variable(module, address))
    }
}

/// The lines of a symbol, with the innermost inlined function first.
fn lines_of(symbol: &Sym<'_>) -> (FrameKind, Vec<SourceLine>) {
    let inlined = symbol.inlined.iter().rev();
    let inlined = inlined.map(|function| (&function.name, function.code_info.as_ref()));
    let outermost = std::iter::once((&symbol.name, symbol.code_info.as_deref()));
    let (mut kind, mut lines) = (FrameKind::Native, Vec::new());
    for (symbol, code) in inlined.chain(outermost) {
        let (name, kind_by_name) = demangle(symbol);
        let path = code.map(CodeInfo::to_path);
        if kind_by_name == FrameKind::Rust || path.as_deref().is_some_and(is_rust_file) {
            kind = FrameKind::Rust;
        }
        let file = path.as_deref().map(Path::to_string_lossy).unwrap_or(Cow::Borrowed(""));
        let (system_name, file) = (capped(symbol).into_owned(), capped(&file).into_owned());
        let function = Function { name, system_name, file };
        let line = code.and_then(|code| code.line).unwrap_or(0);
        let column = code.and_then(|code| code.column).map_or(0, u32::from);
        lines.push(SourceLine { function, line, column });
    }
    (kind, lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Mapping, ProfileId};
    use crate::unwind::Unwinder;

    #[test]
    #[cfg(target_env = "gnu")]
    fn jumps_to_other_modules_have_no_name_of_the_program() {
        if cfg!(tracing_profiling_unsupported) {
            return;
        }
        let mut unwinder: Unwinder = Unwinder::default();
        unwinder.refresh();
        let modules = unwinder.modules();
        let program = Arc::clone(modules.get(modules.program().unwrap()).unwrap());
        let mut symbolizer = Symbolizer::new(SymbolSettings { names: true, most_bytes: u64::MAX });
        let table = symbolizer.opened(&program).content.linkage_table;
        assert!(!table.is_empty());
        let mapping = Profile::new(ProfileId::for_test(1), 1).add_mapping(Mapping::default());
        let modules = HashMap::from([(mapping, program)]);
        let mut symbols = WithModules { symbolizer: &mut symbolizer, modules: &modules };
        for address in [table.start, table.end - 1] {
            let location = Location {
                mapping: Some(mapping),
                address,
                kind: FrameKind::Native,
                lines: Vec::new(),
                is_inferred: false,
            };
            let (_, lines) = symbols.lines(&location).unwrap();
            let names: Vec<_> = lines.iter().map(|line| line.function.name.as_str()).collect();
            assert_eq!(names, ["[plt]"], "{address:#x}");
        }
        let futex = std::ptr::from_ref(&FUTEX).addr() as u64;
        let of_futex = Some(format!("{}::FUTEX", module_path!()));
        assert_eq!(
            [symbols.variable(futex), symbols.variable(futex + 7)],
            [of_futex.clone(), of_futex]
        );
        let (on_stack, on_heap) = (0_u8, Box::new(0_u8));
        for other in [&on_stack, &*on_heap] {
            assert_eq!(symbols.variable(std::ptr::from_ref(other).addr() as u64), None);
        }
        assert!(symbolizer.files.values().all(|file| !file.has_unnamed));
    }

    static FUTEX: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(7);
}

//! Symbolizing with blazesym.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blazesym::symbolize::source::{Elf, Process, Source};
use blazesym::symbolize::{CodeInfo, Input, Sym, Symbolized};
use blazesym::{Pid, helper, symbolize};

use super::build_id::htlhash;
use super::kernel::KernelNames;
use super::names::{demangle, is_qualified, is_rust_file};
use super::sections::Sizes;
use crate::profile::{FrameKind, Function, Line, MappingId, Profile, Symbols};
use crate::unwind::Module;

/// What of a program's symbols cannot be had, and should be told once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Missing {
    /// The program has no line tables.
    LineTables,
    /// A file is not the one that was loaded.
    Replaced(String),
    /// A file cannot be read.
    Unreadable(String, String),
    /// A file has more debug information than may be held: so many bytes.
    TooLarge(String, u64),
}

/// Whether symbols are asked for, and how much of them may be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SymbolSettings {
    /// Otherwise profiles have addresses, mappings and build ids alone.
    pub(crate) names: bool,
    /// Of debug information and symbol tables, as large as they are in files.
    pub(crate) most_bytes: u64,
}

/// What is read of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Detail {
    /// Functions, lines and inlined functions.
    All,
    /// Its symbol table.
    Functions,
    Nothing,
}

/// Symbolizes profiles, and remembers what it has read.
///
/// What it holds grows with the debug information that was looked at, which blazesym maps, and of which it
/// parses those parts that are asked for: so that each file is looked at for its sizes before, and not
/// opened if it does not fit. Drop it when it has not been used for a while.
pub(crate) struct Symbolizer {
    settings: SymbolSettings,
    blazesym: symbolize::Symbolizer,
    /// What is read of each file, and how much that is together.
    details: HashMap<FileKey, Detail>,
    held_bytes: u64,
    /// By path and build id, of the present profile: between two a file may be replaced.
    files: HashMap<FileKey, FileState>,
    /// Addresses of the program that were asked for, and those that had a line.
    program_addresses: usize,
    program_lines: usize,
    missing: Vec<Missing>,
    kernel: KernelNames,
}

/// Path and build id.
type FileKey = (PathBuf, Option<Vec<u8>>);

/// So many addresses of the program without a line mean that it has no line tables.
const WITHOUT_LINES: usize = 8;

impl std::fmt::Debug for Symbolizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Symbolizer").field("files", &self.files).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug)]
struct FileState {
    is_usable: bool,
    build_ids: Vec<(String, String)>,
}

impl Symbolizer {
    pub(crate) fn new(settings: SymbolSettings) -> Self {
        Self {
            settings,
            details: HashMap::new(),
            held_bytes: 0,
            // The functions' names as the linker knows them are exported too.
            blazesym: symbolize::Symbolizer::builder().enable_demangling(false).build(),
            files: HashMap::new(),
            program_addresses: 0,
            program_lines: 0,
            missing: Vec::new(),
            kernel: KernelNames::default(),
        }
    }

    /// The profile with functions, files and lines.
    pub(crate) fn symbolize(
        &mut self,
        profile: Profile,
        modules: &HashMap<MappingId, Arc<Module>>,
    ) -> Profile {
        self.files.clear();
        let profile = profile.symbolized(&mut WithModules { symbolizer: self, modules });
        if self.program_addresses >= WITHOUT_LINES && self.program_lines == 0 {
            self.missing.push(Missing::LineTables);
        }
        profile
    }

    /// What was found to be missing since the last call.
    pub(crate) fn take_missing(&mut self) -> Vec<Missing> {
        std::mem::take(&mut self.missing)
    }

    fn file(&mut self, module: &Module) -> FileState {
        let key = (module.path().to_owned(), module.build_id.clone());
        if let Some(state) = self.files.get(&key) {
            return state.clone();
        }
        let state = self.look_at(module);
        self.files.insert(key, state.clone());
        state
    }

    /// How much is read of a file, decided when it is first asked for.
    fn detail(&mut self, module: &Module) -> Detail {
        if module.is_vdso {
            return Detail::All;
        }
        let key = (module.path().to_owned(), module.build_id.clone());
        if let Some(known) = self.details.get(&key) {
            return *known;
        }
        // What cannot be read is said where it is opened.
        let sizes = Sizes::of(module.path()).unwrap_or_default();
        let held = self.held_bytes.saturating_add(self.kernel.bytes());
        let free = self.settings.most_bytes.saturating_sub(held);
        let (detail, bytes) = match (sizes.all(), sizes.symbols) {
            (all, _) if all <= free => (Detail::All, all),
            (_, symbols) if symbols <= free => (Detail::Functions, symbols),
            _ => (Detail::Nothing, 0),
        };
        if detail != Detail::All {
            self.missing.push(Missing::TooLarge(module.name.clone(), sizes.all()));
        }
        self.held_bytes += bytes;
        self.details.insert(key, detail);
        detail
    }

    fn look_at(&mut self, module: &Module) -> FileState {
        let mut state = FileState { is_usable: true, build_ids: Vec::new() };
        if module.is_vdso {
            return state;
        }
        match htlhash(module.path()) {
            Ok(hash) if is_loaded_file(module) => {
                state.build_ids.push(("process.executable.build_id.htlhash".to_owned(), hash));
            }
            Ok(_) => {
                self.missing.push(Missing::Replaced(module.name.clone()));
                state.is_usable = false;
            }
            Err(error) => {
                self.missing.push(Missing::Unreadable(module.name.clone(), error.to_string()));
                state.is_usable = false;
            }
        }
        if !self.settings.names {
            // Nobody misses names that were not asked for.
            self.missing.clear();
        }
        state
    }

    pub(crate) fn find(&mut self, module: &Module, address: u64) -> Option<Sym<'static>> {
        if !self.settings.names || !self.file(module).is_usable {
            return None;
        }
        let detail = self.detail(module);
        if detail == Detail::Nothing {
            return None;
        }
        let found = if module.is_vdso {
            let process = Source::Process(Process::new(Pid::Slf));
            let in_memory = module.loaded_at(address);
            self.blazesym.symbolize_single(&process, Input::AbsAddr(in_memory))
        } else {
            let mut elf = Elf::new(module.path());
            elf.debug_syms = detail == Detail::All;
            self.blazesym.symbolize_single(&Source::Elf(elf), Input::VirtOffset(address))
        };
        let mut symbol = match found {
            Ok(Symbolized::Sym(symbol)) => Some(symbol.into_owned()),
            Ok(Symbolized::Unknown(_)) => None,
            Err(error) => {
                let missing = Missing::Unreadable(module.name.clone(), error.to_string());
                if !self.missing.contains(&missing) {
                    self.missing.push(missing);
                }
                None
            }
        };
        if module.is_program() && detail == Detail::All {
            let has_line = symbol.as_ref().is_some_and(|symbol| symbol.code_info.is_some());
            self.program_addresses += 1;
            self.program_lines += usize::from(has_line);
        }
        if let Some(symbol) = &mut symbol
            && !module.is_vdso
            && detail == Detail::All
            && !is_qualified(&symbol.name)
            && let Some(linkers) = self.linker_name(module, address)
        {
            symbol.name = linkers;
        }
        symbol
    }

    /// The name in the symbol table. Line tables alone know a function by the last part of its
    /// path only; the linker knows all of it, but of functions that were inlined.
    fn linker_name(&self, module: &Module, address: u64) -> Option<Cow<'static, str>> {
        let mut elf = Elf::new(module.path());
        elf.debug_syms = false;
        let elf = Source::Elf(elf);
        match self.blazesym.symbolize_single(&elf, Input::VirtOffset(address)) {
            Ok(Symbolized::Sym(symbol)) => Some(Cow::Owned(symbol.name.into_owned())),
            _ => None,
        }
        .filter(|name: &Cow<'_, str>| is_qualified(name))
    }
}

/// Whether the file is still the one that was loaded. Without a build id we cannot know, and the
/// path of the program is always right.
fn is_loaded_file(module: &Module) -> bool {
    match &module.build_id {
        Some(id) if !module.is_program() => {
            let on_disk = helper::read_elf_build_id(&module.path());
            on_disk.is_ok_and(|found| found.as_deref() == Some(id.as_slice()))
        }
        _ => true,
    }
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

    fn lines(
        &mut self,
        profile: &mut Profile,
        mapping: MappingId,
        address: u64,
    ) -> (FrameKind, Vec<Line>) {
        let found =
            self.modules.get(&mapping).and_then(|module| self.symbolizer.find(module, address));
        match found {
            Some(symbol) => lines_of(profile, &symbol),
            None => (FrameKind::Native, Vec::new()),
        }
    }

    fn prepare_kernel(&mut self, addresses: &[u64]) {
        if self.symbolizer.settings.names {
            let Symbolizer { kernel, settings, held_bytes, .. } = &mut *self.symbolizer;
            kernel.learn(addresses, settings.most_bytes.saturating_sub(*held_bytes));
        }
    }

    fn kernel_function(&mut self, address: u64) -> String {
        self.symbolizer.kernel.function(address)
    }
}

/// The lines of a symbol, the innermost inlined function first.
fn lines_of(profile: &mut Profile, symbol: &Sym<'_>) -> (FrameKind, Vec<Line>) {
    let inlined = symbol.inlined.iter().rev();
    let inlined = inlined.map(|function| (&function.name, function.code_info.as_ref()));
    let outermost = std::iter::once((&symbol.name, symbol.code_info.as_deref()));
    let mut kind = FrameKind::Native;
    let lines = inlined
        .chain(outermost)
        .map(|(name, code)| {
            let (line, is_rust) = line_of(profile, name, code);
            if is_rust {
                kind = FrameKind::Rust;
            }
            line
        })
        .collect();
    (kind, lines)
}

fn line_of(profile: &mut Profile, symbol: &str, code: Option<&CodeInfo<'_>>) -> (Line, bool) {
    let (name, kind) = demangle(symbol);
    let path = code.map(CodeInfo::to_path);
    let is_rust = kind == FrameKind::Rust || path.as_deref().is_some_and(is_rust_file);
    let file = path.as_deref().map(Path::to_string_lossy).unwrap_or(Cow::Borrowed(""));
    let function = Function {
        name: profile.add_string(&name),
        system_name: profile.add_string(symbol),
        file: profile.add_string(&file),
    };
    let line = Line {
        function: profile.add_function(function),
        line: code.and_then(|code| code.line).unwrap_or(0),
        column: code.and_then(|code| code.column).map_or(0, u32::from),
    };
    (line, is_rust)
}

//! Symbolization with blazesym.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use blazesym::symbolize::source::{Elf, Process};
use blazesym::symbolize::{self as found, CodeInfo, Input, Sym};
use blazesym::{Pid, symbolize};

use super::kernel::KernelNames;
use super::module_file::{self, LoadedFile};
use super::names::{demangle, is_qualified, is_rust_file};
use super::source::{Detail, Lack, SymbolFile};
use super::{Missing, SymbolSettings, build_id};
use crate::profile::{
    FrameKind, Function, Location, MappingId, Profile, SourceLine, Symbolized, Symbols, capped,
};
use crate::redact::Redaction;
use crate::sys;
use crate::unwind::Module;

/// Symbolizes profiles, and caches what it has read.
///
/// Its memory grows with the debug information that was used: blazesym maps it and parses the parts that are needed.
/// The size of each file is therefore checked first, and a file that does not fit is not opened. The symbolizer should
/// be dropped when it has not been used for a while.
pub(crate) struct Symbolizer {
    settings: SymbolSettings,
    blazesym: symbolize::Symbolizer,
    /// What is read of the file of each module, by its serial number, and the total size.
    opened: HashMap<u64, Opened>,
    held_bytes: u64,
    /// How many files were opened.
    paths: usize,
    /// The same, for the current profile: a file can be replaced between profiles.
    files: HashMap<u64, FileState>,
    /// Addresses in the executable that were looked up, and how many had a line.
    program_addresses: usize,
    program_lines: usize,
    missing: Vec<Missing>,
    kernel: KernelNames,
}

/// A file that blazesym has opened.
#[derive(Clone, Debug)]
struct Opened {
    /// The path that it was opened by.
    path: PathBuf,
    detail: Detail,
    /// How much is held of it.
    bytes: u64,
    module: Weak<Module>,
}

impl Opened {
    fn is_held(&self) -> bool {
        !self.path.as_os_str().is_empty()
    }

    /// Whether its module is not loaded any more.
    fn is_gone(&self) -> bool {
        self.module.upgrade().is_none_or(|module| !module.is_loaded())
    }
}

/// Of more modules that are not loaded any more, nothing is held: each takes a descriptor.
const MOST_GONE: usize = 16;

/// After this number of addresses without a line, the executable is assumed to have no line tables.
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
            program_addresses: 0,
            program_lines: 0,
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
        let symbolized = profile.symbolized(symbols, redaction, most_bytes);
        if self.program_addresses >= WITHOUT_LINES && self.program_lines == 0 {
            self.missing.push(Missing::LineTables);
        }
        symbolized
    }

    /// Takes the problems found since the last call.
    pub(crate) fn take_missing(&mut self) -> Vec<Missing> {
        std::mem::take(&mut self.missing)
    }

    /// Whether much is held of modules that are not loaded any more. Blazesym drops nothing of it alone.
    pub(crate) fn holds_what_is_gone(&self) -> bool {
        let gone = self.opened.values().filter(|opened| opened.is_held() && opened.is_gone());
        let (number, bytes) = gone.fold((0, 0), |(n, bytes), opened| (n + 1, bytes + opened.bytes));
        number > MOST_GONE || bytes > self.settings.most_bytes / 4
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
            path: PathBuf::new(),
            detail: Detail::Nothing,
            bytes: 0,
            module: Arc::downgrade(module),
        };
        let held = self.held_bytes.saturating_add(self.kernel.bytes());
        let left = sys::address_space_left();
        // Symbols are mapped, and the parsed data takes about as much again.
        let most_bytes = left.unwrap_or(u64::MAX) / 4;
        let free = self.settings.most_bytes.saturating_sub(held).min(most_bytes);
        let name = || module.name.clone();
        let source = match SymbolFile::open(module, free) {
            Ok(source) => source,
            Err(missing) => {
                self.missing.push(missing);
                return nothing;
            }
        };
        // Blazesym maps all of the file. What is left must do for the parsed data, and for the program.
        let bytes = source.file.metadata().map_or(0, |metadata| metadata.len());
        if left.is_some_and(|left| bytes > (left - left / 4).saturating_sub(LEFT_FOR_PROGRAM)) {
            let error =
                format!("its {} MiB do not fit into the address space (`ulimit -v`)", bytes >> 20);
            self.missing.push(Missing::Unreadable(name(), error));
            return nothing;
        }
        match source.lacks {
            Some(Lack::TooLarge(bytes)) => self.missing.push(Missing::TooLarge(name(), bytes)),
            Some(Lack::Compressed) => self.missing.push(Missing::Compressed(name())),
            None => {}
        }
        self.held_bytes += source.bytes;
        // The number makes the path unique, because descriptors are reused.
        let path = sys::path_of_open(&source.file, self.paths);
        self.paths += 1;
        let mut opened = Opened { path, detail: source.detail, bytes: source.bytes, ..nothing };
        // Opened now, while the path leads to the file. Blazesym keeps it open and does not use the path again.
        if opened.detail == Detail::All
            && let Err(error) = self.look_up(&opened, 0)
        {
            self.missing.push(Missing::Unreadable(name(), error.to_string()));
            opened.detail = Detail::Functions;
        }
        if opened.detail == Detail::Functions && self.look_up(&opened, 0).is_err() {
            opened.detail = Detail::Nothing;
        }
        opened
    }

    fn look_up(&self, opened: &Opened, address: u64) -> blazesym::Result<found::Symbolized<'_>> {
        let mut elf = Elf::new(&opened.path);
        elf.debug_syms = opened.detail == Detail::All;
        self.blazesym.symbolize_single(&found::source::Source::Elf(elf), Input::VirtOffset(address))
    }

    fn inspect(&mut self, module: &Module) -> FileState {
        let mut state = FileState { is_usable: true, build_ids: Vec::new() };
        if module.is_vdso {
            return state;
        }
        let hash = module_file::open_loaded(module).and_then(|LoadedFile { file, .. }| {
            let unreadable =
                |error: std::io::Error| Missing::Unreadable(module.name.clone(), error.to_string());
            build_id::hash(&file).map_err(unreadable)
        });
        match hash {
            Ok(hash) => {
                let named = |hash| ("process.executable.build_id.htlhash".to_owned(), hash);
                state.build_ids.extend(hash.map(named));
            }
            Err(missing) => {
                self.missing.push(missing);
                state.is_usable = false;
            }
        }
        if !self.settings.names {
            // Missing names do not matter if none were requested.
            self.missing.clear();
        }
        state
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
        if opened.detail == Detail::Nothing {
            return None;
        }
        let by_linker = Opened { detail: Detail::Functions, ..opened.clone() };
        let mut symbol = match self.look_up(&opened, address) {
            Ok(found) => found.into_sym().map(Sym::into_owned),
            Err(error) => {
                let missing = Missing::Unreadable(module.name.clone(), error.to_string());
                // The symbol table may still be readable.
                let found = self.look_up(&by_linker, address);
                let symbol = found.ok().and_then(|found| found.into_sym().map(Sym::into_owned));
                if !self.missing.contains(&missing) {
                    self.missing.push(missing);
                }
                return symbol;
            }
        };
        let is_all = opened.detail == Detail::All;
        if module.is_program && is_all {
            let has_line = symbol.as_ref().is_some_and(|symbol| symbol.code_info.is_some());
            self.program_addresses += 1;
            self.program_lines += usize::from(has_line);
        }
        // Line tables alone contain only the last part of a function's path. The symbol table contains all of it,
        // except for inlined functions.
        if let Some(symbol) = symbol.as_mut().filter(|symbol| is_all && !is_qualified(&symbol.name))
            && let Ok(found) = self.look_up(&by_linker, address)
            && let Some(linkers) = found.into_sym().filter(|linkers| is_qualified(&linkers.name))
        {
            symbol.name = Cow::Owned(linkers.name.into_owned());
        }
        symbol
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

    fn lines(&mut self, location: &Location) -> Option<(FrameKind, Vec<SourceLine>)> {
        if location.kind == FrameKind::Kernel {
            let name = self.symbolizer.kernel.function(location.address);
            let function = Function::named(&capped(&name));
            return Some((FrameKind::Kernel, vec![SourceLine { function, line: 0, column: 0 }]));
        }
        let module = self.modules.get(&location.mapping?)?;
        self.symbolizer.find(module, location.address).map(|symbol| lines_of(&symbol))
    }
}

/// The lines of a symbol, with the innermost inlined function first.
fn lines_of(symbol: &Sym<'_>) -> (FrameKind, Vec<SourceLine>) {
    let inlined = symbol.inlined.iter().rev();
    let inlined = inlined.map(|function| (&function.name, function.code_info.as_ref()));
    let outermost = std::iter::once((&symbol.name, symbol.code_info.as_deref()));
    let mut kind = FrameKind::Native;
    let lines = inlined
        .chain(outermost)
        .map(|(name, code)| {
            let (line, is_rust) = line_of(name, code);
            if is_rust {
                kind = FrameKind::Rust;
            }
            line
        })
        .collect();
    (kind, lines)
}

fn line_of(symbol: &str, code: Option<&CodeInfo<'_>>) -> (SourceLine, bool) {
    let (name, kind) = demangle(symbol);
    let path = code.map(CodeInfo::to_path);
    let is_rust = kind == FrameKind::Rust || path.as_deref().is_some_and(is_rust_file);
    let file = path.as_deref().map(Path::to_string_lossy).unwrap_or(Cow::Borrowed(""));
    let (system_name, file) = (capped(symbol).into_owned(), capped(&file).into_owned());
    let function = Function { name, system_name, file };
    let line = code.and_then(|code| code.line).unwrap_or(0);
    let column = code.and_then(|code| code.column).map_or(0, u32::from);
    (SourceLine { function, line, column }, is_rust)
}

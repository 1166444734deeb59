//! The code that is loaded into this process.
#![allow(
    unsafe_code,
    reason = "dl_iterate_phdr: /proc/self/maps does not say where unwind tables lie"
)]

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fs::File;
use std::io;
use std::mem;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::calls::may;
use super::fork::{ForkSafe, ForkSafeGuard};
use super::maps::{file_at, module_files};
use crate::sys::types::{
    FilteredSyscall, LoadedModule, MappedFile, MappedPart, ModuleList, ModuleLoads, NoFile,
    WhyRefused,
};

/// What changes whenever a library is loaded or unloaded.
pub(crate) fn module_loads() -> ModuleLoads {
    let mut loads = ModuleLoads::default();
    iterate(&mut |info| {
        loads = loads_of(info);
        false
    });
    loads
}

/// An address in the C library, or in a library that the program has put before it when it started.
pub(crate) fn address_in_libc() -> u64 {
    libc::dl_iterate_phdr as *const () as u64
}

/// All modules that are currently loaded, with their files or without.
///
/// Holds the dynamic loader's lock while it copies some hundred bytes per module. Never call this in a signal handler.
pub(crate) fn loaded_modules(with_files: bool) -> ModuleList {
    let mut listing = Listing::default();
    while !listing.fill() {
        listing = listing.larger();
    }
    let mut modules: Vec<_> = listing.modules().collect();
    let listed = modules.len();
    if !modules.iter().any(|module| module.is_vdso) {
        modules.extend(vdso());
    }
    let files = with_files.then(|| module_files(&modules));
    let has_files = matches!(files, Some(Ok(_)));
    for (number, module) in modules.iter_mut().enumerate() {
        module.file = match &files {
            None => continue,
            Some(Ok(files)) => files.get(number).cloned().flatten().ok_or(NoFile::NotMapped),
            Some(Err(error)) => Err(NoFile::Unreadable(error.to_string())),
        };
    }
    ModuleList { loads: listing.loads, modules, listed, has_files }
}

/// A copy of the loader's list, which is made without allocating: see [`iterate`].
#[derive(Default)]
struct Listing {
    loads: ModuleLoads,
    found: Vec<Found>,
    names: Vec<u8>,
    /// What there was, whether there was room for it or not.
    modules_needed: usize,
    names_needed: usize,
}

struct Found {
    bias: u64,
    /// The address of its program headers, and their number.
    headers: (u64, u16),
    /// Where its name ends in the names.
    name_end: usize,
}

impl Listing {
    /// Copies the list. Returns false if there was not enough room.
    fn fill(&mut self) -> bool {
        iterate(&mut |info| {
            self.add(info);
            true
        });
        self.modules_needed == self.found.len() && self.names_needed == self.names.len()
    }

    fn add(&mut self, info: &libc::dl_phdr_info) {
        let name = name_of(info);
        self.loads = loads_of(info);
        self.modules_needed += 1;
        self.names_needed += name.len();
        if name.len() <= self.names.capacity() - self.names.len() {
            self.names.extend_from_slice(name);
        }
        if self.found.len() < self.found.capacity() {
            self.found.push(Found {
                bias: info.dlpi_addr,
                headers: (info.dlpi_phdr.addr() as u64, info.dlpi_phnum),
                name_end: self.names.len(),
            });
        }
    }

    /// One with room for what there was, and for some libraries that are loaded until it is filled.
    fn larger(&self) -> Self {
        let more = |needed: usize| needed + needed / 4 + 16;
        Self {
            found: Vec::with_capacity(more(self.modules_needed)),
            names: Vec::with_capacity(more(self.names_needed)),
            ..Self::default()
        }
    }

    /// The modules that are still loaded.
    fn modules(&self) -> impl Iterator<Item = LoadedModule> {
        let mut start = 0;
        self.found.iter().enumerate().filter_map(move |(number, found)| {
            let name = self.names.get(start..found.name_end).unwrap_or_default();
            start = found.name_end;
            // The program is always the first module.
            let headers = header_bytes(found.headers, number == 0)?;
            Some(describe(name, found.bias, &headers))
        })
    }
}

/// The vDSO, which the loader of a static program does not list.
fn vdso() -> Option<LoadedModule> {
    let start = vdso_address()?;
    Some(describe(b"", start, &headers_at(start)?))
}

fn vdso_address() -> Option<u64> {
    // SAFETY: reads the auxiliary vector, which the kernel placed next to the program's arguments.
    let start = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    (start != 0).then_some(start)
}

/// The program headers of the file of which the beginning is at this address, if it is a 64-bit ELF file.
fn headers_at(start: u64) -> Option<Vec<u8>> {
    let header = read_own_memory(start..start.checked_add(size_of::<libc::Elf64_Ehdr>() as u64)?);
    let header = header.ok().filter(|header| header.starts_with(b"\x7fELF\x02"))?;
    let headers_at = header.get(mem::offset_of!(libc::Elf64_Ehdr, e_phoff)..)?.first_chunk()?;
    let count = header.get(mem::offset_of!(libc::Elf64_Ehdr, e_phnum)..)?.first_chunk()?;
    let headers = start.checked_add(u64::from_ne_bytes(*headers_at))?;
    header_bytes((headers, u16::from_ne_bytes(*count)), false)
}

/// The path of the program, as the kernel shows it where its code is mapped: what it was started by may be the loader.
pub fn program_path() -> Option<PathBuf> {
    let code = program_segment(|header, _| header.p_flags & libc::PF_X != 0)?;
    file_at(code.start).map(|MappedFile { path, .. }| path)
}

/// Copies `addresses` of this process's memory. An unmapped address is an error, not a fault.
pub fn read_own_memory(addresses: Range<u64>) -> io::Result<Vec<u8>> {
    let length = addresses.end.saturating_sub(addresses.start);
    let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidInput)?;
    // A damaged file may claim a length of terabytes, and even a correct length may exceed the free memory.
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length)?;
    bytes.resize(length, 0);
    // A container's filter may refuse this system call. The file takes three.
    let from = libc::iovec { iov_base: addresses.start as *mut c_void, iov_len: length };
    if !read_by_system_call(&[from], &mut bytes).is_ok_and(|read| read == length) {
        File::open("/proc/self/mem")?.read_exact_at(&mut bytes, addresses.start)?;
    }
    Ok(bytes)
}

/// Copies pieces of this process's memory to `into`, until the first that is not mapped, each completely or not at all.
pub(super) fn read_by_system_call(from: &[libc::iovec], into: &mut [u8]) -> io::Result<usize> {
    if !may(FilteredSyscall::ProcessVmReadv) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let to = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let process = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: the kernel writes to `into`, which is borrowed exclusively, at most its length. It checks the source
    // addresses itself, and returns an error for unmapped ones.
    let length = unsafe {
        libc::process_vm_readv(process, &raw const to, 1, from.as_ptr(), from.len() as u64, 0)
    };
    usize::try_from(length).map_err(|_| io::Error::last_os_error())
}

/// Whether the call is allowed, so that a signal handler can make it.
pub(super) fn can_read_by_system_call() -> Result<(), WhyRefused> {
    let (from, mut to) = (1_u64, [0; size_of::<u64>()]);
    let iov_base = (&raw const from).cast_mut().cast();
    let read = read_by_system_call(&[libc::iovec { iov_base, iov_len: to.len() }], &mut to);
    let why = |error: io::Error| {
        let errno = error.raw_os_error().unwrap_or(libc::EPERM);
        WhyRefused::Failed(FilteredSyscall::ProcessVmReadv, errno)
    };
    read.map(drop).map_err(why)
}

/// Memory of the program itself (not of a library), if all of `addresses` is read-only in it.
pub(crate) fn program_memory(addresses: Range<u64>) -> Option<&'static [u8]> {
    let Range { start, end } = addresses;
    let length = end.checked_sub(start).filter(|length| *length > 0)? as usize;
    program_segment(|header, segment| {
        is_read_only(header) && segment.start <= start && end <= segment.end
    })?;
    // SAFETY: the loader keeps the program's segments mapped for the life of the process, and this one is not writable.
    Some(unsafe { std::slice::from_raw_parts(start as *const u8, length) })
}

/// Whether the program itself (not a library) contains an address.
pub(super) fn is_in_program(address: u64) -> bool {
    program_segment(|_, segment| segment.contains(&address)).is_some()
}

/// The addresses of the first segment of the program that is such a one.
fn program_segment(is_it: impl Fn(&libc::Elf64_Phdr, &Range<u64>) -> bool) -> Option<Range<u64>> {
    let mut found = None;
    iterate(&mut |info| {
        // The program is always the first module.
        let mut loaded =
            program_headers(info).iter().filter(|header| header.p_type == libc::PT_LOAD);
        found = loaded.find_map(|header| {
            let segment = addresses_of(header, info.dlpi_addr);
            is_it(header, &segment).then_some(segment)
        });
        false
    });
    found
}

/// Held while the loaded modules are read, because glibc does not release the loader's own lock in a forked child.
static LOADER: ForkSafe<()> = ForkSafe::new(());

pub(super) fn lock_loader() -> ForkSafeGuard<()> {
    LOADER.lock()
}

fn loads_of(info: &libc::dl_phdr_info) -> ModuleLoads {
    ModuleLoads { loaded: info.dlpi_adds, unloaded: info.dlpi_subs }
}

/// Calls `visit` for each loaded module until it returns false, under the loader's lock.
///
/// `visit` must neither allocate nor free. Allocators ask for this list, too, to walk a stack, and some do so under a lock
/// of their own: a thread that holds the loader's lock and waits for the allocator's would wait forever.
fn iterate(visit: &mut dyn FnMut(&libc::dl_phdr_info) -> bool) {
    type Visit<'a> = &'a mut dyn FnMut(&libc::dl_phdr_info) -> bool;

    unsafe extern "C" fn each(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: `data` is the pointer to `visit` that was passed to `dl_iterate_phdr` below.
        let visit = unsafe { &mut *data.cast::<Visit<'_>>() };
        // SAFETY: the loader passes a valid structure, which lives until this function returns.
        let go_on = visit(unsafe { &*info });
        c_int::from(!go_on)
    }

    let mut visit: Visit<'_> = visit;
    let _loader = lock_loader();
    // SAFETY: `each` has the right signature and does not unwind (`visit` only copies), and the pointer to `visit` is
    // used only during this call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut visit).cast()) };
}

fn name_of(info: &libc::dl_phdr_info) -> &[u8] {
    if info.dlpi_name.is_null() {
        return &[];
    }
    // SAFETY: a NUL-terminated string that the loader keeps while its lock is held.
    unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes()
}

/// Of the program, which is never unloaded.
fn program_headers(info: &libc::dl_phdr_info) -> &[libc::Elf64_Phdr] {
    if info.dlpi_phdr.is_null() {
        return &[];
    }
    // SAFETY: the loader gives the number of headers, which are mapped as long as the program.
    unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) }
}

fn addresses_of(header: &libc::Elf64_Phdr, bias: u64) -> Range<u64> {
    let start = bias.wrapping_add(header.p_vaddr);
    start..start.wrapping_add(header.p_memsz)
}

fn is_read_only(header: &libc::Elf64_Phdr) -> bool {
    header.p_type == libc::PT_LOAD && header.p_flags & (libc::PF_R | libc::PF_W) == libc::PF_R
}

/// Copies program headers; `None` if the module has just been unloaded. Those of libraries are read by system calls, like
/// all of their memory: a file that has been truncated cannot be read where it is mapped.
fn header_bytes((address, number): (u64, u16), is_program: bool) -> Option<Vec<u8>> {
    let length = size_of::<libc::Elf64_Phdr>() as u64 * u64::from(number);
    let end = address.checked_add(length)?;
    if is_program && address != 0 {
        // Also where no system call reads memory.
        // SAFETY: the loader gives the number of headers. The program is never unloaded, and its file cannot be written to.
        let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, length as usize) };
        return Some(bytes.to_vec());
    }
    read_own_memory(address..end).ok()
}

fn describe(name: &[u8], bias: u64, headers: &[u8]) -> LoadedModule {
    let mut module = LoadedModule {
        file: Err(NoFile::NotRead),
        loader_name: PathBuf::from(OsStr::from_bytes(name)),
        is_vdso: false,
        bias,
        code: Vec::new(),
        loaded: Vec::new(),
        read_only: Vec::new(),
        eh_frame_hdr: None,
        notes: Vec::new(),
    };
    for header in parsed(headers) {
        let addresses = addresses_of(&header, bias);
        let part = || MappedPart { addresses: addresses.clone(), file_offset: header.p_offset };
        match header.p_type {
            libc::PT_LOAD => {
                module.loaded.push(part());
                if is_read_only(&header) {
                    module.read_only.push(addresses.clone());
                }
                if header.p_flags & libc::PF_X != 0 {
                    module.code.push(part());
                }
            }
            libc::PT_GNU_EH_FRAME => module.eh_frame_hdr = Some(part()),
            libc::PT_NOTE => module.notes.push(addresses),
            _ => {}
        }
    }
    let is_inside = |address| module.loaded.iter().any(|part| part.addresses.contains(&address));
    module.is_vdso = vdso_address().is_some_and(is_inside);
    module
}

fn parsed(headers: &[u8]) -> impl Iterator<Item = libc::Elf64_Phdr> {
    // SAFETY: all bytes are a valid header, which is plain integers, and each part has its size.
    let header = |part: &[u8]| unsafe { part.as_ptr().cast::<libc::Elf64_Phdr>().read_unaligned() };
    headers.chunks_exact(size_of::<libc::Elf64_Phdr>()).map(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_program_its_libraries_and_the_vdso() {
        let list = loaded_modules(true);
        let here = finds_the_program_its_libraries_and_the_vdso as *const () as u64;
        let program = &list.modules[0];
        assert!(program.code.iter().any(|segment| segment.addresses.contains(&here)));
        assert!(program.eh_frame_hdr.is_some());
        let number = |part: &str| {
            let files = list.modules.iter().filter_map(|module| module.file.as_ref().ok());
            files.filter(|file| file.path.to_string_lossy().contains(part)).count()
        };
        assert!(list.has_files);
        let path = std::env::current_exe().unwrap();
        assert_eq!(program.file.as_ref().unwrap().path, path);
        assert_eq!(program_path(), Some(path));
        let is_static = cfg!(target_feature = "crt-static");
        // Some releases have a number in between.
        assert!(number("/libc") == 1 || is_static || cfg!(target_env = "musl"));
        // An emulator may have none.
        let vdsos = list.modules.iter().filter(|module| module.is_vdso);
        assert_eq!(vdsos.count(), usize::from(vdso().is_some()));
        let without_file = list.modules.iter().filter(|module| module.file.is_err());
        assert!(without_file.into_iter().all(|module| module.is_vdso));
        assert_eq!(list.loads, module_loads());
    }

    #[test]
    fn borrows_only_read_only_memory_of_the_program() {
        let program = &loaded_modules(false).modules[0];
        let header = program.eh_frame_hdr.clone().unwrap().addresses;
        assert_eq!(program_memory(header.clone()).unwrap(), read_own_memory(header).unwrap());
        let here = 0_u64;
        let address = (&raw const here) as u64;
        assert_eq!(program_memory(address..address + 8), None);
        assert_eq!(program_memory(0..8), None);
        let code = program.code[0].addresses.clone();
        assert_eq!(program_memory(code.start..u64::MAX), None);
    }

    #[test]
    fn reads_memory_and_fails_where_none_is_mapped() {
        let bytes = *b"bytes of this test";
        let address = bytes.as_ptr() as u64;
        assert_eq!(read_own_memory(address..address + 18).unwrap(), bytes);
        assert!(read_own_memory(0..4096).is_err());
        assert!(read_own_memory(u64::MAX - 4096..u64::MAX).is_err());
        let mut copy = [0; 18];
        let at = |address: u64| [libc::iovec { iov_base: address as *mut c_void, iov_len: 18 }];
        assert_eq!(read_by_system_call(&at(address), &mut copy).unwrap(), 18);
        assert_eq!(copy, bytes);
        assert!(read_by_system_call(&at(0), &mut copy).is_err());
    }
}

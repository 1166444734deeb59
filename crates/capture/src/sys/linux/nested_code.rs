//! Functions in assembly that call each other, for the tests of stacks without unwind tables. The innermost one notes its
//! registers and has a copy of the stack made.

#![allow(clippy::expect_used, reason = "for tests")]
#![allow(unsafe_code, reason = "calls functions in assembly, and maps code")]

use std::arch::global_asm;
use std::ffi::c_void;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use super::modules::read_own_memory;
use super::thread::stack_bounds;

/// What the innermost function knows, as its assembly writes it.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Running {
    pub(crate) sp: u64,
    pub(crate) bp: u64,
    pub(crate) stack: Vec<u8>,
}

extern "C" fn copy_stack(running: &mut Running) {
    let end = stack_bounds().expect("it is known").end;
    let copied = read_own_memory(running.sp..end.min(running.sp + (64 << 10)));
    running.stack = copied.expect("the thread's own stack");
}

type Nested = unsafe extern "C" fn(&mut Running, extern "C" fn(&mut Running), u64);

// `rdi` is a `Running`, `rsi` is `copy_stack`. Each function puts the return addresses of an indirect and of a direct call
// on the stack, as data: the address of `decoy_return` is in `rdx`.
// SAFETY: the names are those of this file alone, and each function keeps the registers and the stack as the ABI requires.
global_asm!(
    r"
    .text
    .macro data
    mov [rsp], rdx
    lea rax, [rip + unwound_plain_3_return]
    mov [rsp + 8], rax
    lea rax, [rip + unwound_framed_2_return]
    mov [rsp + 16], rax
    mov [rsp + 24], rsp
    .endm

    .macro innermost name
    mov [rdi], rsp
    mov [rdi + 8], rbp
    .globl unwound_\name\()_runs
    unwound_\name\()_runs:
    call rsi
    .endm

    # With tables, but with an indirect call.
    .globl unwound_decoy
    unwound_decoy:
    .cfi_startproc
    sub rsp, 8
    .cfi_def_cfa_offset 16
    call rax
    .globl unwound_decoy_return
    unwound_decoy_return:
    add rsp, 8
    .cfi_def_cfa_offset 8
    ret
    .cfi_endproc

    # Without tables and without frame pointers: rbp is the caller's.
    .macro plain from, to
    .globl unwound_plain_\from\()
    unwound_plain_\from\():
    sub rsp, 56
    data
    call unwound_plain_\to
    .globl unwound_plain_\from\()_return
    unwound_plain_\from\()_return:
    add rsp, 56
    ret
    .endm
    plain 1, 2
    plain 2, 3
    plain 3, 4
    .globl unwound_plain_4
    unwound_plain_4:
    sub rsp, 56
    data
    innermost plain
    add rsp, 56
    .globl unwound_plain_ends
    unwound_plain_ends:
    ret

    # What is left on the stack of calls before could be a return address that is nearer.
    .macro clean
    mov qword ptr [rsp], 0
    mov qword ptr [rsp + 8], 0
    mov qword ptr [rsp + 16], 0
    mov qword ptr [rsp + 24], 0
    mov qword ptr [rsp + 32], 0
    mov qword ptr [rsp + 40], 0
    .endm

    # With frame pointers.
    .macro framed from, to
    .globl unwound_framed_\from\()
    unwound_framed_\from\():
    push rbp
    mov rbp, rsp
    sub rsp, 48
    clean
    mov rax, rsp
    mov [rsp + 8], rax
    call unwound_framed_\to
    .globl unwound_framed_\from\()_return
    unwound_framed_\from\()_return:
    leave
    ret
    .endm
    framed 1, 2
    framed 2, 3
    .globl unwound_framed_3
    unwound_framed_3:
    push rbp
    mov rbp, rsp
    sub rsp, 48
    clean
    mov [rsp], rdi
    innermost framed
    leave
    ret

    # One that saves the frame pointer, and one that leaves it alone.
    .globl unwound_mixed_1
    unwound_mixed_1:
    push rbp
    mov rbp, rsp
    sub rsp, 32
    call unwound_mixed_2
    .globl unwound_mixed_1_return
    unwound_mixed_1_return:
    mov rsp, rbp
    pop rbp
    ret
    .globl unwound_mixed_2
    unwound_mixed_2:
    sub rsp, 40
    innermost mixed
    add rsp, 40
    ret

    # The same, with an end that is not recognized between them.
    .globl unwound_unseen_1
    unwound_unseen_1:
    push rbp
    mov rbp, rsp
    sub rsp, 32
    call unwound_unseen_2
    .globl unwound_unseen_1_return
    unwound_unseen_1_return:
    mov rsp, rbp
    pop rbp
    nop
    ret
    unwound_unseen_2:
    sub rsp, 40
    innermost unseen
    add rsp, 40
    ret

    # The frame pointer as a general register: zero; the address of a pair like a frame record; of a pair of zeros.
    .macro general name
    .globl unwound_\name\()
    unwound_\name\():
    push rbp
    push rbx
    sub rsp, 56
    data
    .endm
    .macro general_ends name
    innermost \name
    add rsp, 56
    pop rbx
    pop rbp
    ret
    .endm
    general zero
    xor ebp, ebp
    general_ends zero
    general pair
    lea rbp, [rsp + 32]
    lea rax, [rsp + 48]
    mov [rbp], rax
    mov [rbp + 8], rdx
    general_ends pair
    general nothing
    lea rbp, [rsp + 32]
    mov qword ptr [rbp], 0
    mov qword ptr [rbp + 8], 0
    general_ends nothing

    # A prologue, and then rbp for something else.
    .globl unwound_reused
    unwound_reused:
    push rbp
    mov rbp, rsp
    push rbp
    sub rsp, 56
    data
    lea rbp, [rsp + 32]
    mov qword ptr [rbp], 0
    mov qword ptr [rbp + 8], 0
    innermost reused
    add rsp, 56
    pop rbp
    pop rbp
    ret

    # To be copied elsewhere.
    .globl unwound_moved_framed
    unwound_moved_framed:
    push rbp
    mov rbp, rsp
    push rbx
    push rbx
    innermost moved_framed
    pop rbx
    pop rbx
    pop rbp
    ret
    .globl unwound_moved_plain
    unwound_moved_plain:
    push rbp
    push rbx
    sub rsp, 56
    mov [rsp], rdx
    mov [rsp + 8], rdx
    innermost moved_plain
    add rsp, 56
    pop rbx
    pop rbp
    ret
    .globl unwound_moved_ends
    unwound_moved_ends:

    # With tables that compute the frame from memory, as in cryptographic libraries: rbp is a general register.
    .globl unwound_stored
    unwound_stored:
    .cfi_startproc
    mov rax, rsp
    .cfi_def_cfa_register rax
    push rbx
    .cfi_offset rbx, -16
    push rbp
    .cfi_offset rbp, -24
    sub rsp, 128
    and rsp, -64
    mov [rsp + 40], rax
    # DW_CFA_def_cfa_expression: breg7 (rsp) + 40, deref, plus_uconst 8
    .cfi_escape 0x0f, 5, 0x77, 40, 0x06, 0x23, 8
    mov rbp, 12345
    innermost stored
    mov rax, [rsp + 40]
    .cfi_def_cfa rax, 8
    mov rbp, [rax - 16]
    mov rbx, [rax - 8]
    mov rsp, rax
    .cfi_def_cfa_register rsp
    ret
    .cfi_endproc
    "
);

macro_rules! places {
    ($(fn $function:ident)* $(at $label:ident)*) => {
        // SAFETY: the assembly above defines these names, and only their addresses are used.
        unsafe extern "C" {
            $(static $function: u8;)*
            $(static $label: u8;)*
        }

        /// Functions that [`run`](NestedFunction::run) can call.
        pub(crate) mod functions {
            use super::NestedFunction;

            $(
                pub(crate) fn $function() -> NestedFunction {
                    NestedFunction((&raw const super::$function) as u64)
                }
            )*
        }

        /// Addresses of instructions.
        pub(crate) mod labels {
            $(
                pub(crate) fn $label() -> u64 {
                    (&raw const super::$label) as u64
                }
            )*
        }
    };
}

places! {
    fn unwound_plain_1
    fn unwound_framed_1
    fn unwound_mixed_1
    fn unwound_unseen_1
    fn unwound_zero
    fn unwound_pair
    fn unwound_nothing
    fn unwound_reused
    fn unwound_moved_framed
    fn unwound_moved_plain
    fn unwound_stored
    at unwound_decoy_return
    at unwound_plain_1_return
    at unwound_plain_2_return
    at unwound_plain_3_return
    at unwound_plain_4
    at unwound_plain_runs
    at unwound_plain_ends
    at unwound_framed_1_return
    at unwound_framed_2_return
    at unwound_framed_3
    at unwound_framed_runs
    at unwound_mixed_1_return
    at unwound_mixed_runs
    at unwound_unseen_1_return
    at unwound_unseen_runs
    at unwound_zero_runs
    at unwound_pair_runs
    at unwound_nothing_runs
    at unwound_reused_runs
    at unwound_moved_framed_runs
    at unwound_moved_plain_runs
    at unwound_moved_ends
    at unwound_stored_runs
}

/// A function of the assembly above that can be called.
#[derive(Clone, Copy)]
pub(crate) struct NestedFunction(u64);

impl NestedFunction {
    pub(crate) fn address(self) -> u64 {
        self.0
    }

    /// Runs it, and returns what its innermost function knew.
    #[inline(never)]
    pub(crate) fn run(self) -> Running {
        // SAFETY: a `NestedFunction` is only made of names of functions that have these arguments.
        unsafe { call(self.0) }
    }
}

/// # Safety
///
/// The address is that of a function of the assembly above, or of a copy of one that is mapped.
#[inline(never)]
unsafe fn call(function: u64) -> Running {
    let mut running = Running::default();
    // SAFETY: it is a function with these arguments, as the caller promises. It keeps the registers and the stack as the ABI
    // requires.
    unsafe {
        let function = std::mem::transmute::<u64, Nested>(function);
        function(&mut running, copy_stack, labels::unwound_decoy_return());
    }
    std::hint::black_box(running)
}

/// The address of the function that calls those above, which has tables.
pub(crate) fn caller() -> u64 {
    call as *const () as u64
}

/// A copy of the functions that can be moved, in a page of no module, as generated code is.
pub(crate) struct Moved(*mut c_void);

const PAGE: usize = 4096;

impl Moved {
    pub(crate) fn map() -> Self {
        let begin = functions::unwound_moved_framed().address();
        let length = (labels::unwound_moved_ends() - begin) as usize;
        assert!(length <= PAGE);
        // SAFETY: the kernel chooses the address of the new mapping. The code is readable, and fits.
        let page = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let page = std::ptr::null_mut();
            let page = rustix::mm::mmap_anonymous(page, PAGE, access, MapFlags::PRIVATE);
            let page = page.expect("a page");
            std::ptr::copy_nonoverlapping(begin as *const u8, page.cast::<u8>(), length);
            let access = MprotectFlags::READ | MprotectFlags::EXEC;
            rustix::mm::mprotect(page, PAGE, access).expect("the same page");
            page
        };
        Self(page)
    }

    /// Where an address between the functions that were copied is now.
    pub(crate) fn at(&self, address: u64) -> u64 {
        let begin = functions::unwound_moved_framed().address();
        assert!((begin..labels::unwound_moved_ends()).contains(&address));
        self.0 as u64 + (address - begin)
    }

    /// Runs the copy of a function.
    pub(crate) fn run(&self, function: NestedFunction) -> Running {
        // SAFETY: `at` checks that the function was copied, and the copy is mapped as long as this lives. Its code does not
        // depend on where it is.
        unsafe { call(self.at(function.0)) }
    }
}

impl Drop for Moved {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which this alone refers to, and in which nothing runs any more.
        unsafe { rustix::mm::munmap(self.0, PAGE).expect("a mapping") };
    }
}

/// An instruction that was run in a library: its address, stack and frame pointer; the return addresses of its callers up to
/// the first outside of the library; the words of the stack.
pub(crate) struct Stepped {
    pub(crate) registers: [u64; 3],
    pub(crate) callers: Vec<u64>,
    pub(crate) stack: Vec<u64>,
}

/// Compiles C sources to libraries with these flags. In the last, calls `work` one instruction at a time. Every n-th in this
/// range of its functions is noted. `None` without a compiler.
pub(crate) fn run_stepped(source: &str, flags: &[&str], every: u64) -> Option<Vec<Stepped>> {
    let directory = tempfile::tempdir().expect("a directory");
    let load = |name: &str, source: &str, flags: &[&str]| {
        let (from, to) = (directory.path().join(name), directory.path().join(format!("{name}.so")));
        std::fs::write(&from, source).expect("a file");
        let mut cc = std::process::Command::new("cc");
        cc.args(["-w", "-shared", "-fPIC", "-o"]).arg(&to).args(flags).args(["-x", "c"]).arg(&from);
        assert!(cc.status().ok()?.success(), "{cc:?}");
        let path =
            std::ffi::CString::new(to.into_os_string().into_encoded_bytes()).expect("a path");
        // SAFETY: a library that does nothing when it is loaded. It is never unloaded.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "loaded");
        Some(library)
    };
    let name = |library, name: &std::ffi::CStr| {
        // SAFETY: the library is loaded.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        found
    };
    let run = name(load("stepped", include_str!("stepped.c"), &["-O1"])?, c"run_stepped");
    let work = name(load("work", source, flags)?, c"work");
    let modules = super::modules::loaded_modules(true).modules;
    let mut parts = modules.iter().flat_map(|module| &module.code).map(|part| &part.addresses);
    let code = parts.find(|code| code.contains(&(work as u64))).expect("its code").clone();
    let mut samples = vec![0_u64; 16 << 20];
    // SAFETY: the names are those of functions with these arguments; at most `length` words are written.
    let length = unsafe {
        type Run = extern "C" fn(*const c_void, *const u64, *mut u64, u64) -> u64;
        let run = std::mem::transmute::<*mut c_void, Run>(run);
        let range = [code.start, code.end, every];
        run(work, range.as_ptr(), samples.as_mut_ptr(), samples.len() as u64)
    };
    let mut words = samples.into_iter().take(length as usize);
    let mut take = |number: usize| words.by_ref().take(number).collect::<Vec<_>>();
    let mut found = Vec::new();
    while let [ip, sp, bp, callers, stack] = take(5)[..] {
        let registers = [ip, sp, bp];
        found.push(Stepped {
            registers,
            callers: take(callers as usize),
            stack: take(stack as usize),
        });
    }
    Some(found)
}

//! Stacks of code without unwind tables, against what is known of them: functions in assembly that call each other and,
//! with their registers and the stack, a function that takes a copy of it.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test"
)]
#![cfg(all(target_os = "linux", not(miri), not(tracing_profiling_unsupported)))]
#![allow(unsafe_code, reason = "calls functions in assembly, and maps code")]

use std::arch::global_asm;
use std::ops::Range;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use super::rules::FrameRule;
use super::unwinder::tests::{bytes, stack};
use super::{UnwindEnd, Unwinder};
use crate::sampler::record::Registers;
use crate::sys::{loaded_modules, read_own_memory, stack_bounds};

/// What the innermost function knows, as its assembly writes it.
#[repr(C)]
#[derive(Default)]
struct Running {
    sp: u64,
    bp: u64,
    stack: Vec<u8>,
}

extern "C" fn copy_stack(running: &mut Running) {
    let end = stack_bounds().unwrap().end;
    running.stack = read_own_memory(running.sp..end.min(running.sp + (64 << 10))).unwrap();
}

type Nested = unsafe extern "C" fn(&mut Running, extern "C" fn(&mut Running), u64);

// `rdi` is a `Running`, `rsi` is `copy_stack`. Each function puts the return addresses of an indirect and of a direct call
// on the stack, as data: the address of `decoy_return` is in `rdx`.
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

    # With frame pointers.
    .macro framed from, to
    .globl unwound_framed_\from\()
    unwound_framed_\from\():
    push rbp
    mov rbp, rsp
    sub rsp, 48
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

macro_rules! symbols {
    ($($name:ident)*) => {
        unsafe extern "C" {
            $(static $name: u8;)*
        }
        $(
            #[allow(non_snake_case)]
            mod $name {
                pub(super) fn address() -> u64 {
                    (&raw const super::$name) as u64
                }
            }
        )*
    };
}

symbols! {
    unwound_decoy_return
    unwound_plain_1 unwound_plain_1_return unwound_plain_2_return unwound_plain_3_return
    unwound_plain_4 unwound_plain_runs unwound_plain_ends
    unwound_framed_1 unwound_framed_1_return unwound_framed_2_return unwound_framed_3
    unwound_framed_runs
    unwound_mixed_1 unwound_mixed_1_return unwound_mixed_runs
    unwound_unseen_1 unwound_unseen_1_return unwound_unseen_runs
    unwound_zero unwound_zero_runs unwound_pair unwound_pair_runs
    unwound_nothing unwound_nothing_runs unwound_reused unwound_reused_runs
    unwound_moved_framed unwound_moved_framed_runs unwound_moved_plain unwound_moved_plain_runs
    unwound_moved_ends
    unwound_stored unwound_stored_runs
}

/// Runs a function, and returns what it knew.
#[inline(never)]
fn run(function: u64) -> Running {
    let mut running = Running::default();
    // SAFETY: the address of a function above, or of a copy, with these arguments.
    unsafe {
        let function = std::mem::transmute::<u64, Nested>(function);
        function(&mut running, copy_stack, unwound_decoy_return::address());
    }
    std::hint::black_box(running)
}

/// Addresses in memory, and how the stack ends.
fn unwound(ip: u64, sp: u64, bp: Option<u64>, words: &[u8]) -> (Vec<u64>, UnwindEnd) {
    let mut unwinder: Unwinder = Unwinder::default();
    unwinder.refresh();
    let mut frames = Vec::new();
    let word = stack(words);
    let end = match bp {
        Some(bp) => unwinder.unwind(Registers::X86_64 { ip, sp, bp }, word, 100, &mut frames),
        None => unwinder.unwind_blocked(ip, sp, word, 100, &mut frames).0,
    };
    let modules = unwinder.modules();
    let loaded = |frame: &super::ModuleAddress| {
        let module = frame.module().and_then(|id| modules.get(id));
        module.map_or(frame.address(), |module| module.loaded_at(frame.address()))
    };
    (frames.iter().map(loaded).collect(), end)
}

/// The stack at an instruction of the innermost function, whose callers return to `callers` and then to a function with
/// tables. Sampled, and as a wait. It has a part of the truth and its end is marked, or it is whole.
#[track_caller]
fn check(running: &Running, ip: u64, sp: u64, callers: &[u64], is_whole: bool) {
    let skipped = (sp - running.sp) as usize;
    for bp in [Some(running.bp), None] {
        let (found, end) = unwound(ip, sp, bp, &running.stack[skipped..]);
        let known: Vec<u64> =
            std::iter::once(ip).chain(callers.iter().map(|caller| caller - 1)).collect();
        let common = found.len().min(known.len());
        assert_eq!(found[..common], known[..common], "with {bp:x?}: {end:?}");
        if found.len() > known.len() {
            // The caller of the outermost, which has tables.
            let run = function_at(run as *const () as u64);
            assert!(run.contains(&found[known.len()]), "{found:x?}");
            assert_ne!(end, UnwindEnd::WithoutTables, "{found:x?}");
        } else {
            assert_eq!(end, UnwindEnd::WithoutTables, "with {bp:x?}: {found:x?}");
        }
        if is_whole && bp.is_some() {
            assert!(found.len() > known.len() + 1, "{found:x?}, {end:?}");
            assert!(matches!(end, UnwindEnd::Root | UnwindEnd::Cut), "{end:?}");
        }
    }
}

/// A small function that begins there.
fn function_at(start: u64) -> Range<u64> {
    start..start + 400
}

#[test]
fn nested_assembly_has_no_false_caller() {
    let running = run(unwound_plain_1::address());
    let callers = [
        unwound_plain_3_return::address(),
        unwound_plain_2_return::address(),
        unwound_plain_1_return::address(),
    ];
    let runs = unwound_plain_runs::address();
    check(&running, runs, running.sp, &callers, false);
    let (found, end) = unwound(runs, running.sp, Some(running.bp), &running.stack);
    assert_eq!((found, end), (vec![runs], UnwindEnd::WithoutTables));
    // At its first instruction and at its return, the caller is known, and nothing of that one's.
    for at in [unwound_plain_4::address(), unwound_plain_ends::address()] {
        check(&running, at, running.sp + 56, &callers, false);
        let (found, end) = unwound(at, running.sp + 56, Some(running.bp), &running.stack[56..]);
        assert_eq!((found, end), (vec![at, callers[0] - 1], UnwindEnd::WithoutTables));
    }
}

#[test]
fn frame_pointers_are_followed_where_code_without_tables_saved_them() {
    let running = run(unwound_framed_1::address());
    let callers = [unwound_framed_2_return::address(), unwound_framed_1_return::address()];
    check(&running, unwound_framed_runs::address(), running.sp, &callers, true);
    // Before it has saved it, and between both instructions of the prologue: it is the caller's.
    let callers_bp = u64::from_ne_bytes(*running.stack[48..].first_chunk().unwrap());
    let early = |sp| Running {
        sp,
        bp: callers_bp,
        stack: running.stack[(sp - running.sp) as usize..].to_vec(),
    };
    let start = unwound_framed_3::address();
    check(&early(running.sp + 56), start, running.sp + 56, &callers, true);
    check(&early(running.sp + 48), start + 1, running.sp + 48, &callers, false);
}

#[test]
fn a_frame_pointer_of_another_function_is_not_followed() {
    for (function, caller, runs) in [
        (
            unwound_mixed_1::address(),
            unwound_mixed_1_return::address(),
            unwound_mixed_runs::address(),
        ),
        (
            unwound_unseen_1::address(),
            unwound_unseen_1_return::address(),
            unwound_unseen_runs::address(),
        ),
    ] {
        let running = run(function);
        check(&running, runs, running.sp, &[caller], false);
    }
}

#[test]
fn a_general_register_is_not_a_frame_pointer_and_a_zero_is_no_end() {
    for (function, runs) in [
        (unwound_zero::address(), unwound_zero_runs::address()),
        (unwound_pair::address(), unwound_pair_runs::address()),
        (unwound_nothing::address(), unwound_nothing_runs::address()),
        (unwound_reused::address(), unwound_reused_runs::address()),
    ] {
        let running = run(function);
        let (found, end) = unwound(runs, running.sp, Some(running.bp), &running.stack);
        assert_eq!((found, end), (vec![runs], UnwindEnd::WithoutTables));
        check(&running, runs, running.sp, &[], false);
    }
}

#[test]
fn tables_that_compute_a_frame_from_memory_are_followed() {
    let running = run(unwound_stored::address());
    check(&running, unwound_stored_runs::address(), running.sp, &[], true);
}

#[test]
fn generated_code_is_unwound_by_the_frame_pointers_that_it_saved() {
    let code = unwound_moved_framed::address()..unwound_moved_ends::address();
    let length = 4096;
    // SAFETY: the kernel chooses the address, and the code fits.
    let page = unsafe {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let page =
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, access, MapFlags::PRIVATE)
                .unwrap();
        let bytes = (code.end - code.start) as usize;
        std::ptr::copy_nonoverlapping(code.start as *const u8, page.cast::<u8>(), bytes);
        rustix::mm::mprotect(page, length, MprotectFlags::READ | MprotectFlags::EXEC).unwrap();
        page
    };
    let moved = |address: u64| page as u64 + (address - code.start);
    let framed = run(moved(unwound_moved_framed::address()));
    let runs = moved(unwound_moved_framed_runs::address());
    check(&framed, runs, framed.sp, &[], true);
    let plain = run(moved(unwound_moved_plain::address()));
    let runs = moved(unwound_moved_plain_runs::address());
    let (found, end) = unwound(runs, plain.sp, Some(plain.bp), &plain.stack);
    assert_eq!((found, end), (vec![runs], UnwindEnd::WithoutTables));
    check(&plain, runs, plain.sp, &[], false);
    // SAFETY: the whole mapping, in which nothing runs any more.
    unsafe { rustix::mm::munmap(page, length).unwrap() };
    // Where nothing is mapped any more.
    let (found, end) = unwound(runs, framed.sp, Some(framed.bp), &framed.stack);
    assert_eq!((found, end), (vec![runs], UnwindEnd::WithoutTables));
}

/// Whether a call ends right before an address, by the encodings in the manual.
fn is_after_call(address: u64) -> bool {
    let Ok(code) = read_own_memory(address - 8..address) else { return false };
    let before = |length: usize| &code[8 - length..];
    let indirect = |code: &[u8]| {
        code[0] == 0xff && code[1] >> 3 & 7 == 2 && {
            let (mode, base) = (code[1] >> 6, code[1] & 7);
            let has_index = mode != 3 && base == 4;
            let displacement = match mode {
                0 if base == 5 || has_index && code.len() > 2 && code[2] & 7 == 5 => 4,
                0 | 3 => 0,
                1 => 1,
                _ => 4,
            };
            code.len() == 2 + usize::from(has_index) + displacement
        }
    };
    before(5)[0] == 0xe8 || (2..=7).any(|length| indirect(before(length)))
}

#[test]
fn random_stacks_have_no_frame_that_is_not_after_a_call() {
    let mut unwinder: Unwinder = Unwinder::default();
    unwinder.refresh();
    let modules = loaded_modules().modules;
    let segments: Vec<_> = modules.iter().flat_map(|module| &module.code).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        random >> 16
    };
    // Addresses of code, half of them after calls.
    let mut addresses = Vec::new();
    while addresses.len() < 1_000 {
        let segment = &segments[next() as usize % segments.len()].addresses;
        let address = segment.start + 8 + next() % (segment.end - segment.start - 8);
        let after = (address..segment.end).take(500).find(|address| is_after_call(*address));
        addresses.extend([Some(address), after].into_iter().flatten());
    }
    let sp = 0x7fff_0000_0000;
    let (mut callers, mut roots) = (0, 0);
    let mut frames = Vec::new();
    for round in 0..2_000 {
        let ip = addresses[next() as usize % addresses.len()];
        let words: Vec<u64> = (0..64)
            .map(|_| match next() % 8 {
                0 => 0,
                1 => sp + next() % 64 * 8,
                2 => next(),
                _ => addresses[next() as usize % addresses.len()],
            })
            .collect();
        let words = bytes(&words);
        let bp = if next() % 4 == 0 { next() } else { sp + next() % 64 * 8 };
        let end = match round % 2 {
            0 => unwinder.unwind(Registers::X86_64 { ip, sp, bp }, stack(&words), 100, &mut frames),
            _ => unwinder.unwind_blocked(ip, sp, stack(&words), 100, &mut frames).0,
        };
        let modules = unwinder.modules();
        let found: Vec<u64> = frames
            .iter()
            .map(|frame| {
                let module = frame.module().and_then(|id| modules.get(id));
                module.map_or(frame.address(), |module| module.loaded_at(frame.address()))
            })
            .collect();
        for address in found.iter().skip(1) {
            assert!(is_after_call(address + 1), "{address:#x} in {found:x?}, {end:?}");
            callers += 1;
        }
        let last = *found.last().unwrap();
        if end == UnwindEnd::Root {
            assert!(unwinder.place(last).rule == FrameRule::First, "{found:x?}");
            roots += 1;
        }
    }
    assert!(callers > 100, "{callers} callers, {roots} roots");
}

//! Alternate signal stacks: which are too small for the signals of timers.
//!
//! The kernel writes a frame to the thread's alternate stack before the handler begins, and below it the handler has its
//! own frames. No other thread can read which stack a thread has, and a thread can change it at any time. So a thread
//! checks its own in its hooks, and [`on_signal`] checks the one that a signal came to.
#![allow(unsafe_code, reason = "asks for the signal stack, and checks it without using any of it")]

use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::sync::atomic::{AtomicU64, Ordering};

use super::timer::{TAG, handle};

/// The bytes of stack that the handler needs, without the kernel's frame: some 500, and 1,300 without optimization.
const ROOM: usize = 2048;

/// What the standard library gives its threads, or where the kernel's frame needs more, just what the largest frame needs:
/// frames are that large only in a program that uses matrix registers.
const USUAL: usize = 8192;

/// Whether the calling thread has an alternate signal stack on which a signal of a timer may not fit.
pub(crate) fn has_small_signal_stack() -> bool {
    let mut stack = MaybeUninit::<libc::stack_t>::zeroed();
    // SAFETY: only queries; the kernel fills the structure.
    let result = unsafe { libc::sigaltstack(std::ptr::null(), stack.as_mut_ptr()) };
    // SAFETY: zeroed and possibly filled: plain integers and a pointer.
    let stack = unsafe { stack.assume_init() };
    let has_one = result == 0 && stack.ss_flags & libc::SS_DISABLE == 0;
    has_one && stack.ss_size < least_bytes(largest_frame())
}

/// Not every C library has the name.
const AT_MINSIGSTKSZ: libc::c_ulong = 51;

/// The size of the kernel's largest frame: `AT_MINSIGSTKSZ`. Kernels before 5.14 do not say it on x86-64.
fn largest_frame() -> Option<usize> {
    // SAFETY: reads a value that the kernel gave this process when it started.
    let bytes = unsafe { libc::getauxval(AT_MINSIGSTKSZ) };
    usize::try_from(bytes).ok().filter(|bytes| *bytes > 0)
}

fn least_bytes(largest_frame: Option<usize>) -> usize {
    largest_frame.map_or(USUAL, |frame| frame.max((frame + ROOM).min(USUAL)))
}

/// Offsets in the context of a signal.
const STACK_LOW: usize = offset_of!(libc::ucontext_t, uc_stack) + offset_of!(libc::stack_t, ss_sp);
const STACK_SIZE: usize =
    offset_of!(libc::ucontext_t, uc_stack) + offset_of!(libc::stack_t, ss_size);
/// Offsets in the kernel's information on a timer's signal, and of the upper half of its value; see `timer::TimerInfo`.
const CODE: usize = 8;
const TAG_AT: usize = 28;

/// Signals of timers that came to an alternate stack without room for the handler.
static WITHOUT_ROOM: AtomicU64 = AtomicU64::new(0);

/// The number of those since the last call.
pub(crate) fn take_signals_without_room() -> u64 {
    WITHOUT_ROOM.swap(0, Ordering::Relaxed)
}

/// The handler of the signal. It calls [`handle`] if that has room on the stack, and otherwise counts the signal. Until
/// then it uses no stack, since there may be none left.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub(super) extern "C" fn on_signal(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    core::arch::naked_asm!(
        // How far it is to the end of the alternate stack. Not less than its size on another stack.
        "mov rax, rsp",
        "sub rax, [rdx + {stack_low}]",
        "cmp rax, [rdx + {stack_size}]",
        "jae 2f",
        "cmp rax, {room}",
        "jae 2f",
        // Whether the signal is one of this crate's timers.
        "cmp dword ptr [rsi + {code}], {is_timer}",
        "jne 3f",
        "cmp dword ptr [rsi + {tag_at}], {tag}",
        "jne 3f",
        "lock inc qword ptr [rip + {without_room}]",
        "3:",
        "ret",
        "2:",
        "jmp {handle}",
        stack_low = const STACK_LOW,
        stack_size = const STACK_SIZE,
        room = const ROOM,
        code = const CODE,
        is_timer = const libc::SI_TIMER,
        tag_at = const TAG_AT,
        tag = const TAG >> 32,
        without_room = sym WITHOUT_ROOM,
        handle = sym handle,
    )
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
pub(super) extern "C" fn on_signal(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    core::arch::naked_asm!(
        "ldr x9, [x2, #{stack_low}]",
        "ldr x10, [x2, #{stack_size}]",
        "mov x11, sp",
        "sub x11, x11, x9",
        "cmp x11, x10",
        "b.hs 2f",
        "mov x12, #{room}",
        "cmp x11, x12",
        "b.hs 2f",
        // Whether the signal is one of this crate's timers.
        "ldr w9, [x1, #{code}]",
        "cmn w9, #{is_timer}",
        "b.ne 3f",
        "ldr w9, [x1, #{tag_at}]",
        "movz w11, #{tag_low}",
        "movk w11, #{tag_high}, lsl #16",
        "cmp w9, w11",
        "b.ne 3f",
        "adrp x11, {without_room}",
        "add x11, x11, :lo12:{without_room}",
        "4:",
        "ldxr x9, [x11]",
        "add x9, x9, #1",
        "stxr w10, x9, [x11]",
        "cbnz w10, 4b",
        "3:",
        "ret",
        "2:",
        "b {handle}",
        stack_low = const STACK_LOW,
        stack_size = const STACK_SIZE,
        room = const ROOM,
        code = const CODE,
        is_timer = const -libc::SI_TIMER,
        tag_at = const TAG_AT,
        tag_low = const (TAG >> 32) & 0xffff,
        tag_high = const TAG >> 48,
        without_room = sym WITHOUT_ROOM,
        handle = sym handle,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_must_hold_the_largest_frame_and_the_handler_or_be_that_of_the_standard_library() {
        assert_eq!(least_bytes(Some(1_776)), 3_824);
        assert_eq!(least_bytes(Some(3_376)), 5_424);
        // With AVX-512 and matrix registers. The standard library gives as much.
        assert_eq!(least_bytes(Some(11_952)), 11_952);
        assert_eq!(least_bytes(None), 8_192);
        assert!(!has_small_signal_stack(), "Rust's threads have one that is large enough");
    }
}

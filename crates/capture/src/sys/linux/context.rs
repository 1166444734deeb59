//! What a signal handler is given, and what is the same in all records that it writes.

use std::ffi::c_int;
use std::ops::Range;

/// The kernel's information on a timer's signal.
#[repr(C)]
pub(super) struct TimerInfo {
    pub(super) signal: c_int,
    pub(super) error: c_int,
    pub(super) code: c_int,
    pub(super) padding: c_int,
    pub(super) timer: c_int,
    pub(super) overrun: c_int,
    pub(super) value: u64,
}

/// In the kernel's order of register numbers, as in perf's records.
#[cfg(target_arch = "x86_64")]
pub(super) type RawRegisters = [u64; 3];
#[cfg(target_arch = "aarch64")]
pub(super) type RawRegisters = [u64; 4];

#[cfg(target_arch = "x86_64")]
pub(super) fn registers(context: &libc::ucontext_t) -> (RawRegisters, u64) {
    let [.., bp, _, _, _, _, sp, ip, _, _, _, _, _, _] = context.uc_mcontext.gregs;
    let _: [(); 23] = [(); libc::REG_CR2 as usize + 1];
    ([bp as u64, sp as u64, ip as u64], sp as u64)
}

#[cfg(target_arch = "aarch64")]
pub(super) fn registers(context: &libc::ucontext_t) -> (RawRegisters, u64) {
    let machine = &context.uc_mcontext;
    let [.., fp, lr] = machine.regs;
    ([fp, lr, machine.sp, machine.pc], machine.sp)
}

/// The alternate signal stack of the interrupted thread, which a handler that was interrupted on it uses up to its end.
pub(super) fn alternate_stack(context: &libc::ucontext_t) -> Range<u64> {
    let start = context.uc_stack.ss_sp.addr() as u64;
    start..start.saturating_add(context.uc_stack.ss_size as u64)
}

pub(super) const RECORD_LOST: u64 = 2;
pub(super) const RECORD_SAMPLE: u64 = 9;
pub(super) const IN_USER_MODE: u64 = 2;
pub(super) const ABI_64: u64 = 2;

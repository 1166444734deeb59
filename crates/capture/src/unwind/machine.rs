//! The differences between the architectures.

use std::ops::Deref;

use framehop::AllocationPolicy;
use framehop::aarch64::{PtrAuthMask, UnwindRegsAarch64, UnwinderAarch64};
use framehop::x86_64::{UnwindRegsX86_64, UnwinderX86_64};

use super::calls::{self, CallTarget};
use super::places::SavedFrames;
use super::rules::{FrameRule, TableRow};
use crate::sys::Registers;

/// Replaces an unknown link register: an address that no instruction can have.
const UNKNOWN_LINK: u64 = 1;

/// `-mbranch-protection` signs return addresses of aarch64 in the bits above those of user addresses, which have 48 unless a
/// program requests more. Code is never above the range of the dynamic loader.
const MASK: PtrAuthMask = PtrAuthMask(u64::MAX >> (u64::BITS - USER_ADDRESS_BITS));
const USER_ADDRESS_BITS: u32 = 48;

/// A framehop unwinder that can start from the registers of a sample.
pub(crate) trait ArchUnwinder: framehop::Unwinder {
    /// Otherwise it is that of aarch64.
    const IS_X86_64: bool;

    fn registers(registers: Registers) -> Self::UnwindRegs;

    fn stack_pointer(registers: &Self::UnwindRegs) -> u64;

    fn frame_pointer(registers: &Self::UnwindRegs) -> u64;

    /// 0 where there is none.
    fn link_register(registers: &Self::UnwindRegs) -> u64;

    /// The registers of a frame if no others are known.
    fn few_registers(pc: u64, sp: u64, fp: u64) -> Self::UnwindRegs {
        Self::registers(Registers { pc, sp, fp, lr: UNKNOWN_LINK })
    }

    /// Whether a zero in place of a frame pointer ends the stack of a function with tables: the first function of a thread
    /// saves the zero that its frame pointer was.
    const ENDS_BY_ZERO: bool = !Self::IS_X86_64;

    /// Instructions begin at multiples of that many bytes.
    const ALIGNMENT: u64 = if Self::IS_X86_64 { 1 } else { 4 };

    /// A call leaves its return address on the stack, and not in a register.
    const CALLS_PUSH: bool = Self::IS_X86_64;

    /// The possible targets of the call that ends with these bytes; none if no call does.
    fn calls(code: [u8; calls::LONGEST], return_address: u64) -> [Option<CallTarget>; 3] {
        match Self::IS_X86_64 {
            true => calls::x86_64_calls(code, return_address),
            false => [calls::aarch64_call(code, return_address), None, None],
        }
    }

    /// None are searched for on aarch64.
    fn jumps(code: &[u8], address: u64) -> impl Iterator<Item = CallTarget> {
        let code = if Self::IS_X86_64 { code } else { &[] };
        calls::x86_64_jumps(code, address)
    }

    fn rule(row: &TableRow) -> FrameRule {
        if Self::IS_X86_64 { FrameRule::of_x86_64(row) } else { FrameRule::Simple }
    }

    /// Where a function's return address is at its first instruction and its return, and the stack pointer after it.
    fn innermost_return(
        registers: &Self::UnwindRegs,
        mut word_at: impl FnMut(u64) -> Option<u64>,
    ) -> Option<(u64, u64)> {
        let sp = Self::stack_pointer(registers);
        match Self::IS_X86_64 {
            true => Some((word_at(sp)?, sp.checked_add(8)?)),
            false => Some((Self::unsigned(Self::link_register(registers)), sp)),
        }
    }

    /// Whether this code returns at once, also with a prefix or a number of bytes, or with authentication.
    fn returns(code: [u8; 4]) -> bool {
        match Self::IS_X86_64 {
            true => matches!(code, [0xc2 | 0xc3, ..] | [0xf2 | 0xf3, 0xc3, ..]),
            false => calls::is_aarch64_return(u32::from_le_bytes(code)),
        }
    }

    /// How many times this code sets up a frame, at most two, and the last.
    fn saved_frames(code: &[u8]) -> SavedFrames {
        if Self::IS_X86_64 {
            return calls::x86_64_saved_frames(code);
        }
        let last = calls::aarch64_saved_frame(code);
        (usize::from(last.is_some()), last)
    }

    /// A return address as it is on the stack, without its signature.
    fn unsigned(return_address: u64) -> u64 {
        if Self::IS_X86_64 { return_address } else { MASK.strip_ptr_auth(return_address) }
    }

    /// The code that signal handlers return to: `mov rax, 15; syscall`, or `mov x8, 139; svc 0`.
    const SIGNAL_RETURN: &[u8] = if Self::IS_X86_64 {
        &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05]
    } else {
        &[0x68, 0x11, 0x80, 0xd2, 0x01, 0, 0, 0xd4]
    };

    /// Where `struct ucontext` is, in bytes above the stack pointer that the handler returns with: on aarch64, `struct
    /// siginfo` comes first.
    const CONTEXT: u64 = if Self::IS_X86_64 { 0 } else { 128 };

    /// The registers in the kernel's `struct ucontext`; `None` if they cannot be read or cannot be those of a program.
    /// `word` reads at an offset in bytes from its start.
    ///
    /// `struct sigcontext` of x86-64 begins at 40 with 8 registers, `rdi`, `rsi`, `rbp`, four others, `rsp`, `rip`, the flags
    /// and `cs`; of aarch64 at 176 with the fault's address, 31 registers, `sp`, `pc`, and `pstate`. The lowest bits of the
    /// last are the privilege level.
    fn interrupted(mut word: impl FnMut(u64) -> Option<u64>) -> Option<Registers> {
        let (first, [pc, sp, fp], (privilege, mask, of_programs)) = match Self::IS_X86_64 {
            true => (40, [16, 15, 10], (18, 3, 3)),
            false => (176 + 8, [32, 31, 29], (33, 0xf, 0)),
        };
        let mut register = |index: u64| word(first + 8 * index);
        if register(privilege)? & mask != of_programs {
            return None;
        }
        let lr = if Self::IS_X86_64 { 0 } else { register(30)? };
        Some(Registers { pc: register(pc)?, sp: register(sp)?, fp: register(fp)?, lr })
    }
}

impl<D: Deref<Target = [u8]>, P: AllocationPolicy> ArchUnwinder for UnwinderX86_64<D, P>
where
    Self: framehop::Unwinder<UnwindRegs = UnwindRegsX86_64>,
{
    const IS_X86_64: bool = true;

    fn registers(Registers { pc, sp, fp, .. }: Registers) -> UnwindRegsX86_64 {
        UnwindRegsX86_64::new(pc, sp, fp)
    }

    fn stack_pointer(registers: &UnwindRegsX86_64) -> u64 {
        registers.sp()
    }

    fn frame_pointer(registers: &UnwindRegsX86_64) -> u64 {
        registers.bp()
    }

    fn link_register(_: &UnwindRegsX86_64) -> u64 {
        0
    }
}

impl<D: Deref<Target = [u8]>, P: AllocationPolicy> ArchUnwinder for UnwinderAarch64<D, P>
where
    Self: framehop::Unwinder<UnwindRegs = UnwindRegsAarch64>,
{
    const IS_X86_64: bool = false;

    fn registers(Registers { sp, fp, lr, .. }: Registers) -> UnwindRegsAarch64 {
        UnwindRegsAarch64::new_with_ptr_auth_mask(MASK, lr, sp, fp)
    }

    fn stack_pointer(registers: &UnwindRegsAarch64) -> u64 {
        registers.sp()
    }

    fn frame_pointer(registers: &UnwindRegsAarch64) -> u64 {
        registers.fp()
    }

    fn link_register(registers: &UnwindRegsAarch64) -> u64 {
        registers.lr()
    }
}

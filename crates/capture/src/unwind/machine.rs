//! The differences between the architectures.

use framehop::aarch64::{PtrAuthMask, UnwindRegsAarch64, UnwinderAarch64};
use framehop::x86_64::{UnwindRegsX86_64, UnwinderX86_64};

use super::calls::{self, CallTarget};
use super::rules::{FrameRule, TableRow};
use crate::sys::Registers;

/// Replaces an unknown link register: an address that no instruction can have.
const UNKNOWN_LINK: u64 = 1;

/// A framehop unwinder that can start from the registers of a sample.
pub(crate) trait ArchUnwinder: framehop::Unwinder {
    fn registers(registers: Registers) -> Self::UnwindRegs;

    /// The registers of a frame if no others are known.
    fn few_registers(pc: u64, sp: u64, fp: u64) -> Self::UnwindRegs {
        Self::registers(Registers { pc, sp, fp, lr: UNKNOWN_LINK })
    }

    fn stack_pointer(registers: &Self::UnwindRegs) -> u64;

    fn frame_pointer(registers: &Self::UnwindRegs) -> u64;

    /// The possible targets of the call that ends with these bytes; none if no call does.
    fn calls(code: [u8; calls::LONGEST], return_address: u64) -> [Option<CallTarget>; 3];

    fn jumps(code: &[u8], address: u64) -> impl Iterator<Item = CallTarget>;

    fn rule(row: &TableRow) -> FrameRule;

    /// Whether a zero in place of a frame pointer ends the stack of a function with tables.
    const ENDS_BY_ZERO: bool;

    /// Where a function's return address is at its first instruction and its return, and the stack pointer after it.
    fn innermost_return(
        registers: &Self::UnwindRegs,
        word_at: impl FnMut(u64) -> Option<u64>,
    ) -> Option<(u64, u64)>;

    fn returns(code: [u8; 4]) -> bool;

    /// Instructions begin at multiples of that many bytes.
    const ALIGNMENT: u64;

    /// How many times this code sets up a frame, at most two, and the last.
    fn saved_frames(code: &[u8]) -> (usize, Option<calls::SavedFrame>);

    /// A call leaves its return address on the stack, and not in a register.
    const CALLS_PUSH: bool;

    /// A return address as it is on the stack, without its signature.
    fn unsigned(return_address: u64) -> u64;

    /// The code that signal handlers return to: the number of `rt_sigreturn` into a register, then the system call.
    const SIGNAL_RETURN: &[u8];

    /// Where `struct ucontext` is, in bytes above the stack pointer that the handler returns with.
    const CONTEXT: u64;

    /// The registers in the kernel's `struct ucontext`; `None` if they cannot be read or cannot be those of a program.
    /// `word` reads at an offset in bytes from its start.
    fn interrupted(word: impl FnMut(u64) -> Option<u64>) -> Option<Registers>;
}

impl<D: std::ops::Deref<Target = [u8]>, P: framehop::AllocationPolicy> ArchUnwinder
    for UnwinderX86_64<D, P>
where
    Self: framehop::Unwinder<UnwindRegs = UnwindRegsX86_64>,
{
    fn registers(Registers { pc, sp, fp, .. }: Registers) -> UnwindRegsX86_64 {
        UnwindRegsX86_64::new(pc, sp, fp)
    }

    fn stack_pointer(registers: &UnwindRegsX86_64) -> u64 {
        registers.sp()
    }

    fn frame_pointer(registers: &UnwindRegsX86_64) -> u64 {
        registers.bp()
    }

    fn calls(code: [u8; calls::LONGEST], return_address: u64) -> [Option<CallTarget>; 3] {
        calls::x86_64_calls(code, return_address)
    }

    fn jumps(code: &[u8], address: u64) -> impl Iterator<Item = CallTarget> {
        calls::x86_64_jumps(code, address)
    }

    fn rule(row: &TableRow) -> FrameRule {
        FrameRule::of_x86_64(row)
    }

    const ENDS_BY_ZERO: bool = false;

    fn innermost_return(
        registers: &UnwindRegsX86_64,
        mut word_at: impl FnMut(u64) -> Option<u64>,
    ) -> Option<(u64, u64)> {
        let sp = registers.sp();
        Some((word_at(sp)?, sp.checked_add(8)?))
    }

    /// `ret`, also with a prefix or a number of bytes.
    fn returns(code: [u8; 4]) -> bool {
        matches!(code, [0xc2 | 0xc3, ..] | [0xf2 | 0xf3, 0xc3, ..])
    }

    const ALIGNMENT: u64 = 1;

    fn saved_frames(code: &[u8]) -> (usize, Option<calls::SavedFrame>) {
        calls::x86_64_saved_frames(code)
    }

    const CALLS_PUSH: bool = true;

    fn unsigned(return_address: u64) -> u64 {
        return_address
    }

    /// `mov rax, 15; syscall`.
    const SIGNAL_RETURN: &[u8] = &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];

    const CONTEXT: u64 = 0;

    /// `struct sigcontext` begins at 40 with 8 registers, `rdi`, `rsi`, `rbp`, four others, `rsp`, `rip`, the flags and
    /// `cs`, whose lowest bits are the privilege level.
    fn interrupted(mut word: impl FnMut(u64) -> Option<u64>) -> Option<Registers> {
        const SIGCONTEXT: u64 = 40;
        const OF_PROGRAMS: u64 = 3;
        let mut register = |index: u64| word(SIGCONTEXT + 8 * index);
        if register(18)? & 3 != OF_PROGRAMS {
            return None;
        }
        Some(Registers { pc: register(16)?, sp: register(15)?, fp: register(10)?, lr: 0 })
    }
}

/// `-mbranch-protection` signs return addresses in the bits above those of user addresses, which have 48 unless a program
/// requests more. Code is never above the range of the dynamic loader.
const MASK: PtrAuthMask = PtrAuthMask(u64::MAX >> (u64::BITS - USER_ADDRESS_BITS));
const USER_ADDRESS_BITS: u32 = 48;

impl<D: std::ops::Deref<Target = [u8]>, P: framehop::AllocationPolicy> ArchUnwinder
    for UnwinderAarch64<D, P>
where
    Self: framehop::Unwinder<UnwindRegs = UnwindRegsAarch64>,
{
    fn registers(Registers { sp, fp, lr, .. }: Registers) -> UnwindRegsAarch64 {
        UnwindRegsAarch64::new_with_ptr_auth_mask(MASK, lr, sp, fp)
    }

    fn stack_pointer(registers: &UnwindRegsAarch64) -> u64 {
        registers.sp()
    }

    fn frame_pointer(registers: &UnwindRegsAarch64) -> u64 {
        registers.fp()
    }

    fn calls(code: [u8; calls::LONGEST], return_address: u64) -> [Option<CallTarget>; 3] {
        [calls::aarch64_call(code, return_address), None, None]
    }

    fn jumps(_: &[u8], _: u64) -> impl Iterator<Item = CallTarget> {
        std::iter::empty()
    }

    fn rule(_: &TableRow) -> FrameRule {
        FrameRule::Simple
    }

    /// The first function of a thread saves the zero that its frame pointer was.
    const ENDS_BY_ZERO: bool = true;

    fn innermost_return(
        registers: &UnwindRegsAarch64,
        _: impl FnMut(u64) -> Option<u64>,
    ) -> Option<(u64, u64)> {
        Some((Self::unsigned(registers.lr()), registers.sp()))
    }

    /// `ret`, also with authentication.
    fn returns(code: [u8; 4]) -> bool {
        calls::is_aarch64_return(u32::from_le_bytes(code))
    }

    const ALIGNMENT: u64 = 4;

    fn saved_frames(code: &[u8]) -> (usize, Option<calls::SavedFrame>) {
        let last = calls::aarch64_saved_frame(code);
        (usize::from(last.is_some()), last)
    }

    const CALLS_PUSH: bool = false;

    fn unsigned(return_address: u64) -> u64 {
        MASK.strip_ptr_auth(return_address)
    }

    /// `mov x8, 139; svc 0`.
    const SIGNAL_RETURN: &[u8] = &[0x68, 0x11, 0x80, 0xd2, 0x01, 0, 0, 0xd4];

    /// `struct siginfo` comes first.
    const CONTEXT: u64 = 128;

    /// `struct sigcontext` is at 176: the fault's address, 31 registers, `sp`, `pc`, and `pstate`, whose lowest bits are
    /// the privilege level.
    fn interrupted(mut word: impl FnMut(u64) -> Option<u64>) -> Option<Registers> {
        const REGISTERS: u64 = 176 + 8;
        const OF_PROGRAMS: u64 = 0;
        let mut register = |index: u64| word(REGISTERS + 8 * index);
        if register(33)? & 0xf != OF_PROGRAMS {
            return None;
        }
        let (fp, lr) = (register(29)?, register(30)?);
        Some(Registers { pc: register(32)?, sp: register(31)?, fp, lr })
    }
}

//! The stack in use of the calling thread, and a copy of it.
#![allow(unsafe_code, reason = "reads registers and copies the stack in use")]

use std::ops::Range;
use std::ptr;

use super::platform;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    pub pc: u64,
    pub(crate) sp: u64,
    pub(crate) fp: u64,
    /// The link register; 0 where there is none.
    pub(crate) lr: u64,
}

/// Reads the registers here, in a function that must allow `unsafe_code`; `None` on unknown processors.
macro_rules! live_registers {
    () => {{
        let (mut pc, mut sp, mut fp, mut lr) = (0_u64, 0_u64, 0_u64, 0_u64);
        // SAFETY: only reads registers.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        unsafe {
            std::arch::asm!(
                "lea {pc}, [rip]", "mov {sp}, rsp", "mov {fp}, rbp",
                pc = out(reg) pc, sp = out(reg) sp, fp = out(reg) fp,
                options(nomem, nostack, preserves_flags),
            );
        }
        // SAFETY: as above.
        #[cfg(all(target_arch = "aarch64", not(miri)))]
        unsafe {
            std::arch::asm!(
                "adr {pc}, .", "mov {sp}, sp", "mov {fp}, x29", "mov {lr}, x30",
                pc = out(reg) pc, sp = out(reg) sp, fp = out(reg) fp, lr = out(reg) lr,
                options(nomem, nostack, preserves_flags),
            );
        }
        _ = (&mut pc, &mut sp, &mut fp, &mut lr);
        (sp != 0).then_some($crate::sys::Registers { pc, sp, fp, lr })
    }};
}

pub(super) use live_registers;

/// A part of the calling thread's stack, from the stack pointer of a function up.
#[derive(Debug)]
pub struct LiveStack {
    pub registers: Registers,
    addresses: Range<u64>,
}

impl LiveStack {
    /// Whether the registers and the bounds of stacks are known.
    pub(super) const CAN_BE_READ: bool =
        cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")));
    /// Larger parts are not copied.
    pub(crate) const MAX_BYTES: usize = 64 << 10;

    /// The part up to an address in the stack frame of a caller. `None` if it is too large, or not on the thread's own
    /// stack: what lies between two stacks may not be mapped.
    pub(super) fn up_to(registers: Registers, frame: u64) -> Option<Self> {
        let length = frame.checked_sub(registers.sp)?;
        let stack = Self::at_most(registers, usize::try_from(length).ok()?)?;
        (stack.addresses.end == frame).then_some(stack)
    }

    /// At most that many bytes. `None` if they are not on the thread's own stack.
    pub(super) fn at_most(registers: Registers, bytes: usize) -> Option<Self> {
        let bounds = own_stack().filter(|bounds| bounds.contains(&registers.sp))?;
        let end = registers.sp.saturating_add(bytes.min(Self::MAX_BYTES) as u64).min(bounds.end);
        Some(Self { registers, addresses: registers.sp..end })
    }

    pub fn length_bytes(&self) -> usize {
        (self.addresses.end - self.addresses.start) as usize
    }

    /// Copies it, from the stack pointer up, as far as there is room.
    pub fn copy_to<'a>(&self, parts: impl Iterator<Item = &'a mut [u8]>) {
        let mut from = ptr::with_exposed_provenance::<u8>(self.addresses.start as usize);
        let mut left = self.length_bytes();
        for part in parts {
            let length = left.min(part.len());
            // SAFETY: this is the stack in use of the calling thread, within its bounds: `self` is made in the function
            // whose registers it has, is never sent, and is only lent to callees. The bytes are only copied, so it does
            // not matter what they mean.
            unsafe {
                platform::copy_any(from, part.as_mut_ptr(), length);
                from = from.add(length);
            }
            left -= length;
        }
    }
}

/// The addresses of the calling thread's stack, which take a system call to find.
fn own_stack() -> Option<Range<u64>> {
    use std::cell::Cell;
    thread_local! {
        static BOUNDS: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
    }
    let (start, end) = BOUNDS.get().unwrap_or_else(|| {
        let bounds = platform::stack_bounds().map_or((0, 0), |bounds| (bounds.start, bounds.end));
        BOUNDS.set(Some(bounds));
        bounds
    });
    (start < end).then_some(start..end)
}

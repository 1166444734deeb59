//! Signal frames: where the stack continues below a signal handler.
//!
//! The kernel pushes a frame with the interrupted registers and calls the handler so that it returns to two instructions
//! that call `rt_sigreturn`. Their unwind table is an expression that reads memory, which framehop does not evaluate: it
//! would follow the frame pointer instead, which can skip the interrupted function or lead anywhere.

use super::modules::Modules;

/// At least the length of those instructions on any architecture.
const LONGEST: usize = 9;

/// As many as framehop caches rules for.
const CACHED: usize = 509;

/// Where signal handlers return to. Caches the addresses at which they do not: reading the code of a library is a system
/// call.
#[derive(Debug)]
pub(super) struct SignalReturns {
    elsewhere: Vec<u64>,
}

impl Default for SignalReturns {
    fn default() -> Self {
        Self { elsewhere: vec![0; CACHED] }
    }
}

impl SignalReturns {
    /// Whether an address is at the start of these instructions, between them or right after them.
    pub(super) fn contain(&mut self, address: u64, instructions: &[u8], modules: &Modules) -> bool {
        let Some(known) = self.elsewhere.get_mut((address % CACHED as u64) as usize) else {
            return false;
        };
        if *known == address {
            return false;
        }
        let start = address.checked_sub(LONGEST as u64);
        let code = start.and_then(|start| modules.code::<{ 2 * LONGEST }>(start));
        let is_there = code.is_some_and(|code| {
            code.windows(instructions.len()).take(LONGEST + 1).any(|code| code == instructions)
        });
        if !is_there {
            *known = address;
        }
        is_there
    }
}

#[cfg(test)]
mod tests {
    use framehop::aarch64::UnwinderAarch64;
    use framehop::x86_64::UnwinderX86_64;

    use super::super::machine::ArchUnwinder;
    use super::super::tables::TableBytes;
    use super::super::unwinder::tests::{addresses, bytes, code, stack};
    use super::super::unwinder::{UnwindEnd, Unwinder};
    use crate::sampler::record::Registers;

    /// Code without tables, in which the return of signal handlers is at `RETURN`.
    const fn code_of<M: ArchUnwinder>() -> [u8; 128] {
        let mut code = [0x90; 128];
        let (instructions, _) = code.split_at_mut(RETURN).1.split_at_mut(M::SIGNAL_RETURN.len());
        instructions.copy_from_slice(M::SIGNAL_RETURN);
        code
    }

    const RETURN: usize = 16;

    static X86_64: [u8; 128] = code_of::<UnwinderX86_64<TableBytes>>();
    static AARCH64: [u8; 128] = code_of::<UnwinderAarch64<TableBytes>>();

    fn x86_64(ip: u64, sp: u64, bp: u64) -> Registers {
        Registers::X86_64 { ip, sp, bp }
    }

    fn aarch64(pc: u64, sp: u64, fp: u64) -> Registers {
        Registers::Aarch64 { pc, sp, fp, lr: 0 }
    }

    const STACK: u64 = 0x7000;

    /// Unwinds a handler with a frame record, of which the return address is that of signal handlers; or its return, if
    /// `sampled_at` says so. `interrupted` are the program counter, relative to the code, and the stack pointer. Returns
    /// the frames, relative to the code.
    fn unwound<M: ArchUnwinder<Module = framehop::Module<TableBytes>> + Default>(
        program: &'static [u8],
        registers: fn(u64, u64, u64) -> Registers,
        sampled_at: u64,
        interrupted: (u64, u64),
    ) -> (Vec<u64>, UnwindEnd)
    where
        M::Cache: Default,
    {
        const WORDS: u64 = 100;
        let start = program.as_ptr() as u64;
        let mut unwinder = Unwinder::<M>::default();
        unwinder.update(&[code(start..start + program.len() as u64)]);
        let mut words = vec![0; WORDS as usize];
        let frame = 32;
        words[3] = start + RETURN as u64;
        // The interrupted function's, which the handler saves in its own.
        let record = STACK + 8 * (WORDS - 4);
        words[2] = record;
        words[WORDS as usize - 4] = record + 16;
        words[WORDS as usize - 3] = start + 101;
        // The offset of each register.
        let layout = M::interrupted(Some).unwrap();
        let (pc, sp) = (layout.instruction(), layout.stack_pointer());
        let fp = match layout {
            Registers::X86_64 { bp, .. } => bp,
            Registers::Aarch64 { fp, .. } => fp,
        };
        for (offset, value) in [(pc, start + interrupted.0), (sp, interrupted.1), (fp, record)] {
            words[((frame + offset) / 8) as usize] = value;
        }
        let sampled = match sampled_at.checked_sub(RETURN as u64) {
            Some(..=9) => registers(start + sampled_at, STACK + frame, 0),
            _ => registers(start + sampled_at, STACK, STACK + 16),
        };
        let skipped = sampled.stack_pointer() - STACK;
        let copy = bytes(&words);
        let mut frames = Vec::new();
        let end = unwinder.unwind(sampled, stack(&copy[skipped as usize..]), 10, &mut frames);
        (addresses(&frames).iter().map(|address| address - start).collect(), end)
    }

    fn check(unwound: impl Fn(u64, (u64, u64)) -> (Vec<u64>, UnwindEnd), length: u64) {
        let on_this_stack = STACK + 704;
        let handler = 60;
        let whole = unwound(handler, (80, on_this_stack));
        assert_eq!(whole, (vec![handler, 16, 80, 100], UnwindEnd::Root));
        // Before the first instruction, and in the system call.
        for at in [16, 16 + length] {
            let whole = unwound(at, (80, on_this_stack));
            assert_eq!(whole, (vec![at, 80, 100], UnwindEnd::Root));
        }
        let on_another_stack = unwound(handler, (80, 0x9_0000));
        assert_eq!(on_another_stack, (vec![handler, 16, 80], UnwindEnd::Lost));
        let in_no_code = unwound(handler, (1 << 20, on_this_stack));
        assert_eq!(in_no_code, (vec![handler, 16], UnwindEnd::Lost));
    }

    #[test]
    fn a_stack_continues_with_the_interrupted_function_on_x86_64() {
        type Of = UnwinderX86_64<TableBytes>;
        check(|at, interrupted| unwound::<Of>(&X86_64, x86_64, at, interrupted), 9);
    }

    #[test]
    fn a_stack_continues_with_the_interrupted_function_on_aarch64() {
        type Of = UnwinderAarch64<TableBytes>;
        check(|at, interrupted| unwound::<Of>(&AARCH64, aarch64, at, interrupted), 8);
    }
}

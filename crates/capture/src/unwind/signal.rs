//! Signal frames: where the stack continues below a signal handler.
//!
//! The kernel pushes a frame with the interrupted registers and calls the handler so that it returns to two instructions
//! that call `rt_sigreturn`. Their unwind table is an expression that reads memory, which framehop does not evaluate: it
//! would follow the frame pointer instead, which can skip the interrupted function or lead anywhere.

use super::machine::ArchUnwinder;
use crate::sys::Registers;

/// At least the length of those instructions on any architecture.
const LONGEST: usize = 9;

/// The code around an address in which [`return_start`] searches, and how much of it comes before the address.
pub(super) const AROUND: usize = 2 * LONGEST + 1;
pub(super) const BEFORE: u64 = LONGEST as u64;

/// Where in this code the instructions begin that signal handlers return to.
pub(super) fn return_start(code: &[u8], instructions: &[u8]) -> Option<usize> {
    code.windows(instructions.len()).take(LONGEST + 2).position(|code| code == instructions)
}

pub(super) struct Interrupted {
    pub(super) registers: Registers,
    /// The handler had a stack of its own, and the interrupted stack is another one.
    pub(super) is_on_other_stack: bool,
}

impl Interrupted {
    /// Reads the frame of a signal, at the stack pointer that its handler returns with. `None` if it is none.
    pub(super) fn at<M: ArchUnwinder>(
        sp: u64,
        mut word_at: impl FnMut(u64) -> Option<u64>,
    ) -> Option<Self> {
        /// In `struct ucontext`: a pointer that the kernel leaves empty, and the alternate stack.
        const LINK: u64 = 8;
        const STACK: u64 = 16;
        const STACK_BYTES: u64 = 32;
        let mut words = |offset| word_at(sp.checked_add(M::CONTEXT)?.checked_add(offset)?);
        if words(LINK)? != 0 {
            return None;
        }
        let (start, length) = (words(STACK)?, words(STACK_BYTES)?);
        let registers = M::interrupted(&mut words)?;
        let is_in = |sp: u64| sp.checked_sub(start).is_some_and(|offset| offset < length);
        let is_on_other_stack = is_in(sp) && !is_in(registers.sp);
        Some(Self { registers, is_on_other_stack })
    }
}

#[cfg(test)]
mod tests {
    use framehop::aarch64::UnwinderAarch64;
    use framehop::x86_64::UnwinderX86_64;

    use super::super::tables::TableBytes;
    use super::super::unwinder::tests::{addresses, bytes, code, stack};
    use super::super::unwinder::{UnwindEnd, Unwinder};
    use super::*;
    use crate::unwind::listing::ChangedModules;

    /// Code without tables, in which the return of signal handlers is at `RETURN`. A function that saves the frame pointer
    /// begins at 40, and has a call before `AFTER_CALL`.
    const fn code_of(signal_return: &[u8], prologue: &[u8], call: &[u8]) -> Code {
        let mut code = [0x90; 128];
        let parts = [(RETURN, signal_return), (40, prologue), (AFTER_CALL - call.len(), call)];
        let mut part = 0;
        while part < parts.len() {
            let (at, bytes) = parts[part];
            code.split_at_mut(at).1.split_at_mut(bytes.len()).0.copy_from_slice(bytes);
            part += 1;
        }
        Code(code)
    }

    #[repr(align(16))]
    struct Code([u8; 128]);

    const RETURN: usize = 16;
    const AFTER_CALL: usize = 101;

    /// `mov rax, 15; syscall`, `push rbp; mov rbp, rsp` and `call rax`.
    static X86_64: Code =
        code_of(b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05", b"\x55\x48\x89\xe5", b"\xff\xd0");
    /// `mov x8, 139; svc 0`, `stp x29, x30, [sp, -16]!; mov x29, sp` and `blr x8`.
    static AARCH64: Code = code_of(
        b"\x68\x11\x80\xd2\x01\0\0\xd4",
        b"\xfd\x7b\xbf\xa9\xfd\x03\0\x91",
        b"\0\x01\x3f\xd6",
    );

    /// Offsets in the frame of a signal.
    struct Layout {
        link: u64,
        stack: u64,
        stack_bytes: u64,
        pc: u64,
        sp: u64,
        fp: u64,
        privilege: (u64, u64),
        registers: fn(u64, u64, u64) -> Registers,
    }

    const OF_X86_64: Layout = Layout {
        link: 8,
        stack: 16,
        stack_bytes: 32,
        pc: 168,
        sp: 160,
        fp: 120,
        privilege: (184, 0x33),
        registers: |pc, sp, fp| Registers { pc, sp, fp, lr: 0 },
    };

    const OF_AARCH64: Layout = Layout {
        link: 136,
        stack: 144,
        stack_bytes: 160,
        pc: 568,
        sp: 560,
        fp: 544,
        privilege: (576, 0x8000_0000),
        registers: |pc, sp, fp| Registers { pc, sp, fp, lr: 0 },
    };

    /// Where the sampled function's stack begins, and how many words of it are copied.
    const STACK: u64 = 0x7000;
    const WORDS: u64 = 100;
    /// The offset of the signal's frame, right above the handler's own.
    const FRAME: u64 = 32;
    const ON_THIS_STACK: u64 = STACK + 704;

    /// Unwinds a handler with a frame record, of which the return address is that of signal handlers; or its return, if
    /// `sampled_at` says so. Addresses are relative to the code. `changes` are written at offsets in the signal's frame.
    fn unwound<M: ArchUnwinder<Module = framehop::Module<TableBytes>> + Default>(
        program: &'static [u8],
        layout: &Layout,
        sampled_at: u64,
        interrupted_at: u64,
        changes: &[(u64, u64)],
    ) -> (Vec<u64>, UnwindEnd)
    where
        M::Cache: Default,
    {
        let start = program.as_ptr() as u64;
        let mut unwinder = Unwinder::<M>::default();
        unwinder.update(&ChangedModules::of(vec![code(start..start + program.len() as u64)]));
        let mut words = vec![0; WORDS as usize];
        // The handler's frame record, then the interrupted function's.
        let record = STACK + 8 * (WORDS - 4);
        words[2] = record;
        words[3] = start + RETURN as u64;
        words[WORDS as usize - 4] = record + 16;
        words[WORDS as usize - 3] = start + AFTER_CALL as u64;
        let Layout { pc, sp, fp, privilege, .. } = *layout;
        let registers =
            [privilege, (pc, start + interrupted_at), (sp, ON_THIS_STACK), (fp, record)];
        for (offset, value) in registers.into_iter().chain(changes.iter().copied()) {
            words[((FRAME + offset) / 8) as usize] = value;
        }
        let sampled = match sampled_at.checked_sub(RETURN as u64) {
            Some(..=9) => (layout.registers)(start + sampled_at, STACK + FRAME, 0),
            _ => (layout.registers)(start + sampled_at, STACK, STACK + 16),
        };
        let skipped = sampled.sp - STACK;
        let copy = bytes(&words);
        let mut frames = Vec::new();
        let end = unwinder.unwind(sampled, stack(&copy[skipped as usize..]), 10, &mut frames);
        let relative =
            addresses(&frames).iter().map(|address| address.wrapping_sub(start)).collect();
        (relative, end)
    }

    fn check(
        layout: &Layout,
        length: u64,
        unwound: impl Fn(u64, u64, &[(u64, u64)]) -> (Vec<u64>, UnwindEnd),
    ) {
        if cfg!(tracing_profiling_unsupported) {
            // No code can be read.
            return;
        }
        let handler = 60;
        // The zeros above are not the end of a thread's stack.
        let end = UnwindEnd::WithoutTables;
        assert_eq!(unwound(handler, 80, &[]), (vec![handler, 16, 80, 100], end));
        // Before the first instruction, and in the system call.
        for at in [16, 16 + length] {
            assert_eq!(unwound(at, 80, &[]), (vec![16, 80, 100], end));
        }
        // In code of no module, where nothing shows that the frame pointer was saved.
        let far = 1 << 46;
        assert_eq!(unwound(handler, far, &[]), (vec![handler, 16, far], end));
        // The copy ends before the interrupted stack.
        let cut = [(layout.sp, STACK + 8 * WORDS), (layout.fp, STACK + 8 * WORDS + 64)];
        assert_eq!(unwound(handler, 80, &cut), (vec![handler, 16, 80], UnwindEnd::Cut));
        let alternate = [(layout.stack, STACK - 1024), (layout.stack_bytes, 2048)];
        let elsewhere = [&alternate[..], &[(layout.sp, 0x9_0000)]].concat();
        assert_eq!(
            unwound(handler, 80, &elsewhere),
            (vec![handler, 16, 80], UnwindEnd::OtherStack)
        );
        let both_on_it = unwound(handler, 80, &alternate);
        assert_eq!(both_on_it, (vec![handler, 16, 80, 100], end));
        let in_the_kernel = (layout.privilege.0, layout.privilege.1 ^ 3);
        for wrong in [(layout.link, 1), in_the_kernel] {
            let ended = unwound(handler, 80, &[wrong]);
            assert_eq!(ended, (vec![handler, 16], UnwindEnd::Lost), "{wrong:?}");
        }
    }

    #[test]
    fn a_stack_continues_with_the_interrupted_function_on_x86_64() {
        check(&OF_X86_64, 9, |at, interrupted, changes| {
            type Of = UnwinderX86_64<TableBytes>;
            unwound::<Of>(&X86_64.0, &OF_X86_64, at, interrupted, changes)
        });
    }

    #[test]
    fn a_stack_continues_with_the_interrupted_function_on_aarch64() {
        check(&OF_AARCH64, 8, |at, interrupted, changes| {
            type Of = UnwinderAarch64<TableBytes>;
            unwound::<Of>(&AARCH64.0, &OF_AARCH64, at, interrupted, changes)
        });
    }
}

//! Unwinding with framehop.

use framehop::FrameAddress;

use super::blocked::ScannedStack;
use super::machine::ArchUnwinder;
use super::modules::{ModuleAddress, ModuleChange, Modules};
use super::signal::{Interrupted, SignalReturns};
use super::tables::TableBytes;
use crate::sampler::record::Registers;
use crate::sys::{LoadedModule, loaded_modules, module_generation};

/// How the unwinding of a stack ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum UnwindEnd {
    /// At the thread's first function.
    Root,
    /// At the end of the copied bytes, or at the maximum number of frames.
    Cut,
    /// Because unwind tables are missing, or they or the stack are damaged.
    Lost,
}

#[cfg(target_arch = "aarch64")]
type Native = framehop::aarch64::UnwinderAarch64<TableBytes>;
#[cfg(not(target_arch = "aarch64"))]
type Native = framehop::x86_64::UnwinderX86_64<TableBytes>;

/// Unwinds stacks of this process from copies.
pub(crate) struct Unwinder<M: ArchUnwinder = Native> {
    pub(super) machine: M,
    pub(super) cache: M::Cache,
    pub(super) modules: Modules,
    signal_returns: SignalReturns,
    generation: Option<u64>,
}

impl<M: ArchUnwinder> std::fmt::Debug for Unwinder<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unwinder").field("modules", &self.modules).finish_non_exhaustive()
    }
}

impl<M> Default for Unwinder<M>
where
    M: ArchUnwinder<Module = framehop::Module<TableBytes>> + Default,
    M::Cache: Default,
{
    fn default() -> Self {
        Self {
            machine: M::default(),
            cache: M::Cache::default(),
            modules: Modules::default(),
            signal_returns: SignalReturns::default(),
            generation: None,
        }
    }
}

impl<M: ArchUnwinder<Module = framehop::Module<TableBytes>>> Unwinder<M> {
    /// Updates the list of libraries after one was loaded or unloaded; cheap if there was no change.
    pub(crate) fn refresh(&mut self) {
        if self.generation != Some(module_generation()) {
            let list = loaded_modules();
            self.generation = Some(list.generation);
            self.update(&list.modules);
        }
    }

    pub(super) fn update(&mut self, list: &[LoadedModule]) {
        self.signal_returns = SignalReturns::default();
        for change in self.modules.update(list) {
            match change {
                ModuleChange::Added(module) => self.machine.add_module(module),
                ModuleChange::Removed(start) => self.machine.remove_module(start),
            }
        }
    }

    pub(crate) fn modules(&self) -> &Modules {
        &self.modules
    }

    /// Forgets modules that are neither loaded nor in `stacks`, if many are known.
    pub(crate) fn forget_modules<'a>(&mut self, stacks: impl Iterator<Item = &'a [ModuleAddress]>) {
        if self.modules.is_many() {
            self.modules.forget(&stacks.flatten().filter_map(|frame| frame.module()).collect());
        }
    }

    /// The start of the code that signal handlers return to, if an address is in it.
    pub(super) fn signal_return(&self, address: u64) -> Option<u64> {
        self.signal_returns.start(address, M::SIGNAL_RETURN, &self.modules)
    }

    /// Fills `frames` with the stack's frames, the innermost first. `stack` returns the word at an offset in bytes
    /// above the stack pointer.
    pub(crate) fn unwind(
        &mut self,
        registers: Registers,
        stack: impl Fn(u64) -> Option<u64>,
        most_frames: usize,
        frames: &mut Vec<ModuleAddress>,
    ) -> UnwindEnd {
        frames.clear();
        // At once: a vector that grows may stay in the heap of a thread that has ended (docs/design.md).
        frames.reserve(most_frames);
        let Some(mut unwound) = self.machine.registers(registers) else {
            return UnwindEnd::Lost;
        };
        let bottom = registers.stack_pointer();
        let stack = ScannedStack { bottom, word: stack, most_frames };
        let mut running = 0;
        let mut beyond = false;
        let mut read = |address: u64| {
            let word = stack.word_at(address);
            beyond |= word.is_none() && address >= bottom;
            word.ok_or(())
        };
        let mut address = FrameAddress::from_instruction_pointer(registers.instruction());
        let end = loop {
            if frames.len() >= most_frames {
                break UnwindEnd::Cut;
            }
            let (sp, fp) = (M::stack_pointer(&unwound), M::frame_pointer(&unwound));
            if let Some(start) = self.signal_return(address.address()) {
                frames.push(self.modules.frame(start));
                let interrupted = Interrupted::at::<M>(sp, |at| read(at).ok());
                let Some(interrupted) = interrupted else { break UnwindEnd::Lost };
                let Some(registers) = self.machine.registers(interrupted.registers) else {
                    break UnwindEnd::Lost;
                };
                let at = interrupted.registers.instruction();
                (unwound, address) = (registers, FrameAddress::from_instruction_pointer(at));
                running = frames.len();
                if interrupted.is_on_other_stack && running < most_frames {
                    // Only the handler's stack was copied.
                    frames.push(self.modules.frame(at));
                    break UnwindEnd::Lost;
                }
                continue;
            }
            frames.push(self.modules.frame(address.address_for_lookup()));
            let next = self.machine.unwind_frame(address, &mut unwound, &mut self.cache, &mut read);
            let next = next.map(|next| next.and_then(FrameAddress::from_return_address));
            // Checked before an address that is not code is taken for a caller.
            if self.is_wrong(address, next.ok().flatten()) {
                if self.is_start(address, (sp, fp), |at| stack.word_at(at)) {
                    break UnwindEnd::Root;
                }
                if self.is_without_tables(address.address_for_lookup()) {
                    break self.end_in_library((sp, fp), &stack, frames, running);
                }
            }
            match next {
                Ok(Some(next)) => address = next,
                Ok(None) => break UnwindEnd::Root,
                Err(_) => break UnwindEnd::Lost,
            }
        };
        if end == UnwindEnd::Lost && beyond { UnwindEnd::Cut } else { end }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::ops::Range;

    use super::*;
    use crate::sys::CodeSegment;

    type Aarch64 = Unwinder<framehop::aarch64::UnwinderAarch64<TableBytes>>;
    type X86 = Unwinder<framehop::x86_64::UnwinderX86_64<TableBytes>>;

    pub(crate) fn code(addresses: Range<u64>) -> LoadedModule {
        LoadedModule {
            path: "/code".into(),
            bias: 0,
            loaded: vec![addresses.clone()],
            code: vec![CodeSegment { addresses, file_offset: 0 }],
            read_only: Vec::new(),
            eh_frame_hdr: None,
            notes: Vec::new(),
        }
    }

    pub(crate) fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    pub(crate) fn stack(bytes: &[u8]) -> impl Fn(u64) -> Option<u64> {
        |offset| {
            let rest = bytes.get(usize::try_from(offset).ok()?..)?;
            rest.first_chunk().map(|word| u64::from_ne_bytes(*word))
        }
    }

    pub(crate) fn addresses(frames: &[ModuleAddress]) -> Vec<u64> {
        frames.iter().map(|frame| frame.address()).collect()
    }

    /// Two frames linked by frame pointers: zeros at `sp`, and the caller's frame pointer and return address at `fp`.
    const STACK_POINTER: u64 = 0x7000;

    fn two_frames(return_address: u64) -> Vec<u8> {
        bytes(&[0, 0, STACK_POINTER + 0x20, return_address, 0, 0])
    }

    #[test]
    fn unwinds_by_frame_pointers_where_there_are_no_tables() {
        let mut unwinder = X86::default();
        unwinder.update(&[code(0x1000..0x9000)]);
        let registers =
            Registers::X86_64 { ip: 0x2000, sp: STACK_POINTER, bp: STACK_POINTER + 0x10 };
        let mut frames = Vec::new();
        let end = unwinder.unwind(registers, stack(&two_frames(0x3001)), 100, &mut frames);
        assert_eq!(addresses(&frames), [0x2000, 0x3000]);
        assert_eq!(end, UnwindEnd::Root);
    }

    #[test]
    fn strips_the_signature_of_return_addresses_on_aarch64() {
        let mut unwinder = Aarch64::default();
        unwinder.update(&[code(0x1000..0x9000)]);
        let signature = 0x00a5 << 48;
        let registers = Registers::Aarch64 {
            pc: 0x2000,
            sp: STACK_POINTER,
            fp: STACK_POINTER + 0x10,
            lr: signature | 0x4001,
        };
        let mut frames = Vec::new();
        let end =
            unwinder.unwind(registers, stack(&two_frames(signature | 0x3001)), 100, &mut frames);
        assert_eq!(addresses(&frames), [0x2000, 0x3000]);
        assert_eq!(end, UnwindEnd::Root);
    }

    #[test]
    fn registers_of_another_machine_are_refused() {
        let registers = Registers::X86_64 { ip: 1, sp: 2, bp: 3 };
        let mut frames = Vec::new();
        assert_eq!(
            Aarch64::default().unwind(registers, stack(&[]), 100, &mut frames),
            UnwindEnd::Lost
        );
    }

    #[test]
    fn a_stack_longer_than_its_copy_is_cut() {
        let mut unwinder = X86::default();
        unwinder.update(&[code(0x1000..0x9000)]);
        let registers =
            Registers::X86_64 { ip: 0x2000, sp: STACK_POINTER, bp: STACK_POINTER + 0x10 };
        let mut frames = Vec::new();
        let whole = two_frames(0x3001);
        let cut = stack(&whole[..0x18]);
        assert_eq!(unwinder.unwind(registers, cut, 100, &mut frames), UnwindEnd::Cut);
        assert_eq!(addresses(&frames), [0x2000]);
        let most = 1;
        assert_eq!(unwinder.unwind(registers, stack(&whole), most, &mut frames), UnwindEnd::Cut);
        assert_eq!(frames.len(), 1);
    }

    #[test]
    fn arbitrary_input_does_not_panic() {
        let mut unwinder = Unwinder::<Native>::default();
        unwinder.refresh();
        let mut frames = Vec::new();
        let mut random = 0x1234_5678_9abc_def0_u64;
        let mut next = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            random
        };
        let here = arbitrary_input_does_not_panic as *const () as u64;
        for _ in 0..2_000 {
            let near = |x: u64| here.wrapping_add(x % 100_000).wrapping_sub(50_000);
            let (ip, sp) = (near(next()), next());
            let bp = sp.wrapping_add(next() % 64);
            let (fp, lr) = (bp, near(next()));
            let registers = if cfg!(target_arch = "aarch64") {
                Registers::Aarch64 { pc: ip, sp, fp, lr }
            } else {
                Registers::X86_64 { ip, sp, bp }
            };
            let words: Vec<u64> = (0..next() % 64).map(|_| near(next())).collect();
            unwinder.unwind(registers, stack(&bytes(&words)), 100, &mut frames);
            assert!(frames.len() <= 100);
        }
    }
}

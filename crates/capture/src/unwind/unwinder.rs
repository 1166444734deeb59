//! Unwinding with framehop.
//!
//! Where tables are missing, framehop follows the first word of the stack or the frame pointer, which shows data as
//! callers. So each caller is checked: executable memory, right after a call. Otherwise the stack ends there and says
//! why.

use std::ops::Range;

use framehop::FrameAddress;

use super::blocked::{CallMatch, ScannedStack, Stop};
use super::calls::{CallTarget, LONGEST};
use super::listing::{ChangedModules, ModuleListing};
use super::machine::ArchUnwinder;
use super::modules::{ModuleAddress, ModuleChange, Modules};
use super::places::{BeforeNext, CodePlace, Places};
use super::rules::{self, FrameRule};
use super::signal;
use super::tables::TableBytes;
use crate::sys::{ANY_STACK, MAX_STACK_COPIED, Registers, module_loads, read_own_memory};

/// How the unwinding of a stack ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum UnwindEnd {
    /// At the thread's first function.
    #[default]
    Root,
    /// At the end of the copied bytes, or at the maximum number of frames.
    Cut,
    /// In code without unwind tables.
    WithoutTables,
    /// The callers are on another stack than the one that was copied.
    OtherStack,
    /// The next word is on the same stack, but further away than can be copied.
    TooFar,
    /// Because unwind tables or the stack are damaged.
    Lost,
}

impl UnwindEnd {
    /// Whether the stack goes on where nothing was copied.
    pub fn is_cut(self) -> bool {
        matches!(self, Self::Cut | Self::TooFar | Self::OtherStack)
    }
}

#[cfg(target_arch = "aarch64")]
type Native = framehop::aarch64::UnwinderAarch64<TableBytes>;
#[cfg(not(target_arch = "aarch64"))]
type Native = framehop::x86_64::UnwinderX86_64<TableBytes>;

/// Unwinds stacks of this process from copies.
#[allow(missing_debug_implementations, reason = "the caches of framehop have none")]
pub struct Unwinder<M: ArchUnwinder = Native> {
    pub(super) machine: M,
    pub(super) cache: M::Cache,
    pub(super) modules: Modules,
    pub(super) places: Places,
    context: gimli::UnwindContext<usize>,
    listing: ModuleListing,
    /// Some samples of this reading are left to be read next time.
    pub(crate) has_left: bool,
    /// The own stack of the thread that is unwound next, if it is known.
    pub own_stack: Range<u64>,
}

/// A library can be loaded or unloaded while the list is read.
const MAX_TRIES: usize = 3;

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
            places: Places::default(),
            context: gimli::UnwindContext::new(),
            listing: ModuleListing::new(module_loads()),
            has_left: false,
            own_stack: ANY_STACK,
        }
    }
}

impl<M: ArchUnwinder<Module = framehop::Module<TableBytes>>> Unwinder<M> {
    /// Updates the list of libraries after one was loaded or unloaded; cheap if there was no change.
    pub fn refresh(&mut self) {
        self.places.forget_changing();
        for _ in 0..MAX_TRIES {
            let Some(changed) = self.listing.read() else { return };
            self.update(&changed);
            // What was only loaded is listed next time.
            if !self.listing.has_unloaded() {
                return self.modules.confirm(!self.listing.is_outdated());
            }
        }
        self.modules.contest_uncertain();
    }

    /// Whether a library was loaded or unloaded since the list was updated.
    pub fn is_outdated(&self) -> bool {
        self.listing.is_outdated()
    }

    pub fn begin_reading(&mut self) {
        self.has_left = false;
        self.listing.begin_reading(module_loads());
        self.modules.begin_reading();
    }

    /// Ends the reading: samples that are read from now on were taken after it began, unless some were left.
    pub fn end_reading(&mut self) {
        if self.has_left {
            return;
        }
        self.listing.end_reading();
        if self.modules.end_reading() {
            self.places = Places::default();
        }
    }

    pub(super) fn update(&mut self, changed: &ChangedModules) {
        self.places = Places::default();
        for change in self.modules.update(changed) {
            match change {
                ModuleChange::Added(module) => self.machine.add_module(module),
                ModuleChange::Removed(start) => self.machine.remove_module(start),
            }
        }
    }

    pub fn modules(&self) -> &Modules {
        &self.modules
    }

    /// The start of the code that signal handlers return to, if an address is in it.
    pub(super) fn signal_return(&self, address: u64) -> Option<u64> {
        let from = address.checked_sub(signal::BEFORE)?;
        let code = self.code_within::<{ signal::AROUND }>(from, address)?;
        let start = from + signal::return_start(&code, M::SIGNAL_RETURN)? as u64;
        (start <= address).then_some(start)
    }

    /// Like [`signal_return`](Self::signal_return), for the address, or the one right after, of a place.
    pub(super) fn signal_return_at(&self, place: CodePlace, address: u64) -> Option<u64> {
        if place.may_be_signal_return { self.signal_return(address) } else { None }
    }

    pub(super) fn place(&mut self, address: u64) -> CodePlace {
        if let Some(place) = self.places.get(address) {
            return place;
        }
        let mut place = CodePlace::new(address);
        if self.modules.is_contested(address) {
            return place;
        }
        if self.modules.is_code(address) {
            place.is_in_module = true;
            let row = self.modules.with_row(address, &mut self.context, |row, _| M::rule(row));
            place.rule = row.unwrap_or(FrameRule::Missing);
        }
        // In a module, or generated code.
        let is_code = place.is_in_module || self.places.mappings.find(address).is_some();
        if !is_code {
            return place;
        }
        if let Some(from) = address.checked_sub(signal::BEFORE) {
            match self.code_within::<{ signal::AROUND }>(from, address) {
                Some(code) => {
                    let starts = signal::return_start(&code, M::SIGNAL_RETURN);
                    place.may_be_signal_return = starts.is_some();
                    if self.has_call_before(address + 1) {
                        place.before_next = BeforeNext::Call;
                    }
                }
                None => place.before_next = BeforeNext::Unreadable,
            }
        }
        self.places.insert(place);
        place
    }

    fn has_call_before(&self, return_address: u64) -> bool {
        self.calls_before(return_address).into_iter().flatten().any(|target| match target {
            CallTarget::Address(address) => self.is_code(address),
            CallTarget::Stored(_) | CallTarget::Unknown => true,
        })
    }

    /// The targets of the calls that the code before an address may end with.
    pub(super) fn calls_before(&self, return_address: u64) -> [Option<CallTarget>; 3] {
        let start = return_address.checked_sub(LONGEST as u64);
        let code = start.and_then(|start| self.code_within(start, return_address.wrapping_sub(1)));
        code.map_or([None; 3], |code| M::calls(code, return_address))
    }

    /// Whether a thread that continues at an address is in a system call, or no code can be read there.
    pub fn is_in_system_call(&self, address: u64) -> bool {
        let length = M::ALIGNMENT.max(2);
        let before = address.wrapping_sub(length);
        let code = self.code_within::<4>(before, address.wrapping_sub(1));
        // The code that signal handlers return to ends with one.
        let call = M::SIGNAL_RETURN.rchunks(length as usize).next();
        code.zip(call).is_none_or(|(code, call)| code.starts_with(call))
    }

    pub(super) fn is_code(&self, address: u64) -> bool {
        self.modules.is_code(address) || self.generated_code(address).is_some()
    }

    /// The mapping of code in no module, if it is known already.
    fn generated_code(&self, address: u64) -> Option<Range<u64>> {
        self.places.mappings.get(address).filter(|_| !self.modules.is_contested(address))
    }

    /// The code from an address on, zeros beyond its mapping.
    pub(super) fn code_at<const LENGTH: usize>(&self, address: u64) -> Option<[u8; LENGTH]> {
        self.code_within(address, address)
    }

    /// The code from an address on, zeros outside of the mapping that contains `inside`.
    pub(super) fn code_within<const LENGTH: usize>(
        &self,
        from: u64,
        inside: u64,
    ) -> Option<[u8; LENGTH]> {
        let of_module = self.modules.segment(inside);
        let mapping = of_module.clone().or_else(|| self.generated_code(inside))?;
        let start = from.max(mapping.start);
        let addresses = start..from.checked_add(LENGTH as u64)?.min(mapping.end);
        let bytes = match of_module {
            Some(_) => self.modules.bytes(addresses)?,
            None => read_own_memory(addresses).ok()?.into(),
        };
        let mut code = [0; LENGTH];
        let place = code.get_mut(usize::try_from(start - from).ok()?..)?;
        place.get_mut(..bytes.len())?.copy_from_slice(&bytes);
        Some(code)
    }

    /// Unwinds a frame: the caller is code after a call. Otherwise, how the stack ends.
    pub(super) fn caller(
        &mut self,
        frame: FrameAddress,
        place: CodePlace,
        registers: &mut M::UnwindRegs,
        read: &mut impl FnMut(u64) -> Result<u64, ()>,
    ) -> Result<FrameAddress, UnwindEnd> {
        if self.modules.is_contested(frame.address_for_lookup()) {
            return Err(UnwindEnd::Lost);
        }
        let return_address = match place.rule {
            FrameRule::First => return Err(UnwindEnd::Root),
            FrameRule::Simple => {
                let next = self.machine.unwind_frame(frame, registers, &mut self.cache, read);
                match next {
                    Ok(Some(next)) => next,
                    Ok(None) if M::ENDS_BY_ZERO => return Err(UnwindEnd::Root),
                    // A zero is not the address of a caller.
                    Ok(None) | Err(_) => return Err(UnwindEnd::Lost),
                }
            }
            FrameRule::Complex | FrameRule::Computed => {
                self.follow(frame, registers, read).ok_or(UnwindEnd::Lost)?
            }
            FrameRule::Missing => self.caller_without_tables(frame, registers, read)?,
        };
        let next = FrameAddress::from_return_address(return_address).ok_or(UnwindEnd::Lost)?;
        match self.place(next.address_for_lookup()).before_next {
            BeforeNext::Call => Ok(next),
            // By the tables.
            BeforeNext::Unreadable if place.rule != FrameRule::Missing => Ok(next),
            // The kernel calls any handler.
            _ if self.signal_return(return_address) == Some(return_address) => Ok(next),
            _ if place.rule == FrameRule::Missing => Err(UnwindEnd::WithoutTables),
            _ => Err(UnwindEnd::Lost),
        }
    }

    /// By a row that framehop does not follow.
    fn follow(
        &mut self,
        frame: FrameAddress,
        registers: &mut M::UnwindRegs,
        read: &mut impl FnMut(u64) -> Result<u64, ()>,
    ) -> Option<u64> {
        let (sp, fp) = (M::stack_pointer(registers), M::frame_pointer(registers));
        let known = Registers { pc: frame.address(), sp, fp, lr: 0 };
        let address = frame.address_for_lookup();
        let mut word_at = |at| read(at).ok();
        let caller = self.modules.with_row(address, &mut self.context, |row, section| {
            rules::follow(row, section, known, &mut word_at)
        });
        let caller = caller?.filter(|caller| caller.sp > sp)?;
        *registers = M::few_registers(caller.pc, caller.sp, caller.fp);
        Some(caller.pc)
    }

    /// How a stack ends at a frame that cannot be unwound.
    pub(super) fn end_at(&mut self, frame: FrameAddress) -> UnwindEnd {
        match self.place(frame.address_for_lookup()).rule {
            FrameRule::Missing => UnwindEnd::WithoutTables,
            _ => UnwindEnd::Lost,
        }
    }

    /// Whether this word is the return address of a running function without tables: at its first instruction or return.
    pub(super) fn is_innermost_return(
        &mut self,
        frame: FrameAddress,
        word: u64,
        is_on_stack: bool,
    ) -> bool {
        let Some(before) = word.checked_sub(1) else { return false };
        let address = frame.address_for_lookup();
        let returns = |unwinder: &Self| unwinder.code_at(address).is_some_and(M::returns);
        let was_called =
            |unwinder: &Self| unwinder.call_before(word, Some(address)) == Some(CallMatch::Exact);
        self.place(before).before_next == BeforeNext::Call
            && (returns(self)
                || was_called(self)
                || self.returns_from_library(frame, word, is_on_stack))
    }

    /// Like [`unwind`](Self::unwind), for a stack that was copied after that number of unloads.
    pub fn unwind_copied(
        &mut self,
        unloads: u64,
        registers: Registers,
        stack: impl Fn(u64) -> Option<u64>,
        most_frames: usize,
        frames: &mut Vec<ModuleAddress>,
    ) -> UnwindEnd {
        let set = |unwinder: &mut Self, unloads| {
            if unwinder.modules.set_copied_after(unloads) {
                unwinder.places.forget_known();
            }
        };
        set(self, Some(unloads));
        let end = self.unwind(registers, stack, most_frames, frames);
        set(self, None);
        end
    }

    /// Fills `frames`, the innermost first. `stack` returns the word at an offset in bytes above the stack pointer.
    pub fn unwind(
        &mut self,
        registers: Registers,
        stack: impl Fn(u64) -> Option<u64>,
        most_frames: usize,
        frames: &mut Vec<ModuleAddress>,
    ) -> UnwindEnd {
        frames.clear();
        // At once: a vector that grows may stay in the heap of a thread that has ended.
        frames.reserve(most_frames);
        let Registers { pc, sp: bottom, .. } = registers;
        let stack = ScannedStack { bottom, word: stack, most_frames };
        let is_on_own = self.own_stack.contains(&bottom);
        let address = FrameAddress::from_instruction_pointer(pc);
        let place = self.place(pc);
        let start = self.signal_return_at(place, pc);
        frames.push(self.modules.frame(start.unwrap_or(pc)));
        let end = if stack.word_at(bottom).is_some() {
            let (first, mut interrupted) = ((address, M::registers(registers)), 0);
            match self.walk_on(first, &stack, frames, None, &mut interrupted) {
                Stop::At(end) | Stop::BelowHandler(end) => end,
                Stop::InLibrary(sp, fp) => {
                    self.end_in_library((sp, fp), &stack, frames, interrupted)
                }
                Stop::Needs(..) => UnwindEnd::Lost,
            }
        } else {
            UnwindEnd::Lost
        };
        self.own_stack = ANY_STACK;
        match end {
            // What is not the thread's own ends where its callers are elsewhere.
            UnwindEnd::Root | UnwindEnd::Lost if !is_on_own => UnwindEnd::OtherStack,
            end => end,
        }
    }
}

/// How a stack ends of which the word at an address was not copied, or is none of a stack.
pub(super) fn end_beyond(own_stack: &Range<u64>, bottom: u64, at: u64) -> UnwindEnd {
    let is_same = own_stack.contains(&at) == own_stack.contains(&bottom);
    match at.checked_sub(bottom) {
        Some(distance) if is_same && distance < u64::from(MAX_STACK_COPIED) => UnwindEnd::Cut,
        None if is_same => UnwindEnd::Lost,
        _ if read_own_memory(at..at.saturating_add(1)).is_err() => UnwindEnd::Lost,
        _ if is_same => UnwindEnd::TooFar,
        _ => UnwindEnd::OtherStack,
    }
}

#[cfg(test)]
pub(super) mod tests;

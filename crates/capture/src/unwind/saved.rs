//! Callers in code without unwind tables: by the frame pointer, where a saved pair of it and a return address is proved.
//!
//! Compilers put code behind a function's first return, and cheap paths before its prologue. So where a function begins is
//! known from the calls whose return addresses are on the stack: the code from the target of such a call on is its function, as
//! long as it has at most one prologue.

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use framehop::FrameAddress;

use super::blocked::{CallMatch, stored};
use super::calls::{CallTarget, LONGEST_SAVING, STUB, SavedFrame};
use super::machine::ArchUnwinder;
use super::places::{BeforeNext, MAX_JUMPS, MAX_SAVED, SavedFrames, keep};
use super::rules::FrameRule;
use super::tables::TableBytes;
use super::unwinder::{UnwindEnd, Unwinder};
use crate::sys::read_own_memory;

/// The most frames above one that are unwound to prove it.
const PROOFS: usize = 16;

/// A function's jumps to others are searched within this many bytes, and theirs.
const SEARCHED: usize = 1024;
const CHAINED: usize = 16;

type ReadWord<'a> = &'a mut dyn FnMut(u64) -> Result<u64, ()>;

/// A caller: its return address, stack pointer and frame pointer.
type SavedCaller = (u64, u64, u64);

impl<M: ArchUnwinder<Module = framehop::Module<TableBytes>>> Unwinder<M> {
    /// The start of the function that contains an address: by the tables, or by where its code saves the frame pointer.
    pub(super) fn function_start(&mut self, address: u64) -> Option<u64> {
        let by_tables = self.modules.function_start(address);
        by_tables.or_else(|| Some(self.saving_function(address)?.0))
    }

    /// How the code between these addresses sets up frames, if it is in one mapping without tables.
    fn saved_frames(&mut self, code: Range<u64>) -> Option<SavedFrames> {
        // A return address less one is inside of an instruction.
        let code = code.start..code.end & !(M::ALIGNMENT - 1);
        if let Some(known) = self.places.saved.get(&code) {
            return Some(*known);
        }
        if self.modules.is_contested(code.end) {
            return None;
        }
        let of_module = self.modules.segment(code.end);
        let mapping = of_module.clone().or_else(|| self.places.mappings.find(code.end))?;
        let read = mapping.start.max(code.start)..code.end;
        let bytes = match of_module {
            Some(_) => self.modules.bytes(read)?,
            None => read_own_memory(read).ok()?.into(),
        };
        let saved = M::saved_frames(&bytes);
        keep(&mut self.places.saved, MAX_SAVED, code, saved);
        Some(saved)
    }

    /// The start and the frame of the function without tables that has the nearest prologue before an address.
    fn saving_function(&mut self, address: u64) -> Option<(u64, SavedFrame)> {
        let from = address.saturating_sub(LONGEST_SAVING);
        let frame = self
            .saved_frames(from..address)?
            .1
            .filter(|frame| M::CALLS_PUSH || !frame.has_ended)?;
        let start = (address & !(M::ALIGNMENT - 1)).checked_sub(frame.begins_before as u64)?;
        // Otherwise it is another function, with tables.
        self.modules.function_start(start).is_none().then_some((start, frame))
    }

    /// The frame of the function that begins at `start`, if an address is in it and behind its prologue.
    fn frame_within(&mut self, start: u64, address: u64) -> Option<SavedFrame> {
        let (number, frame) = self.frames_from(start, address)?;
        frame.filter(|frame| number == 1 && (M::CALLS_PUSH || !frame.has_ended))
    }

    /// Whether an address is in the function that begins at `start`, before its prologue.
    fn is_before_prologue(&mut self, start: u64, address: u64) -> bool {
        start == address || self.frames_from(start, address).is_some_and(|(number, _)| number == 0)
    }

    fn frames_from(&mut self, start: u64, address: u64) -> Option<SavedFrames> {
        let distance = address.checked_sub(start)?;
        let is_near = (1..LONGEST_SAVING).contains(&distance);
        // Otherwise it is another function, with tables.
        let is_without_tables =
            is_near && self.is_code(start) && self.modules.function_start(start).is_none();
        if is_without_tables { self.saved_frames(start..address) } else { None }
    }

    /// Without tables, the caller is known where a function was just called, returns, or has saved the frame pointer.
    pub(super) fn caller_without_tables(
        &mut self,
        frame: FrameAddress,
        registers: &mut M::UnwindRegs,
        read: &mut impl FnMut(u64) -> Result<u64, ()>,
    ) -> Result<u64, UnwindEnd> {
        let (sp, fp) = (M::stack_pointer(registers), M::frame_pointer(registers));
        let mut own_return = None;
        if !frame.is_return_address()
            && let Some((word, callers_sp)) = M::innermost_return(registers, |at| read(at).ok())
        {
            if self.is_innermost_return(frame, word, callers_sp != sp) {
                *registers = M::few_registers(word, callers_sp, fp);
                return Ok(word);
            }
            // It may have pushed the frame pointer already.
            own_return = match callers_sp.checked_add(8) {
                Some(above) if word == fp => read(callers_sp).ok().map(|word| (word, above)),
                _ => Some((word, callers_sp)).filter(|_| M::CALLS_PUSH),
            };
        }
        let caller = match self.saved_caller(frame, (sp, fp), own_return, read, PROOFS) {
            Ok(caller) => caller,
            Err(UnwindEnd::WithoutTables) => {
                return self.started_by(registers, read).ok_or(UnwindEnd::WithoutTables);
            }
            Err(end) => return Err(end),
        };
        *registers = M::few_registers(caller.0, caller.1, caller.2);
        Ok(caller.0)
    }

    /// The return address of a small function that the C library calls first, such as the `main` that rustc makes, which has
    /// no tables with `panic = "abort"`: from there, tables lead to the thread's first function at once.
    fn started_by(
        &mut self,
        registers: &mut M::UnwindRegs,
        read: &mut impl FnMut(u64) -> Result<u64, ()>,
    ) -> Option<u64> {
        const MAX_PUSHED: u64 = 2;
        const MAX_CALLERS: usize = 4;
        let (sp, fp) = (M::stack_pointer(registers), M::frame_pointer(registers));
        (sp..=sp.saturating_add(8 * MAX_PUSHED)).step_by(8).find_map(|at| {
            let word = M::unsigned(read(at).ok()?);
            let mut frame = FrameAddress::from_return_address(word)?;
            let above = at.checked_add(8)?;
            let mut found = M::few_registers(word, above, fp);
            for _ in 0..MAX_CALLERS {
                let place = self.place(frame.address_for_lookup());
                if place.before_next != BeforeNext::Call || place.rule == FrameRule::Missing {
                    break;
                }
                match self.caller(frame, place, &mut found, read) {
                    Ok(caller) => frame = caller,
                    Err(UnwindEnd::Root) => {
                        *registers = M::few_registers(word, above, fp);
                        return Some(word);
                    }
                    Err(_) => break,
                }
            }
            None
        })
    }

    /// The caller by the frame pointer: that of this function, or of its caller if this one has none yet. `own_return` is
    /// then what can be its return address, with the stack pointer above it.
    fn saved_caller(
        &mut self,
        frame: FrameAddress,
        (sp, fp): (u64, u64),
        own_return: Option<(u64, u64)>,
        read: ReadWord<'_>,
        proofs: usize,
    ) -> Result<SavedCaller, UnwindEnd> {
        /// No frame is larger.
        const LARGEST: u64 = 16 << 20;
        let address = frame.address_for_lookup();
        let has_returned = frame.is_return_address();
        let nearest = self.saving_function(address);
        if nearest.is_none() && own_return.is_none() {
            return Err(UnwindEnd::WithoutTables);
        }
        let word = fp.checked_add(8).and_then(|at| read(at).ok());
        if fp.checked_sub(sp).is_none_or(|size| size >= LARGEST) || fp % 8 != 0 {
            return Err(UnwindEnd::WithoutTables);
        }
        let return_address = M::unsigned(word.ok_or(UnwindEnd::Cut)?);
        let callers_fp = read(fp).map_err(|()| UnwindEnd::Cut)?;
        let caller =
            |frame: SavedFrame| (return_address, fp.wrapping_add(frame.caller_above), callers_fp);
        let calls = self.calls_of(return_address);
        let own_return = own_return.map(|(word, sp)| (word, sp, self.calls_of(word)));
        let size = fp - sp;
        let is_framed = nearest.is_some_and(|(_, frame)| frame.fills(sp, fp));
        for target in calls.iter().filter_map(|call| call.address()) {
            // It is this function or its caller, or jumped to it.
            let callers =
                own_return.as_ref().and_then(|own| self.saving_function(own.0.wrapping_sub(1)));
            let by_jump = [nearest, callers].map(|function| {
                let start = function?.0;
                let leads = self.leads_before(CallTarget::Address(target), start);
                (start != target && leads).then_some(start)
            });
            let starts = || std::iter::once(target).chain(by_jump.into_iter().flatten());
            let found =
                starts().find_map(|start| Some((start, self.frame_within(start, address)?)));
            if let Some((start, frame)) = found {
                let words = self.returns_below((sp, fp), frame, has_returned, read);
                let is_deeper = words.iter().any(|calls| self.lead_into(calls, start..=address))
                    || own_return.as_ref().is_some_and(|own| self.lead_to_leaf(&own.2, address));
                if !is_deeper {
                    return Ok(caller(frame));
                }
            }
            // A function that has no frame, called by that one.
            if let Some((word, callers_sp, calls)) = &own_return
                && !is_framed
                && starts().any(|start| {
                    let frame = self.frame_within(start, *word);
                    frame.is_some_and(|frame| frame.fills(*callers_sp, fp))
                })
                && match found {
                    Some(_) => calls.iter().any(|call| self.leads_before(*call, address)),
                    None => self.lead_to_leaf(calls, address),
                }
            {
                return Ok((*word, *callers_sp, fp));
            }
            if found.is_some() {
                return Err(UnwindEnd::WithoutTables);
            }
        }
        if !calls.contains(&CallTarget::Unknown) {
            return Err(UnwindEnd::WithoutTables);
        }
        // What was called is not known: the frame must have the size that the prologue says.
        if let Some((word, callers_sp, calls)) = own_return
            && !is_framed
            && let Some((start, frame)) = self.saving_function(word.wrapping_sub(1))
            && frame.fills(callers_sp, fp)
            && (calls.iter().any(|call| self.leads_before(*call, address))
                || calls.contains(&CallTarget::Unknown)
                    && nearest.is_none_or(|(nearest, _)| nearest != start))
            && self.proves(caller(frame), read, proofs)
        {
            return Ok((word, callers_sp, fp));
        }
        let Some((start, saved)) = nearest else { return Err(UnwindEnd::WithoutTables) };
        let words = self.returns_below((sp, fp), saved, has_returned, read);
        if words.iter().any(|calls| self.lead_into(calls, start..=address)) {
            return Err(UnwindEnd::WithoutTables);
        }
        let fits = size.checked_sub(saved.local).is_some_and(|saved| saved <= 48);
        if saved.has_ended && !(fits && self.proves(caller(saved), read, proofs)) {
            return Err(UnwindEnd::WithoutTables);
        }
        Ok(caller(saved))
    }

    /// The targets of the call before an address, with those that the linkage table has for them.
    fn calls_of(&mut self, word: u64) -> Vec<CallTarget> {
        let Some(place) = word.checked_sub(1).map(|before| self.place(before)) else {
            return Vec::new();
        };
        if self.signal_return_at(place, word) == Some(word) {
            // The kernel calls any handler.
            return vec![CallTarget::Unknown];
        }
        if place.before_next != BeforeNext::Call {
            return Vec::new();
        }
        let mut found = Vec::new();
        for target in self.calls_before(word).into_iter().flatten() {
            let target = match target {
                CallTarget::Stored(at) => {
                    stored(at).map_or(CallTarget::Unknown, CallTarget::Address)
                }
                target => target,
            };
            found.push(target);
            if let CallTarget::Address(stub) = target
                && let Some(code) = self.code_at::<STUB>(stub)
                && let Some(CallTarget::Stored(at)) = M::jumps(&code[..16], stub).next()
            {
                found.extend(stored(at).map(CallTarget::Address));
            }
        }
        found.retain(|target| target.address().is_none_or(|address| self.is_code(address)));
        found
    }

    /// Where a function's jumps lead, also through the jumps of others: a function may end with a jump to another.
    fn jumps(&mut self, function: u64) -> Arc<[u64]> {
        if let Some(known) = self.places.jumps.get(&function) {
            return Arc::clone(known);
        }
        let (mut searched, mut found) = (vec![function], BTreeSet::new());
        let mut next = 0;
        while let Some(from) = searched.get(next).copied().filter(|_| next < CHAINED) {
            next += 1;
            let code = self.code_at::<SEARCHED>(from).unwrap_or([0; SEARCHED]);
            for to in M::jumps(&code, from).filter_map(CallTarget::address) {
                if found.insert(to) && self.is_code(to) {
                    let is_known = |from: &u64| to.wrapping_sub(*from) < SEARCHED as u64 / 2;
                    if !searched.iter().any(is_known) {
                        searched.push(to);
                    }
                }
            }
        }
        let found: Arc<[u64]> = found.into_iter().collect();
        keep(&mut self.places.jumps, MAX_JUMPS, function, Arc::clone(&found));
        found
    }

    /// Whether a call leads to an address before the prologue of the function called, or of one that it jumps to.
    fn leads_before(&mut self, call: CallTarget, address: u64) -> bool {
        let Some(target) = call.address() else { return false };
        // What is farther has as many prologues behind it, or more.
        let nearest = self.jumps(target).iter().copied().rfind(|to| *to <= address);
        [Some(target), nearest]
            .into_iter()
            .flatten()
            .any(|start| self.is_before_prologue(start, address))
    }

    /// Whether any call [leads before](Self::leads_before) a prologue, or calls or jumps to an unknown address.
    fn lead_to_leaf(&mut self, calls: &[CallTarget], address: u64) -> bool {
        calls.iter().any(|call| {
            let is_unknown = call.address().is_none_or(|target| {
                let code = self.code_at::<128>(target);
                code.is_some_and(|code| M::jumps(&code, target).any(|to| to == CallTarget::Unknown))
            });
            is_unknown || self.leads_before(*call, address)
        })
    }

    /// Whether one of these calls may lead into these addresses.
    fn lead_into(&mut self, calls: &[CallTarget], addresses: RangeInclusive<u64>) -> bool {
        calls.iter().any(|call| {
            call.address().is_none_or(|target| {
                addresses.contains(&target)
                    || self.jumps(target).iter().any(|to| addresses.contains(to))
            })
        })
    }

    /// The calls of the words that may be return addresses, below what a function's frame has for itself. Where the frame is
    /// whole, those that a function called by it has pushed.
    fn returns_below(
        &mut self,
        (sp, fp): (u64, u64),
        frame: SavedFrame,
        has_returned: bool,
        read: ReadWord<'_>,
    ) -> Vec<Vec<CallTarget>> {
        let end = match frame.fills(sp, fp) {
            true if has_returned => sp,
            true => sp.saturating_add(16),
            false => fp.saturating_sub(frame.local).max(sp.saturating_add(8)),
        };
        let words = (sp..end.min(fp)).step_by(8).map_while(|at| read(at).ok());
        words.map(|word| self.calls_of(word)).filter(|calls| !calls.is_empty()).collect()
    }

    /// Whether the stack above a caller shows that it is one.
    fn proves(
        &mut self,
        (return_address, sp, fp): SavedCaller,
        read: ReadWord<'_>,
        proofs: usize,
    ) -> bool {
        let (Some(proofs), Some(frame)) =
            (proofs.checked_sub(1), FrameAddress::from_return_address(return_address))
        else {
            return false;
        };
        let place = self.place(frame.address_for_lookup());
        if place.rule == FrameRule::Missing {
            return self.saved_caller(frame, (sp, fp), None, read, proofs).is_ok();
        }
        let mut registers = M::few_registers(return_address, sp, fp);
        let function = self.function_start(frame.address_for_lookup());
        let next = self.caller(frame, place, &mut registers, &mut |at| read(at));
        next.is_ok_and(|next| {
            matches!(
                self.call_before(next.address(), function),
                Some(CallMatch::Exact | CallMatch::Unknown)
            )
        })
    }
}

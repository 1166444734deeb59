//! A C library without unwind tables: where stacks end in it, and who called it.

use framehop::FrameAddress;

use super::blocked::{FrameToUnwind, ScannedStack, Stop, UNKNOWN, stored};
use super::calls::{CallTarget, LONGEST};
use super::machine::ArchUnwinder;
use super::modules::ModuleAddress;
use super::tables::TableBytes;
use super::unwinder::{UnwindEnd, Unwinder};

/// musl is built without tables: nothing marks those of its functions that call `main` and the first function
/// of a thread as the end of the stack, and its other functions do not tell where their caller is.
const IS_WITHOUT_TABLES: bool = cfg!(target_env = "musl");

/// How far above one of its functions the caller would be found: `qsort` can take three kilobytes.
const FAR_WORDS: u64 = 512;

/// What lies above the function that calls the first one of a thread, and is of musl alone.
const START_WORDS: u64 = 32;

/// How far above the stack pointer of a function that is running the caller is searched. Further up lie the
/// arrays of large functions, and in them what other calls left behind.
const NEAR_WORDS: u64 = 64;

impl<M: ArchUnwinder<Module = framehop::Module<TableBytes>>> Unwinder<M> {
    /// Whether what a frame was unwound to is no caller.
    pub(super) fn is_wrong(&self, frame: FrameAddress, caller: Option<FrameAddress>) -> bool {
        // Of a function without tables framehop takes the first word of the stack, or the link register.
        let is_guessed =
            || !frame.is_return_address() && self.is_without_tables(frame.address_for_lookup());
        let is_caller = |caller: FrameAddress| {
            self.modules.is_code(caller.address_for_lookup())
                && (!is_guessed() || self.is_return_address(caller.address()))
        };
        IS_WITHOUT_TABLES && !caller.is_some_and(is_caller)
    }

    /// Whether a frame that cannot be unwound is the C library's function below the first of the thread: one
    /// that nothing above it has called.
    pub(super) fn is_start(
        &self,
        frame: FrameAddress,
        (sp, fp): (u64, u64),
        word_at: impl Fn(u64) -> Option<u64>,
    ) -> bool {
        // A thread begins with a frame pointer of zero, right above its first frames are what it was given
        // and its thread-locals, and behind these can be what is another's.
        let length = if fp == 0 { START_WORDS } else { FAR_WORDS };
        // The library's record of the thread, which begins with a pointer to itself, ends the stack.
        let mut words = (0..length).map_while(|word| {
            let at = sp.checked_add(8 * word)?;
            word_at(at).filter(|word| *word != at)
        });
        frame.is_return_address()
            && self.is_without_tables(frame.address_for_lookup())
            && !words.any(|word| self.is_return_address(word))
    }

    /// Goes on behind a function of the C library that is running: with the nearest word that is the return
    /// address of a call into the library, and is proven by the stack above it.
    fn past_library(
        &mut self,
        sp: u64,
        fp: u64,
        stack: &ScannedStack<impl Fn(u64) -> Option<u64>>,
        frames: &mut Vec<ModuleAddress>,
    ) -> Option<UnwindEnd> {
        let known = frames.len();
        for word in 0..NEAR_WORDS {
            let at = sp.checked_add(8 * word)?;
            let return_address = stack.word_at(at)?;
            if !self.is_return_address(return_address) || !self.calls_library(return_address) {
                continue;
            }
            let address = FrameAddress::from_return_address(return_address)?;
            let place = FrameToUnwind { address, sp: at + 8 };
            // The library can have used the frame pointer for something else.
            for fp in [fp, UNKNOWN] {
                frames.truncate(known);
                frames.push(self.modules.frame(address.address_for_lookup()));
                let mut elsewhere = 0;
                let end = match self.walk(place, fp, stack, frames, Some(&mut elsewhere)) {
                    Stop::Needs(place, distance) => self.infer(place, distance, stack, frames),
                    Stop::At(end) => Some(end),
                    Stop::InLibrary(..) => None,
                };
                if let Some(end @ (UnwindEnd::Root | UnwindEnd::Cut)) = end
                    && elsewhere == 0
                {
                    return Some(end);
                }
            }
        }
        frames.truncate(known);
        None
    }

    /// Whether the call before a return address can go to a function without tables.
    fn calls_library(&self, return_address: u64) -> bool {
        let Some(code) = self.code(return_address.wrapping_sub(LONGEST as u64)) else {
            return false;
        };
        let mut is_unknown = false;
        for target in M::calls(code, return_address).into_iter().flatten() {
            let address = match target {
                CallTarget::Address(address) => Some(address),
                CallTarget::Stored(at) => stored(at),
                // The address was in a register.
                CallTarget::Unknown => None,
            };
            match address.filter(|address| self.modules.is_code(*address)) {
                Some(address) => return self.is_without_tables(address),
                None => is_unknown = true,
            }
        }
        is_unknown
    }

    /// How the walk of a sample ends that is at such a function, and cannot be unwound there.
    pub(super) fn end_in_library(
        &mut self,
        (sp, fp): (u64, u64),
        stack: &ScannedStack<impl Fn(u64) -> Option<u64>>,
        frames: &mut Vec<ModuleAddress>,
    ) -> UnwindEnd {
        let module = |frame: &ModuleAddress| self.modules.get(frame.module()?);
        // One that calls back is large, and has much of what others left behind.
        let is_running = match frames.as_slice() {
            [_] => true,
            [first, _] => module(first).is_some_and(|module| module.is_vdso),
            _ => false,
        };
        let end = if is_running { self.past_library(sp, fp, stack, frames) } else { None };
        end.unwrap_or(UnwindEnd::Lost)
    }

    pub(super) fn is_without_tables(&self, address: u64) -> bool {
        IS_WITHOUT_TABLES && self.modules.is_beside_tables(address)
    }

    /// Whether a word leads back into a function that has tables, behind a call. Not to the beginning of
    /// one: such words are pointers to functions, and lie about everywhere.
    fn is_return_address(&self, word: u64) -> bool {
        let before = word.wrapping_sub(1);
        self.modules.is_code(before)
            && self.modules.function_start(before).is_some()
            && self.modules.function_start(word) != Some(word)
            && self.call_before(word, None).is_some()
    }
}

//! A C library without unwind tables (musl): the end of the stack, and the callers of its functions.

use framehop::FrameAddress;

use super::blocked::{FrameToUnwind, ScannedStack, Stop, UNKNOWN, stored};
use super::calls::CallTarget;
use super::machine::ArchUnwinder;
use super::modules::ModuleAddress;
use super::tables::TableBytes;
use super::unwinder::{UnwindEnd, Unwinder};

/// musl is built without tables: nothing marks its functions that call `main` or a thread's first function as the end
/// of the stack, and its other functions cannot be unwound.
const IS_WITHOUT_TABLES: bool = cfg!(target_env = "musl");

/// The maximum distance from one of its functions to the caller: `qsort` can take three kilobytes.
const FAR_WORDS: u64 = 512;

/// The words above musl's function that calls a thread's first function, which belong to musl only.
const START_WORDS: u64 = 32;

/// The distance above the stack pointer of a running function within which its caller is searched. Further up are
/// arrays of large functions, which contain remains of other calls.
const NEAR_WORDS: u64 = 64;

impl<M: ArchUnwinder<Module = framehop::Module<TableBytes>>> Unwinder<M> {
    /// Whether the word where the return address of a running function of such a library is, if the function has not
    /// moved the stack pointer, is one. On the stack, it may be a remain of another call if the target is not known.
    pub(super) fn returns_from_library(
        &self,
        frame: FrameAddress,
        word: u64,
        is_on_stack: bool,
    ) -> bool {
        self.is_without_tables(frame.address_for_lookup())
            && self.is_return_address(word)
            && self.calls_library(word).unwrap_or(!is_on_stack)
    }

    /// Whether a frame that cannot be unwound is the C library's function that starts the thread, which has no caller.
    pub(super) fn is_start(
        &self,
        frame: FrameAddress,
        (sp, fp): (u64, u64),
        word_at: impl Fn(u64) -> Option<u64>,
    ) -> bool {
        // A new thread starts with a frame pointer of zero. Its arguments are above its first frames, and unrelated data.
        let length = if fp == 0 { START_WORDS } else { FAR_WORDS };
        // The library's thread record, which begins with a pointer to itself, ends the stack.
        let mut words = (0..length).map_while(|word| {
            let at = sp.checked_add(8 * word)?;
            word_at(at).filter(|word| *word != at)
        });
        frame.is_return_address()
            && self.is_without_tables(frame.address_for_lookup())
            && !words.any(|word| self.is_return_address(word))
    }

    /// Continues beyond a running function of the C library: finds the nearest word that is the return address of a
    /// call into the library and is confirmed by the stack above it.
    fn past_library(
        &mut self,
        sp: u64,
        fp: u64,
        stack: &ScannedStack<impl Fn(u64) -> Option<u64>>,
        frames: &mut Vec<ModuleAddress>,
    ) -> Option<UnwindEnd> {
        let known = frames.len();
        'search: for word in 0..NEAR_WORDS {
            let at = sp.checked_add(8 * word)?;
            let return_address = stack.word_at(at)?;
            if self.signal_return(return_address) == Some(return_address) {
                break;
            }
            // The address may have been in a register.
            if !self.is_return_address(return_address)
                || self.calls_library(return_address) == Some(false)
            {
                continue;
            }
            let address = FrameAddress::from_return_address(return_address)?;
            let frame = FrameToUnwind { address, sp: at + 8 };
            // The library can have used the frame pointer as a general register.
            for fp in [fp, UNKNOWN] {
                frames.truncate(known);
                frames.push(self.modules.frame(address.address_for_lookup()));
                let mut mismatches = 0;
                let stop = match self.walk(frame, fp, stack, frames, Some(&mut mismatches)) {
                    Stop::Needs(frame, distance) => self.infer(frame, distance, stack, frames),
                    stop => Some(stop),
                };
                // The caller, if this is the return address, was called by the library, and its own caller is not known. A
                // word further up can be that one's.
                if let Some(Stop::InLibrary(..)) = stop
                    && mismatches == 0
                {
                    return (word == 0).then_some(UnwindEnd::WithoutTables);
                }
                match stop {
                    Some(
                        Stop::At(end @ (UnwindEnd::Root | UnwindEnd::Cut | UnwindEnd::TooFar))
                        | Stop::BelowHandler(end),
                    ) if mismatches == 0 => {
                        return Some(end);
                    }
                    // No caller is further up than the frame of a signal.
                    Some(Stop::BelowHandler(_)) => break 'search,
                    _ => {}
                }
            }
            if word == 0 {
                // The function may not have moved the stack pointer, and then all words further up are of other calls.
                break;
            }
        }
        None
    }

    /// Whether the call before a return address goes to a function without tables. `None` if that is not known.
    fn calls_library(&self, return_address: u64) -> Option<bool> {
        let mut found = Some(false);
        for target in self.calls_before(return_address).into_iter().flatten() {
            let address = match target {
                CallTarget::Address(address) => Some(address),
                CallTarget::Stored(at) => stored(at),
                // The address was in a register.
                CallTarget::Unknown => None,
            };
            match address.filter(|address| self.modules.is_code(*address)) {
                Some(address) => return Some(self.is_without_tables(address)),
                None => found = None,
            }
        }
        found
    }

    /// Finishes a sample that stopped in such a function. Returns how it ends. `running` is the index of the function that
    /// was running, or was interrupted by the signal whose handler was.
    pub(super) fn end_in_library(
        &mut self,
        (sp, fp): (u64, u64),
        stack: &ScannedStack<impl Fn(u64) -> Option<u64>>,
        frames: &mut Vec<ModuleAddress>,
        running: usize,
    ) -> UnwindEnd {
        if frames.len() >= stack.most_frames {
            return UnwindEnd::Cut;
        }
        // A function that calls back is large, and its frame has many remains of other calls.
        let module = |frame: &ModuleAddress| self.modules.get(frame.module()?);
        let is_running =
            frames.get(running..).unwrap_or_default().iter().enumerate().all(|(number, frame)| {
                match module(frame) {
                    Some(module) if number == 0 && module.is_vdso => true,
                    Some(module) => self.is_without_tables(module.loaded_at(frame.address())),
                    None => false,
                }
            });
        let known = frames.len();
        let end = if is_running { self.past_library(sp, fp, stack, frames) } else { None };
        end.unwrap_or_else(|| {
            frames.truncate(known);
            UnwindEnd::WithoutTables
        })
    }

    pub(super) fn is_without_tables(&self, address: u64) -> bool {
        IS_WITHOUT_TABLES && self.modules.is_beside_tables(address)
    }

    /// Whether a word is an address inside a function with tables, right after a call. Excludes the starts of
    /// functions: such words are function pointers, which occur everywhere.
    fn is_return_address(&self, word: u64) -> bool {
        let before = word.wrapping_sub(1);
        self.modules.is_code(before)
            && self.modules.function_start(before).is_some()
            && self.modules.function_start(word) != Some(word)
            && self.call_before(word, None).is_some()
    }
}

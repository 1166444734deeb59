//! What is known of the addresses that frames have: how to unwind there, and whether a call comes before them.
//!
//! Reading the code of a library is a system call, and a row of its tables takes a microsecond: the answers are kept.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::calls::SavedFrame;
use super::rules::FrameRule;
use crate::sys::mappings;

/// Twice the rules that framehop caches: code at other places must not collide in both.
const CACHED: usize = 1021;

/// The most pieces of code without tables that are kept, and the most functions whose jumps are.
pub(super) const MAX_SAVED: usize = 8_192;
pub(super) const MAX_JUMPS: usize = 1_024;

#[derive(Clone, Copy, Debug)]
pub(super) struct CodePlace {
    address: u64,
    pub(super) rule: FrameRule,
    pub(super) before_next: BeforeNext,
    /// What signal handlers return to may be here or at the next byte.
    pub(super) may_be_signal_return: bool,
    /// In the code of a module, which stays.
    pub(super) is_in_module: bool,
}

/// What the code up to and including the address ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BeforeNext {
    Call,
    /// None, or it is not code.
    NoCall,
    /// The code cannot be read.
    Unreadable,
}

impl CodePlace {
    pub(super) const fn new(address: u64) -> Self {
        Self {
            address,
            rule: FrameRule::Missing,
            before_next: BeforeNext::NoCall,
            may_be_signal_return: false,
            is_in_module: false,
        }
    }
}

/// How many times code without tables sets up a frame, at most two, and the last.
pub(super) type SavedFrames = (usize, Option<SavedFrame>);

#[derive(Debug)]
pub(super) struct Places {
    known: Vec<CodePlace>,
    /// By the addresses that the code is between.
    pub(super) saved: HashMap<Range<u64>, SavedFrames>,
    pub(super) jumps: HashMap<u64, Arc<[u64]>>,
    pub(super) mappings: Mappings,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            known: vec![CodePlace::new(0); CACHED],
            saved: HashMap::new(),
            jumps: HashMap::new(),
            mappings: Mappings::default(),
        }
    }
}

impl Places {
    #[inline]
    pub(super) fn get(&self, address: u64) -> Option<CodePlace> {
        let known = *self.known.get((address % CACHED as u64) as usize)?;
        (known.address == address && address != 0).then_some(known)
    }

    pub(super) fn insert(&mut self, place: CodePlace) {
        self.mappings.are_used |= !place.is_in_module;
        if let Some(known) = self.known.get_mut((place.address % CACHED as u64) as usize) {
            *known = place;
        }
    }

    /// Forgets all but the mappings outside of modules.
    pub(super) fn forget_known(&mut self) {
        self.known.fill(CodePlace::new(0));
        self.saved.clear();
        self.jumps.clear();
    }

    /// Forgets code outside of modules, which can change at any time.
    pub(super) fn forget_changing(&mut self) {
        if !std::mem::take(&mut self.mappings.are_used) {
            return;
        }
        for known in self.known.iter_mut().filter(|known| !known.is_in_module) {
            *known = CodePlace::new(0);
        }
        self.saved.clear();
        self.jumps.clear();
        if self.mappings.are_due() {
            self.mappings.executable.clear();
        }
    }
}

/// Adds an answer to those that are kept, of which there are at most `most`.
pub(super) fn keep<K: Eq + Hash, V>(kept: &mut HashMap<K, V>, most: usize, key: K, value: V) {
    if kept.len() >= most {
        kept.clear();
    }
    kept.insert(key, value);
}

/// The executable mappings of the process, by address. Only for code that is in no module: of a just-in-time compiler.
#[derive(Debug, Default)]
pub(super) struct Mappings {
    executable: Vec<Range<u64>>,
    /// A place outside of modules was asked for.
    are_used: bool,
    next_read: Option<Instant>,
}

/// Reading them may take a hundredth of the time: some processes have ten thousands.
const PAUSE: u32 = 100;

impl Mappings {
    /// The mapping outside of modules that contains this address, if it is known already.
    pub(super) fn get(&self, address: u64) -> Option<Range<u64>> {
        let after = self.executable.partition_point(|mapping| mapping.start <= address);
        let found = after.checked_sub(1).and_then(|at| self.executable.get(at))?;
        found.contains(&address).then(|| found.clone())
    }

    /// Like [`get`](Self::get), but reads the executable mappings again if the address is in none and this is due.
    pub(super) fn find(&mut self, address: u64) -> Option<Range<u64>> {
        if self.get(address).is_none() && self.are_due() {
            let start = Instant::now();
            self.executable = mappings(true).unwrap_or_default();
            let took = start.elapsed().max(Duration::from_micros(10));
            self.next_read = Instant::now().checked_add(took.saturating_mul(PAUSE));
        }
        self.get(address)
    }

    fn are_due(&self) -> bool {
        self.next_read.is_none_or(|next| Instant::now() >= next)
    }
}

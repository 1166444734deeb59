//! What each hook looks at first.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// One word that says whether the hooks of a layer have anything to do.
///
/// It is never freed, so that the child of a fork, in which no lock may be touched, can shut the
/// gates of all layers by storing to memory.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Gate {
    state: AtomicU32,
    next: OnceLock<&'static Self>,
}

/// The layer's threads run, in this process.
const OPEN: u32 = 1;
/// The order of the layers is in doubt, or spans are paired with those of OpenTelemetry.
const LOOK: u32 = 1 << 1;
/// It was open in the process that this one is forked from, and nobody has said so here.
const FORKED: u32 = 1 << 2;
/// How often a hook has come by since then.
const ONE_HOOK: u32 = 1 << 3;

static FIRST: OnceLock<&'static Gate> = OnceLock::new();

impl Gate {
    /// A gate that is still shut.
    pub(crate) fn new() -> &'static Self {
        let gate: &'static Self =
            Box::leak(Box::new(Self { state: AtomicU32::new(0), next: OnceLock::new() }));
        let mut place = &FIRST;
        loop {
            match place.get() {
                Some(other) => place = &other.next,
                None if place.set(gate).is_ok() => return gate,
                None => {}
            }
        }
    }

    /// The engine can be found.
    pub(crate) fn open(&self) {
        // Release: who finds it open finds the engine.
        self.state.fetch_or(OPEN, Ordering::Release);
    }

    /// For a hook that has found it shut: whether it is to ask if its process goes on in the place of the
    /// one that it is forked from. Not each time.
    #[inline(always)]
    pub(crate) fn must_ask_of_fork(&self) -> bool {
        self.state.load(Ordering::Relaxed) & FORKED != 0 && self.count_hook()
    }

    #[cold]
    fn count_hook(&self) -> bool {
        let count = self.state.fetch_add(ONE_HOOK, Ordering::Relaxed) / ONE_HOOK + 1;
        count.is_power_of_two()
    }

    /// It does, and this is who says so.
    pub(crate) fn take_forked(&self) -> bool {
        self.state.swap(0, Ordering::Relaxed) & FORKED != 0
    }

    #[inline(always)]
    pub(crate) fn is_open(&self) -> bool {
        self.state.load(Ordering::Relaxed) & OPEN != 0
    }

    /// Whether it is open, and nothing else is to be said.
    #[inline(always)]
    pub(crate) fn is_only_open(&self) -> bool {
        self.state.load(Ordering::Relaxed) == OPEN
    }

    #[inline(always)]
    pub(crate) fn must_look(&self) -> bool {
        self.state.load(Ordering::Relaxed) & LOOK != 0
    }

    pub(crate) fn set_look(&self, look: bool) {
        if look {
            self.state.fetch_or(LOOK, Ordering::Relaxed);
        } else {
            self.state.fetch_and(!LOOK, Ordering::Relaxed);
        }
    }

    pub(super) fn close(&self) {
        self.state.store(0, Ordering::Relaxed);
    }

    /// Only stores to memory: it is called in the child of a fork.
    pub(super) fn close_all() {
        let mut place = &FIRST;
        while let Some(gate) = place.get() {
            // Open, or in the child of a child.
            let was_open = gate.state.load(Ordering::Relaxed) & (OPEN | FORKED) != 0;
            gate.state.store(if was_open { FORKED } else { 0 }, Ordering::Relaxed);
            place = &gate.next;
        }
    }
}

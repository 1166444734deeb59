//! Unwinding a thread that is blocked in a system call, of which the kernel reports the program counter and stack pointer.
//!
//! The frame pointer is restored where a function saved it. Before that, its value follows from the function's
//! prologue, or from a saved pair whose return address comes right after a call of this function. Frames from there on
//! are marked as inferred.

use std::iter::successors;

use framehop::FrameAddress;

use super::calls::{CallTarget, PROLOGUE, STUB, SavedFrame};
use super::machine::ArchUnwinder;
use super::modules::ModuleAddress;
use super::rules::FrameRule;
use super::signal::Interrupted;
use super::tables::TableBytes;
use super::unwinder::{UnwindEnd, Unwinder, end_beyond};
use crate::sys::{ANY_STACK, read_own_memory};

/// Replaces an unknown frame pointer: an address that no processor accepts. It is below 2^63, since framehop uses
/// signed arithmetic and would cache an overflow as a rule.
pub(super) const UNKNOWN: u64 = 0x5eed_5eed_5eed_5eed;

/// The maximum distance from the frame pointer of what a frame reads relative to it.
const NEAR: u64 = 1 << 31;

/// The maximum number of candidate stacks per wait.
const MAX_TRIES: usize = 64;

/// How well a call matches the expected function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CallMatch {
    /// The call goes to the function's first instruction, or to code that jumps there.
    Exact,
    /// The target of the call is not known, such as an address that was in a register.
    Unknown,
    /// The call goes to another function, which may have jumped to the expected one.
    Other,
}

#[derive(Clone, Copy)]
pub(super) struct FrameToUnwind {
    pub(super) address: FrameAddress,
    pub(super) sp: u64,
}

pub(super) enum Stop {
    At(UnwindEnd),
    /// After the frame of a signal, which proves that the frames below it are those of its handler.
    BelowHandler(UnwindEnd),
    /// A frame cannot be unwound without the frame pointer; the return address is at this distance from it.
    Needs(FrameToUnwind, i64),
    /// In a function of a C library without tables, at this stack pointer and frame pointer.
    InLibrary(u64, u64),
}

pub(super) struct ScannedStack<F> {
    pub(super) bottom: u64,
    pub(super) word: F,
    pub(super) most_frames: usize,
}

impl<F: Fn(u64) -> Option<u64>> ScannedStack<F> {
    pub(super) fn word_at(&self, address: u64) -> Option<u64> {
        (self.word)(address.checked_sub(self.bottom)?)
    }
}

impl<M: ArchUnwinder<Module = framehop::Module<TableBytes>>> Unwinder<M> {
    /// Fills `frames` like [`Unwinder::unwind`], for a thread that is in a system call.
    ///
    /// Many frames can be unwound without the frame pointer, and frames that save it restore it. If a frame needs it
    /// before that, its value is inferred from the code and the stack, and confirmed by what is found there. The
    /// returned number is the index of the first frame found in this way; the frames before it are as reliable as those
    /// of a sample. It is `None` if nothing was inferred.
    pub fn unwind_blocked(
        &mut self,
        pc: u64,
        sp: u64,
        stack: impl Fn(u64) -> Option<u64>,
        most_frames: usize,
        frames: &mut Vec<ModuleAddress>,
    ) -> (UnwindEnd, Option<usize>) {
        frames.clear();
        frames.push(self.modules.frame(pc));
        let stack = ScannedStack { bottom: sp, word: stack, most_frames };
        let first = FrameToUnwind { address: FrameAddress::from_instruction_pointer(pc), sp };
        let found = match self.walk(first, UNKNOWN, &stack, frames, None) {
            Stop::At(end) | Stop::BelowHandler(end) => (end, None),
            Stop::InLibrary(sp, fp) => {
                let known = frames.len();
                let end = self.end_in_library((sp, fp), &stack, frames, 0);
                (end, (frames.len() > known).then_some(known))
            }
            Stop::Needs(frame, distance) => {
                let known = frames.len();
                match self.infer(frame, distance, &stack, frames) {
                    Some(Stop::At(end) | Stop::BelowHandler(end)) => (end, Some(known)),
                    _ => (self.end_at(frame.address), None),
                }
            }
        };
        self.own_stack = ANY_STACK;
        found
    }

    /// Finds the caller of a frame, and from it all frames above. The result is `At` or `BelowHandler`.
    pub(super) fn infer(
        &mut self,
        frame: FrameToUnwind,
        distance: i64,
        stack: &ScannedStack<impl Fn(u64) -> Option<u64>>,
        frames: &mut Vec<ModuleAddress>,
    ) -> Option<Stop> {
        let known = frames.len();
        // Otherwise every word after a call could be the return address.
        let callee = self.function_start(frame.address.address_for_lookup())?;
        let call_at = |unwinder: &Self, frame_pointer: u64| {
            let word = stack.word_at(frame_pointer.wrapping_add_signed(distance))?;
            unwinder.call_before(word, Some(callee))
        };
        if let Some(frame_pointer) = self.predict_frame_pointer(frame, callee)
            && let call @ Some(CallMatch::Exact | CallMatch::Unknown) = call_at(self, frame_pointer)
        {
            // If the code determines both the frame pointer and the call, all that follows is accepted.
            let mut mismatches = 0;
            let check = (call != Some(CallMatch::Exact)).then_some(&mut mismatches);
            let is_certain = check.is_none();
            match self.walk(frame, frame_pointer, stack, frames, check) {
                Stop::At(end)
                    if frames.len() > known
                        && (is_certain
                            || end == UnwindEnd::Root
                            || end.is_cut()
                            || end == UnwindEnd::WithoutTables && mismatches == 0) =>
                {
                    return Some(Stop::At(end));
                }
                stop @ Stop::BelowHandler(_) if is_certain || mismatches == 0 => return Some(stop),
                _ => frames.truncate(known),
            }
        }
        self.search(frame, distance, callee, stack, frames)
    }

    /// Predicts the frame pointer from the function's prologue. The result must be checked: the stack pointer may change later.
    fn predict_frame_pointer(&self, frame: FrameToUnwind, function: u64) -> Option<u64> {
        let (number, saved) = M::saved_frames(&self.code_at::<PROLOGUE>(function)?);
        let begins = |saved: &SavedFrame| number == 1 && saved.begins_before == PROLOGUE;
        frame.sp.checked_add(saved.filter(begins)?.size()?)
    }

    /// Tries the words of the stack that can be the frame's return address: first those after a call of its function, then
    /// those after an indirect call. The lowest address comes first, since higher ones belong to callers.
    ///
    /// The first functions of a thread are called indirectly, so such a word is taken only if no nearer one leads anywhere.
    fn search(
        &mut self,
        frame: FrameToUnwind,
        distance: i64,
        callee: u64,
        stack: &ScannedStack<impl Fn(u64) -> Option<u64>>,
        frames: &mut Vec<ModuleAddress>,
    ) -> Option<Stop> {
        let known = frames.len();
        // Whether the stack is cut, the number of calls to other functions, and the stop and the frames above.
        let mut best: Option<(bool, usize, Stop, Vec<ModuleAddress>)> = None;
        let words = || {
            let addresses =
                successors(Some(frame.sp), |at| at.checked_add(size_of::<u64>() as u64));
            addresses.map_while(|at| Some((at, stack.word_at(at)?)))
        };
        let candidates = words().map(|word| (word, true)).chain(words().map(|word| (word, false)));
        let mut tries = 0;
        for ((at, word), is_exact) in candidates {
            if !is_exact && best.is_some() || tries == MAX_TRIES {
                break;
            }
            let Some(call) = self.call_before(word, Some(callee)) else { continue };
            if is_exact != (call == CallMatch::Exact) {
                continue;
            }
            tries += 1;
            let mut mismatches = 0;
            let frame_pointer = at.wrapping_add_signed(-distance);
            let stop = self.walk(frame, frame_pointer, stack, frames, Some(&mut mismatches));
            let above = frames.split_off(known);
            let is_cut = match stop {
                Stop::At(UnwindEnd::Root) | Stop::BelowHandler(_) => false,
                Stop::At(UnwindEnd::WithoutTables) if is_exact => false,
                // A stack without an end proves little.
                Stop::At(end) if is_exact && end.is_cut() => true,
                Stop::At(end) if end == UnwindEnd::WithoutTables || end.is_cut() => return None,
                _ => continue,
            };
            if call == CallMatch::Other {
                return None;
            }
            if best.as_ref().is_none_or(|best| (is_cut, mismatches) < (best.0, best.1)) {
                best = Some((is_cut, mismatches, stop, above));
            }
            if !is_cut && mismatches == 0 {
                break;
            }
        }
        let (_, _, stop, mut above) = best?;
        frames.append(&mut above);
        Some(stop)
    }

    /// How the call before an address, if there is one, matches this function.
    pub(super) fn call_before(
        &self,
        return_address: u64,
        callee: Option<u64>,
    ) -> Option<CallMatch> {
        let targets = self.calls_before(return_address).into_iter().flatten();
        let matches = targets.filter_map(|target| {
            let address = match target {
                CallTarget::Address(address) => self.is_code(address).then_some(address)?,
                CallTarget::Stored(at) => stored(at)?,
                CallTarget::Unknown => return Some(CallMatch::Unknown),
            };
            let Some(callee) = callee else {
                return Some(CallMatch::Unknown);
            };
            let is_callee = address == callee || self.jumps_to(address, callee);
            Some(if is_callee { CallMatch::Exact } else { CallMatch::Other })
        });
        let is_signal_return = || self.signal_return(return_address) == Some(return_address);
        // The kernel calls any handler.
        matches.min().or_else(|| is_signal_return().then_some(CallMatch::Unknown))
    }

    /// Whether a function does little but jump to another.
    fn jumps_to(&self, function: u64, other: u64) -> bool {
        let Some(code) = self.code_at::<STUB>(function) else {
            return false;
        };
        M::jumps(&code, function).any(|target| match target {
            CallTarget::Address(target) => target == other,
            CallTarget::Stored(at) => stored(at) == Some(other),
            CallTarget::Unknown => false,
        })
    }

    /// Adds the frames above `from`. With `mismatches`, checks whether these can have called each other.
    pub(super) fn walk(
        &mut self,
        from: FrameToUnwind,
        frame_pointer: u64,
        stack: &ScannedStack<impl Fn(u64) -> Option<u64>>,
        frames: &mut Vec<ModuleAddress>,
        mismatches: Option<&mut usize>,
    ) -> Stop {
        let (mut interrupted, pc) = (0, from.address.address());
        let first = (from.address, M::few_registers(pc, from.sp, frame_pointer));
        match self.walk_on(first, stack, frames, mismatches, &mut interrupted) {
            Stop::At(end) if interrupted > 0 => Stop::BelowHandler(end),
            Stop::Needs(..) | Stop::InLibrary(..) if interrupted > 0 => {
                Stop::BelowHandler(UnwindEnd::Lost)
            }
            stop => stop,
        }
    }

    /// Adds the frames above the one with these registers. `interrupted` is the last that a signal interrupted, or 0.
    pub(super) fn walk_on(
        &mut self,
        (mut address, mut registers): (FrameAddress, M::UnwindRegs),
        stack: &ScannedStack<impl Fn(u64) -> Option<u64>>,
        frames: &mut Vec<ModuleAddress>,
        mut mismatches: Option<&mut usize>,
        interrupted: &mut usize,
    ) -> Stop {
        let mut place = self.place(address.address_for_lookup());
        let mut is_signal_return = self.signal_return_at(place, address.address()).is_some();
        loop {
            let frame = FrameToUnwind { address, sp: M::stack_pointer(&registers) };
            let mut missing = None;
            let mut needed = None;
            let mut read = |at: u64| {
                if at.abs_diff(UNKNOWN) < NEAR {
                    // Not an error, which framehop would cache as a rule for this address.
                    needed = needed.max(Some(at.wrapping_sub(UNKNOWN) as i64));
                    return Ok(0);
                }
                let word = stack.word_at(at);
                missing = if word.is_none() { Some(at) } else { missing };
                word.ok_or(())
            };
            let mut is_on_other_stack = false;
            let next = if is_signal_return {
                let found = Interrupted::at::<M>(frame.sp, |at| read(at).ok());
                found.ok_or(UnwindEnd::Lost).map(|found| {
                    *interrupted = frames.len();
                    is_on_other_stack = found.is_on_other_stack;
                    registers = M::registers(found.registers);
                    FrameAddress::from_instruction_pointer(found.registers.pc)
                })
            } else {
                let fp = M::frame_pointer(&registers);
                let next = self.caller(address, place, &mut registers, &mut read);
                if needed.is_some() || next.is_err_and(|end| end != UnwindEnd::Root) {
                    if self.is_start(address, (frame.sp, fp), |at| stack.word_at(at)) {
                        return Stop::At(UnwindEnd::Root);
                    }
                    if self.is_without_tables(address.address_for_lookup()) {
                        return Stop::InLibrary(frame.sp, fp);
                    }
                }
                next
            };
            if let Some(distance) = needed {
                return match place.rule {
                    // The return address can be anywhere.
                    FrameRule::Computed => Stop::At(UnwindEnd::Lost),
                    _ => Stop::Needs(frame, distance),
                };
            }
            let next = match (next, missing) {
                (Ok(next), _) => next,
                (Err(UnwindEnd::Cut | UnwindEnd::Lost), Some(at)) => {
                    return Stop::At(end_beyond(&self.own_stack, stack.bottom, at));
                }
                (Err(end), _) => return Stop::At(end),
            };
            if let Some(mismatches) = &mut mismatches
                && !is_signal_return
            {
                let callee = self.function_start(address.address_for_lookup());
                match self.call_before(next.address(), callee) {
                    Some(CallMatch::Other) => **mismatches += 1,
                    Some(_) => {}
                    None => return Stop::At(UnwindEnd::Lost),
                }
            }
            if frames.len() >= stack.most_frames {
                return Stop::At(UnwindEnd::Cut);
            }
            address = next;
            place = self.place(address.address_for_lookup());
            let start = self.signal_return_at(place, address.address());
            frames.push(self.modules.frame(start.unwrap_or(address.address_for_lookup())));
            is_signal_return = start.is_some();
            if is_on_other_stack {
                // Only the handler's stack was copied.
                return Stop::At(UnwindEnd::OtherStack);
            }
        }
    }
}

/// Copied without creating a reference, since a library can be unloaded at any time.
pub(super) fn stored(address: u64) -> Option<u64> {
    let word = read_own_memory(address..address.checked_add(8)?).ok()?;
    word.first_chunk().map(|word| u64::from_ne_bytes(*word))
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::io::Read as _;
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Condvar, Mutex, mpsc};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::sys::{PerfRing, Registers, current_tid, loaded_modules, open_switch_registers};

    type Wait = Box<dyn FnOnce() + Send>;

    #[inline(never)]
    fn outer(wait: Wait) {
        inner(wait);
        // Work after the call prevents a tail call.
        black_box(());
    }

    #[inline(never)]
    fn inner(wait: Wait) {
        wait();
        black_box(());
    }

    /// The location at which a thread is blocked, and its stack.
    struct Blocked {
        tid: u32,
        /// As in procfs.
        text: String,
        pc: u64,
        sp: u64,
        stack: Vec<u8>,
    }

    impl Blocked {
        /// Waits until the thread is in this system call.
        fn find(tid: u32, call: &str) -> Self {
            let start = Instant::now();
            loop {
                let text = Self::text_of(tid);
                let words: Vec<&str> = text.split_whitespace().collect();
                if let [number, .., sp, pc] = words[..]
                    && number == call
                {
                    let hex = |word: &str| {
                        u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap()
                    };
                    let (pc, sp) = (hex(pc), hex(sp));
                    let stack = read_own_memory(sp..stack_end(sp)).unwrap();
                    let found = Self { tid, text: text.clone(), pc, sp, stack };
                    if found.is_there() {
                        return found;
                    }
                }
                assert!(start.elapsed() < Duration::from_secs(60), "{text}");
                thread::yield_now();
            }
        }

        fn text_of(tid: u32) -> String {
            std::fs::read_to_string(format!("/proc/self/task/{tid}/syscall")).unwrap()
        }

        /// Whether the thread is still there.
        fn is_there(&self) -> bool {
            Self::text_of(self.tid) == self.text
        }

        fn word(&self, offset: u64) -> Option<u64> {
            let rest = self.stack.get(usize::try_from(offset).ok()?..)?;
            rest.first_chunk().map(|word| u64::from_ne_bytes(*word))
        }
    }

    fn stack_end(sp: u64) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let ends = maps.lines().filter_map(|line| {
            let (start, end) = line.split_once(' ')?.0.split_once('-')?;
            let start = u64::from_str_radix(start, 16).ok()?;
            let end = u64::from_str_radix(end, 16).ok()?;
            (start..end).contains(&sp).then_some(end)
        });
        ends.min().unwrap()
    }

    /// Unwinds a thread that blocks in `wait`, and checks that its functions are found.
    fn functions_of(call: &str, wait: impl FnOnce() + Send + 'static) {
        if !cfg!(target_arch = "x86_64") || loaded_modules(true).modules.is_empty() {
            return;
        }
        let tid = Arc::new(AtomicU32::new(0));
        let published_tid = Arc::clone(&tid);
        let (send_ring, receive_ring) = mpsc::channel();
        // Not joined: its wait does not end.
        thread::spawn(move || {
            // The actual registers, if perf allows reading them.
            send_ring.send(open_switch_registers(1 << 16).ok()).unwrap();
            // Inside of both functions, so that what it waits for from then on is, too.
            outer(Box::new(move || {
                published_tid.store(current_tid(), Ordering::Release);
                wait();
            }));
        });
        let tid = loop {
            match tid.load(Ordering::Acquire) {
                0 => thread::yield_now(),
                tid => break tid,
            }
        };
        let ring = receive_ring.recv().unwrap();
        // On its way it can wait for a lock of the allocator.
        let (blocked, bp) = loop {
            let blocked = Blocked::find(tid, call);
            let registers = ring.as_ref().and_then(switched_out);
            if blocked.is_there() {
                let bp = registers.map(|(bp, place)| {
                    assert_eq!(place, (blocked.sp, blocked.pc));
                    bp
                });
                break (blocked, bp);
            }
        };
        let mut unwinder: Unwinder = Unwinder::default();
        unwinder.refresh();
        let mut frames = Vec::new();
        let word = |offset| blocked.word(offset);
        let (end, inferred) =
            unwinder.unwind_blocked(blocked.pc, blocked.sp, word, 100, &mut frames);
        let searched = search(&mut unwinder, &blocked);
        assert_eq!(searched.as_ref().map(|(known, _)| *known), inferred);
        if let Some((_, searched)) = searched {
            assert_eq!(searched, frames);
        }
        assert_eq!(end, UnwindEnd::Root);
        if let Some(bp) = bp {
            let mut exact = Vec::new();
            let registers = Registers { pc: blocked.pc, sp: blocked.sp, fp: bp, lr: 0 };
            assert_eq!(unwinder.unwind(registers, word, 100, &mut exact), UnwindEnd::Root);
            assert_eq!(exact, frames);
        }
        let starts: Vec<_> = frames
            .iter()
            .map(|frame| {
                let bias = unwinder.modules().get(frame.module().unwrap()).unwrap().loaded_at(0);
                unwinder.modules.function_start(frame.address().wrapping_add(bias)).unwrap_or(0)
            })
            .collect();
        let at =
            |function: fn(Wait)| starts.iter().position(|start| *start == function as usize as u64);
        let (inner, outer) = (at(inner).unwrap(), at(outer).unwrap());
        assert_eq!(inner + 1, outer);
    }

    /// The frame pointer when the thread was last switched out, with its stack pointer and instruction pointer.
    fn switched_out(ring: &PerfRing) -> Option<(u64, (u64, u64))> {
        // Header, time, ABI, and the registers in the order of their numbers.
        let start = ring.head().checked_sub(48)?;
        let (bp, sp, ip) = (ring.word(start + 24), ring.word(start + 32), ring.word(start + 40));
        Some((bp, (sp, ip)))
    }

    /// Finds the frames by searching alone, without a prediction from the prologue.
    fn search(unwinder: &mut Unwinder, blocked: &Blocked) -> Option<(usize, Vec<ModuleAddress>)> {
        let stack = ScannedStack {
            bottom: blocked.sp,
            word: |offset| blocked.word(offset),
            most_frames: 100,
        };
        let mut frames = vec![unwinder.modules.frame(blocked.pc)];
        let address = FrameAddress::from_instruction_pointer(blocked.pc);
        let first = FrameToUnwind { address, sp: blocked.sp };
        let Stop::Needs(frame, distance) = unwinder.walk(first, UNKNOWN, &stack, &mut frames, None)
        else {
            return None;
        };
        let known = frames.len();
        let callee = unwinder.modules.function_start(frame.address.address_for_lookup()).unwrap();
        let end = unwinder.search(frame, distance, callee, &stack, &mut frames);
        assert!(matches!(end, Some(Stop::At(UnwindEnd::Root))));
        Some((known, frames))
    }

    const READ: &str = "0";
    const RECEIVE: &str = "45";
    const FUTEX: &str = "202";
    const SLEEP: &str = "230";
    const ACCEPT: &str = "288";

    #[test]
    fn a_mutex() {
        let mutex = Arc::new(Mutex::new(()));
        let same = Arc::clone(&mutex);
        let _locked = mutex.lock().unwrap();
        functions_of(FUTEX, move || drop(same.lock()));
    }

    #[test]
    fn a_condition_variable() {
        functions_of(FUTEX, || {
            let mutex = Mutex::new(());
            drop(Condvar::new().wait_while(mutex.lock().unwrap(), |()| true));
        });
    }

    #[test]
    fn a_condition_variable_with_a_timeout() {
        functions_of(FUTEX, || {
            let mutex = Mutex::new(());
            drop(Condvar::new().wait_timeout(mutex.lock().unwrap(), LONG));
        });
    }

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_sleep() {
        functions_of(SLEEP, || thread::sleep(LONG));
    }

    #[test]
    fn a_park() {
        functions_of(FUTEX, thread::park);
    }

    #[test]
    fn a_channel() {
        let (_sender, receiver) = mpsc::channel::<u32>();
        functions_of(FUTEX, move || _ = receiver.recv());
    }

    #[test]
    fn a_parking_lot_mutex() {
        let mutex = Arc::new(parking_lot::Mutex::new(()));
        let same = Arc::clone(&mutex);
        let _locked = mutex.lock();
        functions_of(FUTEX, move || drop(same.lock()));
    }

    #[test]
    fn a_pipe() {
        let (mut reader, _writer) = std::io::pipe().unwrap();
        functions_of(READ, move || drop(reader.read(&mut [0])));
    }

    #[test]
    fn a_socket() {
        let (mut reader, _writer) = UnixStream::pair().unwrap();
        functions_of(RECEIVE, move || drop(reader.read_to_end(&mut Vec::new())));
    }

    #[test]
    fn a_datagram() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        functions_of(RECEIVE, move || drop(socket.recv_from(&mut [0])));
    }

    #[test]
    fn a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        functions_of(ACCEPT, move || drop(listener.accept()));
    }

    #[test]
    fn a_join() {
        functions_of(FUTEX, || {
            let other = thread::spawn(|| thread::sleep(LONG));
            drop(other.join());
        });
    }

    #[test]
    fn arbitrary_input_does_not_panic() {
        let mut unwinder: Unwinder = Unwinder::default();
        unwinder.refresh();
        let mut frames = Vec::new();
        let mut random = 0x1234_5678_9abc_def0_u64;
        let mut next = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            random >> 8
        };
        let here = arbitrary_input_does_not_panic as *const () as u64;
        for round in 0..500 {
            let near = |x: u64| here.wrapping_add(x % 100_000).wrapping_sub(50_000);
            let pc = near(next());
            let sp = if round % 2 == 0 { next() } else { u64::MAX - next() % 256 };
            let words: Vec<u64> = (0..next() % 64).map(|_| near(next())).collect();
            let word = |offset: u64| words.get(usize::try_from(offset / 8).ok()?).copied();
            let (_, inferred) = unwinder.unwind_blocked(pc, sp, word, 100, &mut frames);
            assert!(frames.len() <= 100 && inferred.is_none_or(|first| first < frames.len()));
        }
    }
}

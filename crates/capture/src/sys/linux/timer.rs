//! Sampling a thread with a timer and a signal.
//!
//! The handler writes a record like perf's. It finds its memory by the number that the timer sends, and first checks
//! that it is on that thread's stack, so a late signal is harmless. Of another stack it reads nothing but an alternate
//! signal stack, whose end is known: beyond others there can be a guard page.
#![allow(
    unsafe_code,
    reason = "POSIX timers, and a signal handler that copies registers and stack; no crate offers \
              the one without unwinding or locking in the other"
)]

use std::ffi::{c_int, c_void};
use std::hash::{BuildHasher as _, RandomState};
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence, fence,
};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::blocked::{blocks_signal, cpu_ns_of, has_same_filters};
use super::calls::may;
use super::clock::{create_timer, delete_timer, set_timer};
use super::fork::{ForkSafe, ForkSafeGuard};
use super::modules::can_read_by_system_call;
use super::ring::{MAX_READ, RECORD_LOST, RawRegisters, RingMemory};
use super::signal::{block, handled_by, signal_for, unblock};
use super::signal_stack::on_signal;
use super::thread::{are_signals_used_up, current_pid, current_tid, is_own_thread, own_status};
use crate::sys::poll::{Waker, Wakeups};
use crate::sys::types::{ANY_STACK, FilteredSyscall, SampleRequest, ThreadStack, WhyRefused};

/// The thread that a signal is for, found by the number that its timer sends.
///
/// Targets are reused for other threads. A signal may arrive after its timer was deleted; it then finds the ring of another
/// thread here, or none.
#[derive(Debug)]
#[repr(align(64))]
struct Target {
    ring: AtomicPtr<HandlerRing>,
    /// The number of handlers that may use the ring.
    busy: AtomicU32,
}

/// Of no memory until they are used: as many as the usual limit of pending signals allows timers on a machine with 32 GiB.
/// Further threads are refused one, and counted.
static TARGETS: [Target; MAX_TARGETS] =
    [const { Target { ring: AtomicPtr::new(std::ptr::null_mut()), busy: AtomicU32::new(0) } };
        MAX_TARGETS];
const MAX_TARGETS: usize = 1 << 14;

static POOL: ForkSafe<Pool> = ForkSafe::new(Pool { free: Vec::new(), used: 0 });

pub(super) struct Pool {
    free: Vec<u32>,
    /// All from here on are free, too.
    used: u32,
}

/// Locks the pool of free targets; also held across forks.
pub(super) fn lock_targets() -> ForkSafeGuard<Pool> {
    POOL.lock()
}

/// Sent together with the number, to identify this crate's timers.
pub(super) const TAG: u64 = 0x7472_7066 << 32;

impl Target {
    fn by_number(number: u32) -> Option<&'static Self> {
        TARGETS.get(number as usize)
    }

    fn take() -> Option<u32> {
        let mut pool = lock_targets();
        pool.free.pop().or_else(|| {
            let number = pool.used;
            Self::by_number(number)?;
            pool.used += 1;
            Some(number)
        })
    }

    /// Only for the owner that has taken the target.
    fn set(&self, ring: *const HandlerRing) {
        self.ring.store(ring.cast_mut(), Ordering::Release);
    }
}

#[derive(Debug)]
pub(super) struct Timer {
    id: libc::timer_t,
    number: u32,
    signal: c_int,
}

// SAFETY: a timer belongs to the process; any thread may set and delete it.
unsafe impl Send for Timer {}

pub(crate) fn unblock_timers(wanted: Option<i32>) {
    _ = signal_of_timers(wanted).map(unblock);
}

pub(crate) fn block_timers(wanted: Option<i32>) {
    _ = signal_of_timers(wanted).map(block);
}

/// The signal that timers send: `wanted`, if that is given. Choosing it creates a timer.
pub(crate) fn signal_of_timers(wanted: Option<i32>) -> Result<c_int, WhyRefused> {
    let calls =
        [FilteredSyscall::TimerCreate, FilteredSyscall::TimerSettime, FilteredSyscall::TimerDelete];
    if calls.into_iter().all(may) {
        signal_for(on_signal, wanted)
    } else {
        Err(WhyRefused::KilledBySeccomp)
    }
}

/// Creates a timer that samples thread `tid`, whose stack is `stack`, once it is started, if the thread does not
/// [block](unblock_timers) the signal. Each sample is a record as perf would write it. If the bounds of the stack are not
/// known, they are [`ANY_STACK`]. The waker is used once half of the ring is full.
pub(crate) fn open_timer_ring(
    request: SampleRequest,
    tid: u32,
    stack: ThreadStack,
    waker: &Waker,
) -> Result<TimerRing, WhyRefused> {
    let signal = signal_of_timers(request.signal)?;
    if stack.bounds == ANY_STACK {
        can_read_stack_of(tid, signal)?;
    }
    let memory = RingMemory::anonymous(request.ring_bytes).map_err(|_| WhyRefused::NoMemory)?;
    let ring = Arc::new(HandlerRing::new(memory, request, (tid, stack), waker.hold()));
    let timer = Timer::create(signal, tid, Arc::as_ptr(&ring))?;
    Ok(TimerRing { ring, timer: Mutex::new(Some(timer)) })
}

/// Whether the handler can read the stack of that thread, whose bounds are not known.
fn can_read_stack_of(tid: u32, signal: c_int) -> Result<(), WhyRefused> {
    // Its hooks would have probed its filters.
    if !has_same_filters(tid) {
        return Err(if has_ended(tid) { WhyRefused::Ended } else { WhyRefused::KilledBySeccomp });
    }
    // Its signals would stay pending, and interrupt the call in which it lets them in. The second reading is for threads
    // that block all signals for a moment, while they create another one.
    if (0..2).all(|_| blocks_signal(tid, signal)) {
        return Err(WhyRefused::SignalBlocked);
    }
    can_read_by_system_call()
}

/// Makes the calls that sample thread `tid` by a timer. The thread must exist, and must not run: its timer does not expire.
pub(crate) fn probe_timers(request: SampleRequest, tid: u32) -> Result<(), WhyRefused> {
    let (signal, number) = (signal_of_timers(request.signal)?, TAG | u64::from(NO_TARGET));
    let id = create_timer(signal, tid, number).map_err(why_not_created)?;
    let started = set_timer(id, request.period_ns, request.period_ns);
    let ended = delete_timer(id).inspect_err(|_| _ = set_timer(id, 0, 0));
    started.and(ended)
}

const NO_TARGET: u32 = u32::MAX;

fn why_not_created(errno: i32) -> WhyRefused {
    match errno {
        libc::EAGAIN if are_signals_used_up(&own_status()) => WhyRefused::NoTimers,
        libc::EAGAIN => WhyRefused::Other(errno),
        libc::ENOMEM => WhyRefused::NoMemory,
        errno => WhyRefused::Failed(FilteredSyscall::TimerCreate, errno),
    }
}

fn has_ended(tid: u32) -> bool {
    // Without `/proc` its CPU clock shows it, if such clocks can be read.
    !is_own_thread(tid) || cpu_ns_of(tid).is_none() && cpu_ns_of(current_tid()).is_some()
}

/// The errno, once a timer could not be deleted. No more are created then: each one would stay.
static STAYS: AtomicI32 = AtomicI32::new(0);

impl Timer {
    /// Creates one that is not set yet, for that thread. `ring` must live until it has [ended](Self::end).
    fn create(signal: c_int, tid: u32, ring: *const HandlerRing) -> Result<Self, WhyRefused> {
        let errno = STAYS.load(Ordering::Relaxed);
        if errno != 0 {
            return Err(WhyRefused::Failed(FilteredSyscall::TimerDelete, errno));
        }
        let number = Target::take().ok_or(WhyRefused::Other(libc::EAGAIN))?;
        let created = create_timer(signal, tid, TAG | u64::from(number));
        let id = created.map_err(|errno| {
            lock_targets().free.push(number);
            // A clock of a thread that has ended is as invalid as one that the system does not have.
            let is_invalid = errno == libc::ESRCH || errno == libc::EINVAL;
            if is_invalid && has_ended(tid) { WhyRefused::Ended } else { why_not_created(errno) }
        })?;
        Target::by_number(number).iter().for_each(|target| target.set(ring));
        Ok(Self { id, number, signal })
    }

    /// Deletes the timer, and waits for a running handler. Returns false if the timer goes on, or the handler does not
    /// return, because its thread was stopped in it.
    fn end(self) -> bool {
        let deleted = delete_timer(self.id);
        if let Err(WhyRefused::Failed(_, errno)) = deleted {
            STAYS.store(errno, Ordering::Relaxed);
        }
        // A timer that is disarmed sends no signal either.
        let is_over = deleted.is_ok() || set_timer(self.id, 0, 0).is_ok();
        let Some(target) = Target::by_number(self.number) else { return true };
        target.set(std::ptr::null());
        if !is_over {
            return false;
        }
        // Pairs with the fence in `handle`: either the handler finds no ring, or `busy` is visible here.
        fence(Ordering::SeqCst);
        let start = Instant::now();
        while target.busy.load(Ordering::Acquire) != 0 {
            if start.elapsed() > MAX_HANDLER_TIME {
                return false;
            }
            std::thread::yield_now();
        }
        lock_targets().free.push(self.number);
        true
    }
}

/// A handler takes some microseconds, but its thread can be preempted in it.
const MAX_HANDLER_TIME: Duration = Duration::from_secs(1);

/// The part of a ring that the signal handler uses.
#[derive(Debug)]
pub(super) struct HandlerRing {
    memory: RingMemory,
    /// Wakes the collector once the ring is half full.
    waker: Option<Arc<Wakeups>>,
    stack_bytes: u64,
    period_ns: u64,
    /// The kernel's ids of the process and the thread, as in records.
    ids: u64,
    stack: ThreadStack,
    /// Samples lost since the last one that was written, because the ring was full.
    lost: AtomicU64,
    /// The position that hooks read: each sample advances it by `step`, independent of its length.
    pub(super) position: AtomicU64,
    pub(super) step: u64,
}

impl HandlerRing {
    pub(super) fn new(
        memory: RingMemory,
        request: SampleRequest,
        (tid, stack): (u32, ThreadStack),
        waker: Option<Arc<Wakeups>>,
    ) -> Self {
        Self {
            memory,
            waker,
            stack,
            stack_bytes: u64::from(request.stack_bytes),
            period_ns: request.period_ns,
            ids: u64::from(tid) << 32 | u64::from(current_pid()),
            lost: AtomicU64::new(0),
            position: AtomicU64::new(0),
            step: request.position_step,
        }
    }
}

/// A ring that the signal handler of a timer fills, on the thread that it samples. Its layout is that of perf's rings.
#[derive(Debug)]
pub struct TimerRing {
    pub(super) ring: Arc<HandlerRing>,
    pub(super) timer: Mutex<Option<Timer>>,
}

impl TimerRing {
    /// The position that hooks read. It differs from the ring's head, since samples vary in length.
    pub(crate) fn position_word(&self) -> &AtomicU64 {
        &self.ring.position
    }

    /// Whether its signal has another handler by now.
    pub fn has_lost_signal(&self) -> bool {
        let timer = self.timer.lock();
        let handler = timer.as_ref().map(|timer| handled_by(timer.signal));
        handler.is_some_and(|handler| handler != Some(on_signal as *const () as usize))
    }

    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        let period_ns = self.ring.period_ns;
        // Random, so that all points of a short time are equally likely to be sampled.
        let first_ns = 1 + RandomState::new().hash_one(period_ns) % period_ns.max(1);
        self.set(first_ns, period_ns)
    }

    pub(crate) fn pause(&self) {
        _ = self.set(0, 0);
    }

    fn set(&self, first_ns: u64, period_ns: u64) -> Result<(), WhyRefused> {
        self.timer.lock().as_ref().map_or(Ok(()), |timer| set_timer(timer.id, first_ns, period_ns))
    }

    /// Ends the sampling of the thread. The records stay in the ring.
    pub fn stop(&self) {
        let mut timer = self.timer.lock();
        if timer.take().is_some_and(|timer| !timer.end()) {
            // A handler may still write to the ring.
            std::mem::forget(Arc::clone(&self.ring));
        }
    }

    /// Ends the sampling, and releases the memory of the records.
    pub(crate) fn retire(&self) {
        self.stop();
        self.ring.memory.discard_records();
    }
}

impl Deref for TimerRing {
    type Target = RingMemory;

    fn deref(&self) -> &RingMemory {
        &self.ring.memory
    }
}

impl Drop for TimerRing {
    fn drop(&mut self) {
        // Timers are not copied into a forked child, where their ids may belong to other timers.
        if self.ring.memory.is_at_home() {
            self.stop();
        }
    }
}

/// The kernel's information on a timer's signal.
#[repr(C)]
struct TimerInfo {
    signal: c_int,
    error: c_int,
    code: c_int,
    padding: c_int,
    timer: c_int,
    overrun: c_int,
    value: u64,
}

#[cfg(target_arch = "x86_64")]
fn registers(context: &libc::ucontext_t) -> (RawRegisters, u64) {
    let [.., bp, _, _, _, _, sp, ip, _, _, _, _, _, _] = context.uc_mcontext.gregs;
    let _: [(); 23] = [(); libc::REG_CR2 as usize + 1];
    ([bp as u64, sp as u64, ip as u64], sp as u64)
}

#[cfg(target_arch = "aarch64")]
fn registers(context: &libc::ucontext_t) -> (RawRegisters, u64) {
    let machine = &context.uc_mcontext;
    let [.., fp, lr] = machine.regs;
    ([fp, lr, machine.sp, machine.pc], machine.sp)
}

/// The alternate signal stack of the interrupted thread, which a handler that was interrupted on it uses up to its end.
fn alternate_stack(context: &libc::ucontext_t) -> Range<u64> {
    let start = context.uc_stack.ss_sp.addr() as u64;
    start..start.saturating_add(context.uc_stack.ss_size as u64)
}

/// The signal handler. It takes no locks, does not allocate or unwind, and modifies nothing but the ring. It can run at
/// any instruction of the program, also inside `malloc`.
pub(super) extern "C" fn handle(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the C library gives each thread its own errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // SAFETY: the kernel passes both to handlers that were installed with `SA_SIGINFO`. This is its layout for timer
    // signals, and other kinds are not smaller.
    let sent = unsafe { &*info.cast::<TimerInfo>() };
    let is_ours = sent.code == libc::SI_TIMER && sent.value & !u64::from(u32::MAX) == TAG;
    if is_ours && let Some(target) = Target::by_number(sent.value as u32) {
        // SAFETY: as above: this is the context of the interrupted thread.
        let context = unsafe { &*context.cast::<libc::ucontext_t>() };
        target.busy.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `Timer::end`.
        fence(Ordering::SeqCst);
        sample(target, context, errno.addr() as u64, sent.overrun);
        // Release: everything was written before.
        target.busy.fetch_sub(1, Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

fn sample(target: &Target, context: &libc::ucontext_t, errno_at: u64, overrun: c_int) {
    let (registers, sp) = &registers(context);
    // SAFETY: null, or a ring. Before it is unmapped, it is removed from the target, and `busy` is awaited.
    let Some(ring) = (unsafe { target.ring.load(Ordering::Acquire).as_ref() }) else { return };
    let ThreadStack { bounds: stack, errno_at: errno_of_thread } = &ring.stack;
    let is_any = *stack == ANY_STACK;
    // Only the ring's own thread may write to it: the signal may be late. A thread with hooks may have got a filter in the
    // meantime that ends the process at system calls.
    let is_its_thread = match is_any {
        true => current_tid() == (ring.ids >> 32) as u32,
        false => stack.contains(sp) || errno_at == *errno_of_thread,
    };
    if !is_its_thread {
        return;
    }
    // Another stack than these (of a coroutine, of Go) may end anywhere, even at the stack pointer.
    let alternate = alternate_stack(context);
    let known = [stack, &alternate].into_iter().find(|stack| stack.contains(sp));
    let end = known.map_or(*sp, |stack| stack.end);
    // Timers on CPU time expire at the kernel's ticks, so one signal can represent several periods.
    let weight_ns = ring.period_ns.saturating_mul(1_u64.saturating_add(overrun.max(0) as u64));
    let most = if is_any { MAX_READ } else { end.wrapping_sub(*sp) };
    let mut writer = ring.memory.writer();
    let before_stack = 8 * (6 + registers.len() as u64);
    // The next sample fits while the reader is woken.
    let most_size = (ring.memory.data_size() as u64 / 2).saturating_sub(LOST_SIZE).min(MAX_SIZE);
    let most_copied = ring.stack_bytes.min(most_size.saturating_sub(before_stack + 24));
    let most = most.min(most_copied) & !7;
    let position = ring.position.load(Ordering::Relaxed);
    let lost = ring.lost.load(Ordering::Relaxed);
    let lost_size = if lost > 0 { LOST_SIZE } else { 0 };
    if !writer.has_room(lost_size + before_stack + most.max(8) + 24) {
        ring.lost.store(lost.wrapping_add(1), Ordering::Relaxed);
        ring.waker.iter().for_each(|waker| waker.wake());
        return;
    }
    let used =
        if is_any { writer.read_ahead(lost_size + before_stack, *sp, most) & !7 } else { most };
    // Without a stack, there would be no weight.
    let reserved = used.max(8);
    let size = before_stack + reserved + 24;
    if lost > 0 {
        ring.lost.store(0, Ordering::Relaxed);
        writer.word(RECORD_LOST | LOST_SIZE << 48);
        writer.word(0);
        writer.word(lost);
        writer.word(position);
    }
    writer.begin_sample(size, ring.ids, registers, reserved);
    if is_any || used == 0 {
        writer.skip(reserved);
    } else {
        // SAFETY: the thread is using everything from its stack pointer to the end of its stack, or of the alternate one
        // that it is on, and is interrupted.
        unsafe { writer.bytes(*sp as *const u8, used) };
    }
    writer.word(used);
    writer.word(weight_ns);
    writer.word(position);
    let is_half_full = writer.used() >= ring.memory.data_size() as u64 / 2;
    writer.publish();
    // After the record: this thread's hooks must not observe the sample before the collector can.
    compiler_fence(Ordering::Release);
    ring.position.store(position.wrapping_add(ring.step), Ordering::Release);
    if is_half_full {
        ring.waker.iter().for_each(|waker| waker.wake());
    }
}

const LOST_SIZE: u64 = 32;
/// A record states its size in 16 bits.
const MAX_SIZE: u64 = 0xfff8;

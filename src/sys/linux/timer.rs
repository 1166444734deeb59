//! Sampling a thread by a timer of its own and a signal.
#![allow(
    unsafe_code,
    reason = "POSIX timers, and a signal handler that copies registers and stack; no crate offers \
              the one without unwinding or locking in the other"
)]

use std::ffi::{c_int, c_void};
use std::hash::{BuildHasher as _, RandomState};
use std::mem::MaybeUninit;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::blocked::{cpu_clock_of, cpu_ns_of};
use super::calls::may;
use super::clock::{monotonic_raw_ns, thread_cpu_ns, tick_ns};
use super::fork::{ForkSafe, ForkSafeGuard};
use super::ring::RingMemory;
use super::signal::{handled_by, last_error, signal_for, unblock};
use crate::sys::types::{SampleRequest, TimerClock, Unusual, WhyRefused};

/// Which thread a signal is for, found from the number that its timer sends along.
///
/// Never freed and used again for other threads, since a signal may come after its timer was
/// deleted. It then finds the stack of another thread here, or none.
#[derive(Debug)]
#[repr(align(64))]
struct Target {
    /// Odd while the rest is written.
    version: AtomicU32,
    ring: AtomicPtr<HandlerRing>,
    stack_low: AtomicU64,
    stack_high: AtomicU64,
    /// Signals that found their thread on another stack than its own.
    off_stack: AtomicU64,
    /// Handlers that may have the ring.
    busy: AtomicU32,
}

const A_CHUNK: usize = 64;
const MOST_CHUNKS: usize = 1024;
type TargetChunk = [Target; A_CHUNK];

/// All targets by number.
static CHUNKS: [AtomicPtr<TargetChunk>; MOST_CHUNKS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MOST_CHUNKS];

static POOL: ForkSafe<Pool> = ForkSafe::new(Pool { free: Vec::new(), made: 0 });

pub(super) struct Pool {
    free: Vec<u32>,
    made: u32,
}

/// All targets that are free; also for the time of a fork.
pub(super) fn lock_targets() -> ForkSafeGuard<Pool> {
    POOL.lock()
}

/// What our timers send beside the number, so that those of others are known.
const TAG: u64 = 0x7472_7066 << 32;

impl Target {
    const fn new() -> Self {
        Self {
            version: AtomicU32::new(0),
            ring: AtomicPtr::new(std::ptr::null_mut()),
            stack_low: AtomicU64::new(0),
            stack_high: AtomicU64::new(0),
            off_stack: AtomicU64::new(0),
            busy: AtomicU32::new(0),
        }
    }

    fn by_number(number: u32) -> Option<&'static Self> {
        let number = number as usize;
        let chunk = CHUNKS.get(number / A_CHUNK)?.load(Ordering::Acquire);
        // SAFETY: null, or a chunk that is never freed.
        unsafe { chunk.as_ref() }?.get(number % A_CHUNK)
    }

    /// Takes one that nobody uses.
    fn take() -> Option<u32> {
        let mut pool = lock_targets();
        if let Some(number) = pool.free.pop() {
            return Some(number);
        }
        let number = pool.made;
        let place = CHUNKS.get(number as usize / A_CHUNK)?;
        if (number as usize).is_multiple_of(A_CHUNK) {
            let chunk: Box<TargetChunk> = Box::new([const { Target::new() }; A_CHUNK]);
            place.store(Box::into_raw(chunk), Ordering::Release);
        }
        pool.made += 1;
        Some(number)
    }

    /// Only for who has taken it.
    fn set(&self, ring: *const HandlerRing, stack: Range<u64>) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.ring.store(ring.cast_mut(), Ordering::Relaxed);
        self.stack_low.store(stack.start, Ordering::Relaxed);
        self.stack_high.store(stack.end, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The ring and the bounds of the stack; none while they are being changed.
    fn get(&self) -> Option<(NonNull<HandlerRing>, Range<u64>)> {
        let before = self.version.load(Ordering::Acquire);
        let ring = NonNull::new(self.ring.load(Ordering::Relaxed))?;
        let low = self.stack_low.load(Ordering::Relaxed);
        let high = self.stack_high.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let is_whole = before & 1 == 0 && self.version.load(Ordering::Relaxed) == before;
        is_whole.then_some((ring, low..high))
    }
}

/// A timer that samples a thread.
#[derive(Debug)]
struct Timer {
    id: libc::timer_t,
    number: u32,
    signal: c_int,
}

// SAFETY: a timer belongs to the process; any thread may set and delete it.
unsafe impl Send for Timer {}

/// Lets the signals of timers come to the calling thread.
pub(crate) fn unblock_timers() -> Result<(), WhyRefused> {
    unblock(signal_of_timers()?);
    Ok(())
}

/// The signal that they send. To choose one makes a timer.
fn signal_of_timers() -> Result<c_int, WhyRefused> {
    let calls = [Unusual::TimerCreate, Unusual::TimerSettime, Unusual::TimerDelete];
    if calls.into_iter().all(may) { signal_for(handle) } else { Err(WhyRefused::Deadly) }
}

/// What samples the thread of that number and with that stack once it is started, if it does not
/// [block](unblock_timers) the signal. Each sample is a record as perf would write it.
pub(crate) fn open_timer_ring(
    request: SampleRequest,
    clock: TimerClock,
    tid: u32,
    stack: Range<u64>,
) -> Result<TimerRing, WhyRefused> {
    // The handler reads the thread's CPU clock at each signal of such a timer.
    if clock == TimerClock::Monotonic && !may(Unusual::ClockGettime) {
        return Err(WhyRefused::Deadly);
    }
    let signal = signal_of_timers()?;
    let memory = RingMemory::anonymous(request.ring_bytes).map_err(|_| WhyRefused::NoMemory)?;
    let ring = Arc::new(HandlerRing::new(memory, request, clock, tid));
    let number = Target::take().ok_or(WhyRefused::Other(libc::EAGAIN))?;
    let target = Target::by_number(number).ok_or(WhyRefused::Other(libc::EAGAIN))?;
    let id = create(signal, clock, tid, TAG | u64::from(number))
        .inspect_err(|_| lock_targets().free.push(number))?;
    target.set(Arc::as_ptr(&ring), stack);
    let timer = Mutex::new(Some(Timer { id, number, signal }));
    Ok(TimerRing { ring, timer, off_stack: AtomicU64::new(0) })
}

fn create(
    signal: c_int,
    clock: TimerClock,
    tid: u32,
    value: u64,
) -> Result<libc::timer_t, WhyRefused> {
    let mut event = MaybeUninit::<libc::sigevent>::zeroed();
    let pointer = event.as_mut_ptr();
    // SAFETY: writes fields of a structure of ours; all zeros is a valid rest.
    unsafe {
        (*pointer).sigev_value = libc::sigval { sival_ptr: value as *mut c_void };
        (*pointer).sigev_signo = signal;
        (*pointer).sigev_notify = libc::SIGEV_THREAD_ID;
        (*pointer).sigev_notify_thread_id = tid.cast_signed();
    }
    let clock = match clock {
        TimerClock::Cpu => cpu_clock_of(tid),
        TimerClock::Monotonic => libc::CLOCK_MONOTONIC,
    };
    let mut id: libc::timer_t = std::ptr::null_mut();
    // SAFETY: both pointers are to initialized structures of ours.
    if unsafe { libc::timer_create(clock, pointer, &raw mut id) } == 0 {
        return Ok(id);
    }
    Err(match last_error() {
        // Each timer takes one of the signals that a user may have pending.
        libc::EAGAIN => WhyRefused::NoTimers,
        libc::ENOSYS | libc::EPERM | libc::EACCES => WhyRefused::NotAllowed,
        // All else that could be invalid is ours.
        libc::ESRCH | libc::EINVAL => WhyRefused::Ended,
        other => WhyRefused::Other(other),
    })
}

impl Timer {
    /// Begins anew with that time to the first signal, 0 for none, and between signals. The error is an errno.
    fn set(&self, first_ns: u64, period_ns: u64) -> Result<(), i32> {
        if !may(Unusual::TimerSettime) {
            return Err(libc::EPERM);
        }
        let time = |ns: u64| libc::timespec {
            // `time_t`, whose name is deprecated on musl.
            tv_sec: (ns / 1_000_000_000) as _,
            tv_nsec: (ns % 1_000_000_000) as libc::c_long,
        };
        let setting = libc::itimerspec { it_interval: time(period_ns), it_value: time(first_ns) };
        // SAFETY: a timer of ours that is not deleted, and a structure that lives long enough.
        let result =
            unsafe { libc::timer_settime(self.id, 0, &raw const setting, std::ptr::null_mut()) };
        if result == 0 { Ok(()) } else { Err(last_error()) }
    }

    /// Whether somebody else handles its signal by now.
    fn has_lost_signal(&self) -> bool {
        handled_by(self.signal) != Some(handle as *const () as usize)
    }

    /// Signals that found the thread on another stack, since this was last asked.
    fn take_off_stack(&self) -> u64 {
        let target = Target::by_number(self.number);
        target.map_or(0, |target| target.off_stack.swap(0, Ordering::Relaxed))
    }

    /// Deletes it, and waits for a handler that has begun before. False if that does not come to its end: its
    /// thread was stopped in it.
    fn end(self) -> bool {
        let may_delete = may(Unusual::TimerDelete);
        if may_delete {
            // SAFETY: made by `timer_create`, and deleted only here.
            unsafe { libc::timer_delete(self.id) };
        }
        let Some(target) = Target::by_number(self.number) else { return true };
        target.set(std::ptr::null(), 0..0);
        if !may_delete {
            return false;
        }
        // With the one in `handle`: it finds no ring, or is found busy here.
        fence(Ordering::SeqCst);
        let start = Instant::now();
        while target.busy.load(Ordering::Acquire) != 0 {
            if start.elapsed() > LONGEST_HANDLER {
                return false;
            }
            std::thread::yield_now();
        }
        lock_targets().free.push(self.number);
        true
    }
}

/// It takes some microseconds, but its thread can be preempted in it.
const LONGEST_HANDLER: Duration = Duration::from_secs(1);

/// What the signal handler must know of a ring.
#[derive(Debug)]
pub(super) struct HandlerRing {
    pub(super) memory: RingMemory,
    stack_bytes: u64,
    period_ns: u64,
    /// The kernel's numbers of the process and the thread, as records have them.
    ids: u64,
    /// Samples stand for the CPU time since the one before.
    counts_cpu: bool,
    cpu_ns: AtomicU64,
    /// Samples that found the ring full since the last that did not.
    lost: AtomicU64,
    /// The position that hooks look at: `step` further with each sample, however long it is.
    pub(super) position: AtomicU64,
    pub(super) step: u64,
}

impl HandlerRing {
    pub(super) fn new(
        memory: RingMemory,
        request: SampleRequest,
        clock: TimerClock,
        tid: u32,
    ) -> Self {
        Self {
            memory,
            stack_bytes: u64::from(request.stack_bytes),
            period_ns: request.period_ns,
            ids: u64::from(tid) << 32 | u64::from(super::process_id()),
            counts_cpu: clock == TimerClock::Monotonic,
            cpu_ns: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            position: AtomicU64::new(0),
            step: request.position_step,
        }
    }
}

/// A ring that the handler of a timer's signal fills, on the thread that it samples. It is laid out as perf's are.
#[derive(Debug)]
pub(crate) struct TimerRing {
    pub(super) ring: Arc<HandlerRing>,
    /// None once it has ended.
    timer: Mutex<Option<Timer>>,
    off_stack: AtomicU64,
}

impl TimerRing {
    /// One that a test fills. Its position moves by `step` at a time.
    #[cfg(test)]
    pub(crate) fn scripted(data_size: usize, step: u64) -> std::io::Result<Self> {
        let request = SampleRequest { position_step: step, ..SampleRequest::default() };
        let memory = RingMemory::anonymous(data_size)?;
        let ring = Arc::new(HandlerRing::new(memory, request, TimerClock::Cpu, 0));
        Ok(Self { ring, timer: Mutex::new(None), off_stack: AtomicU64::new(0) })
    }

    /// The position that hooks look at. It has one of its own, since samples are not all of one length.
    pub(crate) fn position_word(&self) -> &AtomicU64 {
        &self.ring.position
    }

    /// Samples that could not be taken because the thread was on a stack that is not its own, since this was last
    /// asked.
    pub(crate) fn take_off_stack(&self) -> u64 {
        let now = self.timer.lock().as_ref().map_or(0, Timer::take_off_stack);
        now + self.off_stack.swap(0, Ordering::Relaxed)
    }

    /// Whether somebody else handles its signal by now.
    pub(crate) fn has_lost_signal(&self) -> bool {
        self.timer.lock().as_ref().is_some_and(Timer::has_lost_signal)
    }

    /// The shortest CPU time between two samples.
    pub(crate) fn least_interval_ns(&self) -> u64 {
        // Timers of CPU time run out with the kernel's tick.
        let tick_ns = if self.ring.counts_cpu { None } else { tick_ns() };
        self.ring.period_ns.max(tick_ns.unwrap_or(0))
    }

    /// Begins to sample, or goes on.
    pub(crate) fn start(&self) -> Result<(), WhyRefused> {
        let ring = &*self.ring;
        // What the thread has run for until now is nobody's.
        let cpu_ns = cpu_ns_of((ring.ids >> 32) as u32).unwrap_or(0);
        ring.cpu_ns.store(cpu_ns, Ordering::Relaxed);
        // So that no point of a short time is more likely to be sampled than another.
        let first_ns = 1 + RandomState::new().hash_one(cpu_ns) % ring.period_ns.max(1);
        self.set(first_ns, ring.period_ns).map_err(WhyRefused::Other)
    }

    /// Stops, until it is started again.
    pub(crate) fn pause(&self) {
        _ = self.set(0, 0);
    }

    fn set(&self, first_ns: u64, period_ns: u64) -> Result<(), i32> {
        self.timer.lock().as_ref().map_or(Ok(()), |timer| timer.set(first_ns, period_ns))
    }

    /// Ends the sampling of the thread; what is in the ring stays there.
    pub(crate) fn stop(&self) {
        let mut timer = self.timer.lock();
        if let Some(timer) = timer.take() {
            self.off_stack.fetch_add(timer.take_off_stack(), Ordering::Relaxed);
            if !timer.end() {
                // A handler may still write there.
                std::mem::forget(Arc::clone(&self.ring));
            }
        }
    }

    /// The same, and gives back what the records take.
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
        // Timers are not copied into the child of a fork: their numbers may be somebody else's there.
        if self.ring.memory.home().is_current() {
            self.stop();
        }
    }
}

/// What the kernel says of a signal that a timer sent.
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

/// The signal handler. It takes no lock, allocates nothing, unwinds nothing and changes nothing but
/// the ring; it can come at any instruction of the program, also inside `malloc`.
extern "C" fn handle(_: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the C library gives each thread its own errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // SAFETY: the kernel gives both to handlers that were installed with `SA_SIGINFO`; this is the
    // layout that it has for signals of timers, and the other kinds are no smaller.
    let sent = unsafe { &*info.cast::<TimerInfo>() };
    let is_ours = sent.code == libc::SI_TIMER && sent.value & !u64::from(u32::MAX) == TAG;
    if is_ours && let Some(target) = Target::by_number(sent.value as u32) {
        // SAFETY: as above: this is the context of the interrupted thread.
        let registers = unsafe { registers(&*context.cast::<libc::ucontext_t>()) };
        target.busy.fetch_add(1, Ordering::Relaxed);
        // With the one in `Timer::end`.
        fence(Ordering::SeqCst);
        sample(target, &registers, sent.overrun);
        // Release: all that it has written is written.
        target.busy.fetch_sub(1, Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// In the order in which the kernel numbers them, as in a record of perf.
#[cfg(target_arch = "x86_64")]
type RawRegisters = [u64; 3];
#[cfg(target_arch = "aarch64")]
type RawRegisters = [u64; 4];

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

const RECORD_LOST: u64 = 2;
const RECORD_SAMPLE: u64 = 9;
const IN_USER_MODE: u64 = 2;
const ABI_64: u64 = 2;

fn sample(target: &Target, (registers, sp): &(RawRegisters, u64), overrun: c_int) {
    let Some((ring, stack)) = target.get() else { return };
    // Another stack than the thread's own (of a coroutine, of another handler) may end anywhere; and
    // for a signal that came too late this is the stack of another thread.
    if !stack.contains(sp) {
        target.off_stack.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // SAFETY: this is the very thread whose stack it is, so the ring is that of this thread. Whoever unmaps it
    // takes it from the target first, and waits as long as that is busy.
    let ring = unsafe { ring.as_ref() };
    let period_ns = ring.period_ns;
    let weight_ns = if ring.counts_cpu {
        let now = thread_cpu_ns().unwrap_or(0);
        let ran = now.saturating_sub(ring.cpu_ns.swap(now, Ordering::Relaxed));
        // The thread was waiting: what it runs for between two waits is not worth a sample each.
        if ran < period_ns / 16 {
            ring.cpu_ns.store(now.wrapping_sub(ran), Ordering::Relaxed);
            return;
        }
        ran
    } else {
        // Timers of CPU time run out with the kernel's tick: one signal can stand for more.
        period_ns.saturating_mul(1_u64.saturating_add(overrun.max(0) as u64))
    };
    let used = stack.end.wrapping_sub(*sp).min(ring.stack_bytes) & !7;
    if used == 0 {
        target.off_stack.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let mut writer = ring.memory.writer();
    let size = 8 * (5 + registers.len() as u64) + used + 24;
    let position = ring.position.load(Ordering::Relaxed);
    let lost = ring.lost.load(Ordering::Relaxed);
    if !writer.has_room(size + if lost > 0 { LOST_SIZE } else { 0 }) {
        ring.lost.store(lost.wrapping_add(1), Ordering::Relaxed);
        return;
    }
    if lost > 0 {
        ring.lost.store(0, Ordering::Relaxed);
        writer.word(RECORD_LOST | LOST_SIZE << 48);
        writer.word(0);
        writer.word(lost);
        writer.word(position);
    }
    writer.word(RECORD_SAMPLE | IN_USER_MODE << 32 | size << 48);
    writer.word(ring.ids);
    writer.word(monotonic_raw_ns());
    writer.word(ABI_64);
    for register in registers {
        writer.word(*register);
    }
    writer.word(used);
    // SAFETY: the thread is in use of everything from its stack pointer up to the end of its stack,
    // and stands still.
    unsafe { writer.bytes(*sp as *const u8, used) };
    writer.word(used);
    writer.word(weight_ns);
    writer.word(position);
    writer.publish();
    // After the record: the hooks of this thread must not see it before the collector can.
    compiler_fence(Ordering::Release);
    ring.position.store(position.wrapping_add(ring.step), Ordering::Release);
}

const LOST_SIZE: u64 = 32;

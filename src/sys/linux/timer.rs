//! Sampling a thread by a timer of its own and a signal.
#![allow(
    unsafe_code,
    reason = "POSIX timers, and a signal handler that copies registers and stack; no crate offers \
              the one without unwinding or locking in the other"
)]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::blocked::cpu_clock_of;
use super::calls::may;
use super::clock::{monotonic_raw_ns, thread_cpu_ns};
use super::poll::Waker;
use super::ring::Ring;
use super::signal::{hand_on, handled_by, last_error, signal_for, unblock};
use super::sink::Sink;
use super::thread::{current_tid, main_stack};
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
    sink: AtomicPtr<Sink>,
    stack_low: AtomicU64,
    stack_high: AtomicU64,
    /// Signals that found their thread on another stack than its own.
    foreign: AtomicU64,
    /// Handlers that may have the sink.
    busy: AtomicU32,
}

const A_CHUNK: usize = 64;
const MOST_CHUNKS: usize = 1024;
type TargetChunk = [Target; A_CHUNK];

/// All targets by number.
static CHUNKS: [AtomicPtr<TargetChunk>; MOST_CHUNKS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; MOST_CHUNKS];

/// Held over forks, as the lock in the module `signal` is.
static POOL: Mutex<Pool> = Mutex::new(Pool { free: Vec::new(), made: 0 });

pub(super) struct Pool {
    free: Vec<u32>,
    made: u32,
}

pub(super) type Targets = MutexGuard<'static, Pool>;

/// All targets that are free; also for the time of a fork.
pub(super) fn lock_targets() -> Targets {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What our timers send beside the number, so that those of others are known.
const TAG: u64 = 0x7472_7066 << 32;

impl Target {
    const fn new() -> Self {
        Self {
            version: AtomicU32::new(0),
            sink: AtomicPtr::new(std::ptr::null_mut()),
            stack_low: AtomicU64::new(0),
            stack_high: AtomicU64::new(0),
            foreign: AtomicU64::new(0),
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
    fn set(&self, sink: *mut Sink, stack: Range<u64>) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.sink.store(sink, Ordering::Relaxed);
        self.stack_low.store(stack.start, Ordering::Relaxed);
        self.stack_high.store(stack.end, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The sink and the bounds of the stack; none while they are being changed.
    fn get(&self) -> Option<(NonNull<Sink>, Range<u64>)> {
        let before = self.version.load(Ordering::Acquire);
        let sink = NonNull::new(self.sink.load(Ordering::Relaxed))?;
        let low = self.stack_low.load(Ordering::Relaxed);
        let high = self.stack_high.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let is_whole = before & 1 == 0 && self.version.load(Ordering::Relaxed) == before;
        is_whole.then_some((sink, low..high))
    }
}

/// A timer that samples a thread.
#[derive(Debug)]
pub(super) struct Timer {
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
    waker: &Waker,
    tid: u32,
    stack: Range<u64>,
) -> Result<Ring, WhyRefused> {
    // The handler reads the thread's CPU clock at each signal of such a timer.
    if clock == TimerClock::Monotonic && !may(Unusual::ClockGettime) {
        return Err(WhyRefused::Deadly);
    }
    let signal = signal_of_timers()?;
    let ring = Ring::of_ours(request.ring_bytes, waker.wakeups());
    let ring = ring.map_err(|_| WhyRefused::NoMemory)?;
    let sink = ring.sink();
    let number = Target::take().ok_or(WhyRefused::Other(libc::EAGAIN))?;
    let target = Target::by_number(number).ok_or(WhyRefused::Other(libc::EAGAIN))?;
    // SAFETY: the ring is not shared yet, and its timer does not exist.
    unsafe {
        sink.write(Sink {
            memory: ring.sink_memory(),
            stack_bytes: u64::from(request.stack_bytes),
            wake_after_bytes: u64::from(request.wake_after_bytes),
            wakes: ring.wakes(),
            period_ns: request.period_ns,
            ids: u64::from(tid) << 32 | u64::from(super::process_id()),
            counts_cpu: clock == TimerClock::Monotonic,
            cpu_ns: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            position: AtomicU64::new(0),
            step: request.position_step,
        });
    }
    let id = match create(signal, clock, tid, TAG | u64::from(number)) {
        Ok(id) => id,
        Err(why) => {
            lock_targets().free.push(number);
            return Err(why);
        }
    };
    target.set(sink.as_ptr(), stack);
    ring.set_timer(Timer { id, number, signal });
    Ok(ring)
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
    pub(super) fn set(&self, first_ns: u64, period_ns: u64) -> Result<(), i32> {
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
    pub(super) fn has_lost_signal(&self) -> bool {
        handled_by(self.signal) != Some(handle as *const () as usize)
    }

    /// Signals that found the thread on another stack, since this was last asked.
    pub(super) fn take_foreign(&self) -> u64 {
        Target::by_number(self.number).map_or(0, |target| target.foreign.swap(0, Ordering::Relaxed))
    }
}

impl Timer {
    /// Deletes it, and waits for a handler that has begun before. False if that does not come to its end: its
    /// thread was stopped in it.
    pub(super) fn end(self) -> bool {
        let may_delete = may(Unusual::TimerDelete);
        if may_delete {
            // SAFETY: made by `timer_create`, and deleted only here.
            unsafe { libc::timer_delete(self.id) };
        }
        let Some(target) = Target::by_number(self.number) else { return true };
        target.set(std::ptr::null_mut(), 0..0);
        if !may_delete {
            return false;
        }
        // With the one in `handle`: it finds no sink, or is found busy here.
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

/// The addresses of the calling thread's stack.
pub(crate) fn stack_bounds() -> Option<Range<u64>> {
    // Of the main thread's stack a C library may know only what it takes so far (musl does). In the child of a
    // fork the first thread can be one that has another.
    let here = {
        let here = 0_u8;
        (&raw const here).addr() as u64
    };
    if current_tid() == super::process_id()
        && let Some(stack) = main_stack().filter(|stack| stack.contains(&here))
    {
        return Some(stack);
    }
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::zeroed();
    let (mut low, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: fills the structure, which is then read and destroyed; for the calling thread it
    // works at any time.
    let is_known = unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
            return None;
        }
        let result = libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut low, &raw mut size);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        result == 0
    };
    let low = low as u64;
    is_known.then(|| low..low.saturating_add(size as u64))
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
extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the C library gives each thread its own errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // SAFETY: the kernel gives both to handlers that were installed with `SA_SIGINFO`; this is the
    // layout that it has for signals of timers, and the other kinds are no smaller.
    let sent = unsafe { &*info.cast::<TimerInfo>() };
    if sent.code == libc::SI_TIMER && sent.value & !u64::from(u32::MAX) == TAG {
        if let Some(target) = Target::by_number(sent.value as u32) {
            // SAFETY: as above: this is the context of the interrupted thread.
            let registers = unsafe { registers(&*context.cast::<libc::ucontext_t>()) };
            target.busy.fetch_add(1, Ordering::Relaxed);
            // With the one in `Timer::end`.
            fence(Ordering::SeqCst);
            sample(target, &registers, sent.overrun);
            // Release: all that it has written is written.
            target.busy.fetch_sub(1, Ordering::Release);
        }
    } else {
        // SAFETY: in a handler, with what it was given.
        unsafe { hand_on(signal, info, context) };
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
    let Some((sink, stack)) = target.get() else { return };
    // Another stack than the thread's own (of a coroutine, of another handler) may end anywhere; and
    // for a signal that came too late this is the stack of another thread.
    if !stack.contains(sp) {
        target.foreign.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // SAFETY: this is the very thread whose stack it is, so the sink is that of this thread. Whoever unmaps it
    // takes it from the target first, and waits as long as that is busy.
    let sink = unsafe { sink.as_ref() };
    let period_ns = sink.period_ns;
    let weight_ns = if sink.counts_cpu {
        let now = thread_cpu_ns().unwrap_or(0);
        let ran = now.saturating_sub(sink.cpu_ns.swap(now, Ordering::Relaxed));
        // The thread was waiting: what it runs for between two waits is not worth a sample each.
        if ran < period_ns / 16 {
            sink.cpu_ns.store(now.wrapping_sub(ran), Ordering::Relaxed);
            return;
        }
        ran
    } else {
        // Timers of CPU time run out with the kernel's tick: one signal can stand for more.
        period_ns.saturating_mul(1_u64.saturating_add(overrun.max(0) as u64))
    };
    let used = stack.end.wrapping_sub(*sp).min(sink.stack_bytes) & !7;
    if used == 0 {
        target.foreign.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let mut writer = sink.writer();
    let size = 8 * (5 + registers.len() as u64) + used + 24;
    let position = sink.position.load(Ordering::Relaxed);
    let lost = sink.lost.load(Ordering::Relaxed);
    if !writer.has_room(size + if lost > 0 { LOST_SIZE } else { 0 }) {
        sink.lost.store(lost.wrapping_add(1), Ordering::Relaxed);
        return;
    }
    if lost > 0 {
        sink.lost.store(0, Ordering::Relaxed);
        writer.word(RECORD_LOST | LOST_SIZE << 48);
        writer.word(0);
        writer.word(lost);
        writer.word(position);
    }
    writer.word(RECORD_SAMPLE | IN_USER_MODE << 32 | size << 48);
    writer.word(sink.ids);
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
    let is_at_mark = writer.publish();
    // After the record: the hooks of this thread must not see it before the collector can.
    compiler_fence(Ordering::Release);
    sink.position.store(position.wrapping_add(sink.step), Ordering::Release);
    // SAFETY: null, or valid as long as the sink.
    if let Some(wakes) = unsafe { sink.wakes.as_ref() }.filter(|_| is_at_mark)
        && !wakes.pending.swap(true, Ordering::SeqCst)
    {
        wakes.word.fetch_add(1, Ordering::SeqCst);
        // Not by a function of a library, which may be what is interrupted.
        // SAFETY: touches no memory: it only ends the sleep of who sleeps on that word.
        unsafe {
            let wake = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
            libc::syscall(libc::SYS_futex, wakes.word.as_ptr(), wake, i32::MAX);
        }
    }
}

const LOST_SIZE: u64 = 32;

//! Waits until the kernel has checked CPU-time timers. It does so in its tick, and only for the thread that is running
//! then. On a busy machine this can be so rare that a thread burns 60 ms of CPU time in between.

#![allow(unsafe_code, reason = "timers and signals")]

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::Duration;

thread_local! {
    static HAS_COME: Cell<bool> = const { Cell::new(false) };
}

/// A timer on the calling thread's CPU time, like the one that may sample it.
pub(super) struct Tick(libc::timer_t);

/// Longer than a sampling period, as long as no test asks for fewer than 91 samples per second.
const A_PERIOD: Duration = Duration::from_millis(11);

extern "C" fn note(_: libc::c_int) {
    HAS_COME.set(true);
}

impl Tick {
    /// Starts waiting for the next tick that also samples this thread, if a timer samples it. `None` where signals are
    /// blocked, since no timer samples such a thread.
    pub(super) fn await_next() -> Option<Self> {
        // SAFETY: all structures are local and all zeros is a valid value of each. The handler only sets a thread-local
        // flag of the thread that it runs on.
        unsafe {
            let signal = libc::SIGRTMIN() + 5;
            let mut blocked: libc::sigset_t = MaybeUninit::zeroed().assume_init();
            libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), &raw mut blocked);
            if libc::sigismember(&raw const blocked, signal) == 1 {
                return None;
            }
            let handler: extern "C" fn(_) = note;
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = handler as libc::sighandler_t;
            // On the thread's own stack, so that a sample of this handler has a whole stack.
            action.sa_flags = libc::SA_RESTART;
            // The sampling signal that arrives together with this one must interrupt the program, not this handler.
            libc::sigfillset(&raw mut action.sa_mask);
            assert_eq!(libc::sigaction(signal, &raw const action, ptr::null_mut()), 0);
            let mut event: libc::sigevent = MaybeUninit::zeroed().assume_init();
            event.sigev_signo = signal;
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_notify_thread_id = libc::gettid();
            let mut id = ptr::null_mut();
            if libc::timer_create(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut event, &raw mut id) != 0 {
                return None;
            }
            HAS_COME.set(false);
            let mut once: libc::itimerspec = MaybeUninit::zeroed().assume_init();
            once.it_value.tv_nsec = A_PERIOD.as_nanos() as libc::c_long;
            assert_eq!(libc::timer_settime(id, 0, &raw const once, ptr::null_mut()), 0);
            Some(Self(id))
        }
    }

    pub(super) fn has_come(&self) -> bool {
        HAS_COME.get()
    }
}

impl Drop for Tick {
    fn drop(&mut self) {
        // SAFETY: `timer_create` has made it, and only this call deletes it.
        unsafe { libc::timer_delete(self.0) };
    }
}

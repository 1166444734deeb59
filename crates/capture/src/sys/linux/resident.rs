//! Keeps the code of this crate loaded, where a library contains it.
#![allow(unsafe_code, reason = "dladdr and dlopen")]

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

use super::modules::is_in_program;

/// Keeps this code loaded until the process ends. A signal handler stays installed, and a signal can arrive at any time:
/// without this, the program could unload a plugin that contains the handler. Loaded again, it would be another one, which
/// takes another signal.
pub(super) fn keep_loaded() {
    static IS_KEPT: AtomicBool = AtomicBool::new(false);
    let here = keep_loaded as *const c_void;
    if IS_KEPT.swap(true, Ordering::Relaxed) || is_in_program(here.addr() as u64) {
        return;
    }
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: fills the structure.
    let is_known = unsafe { libc::dladdr(here, info.as_mut_ptr()) } != 0;
    // SAFETY: zeroed, and then filled: plain pointers.
    let name = unsafe { info.assume_init() }.dli_fname;
    if is_known && !name.is_null() {
        // If it fails, nothing is kept.
        // SAFETY: the name that the loader has for this library. It is already loaded, so no code of it runs. The handle
        // is never closed.
        unsafe { libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
    }
}

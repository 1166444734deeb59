//! Loads and unloads a library with a layer, again and again, and survives its signal afterwards.

use std::time::{Duration, Instant};

/// The real-time signals that have handlers.
fn handled() -> Vec<i32> {
    let is_handled = |signal: &i32| {
        // SAFETY: only queries; all zeros is a valid action.
        let mut action = unsafe { std::mem::zeroed::<libc::sigaction>() };
        // SAFETY: as above.
        let result = unsafe { libc::sigaction(*signal, std::ptr::null(), &raw mut action) };
        result == 0 && ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction)
    };
    (libc::SIGRTMIN()..=libc::SIGRTMAX()).filter(is_handled).collect()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn main() {
    let path = std::env::args_os().nth(1).unwrap();
    for _ in 0..3 {
        // SAFETY: the library has no initializers of its own.
        let library = unsafe { libloading::Library::new(&path) }.unwrap();
        // SAFETY: the function has this signature.
        let run = *unsafe { library.get::<extern "C" fn() -> bool>(b"run_with_timers") }.unwrap();
        // On a thread, whose thread-locals end with it: as long as one has a destructor in the library, that stays loaded.
        assert!(std::thread::spawn(move || run()).join().unwrap());
        let start = Instant::now();
        while threads() > 1 {
            assert!(start.elapsed() < Duration::from_secs(60), "its threads have ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        library.close().unwrap();
        let signals = handled();
        assert_eq!(signals.len(), 1, "{signals:?}");
        for signal in signals {
            // SAFETY: sends a signal to this thread.
            unsafe { libc::raise(signal) };
        }
    }
    println!("survived");
}

//! Where stacks end: every stack is unwound to the first function of its thread, whatever created that thread, and the
//! main thread is sampled however far its stack has grown. Without the test harness, which runs no test on the main
//! thread.

#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test; threads and callbacks of the C library"
)]

mod support;

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::time::Duration;

use support::{
    HAS_STACKS, Setup, burn, functions, has_perf, points_in, points_with_remark, taken_samples,
};
use tracing::info_span;
use tracing_profiling::Source;
use tracing_profiling::profile::{FrameKind, Location, Profile, Sample, SampleKind};

const A_WHILE: Duration = Duration::from_millis(200);

fn main() {
    if !HAS_STACKS {
        return;
    }
    let mut sources = vec![Source::Timer];
    if has_perf() {
        sources.push(Source::Perf);
    }
    for source in sources {
        // In this order, because a stack never shrinks.
        grows_after_the_first_span(source);
        grows_before_the_first_span(source);

        assert_complete(source, "main", || {
            main_is_busy();
        });
        // For a blocked thread an emulator shows its own stack.
        if std::env::var_os("PROFILING_TEST_EMULATED").is_none() {
            assert_complete(source, "waits", || {
                waits();
                std::thread::scope(|scope| {
                    scope.spawn(with_this_subscriber(waits));
                });
            });
        }
        assert_complete(source, "of_rust", || {
            std::thread::scope(|scope| {
                scope.spawn(with_this_subscriber(of_rust));
            });
        });
        let runs: &[Start] = &[
            start_of_c,
            #[cfg(all(target_arch = "x86_64", not(target_env = "musl")))]
            starts_without_tables,
        ];
        for (is_explicit, start) in [false, true]
            .into_iter()
            .flat_map(|is_explicit| runs.iter().map(move |start| (is_explicit, *start)))
        {
            assert_complete(source, "of_c", || {
                in_thread_of_c(is_explicit, start, &mut with_this_subscriber(of_c))
            });
        }
        called_back(source);
        #[cfg(target_arch = "x86_64")]
        in_assembly(source);
        in_signal_handler(source);
    }
}

fn setup(source: Source) -> Setup {
    Setup::with("0ms|hung=off", |builder| builder.source(source).rate(500))
}

fn only_profile(setup: &Setup) -> Profile {
    setup.profiles().into_iter().next().unwrap()
}

/// Uses that much stack, and is busy at the bottom of it.
#[inline(never)]
fn deep(bytes: usize) {
    let mut taken = [0_u8; 16 * 1024];
    black_box(&mut taken);
    match bytes.checked_sub(taken.len()) {
        Some(rest) => deep(rest),
        None => at_the_bottom(),
    }
    black_box(&mut taken);
}

#[inline(never)]
fn at_the_bottom() {
    burn(A_WHILE);
    black_box(());
}

fn grows_after_the_first_span(source: Source) {
    for bytes in [200 << 10, 1 << 20] {
        let setup = setup(source);
        setup.run(|| {
            let _span = info_span!("grows").entered();
            deep(bytes);
        });
        is_sampled_at_the_bottom(&setup, bytes);
    }
}

fn grows_before_the_first_span(source: Source) {
    #[inline(never)]
    fn deeper(bytes: usize) {
        let mut taken = [0_u8; 16 * 1024];
        black_box(&mut taken);
        match bytes.checked_sub(taken.len()) {
            Some(rest) => deeper(rest),
            None => {
                let _span = info_span!("has grown").entered();
                deep(1 << 20);
            }
        }
        black_box(&mut taken);
    }
    let setup = setup(source);
    setup.run(|| deeper(2 << 20));
    is_sampled_at_the_bottom(&setup, 3 << 20);
}

fn is_sampled_at_the_bottom(setup: &Setup, bytes: usize) {
    let stats = setup.handle.stats();
    assert_eq!(stats.samples.dropped_alt_stack, 0, "{bytes} bytes down: {stats:?}");
    let found = points_in(&only_profile(setup), "at_the_bottom");
    assert!(found > 0, "{bytes} bytes down: {stats:?}");
}

#[inline(never)]
fn main_is_busy() {
    let _span = info_span!("main").entered();
    burn(A_WHILE);
}

/// Blocks in three different system calls.
#[inline(never)]
fn waits() {
    let _span = info_span!("waits").entered();
    let some = A_WHILE / 4;
    burn(A_WHILE / 4);
    std::thread::sleep(some);
    let (_sender, receiver) = std::sync::mpsc::channel::<()>();
    assert!(receiver.recv_timeout(some).is_err());
    let (mutex, condition) = (std::sync::Mutex::new(()), std::sync::Condvar::new());
    drop(condition.wait_timeout(mutex.lock().unwrap(), some).unwrap());
    burn(A_WHILE / 4);
}

#[inline(never)]
fn of_rust() {
    let _span = info_span!("of rust").entered();
    burn(A_WHILE);
}

#[inline(never)]
fn of_c() {
    let _span = info_span!("of c").entered();
    burn(A_WHILE);
}

fn with_this_subscriber(action: fn()) -> impl FnMut() + Send {
    let dispatch = tracing::dispatcher::get_default(Clone::clone);
    move || tracing::dispatcher::with_default(&dispatch, action)
}

/// Asserts that every stack of the action has that function, and no remark that callers are missing.
#[track_caller]
fn assert_complete(source: Source, function: &str, action: impl FnOnce()) {
    let setup = setup(source);
    setup.run(action);
    let profile = only_profile(&setup);
    let stats = setup.handle.stats();
    let all = profile.samples().iter().map(|sample| sample.points.len()).sum::<usize>();
    assert!(all > 0, "{source:?}, {function}: {stats:?}");
    let incomplete = points_with_remark(&profile);
    assert_eq!(incomplete, 0, "{source:?}, {function}: of {all} stacks are incomplete; {stats:?}");
    for sample in taken_samples(&profile).chain(profile.of_kind(SampleKind::OffCpu)) {
        let names = functions(&profile, sample);
        assert!(names.iter().any(|name| name.ends_with(function)), "{names:#?}");
    }
}

type Action<'a> = &'a mut (dyn FnMut() + Send);

type Start = extern "C" fn(*mut c_void) -> *mut c_void;

extern "C" fn start_of_c(action: *mut c_void) -> *mut c_void {
    // SAFETY: the pointer that was passed to `pthread_create` below; the thread is joined before it becomes invalid.
    unsafe { (*action.cast::<Action<'_>>())() };
    action
}

// As `main` of a Rust program with `panic = "abort"`.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    r"
    .globl starts_without_tables
    starts_without_tables:
    push rax
    call {start}
    pop rcx
    ret
    ",
    start = sym start_of_c
);

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    safe fn starts_without_tables(action: *mut c_void) -> *mut c_void;
}

/// Runs on a thread of the C library, with default attributes or with an explicit scheduling policy.
fn in_thread_of_c(is_explicit: bool, start: Start, mut action: Action<'_>) {
    let mut attributes = MaybeUninit::uninit();
    let mut thread = MaybeUninit::uninit();
    // SAFETY: the attributes are initialized before they are used, and the thread is joined.
    unsafe {
        assert_eq!(libc::pthread_attr_init(attributes.as_mut_ptr()), 0);
        if is_explicit {
            // The crate libc does not declare it for every C library.
            unsafe extern "C" {
                fn pthread_attr_setinheritsched(
                    attributes: *mut libc::pthread_attr_t,
                    inherit: c_int,
                ) -> c_int;
            }
            const EXPLICIT: c_int = 1;
            assert_eq!(pthread_attr_setinheritsched(attributes.as_mut_ptr(), EXPLICIT), 0);
        }
        let argument = (&raw mut action).cast();
        let made = libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), start, argument);
        assert_eq!(made, 0);
        assert_eq!(libc::pthread_join(thread.assume_init(), std::ptr::null_mut()), 0);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
    }
}

/// A callback of the C library is not mistaken for the first function of its thread: the stack has the caller of the
/// library, or a remark that it is missing.
fn called_back(source: Source) {
    unsafe extern "C" {
        fn qsort(
            base: *mut c_void,
            count: usize,
            size: usize,
            compare: unsafe extern "C" fn(*const c_void, *const c_void) -> c_int,
        );
    }
    unsafe extern "C" fn compare(one: *const c_void, other: *const c_void) -> c_int {
        compares();
        // SAFETY: the pointers are to elements of the array.
        unsafe { *one.cast::<c_int>() - *other.cast::<c_int>() }
    }
    #[inline(never)]
    fn compares() {
        burn(A_WHILE / 10);
        black_box(());
    }
    #[inline(never)]
    fn sorts() {
        let _span = info_span!("sorts").entered();
        let mut numbers: [c_int; 8] = [8, 3, 5, 1, 7, 2, 6, 4];
        // SAFETY: the array has eight elements of that size.
        unsafe { qsort(numbers.as_mut_ptr().cast(), 8, size_of::<c_int>(), compare) };
        assert_eq!(numbers, [1, 2, 3, 4, 5, 6, 7, 8]);
    }
    let setup = setup(source);
    setup.run(sorts);
    let profile = only_profile(&setup);
    let compared = points_in(&profile, "compares");
    let (sorted, without) = (points_in(&profile, "sorts"), points_with_remark(&profile));
    assert!(compared > 0, "{:?}", setup.handle.stats());
    assert!(sorted + without >= compared, "{sorted} of {compared}, and {without} with a remark");
}

// Functions without unwind tables. Data on the stack looks like a return address.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    r"
    .globl outer_without_tables
    outer_without_tables:
    sub rsp, 24
    call inner_without_tables
    add rsp, 24
    ret
    inner_without_tables:
    push rbx
    push r12
    sub rsp, 40
    mov rbx, rdi
    lea rax, [rip + 3f]
    mov [rsp], rax
    mov [rsp + 24], rax
    2: dec rsi
    jnz 2b
    call rbx
    3: add rsp, 40
    pop r12
    pop rbx
    ret
    "
);

/// A stack through code without unwind tables, running and blocked, ends there and says so; none has a false caller.
#[cfg(target_arch = "x86_64")]
fn in_assembly(source: Source) {
    unsafe extern "C" {
        fn outer_without_tables(call: extern "C" fn(), rounds: u64);
    }
    extern "C" fn is_called() {
        std::thread::sleep(A_WHILE);
        black_box(());
    }
    #[inline(never)]
    fn calls_assembly() {
        let _span = info_span!("assembly").entered();
        // SAFETY: it calls a function without arguments.
        unsafe { outer_without_tables(is_called, 300_000_000) };
        black_box(());
    }
    let setup = setup(source);
    setup.run(calls_assembly);
    let profile = only_profile(&setup);
    let (mut running, mut blocked) = (0, 0);
    for (samples, ends) in [
        (taken_samples(&profile).collect::<Vec<_>>(), &mut running),
        (profile.of_kind(SampleKind::OffCpu).collect(), &mut blocked),
    ] {
        assert!(!samples.is_empty(), "{source:?}: {:?}", setup.handle.stats());
        for sample in samples {
            let names = functions(&profile, sample);
            match names.last().filter(|name| name.starts_with("[callers")) {
                Some(end) => {
                    assert_eq!(*end, "[callers not found: no unwind tables]", "{names:#?}");
                    assert!(!names.iter().any(|name| name.ends_with("calls_assembly")));
                    *ends += sample.points.len();
                }
                None => assert!(
                    names.iter().any(|name| name.ends_with("calls_assembly")),
                    "{source:?}: {names:#?}"
                ),
            }
        }
    }
    // With musl, functions without tables are left out up to one that has them.
    assert!(
        running > 0 && blocked > 0 || cfg!(target_env = "musl"),
        "{source:?}: {running}, {blocked}; {:?}",
        setup.handle.stats()
    );
}

/// A signal handler's stack continues with the function that it interrupted. If the handler has a stack of its own, only
/// that one is copied, and the stack ends with the interrupted instruction and a remark.
fn in_signal_handler(source: Source) {
    extern "C" fn handler(_: c_int) {
        handles();
    }
    #[inline(never)]
    fn handles() {
        burn(A_WHILE);
        std::thread::sleep(A_WHILE);
        black_box(());
    }
    #[inline(never)]
    fn is_interrupted() {
        // SAFETY: the handler is installed.
        assert_eq!(unsafe { libc::raise(libc::SIGUSR2) }, 0);
        black_box(());
    }
    #[inline(never)]
    fn calls() {
        let _span = info_span!("calls").entered();
        is_interrupted();
        burn(A_WHILE / 10);
    }
    let mut own_stack = vec![0_u8; 128 * 1024];
    let own = libc::stack_t {
        ss_sp: own_stack.as_mut_ptr().cast(),
        ss_flags: 0,
        ss_size: own_stack.len(),
    };
    let mut before = MaybeUninit::uninit();
    // SAFETY: the stack is in use until the thread gets its former one back below.
    assert_eq!(unsafe { libc::sigaltstack(&raw const own, before.as_mut_ptr()) }, 0);
    for flags in [0, libc::SA_ONSTACK] {
        install(libc::SIGUSR2, handler, flags);
        let setup = setup(source);
        setup.run(calls);
        let stats = setup.handle.stats();
        let profile = only_profile(&setup);
        let mut kinds = vec![SampleKind::OnCpu, SampleKind::OffCpu];
        if flags == libc::SA_ONSTACK && source == Source::Timer {
            // Timers copy no stack but the thread's own.
            assert!(stats.samples.dropped_alt_stack > 0, "{stats:?}");
            kinds.remove(0);
        }
        if std::env::var_os("PROFILING_TEST_EMULATED").is_some() {
            // For a blocked thread an emulator shows its own stack.
            kinds.retain(|kind| *kind == SampleKind::OnCpu);
        }
        for kind in kinds {
            let mut checked = 0;
            for sample in profile.of_kind(kind) {
                checked += usize::from(continues(&profile, sample, flags == 0));
            }
            assert!(checked > 0, "{kind:?}: {stats:?}");
        }
    }
    // SAFETY: the thread's former stack.
    assert_eq!(unsafe { libc::sigaltstack(before.as_ptr(), std::ptr::null_mut()) }, 0);
}

/// Checks one stack. Returns false if it is none of the handler.
fn continues(profile: &Profile, sample: &Sample, is_on_this_stack: bool) -> bool {
    let names = functions(profile, sample);
    let position = |function| names.iter().position(|name| name.ends_with(function));
    let Some(handler) = position("in_signal_handler::handler") else { return false };
    let (interrupted, calls) = (position("is_interrupted"), position("::calls"));
    let stack: Vec<_> = profile.stack(sample.stack).collect();
    let is_remark = |location: &&Location| location.kind == FrameKind::Remark;
    // In musl, which has no tables, the interrupted function's caller is not found from within musl.
    let is_in_musl = cfg!(target_env = "musl") && interrupted.is_none();
    if is_on_this_stack && !is_in_musl {
        assert!(Some(handler) < interrupted && interrupted < calls, "{names:#?}");
        assert!(position("main") > calls, "{names:#?}");
        assert!(!stack.iter().any(is_remark), "{names:#?}");
    } else {
        assert_eq!((interrupted, calls, position("main")), (None, None, None), "{names:#?}");
        assert!(stack.last().is_some_and(is_remark), "{names:#?}");
    }
    if !is_on_this_stack {
        // The instructions that the handler returns to, the interrupted one, and the remark.
        let of_handler = |location: &&Location| {
            let mut names =
                location.lines.iter().filter_map(|line| profile.function(line.function));
            names.any(|function| function.name.ends_with("in_signal_handler::handler"))
        };
        let handler = stack.iter().position(of_handler);
        assert_eq!(handler.map(|handler| handler + 4), Some(stack.len()), "{names:#?}");
    }
    true
}

/// Installs a handler.
#[cfg(not(target_arch = "aarch64"))]
fn install(signal: c_int, handler: extern "C" fn(c_int), flags: c_int) {
    // SAFETY: all zeros is a valid value. The signal is only raised by this thread for itself, which holds no lock then,
    // so the handler may call what any function may.
    unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
    }
}

#[cfg(target_arch = "aarch64")]
std::arch::global_asm!("returns_from_handler:", "mov x8, #139", "svc #0");

/// Installs a handler that returns to instructions of this program: an emulator has them in no module.
#[cfg(target_arch = "aarch64")]
fn install(signal: c_int, handler: extern "C" fn(c_int), flags: c_int) {
    unsafe extern "C" {
        fn returns_from_handler();
    }
    const SA_RESTORER: u64 = 0x0400_0000;
    let returns: unsafe extern "C" fn() = returns_from_handler;
    // `struct sigaction` of the kernel.
    let action = [handler as usize as u64, flags as u64 | SA_RESTORER, returns as usize as u64, 0];
    let none = std::ptr::null_mut::<u64>();
    // SAFETY: as above.
    let installed = unsafe {
        libc::syscall(libc::SYS_rt_sigaction, signal, action.as_ptr(), none, size_of::<u64>())
    };
    assert_eq!(installed, 0);
}

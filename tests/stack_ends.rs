//! Where stacks end: every stack is unwound to the first function of its thread, whatever created that thread, and the
//! main thread is sampled however far its stack has grown. Work on another stack is sampled, too, and its stack says that
//! its callers are elsewhere. Without the test harness, which runs no test on the main thread.

#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a test; threads and callbacks of the C library"
)]

mod support;

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use corosensei::{Coroutine, CoroutineResult, Yielder};
use cpu_time::ThreadTime;
use support::{
    HAS_STACKS, Log, PLENTY, Setup, burn, functions, has_perf, points_in, points_with_remark,
    taken, taken_samples,
};
use tracing::{Dispatch, info_span};
use tracing_profiling::export::Memory;
use tracing_profiling::profile::{FrameKind, Location, Profile, Sample, SampleKind};
use tracing_profiling::{ProfilingLayer, Source};
use tracing_subscriber::prelude::*;

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
        in_a_large_frame(source);
        on_other_stacks(source);
        std::thread::scope(|scope| {
            scope.spawn(|| on_other_stacks(source));
        });
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
    assert_eq!(stats.stacks.on_other_stacks, 0, "{bytes} bytes down: {stats:?}");
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
        assert!(is_in_musl || names.last() == Some(&ON_ANOTHER_STACK), "{names:#?}");
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

const ON_ANOTHER_STACK: &str = "[callers on another stack]";

/// The callers of a function with a frame that is larger than what is ever copied are not said to be within reach.
fn in_a_large_frame(source: Source) {
    #[inline(never)]
    fn has_a_large_frame() {
        let mut taken = [0_u8; 200 * 1024];
        black_box(&mut taken);
        burn(A_WHILE);
        black_box(&mut taken);
    }
    let setup = setup(source);
    setup.run(|| info_span!("large frame").in_scope(has_a_large_frame));
    let (profile, stats) = (only_profile(&setup), setup.handle.stats());
    for sample in taken_samples(&profile) {
        let names = functions(&profile, sample);
        if !names.iter().any(|name| name.ends_with("has_a_large_frame")) {
            continue;
        }
        assert_eq!(names.last(), Some(&"[callers beyond what can be copied]"), "{names:#?}");
    }
    assert!(points_in(&profile, "has_a_large_frame") > 0, "{stats:?}");
    assert_eq!((stats.stacks.truncated, stats.stacks.on_other_stacks), (0, 0), "{stats:?}");
}

/// Work on the stack of a coroutine, or of Go, is sampled as other work is, and its stack ends with the reason why it has no
/// callers, which no setting helps against.
fn on_other_stacks(source: Source) {
    #[inline(never)]
    fn works_elsewhere() {
        burn(A_WHILE);
        black_box(());
    }
    let on_a_larger_stack = || stacker::grow(1 << 20, works_elsewhere);
    let in_a_coroutine = || {
        let mut coroutine = Coroutine::new(|_: &Yielder<(), ()>, ()| works_elsewhere());
        assert!(matches!(coroutine.resume(()), CoroutineResult::Return(())));
    };
    let mut all: Vec<(_, Box<dyn Fn()>)> =
        vec![("stacker", Box::new(on_a_larger_stack)), ("corosensei", Box::new(in_a_coroutine))];
    match go() {
        Some(spin) => all.push((
            "Go",
            Box::new(move || {
                let start = ThreadTime::now();
                while start.elapsed() < A_WHILE {
                    black_box(spin(10_000_000));
                }
            }),
        )),
        None => println!("skipped: a library of Go"),
    }
    for (name, work) in all {
        let (memory, log) = (Memory::new(), Log::default());
        let layer = ProfilingLayer::builder()
            .rules("0ms|hung=off".parse().unwrap())
            .source(source)
            .rate(500)
            .sampling_delay(Duration::ZERO)
            .cpu_budget(0)
            .exporter(memory.clone())
            .build()
            .unwrap();
        let (handle, writer) = (layer.handle(), log.clone());
        let lines = tracing_subscriber::fmt::layer().with_writer(move || writer.clone());
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(lines).with(layer));
        tracing::dispatcher::with_default(&dispatch, || info_span!("elsewhere").in_scope(&work));
        handle.flush(PLENTY).unwrap();
        let (profile, stats) = (memory.profiles().remove(0), handle.stats());
        let (mut there_ns, mut unknown) = (0, Vec::new());
        for sample in taken_samples(&profile) {
            let names = functions(&profile, sample);
            let ns = sample.points.iter().map(|point| point.weight).sum::<u64>();
            let has = |function: &str| names.iter().any(|name| name.ends_with(function));
            match names.last() {
                // At least the function that ran is known.
                Some(&ON_ANOTHER_STACK) if names.len() > 1 => there_ns += ns,
                // Of Go, perf copies a stack, which has no tables.
                Some(&"[callers not found: no unwind tables]") if name == "Go" => there_ns += ns,
                // The C library of musl has none either.
                Some(&"[callers not found: no unwind tables]")
                    if cfg!(target_env = "musl") && has("clock_gettime") => {}
                _ if has("on_other_stacks") => {}
                _ => unknown.push(names),
            }
        }
        assert_eq!(unknown, [[""; 0]; 0], "{name}, {source:?}");
        let (_, taken_ns) = taken(&profile);
        let on_cpu_ns = profile.spans[0].times.on_cpu().as_nanos() as u64;
        println!(
            "{name}, {source:?}: of {on_cpu_ns} ns on-CPU, samples have {taken_ns}, and {there_ns} on another stack"
        );
        // Nearly none before. Beside other programs, timers have lost a third of it; on a quiet machine, all is printed.
        // Samples that come late on a busy machine are lost and counted.
        let samples = stats.samples;
        let late = samples.dropped_late as f64;
        let came = 1.0 - late / (samples.taken as f64 + late).max(1.0);
        let is_covered = there_ns as f64 >= on_cpu_ns as f64 / 3.0 * came;
        assert!(
            is_covered,
            "{name}, {source:?}: {taken_ns}, {there_ns} of {on_cpu_ns} ns; {stats:?}"
        );
        // With perf, those of Go have no tables, but where its own signal interrupts what runs for long.
        let is_counted =
            stats.stacks.on_other_stacks > 0 || name == "Go" && source != Source::Timer;
        assert!(is_counted && stats.stacks.truncated == 0, "{name}: {stats:?}");
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        assert!(log.contains("elsewhere") && !log.contains("_STACK_BYTES"), "{log}");
        assert!(!log.contains("no sample fell in it"), "{log}");
    }
}

/// A function of a library of Go, which runs on stacks of its own; `None` without a compiler of Go.
fn go() -> Option<extern "C" fn(u64) -> u64> {
    const SOURCE: &str = r#"
package main

import "C"

//export Spin
func Spin(n uint64) uint64 {
	sum := uint64(1)
	for i := uint64(0); i < n; i++ {
		sum = sum*31 + i
	}
	return sum
}

func main() {}
"#;
    static SPIN: OnceLock<Option<extern "C" fn(u64) -> u64>> = OnceLock::new();
    *SPIN.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("spin.go"), SOURCE).unwrap();
        let path = std::env::var("PATH").unwrap_or_default() + ":/usr/local/go/bin";
        let mut build = Command::new("go");
        build.args(["build", "-buildmode=c-shared", "-o", "libspin.so", "spin.go"]);
        let built = build.current_dir(directory.path()).env("PATH", path).status();
        if cfg!(target_env = "musl") || !built.is_ok_and(|status| status.success()) {
            return None;
        }
        // SAFETY: a library of Go may be loaded at any time, and is never unloaded. The function has this type.
        unsafe {
            // Symbols are read from the file.
            let library = libloading::Library::new(directory.keep().join("libspin.so")).ok()?;
            let spin = *library.get::<extern "C" fn(u64) -> u64>(b"Spin").unwrap();
            std::mem::forget(library);
            Some(spin)
        }
    })
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

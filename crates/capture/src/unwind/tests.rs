//! Stacks of code without unwind tables, against what is known of them: functions in assembly that call each other and,
//! with their registers and the stack, a function that takes a copy of it.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test"
)]
#![cfg(all(target_os = "linux", not(miri), not(tracing_profiling_unsupported)))]

use std::ops::Range;

use super::rules::FrameRule;
use super::unwinder::tests::{bytes, stack};
use super::{UnwindEnd, Unwinder};
use crate::sys::nested_code::{Moved, Running, caller, functions, labels, run_stepped};
use crate::sys::{Registers, loaded_modules, read_own_memory};

/// Addresses in memory, and how the stack ends.
fn unwound(ip: u64, sp: u64, bp: Option<u64>, words: &[u8]) -> (Vec<u64>, UnwindEnd) {
    let mut unwinder: Unwinder = Unwinder::default();
    unwinder.refresh();
    let mut frames = Vec::new();
    let word = stack(words);
    let end = match bp {
        Some(bp) => {
            unwinder.unwind(Registers { pc: ip, sp, fp: bp, lr: 0 }, word, 100, &mut frames)
        }
        None => unwinder.unwind_blocked(ip, sp, word, 100, &mut frames).0,
    };
    let modules = unwinder.modules();
    let loaded = |frame: &super::ModuleAddress| {
        let module = frame.module().and_then(|id| modules.get(id));
        module.map_or(frame.address(), |module| module.loaded_at(frame.address()))
    };
    (frames.iter().map(loaded).collect(), end)
}

/// The stack at an instruction of the innermost function, whose callers return to `callers` and then to a function with
/// tables. Sampled, and as a wait. It has a part of the truth and its end is marked, or it is whole.
#[track_caller]
fn check(running: &Running, ip: u64, sp: u64, callers: &[u64], is_whole: bool) {
    let skipped = (sp - running.sp) as usize;
    for bp in [Some(running.bp), None] {
        let (found, end) = unwound(ip, sp, bp, &running.stack[skipped..]);
        let known: Vec<u64> =
            std::iter::once(ip).chain(callers.iter().map(|caller| caller - 1)).collect();
        let may_leave_out = !callers.is_empty() && (!is_whole || bp.is_none());
        if may_leave_out && leaves_out(&found) {
            assert_eq!(found[0], ip);
            continue;
        }
        let common = found.len().min(known.len());
        assert_eq!(found[..common], known[..common], "with {bp:x?}: {end:?}");
        if found.len() > known.len() {
            // The caller of the outermost, which has tables.
            let run = function_at(caller());
            assert!(run.contains(&found[known.len()]), "{found:x?}");
            assert_ne!(end, UnwindEnd::WithoutTables, "{found:x?}");
        } else {
            assert_eq!(end, UnwindEnd::WithoutTables, "with {bp:x?}: {found:x?}");
        }
        if is_whole && bp.is_some() {
            assert!(found.len() > known.len() + 1, "{found:x?}, {end:?}");
            assert!(matches!(end, UnwindEnd::Root | UnwindEnd::Cut), "{end:?}");
        }
    }
}

/// With musl, all that is known of a running function without tables may be the nearest caller that has them, as the
/// functions in between are left out.
fn leaves_out(found: &[u64]) -> bool {
    cfg!(target_env = "musl")
        && found.get(1).is_some_and(|caller_at| function_at(caller()).contains(caller_at))
}

/// The stack ends at its first function.
#[track_caller]
fn check_ends_at_once((found, end): (Vec<u64>, UnwindEnd), ip: u64) {
    if leaves_out(&found) {
        assert!(matches!(end, UnwindEnd::Root | UnwindEnd::Cut), "{found:x?}, {end:?}");
    } else {
        assert_eq!((found, end), (vec![ip], UnwindEnd::WithoutTables));
    }
}

/// A small function that begins there.
fn function_at(start: u64) -> Range<u64> {
    start..start + 400
}

#[test]
fn nested_assembly_has_no_false_caller() {
    let running = functions::unwound_plain_1().run();
    let callers = [
        labels::unwound_plain_3_return(),
        labels::unwound_plain_2_return(),
        labels::unwound_plain_1_return(),
    ];
    let runs = labels::unwound_plain_runs();
    check(&running, runs, running.sp, &callers, false);
    check_ends_at_once(unwound(runs, running.sp, Some(running.bp), &running.stack), runs);
    // At its first instruction and at its return, the caller is known, and nothing of that one's.
    for at in [labels::unwound_plain_4(), labels::unwound_plain_ends()] {
        check(&running, at, running.sp + 56, &callers, false);
        let (found, end) = unwound(at, running.sp + 56, Some(running.bp), &running.stack[56..]);
        assert_eq!(found[..2.min(found.len())], [at, callers[0] - 1]);
        // With musl, functions without tables may be left out between these and the next with tables.
        let is_longer = cfg!(target_env = "musl")
            && found.get(2).is_some_and(|next| function_at(caller()).contains(next));
        assert!(is_longer || (found.len(), end) == (2, UnwindEnd::WithoutTables), "{found:x?}");
    }
}

#[test]
fn frame_pointers_are_followed_where_code_without_tables_saved_them() {
    let running = functions::unwound_framed_1().run();
    let callers = [labels::unwound_framed_2_return(), labels::unwound_framed_1_return()];
    check(&running, labels::unwound_framed_runs(), running.sp, &callers, true);
    // Before it has saved it, and between both instructions of the prologue: it is the caller's.
    let callers_bp = u64::from_ne_bytes(*running.stack[48..].first_chunk().unwrap());
    let early = |sp| Running {
        sp,
        bp: callers_bp,
        stack: running.stack[(sp - running.sp) as usize..].to_vec(),
    };
    let start = labels::unwound_framed_3();
    check(&early(running.sp + 56), start, running.sp + 56, &callers, true);
    check(&early(running.sp + 48), start + 1, running.sp + 48, &callers, false);
}

#[test]
fn a_frame_pointer_of_another_function_is_not_followed() {
    for (function, caller, runs) in [
        (
            functions::unwound_mixed_1(),
            labels::unwound_mixed_1_return(),
            labels::unwound_mixed_runs(),
        ),
        (
            functions::unwound_unseen_1(),
            labels::unwound_unseen_1_return(),
            labels::unwound_unseen_runs(),
        ),
    ] {
        let running = function.run();
        check(&running, runs, running.sp, &[caller], false);
    }
}

#[test]
fn a_general_register_is_not_a_frame_pointer_and_a_zero_is_no_end() {
    for (function, runs) in [
        (functions::unwound_zero(), labels::unwound_zero_runs()),
        (functions::unwound_pair(), labels::unwound_pair_runs()),
        (functions::unwound_nothing(), labels::unwound_nothing_runs()),
        (functions::unwound_reused(), labels::unwound_reused_runs()),
    ] {
        let running = function.run();
        check_ends_at_once(unwound(runs, running.sp, Some(running.bp), &running.stack), runs);
        check(&running, runs, running.sp, &[], false);
    }
}

#[test]
fn tables_that_compute_a_frame_from_memory_are_followed() {
    let running = functions::unwound_stored().run();
    check(&running, labels::unwound_stored_runs(), running.sp, &[], true);
}

#[test]
fn generated_code_is_unwound_by_the_frame_pointers_that_it_saved() {
    let page = Moved::map();
    let framed = page.run(functions::unwound_moved_framed());
    let runs = page.at(labels::unwound_moved_framed_runs());
    check(&framed, runs, framed.sp, &[], true);
    let plain = page.run(functions::unwound_moved_plain());
    let runs = page.at(labels::unwound_moved_plain_runs());
    let (found, end) = unwound(runs, plain.sp, Some(plain.bp), &plain.stack);
    assert_eq!((found, end), (vec![runs], UnwindEnd::WithoutTables));
    check(&plain, runs, plain.sp, &[], false);
    drop(page);
    // Where nothing is mapped any more.
    let (found, end) = unwound(runs, framed.sp, Some(framed.bp), &framed.stack);
    assert_eq!((found, end), (vec![runs], UnwindEnd::WithoutTables));
}

/// A random C library of functions that call each other: directly, by pointers, last; with cheap paths before and behind
/// their first returns, arrays, loops and tables of jumps.
fn random_library(seed: u64) -> String {
    const FUNCTIONS: u64 = 40;
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move |below: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) % below
    };
    let mut source = String::from("long budget, sum, data[64];\n");
    for function in 0..FUNCTIONS {
        source += &format!("static __attribute__((noinline)) long f{function}(long, long *);\n");
    }
    let all: Vec<_> = (0..FUNCTIONS).map(|function| format!("f{function}")).collect();
    source += &format!("long (*volatile table[])(long, long *) = {{ {} }};\n", all.join(", "));
    for function in 0..FUNCTIONS {
        source +=
            &format!("static long f{function}(long n, long *p) {{\n  long r = n + {function};\n");
        if next(3) == 0 {
            source += &format!("  if (n % {} == 0) return r + p[{}];\n", 2 + next(3), next(64));
        }
        source += "  if (--budget < 0) { sum += n; return n; }\n";
        let array = 1 + next(60);
        let has_array = next(3) == 0;
        if has_array {
            source +=
                &format!("  long a[{array}]; for (int i = 0; i < {array}; i++) a[i] = p[i] + r;\n");
        }
        let p = if has_array && array >= 60 { "a" } else { "p" };
        for _ in 0..next(6) {
            let callee = FUNCTIONS - 1 - next(FUNCTIONS - function.min(FUNCTIONS - 1));
            let call = match next(4) {
                0 => format!("table[{callee}](r % 97, p)"),
                1 if function % 5 == 0 => format!("f{}(r % 89, p)", next(FUNCTIONS)),
                _ => format!("f{callee}(r % 91, {p})"),
            };
            source += &match next(6) {
                0 => format!("  for (int i = 0; i < {}; i++) r += {call} ^ i;\n", 2 + next(9)),
                1 => format!("  if (r % {} == 1) return {call} + n;\n", 2 + next(4)),
                2 => format!("  if (r % {} == 1) return {call};\n", 2 + next(4)),
                3 => "  r += n; for (long i = n & 63; i--;) p[i] = p[i] * 3 + r;\n".to_owned(),
                4 => format!(
                    "  switch (r & 7) {{ case 0: r += {call}; break; case 1: r ^= n; break; case 2: r += p[n & 63]; break;\n\
                     case 3: return r; case 4: r *= 3; break; case 5: r += {call} + 1; break; case 6: p[3] += r; }}\n"
                ),
                _ => format!("  r += {call};\n"),
            };
        }
        if next(2) == 0 {
            source += &format!("  return f{}(r % 50, p);\n}}\n", FUNCTIONS - 1 - next(8));
        } else {
            source += "  return r;\n}\n";
        }
    }
    source
        + "void work(void) { for (int i = 0; i < 40; i++) { budget = 40; sum += f0(i, data) + table[i % 9](i, data); } }\n"
}

/// In libraries that were built for frame pointers and without tables, every caller that is found is the true one, and nearly
/// all stacks are whole, wherever they are sampled, although more of these functions end with calls or are small than of
/// others. `PROFILING_TEST_LIBRARIES` is how many.
#[test]
fn random_libraries_with_frame_pointers_have_no_false_caller() {
    let libraries =
        std::env::var("PROFILING_TEST_LIBRARIES").map_or(3, |text| text.parse().unwrap());
    let (mut whole, mut all) = (0, 0);
    for seed in 0..libraries {
        let optimized = ["-O2", "-O3", "-Os", "-O1"][seed as usize % 4];
        let (framed, tables) = ("-fno-omit-frame-pointer", "-fno-asynchronous-unwind-tables");
        let flags = [optimized, framed, tables, "-fno-unwind-tables", "-nostdlib"];
        let Some(steps) = run_stepped(&random_library(seed), &flags, 97) else { return };
        let mut unwinder: Unwinder = Unwinder::default();
        unwinder.refresh();
        let mut frames = Vec::new();
        for step in &steps {
            let [ip, sp, bp] = step.registers;
            let words = bytes(&step.stack);
            let registers = Registers { pc: ip, sp, fp: bp, lr: 0 };
            let end = unwinder.unwind(registers, stack(&words), 1_000, &mut frames);
            let modules = unwinder.modules();
            let found = frames.iter().map(|frame| {
                let module = frame.module().and_then(|id| modules.get(id));
                module.map_or(frame.address(), |module| module.loaded_at(frame.address()))
            });
            let callers = step.callers.iter().map(|caller| caller - 1);
            let truth: Vec<_> = std::iter::once(ip).chain(callers).collect();
            let found: Vec<_> = found.take(truth.len()).collect();
            assert_eq!(found, truth[..found.len()], "seed {seed}, {end:?}");
            assert!(found.len() == truth.len() || end == UnwindEnd::WithoutTables, "{end:?}");
            (whole, all) = (whole + usize::from(found.len() == truth.len()), all + 1);
        }
    }
    println!("{whole} of {all} stacks are whole");
    assert!(all > 1_000 && whole * 10 > all * 9, "{whole} of {all}");
}

/// Whether a call ends right before an address, by the encodings in the manual.
fn is_after_call(address: u64) -> bool {
    let Ok(code) = read_own_memory(address - 8..address) else { return false };
    let before = |length: usize| &code[8 - length..];
    let indirect = |code: &[u8]| {
        code[0] == 0xff && code[1] >> 3 & 7 == 2 && {
            let (mode, base) = (code[1] >> 6, code[1] & 7);
            let has_index = mode != 3 && base == 4;
            let displacement = match mode {
                0 if base == 5 || has_index && code.len() > 2 && code[2] & 7 == 5 => 4,
                0 | 3 => 0,
                1 => 1,
                _ => 4,
            };
            code.len() == 2 + usize::from(has_index) + displacement
        }
    };
    before(5)[0] == 0xe8 || (2..=7).any(|length| indirect(before(length)))
}

#[test]
fn random_stacks_have_no_frame_that_is_not_after_a_call() {
    let mut unwinder: Unwinder = Unwinder::default();
    unwinder.refresh();
    let modules = loaded_modules(true).modules;
    let segments: Vec<_> = modules.iter().flat_map(|module| &module.code).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        random >> 16
    };
    // Addresses of code, half of them after calls.
    let mut addresses = Vec::new();
    while addresses.len() < 1_000 {
        let segment = &segments[next() as usize % segments.len()].addresses;
        let address = segment.start + 8 + next() % (segment.end - segment.start - 8);
        let after = (address..segment.end).take(500).find(|address| is_after_call(*address));
        addresses.extend([Some(address), after].into_iter().flatten());
    }
    let sp = 0x7fff_0000_0000;
    let (mut callers, mut roots) = (0, 0);
    let mut frames = Vec::new();
    for round in 0..2_000 {
        let ip = addresses[next() as usize % addresses.len()];
        let words: Vec<u64> = (0..64)
            .map(|_| match next() % 8 {
                0 => 0,
                1 => sp + next() % 64 * 8,
                2 => next(),
                _ => addresses[next() as usize % addresses.len()],
            })
            .collect();
        let words = bytes(&words);
        let bp = if next() % 4 == 0 { next() } else { sp + next() % 64 * 8 };
        let end = match round % 2 {
            0 => unwinder.unwind(
                Registers { pc: ip, sp, fp: bp, lr: 0 },
                stack(&words),
                100,
                &mut frames,
            ),
            _ => unwinder.unwind_blocked(ip, sp, stack(&words), 100, &mut frames).0,
        };
        let modules = unwinder.modules();
        let found: Vec<u64> = frames
            .iter()
            .map(|frame| {
                let module = frame.module().and_then(|id| modules.get(id));
                module.map_or(frame.address(), |module| module.loaded_at(frame.address()))
            })
            .collect();
        for address in found.iter().skip(1) {
            assert!(is_after_call(address + 1), "{address:#x} in {found:x?}, {end:?}");
            callers += 1;
        }
        let last = *found.last().unwrap();
        if end == UnwindEnd::Root {
            // What calls the first functions with musl has no tables.
            let is_first = match unwinder.place(last).rule {
                FrameRule::First => true,
                rule => cfg!(target_env = "musl") && rule == FrameRule::Missing,
            };
            assert!(is_first, "{found:x?}");
            roots += 1;
        }
    }
    assert!(callers > 100, "{callers} callers, {roots} roots");
}

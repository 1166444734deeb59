//! What is sampled.

use std::arch::global_asm;
use std::ffi::{CString, c_ulong, c_void};
use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

const A_WHILE: Duration = Duration::from_millis(600);

type Case = (&'static str, Box<dyn Fn()>);

pub(crate) fn all() -> Vec<Case> {
    let mut all: Vec<Case> = vec![
        ("zstd: decompress", Box::new(zstd())),
        ("ring: SHA-256", Box::new(sha256)),
        ("ring: ChaCha20-Poly1305", Box::new(|| seal(&ring::aead::CHACHA20_POLY1305))),
        ("ring: AES-256-GCM", Box::new(|| seal(&ring::aead::AES_256_GCM))),
        ("PCRE2, compiled at run time", Box::new(pcre2)),
        ("C without tables, with frame pointers", Box::new(|| c_code(no_tables_framed))),
        ("C without tables or frame pointers", Box::new(|| c_code(no_tables_plain))),
        (
            "anonymous page, with frame pointers",
            Box::new(page(&raw const framed_start, &raw const framed_end)),
        ),
        (
            "anonymous page, rbp is a counter",
            Box::new(page(&raw const counter_start, &raw const counter_end)),
        ),
        (
            "anonymous page, rbp is old",
            Box::new(page(&raw const stale_start, &raw const stale_end)),
        ),
    ];
    match go() {
        Some(case) => all.push(("Go, a shared library", Box::new(case))),
        None => println!("skipped: Go is not installed"),
    }
    all
}

#[inline(never)]
pub(crate) fn burn(time: Duration) {
    let start = Instant::now();
    let mut sum = 0_u64;
    while start.elapsed() < time {
        for i in 0..10_000 {
            sum = sum.wrapping_mul(31).wrapping_add(black_box(i));
        }
    }
    black_box(sum);
}

fn for_a_while(mut step: impl FnMut()) {
    let start = Instant::now();
    while start.elapsed() < A_WHILE {
        step();
    }
}

/// Text of few letters, which is decoded by Huffman tables, in hand-written assembly.
fn zstd() -> impl Fn() {
    let mut state = 1_u32;
    let text: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        b"eeeeeeettttaaoinshr"[(state >> 16) as usize % 19]
    })
    .take(4 << 20)
    .collect();
    let packed = zstd::encode_all(&text[..], 1).expect("packed");
    move || for_a_while(|| drop(black_box(zstd::decode_all(&packed[..]).expect("unpacked"))))
}

fn sha256() {
    let data = vec![7; 1 << 20];
    for_a_while(|| _ = black_box(ring::digest::digest(&ring::digest::SHA256, &data)));
}

fn seal(algorithm: &'static ring::aead::Algorithm) {
    use ring::aead::{Aad, LessSafeKey, Nonce, UnboundKey};
    let key = UnboundKey::new(algorithm, &[7; 32]).expect("a key");
    let key = LessSafeKey::new(key);
    let mut data = vec![7; 1 << 20];
    for_a_while(|| {
        let nonce = Nonce::assume_unique_for_key([1; 12]);
        _ = black_box(key.seal_in_place_separate_tag(nonce, Aad::empty(), &mut data).expect("sealed"));
    });
}

fn pcre2() {
    let regex =
        pcre2::bytes::RegexBuilder::new().jit(true).build(r"(a+)+b\d*(?:x|yz)+$").expect("a regex");
    let text = [b"aaaaaaaaaaaaac".repeat(40), b"ab12xyz".to_vec()].concat();
    for_a_while(|| _ = black_box(regex.is_match(&text)));
}

unsafe extern "C" {
    fn no_tables_framed(rounds: c_ulong, call: extern "C" fn()) -> c_ulong;
    fn no_tables_plain(rounds: c_ulong, call: extern "C" fn()) -> c_ulong;
}

extern "C" fn sleeps() {
    std::thread::sleep(Duration::from_millis(20));
    black_box(());
}

fn c_code(function: unsafe extern "C" fn(c_ulong, extern "C" fn()) -> c_ulong) {
    // SAFETY: it only computes and calls the function.
    for_a_while(|| _ = black_box(unsafe { function(10_000_000, sleeps) }));
}

/// Calls a copy of the code between the addresses.
fn page(start: *const c_void, end: *const c_void) -> impl Fn() {
    let length = end.addr() - start.addr();
    // SAFETY: a new mapping, which is never unmapped; the source is code of this program.
    let code: extern "C" fn(extern "C" fn(), u64, u64) = unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_ne!(page, libc::MAP_FAILED);
        std::ptr::copy_nonoverlapping(start.cast::<u8>(), page.cast::<u8>(), length);
        assert_eq!(libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_EXEC), 0);
        std::mem::transmute(page)
    };
    move || for_a_while(|| code(sleeps, 3, sleeps as *const () as u64))
}

unsafe extern "C" {
    static framed_start: c_void;
    static framed_end: c_void;
    static counter_start: c_void;
    static counter_end: c_void;
    static stale_start: c_void;
    static stale_end: c_void;
}

// Each is called with a function, how many times to call it, and a word.
global_asm!(
    "
    .macro work
    2: mov rcx, 20000000
    3: dec rcx
    jnz 3b
    .endm

    .globl framed_start
    framed_start:
    push rbp
    mov rbp, rsp
    push rbx
    push r12
    mov rbx, rdi
    mov r12, rsi
    work
    call rbx
    dec r12
    jnz 2b
    pop r12
    pop rbx
    pop rbp
    ret
    .globl framed_end
    framed_end:

    .globl counter_start
    counter_start:
    push rbp
    push rbx
    push r12
    mov rbx, rdi
    mov r12, rsi
    2: mov rbp, 20000000
    3: dec rbp
    jnz 3b
    mov rbp, r12
    call rbx
    dec r12
    jnz 2b
    pop r12
    pop rbx
    pop rbp
    ret
    .globl counter_end
    counter_end:

    .globl stale_start
    stale_start:
    push rbp
    push rbx
    push r12
    sub rsp, 64
    mov rbx, rdi
    mov r12, rsi
    // What a frame that has ended has left: a link and a return address, which is that of a function here.
    mov rbp, rsp
    mov [rbp + 8], rdx
    lea rax, [rbp + 32]
    mov [rbp], rax
    mov [rbp + 40], rdx
    mov qword ptr [rbp + 32], 0
    work
    call rbx
    dec r12
    jnz 2b
    add rsp, 64
    pop r12
    pop rbx
    pop rbp
    ret
    .globl stale_end
    stale_end:
    "
);

/// A library of Go, which runs on stacks of its own.
fn go() -> Option<impl Fn()> {
    const SOURCE: &str = r#"
package main

import "C"

func inner(n uint64) uint64 {
	sum := uint64(1)
	for i := uint64(0); i < n; i++ {
		sum = sum*31 + i
	}
	return sum
}

//export Spin
func Spin(n uint64) uint64 { return inner(n) + inner(n+1) }

func main() {}
"#;
    let directory = tempfile::tempdir().ok()?;
    let library = directory.path().join("libspin.so");
    std::fs::write(directory.path().join("spin.go"), SOURCE).ok()?;
    let mut build = Command::new("go");
    let built = build
        .args(["build", "-buildmode=c-shared", "-o"])
        .arg(&library)
        .arg("spin.go")
        .current_dir(directory.path())
        .status();
    if !built.is_ok_and(|status| status.success()) {
        return None;
    }
    // Symbols are read from the file.
    let directory = directory.keep();
    let path =
        CString::new(directory.join("libspin.so").into_os_string().into_encoded_bytes()).ok()?;
    // SAFETY: a library of Go may be loaded at any time, and is never unloaded.
    let spin: extern "C" fn(u64) -> u64 = unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let spin = libc::dlsym(library, c"Spin".as_ptr());
        assert!(!spin.is_null(), "loaded");
        std::mem::transmute(spin)
    };
    Some(move || for_a_while(|| _ = black_box(spin(10_000_000))))
}

//! Stacks of few words, by frame pointers and small programs.

use super::*;
use crate::sys::LoadedModule;
use crate::sys::{MappedPart, NoFile};

type Aarch64 = Unwinder<framehop::aarch64::UnwinderAarch64<TableBytes>>;
type X86 = Unwinder<framehop::x86_64::UnwinderX86_64<TableBytes>>;

pub(crate) fn code(addresses: Range<u64>) -> LoadedModule {
    let code = vec![MappedPart { addresses, file_offset: 0 }];
    LoadedModule {
        file: Err(NoFile::NotRead),
        loader_name: "/code".into(),
        is_vdso: false,
        bias: 0,
        loaded: code.clone(),
        code,
        read_only: Vec::new(),
        eh_frame_hdr: None,
        notes: Vec::new(),
    }
}

pub(crate) fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub(crate) fn stack(bytes: &[u8]) -> impl Fn(u64) -> Option<u64> {
    |offset| {
        let rest = bytes.get(usize::try_from(offset).ok()?..)?;
        rest.first_chunk().map(|word| u64::from_ne_bytes(*word))
    }
}

pub(crate) fn addresses(frames: &[ModuleAddress]) -> Vec<u64> {
    frames.iter().map(|frame| frame.address()).collect()
}

/// Two frames linked by frame pointers: zeros at `sp`, and the caller's frame pointer and return address at `fp`.
const STACK_POINTER: u64 = 0x7000;

fn two_frames(return_address: u64) -> Vec<u8> {
    bytes(&[0, 0, STACK_POINTER + 0x20, return_address, 0, 0])
}

/// Code with a prologue at its beginning, and a call before `AFTER_CALL`.
const fn code_with(prologue: &[u8], call: &[u8]) -> Code {
    let mut code = [0; 64];
    code.split_at_mut(prologue.len()).0.copy_from_slice(prologue);
    let call_at = AFTER_CALL as usize - call.len();
    code.split_at_mut(call_at).1.split_at_mut(call.len()).0.copy_from_slice(call);
    Code(code)
}

#[repr(align(16))]
struct Code([u8; 64]);

const RUNNING: u64 = 16;
const AFTER_CALL: u64 = 40;
/// `push rbp; mov rbp, rsp` and `call rax`.
static OF_X86_64: Code = code_with(b"\x55\x48\x89\xe5", b"\xff\xd0");
/// `stp x29, x30, [sp, -16]!; mov x29, sp` and `blr x8`.
static OF_AARCH64: Code = code_with(b"\xfd\x7b\xbf\xa9\xfd\x03\0\x91", b"\0\x01\x3f\xd6");

fn addresses_of(Code(program): &'static Code) -> Range<u64> {
    let start = program.as_ptr() as u64;
    start..start + program.len() as u64
}

#[test]
fn unwinds_by_frame_pointers_where_there_are_no_tables() {
    if cfg!(tracing_profiling_unsupported) {
        // No code can be read.
        return;
    }
    let mut unwinder = X86::default();
    let program = addresses_of(&OF_X86_64);
    unwinder.update(&ChangedModules::of(vec![code(program.clone())]));
    let ip = program.start + RUNNING;
    let registers = Registers { pc: ip, sp: STACK_POINTER, fp: STACK_POINTER + 0x10, lr: 0 };
    let mut frames = Vec::new();
    let return_address = program.start + AFTER_CALL;
    let end = unwinder.unwind(registers, stack(&two_frames(return_address)), 100, &mut frames);
    assert_eq!(addresses(&frames), [ip, return_address - 1]);
    // A zero is no caller, and no end of the stack.
    assert_eq!(end, UnwindEnd::WithoutTables);
    // No call is before it.
    let other = return_address + 1;
    let end = unwinder.unwind(registers, stack(&two_frames(other)), 100, &mut frames);
    assert_eq!((addresses(&frames), end), (vec![ip], UnwindEnd::WithoutTables));
}

#[test]
fn strips_the_signature_of_return_addresses_on_aarch64() {
    if cfg!(tracing_profiling_unsupported) {
        return;
    }
    let mut unwinder = Aarch64::default();
    let program = addresses_of(&OF_AARCH64);
    unwinder.update(&ChangedModules::of(vec![code(program.clone())]));
    let signature = 0x00a5 << 48;
    let (pc, return_address) = (program.start + RUNNING, program.start + AFTER_CALL);
    let registers = Registers {
        pc,
        sp: STACK_POINTER,
        fp: STACK_POINTER + 0x10,
        lr: signature | return_address,
    };
    let mut frames = Vec::new();
    let signed = two_frames(signature | return_address);
    let end = unwinder.unwind(registers, stack(&signed), 100, &mut frames);
    assert_eq!(addresses(&frames), [pc, return_address - 1]);
    assert_eq!(end, UnwindEnd::WithoutTables);
}

#[test]
fn a_stack_longer_than_its_copy_is_cut() {
    if cfg!(tracing_profiling_unsupported) {
        return;
    }
    let mut unwinder = X86::default();
    let program = addresses_of(&OF_X86_64);
    unwinder.update(&ChangedModules::of(vec![code(program.clone())]));
    let ip = program.start + RUNNING;
    let registers = Registers { pc: ip, sp: STACK_POINTER, fp: STACK_POINTER + 0x10, lr: 0 };
    let mut frames = Vec::new();
    let whole = two_frames(program.start + AFTER_CALL);
    let cut = stack(&whole[..0x18]);
    assert_eq!(unwinder.unwind(registers, cut, 100, &mut frames), UnwindEnd::Cut);
    assert_eq!(addresses(&frames), [ip]);
    let most = 1;
    assert_eq!(unwinder.unwind(registers, stack(&whole), most, &mut frames), UnwindEnd::Cut);
    assert_eq!(frames.len(), 1);
}

#[test]
fn what_was_not_copied_says_where_the_callers_are() {
    if cfg!(tracing_profiling_unsupported) {
        return;
    }
    let (stack, elsewhere) = (vec![0_u8; 200_000], vec![0_u8; 200_000]);
    let (bottom, other) = (stack.as_ptr().addr() as u64, elsewhere.as_ptr().addr() as u64);
    let own = bottom..bottom + stack.len() as u64;
    let of_own = |at| end_beyond(&own, bottom + 1_000, at);
    assert_eq!(of_own(bottom + 40_000), UnwindEnd::Cut);
    assert_eq!(of_own(bottom + 150_000), UnwindEnd::TooFar);
    assert_eq!(of_own(bottom), UnwindEnd::Lost);
    assert_eq!(of_own(other), UnwindEnd::OtherStack);
    assert_eq!(of_own(16), UnwindEnd::Lost, "it is not mapped");
    // On another stack: a longer one, and one that goes on in the thread's own.
    assert_eq!(end_beyond(&own, other, other + 40_000), UnwindEnd::Cut);
    assert_eq!(end_beyond(&own, other, bottom + 150_000), UnwindEnd::OtherStack);
    // Of a thread whose stack is not known.
    assert_eq!(end_beyond(&ANY_STACK, bottom, bottom + 150_000), UnwindEnd::TooFar);
}

#[test]
fn arbitrary_input_does_not_panic() {
    let mut unwinder = Unwinder::<Native>::default();
    unwinder.refresh();
    let mut frames = Vec::new();
    let mut random = 0x1234_5678_9abc_def0_u64;
    let mut next = || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        random
    };
    let here = arbitrary_input_does_not_panic as *const () as u64;
    for _ in 0..2_000 {
        let near = |x: u64| here.wrapping_add(x % 100_000).wrapping_sub(50_000);
        let (pc, sp) = (near(next()), next());
        let (fp, lr) = (sp.wrapping_add(next() % 64), near(next()));
        let registers = Registers { pc, sp, fp, lr };
        let words: Vec<u64> = (0..next() % 64).map(|_| near(next())).collect();
        unwinder.unwind(registers, stack(&bytes(&words)), 100, &mut frames);
        assert!(frames.len() <= 100);
    }
}

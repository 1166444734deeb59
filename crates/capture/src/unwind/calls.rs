//! The encodings of call instructions, decoded backwards from their last byte.

pub(super) const LONGEST: usize = 8;

/// A function that does little but jump to another does so within this many bytes.
pub(super) const STUB: usize = 32;

/// Most functions set up their frame within this many bytes.
pub(super) const PROLOGUE: usize = 32;

/// What a function did to save its caller's frame pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SavedFrame {
    /// Where the function begins, in bytes before the end of the code.
    pub(crate) begins_before: usize,
    /// From the saved frame pointer to the stack pointer of the caller.
    pub(crate) caller_above: u64,
    /// Something after it is like the end of a function.
    pub(crate) has_ended: bool,
    /// The bytes of the registers that it pushes next, about, and of the rest of the frame.
    pub(crate) saved: u64,
    pub(crate) local: u64,
    /// The code says how large the frame is.
    pub(crate) has_size: bool,
}

impl SavedFrame {
    /// The distance from the stack pointer to the frame pointer, about.
    pub(super) fn size(self) -> Option<u64> {
        self.has_size.then_some(self.saved + self.local)
    }

    /// Whether it is what lies between these.
    pub(super) fn fills(self, sp: u64, fp: u64) -> bool {
        self.size().is_some_and(|size| sp.checked_add(size) == Some(fp))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallTarget {
    Address(u64),
    /// The address stored at this address.
    Stored(u64),
    /// An address in a register.
    Unknown,
}

impl CallTarget {
    pub(super) fn address(self) -> Option<u64> {
        if let Self::Address(address) = self { Some(address) } else { None }
    }
}

/// The calls that `code`, right before `return_address`, may end with. There can be several, because the start of an
/// instruction cannot be determined from its end.
pub(super) fn x86_64_calls(code: [u8; LONGEST], return_address: u64) -> [Option<CallTarget>; 3] {
    let [.., d0, d1, d2, d3] = code;
    let relative = return_address.wrapping_add_signed(i32::from_le_bytes([d0, d1, d2, d3]).into());
    let [_, _, opcode, modrm, ..] = code;
    let direct = code[3] == 0xe8;
    let stored = opcode == 0xff && modrm == 0x15;
    let by_register = (2..LONGEST).any(|length| is_call_by_register(&code, length));
    [
        direct.then_some(CallTarget::Address(relative)),
        stored.then_some(CallTarget::Stored(relative)),
        by_register.then_some(CallTarget::Unknown),
    ]
}

/// Whether this is a `call r/m64` whose address is in a register, or in memory that a register points to.
fn is_call_by_register(code: &[u8; LONGEST], length: usize) -> bool {
    let Some([0xff, modrm, rest @ ..]) = code.get(LONGEST - length..) else {
        return false;
    };
    let (mode, operation, register) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    // Register 4 means that a SIB byte with base and index follows.
    let (has_index, base) = match (register, rest.first()) {
        (4, Some(index)) if mode != 3 => (true, index & 7),
        _ => (false, register),
    };
    let displacement = match mode {
        0 if base == 5 && !has_index => return false,
        0 if base == 5 => 4,
        0 | 3 => 0,
        1 => 1,
        _ => 4,
    };
    operation == 2 && length == 2 + usize::from(has_index) + displacement
}

/// Marks a valid indirect branch target, where the processor checks them.
const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];

/// The targets of the jumps in code. The code is not decoded instruction by instruction, so some results may not be jumps.
pub(super) fn x86_64_jumps(code: &[u8], address: u64) -> impl Iterator<Item = CallTarget> {
    (0..code.len()).filter_map(move |offset| {
        let (length, distance) = match code.get(offset..)? {
            [0xeb | 0x70..=0x7f, distance, ..] => {
                let next = address.wrapping_add(offset as u64 + 2);
                let distance = i64::from(distance.cast_signed());
                return Some(CallTarget::Address(next.wrapping_add_signed(distance)));
            }
            [0xe9, distance @ ..] => (1, distance),
            [0x0f, 0x80..=0x8f, distance @ ..] | [0xff, 0x25, distance @ ..] => (2, distance),
            [0xff, operation, ..] if operation >> 3 & 7 == 4 => return Some(CallTarget::Unknown),
            _ => return None,
        };
        let is_stored = code.get(offset) == Some(&0xff);
        let distance = distance.first_chunk::<4>()?;
        let next = address.wrapping_add((offset + length + distance.len()) as u64);
        let target = next.wrapping_add_signed(i32::from_le_bytes(*distance).into());
        Some(if is_stored { CallTarget::Stored(target) } else { CallTarget::Address(target) })
    })
}

/// How many prologues `push rbp; mov rbp, rsp` this code has, at most two, and the last. A compiler can move both
/// instructions apart, and behind the first returns of a function.
///
/// Where instructions begin is not known. Bytes that only happen to be those of an end cost a caller; those of a prologue are
/// three and near a fourth.
pub(super) fn x86_64_saved_frames(code: &[u8]) -> (usize, Option<SavedFrame>) {
    const APART: usize = 64;
    let prologue = |at: usize| {
        let is_set = matches!(code.get(at..at + 3)?, [0x48, 0x89, 0xe5] | [0x48, 0x8b, 0xec]);
        let from = at.saturating_sub(APART);
        let before = if is_set { code.get(from..at)? } else { &[] };
        Some((from + before.iter().rposition(|byte| *byte == 0x55)?, at))
    };
    let mut found = (1..code.len()).rev().filter_map(prologue);
    let Some((pushed_at, set_at)) = found.next() else { return (0, None) };
    let (before, _) = code.split_at(pushed_at);
    let marker = if before.ends_with(ENDBR64) { ENDBR64.len() } else { 0 };
    let after = code.get(set_at + 3..).unwrap_or_default();
    // `pop rbp` or `leave`, then a return or a jump.
    let is_end = |code: &[u8]| match code {
        [0x5d | 0xc9, 0xc2 | 0xc3 | 0xe9 | 0xeb | 0xf2 | 0xf3 | 0xff] => true,
        // `ud2`, or what fills the space to the next function.
        [0x0f, 0x0b] | [0xcc, 0xcc] => true,
        _ => false,
    };
    let first_end = after.windows(2).position(is_end);
    // The registers that are pushed next: each once, the upper eight with a prefix.
    let (mut pushed, mut local, mut before, mut has_size) = (0_u16, 0, 0, true);
    let start = after.get(..first_end.unwrap_or(after.len())).unwrap_or_default();
    for at in 0..start.len().min(80) {
        local = match start.get(at..).unwrap_or_default() {
            // sub rsp, n
            [0x48, 0x83, 0xec, size, ..] => u64::from(*size),
            [0x48, 0x81, 0xec, s0, s1, s2, s3, ..] => {
                u64::from(u32::from_le_bytes([*s0, *s1, *s2, *s3]))
            }
            [byte, rest @ ..] => {
                // and rsp, n
                has_size &= !(*byte == 0x48 && rest.starts_with(&[0x83, 0xe4]));
                let upper = if before == 0x41 { 8 } else { 0 };
                pushed |= u16::from(byte & 0xf8 == 0x50) << (byte & 7 | upper);
                before = *byte;
                continue;
            }
            [] => 0,
        };
        break;
    }
    let saved = 8 * u64::from(pushed.count_ones());
    let last = SavedFrame {
        begins_before: code.len() - pushed_at + marker,
        caller_above: 16,
        has_ended: first_end.is_some(),
        saved,
        local,
        has_size,
    };
    (1 + usize::from(found.next().is_some()), Some(last))
}

/// The code before an instruction that is read to find where the frame pointer was saved.
pub(super) const LONGEST_SAVING: u64 = 1 << 16;

/// Finds the last prologue in this code: `stp x29, x30, [sp, ...]`, then `mov x29, sp` or `add x29, sp, n`.
pub(super) fn aarch64_saved_frame(code: &[u8]) -> Option<SavedFrame> {
    /// Instructions that save other registers in between.
    const BETWEEN: usize = 12;
    let instructions: Vec<u32> = code
        .rchunks_exact(4)
        .filter_map(|bytes| bytes.first_chunk().map(|bytes| u32::from_le_bytes(*bytes)))
        .collect();
    // The last comes first.
    let sets = |word: &u32| word & 0xff80_03ff == 0x9100_03fd;
    let set_at = instructions.iter().position(sets)?;
    let earlier = instructions.get(set_at + 1..)?;
    let saves = |word: &u32| word & 0xfc40_7fff == 0xa800_7bfd;
    let saved_at = earlier.iter().take(BETWEEN).position(saves)?;
    let saved = *earlier.get(saved_at)?;
    // Seven bits with a sign, in units of eight bytes.
    let offset = i64::from((saved << 10) as i32 >> 25) * 8;
    let above_sp = |word: u32| u64::from(word >> 10 & 0xfff);
    let is_pushed = saved >> 23 & 3 == 3;
    let (begins_at, caller_above) = if is_pushed {
        (saved_at, offset.unsigned_abs())
    } else {
        // sub sp, sp, n
        let allocates = |word: &u32| word & 0xff80_03ff == 0xd100_03ff;
        let after = earlier.get(saved_at + 1..)?;
        let at = after.iter().take(BETWEEN).position(allocates)?;
        (saved_at + 1 + at, above_sp(*after.get(at)?).checked_sub(offset.unsigned_abs())?)
    };
    // The frame pointer must be where the pair is.
    let set_to = above_sp(*instructions.get(set_at)?);
    let is_at_pair = if is_pushed { set_to == 0 } else { set_to == offset.unsigned_abs() };
    let begins_before = 4 * (set_at + 1 + begins_at + 1);
    let has_ended = instructions.iter().take(set_at).any(|word| is_aarch64_return(*word));
    let (saved, local, has_size) = (0, 0, false);
    let saved = SavedFrame { begins_before, caller_above, has_ended, saved, local, has_size };
    is_at_pair.then_some(saved)
}

/// `ret`, `retaa` or `retab`.
pub(super) fn is_aarch64_return(word: u32) -> bool {
    matches!(word, 0xd65f_03c0 | 0xd65f_0bff | 0xd65f_0fff)
}

/// The call that `code`, right before `return_address`, ends with.
pub(super) fn aarch64_call(code: [u8; LONGEST], return_address: u64) -> Option<CallTarget> {
    let [.., b0, b1, b2, b3] = code;
    let word = u32::from_le_bytes([b0, b1, b2, b3]);
    if word >> 26 == 0b10_0101 {
        // BL: 26 bits of a signed number of instructions.
        let distance = i64::from((word << 6) as i32 >> 6) * 4;
        return Some(CallTarget::Address(
            return_address.wrapping_sub(4).wrapping_add_signed(distance),
        ));
    }
    // BLR, and its forms that authenticate a pointer.
    (word & 0xfeff_f000 == 0xd63f_0000).then_some(CallTarget::Unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn x86_64(call: &[u8]) -> Vec<CallTarget> {
        let mut code = [0x90; LONGEST];
        code[LONGEST - call.len()..].copy_from_slice(call);
        x86_64_calls(code, 0x1000).into_iter().flatten().collect()
    }

    #[test]
    fn reads_the_calls_of_x86_64() {
        assert_eq!(x86_64(&[0xe8, 0xf0, 0xff, 0xff, 0xff]), [CallTarget::Address(0xff0)]);
        assert_eq!(x86_64(&[0xff, 0x15, 0x10, 0, 0, 0]), [CallTarget::Stored(0x1010)]);
        for by_register in [
            &[0xff, 0xd0][..],                     // rax
            &[0x41, 0xff, 0xd4],                   // r12
            &[0xff, 0x10],                         // [rax]
            &[0x41, 0xff, 0x14, 0x24],             // [r12]
            &[0xff, 0x14, 0xc8],                   // [rax + rcx * 8]
            &[0xff, 0x50, 0x18],                   // [rax + 0x18]
            &[0xff, 0x54, 0x24, 0x10],             // [rsp + 0x10]
            &[0xff, 0x90, 0, 1, 0, 0],             // [rax + 0x100]
            &[0xff, 0x94, 0x24, 0, 1, 0, 0],       // [rsp + 0x100]
            &[0xff, 0x14, 0xcd, 0, 0x10, 0x20, 0], // [rcx * 8 + 0x201000]
        ] {
            assert_eq!(x86_64(by_register), [CallTarget::Unknown], "{by_register:x?}");
        }
        for none in [&[0x90][..], &[0xff, 0xe0], &[0xff, 0x50], &[0xe9, 0, 0, 0, 0]] {
            assert_eq!(x86_64(none), [], "{none:x?}");
        }
    }

    #[test]
    fn reads_the_stubs_of_x86_64() {
        let jumps = |bytes: &[u8]| -> Vec<CallTarget> {
            let mut code = [0; STUB];
            code[..bytes.len()].copy_from_slice(bytes);
            x86_64_jumps(&code, 0x1000).collect()
        };
        assert_eq!(jumps(&[0xff, 0x25, 0x10, 0, 0, 0]), [CallTarget::Stored(0x1016)]);
        assert_eq!(jumps(&[0xe9, 0x10, 0, 0, 0]), [CallTarget::Address(0x1015)]);
        let with_prefixes = [0xf3, 0x0f, 0x1e, 0xfa, 0xf2, 0xff, 0x25, 0x10, 0, 0, 0];
        assert_eq!(jumps(&with_prefixes), [CallTarget::Stored(0x101b)]);
        // add rdi, 8; jmp
        let with_work = [0x48, 0x83, 0xc7, 0x08, 0xe9, 0xf7, 0xff, 0xff, 0xff];
        assert_eq!(jumps(&with_work), [CallTarget::Address(0x1000)]);
        assert_eq!(jumps(&[0x55, 0x48, 0x89, 0xe5]), []);
        assert_eq!(jumps(&[0xe9; STUB]).len(), STUB - 4);
    }

    #[test]
    fn finds_where_x86_64_saved_the_frame_pointer() {
        let saved = |code: &[u8]| {
            let (number, saved) = x86_64_saved_frames(code);
            let saved = saved?;
            assert_eq!(saved.caller_above, 16);
            Some((number, saved.begins_before, saved.has_ended))
        };
        let prologue = [0x55, 0x48, 0x89, 0xe5];
        assert_eq!(saved(&prologue), Some((1, 4, false)));
        assert_eq!(saved(&[0x55, 0x48, 0x8b, 0xec, 0x90]), Some((1, 5, false)));
        assert_eq!(saved(&[ENDBR64, &prologue, &[0x53]].concat()), Some((1, 9, false)));
        assert_eq!(saved(&[&prologue[..], &[0x90; 8], &prologue].concat()), Some((2, 4, false)));
        // `mov ebx, eax` has the byte of a return.
        assert_eq!(saved(&[&prologue[..], &[0x89, 0xc3]].concat()), Some((1, 6, false)));
        // At the return itself.
        assert_eq!(saved(&[&prologue[..], &[0x5d]].concat()), Some((1, 5, false)));
        for end in [&[0x5d, 0xc3][..], &[0xc9, 0xc3], &[0x5d, 0xe9], &[0x0f, 0x0b], &[0xcc, 0xcc]] {
            assert_eq!(
                saved(&[&prologue[..], end, &[0x90]].concat()),
                Some((1, 7, true)),
                "{end:x?}"
            );
        }
        // Another instruction in between.
        assert_eq!(saved(&[0x55, 0x53, 0x48, 0x89, 0xe5]), Some((1, 5, false)));
        assert_eq!(saved(&[0x48, 0x89, 0xe5]), None);
        assert_eq!(saved(&[]), None);
        let frame =
            [&prologue[..], &[0x41, 0x57, 0x31, 0xc0, 0x53, 0x48, 0x83, 0xec, 0x28]].concat();
        let saved = x86_64_saved_frames(&frame).1.unwrap();
        assert_eq!((saved.saved, saved.local), (16, 0x28));
        let size = |code: &[&[u8]]| x86_64_saved_frames(&code.concat()).1.unwrap().size();
        let pushes = [0x55, 0x48, 0x89, 0xe5, 0x41, 0x57, 0x53];
        assert_eq!(size(&[&pushes]), Some(16));
        assert_eq!(size(&[&pushes, &[0x48, 0x81, 0xec, 0, 1, 0, 0]]), Some(16 + 0x100));
        assert_eq!(size(&[&pushes, &[0x48, 0x83, 0xe4, 0xe0, 0x48, 0x83, 0xec, 8]]), None);
        // `lea r14, [rip + 0x2653]` between them: each register is pushed once.
        let lea = [0x4c, 0x8d, 0x35, 0x53, 0x26, 0, 0];
        assert_eq!(size(&[&pushes, &lea, &[0x48, 0x83, 0xec, 0x28]]), Some(16 + 0x28));
    }

    #[test]
    fn finds_where_aarch64_saved_the_frame_pointer() {
        let saved = |words: &[u32]| {
            let code: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let saved = aarch64_saved_frame(&code).filter(|saved| !saved.has_ended);
            saved.map(|saved| (saved.begins_before, saved.caller_above))
        };
        const NOP: u32 = 0xd503_201f;
        // stp x29, x30, [sp, #-32]!; mov x29, sp
        let pushed = [0xa9be_7bfd, 0x9100_03fd];
        assert_eq!(saved(&pushed), Some((8, 32)));
        assert_eq!(saved(&[NOP, 0xa9be_7bfd, 0xa901_4ff4, 0x9100_03fd, NOP]), Some((16, 32)));
        // sub sp, sp, #48; stp x29, x30, [sp, #32]; add x29, sp, #32
        let allocated = [0xd100_c3ff, 0xa902_7bfd, 0x9100_83fd];
        assert_eq!(saved(&allocated), Some((12, 16)));
        // add x29, sp, #16: elsewhere.
        assert_eq!(saved(&[0xd100_c3ff, 0xa902_7bfd, 0x9100_43fd]), None);
        assert_eq!(saved(&[0xa9be_7bfd, 0x9100_03fd, 0xd65f_03c0, NOP]), None);
        assert_eq!(saved(&[0x9100_03fd]), None);
        assert_eq!(saved(&[]), None);
    }

    #[test]
    fn reads_the_calls_of_aarch64() {
        let call = |word: u32| {
            let [b0, b1, b2, b3] = word.to_le_bytes();
            aarch64_call([0, 0, 0, 0, b0, b1, b2, b3], 0x1000)
        };
        assert_eq!(call(0x9400_0004), Some(CallTarget::Address(0xffc + 0x10)));
        assert_eq!(call(0x97ff_ffff), Some(CallTarget::Address(0xffc - 4)));
        assert_eq!(call(0xd63f_0100), Some(CallTarget::Unknown));
        assert_eq!(call(0xd73f_0901), Some(CallTarget::Unknown));
        assert_eq!(call(0xd65f_03c0), None);
        assert_eq!(call(0x1400_0004), None);
    }
}

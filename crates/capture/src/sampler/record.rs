//! Parses the records that the kernel writes into a ring, without trusting any byte of them.
//!
//! The layouts are those of `perf_event_open(2)` for exactly the attributes that `sys` requests. Nothing here accesses
//! the kernel: the bytes come through `RecordBytes`, from a ring or from a test.

use crate::sys::{Registers, RingMemory};

/// Bytes at positions that only grow: a ring, or a copy of one.
pub(crate) trait RecordBytes {
    /// The eight bytes from there on.
    fn word(&self, position: u64) -> u64;
}

impl RecordBytes for RingMemory {
    fn word(&self, position: u64) -> u64 {
        Self::word(self, position)
    }
}

/// A copy, whose positions begin at 0; zeros beyond its end.
impl RecordBytes for [u8] {
    fn word(&self, position: u64) -> u64 {
        let from = usize::try_from(position).unwrap_or(usize::MAX);
        let mut word = [0; 8];
        word.iter_mut()
            .zip(self.get(from..).unwrap_or_default())
            .for_each(|(to, from)| *to = *from);
        u64::from_ne_bytes(word)
    }
}

const RECORD_LOST: u32 = 2;
const RECORD_THROTTLE: u32 = 5;
const RECORD_SAMPLE: u32 = 9;
const RECORD_SWITCH: u32 = 14;
const MISC_CPU_MODE: u16 = 7;
const MISC_KERNEL: u16 = 1;
const MISC_SWITCH_OUT: u16 = 1 << 13;
const MISC_SWITCH_OUT_PREEMPT: u16 = 1 << 14;

const HEADER: u64 = 8;

/// A record, as far as its header and its first words show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// A sample; read it with [`read_sample`].
    Sample(RecordPlace),
    /// The kernel found the ring full `count` times since the previous record.
    Lost { count: u64, place: RecordPlace },
    /// The kernel paused sampling because it took too long.
    Throttled,
    SwitchOut {
        /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
        time_ns: u64,
        /// Whether the scheduler preempted the thread; otherwise the thread blocked.
        preempted: bool,
    },
    SwitchIn {
        /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
        time_ns: u64,
    },
    /// A record that was not requested.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordPlace {
    /// The position of its header.
    pub(crate) position: u64,
    /// The length of the record in bytes, header included.
    pub(crate) size: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

#[derive(Debug)]
pub(crate) struct Records<'a, B: ?Sized> {
    bytes: &'a B,
    position: u64,
    end: u64,
}

impl<'a, B: RecordBytes + ?Sized> Records<'a, B> {
    /// Both positions must be ends of records.
    pub(crate) fn between(bytes: &'a B, position: u64, end: u64) -> Self {
        Self { bytes, position, end }
    }

    fn word(&self, offset: u64) -> u64 {
        self.bytes.word(self.position.wrapping_add(offset))
    }

    fn read(&self, kind: u32, misc: u16, size: u16) -> Record {
        match kind {
            RECORD_SAMPLE => Record::Sample(RecordPlace { position: self.position, size }),
            RECORD_LOST if size >= 24 => {
                let place = RecordPlace { position: self.position, size };
                Record::Lost { count: self.word(16), place }
            }
            RECORD_THROTTLE => Record::Throttled,
            RECORD_SWITCH if size >= 16 => {
                let time_ns = self.word(HEADER);
                if misc & MISC_SWITCH_OUT != 0 {
                    Record::SwitchOut { time_ns, preempted: misc & MISC_SWITCH_OUT_PREEMPT != 0 }
                } else {
                    Record::SwitchIn { time_ns }
                }
            }
            _ => Record::Other,
        }
    }
}

impl<B: RecordBytes + ?Sized> Iterator for Records<'_, B> {
    type Item = Result<Record, Malformed>;

    /// The position after a malformed record is unknown, so iteration ends there.
    fn next(&mut self) -> Option<Self::Item> {
        let left = self.end.checked_sub(self.position).filter(|left| *left > 0)?;
        let header = self.word(0);
        let (kind, misc, size) = (header as u32, (header >> 32) as u16, (header >> 48) as u16);
        if u64::from(size) < HEADER || u64::from(size) > left || size % 8 != 0 {
            self.position = self.end;
            return Some(Err(Malformed));
        }
        let record = self.read(kind, misc, size);
        self.position = self.position.wrapping_add(u64::from(size));
        Some(Ok(record))
    }
}

/// The architecture, which determines a sample's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the processors' own names")]
pub(crate) enum Machine {
    X86_64,
    Aarch64,
}

impl Machine {
    pub(crate) const NATIVE: Self =
        if cfg!(target_arch = "aarch64") { Self::Aarch64 } else { Self::X86_64 };

    /// The number of registers. The kernel stores them in the order of their numbers.
    fn registers(self) -> u64 {
        match self {
            Self::X86_64 => 3,
            Self::Aarch64 => 4,
        }
    }

    /// The size in bytes of a sample with a stack copy of `stack_bytes`, taken in user space.
    pub(crate) fn sample_size(self, stack_bytes: u32) -> u64 {
        // Header, thread, time, length of the kernel's chain, ABI, registers, stack size, stack, used stack size.
        let size = HEADER + 8 * (4 + self.registers() + 1) + u64::from(stack_bytes) + 8;
        // The kernel copies less, so that the record's 16 bits can state its length.
        size.min(u64::from(u16::MAX) & !7)
    }
}

/// A sample. Its stack is not copied out of the ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawSample<'a, B: ?Sized> {
    /// The kernel's ids of the process and the thread.
    pub(crate) pid: u32,
    pub(crate) tid: u32,
    /// `CLOCK_MONOTONIC_RAW` in nanoseconds.
    pub(crate) time_ns: u64,
    /// Whether the thread was in the kernel; then `registers` are those of its system call.
    pub(crate) in_kernel: bool,
    /// Addresses in the kernel, the innermost first.
    pub(crate) kernel_chain: Words<'a, B>,
    pub(crate) registers: Registers,
    /// The bytes from the stack pointer up.
    pub(crate) stack: Words<'a, B>,
    /// The CPU time that the sample represents, if that is not one period. Only timers record it.
    pub(crate) weight_ns: Option<u64>,
}

/// Words of a record, read in the ring: the kernel's copy of a stack, or its call chain.
///
/// Unwinding reads a few words per frame. Copying all of a stack would move every line out of the cache of the sampled
/// thread's CPU, which would have to fetch them back to write its next sample.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words<'a, B: ?Sized> {
    bytes: &'a B,
    position: u64,
    /// In bytes.
    length: u64,
}

impl<B: RecordBytes + ?Sized> Words<'_, B> {
    #[cfg(any(test, fuzzing))]
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// The word at that many bytes, if there is one: of a stack, above the stack pointer.
    pub(crate) fn word(&self, offset: u64) -> Option<u64> {
        let end = offset.checked_add(8)?;
        (end <= self.length).then(|| self.bytes.word(self.position.wrapping_add(offset)))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        (0..self.length / 8).map_while(|number| self.word(8 * number))
    }
}

/// The position at which hooks observed a record of a timer's ring: its last word.
pub(crate) fn stated_position<B: RecordBytes + ?Sized>(bytes: &B, place: RecordPlace) -> u64 {
    bytes.word(place.position.wrapping_add(u64::from(place.size)).wrapping_sub(8))
}

/// Fails if the record's lengths contradict each other, or if it has no user registers.
pub(crate) fn read_sample<B: RecordBytes + ?Sized>(
    bytes: &B,
    place: RecordPlace,
    machine: Machine,
) -> Result<RawSample<'_, B>, Malformed> {
    const ABI_64: u64 = 2;
    const CHAIN: u64 = HEADER + 16;
    let at = |offset: u64| bytes.word(place.position.wrapping_add(offset));
    let words = |offset: u64, length: u64| {
        let position = place.position.wrapping_add(offset);
        Words { bytes, position, length }
    };
    let record_size = u64::from(place.size);
    let chain_room = record_size.checked_sub(CHAIN + 8).ok_or(Malformed)?;
    let chain_length = Some(at(CHAIN)).filter(|length| *length <= chain_room / 8);
    let chain_bytes = 8 * chain_length.ok_or(Malformed)?;
    let abi = CHAIN + 8 + chain_bytes;
    let registers_end = abi + 8 * (1 + machine.registers());
    let stack_start = registers_end + 8;
    if stack_start > record_size || at(abi) != ABI_64 {
        return Err(Malformed);
    }
    let reserved = at(registers_end);
    // If no stack could be copied, there are no stack bytes and no second length.
    let mut length = 0;
    if reserved > 0 {
        if reserved % 8 != 0 || reserved > record_size || stack_start + reserved + 8 > record_size {
            return Err(Malformed);
        }
        length = at(stack_start + reserved);
        if length > reserved {
            return Err(Malformed);
        }
    }
    let after_stack = stack_start + reserved + 8;
    let weight_ns = (reserved > 0 && after_stack + 8 <= record_size).then(|| at(after_stack));
    let register = |number: u64| at(abi + 8 + 8 * number);
    let misc = (at(0) >> 32) as u16;
    Ok(RawSample {
        in_kernel: misc & MISC_CPU_MODE == MISC_KERNEL,
        kernel_chain: words(CHAIN + 8, chain_bytes),
        weight_ns,
        pid: at(8) as u32,
        tid: (at(8) >> 32) as u32,
        time_ns: at(16),
        registers: match machine {
            Machine::X86_64 => {
                Registers { fp: register(0), sp: register(1), pc: register(2), lr: 0 }
            }
            Machine::Aarch64 => {
                Registers { fp: register(0), lr: register(1), sp: register(2), pc: register(3) }
            }
        },
        stack: words(stack_start, length),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: u32, misc: u16, size: u16) -> Vec<u8> {
        [&kind.to_ne_bytes()[..], &misc.to_ne_bytes(), &size.to_ne_bytes()].concat()
    }

    fn words(bytes: &mut Vec<u8>, words: &[u64]) {
        words.iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
    }

    /// A sample of thread 7 in process 5, with 16 bytes reserved for its stack.
    fn sample(machine: Machine, used: u64) -> Vec<u8> {
        let registers: &[u64] = match machine {
            Machine::X86_64 => &[0xb0, 0x50, 0x10],
            Machine::Aarch64 => &[0xf0, 0x12, 0x50, 0xc0],
        };
        let size = machine.sample_size(16);
        let mut bytes = header(RECORD_SAMPLE, 2, size as u16);
        words(&mut bytes, &[7 << 32 | 5, 1_000, 0, 2]);
        words(&mut bytes, registers);
        words(&mut bytes, &[16, 0x1111, 0x2222, used]);
        assert_eq!(bytes.len() as u64, size);
        bytes
    }

    fn read(bytes: &[u8], machine: Machine) -> Result<RawSample<'_, [u8]>, Malformed> {
        read_sample(bytes, RecordPlace { position: 0, size: bytes.len() as u16 }, machine)
    }

    #[track_caller]
    fn refused(bytes: &[u8]) {
        assert_eq!(read(bytes, Machine::X86_64).err(), Some(Malformed));
    }

    #[test]
    fn reads_the_registers_of_each_machine() {
        let bytes = sample(Machine::X86_64, 16);
        let x86 = read(&bytes, Machine::X86_64).unwrap();
        assert_eq!(x86.tid, 7);
        assert_eq!(x86.time_ns, 1_000);
        assert_eq!(x86.registers, Registers { pc: 0x10, sp: 0x50, fp: 0xb0, lr: 0 });
        assert_eq!(x86.stack.length(), 16);
        let bytes = sample(Machine::Aarch64, 16);
        let attach = read(&bytes, Machine::Aarch64).unwrap();
        assert_eq!(attach.registers, Registers { pc: 0xc0, sp: 0x50, fp: 0xf0, lr: 0x12 });
    }

    #[test]
    fn reads_the_kernel_call_chain() {
        let plain = sample(Machine::X86_64, 16);
        let with_chain = |claimed: u64, chain: &[u64]| {
            let mut bytes =
                header(RECORD_SAMPLE, MISC_KERNEL, (plain.len() + 8 * chain.len()) as u16);
            bytes.extend(&plain[8..24]);
            words(&mut bytes, &[claimed]);
            words(&mut bytes, chain);
            bytes.extend(&plain[32..]);
            bytes
        };
        for chain in [&[][..], &[u64::MAX - 127, 0xffff_ffff_8000_1234]] {
            let bytes = with_chain(chain.len() as u64, chain);
            let sample = read(&bytes, Machine::X86_64).unwrap();
            assert!(sample.in_kernel);
            assert_eq!(sample.kernel_chain.iter().collect::<Vec<_>>(), chain);
            assert_eq!(sample.registers, Registers { pc: 0x10, sp: 0x50, fp: 0xb0, lr: 0 });
            assert_eq!(sample.weight_ns, None);
        }
        for claimed in [1, 3, 1 << 60, u64::MAX] {
            let bytes = with_chain(claimed, &[7]);
            let refused = read(&bytes, Machine::X86_64).is_err();
            assert!(refused || claimed == 1, "{claimed}");
        }
    }

    #[test]
    fn reads_the_weight_of_a_timer_sample() {
        let mut bytes = sample(Machine::X86_64, 16);
        assert_eq!(read(&bytes, Machine::X86_64).unwrap().weight_ns, None);
        words(&mut bytes, &[12_000_000]);
        let sample = read(&bytes, Machine::X86_64).unwrap();
        assert_eq!(sample.weight_ns, Some(12_000_000));
        assert!(!sample.in_kernel);
    }

    #[test]
    fn reads_only_the_copied_part_of_a_stack() {
        let bytes = sample(Machine::X86_64, 12);
        let stack = read(&bytes, Machine::X86_64).unwrap().stack;
        let words = [0, 4, 5, 8, u64::MAX - 7, u64::MAX].map(|offset| stack.word(offset));
        let across = 0x2222 << 32;
        assert_eq!(words, [Some(0x1111), Some(across), None, None, None, None]);
    }

    #[test]
    fn refuses_lengths_that_contradict_each_other() {
        let good = sample(Machine::X86_64, 16);
        let mut more_used_than_reserved = good.clone();
        let end = good.len();
        more_used_than_reserved[end - 8..].copy_from_slice(&17_u64.to_ne_bytes());
        refused(&more_used_than_reserved);
        for size in [0, 8, 24, 64, 72, good.len() - 8] {
            refused(&good[..size]);
        }
        for reserved in [17_u64, 24, u64::MAX, u64::MAX - 7] {
            let mut bytes = good.clone();
            bytes[64..72].copy_from_slice(&reserved.to_ne_bytes());
            refused(&bytes);
        }
    }

    #[test]
    fn a_sample_without_registers_is_refused() {
        let mut bytes = sample(Machine::X86_64, 16);
        bytes[32..40].copy_from_slice(&0_u64.to_ne_bytes());
        refused(&bytes);
    }

    #[test]
    fn reads_every_kind_of_record_in_order() {
        let mut bytes = header(RECORD_SWITCH, MISC_SWITCH_OUT, 16);
        words(&mut bytes, &[10]);
        bytes.extend(header(RECORD_SWITCH, 0, 16));
        words(&mut bytes, &[25]);
        bytes.extend(header(RECORD_SWITCH, MISC_SWITCH_OUT | MISC_SWITCH_OUT_PREEMPT, 16));
        words(&mut bytes, &[30]);
        let lost_at = bytes.len() as u64;
        bytes.extend(header(RECORD_LOST, 0, 24));
        words(&mut bytes, &[1, 42]);
        bytes.extend(header(RECORD_THROTTLE, 0, 8));
        bytes.extend(header(99, 0, 8));
        let sample_at = bytes.len() as u64;
        bytes.extend(sample(Machine::X86_64, 16));
        let records: Vec<_> =
            Records::between(&bytes[..], 0, bytes.len() as u64).collect::<Result<_, _>>().unwrap();
        let place =
            RecordPlace { position: sample_at, size: (bytes.len() as u64 - sample_at) as u16 };
        assert_eq!(
            records,
            [
                Record::SwitchOut { time_ns: 10, preempted: false },
                Record::SwitchIn { time_ns: 25 },
                Record::SwitchOut { time_ns: 30, preempted: true },
                Record::Lost { count: 42, place: RecordPlace { position: lost_at, size: 24 } },
                Record::Throttled,
                Record::Other,
                Record::Sample(place),
            ]
        );
    }

    #[test]
    fn a_malformed_length_ends_the_iteration() {
        for size in [0_u16, 7, 9, 24] {
            let bytes = [header(RECORD_SAMPLE, 0, size), header(99, 0, 8)].concat();
            let mut records = Records::between(&bytes[..], 0, bytes.len() as u64);
            assert_eq!(records.next(), Some(Err(Malformed)), "{size}");
            assert_eq!(records.next(), None);
        }
    }

    #[test]
    fn an_empty_range_has_no_records() {
        assert_eq!(Records::between(&[][..], 8, 8).next(), None);
        assert_eq!(Records::between(&[][..], 16, 8).next(), None);
    }
}

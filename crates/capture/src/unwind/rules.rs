//! What a row of the unwind tables says, and rows that framehop does not follow.
//!
//! Where framehop cannot evaluate a row, it follows the frame pointer instead, and remembers that for the address. Code
//! that has such rows (of OpenSSL, ring and aws-lc, of the linkage table) often uses that register for something else.

use gimli::{CfaRule, EvaluationResult, Register, RegisterRule, X86_64};

use crate::sys::Registers;

pub(crate) type TableRow = gimli::UnwindTableRow<usize>;

pub(super) type TableFrames<'a> = gimli::EhFrame<gimli::EndianSlice<'a, gimli::NativeEndian>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameRule {
    /// By a row that framehop follows.
    Simple,
    /// By a row of another form, relative to a register.
    Complex,
    /// By a row with an expression.
    Computed,
    /// The frame has no caller: it is of the first function of a thread, or the program's.
    First,
    Missing,
}

const MAX_OPERATIONS: u32 = 1_000;

impl FrameRule {
    /// Framehop follows rows that refer to the stack pointer, or to the frame pointer with the usual prologue.
    pub(super) fn of_x86_64(row: &TableRow) -> Self {
        match row.register(X86_64::RA) {
            None | Some(RegisterRule::Undefined) => return Self::First,
            Some(RegisterRule::Offset(-8)) => {}
            Some(_) => return Self::Computed,
        }
        let saved = match row.register(X86_64::RBP) {
            None | Some(RegisterRule::Undefined | RegisterRule::SameValue) => None,
            Some(RegisterRule::Offset(offset)) => Some(offset),
            Some(_) => return Self::Computed,
        };
        let is_simple = match row.cfa() {
            CfaRule::RegisterAndOffset { register: X86_64::RSP, offset } => {
                let is_near = |offset: i64| i16::try_from(offset / 8).is_ok();
                (0..1 << 19).contains(offset) && saved.is_none_or(|saved| is_near(offset + saved))
            }
            CfaRule::RegisterAndOffset { register: X86_64::RBP, offset } => {
                (*offset, saved) == (16, Some(-16))
            }
            CfaRule::RegisterAndOffset { .. } => false,
            CfaRule::Expression(_) => return Self::Computed,
        };
        if is_simple { Self::Simple } else { Self::Complex }
    }
}

/// Follows a row of x86-64. The result is the caller's; its `pc` is the return address.
pub(super) fn follow(
    row: &TableRow,
    (frames, encoding): (&TableFrames<'_>, gimli::Encoding),
    registers: Registers,
    read: &mut dyn FnMut(u64) -> Option<u64>,
) -> Option<Registers> {
    let known = |register| match register {
        X86_64::RA => Some(registers.pc),
        X86_64::RSP => Some(registers.sp),
        X86_64::RBP => Some(registers.fp),
        _ => None,
    };
    let evaluate = |expression: &gimli::UnwindExpression<usize>,
                    cfa: Option<u64>,
                    read: &mut dyn FnMut(u64) -> Option<u64>| {
        let mut evaluation = expression.get(frames).ok()?.evaluation(encoding);
        evaluation.set_max_iterations(MAX_OPERATIONS);
        if let Some(cfa) = cfa {
            evaluation.set_initial_value(cfa);
        }
        let mut result = evaluation.evaluate().ok()?;
        loop {
            result = match result {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresRegister { register, .. } => {
                    evaluation.resume_with_register(gimli::Value::Generic(known(register)?)).ok()?
                }
                EvaluationResult::RequiresMemory { address, size: 8, .. } => {
                    evaluation.resume_with_memory(gimli::Value::Generic(read(address)?)).ok()?
                }
                _ => return None,
            };
        }
        match evaluation.as_result().last()?.location {
            gimli::Location::Address { address } => Some(address),
            _ => None,
        }
    };
    let cfa = match row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => {
            known(*register)?.checked_add_signed(*offset)?
        }
        CfaRule::Expression(expression) => evaluate(expression, None, &mut *read)?,
    };
    let mut value = |register: Register| {
        let at = match row.register(register) {
            None | Some(RegisterRule::Undefined | RegisterRule::SameValue) => {
                return known(register);
            }
            Some(RegisterRule::Offset(offset)) => cfa.checked_add_signed(offset)?,
            Some(RegisterRule::ValOffset(offset)) => return cfa.checked_add_signed(offset),
            Some(RegisterRule::Register(other)) => return known(other),
            Some(RegisterRule::Expression(found)) => evaluate(&found, Some(cfa), &mut *read)?,
            Some(RegisterRule::ValExpression(found)) => {
                return evaluate(&found, Some(cfa), &mut *read);
            }
            _ => return None,
        };
        read(at)
    };
    let (pc, fp) = (value(X86_64::RA)?, value(X86_64::RBP)?);
    Some(Registers { pc, sp: cfa, fp, lr: registers.lr })
}

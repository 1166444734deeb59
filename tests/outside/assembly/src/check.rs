//! What is true of the stacks of a profile.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use tracing_profiling::profile::{FrameKind, Location, Profile, SampleKind};

/// The function whose callers are known.
const KNOWN: &str = "assembly::in_span";
/// A function that it calls, and whose stacks are whole.
const REFERENCE: &str = "assembly::cases::burn";

#[derive(Debug, Default)]
pub(crate) struct Checked {
    pub(crate) samples: usize,
    pub(crate) waits: usize,
    pub(crate) whole: usize,
    pub(crate) early: usize,
    /// The stacks with a false frame, with what is false.
    pub(crate) wrong: Vec<String>,
}

impl Checked {
    pub(crate) fn of(profile: &Profile) -> Self {
        let mut checked = Self::default();
        let mut code = Code::default();
        let stacks: Vec<_> = profile
            .samples()
            .iter()
            .filter(|sample| [SampleKind::OnCpu, SampleKind::OffCpu].contains(&sample.kind))
            .map(|sample| (sample, profile.stack(sample.stack).collect::<Vec<_>>()))
            .filter(|(_, stack)| !stack.iter().all(|location| location.kind == FrameKind::Kernel))
            .collect();
        let callers = |stack: &[&Location]| {
            let known = stack.iter().position(|location| is_in(profile, location, KNOWN))?;
            Some(stack[known + 1..].iter().map(|location| location.address).collect::<Vec<_>>())
        };
        let is_reference = |stack: &&Vec<&Location>| {
            stack.iter().any(|location| is_in(profile, location, REFERENCE))
        };
        let mut references: Vec<_> = stacks
            .iter()
            .map(|(_, stack)| stack)
            .filter(is_reference)
            .map(|stack| callers(stack))
            .collect();
        references.dedup();
        let [Some(reference)] = &references[..] else {
            checked.wrong.push(format!("the callers differ: {references:x?}"));
            return checked;
        };
        for (sample, stack) in &stacks {
            let points = sample.points.len();
            match sample.kind {
                SampleKind::OnCpu => checked.samples += points,
                _ => checked.waits += points,
            }
            let is_marked = stack.last().is_some_and(|last| last.kind == FrameKind::Remark);
            let problem = match callers(stack) {
                Some(callers) if callers == *reference => None,
                Some(_) => Some("other callers".to_owned()),
                None if is_marked => None,
                None => Some("ends early and does not say so".to_owned()),
            };
            let frames = stack.iter().enumerate().skip(1);
            let problem = problem.or_else(|| {
                let is_code = |location: &Location| {
                    matches!(location.kind, FrameKind::Rust | FrameKind::Native)
                    // The first frame of user code below the kernel's is no caller.
                };
                let first = stack.iter().position(|location| is_code(location))?;
                frames
                    .clone()
                    .filter(|(at, location)| *at > first && is_code(location))
                    .find(|(_, location)| !code.is_in_call(profile, location))
                    .map(|(at, _)| format!("frame {at} is not in a call"))
            });
            match problem {
                None if is_marked => checked.early += points,
                None => checked.whole += points,
                Some(problem) => {
                    let names =
                        stack.iter().map(|location| format!("    {}", name(profile, location)));
                    let names: Vec<_> = names.collect();
                    checked.wrong.push(format!("{problem}:\n{}", names.join("\n")));
                }
            }
        }
        checked
    }
}

fn is_in(profile: &Profile, location: &Location, function: &str) -> bool {
    let mut functions = location.lines.iter().filter_map(|line| profile.function(line.function));
    functions.any(|one| one.name == function || one.name.starts_with(&format!("{function}::")))
}

fn name(profile: &Profile, location: &Location) -> String {
    let lines = location.lines.iter().filter_map(|line| profile.function(line.function));
    let names: Vec<_> = lines.map(|function| function.name.as_str()).collect();
    format!("{} {}", profile.module_offset(location), names.join(" < "))
}

/// The bytes of the program's code.
#[derive(Default)]
struct Code {
    files: HashMap<String, Option<File>>,
}

impl Code {
    /// Whether the location is in a call instruction: that of a caller is the byte before the return address.
    fn is_in_call(&mut self, profile: &Profile, location: &Location) -> bool {
        const LONGEST: u64 = 7;
        let mapping = location.mapping.and_then(|id| profile.mapping(id));
        let (file, offset) = match mapping {
            Some(mapping) => {
                (mapping.file.clone(), location.address - mapping.start + mapping.file_offset)
            }
            None => ("/proc/self/mem".to_owned(), location.address),
        };
        if mapping.is_some_and(|mapping| mapping.file.starts_with("[vdso")) {
            return true;
        }
        let file = self.files.entry(file.clone()).or_insert_with(|| File::open(file).ok());
        let mut bytes = [0; LONGEST as usize];
        let start = offset + 1 - LONGEST;
        file.as_ref().is_some_and(|file| file.read_exact_at(&mut bytes, start).is_ok())
            && ends_with_call(&bytes)
    }
}

/// Whether the bytes end with a call: `e8` with 4 bytes, or `ff /2`, whose length is that of its operand. See the Intel
/// manual, volume 2, chapter 2 and `CALL`.
fn ends_with_call(bytes: &[u8]) -> bool {
    let is_call = |length: usize| {
        let [0xff, rest @ ..] = &bytes[bytes.len() - length..] else { return false };
        let (mode, operation, register) = (rest[0] >> 6, rest[0] >> 3 & 7, rest[0] & 7);
        let has_sib = mode != 3 && register == 4;
        let displacement = match mode {
            0 if register == 5 || (has_sib && rest.get(1).is_some_and(|sib| sib & 7 == 5)) => 4,
            1 => 1,
            2 => 4,
            _ => 0,
        };
        operation == 2 && length == 2 + usize::from(has_sib) + displacement
    };
    bytes[bytes.len() - 5] == 0xe8 || (2..=7).any(is_call)
}

//! A program's trace by lackey, cut into pieces at its marks.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Command, Stdio};

const LINE: u64 = 64;

/// What ran between two marks.
#[derive(Clone, Default)]
pub(crate) struct Piece {
    pub(crate) instructions: usize,
    /// The lines of code, and which instructions of each have run.
    pub(crate) code: BTreeMap<u64, BTreeSet<u64>>,
    /// The lines of data, whether they are written, and which instructions have accessed them.
    pub(crate) data: BTreeMap<u64, (bool, BTreeSet<u64>)>,
}

impl Piece {
    /// in turn.
    pub(crate) fn and(mut self, other: &Self) -> Self {
        self.instructions += other.instructions;
        for (line, instructions) in &other.code {
            self.code.entry(*line).or_default().extend(instructions);
        }
        for (line, (is_written, instructions)) in &other.data {
            let known = self.data.entry(*line).or_default();
            known.0 |= is_written;
            known.1.extend(instructions);
        }
        self
    }

    fn fetch(&mut self, address: u64, length: u64) {
        self.instructions += 1;
        for line in lines(address, length) {
            self.code.entry(line).or_default().insert(address);
        }
    }

    fn access(&mut self, by: u64, address: u64, length: u64, is_written: bool) {
        for line in lines(address, length) {
            let known = self.data.entry(line).or_default();
            known.0 |= is_written;
            known.1.insert(by);
        }
    }
}

fn lines(address: u64, length: u64) -> impl Iterator<Item = u64> {
    address / LINE..=(address + length.max(1) - 1) / LINE
}

/// A part of a file that is mapped.
struct Mapped {
    addresses: Range<u64>,
    /// Of the file.
    offset: u64,
    path: String,
}

/// Where the program has its marks, and what is mapped.
struct Layout {
    marks: u64,
    mapped: Vec<Mapped>,
}

pub(crate) struct Program {
    /// By mark, in order.
    pieces: Vec<Vec<Piece>>,
    layout: Layout,
}

impl Program {
    /// Runs that kind of this program under lackey; it has `count` marks.
    pub(crate) fn trace(kind: &str, count: usize) -> Self {
        let this = std::env::current_exe().expect("the path of this program");
        // Not a pipe: the program would wait for its reader, and each wait is longer than the interval in which hooks
        // read the CPU clock.
        let trace = tempfile::NamedTempFile::new().expect("a file");
        let log = format!("--log-file={}", trace.path().display());
        let mut command = Command::new("valgrind");
        command.args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no", &log]).arg(this);
        command.args(["--child", kind]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("valgrind");
        let mut text = String::new();
        let printed = process.stdout.take().expect("a pipe");
        BufReader::new(printed).read_line(&mut text).expect("a pipe");
        let marks = text.trim().parse().expect("an address");
        let layout = Layout { marks, mapped: mapped(process.id()) };
        writeln!(process.stdin.take().expect("a pipe")).expect("a pipe");
        assert!(process.wait().expect("a process").success(), "valgrind --tool=lackey");
        let mut pieces = vec![Vec::new(); count];
        let (mut mark, mut piece, mut instruction) = (0, Piece::default(), 0);
        let mut trace = BufReader::new(trace.reopen().expect("the file"));
        let mut line = Vec::new();
        loop {
            line.clear();
            if trace.read_until(b'\n', &mut line).expect("the file") == 0 {
                break;
            }
            let Some(Access { kind, address, length }) = Access::parse(&line) else { continue };
            let to = address.wrapping_sub(layout.marks);
            if kind == b'S' && to < count as u64 * LINE {
                let ended = std::mem::replace(&mut mark, (to / LINE) as usize);
                let piece = std::mem::take(&mut piece);
                if ended != 0 {
                    pieces[ended].push(piece);
                }
            } else if mark != 0 && kind == b'I' {
                instruction = address;
                piece.fetch(address, length);
            } else if mark != 0 {
                piece.access(instruction, address, length, kind != b'L');
            }
        }
        Self { pieces, layout }
    }

    /// An execution with as many instructions as most have, of those that begin with that mark: in others a thread was
    /// interrupted by another, or read the CPU clock.
    pub(crate) fn usual(&self, mark: usize) -> &Piece {
        let pieces = &self.pieces[mark];
        let like = |piece: &&Piece| {
            pieces.iter().filter(|other| other.instructions == piece.instructions).count()
        };
        pieces.iter().max_by_key(like).expect("it was executed")
    }

    /// Prints each line of code with the functions in it, and each line of data with those that access it.
    pub(crate) fn list(&self, piece: &Piece) {
        let data = piece.data.values().flat_map(|(_, by)| by);
        let instructions: BTreeSet<u64> =
            piece.code.values().flatten().chain(data).copied().collect();
        let names = self.names(&instructions);
        let functions = |instructions: &BTreeSet<u64>| {
            let mut functions: Vec<&str> = Vec::new();
            for name in instructions.iter().filter_map(|instruction| names.get(instruction)) {
                if !functions.contains(&name.as_str()) {
                    functions.push(name);
                }
            }
            functions.join(", ")
        };
        for (line, instructions) in &piece.code {
            let (place, count) = (self.place(line * LINE), instructions.len());
            println!("code {place} {count} instructions: {}", functions(instructions));
        }
        for (line, (is_written, by)) in &piece.data {
            let (place, how) =
                (self.place(line * LINE), if *is_written { "written" } else { "read" });
            println!("data {place} {how}: {}", functions(by));
        }
    }

    fn mapped(&self, address: u64) -> Option<&Mapped> {
        self.layout.mapped.iter().find(|mapped| mapped.addresses.contains(&address))
    }

    fn place(&self, address: u64) -> String {
        let Some(mapped) = self.mapped(address) else { return format!("{address:#x} (anonymous)") };
        let name = mapped.path.rsplit('/').next().unwrap_or_default();
        format!("{address:#x} ({name}+{:#x})", address - mapped.addresses.start + mapped.offset)
    }

    /// The function of each instruction, and the line of its source; that of the innermost inlined one.
    fn names(&self, instructions: &BTreeSet<u64>) -> BTreeMap<u64, String> {
        let mut of_files: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
        for address in instructions {
            if let Some(mapped) =
                self.mapped(*address).filter(|mapped| mapped.path.starts_with('/'))
            {
                // Relative to where the file begins, as the addresses of its symbols.
                let all = self.layout.mapped.iter().filter(|other| other.path == mapped.path);
                let start = all.map(|mapped| mapped.addresses.start).min().unwrap_or_default();
                of_files.entry(&mapped.path).or_default().push((*address, address - start));
            }
        }
        let mut names = BTreeMap::new();
        for (path, addresses) in of_files {
            let mut command = Command::new("addr2line");
            command.args(["-f", "-C", "-s", "-e", path]);
            command.args(addresses.iter().map(|(_, relative)| format!("{relative:#x}")));
            let text = command.output().expect("addr2line").stdout;
            let text = String::from_utf8_lossy(&text).into_owned();
            let lines: Vec<&str> = text.lines().collect();
            for ((address, _), name) in addresses.iter().zip(lines.chunks(2)) {
                names.insert(*address, name.join(" "));
            }
        }
        names
    }
}

/// A line of lackey's trace, such as ` S 1ffefff4f8,8`.
struct Access {
    /// Instruction, load, store, or modify.
    kind: u8,
    address: u64,
    length: u64,
}

impl Access {
    fn parse(line: &[u8]) -> Option<Self> {
        let kind = *line.iter().take(2).find(|byte| b"ILSM".contains(byte))?;
        let (address, length) = std::str::from_utf8(line.get(3..)?).ok()?.trim().split_once(',')?;
        let address = u64::from_str_radix(address, 16).ok()?;
        Some(Self { kind, address, length: length.parse().ok()? })
    }
}

fn mapped(process: u32) -> Vec<Mapped> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).expect("procfs");
    let parse = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let number = |hex| u64::from_str_radix(hex, 16).ok();
        let (addresses, offset) = (number(start)?..number(end)?, number(words.nth(1)?)?);
        let path = words.nth(2).unwrap_or("anonymous").to_owned();
        Some(Mapped { addresses, offset, path })
    };
    maps.lines().filter_map(parse).collect()
}

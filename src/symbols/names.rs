//! Demangling.

use std::fmt::{self, Write};
use std::path::Path;

use crate::profile::{FrameKind, LONGEST_NAME, capped};

/// Demangles a symbol, and returns whether it is Rust's.
///
/// The hash of Rust symbols is left out: it means nothing to a reader, and it separates instances of one function.
/// Because parts of a symbol can refer to each other, a symbol of some hundred bytes can expand to a gigabyte. Such a
/// function keeps its mangled name.
pub(super) fn demangle(symbol: &str) -> (String, FrameKind) {
    let mut name = Capped::default();
    let (is_whole, kind) = if symbol.len() > LONGEST_SYMBOL {
        (false, FrameKind::Native)
    } else if let Ok(parsed) = rustc_demangle::try_demangle(symbol) {
        (write!(name, "{parsed:#}").is_ok(), FrameKind::Rust)
    } else if symbol.starts_with("_Z")
        && let Ok(parsed) = cpp_demangle::Symbol::new(symbol)
    {
        let written = parsed.structured_demangle(&mut name, &Default::default());
        (written.is_ok(), FrameKind::Native)
    } else {
        (false, FrameKind::Native)
    };
    (if is_whole { name.0 } else { capped(symbol).into_owned() }, kind)
}

/// Longer symbols are not demangled.
const LONGEST_SYMBOL: usize = 32 * 1024;

/// Text that returns an error when it becomes longer than a name may be.
#[derive(Default)]
struct Capped(String);

impl Write for Capped {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > LONGEST_NAME {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// Whether a symbol is mangled, so that it contains the function's complete path.
pub(super) fn is_qualified(symbol: &str) -> bool {
    symbol.starts_with("_R") || symbol.starts_with("_Z")
}

/// Whether a source file is Rust. The name of an `extern "C"` function does not show that.
pub(super) fn is_rust_file(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "rs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_names_lose_their_hash() {
        let legacy = "_ZN4shop4cart5total17h0123456789abcdefE";
        assert_eq!(demangle(legacy), ("shop::cart::total".into(), FrameKind::Rust));
        let v0 = "_RNvNtCs1234_4shop4cart5total";
        assert_eq!(demangle(v0), ("shop::cart::total".into(), FrameKind::Rust));
    }

    #[test]
    fn other_names_are_native() {
        assert_eq!(demangle("_ZN3foo3barEi"), ("foo::bar(int)".into(), FrameKind::Native));
        assert_eq!(demangle("sqlite3VdbeExec"), ("sqlite3VdbeExec".into(), FrameKind::Native));
        assert_eq!(demangle("_Znonsense"), ("_Znonsense".into(), FrameKind::Native));
    }

    /// `P<P<P<int, int>, P<int, int>>, ...>`: each level is twice as long as the one before.
    fn doubling_cpp(levels: usize) -> String {
        let mut symbol = "_Z1f1PIiiE".to_owned();
        for level in 0..levels {
            let digits = match level {
                level @ 0..10 => format!("{level}"),
                level => {
                    let digit = |number: usize| {
                        char::from_digit(number as u32, 36).unwrap().to_ascii_uppercase()
                    };
                    match level {
                        10..36 => digit(level).to_string(),
                        level => format!("{}{}", digit(level / 36), digit(level % 36)),
                    }
                }
            };
            symbol += &format!("S_IS{digits}_S{digits}_E");
        }
        symbol
    }

    /// `f::<((u8, u8), (u8, u8), ...)>` with back references.
    fn doubling_rust(levels: usize) -> String {
        let digits = |mut number: usize| {
            const DIGITS: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
            if number == 0 {
                return "_".to_owned();
            }
            number -= 1;
            let mut digits = Vec::new();
            loop {
                digits.push(DIGITS[number % 62]);
                number /= 62;
                if number == 0 {
                    break;
                }
            }
            digits.reverse();
            format!("{}_", String::from_utf8(digits).unwrap())
        };
        let mut symbol = "_RINvC1a1f".to_owned();
        let mut last = symbol.len() - 2;
        symbol += "ThhE";
        for _ in 0..levels {
            let at = symbol.len() - 2;
            let back = format!("B{}", digits(last));
            symbol += &format!("T{back}{back}E");
            last = at;
        }
        symbol + "E"
    }

    #[test]
    fn names_are_limited_in_length() {
        assert_eq!(demangle(&doubling_cpp(1)).0, "f(P<int, int>, P<P<int, int>, P<int, int> >)");
        assert_eq!(demangle(&doubling_rust(1)).0, "a::f::<(u8, u8), ((u8, u8), (u8, u8))>");
        for levels in [14, 16, 18, 20] {
            for symbol in [doubling_cpp(levels), doubling_rust(levels)] {
                let (name, _) = demangle(&symbol);
                assert!(name.len() <= 4096, "{levels}: {} bytes", name.len());
                // A part of the name would not identify the function.
                assert_eq!(name, symbol);
            }
        }
    }

    #[test]
    fn exponential_names_are_limited_in_time() {
        for levels in [34, 64, 500] {
            assert!(demangle(&doubling_cpp(levels)).0.starts_with("_Z1f"));
            assert!(demangle(&doubling_rust(levels)).0.starts_with("_RINv"));
        }
        for (width, levels) in [(2, 24), (2, 30), (3, 16), (4, 26), (8, 12), (40, 7)] {
            let mut symbol = format!("_Z1f1PI{}E", "i".repeat(width));
            for level in 0..levels {
                let back = match level {
                    level @ 0..10 => format!("S{level}_"),
                    level => format!("S{}_", (b'A' + level - 10) as char),
                };
                symbol += &format!("S_I{}E", back.repeat(width));
            }
            assert_eq!(demangle(&symbol).0, symbol);
        }
        let long = format!("_Z{}{}v", 100_000, "f".repeat(100_000));
        assert!(demangle(&long).0.len() <= 4096);
        assert!(demangle(&"x".repeat(100_000)).0.len() <= 4096);
        assert!(demangle(&"ä".repeat(100_000)).0.len() <= 4096);
    }

    #[test]
    fn a_rust_file_is_recognized_by_its_extension() {
        assert!(is_rust_file(Path::new("/src/main.rs")));
        assert!(!is_rust_file(Path::new("sqlite3.c")));
    }
}

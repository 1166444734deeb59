//! Demangling.

use std::path::Path;

use crate::profile::FrameKind;

/// A symbol as a programmer writes it, and whether it is Rust's.
///
/// Rust's hash is left out: it says nothing to a reader and splits what belongs together.
pub(super) fn demangle(symbol: &str) -> (String, FrameKind) {
    if let Ok(name) = rustc_demangle::try_demangle(symbol) {
        return (format!("{name:#}"), FrameKind::Rust);
    }
    if symbol.starts_with("_Z")
        && let Ok(parsed) = cpp_demangle::Symbol::new(symbol)
        && let Ok(name) = parsed.demangle()
    {
        return (name, FrameKind::Native);
    }
    (symbol.to_owned(), FrameKind::Native)
}

/// Whether a symbol is mangled, and so says the whole path of its function.
pub(super) fn is_qualified(symbol: &str) -> bool {
    symbol.starts_with("_R") || symbol.starts_with("_Z")
}

/// Whether a source file is Rust: an `extern "C"` function has no name that tells.
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

    #[test]
    fn a_rust_file_is_known_by_its_end() {
        assert!(is_rust_file(Path::new("/src/main.rs")));
        assert!(!is_rust_file(Path::new("sqlite3.c")));
    }
}

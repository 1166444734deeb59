//! From addresses to functions, inlined functions, files and lines.

mod build_id;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
#[cfg(feature = "symbols")]
mod kernel;
#[cfg(feature = "symbols")]
mod names;
mod sections;
#[cfg(feature = "symbols")]
mod source;
#[cfg(feature = "symbols")]
mod symbolizer;
#[cfg(not(feature = "symbols"))]
#[path = "no_symbolizer.rs"]
mod symbolizer;

pub(crate) use build_id::hex;
pub(crate) use symbolizer::Symbolizer;

/// What of a program's symbols cannot be had, and should be told once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "symbols"), expect(dead_code, reason = "nothing is looked up"))]
pub(crate) enum Missing {
    /// The program has no line tables.
    LineTables,
    /// A file is not the one that was loaded.
    Replaced(String),
    /// A file cannot be read.
    Unreadable(String, String),
    /// A file has more debug information than may be held: so many bytes.
    TooLarge(String, u64),
    /// A file's debug information is compressed in a way that is not known here.
    Compressed(String),
}

/// Whether symbols are asked for, and how much of them may be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SymbolSettings {
    /// Otherwise profiles have addresses, mappings and build ids alone.
    pub(crate) names: bool,
    /// Of debug information and symbol tables, as large as they are in files.
    pub(crate) most_bytes: u64,
}

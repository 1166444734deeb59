//! Symbolization: functions, inlined functions, files and lines by address.

mod build_id;
#[cfg(fuzzing)]
pub(crate) mod fuzzing;
#[cfg(feature = "symbols")]
mod kernel;
mod module_file;
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

/// A problem with symbols that should be reported once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "symbols"), expect(dead_code, reason = "nothing is looked up"))]
pub(crate) enum Missing {
    /// The executable has no line tables.
    LineTables,
    /// The file that was loaded is not there any more.
    Replaced(String),
    /// It is not known which files are loaded.
    Mappings(String),
    /// A file cannot be read.
    Unreadable(String, String),
    /// The debug information of a file is larger than the limit; its size in bytes.
    TooLarge(String, u64),
    /// The debug information of a file has an unsupported compression.
    Compressed(String),
}

/// Whether to symbolize, and the limit of memory for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SymbolSettings {
    /// If false, profiles have only addresses, mappings and build ids.
    pub(crate) names: bool,
    /// The limit for debug information and symbol tables, measured as in the files.
    pub(crate) most_bytes: u64,
}

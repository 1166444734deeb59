//! Symbolization: functions, inlined functions, files and lines by address.

mod build_id;
#[cfg(feature = "symbols")]
mod embedded;
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
mod supplement;
#[cfg(feature = "symbols")]
mod symbolizer;
#[cfg(not(feature = "symbols"))]
#[path = "no_symbolizer.rs"]
mod symbolizer;

pub(crate) use build_id::hex;
pub(crate) use symbolizer::Symbolizer;

/// A problem with symbols that should be reported once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    /// `None` for the program, and if it is not known which files there are.
    pub(crate) file: Option<String>,
    pub(crate) lack: SymbolProblem,
}

/// Why symbols of a file are incomplete.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "symbols"), expect(dead_code, reason = "nothing is looked up"))]
pub(crate) enum SymbolProblem {
    /// The executable has no line tables, and whether it has no symbol table either.
    LineTables { is_stripped: bool },
    /// The file that was loaded is not there any more.
    Replaced,
    /// The loaded files are not known, and why.
    Mappings(String),
    /// The file cannot be read, and why.
    Unreadable(String),
    /// The debug information of the file cannot be read or copied, and why.
    DebugUnreadable(String),
    /// The symbols embedded in it cannot be read, and why.
    EmbeddedUnreadable(String),
    /// The debug information of the file is larger than the limit; its size in bytes, and whether that limit is the
    /// layer's own, not what control groups and resource limits leave.
    TooLarge { bytes: u64, is_own: bool },
    /// The debug information of the file has an unsupported compression.
    Compressed,
    /// The supplementary file of its debug information cannot be read, and why.
    SupplementUnreadable(String),
    /// A part of its debug information is in others, which are not read.
    Split,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SymbolSettings {
    /// If false, profiles have only addresses, mappings and build ids.
    pub(crate) names: bool,
    /// The limit for debug information and symbol tables, measured as in the files.
    pub(crate) most_bytes: u64,
}

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
#[cfg_attr(not(feature = "symbols"), expect(dead_code, reason = "nothing is looked up"))]
pub(crate) enum Missing {
    /// The executable has no line tables, and whether it has no symbol table either.
    LineTables { is_stripped: bool },
    /// The file that was loaded is not there any more.
    Replaced(String),
    /// It is not known which files are loaded.
    Mappings(String),
    /// A file cannot be read, and why.
    Unreadable(String, String),
    /// The debug information of a file cannot be read, and why.
    DebugUnreadable(String, String),
    /// The symbols embedded in a file cannot be read, and why.
    EmbeddedUnreadable(String, String),
    /// The debug information of a file is larger than the limit; its size in bytes, and whether that limit is the layer's
    /// own, not what control groups and resource limits leave.
    TooLarge(String, u64, bool),
    /// The debug information of a file has an unsupported compression.
    Compressed(String, DebugCompression),
    /// The supplementary file of a file's debug information cannot be read, and why.
    SupplementUnreadable(String, String),
    /// A part of the debug information of a file is in others, which are not read.
    Split(String),
}

/// A compression of debug information that is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DebugCompression {
    Zstd,
    /// That of sections named `.zdebug_`, which older tools write.
    Old,
}

impl Missing {
    /// The file that it is about; `None` for the program, and if it is not known which files there are.
    pub(crate) fn file(&self) -> Option<&str> {
        match self {
            Self::LineTables { .. } | Self::Mappings(_) => None,
            Self::Replaced(file)
            | Self::Unreadable(file, _)
            | Self::DebugUnreadable(file, _)
            | Self::EmbeddedUnreadable(file, _)
            | Self::SupplementUnreadable(file, _)
            | Self::TooLarge(file, ..)
            | Self::Compressed(file, _)
            | Self::Split(file) => Some(file),
        }
    }
}

/// Whether to symbolize, and the limit of memory for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SymbolSettings {
    /// If false, profiles have only addresses, mappings and build ids.
    pub(crate) names: bool,
    /// The limit for debug information and symbol tables, measured as in the files.
    pub(crate) most_bytes: u64,
}

//! The formats of profile files.

use std::fmt;
use std::str::FromStr;

use tracing_profiling_capture::UnknownName;

use crate::encode::{self, HtmlContext};
use crate::profile::Profile;

/// A format in which a [`Directory`](super::Directory) writes profiles. `Display` and `FromStr` use the names of
/// `TRACING_PROFILING_FORMATS`: `html`, `pprof` and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Format {
    /// [`encode::html`]: a report for browsers (`.html`).
    Html,
    /// [`encode::pprof`](crate::encode): for `go tool pprof` and speedscope (`.pb.gz`, feature `pprof`).
    Pprof,
    /// [`encode::otlp`](crate::encode): OpenTelemetry's `ProfilesData` (`.otlp`, feature `otlp`).
    Otlp,
    /// [`encode::folded`]: folded stacks (`.folded`).
    Folded,
    /// [`encode::firefox`](crate::encode): for profiler.firefox.com and samply (`.firefox.json.gz`, feature `firefox`).
    Firefox,
    /// [`encode::markdown`]: the most important in 2 KiB (`.md`).
    Markdown,
}

impl Format {
    pub(super) const ALL: [Self; 6] =
        [Self::Html, Self::Pprof, Self::Otlp, Self::Folded, Self::Firefox, Self::Markdown];

    /// The name, how the names of files end, and whether the feature is on.
    const fn row(self) -> (&'static str, &'static str, bool) {
        match self {
            Self::Html => ("html", ".html", true),
            Self::Pprof => ("pprof", ".pb.gz", cfg!(feature = "pprof")),
            Self::Otlp => ("otlp", ".otlp", cfg!(feature = "otlp")),
            Self::Folded => ("folded", ".folded", true),
            Self::Firefox => ("firefox", ".firefox.json.gz", cfg!(feature = "firefox")),
            Self::Markdown => ("md", ".md", true),
        }
    }

    /// All formats whose features are on.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|format| format.row().2)
    }

    /// The name of the format.
    pub const fn as_str(self) -> &'static str {
        self.row().0
    }

    /// How the names of its files end.
    pub const fn extension(self) -> &'static str {
        self.row().1
    }

    /// The contents of a file. `None` if the feature is off.
    pub fn encode(self, profile: &Profile, context: &HtmlContext) -> Option<Vec<u8>> {
        match self {
            Self::Html => Some(encode::html(profile, context).into_bytes()),
            #[cfg(feature = "pprof")]
            Self::Pprof => Some(encode::pprof(profile)),
            #[cfg(feature = "otlp")]
            Self::Otlp => Some(encode::otlp(profile, context.resource())),
            Self::Folded => Some(encode::folded(profile).into_bytes()),
            #[cfg(feature = "firefox")]
            Self::Firefox => Some(encode::firefox(profile, context.resource())),
            Self::Markdown => Some(encode::markdown(profile).into_bytes()),
            #[allow(unreachable_patterns, reason = "if all features are on")]
            _ => None,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Format {
    type Err = UnknownName;

    /// Parses the name of a format.
    ///
    /// # Errors
    ///
    /// If there is no such format, or if its feature is off.
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = Self::available().find(|format| format.as_str() == name);
        found.ok_or_else(|| UnknownName::new(Self::available().map(Self::as_str)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_can_be_read_back_and_errors_list_them() {
        for format in Format::available() {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        let error = "pdf".parse::<Format>().unwrap_err().to_string();
        assert!(error.starts_with("expected one of html, "), "{error}");
    }
}

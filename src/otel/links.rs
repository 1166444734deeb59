//! What samples link to.

use std::str::FromStr;

use crate::error::UnknownName;

/// Which span the samples of a profile link to, in OTLP. Set by [`Builder::link`](crate::Builder::link).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkTo {
    /// The root of the sample's tree of spans in this process, so that the link from that span leads to all that the
    /// request did. It is the outermost profiled span that was not open for more than ten times its threshold, as a
    /// connection or `main` is, when the first span of the profile was kept.
    #[default]
    Root,
    /// The innermost profiled span of each sample.
    Innermost,
}

impl FromStr for LinkTo {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        match text.trim() {
            "root" => Ok(Self::Root),
            "innermost" => Ok(Self::Innermost),
            _ => Err(UnknownName::new(["root", "innermost"])),
        }
    }
}

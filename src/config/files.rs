//! Settings of the files that profiles are written to.

use std::path::PathBuf;

use crate::export::{Directory, Format};
use crate::log::{LogEvent, LogKind};
use crate::text::shortened;

/// Where files are written, and what they contain.
#[derive(Clone, Debug)]
pub(super) struct FileSettings {
    pub(super) directory: PathBuf,
    pub(super) formats: Option<Vec<Format>>,
    pub(super) trace_url: Option<String>,
    pub(super) source_url: Option<String>,
}

impl Default for FileSettings {
    fn default() -> Self {
        let directory = PathBuf::from("profiles");
        Self { directory, formats: None, trace_url: None, source_url: None }
    }
}

impl FileSettings {
    /// Applies everything but the path.
    pub(super) fn apply(self, directory: Directory) -> Directory {
        let directory = self.formats.into_iter().fold(directory, Directory::with_formats);
        let directory = self.trace_url.into_iter().fold(directory, Directory::with_trace_url);
        self.source_url.into_iter().fold(directory, Directory::with_source_url)
    }
}

/// What the values must be, for errors.
pub(super) const A_TRACE_URL: &str = "a URL as https://tempo.internal/trace/{trace_id}";
pub(super) const A_SOURCE_URL: &str = "a URL as vscode://file/{file}:{line}, which runs no script";

/// The warning about a value that is not used.
pub(super) fn ignored(setting: &str, value: &str, expected: &str) -> LogEvent {
    let value = shortened(value);
    let message = format!("{setting}: `{value}` is not {expected}, and is not used");
    LogEvent { value: Some(value), ..LogEvent::warning(LogKind::UrlIgnored, message) }
}

/// Parses names of formats, separated by commas.
pub(super) fn formats(text: &str) -> Option<Vec<Format>> {
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    let formats: Option<Vec<_>> = names.map(|name| name.parse().ok()).collect();
    formats.filter(|formats| !formats.is_empty())
}

/// A URL that a report can use as a link to a trace.
pub(super) fn trace_url(text: &str) -> Option<String> {
    let is_web = text.starts_with("https://") || text.starts_with("http://");
    (is_web && text.contains("{trace_id}")).then(|| text.to_owned())
}

/// A URL that a report can use as a link to a source line. It is that of a page or an editor, not a script.
pub(super) fn source_url(text: &str) -> Option<String> {
    let (scheme, _) = text.split_once(':')?;
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    let runs = ["javascript", "data", "vbscript", "blob"];
    let is_safe = is_scheme && !runs.contains(&scheme.to_ascii_lowercase().as_str());
    (is_safe && text.contains("{file}")).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_urls_with_their_placeholder() {
        assert!(trace_url("https://tempo.internal/trace/{trace_id}?span={span_id}").is_some());
        assert!(trace_url("http://localhost:3200/{trace_id}").is_some());
        for text in
            ["https://tempo.internal", "javascript:{trace_id}", "{trace_id}", "ftp://{trace_id}"]
        {
            assert_eq!(trace_url(text), None, "{text}");
        }
        for text in ["vscode://file/{file}:{line}", "https://git.internal/{file}#L{line}"] {
            assert!(source_url(text).is_some(), "{text}");
        }
        for text in [
            "javascript:alert('{file}')",
            "JavaScript:{file}",
            "data:{file}",
            "{file}:1",
            " x:{file}",
        ] {
            assert_eq!(source_url(text), None, "{text}");
        }
    }

    #[test]
    fn formats_are_a_list_of_names() {
        assert_eq!(formats(" html, folded,"), Some(vec![Format::Html, Format::Folded]));
        assert_eq!((formats("html,pdf"), formats(","), formats("")), (None, None, None));
    }
}

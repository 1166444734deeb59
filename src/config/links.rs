//! The links in reports.

pub(super) const A_TRACE_URL: &str = "a URL as https://tempo.internal/trace/{trace_id}";
pub(super) const A_SOURCE_URL: &str = "a URL as vscode://file/{file}:{line}, which runs no script";

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
}

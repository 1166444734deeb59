//! The links in reports.

pub(super) const A_TRACE_URL: &str = "a URL as https://tempo.internal/trace/{trace_id}";
pub(super) const A_SOURCE_URL: &str = "a URL as vscode://file/{file}:{line}, which runs no script";

/// A URL that a report can use as a link to a trace.
pub(super) fn is_trace_url(text: &str) -> bool {
    let is_web = text.starts_with("https://") || text.starts_with("http://");
    is_web && text.contains("{trace_id}")
}

/// A URL that a report can use as a link to a source line. It is that of a page or an editor, not a script.
pub(super) fn is_source_url(text: &str) -> bool {
    let Some((scheme, _)) = text.split_once(':') else { return false };
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    let runs = ["javascript", "data", "vbscript", "blob"];
    let is_safe = is_scheme && !runs.contains(&scheme.to_ascii_lowercase().as_str());
    is_safe && text.contains("{file}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_urls_with_their_placeholder() {
        assert!(is_trace_url("https://tempo.internal/trace/{trace_id}?span={span_id}"));
        assert!(is_trace_url("http://localhost:3200/{trace_id}"));
        for text in
            ["https://tempo.internal", "javascript:{trace_id}", "{trace_id}", "ftp://{trace_id}"]
        {
            assert!(!is_trace_url(text), "{text}");
        }
        for text in ["vscode://file/{file}:{line}", "https://git.internal/{file}#L{line}"] {
            assert!(is_source_url(text), "{text}");
        }
        for text in [
            "javascript:alert('{file}')",
            "JavaScript:{file}",
            "data:{file}",
            "{file}:1",
            " x:{file}",
        ] {
            assert!(!is_source_url(text), "{text}");
        }
    }
}

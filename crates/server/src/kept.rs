//! The list of what was kept: spans of this process, and profiles in the directory.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde_json::{Value, json};

use tracing_profiling::{Handle, RecentlyKept};
use tracing_profiling_profile::encode::joined;
use tracing_profiling_profile::export::stored::{
    StoredFile, brief_of, list_stored, profile_id_of, read_stored, span_of, summary_of,
};

use crate::answer::{HTML, time};

/// How many entries are listed, unless the query asks for another number, and at most.
pub(crate) const USUAL: usize = 100;
const MOST: usize = 1_000;

/// What was kept, the newest first.
pub(crate) fn list(handle: &Handle, limit: usize) -> std::io::Result<Value> {
    let limit = limit.min(MOST);
    let dir = handle.directory();
    let files = dir.as_deref().map(list_stored).transpose()?.unwrap_or_default();
    let mut stored = by_profile(files);
    let (mut entries, mut listed, mut total) = (Vec::new(), HashSet::new(), 0);
    let recent = handle.recently_kept();
    // Several spans of a profile can be reported one by one.
    for recent in recent.iter().filter(|it| it.kept.profile.is_none_or(|id| listed.insert(id))) {
        let files = recent.kept.profile.and_then(|id| stored.remove(&id.to_string()));
        if total < limit {
            let summary = recent.summary().map_or(json!({}), |summary| summary.to_json());
            let files = files.unwrap_or_default();
            entries.push(joined(summary, json!({ "files": Value::from_iter(names_of(&files)) })));
        }
        total += 1;
    }
    total += stored.len();
    // Of earlier runs, or of other processes that use the directory.
    if let Some(dir) = &dir {
        let mut others: Vec<_> = stored.into_values().collect();
        others.sort_by(|a, b| names_of(b).cmp(names_of(a)));
        let room = limit.saturating_sub(entries.len());
        entries.extend(others.iter().take(room).map(|files| of_files(dir, files)));
    }
    let time = |entry: &Value| entry.get("time").and_then(Value::as_str).unwrap_or("").to_owned();
    entries.sort_by_cached_key(|entry| std::cmp::Reverse(time(entry)));
    Ok(json!({ "kept": entries, "total": total }))
}

/// In which form a client wants a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Report,
    Markdown,
    Json,
}

impl Form {
    /// The first that the header `Accept` names, as a client lists what it wants most first. Weights are not read.
    pub(crate) fn accepted(accept: &str) -> Self {
        let accept = accept.to_ascii_lowercase();
        let named = accept.split([',', ';']).find_map(|name| match name.trim() {
            "text/html" | "*/*" | "text/*" => Some(Self::Report),
            "text/markdown" => Some(Self::Markdown),
            "application/json" | "application/*" => Some(Self::Json),
            _ => None,
        });
        named.unwrap_or(Self::Report)
    }

    pub(crate) const fn content_type(self) -> &'static str {
        match self {
            Self::Report => HTML,
            Self::Markdown => "text/markdown; charset=utf-8",
            Self::Json => "application/json",
        }
    }
}

/// What was kept under an id: its report or the short form in that, else that of a span kept lately.
pub(crate) fn one(
    handle: &Handle,
    id: &str,
    form: Form,
) -> std::io::Result<Option<(Form, Vec<u8>)>> {
    if let Some(dir) = handle.directory().filter(|_| !id.starts_with("span-")) {
        let is_its = |name: &str| name.ends_with(".html") && profile_id_of(name) == Some(id);
        let report = list_stored(&dir)?.into_iter().find(|file| is_its(&file.name));
        if let Some(text) = report.map(|file| read(&dir, &file.name, form)).transpose()?.flatten() {
            return Ok(Some((form, text)));
        }
    }
    let recent = handle.find_kept(id);
    Ok(recent.as_ref().and_then(RecentlyKept::summary).map(|summary| match form {
        Form::Json => (form, summary.to_json_summary().into()),
        Form::Markdown | Form::Report => (Form::Markdown, summary.to_markdown().into()),
    }))
}

/// A report, or the short form that it contains.
fn read(dir: &Path, report: &str, form: Form) -> std::io::Result<Option<Vec<u8>>> {
    let member = match form {
        Form::Report => return read_stored(dir, report),
        Form::Markdown => "markdown",
        Form::Json => "json",
    };
    let brief = brief_of(dir, report)?.unwrap_or_default();
    Ok(brief.get(member).and_then(Value::as_str).map(|text| text.as_bytes().to_vec()))
}

/// The files of each profile, the report first.
fn by_profile(files: Vec<StoredFile>) -> HashMap<String, Vec<StoredFile>> {
    let mut profiles: HashMap<String, Vec<_>> = HashMap::new();
    for file in files {
        let Some(id) = profile_id_of(&file.name).map(str::to_owned) else { continue };
        profiles.entry(id).or_default().push(file);
    }
    for files in profiles.values_mut() {
        files.sort_by_cached_key(|file| (!file.name.ends_with(".html"), file.name.clone()));
    }
    profiles
}

fn names_of(files: &[StoredFile]) -> impl Iterator<Item = &str> {
    files.iter().map(|file| file.name.as_str())
}

/// The entry of a profile of which only files are known. A report contains its summary.
fn of_files(dir: &Path, files: &[StoredFile]) -> Value {
    let first = files.first();
    let report = first.filter(|file| file.name.ends_with(".html"));
    let summary = report.and_then(|file| summary_of(dir, &file.name)).unwrap_or_else(|| {
        let name = first.and_then(|file| span_of(&file.name)).unwrap_or_default();
        json!({ "time": first.map(|file| time(file.modified)), "name": name })
    });
    joined(summary, json!({ "files": Value::from_iter(names_of(files)) }))
}

#[cfg(test)]
mod tests {
    use super::Form;

    #[test]
    fn the_form_that_is_named_first_is_sent() {
        for (accept, form) in [
            ("", Form::Report),
            ("*/*", Form::Report),
            ("text/html,application/xhtml+xml,*/*;q=0.8", Form::Report),
            ("text/markdown", Form::Markdown),
            ("text/plain, text/markdown ;q=0.9, application/json;q=0.5", Form::Markdown),
            ("application/json;charset=utf-8, text/markdown", Form::Json),
            ("image/png", Form::Report),
            ("Text/Markdown, */*", Form::Markdown),
        ] {
            assert_eq!(Form::accepted(accept), form, "{accept}");
        }
    }
}

//! The files that a `Directory` has written.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tracing_profiling_capture::sys;

use super::directory::{base_name_of, entries_of};

/// A file of a profile.
#[derive(Debug)]
pub struct StoredFile {
    pub name: String,
    pub bytes: u64,
    pub modified: SystemTime,
}

/// The profiles in that directory, the newest first. Empty if there is no such directory.
pub fn list_stored(dir: &Path) -> io::Result<Vec<StoredFile>> {
    let stored = |(name, metadata): (String, fs::Metadata)| {
        let (bytes, modified) = (metadata.len(), metadata.modified().unwrap_or(UNIX_EPOCH));
        let is_stored = is_profile(&name) && metadata.is_file();
        is_stored.then_some(StoredFile { name, bytes, modified })
    };
    let mut files: Vec<_> = entries_of(dir)?.into_iter().filter_map(stored).collect();
    files.sort_by(|a, b| (b.modified, &b.name).cmp(&(a.modified, &a.name)));
    Ok(files)
}

/// Reads the profile with that name, if it would be listed.
pub fn read_stored(dir: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    if !is_profile(name) {
        return Ok(None);
    }
    let Some(mut file) = sys::open_regular(&dir.join(name))? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// The id of the profile that a file with that name belongs to.
pub fn profile_id_of(name: &str) -> Option<&str> {
    base_name_of(name)?.0.rsplit('-').next()
}

/// The name of the span of a file, as far as it is in the file's name.
pub fn span_of(name: &str) -> Option<&str> {
    base_name_of(name)?.0.split('-').nth(2)
}

/// The summary in a report, an object; `None` if the file cannot be read or has none.
pub fn summary_of(dir: &Path, name: &str) -> Option<Value> {
    /// More than what precedes a summary, and the longest summary.
    const MOST: u64 = 32 * 1024;
    let file = sys::open_regular(&dir.join(name)).ok()??;
    let mut head = Vec::new();
    file.take(MOST).read_to_end(&mut head).ok()?;
    element(&head, "id=\"summary\">").filter(Value::is_object)
}

/// The 2 KiB of a report for programs and people, an object with two texts; `None` if the file has none.
pub fn brief_of(dir: &Path, name: &str) -> io::Result<Option<Value>> {
    Ok(read_stored(dir, name)?.and_then(|report| element(&report, "id=\"brief\">")))
}

/// The JSON in an element of a report.
fn element(report: &[u8], begin: &str) -> Option<Value> {
    let report = String::from_utf8_lossy(report);
    let (json, _) = report.split_once(begin)?.1.split_once("</script>")?;
    serde_json::from_str(json).ok()
}

/// Whether a `Directory` could have given a complete file that name, which leads out of it on no system.
fn is_profile(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    name.bytes().all(is_plain) && base_name_of(name).is_some() && !name.ends_with(".tmp")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEM: &str = "20231114T221320.123Z-1-GET__a-01010101010101010101010101010101";

    #[test]
    fn only_complete_profiles_have_valid_names() {
        for extension in ["html", "pb.gz", "otlp", "folded", "firefox.json.gz", "md"] {
            assert!(is_profile(&format!("{STEM}.{extension}")));
        }
        assert!(is_profile(&format!("{}.html", STEM.replace("GET__a", "a..b"))));
        for name in ["", "..", "secret", "notes.html", &format!("{STEM}.tmp"), STEM] {
            assert!(!is_profile(name), "{name}");
        }
        for (part, other) in [
            ("GET__a", "/../../secret/"),
            ("GET__a", "a\\b"),
            ("GET__a", "a\0b"),
            ("GET__a", "a:b"),
            ("20231114T221320.123Z", "../../../../a/secreZ"),
            ("20231114T221320.123Z", "..\\..\\..\\..\\a\\secreZ"),
        ] {
            let name = format!("{}.html", STEM.replace(part, other));
            assert!(!is_profile(&name), "{name}");
        }
    }
}

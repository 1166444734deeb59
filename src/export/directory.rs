//! Profiles as files in a directory.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_sdk::Resource;

use super::{ExportError, Exported, Exporter};
use crate::encode;
use crate::profile::{Profile, ProfileId};
use crate::sys;

/// Writes each profile as a flame graph (`.svg`), as pprof (`.pb.gz`) and as OTLP (`.otlp`), and
/// removes old ones.
///
/// The files of a profile are named `<time>-<pid>-<span>-<profile id>`, are readable by their
/// owner alone, and appear complete or not at all. Of the directory's other files none is touched.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    resource: Resource,
    quota_bytes: u64,
    quota_age: Duration,
}

const DEFAULT_QUOTA_BYTES: u64 = 64 * 1024 * 1024;
const DEFAULT_QUOTA_AGE: Duration = Duration::from_secs(7 * 24 * 60 * 60);

impl Directory {
    /// Writes to `path`, which is made when the first profile comes. It holds at most 64 MiB of
    /// profiles, none older than 7 days. `resource` goes into the OTLP files.
    pub fn new(path: impl Into<PathBuf>, resource: Resource) -> Self {
        let path = path.into();
        Self {
            // The program may change its working directory. Fails for an empty path, or if there
            // is none; then it stays relative.
            path: std::path::absolute(&path).unwrap_or(path),
            resource,
            quota_bytes: DEFAULT_QUOTA_BYTES,
            quota_age: DEFAULT_QUOTA_AGE,
        }
    }

    /// Removes the oldest profiles when all together have more than `bytes`, and those older than
    /// `age`.
    #[must_use]
    pub fn with_quota(self, bytes: u64, age: Duration) -> Self {
        Self { quota_bytes: bytes, quota_age: age, ..self }
    }

    fn write(&self, profile: &Profile) -> io::Result<Vec<PathBuf>> {
        sys::create_private_directory(&self.path)?;
        let stem = stem(profile);
        let contents = [
            ("svg", encode::svg(profile).into_bytes()),
            ("pb.gz", encode::pprof(profile)),
            ("otlp", encode::otlp(profile, &self.resource)),
        ];
        let new: u64 = contents.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        self.make_room(new.min(self.quota_bytes));
        if new > self.quota_bytes {
            let quota = self.quota_bytes;
            let problem =
                format!("a profile of {new} bytes does not fit: raise the quota ({quota})");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, problem));
        }
        let mut written = Vec::new();
        for (extension, bytes) in &contents {
            let path = self.path.join(format!("{stem}.{extension}"));
            let temporary = self.path.join(format!("{stem}.tmp"));
            if let Err(error) = write_whole(&path, &temporary, bytes) {
                // Half a set of files would only puzzle.
                for path in &written {
                    _ = fs::remove_file(path);
                }
                return Err(error);
            }
            written.push(path);
        }
        Ok(written)
    }

    fn problem(&self, error: &io::Error) -> String {
        let path = self.path.display();
        match error.kind() {
            io::ErrorKind::QuotaExceeded => format!("cannot write to {path}: {error}"),
            _ => format!(
                "cannot write to {path}: {error}; make it writable or set TRACING_PROFILING_DIR to \
                 a directory that is"
            ),
        }
    }

    /// Removes the oldest profiles until `new` bytes fit, and those that are too old, each with all
    /// its files. What cannot be removed stays.
    fn make_room(&self, new: u64) {
        let Ok(entries) = fs::read_dir(&self.path) else {
            return;
        };
        let mut profiles: HashMap<String, Stored> = HashMap::new();
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let Some(stem) = stem_of(&name) else { continue };
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_file() {
                let modified = metadata.modified().unwrap_or(UNIX_EPOCH);
                let stored = profiles.entry(stem.to_owned()).or_insert(Stored::NONE);
                stored.modified = stored.modified.max(modified);
                stored.files.push((metadata.len(), entry.path()));
            }
        }
        let mut profiles: Vec<_> = profiles.into_values().collect();
        profiles.sort_by_key(|stored| stored.modified);
        let now = SystemTime::now();
        let lengths = profiles.iter().flat_map(|stored| &stored.files).map(|(length, _)| length);
        let mut bytes: u64 = lengths.sum();
        for stored in profiles {
            let age = now.duration_since(stored.modified).unwrap_or_default();
            if bytes.saturating_add(new) <= self.quota_bytes && age <= self.quota_age {
                break;
            }
            for (length, path) in stored.files {
                if fs::remove_file(path).is_ok() {
                    bytes -= length;
                }
            }
        }
    }
}

/// A profile that was written before.
struct Stored {
    /// When the last of its files was.
    modified: SystemTime,
    /// Length and path.
    files: Vec<(u64, PathBuf)>,
}

impl Stored {
    const NONE: Self = Self { modified: UNIX_EPOCH, files: Vec::new() };
}

impl Exporter for Directory {
    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        let files = self.write(profile).map_err(|error| self.problem(&error))?;
        Ok(Exported::to_files(files))
    }

    fn check(&mut self) -> Result<(), ExportError> {
        // What is not there will be made: below the first folder that is.
        let nearest = self.path.ancestors().find(|path| path.exists());
        let checked = sys::check_writable(nearest.unwrap_or(Path::new(".")));
        Ok(checked.map_err(|error| self.problem(&error))?)
    }
}

fn stem(profile: &Profile) -> String {
    let start = UNIX_EPOCH + Duration::from_nanos(profile.start_unix_ns);
    let time = humantime::format_rfc3339_millis(start).to_string();
    // No colons: they mean something to other systems and to `scp`.
    let time = time.replace([':', '-'], "");
    format!("{time}-{}-{}-{}", sys::process_id(), file_name(&profile.name), profile.id)
}

/// A span's name as a part of a file's name.
fn file_name(span: &str) -> String {
    const LONGEST: usize = 60;
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || "._".contains(c) { c } else { '_' }
    };
    let name: String = span.chars().map(plain).take(LONGEST).collect();
    if name.is_empty() { "span".to_owned() } else { name }
}

/// What `stem` made of a file's name, if it is one that it could have made.
fn stem_of(name: &str) -> Option<&str> {
    let extensions = [".svg", ".pb.gz", ".otlp", ".tmp"];
    let stem = extensions.iter().find_map(|extension| name.strip_suffix(extension))?;
    let mut parts = stem.splitn(4, '-');
    let (Some(time), Some(pid), Some(_span), Some(id), None) =
        (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    let is_time = time.len() == "20261121T085100.123Z".len() && time.ends_with('Z');
    let is_id = id.len() == 2 * size_of::<ProfileId>() && id.bytes().all(|b| b.is_ascii_hexdigit());
    let is_ours = is_time && is_id && pid.bytes().all(|byte| byte.is_ascii_digit());
    is_ours.then_some(stem)
}

/// Writes a file that is there as a whole or not at all.
fn write_whole(path: &Path, temporary: &Path, bytes: &[u8]) -> io::Result<()> {
    let written = sys::create_private_file(temporary)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(temporary, path));
    if written.is_err() {
        _ = fs::remove_file(temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(byte: u8) -> Profile {
        let mut profile = Profile::new(ProfileId::for_test(byte), 1);
        profile.name = "GET /a b".to_owned();
        profile.start_unix_ns = 1_700_000_000_123_456_789;
        profile
    }

    fn directory(path: &Path) -> Directory {
        Directory::new(path, Resource::builder_empty().build())
    }

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn writes_three_files_named_by_time_process_span_and_id() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("deep/er");
        let exported = directory(&path).export(&profile(7)).unwrap();
        let stem =
            format!("20231114T221320.123Z-{}-GET__a_b-{}", std::process::id(), "07".repeat(16));
        assert_eq!(
            names(&path),
            [format!("{stem}.otlp"), format!("{stem}.pb.gz"), format!("{stem}.svg")]
        );
        assert_eq!(exported.files[0], path.join(format!("{stem}.svg")));
        assert!(names(&path).iter().all(|name| stem_of(name) == Some(&stem)));
    }

    #[cfg(unix)]
    #[test]
    fn only_the_owner_may_read() {
        use std::os::unix::fs::PermissionsExt;
        let temporary = tempfile::tempdir().unwrap();
        let exported = directory(temporary.path()).export(&profile(7)).unwrap();
        for file in exported.files {
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn removes_the_oldest_when_full_and_nothing_of_others() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path();
        fs::write(path.join("notes.svg"), [0; 100_000]).unwrap();
        let first = directory(path).export(&profile(1)).unwrap();
        let size: u64 = first.files.iter().map(|f| fs::metadata(f).unwrap().len()).sum();
        // Older than what follows, whatever the file system's clock says.
        for file in &first.files {
            let earlier = SystemTime::now() - Duration::from_secs(60);
            fs::File::options().write(true).open(file).unwrap().set_modified(earlier).unwrap();
        }
        let day = Duration::from_secs(86_400);
        let mut small = directory(path).with_quota(size * 2, day);
        small.export(&profile(2)).unwrap();
        assert!(first.files.iter().all(|file| file.exists()));
        small.export(&profile(3)).unwrap();
        assert!(!first.files.iter().any(|file| file.exists()));
        assert_eq!(names(path).len(), 7);
        assert!(path.join("notes.svg").exists());

        let error = directory(path).with_quota(size / 2, day).export(&profile(4)).unwrap_err();
        assert!(error.to_string().contains("raise the quota"), "{error}");
        assert_eq!(names(path), ["notes.svg"], "the others did not fit either");
    }

    #[test]
    fn removes_what_is_too_old() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path();
        let first = directory(path).export(&profile(1)).unwrap();
        for file in &first.files {
            let earlier = SystemTime::now() - Duration::from_secs(60);
            fs::File::options().write(true).open(file).unwrap().set_modified(earlier).unwrap();
        }
        directory(path).with_quota(u64::MAX, Duration::from_secs(30)).export(&profile(2)).unwrap();
        assert_eq!(names(path).len(), 3);
    }

    #[test]
    fn a_directory_that_cannot_be_made_says_what_to_do() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut directory = directory(&file.path().join("below"));
        for error in [directory.export(&profile(1)).unwrap_err(), directory.check().unwrap_err()] {
            let message = error.to_string();
            assert!(message.contains("TRACING_PROFILING_DIR"), "{message}");
        }
    }

    #[test]
    fn a_check_makes_nothing() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("deep/er");
        directory(&path).check().unwrap();
        assert_eq!(names(temporary.path()), [""; 0]);
    }

    #[test]
    fn other_names_are_not_ours() {
        for name in [
            "profile.svg",
            "a-b-c-d.svg",
            "20231114T221320.123Z-x-span-01010101010101010101010101010101.svg",
            "20231114T221320.123Z-1-span-0101.svg",
            "20231114T221320.123Z-1-span-01010101010101010101010101010101.txt",
        ] {
            assert_eq!(stem_of(name), None, "{name}");
        }
    }
}

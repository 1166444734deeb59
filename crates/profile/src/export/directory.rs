//! Profiles as files in a directory.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indexmap::IndexSet;

use super::format::Format;
use super::resource_from_env;
use super::{ExportError, Exported, Exporter, Unexportable};
use crate::encode::HtmlContext;
use crate::profile::{Profile, ProfileId};

/// Writes each profile as a report (`.html`), as pprof (`.pb.gz`, feature `pprof`) and as OTLP (`.otlp`, feature
/// `otlp`), and removes old profiles.
///
/// The files of a profile are named `<time>-<pid>-<span>-<profile id>`. Only their owner can read them, and each file
/// is created atomically. Other files in the directory are not touched.
///
/// Without a layer, reports have the resource of the environment and no links, unless
/// [`set_context`](Exporter::set_context) is called.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// The context of the layer. Without one, the resource is read from the environment.
    context: OnceLock<HtmlContext>,
    formats: Vec<Format>,
    quota_bytes: u64,
    quota_age: Duration,
    of_process: OnceLock<Box<Directory>>,
}

/// The name of the directory in it that has the profiles of the process.
pub const OF_PROCESS: &str = "process";
const DEFAULT_QUOTA_BYTES: u64 = 64 * 1024 * 1024;
const DEFAULT_QUOTA_AGE: Duration = Duration::from_secs(7 * 24 * 60 * 60);

impl Directory {
    /// Writes to `path`, which is created with the first profile. By default it holds at most 64 MiB of profiles, none
    /// older than 7 days. Profiles of a continuous profile are in its directory `process`,
    /// without reports, and with the same limits of their own.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        // A report, and the same for other programs.
        let is_usual = |it: &Format| matches!(it, Format::Html | Format::Pprof | Format::Otlp);
        Self {
            // The program may change its working directory. Without one, or for an empty path, the path stays relative.
            path: std::path::absolute(&path).unwrap_or(path),
            context: OnceLock::new(),
            formats: Format::available().filter(is_usual).collect(),
            quota_bytes: DEFAULT_QUOTA_BYTES,
            quota_age: DEFAULT_QUOTA_AGE,
            of_process: OnceLock::new(),
        }
    }

    /// Sets the formats, each of which is a file. The first one is the best to start with: it is in the log.
    ///
    /// The default is [`Html`](Format::Html), [`Pprof`](Format::Pprof), [`Otlp`](Format::Otlp), as far as features are on.
    #[must_use]
    pub fn with_formats(self, formats: impl IntoIterator<Item = Format>) -> Self {
        let unique: IndexSet<_> = formats.into_iter().collect();
        Self { formats: unique.into_iter().collect(), ..self }
    }

    /// Sets the quota: the oldest profiles are removed when all of them exceed `bytes`, and so are profiles older than
    /// `age`.
    #[must_use]
    pub fn with_quota(self, bytes: u64, age: Duration) -> Self {
        Self { quota_bytes: bytes, quota_age: age, ..self }
    }

    fn write(&self, profile: &Profile, otlp: Option<Vec<u8>>) -> io::Result<Vec<PathBuf>> {
        let context = self.context.get_or_init(|| HtmlContext::new(resource_from_env()));
        // A message that is to be sent later is written in any case.
        let unlisted = otlp.is_some() && !self.formats.contains(&Format::Otlp);
        let formats = self.formats.iter().copied().chain(unlisted.then_some(Format::Otlp));
        let encoded = formats.filter_map(|format| {
            let known = otlp.clone().filter(|_| format == Format::Otlp);
            Some((format.extension(), known.or_else(|| format.encode(profile, context))?))
        });
        self.write_files(&stem(profile), &encoded.collect::<Vec<_>>())
    }

    /// Writes the files of one stem, or none of them. Each has one of the [`extensions`]. Older profiles are removed first:
    /// those over the quota, and as many as a full file system needs.
    #[doc(hidden)]
    pub fn write_files(
        &self,
        stem: &str,
        files: &[(&'static str, impl AsRef<[u8]>)],
    ) -> io::Result<Vec<PathBuf>> {
        create_private_directory(&self.path)?;
        let new: u64 = files.iter().map(|(_, bytes)| bytes.as_ref().len() as u64).sum();
        // Checked first: nothing is removed for a profile that cannot fit.
        if new > self.quota_bytes {
            let quota = self.quota_bytes;
            let problem =
                format!("a profile of {new} bytes does not fit: raise the quota ({quota})");
            return Err(io::Error::other(problem));
        }
        let write = || {
            let mut written = Vec::new();
            for (extension, bytes) in files {
                let path = self.path.join(format!("{stem}{extension}"));
                let temporary = self.path.join(format!("{stem}.tmp"));
                if let Err(error) = write_whole(&path, &temporary, bytes.as_ref()) {
                    // An incomplete set of files would only confuse.
                    for path in &written {
                        _ = fs::remove_file(path);
                    }
                    return Err(error);
                }
                written.push(path);
            }
            Ok(written)
        };
        self.make_room(new, 0);
        let mut written = write();
        for _ in 0..MOST_TRIES {
            if !written.as_ref().is_err_and(is_full) || !self.make_room(new, new) {
                break;
            }
            written = write();
        }
        written
    }

    /// Writes all formats of a profile and returns the paths. The OTLP file may be encoded already.
    #[doc(hidden)]
    pub fn store(
        &self,
        profile: &Profile,
        otlp: Option<Vec<u8>>,
    ) -> Result<Vec<PathBuf>, ExportError> {
        let directory = if profile.is_of_process() { self.of_process() } else { self };
        directory.write(profile, otlp).map_err(|error| {
            let problem = directory.problem(&error);
            // The same files would be too large again.
            if is_over_quota(&error) { Unexportable(problem).into() } else { problem.into() }
        })
    }

    /// The directory of the profiles of the process, which are many, and have no reports.
    fn of_process(&self) -> &Self {
        self.of_process.get_or_init(|| {
            let has_stacks = |format: &Format| !matches!(format, Format::Html | Format::Markdown);
            let mut formats: Vec<_> = self.formats.iter().copied().filter(has_stacks).collect();
            if formats.is_empty() {
                formats.push(Format::Folded);
            }
            let directory = Self::new(self.path.join(OF_PROCESS)).with_formats(formats);
            Box::new(directory.with_quota(self.quota_bytes, self.quota_age))
        })
    }

    pub(super) fn problem(&self, error: &io::Error) -> String {
        let path = self.path.display();
        match error.kind() {
            _ if is_over_quota(error) => format!("cannot write to {path}: {error}"),
            io::ErrorKind::FileTooLarge => format!(
                "cannot write to {path}: {error}; raise the limit on the size of files (`ulimit -f`, \
                 `LimitFSIZE=` of systemd)"
            ),
            _ => format!(
                "cannot write to {path}: {error}; make it writable or set TRACING_PROFILING_DIR to \
                 a directory that is"
            ),
        }
    }

    /// Removes the oldest profiles, with all their files, until `new` bytes fit and `least` are free, and those that are
    /// too old. Files that cannot be removed stay. Returns whether anything was removed.
    fn make_room(&self, new: u64, least: u64) -> bool {
        let stored = stored_in(&self.path).unwrap_or_default();
        let bytes: u64 = stored.iter().map(Stored::bytes).sum();
        let (now, mut freed) = (SystemTime::now(), 0);
        for oldest in stored {
            let age = now.duration_since(oldest.modified).unwrap_or_default();
            let fits = (bytes - freed).saturating_add(new) <= self.quota_bytes && freed >= least;
            if fits && age <= self.quota_age {
                break;
            }
            freed += oldest.remove(&self.path);
        }
        freed > 0
    }

    /// Creates an entry where profiles would go, and removes it. Permissions alone are not reliable, as in `/proc`.
    fn probe(&self) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        // Missing directories will be created below the nearest existing one.
        let nearest = self.path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
        let (pid, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        // If the process ends before the entry is removed, it is later removed like an old profile.
        let time = file_time(SystemTime::now());
        let probe = nearest.join(format!("{time}-{pid}-check-{number:032x}.tmp"));
        let made = if nearest == self.path {
            create_private_file(&probe).and_then(|_| fs::remove_file(probe))
        } else {
            create_private_directory(&probe).and_then(|()| fs::remove_dir(probe))
        };
        match made {
            // The user's quota is used up, or there is no free inode.
            Err(error)
                if is_full(&error)
                    && stored_in(&self.path).is_ok_and(|stored| !stored.is_empty()) =>
            {
                Ok(())
            }
            made => made,
        }
    }
}

/// Creates a file of mode 0600. Fails if the path exists: it could be a link to another file.
fn create_private_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.write(true).create_new(true).open(path)
}

/// Creates a directory and its parents with mode 0700, if it does not exist.
fn create_private_directory(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

/// How often writing is repeated after room was made.
const MOST_TRIES: usize = 4;

/// The file system is full, or the user's quota on it.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The profile alone is larger than the quota. Errors of the system have nothing inside.
fn is_over_quota(error: &io::Error) -> bool {
    error.get_ref().is_some()
}

#[derive(Debug)]
struct Stored {
    stem: String,
    /// When the newest of its files was modified.
    modified: SystemTime,
    /// The extensions and lengths of its files.
    files: Vec<(&'static str, u64)>,
}

/// The profiles in a directory, the oldest first.
fn stored_in(path: &Path) -> io::Result<Vec<Stored>> {
    let mut profiles: HashMap<String, Stored> = HashMap::new();
    for (name, metadata) in entries_of(path)? {
        let Some((stem, extension)) = base_name_of(&name) else { continue };
        if metadata.is_file() {
            let modified = metadata.modified().unwrap_or(UNIX_EPOCH);
            let new = || Stored { stem: stem.to_owned(), modified, files: Vec::new() };
            let stored = profiles.entry(stem.to_owned()).or_insert_with(new);
            stored.modified = stored.modified.max(modified);
            stored.files.push((extension, metadata.len()));
        }
    }
    let mut profiles: Vec<_> = profiles.into_values().collect();
    profiles.sort_by(|a, b| (a.modified, &a.stem).cmp(&(b.modified, &b.stem)));
    Ok(profiles)
}

impl Stored {
    fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, length)| length).sum()
    }

    /// Removes its files. Returns how many bytes that frees.
    fn remove(&self, path: &Path) -> u64 {
        let is_gone = |(extension, _): &&(&'static str, u64)| {
            // A file that is already gone takes no room either.
            match fs::remove_file(path.join(format!("{}{extension}", self.stem))) {
                Err(error) => error.kind() == io::ErrorKind::NotFound,
                Ok(()) => true,
            }
        };
        self.files.iter().filter(is_gone).map(|(_, length)| length).sum()
    }
}

impl Exporter for Directory {
    fn keeps_files(&self) -> bool {
        false
    }

    fn export(&mut self, profile: &Profile) -> Result<Exported, ExportError> {
        Ok(Exported::to_files(self.store(profile, None)?))
    }

    fn check(&mut self) -> Result<(), ExportError> {
        Ok(self.probe().map_err(|error| self.problem(&error))?)
    }

    fn set_context(&mut self, context: &HtmlContext) {
        self.context = OnceLock::from(context.clone());
    }

    fn directory(&self) -> Option<&Path> {
        Some(&self.path)
    }
}

/// The name of the files of a profile, without their extensions.
pub fn stem(profile: &Profile) -> String {
    let start = UNIX_EPOCH + Duration::from_nanos(profile.start_unix_ns);
    base_name_at(start, &profile.name, profile.id)
}

pub(super) fn base_name_at(time: SystemTime, name: &str, id: ProfileId) -> String {
    format!("{}-{}-{}-{id}", file_time(time), std::process::id(), file_name(name))
}

pub(super) fn file_time(time: SystemTime) -> String {
    let time = humantime::format_rfc3339_millis(time).to_string();
    // No colons: they are special on other systems and to `scp`.
    time.replace([':', '-'], "")
}

/// A span's name as a part of a file name.
pub(super) fn file_name(span: &str) -> String {
    const LONGEST: usize = 60;
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || "._".contains(c) { c } else { '_' }
    };
    let name: String = span.chars().map(plain).take(LONGEST).collect();
    if name.is_empty() { "span".to_owned() } else { name }
}

/// The extension of files with what was typical in an hour.
pub(super) const TYPICAL: &str = ".typical.gz";

/// Extensions of a profile's files, of those in directories beside them, and of a file that is not complete yet.
fn extensions() -> impl Iterator<Item = &'static str> {
    Format::ALL.map(Format::extension).into_iter().chain([TYPICAL, ".tmp"])
}

/// Splits a file name that `stem` could have made into the stem and its extension.
pub(super) fn base_name_of(name: &str) -> Option<(&str, &'static str)> {
    let split = |extension| Some((name.strip_suffix(extension)?, extension));
    let (stem, extension) = extensions().find_map(split)?;
    let mut parts = stem.splitn(4, '-');
    let [time, pid, _, id] = [(); 4].map(|()| parts.next().unwrap_or_default());
    let is_time = time.len() == "20261121T085100.123Z".len() && time.ends_with('Z');
    let is_id = id.len() == 2 * size_of::<ProfileId>() && id.bytes().all(|b| b.is_ascii_hexdigit());
    let is_ours = is_time && is_id && pid.bytes().all(|byte| byte.is_ascii_digit());
    is_ours.then_some((stem, extension))
}

/// The names of what is in a directory, and what is known of it: of the entries themselves, also if they are links. Empty if
/// there is no such directory.
pub(super) fn entries_of(dir: &Path) -> io::Result<Vec<(String, fs::Metadata)>> {
    let known =
        |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.metadata().ok()?));
    match fs::read_dir(dir) {
        Ok(entries) => Ok(entries.flatten().filter_map(known).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Writes a file atomically.
fn write_whole(path: &Path, temporary: &Path, bytes: &[u8]) -> io::Result<()> {
    let written = create_private_file(temporary)
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
    use crate::profile::ProfileScope;

    fn profile(byte: u8) -> Profile {
        let mut profile = Profile::new(ProfileId::for_test(byte), 1);
        profile.name = "GET /a b".to_owned();
        profile.start_unix_ns = 1_700_000_000_123_456_789;
        profile
    }

    fn directory(path: &Path) -> Directory {
        Directory::new(path)
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
            [format!("{stem}.html"), format!("{stem}.otlp"), format!("{stem}.pb.gz")]
        );
        assert_eq!(exported.files[0], path.join(format!("{stem}.html")));
        assert!(names(&path).iter().all(|name| base_name_of(name).unwrap().0 == stem));
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
    fn removes_the_oldest_profile_when_full_and_no_other_files() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path();
        fs::write(path.join("notes.html"), [0; 100_000]).unwrap();
        let first = directory(path).export(&profile(1)).unwrap();
        let size: u64 = first.files.iter().map(|f| fs::metadata(f).unwrap().len()).sum();
        // Older than the following files, whatever the file system's clock returns.
        for file in &first.files {
            let earlier = SystemTime::now() - Duration::from_secs(60);
            fs::File::options().write(true).open(file).unwrap().set_modified(earlier).unwrap();
        }
        let day = Duration::from_secs(86_400);
        let mut small = directory(path).with_quota(size * 2 + size / 2, day);
        small.export(&profile(2)).unwrap();
        assert!(first.files.iter().all(|file| file.exists()));
        small.export(&profile(3)).unwrap();
        assert!(!first.files.iter().any(|file| file.exists()));
        assert_eq!(names(path).len(), 7);
        assert!(path.join("notes.html").exists());

        let error = directory(path).with_quota(size / 2, day).export(&profile(4)).unwrap_err();
        assert!(error.to_string().contains("raise the quota"), "{error}");
        assert!(error.is::<Unexportable>());
        assert_eq!(names(path).len(), 7, "no other profile was removed");
    }

    #[test]
    fn profiles_of_the_process_have_a_quota_of_their_own_and_are_no_reports() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path();
        let of_process = |byte| {
            let mut profile = profile(byte);
            profile.scope = ProfileScope::Process;
            profile
        };
        let first = directory(path).export(&of_process(1)).unwrap();
        assert!(first.files.iter().all(|file| file.parent() == Some(&path.join("process"))));
        assert!(first.files.iter().all(|file| file.extension().unwrap() != "html"));
        let size: u64 = first.files.iter().map(|f| fs::metadata(f).unwrap().len()).sum();
        // Room for one of them, besides one profile of a span.
        let day = Duration::from_secs(86_400);
        let report = directory(path).with_formats([Format::Folded]).export(&profile(9)).unwrap();
        let mut small = directory(path).with_quota(size + size / 2, day);
        small.export(&of_process(2)).unwrap();
        assert!(first.files.iter().all(|file| !file.exists()));
        assert!(report.files[0].exists());
        let mut only_reports = directory(path).with_formats([Format::Html, Format::Markdown]);
        let files = only_reports.export(&of_process(3)).unwrap().files;
        assert!(files.len() == 1 && files[0].extension().unwrap() == "folded", "{files:?}");
    }

    #[test]
    fn files_that_others_removed_are_not_counted() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path();
        let mut directory = directory(path).with_quota(u64::MAX, Duration::from_secs(86_400));
        let first = directory.export(&profile(1)).unwrap();
        let size: u64 = first.files.iter().map(|f| fs::metadata(f).unwrap().len()).sum();
        // Compressed sizes depend slightly on the ids.
        directory.quota_bytes = 2 * size + size / 2;
        directory.export(&profile(2)).unwrap();
        first.files.iter().for_each(|file| fs::remove_file(file).unwrap());
        for byte in [3, 4, 5] {
            directory.export(&profile(byte)).unwrap();
            assert_eq!(names(path).len(), 6);
        }
    }

    #[test]
    fn profiles_that_others_write_are_counted() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path();
        let day = Duration::from_secs(86_400);
        let mut ours = directory(path).with_quota(u64::MAX, day);
        let first = ours.export(&profile(1)).unwrap();
        let size: u64 = first.files.iter().map(|f| fs::metadata(f).unwrap().len()).sum();
        let mut theirs = directory(path);
        theirs.export(&profile(2)).unwrap();
        ours.quota_bytes = 2 * size + size / 2;
        ours.export(&profile(3)).unwrap();
        assert!(!first.files.iter().any(|file| file.exists()));
        assert_eq!(names(path).len(), 6);
    }

    #[test]
    fn removes_profiles_that_are_too_old() {
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
    fn the_error_for_an_unusable_directory_says_what_to_do() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut directory = directory(&file.path().join("below"));
        for error in [directory.export(&profile(1)).unwrap_err(), directory.check().unwrap_err()] {
            let message = error.to_string();
            assert!(message.contains("TRACING_PROFILING_DIR"), "{message}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn check_detects_unusable_directories() {
        for path in ["/proc/nope", "/proc/nope/below", "/dev/null", "/dev/null/below"] {
            let problem = directory(Path::new(path)).check().unwrap_err().to_string();
            assert!(problem.contains("TRACING_PROFILING_DIR"), "{problem}");
        }
    }

    #[test]
    fn a_check_leaves_nothing_behind() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("deep/er");
        directory(&path).check().unwrap();
        assert_eq!(names(temporary.path()), [""; 0]);
        directory(temporary.path()).check().unwrap();
        assert_eq!(names(temporary.path()), [""; 0]);
    }

    #[test]
    fn other_file_names_are_not_profiles() {
        for name in [
            "profile.html",
            "a-b-c-d.html",
            "20231114T221320.123Z-x-span-01010101010101010101010101010101.html",
            "20231114T221320.123Z-1-span-0101.html",
            "20231114T221320.123Z-1-span-01010101010101010101010101010101.txt",
        ] {
            assert_eq!(base_name_of(name), None, "{name}");
        }
    }
}

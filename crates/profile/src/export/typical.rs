//! The files with what was typical in each hour.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tracing_profiling_capture::sys;

use super::Exporter as _;
use super::directory::{
    Directory, TYPICAL, base_name_at, base_name_of, entries_of, file_name, file_time,
};
use crate::profile::ProfileId;

/// The name of their directory in that of profiles.
const OF_TYPICAL: &str = "typical";
/// A week of a day's 24 files of 100 KiB each. Those of a service with ten routes have some 10 KiB.
const QUOTA_BYTES: u64 = 16 * 1024 * 1024;
const QUOTA_AGE: Duration = Duration::from_secs(8 * 24 * 60 * 60);
/// More than any that is written: compressed as well as names are, it is 16 MiB.
const LARGEST_FILE: u64 = 4 * 1024 * 1024;
/// The most files that are listed: those of 25 hours and 40 processes.
const MOST_LISTED: usize = 1_000;

/// What one process writes: a file for each hour, so that processes can share the directory.
#[derive(Debug)]
pub struct TypicalFiles {
    directory: Directory,
    id: ProfileId,
}

/// A file of some process.
#[derive(Clone, Debug)]
pub struct TypicalFile {
    pub path: PathBuf,
    /// When its hour began, as text that sorts by time.
    time: String,
    modified: Option<SystemTime>,
    /// The version of the service, as far as it is in the name of the file.
    pub version: String,
}

impl TypicalFiles {
    /// The files in the directory `typical` in `dir`, which is created with the first file.
    pub fn new(dir: &Path) -> Self {
        let directory = Directory::new(dir.join(OF_TYPICAL)).with_quota(QUOTA_BYTES, QUOTA_AGE);
        Self { directory, id: ProfileId::random().unwrap_or(ProfileId::NONE) }
    }

    /// Writes, or replaces, the own file of an hour. The oldest files make room. Returns what the problem is if it fails.
    pub fn write(
        &self,
        hour_begins: SystemTime,
        version: &str,
        bytes: &[u8],
    ) -> Result<(), String> {
        // That of profiles is made with the first profile.
        let of_profiles = self.directory.directory().and_then(Path::parent);
        if !of_profiles.is_some_and(Path::exists) {
            return Ok(());
        }
        let stem = base_name_at(hour_begins, version, self.id);
        let written = self.directory.write_files(&stem, &[(TYPICAL, bytes)]);
        written.map(drop).map_err(|error| self.directory.problem(&error))
    }
}

impl TypicalFile {
    /// The newest files in the directory of that name in `dir`, or in `dir` itself, the newest hour first, and of an hour
    /// the last written. Empty if there is no such directory.
    pub fn list(dir: &Path) -> io::Result<Vec<Self>> {
        let below = dir.join(OF_TYPICAL);
        let dir = if below.is_dir() { &below } else { dir };
        let names = entries_of(dir)?.into_iter().filter_map(|(name, metadata)| {
            let (stem, _) = base_name_of(&name).filter(|(_, extension)| *extension == TYPICAL)?;
            let mut parts = stem.split('-');
            let (time, version) = (parts.next()?.to_owned(), parts.nth(1)?.to_owned());
            let modified = metadata.modified().ok();
            Some(Self { path: dir.join(&name), time, modified, version })
        });
        let mut files: Vec<_> = names.collect();
        files.sort_by(|a, b| (&b.time, b.modified, &b.path).cmp(&(&a.time, a.modified, &a.path)));
        files.truncate(MOST_LISTED);
        Ok(files)
    }

    /// Whether its hour began at that time or later.
    pub fn is_since(&self, time: SystemTime) -> bool {
        self.time >= file_time(time)
    }

    pub fn is_of_version(&self, version: &str) -> bool {
        self.version == file_name(version)
    }
}

/// The content of a file that is not larger than any that a layer writes.
pub fn read_typical(path: &Path) -> io::Result<Vec<u8>> {
    let file = sys::open_regular(path)?.ok_or_else(|| io::Error::other("it is no file"))?;
    let mut bytes = Vec::new();
    file.take(LARGEST_FILE + 1).read_to_end(&mut bytes)?;
    let problem = "it is larger than any that is written";
    let too_large = || io::Error::new(io::ErrorKind::FileTooLarge, problem);
    (bytes.len() as u64 <= LARGEST_FILE).then_some(bytes).ok_or_else(too_large)
}

//! What was stored of hours, for comparisons of any two.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;

use super::HOURS_PER_DAY;
use super::format::HourFile;
use crate::compare::{CohortHour, Comparison, MAX_ROUTES, compare_sets, hour_begins, hour_of};
use crate::export::typical::{TypicalFile, read_typical};
use crate::references::Route;

/// What was typical of each route in some hours, as layers have stored it in the directory `typical` of a
/// [`Directory`](crate::Directory).
///
/// A route is the name of a span with the values of the fields that name the route of a request:
/// `GET /similar`. What is known of it are sums over its [reference spans](crate::Builder::references).
///
/// ```no_run
/// use tracing_profiling::{Period, RouteHistory};
///
/// # fn main() -> std::io::Result<()> {
/// let read = |version: &str| RouteHistory::of_period("profiles", &Period::Version(version.into()));
/// for (route, comparison) in read("1.4.2")?.compare(&read("1.4.1")?) {
///     println!("{route} takes {} ns more on average", comparison.wall.extra());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct RouteHistory {
    routes: BTreeMap<String, CohortHour>,
    unreadable: usize,
}

/// Some of the hours that are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Period {
    /// The last 24 in which there is any of a version of the service: the attribute `service.version` of its
    /// [resource](crate::Builder::resource).
    Version(String),
    /// One, [counted](crate::compare::hour_of) from 1970.
    Hour(u64),
    /// All.
    All,
}

impl RouteHistory {
    /// Reads a file of an hour, or all that is in a directory: that of profiles, or its directory `typical`. At most the
    /// newest 1,000 files are read.
    ///
    /// # Errors
    ///
    /// If there is none, or if a single file is damaged.
    pub fn read(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            return Self::of_period(path, &Period::All);
        }
        let file = HourFile::read(path).map_err(io::Error::other)?;
        Ok(Self { routes: file.routes, unreadable: 0 })
    }

    /// Reads a period in a directory of profiles.
    ///
    /// # Errors
    ///
    /// If nothing is stored of it in that directory.
    pub fn of_period(dir: impl AsRef<Path>, period: &Period) -> io::Result<Self> {
        let dir = dir.as_ref();
        let (mut found, mut newest) = (Self::default(), None);
        for file in TypicalFile::list(dir)? {
            let may_be_of = match period {
                Period::Version(version) => file.is_of_version(version),
                Period::Hour(hour) => {
                    file.is_since(hour_begins(*hour))
                        && !file.is_since(hour_begins(hour.saturating_add(1)))
                }
                Period::All => true,
            };
            if !may_be_of {
                continue;
            }
            match HourFile::read(&file.path) {
                // The newest is first.
                Ok(hour) => match period {
                    Period::Version(version) if *version != hour.version => {}
                    Period::Version(_)
                        if hour.hour + HOURS_PER_DAY <= *newest.get_or_insert(hour.hour) => {}
                    _ => found.add(hour.routes),
                },
                Err(_) => found.unreadable += 1,
            }
        }
        if found.routes.is_empty() {
            let problem = format!("nothing is stored of {period} in {}", dir.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, problem));
        }
        Ok(found)
    }

    fn add(&mut self, routes: BTreeMap<String, CohortHour>) {
        for (route, hour) in routes {
            if self.routes.len() < MAX_ROUTES || self.routes.contains_key(&route) {
                self.routes.entry(route).or_default().merge(&hour);
            }
        }
    }

    /// The versions of which hours are stored in a directory of profiles, the last one first.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    pub fn versions(dir: impl AsRef<Path>) -> io::Result<Vec<String>> {
        let mut versions: Vec<String> = Vec::new();
        for file in TypicalFile::list(dir.as_ref())? {
            if !versions.iter().any(|version| file.is_of_version(version))
                && let Ok(hour) = HourFile::read(&file.path)
            {
                versions.push(hour.version);
            }
        }
        versions.retain(|version| !version.is_empty());
        Ok(versions)
    }

    /// The names of the routes, in order. At most 1,024.
    pub fn routes(&self) -> impl Iterator<Item = &str> {
        self.routes.keys().map(String::as_str)
    }

    /// How many reference spans there are of a route.
    pub fn references(&self, route: &str) -> u64 {
        self.routes.get(route).map_or(0, |hour| hour.references.spans())
    }

    /// How many files were damaged, and left out.
    pub fn unreadable(&self) -> usize {
        self.unreadable
    }

    /// Compares the mean span of each route that both have with that of `before`, in the order of names. Each comparison
    /// has as many [`references`](Comparison::references) as `before` has of the route.
    pub fn compare(&self, before: &Self) -> Vec<(String, Comparison)> {
        let compared = |route: &String| Some((route.clone(), self.compare_route(before, route)?));
        self.routes.keys().filter_map(compared).collect()
    }

    /// Compares the mean span of one route with that of `before`. `None` unless both have the route.
    pub fn compare_route(&self, before: &Self, route: &str) -> Option<Comparison> {
        let (before, after) = (before.routes.get(route)?, self.routes.get(route)?);
        Some(compare_sets(&before.references, &after.references))
    }
}

impl From<Vec<Route>> for RouteHistory {
    /// What is in memory: the hour that has not ended, and the one before.
    fn from(routes: Vec<Route>) -> Self {
        let routes = routes.into_iter().map(|route| (route.name, route.recent)).collect();
        Self { routes, unreadable: 0 }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(f, "version {version}"),
            Self::Hour(hour) => {
                let begins = hour_begins(*hour);
                write!(f, "the hour from {}", humantime::format_rfc3339_seconds(begins))
            }
            Self::All => f.write_str("all hours"),
        }
    }
}

impl Period {
    /// Parses an hour in UTC, such as `2026-11-25T14`; anything else is a version.
    pub fn parse(text: &str) -> Self {
        let time = humantime::parse_rfc3339(&format!("{text}:00:00Z"));
        time.map_or_else(|_| Self::Version(text.to_owned()), |time| Self::Hour(hour_of(time)))
    }
}

impl HourFile {
    /// Reads a file. Returns what is wrong with it if it cannot be read.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let bytes = read_typical(path).map_err(|error| error.to_string())?;
        Self::decode(&bytes)
    }
}

//! Errors of building and reconfiguring a layer.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::export::InvalidSetting;
use crate::redact::InvalidPattern;
use crate::text::{around, line_of};

/// Why a layer could not be built, or why its rules could not be replaced. No other error needs to be handled by a
/// program: later losses are counted in [`Stats`](crate::Stats) and logged.
///
/// [`Debug`](fmt::Debug) prints the same text as [`Display`](fmt::Display), so that a `main` that returns this error
/// prints a readable message.
#[derive(Clone)]
pub struct Error(Problem);

#[derive(Clone, Debug, thiserror::Error)]
enum Problem {
    #[error("cannot read {what}: {problem}\n  {line}\n  {}^", " ".repeat(*before))]
    Text {
        what: &'static str,
        /// The text around the error, and the number of characters before its position.
        line: String,
        before: usize,
        problem: String,
    },
    #[error(transparent)]
    Setting(InvalidSetting),
    #[error("cannot start the profiling threads: {0}")]
    Thread(Arc<io::Error>),
    #[error(
        "profiling needs {needed_mib} MiB of memory, more than the limits of this process allow: raise them (`ulimit -v`, \
         `ulimit -d`)"
    )]
    NoMemory { needed_mib: u64 },
    #[error("the profiling layer is gone, or has been shut down")]
    Ended,
}

/// The characters of a problem that are shown: the names of all conditions have room.
const MOST_OF_PROBLEM: usize = 400;

impl Error {
    /// `what` cannot be parsed because of the text at that position.
    pub(crate) fn text(what: &'static str, text: &str, at: usize, problem: String) -> Self {
        let (line, before) = around(text, at);
        Self(Problem::Text {
            what,
            line,
            before,
            problem: line_of(&problem, MOST_OF_PROBLEM).into_owned(),
        })
    }

    /// Without a line of its own for the position, as logs escape line breaks.
    pub(crate) fn in_one_line(&self) -> String {
        let Problem::Text { what, line, before, problem } = &self.0 else {
            return self.to_string();
        };
        let read: String = line.chars().take(*before).collect();
        let place =
            if read.is_empty() { "at the beginning".into() } else { format!("after `{read}`") };
        format!("cannot read {what}: {problem}, {place} of `{line}`")
    }

    /// Replaces `what` of the error by `name`.
    pub(crate) fn found_in(mut self, name: &'static str) -> Self {
        if let Problem::Text { what, .. } = &mut self.0 {
            *what = name;
        }
        self
    }

    /// What cannot be read, such as the name of a variable.
    pub(crate) fn subject(&self) -> &'static str {
        match &self.0 {
            Problem::Text { what, .. } => what,
            Problem::Setting(setting) => setting.name,
            Problem::Thread(_) | Problem::NoMemory { .. } | Problem::Ended => "",
        }
    }

    pub(crate) fn setting(name: &'static str, value: &str, expected: &'static str) -> Self {
        InvalidSetting::new(name, value, expected).into()
    }

    pub(crate) fn thread(error: io::Error) -> Self {
        Self(Problem::Thread(Arc::new(error)))
    }

    pub(crate) fn no_memory(needed_mib: u64) -> Self {
        Self(Problem::NoMemory { needed_mib })
    }

    pub(crate) fn ended() -> Self {
        Self(Problem::Ended)
    }
}

/// For a `main` that returns errors of the system.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::other(error)
    }
}

impl From<InvalidPattern> for Error {
    fn from(error: InvalidPattern) -> Self {
        Self::text("the pattern", &error.text, error.at, error.problem)
    }
}

impl From<InvalidSetting> for Error {
    fn from(error: InvalidSetting) -> Self {
        Self(Problem::Setting(error))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Why [`Handle::flush`](crate::Handle::flush) or [`Handle::shutdown`](crate::Handle::shutdown) could not deliver
/// everything.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FlushError {
    /// The timeout has passed before that was done.
    #[error("{0} in time")]
    Timeout(FlushStage),
    /// The exporter fails, or its receiver is away or refuses profiles, for this reason.
    #[error("profiles cannot be exported: {0}")]
    ExporterFails(String),
    /// How many profiles with a reported id were lost since the last call; [`Stats`](crate::Stats) and the log say why.
    #[error("{0} profiles were lost")]
    ProfilesLost(u64),
    /// The call was made on a thread of the layer, which would wait for itself: in an exporter or a callback.
    #[error("called on a thread of the profiling layer")]
    OwnThread,
    /// Too many callers wait already.
    #[error("too many callers wait already")]
    TooManyCallers,
    /// A thread of the layer has failed.
    #[error("a thread of the profiling layer has failed")]
    Ended,
    /// This process was forked from the one that built the layer, which has the spans that were kept before.
    #[error("the profiling layer belongs to the parent process")]
    Forked,
}

/// What a flush waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FlushStage {
    /// The profiles, which are made and given to the exporter.
    #[error("the profiles were not made and exported")]
    Collection,
    /// The delivery of that number of profiles.
    #[error("{profiles} profiles were not delivered")]
    Delivery {
        /// How many are not delivered.
        profiles: usize,
    },
    /// The log or [`Builder::on_kept`](crate::Builder::on_kept).
    #[error("the log or the callback of kept spans did not return")]
    Reports,
}

/// Why there is no profile of the process, its heap or its threads; see [`Handle::profile`](crate::Handle::profile).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// One is being made. Only one is made at a time.
    #[error("cpu profiling already in use")]
    Busy,
    /// No thread can be sampled or observed, and why: [`Handle::source`](crate::Handle::source), or that the system does
    /// not list the threads.
    #[error("{0}")]
    Unavailable(String),
    /// The live heap is not tracked.
    #[error(
        "the live heap is not tracked. That takes TRACING_PROFILING_HEAP=on, TRACING_PROFILING_ALLOC_SAMPLE_INTERVAL not 0, \
         `tracing_profiling::ProfilingAllocator` as the program's `#[global_allocator]`, and profiling that was not off from \
         the start"
    )]
    HeapNotTracked,
    /// The rate or the duration is 0 or more than what is possible.
    #[error(
        "the duration must be more than 0 and at most an hour, and the rate from 1 to 1000 per second, or to 100 for wall \
         time"
    )]
    OutOfRange,
    /// The call was made on a thread of the layer, which would wait for itself: in an exporter or a callback.
    #[error("called on a thread of the profiling layer")]
    OwnThread,
    /// The layer's threads did not answer in time.
    #[error("the profiler's threads did not answer in time")]
    NoAnswer,
    /// The layer is off, was dropped or shut down, or belongs to the parent of this process.
    #[error("the profiling layer is off or has ended")]
    Ended,
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {
    /// The system's error, if there is one.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0 {
            Problem::Thread(error) => Some(&**error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn the_system_error_is_the_source() {
        let error = Error::thread(io::Error::from(io::ErrorKind::WouldBlock));
        let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(source.unwrap().kind(), io::ErrorKind::WouldBlock);
        assert!(Error::ended().source().is_none());
    }

    #[test]
    fn only_the_beginning_of_a_long_value_is_shown() {
        for (letter, bytes) in [('x', 1), ('ö', 2), ('\u{1f525}', 4)] {
            let value: String = std::iter::repeat_n(letter, 100_000).collect();
            let error = Error::setting("NAME", &value, "less").to_string();
            assert!(
                error.starts_with("NAME is `") && error.ends_with("`: expected less"),
                "{error}"
            );
            assert!(error.len() < 150 * bytes, "{} bytes", error.len());
            for at in [0, 10, 50_000, 99_999, 100_000] {
                let rules = format!("a={value}");
                let error =
                    Error::text("the rules", &rules, at * bytes, "a rule".to_owned()).to_string();
                assert!(error.len() < 300 * bytes, "{} bytes", error.len());
                let lines: Vec<_> = error.lines().collect();
                let place = lines[2].chars().position(|c| c == '^').unwrap();
                assert!(lines.len() == 3 && place <= lines[1].chars().count(), "{error}");
            }
        }
        let short = "x".repeat(90);
        assert!(Error::setting("NAME", &short, "less").to_string().contains(&short));
    }

    #[test]
    fn the_marker_is_below_its_position_in_a_long_text() {
        for before in [0, 3, 49, 50, 51, 1_000] {
            let text = format!("{}!{}", "ö".repeat(before), "x".repeat(1_000));
            let error = Error::text("it", &text, 2 * before, "no".to_owned()).to_string();
            let lines: Vec<_> = error.lines().collect();
            let at = |line: &str, c| line.chars().position(|other| other == c).unwrap();
            assert_eq!(at(lines[1], '!'), at(lines[2], '^'), "{error}");
        }
    }

    #[test]
    fn unsafe_characters_are_not_shown() {
        let hostile = "a\nb\r\0\u{1b}[31m\u{85}\u{202e}\u{2066}\u{200f}\u{61c}\u{2028}c";
        let errors = [
            Error::setting("NAME", hostile, "less"),
            Error::text("it", hostile, hostile.len() - 1, "no".to_owned()),
        ];
        for error in errors {
            let text = error.to_string();
            let is_bad = |c: char| {
                c != '\n'
                    && (c.is_control() || "\u{202e}\u{2066}\u{200f}\u{61c}\u{2028}".contains(c))
            };
            assert!(!text.contains(is_bad), "{text:?}");
            assert!(text.lines().count() <= 3, "{text:?}");
        }
    }
}

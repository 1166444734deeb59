//! What can go wrong before anything runs.

use std::fmt;
use std::io;

/// Why a layer could not be made. Nothing goes wrong later that a program would have to handle:
/// what is lost then is counted in [`Stats`](crate::Stats), and said in the log.
///
/// Its [`Debug`](fmt::Debug) is its [`Display`](fmt::Display), so that a `main` that returns it
/// prints something to read.
#[derive(Clone)]
pub struct Error(Kind);

#[derive(Clone)]
enum Kind {
    Rules { text: String, at: usize, expected: String },
    Setting { name: &'static str, value: String, expected: &'static str },
    Thread(String),
}

impl Error {
    pub(crate) fn rules(text: &str, at: usize, expected: String) -> Self {
        Self(Kind::Rules { text: text.to_owned(), at, expected })
    }

    pub(crate) fn setting(name: &'static str, value: &str, expected: &'static str) -> Self {
        Self(Kind::Setting { name, value: value.to_owned(), expected })
    }

    pub(crate) fn thread(error: io::Error) -> Self {
        Self(Kind::Thread(error.to_string()))
    }

    /// Whether a directive or a variable is not as it should be; otherwise the system refused
    /// something that we cannot do without.
    pub fn is_configuration(&self) -> bool {
        !matches!(self.0, Kind::Thread(_))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Rules { text, at, expected } => {
                // The place in characters, for the marker below the text.
                let before = text.get(..*at).unwrap_or(text).chars().count();
                writeln!(f, "cannot read the profiling rules: expected {expected}")?;
                writeln!(f, "  {text}")?;
                write!(f, "  {:before$}^", "")
            }
            Kind::Setting { name, value, expected } => {
                write!(f, "{name} is `{value}`: expected {expected}")
            }
            Kind::Thread(error) => write!(f, "cannot start the profiling threads: {error}"),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

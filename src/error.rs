//! What can go wrong before anything runs.

use std::fmt;
use std::io;

/// Why a layer could not be made, or its rules not be replaced. Nothing else goes wrong that a program would have to handle:
/// what is lost then is counted in [`Stats`](crate::Stats), and said in the log.
///
/// Its [`Debug`](fmt::Debug) is its [`Display`](fmt::Display), so that a `main` that returns it
/// prints something to read.
#[derive(Clone)]
pub struct Error(Kind);

#[derive(Clone)]
enum Kind {
    Text {
        what: &'static str,
        text: String,
        at: usize,
        problem: String,
    },
    Setting {
        name: &'static str,
        value: String,
        expected: &'static str,
    },
    #[cfg(feature = "_otlp")]
    Otlp {
        name: &'static str,
        value: String,
        problem: String,
    },
    Thread(String),
    Ended,
}

impl Error {
    pub(crate) fn rules(text: &str, at: usize, expected: String) -> Self {
        Self::text("the profiling rules", text, at, format!("expected {expected}"))
    }

    /// `what` cannot be read because of what is at that place of the text.
    pub(crate) fn text(what: &'static str, text: &str, at: usize, problem: String) -> Self {
        Self(Kind::Text { what, text: text.to_owned(), at, problem })
    }

    pub(crate) fn setting(name: &'static str, value: &str, expected: &'static str) -> Self {
        Self(Kind::Setting { name, value: value.to_owned(), expected })
    }

    /// Something that a setting names cannot be used.
    #[cfg(feature = "_otlp")]
    pub(crate) fn otlp(name: &'static str, value: &str, problem: impl fmt::Display) -> Self {
        Self(Kind::Otlp { name, value: value.to_owned(), problem: problem.to_string() })
    }

    pub(crate) fn thread(error: io::Error) -> Self {
        Self(Kind::Thread(error.to_string()))
    }

    pub(crate) fn ended() -> Self {
        Self(Kind::Ended)
    }

    /// Whether a directive or a variable is not as it should be; otherwise the system refused
    /// something that we cannot do without, or the layer is gone.
    pub fn is_configuration(&self) -> bool {
        !matches!(self.0, Kind::Thread(_) | Kind::Ended)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Text { what, text, at, problem } => {
                // The place in characters, for the marker below the text.
                let before = text.get(..*at).unwrap_or(text).chars().count();
                writeln!(f, "cannot read {what}: {problem}")?;
                writeln!(f, "  {text}")?;
                write!(f, "  {:before$}^", "")
            }
            Kind::Setting { name, value, expected } => {
                write!(f, "{name} is `{value}`: expected {expected}")
            }
            #[cfg(feature = "_otlp")]
            Kind::Otlp { name, value, problem } => write!(f, "{name} is `{value}`: {problem}"),
            Kind::Ended => f.write_str("the profiling layer is gone, or has been shut down"),
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

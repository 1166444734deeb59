//! The environment variables.

use std::env;
use std::path::PathBuf;
use std::str::FromStr;

use super::Builder;
use crate::error::Error;
use crate::keep::Rules;

const RULES: &str = "TRACING_PROFILING";
const RATE: &str = "TRACING_PROFILING_RATE";
const STACK_BYTES: &str = "TRACING_PROFILING_STACK_BYTES";
const MAX_DEPTH: &str = "TRACING_PROFILING_MAX_DEPTH";
const DIR: &str = "TRACING_PROFILING_DIR";

impl Builder {
    /// What is set by the environment; what is not keeps its value.
    ///
    /// # Errors
    ///
    /// If a variable's value is not of the form it should have. The error says where and why.
    pub fn with_env(self) -> Result<Self, Error> {
        self.with_variables(|name| match env::var(name) {
            Ok(value) => Ok(Some(value)),
            Err(env::VarError::NotPresent) => Ok(None),
            Err(env::VarError::NotUnicode(value)) => Err(value.to_string_lossy().into_owned()),
        })
    }

    /// The same from any source of variables; an error is a value that is not Unicode.
    fn with_variables(
        mut self,
        variable: impl Fn(&'static str) -> Result<Option<String>, String>,
    ) -> Result<Self, Error> {
        let get =
            |name| variable(name).map_err(|value| Error::setting(name, &value, "text in UTF-8"));
        if let Some(text) = get(RULES)? {
            self = self.rules(Rules::from_str(&text)?);
        }
        if let Some(text) = get(RATE)? {
            self = self.rate(number(RATE, &text, "samples a second, from 1 to 10000")?);
        }
        if let Some(text) = get(STACK_BYTES)? {
            self = self.stack_bytes(number(STACK_BYTES, &text, "bytes, from 1024 to 65528")?);
        }
        if let Some(text) = get(MAX_DEPTH)? {
            self = self.max_depth(number(MAX_DEPTH, &text, "frames, from 1 to 1024")?);
        }
        if let Some(text) = get(DIR)? {
            self = self.directory(PathBuf::from(text));
        }
        Ok(self)
    }
}

fn number<T: FromStr>(name: &'static str, text: &str, expected: &'static str) -> Result<T, Error> {
    text.trim().parse().map_err(|_| Error::setting(name, text, expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Builder, Error> {
        Builder::new().with_variables(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            Ok(found.map(|(_, value)| (*value).to_owned()))
        })
    }

    #[test]
    fn nothing_set_is_the_default() {
        let builder = read(&[]).unwrap();
        assert_eq!(format!("{builder:?}"), format!("{:?}", Builder::new()));
    }

    #[test]
    fn each_variable_sets_what_it_says() {
        let builder = read(&[
            ("TRACING_PROFILING", "shop=100ms"),
            ("TRACING_PROFILING_RATE", "99"),
            ("TRACING_PROFILING_STACK_BYTES", "8192"),
            ("TRACING_PROFILING_MAX_DEPTH", " 64 "),
            ("TRACING_PROFILING_DIR", "/var/profiles"),
        ]);
        let by_hand = Builder::new()
            .rules("shop=100ms".parse().unwrap())
            .rate(99)
            .stack_bytes(8192)
            .max_depth(64)
            .directory("/var/profiles");
        assert_eq!(format!("{:?}", builder.unwrap()), format!("{by_hand:?}"));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let error = read(&[("TRACING_PROFILING_RATE", "often")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "TRACING_PROFILING_RATE is `often`: expected samples a second, from 1 to 10000"
        );
        assert!(error.is_configuration());
        let error = read(&[("TRACING_PROFILING", "shop=")]).unwrap_err();
        assert!(error.to_string().contains("shop=\n"), "{error}");
        let not_unicode = Builder::new().with_variables(|_| Err("\u{fffd}".to_owned()));
        assert!(not_unicode.unwrap_err().to_string().contains("UTF-8"));
    }
}

//! The environment variables.

use std::env;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use super::Builder;
use super::builder::{self, DEPTHS, RATES};
use crate::error::Error;
use crate::keep::Rules;

const RULES: &str = "TRACING_PROFILING";
const SOURCE: &str = "TRACING_PROFILING_SOURCE";
const TIMER_CLOCK: &str = "TRACING_PROFILING_TIMER_CLOCK";
const RATE: &str = "TRACING_PROFILING_RATE";
const STACK_BYTES: &str = "TRACING_PROFILING_STACK_BYTES";
const MAX_DEPTH: &str = "TRACING_PROFILING_MAX_DEPTH";
const DIR: &str = "TRACING_PROFILING_DIR";

impl Builder {
    /// What is set by the environment; what is not set, or empty, keeps its value.
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
        let get = |name| match variable(name) {
            Ok(value) => Ok(value.filter(|value| !value.trim().is_empty())),
            Err(value) => Err(Error::setting(name, &value, "text in UTF-8")),
        };
        if let Some(text) = get(RULES)? {
            self = self.rules(Rules::from_str(&text)?);
        }
        if let Some(text) = get(SOURCE)? {
            let source = text.trim().parse();
            self = self.source(
                source.map_err(|()| Error::setting(SOURCE, &text, "auto, perf, timer or none"))?,
            );
        }
        if let Some(text) = get(TIMER_CLOCK)? {
            self = match text.trim() {
                "cpu" => self.coarse_timers(),
                "monotonic" => self.fine_timers(),
                _ => return Err(Error::setting(TIMER_CLOCK, &text, "cpu or monotonic")),
            };
        }
        if let Some(text) = get(RATE)? {
            self = self.rate(number(RATE, &text, RATES, "samples a second, from 1 to 10000")?);
        }
        if let Some(text) = get(STACK_BYTES)? {
            self = self.stack_bytes(number(
                STACK_BYTES,
                &text,
                builder::STACK_BYTES,
                "bytes, from 1024 to 65448",
            )?);
        }
        if let Some(text) = get(MAX_DEPTH)? {
            self = self.max_depth(number(MAX_DEPTH, &text, DEPTHS, "frames, from 1 to 1024")?);
        }
        if let Some(text) = get(DIR)? {
            self = self.directory(PathBuf::from(text));
        }
        Ok(self)
    }
}

fn number(
    name: &'static str,
    text: &str,
    allowed: RangeInclusive<u32>,
    expected: &'static str,
) -> Result<u32, Error> {
    let number = text.trim().parse().ok().filter(|number| allowed.contains(number));
    number.ok_or_else(|| Error::setting(name, text, expected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::Source;

    fn read(variables: &[(&str, &str)]) -> Result<Builder, Error> {
        Builder::new().with_variables(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            Ok(found.map(|(_, value)| (*value).to_owned()))
        })
    }

    #[test]
    fn nothing_set_is_the_default() {
        let empty = ["", "_SOURCE", "_TIMER_CLOCK", "_RATE", "_STACK_BYTES", "_MAX_DEPTH", "_DIR"]
            .map(|rest| format!("TRACING_PROFILING{rest}"));
        let empty = empty.each_ref().map(|name| (name.as_str(), " "));
        for variables in [&[][..], &empty] {
            let builder = read(variables).unwrap();
            assert_eq!(format!("{builder:?}"), format!("{:?}", Builder::new()));
        }
    }

    #[test]
    fn each_variable_sets_what_it_says() {
        let builder = read(&[
            ("TRACING_PROFILING", "shop=100ms"),
            ("TRACING_PROFILING_SOURCE", "timer"),
            ("TRACING_PROFILING_TIMER_CLOCK", "monotonic"),
            ("TRACING_PROFILING_RATE", "99"),
            ("TRACING_PROFILING_STACK_BYTES", "8192"),
            ("TRACING_PROFILING_MAX_DEPTH", " 64 "),
            ("TRACING_PROFILING_DIR", "/var/profiles"),
        ]);
        let by_hand = Builder::new()
            .rules("shop=100ms".parse().unwrap())
            .source(Source::Timer)
            .fine_timers()
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
        for (name, value) in [
            ("SOURCE", "ebpf"),
            ("TIMER_CLOCK", "wall"),
            ("RATE", "0"),
            ("RATE", "10001"),
            ("STACK_BYTES", "1"),
            ("MAX_DEPTH", "1025"),
        ] {
            let name = format!("TRACING_PROFILING_{name}");
            assert!(read(&[(&name, value)]).is_err(), "{name}={value}");
        }
        let error = read(&[("TRACING_PROFILING", "shop=")]).unwrap_err();
        assert!(error.to_string().contains("shop=\n"), "{error}");
        let not_unicode = Builder::new().with_variables(|_| Err("\u{fffd}".to_owned()));
        assert!(not_unicode.unwrap_err().to_string().contains("UTF-8"));
    }
}

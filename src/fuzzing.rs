//! Entry points of the fuzz targets in `fuzz/`. Compiled only for these.

use crate::config::Builder;
use crate::error::Error;
use crate::keep::{Keep, Rule, Rules};
use crate::redact::Redaction;
use crate::symbols::fuzzing as symbols;
use crate::text::disturbs;

/// Parses `text` as rules, as a pattern of a rule, as redaction patterns and as a name. Errors must be a few short lines,
/// rules must round-trip, and patterns must match their own text.
pub fn rules_and_patterns(text: &str) {
    match text.parse::<Rules>() {
        Ok(rules) => {
            let written = rules.to_string();
            let again = written.parse::<Rules>().map(|rules| rules.to_string());
            assert_eq!(again.map_err(|error| error.to_string()), Ok(written));
            rules.iter().for_each(|rule| rule.match_own_values(text));
        }
        Err(error) => check_error(&error),
    }
    match Rule::for_all(Keep::failed()).with_field_pattern("a", text) {
        Ok(rule) => rule.match_own_values(text),
        Err(error) => check_error(&error),
    }
    let all = Redaction::new().hide_all(text);
    let one = Redaction::new().hide(text);
    for redaction in [all, one] {
        match redaction {
            Ok(redaction) => {
                for name in ["shop::cart::total", "/home/me/shop/src/main.rs", "GET /a\nb"] {
                    let names = [
                        redaction.redact_function(name),
                        redaction.redact_source(name),
                        redaction.redact_span(name),
                    ];
                    assert!(names.iter().all(|name| !name.contains(disturbs)));
                }
            }
            Err(error) => check_error(&Error::from(error)),
        }
    }
    let plain = Redaction::new();
    for name in [
        plain.redact_function(text),
        plain.redact_source(text),
        plain.redact_module(text),
        plain.redact_span(text),
    ] {
        assert!(!name.contains(disturbs));
    }
}

/// Parses settings from variables: `NAME=value` pairs separated by NUL.
pub fn environment(text: &str) {
    let variables = text.split('\0').filter_map(|pair| pair.split_once('='));
    let variables: Vec<_> = variables.collect();
    // Not settings for files or directories: they could be any of this machine.
    let find = |name: &'static str| {
        let is_asked = |(key, _): &&(&str, &str)| name.ends_with(key) && !key.is_empty();
        let is_file = ["CERTIFICATE", "KEY", "DIR"].iter().any(|end| name.ends_with(end));
        let found = variables.iter().find(is_asked).filter(|_| !is_file);
        Ok(found.map(|(_, value)| (*value).to_owned()))
    };
    if let Err(error) = Builder::new().with_variables(find) {
        check_error(&error);
    }
}

fn check_error(error: &Error) {
    let text = error.to_string();
    assert!(text.lines().count() <= 3 && text.chars().count() < 700, "{text}");
    assert!(!text.contains(|c| c != '\n' && disturbs(c)), "{text:?}");
}

pub use tracing_profiling_capture::fuzzing::{code, proc_texts, records};
use tracing_profiling_capture::fuzzing::{map, tables};

#[cfg(all(feature = "otlp-grpc", feature = "otlp-http"))]
pub use tracing_profiling_otlp::fuzz_answers as answers;
/// Parses `bytes` as an object file, and as parts of one in memory.
pub fn elf(bytes: &[u8]) {
    symbols::elf(bytes);
    let address = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
    tables(bytes, address);
}

/// Parses `bytes` as the kernel's symbol table, as lines of `/proc/self/maps`, and as mangled names.
pub fn texts(bytes: &[u8]) {
    let address = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
    symbols::kernel(bytes, address);
    for line in bytes.split(|byte| *byte == b'\n') {
        map(line);
        if let Ok(name) = std::str::from_utf8(line) {
            symbols::name(name);
        }
    }
}

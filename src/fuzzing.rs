//! Entry points of the fuzz targets in `fuzz/`. Compiled only for these.

use crate::config::Builder;
use crate::error::Error;
use crate::keep::{Keep, Rule, Rules};
use crate::redact::Redaction;
use crate::sampler::record::{Layout, Machine, Record, Records, read_sample, stated_position};
use crate::symbols::fuzzing as symbols;
use crate::sys;
use crate::text::disturbs;
use crate::unwind::fuzzing as unwind;

/// Parses `bytes` as a ring of each machine, with and without call chains of the kernel. Returns the number of records.
pub fn records(bytes: &[u8]) -> usize {
    let mut count = 0;
    for record in Records::between(bytes, 0, bytes.len() as u64).flatten() {
        count += 1;
        let (Record::Sample(place) | Record::Lost { place, .. }) = record else { continue };
        stated_position(bytes, place);
        for machine in [Machine::X86_64, Machine::Aarch64] {
            for has_kernel_chain in [false, true] {
                let layout = Layout { machine, has_kernel_chain };
                let Ok(sample) = read_sample(bytes, place, layout) else { continue };
                let stack = sample.stack;
                assert!(stack.length() < u64::from(place.size));
                assert!(stack.word(stack.length()).is_none());
                assert!(sample.kernel_chain.count() < usize::from(place.size) / 8);
            }
        }
    }
    count
}

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
        assert_eq!(error.kind(), crate::error::ErrorKind::Configuration);
        check_error(&error);
    }
}

fn check_error(error: &Error) {
    let text = error.to_string();
    assert!(text.lines().count() <= 3 && text.chars().count() < 700, "{text}");
    assert!(!text.contains(|c| c != '\n' && disturbs(c)), "{text:?}");
}

#[cfg(all(feature = "otlp-grpc", feature = "otlp-http"))]
pub use crate::export::fuzz_answers as answers;
/// Parses `bytes` as an object file, and as parts of one in memory.
pub fn elf(bytes: &[u8]) {
    symbols::elf(bytes);
    let address = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
    unwind::tables(bytes, address);
}

/// Parses `bytes` as code, and as calls in it.
pub fn code(bytes: &[u8]) {
    let address = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
    bytes.as_chunks().0.iter().for_each(|code| unwind::code(*code, address));
}

/// Parses `bytes` as the kernel's symbol table, as lines of `/proc/self/maps`, and as mangled names.
pub fn texts(bytes: &[u8]) {
    let address = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
    symbols::kernel(bytes, address);
    for line in bytes.split(|byte| *byte == b'\n') {
        _ = sys::parse_map(line);
        if let Ok(name) = std::str::from_utf8(line) {
            symbols::name(name);
        }
    }
}

/// Parses `text` as the kernel's texts about threads. Returns whether each of the two was understood.
pub fn proc_texts(text: &str) -> (bool, bool) {
    crate::sys::read_proc_texts(text)
}

//! Removes private parts of names before they leave the process.

mod paths;

use std::borrow::Cow;
use std::fmt;

use regex_lite::{Captures, Regex};

use crate::text::{around, escaped};

/// What is removed from the names of functions, files and spans before they leave the process, that is before they
/// reach exporters, the log and `Builder::on_kept`.
///
/// By default absolute paths are shortened, so that they contain neither the user nor the directory in which a program
/// was built. For example, `tokio-1.50.0/src/lib.rs` remains of a file in a dependency, `shop/src/main.rs` of a file in
/// the package in the directory `shop`, and `shop` of the executable.
///
/// ```
/// use tracing_profiling_profile::redact::{InvalidPattern, Redaction};
///
/// # fn main() -> Result<(), InvalidPattern> {
/// let redaction = Redaction::new()
///     .hide(r"acme_\w+")?
///     .replace(r"^GET /users/\w+", "GET /users/{id}")?;
/// assert_eq!(redaction.redact_span("GET /users/7"), "GET /users/{id}");
/// # Ok(())
/// # }
/// ```
///
/// Patterns have the syntax of the crate `regex-lite`: regular expressions without look-around. They apply to the names
/// of functions (`shop::cart::total`) and to their linker names; if the former changes, it replaces the linker name.
/// Patterns also apply to paths, both as they are in the program and as they are shortened, and to the names of spans.
/// A pattern without `^` and `$` can match anywhere in a name.
///
/// Profiles contain the values of the fields in `Builder::span_fields`, to which the patterns for
/// names of spans apply, and no others. Characters that end a line, control a terminal or
/// change the direction of text are escaped as in Rust (`\n`, `\u{202e}`).
#[derive(Clone, Debug, Default)]
pub struct Redaction {
    /// Each with its replacement.
    patterns: Vec<(Regex, String)>,
    /// `None` if not set.
    full_paths: Option<bool>,
}

/// The error for a malformed pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InvalidPattern {
    /// The text with the pattern in it.
    pub text: String,
    /// The byte at which the pattern begins.
    pub at: usize,
    /// What is wrong.
    pub problem: String,
}

/// Compiles the pattern that begins there in a text.
fn compiled(text: &str, at: usize, pattern: &str) -> Result<Regex, InvalidPattern> {
    Regex::new(pattern).map_err(|problem| {
        let (text, problem) = (text.to_owned(), problem.to_string());
        InvalidPattern { text, at, problem }
    })
}

impl fmt::Display for InvalidPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, before) = around(&self.text, self.at);
        write!(f, "{}\n  {line}\n  {:before$}^", self.problem, "")
    }
}

impl std::error::Error for InvalidPattern {}

const HIDDEN: &str = "[redacted]";
/// Separates patterns in a variable.
const SEPARATOR: u8 = b';';

impl Redaction {
    /// Shortens paths and changes nothing else.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces everything that `pattern` matches with `[redacted]`.
    ///
    /// # Errors
    ///
    /// If the pattern is invalid.
    pub fn hide(self, pattern: &str) -> Result<Self, InvalidPattern> {
        // The replacement contains no `$` that could be expanded.
        self.replace(pattern, HIDDEN)
    }

    /// Replaces everything that `pattern` matches with `with`, in which `$1` and `${name}` expand to the text of a
    /// group, and `$$` to a dollar sign.
    ///
    /// # Errors
    ///
    /// If the pattern is invalid.
    pub fn replace(mut self, pattern: &str, with: &str) -> Result<Self, InvalidPattern> {
        self.patterns.push((compiled(pattern, 0, pattern)?, with.to_owned()));
        Ok(self)
    }

    /// Whether to keep paths complete, so that editors find the files where they were built. The default is false.
    #[must_use]
    pub fn full_paths(self, full: bool) -> Self {
        Self { full_paths: Some(full), ..self }
    }

    /// Combines both: hides what either hides. Paths are complete if one requests it and the other does not forbid it.
    pub fn and(mut self, other: Self) -> Self {
        self.patterns.extend(other.patterns);
        let set = [self.full_paths, other.full_paths].into_iter().flatten();
        Self { full_paths: set.reduce(|one, other| one && other), ..self }
    }

    /// Adds the patterns of a variable, separated by `;`.
    pub fn hide_all(mut self, text: &str) -> Result<Self, InvalidPattern> {
        for (at, pattern) in split(text) {
            self.patterns.push((compiled(text, at, pattern)?, HIDDEN.to_owned()));
        }
        Ok(self)
    }

    fn apply<'a>(&self, name: &'a str) -> Cow<'a, str> {
        let mut name = Cow::Borrowed(name);
        for pattern in &self.patterns {
            if let Some(replaced) = replaced(pattern, &name) {
                name = Cow::Owned(replaced);
            }
        }
        name
    }

    fn path<'a>(&self, path: &'a str, shorten: fn(&str) -> Cow<'_, str>) -> Cow<'a, str> {
        if self.full_paths == Some(true) {
            return self.apply(path);
        }
        let mut name = Cow::Borrowed(path);
        // Patterns that are written for shortened paths are applied once more afterwards, unless they could match their
        // own replacement. A pattern that hides text never does.
        let mut again = Vec::new();
        for pattern in &self.patterns {
            let replaced = replaced(pattern, &name);
            if replaced.is_none() || pattern.1 == HIDDEN {
                again.push(pattern);
            }
            name = replaced.map_or(name, Cow::Owned);
        }
        let mut short = shorten(&name).into_owned();
        for pattern in again {
            short = replaced(pattern, &short).unwrap_or(short);
        }
        if short == path { Cow::Borrowed(path) } else { Cow::Owned(short) }
    }

    /// A function's name or linker name.
    pub fn redact_function<'a>(&self, name: &'a str) -> Cow<'a, str> {
        legible(self.apply(name))
    }

    /// The path of a source file.
    pub fn redact_source<'a>(&self, path: &'a str) -> Cow<'a, str> {
        legible(self.path(path, paths::short_source))
    }

    /// The path of a mapped file.
    pub fn redact_module<'a>(&self, path: &'a str) -> Cow<'a, str> {
        legible(self.path(path, paths::short_code))
    }

    /// The name of a span.
    pub fn redact_span<'a>(&self, name: &'a str) -> Cow<'a, str> {
        legible(self.apply(name))
    }
}

/// The name with the pattern applied, if that changes it. Text that is already hidden is not searched.
fn replaced((pattern, with): &(Regex, String), name: &str) -> Option<String> {
    let hidden: Vec<_> = name.match_indices(HIDDEN).map(|(at, _)| at..at + HIDDEN.len()).collect();
    let new = pattern.replace_all(name, |found: &Captures<'_>| {
        let mut text = String::new();
        let Some(whole) = found.get(0) else { return text };
        if hidden.iter().any(|hidden| hidden.start <= whole.start() && whole.end() <= hidden.end) {
            text.push_str(whole.as_str());
        } else if !whole.is_empty() {
            // Otherwise a pattern that matches the empty string would match between all characters.
            found.expand(with, &mut text);
        }
        text
    });
    (new != name).then(|| new.into_owned())
}

/// Names may come from outside. In a log, none may end its line or change the direction of text.
fn legible(name: Cow<'_, str>) -> Cow<'_, str> {
    match name {
        Cow::Borrowed(name) => escaped(name),
        Cow::Owned(name) => Cow::Owned(escaped(&name).into_owned()),
    }
}

/// Splits a text into patterns and their positions. A separator after a backslash does not separate.
fn split(text: &str) -> Vec<(usize, &str)> {
    let mut patterns = Vec::new();
    let (mut begin, mut is_escaped) = (0, false);
    let ends = text.bytes().enumerate().filter_map(|(at, byte)| {
        let ends = byte == SEPARATOR && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends.then_some(at)
    });
    for end in ends.chain([text.len()]) {
        let piece = text.get(begin..end).unwrap_or_default();
        let pattern = piece.trim();
        if !pattern.is_empty() {
            patterns.push((begin + (piece.len() - piece.trim_start().len()), pattern));
        }
        begin = end + 1;
    }
    patterns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_are_replaced_everywhere() {
        let redaction =
            Redaction::new().hide(r"acme_\w+").unwrap().replace(r"/users/(\d)\d*", "/$1").unwrap();
        assert_eq!(
            redaction.redact_function("shop::acme_x::acme_y"),
            "shop::[redacted]::[redacted]"
        );
        assert_eq!(redaction.redact_span("GET /users/123"), "GET /1");
        assert_eq!(redaction.redact_source("/home/a/acme_shop/src/x.rs"), "[redacted]/src/x.rs");
        assert_eq!(redaction.redact_module("/srv/acme_shop"), "[redacted]");
        assert_eq!(redaction.redact_function("shop::cart"), "shop::cart");
    }

    #[test]
    fn patterns_apply_to_complete_and_shortened_paths() {
        let shown = Redaction::new().hide("^cart/").unwrap();
        assert_eq!(shown.redact_source("/srv/cart/src/x.rs"), "[redacted]src/x.rs");
        let whole = Redaction::new().hide("^/srv/cart/.*").unwrap();
        assert_eq!(whole.redact_source("/srv/cart/src/x.rs"), "[redacted]");
    }

    #[test]
    fn a_replacement_that_matches_its_pattern_is_applied_once() {
        let redaction = Redaction::new().replace("cart", "cart-svc").unwrap();
        assert_eq!(redaction.redact_source("/srv/cart/src/x.rs"), "cart-svc/src/x.rs");
        assert_eq!(redaction.redact_source("cart/src/x.rs"), "cart-svc/src/x.rs");
        assert_eq!(redaction.redact_module("/srv/cart"), "cart-svc");
        assert_eq!(redaction.clone().full_paths(true).redact_module("/srv/cart"), "/srv/cart-svc");
        let hidden = Redaction::new().hide("^shop|red").unwrap();
        assert_eq!(hidden.redact_source("/redis/shop/src/red.rs"), "[redacted]/src/[redacted].rs");
        let twice = Redaction::new().hide("acme").unwrap().hide("act").unwrap();
        assert_eq!(twice.redact_function("acme::fact"), "[redacted]::f[redacted]");
    }

    #[test]
    fn paths_are_shortened_unless_they_are_to_be_complete() {
        let path = "/home/alice/shop/src/x.rs";
        assert_eq!(Redaction::new().redact_source(path), "shop/src/x.rs");
        let full = Redaction::new().full_paths(true);
        assert_eq!(full.redact_source(path), path);
        assert_eq!(full.redact_module(path), path);
    }

    #[test]
    fn a_pattern_that_matches_the_empty_string_replaces_only_text() {
        let redaction = Redaction::new().hide("x*").unwrap();
        assert_eq!(redaction.redact_function("axxb"), "a[redacted]b");
        assert_eq!(Redaction::new().hide(".*").unwrap().redact_function("ab"), "[redacted]");
        assert_eq!(Redaction::new().hide(".*").unwrap().redact_function(""), "");
    }

    #[test]
    fn a_variable_contains_several_patterns() {
        assert_eq!(split(r"a\w+; b{1,2} ;;c\;d;"), [(0, r"a\w+"), (6, "b{1,2}"), (15, r"c\;d")]);
        assert_eq!(split(r"a\\;b"), [(0, r"a\\"), (4, "b")]);
        assert!(split(" ; ").is_empty());
        let redaction = Redaction::new().hide_all(r"a\d;\[u8\; 4\]").unwrap();
        assert_eq!(redaction.redact_function("a1<[u8; 4]>"), "[redacted]<[redacted]>");
    }

    #[test]
    fn an_invalid_pattern_is_shown_in_the_error() {
        let error = Redaction::new().hide_all(r"a\w+; (b").unwrap_err();
        let text = error.to_string();
        assert!(text.ends_with("\n  a\\w+; (b\n        ^"), "{text}");
        let error = Redaction::new().hide("(b").unwrap_err();
        assert_eq!((error.text.as_str(), error.at), ("(b", 0));
    }
}

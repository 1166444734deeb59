//! What is left out of names before they leave the process.

mod paths;

use std::borrow::Cow;

use regex_lite::{Captures, Regex};

use crate::error::Error;
use crate::text::escaped;

/// What is left out of the names of functions, files and spans before anything leaves the process:
/// before exporters, the log and [`Builder::on_kept`](crate::Builder::on_kept) have them.
///
/// By default absolute paths are shortened, so that they name neither the user nor the folder that a
/// program was built in: `tokio-1.50.0/src/lib.rs` is left of a dependency, `shop/src/main.rs` of the
/// package in the folder `shop`, and `shop` of the program.
///
/// ```
/// use tracing_profiling::{ProfilingLayer, Redaction};
///
/// # fn main() -> Result<(), tracing_profiling::Error> {
/// let redaction = Redaction::new()
///     .hide(r"acme_\w+")?
///     .replace(r"^GET /users/\w+", "GET /users/{id}")?;
/// let builder = ProfilingLayer::builder().redact(redaction);
/// # _ = builder;
/// # Ok(())
/// # }
/// ```
///
/// Patterns are those of the crate `regex-lite`: regular expressions without look-around. They are looked
/// for in a function's name (`shop::cart::total`) and in the name that the linker knows it by, which is
/// replaced by the other where that is changed; in paths, as the program has them and as they are
/// shortened; and in the names of spans. A pattern without `^` and `$` is found anywhere in a name.
///
/// The values of fields are in no profile, whatever is set here. Characters that would end a line, command a
/// terminal or turn the order of a text are written as Rust writes them (`\n`, `\u{202e}`).
#[derive(Clone, Debug, Default)]
pub struct Redaction {
    /// Each with what comes in its place.
    patterns: Vec<(Regex, String)>,
    /// If anybody has said so.
    full_paths: Option<bool>,
}

/// What is shown in place of what is hidden.
const HIDDEN: &str = "[redacted]";
/// What comes between two patterns in a variable.
const SEPARATOR: u8 = b';';

impl Redaction {
    /// Paths are shortened, and all else is as it is.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `[redacted]` in the place of whatever `pattern` matches.
    ///
    /// # Errors
    ///
    /// If the pattern is none.
    pub fn hide(self, pattern: &str) -> Result<Self, Error> {
        // Not `$`: there is nothing to expand in it.
        self.replace(pattern, HIDDEN)
    }

    /// Puts `with` in the place of whatever `pattern` matches. In it `$1` or `${name}` is what the group
    /// matched, and `$$` a dollar.
    ///
    /// # Errors
    ///
    /// If the pattern is none.
    pub fn replace(mut self, pattern: &str, with: &str) -> Result<Self, Error> {
        let pattern = Regex::new(pattern)
            .map_err(|error| Error::text("the pattern", pattern, 0, error.to_string()))?;
        self.patterns.push((pattern, with.to_owned()));
        Ok(self)
    }

    /// Leaves paths as they are, so that editors find the files on the machine that built them.
    #[must_use]
    pub fn full_paths(self, full: bool) -> Self {
        Self { full_paths: Some(full), ..self }
    }

    /// What either hides: paths are whole if one says so, and the other does not say that they shall not be.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.patterns.extend(other.patterns);
        let said = [self.full_paths, other.full_paths].into_iter().flatten();
        Self { full_paths: said.reduce(|one, other| one && other), ..self }
    }

    fn has_full_paths(&self) -> bool {
        self.full_paths == Some(true)
    }

    /// Hides what matches one of the patterns of a variable, between which there is a `;`.
    pub(crate) fn hide_all(mut self, variable: &'static str, text: &str) -> Result<Self, Error> {
        for (at, pattern) in split(text) {
            let compiled = Regex::new(pattern)
                .map_err(|error| Error::text(variable, text, at, error.to_string()))?;
            self.patterns.push((compiled, HIDDEN.to_owned()));
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
        if self.has_full_paths() {
            return self.apply(path);
        }
        let mut name = Cow::Borrowed(path);
        // Those that are written for what is shown: looked for once more, unless they would find what they
        // have written. What hides never does.
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
}

/// The name, if that changes it. What is hidden is nothing to look into.
fn replaced((pattern, with): &(Regex, String), name: &str) -> Option<String> {
    let hidden: Vec<_> = name.match_indices(HIDDEN).map(|(at, _)| at..at + HIDDEN.len()).collect();
    let new = pattern.replace_all(name, |found: &Captures<'_>| {
        let mut text = String::new();
        let Some(whole) = found.get(0) else { return text };
        if hidden.iter().any(|hidden| hidden.start <= whole.start() && whole.end() <= hidden.end) {
            text.push_str(whole.as_str());
        } else if !whole.is_empty() {
            // A pattern that also matches nothing would be found between all letters.
            found.expand(with, &mut text);
        }
        text
    });
    (new != name).then(|| new.into_owned())
}

/// What names are outside of the process.
impl Redaction {
    /// A function, as a programmer writes it or as the linker knows it.
    pub(crate) fn function<'a>(&self, name: &'a str) -> Cow<'a, str> {
        legible(self.apply(name))
    }

    /// A file of source code.
    pub(crate) fn source<'a>(&self, path: &'a str) -> Cow<'a, str> {
        legible(self.path(path, paths::short_source))
    }

    /// A file of code.
    pub(crate) fn code<'a>(&self, path: &'a str) -> Cow<'a, str> {
        legible(self.path(path, paths::short_code))
    }

    /// A span.
    pub(crate) fn span<'a>(&self, name: &'a str) -> Cow<'a, str> {
        legible(self.apply(name))
    }
}

/// Names may come from outside, such as those of spans that are made of a request: in a log none ends its line
/// or turns its order.
fn legible(name: Cow<'_, str>) -> Cow<'_, str> {
    match name {
        Cow::Borrowed(name) => escaped(name),
        Cow::Owned(name) => Cow::Owned(escaped(&name).into_owned()),
    }
}

/// The patterns in a text and where they begin. What follows a backslash separates nothing.
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
    fn what_matches_is_replaced_wherever_it_is() {
        let redaction =
            Redaction::new().hide(r"acme_\w+").unwrap().replace(r"/users/(\d)\d*", "/$1").unwrap();
        assert_eq!(redaction.function("shop::acme_x::acme_y"), "shop::[redacted]::[redacted]");
        assert_eq!(redaction.span("GET /users/123"), "GET /1");
        assert_eq!(redaction.source("/home/a/acme_shop/src/x.rs"), "[redacted]/src/x.rs");
        assert_eq!(redaction.code("/srv/acme_shop"), "[redacted]");
        assert_eq!(redaction.function("shop::cart"), "shop::cart");
    }

    #[test]
    fn patterns_are_for_paths_as_they_are_and_as_they_are_shown() {
        let shown = Redaction::new().hide("^cart/").unwrap();
        assert_eq!(shown.source("/srv/cart/src/x.rs"), "[redacted]src/x.rs");
        let whole = Redaction::new().hide("^/srv/cart/.*").unwrap();
        assert_eq!(whole.source("/srv/cart/src/x.rs"), "[redacted]");
    }

    #[test]
    fn a_path_is_replaced_once_also_by_what_matches_itself() {
        let redaction = Redaction::new().replace("cart", "cart-svc").unwrap();
        assert_eq!(redaction.source("/srv/cart/src/x.rs"), "cart-svc/src/x.rs");
        assert_eq!(redaction.source("cart/src/x.rs"), "cart-svc/src/x.rs");
        assert_eq!(redaction.code("/srv/cart"), "cart-svc");
        assert_eq!(redaction.clone().full_paths(true).code("/srv/cart"), "/srv/cart-svc");
        let hidden = Redaction::new().hide("^shop|red").unwrap();
        assert_eq!(hidden.source("/redis/shop/src/red.rs"), "[redacted]/src/[redacted].rs");
        let twice = Redaction::new().hide("acme").unwrap().hide("act").unwrap();
        assert_eq!(twice.function("acme::fact"), "[redacted]::f[redacted]");
    }

    #[test]
    fn paths_are_shortened_unless_they_shall_not_be() {
        let path = "/home/alice/shop/src/x.rs";
        assert_eq!(Redaction::new().source(path), "shop/src/x.rs");
        let full = Redaction::new().full_paths(true);
        assert_eq!(full.source(path), path);
        assert_eq!(full.code(path), path);
    }

    #[test]
    fn what_also_matches_nothing_is_found_only_where_there_is_something() {
        let redaction = Redaction::new().hide("x*").unwrap();
        assert_eq!(redaction.function("axxb"), "a[redacted]b");
        assert_eq!(Redaction::new().hide(".*").unwrap().function("ab"), "[redacted]");
        assert_eq!(Redaction::new().hide(".*").unwrap().function(""), "");
    }

    #[test]
    fn a_variable_holds_several() {
        assert_eq!(split(r"a\w+; b{1,2} ;;c\;d;"), [(0, r"a\w+"), (6, "b{1,2}"), (15, r"c\;d")]);
        assert_eq!(split(r"a\\;b"), [(0, r"a\\"), (4, "b")]);
        assert!(split(" ; ").is_empty());
        let redaction = Redaction::new().hide_all("X", r"a\d;\[u8\; 4\]").unwrap();
        assert_eq!(redaction.function("a1<[u8; 4]>"), "[redacted]<[redacted]>");
    }

    #[test]
    fn what_is_no_pattern_is_shown() {
        let error = Redaction::new().hide_all("X", r"a\w+; (b").unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("cannot read X: "), "{text}");
        assert!(text.ends_with("\n  a\\w+; (b\n        ^"), "{text}");
        let error = Redaction::new().hide("(b").unwrap_err();
        assert!(error.to_string().starts_with("cannot read the pattern: "), "{error}");
        assert_eq!(error.kind(), crate::error::ErrorKind::Configuration);
    }
}

//! The values that a rule wants fields to have.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use regex_lite::{Regex, RegexBuilder};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum WantedValue {
    Text(String),
    Pattern(ValuePattern),
}

/// A regular expression that a whole value must match, or be equal to: so `/a?b=1` can be written as it is.
#[derive(Clone, Debug)]
pub(super) struct ValuePattern {
    text: String,
    whole: Arc<Regex>,
}

/// The characters by which a text is a pattern.
const SPECIAL: [char; 14] = ['\\', '.', '+', '*', '?', '(', ')', '|', '[', ']', '{', '}', '^', '$'];
/// The most memory that a pattern may take once it is compiled. The time to match a value grows with it.
const MAX_COMPILED_BYTES: usize = 16 * 1024;
/// Of a longer value, only the beginning is matched.
const MAX_MATCHED_BYTES: usize = 1024;

impl WantedValue {
    /// The meaning of a value without quotes, as in `EnvFilter`: numbers are compared as values, and other text is a
    /// pattern.
    pub(super) fn unquoted(text: &str) -> Result<Self, regex_lite::Error> {
        if text.parse::<f64>().is_ok() || !text.contains(SPECIAL) {
            return Ok(Self::Text(text.to_owned()));
        }
        ValuePattern::new(text).map(Self::Pattern)
    }

    pub(super) fn as_str(&self) -> &str {
        match self {
            Self::Text(text) | Self::Pattern(ValuePattern { text, .. }) => text,
        }
    }

    pub(super) fn is_str(&self, value: &str) -> bool {
        match self {
            Self::Text(text) => text == value,
            Self::Pattern(pattern) => pattern.matches(value),
        }
    }

    pub(super) fn is_f64(&self, value: f64) -> bool {
        match self {
            Self::Text(text) => {
                let wanted = text.parse::<f64>();
                wanted.is_ok_and(|wanted| wanted == value || (wanted.is_nan() && value.is_nan()))
            }
            Self::Pattern(pattern) => pattern.matches(&format!("{value:?}")),
        }
    }

    /// Whether it is what `Debug` has printed. A string that was recorded with `?` has quotes around it.
    pub(super) fn is_printed(&self, printed: &str) -> bool {
        let quoted = || printed.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        self.is_str(printed)
            || match self {
                Self::Text(text) => quoted().is_some() && printed == format!("{text:?}"),
                Self::Pattern(pattern) => quoted().is_some_and(|value| pattern.matches(value)),
            }
    }
}

impl ValuePattern {
    pub(super) fn new(text: &str) -> Result<Self, regex_lite::Error> {
        // First alone: `a)(b` would be valid in a group.
        compiled(text)?;
        let whole = compiled(&format!("^(?:{text})$"))?;
        Ok(Self { text: text.to_owned(), whole: Arc::new(whole) })
    }

    fn matches(&self, value: &str) -> bool {
        // A character may be cut.
        let most = value.len().min(MAX_MATCHED_BYTES);
        let beginning = (0..=most).rev().find_map(|end| value.get(..end));
        self.text == value || beginning.is_some_and(|beginning| self.whole.is_match(beginning))
    }
}

fn compiled(pattern: &str) -> Result<Regex, regex_lite::Error> {
    RegexBuilder::new(pattern).size_limit(MAX_COMPILED_BYTES).build()
}

impl PartialEq for ValuePattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for ValuePattern {}

impl Hash for ValuePattern {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unquoted(text: &str) -> WantedValue {
        WantedValue::unquoted(text).unwrap()
    }

    #[test]
    fn a_pattern_matches_a_whole_value() {
        let acme = unquoted("acme.*");
        assert!(acme.is_str("acme") && acme.is_str("acme-test") && !acme.is_str("big-acme"));
        let either = unquoted("a|ab");
        assert!(either.is_str("a") && either.is_str("ab") && !either.is_str("abc"));
        let class = unquoted("(?i)[a-c]+");
        assert!(class.is_str("aBc") && !class.is_str("abd"));
        assert!(!unquoted("a.c").is_str("a\nc") && unquoted("(?s)a.c").is_str("a\nc"));
    }

    #[test]
    fn text_without_special_characters_is_compared() {
        assert_eq!(unquoted("acme"), WantedValue::Text("acme".to_owned()));
        assert_eq!(unquoted("1.5"), WantedValue::Text("1.5".to_owned()));
        assert_eq!(unquoted("/a-b"), WantedValue::Text("/a-b".to_owned()));
        assert!(matches!(unquoted("acme.com"), WantedValue::Pattern(_)));
        // It is no pattern that matches itself.
        assert!(unquoted("/a?b=1").is_str("/a?b=1"));
        assert!(!WantedValue::Text("a.c".to_owned()).is_str("abc"));
    }

    #[test]
    fn numbers_are_compared_as_values() {
        for (text, value) in [("1.50", 1.5), ("1e3", 1_000.0), ("NaN", f64::NAN), ("2", 2.0)] {
            assert!(unquoted(text).is_f64(value), "{text}");
        }
        assert!(!unquoted("1.5").is_f64(1.25) && unquoted(r"1\..+").is_f64(1.25));
        assert!(unquoted("5..").is_printed("503") && !unquoted("5..").is_printed("5031"));
        assert!(unquoted("true").is_printed("true"));
    }

    #[test]
    fn a_string_may_be_printed_in_quotes() {
        let (text, pattern) = (WantedValue::Text("a \"b".to_owned()), unquoted("a.*"));
        assert!(text.is_printed("a \"b") && text.is_printed(r#""a \"b""#));
        assert!(
            pattern.is_printed("ab")
                && pattern.is_printed("\"ab\"")
                && !pattern.is_printed("\"ba\"")
        );
        assert!(!pattern.is_printed("\"") && !text.is_printed("\""));
    }

    #[test]
    fn a_pattern_and_the_time_to_match_it_are_bounded() {
        for wrong in ["a)(b", "(", "*", "[a", r"(?=a)", "a{9999}", "(?x)a #"] {
            assert!(ValuePattern::new(wrong).is_err(), "{wrong}");
        }
        let long = format!("SELECT {};", "ö".repeat(1_000));
        assert!(unquoted("SELECT.*").is_str(&long) && !unquoted("SELECT.*;").is_str(&long));
    }
}

//! Makes untrusted text safe for a log line, and times readable for machines.

use std::borrow::Cow;
use std::fmt;
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;

/// The maximum number of characters of a value in an error.
const MOST_SHOWN: usize = 100;

/// Milliseconds with three digits after the point.
pub fn ms(ns: u64) -> f64 {
    (ns as f64 / 1e3).round() / 1e3
}

/// A time as in RFC 3339, clamped to years with four digits, which are all that the format can represent.
pub fn rfc3339(time: SystemTime) -> String {
    const LAST: Duration = Duration::from_secs(253_402_300_799);
    let time = time.clamp(UNIX_EPOCH, UNIX_EPOCH + LAST);
    humantime::format_rfc3339_millis(time).to_string()
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    gzip_with(|gzip| _ = gzip.write_all(bytes))
}

pub(crate) fn gzip_json(value: &impl Serialize) -> Vec<u8> {
    gzip_with(|gzip| _ = serde_json::to_writer(gzip, value))
}

/// Writing to memory does not fail.
fn gzip_with(write: impl FnOnce(&mut GzEncoder<Vec<u8>>)) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    write(&mut gzip);
    gzip.finish().unwrap_or_default()
}

/// Whether a character ends a line, controls a terminal, or changes the direction of text.
pub fn disturbs(character: char) -> bool {
    const TURNS: [char; 3] = ['\u{61c}', '\u{200e}', '\u{200f}'];
    character.is_control()
        || TURNS.contains(&character)
        || matches!(character, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes such characters as in a Rust string: `\n`, `\u{202e}`.
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(disturbs) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if disturbs(character) {
            escaped.extend(character.escape_default());
        } else {
            escaped.push(character);
        }
    }
    Cow::Owned(escaped)
}

/// The maximum length of the name of a function, file or span, in bytes. Longer ones are truncated.
pub const LONGEST_NAME: usize = 4096;
/// The most bytes of a span's name that are used: profiles, log events and reports have several copies.
const LONGEST_SPAN: usize = 1024;

/// As many characters as fit.
fn within(text: &str, bytes: usize) -> &str {
    let mut ends = (0..=bytes.min(text.len())).rev();
    ends.find_map(|end| text.get(..end)).unwrap_or_default()
}

/// The name, truncated if it is too long.
pub fn capped(name: &str) -> Cow<'_, str> {
    match name.len() <= LONGEST_NAME {
        true => name.into(),
        false => format!("{}…", within(name, LONGEST_NAME - '…'.len_utf8())).into(),
    }
}

/// The beginning of a span's name.
pub fn beginning(name: &str) -> &str {
    within(name, LONGEST_SPAN)
}

/// The escaped beginning of a text that may be long.
pub fn shortened<'a>(text: impl Into<Cow<'a, str>>) -> String {
    let text = text.into();
    match line_of(&text, MOST_SHOWN) {
        Cow::Owned(line) => line,
        Cow::Borrowed(_) => text.into_owned(),
    }
}

/// A text in one line of the log: escaped, and of at most that many characters before that.
pub fn line_of(text: &str, most: usize) -> Cow<'_, str> {
    let end = text.char_indices().nth(most).map_or(text.len(), |(at, _)| at);
    let line = escaped(text.get(..end).unwrap_or(text));
    if end == text.len() { line } else { Cow::Owned(format!("{line}…")) }
}

/// The text around byte `at`, and the number of characters before that position. Each unsafe character is replaced by
/// one other, so that a marker below the line is at the right position.
pub fn around(text: &str, at: usize) -> (String, usize) {
    let (before, after) = text.split_at_checked(at).unwrap_or((text, ""));
    let plain = |c: char| match c {
        _ if !disturbs(c) => c,
        _ if c.is_whitespace() => ' ',
        _ => '\u{fffd}',
    };
    let half = MOST_SHOWN / 2;
    let skipped = before.char_indices().rev().nth(half.saturating_sub(1)).map_or(0, |(at, _)| at);
    let mut line = String::new();
    if skipped > 0 {
        line.push('…');
    }
    line.extend(before.get(skipped..).unwrap_or(before).chars().map(plain));
    let place = line.chars().count();
    line.extend(after.chars().take(half).map(plain));
    if after.chars().nth(half).is_some() {
        line.push('…');
    }
    (line, place)
}

const UNITS: [(&str, u64); 8] = [
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("B", 1),
    ("", 1),
];

/// Parses sizes such as `2GB`, `1536 MiB` and `500000000`.
pub fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let unit = text.trim_start_matches(|digit: char| digit.is_ascii_digit());
    let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
    let times = match unit.trim() {
        "kB" => 1_000,
        unit => UNITS.iter().find(|(name, _)| *name == unit)?.1,
    };
    number.checked_mul(times)
}

/// Displays a size exactly, in a form that [`bytes`] can parse.
#[derive(Debug)]
pub struct ExactBytes(pub u64);

impl fmt::Display for ExactBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_exact = |(_, times): &&(&str, u64)| self.0.is_multiple_of(*times) && self.0 > 0;
        let (unit, times) = UNITS.iter().find(is_exact).unwrap_or(&("B", 1));
        write!(f, "{}{unit}", self.0 / times)
    }
}

/// Displays a size with three digits.
#[derive(Debug)]
pub struct ShortBytes(pub u64);

impl fmt::Display for ShortBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&three_digits(self.0, ["B", "KB", "MB", "GB"]))
    }
}

/// A number with three digits, in the first of these units or a thousand, a million or a billion times that.
pub(crate) fn three_digits(number: u64, [unit, thousand, million, billion]: [&str; 4]) -> String {
    let (value, unit) = match number {
        0..1_000 => return format!("{number} {unit}"),
        1_000..1_000_000 => (number as f64 / 1e3, thousand),
        1_000_000..1_000_000_000 => (number as f64 / 1e6, million),
        _ => (number as f64 / 1e9, billion),
    };
    let digits = match value {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_ends_with_its_last_whole_character() {
        for name in ["", "a", "ä"] {
            assert_eq!(beginning(name), name);
        }
        assert_eq!(beginning(&"x".repeat(1_024)).len(), 1_024);
        assert_eq!(beginning(&"x".repeat(1_025)).len(), 1_024);
        assert_eq!(beginning(&format!("x{}", "ä".repeat(9_999))).len(), 1_023);
    }

    #[test]
    fn only_unsafe_characters_are_escaped() {
        for plain in ["shop::cart", "GET /ü?a=b", "日本語 🔥", "a\\b", ""] {
            assert_eq!(escaped(plain), plain);
        }
        assert_eq!(escaped("a\nb\r\0\t"), "a\\nb\\r\\u{0}\\t");
        let order =
            "\u{202a}\u{202e}\u{2066}\u{2069}\u{200e}\u{200f}\u{61c}\u{2028}\u{2029}\u{85}\u{7f}";
        let shown = escaped(order);
        assert!(shown.is_ascii() && shown.starts_with("\\u{202a}\\u{202e}"), "{shown}");
    }

    #[test]
    fn long_names_are_cut_between_characters() {
        for (name, length) in [("a", 4096), ("a", 4097), ("ä", 2048), ("ä", 5000), ("→", 9999)]
        {
            let name = name.repeat(length);
            let capped = capped(&name);
            assert!(capped.len() <= LONGEST_NAME);
            assert_eq!(capped == name, name.len() <= LONGEST_NAME);
        }
    }
}

//! How texts for people state times and sizes.

use std::fmt::{self, Display};
use std::time::Duration;

use super::{Measure, Unit};
use crate::facts::Allocations;
use crate::text::{ShortBytes, three_digits};

pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The last two parts of a file's path, and the line. In the sources of a package with a version, which is a dependency,
/// that comes before them: `lib.rs` alone names no file.
pub fn place_of(file: &str, line: u32) -> String {
    if file.is_empty() {
        return String::new();
    }
    let begins_version = |end: &str| end.starts_with(|c: char| c.is_ascii_digit());
    let mut above = file.rsplit('/').skip(1);
    let is_versioned = above.next() == Some("src")
        && above.next().is_some_and(|of| of.split('-').skip(1).any(begins_version));
    let parts: Vec<&str> = file.rsplit('/').take(if is_versioned { 3 } else { 2 }).collect();
    let end: Vec<&str> = parts.into_iter().rev().collect();
    match line {
        0 => end.join("/"),
        line => format!("{}:{line}", end.join("/")),
    }
}

/// Displays what was allocated.
#[derive(Debug)]
pub struct Allocated<'a>(pub &'a Allocations);

impl Allocated<'_> {
    /// Whether a line of the log should say it: below, allocations take some milliseconds.
    pub fn is_much(&self) -> bool {
        const BYTES: u64 = 10_000_000;
        const COUNT: u64 = 100_000;
        self.0.allocated_bytes >= BYTES || self.0.allocations >= COUNT
    }
}

impl Display for Allocated<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Allocations { allocated_bytes, allocations, freed_bytes, .. } = *self.0;
        let (bytes, freed) = (ShortBytes(allocated_bytes), ShortBytes(freed_bytes));
        let s = if allocations == 1 { "" } else { "s" };
        let count = grouped(allocations);
        write!(f, "allocated {bytes} in {count} allocation{s}, freed {freed}")
    }
}

/// Displays the value of a measure.
#[derive(Debug)]
pub struct MeasuredValue(pub Measure, pub u64);

impl Display for MeasuredValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.unit() {
            Unit::Nanoseconds => Ns(self.1).fmt(f),
            Unit::Bytes => ShortBytes(self.1).fmt(f),
            Unit::Count => f.write_str(&grouped(self.1)),
        }
    }
}

/// A number with its digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// Whether the error of a time is as large as the time, which then says nothing. All times have some error.
pub fn is_vague(ns: u64, error_ns: u64) -> bool {
    const MIN_NS: u64 = 1_000;
    error_ns >= MIN_NS && error_ns >= ns
}

/// Displays a duration with three digits.
#[derive(Debug)]
pub struct Ns(pub u64);

impl Display for Ns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&three_digits(self.0, ["ns", "µs", "ms", "s"]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_three_digits() {
        let lengths = [0, 999, 1_000, 12_345, 999_900, 1_312_000_000, 250_000_000];
        let texts: Vec<_> = lengths.into_iter().map(|ns| Ns(ns).to_string()).collect();
        assert_eq!(texts, ["0 ns", "999 ns", "1.00 µs", "12.3 µs", "1000 µs", "1.31 s", "250 ms"]);
    }

    #[test]
    fn a_place_in_a_dependency_names_it() {
        for (file, place) in [
            ("shop/src/lib.rs", "src/lib.rs:4"),
            ("shop-api/src/lib.rs", "src/lib.rs:4"),
            ("tokio-1.50.0/src/lib.rs", "tokio-1.50.0/src/lib.rs:4"),
            (
                "/x/registry/src/index-1/rust-ini-0.2.1-beta/src/lib.rs",
                "rust-ini-0.2.1-beta/src/lib.rs:4",
            ),
            ("tokio-1.50.0/src/time/sleep.rs", "time/sleep.rs:4"),
            ("lib.rs", "lib.rs:4"),
        ] {
            assert_eq!(place_of(file, 4), place);
        }
        assert_eq!((place_of("", 4).as_str(), place_of("a/b.rs", 0).as_str()), ("", "a/b.rs"));
    }

    #[test]
    fn what_was_allocated_is_said_in_words() {
        let all = Allocations {
            allocated_bytes: 1_913_600_000,
            allocations: 25_301_234,
            freed_bytes: 12_340,
            ..Allocations::default()
        };
        let text = Allocated(&all).to_string();
        assert_eq!(text, "allocated 1.91 GB in 25,301,234 allocations, freed 12.3 KB");
        let one = Allocations { allocated_bytes: 999, allocations: 1, ..Allocations::default() };
        assert_eq!(Allocated(&one).to_string(), "allocated 999 B in 1 allocation, freed 0 B");
        assert!(Allocated(&all).is_much() && !Allocated(&one).is_much());
    }
}

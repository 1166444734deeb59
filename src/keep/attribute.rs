//! Reads what `#[profiled]` states about its callsite.

use std::time::Duration;

use tracing::Metadata;

use super::condition::boxed;
use super::{Condition, Keep, Threshold};
use crate::facts::Measure;

const FIRST_WORD: &str = "tracing_profiling";

/// The `Keep` that the attribute of a callsite states, if any. It is encoded in the name of a field that never has a
/// value, as words separated by blanks: `tracing_profiling threshold_ns=50000000 on_error`.
pub(super) fn keep_of(metadata: &Metadata<'_>) -> Option<Box<Keep>> {
    metadata.fields().iter().find_map(|field| read(field.name()))
}

/// Whether the callsite is that of an attribute, which may state nothing.
pub(super) fn is_on(metadata: &Metadata<'_>) -> bool {
    let is_first = |name: &str| name.split(' ').next() == Some(FIRST_WORD);
    metadata.fields().iter().any(|field| is_first(field.name()))
}

fn read(name: &str) -> Option<Box<Keep>> {
    let mut words = name.split(' ');
    words.next().filter(|first| *first == FIRST_WORD)?;
    let mut stated: Option<Box<Keep>> = None;
    for word in words {
        let keep = stated.get_or_insert_with(|| boxed(Keep::NEVER));
        match word.split_once('=').unwrap_or((word, "")) {
            ("threshold_ns", ns) => {
                let latency = Duration::from_nanos(ns.parse().ok()?);
                keep.add(Condition::Above(Measure::Wall, Threshold::Time(latency)));
            }
            ("on_error", "") => keep.add(Condition::Error),
            ("off", "") => *keep = boxed(Keep::NEVER),
            // Written by a later release of the macro: do not guess.
            _ => return None,
        }
    }
    stated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_macro_writes() {
        let slow = Keep::slower_than(Duration::from_millis(50));
        let cases = [
            ("tracing_profiling threshold_ns=50000000", Some(slow)),
            ("tracing_profiling threshold_ns=50000000 on_error", Some(slow.or_failed())),
            ("tracing_profiling on_error", Some(Keep::failed())),
            ("tracing_profiling", None),
            ("tracing_profiling off", Some(Keep::never())),
        ];
        for (name, keep) in cases {
            assert_eq!(read(name).as_deref(), keep.as_ref(), "{name}");
        }
    }

    #[test]
    fn other_fields_are_ignored() {
        for name in ["name", "tracing_profiling.x", "off", "tracing_profiling sometimes", ""] {
            assert_eq!(read(name), None, "{name}");
        }
    }
}

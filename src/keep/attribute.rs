//! Reads what `#[profiled]` states about its callsite.

use std::time::Duration;

use tracing::Metadata;

use super::Keep;

const FIRST_WORD: &str = "tracing_profiling";

/// The `Keep` that the attribute of a callsite states, if any. It is encoded in the name of a field that never has a
/// value, as words separated by blanks: `tracing_profiling threshold_ns=50000000 on_error`.
pub(super) fn keep_of(metadata: &Metadata<'_>) -> Option<Keep> {
    metadata.fields().iter().find_map(|field| read(field.name()))
}

fn read(name: &str) -> Option<Keep> {
    let mut words = name.split(' ');
    words.next().filter(|first| *first == FIRST_WORD)?;
    let mut stated = None;
    for word in words {
        let keep = stated.unwrap_or(Keep::never());
        stated = Some(match word.split_once('=').unwrap_or((word, "")) {
            ("threshold_ns", ns) => keep.or_slower_than(Duration::from_nanos(ns.parse().ok()?)),
            ("on_error", "") => keep.or_failed(),
            ("off", "") => Keep::never(),
            // Written by a later release of the macro: do not guess.
            _ => return None,
        });
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
            assert_eq!(read(name), keep, "{name}");
        }
    }

    #[test]
    fn other_fields_are_ignored() {
        for name in ["name", "tracing_profiling.x", "off", "tracing_profiling sometimes", ""] {
            assert_eq!(read(name), None, "{name}");
        }
    }
}

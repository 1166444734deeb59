//! What `#[profiled]` says of its callsite.

use std::time::Duration;

use tracing::Metadata;

use super::Keep;

/// The settings of a callsite. They stand in the name of a field that never has a value, words with
/// blanks between: `tracing_profiling threshold_ns=50000000 on_error rate=997`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    /// None if it says nothing of when to keep.
    pub(super) keep: Option<Keep>,
    /// Samples a second of CPU time.
    pub(super) rate: Option<u32>,
}

const FIRST_WORD: &str = "tracing_profiling";

impl Settings {
    pub(super) fn of(metadata: &Metadata<'_>) -> Option<Self> {
        metadata.fields().iter().find_map(|field| Self::read(field.name()))
    }

    fn read(name: &str) -> Option<Self> {
        let mut words = name.split(' ');
        words.next().filter(|first| *first == FIRST_WORD)?;
        let mut settings = Self::default();
        for word in words {
            let keep = settings.keep.unwrap_or(Keep::never());
            match word.split_once('=').unwrap_or((word, "")) {
                ("threshold_ns", ns) => {
                    let latency = Duration::from_nanos(ns.parse().ok()?);
                    settings.keep = Some(keep.or_slower_than(latency));
                }
                ("on_error", "") => settings.keep = Some(keep.or_failed()),
                ("off", "") => settings.keep = Some(Keep::never()),
                ("rate", rate) => settings.rate = Some(rate.parse().ok()?),
                // From a later release of the macro: better not to guess.
                _ => return None,
            }
        }
        Some(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_macro_writes() {
        let slow = Keep::slower_than(Duration::from_millis(50));
        let cases = [
            ("tracing_profiling threshold_ns=50000000", Some(slow), None),
            ("tracing_profiling threshold_ns=50000000 on_error", Some(slow.or_failed()), None),
            ("tracing_profiling on_error rate=997", Some(Keep::failed()), Some(997)),
            ("tracing_profiling rate=997", None, Some(997)),
            ("tracing_profiling off", Some(Keep::never()), None),
        ];
        for (name, keep, rate) in cases {
            assert_eq!(Settings::read(name), Some(Settings { keep, rate }), "{name}");
        }
    }

    #[test]
    fn other_fields_are_none_of_ours() {
        for name in ["name", "tracing_profiling.x", "off", "tracing_profiling sometimes", ""] {
            assert_eq!(Settings::read(name), None, "{name}");
        }
    }
}

//! Where in the source errors were logged.

use std::sync::atomic::{AtomicU64, Ordering};

use tracing::Metadata;

use crate::span::SpanKey;
use crate::sys::OnceRef;

/// The callsites of error events, and those of spans that failed lately.
#[derive(Debug)]
pub(crate) struct ErrorSites {
    sites: [OnceRef<Metadata<'static>>; MOST_SITES],
    /// At a place that its key decides, the end of a span's key and behind it a place in `sites`. If many spans fail at the
    /// same time, it can be that of another one. 0 if it was not used.
    spans: [AtomicU64; MOST_SPANS],
}

/// Further callsites are not known.
const MOST_SITES: usize = 256;
const MOST_PROBES: usize = 16;
const MOST_SPANS: usize = 1 << SPAN_BITS;
const SPAN_BITS: u32 = 10;
/// The bits of a place in `sites`.
const SITE_BITS: u32 = 8;
const _: () = assert!(MOST_SITES == 1 << SITE_BITS);

impl Default for ErrorSites {
    fn default() -> Self {
        Self {
            sites: [const { OnceRef::new() }; MOST_SITES],
            spans: [const { AtomicU64::new(0) }; MOST_SPANS],
        }
    }
}

impl ErrorSites {
    /// An error in a span was logged there. Nothing changes if another one is known. Those of the crate `log` have no file,
    /// and are not added.
    pub(crate) fn add(&self, span: SpanKey, metadata: &'static Metadata<'static>) {
        let Some(place) = self.spans.get(of_key(span)) else { return };
        if metadata.file().is_none() || is_of(place.load(Ordering::Relaxed), span) {
            return;
        }
        if let Some(site) = self.place_of(metadata).and_then(|site| u64::try_from(site).ok()) {
            place.store(span.get() << SITE_BITS | site, Ordering::Relaxed);
        }
    }

    fn place_of(&self, metadata: &'static Metadata<'static>) -> Option<usize> {
        // Callsites are static variables, several dozen bytes apart.
        let first = std::ptr::from_ref(metadata).addr() >> 5;
        let is_it = |at: usize| {
            let site = self.sites.get(at)?;
            let known = site.get().unwrap_or_else(|| site.get_or_set(metadata));
            std::ptr::eq(known, metadata).then_some(at)
        };
        (first..first + MOST_PROBES).find_map(|at| is_it(at % MOST_SITES))
    }

    /// Where the first error in the span was logged, if that is known.
    pub(crate) fn of(&self, span: SpanKey) -> Option<&'static Metadata<'static>> {
        let known = self.spans.get(of_key(span))?.load(Ordering::Relaxed);
        let site = usize::try_from(known & ((1 << SITE_BITS) - 1)).ok()?;
        is_of(known, span).then(|| self.sites.get(site)?.get()).flatten()
    }
}

fn is_of(known: u64, span: SpanKey) -> bool {
    known >> SITE_BITS == span.get() << SITE_BITS >> SITE_BITS
}

/// Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): the keys of each thread begin at a multiple of a
/// power of two.
fn of_key(span: SpanKey) -> usize {
    let hash = span.get().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - SPAN_BITS);
    usize::try_from(hash).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use tracing::callsite::{Callsite, Identifier};
    use tracing::field::FieldSet;
    use tracing::metadata::Kind;
    use tracing::subscriber::Interest;

    use super::*;

    macro_rules! sites {
        ($($file:expr, $line:literal);*) => {
            [$({
                struct Site;
                impl Callsite for Site {
                    fn set_interest(&self, _: Interest) {}
                    fn metadata(&self) -> &Metadata<'_> {
                        &METADATA
                    }
                }
                static METADATA: Metadata<'static> = Metadata::new(
                    "event",
                    "shop",
                    tracing::Level::ERROR,
                    $file,
                    Some($line),
                    None,
                    FieldSet::new(&[], Identifier(&Site)),
                    Kind::EVENT,
                );
                &METADATA
            }),*]
        };
    }

    fn key(key: u64) -> SpanKey {
        SpanKey::new(key).unwrap()
    }

    fn lines(known: &ErrorSites, keys: &[u64]) -> Vec<Option<u32>> {
        keys.iter().map(|it| known.of(key(*it)).and_then(Metadata::line)).collect()
    }

    #[test]
    fn the_site_of_a_span_is_known_until_another_takes_its_place() {
        let known = ErrorSites::default();
        let [first, second, of_log] = sites!(Some("a.rs"), 1; Some("a.rs"), 2; None, 3);
        known.add(key(5), first);
        known.add(key(6), second);
        known.add(key(7), first);
        known.add(key(7), second);
        known.add(key(8), of_log);
        assert_eq!(lines(&known, &[5, 6, 7, 8, 9]), [Some(1), Some(2), Some(1), None, None]);
        let used = known.sites.iter().filter(|site| site.get().is_some()).count();
        assert_eq!(used, 2, "each is there once");
        let later = (10..).find(|it| of_key(key(*it)) == of_key(key(5))).unwrap();
        known.add(key(later), second);
        assert_eq!(lines(&known, &[5, later]), [None, Some(2)]);
        assert_eq!(lines(&ErrorSites::default(), &[1, u64::MAX]), [None, None]);
    }

    #[test]
    fn the_first_spans_of_many_threads_do_not_take_each_others_places() {
        let (known, [site]) = (ErrorSites::default(), sites!(Some("a.rs"), 1));
        let keys: Vec<u64> = (0..64).map(|thread| 1 + (thread << 16)).collect();
        keys.iter().for_each(|it| known.add(key(*it), site));
        let known = lines(&known, &keys).into_iter().flatten().count();
        assert!(known > 60, "{known}");
    }

    #[test]
    fn where_there_is_no_room_nothing_is_known() {
        let (known, [usual, other]) =
            (ErrorSites::default(), sites!(Some("a.rs"), 1; Some("a.rs"), 2));
        known.sites.iter().for_each(|site| _ = site.get_or_set(usual));
        known.add(key(1), other);
        known.add(key(2), usual);
        assert_eq!(lines(&known, &[1, 2]), [None, Some(1)]);
    }
}

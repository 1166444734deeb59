//! The first errors that were logged in spans which failed lately.

use std::cell::Cell;
use std::fmt::{self, Debug, Write};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::Event;
use tracing::field::{Field, Visit};

use crate::redact::Redaction;
use crate::span::SpanKey;
use crate::sys::SuspendCounting;
use crate::text::escaped;

#[derive(Clone, Debug)]
pub(crate) struct LoggedError {
    /// The file and line where it was logged, unless that is unknown, or where the panic was that it reports.
    pub(crate) place: Option<(Arc<str>, u32)>,
    pub(crate) is_panic: bool,
    /// The beginning of its message and error.
    pub(crate) text: Arc<str>,
}

/// Where a thread panicked, what that said, and when.
type Panicked = ((Arc<str>, u32), String, Instant);

thread_local! {
    static LAST_PANIC: Cell<Option<Panicked>> = const { Cell::new(None) };
}

/// From now on, it is known where threads panic. The hook before this one runs, too.
pub(crate) fn observe_panics() {
    static ONCE: Once = Once::new();
    if !std::thread::panicking() {
        ONCE.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |panicked| {
                // It can take seconds to print a backtrace.
                before(panicked);
                note_panic(panicked);
            }));
        });
    }
}

fn note_panic(panicked: &PanicHookInfo<'_>) {
    let _uncounted = SuspendCounting::begin();
    let payload = panicked.payload();
    let said = payload.downcast_ref::<String>().map(String::as_str);
    let said = said.or_else(|| payload.downcast_ref().copied());
    let place = panicked.location().map(|place| (place.file().into(), place.line()));
    let panicked = place.zip(said.filter(|said| said.len() >= MIN_SAID));
    let beginning = |said: &str| said.chars().take(MAX_CHARS).collect();
    swap_panic(panicked.map(|(place, said)| (place, beginning(said), Instant::now())));
}

/// Exchanges what is known of the last panic of this thread.
fn swap_panic(panicked: Option<Panicked>) -> Option<Panicked> {
    LAST_PANIC.try_with(|last| last.replace(panicked)).ok().flatten()
}

/// What is known of spans that failed or were answered lately, at places that their keys decide. Of spans at one place, the
/// last has it.
#[derive(Debug)]
pub(crate) struct BySpan<T>(Box<[Mutex<Known<T>>]>);

type Known<T> = Option<(SpanKey, T)>;

const SPAN_BITS: u32 = 10;
/// The bytes of a message and of an error that are read, and the characters of both that are shown, and of their end.
const MAX_BYTES: usize = 1_024;
const MAX_CHARS: usize = 92;
const END_CHARS: usize = 32;
/// A shorter text can be part of any other.
const MIN_SAID: usize = 8;
/// What is logged later can be of another panic that said the same.
const MAX_PANIC_AGE: Duration = Duration::from_secs(10);

impl<T> Default for BySpan<T> {
    fn default() -> Self {
        // Not on the stack, which can be small.
        Self((0..1 << SPAN_BITS).map(|_| Mutex::default()).collect())
    }
}

impl<T: Clone> BySpan<T> {
    /// An error in a span was logged. Nothing changes if another one is known, or while another thread
    /// reads or writes there. Returns whether this one is known now.
    pub(crate) fn add(&self, span: SpanKey, error: impl FnOnce() -> T) -> bool {
        let place = || self.0.get(of_key(span)).and_then(Mutex::try_lock);
        if place().is_none_or(|place| matches!(&*place, Some((of, _)) if *of == span)) {
            return false;
        }
        let error = error();
        let before = place().map(|mut place| place.replace((span, error)));
        let _uncounted = SuspendCounting::begin();
        before.is_some()
    }

    /// Changes what is known of a span, if no other thread reads or writes there.
    #[cfg(feature = "tower")]
    pub(crate) fn change(&self, span: SpanKey, change: impl FnOnce(Option<T>) -> T) {
        if let Some(mut place) = self.0.get(of_key(span)).and_then(Mutex::try_lock) {
            let known = place.take().filter(|(of, _)| *of == span).map(|(_, known)| known);
            *place = Some((span, change(known)));
        }
    }

    pub(crate) fn of(&self, span: SpanKey) -> Option<T> {
        let place = self.0.get(of_key(span))?.try_lock()?;
        place.as_ref().filter(|(of, _)| *of == span).map(|(_, error)| error.clone())
    }
}

/// Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): the keys of each thread begin at a multiple of a
/// power of two.
fn of_key(span: SpanKey) -> usize {
    let hash = span.get().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - SPAN_BITS);
    usize::try_from(hash).unwrap_or(0)
}

/// The beginning of a text that can be long.
#[derive(Default)]
struct Beginning(String);

impl Write for Beginning {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let rest = MAX_BYTES.saturating_sub(self.0.len());
        let end = (0..=rest.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
        self.0.push_str(text.get(..end.unwrap_or(0)).unwrap_or_default());
        if text.len() > rest { Err(fmt::Error) } else { Ok(()) }
    }
}

#[derive(Default)]
struct EventText {
    message: Beginning,
    error: Beginning,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = match field.name() {
            "message" => &mut self.message,
            // `classification`: of tower-http's `TraceLayer`.
            "error" | "err" | "exception" | "exception.message" | "classification" => {
                &mut self.error
            }
            _ => return,
        };
        // What panics here panics in each layer that writes it.
        _ = catch_unwind(AssertUnwindSafe(|| write!(text, "{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

impl LoggedError {
    pub(crate) fn of(event: &Event<'_>) -> Self {
        let _uncounted = SuspendCounting::begin();
        // Formatting a value can panic, too.
        let last_panic = swap_panic(None);
        let mut text = EventText::default();
        event.record(&mut text);
        let EventText { message: Beginning(message), error: Beginning(error) } = text;
        let between = if message.is_empty() || error.is_empty() { "" } else { ": " };
        let (text, metadata) = (message + between + &error, event.metadata());
        let is_panic = last_panic
            .as_ref()
            .is_some_and(|(_, said, at)| text.contains(&**said) && at.elapsed() < MAX_PANIC_AGE);
        let place = match last_panic {
            // It is reported once.
            Some((place, ..)) if is_panic => Some(place),
            last_panic => {
                swap_panic(last_panic);
                metadata.file().map(|file| (file.into(), metadata.line().unwrap_or(0)))
            }
        };
        Self { place, is_panic, text: text.into() }
    }

    /// In one line, without what is hidden. Of a long one its beginning and its end, where the cause is.
    pub(crate) fn line(&self, redaction: &Redaction) -> Arc<str> {
        let text = redaction.redact_span(&self.text);
        let line = escaped(&text);
        let all = line.chars().count();
        if all <= MAX_CHARS {
            return (*line).into();
        }
        let beginning = line.chars().take(MAX_CHARS - END_CHARS);
        beginning.chain(['…']).chain(line.chars().skip(all - END_CHARS)).collect::<String>().into()
    }
}

#[cfg(test)]
mod tests {
    use tracing::Metadata;
    use tracing::callsite::{Callsite, Identifier};
    use tracing::field::FieldSet;
    use tracing::metadata::Kind;
    use tracing::subscriber::Interest;

    use super::*;

    type LoggedErrors = BySpan<LoggedError>;

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
        Some("a.rs"),
        Some(1),
        None,
        FieldSet::new(&["message", "error", "other"], Identifier(&Site)),
        Kind::EVENT,
    );

    fn key(key: u64) -> SpanKey {
        SpanKey::new(key).unwrap()
    }

    fn error(text: &str) -> LoggedError {
        LoggedError { place: None, is_panic: false, text: text.into() }
    }

    fn texts(known: &LoggedErrors, keys: &[u64]) -> Vec<Option<String>> {
        keys.iter().map(|it| known.of(key(*it)).map(|error| error.text.to_string())).collect()
    }

    #[test]
    fn the_first_error_of_a_span_is_known_until_another_takes_its_place() {
        let known = LoggedErrors::default();
        known.add(key(5), || error("a"));
        known.add(key(6), || error("b"));
        known.add(key(6), || error("c"));
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(texts(&known, &[5, 6, 7]), [text("a"), text("b"), None]);
        let later = (10..).find(|it| of_key(key(*it)) == of_key(key(5))).unwrap();
        known.add(key(later), || error("d"));
        assert_eq!(texts(&known, &[5, later]), [None, text("d")]);
    }

    #[test]
    fn the_first_spans_of_many_threads_do_not_take_each_others_places() {
        let known = LoggedErrors::default();
        let keys: Vec<u64> = (0..64).map(|thread| 1 + (thread << 16)).collect();
        keys.iter().for_each(|it| _ = known.add(key(*it), || error("a")));
        let known = texts(&known, &keys).into_iter().flatten().count();
        assert!(known > 60, "{known}");
    }

    #[test]
    fn an_event_that_reports_a_panic_has_its_place_once() {
        observe_panics();
        let logged = |text: &str| {
            let message = METADATA.fields().field("message").unwrap();
            let values = [(&message, Some(&text as &dyn tracing::field::Value))];
            let error =
                LoggedError::of(&Event::new(&METADATA, &METADATA.fields().value_set(&values)));
            let (file, line) = error.place.unwrap();
            (error.is_panic, format!("{file}:{line}"))
        };
        let at_log = || (false, "a.rs:1".to_owned());
        let line = line!() + 1;
        let panics = |said: &str| _ = catch_unwind(AssertUnwindSafe(|| panic!("{said}")));
        panics("no such age: 104");
        assert_eq!(logged("no offers"), at_log(), "it reports something else");
        let place = (true, format!("{}:{line}", file!()));
        assert_eq!(logged("Service panicked: no such age: 104"), place);
        assert_eq!(logged("Service panicked: no such age: 104"), at_log(), "another one");
        panics("");
        assert_eq!(logged("Service panicked"), at_log(), "any text has nothing");
        let elsewhere = std::thread::spawn(|| panic!("on another thread"));
        elsewhere.join().unwrap_err();
        assert_eq!(logged("on another thread"), at_log());
    }

    #[test]
    fn a_text_has_the_message_and_the_error() {
        let long = "x".repeat(2_000);
        let said = |values: [Option<&dyn tracing::field::Value>; 3]| {
            let fields = METADATA.fields();
            let [message, error, other] =
                ["message", "error", "other"].map(|name| fields.field(name).unwrap());
            let values = [(&message, values[0]), (&error, values[1]), (&other, values[2])];
            let event = LoggedError::of(&Event::new(&METADATA, &fields.value_set(&values)));
            assert!(event.text.len() <= 2 * MAX_BYTES + 2);
            event.line(&Redaction::new().hide("acme.*").unwrap()).to_string()
        };
        let refused: &dyn tracing::field::Value = &"refused\n";
        assert_eq!(said([Some(&"no offers"), Some(refused), Some(&7)]), r"no offers: refused\n");
        assert_eq!(said([None, Some(refused), None]), r"refused\n");
        assert_eq!(said([Some(&long.as_str()), None, None]).chars().count(), 93);
        let chain = format!("no offers: {}: name not known", "x".repeat(200));
        let line = said([Some(&chain.as_str()), None, None]);
        assert!(
            line.starts_with("no offers: xx") && line.ends_with("xx: name not known"),
            "{line}"
        );
        let status =
            format!("permit 7: no signature: status (404 Not Found) for {}/keys", "x".repeat(90));
        let line = said([Some(&status.as_str()), None, None]);
        assert!(line.contains("(404 Not Found) for xx") && line.ends_with("xx/keys"), "{line}");
        let hidden = format!("{} acme secret", "x".repeat(95));
        assert!(said([Some(&hidden.as_str()), None, None]).ends_with("x [redacted]"));
        struct Panics;
        impl fmt::Debug for Panics {
            fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
                panic!("in a test")
            }
        }
        let panics: &dyn tracing::field::Value = &tracing::field::debug(Panics);
        assert_eq!(said([Some(&"no offers"), Some(panics), None]), "no offers");
    }
}

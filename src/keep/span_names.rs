//! The names of spans that others waited for, each with its route.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use tracing::Dispatch;
use tracing::dispatcher::WeakDispatch;

use super::FieldValues;
use crate::redact::Redaction;
use crate::span::{OtherSpan, RegistryId, SpanKey, Spans};

/// The subscriber that the layer is part of, once it is known.
pub(crate) type OwnDispatch = Arc<RwLock<Option<WeakDispatch>>>;

/// Spans with further routes have their bare names.
const MOST_NAMES: usize = 1_000;
/// So many that closed last are remembered: the collector asks for them in its next round.
const MOST_CLOSED: usize = 256;
/// Numbers with this bit are of names, and others of plans.
const IS_NAME: u64 = 1 << 63;

/// What open spans are called, and what those were called that have just closed after they blocked their thread for long.
#[derive(Debug, Default)]
pub(crate) struct SpanNames {
    dispatch: OwnDispatch,
    redaction: Arc<Redaction>,
    known: Mutex<KnownNames>,
}

#[derive(Debug, Default)]
struct KnownNames {
    by_number: HashMap<u64, String>,
    closed: VecDeque<(SpanKey, u64)>,
}

impl SpanNames {
    pub(crate) fn new(dispatch: OwnDispatch, redaction: Arc<Redaction>) -> Self {
        Self { dispatch, redaction, known: Mutex::default() }
    }

    pub(crate) fn with_dispatch<T>(&self, read: impl Fn(&Dispatch) -> T) -> T {
        let known = self.dispatch.read().as_ref().and_then(WeakDispatch::upgrade);
        match known {
            Some(dispatch) => read(&dispatch),
            // Some combinations of layers do not pass on their subscriber.
            None => tracing::dispatcher::get_default(read),
        }
    }

    /// The values of an open span that are shown.
    pub(crate) fn values_of(&self, id: RegistryId) -> FieldValues {
        let values = self.with_dispatch(|dispatch| FieldValues::of(id, dispatch));
        values.map(|value| self.redaction.redact_span(value).into())
    }

    /// The name of an open span with its route; `None` if it has none, or has closed.
    pub(crate) fn with_route(&self, spans: &Spans, span: OtherSpan) -> Option<String> {
        let name = self.of_open(span.id)?;
        // Otherwise it may be that of the next span with this id.
        spans.is_open(span.id, span.key).then_some(name)
    }

    fn of_open(&self, id: RegistryId) -> Option<String> {
        let redact = |text: &str| self.redaction.redact_span(text).into_owned();
        self.with_dispatch(|dispatch| FieldValues::name_with_route(id, dispatch, redact))
    }

    /// A span closes in which a thread was for long: what it delayed may be read later.
    pub(crate) fn note_closing(&self, id: RegistryId, key: SpanKey) {
        let Some(name) = self.of_open(id) else { return };
        let mut known = self.known.lock();
        let number = known.number_of(name);
        known.closed.truncate(MOST_CLOSED - 1);
        number.into_iter().for_each(|number| known.closed.push_front((key, number)));
    }

    /// A number for [`name_of`](Self::name_of), of a span's name with its route, or else of its plan.
    pub(crate) fn number_of(&self, spans: &Spans, span: OtherSpan) -> u64 {
        let open = self.with_route(spans, span);
        let mut known = self.known.lock();
        let number = match open {
            Some(name) => known.number_of(name),
            None => known.closed.iter().find(|(key, _)| *key == span.key).map(|(_, it)| *it),
        };
        number.unwrap_or(span.plan)
    }

    /// The name with that number, redacted; `None` if it is the number of a plan.
    pub(crate) fn name_of(&self, number: u64) -> Option<String> {
        self.known.lock().by_number.get(&number).cloned()
    }
}

impl KnownNames {
    /// `None` if there are too many.
    fn number_of(&mut self, name: String) -> Option<u64> {
        let number = BuildHasherDefault::<DefaultHasher>::default().hash_one(&name) | IS_NAME;
        let has_room = self.by_number.len() < MOST_NAMES || self.by_number.contains_key(&number);
        has_room.then(|| {
            self.by_number.entry(number).or_insert(name);
            number
        })
    }
}

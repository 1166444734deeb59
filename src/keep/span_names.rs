//! What open spans are called: the values of their fields, and their names with their routes.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use tracing::dispatcher::{WeakDispatch, get_default};

use super::{Callsites, FieldValues};
use crate::facts::name_with_fields;
use crate::redact::Redaction;
use crate::span::{OtherSpan, RegistryId, SpanKey, Spans};
use crate::text::beginning;

/// The subscriber that the layer is part of, once it is known.
pub(crate) type OwnDispatch = Arc<RwLock<Option<WeakDispatch>>>;

/// Spans with further routes have their bare names.
const MAX_ROUTES: usize = 1_000;
/// The number of spans that closed last and are remembered: the collector asks for them in its next round.
const MAX_CLOSED: usize = 256;
/// The number of a name is that of the plan, and above these bits that of the route.
const PLAN_BITS: u32 = 48;

/// What open spans are called, and those that have just closed and may be named by others.
#[derive(Debug, Default)]
pub(crate) struct SpanNames {
    pub(crate) dispatch: OwnDispatch,
    pub(crate) redaction: Arc<Redaction>,
    known: Mutex<KnownRoutes>,
}

impl Callsites {
    pub(crate) fn name_of(&self, plan: u64) -> Option<&'static str> {
        Some(self.get(plan)?.metadata.name())
    }
}

#[derive(Debug, Default)]
struct KnownRoutes {
    /// `{http.route=/cart}`, by number: from 1.
    routes: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, u64>,
    closed: VecDeque<(SpanKey, u64)>,
}

impl SpanNames {
    pub(crate) fn new(dispatch: OwnDispatch, redaction: Arc<Redaction>) -> Self {
        Self { dispatch, redaction, known: Mutex::default() }
    }

    /// Reads the values of an open span that are shown; `None` if there are none.
    pub(crate) fn read<T>(&self, id: RegistryId, read: impl Fn(&FieldValues) -> T) -> Option<T> {
        let known = self.dispatch.read().as_ref().and_then(WeakDispatch::upgrade);
        match known {
            Some(dispatch) => FieldValues::read_stored(id, &dispatch, read),
            // Some combinations of layers do not pass on their subscriber.
            None => get_default(|dispatch| FieldValues::read_stored(id, dispatch, &read)),
        }
    }

    pub(crate) fn values_of(&self, id: RegistryId) -> FieldValues {
        let values = self.read(id, FieldValues::clone).unwrap_or_default();
        values.map(|value| self.redaction.redact_span(value).into())
    }

    /// The number of an open span's route, shifted; 0 if it has none, or if there are too many.
    fn route_of(&self, id: RegistryId) -> u64 {
        let fields = self.values_of(id).to_route();
        if fields.is_empty() {
            return 0;
        }
        let fields = fields.iter().map(|(field, value)| (*field, &**value));
        let route: Arc<str> = name_with_fields("", fields).into();
        let KnownRoutes { routes, numbers, .. } = &mut *self.known.lock();
        if routes.len() == MAX_ROUTES {
            return numbers.get(&route).map_or(0, |number| number << PLAN_BITS);
        }
        let number = numbers.entry(Arc::clone(&route)).or_insert_with(|| {
            routes.push(route);
            routes.len() as u64
        });
        *number << PLAN_BITS
    }

    /// A span closes in which a thread was for long, or that woke others: what it delayed may be read later.
    pub(crate) fn note_closing(&self, id: RegistryId, key: SpanKey) {
        let route = self.route_of(id);
        let closed = &mut self.known.lock().closed;
        closed.truncate(MAX_CLOSED - 1);
        closed.push_front((key, route));
    }

    /// A number for [`name_of`](Self::name_of).
    pub(crate) fn number_of(&self, spans: &Spans, span: OtherSpan) -> u64 {
        let open = self.route_of(span.id);
        // Otherwise it may be that of the next span with this id.
        let is_open = spans.is_open(span.id, span.key);
        let known = self.known.lock();
        let closed = known.closed.iter().find(|(key, _)| !is_open && *key == span.key);
        span.plan | if is_open { open } else { closed.map_or(0, |(_, route)| *route) }
    }

    /// The name of a span with its route if that is known, redacted. `named` finds the name of a plan.
    pub(crate) fn name_of(
        &self,
        number: u64,
        named: impl FnOnce(u64) -> Option<&'static str>,
    ) -> Option<String> {
        let name = named(number & ((1 << PLAN_BITS) - 1))?;
        let name = self.redaction.redact_span(beginning(name));
        let place = usize::try_from(number >> PLAN_BITS).ok().and_then(|it| it.checked_sub(1));
        let route = place.and_then(|place| self.known.lock().routes.get(place).cloned());
        Some(match route.as_deref().unwrap_or_default() {
            // With its method, it is the name.
            route if route.is_empty() || route.starts_with('{') => name.into_owned() + route,
            route => route.to_owned(),
        })
    }
}

//! Fields whose values say which request a span is.

use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use smallvec::SmallVec;
use tracing::field::{Field, Visit};
use tracing::{Dispatch, Metadata};
use tracing_subscriber::Registry;
use tracing_subscriber::registry::{ExtensionsMut, LookupSpan as _};

use crate::span::RegistryId;
use crate::text::shortened;

/// Fields that the semantic conventions of OpenTelemetry define to have few different values, and the field of
/// tower-http's `TraceLayer`. All other values may be secret, or different for each span. The log
/// event of a kept span has a field for each.
pub(crate) const DEFAULT_FIELDS: [&str; 7] = [
    "otel.name",
    "http.route",
    "http.request.method",
    "method",
    "rpc.service",
    "rpc.method",
    "messaging.destination.name",
];

/// Whether a field has the template of a request's route.
fn has_template(field: &str) -> bool {
    matches!(field, "otel.name" | "http.route" | "route" | "matched_path")
}

/// Whether a field has the path of a request as its client sent it: of any number of values.
fn has_path(field: &str) -> bool {
    matches!(field, "url.path" | "http.target" | "path" | "uri")
}

/// Of shown fields, those that name the route of a request, and not what tells those of a route apart: with the segments
/// of the part of their values that does, without a query, and with `{}` for what may be an id.
fn segments_of_route<'a>(
    fields: &'a [(&'static str, String)],
) -> impl Iterator<Item = (&'static str, impl Iterator<Item = &'a str>)> {
    let is_templated = fields.iter().any(|(field, _)| has_template(field));
    let names_route = move |field: &str| {
        let is_path = has_path(field);
        is_path && !is_templated
            || !is_path && (has_template(field) || DEFAULT_FIELDS.contains(&field))
    };
    let fields = fields.iter().filter(move |(field, _)| names_route(field));
    fields.map(|(field, value)| {
        let is_path = has_path(field);
        let path = value.trim_matches('"').split(['?', '#']).next().unwrap_or_default();
        let segments = path.split('/').map(move |segment| match is_path && is_value(segment) {
            true => "{}",
            false => segment,
        });
        (*field, segments)
    })
}

/// The fields that name the route of a request.
pub(crate) fn of_route(fields: &[(&'static str, String)]) -> Vec<(&'static str, String)> {
    segments_of_route(fields)
        .map(|(name, segments)| (name, segments.collect::<Vec<_>>().join("/")))
        .collect()
}

/// Whether a segment of a path is a number, an id or long.
fn is_value(segment: &str) -> bool {
    const LONG: usize = 24;
    let digits = segment.bytes().filter(u8::is_ascii_digit).count();
    // `v1` is none.
    segment.len() > LONG || digits > 0 && (segment.len() > 3 || digits == segment.len())
}

const METHODS: [&str; 10] =
    ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"];

/// The names of the fields whose values are shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShownFields(Arc<[String]>);

impl Default for ShownFields {
    fn default() -> Self {
        Self::new(DEFAULT_FIELDS)
    }
}

impl ShownFields {
    pub(crate) fn new(names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self(names.into_iter().map(Into::into).collect())
    }

    /// Which fields of a callsite these are, a bit for each.
    pub(crate) fn of(&self, metadata: &Metadata<'_>) -> u64 {
        let shown =
            metadata.fields().iter().filter(|field| self.0.iter().any(|it| it == field.name()));
        shown.fold(0, |all, field| all | bit_of(&field))
    }
}

/// 0 for fields beyond 64, which are not shown.
fn bit_of(field: &Field) -> u64 {
    u32::try_from(field.index()).ok().and_then(|index| 1_u64.checked_shl(index)).unwrap_or(0)
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct FieldValues(SmallVec<[(&'static str, String); 2]>);

impl FieldValues {
    /// The values that are recorded of the fields with these [bits](ShownFields::of). They must be read before the span's
    /// extensions are locked: a value's `Display` is code of the program, which may log in this span.
    pub(crate) fn read(
        shown: u64,
        metadata: &Metadata<'_>,
        record: impl FnOnce(&mut dyn Visit),
    ) -> Self {
        let mut values = Self::default();
        record(&mut Recorder { shown, values: &mut values });
        // A client can invent the method of its request. As OpenTelemetry has it, an unknown one is `_OTHER`. The field
        // `method` of other programs has other methods.
        let is_of_tower_http = metadata.target().starts_with("tower_http::");
        for (name, value) in &mut values.0 {
            let is_method = *name == "http.request.method" || *name == "method" && is_of_tower_http;
            if is_method && !METHODS.contains(&value.as_str()) {
                "_OTHER".clone_into(value);
            }
        }
        values
    }

    /// Reads the values of an open span; `None` if there are none, or if the subscriber is not based on the registry.
    pub(super) fn read_stored<T>(
        id: RegistryId,
        subscriber: &Dispatch,
        read: impl FnOnce(&Self) -> T,
    ) -> Option<T> {
        let id = tracing::span::Id::from_non_zero_u64(id);
        let span = subscriber.downcast_ref::<Registry>()?.span(&id)?;
        let extensions = span.extensions();
        extensions.get::<Self>().map(read)
    }

    /// A hash of those that name the route of a request; `None` if there are none.
    pub(crate) fn route_hash(&self) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        let mut is_any = false;
        for (name, segments) in segments_of_route(&self.0) {
            // The names are those of a callsite.
            hasher.write_usize(name.as_ptr().addr());
            segments.for_each(|segment| segment.hash(&mut hasher));
            is_any = true;
        }
        is_any.then(|| hasher.finish())
    }

    /// Stores the values with their span, in place of earlier ones of the same fields.
    pub(crate) fn store(self, extensions: &mut ExtensionsMut<'_>) {
        if self.is_empty() {
            return;
        }
        match extensions.get_mut::<Self>() {
            Some(known) => self.0.into_iter().for_each(|(name, value)| known.set(name, value)),
            None => extensions.insert(self),
        }
    }

    pub(crate) fn to_route(&self) -> Vec<(&'static str, String)> {
        of_route(&self.0)
    }

    pub(crate) fn into_vec(self) -> Vec<(&'static str, String)> {
        self.0.into_vec()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn map(self, change: impl Fn(&str) -> String) -> Self {
        Self(self.0.into_iter().map(|(name, value)| (name, change(&value))).collect())
    }

    /// Adds what names a request and is `shown`, if these are of a request without a route.
    #[cfg(feature = "tower")]
    pub(crate) fn add_route(
        &mut self,
        names: [(&'static str, Option<&str>); 2],
        shown: &ShownFields,
    ) {
        let has = |is_it: fn(&str) -> bool| self.0.iter().any(|(name, _)| is_it(name));
        if has(|name| matches!(name, "method" | "http.request.method")) && !has(has_template) {
            let is_wanted = |name: &str| {
                name != "http.request.method" && shown.0.iter().any(|shown| shown == name)
            };
            let route = names.into_iter().filter(|(name, _)| is_wanted(name));
            route.for_each(|(name, value)| {
                value.iter().for_each(|it| self.set(name, shortened(*it)))
            });
        }
    }

    fn set(&mut self, name: &'static str, value: String) {
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => self.0.push((name, value)),
        }
    }
}

struct Recorder<'a> {
    shown: u64,
    values: &'a mut FieldValues,
}

impl Visit for Recorder<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if self.shown & bit_of(field) != 0 {
            self.values.set(field.name(), shortened(value));
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if self.shown & bit_of(field) != 0 {
            self.values.set(field.name(), shortened(format!("{value:?}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing::field::Empty;
    use tracing_subscriber::layer::{Context, SubscriberExt as _};

    use super::*;
    use crate::keep::SpanNames;
    use crate::redact::Redaction;
    use crate::sampler::{AttachThreads, ThreadSetup, ThreadShared};
    use crate::span::{OtherSpan, SpanKey, Spans};
    use crate::sys::Clock;

    #[cfg(feature = "tower")]
    #[test]
    fn a_route_is_added_where_it_is_shown_and_there_is_none() {
        let added = |known: &[(&'static str, &str)], shown: ShownFields| {
            let mut values = FieldValues::default();
            known.iter().for_each(|(name, value)| values.set(name, (*value).to_owned()));
            let names = [("http.request.method", Some("GET")), ("http.route", Some("/cart/{id}"))];
            values.add_route(names, &shown);
            values
                .into_vec()
                .into_iter()
                .skip(known.len())
                .map(|(_, value)| value)
                .collect::<Vec<_>>()
        };
        let method = [("method", "GET")];
        assert_eq!(added(&method, ShownFields::default()), ["/cart/{id}"]);
        assert!(added(&method, ShownFields::new(["method"])).is_empty(), "not shown");
        assert!(added(&[method[0], ("otel.name", "cart")], ShownFields::default()).is_empty());
        assert!(added(&[("user", "7")], ShownFields::default()).is_empty(), "no request");
    }

    /// Records the fields of all spans.
    struct Storing(ShownFields);

    impl tracing_subscriber::Layer<Registry> for Storing {
        fn on_new_span(
            &self,
            attributes: &tracing::span::Attributes<'_>,
            id: &tracing::span::Id,
            ctx: Context<'_, Registry>,
        ) {
            let span = ctx.span(id).unwrap();
            let metadata = span.metadata();
            let record = |visit: &mut dyn Visit| attributes.record(visit);
            let values = FieldValues::read(self.0.of(metadata), metadata, record);
            values.store(&mut span.extensions_mut());
        }

        fn on_record(
            &self,
            id: &tracing::span::Id,
            values: &tracing::span::Record<'_>,
            ctx: Context<'_, Registry>,
        ) {
            let span = ctx.span(id).unwrap();
            let metadata = span.metadata();
            let record = |visit: &mut dyn Visit| values.record(visit);
            let values = FieldValues::read(self.0.of(metadata), metadata, record);
            values.store(&mut span.extensions_mut());
        }
    }

    #[test]
    fn a_route_has_few_values_whatever_clients_send() {
        let values = |fields: &[(&'static str, &str)]| {
            let fields = fields.iter().map(|(name, value)| (*name, (*value).to_owned()));
            FieldValues(fields.collect())
        };
        let route = |field, value| values(&[(field, value)]).to_route()[0].1.clone();
        for (path, expected) in [
            ("/a?token=1", "/a"),
            ("/a#b", "/a"),
            ("\"/a/7\"", "/a/{}"),
            ("/users/17/orders", "/users/{}/orders"),
            ("/api/v1/users/4f2a9c", "/api/v1/users/{}"),
            ("/f/67e55044-10b1-426f-9247-bb680e5fe0c8", "/f/{}"),
            ("/t/abcdefghijklmnopqrstuvwxyz/", "/t/{}/"),
        ] {
            for field in ["uri", "path", "url.path", "http.target"] {
                assert_eq!(route(field, path), expected);
            }
        }
        assert_eq!(route("http.route", "/a2345/{id}?b"), "/a2345/{id}");
        let hash = |fields: &[_]| values(fields).route_hash();
        assert_eq!(hash(&[("uri", "/a/1")]), hash(&[("uri", "/a/2")]));
        assert_ne!(hash(&[("uri", "/a")]), hash(&[("uri", "/b")]));
        assert_eq!(hash(&[("customer", "")]), None);
        // A path beside the template is only shown.
        let both = |uri| [("http.route", "/{page}"), ("uri", uri), ("customer", uri)];
        assert_eq!(hash(&both("/a")), hash(&both("/b")));
        assert_eq!(values(&both("/a")).to_route(), [("http.route", "/{page}".to_owned())]);
        for field in DEFAULT_FIELDS {
            assert!(hash(&[(field, "a")]).is_some());
        }
    }

    fn shown(names: &[&str], span: impl FnOnce() -> tracing::Span) -> String {
        let layer = Storing(ShownFields::new(names.iter().copied()));
        let subscriber = Dispatch::new(tracing_subscriber::registry().with(layer));
        tracing::dispatcher::with_default(&subscriber, || {
            let span = span();
            let id = span.id().unwrap().into_non_zero_u64();
            let fields = FieldValues::read_stored(id, &subscriber, FieldValues::clone);
            let fields = fields.unwrap_or_default().into_vec();
            crate::facts::Facts { fields, ..Default::default() }.name()
        })
    }

    #[test]
    fn only_listed_fields_are_shown_with_their_last_values() {
        let span = || {
            let span = tracing::info_span!(
                "request", method = %"GET", secret = "x", http.route = Empty, status = 200, path = ?"/a"
            );
            span.record("http.route", "/wrong").record("http.route", "/cart/{id}");
            span.record("secret", "y");
            span
        };
        assert_eq!(shown(&["http.route", "method"], span), "GET /cart/{id}");
        assert_eq!(shown(&["http.route", "method", "status"], span), "GET /cart/{id}{status=200}");
        assert_eq!(shown(&["status", "path"], span), "{status=200 path=\"/a\"}");
        assert_eq!(shown(&["http.route"], span), "{http.route=/cart/{id}}");
        assert_eq!(shown(&["other"], span), "");
    }

    #[test]
    fn invented_methods_of_requests_have_one_value() {
        let names = ["method", "http.request.method"];
        let of = |method: &'static str| {
            [
                shown(
                    &names,
                    || tracing::info_span!(target: "tower_http::trace::make_span", "request", method),
                ),
                shown(&names, || tracing::info_span!("request", http.request.method = %method)),
                shown(&names, || tracing::info_span!("pay", method)),
            ]
        };
        assert_eq!(of("GET"), ["{method=GET}", "{http.request.method=GET}", "{method=GET}"]);
        for method in ["card", "get", "G3T", "AAAA1"] {
            assert_eq!(of(method)[..2], ["{method=_OTHER}", "{http.request.method=_OTHER}"]);
            assert_eq!(of(method)[2], format!("{{method={method}}}"), "not of a request");
        }
    }

    #[test]
    fn equal_values_have_equal_hashes() {
        let subscriber =
            Dispatch::new(tracing_subscriber::registry().with(Storing(ShownFields::default())));
        let hash = |span: tracing::Span| {
            let id = span.id().unwrap().into_non_zero_u64();
            FieldValues::read_stored(id, &subscriber, |values| crate::ids::hash_of(values))
        };
        tracing::dispatcher::with_default(&subscriber, || {
            let of = |method| hash(tracing::info_span!("request", method, secret = 1));
            assert!(of("GET").is_some() && of("GET") == of("GET") && of("GET") != of("PUT"));
            assert_eq!(hash(tracing::info_span!("request", secret = 1)), None);
        });
    }

    /// No thread is sampled.
    #[derive(Debug)]
    struct NoThreads;

    impl AttachThreads for NoThreads {
        fn begin(&self) -> ThreadSetup {
            panic!("no span is entered")
        }

        fn attach(&self, _: &ThreadShared) {}
    }

    #[test]
    fn a_span_that_has_closed_has_its_route_and_its_name_is_redacted_by_itself() {
        let mut names = SpanNames::default();
        names.redaction = Arc::new(Redaction::new().replace("^request$", "call").unwrap());
        let layer = Storing(ShownFields::new(["http.route", "user"]));
        let subscriber = Dispatch::new(tracing_subscriber::registry().with(layer));
        *names.dispatch.write() = Some(subscriber.downgrade());
        let spans = Spans::new(Clock::by_hand(Arc::default()), Box::new(NoThreads), Arc::default());
        let key = |number| SpanKey::new(number).unwrap();
        let id = tracing::dispatcher::with_default(&subscriber, || {
            let span = tracing::info_span!("request", http.route = "/a/{id}", user = 1);
            let id = span.id().unwrap().into_non_zero_u64();
            names.note_closing(id, key(1));
            // The same id is that of another span by now.
            (2..=256).for_each(|number| names.note_closing(RegistryId::MAX, key(number)));
            id
        });
        let name_of = |number| {
            let number = names.number_of(&spans, OtherSpan { id, key: key(number), plan: 7 });
            names.name_of(number, |plan| (plan == 7).then_some("request")).unwrap()
        };
        assert_eq!([1, 2].map(name_of), ["call{http.route=/a/{id}}", "call"]);
        names.note_closing(RegistryId::MAX, key(257));
        assert_eq!(name_of(1), "call", "only the last are remembered");
        assert_eq!(names.name_of(u64::MAX, |_| None), None, "of no span");
    }

    #[test]
    fn values_are_short_and_on_one_line() {
        let long = "x".repeat(10_000);
        let text = shown(&["a"], || tracing::info_span!("request", a = long.as_str()));
        assert!(text.len() < 300, "{}", text.len());
        let text = shown(&["a"], || tracing::info_span!("request", a = "b\nc"));
        assert_eq!(text, "{a=b\\nc}");
    }
}

//! What is known of a kept span. Its times are known when it is judged, the rest of its facts once it is kept; all that
//! writes about kept spans reads them here.

mod children;
mod control_group;
#[doc(hidden)]
pub mod format;
mod measure;
mod reason;
mod split;
mod times;

use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::ids::{SpanId, TraceId, TraceIds};

pub use children::{ChildOrder, ChildTotals, Children};
pub use control_group::ThrottlingUnknown;
#[doc(hidden)]
pub use control_group::{ControlGroup, cpu_group_in, memory_left, memory_limit};
pub use measure::{Measure, Unit};
pub use reason::{Reason, Reasons};
pub use split::TimeKind;
pub use times::TimeBreakdown;
pub use tracing_profiling_capture::{Allocations, Usage};

/// The name of a span with the values of fields: `report{tenant=7}`. One with `otel.name` is named
/// by it, as in its trace, and a request by method and route, `GET /cart/{id}`, or by service and
/// method, `shop.Cart/Get`.
pub fn name_with_fields<'a>(
    span: &str,
    fields: impl Iterator<Item = (&'a str, &'a str)> + Clone,
) -> String {
    const OF_REQUEST: [&str; 6] =
        ["http.request.method", "method", "http.route", "otel.name", "rpc.service", "rpc.method"];
    let [standard, method, route, of_trace, service, call] = OF_REQUEST
        .map(|field| fields.clone().find(|(name, _)| *name == field).map(|(_, value)| value));
    let of_trace = of_trace.filter(|name| !name.is_empty()).map(str::to_owned);
    let rpc = service.zip(call).map(|(service, call)| format!("{service}/{call}"));
    let http = standard.or(method).zip(route).map(|(method, route)| match method {
        "_OTHER" => format!("HTTP {route}"),
        _ => format!("{method} {route}"),
    });
    // The HTTP method of a call is always the same.
    let is_of_http = |field: &str| matches!(field, "method" | "http.request.method");
    let is_said = |field: &str| field == "otel.name" || rpc.is_some() && is_of_http(field);
    let request = of_trace.or_else(|| rpc.clone()).or(http);
    let is_in_name = |field: &str, value: &str| {
        let has = |name: &String| {
            let mut parts = name.split(' ').chain(name.split('/'));
            is_said(field) || value == "_OTHER" || parts.any(|part| part == value)
        };
        OF_REQUEST.contains(&field) && request.as_ref().is_some_and(has)
    };
    let (mut name, mut end) = (request.clone().unwrap_or_else(|| span.to_owned()), "");
    for (field, value) in fields.clone().filter(|(field, value)| !is_in_name(field, value)) {
        _ = write!(name, "{}{field}={value}", if end.is_empty() { "{" } else { " " });
        end = "}";
    }
    name + end
}

/// What kept a span from a CPU. Until its profile is made, it is unknown.
#[derive(Clone, Debug)]
pub struct Starved {
    /// For how long the control group of the process was throttled, in nanoseconds, or why that is unknown.
    pub throttled: Result<u64, ThrottlingUnknown>,
    /// Who ran while it waited for a CPU, in words, if that was long.
    pub rivals: Option<String>,
}

impl Default for Starved {
    fn default() -> Self {
        Self { throttled: Err(ThrottlingUnknown::NOT_READ), rivals: None }
    }
}

/// Everything that is known of a kept span. Texts are redacted.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The name of the span in the source.
    pub span: Cow<'static, str>,
    /// The target of the span.
    pub target: Cow<'static, str>,
    /// The values of its fields that identify it.
    pub fields: Vec<(&'static str, String)>,
    /// Why it was kept.
    pub reasons: Reasons,
    /// The conditions of its rule, as in `TRACING_PROFILING`, if they are known.
    // Not an empty text: all of those count their uses in one place, which each verdict would write.
    pub rule: Option<Arc<str>>,
    /// Whether it was open when it was kept.
    pub is_open: bool,
    /// Where its time went.
    pub times: TimeBreakdown,
    /// The spans inside it, by name; known once its profile is made, or it is known that it gets none.
    pub children: Children,
    /// What kept it from a CPU.
    pub starved: Starved,
    /// Where in the source the first error event in it was logged, or the panic was that this reports: the last two parts
    /// of the file's path, and the line. `None` if it did not fail, or by its status or a panic alone, or that is not known:
    /// events of the crate `log` have no place. If many spans fail at the same time, it can be a later event, or none.
    pub error_at: Option<String>,
    /// A deadlock that a thread in it is a part of, in words, if it was kept because it hangs.
    pub deadlock: Option<Arc<str>>,
    /// The ids under which it is exported.
    pub trace: Option<TraceIds>,
    /// Whether the span is inside no other kept span of the profile.
    pub is_topmost: bool,
    /// The source file with its callsite; empty if that is of a dependency.
    pub own_file: &'static str,
    /// 0 if unknown.
    pub start_unix_ns: u64,
}

impl Facts {
    /// The value of a measure. `None` if it is unknown.
    pub fn get(&self, measure: Measure) -> Option<u64> {
        measure.value(self)
    }

    /// The span's name with the values of the fields that identify it: `report{tenant=7}`, `GET /cart/{id}`.
    pub fn name(&self) -> String {
        name_with_fields(&self.span, self.fields.iter().map(|(name, value)| (*name, &**value)))
    }

    /// Why [`Measure::Throttled`] is unknown, in words; `None` if it is known.
    pub fn throttling_unknown(&self) -> Option<&'static str> {
        self.starved.throttled.err().map(|ThrottlingUnknown(words)| words)
    }

    /// When it was created; `None` if unknown.
    pub fn start(&self) -> Option<SystemTime> {
        (self.start_unix_ns > 0).then(|| UNIX_EPOCH + Duration::from_nanos(self.start_unix_ns))
    }

    /// The ids under which it is exported, if it is exported.
    pub fn ids(&self) -> Option<(TraceId, SpanId)> {
        self.trace.map(|ids| (ids.trace, ids.span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_named_as_its_trace_is_or_by_method_and_route() {
        let named = |fields: &[(&str, &str)]| name_with_fields("request", fields.iter().copied());
        let (method, route) = (("http.request.method", "GET"), ("http.route", "/cart/{id}"));
        assert_eq!(named(&[method, route, ("user", "7")]), "GET /cart/{id}{user=7}");
        assert_eq!(named(&[("method", "_OTHER"), route]), "HTTP /cart/{id}");
        assert_eq!(named(&[method]), "request{http.request.method=GET}");
        let of_trace = ("otel.name", "GET /cart/{id}");
        assert_eq!(named(&[route, of_trace]), "GET /cart/{id}");
        assert_eq!(named(&[("http.route", "/"), of_trace]), "GET /cart/{id}{http.route=/}");
        assert_eq!(named(&[("otel.name", ""), method, route]), "GET /cart/{id}");
        let rpc = [("method", "POST"), ("rpc.service", "shop.Cart"), ("rpc.method", "Get")];
        assert_eq!(named(&[&rpc[..], &[("user", "7")]].concat()), "shop.Cart/Get{user=7}");
        assert_eq!(
            named(&[&rpc[..], &[("otel.name", "cart")]].concat()),
            "cart{rpc.service=shop.Cart rpc.method=Get}"
        );
    }
}

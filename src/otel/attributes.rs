//! The attributes of kept spans on their OpenTelemetry spans.

use std::borrow::Cow;

use crate::keep::KeptSpan;
use crate::profile::Value;

const ID: &str = "profile.id";
const REASON: &str = "profile.reason";
const ON_CPU: &str = "profile.on_cpu_ns";
const ON_CPU_ERROR: &str = "profile.on_cpu_error_ns";
const SUBTREE_ON_CPU: &str = "profile.subtree_on_cpu_ns";
const OFF_CPU: &str = "profile.off_cpu_ns";
const IDLE: &str = "profile.idle_ns";
const AFTER_LAST_EXIT: &str = "profile.after_last_exit_ns";
const EARLIER: &str = "profile.earlier_ids";
const PYROSCOPE: &str = "pyroscope.profile.id";

/// The attributes that are set on the OpenTelemetry span of a kept span.
///
/// | name | when | value |
/// |---|---|---|
/// | `profile.id` | if there is a profile | its id, 32 hexadecimal digits |
/// | `profile.reason` | always | `latency`, `error` and so on: the names of [`Reason`](crate::Reason)s, joined by `\|` |
/// | `profile.on_cpu_ns`, `profile.off_cpu_ns`, `profile.idle_ns` | always; the first two if [CPU time is known](crate::TimeBreakdown::is_cpu_time_unknown) | its time breakdown; see [`TimeBreakdown`](crate::TimeBreakdown) |
/// | `profile.on_cpu_error_ns` | if it is not 0 | the maximum error of on-CPU time |
/// | `profile.subtree_on_cpu_ns` | if child spans ran on threads that were not in the span | on-CPU time including these |
/// | `profile.after_last_exit_ns` | if it is 1 ms or more | the idle time after the last exit, during which the span stayed open only because of a child or another reference to it |
/// | `profile.earlier_ids` | if there are any | profiles exported before the span closed: those of spans inside it, and its own from while it was open |
/// | `pyroscope.profile.id` | if there is a profile with samples or waits in the span itself, outside of spans inside it | the span's own id, 16 hexadecimal digits, as Grafana's link from traces to profiles expects it |
pub const SPAN_ATTRIBUTES: [&str; 10] = [
    ID,
    REASON,
    ON_CPU,
    ON_CPU_ERROR,
    SUBTREE_ON_CPU,
    OFF_CPU,
    IDLE,
    AFTER_LAST_EXIT,
    EARLIER,
    PYROSCOPE,
];

/// Every span has some nanoseconds between its last exit and its close.
const WORTH_SAYING_NS: u64 = 1_000_000;

/// Names and values of a span's attributes.
pub(crate) type SpanAttributes = Vec<(Cow<'static, str>, Value)>;

/// The names to use for the attributes.
#[derive(Clone, Debug)]
pub(crate) struct AttributeNames(Vec<(&'static str, Cow<'static, str>)>);

impl Default for AttributeNames {
    fn default() -> Self {
        Self(SPAN_ATTRIBUTES.map(|name| (name, Cow::Borrowed(name))).to_vec())
    }
}

impl AttributeNames {
    pub(crate) fn new(name: impl Fn(&'static str) -> Option<String>) -> Self {
        let named = SPAN_ATTRIBUTES.iter().filter_map(|ours| Some((*ours, name(ours)?.into())));
        Self(named.collect())
    }

    /// The attributes of a kept span.
    pub(crate) fn of(&self, span: &KeptSpan) -> SpanAttributes {
        let named = |(ours, name): &(&'static str, Cow<'static, str>)| {
            Some((name.clone(), value(ours, span)?))
        };
        self.0.iter().filter_map(named).collect()
    }
}

fn value(name: &str, span: &KeptSpan) -> Option<Value> {
    let account = &span.account;
    let ns = |ns: u64| Some(Value::Int(i64::try_from(ns).unwrap_or(i64::MAX)));
    match name {
        ID => span.profile.ok().map(|id| Value::from(id.to_string())),
        REASON => Some(Value::from(span.reasons.to_string())),
        ON_CPU => ns(account.on_cpu_ns).filter(|_| !account.is_cpu_time_unknown),
        ON_CPU_ERROR => ns(account.on_cpu_error_ns).filter(|_| account.on_cpu_error_ns > 0),
        SUBTREE_ON_CPU => ns(account.subtree_on_cpu_ns).filter(|_| account.inside_on_cpu_ns() > 0),
        OFF_CPU => ns(account.off_cpu_ns).filter(|_| !account.is_cpu_time_unknown),
        IDLE => ns(account.idle_ns),
        AFTER_LAST_EXIT => {
            ns(account.after_last_exit_ns).filter(|_| account.after_last_exit_ns >= WORTH_SAYING_NS)
        }
        EARLIER if !span.earlier.profiles.is_empty() => {
            let ids = span.earlier.profiles.iter().map(|id| Value::from(id.to_string()));
            Some(Value::Array(ids.collect()))
        }
        // Pyroscope finds samples by their link, which is the innermost span.
        PYROSCOPE if span.profile.is_ok() && span.is_sampled_itself => {
            span.trace.map(|ids| Value::from(ids.span.to_string()))
        }
        _ => None,
    }
}

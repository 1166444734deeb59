//! What a span must do to be kept.

use std::time::Duration;

use tracing::Metadata;

/// When a span that a rule matches is kept: each condition is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    latency: Option<Duration>,
    on_error: bool,
}

impl Keep {
    /// Never: the span is not profiled and costs nothing.
    pub const fn never() -> Self {
        Self { latency: None, on_error: false }
    }

    /// If the time from its creation to its close is longer than `latency`.
    pub const fn slower_than(latency: Duration) -> Self {
        Self { latency: Some(latency), on_error: false }
    }

    /// If it failed: an event of level `ERROR` in it or in a span inside it, the field
    /// `otel.status_code` set to `ERROR`, or a panic that unwinds through it.
    pub const fn failed() -> Self {
        Self { latency: None, on_error: true }
    }

    /// Also if it took longer than `latency`; the least of several counts.
    #[must_use]
    pub const fn or_slower_than(self, latency: Duration) -> Self {
        let latency = match self.latency {
            Some(other) if other.as_nanos() < latency.as_nanos() => other,
            _ => latency,
        };
        Self { latency: Some(latency), ..self }
    }

    /// Also if it failed; see [`failed`](Self::failed).
    #[must_use]
    pub const fn or_failed(self) -> Self {
        Self { on_error: true, ..self }
    }

    pub(crate) const fn latency(&self) -> Option<Duration> {
        self.latency
    }

    pub(crate) const fn on_error(&self) -> bool {
        self.on_error
    }

    pub(crate) fn is_never(&self) -> bool {
        *self == Self::never()
    }
}

/// Which spans, and when to keep them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    target: Option<String>,
    span: Option<String>,
    keep: Keep,
}

impl Rule {
    /// For every span that no other rule matches.
    pub const fn for_all(keep: Keep) -> Self {
        Self { target: None, span: None, keep }
    }

    /// For spans whose target is `target` or begins with it, as `EnvFilter` matches targets.
    pub fn for_target(target: impl Into<String>, keep: Keep) -> Self {
        Self { target: Some(target.into()), span: None, keep }
    }

    /// Only for spans of that name.
    #[must_use]
    pub fn with_span(self, name: impl Into<String>) -> Self {
        Self { span: Some(name.into()), ..self }
    }

    /// For spans of that name, whatever their target.
    pub fn for_span(name: impl Into<String>, keep: Keep) -> Self {
        Self::for_all(keep).with_span(name)
    }

    pub(crate) fn keep(&self) -> &Keep {
        &self.keep
    }

    pub(crate) fn is_for_all(&self) -> bool {
        self.target.is_none() && self.span.is_none()
    }

    /// Whether this rule is for the same spans as `other`, and takes back what nobody means to: all
    /// for all spans, or the one kind of condition that `other` has for the one that it has itself.
    pub(crate) fn forgets(&self, other: &Self) -> bool {
        let kinds = |rule: &Self| (rule.keep.latency.is_some(), rule.keep.on_error);
        let is_same = self.target == other.target && self.span == other.span;
        if is_same && self.is_for_all() {
            return true;
        }
        is_same
            && matches!(
                (kinds(self), kinds(other)),
                ((true, false), (false, true)) | ((false, true), (true, false))
            )
    }

    fn matches(&self, metadata: &Metadata<'_>) -> bool {
        self.target.as_ref().is_none_or(|target| metadata.target().starts_with(target.as_str()))
            && self.span.as_ref().is_none_or(|name| metadata.name() == name)
    }

    /// The more specific of two rules is the one with the longer target; then the one that names
    /// a span.
    fn specificity(&self) -> (usize, bool) {
        (self.target.as_ref().map_or(0, String::len), self.span.is_some())
    }
}

/// The rules of a layer; the most specific one that matches a span decides, and among equals the
/// last.
///
/// A span that no rule matches is not profiled.
///
/// `Rules` can be [parsed](std::str::FromStr) from the text that `TRACING_PROFILING` takes:
///
/// ```
/// use std::time::Duration;
/// use tracing_profiling::{Keep, Rule, Rules};
///
/// let parsed: Rules = "250ms|error,shop=100ms,shop::cart[checkout]=50ms,noisy=off".parse()?;
/// let built = Rules::new([
///     Rule::for_all(Keep::slower_than(Duration::from_millis(250)).or_failed()),
///     Rule::for_target("shop", Keep::slower_than(Duration::from_millis(100))),
///     Rule::for_target("shop::cart", Keep::slower_than(Duration::from_millis(50)))
///         .with_span("checkout"),
///     Rule::for_target("noisy", Keep::never()),
/// ]);
/// assert_eq!(parsed, built);
/// # Ok::<(), tracing_profiling::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

/// What [`Rules::default`] keeps every span above.
const DEFAULT_LATENCY: Duration = Duration::from_millis(250);

impl Default for Rules {
    /// `250ms|error`, for every span.
    fn default() -> Self {
        Self::new([Rule::for_all(Keep::slower_than(DEFAULT_LATENCY).or_failed())])
    }
}

impl Rules {
    /// The given rules and no others.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Self {
        Self(rules.into_iter().collect())
    }

    /// The number of the rule that decides on spans of this callsite.
    pub(crate) fn decide(&self, metadata: &Metadata<'_>) -> Option<usize> {
        let matching = self.0.iter().enumerate().filter(|(_, rule)| rule.matches(metadata));
        matching.max_by_key(|(_, rule)| rule.specificity()).map(|(number, _)| number)
    }

    pub(crate) fn get(&self, number: usize) -> Option<&Rule> {
        self.0.get(number)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no span is ever kept: nothing is said at all, or `off` for all spans and no more than
    /// that. (`noisy=off` alone leaves those with a `#[profiled]` of their own.)
    pub(crate) fn is_off(&self) -> bool {
        let is_said = self.0.is_empty() || self.0.iter().any(Rule::is_for_all);
        is_said && self.0.iter().all(|rule| rule.keep.is_never())
    }

    /// The threshold of spans in general: of the rule for all if there is one, else the least.
    pub(crate) fn usual_latency(&self) -> Option<Duration> {
        let general = self.0.iter().filter(|rule| rule.specificity() == (0, false));
        general
            .filter_map(|rule| rule.keep.latency)
            .next_back()
            .or_else(|| self.0.iter().filter_map(|rule| rule.keep.latency).min())
    }
}

#[cfg(test)]
mod tests {
    use tracing::field::FieldSet;
    use tracing::metadata::Kind;
    use tracing::{Level, Metadata};

    use super::*;

    fn metadata<'a>(target: &'a str, name: &'static str) -> Metadata<'a> {
        let span = tracing::subscriber::with_default(tracing_subscriber::registry(), || {
            tracing::info_span!("any").metadata().unwrap()
        });
        let fields = FieldSet::new(&[], span.callsite());
        Metadata::new(name, target, Level::INFO, None, None, None, fields, Kind::SPAN)
    }

    const FAST: Keep = Keep::slower_than(Duration::from_millis(1));
    const SLOW: Keep = Keep::slower_than(Duration::from_secs(1));

    fn decided(rules: &Rules, target: &str, name: &'static str) -> Option<usize> {
        rules.decide(&metadata(target, name))
    }

    #[test]
    fn the_longest_target_decides() {
        let rules = Rules::new([
            Rule::for_target("shop::cart", FAST),
            Rule::for_all(SLOW),
            Rule::for_target("shop", Keep::never()),
        ]);
        assert_eq!(decided(&rules, "shop::cart::price", "x"), Some(0));
        assert_eq!(decided(&rules, "shop::list", "x"), Some(2));
        assert_eq!(decided(&rules, "tokio", "x"), Some(1));
    }

    #[test]
    fn a_named_span_beats_its_target_and_nothing_longer() {
        let rules = Rules::new([
            Rule::for_target("shop", FAST).with_span("checkout"),
            Rule::for_target("shop", SLOW),
            Rule::for_target("shop::cart", SLOW),
            Rule::for_span("checkout", FAST),
        ]);
        assert_eq!(decided(&rules, "shop", "checkout"), Some(0));
        assert_eq!(decided(&rules, "shop", "other"), Some(1));
        assert_eq!(decided(&rules, "shop::cart", "checkout"), Some(2));
        assert_eq!(decided(&rules, "bank", "checkout"), Some(3));
        assert_eq!(decided(&rules, "bank", "other"), None);
    }

    #[test]
    fn among_equals_the_last_decides() {
        let rules = Rules::new([Rule::for_target("shop", FAST), Rule::for_target("shop", SLOW)]);
        assert_eq!(decided(&rules, "shop", "x"), Some(1));
    }

    #[test]
    fn off_is_what_keeps_nothing() {
        assert!(Rules::new([]).is_off());
        assert!(Rules::new([Rule::for_all(Keep::never())]).is_off());
        assert!(
            Rules::new([Rule::for_all(Keep::never()), Rule::for_span("x", Keep::never())]).is_off()
        );
        assert!(!Rules::new([Rule::for_span("x", Keep::never())]).is_off());
        assert!(!Rules::new([Rule::for_all(Keep::never()), Rule::for_span("x", FAST)]).is_off());
        assert!(!Rules::new([Rule::for_all(Keep::failed())]).is_off());
    }

    #[test]
    fn the_usual_latency_is_that_of_the_rule_for_all() {
        let all = Rule::for_all(SLOW);
        let shop = Rule::for_target("shop", FAST);
        assert_eq!(Rules::new([all, shop.clone()]).usual_latency(), SLOW.latency());
        assert_eq!(Rules::new([shop]).usual_latency(), FAST.latency());
        assert_eq!(Rules::new([Rule::for_all(Keep::failed())]).usual_latency(), None);
    }
}

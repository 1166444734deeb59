//! Which spans are kept, and when.

use std::fmt;

use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};

use super::Keep;
use super::condition::DEFAULT_LATENCY;
use super::wanted::{ValuePattern, WantedValue};
use crate::error::Error;

/// Selects spans, and states when to keep them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct Rule {
    pub(super) target: Option<String>,
    pub(super) span: Option<String>,
    pub(super) fields: Vec<FieldMatch>,
    pub(super) keep: Keep,
    pub(super) max_level: Option<Level>,
}

/// The level up to which spans are profiled that are not selected by name or field, if they are enabled.
const DEFAULT_LEVEL: Level = Level::DEBUG;
/// The level up to which the rules enable such spans. `tracing` has one maximum level for spans and events: with `DEBUG`,
/// sqlx prepares a log line for each query that no layer prints.
const ENABLED_LEVEL: Level = Level::INFO;

/// Targets of libraries whose spans live as long as a connection, a task or a lock, and are not part of what a program
/// does for one request. A rule for all spans leaves them out.
const INFRASTRUCTURE: [&str; 9] =
    ["actix_rt", "h2", "hyper", "hyper_util", "quinn", "quinn_proto", "runtime", "rustls", "tokio"];

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct FieldMatch {
    pub(super) name: String,
    /// `None` if any value matches.
    pub(super) value: Option<WantedValue>,
}

impl Rule {
    /// A rule for every span that no other rule matches.
    pub const fn for_all(keep: Keep) -> Self {
        Self { target: None, span: None, fields: Vec::new(), keep, max_level: None }
    }

    /// A rule for spans whose target starts with `target`, as in `EnvFilter`.
    pub fn for_target(target: impl Into<String>, keep: Keep) -> Self {
        Self { target: Some(target.into()), ..Self::for_all(keep) }
    }

    /// Restricts the rule to spans with that name.
    pub fn with_span(self, name: impl Into<String>) -> Self {
        Self { span: Some(name.into()), ..self }
    }

    /// A rule for spans with that name, whatever their target.
    pub fn for_span(name: impl Into<String>, keep: Keep) -> Self {
        Self::for_all(keep).with_span(name)
    }

    /// Restricts the rule to spans with that field, whatever its value. Of several calls, a span must have all fields.
    pub fn with_field(mut self, name: impl Into<String>) -> Self {
        self.fields.push(FieldMatch { name: name.into(), value: None });
        self
    }

    /// Restricts the rule to spans whose field has that value, set at creation or recorded later. Strings are compared
    /// as they are, floating-point numbers as numbers, and other values as `Debug` prints them.
    pub fn with_field_value(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        let value = Some(WantedValue::Text(value.into()));
        self.fields.push(FieldMatch { name: name.into(), value });
        self
    }

    /// Restricts the rule to spans in which a field's whole value matches `pattern`, a regular expression in the syntax
    /// of the crate `regex-lite`: without look-around, and at most 16 KiB once it is compiled. Of a value that is longer
    /// than 1,024 bytes, only the beginning is matched.
    ///
    /// ```
    /// use tracing_profiling::{Keep, Rule};
    ///
    /// let rule = Rule::for_span("checkout", Keep::failed()).with_field_pattern("tenant", "acme-.+")?;
    /// assert_eq!(rule.to_string(), r#"[checkout{tenant=~"acme-.+"}]=error"#);
    /// # Ok::<(), tracing_profiling::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the pattern is invalid or too large.
    pub fn with_field_pattern(
        mut self,
        name: impl Into<String>,
        pattern: &str,
    ) -> Result<Self, Error> {
        let compiled = ValuePattern::new(pattern)
            .map_err(|error| Error::text("the pattern", pattern, 0, error.to_string()))?;
        let value = Some(WantedValue::Pattern(compiled));
        self.fields.push(FieldMatch { name: name.into(), value });
        Ok(self)
    }

    /// The highest level of the spans that the rule [enables](crate::guide::subscriber#what-it-enables) and profiles; in
    /// text, `shop=100ms|level<=info`. Without this, a rule for all spans profiles those up to `DEBUG` that another layer
    /// enables; one for a target also enables them up to `INFO`, and one that selects spans by name or field does both
    /// for all levels. Spans of a higher level that the rule matches do not fall to a less specific rule.
    pub fn with_max_level(self, level: Level) -> Self {
        Self { max_level: Some(level), ..self }
    }

    pub(crate) fn is_for_all(&self) -> bool {
        self.target.is_none() && self.span.is_none() && self.fields.is_empty()
    }

    /// Whether the rule is for all spans that are enabled: it states neither which nor of what level.
    pub(super) fn names_nothing(&self) -> bool {
        self.is_for_all() && self.max_level.is_none()
    }

    fn level(&self) -> Level {
        self.chosen_level().unwrap_or(DEFAULT_LEVEL)
    }

    /// The level that the rule states. One that selects spans by name or field means those of all levels.
    fn chosen_level(&self) -> Option<Level> {
        let is_exact = self.span.is_some() || !self.fields.is_empty();
        self.max_level.or(is_exact.then_some(Level::TRACE))
    }

    /// Whether the spans of a callsite that the rule matches are profiled.
    pub(super) fn admits(&self, metadata: &Metadata<'_>) -> bool {
        let library = metadata.target().split("::").next().unwrap_or_default();
        *metadata.level() <= self.level()
            && !(self.is_for_all() && INFRASTRUCTURE.contains(&library))
    }

    pub(crate) fn needs_values(&self) -> bool {
        self.fields.iter().any(|field| field.value.is_some())
    }

    /// Whether this rule overrides `other`, which is for the same spans, in a way that is almost certainly not
    /// intended: both are for all spans, or they have no kind of condition in common.
    pub(crate) fn drops_conditions_of(&self, other: &Self) -> bool {
        #[cfg(test)]
        COMPARED.set(COMPARED.get() + 1);
        let is_same =
            self.target == other.target && self.span == other.span && self.fields == other.fields;
        let (kinds, others) = (self.keep.kinds(), other.keep.kinds());
        is_same && (self.is_for_all() || (kinds != 0 && others != 0 && kinds & others == 0))
    }

    /// Whether the rule matches spans of that callsite, apart from the values of their fields.
    fn matches(&self, metadata: &Metadata<'_>) -> bool {
        let has = |field: &FieldMatch| metadata.fields().field(field.name.as_str()).is_some();
        self.target.as_ref().is_none_or(|target| metadata.target().starts_with(target.as_str()))
            && self.span.as_ref().is_none_or(|name| metadata.name() == name)
            && self.fields.iter().all(has)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.target.as_deref().unwrap_or_default())?;
        if self.span.is_some() || !self.fields.is_empty() {
            write!(f, "[{}", self.span.as_deref().unwrap_or_default())?;
            for (number, field) in self.fields.iter().enumerate() {
                write!(f, "{}{}", if number == 0 { "{" } else { "," }, field.name)?;
                if let Some(value) = &field.value {
                    let is_pattern = matches!(value, WantedValue::Pattern(_));
                    write!(f, "={}\"{}\"", if is_pattern { "~" } else { "" }, value.as_str())?;
                }
            }
            f.write_str(if self.fields.is_empty() { "]" } else { "}]" })?;
        }
        if !self.is_for_all() {
            f.write_str("=")?;
        }
        write!(f, "{}", self.keep)?;
        match self.max_level {
            Some(level) if !self.keep.is_never() => {
                write!(f, "|level<={}", level.as_str().to_ascii_lowercase())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
thread_local! {
    /// How many pairs of rules were compared. This must not grow without bound.
    pub(crate) static COMPARED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The rules of a layer. For each span, the most specific matching rule decides; among equally specific ones, the last.
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

impl Default for Rules {
    /// `250ms|error`, for every span.
    fn default() -> Self {
        Self::new([Rule::for_all(Keep::slower_than(DEFAULT_LATENCY).or_failed())])
    }
}

impl Rules {
    /// Exactly these rules.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Self {
        Self(rules.into_iter().collect())
    }

    /// An error if a condition can never be met.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let mut conditions = self.iter().flat_map(|rule| rule.keep.conditions());
        match conditions.find(|condition| !condition.is_possible()) {
            None => Ok(()),
            Some(condition) => Err(Error::setting(
                "Condition::Above",
                &format!("{condition:?}"),
                "a measure that has a condition, and a threshold in its unit",
            )),
        }
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Rule> {
        self.0.iter()
    }

    /// The rules that may decide for spans of this callsite, the most specific first. Only the last needs no field.
    pub(crate) fn candidates(&self, metadata: &Metadata<'_>) -> Vec<&Rule> {
        let matching = self.0.iter().enumerate().filter(|(_, rule)| rule.matches(metadata));
        let mut candidates: Vec<_> = matching.collect();
        // The rule with the longer target is more specific; then the one with a span name; then the one with more fields.
        candidates.sort_by_key(|(number, rule)| {
            let target = rule.target.as_ref().map_or(0, String::len);
            (target, rule.span.is_some(), rule.fields.len(), *number)
        });
        let mut candidates: Vec<_> = candidates.into_iter().rev().map(|(_, rule)| rule).collect();
        let sure = candidates.iter().position(|rule| !rule.needs_values());
        candidates.truncate(sure.map_or(usize::MAX, |sure| sure + 1));
        candidates
    }

    pub(crate) fn judge_errors(&self) -> bool {
        self.iter().any(|rule| rule.keep.judges_errors())
    }

    /// The highest level of what the rules enable. At least `INFO`.
    pub(crate) fn enabled_level(&self) -> LevelFilter {
        self.highest(|rule| rule.chosen_level().unwrap_or(ENABLED_LEVEL))
    }

    /// The highest level of what they profile if it is enabled, the limit of attributes' own rules. At least `INFO`.
    pub(crate) fn highest_level(&self) -> LevelFilter {
        self.highest(Rule::level)
    }

    fn highest(&self, level: impl FnMut(&Rule) -> Level) -> LevelFilter {
        if self.is_off() {
            return LevelFilter::OFF;
        }
        let keeping = self.iter().filter(|rule| !rule.keep.is_never());
        keeping.map(level).chain([Level::INFO]).max().into()
    }

    /// Whether no span is ever kept: there are no rules, or there is `off` for all spans and nothing that keeps any.
    /// (`noisy=off` alone leaves spans with a `#[profiled]` of their own.)
    pub(crate) fn is_off(&self) -> bool {
        let is_explicit = self.0.is_empty() || self.0.iter().any(Rule::is_for_all);
        is_explicit && self.0.iter().all(|rule| rule.keep.is_never())
    }
}

/// Prints the text form. It can be parsed if the rules can be written as text: quotes in values, and any of `[]{},=` in
/// the name of a span, cannot.
impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("off");
        }
        let rules: Vec<_> = self.iter().map(Rule::to_string).collect();
        f.write_str(&rules.join(","))
    }
}

#[cfg(test)]
mod tests {
    use tracing::field::FieldSet;
    use tracing::metadata::Kind;
    use tracing::{Level, Metadata};

    use std::time::Duration;

    use super::super::{Condition, Threshold};
    use super::*;
    use crate::facts::Measure;

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
        let metadata = metadata(target, name);
        let first = rules.candidates(&metadata).into_iter().next()?;
        rules.0.iter().position(|rule| std::ptr::eq(rule, first))
    }

    #[test]
    fn conditions_that_can_never_be_met_are_errors() {
        let (second, number) = (Threshold::Time(Duration::from_secs(1)), Threshold::Number(7));
        let check = |measure, threshold| {
            let keep = Keep::slower_than(Duration::ZERO).or(Condition::Above(measure, threshold));
            Rules::new([Rule::for_all(keep)]).check()
        };
        for (measure, threshold) in [
            (Measure::Wall, second),
            (Measure::OffCpu, Threshold::Percent(50)),
            (Measure::Allocated, number),
        ] {
            assert!(check(measure, threshold).is_ok(), "{measure:?}");
        }
        for (measure, threshold) in [
            (Measure::Busy, second),
            (Measure::OwnAllocated, number),
            (Measure::Wall, number),
            (Measure::Wall, Threshold::Percent(50)),
            (Measure::Allocated, Threshold::Percent(50)),
            (Measure::Allocated, second),
        ] {
            let error = check(measure, threshold).unwrap_err().to_string();
            assert!(error.starts_with("Condition::Above is `Above("), "{error}");
        }
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
    fn a_span_name_wins_over_the_same_target_but_not_over_a_longer_one() {
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
    fn rules_that_keep_nothing_are_off() {
        assert!(Rules::new([]).is_off());
        assert!(Rules::new([Rule::for_all(Keep::never())]).is_off());
        assert!(
            Rules::new([Rule::for_all(Keep::never()), Rule::for_span("x", Keep::never())]).is_off()
        );
        assert!(!Rules::new([Rule::for_span("x", Keep::never())]).is_off());
        assert!(!Rules::new([Rule::for_all(Keep::never()), Rule::for_span("x", FAST)]).is_off());
        assert!(!Rules::new([Rule::for_all(Keep::failed())]).is_off());
    }
}

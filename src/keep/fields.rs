//! Rules that depend on the values of a span's fields.

use std::fmt::Debug;

use tracing::Metadata;
use tracing::field::{Field, Visit};

use super::Rule;
use super::wanted::WantedValue;

/// The rules of a callsite that depend on values, and the plan for each of them.
///
/// The state of a span is one bit for each wanted value, so later ones are compared without the others.
#[derive(Debug)]
pub(crate) struct FieldRules {
    tests: Vec<Test>,
    /// The most specific first: the bits that the rule wants, and the number of its plan, if it has one.
    rules: Vec<(u64, Option<u64>)>,
    otherwise: Option<u64>,
    /// The plan if no rule keeps the span yet, but a later value might.
    waiting: u64,
    /// Rules for which no bit was left. They never match.
    pub(super) left_out: u64,
}

#[derive(Debug)]
struct Test {
    field: Field,
    value: WantedValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) number: u64,
    /// Which of the wanted values it has.
    pub(crate) bits: u64,
}

impl FieldRules {
    /// Makes the tests of `rules`, the most specific first, with the numbers of their plans.
    pub(super) fn new(
        metadata: &'static Metadata<'static>,
        rules: &[(&Rule, Option<u64>)],
        otherwise: Option<u64>,
        waiting: u64,
    ) -> Self {
        let mut new =
            Self { tests: Vec::new(), rules: Vec::new(), otherwise, waiting, left_out: 0 };
        for (rule, number) in rules {
            match new.wanted(metadata, rule) {
                Some(wanted) => new.rules.push((wanted, *number)),
                None => new.left_out += 1,
            }
        }
        new
    }

    fn wanted(&mut self, metadata: &'static Metadata<'static>, rule: &Rule) -> Option<u64> {
        let mut wanted = 0;
        for field in &rule.fields {
            let Some(value) = &field.value else { continue };
            let field = metadata.fields().field(field.name.as_str())?;
            let is_same = |test: &Test| test.field == field && test.value == *value;
            let known = self.tests.iter().position(is_same);
            let bit = known.unwrap_or(self.tests.len());
            // At most 64 values are compared.
            wanted |= 1_u64.checked_shl(u32::try_from(bit).ok()?)?;
            if known.is_none() {
                self.tests.push(Test { field, value: value.clone() });
            }
        }
        Some(wanted)
    }

    /// Selects the plan for a new span. `None` if no rule keeps it, whatever values are recorded later.
    pub(crate) fn choose(&self, record: impl FnOnce(&mut dyn Visit)) -> Option<Choice> {
        let ValueMatcher { bits, seen, .. } = self.compare(0, record);
        let number = self.number(bits).or_else(|| {
            let must_be_judged = |(wanted, number): &(u64, Option<u64>)| {
                number.is_some() && wanted & !bits & seen == 0
            };
            self.rules.iter().any(must_be_judged).then_some(self.waiting)
        })?;
        Some(Choice { number, bits })
    }

    /// Selects the plan anew for a span whose state is `bits` when more values are recorded.
    pub(crate) fn choose_again(&self, bits: u64, record: impl FnOnce(&mut dyn Visit)) -> Choice {
        let ValueMatcher { bits, .. } = self.compare(bits, record);
        Choice { number: self.number(bits).unwrap_or(self.waiting), bits }
    }

    fn compare(&self, bits: u64, record: impl FnOnce(&mut dyn Visit)) -> ValueMatcher<'_> {
        let mut matcher = ValueMatcher { tests: &self.tests, bits, seen: 0 };
        record(&mut matcher);
        matcher
    }

    fn number(&self, bits: u64) -> Option<u64> {
        let matching = self.rules.iter().find(|(wanted, _)| bits & wanted == *wanted);
        matching.map_or(self.otherwise, |(_, number)| *number)
    }
}

struct ValueMatcher<'a> {
    tests: &'a [Test],
    bits: u64,
    seen: u64,
}

impl ValueMatcher<'_> {
    fn see(&mut self, field: &Field, is_wanted: impl Fn(&WantedValue) -> bool) {
        for (bit, test) in self.tests.iter().enumerate().take(u64::BITS as usize) {
            if test.field == *field {
                self.seen |= 1 << bit;
                if is_wanted(&test.value) {
                    self.bits |= 1 << bit;
                } else {
                    self.bits &= !(1 << bit);
                }
            }
        }
    }
}

impl Visit for ValueMatcher<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.see(field, |wanted| wanted.is_str(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.see(field, |wanted| wanted.is_f64(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if self.tests.iter().any(|test| test.field == *field) {
            let text = format!("{value:?}");
            self.see(field, |wanted| wanted.is_printed(&text));
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing::field::Empty;

    use super::super::Keep;
    use super::*;

    const WAITING: u64 = 9;

    fn metadata() -> &'static Metadata<'static> {
        tracing::subscriber::with_default(tracing_subscriber::registry(), || {
            tracing::info_span!("checkout", tenant = Empty, retry = Empty).metadata().unwrap()
        })
    }

    fn rule(values: &[(&str, &str)]) -> Rule {
        let rule = Rule::for_span("checkout", Keep::failed());
        values.iter().fold(rule, |rule, (name, value)| rule.with_field_value(*name, *value))
    }

    /// Values that are recorded in turn.
    struct Values(&'static Metadata<'static>, Vec<(&'static str, &'static str)>);

    impl Values {
        fn record(&self, visit: &mut dyn Visit) {
            for (name, value) in &self.1 {
                visit.record_str(&self.0.fields().field(*name).unwrap(), value);
            }
        }
    }

    #[test]
    fn the_first_rule_whose_values_all_match_decides() {
        let metadata = metadata();
        let both = rule(&[("tenant", "acme"), ("retry", "true")]);
        let one = rule(&[("tenant", "acme")]);
        let off = rule(&[("tenant", "test")]);
        let rules = [(&both, Some(1)), (&one, Some(2)), (&off, None)];
        let fields = FieldRules::new(metadata, &rules, Some(3), WAITING);
        let choose = |values| fields.choose(|visit| Values(metadata, values).record(visit));
        let number = |values| choose(values).map(|choice| choice.number);
        assert_eq!(number(vec![("tenant", "acme"), ("retry", "true")]), Some(1));
        assert_eq!(number(vec![("tenant", "acme"), ("retry", "false")]), Some(2));
        assert_eq!(number(vec![("tenant", "other")]), Some(3));
        assert_eq!(number(vec![]), Some(3));
        assert_eq!(number(vec![("tenant", "test"), ("retry", "no")]), None);
    }

    #[test]
    fn a_span_that_may_match_later_waits_and_one_that_cannot_does_not() {
        let metadata = metadata();
        let one = rule(&[("tenant", "acme")]);
        let fields = FieldRules::new(metadata, &[(&one, Some(1))], None, WAITING);
        let values = |value| {
            move |visit: &mut dyn Visit| {
                Values(metadata, vec![("tenant", value)]).record(visit);
            }
        };
        assert_eq!(fields.choose(values("other")), None);
        let waiting = fields.choose(|_| {}).unwrap();
        assert_eq!(waiting, Choice { number: WAITING, bits: 0 });
        let matched = fields.choose_again(waiting.bits, values("acme"));
        assert_eq!(matched.number, 1);
        assert_eq!(fields.choose_again(matched.bits, |_| {}).number, 1);
        assert_eq!(fields.choose_again(matched.bits, values("other")).number, WAITING);
    }

    #[test]
    fn rules_that_need_more_than_64_values_are_left_out() {
        let metadata = metadata();
        let values: Vec<_> = (0..1_000).map(|number: u64| number.to_string()).collect();
        let all: Vec<_> = values.iter().map(|value| ("tenant", value.as_str())).collect();
        let (many, one) = (rule(&all), rule(&all[..1]));
        let fields = FieldRules::new(metadata, &[(&many, Some(1)), (&one, Some(2))], Some(3), 9);
        assert_eq!((fields.tests.len(), fields.left_out), (64, 1));
        let chosen = fields.choose(|visit| Values(metadata, vec![("tenant", "0")]).record(visit));
        assert_eq!(chosen.unwrap().number, 2);
    }

    #[test]
    fn values_are_compared_as_they_print() {
        let metadata = metadata();
        let number = rule(&[("tenant", "7")]);
        let text = rule(&[("tenant", "a b")]);
        let fields = FieldRules::new(metadata, &[(&number, Some(1)), (&text, Some(2))], None, 9);
        let tenant = metadata.fields().field("tenant").unwrap();
        let chosen = |record: &dyn Fn(&mut dyn Visit)| {
            fields.choose(|visit| record(visit)).map(|choice| choice.number)
        };
        assert_eq!(chosen(&|visit| visit.record_u64(&tenant, 7)), Some(1));
        assert_eq!(chosen(&|visit| visit.record_i64(&tenant, -7)), None);
        assert_eq!(chosen(&|visit| visit.record_debug(&tenant, &"a b")), Some(2));
        assert_eq!(chosen(&|visit| visit.record_str(&tenant, "a b")), Some(2));
    }
}

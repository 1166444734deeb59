//! Reading rules from text.
//!
//! ```text
//! rules     = directive *( "," directive )
//! directive = [ selector "=" ] keep
//! selector  = target [ "[" span "]" ] / "[" span "]"
//! keep      = "off" / condition *( "|" condition )
//! condition = duration / "error"
//! ```
//!
//! Targets and spans are written as `EnvFilter` has them; durations as the `humantime` crate does
//! (`250ms`, `1s`, `1m 30s`).

use std::str::FromStr;
use std::time::Duration;

use winnow::ModalResult;
use winnow::ascii::{alpha1, digit1, multispace0};
use winnow::combinator::{
    alt, cut_err, delimited, eof, fail, not, opt, preceded, repeat, separated, terminated,
};
use winnow::error::{ContextError, StrContext, StrContextValue};
use winnow::prelude::*;
use winnow::token::take_while;

use crate::error::Error;
use crate::keep::{Keep, Rule, Rules};

const KEEP: &str = "a duration such as `250ms`, `error` or `off`";
const CONDITION: &str = "a duration such as `250ms` or `error`";
const JOINED: &str = "the conditions for the same spans to be joined by `|`";

impl FromStr for Rules {
    type Err = Error;

    /// Reads rules as `TRACING_PROFILING` has them; see the crate's documentation.
    ///
    /// # Errors
    ///
    /// If the text is not of that form; the error shows where.
    fn from_str(text: &str) -> Result<Self, Error> {
        let parsed = rules.parse(text);
        let rules =
            parsed.map_err(|error| Error::rules(text, error.offset(), expected(error.inner())))?;
        // `250ms,error` would keep failed spans only, which nobody means who writes it.
        let is_split = |(number, rule): &(usize, &Option<Rule>)| {
            let before = || rules.iter().take(*number).flatten();
            rule.as_ref().is_some_and(|rule| before().any(|other| rule.forgets(other)))
        };
        if let Some((number, _)) = rules.iter().enumerate().find(is_split) {
            return Err(Error::rules(text, offset_of(text, number), JOINED.to_owned()));
        }
        Ok(Self::new(rules.into_iter().flatten()))
    }
}

/// Where the directive of that number begins.
fn offset_of(text: &str, number: usize) -> usize {
    let before: usize = text.split(',').take(number).map(|directive| directive.len() + 1).sum();
    let rest = text.get(before..).unwrap_or_default();
    before + rest.len() - rest.trim_start().len()
}

fn expected(error: &ContextError) -> String {
    let expected: Vec<String> = error
        .context()
        .filter_map(|context| match context {
            StrContext::Expected(StrContextValue::Description(text)) => Some((*text).to_owned()),
            StrContext::Expected(value) => Some(value.to_string()),
            _ => None,
        })
        .collect();
    if expected.is_empty() { "`,` or the end".to_owned() } else { expected.join(" or ") }
}

fn rules(input: &mut &str) -> ModalResult<Vec<Option<Rule>>> {
    separated(1.., delimited(multispace0, opt(directive), multispace0), ',').parse_next(input)
}

fn directive(input: &mut &str) -> ModalResult<Rule> {
    // An empty one is allowed, as after a comma at the end: so something must be there.
    not(alt((",".void(), eof.void()))).parse_next(input)?;
    let selector = opt(terminated(selector, (multispace0, '=', multispace0))).parse_next(input)?;
    let keep = cut_err(keep).parse_next(input)?;
    let (target, span) = selector.unwrap_or_default();
    let rule = match target {
        "" => Rule::for_all(keep),
        target => Rule::for_target(target, keep),
    };
    Ok(match span {
        Some(span) => rule.with_span(span),
        None => rule,
    })
}

fn selector<'a>(input: &mut &'a str) -> ModalResult<(&'a str, Option<&'a str>)> {
    let target = take_while(0.., |c: char| c.is_alphanumeric() || "_:-.".contains(c));
    let span = preceded(
        '[',
        cut_err(terminated(
            take_while(1.., |c: char| !"[]{},=".contains(c))
                .context(StrContext::Expected("the name of a span".into_description())),
            ']'.context(StrContext::Expected("`]`".into_description())),
        )),
    );
    let (target, span): (&str, Option<&str>) = (target, opt(span)).parse_next(input)?;
    if target.is_empty() && span.is_none() {
        return fail.parse_next(input);
    }
    Ok((target, span.map(str::trim)))
}

fn keep(input: &mut &str) -> ModalResult<Keep> {
    alt(("off".value(Keep::never()), conditions)).parse_next(input)
}

fn conditions(input: &mut &str) -> ModalResult<Keep> {
    let add = |keep: Keep, condition| match condition {
        Condition::Latency(latency) => keep.or_slower_than(latency),
        Condition::Error => keep.or_failed(),
    };
    let mut first = condition.context(StrContext::Expected(KEEP.into_description()));
    let next = condition.context(StrContext::Expected(CONDITION.into_description()));
    let first = add(Keep::never(), first.parse_next(input)?);
    let next = preceded((multispace0, '|', multispace0), cut_err(next));
    repeat(0.., next).fold(|| first, add).parse_next(input)
}

#[derive(Clone, Copy)]
enum Condition {
    Latency(Duration),
    Error,
}

fn condition(input: &mut &str) -> ModalResult<Condition> {
    // A number and a unit; a duration is made of several.
    let part = (digit1::<&str, _>, alpha1);
    alt((
        "error".value(Condition::Error),
        (part, repeat::<_, _, (), _, _>(0.., (multispace0, part)))
            .take()
            .verify_map(|text: &str| humantime::parse_duration(text).ok())
            .map(Condition::Latency),
    ))
    .parse_next(input)
}

trait IntoDescription {
    fn into_description(self) -> StrContextValue;
}

impl IntoDescription for &'static str {
    fn into_description(self) -> StrContextValue {
        StrContextValue::Description(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn slower(ms: u64) -> Keep {
        Keep::slower_than(Duration::from_millis(ms))
    }

    fn read(text: &str) -> Rules {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn reads_what_the_documentation_shows() {
        assert_eq!(read("250ms|error"), Rules::default());
        assert_eq!(
            read("shop=100ms,shop::cart[checkout]=50ms|error,noisy=off"),
            Rules::new([
                Rule::for_target("shop", slower(100)),
                Rule::for_target("shop::cart", slower(50).or_failed()).with_span("checkout"),
                Rule::for_target("noisy", Keep::never()),
            ])
        );
        assert_eq!(read("[GET /x]=1s"), Rules::new([Rule::for_span("GET /x", slower(1000))]));
        assert_eq!(read("error"), Rules::new([Rule::for_all(Keep::failed())]));
        assert!(read("off").is_off());
    }

    #[test]
    fn is_not_put_off_by_blanks_or_a_comma_at_the_end() {
        let rules = Rules::new([
            Rule::for_all(slower(90_000)),
            Rule::for_target("shop", slower(250).or_failed()),
        ]);
        assert_eq!(read(" 1m 30s , shop = error | 250ms ,"), rules);
        assert_eq!(read(""), Rules::new([]));
    }

    fn error(text: &str) -> String {
        text.parse::<Rules>().unwrap_err().to_string()
    }

    #[test]
    fn points_at_what_it_cannot_read() {
        assert_eq!(
            error("250ms|error,shop=fast"),
            "cannot read the profiling rules: expected a duration such as `250ms`, `error` or \
             `off`\n  250ms|error,shop=fast\n                   ^"
        );
        assert!(error("250ms|off").contains("expected a duration such as `250ms` or `error`\n"));
        assert_eq!(
            error("250ms, error,shop=1s"),
            "cannot read the profiling rules: expected the conditions for the same spans to be \
             joined by `|`\n  250ms, error,shop=1s\n         ^"
        );
        assert!(error("shop[x]=error,shop[x]=1s").ends_with("\n                ^"));
        assert!(error("1s,1ms").ends_with("\n     ^"));
        // To override is something else.
        assert!("1s|error,shop=1s|error,shop=500ms,shop=off".parse::<Rules>().is_ok());
        let cases = [
            ("250", 3),
            ("fast", 0),
            ("250ms|", 6),
            ("shop=", 5),
            ("shop[checkout=50ms", 13),
            ("shop[]=50ms", 5),
            ("250ms error", 6),
            ("shöp=fast", 5),
            ("=50ms", 0),
        ];
        for (text, at) in cases {
            let message = error(text);
            let marker = message.lines().last().unwrap();
            assert_eq!(marker.len() - 3, at, "{message}");
        }
    }
}

//! Parses rules from text.
//!
//! ```text
//! rules     = directive *( "," directive )
//! directive = [ selector "=" ] keep
//! selector  = target [ span ] / span
//! span      = "[" [ name ] [ "{" field *( "," field ) "}" ] "]"
//! field     = name [ "=" ( [ "~" ] quoted / value ) ]
//! keep      = "off" / condition *( "|" ( condition / level ) )
//! level     = "level<=" ( "error" / "warn" / "info" / "debug" / "trace" )
//! condition = duration / measure ">" threshold / "error" / "error=self"
//!           / "p" number [ ">" duration ] / "always" / "one_in=" number
//!           / "hung>" duration / "hung=off" / "open>" duration
//! threshold = duration / number "%" / number [ unit ]
//! ```
//!
//! The condition column of the table of measures has the names. Targets, spans and fields use the syntax of `EnvFilter`, in which a value is a pattern. A quoted value is text, or a
//! pattern if it follows `=~`. Durations have the syntax of the `humantime` crate (`250ms`, `1s`, `1m 30s`).

use std::str::FromStr;
use std::time::Duration;

use tracing::Level;
use winnow::ModalResult;
use winnow::ascii::{alpha1, digit1, multispace0};
use winnow::combinator::{
    alt, cut_err, delimited, eof, fail, not, opt, peek, preceded, repeat, separated, terminated,
};
use winnow::error::{ContextError, ErrMode, StrContext, StrContextValue};
use winnow::prelude::*;
use winnow::token::take_while;

use super::rules::FieldMatch;
use super::wanted::{ValuePattern, WantedValue};
use super::{Condition, Keep, Rule, Rules, Threshold};
use crate::error::Error;
use crate::facts::{Measure, Unit};
use crate::text::bytes;

/// Directives in a set of rules. Each new callsite is compared with all of them.
const MAX_DIRECTIVES: usize = 256;

const RULES: &str = "the profiling rules";
const KEEP: &str = "`off` or a condition such as `250ms`, `error`, `p99>20ms` or `on_cpu>100ms`";
const CONDITION: &str = "a condition such as `250ms`, `error`, `p99>20ms` or `on_cpu>100ms`";
const DURATION: &str = "a duration such as `250ms`";
const WHOLE: &str = "a whole number and a unit, such as `250ms`";
const AMOUNT: &str = "a duration such as `250ms`, or a share such as `80%`";
const SIZE: &str = "a size such as `100MB`, below 16 EiB";
const COUNT: &str = "a number such as `1000000`, without a unit";
const LEVEL: &str = "a level: `error`, `warn`, `info`, `debug` or `trace`";
const JOINED: &str = "the conditions for the same spans to be joined by `|`";

impl FromStr for Rules {
    type Err = Error;

    /// Parses rules in the syntax of `TRACING_PROFILING`; see the crate's documentation.
    ///
    /// # Errors
    ///
    /// If the text is malformed; the error shows where.
    fn from_str(text: &str) -> Result<Self, Error> {
        let parsed = rules.parse(text);
        let directives = parsed.map_err(|error| {
            let at = error.offset();
            let problem = match error.inner().cause() {
                Some(cause) => format!("no pattern: {cause} (text can be put in quotes)"),
                None => format!("expected {}", expected(error.inner())),
            };
            Error::text(RULES, text, at, problem)
        })?;
        let wrong = |directive: &Directive, expected| {
            let at = text.len().saturating_sub(directive.rest);
            Err(Error::text(RULES, text, at, format!("expected {expected}")))
        };
        if let Some(over) = directives.get(MAX_DIRECTIVES) {
            return wrong(over, format!("at most {MAX_DIRECTIVES} directives"));
        }
        // `250ms,error` would keep only failed spans, which is almost certainly not intended.
        let is_split = |(number, directive): &(usize, &Directive)| {
            let mut before = directives.iter().take(*number);
            before.any(|other| directive.rule.drops_conditions_of(&other.rule))
        };
        if let Some((_, directive)) = directives.iter().enumerate().find(is_split) {
            return wrong(directive, JOINED.to_owned());
        }
        Ok(Self::new(directives.into_iter().map(|directive| directive.rule)))
    }
}

/// A rule, and the length of the text that was left where it began.
struct Directive {
    rule: Rule,
    rest: usize,
}

fn expected(error: &ContextError) -> String {
    // The innermost context comes first.
    let expected = error.context().find_map(|context| match context {
        StrContext::Expected(StrContextValue::Description(text @ (KEEP | CONDITION))) => {
            let measures = Measure::ALL.iter().filter(|measure| **measure != Measure::Wall);
            let names = measures.map(|measure| measure.row().condition).chain(["hung", "open"]);
            let names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
            Some(format!("{text}; before `>` can be `{}`", names.join("`, `")))
        }
        StrContext::Expected(StrContextValue::Description(text)) => Some((*text).to_owned()),
        StrContext::Expected(value) => Some(value.to_string()),
        _ => None,
    });
    expected.unwrap_or_else(|| "`|`, `,` or the end".to_owned())
}

fn rules(input: &mut &str) -> ModalResult<Vec<Directive>> {
    let directives: Vec<Option<Directive>> =
        separated(1.., delimited(multispace0, opt(directive), multispace0), ',')
            .parse_next(input)?;
    Ok(directives.into_iter().flatten().collect())
}

fn directive(input: &mut &str) -> ModalResult<Directive> {
    let rest = input.len();
    // An empty directive is allowed, as after a trailing comma, so this one must not be empty.
    not(alt((",".void(), eof.void()))).parse_next(input)?;
    // A condition that contains a `=` (`one_in=9`) is not a selector.
    let for_all = terminated(keep, peek((multispace0, alt((",", eof))))).map(|kept| (None, kept));
    let selected = (opt(terminated(selector, equals())), cut_err(keep));
    // `hung=off` alone is no condition, and not the rule `off` for a crate `hung`.
    let hung_off = ("hung", equals(), "off", multispace0, alt((",", eof)));
    cut_err(not(hung_off)).context(expect(KEEP)).parse_next(input)?;
    let (selector, (keep, max_level)) = alt((for_all, selected)).parse_next(input)?;
    let rule = Rule { keep, max_level, ..selector.unwrap_or(Rule::for_all(keep)) };
    Ok(Directive { rule, rest })
}

/// Parses the spans of a rule. The rule keeps nothing yet.
fn selector(input: &mut &str) -> ModalResult<Rule> {
    let target = take_while(0.., |c: char| c.is_alphanumeric() || "_:-.".contains(c));
    let (target, span): (&str, _) = (target, opt(span)).parse_next(input)?;
    if target.is_empty() && span.is_none() {
        return fail.parse_next(input);
    }
    let target = (!target.is_empty()).then(|| target.to_owned());
    Ok(Rule { target, ..span.unwrap_or(Rule::for_all(Keep::never())) })
}

fn span(input: &mut &str) -> ModalResult<Rule> {
    '['.parse_next(input)?;
    let name =
        take_while(1.., |c: char| !"[]{},=".contains(c)).map(|name: &str| name.trim().to_owned());
    let fields = delimited(
        '{',
        cut_err(separated(1.., delimited(multispace0, field, multispace0), ',')),
        cut_err('}'.context(expect("`}`"))),
    );
    let (span, fields): (Option<_>, Option<_>) = (opt(name), opt(fields)).parse_next(input)?;
    if span.is_none() && fields.is_none() {
        return cut_err(fail.context(expect("the name of a span"))).parse_next(input);
    }
    cut_err(']'.context(expect("`]`"))).parse_next(input)?;
    let fields = fields.unwrap_or_default();
    Ok(Rule { span, fields, ..Rule::for_all(Keep::never()) })
}

fn field(input: &mut &str) -> ModalResult<FieldMatch> {
    let name = take_while(1.., |c: char| c.is_alphanumeric() || "_.-".contains(c))
        .context(expect("the name of a field"));
    let value = alt((
        preceded(('~', multispace0, peek('"')), cut_err(quoted.try_map(ValuePattern::new)))
            .map(WantedValue::Pattern),
        quoted.map(|text: &str| WantedValue::Text(text.to_owned())),
        cut_err(unquoted.try_map(|text: &str| WantedValue::unquoted(text.trim()))),
    ));
    let value = value.context(expect("a value, in quotes if it has braces or commas"));
    (name.map(str::to_owned), opt(preceded(equals(), cut_err(value))))
        .map(|(name, value)| FieldMatch { name, value })
        .parse_next(input)
}

fn quoted<'a>(input: &mut &'a str) -> ModalResult<&'a str> {
    delimited('"', take_while(0.., |c: char| c != '"'), cut_err('"')).parse_next(input)
}

fn unquoted<'a>(input: &mut &'a str) -> ModalResult<&'a str> {
    take_while(1.., |c: char| !"\"{},".contains(c)).parse_next(input)
}

type KeptUpTo = (Keep, Option<Level>);

fn keep(input: &mut &str) -> ModalResult<KeptUpTo> {
    let off = terminated("off", not('_')).value((Keep::never(), None));
    let conditions = conditions.verify(|(keep, _)| !keep.is_never()).context(expect(KEEP));
    alt((off, conditions)).parse_next(input)
}

fn conditions(input: &mut &str) -> ModalResult<KeptUpTo> {
    let mut first = part.context(expect(KEEP));
    let next = part.context(expect(CONDITION));
    let first = first.parse_next(input)?;
    let next = preceded((multispace0, '|', multispace0), cut_err(next));
    let and = |(keep, level): KeptUpTo, (more, other): KeptUpTo| {
        (more.conditions().fold(keep, Keep::or), other.or(level))
    };
    repeat(0.., next).fold(|| first, and).parse_next(input)
}

fn part(input: &mut &str) -> ModalResult<KeptUpTo> {
    let level = alpha1.parse_to().context(expect(LEVEL));
    let level = preceded(("level", multispace0, "<=", multispace0), cut_err(level));
    alt((
        level.map(|level: Level| (Keep::never(), Some(level))),
        condition.map(|condition| (Keep::when(condition), None)),
    ))
    .parse_next(input)
}

fn condition(input: &mut &str) -> ModalResult<Condition> {
    let count = digit1.parse_to().context(expect("a number of spans, from 1 on"));
    alt((
        ("error", equals(), "self").value(Condition::ErrorSelf),
        ("hung", equals(), "off").value(Condition::NeverHung),
        preceded(("one_in", equals(), peek(digit1)), cut_err(count)).map(Condition::OneIn),
        terminated("error", not(alpha1)).value(Condition::Error),
        "always".value(Condition::Always),
        above_threshold,
        preceded(above("hung"), limit).map(Condition::Hung),
        preceded(above("open"), limit).map(Condition::Open),
        percentile,
        duration.map(|time| Condition::Above(Measure::Wall, Threshold::Time(time))),
    ))
    .parse_next(input)
}

fn above_threshold(input: &mut &str) -> ModalResult<Condition> {
    let name = take_while(1.., |c: char| c.is_ascii_lowercase() || c == '_');
    // The condition on wall time has no name.
    let judged = |name: &str| Measure::judged_by(name).filter(|one| *one != Measure::Wall);
    let mut measure = terminated(name.verify_map(judged), (multispace0, '>', multispace0));
    let measure: Measure = measure.parse_next(input)?;
    let threshold = match measure.unit() {
        Unit::Nanoseconds => cut_err(amount.context(expect(AMOUNT))).parse_next(input),
        Unit::Bytes => cut_err(size.context(expect(SIZE))).parse_next(input),
        Unit::Count => cut_err(count_above.context(expect(COUNT))).parse_next(input),
    };
    Ok(Condition::Above(measure, threshold?))
}

fn equals<'a>() -> impl Parser<&'a str, (), ErrMode<ContextError>> {
    (multispace0, '=', multispace0).void()
}

fn above<'a>(name: &'static str) -> impl Parser<&'a str, (), ErrMode<ContextError>> {
    (name, multispace0, '>', multispace0).void()
}

fn limit(input: &mut &str) -> ModalResult<Duration> {
    cut_err(duration.context(expect(DURATION))).parse_next(input)
}

fn amount(input: &mut &str) -> ModalResult<Threshold> {
    let percent = terminated(digit1, '%').parse_to().verify(|percent| *percent <= 100);
    alt((percent.map(Threshold::Percent), duration.map(Threshold::Time))).parse_next(input)
}

fn size(input: &mut &str) -> ModalResult<Threshold> {
    let text = (digit1, multispace0, take_while(0.., is_of_number)).take();
    text.verify_map(bytes).map(Threshold::Number).parse_next(input)
}

fn count_above(input: &mut &str) -> ModalResult<Threshold> {
    take_while(1.., is_of_number).parse_to().map(Threshold::Number).parse_next(input)
}

fn is_of_number(c: char) -> bool {
    c.is_alphanumeric() || c == '.' || c == '%'
}

fn percentile(input: &mut &str) -> ModalResult<Condition> {
    let number = take_while(1.., |c: char| c.is_ascii_digit() || c == '.');
    let millionths = preceded('p', number).verify_map(|number: &str| {
        let percent: f64 = number.parse().ok()?;
        let millionths = (percent * 10_000.0).round();
        // Outside this range the value would not be the percentile that the text states.
        let is_some = (1.0..=999_999.0).contains(&millionths);
        is_some.then_some(millionths as u32)
    });
    let floor = opt(preceded((multispace0, '>', multispace0), limit));
    let (millionths, floor) = (millionths, floor).parse_next(input)?;
    Ok(Condition::Percentile { millionths, floor: floor.unwrap_or_default() })
}

fn duration(input: &mut &str) -> ModalResult<Duration> {
    // A number and a unit; a duration has one or more of these.
    let part = || (digit1::<&str, _>, alpha1.context(expect(WHOLE)));
    (part(), repeat::<_, _, (), _, _>(0.., (multispace0, part())))
        .take()
        .verify_map(|text: &str| humantime::parse_duration(text).ok())
        .parse_next(input)
}

const fn expect(what: &'static str) -> StrContext {
    StrContext::Expected(StrContextValue::Description(what))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    const fn slower(ms: u64) -> Keep {
        Keep::slower_than(Duration::from_millis(ms))
    }

    fn read(text: &str) -> Rules {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_level_is_part_of_a_directive_and_no_condition() {
        let traced = Rule::for_target("shop", slower(100)).with_max_level(Level::TRACE);
        assert_eq!(read("shop=100ms|level<=trace"), Rules::new([traced.clone()]));
        assert_eq!(read("shop = level <= TRACE | 100ms"), Rules::new([traced]));
        let all = Rule::for_all(slower(250).or_failed()).with_max_level(Level::INFO);
        assert_eq!(read("250ms|level<=info|error"), Rules::new([all]));
        let printed = read("250ms|level<=info|error,[x]=1s").to_string();
        assert_eq!(printed, "250ms|error|level<=info,[x]=1s");
        assert_eq!(read(&printed).to_string(), printed);
        for (text, expected) in [
            ("level<=info", "expected `off` or a condition"),
            ("shop=level<=info", "expected `off` or a condition"),
            ("250ms|level<=loud", "expected a level"),
            ("250ms|level<=", "expected a level"),
        ] {
            let error = text.parse::<Rules>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
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
    fn every_condition_round_trips() {
        for text in [
            "last_exit>250ms",
            "error=self",
            "error",
            "on_cpu>100ms|on_cpu>80%|off_cpu>50ms|idle>1s",
            "off_cpu>50ms",
            "idle>80%|await>1s|await>80%|delay>50ms|delay>10%",
            "alloc>100MB|allocs>1000000",
            "alloc>1GiB",
            "alloc>1B",
            "own_on_cpu>100ms|own_on_cpu>80%",
            "p99>20ms|one_in=1000",
            "p99.9",
            "always",
            "250ms|hung>30s|open>5m",
            "1s|hung=off",
            "off",
            "250ms|error,shop=100ms,shop::cart[checkout]=50ms|error,noisy=off",
            "[checkout{tenant=\"acme\"}]=50ms",
            "shop[{tenant=\"acme, inc\",retry}]=error=self",
            "[checkout{tenant=~\"acme-[a-z]{2,3}\",path=\"/a.b\"}]=50ms",
        ] {
            assert_eq!(read(text).to_string(), text);
            assert_eq!(read(&read(text).to_string()), read(text));
        }
    }

    #[test]
    fn conditions_with_an_equals_sign_are_not_targets() {
        let one_in = Condition::OneIn(NonZeroU32::new(1000).unwrap());
        assert_eq!(read("one_in=1000"), Rules::new([Rule::for_all(Keep::when(one_in))]));
        assert_eq!(
            read("error = self,shop=one_in = 1000"),
            Rules::new([
                Rule::for_all(Keep::when(Condition::ErrorSelf)),
                Rule::for_target("shop", Keep::when(one_in)),
            ])
        );
        // A selector: the crate named `hung`.
        let hung = Rule::for_target("hung", slower(5));
        assert_eq!(read("hung=5ms"), Rules::new([hung]));
    }

    #[test]
    fn reads_fields() {
        let rule = Rule::for_span("checkout", slower(50)).with_field_value("tenant", "acme");
        assert_eq!(read("[checkout{tenant=acme}]=50ms"), Rules::new([rule]));
        let rule = Rule::for_target("shop", slower(50))
            .with_field("user")
            .with_field_value("path", "/a b,c");
        assert_eq!(read("shop[{ user , path = \"/a b,c\" }]=50ms,"), Rules::new([rule]));
    }

    #[test]
    fn reads_patterns() {
        let rule =
            |pattern| Rule::for_span("x", slower(1)).with_field_pattern("a", pattern).unwrap();
        for (text, pattern) in [
            ("[x{a=acme.*}]=1ms", "acme.*"),
            ("[x{a= [a-c]+$ }]=1ms", "[a-c]+$"),
            ("[x{a =~ \"b{2,3}, c\"}]=1ms", "b{2,3}, c"),
            ("[x{a=~\"b\"}]=1ms", "b"),
        ] {
            assert_eq!(read(text), Rules::new([rule(pattern)]), "{text}");
        }
        let text = |text| Rule::for_span("x", slower(1)).with_field_value("a", text);
        assert_eq!(read("[x{a=\"b.*\"}]=1ms"), Rules::new([text("b.*")]));
        assert_eq!(read("[x{a=~b}]=1ms"), Rules::new([text("~b")]));
    }

    #[test]
    fn an_invalid_pattern_is_an_error_that_says_why() {
        assert_eq!(
            error("250ms,[x{a=b,c=(d}]=1s"),
            "cannot read the profiling rules: no pattern: found open group without closing ')' \
             (text can be put in quotes)\n  250ms,[x{a=b,c=(d}]=1s\n                 ^"
        );
        assert!(error("[x{a=~\"*\"}]=1s").ends_with("\n        ^"));
        let large = format!("[x{{a=~\"{}\"}}]=1s", "a{999}".repeat(20));
        assert!(error(&large).contains("no pattern: compiled regex"), "{}", error(&large));
        let wrong = Rule::for_span("x", slower(1)).with_field_pattern("a", "b)");
        assert_eq!(
            wrong.unwrap_err().to_string(),
            "cannot read the pattern: found closing ')' without matching '('\n  b)\n  ^"
        );
    }

    #[test]
    fn accepts_blanks_and_a_trailing_comma() {
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
    fn the_work_of_parsing_is_bounded() {
        use crate::keep::COMPARED;
        let work = |text: &str| {
            let before = COMPARED.get();
            let read = text.parse::<Rules>();
            (read, COMPARED.get() - before)
        };
        let sets: [fn(usize) -> String; 5] = [
            |n| (0..n).map(|i| format!("a{i}=1ms,")).collect(),
            |n| "a=1ms,".repeat(n),
            |n| (0..n).map(|i| format!("[a{{b={i}}}]=1ms,")).collect(),
            |n| format!("a=1ms{}", "|1ms".repeat(n)),
            |n| format!("[a{{b{}}}]=1ms", ",b".repeat(n)),
        ];
        for set in sets {
            for n in [1, 255, 256, 257, 10_000, 20_000] {
                let (read, compared) = work(&set(n));
                if set(n).matches("ms,").count() > MAX_DIRECTIVES {
                    let error = read.unwrap_err().to_string();
                    assert!(
                        error.contains("at most 256 directives") && error.len() < 300,
                        "{error}"
                    );
                    assert_eq!(compared, 0, "{n}");
                } else {
                    assert!(read.is_ok(), "{n}");
                    let most = MAX_DIRECTIVES * MAX_DIRECTIVES / 2;
                    assert!(compared <= most, "{compared} of {n}");
                }
            }
        }
    }

    #[test]
    fn an_error_says_what_is_expected() {
        const WHOLE: &str = "a whole number and a unit, such as `250ms`";
        const MEASURES: &str = "`off` or a condition such as `250ms`, `error`, `p99>20ms` or `on_cpu>100ms`; before `>` can be \
             `last_exit`, `on_cpu`, ";
        for (expected, texts) in [
            (
                WHOLE,
                &[
                    "250",
                    "error|250",
                    "shop=250, hyper=off",
                    "shop::cart[checkout{tenant=acme}]=250",
                    "p99>20",
                    "on_cpu>100",
                    "0.5s",
                    "error|1.5m",
                    "hung>2.5s",
                    "1..5s",
                    "1.5x",
                ][..],
            ),
            (DURATION, &["hung>250MS", "open>=1s", "p99>fast"]),
            (AMOUNT, &["on_cpu>=100ms", "on_cpu>fast", "idle>1s5x"]),
            (SIZE, &["alloc>100M", "alloc>=100MB", "alloc>50%", "alloc>18446744073709551615GB"]),
            (COUNT, &["allocs>=1000", "allocs>1M", "allocs>1e6", "major_faults>10MB"]),
            (CONDITION, &["250ms|errors", "250ms|", "error|info", "250ms|cpu>1s"]),
            (
                MEASURES,
                &[
                    "fast",
                    "250MS",
                    ".1ms",
                    "latency>250ms",
                    ">250ms",
                    "cpu>100ms",
                    "preempted>50ms",
                    "allocated>1MB",
                    "frees>10",
                    "ON_CPU>80%",
                    "shop=info",
                    "shop=never",
                    "shop=",
                    "p100",
                ],
            ),
        ] {
            for text in texts {
                let error = error(text);
                let begins = format!("cannot read the profiling rules: expected {expected}");
                assert!(error.starts_with(&begins), "{text}: {error}");
                assert_eq!(error.lines().count(), 3, "{error}");
            }
        }
        // Every measure that has a condition is among them.
        for measure in Measure::ALL.iter().filter(|measure| **measure != Measure::Wall) {
            let name = measure.row().condition;
            assert!(name.is_empty() || error("fast").contains(&format!("`{name}`")), "{name}");
        }
    }

    #[test]
    fn errors_point_at_the_malformed_text() {
        let measures = Measure::ALL.iter().map(|measure| measure.row().condition);
        let measures = measures.filter(|name| !["", "latency"].contains(name)).collect::<Vec<_>>();
        assert_eq!(
            error("250ms|error,shop=fast"),
            format!(
                "cannot read the profiling rules: expected `off` or a condition such as `250ms`, `error`, `p99>20ms` or \
                 `on_cpu>100ms`; before `>` can be `{}`, `hung`, `open`\n  250ms|error,shop=fast\n                   ^",
                measures.join("`, `")
            )
        );
        assert!(error("250ms|off").contains("expected a condition such as `250ms`, `error`,"));
        assert_eq!(
            error("250ms, error,shop=1s"),
            "cannot read the profiling rules: expected the conditions for the same spans to be \
             joined by `|`\n  250ms, error,shop=1s\n         ^"
        );
        assert!(error("shop[x]=error,shop[x]=1s").ends_with("\n                ^"));
        assert!(error("1s,1ms").ends_with("\n     ^"));
        assert!(error("shop=1s,shop=p99>20ms").ends_with("\n          ^"));
        // Overriding the same condition is allowed.
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
            ("on_cpu>fast", 7),
            ("on_cpu>101%", 10),
            ("open>", 5),
            ("p100", 0),
            ("p99.99999", 0),
            ("shop=hung=off", 5),
            ("hung=off", 0),
            ("250ms|error,hung = off", 12),
            ("one_in=0", 7),
            ("error=me", 6),
            ("[x{}]=1s", 3),
            ("[x{a=1]=1s", 10),
            ("[x{a=\"1}]=1s", 12),
        ];
        for (text, at) in cases {
            let message = error(text);
            let marker = message.lines().last().unwrap();
            assert_eq!(marker.len() - 3, at, "{message}");
        }
    }
}

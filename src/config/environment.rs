//! Settings by environment variables.

use std::env;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use super::Builder;
#[cfg(feature = "_otlp")]
use super::builder::Opaque;
use super::builder::{LONGEST_INTERVAL, RATES, SHORTEST_INTERVAL, STACK_BYTES};
use super::links;
use crate::collect::continuous_rate;
use crate::error::Error;
use crate::export::{Directory, Format, of_process};
#[cfg(feature = "_otlp")]
use crate::export::{OtlpBuilder, OtlpExporter};
use crate::keep::Rules;
use crate::log::{LogEvent, LogKind};
use crate::redact::Redaction;
use crate::text::{bytes, shortened};

/// The variable with the rules. The names of the others begin like that.
const RULES: &str = "TRACING_PROFILING";
const EXPORTER: &str = "OTEL_PROFILES_EXPORTER";
const ENDPOINTS: [&str; 2] =
    ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT"];
const SDK_DISABLED: &str = "OTEL_SDK_DISABLED";

/// A variable and what it sets.
struct Setting {
    variable: &'static str,
    /// What a value must be, for errors.
    expected: &'static str,
    /// Applies a value. `None` if it is not what is expected; an error shows where.
    set: fn(Builder, &str) -> Option<Result<Builder, Error>>,
}

/// A row of the table, by the rest of the variable's name. With `try`, the value has its blanks and errors of its own.
macro_rules! setting {
    ($rest:literal, $expected:expr, |$builder:ident, $text:ident| $set:expr) => {
        Setting {
            variable: concat!("TRACING_PROFILING", $rest),
            expected: $expected,
            set: |$builder, $text| {
                let $text = $text.trim();
                Some(Ok($set))
            },
        }
    };
    (try $rest:literal, |$variable:ident, $builder:ident, $text:ident| $set:expr) => {
        Setting {
            variable: concat!("TRACING_PROFILING", $rest),
            expected: "",
            set: |$builder, $text| {
                let $variable = concat!("TRACING_PROFILING", $rest);
                Some($set)
            },
        }
    };
}

const ON_OR_OFF: &str = "on or off";
const FORMATS: &str =
    "formats separated by commas: html, md, folded, and with their features pprof, otlp, firefox";
const SYMBOLS: &str = match cfg!(feature = "symbols") {
    true => ON_OR_OFF,
    false => "off: the feature `symbols` of tracing-profiling is not on",
};

/// All variables of this crate.
const SETTINGS: &[Setting] = &[
    setting!(try "", |variable, builder, text| {
        let rules = Rules::from_str(text).map_err(|error| error.found_in(variable));
        rules.map(|rules| builder.rules(rules))
    }),
    setting!("_SOURCE", "auto, perf, timer or none", |builder, text| {
        builder.source(text.parse().ok()?)
    }),
    setting!("_OFF_CPU", ON_OR_OFF, |builder, text| builder.off_cpu(is_on(text)?)),
    setting!("_SIGNAL", "the number of a signal, from 1 to 64", |builder, text| {
        builder.timer_signal(within(text, 1..=64)?.cast_signed())
    }),
    setting!("_SAMPLING_DELAY", "a time, as 5ms, or 0", |builder, text| {
        builder.sampling_delay(time(text)?)
    }),
    setting!("_RATE", "samples a second, from 1 to 10000", |builder, text| {
        builder.rate(within(text, RATES)?)
    }),
    setting!("_STACK_BYTES", "bytes, from 1024 to 65448", |builder, text| {
        builder.stack_bytes(within(text, STACK_BYTES)?)
    }),
    setting!("_CPU_BUDGET", "percent of a core, from 0 to 10000", |builder, text| {
        builder.cpu_budget(within(text, 0..=10_000)?)
    }),
    setting!("_MEMORY", "bytes, from 1MiB on, as 128MiB", |builder, text| {
        // A number without a unit is easily taken for MiB.
        let bytes = bytes(text).filter(|bytes| *bytes >= 1 << 20)?;
        builder.memory(bytes.try_into().ok()?)
    }),
    setting!(try "_DIR", |variable, builder, text| {
        Ok(Builder { files: Directory::new(text), files_set_by: Some(variable), ..builder })
    }),
    setting!("_FORMATS", FORMATS, |builder, text| {
        let files = builder.files.with_formats(formats(text)?);
        Builder { files, files_set_by: Some("TRACING_PROFILING_FORMATS"), ..builder }
    }),
    setting!("_TRACE_URL", links::A_TRACE_URL, |builder, text| {
        links::is_trace_url(text).then(|| builder.trace_url(text))?
    }),
    setting!("_SOURCE_URL", links::A_SOURCE_URL, |builder, text| {
        links::is_source_url(text).then(|| builder.source_url(text))?
    }),
    setting!(try "_SPAN_FIELDS", |variable, builder, text| {
        field_names(variable, text).map(|names| builder.span_fields(names))
    }),
    setting!(try "_REDACT", |variable, builder, text| {
        let found_in = |error| Error::from(error).found_in(variable);
        let hidden = Redaction::new().hide_all(text).map_err(found_in);
        hidden.map(|hidden| builder.redact(hidden))
    }),
    setting!("_FULL_PATHS", ON_OR_OFF, |builder, text| {
        builder.redact(Redaction::new().full_paths(is_on(text)?))
    }),
    setting!("_SYMBOLS", SYMBOLS, |builder, text| {
        builder.symbols(is_on(text).filter(|is_on| !is_on || cfg!(feature = "symbols"))?)
    }),
    setting!("_ALLOC_SAMPLE_INTERVAL", "bytes, from 0 to 4294967295", |builder, text| {
        builder.alloc_sample_interval(within(text, 0..=u32::MAX)?)
    }),
    setting!("_CONTINUOUS", "on, off, or samples a second, from 1 to 1000", |builder, text| {
        builder.continuous(continuous_rate(text)?)
    }),
    setting!("_CONTINUOUS_INTERVAL", "a time from 1s on, as 60s", |builder, text| {
        let intervals = SHORTEST_INTERVAL..=LONGEST_INTERVAL;
        builder.continuous_interval(time(text).filter(|interval| intervals.contains(interval))?)
    }),
    setting!("_REFERENCES", "on, off, or limits as one_in=16|cpu=0.2%", |builder, text| {
        let (one_in, cpu_percent) = reference_limits(text)?;
        builder.references(one_in, cpu_percent)
    }),
    setting!("_HEAP", ON_OR_OFF, |builder, text| builder.heap(is_on(text)?)),
];

impl Builder {
    /// Applies the settings in environment variables. Variables that are unset or empty change nothing. One whose name
    /// begins with `TRACING_PROFILING_` and is not known is logged as a warning.
    ///
    /// # Errors
    ///
    /// If the value of a variable is malformed. The error shows where and why.
    pub fn with_env(self) -> Result<Self, Error> {
        self.warn_of_unknown(names_of_process()).with_variables(of_process)
    }

    /// Like [`with_env`](Self::with_env), but logs a malformed value as a warning.
    pub(crate) fn with_usable_env(self) -> Result<Self, Error> {
        self.warn_of_unknown(names_of_process()).with_each(of_process, Self::without)
    }

    /// Goes on without the value of a variable, in whose place is what certainly does no harm.
    fn without(self, error: Error) -> Result<Self, Error> {
        let variable = error.subject();
        let is_setting = SETTINGS.iter().any(|setting| setting.variable == variable);
        let (mut builder, instead) = match variable {
            "TRACING_PROFILING_SYMBOLS" => (self.symbols(false), "names of functions are not read"),
            "TRACING_PROFILING_SPAN_FIELDS" => {
                (self.span_fields([""]), "no values of fields are shown")
            }
            _ if is_setting && !["TRACING_PROFILING_REDACT", RULES].contains(&variable) => {
                (self, "it has no effect")
            }
            // It may have been to turn profiling off, to hide names, or to send profiles elsewhere.
            _ => (self.rules(Rules::new([])), "profiling is off"),
        };
        let message = format!("{variable} cannot be used, so {instead}: {}", error.in_one_line());
        let warning = LogEvent::warning(LogKind::Malformed, message);
        builder.warn(LogEvent { variable: Some(variable.into()), ..warning });
        Ok(builder)
    }

    /// Whether a value was malformed, which has to be said even if nothing else runs.
    pub(crate) fn has_malformed(&self) -> bool {
        self.warnings.iter().any(|warning| warning.kind == LogKind::Malformed)
    }

    fn warn_of_unknown(mut self, names: impl Iterator<Item = String>) -> Self {
        let is_ours = |name: &String| {
            name.strip_prefix(RULES).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        };
        let is_known = |name: &String| SETTINGS.iter().any(|setting| setting.variable == name);
        let mut unknown: Vec<_> = names.filter(is_ours).filter(|name| !is_known(name)).collect();
        unknown.sort();
        for name in unknown {
            let rest = SETTINGS.iter().filter_map(|known| known.variable.strip_prefix(RULES));
            let known: Vec<_> = rest.filter(|rest| !rest.is_empty()).collect();
            let name = shortened(&name);
            let message = format!(
                "{name} is not a known variable and has no effect; known are {RULES} and, with the same beginning, {}",
                known.join(", ")
            );
            let warning = LogEvent::warning(LogKind::UnknownVariable, message);
            self.warn(LogEvent { variable: Some(name.into()), ..warning });
        }
        self
    }

    /// Like [`with_env`](Self::with_env), from any source of variables. An error is a value that is not valid Unicode.
    pub(crate) fn with_variables(
        self,
        variable: impl Fn(&'static str) -> Result<Option<String>, String>,
    ) -> Result<Self, Error> {
        self.with_each(variable, |_, error| Err(error))
    }

    /// Applies each variable; `wrong` handles a malformed value. Each is tried apart, as a failure takes its builder.
    fn with_each(
        self,
        variable: impl Fn(&'static str) -> Result<Option<String>, String>,
        wrong: fn(Self, Error) -> Result<Self, Error>,
    ) -> Result<Self, Error> {
        let mut builder = self;
        for Setting { variable: name, expected, set } in SETTINGS {
            let apply = |builder: Self| {
                let Some(text) = text_of(name, variable(name))? else { return Ok(builder) };
                let expected = || Err(Error::setting(name, text.trim(), expected));
                set(builder, &text).unwrap_or_else(expected)
            };
            builder = match apply(Self::new()) {
                Ok(_) => apply(builder)?,
                Err(error) => wrong(builder, error)?,
            };
        }
        match Self::new().with_exporter(&variable) {
            Ok(_) => builder.with_exporter(&variable),
            Err(error) => wrong(builder, error),
        }
    }

    fn with_exporter(
        mut self,
        variable: &impl Fn(&'static str) -> Result<Option<String>, String>,
    ) -> Result<Self, Error> {
        let get = |name| text_of(name, variable(name));
        let disabled = get(SDK_DISABLED)?;
        let is_disabled = disabled.is_some_and(|text| text.trim().eq_ignore_ascii_case("true"));
        let exporter = get(EXPORTER)?;
        let is_otlp = match exporter.as_deref().map(str::trim) {
            None => {
                // One that cannot be read is an error of the exporter.
                let endpoint = ENDPOINTS.into_iter().rfind(|name| !matches!(get(name), Ok(None)));
                self.endpoint = endpoint.filter(|_| !is_disabled);
                cfg!(feature = "_otlp") && endpoint.is_some()
            }
            Some("otlp") if is_disabled || cfg!(feature = "_otlp") => true,
            Some("otlp") => {
                let expected =
                    "directory or none; otlp needs the feature `otlp-http` or `otlp-grpc`";
                return Err(Error::setting(EXPORTER, "otlp", expected));
            }
            Some("directory") => false,
            Some("none") => return Ok(self.rules(Rules::new([]))),
            Some(other) => return Err(Error::setting(EXPORTER, other, "otlp, directory or none")),
        };
        match is_otlp {
            // Files in a directory are independent of OpenTelemetry.
            true if is_disabled => Ok(self.rules(Rules::new([]))),
            #[cfg(feature = "_otlp")]
            true => {
                let fallback = get("TRACING_PROFILING_DIR")?.map(|_| self.files);
                let exporter = OtlpExporter::builder();
                let exporter = fallback.into_iter().fold(exporter, OtlpBuilder::fallback_directory);
                let exporter = Box::new(exporter.build_with(variable)?);
                let files = Directory::new("profiles");
                Ok(Self { env_exporter: Opaque(Some(exporter)), files, ..self })
            }
            _ => Ok(self),
        }
    }
}

fn names_of_process() -> impl Iterator<Item = String> {
    env::vars_os().filter_map(|(name, _)| name.into_string().ok())
}

fn text_of(
    name: &'static str,
    value: Result<Option<String>, String>,
) -> Result<Option<String>, Error> {
    match value {
        Ok(value) => Ok(value.filter(|value| !value.trim().is_empty())),
        Err(value) => Err(Error::setting(name, &value, "text in UTF-8")),
    }
}

fn formats(text: &str) -> Option<Vec<Format>> {
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    let formats: Option<Vec<_>> = names.map(|name| name.parse().ok()).collect();
    formats.filter(|formats| !formats.is_empty())
}

fn is_on(text: &str) -> Option<bool> {
    matches!(text, "on" | "off").then_some(text == "on")
}

fn within(text: &str, allowed: RangeInclusive<u32>) -> Option<u32> {
    text.parse().ok().filter(|number| allowed.contains(number))
}

fn time(text: &str) -> Option<Duration> {
    if text == "0" { Some(Duration::ZERO) } else { humantime::parse_duration(text).ok() }
}

/// Parses names of fields, separated by commas. `none` alone is no name.
fn field_names(variable: &'static str, text: &str) -> Result<Vec<String>, Error> {
    if text.trim() == "none" {
        return Ok(Vec::new());
    }
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | ':');
    let mut names = Vec::new();
    let mut begin = 0;
    for part in text.split(',') {
        let name = part.trim();
        if let Some((at, other)) = name.char_indices().find(|(_, c)| !is_part(*c)) {
            let at = begin + (part.len() - part.trim_start().len()) + at;
            let problem = format!("`{name}` is no name of a field, because of {other:?}");
            return Err(Error::text(variable, text, at, problem));
        }
        names.extend((!name.is_empty()).then(|| name.to_owned()));
        begin += part.len() + 1;
    }
    Ok(names)
}

/// Parses limits such as `one_in=16|cpu=0.2%`: one in how many spans, and percent of the CPU time. 0 if it is off.
fn reference_limits(text: &str) -> Option<(u32, f64)> {
    if let Some(is_on) = is_on(text) {
        return Some(if is_on { (16, 0.2) } else { (0, 0.0) });
    }
    let (mut one_in, mut percent) = (None, None);
    for limit in text.split('|') {
        let (name, limit) = limit.split_once('=')?;
        match name.trim() {
            "one_in" if one_in.is_none() => one_in = Some(within(limit.trim(), 1..=1_000_000)?),
            "cpu" if percent.is_none() => {
                let share: Option<f64> = limit.trim().strip_suffix('%')?.trim_end().parse().ok();
                percent = Some(share.filter(|share| (0.1..=100.0).contains(share))?);
            }
            _ => return None,
        }
    }
    Some((one_in.unwrap_or(16), percent.unwrap_or(0.2)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::ShownFields;
    use crate::sampler::Source;

    fn read(variables: &[(&str, &str)]) -> Result<Builder, Error> {
        Builder::new().with_variables(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            Ok(found.map(|(_, value)| (*value).to_owned()))
        })
    }

    #[test]
    fn without_variables_the_defaults_apply() {
        let empty: Vec<_> = SETTINGS.iter().map(|setting| (setting.variable, " ")).collect();
        for variables in [&[][..], &empty] {
            let builder = read(variables).unwrap();
            assert_eq!(format!("{builder:?}"), format!("{:?}", Builder::new()));
        }
    }

    #[test]
    fn unknown_variables_are_named_in_a_warning() {
        let names = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned());
            let warnings = Builder::new().warn_of_unknown(names).warnings;
            warnings.into_iter().map(|warning| warning.message).collect::<Vec<_>>()
        };
        let known: Vec<_> = SETTINGS.iter().map(|setting| setting.variable).collect();
        assert!(names(&known).is_empty());
        assert!(names(&["TRACING_PROFILINGS", "TRACING", "PATH"]).is_empty());
        let warnings = names(&[
            "TRACING_PROFILING_TRESHOLD",
            "TRACING_PROFILING_RATE",
            "TRACING_PROFILING_A\nb",
        ]);
        let [first, second] = warnings.as_slice() else { panic!("{warnings:?}") };
        assert!(first.starts_with("TRACING_PROFILING_A\\nb is not a known variable"), "{first}");
        assert!(
            second.starts_with("TRACING_PROFILING_TRESHOLD is not a known variable"),
            "{second}"
        );
        assert!(second.ends_with("_SOURCE, _OFF_CPU, _SIGNAL, _SAMPLING_DELAY, _RATE, _STACK_BYTES, \
            _CPU_BUDGET, _MEMORY, _DIR, _FORMATS, _TRACE_URL, _SOURCE_URL, _SPAN_FIELDS, _REDACT, _FULL_PATHS, \
            _SYMBOLS, _ALLOC_SAMPLE_INTERVAL, _CONTINUOUS, _CONTINUOUS_INTERVAL, _REFERENCES, _HEAP"), "{second}");
    }

    #[cfg(not(feature = "_otlp"))]
    #[test]
    fn an_endpoint_without_the_feature_for_it_is_noted() {
        let unused = |variables: &[(&str, &str)]| read(variables).unwrap().endpoint;
        let (all, profiles) = (ENDPOINTS[0], ENDPOINTS[1]);
        assert_eq!(unused(&[]), None);
        assert_eq!(unused(&[(all, "http://a")]), Some(all));
        assert_eq!(unused(&[(all, "http://a"), (profiles, "http://b")]), Some(profiles));
        assert_eq!(unused(&[(all, "http://a"), (EXPORTER, "directory")]), None);
        assert_eq!(unused(&[(all, "http://a"), (SDK_DISABLED, "true")]), None);
    }

    #[test]
    fn each_variable_changes_its_setting() {
        let builder = read(&[
            ("TRACING_PROFILING", "shop=100ms"),
            ("TRACING_PROFILING_SOURCE", "timer"),
            ("TRACING_PROFILING_SIGNAL", "40"),
            ("TRACING_PROFILING_OFF_CPU", "off"),
            ("TRACING_PROFILING_RATE", "99"),
            ("TRACING_PROFILING_STACK_BYTES", " 8192 "),
            ("TRACING_PROFILING_CPU_BUDGET", "5"),
            ("TRACING_PROFILING_MEMORY", "64 MiB"),
            ("TRACING_PROFILING_SPAN_FIELDS", "http.route, tenant,"),
            ("TRACING_PROFILING_REDACT", r"acme_\w+; ^GET (.*)"),
            ("TRACING_PROFILING_FULL_PATHS", "on"),
            ("TRACING_PROFILING_SYMBOLS", "off"),
            ("TRACING_PROFILING_ALLOC_SAMPLE_INTERVAL", "4000"),
            ("TRACING_PROFILING_CONTINUOUS", "on"),
            ("TRACING_PROFILING_CONTINUOUS_INTERVAL", "10s"),
            ("TRACING_PROFILING_HEAP", "on"),
        ]);
        let redaction = Redaction::new().hide(r"acme_\w+").unwrap().hide("^GET (.*)").unwrap();
        let redaction = redaction.full_paths(true);
        let by_hand = Builder::new()
            .rules("shop=100ms".parse().unwrap())
            .source(Source::Timer)
            .timer_signal(40)
            .off_cpu(false)
            .rate(99)
            .stack_bytes(8192)
            .cpu_budget(5)
            .memory(64 << 20)
            .span_fields(["http.route", "tenant"])
            .redact(redaction)
            .symbols(false)
            .alloc_sample_interval(4000)
            .continuous(49)
            .continuous_interval(Duration::from_secs(10))
            .heap(true);
        assert_eq!(format!("{:?}", builder.unwrap()), format!("{by_hand:?}"));
    }

    #[test]
    fn an_interval_is_at_most_a_day() {
        let of = |interval| format!("{:?}", Builder::new().continuous_interval(interval));
        assert_eq!(of(Duration::MAX), of(Duration::from_secs(86_400)));
        assert_eq!(of(Duration::ZERO), of(Duration::from_secs(1)));
    }

    #[test]
    fn the_continuous_profile_is_on_off_or_a_rate() {
        for (text, rate) in [("on", 49), ("off", 0), ("97", 97), (" 1000 ", 1_000)] {
            let builder = read(&[("TRACING_PROFILING_CONTINUOUS", text)]).unwrap();
            let by_hand = Builder::new().continuous(rate);
            assert_eq!(format!("{builder:?}"), format!("{by_hand:?}"), "{text}");
        }
        for (name, value) in [
            ("TRACING_PROFILING_CONTINUOUS", "0"),
            ("TRACING_PROFILING_CONTINUOUS", "1001"),
            ("TRACING_PROFILING_CONTINUOUS", "yes"),
            ("TRACING_PROFILING_CONTINUOUS_INTERVAL", "999ms"),
            ("TRACING_PROFILING_CONTINUOUS_INTERVAL", "0"),
        ] {
            let error = read(&[(name, value)]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name} is `{value}`: expected ")), "{error}");
        }
    }

    #[test]
    fn formats_are_a_list_of_names() {
        assert_eq!(formats(" html, folded,"), Some(vec![Format::Html, Format::Folded]));
        assert_eq!((formats("html,pdf"), formats(","), formats("")), (None, None, None));
    }

    #[test]
    fn the_directory_has_the_formats_of_the_environment() {
        let formats = ("TRACING_PROFILING_FORMATS", "folded,html");
        let builder = read(&[("TRACING_PROFILING_DIR", "/var/profiles"), formats]).unwrap();
        let expected = Directory::new("/var/profiles").with_formats([Format::Folded, Format::Html]);
        assert_eq!(format!("{:?}", builder.files), format!("{expected:?}"));
        assert!(builder.finished().unwrap().warnings.is_empty());
        let builder = read(&[formats]).unwrap().exporter(Directory::new("elsewhere"));
        let warnings = builder.finished().unwrap().warnings;
        assert!(
            warnings[0].message.starts_with("TRACING_PROFILING_FORMATS has no effect"),
            "{warnings:?}"
        );
    }

    #[test]
    fn the_environment_can_only_hide_more_in_any_order_of_calls() {
        let variables = |name: &str| match name {
            "TRACING_PROFILING_REDACT" => Ok(Some("acme".to_owned())),
            "TRACING_PROFILING_FULL_PATHS" => Ok(Some("on".to_owned())),
            _ => Ok(None),
        };
        let by_code = || Redaction::new().hide("shop").unwrap();
        let first = Builder::new().redact(by_code()).with_variables(variables).unwrap();
        let last = Builder::new().with_variables(variables).unwrap().redact(by_code());
        let by_variables = || Redaction::new().hide("acme").unwrap().full_paths(true);
        for (builder, all) in
            [(first, by_code().and(by_variables())), (last, by_variables().and(by_code()))]
        {
            assert_eq!(format!("{builder:?}"), format!("{:?}", Builder::new().redact(all)));
        }
        // What either the code or the environment hides stays hidden.
        let short = by_code().full_paths(false);
        let builder = Builder::new().redact(short.clone()).with_variables(variables).unwrap();
        let both = Builder::new().redact(short.hide("acme").unwrap());
        assert_eq!(format!("{builder:?}"), format!("{both:?}"));
        let builder = read(&[("TRACING_PROFILING_FULL_PATHS", "off")]).unwrap();
        let builder = builder.redact(Redaction::new().full_paths(true));
        let short = Builder::new().redact(Redaction::new().full_paths(false));
        assert_eq!(format!("{builder:?}"), format!("{short:?}"));
    }

    #[test]
    fn a_malformed_value_is_replaced_by_what_does_no_harm() {
        let read = |name: &str, value: &str| {
            let variables = |variable: &str| match variable {
                "TRACING_PROFILING_STACK_BYTES" => Ok(Some("5000".to_owned())),
                _ if variable == name => Ok(Some(value.to_owned())),
                _ => Ok(None),
            };
            let builder = Builder::new().with_each(variables, Builder::without).unwrap();
            assert_eq!(
                (builder.source.threads.stack_bytes, builder.warnings.len()),
                (5_000, 1),
                "{name}"
            );
            let message = builder.warnings[0].message.clone();
            assert!(message.starts_with(&format!("{name} cannot be used, so ")), "{message}");
            assert!(!message.contains('\n') && message.contains(value), "{message}");
            builder
        };
        for (name, value) in [
            ("TRACING_PROFILING", "250ms|"),
            ("TRACING_PROFILING_REDACT", "("),
            ("OTEL_PROFILES_EXPORTER", "console"),
        ] {
            assert!(read(name, value).rules.is_off(), "{name}");
        }
        let builder = read("TRACING_PROFILING_RATE", "often");
        assert!(!builder.rules.is_off() && builder.symbols == cfg!(feature = "symbols"));
        let builder = read("TRACING_PROFILING_SYMBOLS", "of");
        assert!(!builder.symbols && !builder.rules.is_off());
        let builder = read("TRACING_PROFILING_SPAN_FIELDS", "user id");
        assert!(builder.shown_fields == ShownFields::new([""]) && !builder.rules.is_off());
    }

    #[test]
    fn the_exporter_can_be_chosen() {
        let exporter = |value| read(&[("OTEL_PROFILES_EXPORTER", value)]);
        assert!(exporter("none").unwrap().rules.is_off());
        assert!(!exporter("directory").unwrap().rules.is_off());
        assert!(exporter("console").unwrap_err().to_string().contains("directory or none"));
        assert_eq!(exporter("otlp").is_ok(), cfg!(feature = "_otlp"));
    }

    #[test]
    fn nothing_is_sent_if_opentelemetry_is_disabled() {
        let is_off = |disabled, variables: &[_]| {
            let variables = [&[("OTEL_SDK_DISABLED", disabled)], variables].concat();
            read(&variables).unwrap().rules.is_off()
        };
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318");
        assert!(is_off("True", &[("OTEL_PROFILES_EXPORTER", "otlp")]));
        assert_eq!(is_off("true", &[endpoint]), cfg!(feature = "_otlp"));
        assert!(!is_off("false", &[endpoint]));
        assert!(!is_off("true", &[]));
        assert!(!is_off("true", &[endpoint, ("OTEL_PROFILES_EXPORTER", "directory")]));
    }

    #[cfg(feature = "_otlp")]
    #[test]
    fn an_endpoint_selects_otlp() {
        let is_otlp = |variables: &[_]| read(variables).unwrap().env_exporter.0.is_some();
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318");
        let own = ("OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT", "http://collector:4318");
        assert!(!is_otlp(&[]));
        assert!(is_otlp(&[endpoint]));
        assert!(is_otlp(&[own]));
        assert!(is_otlp(&[("OTEL_PROFILES_EXPORTER", "otlp")]));
        assert!(!is_otlp(&[endpoint, ("OTEL_PROFILES_EXPORTER", "directory")]));
        let error = read(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "collector port")]).unwrap_err();
        assert!(error.to_string().contains("OTEL_EXPORTER_OTLP_ENDPOINT"), "{error}");
    }

    #[test]
    fn reference_limits_are_shares_or_off() {
        let references = |text| read(&[("TRACING_PROFILING_REFERENCES", text)]);
        let expected =
            |one_in, percent| format!("{:?}", Builder::new().references(one_in, percent));
        for (text, one_in, percent) in [
            ("on", 16, 0.2),
            ("off", 0, 0.0),
            ("one_in=7", 7, 0.2),
            (" cpu = 3 % ", 16, 3.0),
            ("cpu=100%|one_in=1", 1, 100.0),
        ] {
            let read = format!("{:?}", references(text).unwrap());
            assert_eq!(read, expected(one_in, percent), "{text}");
        }
        for text in [
            "maybe",
            "one_in=0",
            "one_in=2|one_in=3",
            "cpu",
            "cpu=1",
            "cpu=0.01%",
            "cpu=101%",
            "rate=3",
            "one_in=2,",
        ] {
            assert_eq!(
                references(text).unwrap_err().to_string(),
                format!(
                    "TRACING_PROFILING_REFERENCES is `{text}`: expected on, off, or limits as \
                     one_in=16|cpu=0.2%"
                )
            );
        }
    }

    #[test]
    fn malformed_values_are_reported_with_their_variable() {
        let error = read(&[("TRACING_PROFILING_RATE", "often")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "TRACING_PROFILING_RATE is `often`: expected samples a second, from 1 to 10000"
        );
        for (name, value) in [
            ("MEMORY", "128"),
            ("SOURCE", "ebpf"),
            ("SIGNAL", "0"),
            ("SIGNAL", "65"),
            ("SIGNAL", "SIGUSR1"),
            ("OFF_CPU", "no"),
            ("RATE", "0"),
            ("RATE", "10001"),
            ("STACK_BYTES", "1"),
            ("CPU_BUDGET", "-1"),
            ("MEMORY", "much"),
            ("MEMORY", "-1"),
            ("FORMATS", "pdf"),
            ("TRACE_URL", "javascript:{trace_id}"),
            ("SOURCE_URL", "javascript:{file}"),
            ("REDACT", "a;["),
            ("FULL_PATHS", "long"),
            ("SYMBOLS", "1"),
            ("ALLOC_SAMPLE_INTERVAL", "512KiB"),
            ("HEAP", "yes"),
        ] {
            let name = format!("TRACING_PROFILING_{name}");
            assert!(read(&[(&name, value)]).is_err(), "{name}={value}");
        }
        let error = read(&[("TRACING_PROFILING", "shop=")]).unwrap_err();
        assert!(error.to_string().contains("shop=\n"), "{error}");
        let error = read(&[("TRACING_PROFILING_REDACT", r"acme_\w+;(users")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot read TRACING_PROFILING_REDACT: found open group without closing ')'\n  \
             acme_\\w+;(users\n           ^"
        );
        let error =
            read(&[("TRACING_PROFILING_SPAN_FIELDS", "method, user id,tenant")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot read TRACING_PROFILING_SPAN_FIELDS: `user id` is no name of a field, because of ' '\n  \
             method, user id,tenant\n              ^"
        );
        let not_unicode = Builder::new().with_variables(|_| Err("\u{fffd}".to_owned()));
        assert!(not_unicode.unwrap_err().to_string().contains("UTF-8"));
    }
}

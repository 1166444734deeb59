//! The arrangements.

use std::any::TypeId;

use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Event, Metadata, Subscriber, span};
use tracing_profiling::ProfilingLayer;
use tracing_subscriber::filter::{DynFilterFn, FilterFn, Targets};
use tracing_subscriber::prelude::*;
use tracing_subscriber::registry::{LookupSpan, Registry};
use tracing_subscriber::{EnvFilter, Layer, fmt, registry, reload};

use crate::traffic::{Outputs, level_number};

/// The spans that the profiling layer wants and gets.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    ToDebug,
    /// Another layer disables the others for all layers, or this layer has a filter.
    ToInfo,
    /// No other layer wants those of a library.
    Own,
    /// No other layer wants any.
    Nothing,
}

impl Wanted {
    /// Sorted. Each is there 16 times.
    pub(crate) fn names(self, has_debug: bool) -> Vec<String> {
        let names: &[&str] = match self {
            Self::ToDebug | Self::ToInfo => {
                &["elsewhere", "elsewhere", "elsewhere", "info", "send"]
            }
            Self::Own => &["elsewhere", "elsewhere", "elsewhere", "info"],
            Self::Nothing => &[],
        };
        let debug = has_debug.then_some("debug");
        let names = debug.iter().chain(names);
        names.flat_map(|name| std::iter::repeat_n((*name).to_owned(), 16)).collect()
    }

    pub(crate) fn is_of_others(self) -> bool {
        matches!(self, Self::Own | Self::Nothing)
    }
}

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) wanted: Wanted,
    /// The program's levels are what the layers need, and no more.
    pub(crate) is_free: bool,
    /// The log says that the layer cannot filter itself.
    pub(crate) warns: bool,
    /// Spans that only this layer wants are the current ones, and have no OpenTelemetry span.
    pub(crate) hides: bool,
    /// Without this layer, too, the registry creates `DEBUG` spans that no layer gets, or this layer is hidden.
    pub(crate) is_loose: bool,
    /// The rules are these, and no others are tried.
    pub(crate) only_rules: Option<&'static str>,
    pub(crate) with: fn(&Outputs, ProfilingLayer) -> Dispatch,
    pub(crate) without: fn(&Outputs) -> Dispatch,
}

/// Rules that profile spans up to `DEBUG` that are enabled, and rules that enable them, too.
const RULES: [&str; 2] = ["always|error", "always|error|level<=debug"];

impl Case {
    /// The rules to try: all, or those for which the case says most.
    pub(crate) fn rules(&self, is_thorough: bool) -> Vec<&'static str> {
        match self.only_rules {
            Some(rules) => vec![rules],
            // `level<=` names them.
            None if self.wanted.is_of_others() => vec![RULES[0]],
            None if is_thorough => RULES.to_vec(),
            None => vec![RULES[usize::from(self.hides)]],
        }
    }
}

/// The level that rules enable.
pub(crate) fn level_of(rules: &str) -> u8 {
    level_number(if rules == RULES[1] { "debug" } else { "info" })
}

fn info() -> EnvFilter {
    EnvFilter::new("info")
}

/// Hides the spans of a library.
fn own() -> EnvFilter {
    EnvFilter::new("warn,arrangements=info")
}

fn own_targets() -> Targets {
    Targets::new().with_default(LevelFilter::WARN).with_target("arrangements", LevelFilter::INFO)
}

/// A `fmt` layer; its lines have no time.
macro_rules! lines {
    ($outputs:expr) => {{
        let log = $outputs.writer();
        fmt::layer().without_time().with_ansi(false).with_writer(move || log.clone())
    }};
}

macro_rules! opentelemetry {
    ($outputs:expr) => {
        tracing_opentelemetry::layer().with_tracer($outputs.tracer())
    };
}

macro_rules! finished {
    ($outputs:expr) => {{
        let log = $outputs.writer();
        fmt().without_time().with_ansi(false).with_writer(move || log.clone())
    }};
}

/// A subscriber around a registry that does not pass on `register_filter`.
struct Wrapper(Registry);

impl Subscriber for Wrapper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.0.enabled(metadata)
    }

    fn new_span(&self, span: &span::Attributes<'_>) -> span::Id {
        self.0.new_span(span)
    }

    fn record(&self, span: &span::Id, values: &span::Record<'_>) {
        self.0.record(span, values);
    }

    fn record_follows_from(&self, span: &span::Id, follows: &span::Id) {
        self.0.record_follows_from(span, follows);
    }

    fn event(&self, event: &Event<'_>) {
        self.0.event(event);
    }

    fn enter(&self, span: &span::Id) {
        self.0.enter(span);
    }

    fn exit(&self, span: &span::Id) {
        self.0.exit(span);
    }

    fn clone_span(&self, id: &span::Id) -> span::Id {
        self.0.clone_span(id)
    }

    fn try_close(&self, id: span::Id) -> bool {
        self.0.try_close(id)
    }

    fn current_span(&self) -> tracing_core::span::Current {
        self.0.current_span()
    }

    // Without this, spans with children never close.
    unsafe fn downcast_raw(&self, id: TypeId) -> Option<*const ()> {
        // SAFETY: as the registry answers.
        unsafe { self.0.downcast_raw(id) }
    }
}

impl<'a> LookupSpan<'a> for Wrapper {
    type Data = <Registry as LookupSpan<'a>>::Data;

    fn span_data(&'a self, id: &span::Id) -> Option<Self::Data> {
        self.0.span_data(id)
    }
}

type Boxed<S> = Box<dyn Layer<S> + Send + Sync>;

macro_rules! cases {
    ($($name:literal: $wanted:ident $free:ident $($more:ident)*,
        |$outputs:pat_param, $profiling:ident| $with:expr, $without:expr;)*) => {
        pub(crate) const CASES: &[Case] = &[$(Case {
            name: $name,
            wanted: Wanted::$wanted,
            is_free: cases!(@$free),
            warns: cases!(@warns $($more)*),
            hides: cases!(@hides $($more)*),
            is_loose: cases!(@loose $($more)*),
            only_rules: cases!(@rules $($more)*),
            with: |$outputs, $profiling| Dispatch::new($with),
            without: |$outputs| Dispatch::new($without),
        }),*];
    };
    (@free) => { true };
    (@costs) => { false };
    (@warns warns $($other:ident)*) => { true };
    (@hides hides $($other:ident)*) => { true };
    (@loose loose $($other:ident)*) => { true };
    (@rules info) => { Some("always|error|level<=info") };
    (@rules $($other:ident)*) => { None };
    (@$what:ident $first:ident $($other:ident)*) => { cases!(@$what $($other)*) };
    (@$what:ident) => { false };
}

cases! {
    "registry": ToDebug costs, |_, p| registry().with(p), registry();
    "fmt to info, then ours": ToDebug free,
        |s, p| registry().with(lines!(s).with_filter(info())).with(p),
        registry().with(lines!(s).with_filter(info()));
    "ours, then fmt to info": ToDebug free,
        |s, p| registry().with(p).with(lines!(s).with_filter(info())),
        registry().with(lines!(s).with_filter(info()));
    "fmt to a level, then ours": ToDebug free,
        |s, p| registry().with(lines!(s).with_filter(LevelFilter::INFO)).with(p),
        registry().with(lines!(s).with_filter(LevelFilter::INFO));
    "fmt of some targets, then ours": Own free,
        |s, p| registry().with(lines!(s).with_filter(EnvFilter::new("warn,arrangements=debug"))).with(p),
        registry().with(lines!(s).with_filter(EnvFilter::new("warn,arrangements=debug")));
    "fmt of a span, then ours": ToDebug costs,
        |s, p| registry().with(lines!(s).with_filter(EnvFilter::new("warn,[debug]=trace"))).with(p),
        registry().with(lines!(s).with_filter(EnvFilter::new("warn,[debug]=trace")));
    "fmt, then ours": ToDebug free, |s, p| registry().with(lines!(s)).with(p), registry().with(lines!(s));
    "ours, then fmt": ToDebug free, |s, p| registry().with(p).with(lines!(s)), registry().with(lines!(s));
    "global filter, fmt, ours": ToInfo costs,
        |s, p| registry().with(info()).with(lines!(s)).with(p), registry().with(info()).with(lines!(s));
    "fmt, global filter, ours": ToInfo costs,
        |s, p| registry().with(lines!(s)).with(info()).with(p), registry().with(lines!(s)).with(info());
    "fmt, ours, global filter": ToInfo costs,
        |s, p| registry().with(lines!(s)).with(p).with(info()), registry().with(lines!(s)).with(info());
    "ours, global filter, fmt": ToInfo costs,
        |s, p| registry().with(p).with(info()).with(lines!(s)), registry().with(info()).with(lines!(s));
    "global filter, ours, fmt": ToInfo costs,
        |s, p| registry().with(info()).with(p).with(lines!(s)), registry().with(info()).with(lines!(s));
    "fmt to info, ours, otel to info": ToDebug free hides,
        |s, p| registry()
            .with(lines!(s).with_filter(info()))
            .with(p)
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO)),
        registry()
            .with(lines!(s).with_filter(info()))
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO));
    "fmt to info, ours to info, otel to info": ToInfo free info,
        |s, p| registry()
            .with(lines!(s).with_filter(info()))
            .with(p)
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO)),
        registry()
            .with(lines!(s).with_filter(info()))
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO));
    "fmt to info, ours, otel to debug": ToDebug free,
        |s, p| registry()
            .with(lines!(s).with_filter(info()))
            .with(p)
            .with(opentelemetry!(s).with_filter(LevelFilter::DEBUG)),
        registry()
            .with(lines!(s).with_filter(info()))
            .with(opentelemetry!(s).with_filter(LevelFilter::DEBUG));
    "fmt to info, ours, otel": ToDebug free,
        |s, p| registry().with(lines!(s).with_filter(info())).with(p).with(opentelemetry!(s)),
        registry().with(lines!(s).with_filter(info())).with(opentelemetry!(s));
    "ours, otel to info, fmt to info": ToDebug free hides,
        |s, p| registry()
            .with(p)
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(lines!(s).with_filter(info())),
        registry()
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(lines!(s).with_filter(info()));
    "otel to info, fmt to info, ours": ToDebug free hides,
        |s, p| registry()
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(lines!(s).with_filter(info()))
            .with(p),
        registry()
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(lines!(s).with_filter(info()));
    "ours, otel": ToDebug free,
        |s, p| registry().with(p).with(opentelemetry!(s)), registry().with(opentelemetry!(s));
    "fmt to info, Option": ToDebug free,
        |s, p| registry().with(lines!(s).with_filter(info())).with(Some(p)),
        registry().with(lines!(s).with_filter(info()));
    "Option, fmt": ToDebug free,
        |s, p| registry().with(Some(p)).with(lines!(s)), registry().with(lines!(s));
    "fmt to info, Box": ToDebug free,
        |s, p| registry().with(lines!(s).with_filter(info())).with(Box::new(p) as Boxed<_>),
        registry().with(lines!(s).with_filter(info()));
    "Box, fmt": ToDebug free,
        |s, p| registry().with(Box::new(p) as Boxed<_>).with(lines!(s)), registry().with(lines!(s));
    "Vec of fmt to info and ours": ToDebug free,
        |s, p| registry().with(vec![Box::new(lines!(s).with_filter(info())) as Boxed<_>, Box::new(p)]),
        registry().with(vec![Box::new(lines!(s).with_filter(info())) as Boxed<_>]);
    "Vec: ours, then fmt to info": ToDebug free,
        |s, p| registry().with(vec![Box::new(p) as Boxed<_>, Box::new(lines!(s).with_filter(info()))]),
        registry().with(vec![Box::new(lines!(s).with_filter(info())) as Boxed<_>]);
    "Vec of fmt and ours": ToDebug costs,
        |s, p| registry().with(vec![Box::new(lines!(s)) as Boxed<_>, Box::new(p)]),
        registry().with(vec![Box::new(lines!(s)) as Boxed<_>]);
    "Vec: ours, then fmt": ToDebug costs,
        |s, p| registry().with(vec![Box::new(p) as Boxed<_>, Box::new(lines!(s))]),
        registry().with(vec![Box::new(lines!(s)) as Boxed<_>]);
    "ours.and_then(fmt to info)": ToInfo costs,
        |s, p| registry().with(p.and_then(lines!(s).with_filter(info()))),
        registry().with(lines!(s).with_filter(info()));
    "fmt to info.and_then(ours)": ToDebug costs,
        |s, p| registry().with(lines!(s).with_filter(info()).and_then(p)),
        registry().with(lines!(s).with_filter(info()));
    "ours.and_then(fmt)": ToDebug costs,
        |s, p| registry().with(p.and_then(lines!(s))), registry().with(lines!(s));
    "fmt.and_then(ours)": ToDebug costs,
        |s, p| registry().with(lines!(s).and_then(p)), registry().with(lines!(s));
    "otel to info, fmt.and_then(ours)": ToDebug free hides,
        |s, p| registry()
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(lines!(s).and_then(p)),
        registry().with(opentelemetry!(s).with_filter(LevelFilter::INFO)).with(lines!(s));
    "otel to info, ours.and_then(fmt to info)": ToDebug free hides,
        |s, p| registry()
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(p.and_then(lines!(s).with_filter(info()))),
        registry()
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(lines!(s).with_filter(info()));
    "fmt to info, reload": ToDebug costs warns loose,
        |s, p| registry().with(lines!(s).with_filter(info())).with(reload::Layer::new(p).0),
        registry().with(lines!(s).with_filter(info()));
    "reload, fmt": ToDebug costs warns loose,
        |s, p| registry().with(reload::Layer::new(p).0).with(lines!(s)), registry().with(lines!(s));
    "reload, otel to info, fmt to info": ToDebug costs warns hides loose,
        |s, p| registry()
            .with(reload::Layer::new(p).0)
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(lines!(s).with_filter(info())),
        registry()
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(lines!(s).with_filter(info()));
    "fmt to info, ours, reload of a filter": ToDebug free,
        |s, p| registry().with(lines!(s).with_filter(reload::Layer::new(info()).0)).with(p),
        registry().with(lines!(s).with_filter(reload::Layer::new(info()).0));
    "fmt to info, reload swapped in": ToDebug costs loose,
        |s, p| {
            let (layer, handle) = reload::Layer::new(None::<ProfilingLayer>);
            let subscriber = registry().with(lines!(s).with_filter(info())).with(layer);
            handle.reload(Some(p)).unwrap();
            subscriber
        },
        registry().with(lines!(s).with_filter(info()));
    "otel to info, reload swapped in, recorder": ToDebug costs hides loose,
        |s, p| {
            let (layer, handle) = reload::Layer::new(None::<ProfilingLayer>);
            let subscriber = registry()
                .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
                .with(layer)
                .with(s.recorder().with_filter(LevelFilter::INFO));
            handle.reload(Some(p)).unwrap();
            subscriber
        },
        registry()
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO))
            .with(s.recorder().with_filter(LevelFilter::INFO));
    "fmt to info, ours with_filter(info)": ToInfo costs,
        |s, p| registry()
            .with(lines!(s).with_filter(info()))
            .with(p.with_filter(LevelFilter::INFO)),
        registry().with(lines!(s).with_filter(info()));
    "fmt of some targets, ours with_filter(info)": ToInfo costs,
        |s, p| registry()
            .with(lines!(s).with_filter(EnvFilter::new("info,app=debug")))
            .with(p.with_filter(LevelFilter::INFO)),
        registry().with(lines!(s).with_filter(EnvFilter::new("info,app=debug")));
    "fmt to info, ours with_filter(EnvFilter)": ToInfo costs,
        |s, p| registry().with(lines!(s).with_filter(info())).with(p.with_filter(info())),
        registry().with(lines!(s).with_filter(info()));
    "recorder, ours": ToDebug free,
        |s, p| registry().with(s.recorder()).with(p), registry().with(s.recorder());
    "ours, recorder": ToDebug free,
        |s, p| registry().with(p).with(s.recorder()), registry().with(s.recorder());
    "recorder to debug, ours, otel to info": ToDebug free hides,
        |s, p| registry()
            .with(s.recorder().with_filter(LevelFilter::DEBUG))
            .with(p)
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO)),
        registry()
            .with(s.recorder().with_filter(LevelFilter::DEBUG))
            .with(opentelemetry!(s).with_filter(LevelFilter::INFO));
    "fmt().finish()": ToInfo costs warns,
        |s, p| finished!(s).finish().with(p), finished!(s).finish();
    "fmt().with_env_filter().finish()": ToInfo costs warns,
        |s, p| finished!(s).with_env_filter("info").finish().with(p),
        finished!(s).with_env_filter("info").finish();
    "fmt().with_max_level(debug).finish()": ToDebug costs warns,
        |s, p| finished!(s).with_max_level(LevelFilter::DEBUG).finish().with(p),
        finished!(s).with_max_level(LevelFilter::DEBUG).finish();
    "a subscriber without filters, fmt": ToDebug costs warns,
        |s, p| Wrapper(registry()).with(lines!(s)).with(p), Wrapper(registry()).with(lines!(s));
    "fmt of own, ours, otel of own": Own free,
        |s, p| registry()
            .with(lines!(s).with_filter(own()))
            .with(p)
            .with(opentelemetry!(s).with_filter(own())),
        registry().with(lines!(s).with_filter(own())).with(opentelemetry!(s).with_filter(own()));
    "ours, fmt to warn, otel of own": Own free,
        |s, p| registry()
            .with(p)
            .with(lines!(s).with_filter(LevelFilter::WARN))
            .with(opentelemetry!(s).with_filter(own_targets())),
        registry()
            .with(lines!(s).with_filter(LevelFilter::WARN))
            .with(opentelemetry!(s).with_filter(own_targets()));
    "otel of own, fmt of own, ours": Own free,
        |s, p| registry()
            .with(opentelemetry!(s).with_filter(own_targets()))
            .with(lines!(s).with_filter(own()))
            .with(p),
        registry()
            .with(opentelemetry!(s).with_filter(own_targets()))
            .with(lines!(s).with_filter(own()));
    "fmt of own, ours, otel of a function": Own costs,
        |s, p| registry()
            .with(lines!(s).with_filter(own()))
            .with(p)
            .with(opentelemetry!(s).with_filter(FilterFn::new(|one| one.target() == "arrangements"))),
        registry()
            .with(lines!(s).with_filter(own()))
            .with(opentelemetry!(s).with_filter(FilterFn::new(|one| one.target() == "arrangements")));
    "fmt of own.and_then(ours).and_then(otel of own)": Own costs,
        |s, p| registry().with(
            lines!(s).with_filter(own()).and_then(p).and_then(opentelemetry!(s).with_filter(own())),
        ),
        registry()
            .with(lines!(s).with_filter(own()).and_then(opentelemetry!(s).with_filter(own())));
    "otel of own, Box, reload of fmt of own": Own free,
        |s, p| registry()
            .with(opentelemetry!(s).with_filter(own()))
            .with(Box::new(p) as Boxed<_>)
            .with(lines!(s).with_filter(reload::Layer::new(own()).0)),
        registry()
            .with(opentelemetry!(s).with_filter(own()))
            .with(lines!(s).with_filter(reload::Layer::new(own()).0));
    "fmt of own, ours with_filter(of own), otel of own": Own free,
        |s, p| registry()
            .with(lines!(s).with_filter(own()))
            .with(p.with_filter(own()))
            .with(opentelemetry!(s).with_filter(own())),
        registry().with(lines!(s).with_filter(own())).with(opentelemetry!(s).with_filter(own()));
    "fmt of own, global filter, ours": ToInfo costs,
        |s, p| registry().with(lines!(s).with_filter(own())).with(info()).with(p),
        registry().with(lines!(s).with_filter(own())).with(info());
    "fmt of a changing filter, ours, otel of own": ToDebug costs loose,
        |s, p| registry()
            .with(lines!(s).with_filter(DynFilterFn::new(|one, _| one.target() == "arrangements")))
            .with(p)
            .with(opentelemetry!(s).with_filter(own())),
        registry()
            .with(lines!(s).with_filter(DynFilterFn::new(|one, _| one.target() == "arrangements")))
            .with(opentelemetry!(s).with_filter(own()));
    "fmt to warn, ours": Nothing free,
        |s, p| registry().with(lines!(s).with_filter(LevelFilter::WARN)).with(p),
        registry().with(lines!(s).with_filter(LevelFilter::WARN));
    "fmt of own to debug, two layers, otel of own": Own free,
        |s, p| registry()
            .with(lines!(s).with_filter(EnvFilter::new("warn,arrangements=debug")))
            .with(ProfilingLayer::builder().rules("1h".parse().unwrap()).build().unwrap())
            .with(p)
            .with(opentelemetry!(s).with_filter(own())),
        registry()
            .with(lines!(s).with_filter(EnvFilter::new("warn,arrangements=debug")))
            .with(opentelemetry!(s).with_filter(own()));
    "two layers, fmt to info": ToDebug free,
        |s, p| registry()
            .with(ProfilingLayer::builder().rules("off".parse().unwrap()).build().unwrap())
            .with(p)
            .with(lines!(s).with_filter(info())),
        registry().with(lines!(s).with_filter(info()));
}

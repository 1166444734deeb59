//! What a program does with its subscriber: spans and events of all levels, and questions whether one is enabled.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracer, SdkTracerProvider, SpanData};
use serde::{Deserialize, Serialize};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Metadata, Subscriber, span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_profiling::export::Memory;
use tracing_profiling::{Handle, ProfilingLayer, Rules, Source};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::cases::Case;

const PLENTY: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Without,
    /// Without the layer and without questions.
    Undisturbed,
    On,
    Off,
    /// Off at first, then on by `set_rules`.
    OnLater,
    /// The reverse.
    OffLater,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Without => "without",
            Self::Undisturbed => "undisturbed",
            Self::On => "on",
            Self::Off => "off",
            Self::OnLater => "later",
            Self::OffLater => "ended",
        }
    }

    pub(crate) fn named(name: &str) -> Self {
        let profiled = [Self::On, Self::Off, Self::OnLater, Self::OffLater];
        let all = [Self::Without, Self::Undisturbed].into_iter().chain(profiled);
        all.into_iter().find(|mode| mode.name() == name).unwrap()
    }
}

/// What reached whom.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Seen {
    /// Of the `fmt` layers, with the spans around each line.
    pub(crate) lines: Vec<String>,
    /// With the span around each.
    pub(crate) exported: Vec<String>,
    /// Which OpenTelemetry span `Span::current()` leads to.
    pub(crate) contexts: Vec<String>,
    pub(crate) recorded: Vec<String>,
    pub(crate) profiled: Vec<String>,
    pub(crate) level: u8,
    pub(crate) log_level: u8,
    pub(crate) enabled: Vec<String>,
    pub(crate) warnings: usize,
}

impl Seen {
    pub(crate) fn levels(&self) -> String {
        format!(
            "level {} log {} enabled {:?}, {} lines, {} exported, {} recorded, {} profiled",
            self.level,
            self.log_level,
            self.enabled,
            self.lines.len(),
            self.exported.len(),
            self.recorded.len(),
            self.profiled.len()
        )
    }
}

/// 0 is off, 5 is `trace`.
pub(crate) fn level_number(level: &str) -> u8 {
    ["off", "error", "warn", "info", "debug", "trace"].iter().position(|one| *one == level).unwrap()
        as u8
}

/// Where the layers of a case write.
#[derive(Clone)]
pub(crate) struct Outputs {
    log: Log,
    recorded: Arc<Mutex<Vec<String>>>,
    tracer: SdkTracer,
    profiled: Arc<Mutex<Vec<String>>>,
}

impl Outputs {
    pub(crate) fn writer(&self) -> Log {
        self.log.clone()
    }

    pub(crate) fn tracer(&self) -> SdkTracer {
        self.tracer.clone()
    }

    pub(crate) fn recorder(&self) -> Recorder {
        Recorder(Arc::clone(&self.recorded))
    }
}

/// A layer with a `Vec` of everything that reaches it.
pub(crate) struct Recorder(Arc<Mutex<Vec<String>>>);

impl Recorder {
    fn record(&self, what: &str, metadata: &Metadata<'_>) {
        // Names of events have the line, names of spans do not.
        let name = if metadata.is_span() { metadata.name() } else { "event" };
        let text = format!("{what} {} {name}", metadata.level());
        if metadata.target() != "tracing_profiling" {
            self.0.lock().unwrap().push(text);
        }
    }
}

impl<S: Subscriber> Layer<S> for Recorder {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, _: &span::Id, _: Context<'_, S>) {
        self.record("span", attributes.metadata());
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        self.record("event", event.metadata());
    }
}

#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs a case; the result is what was seen after the last change of the rules.
pub(crate) fn run(case: &Case, rules: &str, mode: Mode, scope: &str, expected: &[String]) -> Seen {
    let expected = expected.to_vec();
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let outputs = Outputs {
        log: Log::default(),
        recorded: Arc::default(),
        tracer: provider.tracer("arrangements"),
        profiled: Arc::default(),
    };
    let (dispatch, handle) = match mode {
        Mode::Without | Mode::Undisturbed => ((case.without)(&outputs), None),
        _ => {
            let profiled = Arc::clone(&outputs.profiled);
            let starts_on = matches!(mode, Mode::On | Mode::OffLater);
            let layer = ProfilingLayer::builder()
                .rules(if starts_on { rules } else { "off" }.parse().unwrap())
                .source(Source::None)
                .exporter(Memory::new())
                .profiles_per_minute(100_000)
                .on_kept(move |kept| {
                    let names = kept.spans.iter().map(|span| span.name().to_owned());
                    profiled.lock().unwrap().extend(names);
                })
                .build()
                .unwrap();
            let handle = layer.handle();
            ((case.with)(&outputs, layer), Some(handle))
        }
    };
    let parsed: Rules = rules.parse().unwrap();
    let (warns, is_free) = (crate::warns(case, mode), case.is_free);
    let asks = mode != Mode::Undisturbed;
    let traffic = move || {
        // Before the change, so that all callsites are known by then.
        traffic(asks);
        change(mode, handle.as_ref(), &parsed);
        if let Some(handle) = &handle {
            handle.flush(PLENTY).unwrap();
        }
        let start = Instant::now();
        while warns && warnings(&outputs) == 0 && start.elapsed() < PLENTY {
            std::thread::sleep(Duration::from_millis(1));
        }
        let warnings = warnings(&outputs);
        clear(&outputs, &exporter);
        traffic(asks);
        // Errors are wanted until no span is open that they could make fail, which is known after a while.
        let start = Instant::now();
        while mode == Mode::OffLater && is_free && enabled() != expected && start.elapsed() < PLENTY
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (level, log_level) = (LevelFilter::current(), log::max_level());
        let enabled = enabled();
        if let Some(handle) = &handle {
            handle.flush(PLENTY).unwrap();
        }
        let sorted = |list: Vec<String>| {
            let mut list = list;
            list.sort();
            list
        };
        Seen {
            lines: lines(&outputs),
            exported: exported(&exporter.get_finished_spans().unwrap()),
            contexts: CONTEXTS.lock().unwrap().clone(),
            recorded: outputs.recorded.lock().unwrap().clone(),
            profiled: sorted(std::mem::take(&mut *outputs.profiled.lock().unwrap())),
            level: level_number(&level.to_string().to_lowercase()),
            log_level: level_number(&log_level.as_str().to_lowercase()),
            enabled,
            warnings,
        }
    };
    match scope {
        "global" => {
            use tracing_subscriber::util::SubscriberInitExt as _;
            dispatch.init();
            traffic()
        }
        "scoped" => tracing::dispatcher::with_default(&dispatch, traffic),
        // The rules are changed on a thread that has another default.
        _ => {
            let other = dispatch.clone();
            std::thread::scope(|scope| {
                scope.spawn(|| tracing::dispatcher::with_default(&other, || self::traffic(asks)));
            });
            let thread =
                std::thread::spawn(move || tracing::dispatcher::with_default(&dispatch, traffic));
            thread.join().unwrap()
        }
    }
}

fn change(mode: Mode, handle: Option<&Handle>, rules: &Rules) {
    let Some(handle) = handle else { return };
    // On a thread without the subscriber.
    std::thread::scope(|scope| {
        scope.spawn(|| match mode {
            Mode::OnLater => handle.set_rules(rules.clone()).unwrap(),
            Mode::OffLater => handle.set_enabled(false).unwrap(),
            _ => {}
        });
    });
}

fn text(outputs: &Outputs) -> String {
    String::from_utf8(outputs.log.0.lock().unwrap().clone()).unwrap()
}

fn is_ours(line: &str) -> bool {
    line.contains("tracing_profiling:")
}

fn lines(outputs: &Outputs) -> Vec<String> {
    text(outputs).lines().filter(|line| !is_ours(line)).map(str::to_owned).collect()
}

fn warnings(outputs: &Outputs) -> usize {
    text(outputs).lines().filter(|line| is_ours(line) && line.contains("per-layer filters")).count()
}

fn clear(outputs: &Outputs, exporter: &InMemorySpanExporter) {
    outputs.log.0.lock().unwrap().clear();
    outputs.recorded.lock().unwrap().clear();
    outputs.profiled.lock().unwrap().clear();
    CONTEXTS.lock().unwrap().clear();
    exporter.reset();
}

/// Questions that leave something behind in `tracing-subscriber`.
fn probe(number: usize, asks: bool) -> bool {
    match if asks { number % 8 } else { 0 } {
        0 => false,
        1 => tracing::enabled!(Level::DEBUG),
        2 => tracing::enabled!(Level::TRACE),
        3 => log::log_enabled!(log::Level::Debug),
        4 => log::log_enabled!(log::Level::Trace),
        // As sqlx asks after each query.
        5 => {
            log::log_enabled!(target: "sqlx::query", log::Level::Debug)
                || tracing::enabled!(target: "sqlx::query", Level::DEBUG)
        }
        6 => tracing::event_enabled!(Level::DEBUG),
        _ => tracing::span_enabled!(Level::TRACE),
    }
}

fn traffic(asks: bool) {
    let probe = |number| probe(number, asks);
    for number in 0..16 {
        probe(number);
        tracing::info_span!("info", number, user = tracing::field::Empty).in_scope(|| {
            probe(number + 1);
            note_context("info");
            tracing::info!("in info");
            // A client that is instrumented at the default level.
            tracing::info_span!(target: "some_client", "send").in_scope(|| {
                note_context("send");
                tracing::Span::current().record("user", "ann");
                tracing::Span::current().set_attribute("order", 7);
                tracing::info!("sent");
            });
            probe(number);
            tracing::debug_span!("debug").in_scope(|| {
                note_context("debug");
                tracing::debug!("in debug");
                tracing::info!("in debug");
                probe(number);
                tracing::trace_span!("trace").in_scope(|| tracing::info!("in trace"));
                log::info!("logged");
                log::debug!("logged");
            });
            probe(number + 2);
            tracing::debug_span!(target: "h2::client", "connection").in_scope(|| {
                tracing::trace!("in connection");
                tracing::warn!("in connection");
            });
            tracing::info_span!(target: "tokio::task", "task")
                .in_scope(|| tracing::error!("in task"));
        });
        probe(number);
        tracing::info!("after");
        tracing::trace!("after");
        // At each other time, nothing lies between a question and the next span.
        if number % 2 == 0 {
            log::trace!("after");
        }
    }
}

/// The names of the exported spans, with the names of the spans around them, and what was recorded.
fn exported(spans: &[SpanData]) -> Vec<String> {
    let named = |span: &SpanData| {
        let parent = spans.iter().find(|one| one.span_context.span_id() == span.parent_span_id);
        let parent = parent.map_or("-", |parent| &parent.name);
        let is_recorded = |key: &str| ["user", "order"].contains(&key);
        let recorded = span.attributes.iter().filter(|one| is_recorded(one.key.as_str()));
        let recorded: Vec<_> = recorded.map(|one| format!("{}={}", one.key, one.value)).collect();
        format!("{} in {parent} {recorded:?}", span.name)
    };
    spans.iter().map(named).collect()
}

static CONTEXTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// What a client of HTTP or gRPC asks, to pass its trace on, and what `in_current_span` takes to another thread.
fn note_context(place: &str) {
    let current = tracing::Span::current();
    let is_valid = current.context().span().span_context().is_valid();
    CONTEXTS.lock().unwrap().push(format!("{place}: {is_valid}"));
    std::thread::scope(|scope| {
        let dispatch = tracing::dispatcher::get_default(tracing::Dispatch::clone);
        scope.spawn(move || {
            tracing::dispatcher::with_default(&dispatch, || {
                current.in_scope(|| tracing::info_span!("elsewhere").in_scope(|| {}));
            });
        });
    });
}

fn enabled() -> Vec<String> {
    let mut enabled = Vec::new();
    macro_rules! ask {
        ($($level:ident)*) => { $(
            if tracing::enabled!(Level::$level) {
                enabled.push(format!("any {}", Level::$level));
            }
            if tracing::event_enabled!(Level::$level) {
                enabled.push(format!("event {}", Level::$level));
            }
        )* };
    }
    ask!(ERROR WARN INFO DEBUG TRACE);
    enabled
}

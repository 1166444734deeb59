//! The layer's own log events.

use std::borrow::Cow;

use tracing::level_filters::LevelFilter;

use crate::text::line_of;

macro_rules! kinds {
    ($($name:ident = $text:literal,)+) => {
        /// What a log event is about: its field `kind`. Names are not changed, since programs read them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(dead_code, reason = "some belong to features")]
        pub(crate) enum LogKind {
            $($name,)+
        }

        impl LogKind {
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name,)+];

            pub(crate) const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

kinds! {
    Kept = "kept",
    KeptMore = "kept_more",
    Unreported = "unreported",
    Source = "source",
    RulesChanged = "rules_changed",
    Disabled = "disabled",
    ReloadFailed = "reload_failed",
    NothingSeen = "nothing_seen",
    NotCounted = "not_counted",
    NamesAlike = "names_alike",
    UnknownVariable = "unknown_variable",
    Clamped = "clamped",
    EndpointUnused = "endpoint_unused",
    NotLinked = "not_linked",
    Unfiltered = "unfiltered",
    StacksCut = "stacks_cut",
    NoLineTables = "no_line_tables",
    FileReplaced = "file_replaced",
    FileUnreadable = "file_unreadable",
    FileCompressed = "file_compressed",
    FileSplit = "file_split",
    FileTooLarge = "file_too_large",
    RateLowered = "rate_lowered",
    Shed = "shed",
    SignalLost = "signal_lost",
    SignalStackSmall = "signal_stack_small",
    ThreadsUnsampled = "threads_unsampled",
    WaitsUnseen = "waits_unseen",
    CallsForbidden = "calls_forbidden",
    ExportFails = "export_fails",
    ProfileLost = "profile_lost",
    ReceiverAway = "receiver_away",
    ReceiverRefuses = "receiver_refuses",
    ReceiverReplies = "receiver_replies",
    ReceiverBack = "receiver_back",
    SendingEnded = "sending_ended",
    OnKeptPanicked = "on_kept_panicked",
    LogBlocked = "log_blocked",
    FilesClosed = "files_closed",
    Forked = "forked",
    Failed = "failed",
}

/// A log event: its kind and its other fields are for programs, its message is for people. Events of kept spans have
/// more fields, and are in `publish::kept_event`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LogEvent {
    pub(crate) kind: LogKind,
    pub(crate) level: LevelFilter,
    pub(crate) message: String,
    /// The variable that it is about, or that changes it.
    pub(crate) variable: Option<Cow<'static, str>>,
    /// A value of the variable or setting, or a source.
    pub(crate) value: Option<String>,
    pub(crate) limit: Option<u64>,
    pub(crate) count: Option<u64>,
    pub(crate) error: Option<String>,
    pub(crate) file: Option<String>,
    pub(crate) endpoint: Option<String>,
    pub(crate) rules: Option<String>,
}

impl LogEvent {
    fn new(kind: LogKind, level: LevelFilter, message: String) -> Self {
        Self {
            kind,
            level,
            message,
            variable: None,
            value: None,
            limit: None,
            count: None,
            error: None,
            file: None,
            endpoint: None,
            rules: None,
        }
    }

    pub(crate) fn info(kind: LogKind, message: impl Into<String>) -> Self {
        Self::new(kind, LevelFilter::INFO, message.into())
    }

    pub(crate) fn warning(kind: LogKind, message: impl Into<String>) -> Self {
        Self::new(kind, LevelFilter::WARN, message.into())
    }

    pub(crate) fn error(kind: LogKind, message: impl Into<String>) -> Self {
        Self::new(kind, LevelFilter::ERROR, message.into())
    }

    /// Logs it, inside no span of the program. Texts can come from elsewhere: from the network, the environment, files.
    pub(crate) fn emit(&self) {
        /// The characters of a message and of a field.
        const LONGEST: (usize, usize) = (4_096, 2_048);
        let field = |text: &Option<String>| Some(line_of(text.as_deref()?, LONGEST.1).into_owned());
        let message = line_of(&self.message, LONGEST.0);
        let [value, error, file, endpoint, rules] =
            [&self.value, &self.error, &self.file, &self.endpoint, &self.rules].map(field);
        let variable = self.variable.as_deref().map(|name| line_of(name, LONGEST.1));
        macro_rules! emit {
            ($level:ident) => {
                tracing::$level!(
                    target: "tracing_profiling",
                    parent: None,
                    kind = display(self.kind.as_str()),
                    variable = variable.as_deref(),
                    value = value.as_deref(),
                    limit = self.limit,
                    count = self.count,
                    error = error.as_deref(),
                    file = file.as_deref(),
                    endpoint = endpoint.as_deref(),
                    rules = rules.as_deref(),
                    "{message}"
                )
            };
        }
        match self.level {
            LevelFilter::ERROR => emit!(error),
            LevelFilter::WARN => emit!(warn),
            _ => emit!(info),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::Context;
    use tracing_subscriber::prelude::*;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Whether each event is inside no span.
    #[derive(Clone, Default)]
    struct Roots(Arc<Mutex<Vec<bool>>>);

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Roots {
        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            self.0.lock().unwrap().push(event.is_root());
        }
    }

    #[test]
    fn a_json_layer_shows_each_field_and_no_span_of_the_program() {
        let (written, roots) = (Written::default(), Roots::default());
        let writer = written.clone();
        let json = tracing_subscriber::fmt::layer().json().with_writer(move || writer.clone());
        let event = LogEvent {
            variable: Some("TRACING_PROFILING_X".into()),
            value: Some("a".to_owned()),
            limit: Some(1),
            count: Some(2),
            error: Some("b".to_owned()),
            file: Some("c".to_owned()),
            endpoint: Some("d".to_owned()),
            rules: Some("e".to_owned()),
            ..LogEvent::warning(LogKind::StacksCut, "{text}")
        };
        let subscriber = tracing_subscriber::registry().with(json).with(roots.clone());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info_span!("of the program").in_scope(|| {
                event.emit();
                LogEvent::info(LogKind::Source, "text").emit();
                LogEvent::error(LogKind::Failed, "text").emit();
            });
        });
        assert_eq!(*roots.0.lock().unwrap(), [true; 3]);
        let bytes = written.0.lock().unwrap();
        let lines = serde_json::Deserializer::from_slice(&bytes).into_iter::<serde_json::Value>();
        let lines: Vec<_> = lines.map(Result::unwrap).collect();
        let all = serde_json::json!({
            "message": "{text}", "kind": "stacks_cut", "variable": "TRACING_PROFILING_X", "value": "a", "limit": 1,
            "count": 2, "error": "b", "file": "c", "endpoint": "d", "rules": "e",
        });
        assert_eq!(lines[0]["fields"], all);
        assert_eq!(lines[1]["fields"], serde_json::json!({"message": "text", "kind": "source"}));
        let levels: Vec<_> = lines.iter().map(|line| line["level"].clone()).collect();
        assert_eq!(levels, ["WARN", "INFO", "ERROR"]);
        assert!(lines.iter().all(|line| line["target"] == "tracing_profiling"), "{lines:?}");
    }

    #[test]
    fn the_guide_describes_each_kind() {
        let guide = include_str!("../docs/guide/log.md");
        let described: Vec<_> = guide
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
            .filter(|(_, rest)| {
                ["info", "warn", "error"].iter().any(|level| rest.starts_with(level))
            })
            .map(|(kind, _)| kind)
            .collect();
        let kinds: Vec<_> = LogKind::ALL.iter().map(|kind| kind.as_str()).collect();
        assert_eq!(described, kinds);
    }
}

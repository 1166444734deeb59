//! The layer's own log events.

use std::borrow::Cow;

use tracing::level_filters::LevelFilter;

use crate::text::line_of;

macro_rules! kinds {
    ($($kind:ident { $($name:ident = $reason:literal,)+ })+) => {
        /// What a log event is about. Programs read its names.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(dead_code, reason = "some belong to features")]
        pub(crate) enum LogKind {
            $($($name,)+)+
        }

        impl LogKind {
            #[cfg(test)]
            const ALL: &[Self] = &[$($(Self::$name,)+)+];

            /// The field `kind`: the part of the layer. It is also the title of its section in the guide.
            pub(crate) const fn kind(self) -> &'static str {
                match self {
                    $($(Self::$name)|+ => stringify!($kind),)+
                }
            }

            /// The field `reason`: what has happened there.
            pub(crate) const fn reason(self) -> &'static str {
                match self {
                    $($(Self::$name => $reason,)+)+
                }
            }
        }
    };
}

kinds! {
    source {
        Source = "start",
        SignalLost = "signal_lost",
        SignalStackSmall = "signal_stack_small",
        ThreadsUnsampled = "threads_unsampled",
        ContinuousOff = "continuous_off",
        CallsForbidden = "calls_forbidden",
    }
    load {
        Throttled = "throttled",
    }
    stacks {
        StacksCut = "cut",
        WaitsUnseen = "waits_unseen",
    }
    symbols {
        NoLineTables = "no_line_tables",
        FileReplaced = "replaced",
        FileUnreadable = "unreadable",
        FileCompressed = "compressed",
        FileSplit = "split",
        FileTooLarge = "too_large",
    }
    rules {
        RulesChanged = "changed",
        Disabled = "disabled",
        NothingSeen = "nothing_seen",
        Declined = "declined",
        NotCounted = "not_counted",
        PercentilesShared = "percentiles_shared",
        TooDeep = "too_deep",
        AmbiguousNames = "ambiguous_names",
    }
    configuration {
        UnknownVariable = "unknown_variable",
        Malformed = "malformed",
        Clamped = "clamped",
        EndpointUnused = "endpoint_unused",
    }
    subscriber {
        Unfiltered = "unfiltered",
        NotLinked = "not_linked",
    }
    export {
        ExportFails = "fails",
        ProfileLost = "profile_lost",
    }
    receiver {
        ReceiverAway = "away",
        ReceiverRefuses = "refuses",
        ReceiverReplies = "replies",
        ReceiverBack = "back",
        SendingEnded = "sending_ended",
    }
    references {
        Drift = "drift",
        HistoryUnreadable = "history_unreadable",
        HistoryUnwritten = "history_unwritten",
    }
    reports {
        Unreported = "too_many",
        LogBlocked = "log_blocked",
        OnKeptPanicked = "on_kept_panicked",
    }
    ended {
        FilesClosed = "files_closed",
        Failed = "failed",
    }
}

/// A log event: its message is for people, its fields are for programs. The events of kept spans are in
/// `report::kept_event`.
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

    /// Like [`warning`](Self::warning), with the error in a field of its own.
    pub(crate) fn failure(kind: LogKind, message: impl Into<String>, error: String) -> Self {
        Self { error: Some(error), ..Self::warning(kind, message) }
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
        let guide = match self.level {
            LevelFilter::INFO => String::new(),
            _ => format!("; see `{}` in the guide's page `log`", self.kind.kind()),
        };
        let [value, error, file, endpoint, rules] =
            [&self.value, &self.error, &self.file, &self.endpoint, &self.rules].map(field);
        let variable = self.variable.as_deref().map(|name| line_of(name, LONGEST.1));
        macro_rules! emit {
            ($level:ident) => {
                tracing::$level!(
                    target: "tracing_profiling",
                    parent: None,
                    kind = display(self.kind.kind()),
                    reason = display(self.kind.reason()),
                    variable = variable.as_deref(),
                    value = value.as_deref(),
                    limit = self.limit,
                    count = self.count,
                    error = error.as_deref(),
                    file = file.as_deref(),
                    endpoint = endpoint.as_deref(),
                    rules = rules.as_deref(),
                    "{message}{guide}"
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
            "message": "{text}; see `stacks` in the guide's page `log`", "kind": "stacks", "reason": "cut",
            "variable": "TRACING_PROFILING_X", "value": "a", "limit": 1, "count": 2, "error": "b", "file": "c",
            "endpoint": "d", "rules": "e",
        });
        assert_eq!(lines[0]["fields"], all);
        let source = serde_json::json!({"message": "text", "kind": "source", "reason": "start"});
        assert_eq!(lines[1]["fields"], source);
        let levels: Vec<_> = lines.iter().map(|line| line["level"].clone()).collect();
        assert_eq!(levels, ["WARN", "INFO", "ERROR"]);
        assert!(lines.iter().all(|line| line["target"] == "tracing_profiling"), "{lines:?}");
    }

    /// Each kind is a section of its own, which warnings name, with a list of its reasons.
    #[test]
    fn the_guide_has_a_section_for_each_kind_with_its_reasons() {
        let (guide, library) = (include_str!("../docs/guide/log.md"), include_str!("lib.rs"));
        let pages = library.split_once("    pages! {").and_then(|(_, rest)| rest.split_once('}'));
        assert!(pages.unwrap().0.split_whitespace().any(|page| page == "log"));
        let (mut sections, mut described) = (Vec::new(), Vec::new());
        for line in guide.lines() {
            let title = line.split_once("# ").filter(|_| line.starts_with('#'));
            sections.extend(title.map(|(_, title)| title));
            let reason = line.strip_prefix("- `").and_then(|line| line.split('`').next());
            described.extend(sections.last().copied().zip(reason));
        }
        let all: Vec<_> = LogKind::ALL.iter().map(|kind| (kind.kind(), kind.reason())).collect();
        described.retain(|(section, _)| *section != "A kept span");
        assert_eq!(described, all);
        // A second title of the same text has another anchor.
        let unique: std::collections::BTreeSet<_> = sections.iter().collect();
        assert_eq!(unique.len(), sections.len(), "{sections:?}");
    }
}

//! Real profiles, written by the directory store: no hidden name is in any byte of the files or of the log.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "a test")]

#[cfg(all(feature = "otlp-grpc", feature = "otlp-http", feature = "otlp-tls-ring"))]
#[allow(dead_code, reason = "not every test needs all of it")]
#[path = "support/receiver.rs"]
mod receiver;
mod support;

use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flate2::read::GzDecoder;
use opentelemetry_proto::tonic::profiles::v1development as proto;
use prost::Message;
use support::{HAS_STACKS, Log, PLENTY, burn, is_child, run_child};
use tracing::{Dispatch, info_span};
use tracing_profiling::Resource;
use tracing_profiling::profile::SampleKind;
use tracing_profiling::{Builder, Directory, Kept, ProfilingLayer, Redaction, Stats};
use tracing_subscriber::prelude::*;

const MS: Duration = Duration::from_millis(1);

/// The secret: in the name of a module, and so of functions and of a file, and in the names of spans.
const SECRET: &str = "zanzibar";
/// Only in values of fields.
const VALUE: &str = "quetzalcoatl";

#[path = "support/zanzibar.rs"]
mod zanzibar_module;

/// The directory in which this was built.
const PACKAGE: &str = env!("CARGO_MANIFEST_DIR");

/// Everything that was exported.
struct Left {
    /// Names and bytes of all files; gzipped files also uncompressed.
    files: Vec<(String, Vec<u8>)>,
    /// Without the path of the temporary directory, which the log names.
    log: String,
    kept: Vec<Kept>,
}

const KINDS: [SampleKind; 4] =
    [SampleKind::OnCpu, SampleKind::OffCpu, SampleKind::Await, SampleKind::AllocatedBytes];

impl Left {
    fn has(&self, text: &str) -> Vec<&str> {
        let is_in = |bytes: &[u8]| bytes.windows(text.len()).any(|part| part == text.as_bytes());
        let files = self.files.iter().filter(|(name, bytes)| name.contains(text) || is_in(bytes));
        let mut found: Vec<_> = files.map(|(name, _)| name.as_str()).collect();
        found.extend(self.log.contains(text).then_some("the log"));
        let reported = self
            .kept
            .iter()
            .map(|kept| format!("{:?} {:?}", KINDS.map(|kind| kept.hotspot(kind)), kept.waits));
        found.extend(reported.into_iter().any(|one| one.contains(text)).then_some("the reports"));
        found
    }

    fn otlp(&self) -> proto::ProfilesData {
        let otlp = self.files.iter().find(|(name, _)| name.ends_with(".otlp"));
        proto::ProfilesData::decode(otlp.unwrap().1.as_slice()).unwrap()
    }
}

/// Exports a span with secrets in all kinds of places, with the settings of `set`.
fn leave(set: impl Fn(Builder) -> Builder) -> Left {
    // A short wait can be missed on a busy machine, a wait of seconds is not.
    let all = [60, 240, 960, 3_840].map(|time| MS * time).into_iter();
    let mut all = all.map(|time| leave_with_wait(&set, time));
    let found = all.find(|(_, stats)| !HAS_STACKS || stats.waits.captured > 0);
    found.unwrap().0
}

fn leave_with_wait(set: impl Fn(Builder) -> Builder, wait: Duration) -> (Left, Stats) {
    leave_by(set, || {
        in_thread("zanzibar-1", move || {
            let late = tracing::field::Empty;
            let span = info_span!(target: "shop::zanzibar", "GET /zanzibar/7", user = VALUE, late);
            let _outer = span.entered();
            tracing::Span::current().record("late", format!("{VALUE}!"));
            zanzibar_module::burn_zanzibar(60 * MS);
            let inner = info_span!("price zanzibar", ?VALUE).entered();
            zanzibar_module::burn_zanzibar(60 * MS);
            zanzibar_module::sleep_zanzibar(wait);
            drop(inner);
            burn(30 * MS);
        })
    })
}

/// Runs `action` on a thread with that name.
fn in_thread(name: &str, action: impl FnOnce() + Send + 'static) {
    let dispatch = tracing::dispatcher::get_default(Clone::clone);
    let run = move || tracing::dispatcher::with_default(&dispatch, action);
    std::thread::Builder::new().name(name.to_owned()).spawn(run).unwrap().join().unwrap();
}

fn leave_by(set: impl Fn(Builder) -> Builder, action: impl FnOnce()) -> (Left, Stats) {
    let directory = tempfile::tempdir().unwrap();
    let resource = Resource::new().with("service.name", "shop");
    let log = Log::default();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let reports = Arc::clone(&kept);
    let builder = ProfilingLayer::builder()
        .rules("0ms|level<=info".parse().unwrap())
        .resource(resource)
        .exporter(Directory::new(directory.path()))
        .on_kept(move |one| reports.lock().unwrap().push(one.clone()));
    let layer = set(builder).build().unwrap();
    let handle = layer.handle();
    let writer = log.clone();
    let fmt = tracing_subscriber::fmt::layer().with_ansi(false);
    let fmt = fmt.with_writer(move || writer.clone());
    let registry = tracing_subscriber::registry().with(layer).with(
        fmt.with_filter(tracing_subscriber::filter::filter_fn(|metadata| metadata.is_event())),
    );
    let dispatch = Dispatch::new(registry);
    tracing::dispatcher::with_default(&dispatch, action);
    handle.flush(PLENTY).unwrap();
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory.path()).into_iter().flatten() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let bytes = std::fs::read(entry.path()).unwrap();
        if name.ends_with(".html") {
            let data = support::data_of_report(&bytes).replace(r"\\", r"\");
            files.push((format!("{name}, unpacked"), data.into_bytes()));
        }
        if name.ends_with(".gz") {
            let mut plain = Vec::new();
            GzDecoder::new(bytes.as_slice()).read_to_end(&mut plain).unwrap();
            files.push((format!("{name}, un-gzipped"), plain));
        }
        files.push((name, bytes));
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let log = log.replace(directory.path().to_str().unwrap(), "");
    let kept = kept.lock().unwrap().clone();
    (Left { files, log, kept }, handle.stats())
}

/// Asserts that all three formats and the log have the text, so that a missing secret has no other reason.
fn assert_is_everywhere(left: &Left, text: &str) {
    let found = left.has(text);
    for part in ["unpacked", "un-gzipped", ".otlp", "the log"] {
        assert!(found.iter().any(|found| found.contains(part)), "{text} in {part}: {found:?}");
    }
}

#[test]
fn no_hidden_name_is_in_any_exported_byte() {
    let hide = Redaction::new().hide(r"(?i)\w*zanzibar\w*").unwrap();
    // The mangled name contains `7support4burn`.
    let hide = hide.hide("support::burn$").unwrap();
    let left = leave(|builder| builder.redact(hide.clone()));
    if !HAS_STACKS {
        return;
    }
    assert_eq!(left.files.len(), 5, "three files, and two unpacked");
    assert_eq!(left.has(SECRET), Vec::<&str>::new());
    assert_is_everywhere(&left, "[redacted]");
    // Names that are not hidden are there.
    assert!(!left.has("redaction::leave").is_empty());
    assert_eq!(left.has("support::burn"), Vec::<&str>::new());
    assert_eq!(left.has("7support4burn"), Vec::<&str>::new());
    let open = leave(|builder| builder);
    assert!(!open.has("support::burn").is_empty() && !open.has("7support4burn").is_empty());
    assert_is_everywhere(&open, SECRET);
    assert!(open.has(SECRET).contains(&"the reports"));
}

#[test]
fn names_cannot_break_lines_or_change_the_text_direction() {
    for full_paths in [false, true] {
        let left = leave_by(
            |builder| builder.redact(Redaction::new().full_paths(full_paths)),
            || {
                let _outer = info_span!("outer\nkept `forged` (error)\r\0end").entered();
                burn(60 * MS);
                let _inner =
                    info_span!("in\u{202e}ner\u{2066}\u{200f}\u{61c}\u{2028}\u{85}\u{1b}[31m")
                        .entered();
                burn(60 * MS);
            },
        )
        .0;
        // Long enough not to occur in compressed data by chance.
        for part in [
            "outer\n",
            "\nkept `forged`",
            "\rend",
            "\0end",
            "in\u{202e}",
            "\u{202e}ner",
            "\u{2066}\u{200f}",
            "\u{61c}\u{2028}",
            "\u{85}\u{1b}[31m",
        ] {
            assert_eq!(left.has(part), Vec::<&str>::new(), "{part:?}");
        }
        assert!(left.log.lines().all(|line| line.contains("tracing_profiling")), "{}", left.log);
        assert!(
            left.log.contains("kept `outer\\nkept `forged` (error)\\r\\u{0}end`: "),
            "{}",
            left.log
        );
        if HAS_STACKS {
            assert_is_everywhere(&left, "outer\\nkept");
        }
    }
}

#[test]
fn no_field_value_is_in_any_exported_byte() {
    let left = leave(|builder| builder.redact(Redaction::new().full_paths(true)));
    // The log has a layer of its own, which could show them; but the messages of this crate do not have them either.
    assert_eq!(left.has(VALUE), Vec::<&str>::new());
    assert!(left.log.contains("GET /zanzibar/7"), "{}", left.log);
}

#[test]
fn paths_start_at_the_package_unless_full_paths_are_set() {
    let short = leave(|builder| builder);
    if !HAS_STACKS {
        return;
    }
    assert_eq!(short.has(PACKAGE), Vec::<&str>::new());
    let above = PACKAGE.rsplit_once('/').unwrap().0;
    let data = short.otlp();
    let strings = &data.dictionary.as_ref().unwrap().string_table;
    let lead_home: Vec<_> = strings
        .iter()
        .filter(|text| above.len() > 1 && text.contains(&format!("{above}/")))
        .collect();
    assert_eq!(lead_home, Vec::<&String>::new());
    for part in ["/registry/src/", "/rustlib/", "/root/", "/home/"] {
        assert_eq!(short.has(part), Vec::<&str>::new());
    }
    assert!(strings.iter().any(|text| text.ends_with("/tests/support/zanzibar.rs")));
    assert!(strings.iter().any(|text| text.starts_with("/rustc/library/")));
    let full = leave(|builder| builder.redact(Redaction::new().full_paths(true)));
    assert!(full.has(PACKAGE).iter().any(|place| place.ends_with(".otlp")));
}

#[test]
fn patterns_of_the_environment_and_the_code_both_apply() {
    let test = "patterns_of_the_environment_and_the_code_both_apply";
    if !is_child(test) {
        let pattern = [("TRACING_PROFILING_REDACT", r"(?i)\w*zanzibar\w*")];
        let output = run_child(test, &pattern);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let by_code = || Redaction::new().hide("support::burn$").unwrap();
    for is_code_first in [true, false] {
        let left = leave(|builder| match is_code_first {
            true => builder.redact(by_code()).with_env().unwrap(),
            false => builder.with_env().unwrap().redact(by_code()),
        });
        if HAS_STACKS {
            for hidden in [SECRET, "support::burn", "7support4burn"] {
                assert_eq!(left.has(hidden), Vec::<&str>::new(), "{hidden}, {is_code_first}");
            }
            assert_is_everywhere(&left, "[redacted]");
        }
    }
}

#[cfg(all(feature = "otlp-grpc", feature = "otlp-http", feature = "otlp-tls-ring"))]
#[test]
fn no_hidden_name_is_in_any_sent_byte() {
    use receiver::{Receiver, Speaks};

    let sent = |redaction: Redaction| {
        let receiver = Receiver::new(Speaks::Http);
        let exporter = || {
            tracing_profiling::OtlpExporter::builder()
                .protocol(tracing_profiling::Protocol::HttpProtobuf)
                .endpoint(receiver.endpoint())
                .timeout(PLENTY)
                .build()
                .unwrap()
        };
        _ = leave(|builder| builder.redact(redaction.clone()).exporter(exporter()));
        let messages = receiver.got().into_iter().map(|got| got.message.encode_to_vec());
        let messages: Vec<_> = messages.collect();
        assert!(!receiver.profiles().is_empty());
        move |text: &str| {
            let is_in = |bytes: &Vec<u8>| bytes.windows(text.len()).any(|w| w == text.as_bytes());
            messages.iter().any(is_in)
        }
    };
    if HAS_STACKS {
        let hidden = sent(Redaction::new().hide(r"(?i)\w*zanzibar\w*").unwrap());
        assert!(hidden("[redacted]") && hidden("redaction::leave"));
        assert!(!hidden(SECRET) && !hidden(VALUE) && !hidden(PACKAGE));
        assert!(sent(Redaction::new())(SECRET));
    }
}

/// Only with addresses: see also `tests/symbols.rs`.
#[test]
fn without_symbols_no_function_name_is_in_any_exported_byte() {
    let left = leave(|builder| builder.symbols(false));
    if !HAS_STACKS {
        return;
    }
    assert_eq!(left.files.len(), 5, "three files, and two unpacked");
    // Functions of this test, of std, of the C library and of the kernel. Names of spans remain.
    let functions = [
        "burn_zanzibar",
        "sleep_zanzibar",
        "zanzibar.rs",
        "support::burn",
        "support4burn",
        "redaction::leave",
        "core::",
        "std::",
        "__libc_start",
        "clock_nanosleep",
        "do_syscall_64",
        "entry_SYSCALL",
        "schedule",
        "hrtimer",
    ];
    for function in functions {
        assert_eq!(left.has(function), Vec::<&str>::new(), "{function}");
    }
    let open = leave(|builder| builder);
    for function in ["burn_zanzibar", "sleep_zanzibar", "support::burn", "std::"] {
        assert!(!open.has(function).is_empty(), "{function}");
    }
}

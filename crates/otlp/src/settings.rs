//! What an exporter is set to, and how values of variables are read.

use std::num::NonZeroU16;
#[cfg(feature = "tls")]
use std::path::PathBuf;
use std::time::Duration;

use http::header::HeaderMap;
use http::uri::Uri;
use tracing_profiling_profile::export::InvalidSetting;

/// The transport of OTLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Protocol {
    /// gRPC; needs the feature `otlp-grpc`.
    Grpc,
    /// Protobuf in the body of an HTTP `POST`; needs the feature `otlp-http`.
    HttpProtobuf,
}

impl Protocol {
    /// The enabled protocol; if both are, the one that OpenTelemetry recommends.
    pub(crate) const DEFAULT: Self =
        if cfg!(feature = "http") { Self::HttpProtobuf } else { Self::Grpc };

    pub(crate) const NAMES: [(&str, Self); 2] =
        [("grpc", Self::Grpc), ("http/protobuf", Self::HttpProtobuf)];
}

/// The compression of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Compression {
    /// No compression.
    #[default]
    None,
    /// Gzip.
    Gzip,
}

impl Compression {
    pub(crate) const NAMES: [(&str, Self); 2] = [("gzip", Self::Gzip), ("none", Self::None)];
}

/// The variable for profiles, and the one for all signals.
#[derive(Clone, Copy)]
pub(crate) struct VariableNames {
    pub(crate) profiles: &'static str,
    pub(crate) all: &'static str,
}

macro_rules! names {
    ($rest:literal) => {
        VariableNames {
            profiles: concat!("OTEL_EXPORTER_OTLP_PROFILES_", $rest),
            all: concat!("OTEL_EXPORTER_OTLP_", $rest),
        }
    };
}

pub(crate) const ENDPOINT: VariableNames = names!("ENDPOINT");
pub(crate) const PROTOCOL: VariableNames = names!("PROTOCOL");
pub(crate) const HEADERS: VariableNames = names!("HEADERS");
pub(crate) const TIMEOUT: VariableNames = names!("TIMEOUT");
pub(crate) const COMPRESSION: VariableNames = names!("COMPRESSION");
pub(crate) const INSECURE: VariableNames = names!("INSECURE");
#[cfg(feature = "tls")]
pub(crate) const CERTIFICATE: VariableNames = names!("CERTIFICATE");
#[cfg(feature = "tls")]
pub(crate) const CLIENT_CERTIFICATE: VariableNames = names!("CLIENT_CERTIFICATE");
#[cfg(feature = "tls")]
pub(crate) const CLIENT_KEY: VariableNames = names!("CLIENT_KEY");

/// Replaces a value that may be a secret in errors.
pub(crate) const HIDDEN: &str = "...";

/// A file and the variable for it: the one for all signals, if it was set in code.
#[cfg(feature = "tls")]
pub(crate) struct File {
    pub(crate) name: &'static str,
    pub(crate) path: PathBuf,
}

pub(crate) struct Settings {
    pub(crate) protocol: Protocol,
    pub(crate) uri: Uri,
    pub(crate) headers: HeaderMap,
    pub(crate) timeout: Duration,
    pub(crate) compression: Compression,
    #[cfg(feature = "tls")]
    pub(crate) certificate: Option<File>,
    #[cfg(feature = "tls")]
    pub(crate) client_certificate: Option<File>,
    #[cfg(feature = "tls")]
    pub(crate) client_key: Option<File>,
}

impl Settings {
    /// The endpoint without parts that may be secret.
    pub(crate) fn shown_endpoint(&self) -> String {
        let authority = self.uri.host().unwrap_or_default();
        let port = self.uri.port().map(|port| format!(":{port}")).unwrap_or_default();
        let path = Some(self.uri.path()).filter(|path| *path != "/").unwrap_or_default();
        format!("{}://{authority}{port}{path}", self.uri.scheme_str().unwrap_or("http"))
    }
}

/// The variables of the process, or those of a test.
pub(crate) type Variables<'a> = dyn Fn(&'static str) -> Result<Option<String>, String> + 'a;

/// The first value that is not empty, and the name of its variable.
pub(crate) fn get(
    variables: &Variables<'_>,
    names: VariableNames,
) -> Result<Option<(&'static str, String)>, InvalidSetting> {
    for name in [names.profiles, names.all] {
        // It may contain headers.
        let value = variables(name).map_err(|_| InvalidSetting::new(name, HIDDEN, "UTF-8"))?;
        if let Some(value) = value.filter(|value| !value.trim().is_empty()) {
            return Ok(Some((name, value.trim().to_owned())));
        }
    }
    Ok(None)
}

/// The value of a variable as one of two words, and the variable's name.
pub(crate) fn choose<T: Copy>(
    variables: &Variables<'_>,
    names: VariableNames,
    words: &[(&str, T); 2],
) -> Result<Option<(&'static str, T)>, InvalidSetting> {
    let Some((name, text)) = get(variables, names)? else { return Ok(None) };
    let found = words.iter().find(|(word, _)| text.eq_ignore_ascii_case(word));
    let [(first, _), (second, _)] = words;
    let wrong = || unsupported(name, &text, names, &format!("expected {first} or {second}"));
    found.map(|(_, value)| Some((name, *value))).ok_or_else(wrong)
}

/// Whether there is a host, followed by nothing or by a colon and a valid port. For an invalid port, `http` reports
/// none, and the request would go to port 80.
pub(crate) fn has_sound_port(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default();
    let rest = uri.authority().and_then(|authority| authority.as_str().strip_prefix(host));
    let is_port = |port: &str| !port.starts_with('+') && port.parse::<NonZeroU16>().is_ok();
    let rest = rest.filter(|_| !host.is_empty());
    rest.is_some_and(|rest| rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port))
}

/// A URL in an error, unless it may contain a password or a key.
pub(crate) fn shown(url: &str) -> &str {
    if url.contains(['@', '?', '#']) { HIDDEN } else { url }
}

/// An error for a value that other signals may support. If it is set for all signals, the error names the variable for
/// profiles.
pub(crate) fn unsupported(
    name: &'static str,
    text: &str,
    names: VariableNames,
    problem: &str,
) -> InvalidSetting {
    let alone = format!("{problem}; for profiles alone, set {}", names.profiles);
    InvalidSetting::unusable(name, text, if name == names.all { &alone } else { problem })
}

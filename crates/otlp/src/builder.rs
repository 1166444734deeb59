//! Builds an exporter, in code and by OpenTelemetry's environment variables.

use std::fmt;
#[cfg(feature = "tls")]
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::Uri;
use percent_encoding::percent_decode_str;
use tracing_profiling_profile::export::remote::QueueLimits;
use tracing_profiling_profile::export::{Directory, InvalidSetting, of_process};
use tracing_profiling_profile::profile::Resource;

use crate::exporter::OtlpExporter;
use crate::protocol::HTTP_PATH;
#[cfg(feature = "tls")]
use crate::settings::{CERTIFICATE, CLIENT_CERTIFICATE, CLIENT_KEY, File, VariableNames};
use crate::settings::{
    COMPRESSION, Compression, ENDPOINT, HEADERS, HIDDEN, INSECURE, PROTOCOL, Protocol, Settings,
    TIMEOUT, Variables, choose, get, has_sound_port, shown, unsupported,
};
use crate::transport::Transport;

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longer is as good as no timeout, and gRPC cannot represent it.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
/// The default limit of gRPC servers.
const MOST_REQUEST_BYTES: usize = 4 * 1024 * 1024;
/// Headers that define how a request is parsed. Other values would make it unreadable.
const OURS: [HeaderName; 8] = [
    header::CONNECTION,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];
const DEFAULT_QUEUE_PROFILES: usize = 512;
const DEFAULT_QUEUE_BYTES: usize = 16 * 1024 * 1024;
const DEFAULT_GRACE_PERIOD: Duration = Duration::from_secs(10);

/// Builds an [`OtlpExporter`].
///
/// Settings that are not made here come from OpenTelemetry's variables: `OTEL_EXPORTER_OTLP_PROFILES_*`, else
/// `OTEL_EXPORTER_OTLP_*`.
///
/// [The guide](https://docs.rs/tracing-profiling/latest/tracing_profiling/guide/otlp/) has an example.
#[derive(Default)]
#[must_use]
pub struct OtlpBuilder {
    protocol: Option<Protocol>,
    endpoint: Option<String>,
    profiles_endpoint: Option<String>,
    headers: Vec<(String, String)>,
    timeout: Option<Duration>,
    compression: Option<Compression>,
    #[cfg(feature = "tls")]
    certificate: Option<PathBuf>,
    #[cfg(feature = "tls")]
    client_identity: Option<(PathBuf, PathBuf)>,
    resource: Option<Resource>,
    fallback: Option<Directory>,
    grace_period: Option<Duration>,
    queue: Option<(usize, usize)>,
    request_bytes: Option<usize>,
}

impl OtlpExporter {
    /// A builder, for settings other than those of the environment.
    pub fn builder() -> OtlpBuilder {
        OtlpBuilder::default()
    }
}

impl OtlpBuilder {
    /// The protocol. The default is `http/protobuf`, or gRPC if the feature `otlp-http` is off.
    pub fn protocol(mut self, protocol: Protocol) -> Self {
        self.protocol = Some(protocol);
        self
    }

    /// The base URL of the receiver. The default is `http://localhost:4318`, or `http://localhost:4317` for gRPC. For
    /// HTTP, `/v1development/profiles` is appended.
    pub fn endpoint(mut self, base: impl Into<String>) -> Self {
        self.endpoint = Some(base.into());
        self
    }

    /// The complete URL of the receiver: nothing is appended.
    pub fn profiles_endpoint(mut self, url: impl Into<String>) -> Self {
        self.profiles_endpoint = Some(url.into());
        self
    }

    /// Headers of each request, in addition to those of the variables. Values are not percent-decoded.
    pub fn headers<N: Into<String>, V: Into<String>>(
        mut self,
        headers: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let headers = headers.into_iter().map(|(name, value)| (name.into(), value.into()));
        self.headers.extend(headers);
        self
    }

    /// The timeout of a request. The default is 10 seconds.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The compression of requests. The default is none.
    pub fn compression(mut self, compression: Compression) -> Self {
        self.compression = Some(compression);
        self
    }

    /// A PEM file with the root certificates to trust for the receiver. The default is the system's. Needs the feature
    /// `otlp-tls`.
    #[cfg(feature = "tls")]
    pub fn certificate(mut self, file: impl Into<PathBuf>) -> Self {
        self.certificate = Some(file.into());
        self
    }

    /// PEM files with the client certificate chain and its private key. Needs the feature `otlp-tls`.
    #[cfg(feature = "tls")]
    pub fn client_certificate(
        mut self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        self.client_identity = Some((certificate.into(), key.into()));
        self
    }

    /// The resource of the profiles. Give the same one to the tracer provider. The default is taken from
    /// `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`.
    pub fn resource(mut self, resource: impl Into<Resource>) -> Self {
        self.resource = Some(resource.into());
        self
    }

    /// The directory to which profiles are written while the receiver is unavailable or has no room. They are sent when the receiver is available again, and stay
    /// in the directory as long as it has room. Without a fallback, kept spans get no profile in the meantime.
    pub fn fallback_directory(mut self, directory: Directory) -> Self {
        self.fallback = Some(directory);
        self
    }

    /// How long requests may fail, while profiles wait, before the receiver is taken for unavailable: by default 10 seconds.
    pub fn grace_period(mut self, grace_period: Duration) -> Self {
        self.grace_period = Some(grace_period);
        self
    }

    /// The maximum number of queued profiles, and their maximum size in bytes. The defaults are 512 and 16 MiB. When
    /// the queue is full, spans are kept without a profile, or profiles go to the fallback directory.
    pub fn queue(mut self, profiles: usize, bytes: usize) -> Self {
        self.queue = Some((profiles, bytes));
        self
    }

    /// The maximum size of a request before compression, above which profiles are downsampled: by default gRPC's 4 MiB.
    pub fn request_bytes(mut self, bytes: usize) -> Self {
        self.request_bytes = Some(bytes);
        self
    }

    /// Builds the exporter. It does not connect or start a thread yet.
    ///
    /// # Errors
    ///
    /// If a setting, here or in a variable, is invalid: an endpoint that is not a URL, a protocol that is unknown or
    /// whose feature is off, a certificate that cannot be read.
    pub fn build(self) -> Result<OtlpExporter, InvalidSetting> {
        self.build_with(&|name| of_process(name))
    }

    /// Like [`build`](Self::build), from any source of variables. An error is a value that is not valid Unicode.
    #[doc(hidden)]
    pub fn build_with(self, variables: &Variables<'_>) -> Result<OtlpExporter, InvalidSetting> {
        let settings = self.resolve(variables)?;
        let (profiles, bytes) = self.queue.unwrap_or((DEFAULT_QUEUE_PROFILES, DEFAULT_QUEUE_BYTES));
        let grace_period = self.grace_period.unwrap_or(DEFAULT_GRACE_PERIOD);
        Ok(OtlpExporter {
            limits: QueueLimits { profiles: profiles.max(1), bytes: bytes.max(1), grace_period },
            request_bytes: self.request_bytes.unwrap_or(MOST_REQUEST_BYTES),
            resource: self.resource,
            fallback: self.fallback,
            endpoint: settings.shown_endpoint(),
            transport: Some(Transport::new(settings)?),
            link: None,
            answers: None,
        })
    }

    fn resolve(&self, variables: &Variables<'_>) -> Result<Settings, InvalidSetting> {
        let protocol = self.resolve_protocol(variables)?;
        let (name, url) = self.resolve_endpoint(protocol, variables)?;
        let uri = Uri::from_str(&url).ok().filter(|uri| uri.host().is_some());
        let is_web = |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https"));
        let expected = "a URL such as http://localhost:4318";
        let wrong = || InvalidSetting::new(name, shown(&url), expected);
        let uri = uri.filter(is_web).ok_or_else(wrong)?;
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            let problem = format!(
                "it contains a user; use {}=authorization=Basic%20... or `headers` instead",
                HEADERS.all
            );
            return Err(InvalidSetting::unusable(name, HIDDEN, problem));
        }
        if !has_sound_port(&uri) {
            let expected = "a URL such as http://localhost:4318, with a port from 1 to 65535";
            return Err(InvalidSetting::new(name, shown(&url), expected));
        }
        if uri.scheme_str() == Some("https") && !cfg!(feature = "tls") {
            let problem =
                "https needs the feature `otlp-tls`: enable `otlp-tls-ring` or `otlp-tls-aws-lc`";
            return Err(InvalidSetting::unusable(name, shown(&url), problem));
        }
        #[cfg(feature = "tls")]
        let file = |set: Option<&PathBuf>, names: VariableNames| match set {
            Some(path) => Ok(Some(File { name: names.all, path: path.clone() })),
            None => get(variables, names)
                .map(|found| found.map(|(name, path)| File { name, path: PathBuf::from(path) })),
        };
        #[cfg(feature = "tls")]
        let identity = self.client_identity.as_ref();
        Ok(Settings {
            protocol,
            uri,
            headers: self.resolve_headers(variables)?,
            timeout: self.resolve_timeout(variables)?.min(LONGEST_TIMEOUT),
            compression: match self.compression {
                Some(compression) => compression,
                None => choose(variables, COMPRESSION, &Compression::NAMES)?
                    .map_or(Compression::None, |(_, compression)| compression),
            },
            #[cfg(feature = "tls")]
            certificate: file(self.certificate.as_ref(), CERTIFICATE)?,
            #[cfg(feature = "tls")]
            client_certificate: file(identity.map(|(file, _)| file), CLIENT_CERTIFICATE)?,
            #[cfg(feature = "tls")]
            client_key: file(identity.map(|(_, key)| key), CLIENT_KEY)?,
        })
    }

    fn resolve_protocol(&self, variables: &Variables<'_>) -> Result<Protocol, InvalidSetting> {
        let (name, protocol) = match self.protocol {
            Some(protocol) => ("the protocol", protocol),
            None => choose(variables, PROTOCOL, &Protocol::NAMES)?
                .unwrap_or(("the protocol", Protocol::DEFAULT)),
        };
        let (text, problem, is_there) = match protocol {
            Protocol::Grpc => ("grpc", "it needs the feature `otlp-grpc`", cfg!(feature = "grpc")),
            Protocol::HttpProtobuf => {
                ("http/protobuf", "it needs the feature `otlp-http`", cfg!(feature = "http"))
            }
        };
        is_there.then_some(protocol).ok_or_else(|| unsupported(name, text, PROTOCOL, problem))
    }

    /// The URL for profiles, and the name of its setting.
    fn resolve_endpoint(
        &self,
        protocol: Protocol,
        variables: &Variables<'_>,
    ) -> Result<(&'static str, String), InvalidSetting> {
        const SET: &str = "the endpoint";
        let (name, text, is_whole) = match (&self.profiles_endpoint, &self.endpoint) {
            (Some(url), _) => (SET, url.clone(), true),
            (None, Some(base)) => (SET, base.clone(), false),
            (None, None) => match get(variables, ENDPOINT)? {
                Some((name, text)) => (name, text, name == ENDPOINT.profiles),
                None => {
                    let port = if protocol == Protocol::Grpc { 4317 } else { 4318 };
                    (SET, format!("http://localhost:{port}"), false)
                }
            },
        };
        // Nothing can be appended after these.
        if !is_whole && text.contains(['?', '#']) {
            let problem =
                format!("a base URL must not contain `?` or `#`; {} may", ENDPOINT.profiles);
            return Err(InvalidSetting::unusable(name, HIDDEN, problem));
        }
        let url = match protocol {
            Protocol::HttpProtobuf if is_whole => text,
            Protocol::HttpProtobuf => format!("{}{HTTP_PATH}", text.trim_end_matches('/')),
            Protocol::Grpc if text.contains("://") => text,
            // gRPC also accepts an address without a scheme.
            Protocol::Grpc => {
                let found = choose(variables, INSECURE, &[("true", true), ("false", false)])?;
                let is_insecure = found.is_some_and(|(_, is_insecure)| is_insecure);
                format!("{}://{text}", if is_insecure { "http" } else { "https" })
            }
        };
        Ok((name, url))
    }

    fn resolve_headers(&self, variables: &Variables<'_>) -> Result<HeaderMap, InvalidSetting> {
        let mut headers = HeaderMap::new();
        if let Some((name, text)) = get(variables, HEADERS)? {
            // The text may contain secrets, so errors do not show it.
            let expected = "name=value,name=value, with values percent-encoded";
            let wrong = || InvalidSetting::new(name, HIDDEN, expected);
            for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
                let (key, value) = pair.split_once('=').ok_or_else(wrong)?;
                let value = percent_decode_str(value.trim()).decode_utf8().map_err(|_| wrong())?;
                add_header(&mut headers, key.trim(), &value).ok_or_else(wrong)?;
            }
        }
        for (key, value) in &self.headers {
            add_header(&mut headers, key, value)
                .ok_or_else(|| InvalidSetting::new("a header", HIDDEN, "a header of HTTP"))?;
        }
        let is_ours =
            |name: &&HeaderName| OURS.contains(*name) || name.as_str().starts_with("grpc-");
        if let Some(name) = headers.keys().find(is_ours) {
            let problem = "the exporter sets it itself";
            return Err(InvalidSetting::unusable("a header", name.as_str(), problem));
        }
        Ok(headers)
    }

    fn resolve_timeout(&self, variables: &Variables<'_>) -> Result<Duration, InvalidSetting> {
        if let Some(timeout) = self.timeout {
            let wrong = || InvalidSetting::new("the timeout", "0", "more than zero");
            return (!timeout.is_zero()).then_some(timeout).ok_or_else(wrong);
        }
        let Some((name, text)) = get(variables, TIMEOUT)? else { return Ok(DEFAULT_TIMEOUT) };
        let milliseconds = text.parse().ok().filter(|milliseconds| *milliseconds > 0);
        let wrong = || InvalidSetting::new(name, &text, "milliseconds, 1 or more");
        milliseconds.map(Duration::from_millis).ok_or_else(wrong)
    }
}

impl fmt::Debug for OtlpBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Headers and URLs can contain secrets.
        f.debug_struct("OtlpBuilder").field("protocol", &self.protocol).finish_non_exhaustive()
    }
}

fn add_header(headers: &mut HeaderMap, name: &str, value: &str) -> Option<()> {
    let name = HeaderName::from_str(name).ok()?;
    let mut value = HeaderValue::from_str(value).ok()?;
    value.set_sensitive(true);
    headers.insert(name, value);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(builder: &OtlpBuilder, variables: &[(&str, &str)]) -> Result<Settings, String> {
        let get = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            Ok(found.map(|(_, value)| (*value).to_owned()))
        };
        builder.resolve(&get).map_err(|error| error.to_string())
    }

    fn uri(variables: &[(&str, &str)]) -> String {
        resolve(&OtlpBuilder::default(), variables).unwrap().uri.to_string()
    }

    #[cfg(feature = "http")]
    #[test]
    fn the_path_is_appended_to_a_base_url_only() {
        assert_eq!(uri(&[]), "http://localhost:4318/v1development/profiles");
        let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:1/base/");
        assert_eq!(uri(&[all]), "http://all:1/base/v1development/profiles");
        let own = ("OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT", "http://own:2/api/x/v1/profiles");
        assert_eq!(uri(&[all, own]), own.1);
        let set = OtlpBuilder::default().endpoint("http://set:3");
        let set_uri = resolve(&set, &[all, own]).unwrap().uri;
        assert_eq!(set_uri, "http://set:3/v1development/profiles");
        let whole = set.profiles_endpoint("http://set:4/whole");
        assert_eq!(resolve(&whole, &[all, own]).unwrap().uri, "http://set:4/whole");
    }

    #[cfg(feature = "grpc")]
    #[test]
    fn grpc_accepts_a_bare_address_and_has_no_path() {
        let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317");
        let insecure = ("OTEL_EXPORTER_OTLP_INSECURE", "TRUE");
        assert_eq!(uri(&[grpc]), "http://localhost:4317/");
        assert_eq!(uri(&[grpc, endpoint, insecure]), "http://collector:4317/");
        let secure = resolve(&OtlpBuilder::default(), &[grpc, endpoint]);
        match secure {
            Ok(settings) => assert_eq!(settings.uri.scheme_str(), Some("https")),
            Err(error) => assert!(error.contains("otlp-tls"), "{error}"),
        }
    }

    #[test]
    fn headers_are_percent_decoded_and_the_variable_for_profiles_wins() {
        let all = ("OTEL_EXPORTER_OTLP_HEADERS", "a=1,b=of%20all");
        let own = ("OTEL_EXPORTER_OTLP_PROFILES_HEADERS", " authorization = Basic%20dTpw%3D , x=y");
        let headers = |builder: OtlpBuilder, variables: &[_]| {
            let headers = resolve(&builder, variables).unwrap().headers;
            let mut headers: Vec<_> = headers
                .iter()
                .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
                .collect();
            headers.sort();
            headers
        };
        assert_eq!(headers(OtlpBuilder::default(), &[all]), ["a: 1", "b: of all"]);
        assert_eq!(
            headers(OtlpBuilder::default().headers([("x", "z%20")]), &[all, own]),
            ["authorization: Basic dTpw=", "x: z%20"]
        );
    }

    #[test]
    fn timeout_and_compression_are_read() {
        let settings = resolve(
            &OtlpBuilder::default(),
            &[
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "1500"),
                ("OTEL_EXPORTER_OTLP_COMPRESSION", "none"),
                ("OTEL_EXPORTER_OTLP_PROFILES_COMPRESSION", "gzip"),
                ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/ca.pem"),
            ],
        )
        .unwrap();
        assert_eq!(settings.timeout, Duration::from_millis(1500));
        let forever = resolve(&OtlpBuilder::default().timeout(Duration::MAX), &[]).unwrap();
        assert_eq!(forever.timeout, LONGEST_TIMEOUT);
        assert_eq!(settings.compression, Compression::Gzip);
        #[cfg(feature = "tls")]
        assert_eq!(settings.certificate.unwrap().path, PathBuf::from("/ca.pem"));
    }

    #[test]
    fn malformed_values_are_reported_with_their_variable() {
        for (name, value, expected) in [
            ("PROTOCOL", "http/json", "expected grpc or http/protobuf"),
            ("PROFILES_ENDPOINT", "not a url", "expected a URL"),
            ("PROFILES_ENDPOINT", "ftp://collector", "expected a URL"),
            ("PROFILES_ENDPOINT", "/v1/profiles", "expected a URL"),
            ("TIMEOUT", "0", "expected milliseconds"),
            ("TIMEOUT", "10s", "expected milliseconds"),
            ("COMPRESSION", "zstd", "expected gzip or none"),
            ("HEADERS", "authorization", "expected name=value"),
            ("HEADERS", "a b=c", "expected name=value"),
        ] {
            let name = format!("OTEL_EXPORTER_OTLP_{name}");
            let error = resolve(&OtlpBuilder::default(), &[(&name, value)]).err().unwrap();
            assert!(error.contains(expected) && error.starts_with(&name), "{error}");
        }
        let header = OtlpBuilder::default().headers([("a", "new\nline")]);
        assert!(resolve(&header, &[]).err().unwrap().contains("a header"));
        let line = ("OTEL_EXPORTER_OTLP_HEADERS", "a=b%0d%0ac:%20d");
        assert!(resolve(&OtlpBuilder::default(), &[line]).is_err());
    }

    #[test]
    fn headers_that_would_break_a_request_are_refused() {
        for name in ["Content-Length", "transfer-encoding", "content-type", "grpc-timeout"] {
            let set = OtlpBuilder::default().headers([(name, "5")]);
            let error = resolve(&set, &[]).err().unwrap();
            assert!(error.contains("the exporter sets it itself"), "{error}");
            let variable = ("OTEL_EXPORTER_OTLP_HEADERS", format!("{name}=5"));
            assert!(resolve(&OtlpBuilder::default(), &[(variable.0, &variable.1)]).is_err());
        }
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn https_needs_its_feature_and_says_so() {
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4318");
        let error = resolve(&OtlpBuilder::default(), &[endpoint]).err().unwrap();
        assert!(error.starts_with(endpoint.0) && error.contains("feature `otlp-tls`"), "{error}");
        let set = OtlpBuilder::default().endpoint("https://collector:4318");
        let error = resolve(&set, &[]).err().unwrap();
        assert!(error.contains("feature `otlp-tls`"), "{error}");
    }

    #[test]
    fn secrets_are_not_shown() {
        let builder = OtlpBuilder::default()
            .profiles_endpoint("http://host:1/p?token=secret")
            .headers([("authorization", "secret")]);
        let settings = resolve(&builder, &[]).unwrap();
        assert!(!settings.shown_endpoint().contains("secret"), "{}", settings.shown_endpoint());
        let shown = format!("{:?}", OtlpBuilder::default().headers([("a", "secret")]));
        assert!(!shown.contains("secret"), "{shown}");
        let header = OtlpBuilder::default().headers([("authorization: secret", "")]);
        assert!(!resolve(&header, &[]).err().unwrap().contains("secret"));
        for (name, value) in [
            ("HEADERS", "authorization:secret"),
            ("PROFILES_HEADERS", "a=secret\n"),
            ("ENDPOINT", "ftp://me:secret@host"),
            ("ENDPOINT", "http://me:secret@host"),
            ("ENDPOINT", "http://me:se cret@host/secret"),
            ("ENDPOINT", "http://host?token=secret"),
            ("PROFILES_ENDPOINT", "ftp://host/p?token=secret"),
            ("PROFILES_ENDPOINT", "https://me:secret@host/p?token=secret"),
            ("PROFILES_ENDPOINT", "host/p#secret"),
        ] {
            let name = format!("OTEL_EXPORTER_OTLP_{name}");
            let headers = OtlpBuilder::default();
            let error = resolve(&headers, &[(&name, value)]);
            let Err(error) = error else { continue };
            assert!(error.starts_with(&name), "{error}");
            assert!(!error.contains("secret") && !error.contains("cret@"), "{error}");
        }
        // A value that is not valid UTF-8.
        let lossy = |_: &'static str| Err("authorization=secret\u{fffd}".to_owned());
        let error = OtlpBuilder::default().build_with(&lossy).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
    }

    #[test]
    fn the_port_of_an_endpoint_must_be_valid() {
        let resolved = |name: &str, url: &str| {
            resolve(&OtlpBuilder::default(), &[(name, url)]).map(|settings| settings.uri)
        };
        for name in ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT"] {
            for host in ["host", "[::1]", "127.0.0.1", "a.b.c"] {
                for port in [":99999", ":65536", ":0", ":", ":80abc", ":+80", ":-1", ":0x50", "x"] {
                    for (scheme, rest) in
                        [("http", ""), ("http", "/"), ("http", "/p"), ("https", "/")]
                    {
                        if (host, port) == ("host", "x") || host.contains('.') && port == "x" {
                            continue;
                        }
                        let url = format!("{scheme}://{host}{port}{rest}");
                        let error = resolved(name, &url).err().unwrap_or_else(|| panic!("{url}"));
                        assert!(error.starts_with(name), "{url}: {error}");
                    }
                }
                for port in ["", ":1", ":4318", ":65535", ":080"] {
                    let url = format!("http://{host}{port}/");
                    let uri = resolved(name, &url).unwrap_or_else(|error| panic!("{url}: {error}"));
                    let expected = port.strip_prefix(':').map(|port| port.parse().unwrap());
                    assert_eq!(uri.port_u16(), expected, "{url}");
                }
            }
            for url in ["http://:4318", "http://", "http://host 4318", "http://host: 4318"] {
                assert!(resolved(name, url).err().unwrap().starts_with(name), "{url}");
            }
        }
        let whole = "OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT";
        for url in ["http://host:99999?a=b", "http://host:99999#1", "http://host:99999/p#:1"] {
            let error = resolved(whole, url).err().unwrap_or_else(|| panic!("{url}"));
            assert!(error.contains("from 1 to 65535"), "{error}");
        }
        assert!(resolved(whole, "http://host:1/p:99999?:99999#:99999").is_ok());
        let set = OtlpBuilder::default().endpoint("http://host:99999");
        assert!(resolve(&set, &[]).err().unwrap().starts_with("the endpoint is"));
        #[cfg(feature = "grpc")]
        for address in ["host:99999", "host:", "[::1]:0"] {
            let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
            let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", address);
            let error = resolve(&OtlpBuilder::default(), &[grpc, endpoint]).err().unwrap();
            assert!(error.starts_with(endpoint.0), "{error}");
        }
    }

    #[test]
    fn a_user_in_the_endpoint_is_refused_with_advice() {
        for name in ["ENDPOINT", "PROFILES_ENDPOINT"] {
            let name = format!("OTEL_EXPORTER_OTLP_{name}");
            let variable = (name.as_str(), "http://me:secret@host:1/p");
            let error = resolve(&OtlpBuilder::default(), &[variable]).err().unwrap();
            assert!(error.starts_with(&name) && error.contains("authorization=Basic"), "{error}");
        }
        let set = OtlpBuilder::default().endpoint("http://me@host:1");
        assert!(resolve(&set, &[]).is_err());
        let at = OtlpBuilder::default().profiles_endpoint("http://host/@me");
        assert!(resolve(&at, &[]).is_ok());
    }

    #[test]
    fn a_base_with_a_query_or_a_fragment_is_refused() {
        for base in ["http://host/?key=1", "http://host/p#there"] {
            let error = resolve(&OtlpBuilder::default().endpoint(base), &[]).err().unwrap();
            assert!(error.contains("OTEL_EXPORTER_OTLP_PROFILES_ENDPOINT"), "{error}");
        }
        let whole = OtlpBuilder::default().profiles_endpoint("http://host/p?key=1");
        assert_eq!(resolve(&whole, &[]).unwrap().uri, "http://host/p?key=1");
    }

    #[test]
    fn an_unsupported_value_for_all_signals_names_the_variable_for_profiles() {
        for (rest, value) in [("PROTOCOL", "http/json"), ("COMPRESSION", "zstd")] {
            let all = format!("OTEL_EXPORTER_OTLP_{rest}");
            let own = format!("OTEL_EXPORTER_OTLP_PROFILES_{rest}");
            let error = resolve(&OtlpBuilder::default(), &[(&all, value)]).err().unwrap();
            assert!(error.starts_with(&all) && error.contains(&own), "{error}");
            let error = resolve(&OtlpBuilder::default(), &[(&own, value)]).err().unwrap();
            assert!(error.starts_with(&own) && !error.contains("alone"), "{error}");
        }
        let gzip = ("OTEL_EXPORTER_OTLP_COMPRESSION", "GZIP");
        let settings = resolve(&OtlpBuilder::default(), &[gzip]).unwrap();
        assert_eq!(settings.compression, Compression::Gzip);
        #[cfg(feature = "grpc")]
        assert_eq!(uri(&[("OTEL_EXPORTER_OTLP_PROTOCOL", "gRPC")]), "http://localhost:4317/");
    }

    #[test]
    fn a_timeout_of_zero_is_refused() {
        let error = resolve(&OtlpBuilder::default().timeout(Duration::ZERO), &[]).err().unwrap();
        assert!(error.contains("the timeout"), "{error}");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn only_regular_files_of_limited_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let large = dir.path().join("large.pem");
        std::fs::File::create(&large).unwrap().set_len(2 * 1024 * 1024).unwrap();
        let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
        let files = [(path(&large), "larger than"), (path(dir.path()), "not a regular file")];
        let endless = [("/dev/zero".to_owned(), "not a regular file")];
        for (file, expected) in files.into_iter().chain(endless) {
            for names in [CERTIFICATE, CLIENT_CERTIFICATE, CLIENT_KEY] {
                for name in [names.profiles, names.all] {
                    let get = |asked: &str| match asked {
                        _ if asked == name => Ok(Some(file.clone())),
                        // The other setting that this one needs.
                        _ if asked == CLIENT_KEY.all && name.contains("CLIENT_CERT") => {
                            Ok(Some("/nowhere/key.pem".to_owned()))
                        }
                        _ => Ok(None),
                    };
                    let error = OtlpBuilder::default().build_with(&get).unwrap_err().to_string();
                    let is_alone = name.contains("CLIENT_KEY");
                    let expected = if is_alone { "its certificate is missing" } else { expected };
                    assert!(error.starts_with(&format!("{name} is")), "{error}");
                    assert!(error.contains(expected), "{error}");
                }
            }
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn a_file_is_reported_under_the_name_of_its_variable() {
        for names in [CERTIFICATE, CLIENT_CERTIFICATE, CLIENT_KEY] {
            for name in [names.profiles, names.all] {
                let get = |asked: &str| Ok((asked == name).then(|| "/nowhere/shop.pem".to_owned()));
                let error = OtlpBuilder::default().build_with(&get).unwrap_err().to_string();
                assert!(error.starts_with(&format!("{name} is")), "{error}");
            }
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn invalid_settings_are_reported_by_build() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty.pem");
        std::fs::write(&empty, "").unwrap();
        let builder = OtlpExporter::builder;
        for (builder, expected) in [
            (builder().endpoint("collector"), "expected a URL"),
            (builder().profiles_endpoint("http://"), "expected a URL"),
            (builder().headers([("a b", "c")]), "expected a header"),
            (
                builder().certificate("/nowhere/ca.pem"),
                "/nowhere/ca.pem`: it cannot be read: No such file",
            ),
            (builder().certificate(&empty), "the file contains no PEM item of that kind"),
            (
                builder().client_certificate(&empty, &empty),
                "the file contains no PEM item of that kind",
            ),
        ] {
            let error = builder.build().unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

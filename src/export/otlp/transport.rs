//! Sends one request and returns the answer.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderValue, USER_AGENT};
use hyper_util::client::legacy::Client;
#[cfg(not(feature = "otlp-tls"))]
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::protocol::{
    DEVELOPMENT_VERSION, DEVELOPMENT_VERSION_HEADER, ExportProfilesServiceResponse,
};
use super::settings::{Protocol, Settings};
use crate::error::Error;
use crate::export::{Answer, RefusedScope};
use crate::text::disturbs;

#[cfg(feature = "otlp-tls")]
pub(super) use super::tls::Connector;
#[cfg(not(feature = "otlp-tls"))]
pub(super) type Connector = HttpConnector;

/// The maximum number of bytes that are read of an answer.
pub(super) const MOST_ANSWER_BYTES: usize = 64 * 1024;
/// The maximum number of characters that are shown of a server's message.
const MOST_SHOWN_CHARS: usize = 400;

impl Answer {
    /// No answer was received.
    pub(super) fn no_answer(problem: String) -> Self {
        Self::NotNow { after: None, problem }
    }

    /// The receiver calls the request invalid. If it does not know the version of the format, it will accept no profile
    /// until one of both is updated; the protocol forbids to try another version.
    pub(super) fn invalid(problem: String) -> Self {
        if !problem.to_ascii_lowercase().contains(DEVELOPMENT_VERSION_HEADER) {
            return Self::Refused { what: RefusedScope::Request, problem };
        }
        let problem = format!(
            "{problem}; this release of tracing-profiling sends version {DEVELOPMENT_VERSION}: update it, or the receiver"
        );
        Self::Refused { what: RefusedScope::All, problem }
    }

    /// Makes the texts safe for a log, because a server can return anything.
    pub(super) fn single_line(self) -> Self {
        match self {
            Self::Accepted { message } => Self::Accepted { message: shown(&message) },
            Self::NotNow { after, problem } => Self::NotNow { after, problem: shown(&problem) },
            Self::Refused { what, problem } => Self::Refused { what, problem: shown(&problem) },
        }
    }

    /// Checks that the texts fit into one log line.
    #[cfg(fuzzing)]
    pub(super) fn check(&self) {
        let (Self::Accepted { message: text }
        | Self::NotNow { problem: text, .. }
        | Self::Refused { problem: text, .. }) = self;
        assert!(!text.contains(disturbs) && text.chars().count() <= MOST_SHOWN_CHARS);
    }

    pub(super) fn accepted(response: ExportProfilesServiceResponse) -> Self {
        let partial = response.partial_success.unwrap_or_default();
        let message = partial.error_message;
        match partial.rejected_profiles {
            ..=0 => Self::Accepted { message },
            // The receiver counts a profile's samples and waits as two profiles.
            _ => Self::Refused { what: RefusedScope::Request, problem: message },
        }
    }
}

enum Kind {
    #[cfg(feature = "otlp-grpc")]
    Grpc(super::grpc::Grpc),
    #[cfg(feature = "otlp-http")]
    Http(super::http::Http),
}

/// A connection to the server.
pub(super) struct Transport {
    kind: Kind,
    connector: Connector,
    timeout: Duration,
    /// The server's address, for display.
    pub(super) endpoint: String,
}

impl Transport {
    /// Does not connect yet.
    pub(super) fn new(mut settings: Settings) -> Result<Self, Error> {
        let connector = connector(&settings)?;
        let headers = &mut settings.headers;
        headers.entry(USER_AGENT).or_insert(HeaderValue::from_static(super::USER_AGENT));
        headers.insert(DEVELOPMENT_VERSION_HEADER, HeaderValue::from_static(DEVELOPMENT_VERSION));
        let (timeout, endpoint) = (settings.timeout, settings.shown_endpoint());
        let kind = match settings.protocol {
            #[cfg(feature = "otlp-grpc")]
            Protocol::Grpc => {
                Kind::Grpc(super::grpc::Grpc::new(settings, client(&connector, true)))
            }
            #[cfg(feature = "otlp-http")]
            Protocol::HttpProtobuf => {
                Kind::Http(super::http::Http::new(settings, client(&connector, false)))
            }
            // Unreachable: settings exist only for enabled protocols.
            #[cfg(not(all(feature = "otlp-grpc", feature = "otlp-http")))]
            other => {
                return Err(Error::unusable("the protocol", &format!("{other:?}"), "not there"));
            }
        };
        Ok(Self { kind, connector, timeout, endpoint })
    }

    /// Sends a message and waits for the answer until the timeout.
    pub(super) async fn send(&mut self, message: Bytes) -> Answer {
        let deadline = tokio::time::Instant::now() + self.timeout;
        let sent = match &self.kind {
            #[cfg(feature = "otlp-grpc")]
            Kind::Grpc(grpc) => {
                let sent = grpc.send(message, self.timeout);
                tokio::time::timeout_at(deadline, sent).await.ok()
            }
            #[cfg(feature = "otlp-http")]
            Kind::Http(http) => http.send(message, deadline).await,
        };
        let answer = sent.unwrap_or_else(|| {
            // The connection may be dead without an error.
            self.reconnect();
            Answer::no_answer(format!("no answer in {:?}", self.timeout))
        });
        answer.single_line()
    }

    fn reconnect(&mut self) {
        match &mut self.kind {
            #[cfg(feature = "otlp-grpc")]
            Kind::Grpc(grpc) => grpc.client = client(&self.connector, true),
            #[cfg(feature = "otlp-http")]
            Kind::Http(http) => http.client = client(&self.connector, false),
        }
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// A client that connects on first use, and again after the connection is lost.
pub(super) fn client<B>(connector: &Connector, is_http2: bool) -> Client<Connector, B>
where
    B: http_body::Body + Send,
    B::Data: Send,
{
    let mut builder = Client::builder(TokioExecutor::new());
    #[cfg(feature = "otlp-grpc")]
    builder.http2_only(is_http2);
    #[cfg(not(feature = "otlp-grpc"))]
    debug_assert!(!is_http2, "it cannot be");
    builder.pool_timer(TokioTimer::new()).build(connector.clone())
}

#[cfg(feature = "otlp-tls")]
fn connector(settings: &Settings) -> Result<Connector, Error> {
    Connector::new(settings)
}

#[cfg(not(feature = "otlp-tls"))]
fn connector(_: &Settings) -> Result<Connector, Error> {
    Ok(HttpConnector::new())
}

/// A single line of bounded length.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !disturbs(*c)).take(MOST_SHOWN_CHARS).collect()
}

/// An error with all its sources.
pub(super) fn whole(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let cause = error.to_string();
        // Some errors repeat their source.
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        next = error.source();
    }
    text
}

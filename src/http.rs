//! Rules, state and profiles over HTTP.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Map, Value};
use tokio::task::spawn_blocking;

use crate::error::Error;
use crate::export::{StoredFile, list_stored, read_stored};
use crate::handle::Handle;
use crate::keep::{Reason, Rules};
use crate::origin::{Hosts, refuse_foreign};

const LONGEST_RULES: usize = 64 * 1024;

/// A flame graph may run its own script and ask what to search for. It reaches nothing: not the origin
/// that it comes from either.
const POLICY_OF_PICTURES: &str = "sandbox allow-scripts allow-modals; default-src 'none'; \
    script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'";
const POLICY: &str = "sandbox; default-src 'none'; frame-ancestors 'none'";

/// What went wrong, as it is answered.
type Failure = (StatusCode, String);

impl Handle {
    /// Routes that show and change what is kept while the program runs, and hand out profiles, to be
    /// mounted on a port of the program's own. Nothing runs by itself. Needs the feature `axum`.
    ///
    /// **There is no authentication.** Whoever reaches these routes reads every profile, which has the
    /// names of your functions and spans, and changes what the program does: `PUT`, `POST` and
    /// `DELETE` replace the rules and turn profiling on and off. Mount them where nobody from outside
    /// gets to, and not on the port that serves your users: on a port of `127.0.0.1`, or behind what
    /// protects your other routes for operators. [The guide](crate::guide::live_control) has an example with
    /// a token.
    ///
    /// Pages of other sites, open in a browser on a machine that reaches the port, cannot use them:
    ///
    /// - Requests are answered for the host `localhost` and for loopback addresses, whatever the port;
    ///   [`router_for`](Self::router_for) adds others. For any other host the answer is 421. So no name of
    ///   somebody else's that leads to this machine makes the profiles theirs.
    /// - What changes something is answered with 403 if it comes from a page of another origin, as `Origin` and
    ///   `Sec-Fetch-Site` tell. What has neither, as from `curl`, passes.
    ///
    /// ```no_run
    /// use axum::Router;
    /// use tracing_profiling::ProfilingLayer;
    ///
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let profiling = ProfilingLayer::from_env()?;
    /// let admin = Router::new().nest("/profiling", profiling.handle().router());
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:9999").await?;
    /// axum::serve(listener, admin).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// `/` is the very path at which they are nested, without a slash at its end:
    ///
    /// | | |
    /// |---|---|
    /// | `GET /` | the state, as JSON: `enabled`, `rules`, [`source`](Self::source), `kept` by reason, and all of [`Stats`](crate::Stats) |
    /// | `POST /` | [`enable`](Self::enable), and the state |
    /// | `DELETE /` | [`disable`](Self::disable), and the state |
    /// | `GET /rules` | the rules, as text in the syntax of `TRACING_PROFILING` |
    /// | `PUT /rules` | [replaces](Self::set_rules) the rules by those in the body, and returns them; 400 with the place if they do not parse, or there are none: then the rules stay. At most 64 KiB |
    /// | `GET /profiles` | the files of profiles, the newest first, as JSON: `name`, `bytes`, `time` |
    /// | `GET /profiles/NAME` | one of them; 404 for everything that is not in that list |
    ///
    /// When the layer is gone or [shut down](Self::shutdown), `PUT` and `POST` answer 503, while the
    /// others tell what there is: nothing, and what lies in the folder. Profiles are those in the folder
    /// of the layer's [`Directory`](crate::Directory), also such of earlier runs of the program; the
    /// list is empty where another [`Exporter`](crate::Exporter) takes them (but see
    /// [`Exporter::directory`](crate::Exporter::directory)).
    ///
    /// What may block runs beside tokio's runtime, in which the routes must be served.
    pub fn router(&self) -> Router {
        self.router_for([""; 0])
    }

    /// The same, also for these hosts: the names and addresses by which the routes are asked for, as in
    /// `shop.internal` or `10.0.0.7`. Their ports do not matter.
    pub fn router_for(&self, hosts: impl IntoIterator<Item = impl AsRef<str>>) -> Router {
        Router::new()
            .route("/", get(state).post(enable).delete(disable))
            .route("/rules", get(rules).put(set_rules))
            .route("/profiles", get(profiles))
            .route("/profiles/{name}", get(profile))
            .layer(DefaultBodyLimit::max(LONGEST_RULES))
            .layer(from_fn_with_state(Hosts::new(hosts), refuse_foreign))
            .layer(map_response(protect))
            .with_state(self.clone())
    }
}

async fn state(State(handle): State<Handle>) -> Result<Json<Value>, Failure> {
    blocking(move || Ok(Json(describe(&handle)))).await
}

async fn enable(State(handle): State<Handle>) -> Result<Json<Value>, Failure> {
    let enable = move || {
        handle.enable().map_err(not_now)?;
        Ok(Json(describe(&handle)))
    };
    blocking(enable).await
}

async fn disable(State(handle): State<Handle>) -> Result<Json<Value>, Failure> {
    let disable = move || {
        handle.disable();
        Ok(Json(describe(&handle)))
    };
    blocking(disable).await
}

async fn rules(State(handle): State<Handle>) -> Result<String, Failure> {
    blocking(move || Ok(handle.rules().to_string())).await
}

async fn set_rules(State(handle): State<Handle>, body: Bytes) -> Result<String, Failure> {
    let bad = |problem: String| (StatusCode::BAD_REQUEST, problem);
    let set = move || {
        let text = str::from_utf8(&body).map_err(|_| bad("rules are text in UTF-8".to_owned()))?;
        if text.trim().is_empty() {
            // Where it is not meant it would be hard to see.
            return Err(bad("there are no rules: say `off` to keep nothing".to_owned()));
        }
        let rules: Rules = text.trim().parse().map_err(|error: Error| bad(error.to_string()))?;
        handle.set_rules(rules).map_err(not_now)?;
        Ok(handle.rules().to_string())
    };
    blocking(set).await
}

async fn profiles(State(handle): State<Handle>) -> Result<Json<Value>, Failure> {
    let list = move || {
        let folder = handle.folder();
        let files = folder.map(|folder| list_stored(&folder)).transpose().map_err(unreadable)?;
        let files = files.unwrap_or_default().into_iter();
        Ok(Json(files.map(describe_file).collect()))
    };
    blocking(list).await
}

async fn profile(
    State(handle): State<Handle>,
    Path(name): Path<String>,
) -> Result<Response, Failure> {
    let read = move || {
        let content_type = content_type(&name);
        let folder = handle.folder();
        let read = folder.map(|folder| read_stored(&folder, &name)).transpose();
        let found = read.map_err(unreadable)?.flatten();
        let bytes = found.ok_or((StatusCode::NOT_FOUND, "no such profile".to_owned()))?;
        Ok(([(header::CONTENT_TYPE, content_type)], bytes).into_response())
    };
    blocking(read).await
}

/// Runs what may wait for a lock or a file where it stops no other task.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let done = spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())))
}

fn not_now(error: Error) -> Failure {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

fn unreadable(error: io::Error) -> Failure {
    let problem = format!("cannot read the folder of profiles: {error}");
    (StatusCode::INTERNAL_SERVER_ERROR, problem)
}

fn describe(handle: &Handle) -> Value {
    let stats = handle.stats();
    let kept = Reason::ALL.iter().map(|reason| (reason.as_str(), stats.kept_for(*reason)));
    object([
        ("enabled", handle.is_enabled().into()),
        ("rules", handle.rules().to_string().into()),
        ("source", handle.source().into()),
        ("kept", object(kept)),
        ("stats", object(stats.iter())),
    ])
}

fn describe_file(file: StoredFile) -> Value {
    object([
        ("name", Value::from(file.name)),
        ("bytes", file.bytes.into()),
        ("time", time(file.modified).into()),
    ])
}

fn object<V: Into<Value>>(members: impl IntoIterator<Item = (&'static str, V)>) -> Value {
    let members = members.into_iter().map(|(name, value)| (name.to_owned(), value.into()));
    Value::Object(members.collect::<Map<_, _>>())
}

/// Of files only what has four digits of year: nothing else can be written so.
fn time(time: SystemTime) -> String {
    const LAST: Duration = Duration::from_secs(253_402_300_799);
    let time = time.clamp(UNIX_EPOCH, UNIX_EPOCH + LAST);
    humantime::format_rfc3339_millis(time).to_string()
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit('.').next() {
        Some("svg") => SVG,
        Some("otlp") => "application/x-protobuf",
        // Not as an encoding: readers of pprof want it packed.
        _ => "application/octet-stream",
    }
}

const SVG: &str = "image/svg+xml";
const CROSS_ORIGIN_RESOURCE_POLICY: HeaderName =
    HeaderName::from_static("cross-origin-resource-policy");

/// Nothing that is answered can do anything in a browser, but for a flame graph in its own window.
async fn protect(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let is_picture = headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == SVG);
    let policy = if is_picture { POLICY_OF_PICTURES } else { POLICY };
    let says: [(HeaderName, &'static str); 5] = [
        (CROSS_ORIGIN_RESOURCE_POLICY, "same-origin"),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    for (name, value) in says {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

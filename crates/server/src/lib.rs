//! Rules, state and profiles of [`tracing_profiling`] over HTTP, for programs and as a page: [`router`].

#![forbid(unsafe_code)]

mod answer;
mod compare;
mod heap;
mod kept;
mod origin;
mod process;
mod routes;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRef, OriginalUri, Path, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{from_fn, from_fn_with_state, map_response};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing_profiling::encode::pprof_of_threads;
use tracing_profiling::{Builder, Format, Handle, OpenSpan, ProfileKind, Reason, Rules};
use tracing_profiling_profile::encode::TEXTS_SCRIPT;
use tracing_profiling_profile::export::OF_PROCESS;
use tracing_profiling_profile::export::stored::{StoredFile, list_stored, read_stored};
use tracing_profiling_profile::facts::format::nanoseconds;

use crate::answer::{
    Failure, HTML, bad_request, blocking, is_text, no_answer, not_found, not_now, pprof_file, time,
    unreadable, value_in,
};
use crate::origin::{Hosts, refuse_foreign, refuse_links};

const LONGEST_RULES: usize = 64 * 1024;

const PAGE: &str = include_str!("index.html");
/// The page of routes and of comparisons.
const TYPICAL_PAGE: &str = include_str!("typical.html");
const PPROF_PAGE: &str = include_str!("pprof.html");
const STYLE: &str = include_str!("index.css");
/// After [`TEXTS_SCRIPT`].
const SCRIPT: &str = include_str!("index.js");

/// Allows the page to use its style and script, and these routes.
const POLICY_OF_PAGE: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Allows a report to use its style and script, of which its own policy states the hashes: they differ between releases.
/// Links to traces and sources open elsewhere.
const POLICY_OF_REPORTS: &str = "sandbox allow-scripts allow-popups allow-popups-to-escape-sandbox; \
    default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'";
const POLICY: &str = "sandbox; default-src 'none'; frame-ancestors 'none'";

/// What the routes work on.
#[derive(Clone, Debug)]
struct Routed {
    handle: Handle,
    /// Places for requests whose work takes seconds, on threads that the program shares.
    lanes: Arc<Semaphore>,
    /// For those that wait, and work only before and after.
    waiting: Arc<Semaphore>,
}

impl FromRef<Routed> for Handle {
    fn from_ref(routed: &Routed) -> Self {
        routed.handle.clone()
    }
}

const MOST_LANES: usize = 2;

/// A place, until the work is done: also if the client goes away before.
fn take_place(places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Failure> {
    Arc::clone(places).try_acquire_owned().map_err(|_| {
        let text = format!("{MOST_LANES} such requests are being answered; try again in a moment");
        (StatusCode::SERVICE_UNAVAILABLE, text)
    })
}

/// Routes that show and change what is kept at run time, and that return profiles. The program mounts them on a
/// port of its own; nothing is served automatically.
///
/// **There is no authentication.** A client that can reach these routes can read every profile, including the names
/// of your functions and spans, and can change what the program does: `PUT`, `POST` and `DELETE` replace the rules
/// and turn profiling on and off. Do not mount them on the port that serves your users. Use a port of `127.0.0.1`,
/// or the protection of your other routes for operators; `examples/admin_token.rs` has a token. [The
/// guide](https://docs.rs/tracing-profiling/latest/tracing_profiling/guide/live_control/index.html) has more.
///
/// Pages of other sites in a browser that can reach the port cannot use the routes:
///
/// - Requests are served for the host `localhost` and for loopback addresses, with any port;
///   [`router_for`] adds other hosts. Requests for any other host get status 421. This prevents
///   DNS rebinding.
/// - Requests get status 403 if they come from a page of another origin, according to `Origin` and `Sec-Fetch-Site`.
///   Requests with neither header, as from `curl`, are allowed, and so are links to the page and to profiles.
///
/// At most two requests at once may do what takes seconds (`/kept`, `/open`, those of the heap and of
/// threads); others get status 503.
///
/// ```no_run
/// use axum::Router;
/// use tracing_profiling::ProfilingLayer;
///
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let profiling = ProfilingLayer::from_env()?;
/// let admin = Router::new().nest("/profiling", tracing_profiling_server::router(&profiling.handle()));
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:9999").await?;
/// axum::serve(listener, admin).await?;
/// # Ok(())
/// # }
/// ```
///
/// The path `/` is the one at which the routes are nested, without a trailing slash:
///
/// | | |
/// |---|---|
/// | `GET /` | a page for browsers (`Accept: text/html`): what was kept, the state and the rules; otherwise the state, as JSON: `enabled`, `rules`, [`source`](Handle::source), `kept` by reason, and all of [`Stats`](tracing_profiling::Stats) |
/// | `POST /` | [turns profiling on](Handle::set_enabled); returns the state |
/// | `DELETE /` | turns it off; returns the state |
/// | `GET /rules` | the rules, as text in the syntax of `TRACING_PROFILING` |
/// | `PUT /rules` | [replaces](Handle::set_rules) the rules by those in the body, and returns them; 400 with the position of the error if they do not parse or are empty, 503 if there were [too many](Handle::set_rules); and the rules stay as they are. At most 64 KiB |
/// | `GET /kept` | what was kept, the newest first, as JSON: spans that this process kept, with and without a profile, and profiles of earlier runs. 100 of them without `?limit=`, and at most 1,000; `total` says how many there are |
/// | `GET /kept/ID` | what was kept under that `id`: the report of the profile, or with `Accept: text/markdown` or `application/json` [the most important of it](tracing_profiling::encode::markdown) in 2 KiB. Where there is no report, as of a span that failed before a sample fell in it, whose `id` begins with `span-`, a short form for the last 1,000 spans that this process kept; else 404 |
/// | `GET /open?older_than=1s` | the [open spans](Handle::open_spans) that are older than that (1 s without it), the oldest first, as JSON, each with its state and where it is. At most 1,000; 503 if the layer's threads do not answer in 30 s |
/// | `GET /debug/pprof/heap` | the [live heap](Handle::heap_profile) for `go tool pprof` and what scrapes such profiles: `alloc_objects`, `alloc_space`, `inuse_objects` and `inuse_space`, gzipped; with `?debug=1` as text. 404 if the layer does not track it. With `?seconds=30`, what has grown in that time, from which the next `POST` then counts; two such requests can wait at once. |
/// | `GET /debug/pprof/allocs` | the same, of which `alloc_space` is shown first |
/// | `POST /debug/pprof/heap` | [what has grown](Handle::heap_growth) since the last such request |
/// | `GET /debug/pprof/threads` | [all threads](Handle::threads), a sample each, for `go tool pprof`; with `?debug=1` as text. 503 if the layer is off, or if its threads do not answer in 30 s. |
/// | `GET /debug/pprof/` | a page with links to these profiles. |
/// | `GET /continuous` | the rate of the [continuous profile](tracing_profiling::Builder::continuous) in samples per second of CPU time, or `off`, as text |
/// | `PUT /continuous` | changes it: the body is `on`, `off` or a rate; 400 if it is something else |
/// | `GET /debug/pprof/profile?seconds=30` | a [profile of the process](Handle::profile) of that many seconds (30 without it), for `go tool pprof` and what scrapes such profiles, gzipped; `hz=` sets the samples per second of CPU time, and with `format=html` the answer is a report. It ends if the client goes away. 500 while another one is being made, or if there can be none; 400 for more than an hour or 1,000 samples. |
/// | `GET /debug/pprof/wall?seconds=30` | the same of their [wall time](tracing_profiling::ProfileKind::Wall): where all threads are, running or blocked; `hz=` sets how often they are visited per second, 20 without it and at most 100. 400 with `format=html` |
/// | `GET /routes` | what is typical of each route, the one with the most time first, as JSON or for browsers as a page: of this hour and the one before, how many [reference spans](tracing_profiling::Builder::references) there are, how many requests by their probabilities, `p50_ms` and others where there are enough references, the mean wall time and its parts, what [drift](https://docs.rs/tracing-profiling/latest/tracing_profiling/guide/live_control/index.html#typical-requests) was found, and the slowest kept spans. With `?route=NAME` one of them |
/// | `GET /routes/profile?route=NAME` | the typical request of a route, the mean of the last references, as pprof; `format=` is that of a [`Format`], such as `html` or `otlp`. 404 if there is no such route |
/// | `GET /compare?route=NAME` | the mean request in this hour and the one before against that of the last other version of the service, as JSON or as a page; if none is stored, against the same hour of the day before. `before=` and `after=` are stored versions, or hours in UTC, such as `2026-11-25T14`. 404 if nothing is stored of them |
/// | `GET /profiles` | the files of profiles, the newest first, as JSON: `name`, `bytes`, `time` |
/// | `GET /profiles/NAME` | the file of that name; 404 if it is not in the list |
/// | `GET /process`, `/process/NAME` | the same for the newest 100 files of the [continuous profile](tracing_profiling::Builder::continuous) |
///
/// After the layer was [shut down](Handle::shutdown), `PUT` and `POST` get status 503, and the other
/// routes return what is left: no state, and the files in the directory. Profiles are those in the directory of the
/// layer's [`Directory`](tracing_profiling::Directory), including those of earlier runs of the program. If another
/// [`Exporter`](tracing_profiling::Exporter) is used, the list is empty (but see
/// [`Exporter::directory`](tracing_profiling::Exporter::directory)).
///
/// Blocking work runs on at most 16 threads of its own.
pub fn router(handle: &Handle) -> Router {
    router_for(handle, [""; 0])
}

/// Like [`router`], but also serves requests for these hosts: names and addresses such as
/// `shop.internal` or `10.0.0.7`. Their ports do not matter.
pub fn router_for(handle: &Handle, hosts: impl IntoIterator<Item = impl AsRef<str>>) -> Router {
    remember_kept(handle);
    let slow = Router::new()
        .route("/kept", get(kept))
        .route("/open", get(open))
        .route("/compare", get(compared))
        .route("/debug/pprof/heap", get(heap::in_use).post(heap::growth))
        .route("/debug/pprof/allocs", get(heap::allocated))
        .route("/debug/pprof/threads", get(all_threads))
        .route("/debug/pprof/profile", get(|it, uri| process::answer(it, uri, ProfileKind::Cpu)))
        .route("/debug/pprof/wall", get(|it, uri| process::answer(it, uri, ProfileKind::Wall)));
    let [lanes, waiting] = [(); 2].map(|()| Arc::new(Semaphore::new(MOST_LANES)));
    let routed = Routed { handle: handle.clone(), lanes, waiting };
    slow.layer(from_fn(refuse_links))
        .route("/debug/pprof", get(|| async { Redirect::temporary("pprof/") }))
        .route("/debug/pprof/", get(|| async { asset(HTML, PPROF_PAGE) }))
        .route("/", get(page_or_state).post(|it| switch(it, true)).delete(|it| switch(it, false)))
        .route("/index.css", get(|| async { asset("text/css", STYLE) }))
        .route(
            "/index.js",
            get(|| async { asset("text/javascript", &[TEXTS_SCRIPT, SCRIPT].concat()) }),
        )
        .route("/rules", get(rules).put(set_rules))
        .route("/continuous", get(continuous).put(set_continuous))
        .route("/routes", get(typical_routes))
        .route("/routes/profile", get(typical_profile))
        .route("/kept/{id}", get(one_kept))
        .route("/profiles", get(|it| list_files(it, "", usize::MAX)))
        .route("/profiles/{name}", get(|it, name| read_file(it, name, "")))
        .route("/process", get(|it| list_files(it, OF_PROCESS, MOST_OF_PROCESS)))
        .route("/process/{name}", get(|it, name| read_file(it, name, OF_PROCESS)))
        .layer(DefaultBodyLimit::max(LONGEST_RULES))
        .layer(from_fn_with_state(Hosts::new(hosts), refuse_foreign))
        .layer(map_response(protect))
        .with_state(routed)
}

/// The layer remembers what it keeps from the first question on, once it runs.
fn remember_kept(handle: &Handle) {
    _ = handle.recently_kept();
}

/// The page for a browser, and the state for everything else.
async fn page_or_state(
    State(handle): State<Handle>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    if let Some(page) = page_for(&headers, PAGE, &uri, "") {
        return Ok(page);
    }
    let state = blocking(move || Ok(Json(describe(&handle)))).await?;
    Ok(([(header::VARY, "accept")], state).into_response())
}

/// What is typical of all routes, or of the one in the query.
async fn typical_routes(
    State(handle): State<Handle>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    if let Some(page) = page_for(&headers, TYPICAL_PAGE, &uri, "/routes") {
        return Ok(page);
    }
    let wanted = value_in(uri.query(), "route");
    let answer = move || {
        let found = routes::summaries(&handle, wanted.as_deref());
        let all = json!({ "version": routes::own_version(&handle), "routes": found });
        Ok(([(header::VARY, "accept")], Json(all)).into_response())
    };
    blocking(answer).await
}

/// The profile of the typical request of a route.
async fn typical_profile(
    State(handle): State<Handle>,
    OriginalUri(uri): OriginalUri,
) -> Result<Response, Failure> {
    let encode = move || {
        let route = value_in(uri.query(), "route").ok_or_else(not_found)?;
        let format = value_in(uri.query(), "format").unwrap_or_else(|| "pprof".to_owned());
        let format = format.parse::<Format>().map_err(bad_request)?;
        let profile = handle.typical_request(&route).ok_or_else(not_found)?;
        let encoded = format.encode(&profile, &handle.report_context());
        let bytes = encoded.ok_or_else(not_found)?;
        let file = format!("attachment; filename=\"typical{}\"", format.extension());
        let of_file = [(header::CONTENT_TYPE, content_type(format.extension()))];
        Ok(match format {
            Format::Html => (of_file, bytes).into_response(),
            _ => (of_file, [(header::CONTENT_DISPOSITION, file)], bytes).into_response(),
        })
    };
    blocking(encode).await
}

/// A route in two versions of the service, or in two hours.
async fn compared(
    State(routed): State<Routed>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    if let Some(page) = page_for(&headers, TYPICAL_PAGE, &uri, "/compare") {
        return Ok(page);
    }
    let compare = move |handle: &Handle| {
        let value = |name| value_in(uri.query(), name);
        let route = value("route").ok_or_else(|| bad_request("`route` is missing in the query"))?;
        let (before, after) = (value("before"), value("after"));
        let compared = compare::compared(handle, &route, before.as_deref(), after.as_deref())?;
        Ok(([(header::VARY, "accept")], Json(compared)).into_response())
    };
    slow(routed, compare).await
}

fn accepted(headers: &HeaderMap) -> &str {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    accept.unwrap_or_default()
}

/// If a browser asks, the page, whose links begin at the path at which the routes are nested. `at`: its own path there.
fn page_for(headers: &HeaderMap, page: &str, uri: &Uri, at: &str) -> Option<Response> {
    if !accepted(headers).contains("text/html") {
        return None;
    }
    let path = uri.path().strip_suffix(at).unwrap_or(uri.path());
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/-._~%:@!$+,;=".contains(c);
    let base: String = path.trim_end_matches('/').chars().filter(|c| is_plain(*c)).collect();
    let formats: String = Format::available().flat_map(|format| [format.as_str(), " "]).collect();
    let page = page.replace("{{formats}}", &formats);
    let page = page.replace("{{home}}", if base.is_empty() { "/" } else { &base });
    Some(asset(HTML, &page.replace("{{base}}", &format!("{base}/"))))
}

fn asset(content_type: &'static str, text: &str) -> Response {
    let headers = [(header::CONTENT_TYPE, content_type), (header::VARY, "accept")];
    (headers, text.to_owned()).into_response()
}

async fn kept(
    State(routed): State<Routed>,
    OriginalUri(uri): OriginalUri,
) -> Result<Json<Value>, Failure> {
    let limit = value_in(uri.query(), "limit").map_or(Ok(kept::USUAL), |text| text.parse());
    let limit = limit.map_err(|_| bad_request("`limit` must be a number of entries"))?;
    slow(routed, move |handle| Ok(Json(kept::list(handle, limit).map_err(unreadable)?))).await
}

/// A profile in the form that the client prefers.
async fn one_kept(
    State(handle): State<Handle>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let form = kept::Form::accepted(accepted(&headers));
    let read = move || {
        let found = kept::one(&handle, &id, form).map_err(unreadable)?;
        let (form, text) = found.ok_or_else(not_found)?;
        // A report is shown like a file, without the headers of the pages around it.
        Ok(([(header::CONTENT_TYPE, form.content_type())], text).into_response())
    };
    blocking(read).await
}

async fn open(
    State(routed): State<Routed>,
    OriginalUri(uri): OriginalUri,
) -> Result<Json<Value>, Failure> {
    const USUAL: Duration = Duration::from_secs(1);
    let older_than = value_in(uri.query(), "older_than");
    let older_than = older_than.map_or(Ok(USUAL), |text| humantime::parse_duration(&text));
    let older_than = older_than.map_err(|error| {
        bad_request(format!("`older_than` must be a duration, such as `5s` or `200ms`: {error}"))
    })?;
    let list = move |handle: &Handle| {
        let open = handle.open_spans(older_than).map_err(no_answer)?;
        Ok(Json(open.into_iter().map(describe_open).collect()))
    };
    slow(routed, list).await
}

/// All threads, as Go's `net/http/pprof` serves goroutines: as text if the query asks for that.
async fn all_threads(
    State(routed): State<Routed>,
    OriginalUri(uri): OriginalUri,
) -> Result<Response, Failure> {
    let dump = move |handle: &Handle| {
        let dump = handle.threads().map_err(no_answer)?;
        Ok(match is_text(uri.query()) {
            true => dump.to_string().into_response(),
            false => pprof_file("threads", pprof_of_threads(&dump)),
        })
    };
    slow(routed, dump).await
}

fn describe_open(span: OpenSpan) -> Value {
    let ms = |time: Duration| tracing_profiling_profile::text::ms(nanoseconds(time));
    json!({
        "span": span.name,
        "target": span.target,
        "fields": Value::from_iter(span.fields),
        "open_ms": ms(span.open_for),
        "state": span.state.as_str(),
        "state_ms": span.state_for.map(ms),
        "stack": span.stack,
    })
}

async fn switch(State(handle): State<Handle>, is_on: bool) -> Result<Json<Value>, Failure> {
    let switch = move || {
        // There is nothing to turn off in a layer that has ended.
        handle
            .set_enabled(is_on)
            .or_else(|error| if is_on { Err(not_now(error)) } else { Ok(()) })?;
        remember_kept(&handle);
        handle.log_rules("HTTP");
        Ok(Json(describe(&handle)))
    };
    blocking(switch).await
}

async fn rules(State(handle): State<Handle>) -> Result<String, Failure> {
    blocking(move || Ok(handle.rules().to_string())).await
}

async fn set_rules(State(handle): State<Handle>, body: Bytes) -> Result<String, Failure> {
    let set = move || {
        let text = str::from_utf8(&body).map_err(|_| bad_request("rules are text in UTF-8"))?;
        if text.trim().is_empty() {
            // An empty body is likely a mistake that would be hard to spot.
            return Err(bad_request("the body contains no rules: use `off` to keep nothing"));
        }
        let rules = text.trim().parse::<Rules>().map_err(bad_request)?;
        handle.set_rules(rules).map_err(not_now)?;
        remember_kept(&handle);
        handle.log_rules("HTTP");
        Ok(handle.rules().to_string())
    };
    blocking(set).await
}

/// The rate of the continuous profile, as text.
async fn continuous(State(handle): State<Handle>) -> String {
    match handle.continuous() {
        0 => "off".to_owned(),
        rate => rate.to_string(),
    }
}

async fn set_continuous(State(handle): State<Handle>, body: String) -> Result<String, Failure> {
    let rate = match body.trim() {
        "on" => Some(Builder::USUAL_CONTINUOUS_RATE),
        "off" => Some(0),
        rate => rate.parse().ok().filter(|rate| (1..=1_000).contains(rate)),
    };
    let expected = "the body must be `on`, `off`, or samples per second, from 1 to 1000";
    handle.set_continuous(rate.ok_or_else(|| bad_request(expected))?).map_err(not_now)?;
    Ok(continuous(State(handle)).await)
}

/// How many files of the continuous profile are listed, the newest first.
const MOST_OF_PROCESS: usize = 100;

/// The files in a part of the directory, which can be empty for those of spans.
async fn list_files(
    State(handle): State<Handle>,
    part: &'static str,
    most: usize,
) -> Result<Json<Value>, Failure> {
    let list = move || {
        let dir = handle.directory().map(|dir| dir.join(part));
        let files = dir.map(|dir| list_stored(&dir)).transpose().map_err(unreadable)?;
        let files = files.unwrap_or_default().into_iter().take(most);
        let of = |file: StoredFile| json!({ "name": file.name, "bytes": file.bytes, "time": time(file.modified) });
        Ok(Json(files.map(of).collect()))
    };
    blocking(list).await
}

async fn read_file(
    State(handle): State<Handle>,
    Path(name): Path<String>,
    part: &'static str,
) -> Result<Response, Failure> {
    let read = move || {
        let dir = handle.directory().map(|dir| dir.join(part));
        let content_type = content_type(&name);
        let read = dir.map(|dir| read_stored(&dir, &name)).transpose();
        let found = read.map_err(unreadable)?.flatten();
        let bytes = found.ok_or((StatusCode::NOT_FOUND, "no such profile".to_owned()))?;
        Ok(([(header::CONTENT_TYPE, content_type)], bytes).into_response())
    };
    blocking(read).await
}

/// Runs work that takes seconds, if there is a place for it.
async fn slow<T: Send + 'static>(
    routed: Routed,
    work: impl FnOnce(&Handle) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let lane = take_place(&routed.lanes)?;
    let work = move || {
        let _lane = lane;
        work(&routed.handle)
    };
    blocking(work).await
}

fn describe(handle: &Handle) -> Value {
    let stats = handle.stats();
    let kept = Reason::all().map(|reason| (reason.as_str(), stats.kept_for(reason)));
    json!({
        "enabled": handle.is_enabled(),
        "rules": handle.rules().to_string(),
        "source": handle.source(),
        "kept": Value::from_iter(kept),
        "stats": Value::from_iter(stats.iter()),
        "now": time(SystemTime::now()),
        "trace_url": handle.report_context().trace_template(),
    })
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit('.').next() {
        Some("html") => HTML,
        Some("folded") => "text/plain; charset=utf-8",
        Some("md") => "text/markdown; charset=utf-8",
        Some("otlp") => "application/x-protobuf",
        // Not as a content encoding: readers of pprof expect it to be compressed.
        _ => "application/octet-stream",
    }
}

/// Adds headers so that a response can do nothing in a browser, except for the page, and a report in its own window.
async fn protect(mut response: Response) -> Response {
    let is_asset = response.headers().contains_key(header::VARY);
    let headers = response.headers_mut();
    let policy = match headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()) {
        Some(HTML) if is_asset => POLICY_OF_PAGE,
        Some(HTML) => POLICY_OF_REPORTS,
        _ => POLICY,
    };
    let protection: [(HeaderName, &'static str); 5] = [
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    for (name, value) in protection {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

//! The service: axum on tokio, SQLite and JSON. Its process prints the port that it listens on. Each input line then
//! asks for its CPU time and its requests so far, or for what the layer has done.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::ready;
use std::path::Path as FilePath;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request, State as Extracted};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::future::RouteFuture;
use axum::routing::get;
use axum::serve::IncomingStream;
use cpu_time::{ProcessTime, ThreadTime};
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tower::{Service, service_fn};
use tower_http::trace::{DefaultMakeSpan, TraceLayer};
use tracing::instrument::{Instrument, Instrumented};
use tracing::level_filters::LevelFilter;
use tracing::{Level, Span, info_span};
use tracing_profiling::{Builder, Directory, Handle, ProfiledExt, ProfilingLayer, Source};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::process::resident_kib;

/// Few rows that share pages: SQLite takes a lock per page that all connections share, and lock contention is not
/// measured here.
const PRODUCTS: u32 = 2_000;
pub(super) const ORDERS: u32 = 500;
const ITEMS: u32 = 60;
/// How long a slow request takes, for a rule of 250 ms.
const SLOW: Duration = Duration::from_millis(300);
/// One in this many requests is slow.
const SLOW_EACH: u64 = 100;
/// How many orders a request reads that runs on a blocking thread.
const ORDERS_OF_A_LIST: u32 = 20;

/// What the layer of a server has done so far, for one.
#[derive(Deserialize, Serialize)]
pub(super) struct State {
    pub(super) resident_kib: f64,
    /// CPU time of the layer's threads.
    pub(super) own_cpu_ns: u64,
    pub(super) stats: BTreeMap<String, u64>,
}

/// The process of a server; its last two arguments are the kind and the lifetime in seconds of connections that have a
/// span, which is 0 if they have none.
pub(crate) fn child() {
    let arguments: Vec<String> = std::env::args().collect();
    let [.., kind, life_s] = &arguments[..] else { panic!("{arguments:?}") };
    let directory = tempfile::tempdir().expect("a directory");
    // For experiments; no variables are set when the published figures are measured.
    let builder = ProfilingLayer::builder().with_env().expect("settings");
    let ours = || {
        let layer =
            set(builder, kind).exporter(Directory::new(directory.path())).build().expect("threads");
        let handle = layer.handle();
        (layer, handle)
    };
    // The README's: what prints is filtered. Its output is discarded.
    let fmt = |filter| {
        let fmt = tracing_subscriber::fmt::layer().with_writer(std::io::sink);
        tracing_subscriber::registry().with(fmt.with_filter(EnvFilter::new(filter)))
    };
    let mut handle = None;
    match kind.as_str() {
        NO_SUBSCRIBER => {}
        WITHOUT => fmt("info").init(),
        NOT_PRINTED => fmt("warn").init(),
        // A registry without any layer never closes a span.
        DO_NOTHING => tracing_subscriber::registry().with(Identity::new()).init(),
        OTEL => {
            let tracer = SdkTracerProvider::builder().build().tracer("bench");
            let otel = tracing_opentelemetry::layer().with_tracer(tracer);
            fmt("info").with(otel.with_filter(LevelFilter::INFO)).init();
        }
        ALONE => {
            let (layer, of_layer) = ours();
            handle = Some(of_layer);
            tracing_subscriber::registry().with(layer).init();
        }
        _ => {
            let (layer, of_layer) = ours();
            handle = Some(of_layer);
            fmt(if kind == ONLY_OURS { "warn" } else { "info" }).with(layer).init();
        }
    }
    let life = Duration::from_secs(life_s.parse().expect("seconds"));
    serve(handle.as_ref(), life, kind == AWAITS);
}

/// The README's subscriber, without the layer.
pub(super) const WITHOUT: &str = "without";
/// The same with that of tracing-opentelemetry, which has no exporter.
pub(super) const OTEL: &str = "tracing_opentelemetry";
/// The same without the layer, and with it, where no other layer wants the spans.
pub(super) const NOT_PRINTED: &str = "not_printed";
pub(super) const ONLY_OURS: &str = "only_ours";
/// A registry whose only layer does nothing, and one whose only layer is ours.
pub(super) const DO_NOTHING: &str = "do_nothing";
pub(super) const ALONE: &str = "alone";
pub(super) const NO_SUBSCRIBER: &str = "no_subscriber";
/// With the layer, and a wrapper around each request.
pub(super) const AWAITS: &str = "awaits";

fn set(builder: Builder, kind: &str) -> Builder {
    match kind {
        "defaults" | AWAITS | ALONE | ONLY_OURS => builder,
        "timer" => builder.source(Source::Timer),
        "none" => builder.source(Source::None),
        // A process lives for some seconds. Usually a profile is made each minute, so this is an upper bound.
        "no_references" => builder.references(0, 0.0),
        "continuous" => builder.continuous(49).continuous_interval(Duration::from_secs(10)),
        // Every span is sampled from its first enter.
        "early" => builder.sampling_delay(Duration::ZERO),
        "early_timer" => builder.source(Source::Timer).sampling_delay(Duration::ZERO),
        // An outage: every span is kept, and nearly all are over their limits.
        "all_kept" => builder.rules("always".parse().expect("a rule")),
        // Each kept span is reported, and has a profile if it has a sample and the exporter has capacity.
        "all_reported" => {
            builder.rules("always".parse().expect("a rule")).profiles_per_minute(u32::MAX)
        }
        _ => panic!("{kind}"),
    }
}

/// CPU time of the layer's threads in this process.
fn own_cpu_ns() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let of_task = |path: std::path::PathBuf| {
        let read = |name: &str| std::fs::read_to_string(path.join(name)).ok();
        let is_ours = read("comm")?.starts_with("profiling-");
        let ran = read("schedstat")?.split(' ').next()?.parse::<u64>().ok()?;
        is_ours.then_some(ran)
    };
    tasks.filter_map(|task| of_task(task.ok()?.path())).sum()
}

/// Serves until the end of the input.
fn serve(handle: Option<&Handle>, life: Duration, wraps: bool) {
    let directory = tempfile::tempdir().expect("a directory");
    let shop = Shop::new(&directory.path().join("shop.db")).expect("SQLite");
    let counts = Arc::clone(&shop.counts);
    let router = shop.router();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
    println!("{}", listener.local_addr().expect("its number").port());
    if life.is_zero() && !wraps {
        runtime.spawn(async { axum::serve(listener, router).await });
    } else {
        let connect = service_fn(move |_: IncomingStream<'_, TcpListener>| {
            let (router, connection) = (router.clone(), Arc::default());
            ready(Ok::<_, Infallible>(Served { router, connection, life, wraps }))
        });
        runtime.spawn(async { axum::serve(listener, connect).await });
    }
    for line in std::io::stdin().lines() {
        match line.expect("a pipe").as_str() {
            "read" => {
                let ns = ProcessTime::now().as_duration().as_nanos();
                println!("{ns} {}", counts.ended.load(Ordering::SeqCst));
            }
            _ => {
                if let Some(handle) = handle {
                    handle.flush(Duration::from_secs(60)).expect("flushed");
                }
                let stats = handle.map(Handle::stats);
                let stats = stats.iter().flat_map(|stats| stats.iter());
                let stats = stats.map(|(name, count)| (name.to_owned(), count)).collect();
                let (resident_kib, own_cpu_ns) = (resident_kib(), own_cpu_ns());
                let state = State { resident_kib, own_cpu_ns, stats };
                println!("{}", serde_json::to_string(&state).expect("JSON"));
            }
        }
    }
}

/// Answers the requests of a connection that has a span, or that are wrapped.
#[derive(Clone)]
struct Served {
    router: Router,
    /// The span of the connection and its start, shared by all clones of the connection's service.
    connection: Arc<Mutex<Option<(Span, Instant)>>>,
    life: Duration,
    wraps: bool,
}

impl Service<Request> for Served {
    type Response = Response;
    type Error = Infallible;
    type Future = Instrumented<BoxedResponse>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request>::poll_ready(&mut self.router, context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let is_over = |(_, since): &(Span, Instant)| since.elapsed() > self.life;
        let mut connection = self.connection.lock().expect("no panic");
        if !self.life.is_zero() && connection.as_ref().is_none_or(is_over) {
            *connection = Some((info_span!(parent: None, "connection"), Instant::now()));
        }
        let span = connection.as_ref().map_or_else(Span::none, |(span, _)| span.clone());
        drop(connection);
        let response = with_body(span.in_scope(|| self.router.call(request)));
        let response: BoxedResponse = match self.wraps {
            true => Box::pin(response.profiled()),
            false => Box::pin(response),
        };
        response.instrument(span)
    }
}

type BoxedResponse = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

/// With all of its body, so that the span of the connection is around all of it.
async fn with_body(response: RouteFuture<Infallible>) -> Result<Response, Infallible> {
    let (parts, body) = response.await?.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("a body in memory");
    Ok(Response::from_parts(parts, Body::from(body)))
}

#[derive(Default)]
struct Counts {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// A request in progress; it also ends if its client disconnects.
struct Answering(Arc<Counts>);

impl Answering {
    /// Also returns the number of earlier requests.
    fn begin(counts: &Arc<Counts>) -> (Self, u64) {
        let number = counts.begun.fetch_add(1, Ordering::SeqCst);
        (Self(Arc::clone(counts)), number)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

#[derive(Clone)]
struct Shop {
    path: Arc<FilePath>,
    idle: Arc<Mutex<Vec<Connection>>>,
    counts: Arc<Counts>,
}

/// Stored as JSON with the order.
#[derive(Deserialize, Serialize)]
struct Customer {
    name: String,
    addresses: Vec<Address>,
}

#[derive(Deserialize, Serialize)]
struct Address {
    street: String,
    town: String,
    country: String,
}

#[derive(Serialize)]
struct Item {
    product: String,
    about: String,
    quantity: u32,
    price: f64,
}

/// An order, as in the database.
struct Stored {
    customer: String,
    items: Vec<Item>,
    others: Vec<String>,
}

#[derive(Serialize)]
struct Order {
    id: u32,
    customer: Customer,
    items: Vec<Item>,
    total: f64,
    others: Vec<String>,
}

impl Shop {
    fn new(path: &FilePath) -> rusqlite::Result<Self> {
        let database = Connection::open(path)?;
        database.execute_batch(
            "CREATE TABLE product (id INTEGER PRIMARY KEY, name TEXT, price REAL, stock INTEGER);
             CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT);
             CREATE TABLE item (order_id INTEGER, position INTEGER, product TEXT, about TEXT,
                                quantity INTEGER, price REAL,
                                PRIMARY KEY (order_id, position)) WITHOUT ROWID;
             BEGIN;",
        )?;
        let (name, price) =
            (|id| format!("product {id}"), |id| f64::from(id * 7919 % 10_000) / 100.0);
        for id in 0..PRODUCTS {
            let product = (id, name(id), price(id), id % 3);
            database.execute("INSERT INTO product VALUES (?1, ?2, ?3, ?4)", product)?;
        }
        for id in 0..ORDERS {
            let customer = serde_json::to_string(&Customer::number(id)).expect("JSON");
            database.execute("INSERT INTO orders VALUES (?1, ?2)", (id, customer))?;
            for position in 0..ITEMS {
                let product = (id * 31 + position * 617) % PRODUCTS;
                let about =
                    format!("{product} of \"those\", in blue and in red, while there are any left");
                let item = (id, position, name(product), about, position % 5 + 1, price(product));
                database.execute("INSERT INTO item VALUES (?1, ?2, ?3, ?4, ?5, ?6)", item)?;
            }
        }
        database.execute_batch("COMMIT")?;
        Ok(Self { path: path.into(), idle: Arc::default(), counts: Arc::default() })
    }

    fn router(self) -> Router {
        // So that they exist without the layer, too.
        let spans = DefaultMakeSpan::new().level(Level::INFO);
        Router::new()
            .route("/orders/{id}", get(order))
            .route("/awaits/{milliseconds}/{id}", get(awaits))
            .route("/one_sleeps/{id}", get(one_sleeps))
            .route("/one_works/{id}", get(one_works))
            .route("/lists/{id}", get(list))
            .with_state(self)
            .layer(TraceLayer::new_for_http().make_span_with(spans))
    }

    #[tracing::instrument(skip(self))]
    fn load(&self, id: u32) -> rusqlite::Result<Stored> {
        let idle = self.idle.lock().expect("no panic").pop();
        let connection = idle.map_or_else(|| Connection::open(&self.path), Ok)?;
        let loaded = load(&connection, id);
        self.idle.lock().expect("no panic").push(connection);
        loaded
    }
}

fn load(connection: &Connection, id: u32) -> rusqlite::Result<Stored> {
    let mut customer = connection.prepare_cached("SELECT customer FROM orders WHERE id = ?1")?;
    let customer = customer.query_row([id], |row| row.get(0))?;
    let mut items = connection.prepare_cached(
        "SELECT product, about, quantity, price FROM item WHERE order_id = ?1 ORDER BY position",
    )?;
    let items = items.query_map([id], |row| {
        let (product, about) = (row.get(0)?, row.get(1)?);
        Ok(Item { product, about, quantity: row.get(2)?, price: row.get(3)? })
    })?;
    let items: Vec<Item> = items.collect::<Result<_, _>>()?;
    // A query without an index.
    let mut others = connection.prepare_cached(
        "SELECT name FROM product WHERE price BETWEEN ?1 AND ?1 + 1 AND stock > 0 ORDER BY price LIMIT 10",
    )?;
    let least = items.first().map_or(0.0, |item| item.price);
    let others = others.query_map([least], |row| row.get(0))?.collect::<Result<_, _>>()?;
    Ok(Stored { customer, items, others })
}

impl Customer {
    fn number(id: u32) -> Self {
        let address = |number| Address {
            street: format!("{number} Long Street"),
            town: format!("Town {id}"),
            country: "Elsewhere".to_owned(),
        };
        Self { name: format!("customer {id}"), addresses: (0..20).map(address).collect() }
    }
}

type Answer = Result<Response, StatusCode>;

/// A handler and its callees, each with its span, inside the span of tower-http.
#[tracing::instrument(skip(shop))]
async fn order(Extracted(shop): Extracted<Shop>, Path(id): Path<u32>) -> Answer {
    let (_answering, _) = Answering::begin(&shop.counts);
    answer(&shop, id)
}

/// A handler that first waits asynchronously.
#[tracing::instrument(skip(shop))]
async fn awaits(Extracted(shop): Extracted<Shop>, Path((ms, id)): Path<(u64, u32)>) -> Answer {
    let (_answering, _) = Answering::begin(&shop.counts);
    tokio::time::sleep(Duration::from_millis(ms)).await;
    answer(&shop, id)
}

/// One in a hundred blocks its thread, in a span of its own.
#[tracing::instrument(skip(shop))]
async fn one_sleeps(Extracted(shop): Extracted<Shop>, Path(id): Path<u32>) -> Answer {
    let (_answering, number) = Answering::begin(&shop.counts);
    if number % SLOW_EACH == 0 {
        let span = info_span!("call");
        let call = move || span.in_scope(|| std::thread::sleep(SLOW));
        tokio::task::spawn_blocking(call).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    }
    answer(&shop, id)
}

/// One in a hundred reads more than it should.
#[tracing::instrument(skip(shop))]
async fn one_works(Extracted(shop): Extracted<Shop>, Path(id): Path<u32>) -> Answer {
    let (_answering, number) = Answering::begin(&shop.counts);
    if number % SLOW_EACH == 0 {
        let start = ThreadTime::now();
        let connection =
            Connection::open(&shop.path).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
        while start.elapsed() < SLOW {
            load(&connection, id).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
        }
    }
    answer(&shop, id)
}

/// On a blocking thread, of which there is one per request.
#[tracing::instrument(skip(shop))]
async fn list(Extracted(shop): Extracted<Shop>, Path(id): Path<u32>) -> Answer {
    let (answering, _) = Answering::begin(&shop.counts);
    let span = Span::current();
    let read = move || {
        let _answering = answering;
        span.in_scope(|| {
            let mut last = Err(StatusCode::NOT_FOUND);
            for number in 0..ORDERS_OF_A_LIST {
                last = answer(&shop, (id + number) % ORDERS);
            }
            last
        })
    };
    tokio::task::spawn_blocking(read).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?
}

fn answer(shop: &Shop, id: u32) -> Answer {
    let stored = shop.load(id).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    let text = render(id, stored).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(([(CONTENT_TYPE, "application/json")], text).into_response())
}

/// The response body.
#[tracing::instrument(skip_all)]
fn render(id: u32, stored: Stored) -> serde_json::Result<String> {
    let Stored { customer, items, others } = stored;
    let customer: Customer = serde_json::from_str(&customer)?;
    let total = items.iter().map(|item| f64::from(item.quantity) * item.price).sum();
    serde_json::to_string(&Order { id, customer, items, total, others })
}

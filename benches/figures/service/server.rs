//! The service: axum on tokio, SQLite and JSON. Its process prints the port that it listens on. Each input line then
//! selects whether requests have the layer, or begins or ends a measurement, whose results are printed.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::ready;
use std::path::Path as FilePath;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::future::RouteFuture;
use axum::routing::get;
use axum::serve::IncomingStream;
use cpu_time::{ProcessTime, ThreadTime};
use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tower::{Service, service_fn};
use tower_http::trace::TraceLayer;
use tracing::instrument::{WithDispatch, WithSubscriber};
use tracing::{Dispatch, Span, dispatcher, info_span};
use tracing_profiling::{Builder, Handle, ProfiledExt, ProfilingLayer, Source};
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

/// How a server measures itself.
#[derive(Clone, Copy, Deserialize, Serialize)]
pub(super) struct Phases {
    /// The length of a phase.
    pub(super) ms: u64,
    /// The pause after a change, which is not measured: until requests of the other kind are answered, and threads are
    /// no longer sampled.
    pub(super) pause_ms: u64,
    /// The lifetime of connections that have a span; 0 if they have none.
    pub(super) connection_s: u64,
}

/// The results of a server for one measurement.
#[derive(Deserialize, Serialize)]
pub(super) struct Measured {
    /// For each group of four phases (without the layer, with, with, without): CPU time and requests, without and
    /// with.
    pub(super) quads: Vec<[(u64, u64); 2]>,
    pub(super) resident_kib: f64,
    /// CPU time of the layer's threads, and the duration of the measurement.
    pub(super) own_cpu_ns: u64,
    pub(super) took_ns: u64,
    /// The increase of each counter.
    pub(super) stats: BTreeMap<String, u64>,
}

/// The process of a server; its last two arguments are the kind and the phases.
pub(crate) fn child() {
    let arguments: Vec<String> = std::env::args().collect();
    let [.., kind, phases] = &arguments[..] else { panic!("{arguments:?}") };
    let directory = tempfile::tempdir().expect("a directory");
    // For experiments; no variables are set when the published figures are measured.
    let builder = ProfilingLayer::builder().with_env().expect("settings");
    let profiling = set(builder, kind).directory(directory.path()).build().expect("threads");
    serve(profiling, serde_json::from_str(phases).expect("JSON"), kind == AWAITS);
}

/// The layer is always there; the wrapper of requests alternates.
pub(super) const AWAITS: &str = "awaits";

fn set(builder: Builder, kind: &str) -> Builder {
    match kind {
        "defaults" | AWAITS => builder,
        "timer" => builder.source(Source::Timer),
        "none" => builder.source(Source::None),
        // Every span is sampled from its first enter.
        "early" => builder.arm_after(Duration::ZERO),
        "early_timer" => builder.source(Source::Timer).arm_after(Duration::ZERO),
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
fn serve(profiling: ProfilingLayer, phases: Phases, wraps: bool) {
    let handle = profiling.handle();
    let with = Dispatch::new(tracing_subscriber::registry().with(profiling));
    // The spans exist, but no layer uses them. (A registry without any layer never closes a span.)
    let without = Dispatch::new(tracing_subscriber::registry().with(Identity::new()));
    let directory = tempfile::tempdir().expect("a directory");
    let shop = Shop::new(&directory.path().join("shop.db")).expect("SQLite");
    let counts = Arc::clone(&shop.counts);
    let router = shop.router();
    let has_layer = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
    println!("{}", listener.local_addr().expect("its number").port());
    let of_connections = Arc::clone(&has_layer);
    let connect = service_fn(move |_: IncomingStream<'_, TcpListener>| {
        let kind =
            |dispatch: &Dispatch| Kind { dispatch: dispatch.clone(), connection: Arc::default() };
        let kinds = [kind(if wraps { &with } else { &without }), kind(&with)];
        let has_layer = Arc::clone(&of_connections);
        ready(Ok::<_, Infallible>(Served {
            router: router.clone(),
            kinds,
            has_layer,
            phases,
            wraps,
        }))
    });
    runtime.spawn(async { axum::serve(listener, connect).await });
    let mut measuring = None;
    for line in std::io::stdin().lines() {
        match line.expect("a pipe").as_str() {
            "with" => has_layer.store(true, Ordering::SeqCst),
            "without" => has_layer.store(false, Ordering::SeqCst),
            "begin" => {
                let before: Vec<_> = handle.stats().iter().collect();
                let is_over = Arc::new(AtomicBool::new(false));
                let meter = Meter {
                    counts: Arc::clone(&counts),
                    has_layer: Arc::clone(&has_layer),
                    handle: handle.clone(),
                    phases,
                    is_over: Arc::clone(&is_over),
                };
                let thread = std::thread::spawn(|| meter.measure());
                measuring = Some((before, is_over, thread, Instant::now(), own_cpu_ns()));
            }
            _ => {
                let (before, is_over, thread, start, own_before_ns) =
                    measuring.take().expect("a measurement in progress");
                is_over.store(true, Ordering::SeqCst);
                let quads = thread.join().expect("no panic");
                assert!(handle.flush(Duration::from_secs(60)), "flushed");
                let stats = handle.stats();
                let grown = stats.iter().zip(before).map(|((name, after), (_, before))| {
                    (name.to_owned(), after.saturating_sub(before))
                });
                let resident_kib = resident_kib();
                let own_cpu_ns = own_cpu_ns() - own_before_ns;
                let took_ns = start.elapsed().as_nanos() as u64;
                let stats = grown.collect();
                let measured = Measured { quads, resident_kib, own_cpu_ns, took_ns, stats };
                println!("{}", serde_json::to_string(&measured).expect("JSON"));
            }
        }
    }
}

/// Alternates between the layer and none, and measures both.
struct Meter {
    counts: Arc<Counts>,
    has_layer: Arc<AtomicBool>,
    handle: Handle,
    phases: Phases,
    is_over: Arc<AtomicBool>,
}

impl Meter {
    fn measure(self) -> Vec<[(u64, u64); 2]> {
        let start = ProcessTime::now();
        let reading = || {
            let ns = u64::try_from(start.elapsed().as_nanos()).expect("fits in 64 bits");
            (ns, self.counts.ended.load(Ordering::SeqCst))
        };
        let mut quads = Vec::new();
        loop {
            let mut of_kinds = [(0, 0); 2];
            for has_layer in [false, true, true, false] {
                if self.has_layer.swap(has_layer, Ordering::SeqCst) != has_layer {
                    self.pause(has_layer);
                }
                let (cpu_before_ns, requests_before) = reading();
                std::thread::sleep(Duration::from_millis(self.phases.ms));
                let (cpu_ns, requests) = reading();
                let of_kind = &mut of_kinds[usize::from(has_layer)];
                of_kind.0 += cpu_ns - cpu_before_ns;
                of_kind.1 += requests - requests_before;
            }
            if self.is_over.load(Ordering::SeqCst) {
                return quads;
            }
            quads.push(of_kinds);
        }
    }

    /// Leaves out the remaining work of requests of the other kind.
    fn pause(&self, has_layer: bool) {
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(self.phases.pause_ms));
        if has_layer {
            return;
        }
        assert!(self.handle.flush(Duration::from_secs(60)), "flushed");
        while self.handle.stats().threads.sampled > 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "in time");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The subscriber of a request: with the layer or without.
#[derive(Clone)]
struct Kind {
    dispatch: Dispatch,
    /// The span of the connection and its start, shared by all clones of the connection's service.
    connection: Arc<Mutex<Option<(Span, Instant)>>>,
}

/// Answers the requests of a connection.
#[derive(Clone)]
struct Served {
    router: Router,
    kinds: [Kind; 2],
    has_layer: Arc<AtomicBool>,
    phases: Phases,
    /// Whether it is the wrapper that alternates, and not the layer.
    wraps: bool,
}

impl Service<Request> for Served {
    type Response = Response;
    type Error = Infallible;
    type Future = WithDispatch<InSpan>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request>::poll_ready(&mut self.router, context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let is_second = self.has_layer.load(Ordering::SeqCst);
        let kind = &self.kinds[usize::from(is_second)];
        let is_wrapped = self.wraps && is_second;
        let life = Duration::from_secs(self.phases.connection_s);
        let answer = dispatcher::with_default(&kind.dispatch, || {
            let is_over = |(_, since): &(Span, Instant)| since.elapsed() > life;
            let mut connection = kind.connection.lock().expect("no panic");
            if !life.is_zero() && connection.as_ref().is_none_or(is_over) {
                *connection = Some((info_span!(parent: None, "connection"), Instant::now()));
            }
            let span = connection.as_ref().map_or_else(Span::none, |(span, _)| span.clone());
            drop(connection);
            let response = span.in_scope(|| self.router.call(request));
            let response = with_body(response);
            let response: BoxedResponse = match is_wrapped {
                true => Box::pin(response.profiled()),
                false => Box::pin(response),
            };
            InSpan { span, response }
        });
        answer.with_subscriber(kind.dispatch.clone())
    }
}

/// A response in the span of its connection, with all of its body. The spans of a request must be left and closed here:
/// the registry closes a parent, and a span that is exited, through the thread's subscriber, and [`WithDispatch`] sets
/// that only while a future is polled. The span of the connection would stay open forever.
struct InSpan {
    span: Span,
    response: BoxedResponse,
}

type BoxedResponse = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

async fn with_body(response: RouteFuture<Infallible>) -> Result<Response, Infallible> {
    let (parts, body) = response.await?.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("a body in memory");
    Ok(Response::from_parts(parts, Body::from(body)))
}

impl Future for InSpan {
    type Output = Result<Response, Infallible>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { span, response } = self.get_mut();
        span.in_scope(|| response.as_mut().poll(context))
    }
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
        Router::new()
            .route("/orders/{id}", get(order))
            .route("/awaits/{milliseconds}/{id}", get(awaits))
            .route("/one_sleeps/{id}", get(one_sleeps))
            .route("/one_works/{id}", get(one_works))
            .route("/lists/{id}", get(list))
            .with_state(self)
            .layer(TraceLayer::new_for_http())
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
async fn order(State(shop): State<Shop>, Path(id): Path<u32>) -> Answer {
    let (_answering, _) = Answering::begin(&shop.counts);
    answer(&shop, id)
}

/// A handler that first waits asynchronously.
#[tracing::instrument(skip(shop))]
async fn awaits(State(shop): State<Shop>, Path((ms, id)): Path<(u64, u32)>) -> Answer {
    let (_answering, _) = Answering::begin(&shop.counts);
    tokio::time::sleep(Duration::from_millis(ms)).await;
    answer(&shop, id)
}

/// One in a hundred blocks its thread, in a span of its own.
#[tracing::instrument(skip(shop))]
async fn one_sleeps(State(shop): State<Shop>, Path(id): Path<u32>) -> Answer {
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
async fn one_works(State(shop): State<Shop>, Path(id): Path<u32>) -> Answer {
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
async fn list(State(shop): State<Shop>, Path(id): Path<u32>) -> Answer {
    let (answering, _) = Answering::begin(&shop.counts);
    let (span, dispatch) = (Span::current(), dispatcher::get_default(Dispatch::clone));
    let read = move || {
        let _answering = answering;
        let read = || {
            let mut last = Err(StatusCode::NOT_FOUND);
            for number in 0..ORDERS_OF_A_LIST {
                last = answer(&shop, (id + number) % ORDERS);
            }
            last
        };
        dispatcher::with_default(&dispatch, || span.in_scope(read))
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

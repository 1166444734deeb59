//! The service: axum on tokio, SQLite and JSON. Each variant is a process of its own, which says at which
//! port it is, and for each line that it reads where it stands.

use std::collections::BTreeMap;
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use cpu_time::ProcessTime;
use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use tower_http::trace::TraceLayer;
use tracing_profiling::{Builder, Handle, ProfilingLayer, Source};
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::process::resident_kib;

/// Few rows that lie together: for each page SQLite takes a lock that all its connections share, and
/// threads that wait for each other are another measurement.
const PRODUCTS: u32 = 2_000;
pub(super) const ORDERS: u32 = 500;
const ITEMS: u32 = 60;
const CONNECTIONS: usize = 4;

/// Where a server stands.
#[derive(Deserialize, Serialize)]
pub(super) struct Standing {
    pub(super) cpu_ns: u64,
    pub(super) requests: u64,
    pub(super) resident_kib: f64,
    pub(super) stats: BTreeMap<String, u64>,
}

/// The spans are there, and nobody looks at them. (A registry without any layer never closes one.)
pub(crate) fn bare() {
    tracing_subscriber::registry().with(Identity::new()).init();
    serve(None);
}

pub(crate) fn defaults() {
    with_layer(|builder| builder);
}

pub(crate) fn timer() {
    with_layer(|builder| builder.source(Source::Timer));
}

pub(crate) fn none() {
    with_layer(|builder| builder.source(Source::None));
}

/// Every span is sampled from its first enter.
pub(crate) fn early() {
    with_layer(|builder| builder.arm_after(Duration::ZERO));
}

pub(crate) fn early_timer() {
    with_layer(|builder| builder.source(Source::Timer).arm_after(Duration::ZERO));
}

/// Each kept span is reported, and has a profile if it has a sample and the exporter can take it.
pub(crate) fn all_kept() {
    with_layer(|builder| {
        builder.rules("always".parse().expect("a rule")).profiles_per_minute(u32::MAX)
    });
}

fn with_layer(set: impl FnOnce(Builder) -> Builder) {
    let directory = tempfile::tempdir().expect("a directory");
    // So that other settings can be tried; none is set where the figures of the page are measured.
    let builder = ProfilingLayer::builder().with_env().expect("settings");
    let profiling = set(builder.directory(directory.path())).build().expect("threads");
    let handle = profiling.handle();
    tracing_subscriber::registry().with(profiling).init();
    serve(Some(&handle));
}

/// Until nobody asks any more.
fn serve(profiling: Option<&Handle>) {
    let directory = tempfile::tempdir().expect("a directory");
    let shop = Shop::new(&directory.path().join("shop.db")).expect("SQLite");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let requests = Arc::clone(&shop.requests);
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
    println!("{}", listener.local_addr().expect("its number").port());
    runtime.spawn(async { axum::serve(listener, shop.router()).await });
    let start = ProcessTime::now();
    for line in std::io::stdin().lines() {
        _ = line.expect("a pipe");
        // What the client has given up on ends meanwhile.
        std::thread::sleep(Duration::from_millis(20));
        // What is still to do for the requests so far belongs to them.
        let is_done = profiling.is_none_or(|handle| handle.flush(Duration::from_secs(60)));
        assert!(is_done, "flushed");
        let stats = profiling.map(|handle| handle.stats().iter().collect::<Vec<_>>());
        let standing = Standing {
            cpu_ns: u64::try_from(start.elapsed().as_nanos()).expect("less than centuries"),
            requests: requests.load(Ordering::SeqCst),
            resident_kib: resident_kib(),
            stats: stats.unwrap_or_default().into_iter().map(|(n, v)| (n.to_owned(), v)).collect(),
        };
        println!("{}", serde_json::to_string(&standing).expect("JSON"));
    }
}

#[derive(Clone)]
struct Shop {
    idle: Arc<Mutex<Vec<Connection>>>,
    requests: Arc<AtomicU64>,
}

/// As it is stored beside the order, in JSON.
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

/// Of an order, as it is in the database.
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
        let connections = (0..CONNECTIONS).map(|_| Connection::open(path));
        let idle = Arc::new(Mutex::new(connections.collect::<Result<_, _>>()?));
        Ok(Self { idle, requests: Arc::default() })
    }

    fn router(self) -> Router {
        Router::new()
            .route("/orders/{id}", get(order))
            .with_state(self)
            .layer(TraceLayer::new_for_http())
    }

    #[tracing::instrument(skip(self))]
    fn load(&self, id: u32) -> rusqlite::Result<Stored> {
        let idle = self.idle.lock().expect("no panic").pop();
        let connection = idle.expect("as many as requests at once");
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
    // Somebody has forgotten an index.
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

/// One handler and what it calls, each with its span, inside that of tower-http.
#[tracing::instrument(skip(shop))]
async fn order(
    State(shop): State<Shop>,
    Path(id): Path<u32>,
) -> Result<impl IntoResponse, StatusCode> {
    shop.requests.fetch_add(1, Ordering::Relaxed);
    let stored = shop.load(id).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    let text = render(id, stored).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(([(CONTENT_TYPE, "application/json")], text))
}

#[tracing::instrument(skip_all)]
fn render(id: u32, stored: Stored) -> serde_json::Result<String> {
    let Stored { customer, items, others } = stored;
    let customer: Customer = serde_json::from_str(&customer)?;
    let total = items.iter().map(|item| f64::from(item.quantity) * item.price).sum();
    serde_json::to_string(&Order { id, customer, items, total, others })
}

//! The shop of `slow_requests`, and the client that sends it requests.

#![allow(clippy::indexing_slicing, reason = "an example, run by hand")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Method, Request, StatusCode};
use axum::routing::{get, post};
use axum::{Json, Router};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use tower_http::trace::TraceLayer;
use tracing::{Span, info_span};

pub(crate) type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// How long each slow request takes: well over four times the threshold of 250 ms.
pub(crate) const SLOW: Duration = Duration::from_millis(1200);

#[derive(Clone)]
struct Shop {
    database: Arc<Mutex<Connection>>,
    stock: Arc<Mutex<BTreeMap<u32, u32>>>,
    /// A leak: nothing ever removes a receipt.
    receipts: Arc<Mutex<Vec<String>>>,
    words: Arc<regex::Regex>,
    reported: Arc<tokio::sync::Notify>,
    prices: Arc<BTreeMap<u32, Price>>,
}

#[derive(Clone)]
struct Price {
    product: String,
    cents: u32,
}

#[derive(Deserialize, Serialize)]
struct Order {
    customer: String,
    items: Vec<Item>,
}

#[derive(Deserialize, Serialize)]
struct Item {
    product: u32,
    quantity: u32,
    note: String,
}

/// Real text to search: our own licence.
const TEXT: &str = include_str!("../../LICENSE-APACHE");

impl Shop {
    fn open() -> Result<Self, AnyError> {
        let mut database = Connection::open_in_memory()?;
        database.execute_batch(
            "CREATE TABLE product (id INTEGER PRIMARY KEY, name TEXT, price INTEGER, about TEXT)",
        )?;
        let transaction = database.transaction()?;
        {
            let mut insert = transaction.prepare("INSERT INTO product VALUES (?1, ?2, ?3, ?4)")?;
            let lines: Vec<&str> = TEXT.lines().filter(|line| !line.trim().is_empty()).collect();
            for (id, line) in lines.iter().cycle().take(20_000).enumerate() {
                let price = (id * 7919) % 10_000;
                insert.execute((id as i64, format!("product {id}"), price as i64, line.trim()))?;
            }
        }
        transaction.commit()?;
        Ok(Self {
            database: Arc::new(Mutex::new(database)),
            receipts: Arc::default(),
            reported: Arc::default(),
            prices: Arc::new((0..5_000).map(|id| (id, Price::of(id))).collect()),
            stock: Arc::new(Mutex::new((0..1000).map(|id| (id, 100)).collect())),
            words: Arc::new(regex::Regex::new(r"(?i)\b(licen[cs]e|copyright|patent)\w*\b")?),
        })
    }

    fn router(self) -> Router {
        Router::new()
            .route("/orders", post(orders))
            .route("/search", get(search))
            .route("/products", get(products))
            .route("/bundles", get(bundles))
            .route("/similar", get(similar))
            .route("/prices", get(prices))
            .route("/checkout", get(checkout))
            .route("/legacy", get(legacy))
            .route("/upstream", get(upstream))
            .route("/news", get(news))
            .route("/report", get(report))
            .route("/broken", get(broken))
            .with_state(self)
            // For what requests await. Inside of the layer that makes their spans.
            .layer(tracing_profiling::tower::AwaitsLayer::new())
            .layer(TraceLayer::new_for_http().make_span_with(span_of))
    }
}

/// A span's name is fixed at compile time, so each route has its own span.
fn span_of(request: &Request<Body>) -> Span {
    macro_rules! by_route {
        ($($path:literal => $name:literal,)+) => {
            match request.uri().path() {
                $($path => info_span!($name),)+
                _ => info_span!("other"),
            }
        };
    }
    by_route! {
        "/orders" => "POST /orders",
        "/search" => "GET /search",
        "/products" => "GET /products",
        "/bundles" => "GET /bundles",
        "/similar" => "GET /similar",
        "/prices" => "GET /prices",
        "/checkout" => "GET /checkout",
        "/legacy" => "GET /legacy",
        "/upstream" => "GET /upstream",
        "/news" => "GET /news",
        "/report" => "GET /report",
        "/broken" => "GET /broken",
    }
}

// Three fast routes.

#[tracing::instrument(skip_all)]
async fn orders(State(shop): State<Shop>, body: Bytes) -> Result<Json<Order>, StatusCode> {
    let order: Order = serde_json::from_slice(&body).map_err(|_| StatusCode::BAD_REQUEST)?;
    let mut stock = shop.stock.lock().unwrap_or_else(PoisonError::into_inner);
    for item in &order.items {
        let left = stock.entry(item.product).or_insert(100);
        *left = left.saturating_sub(item.quantity).max(10);
    }
    drop(stock);
    let receipt = receipt_of(&order);
    shop.receipts.lock().unwrap_or_else(PoisonError::into_inner).push(receipt);
    Ok(Json(order))
}

/// The terms are repeated for every few items.
#[inline(never)]
fn receipt_of(order: &Order) -> String {
    let mut receipt = format!("Sold to {}\n", order.customer);
    for items in order.items.chunks(5) {
        let lines = items.iter().map(|item| format!("{} of {}\n", item.quantity, item.product));
        receipt.extend(lines);
        receipt += TEXT;
    }
    receipt
}

#[tracing::instrument(skip_all)]
async fn search(State(shop): State<Shop>) -> String {
    format!("{} words found", shop.words.find_iter(TEXT).count())
}

#[tracing::instrument(skip_all)]
async fn products(State(shop): State<Shop>) -> Result<String, StatusCode> {
    let database = shop.database.lock().unwrap_or_else(PoisonError::into_inner);
    let query = "SELECT count(*), avg(price) FROM product WHERE id BETWEEN 5000 AND 9000";
    let (count, price): (i64, f64) = database
        .query_row(query, (), |row| Ok((row.get(0)?, row.get(1)?)))
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(format!("{count} products at {price:.2} on average"))
}

// Nine routes that are slow or fail, each for another reason.

/// CPU time in one Rust function.
#[tracing::instrument(skip_all)]
async fn bundles() -> String {
    let prices: Vec<u32> = (0..400).map(|i| (i * 7919) % 10_000).collect();
    format!("{} bundles cost less than 100", count_cheap_bundles(&prices, SLOW))
}

/// Tries all triples; sorting the prices first would be faster.
#[inline(never)]
fn count_cheap_bundles(prices: &[u32], at_least: Duration) -> u64 {
    let start = Instant::now();
    let mut cheap = 0_u64;
    while start.elapsed() < at_least {
        let mut a = 0;
        while a < prices.len() {
            let mut b = 0;
            while b < prices.len() {
                let mut c = 0;
                while c < prices.len() {
                    if prices[a] + prices[b] + prices[c] < 10_000 {
                        cheap ^= (a ^ b ^ c) as u64 + 1;
                    }
                    c += 1;
                }
                b += 1;
            }
            a += 1;
        }
    }
    cheap
}

/// CPU time in C: a join without an index, which keeps SQLite's interpreter busy.
#[tracing::instrument(skip_all)]
async fn similar(State(shop): State<Shop>) -> Result<String, StatusCode> {
    let database = shop.database.lock().unwrap_or_else(PoisonError::into_inner);
    let query = "SELECT count(*) FROM product a, product b
                 WHERE a.id < 100 AND (a.price + b.price * 31 + a.id * b.id) % 9973 = 17";
    let start = Instant::now();
    let mut found = 0_i64;
    while start.elapsed() < SLOW {
        found = database
            .query_row(query, (), |row| row.get(0))
            .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    }
    Ok(format!("{found} similar products"))
}

/// Clones a large structure again and again.
#[tracing::instrument(skip_all)]
async fn prices(State(shop): State<Shop>) -> String {
    let (start, mut customers, mut cents) = (Instant::now(), 0, 0);
    while start.elapsed() < SLOW {
        cents += cheapest_of_own_list(&shop.prices, customers);
        customers += 1;
    }
    format!("{cents} cents for {customers} customers")
}

/// Each customer has a discount on some products; looking it up would do, without a price list of their own.
#[inline(never)]
fn cheapest_of_own_list(prices: &BTreeMap<u32, Price>, customer: u32) -> u32 {
    let mut own = prices.clone();
    for price in own.values_mut().filter(|price| price.product.ends_with('7')) {
        price.cents -= customer % 100;
    }
    own.values().map(|price| price.cents).min().unwrap_or_default()
}

impl Price {
    fn of(product: u32) -> Self {
        Self { product: format!("product {product}"), cents: 100 + product * 7919 % 10_000 }
    }
}

/// A lock that another thread holds.
#[tracing::instrument(skip_all)]
async fn checkout(State(shop): State<Shop>) -> String {
    let (locked, wait) = mpsc::channel();
    let stock = Arc::clone(&shop.stock);
    std::thread::spawn(move || {
        let _stock = stock.lock().unwrap_or_else(PoisonError::into_inner);
        _ = locked.send(());
        std::thread::sleep(SLOW);
    });
    _ = wait.recv();
    format!("{} products in stock", reserve(&shop.stock))
}

#[inline(never)]
fn reserve(stock: &Mutex<BTreeMap<u32, u32>>) -> usize {
    let stock = stock.lock().unwrap_or_else(PoisonError::into_inner);
    stock.len()
}

/// A sleep that blocks its thread, inside async code.
#[tracing::instrument(skip_all)]
async fn legacy() -> &'static str {
    ask_the_old_system()
}

#[inline(never)]
fn ask_the_old_system() -> &'static str {
    std::thread::sleep(SLOW);
    "the old system answered"
}

#[tracing::instrument(skip_all)]
async fn upstream() -> &'static str {
    ask_upstream().await
}

/// An asynchronous sleep, as if another service were slow.
async fn ask_upstream() -> &'static str {
    tokio::time::sleep(SLOW).await;
    "upstream answered"
}

/// Is ready to continue at once, but its thread is busy with another request.
#[tracing::instrument(skip_all)]
async fn news(State(shop): State<Shop>) -> &'static str {
    shop.reported.notified().await;
    "there is a new report"
}

/// Blocks a thread of the runtime, on which another request has just become ready.
#[tracing::instrument(skip_all)]
async fn report(State(shop): State<Shop>) -> &'static str {
    shop.reported.notify_one();
    std::thread::sleep(SLOW);
    "a report"
}

/// Fast, but fails.
#[tracing::instrument(skip_all)]
async fn broken() -> StatusCode {
    tracing::error!("the payment provider is not configured");
    StatusCode::INTERNAL_SERVER_ERROR
}

// The client.

struct Driver {
    client: Client<hyper_util::client::legacy::connect::HttpConnector, Full<Bytes>>,
    address: SocketAddr,
}

/// Runs the shop and sends its requests. Returns their number.
pub(crate) async fn run() -> Result<usize, AnyError> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let router = Shop::open()?.router();
    tokio::spawn(async move { axum::serve(listener, router).await });
    let driver =
        Arc::new(Driver { client: Client::builder(TokioExecutor::new()).build_http(), address });

    let mut requests = 0;
    for slow in ["/bundles", "/similar", "/prices", "/checkout", "/legacy", "/upstream", "/broken"]
    {
        requests += fast_ones(&driver).await?;
        driver.request(Method::GET, slow, Bytes::new()).await?;
        requests += 1;
    }
    let news = driver.request(Method::GET, "/news", Bytes::new());
    let report = async {
        // The other one waits for it by then.
        tokio::time::sleep(Duration::from_millis(50)).await;
        driver.request(Method::GET, "/report", Bytes::new()).await
    };
    tokio::try_join!(news, report)?;
    requests += 2;
    requests += fast_ones(&driver).await?;
    Ok(requests)
}

/// 90 fast requests, three at a time.
async fn fast_ones(driver: &Arc<Driver>) -> Result<usize, AnyError> {
    const ROUNDS: usize = 30;
    let item = |product| Item { product, quantity: 2, note: "gift-wrapped, please".repeat(4) };
    let order = Order { customer: "Ada".into(), items: (0..50).map(item).collect() };
    let order = Bytes::from(serde_json::to_vec(&order)?);
    for _ in 0..ROUNDS {
        tokio::try_join!(
            driver.request(Method::POST, "/orders", order.clone()),
            driver.request(Method::GET, "/search", Bytes::new()),
            driver.request(Method::GET, "/products", Bytes::new()),
        )?;
    }
    Ok(3 * ROUNDS)
}

impl Driver {
    async fn request(&self, method: Method, path: &str, body: Bytes) -> Result<(), AnyError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address))
            .body(Full::new(body))?;
        let response = self.client.request(request).await?;
        response.into_body().collect().await?;
        Ok(())
    }
}

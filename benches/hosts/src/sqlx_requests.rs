//! Requests of axum that make three queries with sqlx.

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::get;
use sqlx::SqlitePool;
use sqlx::sqlite::SqlitePoolOptions;
use tokio::net::TcpListener;
use tower_http::trace::TraceLayer;

use crate::Done;

const ROWS: u32 = 500;

#[derive(Clone)]
struct Shop {
    pool: SqlitePool,
    done: Done,
}

pub(crate) fn run() {
    let done = Done::default();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(serve(done.clone()));
    done.answer(|_| ());
}

async fn serve(done: Done) {
    // One connection, since each has a database of its own in memory.
    let pool = SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await;
    let shop = Shop { pool: pool.expect("a database"), done };
    shop.fill().await.expect("SQLite");
    let router = Router::new().route("/orders/{id}", get(order)).with_state(shop);
    let router = router.layer(TraceLayer::new_for_http());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    println!("{}", listener.local_addr().expect("its number").port());
    tokio::spawn(async { axum::serve(listener, router).await });
}

impl Shop {
    async fn fill(&self) -> sqlx::Result<()> {
        sqlx::query("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price INTEGER)")
            .execute(&self.pool)
            .await?;
        for id in 0..ROWS {
            let insert = sqlx::query("INSERT INTO item VALUES (?, ?, ?)");
            insert.bind(id).bind(format!("item {id}")).bind(id * 7).execute(&self.pool).await?;
        }
        Ok(())
    }

    #[tracing::instrument(skip(self))]
    async fn load(&self, id: u32) -> sqlx::Result<String> {
        let name = sqlx::query_scalar("SELECT name FROM item WHERE id = ?").bind(id);
        let name: String = name.fetch_one(&self.pool).await?;
        let price = sqlx::query_scalar("SELECT price FROM item WHERE id = ?").bind(id);
        let price: u32 = price.fetch_one(&self.pool).await?;
        let others = sqlx::query_scalar("SELECT name FROM item WHERE id > ? LIMIT 5").bind(id);
        let others: Vec<String> = others.fetch_all(&self.pool).await?;
        Ok(format!("{name} {price} {}", others.join(", ")))
    }
}

#[tracing::instrument(skip(shop))]
async fn order(State(shop): State<Shop>, Path(id): Path<u32>) -> Result<String, StatusCode> {
    let loaded = shop.load(id).await;
    shop.done.count();
    loaded.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

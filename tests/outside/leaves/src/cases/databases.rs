use std::time::Duration;

use sqlx::sqlite::{SqlitePool, SqlitePoolOptions};

use super::{Case, cases, soon};

/// Takes SQLite some time.
const SLOW: &str =
    "WITH RECURSIVE numbers(n) AS (VALUES(1) UNION ALL SELECT n + 1 FROM numbers WHERE n < 1000000)
    SELECT sum(n) FROM numbers";

pub fn cases() -> Vec<Case> {
    cases! {
        "sqlx with SQLite: query": case_sqlx_query(pool().await);
        "sqlx with SQLite: connect": case_sqlx_connect();
        "sqlx: connection of a pool": case_sqlx_acquire(used_pool().await);
    }
}

async fn case_sqlx_query(pool: SqlitePool) {
    sqlx::query(SLOW).fetch_one(&pool).await.unwrap();
}

async fn case_sqlx_connect() {
    SqlitePool::connect("sqlite::memory:").await.unwrap();
}

async fn case_sqlx_acquire(pool: SqlitePool) {
    pool.acquire().await.unwrap();
}

async fn pool() -> SqlitePool {
    let options =
        SqlitePoolOptions::new().max_connections(1).acquire_timeout(Duration::from_secs(60));
    options.connect("sqlite::memory:").await.unwrap()
}

async fn used_pool() -> SqlitePool {
    let pool = pool().await;
    let connection = pool.acquire().await.unwrap();
    soon(async move { drop(connection) });
    pool
}

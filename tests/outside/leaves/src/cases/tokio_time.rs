use std::future::pending;
use std::time::Duration;

use tokio::time::{Instant, Interval, interval_at, sleep, timeout};

use super::{Case, WAIT, cases};

pub fn cases() -> Vec<Case> {
    cases! {
        "tokio `sleep`": case_sleep();
        "tokio `Interval::tick`": case_interval(interval_at(Instant::now() + WAIT, WAIT));
        "tokio `timeout` that elapses": case_timeout();
        "tokio `timeout` of a future that is ready first": case_within_timeout();
    }
}

async fn case_sleep() {
    sleep(WAIT).await;
}

async fn case_interval(mut interval: Interval) {
    interval.tick().await;
}

async fn case_timeout() {
    timeout(WAIT, pending::<()>()).await.unwrap_err();
}

async fn case_within_timeout() {
    timeout(Duration::from_secs(60), child_of_timeout()).await.unwrap();
}

async fn child_of_timeout() {
    sleep(WAIT).await;
}

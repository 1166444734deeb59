use std::convert::Infallible;
use std::task::{Context, Poll};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::time::sleep;
use tower::buffer::Buffer;
use tower::limit::ConcurrencyLimit;
use tower::{Service, ServiceExt as _};

use super::{Case, WAIT, cases, soon};

type Buffered = Buffer<(), <Slow as Service<()>>::Future>;

pub fn cases() -> Vec<Case> {
    cases! {
        "tower `Buffer`: response": case_buffer_response(Buffer::new(Slow, 1));
        "tower `Buffer`: full": case_buffer_ready(full_buffer().await);
        "tower `ConcurrencyLimit`": case_concurrency_limit(reached_limit().await);
    }
}

async fn case_buffer_response(mut buffer: Buffered) {
    buffer.ready().await.unwrap().call(()).await.unwrap();
}

async fn case_buffer_ready(mut buffer: Buffered) {
    buffer.ready().await.unwrap();
}

async fn case_concurrency_limit(mut limit: ConcurrencyLimit<Slow>) {
    limit.ready().await.unwrap();
}

/// Ready at once, with a response after a while.
#[derive(Clone)]
struct Slow;

impl Service<()> for Slow {
    type Response = ();
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<(), Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: ()) -> Self::Future {
        sleep(WAIT).map(Ok).boxed()
    }
}

async fn full_buffer() -> Buffered {
    let (mut buffer, worker) = Buffer::pair(Slow, 1);
    let response = buffer.ready().await.unwrap().call(());
    soon(async move { futures::join!(worker, response) });
    buffer
}

async fn reached_limit() -> ConcurrencyLimit<Slow> {
    let mut limit = ConcurrencyLimit::new(Slow, 1);
    let other = limit.clone();
    tokio::spawn(limit.ready().await.unwrap().call(()));
    other
}

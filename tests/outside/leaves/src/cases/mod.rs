//! One function for each kind of leaf, which awaits it for at least `WAIT` where that is possible.

mod databases;
mod futures_crate;
mod http;
mod other_runtimes;
mod tokio_io;
mod tokio_sync;
mod tokio_tasks;
mod tokio_time;
mod tower_crate;

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::watch::Watch;

pub const WAIT: Duration = Duration::from_millis(40);

pub struct Case {
    pub leaf: &'static str,
    /// The name of its own async function.
    pub function: &'static str,
    pub run: fn(Watch) -> Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// `"leaf": function(arguments);`. The arguments are evaluated before the function is watched.
macro_rules! cases {
    ($($leaf:literal: $function:ident($($argument:expr),*);)+) => {
        vec![$($crate::cases::Case {
            leaf: $leaf,
            function: stringify!($function),
            run: |watch| Box::pin(async move {
                let future = $function($($argument),*);
                watch.run(future).await;
            }),
        }),+]
    };
}
use cases;

pub fn all() -> Vec<Case> {
    let groups = [
        tokio_time::cases(),
        tokio_io::cases(),
        tokio_sync::cases(),
        tokio_tasks::cases(),
        futures_crate::cases(),
        http::cases(),
        databases::cases(),
        tower_crate::cases(),
        other_runtimes::cases(),
    ];
    groups.into_iter().flatten().collect()
}

/// Runs the action after `WAIT`, in a task of its own.
fn soon<T: Send + 'static>(action: impl Future<Output = T> + Send + 'static) {
    tokio::spawn(async {
        tokio::time::sleep(WAIT).await;
        action.await
    });
}

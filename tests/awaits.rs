//! What futures await: where, for how long, and how long they are not polled after they were woken.

#![cfg(not(tracing_profiling_unsupported))]
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::time::Duration;

use support::{Setup, functions};
use tokio::time::sleep;
use tracing::{Instrument, info_span};
use tracing_profiling::ProfiledExt;
use tracing_profiling::profile::{Profile, SampleKind};

const MS: Duration = Duration::from_millis(1);

fn print(profile: &Profile) {
    for sample in profile.samples() {
        let ms: f64 = sample.points.iter().map(|p| p.weight().as_secs_f64() * 1e3).sum();
        println!(
            "{:?} {ms:.1} ms {:?}",
            sample.kind,
            sample.link.and_then(|l| profile.link(l)).map(|l| &l.span)
        );
        for name in functions(profile, sample) {
            println!("    {name}");
        }
    }
}

async fn fetch() {
    sleep(120 * MS).await;
}

async fn request() {
    fetch().await;
    for _ in 0..20 {
        sleep(5 * MS).await;
    }
}

#[test]
fn first() {
    let setup = Setup::new("50ms");
    setup.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(request().instrument(info_span!("request")).profiled());
        runtime.block_on(async {
            let slow = tokio::spawn(
                async { request().await }.instrument(info_span!("inside").or_current()).profiled(),
            );
            sleep(20 * MS).await;
            info_span!("blocker").in_scope(|| std::thread::sleep(110 * MS));
            slow.await.unwrap();
        });
    });
    println!("{:?}", setup.handle.stats().awaits);
    for kept in setup.kept() {
        let t = kept.spans[0].times();
        println!(
            "kept {:?} idle {:?} await {:?} delay {:?}",
            kept.spans[0].name(),
            t.idle(),
            t.awaiting(),
            t.scheduling_delay()
        );
    }
    for profile in setup.profiles() {
        println!("{}", profile.title);
        print(&profile);
    }
    assert!(setup.profiles().iter().any(|profile| profile.of_kind(SampleKind::Await).count() > 0));
}

#[test]
fn open_spans() {
    let setup = Setup::new("50ms");
    let handle = setup.handle.clone();
    setup.run(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let task = request().instrument(info_span!("request", method = "GET")).profiled();
        let task =
            runtime.spawn(tracing::instrument::WithSubscriber::with_current_subscriber(task));
        runtime.block_on(async { sleep(50 * MS).await });
        for open in handle.open_spans(10 * MS) {
            println!("{open:#?}");
        }
        runtime.block_on(task).unwrap();
    });
}

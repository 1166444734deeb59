//! The cost of a context switch of a thread in spans that are not kept.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use tracing::{Dispatch, dispatcher, info_span};
use tracing_profiling::{Builder, ProfilingLayer, Source};
use tracing_subscriber::layer::Identity;
use tracing_subscriber::prelude::*;

use crate::measure::{added, figure, interleave, median};

/// Long enough that all spans here stay young, except the one that is sampled from its enter.
const RULES: &str = "10s";
const SPANS: u32 = 40;
const SWITCHES: u32 = 50;
const ROUNDS: usize = 31;

fn layer(set: impl FnOnce(Builder) -> Builder) -> Dispatch {
    let builder = ProfilingLayer::builder().rules(RULES.parse().expect("rules of this bench"));
    let layer = set(builder).build().expect("threads");
    Dispatch::new(tracing_subscriber::registry().with(layer))
}

fn on_first_core() {
    let mut cores = CpuSet::new();
    cores.set(0);
    sched_setaffinity(None, &cores).expect("core 0 exists");
}

/// Nanoseconds per wait of a thread in a span for another thread on the same core.
fn ping_pong(dispatch: &Dispatch) -> f64 {
    let (mut here, mut there) = UnixStream::pair().expect("two sockets");
    let mut ns = 0.0;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            on_first_core();
            let mut byte = [0];
            while there.read(&mut byte).is_ok_and(|length| length > 0) {
                there.write_all(&byte).expect("it reads");
            }
        });
        scope.spawn(|| {
            on_first_core();
            let mut here = std::mem::replace(&mut here, UnixStream::pair().expect("sockets").0);
            dispatcher::with_default(dispatch, || {
                let mut span = |times: u32| {
                    info_span!("switched").in_scope(|| {
                        for _ in 0..times {
                            here.write_all(&[1]).expect("it reads");
                            here.read_exact(&mut [0]).expect("it answers");
                        }
                    });
                };
                span(SWITCHES);
                let start = Instant::now();
                (0..SPANS).for_each(|_| span(SWITCHES));
                ns = start.elapsed().as_nanos() as f64 / f64::from(SPANS * SWITCHES);
            });
        });
    });
    ns
}

pub(crate) fn run() {
    let bare = Dispatch::new(tracing_subscriber::registry().with(Identity::new()));
    let perf = layer(|builder| builder.source(Source::Perf));
    let timer = layer(|builder| builder.source(Source::Timer));
    let early = layer(|builder| builder.source(Source::Perf).sampling_delay(Duration::ZERO));
    let early_timer = layer(|builder| builder.source(Source::Timer).sampling_delay(Duration::ZERO));
    let times = interleave(
        ROUNDS,
        &mut [
            &mut || ping_pong(&bare),
            &mut || ping_pong(&perf),
            &mut || ping_pong(&timer),
            &mut || ping_pong(&early),
            &mut || ping_pong(&early_timer),
            &mut || ping_pong(&bare),
        ],
    );
    figure("switch.bare", median(&times[0]), "ns");
    // The noise: smaller differences, in either direction, are not significant.
    figure("switch.added_by_nothing", added(&times[0], &times[5]), "ns");
    figure("switch.added_young", added(&times[0], &times[1]), "ns");
    figure("switch.timer.added_young", added(&times[0], &times[2]), "ns");
    figure("switch.added_sampled", added(&times[0], &times[3]), "ns");
    figure("switch.timer.added_sampled", added(&times[0], &times[4]), "ns");
}

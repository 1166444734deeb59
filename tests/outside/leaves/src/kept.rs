//! What the profiles of kept spans show of their idle time.

use std::collections::BTreeMap;
use std::time::Duration;

use tracing_profiling::export::Memory;
use tracing_profiling::profile::{Profile, Sample, SampleKind};
use tracing_profiling::{Handle, ProfilingLayer};
use tracing_subscriber::prelude::*;

use crate::cases::Case;
use crate::stack::Stack;
use crate::watch::Watch;

const LIMIT: Duration = Duration::from_secs(60);

/// A program with the layer.
pub struct Host {
    handle: Handle,
    memory: Memory,
}

/// The idle time of a case's span.
pub struct Explained {
    leaf: &'static str,
    pub idle: Duration,
    /// The part of it that has a stack with the case's own function.
    pub hit: Duration,
    /// What is awaited, as stacks show it.
    places: BTreeMap<String, Duration>,
}

impl Host {
    pub fn new() -> Self {
        let memory = Memory::new();
        let layer = ProfilingLayer::builder()
            .rules("off,[case]=20ms".parse().unwrap())
            .exporter(memory.clone())
            .profiles_per_minute(1_000)
            .build()
            .unwrap();
        let handle = layer.handle();
        tracing_subscriber::registry().with(layer).init();
        Self { handle, memory }
    }

    pub async fn explain(&self, case: &Case) -> Explained {
        let task = tokio::spawn((case.run)(Watch::Profiled));
        tokio::time::timeout(LIMIT, task).await.expect(case.function).expect(case.function);
        let profile = tokio::time::timeout(LIMIT, self.profile()).await;
        Explained::new(case, &profile.expect(case.function))
    }

    /// The next one. The span may close after its future, since sqlx has a clone of it in the thread of the connection.
    async fn profile(&self) -> Profile {
        loop {
            self.handle.flush(LIMIT).unwrap();
            if let Some(profile) = self.memory.take().pop() {
                return profile;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Explained {
    fn new(case: &Case, profile: &Profile) -> Self {
        let idle = profile.spans[0].times.idle();
        let mut explained =
            Self { leaf: case.leaf, idle, hit: Duration::ZERO, places: BTreeMap::new() };
        let idle = [SampleKind::Await, SampleKind::Delay];
        for sample in profile.samples().iter().filter(|sample| idle.contains(&sample.kind)) {
            explained.add(case, &Stack::of_sample(profile, sample), weight(sample));
        }
        // A sample of a short await represents others. And where another thread is in the span, it is not idle.
        explained.hit = explained.hit.min(explained.idle);
        explained
    }

    fn add(&mut self, case: &Case, stack: &Stack, weight: Duration) {
        if stack.contains(case.function) {
            self.hit += weight;
        }
        *self.places.entry(stack.place()).or_default() += weight;
    }

    pub fn text(&self) -> String {
        let places = self.places.iter().map(|(place, time)| format!("{time:.0?} {place}"));
        let cells = [
            self.leaf.to_owned(),
            format!("{:.0?}", self.idle),
            format!("{:.0} %", percent(self.hit, self.idle)),
            places.collect::<Vec<_>>().join("; "),
        ];
        format!("| {} |", cells.join(" | "))
    }
}

fn weight(sample: &Sample) -> Duration {
    Duration::from_nanos(sample.points.iter().map(|point| point.weight).sum())
}

pub fn percent(part: Duration, whole: Duration) -> f64 {
    100.0 * part.as_secs_f64() / whole.as_secs_f64()
}

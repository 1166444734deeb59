//! What all requests of each route took, for metrics.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::facts::{Facts, Measure};

pub(crate) const SUMMED: [Measure; 6] = [
    Measure::Wall,
    Measure::OnCpu,
    Measure::OffCpu,
    Measure::Await,
    Measure::SchedulingDelay,
    Measure::Allocated,
];

/// Further routes are one: clients can invent some. OpenTelemetry's SDK has at most 2,000 series of a metric by default.
const MAX_ROUTES: usize = 1_000;

/// The name of the spans of a route, and the fields that name it. Redacted.
pub(crate) type Route = (String, Vec<(&'static str, String)>);

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RouteTotal {
    /// The name of its spans, and the fields that name the route; `None` if they are of several.
    pub(crate) route: Option<Arc<Route>>,
    pub(crate) requests: u64,
    /// In the order of [`SUMMED`]. What is unknown is left out.
    pub(crate) sums: [u64; SUMMED.len()],
}

/// What all requests took, by route, if that is asked for.
#[derive(Debug, Default)]
pub(crate) struct RouteTotals {
    is_on: AtomicBool,
    /// By a hash of the span's name and the values of these fields. 0 is that of others.
    routes: Mutex<HashMap<u64, RouteTotal>>,
}

impl RouteTotal {
    fn add(&mut self, requests: u64, sums: [u64; SUMMED.len()]) {
        self.requests += requests;
        for (sum, more) in self.sums.iter_mut().zip(sums) {
            *sum = sum.saturating_add(more);
        }
    }
}

impl RouteTotals {
    #[inline]
    pub(crate) fn are_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    pub(crate) fn turn_on(&self) {
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Adds a request that has closed. `route` returns its route if it is a new one.
    pub(crate) fn add(&self, hash: u64, facts: &Facts, route: impl FnOnce() -> Route) {
        let sums = SUMMED.map(|measure| facts.get(measure).unwrap_or(0));
        if let Some(known) = self.routes.lock().get_mut(&hash) {
            return known.add(1, sums);
        }
        // Not under the lock: it reads the span.
        let route = Arc::new(route());
        let mut routes = self.routes.lock();
        let (hash, route) = if routes.len() < MAX_ROUTES { (hash, Some(route)) } else { (0, None) };
        let new = || RouteTotal { route, ..RouteTotal::default() };
        routes.entry(hash).or_insert_with(new).add(1, sums);
    }

    /// What all requests took so far, by route. Routes that differ in what is redacted are one.
    pub(crate) fn read(&self) -> Vec<RouteTotal> {
        let all: Vec<_> = self.routes.lock().values().cloned().collect();
        let mut by_route: HashMap<Option<Arc<Route>>, RouteTotal> = HashMap::new();
        for total in all {
            let known = by_route.entry(total.route.clone()).or_default();
            known.add(total.requests, total.sums);
            known.route = total.route;
        }
        by_route.into_values().collect()
    }
}

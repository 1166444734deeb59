//! Values for tests.

use std::sync::Arc;
use std::time::Duration;

use crate::compare::{
    ComparedRow, ComparedValue, Comparison, Interval, OwnFunction, Quantity, SpentIn, TimeKind,
};
use crate::ids::ProfileId;
use crate::profile::{Awaits, Compared, FunctionShare, Hotspot, Hotspots, Profile, SampleKind};

impl ProfileId {
    /// Of equal bytes.
    pub const fn for_test(byte: u8) -> Self {
        Self::from_bytes([byte; 16])
    }
}

impl Awaits {
    /// Awaits of that total.
    pub fn for_test(total: Duration) -> Self {
        Self { total, are_of_topmost: true, ..Self::default() }
    }
}

impl Hotspots {
    /// Of on-CPU time.
    pub fn for_test(name: &str, share: f64) -> Self {
        let function = FunctionShare { name: name.to_owned(), share, ..Default::default() };
        let kind = SampleKind::OnCpu;
        Self(vec![Hotspot {
            kind,
            functions: vec![function],
            callers: Vec::new(),
            leaf: None,
            beside: None,
            added: None,
            is_certain: true,
        }])
    }

    /// Adds the hotspots of `others` as those of `kind`.
    pub fn and_for_test(mut self, kind: SampleKind, others: Self) -> Self {
        self.0.extend(others.0.into_iter().map(|other| Hotspot { kind, ..other }));
        self
    }

    /// All functions are at that place.
    pub fn locate_for_test(&mut self, location: &str) {
        let functions = self.0.iter_mut().flat_map(|hotspot| &mut hotspot.functions);
        functions.for_each(|function| location.clone_into(&mut function.location));
    }

    /// All functions are called by one, and call another for half of their time.
    pub fn nest_for_test(&mut self, caller: &str, callee: &str) {
        for hotspot in &mut self.0 {
            let leaf = FunctionShare { name: callee.to_owned(), share: 0.53, ..Default::default() };
            (hotspot.callers, hotspot.leaf) = (vec![caller.to_owned()], Some(leaf));
        }
    }

    /// Most awaits are in `shop::fetch`.
    pub fn of_awaits_for_test(share: f64) -> Self {
        let mut hotspots = Self::for_test("shop::fetch", share);
        hotspots.locate_for_test("src/upstream.rs:41");
        for hotspot in &mut hotspots.0 {
            hotspot.kind = SampleKind::Await;
            let name = "tokio::time::sleep".to_owned();
            hotspot.leaf = Some(FunctionShare { name, share: 1.0, ..Default::default() });
        }
        hotspots
    }
}

impl Compared {
    /// Makes it that of another span, with another first function.
    #[cfg(test)]
    pub(crate) fn rename_for_test(&mut self, span: &str, function: &str) {
        self.span = span.to_owned();
        let (file, name) = (String::new(), function.to_owned());
        let own = SpentIn::Function(Arc::new(OwnFunction { name, file, line: 0 }));
        if function != span {
            Arc::make_mut(&mut self.comparison).rows[0].quantity =
                Quantity::Wall(TimeKind::OnCpu, own);
        }
    }

    /// A span of 1.2 s against others of 0.1 s: nearly all that it has more is on-CPU in `shop::count_cheap_bundles`.
    pub fn for_test(references: u64) -> Self {
        const MS: u64 = 1_000_000;
        let own = |name: &str, line| {
            let (name, file) = (format!("shop::{name}"), "shop/src/similar.rs".to_owned());
            SpentIn::Function(Arc::new(OwnFunction { name, file, line }))
        };
        let around = |extra: i64, by: i64| Interval { low: extra - by, high: extra + by };
        let row = |quantity, value: u64, typical: u64, (by, present_in, as_extreme_in)| {
            let compared = ComparedValue { value, typical, interval: None };
            let interval = (references >= 10).then(|| around(compared.extra(), by));
            ComparedRow {
                quantity,
                value: ComparedValue { interval, ..compared },
                present_in,
                as_extreme_in: Some(as_extreme_in),
            }
        };
        let wall = |kind, spent_in| Quantity::Wall(kind, spent_in);
        let ms = MS.cast_signed();
        let rows = vec![
            row(
                wall(TimeKind::OnCpu, own("count_cheap_bundles", 0)),
                1_070 * MS,
                10 * MS,
                (40 * ms, 12, 0),
            ),
            row(wall(TimeKind::OffCpu, own("reserve", 41)), 70 * MS, 20 * MS, (10 * ms, 90, 2)),
            row(wall(TimeKind::Await, own("fetch", 9)), 20 * MS, 30 * MS, (20 * ms, 150, 60)),
            row(
                wall(TimeKind::SchedulingDelay, SpentIn::Unknown),
                30 * MS,
                24 * MS,
                (9 * ms, 80, 40),
            ),
            row(wall(TimeKind::OnCpu, own("render", 0)), 10 * MS, 14 * MS, (9 * ms, 199, 90)),
            row(wall(TimeKind::Unmeasured, SpentIn::Others), 1, 2_000_000, (ms, 3, 100)),
        ];
        let beside = vec![
            row(Quantity::OtherThreads(own("prefetch", 0)), 0, 40 * MS, (5 * ms, 150, 50)),
            row(Quantity::AllocatedBytes, 25_000_000, 2_000_000, (1_000_000, 200, 0)),
            row(Quantity::ChildSpans(Some("query".into())), 214, 3, (1, 200, 0)),
            row(Quantity::ChildTime(Some("query".into())), 60 * MS, 8 * MS, (ms, 200, 0)),
        ];
        let typical = Profile::builder("GET /checkout")
            .sample(
                crate::profile::SampleKind::OnCpu,
                &[],
                &["shop::render", "shop::main"],
                std::time::Duration::ZERO,
                std::time::Duration::from_millis(14),
            )
            .build();
        Self {
            cohort: "GET /checkout".to_owned(),
            span: "GET /checkout".to_owned(),
            comparison: Arc::new(Comparison {
                references,
                median_wall_ns: Some(98 * MS),
                wall: ComparedValue {
                    value: 1_200 * MS + 1,
                    typical: 100 * MS,
                    interval: (references >= 10).then(|| around(1_100 * ms + 1, 60 * ms)),
                },
                rows,
                beside,
            }),
            typical: Arc::new(typical),
        }
    }
}

//! The file with what was typical in an hour: JSON, gzipped.

use std::collections::BTreeMap;
use std::io::Read;

use flate2::read::GzDecoder;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::compare::{CohortHour, MOST_ROUTES, Moments, Quantity, SpanTotals, WallTimes};
use crate::text::gzip;

/// Files of another version are not read.
const FORMAT: &str = "tracing-profiling typical 2";
/// More than 64 routes of 256 quantities and long names take.
const MOST_BYTES: u64 = 16 * 1024 * 1024;
/// More than a layer writes.
const MOST_QUANTITIES: usize = 1_024;

/// What was typical in an hour, by the name of the route.
#[derive(Clone, Debug, Default)]
pub(super) struct HourFile {
    /// The name of the service; other services may share the directory.
    pub(super) service: String,
    pub(super) version: String,
    pub(super) hour: u64,
    pub(super) routes: BTreeMap<String, CohortHour>,
}

/// The hours before the year 10000.
const MOST_HOURS: u64 = 253_402_300_800 / 3_600;

/// The file.
#[derive(Serialize, Deserialize)]
struct StoredHour {
    format: String,
    service: String,
    version: String,
    hour: u64,
    routes: BTreeMap<String, StoredRoute>,
}

#[derive(Serialize, Deserialize)]
struct StoredRoute {
    spans: u64,
    squares: f64,
    quantities: Vec<StoredQuantity>,
    /// Microseconds, and how many spans took that long.
    took: Vec<(u64, u32)>,
}

#[derive(Serialize, Deserialize)]
struct StoredQuantity {
    quantity: Quantity,
    sum: u64,
    squares: f64,
    present: u64,
}

impl StoredRoute {
    fn new(CohortHour { references, walls }: &CohortHour) -> Self {
        let quantities = references.quantities().map(|(quantity, of)| StoredQuantity {
            quantity: quantity.clone(),
            sum: u64::try_from(of.sum).unwrap_or(u64::MAX),
            squares: of.squares,
            present: of.present,
        });
        Self {
            spans: references.spans(),
            squares: references.wall().squares,
            quantities: quantities.collect(),
            took: walls.counts().collect(),
        }
    }

    /// `None` if no layer can have written it.
    fn read(self) -> Option<CohortHour> {
        let Self { spans, squares, quantities, took } = self;
        if quantities.len() > MOST_QUANTITIES {
            return None;
        }
        let moments = |StoredQuantity { quantity, sum, squares, present }| {
            // No span has more than 292 years.
            let is_possible = u128::from(sum) <= u128::from(spans) * u128::from(i64::MAX as u64)
                && present <= spans
                && squares >= 0.0;
            is_possible.then_some((quantity, Moments { sum: sum.into(), squares, present }))
        };
        let quantities = quantities.into_iter().map(moments).collect::<Option<Vec<_>>>()?;
        let wall = Moments { squares, present: spans, ..Moments::default() };
        let references = SpanTotals::of_stored(spans, wall, quantities);
        (squares >= 0.0).then(|| CohortHour { references, walls: WallTimes::of_stored(took) })
    }
}

impl HourFile {
    pub(super) fn encode(&self) -> Vec<u8> {
        let routes = self.routes.iter();
        let stored = StoredHour {
            format: FORMAT.to_owned(),
            service: self.service.clone(),
            version: self.version.clone(),
            hour: self.hour,
            routes: routes.map(|(name, hour)| (name.clone(), StoredRoute::new(hour))).collect(),
        };
        gzip(&serde_json::to_vec(&stored).unwrap_or_default())
    }

    /// Reads a file; what is wrong with it if it is damaged, of another version, or larger than any that a layer writes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut text = String::new();
        let read = GzDecoder::new(bytes).take(MOST_BYTES + 1).read_to_string(&mut text);
        if read.map_err(|error| error.to_string())? as u64 > MOST_BYTES {
            return Err(format!("it has more than {MOST_BYTES} bytes"));
        }
        let wrong = |error: serde_json::Error| error.to_string();
        let stored: Value = serde_json::from_str(&text).map_err(wrong)?;
        if stored.get("format").and_then(Value::as_str) != Some(FORMAT) {
            return Err(format!("it is no `{FORMAT}`"));
        }
        let StoredHour { service, version, hour, routes, .. } =
            serde_json::from_value(stored).map_err(wrong)?;
        if hour >= MOST_HOURS || routes.len() > MOST_ROUTES {
            return Err(format!("its hour is {hour}, and it has {} routes", routes.len()));
        }
        let read = |(name, route): (String, StoredRoute)| {
            let hour = route.read().ok_or_else(|| format!("`{name}` cannot be read"))?;
            Ok((name, hour))
        };
        let routes = routes.into_iter().map(read).collect::<Result<_, String>>()?;
        Ok(Self { service, version, hour, routes })
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use serde_json::json;
    use std::io::Write;
    use std::sync::Arc;

    use super::*;
    use crate::compare::{
        Amount, Breakdown, CohortHistory, Measured, OwnFunction, SpentIn, TimeKind,
    };

    fn amounts() -> Vec<Amount> {
        let function = |name: &str| {
            let (name, file) = (name.to_owned(), "src/a\tb.rs".to_owned());
            SpentIn::Function(Arc::new(OwnFunction { name, file, line: 7 }))
        };
        let mut quantities: Vec<_> =
            TimeKind::ALL.iter().map(|kind| Quantity::Wall(*kind, function(kind.name()))).collect();
        quantities.extend([
            Quantity::Wall(TimeKind::OnCpu, SpentIn::Others),
            Quantity::Wall(TimeKind::OnCpu, SpentIn::Unknown),
            Quantity::OtherThreads(function("a\\tb\r\n\\")),
            Quantity::AllocatedBytes,
            Quantity::ChildSpans(None),
            Quantity::ChildSpans(Some("query\n".into())),
            Quantity::ChildTime(None),
            Quantity::ChildTime(Some("".into())),
        ]);
        let amount = |(value, quantity)| Amount { quantity, value, measured: Measured::Exact };
        (1_000_003..).zip(quantities).map(amount).collect()
    }

    fn file() -> HourFile {
        let mut history = CohortHistory::new(0);
        for wall_ns in [20_000_000, 50_000_000, 3_700_000_000_000_000] {
            history.add_reference(&Breakdown::new(wall_ns, amounts()), 7, 0);
        }
        let hour = history.take_hour();
        let names = ["request{http.route=/a}", "", "end", "a\tb\\n\n"];
        let routes = names.map(|name| (name.to_owned(), hour.clone())).into();
        HourFile {
            service: "shop".to_owned(),
            version: "1.4.2-rc1\t\u{1f980}".to_owned(),
            hour: 490_123,
            routes,
        }
    }

    #[test]
    fn a_file_has_all_that_was_written() {
        let (written, read) = (file(), HourFile::decode(&file().encode()).unwrap());
        assert_eq!((&read.version, read.hour), (&written.version, written.hour));
        assert_eq!(read.routes.len(), 4);
        for (name, of) in &written.routes {
            let known = &read.routes[name];
            assert_eq!(known.references, of.references, "{name:?}");
            assert_eq!(known.walls.spans(), 21);
            assert!(known.walls.counts().eq(of.walls.counts()));
        }
    }

    #[test]
    fn what_is_damaged_is_refused_and_does_no_harm() {
        let bytes = file().encode();
        for length in 0..bytes.len() {
            assert!(HourFile::decode(&bytes[..length]).is_err(), "{length}");
        }
        let gzipped = |text: &str| {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
            gzip.write_all(text.as_bytes()).unwrap();
            gzip.finish().unwrap()
        };
        let decode = |change: &dyn Fn(&mut Value)| {
            let mut stored = json!({
                "format": FORMAT, "service": "", "version": "", "hour": 7,
                "routes": { "a": {
                    "spans": 1, "squares": 4.0, "took": [[5, 1]],
                    "quantities": [
                        { "quantity": "allocated_bytes", "sum": 2, "squares": 4.0, "present": 1 },
                    ],
                } },
            });
            change(&mut stored);
            HourFile::decode(&gzipped(&stored.to_string()))
        };
        assert_eq!(decode(&|_| ()).map(|file| file.routes.len()), Ok(1));
        let set = |path: &str, value: Value| {
            let path = path.to_owned();
            decode(&move |stored| *stored.pointer_mut(&path).unwrap() = value.clone())
        };
        for (path, value) in [
            ("", json!([])),
            ("/format", json!("tracing-profiling typical 1")),
            ("/hour", json!(-7)),
            ("/hour", json!(MOST_HOURS)),
            ("/routes/a/squares", json!(null)),
            ("/routes/a/squares", json!(-1.0)),
            ("/routes/a/took", json!([[5, 1_u64 << 32]])),
            ("/routes/a/quantities/0/squares", json!(-4.0)),
            ("/routes/a/quantities/0/present", json!(2)),
            ("/routes/a/quantities/0/sum", json!(u64::MAX)),
            ("/routes/a/quantities/0/quantity", json!({ "wall": ["none", "unknown"] })),
        ] {
            assert!(set(path, value.clone()).is_err(), "{path} {value}");
        }
        let route = json!({ "spans": 0, "squares": 0.0, "took": [], "quantities": [] });
        let routes = |many: usize| (0..many).map(|n| (n.to_string(), route.clone())).collect();
        assert!(set("/routes", Value::Object(routes(MOST_ROUTES))).is_ok());
        assert!(set("/routes", Value::Object(routes(MOST_ROUTES + 1))).is_err());
        let bomb = gzipped(&"x".repeat(MOST_BYTES as usize + 1));
        assert!(HourFile::decode(&bomb).unwrap_err().contains("bytes"));
    }
}

//! The file with what was typical in an hour: JSON, gzipped.

use std::collections::BTreeMap;
use std::io::Read;

use flate2::read::GzDecoder;
use serde::{Deserialize, Serialize};

use crate::compare::{CohortHour, MAX_ROUTES};
use crate::text::gzip;

/// Files of another version are not read.
const FORMAT: &str = "tracing-profiling typical 3";
/// More than 64 routes of 256 quantities and long names take.
const MAX_BYTES: u64 = 16 * 1024 * 1024;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct HourFile {
    /// The name of the service; other services may share the directory.
    pub(super) service: String,
    pub(super) version: String,
    pub(super) hour: u64,
    pub(super) routes: BTreeMap<String, CohortHour>,
}

/// The hours before the year 10000.
const MAX_HOURS: u64 = 253_402_300_800 / 3_600;

impl HourFile {
    pub(super) fn encode(&self) -> Vec<u8> {
        gzip(&serde_json::to_vec(&(FORMAT, self)).unwrap_or_default())
    }

    /// Reads a file; what is wrong with it if it is damaged, of another version, or larger than any that a layer writes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut text = String::new();
        let read = GzDecoder::new(bytes).take(MAX_BYTES + 1).read_to_string(&mut text);
        if read.map_err(|error| error.to_string())? as u64 > MAX_BYTES {
            return Err(format!("it has more than {MAX_BYTES} bytes"));
        }
        let stored: Result<(String, Self), _> = serde_json::from_str(&text);
        let (format, file) = stored.map_err(|error| format!("it is no `{FORMAT}`: {error}"))?;
        let Self { hour, routes, .. } = &file;
        if format != FORMAT {
            return Err(format!("it is no `{FORMAT}`"));
        }
        if *hour >= MAX_HOURS || routes.len() > MAX_ROUTES {
            return Err(format!("its hour is {hour}, and it has {} routes", routes.len()));
        }
        let wrong = routes.iter().find(|(_, route)| !route.references.are_possible());
        wrong.map_or(Ok(()), |(name, _)| Err(format!("`{name}` cannot be read")))?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use serde_json::{Value, json};
    use std::io::Write;
    use std::sync::Arc;

    use super::*;
    use crate::compare::{Amount, Breakdown, OwnFunction, Quantity, SpentIn, TimeKind};

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
        let amount = |(value, quantity)| Amount::exact(quantity, value);
        (1_000_003..).zip(quantities).map(amount).collect()
    }

    fn file() -> HourFile {
        let mut hour = CohortHour::default();
        for wall_ns in [20_000_000, 50_000_000, 3_700_000_000_000_000] {
            hour.add(&Breakdown::new(wall_ns, amounts()), 7);
        }
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
        assert_eq!((read.routes["end"].walls.spans(), &read.routes), (21, &written.routes));
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
            let moments = json!({ "sum": 2, "squares": 4.0, "present": 1 });
            let none = json!({ "sum": 0, "squares": 4.0, "present": 1 });
            let mut stored = json!([FORMAT, {
                "service": "", "version": "", "hour": 7,
                "routes": { "a": {
                    "references": {
                        "spans": 1, "wall": none, "quantities": [["allocated_bytes", moments]],
                    },
                    "walls": { "5": 1 },
                } },
            }]);
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
            ("/0", json!("tracing-profiling typical 2")),
            ("/1/hour", json!(-7)),
            ("/1/hour", json!(MAX_HOURS)),
            ("/1/routes/a/references/wall/squares", json!(null)),
            ("/1/routes/a/references/wall/squares", json!(-1.0)),
            ("/1/routes/a/references/wall/sum", json!(1)),
            ("/1/routes/a/walls", json!({ "5": -1 })),
            ("/1/routes/a/references/quantities/0/1/squares", json!(-4.0)),
            ("/1/routes/a/references/quantities/0/1/present", json!(2)),
            ("/1/routes/a/references/quantities/0/1/sum", json!(u64::MAX)),
            ("/1/routes/a/references/quantities/0/0", json!({ "wall": ["none", "unknown"] })),
        ] {
            assert!(set(path, value.clone()).is_err(), "{path} {value}");
        }
        let route = serde_json::to_value(CohortHour::default()).unwrap();
        let routes = |many: usize| (0..many).map(|n| (n.to_string(), route.clone())).collect();
        assert!(set("/1/routes", Value::Object(routes(MAX_ROUTES))).is_ok());
        assert!(set("/1/routes", Value::Object(routes(MAX_ROUTES + 1))).is_err());
        let bomb = gzipped(&"x".repeat(MAX_BYTES as usize + 1));
        assert!(HourFile::decode(&bomb).unwrap_err().contains("bytes"));
    }
}

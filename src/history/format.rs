//! The file with what was typical in an hour: lines of fields that are separated by tabs, gzipped.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;

use flate2::read::GzDecoder;

use crate::compare::{
    CohortHour, MOST_ROUTES, Moments, OwnFunction, Quantity, SpanTotals, SpentIn, TimeKind,
    WallTimes,
};
use crate::text::gzip;

/// The first line. Files of another version are not read.
const HEADER: &str = "tracing-profiling typical 1";
/// The last line: what lacks it is not complete.
const END: &str = "end";
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

impl HourFile {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut text = String::new();
        push(&mut text, &[HEADER]);
        push(&mut text, &["service", &self.service]);
        push(&mut text, &["version", &self.version]);
        push(&mut text, &["hour", &self.hour.to_string()]);
        for (name, hour) in &self.routes {
            let (spans, squares) = (hour.references.spans(), hour.references.wall().squares);
            push(&mut text, &["route", name, &spans.to_string(), &squares.to_string()]);
            for (quantity, of) in hour.references.quantities() {
                let mut fields = fields_of(quantity);
                fields.extend([of.sum.to_string(), of.squares.to_string(), of.present.to_string()]);
                push(&mut text, &fields.iter().map(String::as_str).collect::<Vec<_>>());
            }
            for (us, spans) in hour.walls.counts() {
                push(&mut text, &["took", &us.to_string(), &spans.to_string()]);
            }
        }
        push(&mut text, &[END]);
        gzip(text.as_bytes())
    }

    /// Reads a file; what is wrong with it if it is damaged, of another version, or larger than any that a layer writes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut text = String::new();
        let read = GzDecoder::new(bytes).take(MOST_BYTES + 1).read_to_string(&mut text);
        if read.map_err(|error| error.to_string())? as u64 > MOST_BYTES {
            return Err(format!("it has more than {MOST_BYTES} bytes"));
        }
        let mut lines = text.lines().enumerate();
        if lines.next().is_none_or(|(_, line)| line != HEADER) {
            return Err(format!("it does not begin with `{HEADER}`"));
        }
        let (mut file, mut route) = (Self::default(), None);
        for (number, line) in lines {
            let wrong = || format!("line {} cannot be read", number + 1);
            if line == END {
                file.end_route(route.take())?;
                return Ok(file);
            }
            let fields: Vec<_> = line.split('\t').map(unescaped).collect();
            let fields: Vec<_> = fields.iter().map(String::as_str).collect();
            match fields.as_slice() {
                ["service", service] => file.service = (*service).to_owned(),
                ["version", version] => file.version = (*version).to_owned(),
                ["hour", hour] => {
                    let hour = number_of(hour).filter(|hour| *hour < MOST_HOURS);
                    file.hour = hour.ok_or_else(wrong)?;
                }
                ["route", name, spans, squares] => {
                    file.end_route(route.take())?;
                    route = Some(RouteLines::new(name, spans, squares).ok_or_else(wrong)?);
                }
                fields => {
                    let route = route.as_mut().ok_or_else(wrong)?;
                    route.add(fields).ok_or_else(wrong)?;
                }
            }
        }
        Err("its end is missing".to_owned())
    }

    fn end_route(&mut self, route: Option<RouteLines>) -> Result<(), String> {
        let Some(RouteLines { name, spans, squares, quantities, took }) = route else {
            return Ok(());
        };
        if self.routes.len() >= MOST_ROUTES {
            return Err(format!("it has more than {MOST_ROUTES} routes"));
        }
        let wall = Moments { squares, present: spans, ..Moments::default() };
        let references = SpanTotals::of_stored(spans, wall, quantities);
        let walls = WallTimes::of_stored(took);
        self.routes.insert(name, CohortHour { references, walls });
        Ok(())
    }
}

/// A route whose lines are being read.
struct RouteLines {
    name: String,
    spans: u64,
    squares: f64,
    quantities: BTreeMap<Quantity, Moments>,
    took: Vec<(u64, u32)>,
}

impl RouteLines {
    fn new(name: &str, spans: &str, squares: &str) -> Option<Self> {
        let (spans, squares) = (number_of(spans)?, amount_of(squares)?);
        Some(Self {
            name: name.to_owned(),
            spans,
            squares,
            quantities: BTreeMap::new(),
            took: Vec::new(),
        })
    }

    fn add(&mut self, fields: &[&str]) -> Option<()> {
        if let ["took", us, spans] = fields {
            self.took.push((number_of(us)?, spans.parse().ok()?));
            return Some(());
        }
        let [fields @ .., sum, squares, present] = fields else { return None };
        let (sum, present) = (number_of(sum)?, number_of(present)?);
        // No span has more than 292 years.
        let is_possible = u128::from(sum) <= u128::from(self.spans) * u128::from(i64::MAX as u64);
        let is_new =
            is_possible && present <= self.spans && self.quantities.len() < MOST_QUANTITIES;
        let of = Moments { sum: sum.into(), squares: amount_of(squares)?, present };
        let quantity = quantity_of(fields).filter(|_| is_new)?;
        self.quantities.insert(quantity, of);
        Some(())
    }
}

fn number_of(text: &str) -> Option<u64> {
    text.parse().ok()
}

/// Not negative, and a number.
fn amount_of(text: &str) -> Option<f64> {
    text.parse().ok().filter(|amount: &f64| amount.is_finite() && *amount >= 0.0)
}

fn fields_of(quantity: &Quantity) -> Vec<String> {
    let mut fields = Vec::new();
    match quantity {
        Quantity::Wall(kind, spent_in) => {
            fields.extend(["wall".to_owned(), kind.name().to_owned()]);
            fields.extend(fields_of_function(spent_in));
        }
        Quantity::OtherThreads(spent_in) => {
            fields.push("other_threads".to_owned());
            fields.extend(fields_of_function(spent_in));
        }
        Quantity::AllocatedBytes => fields.push("allocated_bytes".to_owned()),
        Quantity::ChildSpans(name) | Quantity::ChildTime(name) => {
            let is_number = matches!(quantity, Quantity::ChildSpans(_));
            fields.push(if is_number { "child_spans" } else { "child_time" }.to_owned());
            fields.extend(name.iter().map(|name| (**name).to_owned()));
        }
    }
    fields
}

fn fields_of_function(spent_in: &SpentIn) -> Vec<String> {
    match spent_in {
        SpentIn::Function(function) => {
            let OwnFunction { name, file, line } = &**function;
            vec!["in".to_owned(), name.clone(), file.clone(), line.to_string()]
        }
        SpentIn::Unknown => vec!["unknown".to_owned()],
        SpentIn::Others => vec!["others".to_owned()],
    }
}

fn quantity_of(fields: &[&str]) -> Option<Quantity> {
    Some(match fields {
        ["wall", kind, spent_in @ ..] => {
            let kind = TimeKind::ALL.iter().find(|known| known.name() == *kind)?;
            Quantity::Wall(*kind, function_of(spent_in)?)
        }
        ["other_threads", spent_in @ ..] => Quantity::OtherThreads(function_of(spent_in)?),
        ["allocated_bytes"] => Quantity::AllocatedBytes,
        ["child_spans"] => Quantity::ChildSpans(None),
        ["child_spans", name] => Quantity::ChildSpans(Some(Arc::from(*name))),
        ["child_time"] => Quantity::ChildTime(None),
        ["child_time", name] => Quantity::ChildTime(Some(Arc::from(*name))),
        _ => return None,
    })
}

fn function_of(fields: &[&str]) -> Option<SpentIn> {
    Some(match fields {
        ["in", name, file, line] => SpentIn::Function(Arc::new(OwnFunction {
            name: (*name).to_owned(),
            file: (*file).to_owned(),
            line: line.parse().ok()?,
        })),
        ["unknown"] => SpentIn::Unknown,
        ["others"] => SpentIn::Others,
        _ => return None,
    })
}

/// Adds a line. Names can contain anything.
fn push(text: &mut String, fields: &[&str]) {
    for (number, field) in fields.iter().enumerate() {
        text.push_str(if number > 0 { "\t" } else { "" });
        for c in field.chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                '\t' => text.push_str("\\t"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                other => text.push(other),
            }
        }
    }
    text.push('\n');
}

fn unescaped(field: &str) -> String {
    let (mut text, mut chars) = (String::with_capacity(field.len()), field.chars());
    while let Some(c) = chars.next() {
        text.push(match (c == '\\').then(|| chars.next()).flatten() {
            Some('t') => '\t',
            Some('n') => '\n',
            Some('r') => '\r',
            Some(other) => other,
            None => c,
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    use super::*;
    use crate::compare::{Amount, Breakdown, CohortHistory, Measured};

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
        let decode = |lines: &str| HourFile::decode(&gzipped(&format!("{HEADER}\n{lines}")));
        assert!(
            decode("hour\t7\nroute\ta\t1\t4\nallocated_bytes\t2\t4\t1\ntook\t5\t1\nend\n").is_ok()
        );
        for lines in [
            "",
            "hour\t-7\nend\n",
            "allocated_bytes\t2\t4\t1\nend\n",
            "route\ta\t1\tNaN\nend\n",
            "route\ta\t1\t4\nallocated_bytes\t2\t4\nend\n",
            "route\ta\t1\t4\nallocated_bytes\t2\tinf\t1\nend\n",
            "route\ta\t1\t4\nallocated_bytes\t2\t4\t2\nend\n",
            "route\ta\t1\t4\nallocated_bytes\t18446744073709551615\t4\t1\nend\n",
            "route\ta\t1\t4\nwall\tnone\tunknown\t2\t4\t1\nend\n",
            "route\ta\t1\t4\ntook\t5\t4294967296\nend\n",
            &"route\ta\t1\t4\n".repeat(2_000),
        ] {
            assert!(decode(lines).is_err(), "{lines}");
        }
        assert!(HourFile::decode(&gzipped("tracing-profiling typical 2\nend\n")).is_err());
        let bomb = gzipped(&"x".repeat(MOST_BYTES as usize + 1));
        assert!(HourFile::decode(&bomb).unwrap_err().contains("bytes"));
    }
}

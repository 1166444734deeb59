//! A profile on the wire and in a file: its size, and the time to encode it.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use tracing::{dispatcher, info_span};
use tracing_profiling::encode;
use tracing_profiling::profile::Profile;
use tracing_profiling::resource_from_env;

use crate::measure::{Setup, figure, median, time_each};

pub(crate) fn run() {
    let profile = profile();
    shape(&profile);
    let resource = resource_from_env().with("service.name", "shop");
    let otlp = encode::otlp(&profile, &resource);
    figure("wire.otlp.size", kib(otlp.len()), "KiB");
    figure("wire.otlp.size_gzip", kib(gzip(&otlp).len()), "KiB");
    figure("wire.otlp.encode", time(|| encode::otlp(&profile, &resource).len()), "us");
    figure("wire.otlp.gzip", time(|| gzip(&otlp).len()), "us");
    let pprof = encode::pprof(&profile);
    let mut whole = Vec::new();
    _ = GzDecoder::new(pprof.as_slice()).read_to_end(&mut whole).expect("gzip");
    figure("wire.pprof.size", kib(whole.len()), "KiB");
    figure("wire.pprof.size_gzip", kib(pprof.len()), "KiB");
    figure("wire.pprof.encode_and_gzip", time(|| encode::pprof(&profile).len()), "us");
    figure("wire.pprof.gzip", time(|| gzip(&whole).len()), "us");
    #[cfg(feature = "otlp-http")]
    sending::run(&profile);
}

/// A second of one thread in SQLite, JSON and regular expressions: most samples have distinct stacks.
fn profile() -> Profile {
    let setup = Setup::new("0ms", |builder| builder.rate(999).samples_per_profile(100_000));
    dispatcher::with_default(&setup.dispatch, || {
        let _span = info_span!("GET /report").entered();
        let start = cpu_time::ThreadTime::now();
        let mut round = 0;
        while start.elapsed() < Duration::from_secs(1) {
            round += 1;
            std::hint::black_box(within(24, &|| mixed_work(round)));
        }
    });
    setup.flush();
    setup.memory.profiles().pop().expect("a profile")
}

/// As deep in calls as the middleware of a service.
#[inline(never)]
fn within(calls: u32, action: &dyn Fn() -> usize) -> usize {
    let result = if calls == 0 { action() } else { within(calls - 1, action) };
    // Prevents a tail call, so that each call has a frame.
    std::hint::black_box(result)
}

fn mixed_work(round: i64) -> usize {
    let database = rusqlite::Connection::open_in_memory().expect("SQLite");
    database
        .execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT, price REAL);")
        .expect("a table");
    for id in 0..200 {
        let name = format!("article {}", id * round % 37);
        let order = rusqlite::params![id, name, id as f64 * 1.3];
        _ = database.execute("INSERT INTO orders VALUES (?, ?, ?)", order).expect("a row");
    }
    let sums = "SELECT name, count(*), sum(price) FROM orders WHERE name LIKE '%1%' \
                GROUP BY name ORDER BY sum(price) DESC";
    let mut statement = database.prepare(sums).expect("a query");
    let rows = statement
        .query_map([], |row| {
            let name = row.get::<_, String>(0)?;
            Ok(serde_json::json!({"name": name, "count": row.get::<_, i64>(1)?, "sum": row.get::<_, f64>(2)?}))
        })
        .expect("rows");
    let rows: Vec<serde_json::Value> = rows.map(|row| row.expect("a row")).collect();
    let text = serde_json::to_string_pretty(&rows).expect("JSON");
    let read: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let pattern = regex::Regex::new(r#""(name|count)": *"?([a-z0-9 ]+)"?"#).expect("a pattern");
    pattern.captures_iter(&text).count() + read.as_array().map_or(0, Vec::len)
}

fn shape(profile: &Profile) {
    let samples = profile.samples();
    let points: usize = samples.iter().map(|sample| sample.points.len()).sum();
    let stacks: HashSet<_> = samples.iter().map(|sample| sample.stack).collect();
    let (mut depth, mut functions) = (0, HashSet::new());
    for stack in &stacks {
        depth += profile.stack(*stack).count();
        let lines = profile.stack(*stack).flat_map(|location| &location.lines);
        functions.extend(lines.map(|line| line.function));
    }
    figure("wire.samples", points as f64, "count");
    figure("wire.stacks", stacks.len() as f64, "count");
    figure("wire.functions", functions.len() as f64, "count");
    figure("wire.depth", depth as f64 / stacks.len() as f64, "frames");
}

fn kib(bytes: usize) -> f64 {
    bytes as f64 / 1024.0
}

/// Time in microseconds.
fn time(mut action: impl FnMut() -> usize) -> f64 {
    let run = |_| time_each(5, || _ = std::hint::black_box(action())) / 1e3;
    median(&(0..7).map(run).collect::<Vec<_>>())
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

/// The work of the sending thread per profile.
#[cfg(feature = "otlp-http")]
mod sending {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use std::sync::mpsc::{Sender, channel};
    use std::thread;

    use tracing_profiling::{Exporter, OtlpExporter, Protocol};

    use super::*;

    const PROFILES: usize = 40;

    pub(super) fn run(profile: &Profile) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its number");
        let (came, bodies) = channel();
        _ = thread::spawn(move || serve(&listener, &came));
        let mut exporter = OtlpExporter::builder()
            .protocol(Protocol::HttpProtobuf)
            .endpoint(format!("http://{address}"))
            .build()
            .expect("an exporter");
        let mut each_us = Vec::new();
        // The first export opens the connection.
        let mut before = None;
        for _ in 0..PROFILES {
            _ = exporter.export(profile).expect("accepted");
            bodies.recv().expect("a request");
            let now = thread_cpu_us();
            each_us.extend(before.replace(now).map(|before| now - before));
        }
        figure("wire.otlp.send", median(&each_us), "us");
    }

    /// Answers each request, and reports it.
    fn serve(listener: &TcpListener, came: &Sender<()>) {
        let (stream, _) = listener.accept().expect("a connection");
        let mut writer = stream.try_clone().expect("a file");
        let mut lines = BufReader::new(stream);
        let mut length = 0;
        loop {
            let mut line = String::new();
            if lines.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if let Some(number) = line.to_lowercase().strip_prefix("content-length:") {
                length = number.trim().parse().expect("a number");
            }
            if line != "\r\n" {
                continue;
            }
            let mut body = vec![0; length];
            lines.read_exact(&mut body).expect("the body");
            writer.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").expect("sent");
            if came.send(()).is_err() {
                return;
            }
        }
    }

    /// CPU time of the sending thread.
    fn thread_cpu_us() -> f64 {
        for task in fs::read_dir("/proc/self/task").expect("threads").flatten() {
            let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
            if read("comm").trim() == "profiling-otlp" {
                let times = read("schedstat");
                let ns = times.split(' ').next().and_then(|ns| ns.parse::<f64>().ok());
                return ns.expect("schedstat") / 1e3;
            }
        }
        panic!("no such thread");
    }
}

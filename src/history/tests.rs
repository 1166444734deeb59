//! Several layers and days on scripted time, with real files.

use std::borrow::Cow;
use std::fs;
use std::path::Path;

use super::*;
use crate::facts::{Facts, TimeBreakdown};
use crate::profile::{Profile, ProfileId};
use crate::references::ReferenceLimits;
use crate::stats::ReferenceStats;

const MS: u64 = 1_000_000;
/// Seven minutes into an hour.
const START: u64 = 490_003 * 3_600 + 7 * 60;

fn at(hours: u64, minutes: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(START + hours * 3_600 + minutes * 60)
}

/// What the layer of one process has.
struct Process {
    references: Arc<References>,
    counters: Arc<Counters>,
    history: HourlyHistory,
}

impl Process {
    fn start(dir: Option<&Path>, version: &str, now: SystemTime) -> Self {
        let counters = Arc::new(Counters::default());
        let limits = ReferenceLimits { one_in: 1, cpu_thousandths: 1 };
        let references =
            Arc::new(References::new(limits, Default::default(), Arc::clone(&counters)));
        let (service, version) = ("shop".to_owned(), version.to_owned());
        let settings = HistorySettings { dir: dir.map(PathBuf::from), service, version };
        let mut history = HourlyHistory::new(settings, &references, &counters);
        history.begin(now);
        Self { references, counters, history }
    }

    /// Adds reference spans of a route that take between 90 and 110 % of some milliseconds.
    fn run(&self, route: &str, spans: u64, ms: u64) {
        let profile = Profile::new(ProfileId::NONE, 0);
        for number in 0..spans {
            let wall_ns = ms * MS * (90 + number * 8 % 21) / 100;
            let facts = Facts {
                span: Cow::Borrowed("request"),
                fields: vec![("http.route", route.to_owned())],
                times: TimeBreakdown { wall_ns, idle_ns: wall_ns, ..TimeBreakdown::default() },
                ..Facts::default()
            };
            self.references.add(&profile, &facts, 10, 0);
        }
    }

    fn advance(&mut self, now: SystemTime) {
        self.history.advance(now);
    }

    fn end(mut self, now: SystemTime) -> Vec<LogEvent> {
        self.history.flush(now);
        self.history.events
    }

    fn stats(&self) -> ReferenceStats {
        self.counters.snapshot().references
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir.join("typical")).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn reasons(events: &[LogEvent]) -> Vec<&'static str> {
    events.iter().map(|event| event.kind.reason()).collect()
}

#[test]
fn a_process_compares_with_the_version_before_that_it_reads() {
    let dir = tempfile::tempdir().unwrap();
    let old = Process::start(Some(dir.path()), "1.4.1", at(0, 0));
    old.run("/similar", 200, 100);
    old.run("/cart", 200, 100);
    assert!(old.end(at(0, 20)).is_empty());
    let mut new = Process::start(Some(dir.path()), "1.4.2", at(72, 0));
    new.run("/similar", 200, 125);
    new.run("/cart", 200, 100);
    new.advance(at(72, 52));
    assert!(new.history.events.is_empty(), "the hour has not ended: {:?}", new.history.events);
    new.advance(at(72, 53));
    assert_eq!(reasons(&new.history.events), ["drift"]);
    let event = &new.history.events[0];
    assert_eq!(
        event.message,
        "request{http.route=/similar} has become slower: 125 ms on average with version 1.4.2, 100.0 ms with version \
         1.4.1 (+25 %)"
    );
    assert_eq!(event.value.as_deref(), Some("request{http.route=/similar}"));
    assert_eq!(new.stats().drifted, 1);
    assert_eq!(new.references.routes().iter().filter(|route| route.drift.is_some()).count(), 1);
    // The rows say where, whatever stored them.
    let of = |version| RouteHistory::of_period(dir.path(), &Period::parse(version)).unwrap();
    let compared = of("1.4.2").compare(&of("1.4.1"));
    let routes: Vec<_> = compared.iter().map(|(route, _)| route.as_str()).collect();
    assert_eq!(routes, ["request{http.route=/cart}", "request{http.route=/similar}"]);
    let (_, slower) = &compared[1];
    assert_eq!(slower.wall.extra(), 24_992_500);
    assert!(slower.wall.interval.unwrap().low > 0 && slower.rows.len() == 1);
    assert_eq!(slower.rows[0].value.extra(), slower.wall.extra());
    assert!(!compared[0].1.wall.interval.unwrap().excludes_zero());
}

#[test]
fn another_service_in_the_same_directory_is_not_compared() {
    for (service, expected) in [("cart", 0), ("shop", 1)] {
        let dir = tempfile::tempdir().unwrap();
        let mut other = Process::start(Some(dir.path()), "3.0.0", at(0, 0));
        other.history.settings.service = service.to_owned();
        other.run("/health", 200, 10);
        _ = other.end(at(0, 20));
        assert_eq!(names(dir.path()).len(), 1);
        let mut process = Process::start(Some(dir.path()), "1.4.2", at(72, 0));
        process.run("/health", 200, 100);
        process.advance(at(72, 53));
        assert_eq!(process.history.events.len(), expected, "{:?}", process.history.events);
    }
}

#[test]
fn without_a_directory_an_hour_is_compared_with_the_day_before() {
    let mut process = Process::start(None, "", at(0, 0));
    for hour in 0..24 {
        process.run("/similar", 100, 50);
        process.advance(at(hour + 1, 0));
    }
    assert!(process.history.events.is_empty(), "{:?}", process.history.events);
    process.run("/similar", 100, 60);
    assert!(process.history.events.is_empty());
    let events = process.end(at(25, 0));
    assert_eq!(reasons(&events), ["drift"]);
    assert!(events[0].message.contains("in the same hour of the day before (+20 %)"), "{events:?}");
}

#[test]
fn an_hour_is_written_every_five_minutes_to_a_file_of_each_process() {
    let dir = tempfile::tempdir().unwrap();
    let mut one = Process::start(Some(dir.path()), "1", at(0, 0));
    let mut other = Process::start(Some(dir.path()), "1", at(0, 0));
    assert_eq!(one.history.due_in(at(0, 1)), Some(Duration::from_secs(4 * 60)));
    assert_eq!(one.history.due_in(at(0, 52)), Some(Duration::ZERO));
    one.advance(at(0, 6));
    assert!(names(dir.path()).is_empty(), "nothing was added");
    for (process, spans) in [(&mut one, 30), (&mut other, 12)] {
        process.run("/a", spans, 5);
        process.advance(at(0, 12));
        process.run("/a", spans, 5);
        process.advance(at(0, 13));
    }
    assert_eq!(names(dir.path()).len(), 2);
    let read = || RouteHistory::read(dir.path()).unwrap();
    assert_eq!(read().references("request{http.route=/a}"), 42, "as of the last write");
    for process in [&mut one, &mut other] {
        process.advance(at(0, 18));
    }
    assert_eq!(read().references("request{http.route=/a}"), 84);
    one.run("/a", 1, 5);
    one.advance(at(1, 0));
    one.run("/b", 3, 5);
    assert!(one.end(at(1, 1)).is_empty() && other.end(at(1, 1)).is_empty());
    assert_eq!(names(dir.path()).len(), 3, "one has a second hour");
    assert_eq!(
        read().routes().collect::<Vec<_>>(),
        ["request{http.route=/a}", "request{http.route=/b}"]
    );
    assert_eq!(read().references("request{http.route=/a}"), 85);
    // A file alone, and one by its hour and version.
    let first = dir.path().join("typical").join(&names(dir.path())[0]);
    assert!(RouteHistory::read(&first).unwrap().references("request{http.route=/a}") > 0);
    let missing = RouteHistory::of_period(dir.path(), &Period::parse("2")).unwrap_err();
    assert!(missing.to_string().contains("of version 2 in"), "{missing}");
}

#[test]
fn damaged_files_are_counted_and_said_once() {
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start(Some(dir.path()), "1", at(0, 0));
    process.run("/a", 30, 5);
    process.end(at(0, 1));
    let name = names(dir.path()).remove(0);
    let path = dir.path().join("typical").join(&name);
    let bytes = fs::read(&path).unwrap();
    for pid in 1..4 {
        let parts: Vec<_> = name.splitn(3, '-').collect();
        let other = format!("{}-{pid}-{}", parts[0], parts[2]);
        fs::write(path.with_file_name(other), &bytes[..bytes.len() / 2]).unwrap();
    }
    fs::write(path.with_file_name("notes.txt"), "not a file of an hour").unwrap();
    let process = Process::start(Some(dir.path()), "1", at(0, 2));
    assert_eq!(reasons(&process.history.events), ["history_unreadable"]);
    assert_eq!(process.stats().history_unreadable, 3);
    let read = RouteHistory::read(dir.path()).unwrap();
    assert_eq!((read.unreadable(), read.references("request{http.route=/a}")), (3, 30));
}

#[test]
fn what_cannot_be_written_is_counted_and_said_once_until_it_works() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::start(Some(dir.path()), "1", at(0, 0));
    fs::write(dir.path().join("typical"), "a file").unwrap();
    for minutes in [5, 10, 15] {
        process.run("/a", 10, 5);
        process.advance(at(0, minutes));
    }
    assert_eq!(reasons(&process.history.events), ["history_unwritten"]);
    assert_eq!(process.stats().history_unwritten, 3);
    fs::remove_file(dir.path().join("typical")).unwrap();
    process.advance(at(0, 20));
    assert_eq!(names(dir.path()).len(), 1);
    assert_eq!((process.history.events.len(), process.stats().history_unwritten), (1, 3));
}

#[test]
fn without_reference_spans_nothing_happens() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::start(Some(dir.path()), "1", at(0, 0));
    process.references =
        Arc::new(References::new(ReferenceLimits::NONE, Default::default(), Arc::default()));
    process.history.references = Arc::clone(&process.references);
    assert_eq!(process.history.due_in(at(0, 1)), None);
    assert!(process.end(at(30, 0)).is_empty() && names(dir.path()).is_empty());
}

#[test]
fn an_hour_of_which_little_is_known_is_stored_and_nothing_is_said_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let old = Process::start(Some(dir.path()), "1.4.1", at(0, 0));
    old.run("/cart", 200, 100);
    assert!(old.end(at(2, 0)).is_empty());
    // At 37 minutes past, with cold caches.
    let mut new = Process::start(Some(dir.path()), "1.4.2", at(24, 30));
    new.run("/cart", 200, 300);
    new.advance(at(24, 53));
    assert!(new.history.events.is_empty(), "{:?}", new.history.events);
    assert_eq!(names(dir.path()).len(), 2);
    new.run("/cart", 200, 300);
    new.advance(at(25, 53));
    // The version before is known of another hour of the day.
    assert!(new.history.events.is_empty(), "{:?}", new.history.events);
}

#[test]
fn after_the_clock_was_set_back_hours_end_as_before() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::start(Some(dir.path()), "1.4.1", at(5, 0));
    process.run("/cart", 20, 100);
    process.advance(at(0, 0));
    process.run("/cart", 20, 100);
    process.advance(at(1, 0));
    assert_eq!(names(dir.path()).len(), 1, "the hour that the clock shows has ended");
    assert!(process.history.due_in(at(1, 0)) <= Some(WRITE_EVERY));
    process.run("/cart", 20, 100);
    process.advance(at(2, 0));
    assert_eq!(names(dir.path()).len(), 2);
}

#[test]
fn of_one_hour_the_version_that_was_written_last_is_the_last() {
    let dir = tempfile::tempdir().unwrap();
    // Several of each, since the id in a file's name is random.
    for version in ["1.4.1", "1.4.2"].repeat(4) {
        let process = Process::start(Some(dir.path()), version, at(0, 0));
        process.run("/a", 30, 5);
        process.end(at(0, 1));
    }
    let mut begun = at(0, 0);
    for (last, others) in [("1.4.2", "1.4.1"), ("1.4.1", "1.4.2")] {
        for version in [others, last] {
            begun += Duration::from_secs(60);
            for name in names(dir.path()).iter().filter(|name| name.contains(version)) {
                let path = dir.path().join("typical").join(name);
                fs::File::options().write(true).open(path).unwrap().set_modified(begun).unwrap();
            }
        }
        assert_eq!(RouteHistory::versions(dir.path()).unwrap(), [last, others]);
    }
}

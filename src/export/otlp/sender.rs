//! The thread that sends.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use bytes::Bytes;

use super::queue::{Item, Next, Queue, Stored};
use super::transport::{Answer, Never, Request, Transport};
use crate::export::directory::Directory;
use crate::export::{Fate, Reporter};
use crate::span::{ignore_this_thread, spawn_ignored};
use crate::sys;

/// How soon a request is sent again, at first and at last.
const FIRST_DELAY: Duration = Duration::from_millis(500);
const LAST_DELAY: Duration = Duration::from_secs(30);
/// No server is waited for longer, whatever it says.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);
/// Looking up a name can hang for longer than a request, and cannot be ended.
const MOST_LOOKUPS: usize = 4;
const MINUTE: Duration = Duration::from_secs(60);

pub(super) struct Sender {
    pub(super) queue: Arc<Queue>,
    pub(super) transport: Transport,
    pub(super) reporter: Reporter,
    /// Where what is given up goes.
    pub(super) fallback: Option<Arc<Directory>>,
    delays: ExponentialBackoff,
    /// When something was said last of what is wrong.
    told: Option<Instant>,
    /// Whether that was that profiles are not sent.
    owes_all_clear: bool,
}

/// How the sending of a profile ended.
enum SendOutcome {
    Accepted { rejected: u64 },
    Never(Never),
    TooOld,
}

impl Sender {
    pub(super) fn new(
        queue: Arc<Queue>,
        transport: Transport,
        reporter: Reporter,
        fallback: Option<Arc<Directory>>,
    ) -> Self {
        let delays = delays();
        Self { queue, transport, reporter, fallback, delays, told: None, owes_all_clear: false }
    }

    /// Starts the thread. It has a runtime of its own, so that it does not matter whether the program has one,
    /// and nothing that is done there is seen by the program's subscriber: requests open spans, too.
    pub(super) fn start(self) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .thread_name("profiling-otlp")
            .thread_stack_size(sys::STACK_BYTES)
            .max_blocking_threads(MOST_LOOKUPS)
            .on_thread_start(ignore_this_thread)
            .build()?;
        spawn_ignored("profiling-otlp", move || {
            let nobody = tracing::subscriber::NoSubscriber::default();
            tracing::subscriber::with_default(nobody, || {
                let (queue, reporter) = (Arc::clone(&self.queue), self.reporter.clone());
                runtime.block_on(async {
                    let work = tokio::spawn(self.run());
                    let abort = work.abort_handle();
                    let queue_of_work = Arc::clone(&queue);
                    tokio::spawn(async move {
                        if work.await.is_err_and(|error| error.is_panic()) {
                            queue_of_work.break_down();
                            reporter
                                .warn("the thread that sends profiles has panicked: none is sent");
                        }
                    });
                    queue.stop.notified().await;
                    abort.abort();
                });
                // Names are looked up on threads that nothing else can end.
                runtime.shutdown_background();
            });
        })
    }

    async fn run(mut self) {
        loop {
            match self.queue.next() {
                Some(Next::Profile(item)) => self.deliver(&item).await,
                Some(Next::Stored(stored)) => self.deliver_stored(stored).await,
                None => self.rest().await,
            }
        }
    }

    /// Until there is something to send. Meanwhile asks a server that has failed, or wants nothing from us,
    /// whether that is still so, without a profile, which would be lost.
    async fn rest(&mut self) {
        let queue = Arc::clone(&self.queue);
        let Some(at) = queue.asks_again_at() else { return queue.wake.notified().await };
        let wake = queue.wake.notified();
        if at > Instant::now() && tokio::time::timeout_at(at.into(), wake).await.is_ok() {
            return;
        }
        let request = self.transport.request(Bytes::new());
        match self.transport.send(&request).await {
            Answer::Never { what: Never::All, problem } => self.note_refusal(&problem),
            Answer::NotNow { after, problem } => self.note_failure(after, &problem),
            // Whatever else it says is not of that kind.
            _ => {
                self.delays = delays();
                self.queue.note_other_answer();
            }
        }
    }

    async fn deliver(&mut self, item: &Arc<Item>) {
        let request = self.transport.request(item.encoded.clone());
        match self.send(&request, item.since).await {
            SendOutcome::Accepted { rejected: 0 } => {
                self.queue.settle(|| self.reporter.count(Fate::Delivered, 1));
            }
            // Its samples and its waits are two profiles to the receiver.
            SendOutcome::Accepted { .. } => {
                self.queue.settle(|| self.reporter.count(Fate::Refused, 1))
            }
            SendOutcome::Never(never) => {
                // It wants none of the others either: they are not sent one by one to be told so.
                if never == Never::All {
                    self.give_up_waiting(Fate::Refused, |_| true);
                }
                self.give_up(item, Fate::Refused);
            }
            SendOutcome::TooOld => {
                let age = self.queue.bounds.age;
                self.give_up_waiting(Fate::TooOld, |item| item.since.elapsed() > age);
                self.give_up(item, Fate::TooOld);
            }
        }
    }

    async fn deliver_stored(&mut self, stored: Stored) {
        // Small, local, and nothing else runs on this thread.
        let fate = match std::fs::read(&stored.path) {
            // The directory has made room.
            Err(_) => Fate::TooOld,
            Ok(_) if stored.since.elapsed() > self.queue.bounds.age => Fate::TooOld,
            Ok(encoded) => {
                let request = self.transport.request(encoded.into());
                match self.send(&request, stored.since).await {
                    SendOutcome::Accepted { rejected: 0 } => Fate::Delivered,
                    // Which may pass.
                    SendOutcome::Never(Never::All) => return self.queue.put_back(stored),
                    SendOutcome::Accepted { .. } | SendOutcome::Never(_) => Fate::Refused,
                    SendOutcome::TooOld => Fate::TooOld,
                }
            }
        };
        self.queue.settle_stored(|| {
            self.reporter.count(fate, 1);
            self.reporter.count_after_all();
        });
    }

    /// Sends a request until there is an answer to it.
    async fn send(&mut self, request: &Request, since: Instant) -> SendOutcome {
        let mut is_repeated = false;
        loop {
            self.wait().await;
            if is_repeated {
                self.reporter.count_repeated();
            }
            is_repeated = true;
            match self.transport.send(request).await {
                Answer::Accepted { rejected, message } => {
                    self.note_accepted(rejected, &message);
                    return SendOutcome::Accepted { rejected };
                }
                Answer::Never { what, problem } => {
                    if what == Never::All {
                        self.note_refusal(&problem);
                    } else {
                        self.delays = delays();
                        self.queue.note_answer();
                        self.warn(&format!("refuses profiles: {problem}"));
                    }
                    return SendOutcome::Never(what);
                }
                Answer::NotNow { after, problem } => {
                    self.note_failure(after, &problem);
                    if since.elapsed() > self.queue.bounds.age {
                        return SendOutcome::TooOld;
                    }
                }
            }
        }
    }

    /// After a failure until the server wants to be asked again, or for a while if it has not said.
    async fn wait(&self) {
        match self.queue.pause() {
            None => {}
            Some((until, true)) => tokio::time::sleep_until(until.into()).await,
            Some((until, false)) => {
                _ = tokio::time::timeout_at(until.into(), self.queue.hurry.notified()).await;
            }
        }
    }

    fn note_failure(&mut self, after: Option<Duration>, problem: &str) {
        let delay = self.delays.next().unwrap_or(LAST_DELAY);
        // Not at once: it may say so each time.
        let pause = after.map_or(delay, |after| after.clamp(FIRST_DELAY, LONGEST_WAIT));
        self.queue.note_failure(problem, pause, after.is_some());
        let waiting = self.queue.len();
        let what = format!("does not take profiles at present: {problem} ({waiting} wait)");
        self.owes_all_clear |= self.warn(&what);
    }

    fn note_refusal(&mut self, problem: &str) {
        self.delays = delays();
        self.queue.note_refusal(problem);
        self.owes_all_clear |= self.warn(&format!("refuses profiles: {problem}"));
    }

    fn note_accepted(&mut self, rejected: u64, message: &str) {
        self.delays = delays();
        self.queue.note_answer();
        // After a warning only, and so no more often than these.
        if std::mem::take(&mut self.owes_all_clear) {
            let endpoint = &self.transport.endpoint;
            self.reporter.inform(format!("profiles are sent to {endpoint} again"));
        }
        if rejected > 0 {
            self.warn(&format!("has refused a profile: {message}"));
        } else if !message.is_empty() {
            self.warn(&format!("has taken a profile and says: {message}"));
        }
    }

    /// Says what the server does, once a minute at most. Returns whether it was said.
    fn warn(&mut self, what: &str) -> bool {
        let is_due = self.told.is_none_or(|told| told.elapsed() >= MINUTE);
        if is_due {
            self.told = Some(Instant::now());
            let endpoint = &self.transport.endpoint;
            self.reporter.warn(format!("{endpoint} {what} (said once a minute)"));
        }
        is_due
    }

    /// The profile that is being sent will not be delivered.
    fn give_up(&self, item: &Arc<Item>, fate: Fate) {
        // First, so that whoever sees that it is done sees the files.
        let stored = store(self.fallback.as_deref(), std::slice::from_ref(item));
        self.queue.settle(|| self.count_given_up(fate, 1, stored));
    }

    /// Neither will those that wait and are to go.
    fn give_up_waiting(&self, fate: Fate, is_to_go: impl Fn(&Item) -> bool) {
        let items = self.queue.take_waiting(is_to_go);
        let stored = store(self.fallback.as_deref(), &items);
        self.count_given_up(fate, items.len() as u64, stored);
    }

    fn count_given_up(&self, fate: Fate, all: u64, stored: u64) {
        // What is refused stays refused, whatever is in the directory: it is sent no more.
        let stored = if fate == Fate::Refused { 0 } else { stored };
        self.reporter.count(Fate::Stored, stored);
        self.reporter.count(fate, all - stored);
    }
}

/// Writes what will not be delivered to the fallback directory, if there is one, and returns how many of them.
pub(super) fn store(fallback: Option<&Directory>, items: &[Arc<Item>]) -> u64 {
    let Some(fallback) = fallback else { return 0 };
    let stored = items.iter().filter(|item| fallback.write_otlp(&item.stem, &item.encoded).is_ok());
    stored.count() as u64
}

/// Ever longer, and not in step with other processes.
fn delays() -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(FIRST_DELAY)
        .with_max_delay(LAST_DELAY)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::otlp::queue::Bounds;
    use crate::export::otlp::{OtlpBuilder, OtlpExporter};
    use crate::stats::Counters;

    const PLENTY: Duration = Duration::from_secs(60);

    /// To where nobody listens: what becomes of it is counted.
    fn sender(say: fn(String, bool), age: Duration) -> (Sender, Arc<Counters>) {
        sender_to("127.0.0.1:1", say, Duration::MAX, age)
    }

    fn sender_to(
        address: &str,
        say: fn(String, bool),
        patience: Duration,
        age: Duration,
    ) -> (Sender, Arc<Counters>) {
        let there: OtlpBuilder = OtlpExporter::builder().endpoint(format!("http://{address}"));
        let counters = Arc::new(Counters::default());
        let bounds = Bounds { profiles: 9, bytes: 9, request_bytes: 999, patience, age };
        let transport = Transport::new(there.resolve(&|_| Ok(None)).unwrap()).unwrap();
        let reporter = Reporter::new(Arc::clone(&counters), say);
        (Sender::new(Queue::new(bounds), transport, reporter, None), counters)
    }

    fn wait_until(is_so: impl Fn() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < PLENTY);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn item(since: Instant) -> Item {
        Item { encoded: Bytes::from_static(b""), since, stem: String::new() }
    }

    #[test]
    fn the_old_do_not_take_the_young_with_them() {
        let (sender, counters) = sender(|_, _| {}, Duration::ZERO);
        let queue = Arc::clone(&sender.queue);
        queue.push(item(Instant::now()));
        queue.push(item(Instant::now() + PLENTY));
        sender.start().unwrap();
        let is_over = || counters.snapshot().profiles_dropped_too_old > 0;
        let start = Instant::now();
        while !is_over() {
            assert!(start.elapsed() < PLENTY);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(queue.close().len(), 1, "it is sent on");
        assert_eq!(counters.snapshot().profiles_dropped_too_old, 1);
    }

    /// Nothing waits any more that would be sent and show it.
    #[cfg(feature = "otlp-http")]
    #[test]
    fn a_server_that_was_away_for_too_long_is_asked_again() {
        use std::io::{Read, Write};
        let listen = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listen().local_addr().unwrap();
        for answer in ["200 OK", "400 Bad Request", "500 Internal Server Error"] {
            let (sender, counters) =
                sender_to(&address.to_string(), |_, _| {}, Duration::ZERO, Duration::ZERO);
            let queue = Arc::clone(&sender.queue);
            queue.push(item(Instant::now()));
            sender.start().unwrap();
            wait_until(|| counters.snapshot().profiles_dropped_too_old > 0);
            assert!(!queue.flush(Instant::now() + PLENTY), "it is still away");
            assert!(queue.problem().is_some());
            let listener = std::net::TcpListener::bind(address).unwrap();
            // Also if nobody flushes.
            let (mut connection, _) = listener.accept().unwrap();
            _ = connection.read(&mut [0; 4096]).unwrap();
            write!(connection, "HTTP/1.1 {answer}\r\ncontent-length: 0\r\n\r\n").unwrap();
            wait_until(|| queue.problem().is_none());
            assert!(queue.flush(Instant::now() + PLENTY));
            queue.close();
        }
    }

    /// Not after a request, and a pause, for each.
    #[cfg(feature = "otlp-http")]
    #[test]
    fn all_that_are_too_old_are_given_up_with_the_first() {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sender, counters) = sender_to(&address, |_, _| {}, Duration::MAX, Duration::ZERO);
        let queue = Arc::clone(&sender.queue);
        let now = Instant::now();
        for since in [now, now, now + PLENTY, now] {
            queue.push(item(since));
        }
        sender.start().unwrap();
        let (mut connection, _) = listener.accept().unwrap();
        _ = connection.read(&mut [0; 4096]).unwrap();
        let busy =
            "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 3600\r\n\r\n";
        connection.write_all(busy.as_bytes()).unwrap();
        // The next request is an hour away.
        wait_until(|| counters.snapshot().profiles_dropped_too_old == 3);
        assert_eq!(queue.len(), 1);
        queue.close();
    }

    #[test]
    fn a_panic_is_the_end_of_sending_and_of_nothing_else() {
        // It has something to say of the first failure.
        let (sender, _) = sender(|line, _| assert!(line.contains("has panicked")), MINUTE);
        let queue = Arc::clone(&sender.queue);
        sender.start().unwrap();
        queue.push(item(Instant::now()));
        assert!(!queue.flush(Instant::now() + PLENTY));
        let start = Instant::now();
        while queue.problem().is_none() {
            assert!(start.elapsed() < PLENTY);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!queue.flush(Instant::now() + 10 * PLENTY), "at once");
        assert!(start.elapsed() < PLENTY);
        assert!(queue.problem().unwrap().contains("panicked"));
        assert_eq!(queue.close().len(), 1, "and can be counted");
    }
}

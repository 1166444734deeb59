//! What waits to be sent, and how the server is.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

/// Limits of what waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) profiles: usize,
    pub(super) bytes: usize,
    /// Of one request, before it is compressed.
    pub(super) request_bytes: usize,
    /// How long requests may fail before the server is away.
    pub(super) patience: Duration,
    /// How old a profile may be when it is sent again.
    pub(super) age: Duration,
}

/// Profiles in the fallback directory that are remembered to be sent.
const MOST_STORED: usize = 4096;
/// After a server has said that it wants nothing, how soon it is asked again, at first and at last.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);
/// How often a request is sent again at least while somebody waits for it, if the server has not said when.
const HURRY: Duration = Duration::from_secs(1);

/// A profile that waits: encoded, which takes a fraction of the memory of the message.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) encoded: Bytes,
    pub(super) since: Instant,
    /// What its files would be called.
    pub(super) stem: String,
}

/// A profile in the fallback directory.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) path: PathBuf,
    pub(super) since: Instant,
}

/// What is to be sent next.
#[derive(Debug)]
pub(super) enum Next {
    Profile(Arc<Item>),
    Stored(Stored),
}

#[derive(Debug)]
struct FailingServer {
    since: Instant,
    /// When to ask again.
    until: Instant,
    /// The server has said so.
    is_said: bool,
    problem: String,
}

#[derive(Debug)]
struct Refusing {
    /// When to ask again.
    until: Instant,
    pause: Duration,
    problem: String,
    /// It did not refuse a request without profiles: the next profile is taken, to see.
    is_over: bool,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: VecDeque<Arc<Item>>,
    /// Of what waits and of what is being sent.
    bytes: usize,
    sending: Option<Arc<Item>>,
    stored: VecDeque<Stored>,
    /// Whether one of those is being sent.
    sends_stored: bool,
    /// Since the last request failed.
    failing: Option<FailingServer>,
    /// Since the server has last said that it wants nothing from us.
    refusing: Option<Refusing>,
    /// Whether somebody waits for it to be asked again.
    asks_now: bool,
    /// The thread has ended by itself.
    is_broken: bool,
    is_closed: bool,
}

impl QueueState {
    /// What is wrong with the server, if it is away.
    fn away(&self, patience: Duration) -> Option<&str> {
        let failing = self.failing.as_ref().filter(|failing| failing.since.elapsed() >= patience);
        let refusing = self.refusing.as_ref().filter(|refusing| !refusing.is_over);
        let problem = failing.map(|failing| &failing.problem);
        problem.or(refusing.map(|refusing| &refusing.problem)).map(String::as_str)
    }

    /// It has said that it wants nothing from us, and nothing since.
    fn is_refusing(&self) -> bool {
        self.refusing.as_ref().is_some_and(|refusing| !refusing.is_over)
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.sending.is_none()
    }

    /// Nothing is left to be sent to the server as it is now.
    fn is_done(&self) -> bool {
        let can_send = self.failing.is_none() && !self.is_refusing();
        self.is_idle() && !(can_send && self.has_stored())
    }

    fn has_stored(&self) -> bool {
        self.sends_stored || !self.stored.is_empty()
    }

    fn profiles(&self) -> usize {
        self.waiting.len() + usize::from(self.sending.is_some())
    }
}

/// Shared by the exporter and the thread that sends.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) bounds: Bounds,
    state: Mutex<QueueState>,
    /// Something is to be sent.
    pub(super) wake: Notify,
    /// Somebody waits for it.
    pub(super) hurry: Notify,
    /// It is over.
    pub(super) stop: Notify,
    /// A request has succeeded or failed.
    answered: Condvar,
}

impl Queue {
    pub(super) fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self {
            bounds,
            state: Mutex::default(),
            wake: Notify::new(),
            hurry: Notify::new(),
            stop: Notify::new(),
            answered: Condvar::new(),
        })
    }

    /// Why no profile can be taken now, if that is so.
    pub(super) fn problem(&self) -> Option<String> {
        let state = self.state.lock();
        if state.is_closed {
            return Some("the exporter has ended".to_owned());
        }
        if state.is_broken {
            return Some("the thread that sends profiles has panicked".to_owned());
        }
        if let Some(problem) = state.away(self.bounds.patience) {
            return Some(problem.to_owned());
        }
        let is_full = state.profiles() >= self.bounds.profiles || state.bytes >= self.bounds.bytes;
        is_full.then(|| {
            let mib = state.bytes as f64 / (1024.0 * 1024.0);
            format!("{} profiles of {mib:.1} MiB wait to be sent already", state.profiles())
        })
    }

    /// Takes a profile; the last one may be over the limit of bytes.
    pub(super) fn push(&self, item: Item) {
        let mut state = self.state.lock();
        state.bytes += item.encoded.len();
        state.waiting.push_back(Arc::new(item));
        drop(state);
        self.wake.notify_one();
    }

    /// A profile was written to the fallback directory, and is to be sent when the server is back.
    pub(super) fn push_stored(&self, stored: Stored) {
        let mut state = self.state.lock();
        if state.is_broken {
            return;
        }
        if state.stored.len() >= MOST_STORED {
            // It stays in the directory.
            state.stored.pop_front();
        }
        state.stored.push_back(stored);
        drop(state);
        self.wake.notify_one();
    }

    /// A stored profile that was to be sent is to be sent later.
    pub(super) fn put_back(&self, stored: Stored) {
        let mut state = self.state.lock();
        state.sends_stored = false;
        if !state.is_closed {
            state.stored.push_front(stored);
        }
        drop(state);
        self.answered.notify_all();
    }

    /// What is to be sent next. To a server that wants nothing no more is sent of what can wait.
    pub(super) fn next(&self) -> Option<Next> {
        let mut state = self.state.lock();
        if let Some(item) = state.waiting.pop_front() {
            state.sending = Some(Arc::clone(&item));
            return Some(Next::Profile(item));
        }
        if state.is_refusing() {
            return None;
        }
        let stored = state.stored.pop_front()?;
        state.sends_stored = true;
        Some(Next::Stored(stored))
    }

    /// The profile that is being sent is done with. Calls `count` before anybody who waits for it goes on, unless
    /// [`close`](Self::close) has given the profile up meanwhile.
    pub(super) fn settle(&self, count: impl FnOnce()) {
        let mut state = self.state.lock();
        if let Some(item) = state.sending.take() {
            state.bytes -= item.encoded.len();
            count();
        }
        drop(state);
        self.answered.notify_all();
    }

    /// Takes what waits and is to go, before the profile that is being sent is settled: so nobody finds the queue done
    /// before these are counted.
    pub(super) fn take_waiting(&self, is_to_go: impl Fn(&Item) -> bool) -> Vec<Arc<Item>> {
        let mut state = self.state.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let (gone, stays): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|item| is_to_go(item));
        state.waiting = stays.into();
        state.bytes -= gone.iter().map(|item| item.encoded.len()).sum::<usize>();
        gone
    }

    /// One of the fallback directory is done with. Calls `count` before anybody who waits for it goes on.
    pub(super) fn settle_stored(&self, count: impl FnOnce()) {
        let mut state = self.state.lock();
        state.sends_stored = false;
        count();
        drop(state);
        self.answered.notify_all();
    }

    /// The server has answered to profiles.
    pub(super) fn note_answer(&self) {
        let mut state = self.state.lock();
        state.refusing = None;
        state.failing = None;
        state.asks_now = false;
        drop(state);
        self.answered.notify_all();
    }

    /// A request has failed. The next is sent in so long; not before, if the server has said that.
    pub(super) fn note_failure(&self, problem: &str, pause: Duration, is_said: bool) {
        let mut state = self.state.lock();
        let now = Instant::now();
        let since = state.failing.as_ref().map_or(now, |failing| failing.since);
        let (until, problem) = (now + pause, problem.to_owned());
        state.failing = Some(FailingServer { since, until, is_said, problem });
        state.asks_now = false;
        drop(state);
        self.answered.notify_all();
    }

    /// After a failure, when the next request may be sent, and whether the server has said that.
    pub(super) fn pause(&self) -> Option<(Instant, bool)> {
        let state = self.state.lock();
        state.failing.as_ref().map(|failing| (failing.until, failing.is_said))
    }

    /// The server wants nothing from us. What waits in the directory waits until it does.
    pub(super) fn note_refusal(&self, problem: &str) {
        let mut state = self.state.lock();
        state.failing = None;
        let pause = state.refusing.as_ref().map(|refusing| (2 * refusing.pause).min(LAST_PAUSE));
        let pause = pause.unwrap_or(FIRST_PAUSE);
        let (until, problem) = (Instant::now() + pause, problem.to_owned());
        state.refusing = Some(Refusing { until, pause, problem, is_over: false });
        state.asks_now = false;
        drop(state);
        self.answered.notify_all();
    }

    /// When to ask a server again that has failed, or wants nothing from us, if it is one.
    pub(super) fn asks_again_at(&self) -> Option<Instant> {
        let state = self.state.lock();
        let refusing = state.refusing.as_ref().filter(|refusing| !refusing.is_over);
        let refusing = refusing.map(|refusing| refusing.until);
        let until = state.failing.as_ref().map(|failing| failing.until).or(refusing)?;
        Some(if state.asks_now { Instant::now() } else { until })
    }

    /// A server that had failed, or wanted nothing from us, has not said so again when it was asked. It wants
    /// profiles again when it takes one; until then it is not forgotten how long the last pause was.
    pub(super) fn note_other_answer(&self) {
        let mut state = self.state.lock();
        if let Some(refusing) = &mut state.refusing {
            refusing.is_over = true;
        }
        state.failing = None;
        state.asks_now = false;
        drop(state);
        self.answered.notify_all();
    }

    /// The thread that sends is no more.
    pub(super) fn break_down(&self) {
        let mut state = self.state.lock();
        state.is_broken = true;
        state.stored.clear();
        drop(state);
        self.answered.notify_all();
    }

    /// Waits until nothing is left to be sent, but no longer than `deadline`. Meanwhile a server that fails
    /// is asked more often. Returns whether nothing is left.
    pub(super) fn flush(&self, deadline: Instant) -> bool {
        self.hurry.notify_one();
        let mut state = self.state.lock();
        let may_ask =
            state.failing.as_ref().map_or(state.is_refusing(), |failing| !failing.is_said);
        if state.is_idle() && may_ask {
            state.asks_now = true;
            self.wake.notify_one();
        }
        while (!state.is_done() || state.asks_now) && !state.is_closed && !state.is_broken {
            let soon = deadline.min(Instant::now() + HURRY);
            if self.answered.wait_until(&mut state, soon).timed_out() {
                if soon == deadline {
                    break;
                }
                self.hurry.notify_one();
            }
        }
        state.is_idle() && !state.has_stored() && state.away(self.bounds.patience).is_none()
    }

    /// How many profiles wait.
    pub(super) fn len(&self) -> usize {
        let state = self.state.lock();
        state.profiles() + state.stored.len() + usize::from(state.sends_stored)
    }

    /// Ends it all. Returns what was not delivered.
    pub(super) fn close(&self) -> Vec<Arc<Item>> {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.stored.clear();
        state.bytes = 0;
        let sending = state.sending.take();
        let left = sending.into_iter().chain(std::mem::take(&mut state.waiting)).collect();
        drop(state);
        self.stop.notify_one();
        self.answered.notify_all();
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLENTY: Duration = Duration::from_secs(60);

    fn queue() -> Arc<Queue> {
        Queue::new(Bounds {
            profiles: 9,
            bytes: 9,
            request_bytes: 9,
            patience: Duration::ZERO,
            age: Duration::MAX,
        })
    }

    fn stored() -> Stored {
        Stored { path: PathBuf::new(), since: Instant::now() }
    }

    #[test]
    fn a_flush_waits_for_what_is_stored_while_the_server_answers() {
        let queue = queue();
        let flush = |millis| queue.flush(Instant::now() + Duration::from_millis(millis));
        queue.push_stored(stored());
        assert!(!flush(1));
        let Some(Next::Stored(next)) = queue.next() else { panic!("it is there") };
        assert!(!flush(1), "it is being sent");
        queue.put_back(next);
        assert!(!flush(1));
        _ = queue.next();
        let (settles, start) = (Arc::clone(&queue), Instant::now());
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            settles.settle_stored(|| {});
        });
        assert!(queue.flush(start + PLENTY));
        thread.join().unwrap();
        // The server goes away: nobody waits for what is in the directory.
        queue.push_stored(stored());
        queue.note_failure("busy", PLENTY, true);
        assert!(!queue.flush(Instant::now() + PLENTY));
        assert!(start.elapsed() < PLENTY);
    }

    #[test]
    fn what_is_stored_waits_while_the_server_wants_nothing() {
        let queue = queue();
        queue.push_stored(stored());
        queue.note_refusal("no");
        queue.push_stored(stored());
        assert!(queue.next().is_none());
        assert!(queue.asks_again_at().is_some());
        queue.note_other_answer();
        for _ in 0..2 {
            assert!(matches!(queue.next(), Some(Next::Stored(_))));
        }
        assert!(queue.next().is_none());
    }
}

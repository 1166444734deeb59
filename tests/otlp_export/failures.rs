//! Receivers and networks that fail, each in a different way. In each test, spans close while nothing can be delivered,
//! on the same thread that ends the failure afterwards: if that thread waited for the delivery, the test would hang.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::profiles::v1development::{
    ExportProfilesPartialSuccess, ExportProfilesServiceResponse,
};
use prost::Message;
use tonic::transport::{Certificate, ServerTlsConfig};
use tracing::{Dispatch, info_span};
use tracing_profiling::export::Memory;
use tracing_profiling::profile::ProfileId;
use tracing_profiling::{Directory, NoProfile, OtlpBuilder, ProfilingLayer, Protocol};
use tracing_subscriber::prelude::*;

use crate::receiver::{Behavior, Certified, Receiver, Speaks, certify, free_address, unused_ip};
use crate::support::{HAS_STACKS, PLENTY, Setup, burn, is_child, run_child};
use crate::{
    BOTH, MS, arrived, arrived_at_least_once, assert_adds_up, assert_one_body, given_ids, keep,
    keep_until_exporter_fails, setup, setup_with, to, wait_for_taken, waiting,
};

/// A setup whose warnings are recorded.
fn setup_with_log(exporter: OtlpBuilder) -> (Setup, Arc<Mutex<Vec<String>>>) {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let received = Arc::clone(&kept);
    let layer = ProfilingLayer::builder()
        .rules("0ms".parse().unwrap())
        // So that a ring covers the time in which the collector waits for a CPU.
        .rate(100)
        .stack_bytes(8_192)
        .profiles_per_minute(1000)
        .exporter(exporter.build().unwrap())
        .on_kept(move |one| received.lock().unwrap().push(one.clone()))
        .build()
        .unwrap();
    let handle = layer.handle();
    let log = Log::default();
    let lines = Arc::clone(&log.0);
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(layer).with(log));
    (Setup { handle, dispatch, memory: Memory::new(), kept }, lines)
}

/// Records warnings.
#[derive(Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Log {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        if *event.metadata().level() == tracing::Level::WARN {
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().unwrap().push(text.0);
        }
    }
}

/// Waits until `repeats` requests were repeated. (A flush skips the pause between them.)
fn wait_for_repeats(setup: &Setup, repeats: u64) {
    let start = Instant::now();
    while setup.handle.stats().profiles.requests_retried < repeats {
        assert!(start.elapsed() < PLENTY);
        _ = setup.handle.flush(10 * MS);
    }
}

/// Waits until the exporter has taken `profiles` profiles.
fn wait_for_exported(setup: &Setup, profiles: u64) {
    let start = Instant::now();
    while setup.handle.stats().profiles.exported < profiles {
        assert!(start.elapsed() < PLENTY);
        thread::sleep(MS);
    }
}

/// Waits until no delivery is pending.
fn wait_until_idle(setup: &Setup) {
    let start = Instant::now();
    while setup.handle.flush(PLENTY).is_err() || waiting(&setup.handle.stats()) > 0 {
        assert!(start.elapsed() < PLENTY, "{:?}", setup.handle.stats());
        thread::sleep(10 * MS);
    }
}

/// Keeps spans while nothing can be delivered. Then `end` ends the trouble and returns a receiver at that address, and
/// all profiles arrive.
fn assert_recovers<T>(
    speaks: Speaks,
    timeout: Duration,
    trouble: T,
    address: SocketAddr,
    end: impl FnOnce(T) -> Receiver,
) {
    let setup = setup(to(speaks, address).timeout(timeout));
    keep(&setup, 1);
    if !HAS_STACKS {
        return;
    }
    wait_for_repeats(&setup, 2);
    keep(&setup, 3);
    wait_for_exported(&setup, 4);
    let stats = setup.handle.stats();
    assert_eq!((stats.profiles.delivered, waiting(&stats)), (0, 4), "{speaks:?}");
    let receiver = end(trouble);
    wait_until_idle(&setup);
    assert_eq!(arrived_at_least_once(&receiver, &setup), given_ids(&setup), "{speaks:?}");
    assert_eq!(setup.handle.stats().profiles.delivered, 4);
    assert_adds_up(&setup.handle.stats());
}

#[test]
fn connections_that_are_refused() {
    for speaks in BOTH {
        let address = free_address();
        assert_recovers(speaks, PLENTY, (), address, |()| Receiver::at(speaks, address));
    }
}

/// Accepts connections on a thread and calls `each` for every one.
struct Listener {
    address: SocketAddr,
    has_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    fn new(mut each: impl FnMut(TcpStream) + Send + 'static) -> Self {
        let listener = TcpListener::bind((unused_ip(), 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&has_ended);
        let thread = thread::spawn(move || {
            for connection in listener.incoming() {
                if ends.load(Ordering::SeqCst) {
                    break;
                }
                each(connection.unwrap());
            }
            // A process that another test spawns may briefly hold the socket too. After a shutdown it no longer listens.
            #[cfg(target_os = "linux")]
            rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
        });
        Self { address, has_ended, thread: Some(thread) }
    }

    /// Stops listening.
    fn end(mut self) {
        self.has_ended.store(true, Ordering::SeqCst);
        // Only wakes the thread. A retry of the exporter may have done that already, and then nothing listens.
        _ = TcpStream::connect(self.address);
        self.thread.take().unwrap().join().unwrap();
    }
}

#[test]
#[cfg(target_os = "linux")]
fn connections_that_are_reset() {
    for speaks in BOTH {
        let listener = Listener::new(|mut connection| {
            _ = connection.read(&mut [0; 16]);
            // Without lingering, closing the connection resets it.
            rustix::net::sockopt::set_socket_linger(&connection, Some(Duration::ZERO)).unwrap();
        });
        let address = listener.address;
        assert_recovers(speaks, PLENTY, listener, address, |listener| {
            listener.end();
            Receiver::at(speaks, address)
        });
    }
}

#[test]
fn connections_without_any_answer() {
    for speaks in BOTH {
        let mut held = Vec::new();
        let listener = Listener::new(move |connection| held.push(connection));
        let address = listener.address;
        assert_recovers(speaks, 300 * MS, listener, address, |listener| {
            listener.end();
            Receiver::at(speaks, address)
        });
    }
}

/// The listener speaks another protocol: HTTP to a gRPC client, and the other way round.
#[test]
fn answers_in_another_protocol() {
    for speaks in BOTH {
        let listener = Listener::new(move |mut connection| {
            _ = connection.read(&mut [0; 16]);
            _ = connection.write_all(match speaks {
                Speaks::Grpc => b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n".as_slice(),
                Speaks::Http => b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            });
        });
        let address = listener.address;
        assert_recovers(speaks, PLENTY, listener, address, |listener| {
            listener.end();
            Receiver::at(speaks, address)
        });
    }
}

/// A network that drops packets: the kernel drops connection attempts while the listener's backlog is full.
#[test]
#[cfg(target_os = "linux")]
fn a_network_that_drops_all_packets() {
    use rustix::net::{
        AddressFamily, Shutdown, SocketFlags, SocketType, bind, listen, shutdown, socket_with,
    };
    for speaks in BOTH {
        let address = free_address();
        let (family, flags) = (AddressFamily::INET, SocketFlags::CLOEXEC);
        let listener = socket_with(family, SocketType::STREAM, flags, None).unwrap();
        rustix::net::sockopt::set_socket_reuseaddr(&listener, true).unwrap();
        bind(&listener, &address).unwrap();
        listen(&listener, 0).unwrap();
        let mut fillers = Vec::new();
        while let Ok(filler) = TcpStream::connect_timeout(&address, 300 * MS) {
            fillers.push(filler);
        }
        let timeout = 300 * MS;
        assert_recovers(speaks, timeout, (listener, fillers), address, |(listener, fillers)| {
            // A process that another test spawns may briefly hold the socket too. After a shutdown it no longer
            // listens.
            shutdown(&listener, Shutdown::Both).unwrap();
            drop((listener, fillers));
            Receiver::at(speaks, address)
        });
    }
}

/// Answers that ask the client to retry later.
#[test]
fn answers_that_ask_for_a_retry() {
    for speaks in BOTH {
        for (status, after) in [(429, Some(1)), (503, Some(0)), (502, None)] {
            let receiver = Receiver::new(speaks);
            let after = after.map(Duration::from_secs);
            receiver.will([
                Behavior::Refuse(status, after),
                Behavior::Refuse(status, after),
                Behavior::Hold,
            ]);
            let setup = setup(to(speaks, receiver.address));
            keep(&setup, 1);
            if !HAS_STACKS {
                return;
            }
            receiver.wait_for(3);
            for pair in receiver.got().windows(2) {
                // A pause is kept even if the receiver asks for none.
                let least = after.unwrap_or(500 * MS).max(500 * MS);
                // (The time of the answer's transfer is included.)
                assert!(pair[1].at - pair[0].at >= least, "{speaks:?} {status} {after:?}");
            }
            keep(&setup, 3);
            wait_for_exported(&setup, 4);
            assert_eq!(waiting(&setup.handle.stats()), 4);
            receiver.release();
            wait_until_idle(&setup);
            assert_eq!(arrived(&receiver, &setup), given_ids(&setup), "{speaks:?} {status}");
            let stats = setup.handle.stats();
            assert_eq!((stats.profiles.requests_retried, stats.profiles.delivered), (2, 4));
            assert_adds_up(&stats);
        }
    }
}

/// The receiver is killed after it has accepted a profile and before it answers. It gets the same profile again, and
/// can recognize it.
#[test]
fn a_receiver_that_is_killed_in_the_middle_of_a_request() {
    for speaks in BOTH {
        let mut receiver = Receiver::new(speaks);
        let setup = setup(to(speaks, receiver.address));
        for round in 1..=3 {
            receiver.will([Behavior::Hold]);
            let before = receiver.got().len();
            keep(&setup, 1);
            if !HAS_STACKS {
                return;
            }
            receiver.wait_for(before + 1);
            receiver.kill();
            keep(&setup, 2);
            wait_for_exported(&setup, round * 3);
            receiver.start();
            wait_until_idle(&setup);
        }
        let all = receiver.ids();
        let set: BTreeSet<_> = all.iter().cloned().collect();
        assert!(all.len() >= set.len() + 3, "three profiles came twice: {all:?}");
        assert!(given_ids(&setup).is_subset(&set), "{speaks:?}");
        assert_eq!(given_ids(&setup).len(), 9);
        assert_one_body(&receiver);
        assert_eq!(setup.handle.stats().profiles.delivered, 9);
        assert_adds_up(&setup.handle.stats());
    }
}

#[test]
fn answers_that_refuse_a_profile() {
    for speaks in BOTH {
        for status in [400, 413] {
            let receiver = Receiver::new(speaks);
            receiver.will([Behavior::Refuse(status, None)]);
            let setup = setup(to(speaks, receiver.address));
            for is_taken in [false, true, true] {
                keep(&setup, 1);
                assert_eq!(setup.handle.flush(PLENTY).is_ok(), is_taken || !HAS_STACKS, "{status}");
            }
            if !HAS_STACKS {
                return;
            }
            let stats = setup.handle.stats();
            assert_eq!((stats.profiles.dropped_refused, stats.profiles.delivered), (1, 2));
            assert_eq!(arrived(&receiver, &setup).len(), 2, "{speaks:?} {status}");
            assert_eq!(stats.profiles.requests_retried, 0);
            assert_adds_up(&stats);
        }
    }
}

/// Keeps a span and waits for its report, which does not depend on the delivery of a profile.
fn keep_one_more(setup: &Setup) -> Result<ProfileId, NoProfile> {
    let (start, before) = (Instant::now(), setup.kept().len());
    keep(setup, 1);
    while setup.kept().len() == before {
        assert!(start.elapsed() < PLENTY);
        _ = setup.handle.flush(10 * MS);
    }
    setup.kept().last().unwrap().spans[0].profile()
}

/// The exporter probes the receiver with empty requests, so no span gets the id of a profile that is then lost.
#[test]
fn a_receiver_that_refuses_everything_costs_no_further_profiles_until_it_recovers() {
    for speaks in BOTH {
        for status in [401, 404] {
            let receiver = Receiver::new(speaks);
            receiver.will(std::iter::repeat_n(Behavior::Refuse(status, None), 1000));
            let setup = setup(to(speaks, receiver.address));
            if !HAS_STACKS {
                return;
            }
            keep_until_exporter_fails(&setup);
            // Profiles taken before the first answer are refused by now, and no more are taken.
            let start = Instant::now();
            assert_eq!(keep_one_more(&setup), Err(NoProfile::ExporterFails));
            while setup.handle.flush(100 * MS).is_ok() || waiting(&setup.handle.stats()) > 0 {
                assert!(start.elapsed() < PLENTY);
            }
            let stats = setup.handle.stats();
            let refused = stats.profiles.dropped_refused;
            assert_eq!((stats.profiles.exported, waiting(&stats)), (refused, 0));
            assert!(refused > 0);
            // Each flush sends a probe until one is answered differently.
            for _ in 0..5 {
                let asked = receiver.got().len();
                while receiver.got().len() == asked {
                    assert!(setup.handle.flush(100 * MS).is_err(), "{speaks:?} {status}");
                    assert!(start.elapsed() < PLENTY);
                }
                assert_eq!(keep_one_more(&setup), Err(NoProfile::ExporterFails));
            }
            let asked = receiver.got();
            assert!(asked.iter().rev().take(5).all(|got| got.message.dictionary.is_none()));
            assert_eq!(setup.handle.stats().profiles.exported, refused, "nothing more is lost");
            receiver.accept_all();
            let start = Instant::now();
            while setup.handle.flush(PLENTY).is_err() {
                assert!(start.elapsed() < PLENTY);
            }
            keep(&setup, 2);
            wait_until_idle(&setup);
            let stats = setup.handle.stats();
            assert_eq!(stats.profiles.dropped_refused, refused, "{speaks:?} {status}");
            assert!(stats.profiles.delivered >= 2);
            assert_eq!(arrived(&receiver, &setup).len() as u64, stats.profiles.delivered);
            assert_eq!(given_ids(&setup).len() as u64, stats.profiles.delivered + refused);
            assert_eq!(stats.profiles.dropped_export_failed, 0);
            assert_adds_up(&stats);
        }
    }
}

/// Answers with success and an arbitrary body. It is accepted, and fits in one log line.
#[test]
fn successes_with_an_invalid_body() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        // More than is read, and more than gRPC's own limit.
        let long: &'static [u8] = vec![b'x'; 5 << 20].leak();
        receiver.will([
            Behavior::Respond(b"\xff\xff\r\nWARN forged"),
            Behavior::Respond(long),
            Behavior::Respond(b""),
        ]);
        let (setup, log) = setup_with_log(to(speaks, receiver.address));
        for _ in 0..3 {
            keep(&setup, 1);
            setup.flush();
        }
        if !HAS_STACKS {
            return;
        }
        assert_eq!(arrived(&receiver, &setup), given_ids(&setup));
        let stats = setup.handle.stats();
        assert_eq!(
            (stats.profiles.delivered, stats.profiles.requests_retried),
            (3, 0),
            "{speaks:?}"
        );
        assert_adds_up(&stats);
        let log = log.lock().unwrap();
        assert!(log.iter().all(|line| line.len() < 1000 && !line.contains('\n')), "{log:?}");
    }
}

/// The text that comes with a success is one log line, whatever it contains.
#[test]
fn a_success_with_a_line_break_cannot_forge_a_log_line() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        let text = "\r\nWARN forged";
        receiver.will([Behavior::Respond(match speaks {
            Speaks::Http => {
                let partial = ExportProfilesPartialSuccess {
                    rejected_profiles: 0,
                    error_message: text.to_owned(),
                };
                let partial = ExportProfilesServiceResponse { partial_success: Some(partial) };
                partial.encode_to_vec().leak()
            }
            // The receiver wraps this text in such a message.
            Speaks::Grpc => text.as_bytes(),
        })]);
        let (setup, log) = setup_with_log(to(speaks, receiver.address));
        keep(&setup, 1);
        setup.flush();
        if !HAS_STACKS {
            return;
        }
        // Another thread logs it.
        let start = Instant::now();
        while log.lock().unwrap().is_empty() {
            assert!(start.elapsed() < PLENTY);
            thread::sleep(MS);
        }
        // (Cloned, so that a failing assertion does not poison the lock for threads that log.)
        let log = log.lock().unwrap().clone();
        let [line] = &log[..] else { panic!("{speaks:?}: {log:?}") };
        assert!(line.contains("replied: WARN forged") && !line.contains(['\r', '\n']), "{line:?}");
        assert_eq!(setup.handle.stats().profiles.delivered, 1);
    }
}

/// The status line already means success; the rest of the body never arrives.
#[test]
fn a_success_that_stalls() {
    let (sent, requests) = std::sync::mpsc::channel();
    let mut held = Vec::new();
    let listener = Listener::new(move |mut connection| {
        _ = connection.read(&mut [0; 1 << 16]);
        _ = sent.send(());
        _ = connection.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nxyz");
        held.push(connection);
    });
    let setup = setup(to(Speaks::Http, listener.address).timeout(2000 * MS));
    for profiles in 1..=2 {
        keep(&setup, 1);
        if !HAS_STACKS {
            return;
        }
        setup.flush();
        let stats = setup.handle.stats();
        assert_eq!((stats.profiles.delivered, stats.profiles.requests_retried), (profiles, 0));
        assert_adds_up(&stats);
    }
    assert_eq!(requests.try_iter().count(), 2);
}

/// More than is read of an answer: the exporter does not wait for the rest of it.
#[test]
fn a_success_that_does_not_end() {
    let mut held = Vec::new();
    let listener = Listener::new(move |mut connection| {
        _ = connection.read(&mut [0; 1 << 16]);
        _ = connection.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n");
        _ = connection.write_all(&[0; 100_000]);
        held.push(connection);
    });
    let setup = setup(to(Speaks::Http, listener.address).timeout(2 * PLENTY));
    keep(&setup, 1);
    setup.flush();
    let stats = setup.handle.stats();
    assert_eq!((stats.profiles.delivered, stats.profiles.requests_retried), (HAS_STACKS.into(), 0));
    assert_adds_up(&stats);
}

/// Reads the first request of an HTTP/2 connection, to its last frame.
fn read_http2_request(connection: &mut TcpStream) {
    const DATA: u8 = 0;
    const END_STREAM: u8 = 1;
    // The preface precedes the frames.
    connection.read_exact(&mut [0; 24]).unwrap();
    loop {
        let mut head = [0; 9];
        connection.read_exact(&mut head).unwrap();
        let [high, middle, low, kind, flags, ..] = head;
        let length = u32::from_be_bytes([0, high, middle, low]);
        connection.read_exact(&mut vec![0; length as usize]).unwrap();
        if kind == DATA && flags & END_STREAM != 0 {
            break;
        }
    }
}

/// An HTTP/2 server begins a successful answer, and then resets the stream, or closes the connection.
#[test]
fn answers_that_break_off() {
    const SETTINGS: &[u8] = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00";
    // Of stream 1: `:status: 200`.
    const HEADERS: &[u8] = b"\x00\x00\x01\x01\x04\x00\x00\x00\x01\x88";
    const RESET: &[u8] = b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x02";
    for end in [RESET, b""] {
        let mut held = Vec::new();
        let listener = Listener::new(move |mut connection| {
            connection.write_all(SETTINGS).unwrap();
            read_http2_request(&mut connection);
            connection.write_all(&[HEADERS, end].concat()).unwrap();
            connection.shutdown(Shutdown::Write).unwrap();
            held.push(connection);
        });
        let address = listener.address;
        assert_recovers(Speaks::Grpc, PLENTY, listener, address, |listener| {
            listener.end();
            Receiver::at(Speaks::Grpc, address)
        });
    }
}

/// 500 does not mean that the profile itself is at fault, but it is not sent again.
#[test]
fn a_server_error_is_not_retried() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        receiver.will([Behavior::Hold]);
        receiver.will([500; 4].map(|status| Behavior::Refuse(status, None)));
        let setup = setup(to(speaks, receiver.address));
        keep(&setup, 1);
        if !HAS_STACKS {
            return;
        }
        receiver.wait_for(1);
        keep(&setup, 4);
        wait_for_exported(&setup, 5);
        receiver.release();
        wait_until_idle(&setup);
        let stats = setup.handle.stats();
        assert_eq!((stats.profiles.dropped_refused, stats.profiles.delivered), (4, 1));
        assert_eq!(receiver.got().len(), 5, "{speaks:?}");
        assert_adds_up(&stats);
    }
}

#[test]
fn an_occasionally_busy_receiver_causes_one_warning_per_minute() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        let start = Instant::now();
        let (setup, log) = setup_with_log(to(speaks, receiver.address));
        for profiles in 1..=4 {
            receiver.will([Behavior::Refuse(503, None), Behavior::Accept(0)]);
            keep(&setup, 1);
            if !HAS_STACKS {
                return;
            }
            wait_until_idle(&setup);
            let stats = setup.handle.stats();
            assert_eq!(
                (stats.profiles.delivered, stats.profiles.requests_retried),
                (profiles, profiles)
            );
        }
        let log = log.lock().unwrap();
        let minutes = start.elapsed().as_secs() as usize / 60;
        assert!(log.len() <= 1 + minutes, "{speaks:?} {log:?}");
    }
}

/// The file stays in the directory and is not sent: it counts as refused.
#[test]
fn a_refused_profile_counts_as_refused_also_with_a_fallback_directory() {
    for speaks in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let receiver = Receiver::new(speaks);
        receiver.will([Behavior::Refuse(400, None)]);
        let setup =
            setup(to(speaks, receiver.address).fallback_directory(Directory::new(dir.path())));
        keep(&setup, 1);
        if !HAS_STACKS {
            return;
        }
        wait_until_idle(&setup);
        let stats = setup.handle.stats();
        assert_eq!((stats.profiles.dropped_refused, stats.profiles.stored_as_fallback), (1, 0));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        assert_adds_up(&stats);
    }
}

/// The receiver refuses everything for a while: stored profiles are kept until it accepts them.
#[test]
fn stored_profiles_survive_a_refusal_of_everything() {
    for speaks in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let mut receiver = Receiver::offline(speaks, free_address());
        let exporter = to(speaks, receiver.address)
            .grace_period(Duration::ZERO)
            .fallback_directory(Directory::new(dir.path()));
        let setup = setup(exporter);
        if !HAS_STACKS {
            return;
        }
        let start = Instant::now();
        while setup.handle.stats().profiles.stored_as_fallback < 3 {
            assert!(start.elapsed() < PLENTY);
            keep(&setup, 1);
        }
        wait_for_taken(&setup);
        assert!(setup.handle.flush(10 * MS).is_err());
        // Profiles taken before the first failure are in the queue and are sent first.
        let stats = setup.handle.stats();
        let stored = stats.profiles.stored_as_fallback;
        let queued = usize::try_from(stats.profiles.exported - stored).unwrap();
        receiver.will(std::iter::repeat_n(Behavior::Accept(0), queued));
        receiver.will([Behavior::Refuse(401, None), Behavior::Refuse(404, None)]);
        receiver.start();
        let start = Instant::now();
        while setup.handle.stats().profiles.resent_from_fallback < stored {
            assert!(start.elapsed() < PLENTY, "{speaks:?} {:?}", setup.handle.stats());
            _ = setup.handle.flush(PLENTY);
            thread::sleep(MS);
        }
        let stats = setup.handle.stats();
        assert_eq!(
            (stats.profiles.delivered, stats.profiles.dropped_refused),
            (stats.profiles.exported, 0)
        );
        assert_eq!(arrived(&receiver, &setup), given_ids(&setup), "{speaks:?}");
        assert_adds_up(&stats);
    }
}

/// The host name does not resolve. At shutdown, queued profiles go to the fallback directory if there is one.
#[test]
fn a_host_name_that_does_not_resolve() {
    for speaks in BOTH {
        for has_directory in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let exporter = to(speaks, free_address()).endpoint("http://missing.invalid:4318");
            let (setup, log) = setup_with_log(if has_directory {
                exporter.fallback_directory(Directory::new(dir.path()))
            } else {
                exporter
            });
            keep(&setup, 3);
            if !HAS_STACKS {
                return;
            }
            wait_for_exported(&setup, 3);
            assert_eq!(waiting(&setup.handle.stats()), 3);
            assert!(setup.handle.shutdown(200 * MS).is_err());
            let start = Instant::now();
            while waiting(&setup.handle.stats()) > 0 {
                assert!(start.elapsed() < PLENTY);
                thread::sleep(MS);
            }
            let stats = setup.handle.stats();
            let (stored, lost) = if has_directory { (3, 0) } else { (0, 3) };
            assert_eq!(stats.profiles.stored_as_fallback, stored);
            assert_eq!(stats.profiles.dropped_at_shutdown, lost);
            // A span that was a reference by chance is in `typical`.
            let entries = std::fs::read_dir(&dir).unwrap().map(Result::unwrap);
            let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
            assert_eq!(files.count() as u64, stored);
            assert!(log.lock().unwrap().iter().all(|line| line.contains("missing.invalid")));
        }
    }
}

/// Profiles stored while the receiver is unavailable are sent when it is back, and can still be refused then.
#[test]
fn every_stored_profile_has_an_outcome() {
    for speaks in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let mut receiver = Receiver::offline(speaks, free_address());
        let exporter = to(speaks, receiver.address)
            .grace_period(Duration::ZERO)
            .fallback_directory(Directory::new(dir.path()));
        let setup = setup(exporter);
        if !HAS_STACKS {
            return;
        }
        let start = Instant::now();
        while setup.handle.stats().profiles.stored_as_fallback < 4 {
            assert!(start.elapsed() < PLENTY);
            keep(&setup, 1);
        }
        wait_for_taken(&setup);
        assert!(setup.handle.flush(10 * MS).is_err());
        let stats = setup.handle.stats();
        let taken = waiting(&stats);
        // One stored file is deleted, and one is refused. The first request has a profile that was taken before.
        let mut files: Vec<_> =
            std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.retain(|path| path.extension().is_some_and(|extension| extension == "otlp"));
        files.sort();
        std::fs::remove_file(files.last().unwrap()).unwrap();
        receiver.will([Behavior::Accept(0), Behavior::Refuse(400, None)]);
        receiver.start();
        let start = Instant::now();
        while setup.handle.stats().profiles.resent_from_fallback < stats.profiles.stored_as_fallback
        {
            assert!(start.elapsed() < PLENTY);
            _ = setup.handle.flush(PLENTY);
            thread::sleep(MS);
        }
        let stored = stats.profiles.stored_as_fallback;
        let stats = setup.handle.stats();
        assert_eq!(stats.profiles.dropped_too_old, 1);
        assert_eq!(stats.profiles.dropped_refused, 1);
        assert_eq!(stats.profiles.delivered, taken + stored - 2);
        assert_adds_up(&stats);
        assert_one_body(&receiver);
        assert_eq!(arrived(&receiver, &setup).len() as u64, stats.profiles.delivered);
    }
}

/// Queued profiles are not sent in turn to a server that has just refused everything.
#[test]
fn queued_profiles_are_not_sent_after_a_refusal_of_everything() {
    for speaks in BOTH {
        let receiver = Receiver::new(speaks);
        receiver.will([Behavior::Accept(0), Behavior::Hold]);
        receiver.will(std::iter::repeat_n(Behavior::Refuse(401, None), 1000));
        let setup = setup(to(speaks, receiver.address));
        if !HAS_STACKS {
            return;
        }
        keep(&setup, 1);
        setup.flush();
        keep(&setup, 1);
        receiver.wait_for(2);
        keep(&setup, 4);
        wait_for_exported(&setup, 6);
        receiver.release();
        let start = Instant::now();
        while waiting(&setup.handle.stats()) > 0 {
            assert!(start.elapsed() < PLENTY);
            thread::sleep(MS);
        }
        let stats = setup.handle.stats();
        assert_eq!((stats.profiles.delivered, stats.profiles.dropped_refused), (2, 4));
        // The third is the refused one. Later requests are probes without a profile.
        let sent = receiver.got().iter().filter(|got| got.message.dictionary.is_some()).count();
        assert_eq!(sent, 3, "{speaks:?}");
        assert_adds_up(&stats);
    }
}

/// A profile that was too large when it was stored is downsampled to fit into a request.
#[test]
fn a_stored_profile_fits_into_a_request() {
    const MOST: usize = 3000;
    for speaks in BOTH {
        let dir = tempfile::tempdir().unwrap();
        let mut receiver = Receiver::offline(speaks, free_address());
        let exporter = to(speaks, receiver.address)
            .grace_period(Duration::ZERO)
            .request_bytes(MOST)
            .fallback_directory(Directory::new(dir.path()));
        // A high rate, for large profiles.
        let setup = setup_with(exporter, |builder| builder.rate(1000));
        if !HAS_STACKS {
            return;
        }
        let start = Instant::now();
        while setup.handle.stats().profiles.stored_as_fallback < 2 {
            assert!(start.elapsed() < PLENTY);
            keep(&setup, 1);
        }
        wait_for_taken(&setup);
        assert!(setup.handle.flush(10 * MS).is_err());
        let stored = setup.handle.stats().profiles.stored_as_fallback;
        receiver.start();
        wait_until_idle(&setup);
        let start = Instant::now();
        while setup.handle.stats().profiles.resent_from_fallback < stored {
            assert!(start.elapsed() < PLENTY);
            thread::sleep(MS);
        }
        let is_downsampled = |body: &String| body.contains("profile.downsampled_to_fit");
        let bodies = receiver.bodies();
        assert!(bodies.values().flatten().all(is_downsampled), "{bodies:?}");
        assert_eq!(arrived(&receiver, &setup), given_ids(&setup));
        assert_adds_up(&setup.handle.stats());
    }
}

const SOCKETS: &str = "failures::requests_that_hang_leave_no_connections";

/// Each timeout closes a connection. The test runs in its own process, whose sockets can be counted.
#[test]
#[cfg(target_os = "linux")]
fn requests_that_hang_leave_no_connections() {
    if !is_child(SOCKETS) {
        let output = run_child(SOCKETS, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let sockets = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = links.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    };
    for speaks in BOTH {
        let listener = TcpListener::bind((unused_ip(), 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let before = sockets();
        let setup = setup(to(speaks, address).timeout(50 * MS));
        keep(&setup, 1);
        if !HAS_STACKS {
            return;
        }
        wait_for_repeats(&setup, 30);
        assert!(sockets() < before + 10, "{speaks:?}: {} and {before}", sockets());
        assert!(setup.handle.shutdown(10 * MS).is_err());
    }
}

const INTERFACE_DOWN: &str = "failures::a_network_interface_that_goes_down";

/// Runs in its own network namespace, whose only device is taken down and up again.
#[test]
#[cfg(target_os = "linux")]
fn a_network_interface_that_goes_down() {
    let set = |state: &str| Command::new("ip").args(["link", "set", "lo", state]).status().unwrap();
    if !is_child(INTERFACE_DOWN) {
        let test = std::env::current_exe().unwrap();
        let mut child = Command::new("unshare");
        child.args(["--map-root-user", "--net"]).arg(test).args([
            "--exact",
            INTERFACE_DOWN,
            "--nocapture",
        ]);
        let can = |program: &mut Command| program.output().is_ok_and(|out| out.status.success());
        let may = can(Command::new("unshare").args([
            "--map-root-user",
            "--net",
            "ip",
            "link",
            "set",
            "lo",
            "up",
        ]));
        if !may {
            println!("left out: network namespaces are not permitted, or there is no `ip`");
            return;
        }
        let output = child.env("CHILD", INTERFACE_DOWN).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    for speaks in BOTH {
        assert!(set("up").success());
        let receiver = Receiver::new(speaks);
        let setup = setup(to(speaks, receiver.address).timeout(300 * MS));
        keep(&setup, 1);
        if !HAS_STACKS {
            return;
        }
        wait_until_idle(&setup);
        for round in 1..=2 {
            // The open connection loses all packets, and no new one can be made.
            assert!(set("down").success());
            let repeats = setup.handle.stats().profiles.requests_retried;
            keep(&setup, 2);
            wait_for_repeats(&setup, repeats + 2);
            keep(&setup, 2);
            wait_for_exported(&setup, 1 + round * 4);
            assert_eq!(waiting(&setup.handle.stats()), 4);
            assert!(set("up").success());
            wait_until_idle(&setup);
        }
        let ids: BTreeSet<_> = receiver.ids().into_iter().collect();
        assert!(given_ids(&setup).is_subset(&ids), "{speaks:?}");
        assert_one_body(&receiver);
        assert_eq!(setup.handle.stats().profiles.delivered, 9);
        assert_adds_up(&setup.handle.stats());
    }
}

/// A receiver that uses TLS and requires a client certificate.
struct Secure {
    dir: tempfile::TempDir,
    certified: Certified,
    receiver: Receiver,
}

impl Secure {
    fn new(speaks: Speaks) -> Self {
        // tonic's server lets rustls choose, which it cannot if all features are on.
        _ = rustls::crypto::ring::default_provider().install_default();
        let certified = certify();
        let tls = ServerTlsConfig::new()
            .identity(certified.server.clone())
            .client_ca_root(Certificate::from_pem(&certified.authority));
        let receiver = Receiver::with_tls(speaks, tls);
        Self { dir: tempfile::tempdir().unwrap(), certified, receiver }
    }

    fn file(&self, name: &str, text: &str) -> std::path::PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// An exporter that trusts `authority`.
    fn exporter(&self, speaks: Speaks, authority: &str) -> OtlpBuilder {
        to(speaks, self.receiver.address)
            .endpoint(format!("https://{}", self.receiver.address))
            .certificate(self.file("ca.pem", authority))
    }
}

#[test]
fn tls_with_certificates_of_both_sides() {
    for speaks in BOTH {
        let secure = Secure::new(speaks);
        let known = secure.exporter(speaks, &secure.certified.authority).client_certificate(
            secure.file("client.pem", &secure.certified.client.0),
            secure.file("client.key", &secure.certified.client.1),
        );
        let setup = setup(known);
        keep(&setup, 2);
        setup.flush();
        assert_eq!(arrived(&secure.receiver, &setup), given_ids(&setup), "{speaks:?}");
        assert_eq!(given_ids(&setup).len(), if HAS_STACKS { 2 } else { 0 });
        assert_adds_up(&setup.handle.stats());
    }
}

#[test]
fn untrusted_certificates_cause_one_warning() {
    for speaks in BOTH {
        let secure = Secure::new(speaks);
        let other = certify();
        for (authority, expected) in [
            (&other.authority, "invalid peer certificate"),
            // The client trusts the server, and not the other way round. The server rejects it late, so that an HTTP/2
            // client only observes a closed connection.
            (
                &secure.certified.authority,
                if speaks == Speaks::Http { "CertificateRequired" } else { "connection" },
            ),
        ] {
            let start = Instant::now();
            let (setup, log) = setup_with_log(secure.exporter(speaks, authority));
            keep(&setup, 2);
            if !HAS_STACKS {
                return;
            }
            wait_for_repeats(&setup, 2);
            wait_for_exported(&setup, 2);
            assert_eq!(waiting(&setup.handle.stats()), 2);
            assert!(setup.handle.shutdown(10 * MS).is_err());
            let ended = Instant::now();
            while waiting(&setup.handle.stats()) > 0 {
                assert!(ended.elapsed() < PLENTY);
                thread::sleep(MS);
            }
            let log = log.lock().unwrap();
            let minutes = start.elapsed().as_secs() as usize / 60;
            assert!(!log.is_empty() && log.len() <= 1 + minutes, "{log:?}");
            let is_clear = |line: &String| line.contains(expected) && line.contains("https://");
            assert!(log.iter().all(is_clear), "{speaks:?} {log:?}");
            assert_eq!(setup.handle.stats().profiles.dropped_at_shutdown, 2);
        }
        assert_eq!(secure.receiver.got().len(), 0);
    }
}

/// gRPC's timeout header cannot represent every duration.
#[test]
fn a_timeout_of_any_length_works() {
    for (speaks, protocol) in
        [(Speaks::Http, Protocol::HttpProtobuf), (Speaks::Grpc, Protocol::Grpc)]
    {
        let receiver = Receiver::new(speaks);
        let exporter = to(speaks, receiver.address).protocol(protocol).timeout(Duration::MAX);
        let setup = setup(exporter);
        tracing::dispatcher::with_default(&setup.dispatch, || {
            info_span!("request").in_scope(|| burn(60 * MS));
        });
        setup.flush();
        assert_eq!(arrived(&receiver, &setup), given_ids(&setup), "{speaks:?}");
    }
}

//! OpenTelemetry's process context, read as profilers of the host read it: by OTEP 4719, from `/proc`.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Instant;

use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::resource::v1::Resource as ProtoResource;
use prost::Message;
use seccompiler::SeccompAction;
use tracing_profiling::export::{Exporter, Memory};
use tracing_profiling::{OtlpExporter, Resource, Source};

use super::filters::in_fork;
use super::refusals::filter;
use super::{Host, alone, in_child};
use crate::support::PLENTY;

#[derive(Clone, PartialEq, Message)]
struct ProcessContext {
    #[prost(message, optional, tag = "1")]
    resource: Option<ProtoResource>,
    #[prost(message, repeated, tag = "2")]
    attributes: Vec<KeyValue>,
}

/// What a reader has found.
#[derive(Debug)]
struct Found {
    published_at_ns: u64,
    attributes: Vec<KeyValue>,
}

impl Found {
    fn text(&self, key: &str) -> &str {
        let found = self.attributes.iter().find(|attribute| attribute.key == key);
        match found.and_then(|found| found.value.as_ref()?.value.as_ref()) {
            Some(any_value::Value::StringValue(text)) => text,
            other => panic!("{key}: {other:?}"),
        }
    }

    fn name(&self) -> &str {
        self.text("service.name")
    }
}

/// The mappings that a reader would take for a context: address and name.
fn mappings(process: &str) -> Vec<(u64, String)> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let found = maps.lines().filter_map(|line| {
        let name = line.splitn(6, ' ').nth(5)?.trim();
        let names = ["[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]", "/memfd:OTEL_CTX"];
        let address = u64::from_str_radix(line.split('-').next()?, 16).unwrap();
        names.iter().any(|known| name.starts_with(known)).then(|| (address, name.to_owned()))
    });
    found.collect()
}

/// Reads the context of a process, once it is there and does not change.
fn read(process: &str) -> Found {
    let memory = File::open(format!("/proc/{process}/mem")).unwrap();
    let bytes_at = |address: u64, bytes: &mut [u8]| memory.read_exact_at(bytes, address);
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < PLENTY, "there is no complete context");
        let [(address, _)] = mappings(process)[..] else { continue };
        let mut header = [0; 32];
        bytes_at(address, &mut header).unwrap();
        assert_eq!(&header[..8], b"OTEL_CTX");
        assert_eq!(u32::from_ne_bytes(header[8..12].try_into().unwrap()), 2, "the version");
        let time = |header: &[u8; 32]| u64::from_ne_bytes(header[16..24].try_into().unwrap());
        let published_at_ns = time(&header);
        if published_at_ns == 0 {
            continue;
        }
        fence(Ordering::SeqCst);
        bytes_at(address, &mut header).unwrap();
        let payload_bytes = u32::from_ne_bytes(header[12..16].try_into().unwrap());
        let payload_at = u64::from_ne_bytes(header[24..].try_into().unwrap());
        let mut payload = vec![0; payload_bytes as usize];
        // A message that was replaced may be in memory that is gone.
        let is_read = bytes_at(payload_at, &mut payload);
        fence(Ordering::SeqCst);
        bytes_at(address, &mut header).unwrap();
        if time(&header) != published_at_ns {
            continue;
        }
        is_read.unwrap();
        let context = ProcessContext::decode(&*payload).unwrap();
        assert_eq!(context.attributes, [], "everything is in the resource");
        return Found { published_at_ns, attributes: context.resource.unwrap().attributes };
    }
}

fn service_with(exporter: impl Exporter + 'static, resource: Resource) -> Host {
    Host::with(Source::None, exporter, |builder| builder.resource(resource))
}

fn service(name: &str) -> Host {
    service_with(Memory::new(), Resource::from_env().with("service.name", name))
}

/// The lines that say that there is no context.
fn warnings(host: &Host) -> Vec<String> {
    host.span(|| {});
    host.handle.flush(PLENTY).unwrap();
    host.lines_with("the process context is not published")
}

fn boot_time_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    (time.tv_sec * 1_000_000_000 + time.tv_nsec).cast_unsigned()
}

#[test]
fn another_process_reads_the_service_and_its_changes() {
    in_child(module_path!(), "another_process_reads_the_service_and_its_changes", &[], || {
        let (mut says, mut say) = std::io::pipe().unwrap();
        let (mut goes, mut go) = std::io::pipe().unwrap();
        std::thread::scope(|scope| {
            let process = scope.spawn(move || {
                alone(|| {
                    let before_ns = boot_time_ns();
                    let mut hosts = Vec::new();
                    for name in ["shop", "a service with a much longer name than the other"] {
                        hosts.push(service(name));
                        say.write_all(&std::process::id().to_ne_bytes()).unwrap();
                        goes.read_exact(&mut [0]).unwrap();
                    }
                    let time_ns = read("self").published_at_ns;
                    assert!((before_ns..=boot_time_ns()).contains(&time_ns), "{time_ns}");
                });
            });
            let mut next = || {
                let mut process = [0; 4];
                says.read_exact(&mut process).unwrap();
                u32::from_ne_bytes(process).to_string()
            };
            let process_id = next();
            let first = read(&process_id);
            assert_eq!(first.name(), "shop");
            assert_eq!(first.text("telemetry.sdk.language"), "rust");
            let number = any_value::Value::IntValue(process_id.parse().unwrap());
            let pid = first.attributes.iter().find(|attribute| attribute.key == "process.pid");
            assert_eq!(pid.unwrap().value.as_ref().unwrap().value, Some(number));
            go.write_all(b"1").unwrap();
            assert_eq!(next(), process_id);
            let second = read(&process_id);
            assert_eq!(second.name(), "a service with a much longer name than the other");
            assert!(second.published_at_ns > first.published_at_ns);
            assert_eq!(first.text("service.instance.id"), second.text("service.instance.id"));
            go.write_all(b"2").unwrap();
            process.join().unwrap();
        });
    });
}

/// Ends a thread that runs until it is set, also after a panic.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_reader_sees_each_change_as_a_whole() {
    in_child(module_path!(), "a_reader_sees_each_change_as_a_whole", &[], || {
        let is_whole = |found: &Found| {
            let number: usize = found.name().parse().unwrap();
            assert_eq!(found.text("filler").len(), number * 100);
        };
        let publish = |number: usize| {
            let filler = "x".repeat(number * 100);
            let resource = Resource::new().with("service.name", number.to_string());
            service_with(Memory::new(), resource.with("filler", filler))
        };
        let (first, is_done) = (publish(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    is_whole(&read("self"));
                }
            });
            let done = SetAtEnd(&is_done);
            let mut last_ns = 0;
            for number in 1..50 {
                let host = publish(number);
                let found = read("self");
                is_whole(&found);
                assert_eq!(found.name(), number.to_string());
                assert!(found.published_at_ns > last_ns);
                last_ns = found.published_at_ns;
                assert_eq!(warnings(&host), [""; 0]);
            }
            drop(done);
            reader.join().unwrap();
        });
        assert_eq!(warnings(&first), [""; 0]);
    });
}

#[test]
fn a_forked_child_has_none_until_it_publishes_its_own() {
    in_child(module_path!(), "a_forked_child_has_none_until_it_publishes_its_own", &[], || {
        let parent = service("parent");
        let of_parent = read("self");
        alone(|| {
            assert_eq!(mappings("self"), []);
            for name in ["child", "child again"] {
                let child = service(name);
                let of_child = read("self");
                assert_eq!(of_child.name(), name);
                let id = "service.instance.id";
                assert_ne!(of_child.text(id), of_parent.text(id));
                assert_eq!(warnings(&child), [""; 0]);
            }
        });
        let found = read("self");
        assert_eq!((found.name(), found.published_at_ns), ("parent", of_parent.published_at_ns));
        assert_eq!(warnings(&parent), [""; 0]);
    });
}

#[test]
fn the_resource_of_the_exporter_is_published() {
    in_child(module_path!(), "the_resource_of_the_exporter_is_published", &[], || {
        let exporter = OtlpExporter::builder()
            .endpoint("http://127.0.0.1:9")
            .resource(Resource::new().with("service.name", "sent"))
            .build();
        let _host = service_with(exporter.unwrap(), Resource::new().with("service.name", "shown"));
        assert_eq!(read("self").name(), "sent");
    });
}

/// A call, and which value of which argument is refused: its number, mask and value.
type Filtered = (libc::c_long, Option<(u8, u64, u64)>);

/// Naming memory is not possible with all kernels, and is refused here for any of them.
#[test]
fn a_context_that_cannot_be_published_is_said_once() {
    in_child(module_path!(), "a_context_that_cannot_be_published_is_said_once", &[], || {
        let naming = (libc::SYS_prctl, Some((0, 0xffff_ffff, 0x5356_4d41)));
        let advice = (libc::SYS_madvise, Some((2, 0xffff_ffff, 10)));
        let file = (libc::SYS_memfd_create, None);
        let refusal = || SeccompAction::Errno(libc::EPERM.cast_unsigned());
        let filtered = |calls: &[Filtered], action: SeccompAction| {
            calls.iter().for_each(|(call, argument)| filter(*call, *argument, action.clone()));
        };
        in_fork("nothing can be named", || {
            filtered(&[file, naming], refusal());
            let host = service("shop");
            let [line] = &warnings(&host)[..] else { panic!("one line") };
            assert!(
                line.contains("memfd_create is refused") && line.contains("os error 1"),
                "{line}"
            );
            assert_eq!(mappings("self"), []);
        });
        in_fork("it would be in the children", || {
            filtered(&[advice], refusal());
            let host = service("shop");
            let [line] = &warnings(&host)[..] else { panic!("one line") };
            assert!(line.contains("madvise is refused"), "{line}");
            assert_eq!(mappings("self"), []);
        });
        for action in [refusal(), SeccompAction::KillProcess] {
            in_fork("the file has the name", || {
                filtered(&[naming], action.clone());
                let host = service("shop");
                assert_eq!(read("self").name(), "shop");
                assert!(mappings("self")[0].1.starts_with("/memfd:OTEL_CTX"));
                assert_eq!(warnings(&host), [""; 0]);
            });
        }
        for action in [refusal(), SeccompAction::KillProcess] {
            in_fork("there is no file", || {
                filtered(&[file], action.clone());
                let host = service("shop");
                match (&warnings(&host)[..], &mappings("self")[..]) {
                    ([], [(_, name)]) => {
                        assert_eq!((&**name, read("self").name()), ("[anon:OTEL_CTX]", "shop"));
                    }
                    ([line], []) => assert!(line.contains("memfd_create is refused"), "{line}"),
                    other => panic!("{other:?}"),
                }
            });
        }
        in_fork("it is too long", || {
            let resource = Resource::new().with("long", "x".repeat(1 << 16));
            let host = service_with(Memory::new(), resource);
            let [line] = &warnings(&host)[..] else { panic!("one line") };
            assert!(line.contains("at most 65536"), "{line}");
            assert_eq!(mappings("self"), []);
        });
    });
}

#[test]
fn the_context_of_another_library_stays_alone() {
    in_child(module_path!(), "the_context_of_another_library_stays_alone", &[], || {
        let file = rustix::fs::memfd_create("OTEL_CTX", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 32).unwrap();
        let (access, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::PRIVATE);
        // SAFETY: a new mapping, that nothing uses.
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), 32, access, flags, &file, 0) }.unwrap();
        let before = mappings("self");
        let host = service("shop");
        let [line] = &warnings(&host)[..] else { panic!("one line") };
        assert!(line.contains("another library of this process has published one"), "{line}");
        assert_eq!((mappings("self"), before.len()), (before, 1));
    });
}

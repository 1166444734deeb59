//! The default resource, from the environment.

use std::env;
use std::sync::OnceLock;

use tracing_profiling_capture::sys;

use crate::facts::memory_limit;
use crate::profile::{ProfileId, Resource, Value};

/// The default resource: the attributes in `OTEL_RESOURCE_ATTRIBUTES`, and these, unless they are among them:
///
/// | attribute | value |
/// |---|---|
/// | `service.name` | from `OTEL_SERVICE_NAME`, which comes first, else `unknown_service:` and the name of the executable |
/// | `service.instance.id` | a random UUID, the same for all resources of the process |
/// | `process.pid`, `process.executable.name` | the process and its program |
/// | `host.name`, `os.version`, `host.cpu.model.name` | the machine or container, its kernel and CPU, on Linux |
/// | `os.type`, `host.arch` | the system that the program was built for |
/// | `profile.machine.cpus` | how many CPUs the process may use, as its affinity and control groups have it |
/// | `profile.machine.memory_bytes` | the memory that its control groups allow, if they limit it |
/// | `telemetry.sdk.*` | `tracing-profiling` |
///
/// Values are not percent-decoded, as in `opentelemetry_sdk`. In its release 0.33, `OTEL_RESOURCE_ATTRIBUTES`
/// overrides `OTEL_SERVICE_NAME`; the specification requires the opposite.
pub fn resource_from_env() -> Resource {
    from_variables(&|name| env::var(name).ok().filter(|text| !text.is_empty()))
}

/// A variable of this process. An error is a value that is not valid Unicode.
pub fn of_process(name: &str) -> Result<Option<String>, String> {
    let read = env::var_os(name).map(|value| value.into_string()).transpose();
    read.map_err(|value| value.to_string_lossy().into_owned())
}

fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Resource {
    let mut resource = Resource::new()
        .with_schema_url(SCHEMA_URL)
        .with("telemetry.sdk.language", "rust")
        .with("telemetry.sdk.name", "tracing-profiling")
        .with("telemetry.sdk.version", env!("CARGO_PKG_VERSION"))
        .with("process.pid", std::process::id())
        .with("os.type", env::consts::OS)
        .with("host.arch", architecture());
    let cpus = std::thread::available_parallelism().map(|cpus| cpus.get() as u64);
    let text = |text: Option<String>| text.map(Value::from);
    let program = executable_name();
    let found = [
        ("profile.machine.cpus", cpus.ok().map(Value::of_number)),
        ("profile.machine.memory_bytes", memory_limit().map(Value::of_number)),
        ("service.instance.id", text(instance_id())),
        ("process.executable.name", text(program.clone())),
        ("host.name", text(line_of("/proc/sys/kernel/hostname"))),
        ("os.version", text(line_of("/proc/sys/kernel/osrelease"))),
        ("host.cpu.model.name", text(cpu_model())),
    ];
    for (key, value) in found {
        resource = value.into_iter().fold(resource, |resource, value| resource.with(key, value));
    }
    let attributes = variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    for (key, value) in attributes.split(',').filter_map(|entry| entry.split_once('=')) {
        resource = resource.with(key.trim(), value.trim());
    }
    match variable("OTEL_SERVICE_NAME") {
        Some(name) => resource.with("service.name", name),
        None if resource.get("service.name").is_some() => resource,
        None => {
            let program = program.map(|name| format!(":{name}")).unwrap_or_default();
            resource.with("service.name", format!("unknown_service{program}"))
        }
    }
}

/// As the semantic conventions name it.
fn architecture() -> &'static str {
    match env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The semantic conventions that define the default resource's attributes.
const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/1.37.0";

fn executable_name() -> Option<String> {
    let file = sys::program_path().or_else(|| env::current_exe().ok())?;
    Some(file.file_name()?.to_str()?.to_owned())
}

/// What the kernel says of itself in a file.
fn line_of(file: &str) -> Option<String> {
    let line = std::fs::read_to_string(file).ok()?;
    Some(line.trim().to_owned()).filter(|line| !line.is_empty())
}

/// What the CPU calls itself. Not all architectures say it.
fn cpu_model() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let model = info.lines().find(|line| line.starts_with("model name"))?;
    Some(model.split_once(':')?.1.trim().to_owned())
}

/// A random UUID for this process; `None` if the system returns no random bytes.
fn instance_id() -> Option<String> {
    static RANDOM: OnceLock<Option<ProfileId>> = OnceLock::new();
    let random = (*RANDOM.get_or_init(|| ProfileId::random().ok()))?;
    // A forked child has the parent's random bytes.
    let mut bits = u128::from_be_bytes(random.to_bytes()) ^ u128::from(std::process::id());
    // Version 4, and the variant of RFC 9562.
    bits = bits & !(0xf << 76) | 0x4 << 76;
    bits = bits & !(0b11 << 62) | 0b10 << 62;
    let mut text = format!("{bits:032x}");
    [20, 16, 12, 8].into_iter().for_each(|at| text.insert(at, '-'));
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Value;

    fn resource(name: Option<&str>, attributes: &str) -> Resource {
        from_variables(&|variable| match variable {
            "OTEL_SERVICE_NAME" => name.map(str::to_owned),
            "OTEL_RESOURCE_ATTRIBUTES" => Some(attributes.to_owned()),
            _ => None,
        })
    }

    fn name_of(name: Option<&str>, attributes: &str) -> Option<Value> {
        resource(name, attributes).get("service.name").cloned()
    }

    #[test]
    fn processes_differ_by_default() {
        let resource = resource(None, "host.name=a,x=y");
        assert_eq!(resource.get("process.pid"), Some(&std::process::id().into()));
        let Some(Value::String(program)) = resource.get("process.executable.name") else {
            panic!("{resource:?}")
        };
        assert!(program.starts_with("tracing_profiling_profile-"), "{program}");
        assert_eq!(resource.get("host.name"), Some(&"a".into()), "what is set comes first");
        let Some(Value::String(id)) = resource.get("service.instance.id") else {
            panic!("{resource:?}")
        };
        let lengths: Vec<_> = id.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        let digit = |place| id.chars().nth(place).unwrap().to_digit(16).unwrap();
        assert_eq!((digit(14), digit(19) >> 2), (4, 2), "version and variant");
        assert_eq!(instance_id().as_ref(), Some(id), "one per process");
        let is_text =
            |key| matches!(resource.get(key), Some(Value::String(text)) if !text.is_empty());
        assert!(is_text("os.type") && is_text("host.arch"), "{resource:?}");
        assert!(matches!(resource.get("profile.machine.cpus"), Some(Value::Int(1..))));
        assert!(resource.schema_url().is_some_and(|url| url.starts_with("https://")));
        #[cfg(target_os = "linux")]
        assert!(is_text("os.version"), "{resource:?}");
    }

    #[test]
    fn all_defaults_can_be_replaced() {
        for key in ["service.instance.id", "process.pid", "process.executable.name"] {
            let resource = resource(None, &format!("{key}=mine"));
            assert_eq!(resource.get(key), Some(&"mine".into()));
        }
    }

    #[test]
    fn the_sources_of_the_service_name_have_an_order() {
        assert_eq!(name_of(Some("shop"), "service.name=other"), Some("shop".into()));
        assert_eq!(name_of(None, "a=b, service.name = other ,c"), Some("other".into()));
        let Some(Value::String(name)) = name_of(None, "") else { panic!("it has one") };
        assert!(name.starts_with("unknown_service:tracing_profiling"), "{name}");
    }
}

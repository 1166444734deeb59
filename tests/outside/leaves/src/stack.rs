//! What a recorded stack shows.

use backtrace::Backtrace;
use tracing_profiling::profile::{Profile, Sample};

const THIS_CRATE: &str = "leaves/src/";
const PROBE: &str = "leaves/src/probe.rs";

struct Frame {
    name: String,
    file: String,
}

/// Innermost first.
pub struct Stack(Vec<Frame>);

impl Stack {
    /// What the probe has recorded, between the clone and the wrapper's poll.
    pub fn of_trace(mut trace: Backtrace) -> Self {
        trace.resolve();
        let symbols = trace.frames().iter().flat_map(|frame| frame.symbols());
        let frames = symbols.filter_map(|symbol| {
            Some(Frame::new(&format!("{:#}", symbol.name()?), symbol.filename()?.to_str()?))
        });
        let is_probe = |frame: &Frame| frame.file.ends_with(PROBE);
        let inside = frames.skip_while(|frame| !is_probe(frame)).skip_while(is_probe);
        Self(inside.take_while(|frame| !is_probe(frame)).collect())
    }

    pub fn of_sample(profile: &Profile, sample: &Sample) -> Self {
        let lines = profile.stack(sample.stack).flat_map(|location| &location.lines);
        let functions = lines.filter_map(|line| profile.function(line.function));
        Self(functions.map(|function| Frame::new(&function.name, &function.file)).collect())
    }

    pub fn contains(&self, function: &str) -> bool {
        self.0.iter().any(|frame| frame.is_own() && frame.name.ends_with(function))
    }

    /// The innermost function of this crate, and the function that it awaits.
    pub fn place(&self) -> String {
        let Some(own) = self.0.iter().position(Frame::is_own) else {
            return self
                .0
                .iter()
                .map(|frame| format!("`{}`", frame.name))
                .collect::<Vec<_>>()
                .join(" < ");
        };
        let awaited = self.0[..own].iter().rfind(|frame| !frame.is_std());
        format!("`{}` at `{}`", self.0[own].last(), awaited.map_or("", |frame| &frame.name))
    }
}

impl Frame {
    fn new(name: &str, file: &str) -> Self {
        Self { name: short(name), file: file.to_owned() }
    }

    fn is_own(&self) -> bool {
        self.file.contains(THIS_CRATE)
    }

    fn is_std(&self) -> bool {
        self.file.starts_with("/rustc/") || self.file.contains("/library/")
    }

    fn last(&self) -> &str {
        self.name.rsplit("::").next().unwrap_or(&self.name)
    }
}

/// Without the parts that do not tell functions apart: closures, traits.
fn short(name: &str) -> String {
    let name = name.replace("::{{closure}}", "");
    match name.strip_prefix('<').and_then(|rest| rest.split_once(" as ")) {
        Some((kind, rest)) => format!("{kind}::{}", rest.rsplit("::").next().unwrap_or(rest)),
        None => name,
    }
}

//! The data of a report, as JSON.

use std::collections::HashMap;
use std::io::{self, Write};

use super::HtmlContext;
use super::compared::ComparedSpan;
use super::json::{Array, Json, Object, Plain};
use crate::facts::{ChildTotals, Children, Facts, Measure};
use crate::ids::{SpanId, TraceId};
use crate::profile::{
    CodeOrigin, FrameKind, Function, Leaf, Link, LocationId, Profile, Sample, SampleKind, StackId,
    TableId, Value,
};

/// The version of the format, which the script checks.
const VERSION: u32 = 2;

impl Json for Value {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::String(text) => text.write(out),
            Self::Array(values) => Array(|| values.iter()).write(out),
            Self::Double(number) if !number.is_finite() => number.to_string().write(out),
            number => Plain(number).write(out),
        }
    }
}

/// Writes everything that a report shows. Times are integers in nanoseconds from the profile's start; -1 is unknown.
pub(super) fn write(
    profile: &Profile,
    context: &HtmlContext,
    out: &mut dyn Write,
) -> io::Result<()> {
    let tables = ReportTables::of(profile);
    Object::write(out, |data| {
        data.member("version", Plain(VERSION))?;
        data.member("of_process", Plain(profile.is_of_process()))?;
        data.member("id", profile.id.to_string())?;
        data.member("name", &profile.name)?;
        data.member("title", &profile.title)?;
        data.member("headline", &profile.headline)?;
        data.member("start_unix_ms", profile.start_unix_ns as f64 / 1e6)?;
        data.member("duration", Plain(profile.duration_ns))?;
        data.member("resource", Array(|| context.resource.attributes()))?;
        let attributes = || profile.attributes.iter().map(|a| (a.key, &a.value));
        data.member("attributes", Array(attributes))?;
        data.member(
            "rule",
            profile.spans.first().and_then(|span| span.rule.as_deref()).unwrap_or_default(),
        )?;
        data.member("losses", Array(|| profile.losses.iter()))?;
        data.member("notes", Array(|| profile.notes.iter()))?;
        data.member("period", Plain(profile.period_ns))?;
        data.member("trace_url", &context.trace_url)?;
        data.member("source_url", &context.source_url)?;
        data.member("kept", Array(|| profile.spans.iter().map(|span| KeptRow { span, profile })))?;
        if let Some(compared) = profile.compared.as_deref() {
            data.member("compared", ComparedSpan { compared, spans: &profile.spans })?;
        }
        tables.write(data)
    })
}

/// The time since the profile's start, in nanoseconds. `unix_ns` is 0 if it is unknown.
fn since_start(profile: &Profile, unix_ns: u64) -> i128 {
    match unix_ns {
        0 => -1,
        unix_ns => i128::from(unix_ns) - i128::from(profile.start_unix_ns),
    }
}

/// A kept span of a report.
struct KeptRow<'a> {
    span: &'a Facts,
    profile: &'a Profile,
}

impl KeptRow<'_> {
    /// Its place among the profile's links.
    fn link(&self) -> i64 {
        let is_same = |link: &Link| match (link.ids, self.span.ids()) {
            (Some(ids), Some(own)) => ids == own,
            _ => link.span == self.span.span && link.start_unix_ns == self.span.start_unix_ns,
        };
        let link = self.profile.links().find(|(_, link)| is_same(link));
        link.map_or(-1, |(id, _)| i64::from(id.number()))
    }
}

impl Json for KeptRow<'_> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self { span, profile } = self;
        Object::write(out, |kept| {
            kept.member("name", span.name())?;
            kept.member("target", &*span.target)?;
            kept.member(
                "fields",
                Array(|| span.fields.iter().map(|(name, value)| (*name, value))),
            )?;
            kept.member("reasons", span.reasons.to_string())?;
            kept.member("rule", span.rule.as_deref().unwrap_or_default())?;
            kept.member("open", Plain(span.is_open))?;
            kept.member("topmost", Plain(span.is_topmost))?;
            kept.member("start", Plain(since_start(profile, span.start_unix_ns)))?;
            for measure in Measure::ALL {
                if let Some(value) = span.get(*measure) {
                    kept.member(measure.name(), Plain(value))?;
                }
            }
            kept.member("cpu_known", Plain(!span.times.is_cpu_time_unknown))?;
            let split = span.split();
            kept.member("beside", Array(|| span.beside().into_iter()))?;
            let parts = || split.parts().map(|(kind, ns)| ((kind.name(), kind.words()), Plain(ns)));
            kept.member("split", Array(parts))?;
            kept.object("children", |children| write_children(&span.children, children))?;
            let (trace, id) = texts(span.ids());
            kept.member("trace_id", trace)?;
            kept.member("span_id", id)?;
            kept.member("span", Plain(self.link()))
        })
    }
}

fn write_children(of: &Children, children: &mut Object<'_>) -> io::Result<()> {
    children.member("from", Plain(of.from_ns))?;
    children.member("incomplete", Plain(of.are_incomplete))?;
    children.member("totals", Array(|| of.totals.iter().map(ChildRow)))
}

/// The spans of one name inside a kept one.
struct ChildRow<'a>(&'a ChildTotals);

impl Json for ChildRow<'_> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self(of) = self;
        Object::write(out, |row| {
            row.member("name", of.name.as_deref().unwrap_or_default())?;
            row.member("count", Plain(of.count))?;
            row.member("total", Plain(of.total_ns))?;
            row.member("longest", Plain(of.longest_ns))?;
            row.member("open", Plain(of.open_ns))?;
            row.member("order", of.order().to_string())
        })
    }
}

/// The texts of ids; empty if there are none.
pub(super) fn texts(ids: Option<(TraceId, SpanId)>) -> (String, String) {
    ids.map(|(trace, span)| (trace.to_string(), span.to_string())).unwrap_or_default()
}

/// The strings of a report, each stored once.
#[derive(Default)]
struct Strings<'a> {
    list: Vec<std::borrow::Cow<'a, str>>,
    places: HashMap<std::borrow::Cow<'a, str>, u32>,
}

impl<'a> Strings<'a> {
    fn add(&mut self, text: impl Into<std::borrow::Cow<'a, str>>) -> u32 {
        let text = text.into();
        if let Some(place) = self.places.get(&text) {
            return *place;
        }
        let place = self.list.len() as u32;
        self.list.push(text.clone());
        self.places.insert(text, place);
        place
    }
}

/// A function in a frame.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Frame {
    function: u32,
    line: u32,
    kind: u8,
    is_inferred: bool,
}

/// One point of a sample.
struct Row {
    time: i128,
    stack: i64,
    leaf: u32,
    span: i64,
    thread: i64,
    kind: u8,
    weight: u64,
}

/// What the typical span has of a stack.
struct TypicalRow {
    stack: i64,
    leaf: u32,
    kind: u8,
    weight: u64,
}

/// Where the parts of stacks are in the tables. Those of the typical span are the same as those of the profile.
#[derive(Default)]
struct KnownStacks {
    /// Functions without a name, by their text and file.
    unnamed: HashMap<(u32, u32), u32>,
    frames: HashMap<Frame, u32>,
    nodes: HashMap<(i64, u32), i64>,
}

/// The tables and samples of a report.
struct ReportTables<'a> {
    profile: &'a Profile,
    strings: Strings<'a>,
    /// Name, file, and whose code it is.
    functions: Vec<(u32, u32, CodeOrigin)>,
    frames: Vec<Frame>,
    /// Parent and frame; parents come first.
    stacks: Vec<(i64, u32)>,
    /// Kind and text.
    leaves: Vec<(u8, u32)>,
    spans: Vec<(u32, u32)>,
    threads: Vec<u32>,
    rows: Vec<Row>,
    typical: Vec<TypicalRow>,
}

const fn kind_number(kind: FrameKind) -> u8 {
    match kind {
        FrameKind::Rust => 0,
        FrameKind::Native => 1,
        FrameKind::Kernel => 2,
        FrameKind::Remark => 4,
    }
}

impl<'a> ReportTables<'a> {
    fn of(profile: &'a Profile) -> Self {
        let mut tables = Self {
            profile,
            strings: Strings::default(),
            functions: Vec::new(),
            frames: Vec::new(),
            stacks: Vec::new(),
            leaves: Vec::new(),
            spans: Vec::new(),
            threads: Vec::new(),
            rows: Vec::new(),
            typical: Vec::new(),
        };
        let mut known = KnownStacks::default();
        let functions: Vec<_> = profile
            .functions()
            .map(|(id, of)| tables.add_function(of, profile.origin(id)))
            .collect();
        let ends = tables.add_stacks(profile, &functions, &mut known);
        for (_, leaf) in profile.leaves() {
            let leaf = tables.leaf(leaf);
            tables.leaves.push(leaf);
        }
        for (_, link) in profile.links() {
            let name = tables.strings.add(&link.span);
            let id = tables.strings.add(texts(link.ids).1);
            tables.spans.push((name, id));
        }
        for (_, thread) in profile.threads() {
            let name = tables.strings.add(&thread.name);
            tables.threads.push(name);
        }
        tables.add_rows(&ends);
        if let Some(compared) = profile.compared.as_deref() {
            tables.add_typical(&compared.typical, &mut known);
        }
        tables
    }

    fn add_function(&mut self, function: &'a Function, origin: CodeOrigin) -> u32 {
        let name = self.strings.add(&function.name);
        self.functions.push((name, self.strings.add(&function.file), origin));
        self.functions.len() as u32 - 1
    }

    fn leaf(&mut self, leaf: &'a Leaf) -> (u8, u32) {
        let (kind, text) = match leaf {
            Leaf::BlockedBy(..) | Leaf::AwaitingOneOf { .. } | Leaf::AwaitingUntil { .. } => {
                let is_wait = matches!(leaf, Leaf::BlockedBy(..));
                let (kind, before) = if is_wait { (1, "[") } else { (2, "[await, ") };
                let text = leaf.to_string();
                let text = text.strip_prefix(before).and_then(|text| text.strip_suffix(']'));
                return (kind, self.strings.add(text.unwrap_or_default().to_owned()));
            }
            Leaf::Ran => (0, ""),
            Leaf::Blocked(call) => (1, call.as_str()),
            Leaf::Awaiting => (2, ""),
            Leaf::Delayed { behind } => (3, behind.as_deref().unwrap_or_default()),
            Leaf::Allocated => (4, ""),
            Leaf::Unknown(why) => (5, *why),
        };
        (kind, self.strings.add(text))
    }

    /// Adds the frames of all stacks. A location is one frame for its function and one for each function inlined into
    /// it. Returns the node of each stack's innermost frame, by the stack's number. `functions` are by their number in the
    /// profile.
    fn add_stacks(
        &mut self,
        profile: &'a Profile,
        functions: &[u32],
        known: &mut KnownStacks,
    ) -> Vec<i64> {
        let locations: Vec<_> = profile
            .locations()
            .map(|(id, _)| self.frames_of(profile, id, functions, known))
            .collect();
        let mut ends = Vec::new();
        for (caller, location) in profile.stack_nodes() {
            let mut node = caller.map_or(-1, |caller| end_of(&ends, caller));
            for frame in locations.get(location.number() as usize).into_iter().flatten() {
                node = *known.nodes.entry((node, *frame)).or_insert_with(|| {
                    self.stacks.push((node, *frame));
                    self.stacks.len() as i64 - 1
                });
            }
            ends.push(node);
        }
        ends
    }

    /// The frames of a location, the outermost first.
    fn frames_of(
        &mut self,
        profile: &'a Profile,
        id: LocationId,
        functions: &[u32],
        known: &mut KnownStacks,
    ) -> Vec<u32> {
        let Some(location) = profile.location(id) else { return Vec::new() };
        let (kind, is_inferred) = (kind_number(location.kind), location.is_inferred);
        let lines = location.lines.iter().rev();
        let function = |number: u32| functions.get(number as usize).copied().unwrap_or(number);
        let mut frames: Vec<_> = lines
            .map(|line| Frame {
                function: function(line.function.number()),
                line: line.line,
                kind,
                is_inferred,
            })
            .collect();
        if frames.is_empty() {
            let mapping = location.mapping.and_then(|mapping| profile.mapping(mapping));
            let name = self.strings.add(profile.module_offset(location));
            let file = self.strings.add(mapping.map_or("", |mapping| &mapping.file));
            let function = *known.unnamed.entry((name, file)).or_insert_with(|| {
                self.functions.push((name, file, profile.origin_of_unnamed(location)));
                self.functions.len() as u32 - 1
            });
            frames.push(Frame { function, line: 0, kind, is_inferred });
        }
        let number = |frame| {
            *known.frames.entry(frame).or_insert_with(|| {
                self.frames.push(frame);
                self.frames.len() as u32 - 1
            })
        };
        frames.into_iter().map(number).collect()
    }

    /// Adds what the typical span did, with the functions, frames, stacks and leaves that the profile has already.
    fn add_typical(&mut self, typical: &'a Profile, known: &mut KnownStacks) {
        let own: HashMap<_, _> =
            self.profile.functions().map(|(id, of)| (of, id.number())).collect();
        let functions = typical.functions().map(|(id, of)| match own.get(of) {
            Some(number) => *number,
            None => self.add_function(of, typical.origin(id)),
        });
        let functions: Vec<_> = functions.collect();
        let ends = self.add_stacks(typical, &functions, known);
        let mut leaves: HashMap<_, _> = (0..).zip(&self.leaves).map(|(at, of)| (*of, at)).collect();
        let numbers = typical.leaves().map(|(_, leaf)| {
            let leaf = self.leaf(leaf);
            *leaves.entry(leaf).or_insert_with(|| {
                self.leaves.push(leaf);
                self.leaves.len() as u32 - 1
            })
        });
        let numbers: Vec<u32> = numbers.collect();
        let row = |sample: &Sample| {
            Some(TypicalRow {
                stack: end_of(&ends, sample.stack),
                leaf: *numbers.get(sample.leaf.number() as usize)?,
                kind: shown_kind(sample.kind)?,
                weight: sample.points.iter().map(|point| point.weight).sum(),
            })
        };
        self.typical = typical.samples().iter().filter_map(row).collect();
    }

    fn add_rows(&mut self, ends: &[i64]) {
        for sample in self.profile.samples() {
            let (stack, leaf) = (end_of(ends, sample.stack), sample.leaf.number());
            let span = sample.link.map_or(-1, |link| i64::from(link.number()));
            let Some(kind) = shown_kind(sample.kind) else { continue };
            for point in &sample.points {
                let time = i128::from(point.time_unix_ns) - i128::from(self.profile.start_unix_ns);
                let thread = point.thread.map_or(-1, |thread| i64::from(thread.number()));
                self.rows.push(Row { time, stack, leaf, span, thread, kind, weight: point.weight });
            }
        }
        self.rows.sort_by_key(|row| row.time);
    }

    fn write(&self, data: &mut Object<'_>) -> io::Result<()> {
        data.member("strings", Array(|| self.strings.list.iter().map(AsRef::<str>::as_ref)))?;
        data.object("functions", |table| {
            column(table, "name", &self.functions, |(name, ..)| *name)?;
            column(table, "file", &self.functions, |(_, file, _)| *file)?;
            column(table, "origin", &self.functions, |(.., origin)| *origin as u8)
        })?;
        data.object("frames", |table| {
            column(table, "function", &self.frames, |frame| frame.function)?;
            column(table, "line", &self.frames, |frame| frame.line)?;
            column(table, "kind", &self.frames, |frame| frame.kind)?;
            column(table, "inferred", &self.frames, |frame| u8::from(frame.is_inferred))
        })?;
        data.object("stacks", |table| {
            column(table, "parent", &self.stacks, |(parent, _)| *parent)?;
            column(table, "frame", &self.stacks, |(_, frame)| *frame)
        })?;
        data.object("leaves", |table| {
            column(table, "kind", &self.leaves, |(kind, _)| *kind)?;
            column(table, "text", &self.leaves, |(_, text)| *text)
        })?;
        data.object("spans", |table| self.write_spans(table))?;
        data.object("threads", |table| {
            column(table, "name", &self.threads, |name| *name)?;
            let tids: Vec<_> = self.profile.threads().map(|(_, thread)| thread.tid).collect();
            column(table, "tid", &tids, |tid| *tid)
        })?;
        data.object("samples", |table| {
            column(table, "stack", &self.rows, |row| row.stack)?;
            column(table, "leaf", &self.rows, |row| row.leaf)?;
            column(table, "span", &self.rows, |row| row.span)?;
            column(table, "thread", &self.rows, |row| row.thread)?;
            column(table, "kind", &self.rows, |row| row.kind)?;
            let before = std::iter::once(0).chain(self.rows.iter().map(|row| row.time));
            let times = self.rows.iter().zip(before).map(|(row, before)| row.time - before);
            column(table, "time", &times.collect::<Vec<_>>(), |time| *time)?;
            column(table, "weight", &self.rows, |row| row.weight)
        })?;
        if self.profile.compared.is_none() {
            return Ok(());
        }
        data.object("typical", |table| {
            column(table, "stack", &self.typical, |row| row.stack)?;
            column(table, "leaf", &self.typical, |row| row.leaf)?;
            column(table, "kind", &self.typical, |row| row.kind)?;
            column(table, "weight", &self.typical, |row| row.weight)
        })
    }

    fn write_spans(&self, table: &mut Object<'_>) -> io::Result<()> {
        let links: Vec<_> = self.profile.links().map(|(_, link)| link).collect();
        let kept =
            self.profile.spans.iter().map(|span| KeptRow { span, profile: self.profile }.link());
        let kept: Vec<_> = kept.collect();
        let place = |link: usize| kept.iter().position(|kept| *kept == link as i64);
        let numbers: Vec<_> = (0..links.len()).collect();
        column(table, "name", &self.spans, |(name, _)| *name)?;
        let parent = |link: &&Link| link.parent.map_or(-1, |id| i64::from(id.number()));
        column(table, "parent", &links, parent)?;
        column(table, "start", &links, |link| since_start(self.profile, link.start_unix_ns))?;
        column(table, "end", &links, |link| since_start(self.profile, link.end_unix_ns))?;
        column(table, "kept", &numbers, |link| place(*link).map_or(-1, |place| place as i64))?;
        column(table, "span_id", &self.spans, |(_, id)| *id)
    }
}

fn end_of(ends: &[i64], stack: StackId) -> i64 {
    ends.get(stack.number() as usize).copied().unwrap_or(-1)
}

/// The number of a kind of samples that the page shows: of allocations, the bytes.
fn shown_kind(kind: SampleKind) -> Option<u8> {
    match kind {
        SampleKind::OnCpu => Some(0),
        SampleKind::OffCpu => Some(1),
        SampleKind::Await => Some(2),
        SampleKind::Delay => Some(3),
        SampleKind::AllocatedBytes => Some(4),
        SampleKind::Allocations | SampleKind::InUseBytes | SampleKind::InUseBlocks => None,
    }
}

/// Writes one number of each row.
fn column<T, N: std::fmt::Display>(
    table: &mut Object<'_>,
    name: &str,
    rows: &[T],
    number: impl Fn(&T) -> N,
) -> io::Result<()> {
    table.member(name, Array(|| rows.iter().map(|row| Plain(number(row)))))
}

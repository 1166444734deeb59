//! The data of a report, as JSON.

use std::borrow::Cow;
use std::collections::HashMap;

use indexmap::IndexSet;
use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};

use super::HtmlContext;
use crate::encode::compared;
use crate::encode::json::{joined, known};
use crate::facts::{ChildTotals, Facts, Measure};
use crate::ids::{SpanId, TraceId};
use crate::profile::{
    CodeOrigin, FrameKind, Function, Leaf, Link, Location, Point, Profile, Sample, SampleKind,
    TableId, Value,
};

/// The version of the format, which the script checks.
const VERSION: u32 = 2;

/// Everything that a report shows beside its tables. Times are in nanoseconds from the profile's start; -1 is unknown.
fn about(profile: &Profile, context: &HtmlContext) -> Json {
    let rule = profile.spans.first().and_then(|span| span.rule.as_deref());
    let attributes = profile.attributes.iter().map(|of| json!([of.key, shown(&of.value)]));
    let resource = context.resource.attributes().map(|(key, value)| json!([key, shown(value)]));
    let compared = profile.compared.as_deref();
    known(json!({
        "version": VERSION,
        "of_process": profile.is_of_process(),
        "id": profile.id.to_string(),
        "name": profile.name,
        "title": profile.title,
        "headline": profile.headline,
        "start_unix_ms": profile.start_unix_ns as f64 / 1e6,
        "duration": profile.duration_ns,
        "resource": resource.collect::<Json>(),
        "attributes": attributes.collect::<Json>(),
        "rule": rule.unwrap_or_default(),
        "losses": profile.losses,
        "notes": profile.notes,
        "period": profile.period_ns,
        "trace_url": context.trace_url,
        "source_url": context.source_url,
        "kept": profile.spans.iter().map(|span| kept_row(span, profile)).collect::<Json>(),
        "compared": compared.map(|compared| compared::of(compared, &profile.spans)),
    }))
}

fn shown(value: &Value) -> Json {
    match value {
        Value::Double(number) if number.is_finite() => (*number).into(),
        Value::Int(number) => (*number).into(),
        Value::Bool(truth) => (*truth).into(),
        Value::Array(values) => values.iter().map(shown).collect(),
        text => text.to_string().into(),
    }
}

/// The time since the profile's start, in nanoseconds. `unix_ns` is 0 if it is unknown.
fn since_start(profile: &Profile, unix_ns: u64) -> i64 {
    match unix_ns {
        0 => -1,
        unix_ns => unix_ns.wrapping_sub(profile.start_unix_ns).cast_signed(),
    }
}

/// The place of a kept span among the profile's links.
fn link_of(span: &Facts, profile: &Profile) -> i64 {
    let is_same = |link: &Link| match (link.ids, span.ids()) {
        (Some(ids), Some(own)) => ids == own,
        _ => link.span == span.span && link.start_unix_ns == span.start_unix_ns,
    };
    let link = profile.links().find(|(_, link)| is_same(link));
    link.map_or(-1, |(id, _)| id.number().into())
}

fn kept_row(span: &Facts, profile: &Profile) -> Json {
    let measures = Measure::ALL.iter().filter_map(|of| Some((of.name(), span.get(*of)?)));
    let split = span.split();
    let parts = split.parts().map(|(kind, ns)| json!([[kind.name(), kind.words()], ns]));
    let children = &span.children;
    let (trace_id, span_id) = texts(span.ids());
    let row = json!({
        "name": span.name(),
        "target": &*span.target,
        "fields": span.fields,
        "reasons": span.reasons.to_string(),
        "rule": span.rule.as_deref().unwrap_or_default(),
        "open": span.is_open,
        "topmost": span.is_topmost,
        "start": since_start(profile, span.start_unix_ns),
        "cpu_known": !span.times.is_cpu_time_unknown,
        "beside": span.beside(),
        "split": parts.collect::<Json>(),
        "children": {
            "from": children.from_ns,
            "incomplete": children.are_incomplete,
            "totals": children.totals.iter().map(child_row).collect::<Json>(),
        },
        "trace_id": trace_id,
        "span_id": span_id,
        "span": link_of(span, profile),
    });
    joined(row, measures.collect())
}

fn child_row(of: &ChildTotals) -> Json {
    json!({
        "name": of.name.as_deref().unwrap_or_default(),
        "count": of.count,
        "total": of.total_ns,
        "longest": of.longest_ns,
        "open": of.open_ns,
        "order": of.order().to_string(),
    })
}

/// The texts of ids; empty if there are none.
pub(super) fn texts(ids: Option<(TraceId, SpanId)>) -> (String, String) {
    ids.map(|(trace, span)| (trace.to_string(), span.to_string())).unwrap_or_default()
}

/// The strings of a report, each stored once.
#[derive(Default, Serialize)]
#[serde(transparent)]
struct Strings<'a>(IndexSet<Cow<'a, str>>);

impl<'a> Strings<'a> {
    fn add(&mut self, text: impl Into<Cow<'a, str>>) -> i64 {
        self.0.insert_full(text.into()).0 as i64
    }
}

/// Rows of numbers, which are written by columns: a list, or a set with the number of each.
struct Columns<const N: usize, R = Vec<[i64; N]>> {
    names: [&'static str; N],
    rows: R,
}

impl<const N: usize, R: Default> Columns<N, R> {
    fn new(names: [&'static str; N]) -> Self {
        Self { names, rows: R::default() }
    }
}

impl<const N: usize> Columns<N, IndexSet<[i64; N]>> {
    /// Returns the number of the row.
    fn add_once(&mut self, row: [i64; N]) -> i64 {
        self.rows.insert_full(row).0 as i64
    }
}

impl<const N: usize, R> Serialize for Columns<N, R>
where
    for<'a> &'a R: IntoIterator<Item = &'a [i64; N]>,
{
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let column = |number: usize| -> Vec<_> {
            (&self.rows).into_iter().filter_map(|row| row.get(number)).collect()
        };
        let columns = self.names.iter().enumerate();
        to.collect_map(columns.map(|(number, name)| (name, column(number))))
    }
}

#[derive(Serialize)]
pub(super) struct ReportTables<'a> {
    #[serde(flatten)]
    about: Json,
    strings: Strings<'a>,
    functions: Columns<3>,
    /// The numbers of functions, by their names and files.
    #[serde(skip)]
    known: HashMap<[i64; 2], i64>,
    frames: Columns<4, IndexSet<[i64; 4]>>,
    /// Parents come first.
    stacks: Columns<2, IndexSet<[i64; 2]>>,
    leaves: Columns<2, IndexSet<[i64; 2]>>,
    spans: Columns<6>,
    threads: Columns<2>,
    samples: Columns<7>,
    #[serde(skip_serializing_if = "Option::is_none")]
    typical: Option<Columns<4>>,
}

const fn kind_number(kind: FrameKind) -> i64 {
    match kind {
        FrameKind::Rust => 0,
        FrameKind::Native => 1,
        FrameKind::Kernel => 2,
        FrameKind::Remark => 4,
    }
}

impl<'a> ReportTables<'a> {
    pub(super) fn of(profile: &'a Profile, context: &HtmlContext) -> Self {
        let mut tables = Self {
            about: about(profile, context),
            strings: Strings::default(),
            functions: Columns::new(["name", "file", "origin"]),
            known: HashMap::new(),
            frames: Columns::new(["function", "line", "kind", "inferred"]),
            stacks: Columns::new(["parent", "frame"]),
            leaves: Columns::new(["kind", "text"]),
            spans: Columns::new(["name", "parent", "start", "end", "kept", "span_id"]),
            threads: Columns::new(["name", "tid"]),
            samples: Columns::new(["stack", "leaf", "span", "thread", "kind", "time", "weight"]),
            typical: None,
        };
        let ends = tables.add_stacks(profile);
        let kept: Vec<_> = profile.spans.iter().map(|span| link_of(span, profile)).collect();
        for (id, link) in profile.links() {
            let place = kept.iter().position(|kept| *kept == i64::from(id.number()));
            tables.spans.rows.push([
                tables.strings.add(&*link.span),
                link.parent.map_or(-1, |id| id.number().into()),
                since_start(profile, link.start_unix_ns),
                since_start(profile, link.end_unix_ns),
                place.map_or(-1, |place| place as i64),
                tables.strings.add(texts(link.ids).1),
            ]);
        }
        for (_, thread) in profile.threads() {
            tables.threads.rows.push([tables.strings.add(&thread.name), thread.tid.into()]);
        }
        tables.add_samples(profile, &ends);
        if let Some(compared) = profile.compared.as_deref() {
            tables.add_typical(&compared.typical);
        }
        tables
    }

    /// Functions of one name and file are one.
    fn add_function(&mut self, name: Cow<'a, str>, file: &'a str, origin: CodeOrigin) -> i64 {
        let [name, file] = [name, file.into()].map(|text| self.strings.add(text));
        *self.known.entry([name, file]).or_insert_with(|| {
            self.functions.rows.push([name, file, origin as i64]);
            self.functions.rows.len() as i64 - 1
        })
    }

    fn add_leaf(&mut self, leaf: &'a Leaf) -> i64 {
        let (kind, text) = match leaf {
            Leaf::BlockedBy(..)
            | Leaf::AwaitingOneOf { .. }
            | Leaf::AwaitingUntil { .. }
            | Leaf::AwaitingWhileEntered(_) => {
                let is_wait = matches!(leaf, Leaf::BlockedBy(..));
                let (kind, before) = if is_wait { (1, "[") } else { (2, "[await, ") };
                let text = leaf.to_string();
                let text = text.strip_prefix(before).and_then(|text| text.strip_suffix(']'));
                let text = self.strings.add(text.unwrap_or_default().to_owned());
                return self.leaves.add_once([kind, text]);
            }
            Leaf::Ran => (0, ""),
            Leaf::Blocked(call) => (1, call.as_str()),
            Leaf::Awaiting => (2, ""),
            Leaf::Delayed { behind } => (3, behind.as_deref().unwrap_or_default()),
            Leaf::Allocated => (4, ""),
            Leaf::Unknown(why) => (5, *why),
        };
        self.leaves.add_once([kind, self.strings.add(text)])
    }

    /// Adds the frames of all stacks, and all leaves. A location is one frame for its function and one for each function
    /// inlined into it. Returns the node of each stack's innermost frame and the leaves, by their numbers in the profile.
    fn add_stacks(&mut self, profile: &'a Profile) -> [Vec<i64>; 2] {
        let functions = profile.functions();
        let functions = functions.map(|(id, Function { name, file, .. })| {
            self.add_function(name.into(), file, profile.origin(id))
        });
        let functions: Vec<_> = functions.collect();
        let locations = profile.locations();
        let locations: Vec<_> =
            locations.map(|(_, location)| self.frames_of(profile, location, &functions)).collect();
        let mut ends = Vec::new();
        for (caller, location) in profile.stack_nodes() {
            let mut node = caller.map_or(-1, |caller| number_at(&ends, caller));
            for frame in locations.get(location.number() as usize).into_iter().flatten() {
                node = self.stacks.add_once([node, *frame]);
            }
            ends.push(node);
        }
        let leaves = profile.leaves().map(|(_, leaf)| self.add_leaf(leaf)).collect();
        [ends, leaves]
    }

    /// The frames of a location, the outermost first.
    fn frames_of(
        &mut self,
        profile: &'a Profile,
        location: &Location,
        functions: &[i64],
    ) -> Vec<i64> {
        let row = |function: i64, line: u32| {
            [function, line.into(), kind_number(location.kind), location.is_inferred.into()]
        };
        let lines = location.lines.iter().rev();
        let mut frames: Vec<_> =
            lines.map(|line| row(number_at(functions, line.function), line.line)).collect();
        if frames.is_empty() {
            let mapping = location.mapping.and_then(|mapping| profile.mapping(mapping));
            let file = mapping.map_or("", |mapping| &mapping.file);
            let (name, origin) =
                (profile.module_offset(location), profile.origin_of_unnamed(location));
            frames.push(row(self.add_function(name.into(), file, origin), 0));
        }
        frames.into_iter().map(|row| self.frames.add_once(row)).collect()
    }

    /// Adds what the typical span did, with the functions, frames, stacks and leaves that the profile has already.
    fn add_typical(&mut self, typical: &'a Profile) {
        let [ends, leaves] = self.add_stacks(typical);
        let mut table: Columns<4> = Columns::new(["stack", "leaf", "kind", "weight"]);
        let row = |sample: &Sample| {
            let (stack, leaf) = (number_at(&ends, sample.stack), number_at(&leaves, sample.leaf));
            Some([stack, leaf, shown_kind(sample.kind)?, sample.total().cast_signed()])
        };
        table.rows.extend(typical.samples().iter().filter_map(row));
        self.typical = Some(table);
    }

    fn add_samples(&mut self, profile: &Profile, [ends, leaves]: &[Vec<i64>; 2]) {
        let rows = &mut self.samples.rows;
        for sample in profile.samples() {
            let (stack, leaf) = (number_at(ends, sample.stack), number_at(leaves, sample.leaf));
            let span = sample.link.map_or(-1, |link| link.number().into());
            let Some(kind) = shown_kind(sample.kind) else { continue };
            for Point { time_unix_ns, weight, thread } in &sample.points {
                let time = time_unix_ns.wrapping_sub(profile.start_unix_ns).cast_signed();
                let thread = thread.map_or(-1, |thread| thread.number().into());
                rows.push([stack, leaf, span, thread, kind, time, weight.cast_signed()]);
            }
        }
        rows.sort_by_key(|[.., time, _]| *time);
        let mut before = 0;
        for [.., time, _] in rows {
            (before, *time) = (*time, *time - before);
        }
    }
}

fn number_at(numbers: &[i64], id: impl TableId) -> i64 {
    numbers.get(id.number() as usize).copied().unwrap_or(-1)
}

/// The number of a kind of samples that the page shows: of allocations, the bytes.
fn shown_kind(kind: SampleKind) -> Option<i64> {
    match kind {
        SampleKind::OnCpu => Some(0),
        SampleKind::OffCpu => Some(1),
        SampleKind::Await => Some(2),
        SampleKind::Delay => Some(3),
        SampleKind::AllocatedBytes => Some(4),
        _ => None,
    }
}

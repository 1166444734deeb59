//! The function that holds most of what a profile has of one kind: what to change first.
//!
//! The leaf with the most is often `free`. So it is the deepest own function with at least half of the time, and what
//! that is in.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{self, Display};

use serde::{Serialize, Serializer};

use super::awaits::{SAMPLED_AWAIT_NS, called, own_name};
use super::call_tree::{CallTree, SampledCall};
use super::code_origin::LINKAGE;
use super::leaf::Leaf;
use super::model::Profile;
use super::sample::{Sample, SampleKind};
use crate::facts::format::{nanoseconds, place_of};

/// Where most of the samples of one kind are, in the program's own code.
///
/// A function holds the samples on whose stacks it is, however often. The hotspot is the deepest own function that holds
/// at least half of all samples, by weight. If several own functions that it calls have parts of that, none of them half,
/// it is those two or three that have at least half together. Where own code holds too little, as in a program without
/// debug information, it is the innermost function with the most, or what most waits and awaits are in.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hotspot {
    /// What it holds: CPU time, waits, awaits, bytes.
    pub kind: SampleKind,
    /// One function, or two or three that hold at least half together. The one with the most comes first.
    pub functions: Vec<FunctionShare>,
    /// The own functions that call these: of helpers that several modules use, those of other modules.
    pub callers: Vec<String>,
    /// What most of the one function's samples are in below it: the deepest function that holds at least half of them,
    /// else the one that holds the most, and none of Rust's library; for waits the system call, the holder of the lock or the function that waited,
    /// for awaits the future. The share is that of the function. `None` if no part is worth naming.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leaf: Option<FunctionShare>,
    /// What most of the futures awaited that were polled at the same time, as the semaphore that lets one of them go on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beside: Option<FunctionShare>,
    /// In words, what another span did just before most of the futures went on, see [`Leaf::AwaitingUntil`], or what of the
    /// rest may be in the function, too.
    #[serde(skip)]
    pub added: Option<String>,
    /// Whether there are enough samples. One or two samples, or two that represent most of the time, can be by chance.
    #[serde(rename = "certain")]
    pub is_certain: bool,
}

impl Hotspot {
    /// The functions' names.
    pub fn names(&self) -> String {
        let names: Vec<_> = self.functions.iter().map(|function| function.name.as_str()).collect();
        names.join(", ")
    }

    /// The functions' share together, unless that can be by chance.
    pub fn share(&self) -> Option<f64> {
        self.is_certain.then(|| self.functions.iter().map(|function| function.share).sum())
    }

    /// The one own function that holds more than half, and where.
    pub fn place(&self) -> Option<String> {
        let FunctionShare { name, location, share } = self.functions.first()?;
        let is_it = self.is_certain && *share > 0.5 && !location.is_empty();
        is_it.then(|| format!("{name} ({location})"))
    }

    /// For where space is short: without callers in their module, parts of foreign paths, and what `parts` leaves out.
    fn brief(&self, parts: &[BriefPart]) -> Self {
        let (mut brief, says) = (self.clone(), |part| parts.contains(&part));
        brief.callers.retain(|caller| says(BriefPart::Caller) && caller.contains("::"));
        let is_waiting = matches!(self.kind, SampleKind::OffCpu | SampleKind::Await);
        let part = if is_waiting { BriefPart::Leaf } else { BriefPart::Callee };
        brief.leaf.take_if(|_| !(says(part) || is_waiting && brief.callers.is_empty()));
        let own = self.functions.iter().find(|function| !function.location.is_empty());
        let of = own.filter(|_| !says(BriefPart::Crate)).and_then(|own| own.name.split_once("::"));
        let of = of.map(|(of, _)| format!("{of}::")).filter(|of| !of.starts_with('<'));
        let own = |text: &mut String| {
            let Some(of) = &of else { return };
            let words = text.split(' ').map(|word| {
                let inside = word.strip_prefix(of.as_str()).filter(|it| it.contains("::"));
                inside.or(word.strip_prefix("src/")).unwrap_or(word)
            });
            *text = words.collect::<Vec<_>>().join(" ").replace("(src/", "(");
        };
        for function in brief.functions.iter_mut().chain(&mut brief.leaf).chain(&mut brief.beside) {
            let parts: Vec<_> = function.name.split("::").collect();
            if let [of, _, .., outer, last] = parts.as_slice()
                && function.location.is_empty()
                && !function.name.contains(['<', '[', ' '])
            {
                function.name = format!("{of}::{outer}::{last}");
            } else {
                own(&mut function.name);
            }
            own(&mut function.location);
        }
        brief.callers.iter_mut().chain(&mut brief.added).for_each(own);
        if !says(BriefPart::Place) && !brief.callers.is_empty() {
            brief.functions.iter_mut().for_each(|function| function.location.clear());
        }
        brief
    }
}

/// A function and its share of something.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FunctionShare {
    /// The name of the function, without type parameters and without the closure of an async function.
    pub name: String,
    /// Where most of the samples are in it: the last two parts of the file's path, and the line; empty if unknown.
    pub location: String,
    /// From 0 to 1. Of on-CPU time, it is that of the kept spans, sampled or not, if it is known.
    #[serde(serialize_with = "rounded")]
    pub share: f64,
}

fn rounded<S: Serializer>(share: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64((share * 1e3).round() / 1e3)
}

/// What of hotspots is said where space is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BriefPart {
    /// What functions call that ran or allocated.
    Callee,
    /// The crate of own functions in modules, and `src/` of places.
    Crate,
    /// What calls own functions, from other modules.
    Caller,
    /// Where functions are, beside their callers.
    Place,
    /// What functions wait for, beside their callers.
    Leaf,
}

impl BriefPart {
    /// From much to little.
    pub const LEVELS: [&[Self]; 8] = [
        &[Self::Callee, Self::Crate, Self::Caller, Self::Place, Self::Leaf],
        &[Self::Crate, Self::Caller, Self::Place, Self::Leaf],
        &[Self::Caller, Self::Place, Self::Leaf],
        &[Self::Caller, Self::Leaf],
        &[Self::Caller, Self::Place],
        &[Self::Caller],
        &[Self::Crate, Self::Place, Self::Leaf],
        &[Self::Place, Self::Leaf],
    ];
}

/// The hotspots of a profile, by kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Hotspots(pub(crate) Vec<Hotspot>);

impl Hotspots {
    /// Returns the hotspot of one kind, if there is one.
    pub fn of(&self, kind: SampleKind) -> Option<&Hotspot> {
        self.0.iter().find(|hotspot| hotspot.kind == kind)
    }

    /// Adds in which function a span was that left the thread, if `place_of` knows it by its name.
    pub fn place_until(&mut self, place_of: impl Fn(&str) -> Option<String>) {
        for until in self.0.iter_mut().filter_map(|hotspot| hotspot.added.as_mut()) {
            let name = until.strip_prefix("until `");
            let name = name.and_then(|until| until.strip_suffix("` left the thread"));
            if let Some(place) = name.and_then(&place_of) {
                *until += &format!(" after {place}");
            }
        }
    }

    /// For where space is short.
    #[must_use]
    pub fn brief(&self, parts: &[BriefPart]) -> Self {
        Self(self.0.iter().map(|hotspot| hotspot.brief(parts)).collect())
    }
}

impl Profile {
    /// The hotspots of CPU time, waits, awaits and allocated bytes. Symbolization gives functions names.
    pub fn hotspots(&self) -> Hotspots {
        const KINDS: [SampleKind; 4] =
            [SampleKind::OnCpu, SampleKind::OffCpu, SampleKind::Await, SampleKind::AllocatedBytes];
        let calls = CallTree::of(self);
        Hotspots(KINDS.into_iter().filter_map(|kind| find(self, &calls, kind)).collect())
    }

    /// The on-CPU time, which can be more than the samples represent.
    pub(crate) fn on_cpu_ns(&self) -> u64 {
        self.least_on_cpu_ns().max(self.total(SampleKind::OnCpu))
    }

    /// The samples of a kind. Awaits without those of the handles of tasks, if others are at the same time: those of the
    /// tasks, which are deeper.
    pub(super) fn without_joins(&self, kind: SampleKind) -> Vec<&Sample> {
        let all: Vec<_> = self.of_kind(kind).collect();
        if kind != SampleKind::Await {
            return all;
        }
        let mut others = all.clone();
        others.retain(|it| !self.awaited(self.location_ids(it.stack)).contains("::task::join"));
        if open_ns(&others) > open_ns(&all) / 20 * 19 { others } else { all }
    }

    /// What a thread was blocked in, or who held the lock, in brackets. Of what has only an address, the function that waited.
    fn waited_for(&self, sample: &Sample) -> Option<String> {
        if let Some(held_by) = self.leaf(sample.leaf).and_then(Leaf::held_by) {
            return Some(format!("[{held_by}]"));
        }
        let call = self.blocked_in(sample)?;
        let has_no_name = call.starts_with("futex 0x");
        let called = has_no_name.then(|| called(&self.code_of(self.location_ids(sample.stack))));
        Some(match called.filter(|called| !called.is_empty()) {
            Some(called) => format!("at {called}"),
            None => format!("[{call}]"),
        })
    }

    /// What the samples of one kind have by the innermost own function, and by what it was blocked in or awaited.
    pub(crate) fn own_rows(&self, kind: SampleKind) -> Vec<OwnRow> {
        let mut rows: BTreeMap<(String, String), BTreeMap<String, u64>> = BTreeMap::new();
        let samples = self.without_joins(kind);
        let sampled: u64 = samples.iter().map(|sample| sample.total()).sum();
        for sample in samples {
            let leaf = match kind {
                SampleKind::OffCpu => self.waited_for(sample),
                SampleKind::Await => Some(self.awaited(self.location_ids(sample.stack))),
                _ => None,
            };
            let own = self.own_function(sample);
            let own = own.map(|(function, file, line)| (function, place_of(file, line)));
            let (function, location) = own.unwrap_or_else(|| {
                (self.leaf(sample.leaf).and_then(Leaf::frame).unwrap_or_default(), String::new())
            });
            let locations = rows.entry((function, leaf.unwrap_or_default())).or_default();
            *locations.entry(location).or_default() += sample.total();
        }
        let total = if kind == SampleKind::OnCpu { self.on_cpu_ns() } else { sampled.max(1) };
        let row = |((function, leaf), locations): (_, BTreeMap<String, u64>)| {
            let share = locations.values().sum::<u64>() as f64 / total as f64;
            let (location, _) = locations.into_iter().max_by_key(|(_, weight)| *weight)?;
            Some(OwnRow { kind, function, location, leaf, share })
        };
        let mut rows: Vec<_> = rows.into_iter().filter_map(row).collect();
        rows.sort_by(|a, b| b.share.total_cmp(&a.share));
        rows
    }
}

/// What the samples of one kind have in one own function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct OwnRow {
    pub(crate) kind: SampleKind,
    #[serde(rename = "name")]
    pub(crate) function: String,
    /// The line with the most.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) location: String,
    /// What it was blocked in or awaited.
    #[serde(rename = "in", skip_serializing_if = "String::is_empty")]
    pub(crate) leaf: String,
    /// Of the time of the kind, as of a hotspot, or of the bytes.
    #[serde(serialize_with = "rounded")]
    pub(crate) share: f64,
}

/// An allocation of several times the mean distance between two samples has one for certain, with its own size.
const LARGE_BYTES: u64 = 2 * 1024 * 1024;
/// Less is not worth naming.
const NOTABLE: f64 = 0.1;
/// The most functions that are named together.
const SEVERAL: usize = 3;

fn find(profile: &Profile, calls: &CallTree<'_>, kind: SampleKind) -> Option<Hotspot> {
    let samples = calls.samples(kind);
    let total: u64 = samples.iter().map(|sample| sample.weight).sum();
    if total == 0 {
        return None;
    }
    let all = if kind == SampleKind::OnCpu { profile.on_cpu_ns() } else { total };
    let share = |weight: u64| (weight as f64 / all as f64).min(1.0);
    let function = |number: usize, weight: u64| FunctionShare {
        name: calls.name(number).to_owned(),
        location: match calls.is_own(number) {
            true => calls.location_in(number, &samples),
            false => String::new(),
        },
        share: share(weight),
    };
    let deepest = calls.deepest_own(&samples, total);
    let held = deepest.map_or(total, |(_, held)| held);
    let around = deepest.map(|(number, _)| number);
    let (callees, elsewhere) = calls.own_callees(around, &samples);
    if let Some(several) = several(&callees, elsewhere, held) {
        let is_named = |sample: &SampledCall<'_>| {
            let callee = calls.own_callee(around, sample).flatten();
            several.iter().any(|(of, _)| Some(*of) == callee)
        };
        let functions = several.iter().map(|(number, weight)| function(*number, *weight)).collect();
        let callers = deepest.iter().map(|(number, _)| calls.name(*number).to_owned()).collect();
        let is_certain = are_enough(kind, samples.iter().filter(|sample| is_named(sample)));
        let (leaf, beside, added) = (None, None, None);
        return Some(Hotspot { kind, functions, callers, leaf, beside, added, is_certain });
    }
    let largest = deepest.or_else(|| {
        let (number, held) = *callees.first()?;
        let (_, of_a_leaf) = profile.functions_by(kind).into_iter().next()?;
        let is_more = !matches!(kind, SampleKind::OffCpu | SampleKind::Await) && held >= of_a_leaf;
        let inside: Vec<_> =
            samples.iter().filter(|sample| calls.is_in(sample, number)).copied().collect();
        is_more.then(|| calls.deepest_own(&inside, held).unwrap_or((number, held)))
    });
    // The own code can be among callers that are not known.
    let largest = largest.or_else(|| calls.deepest_without_callers(&samples, total));
    let Some((number, held)) = largest else { return fallback(profile, kind, &samples, share) };
    let inside: Vec<_> =
        samples.iter().filter(|sample| calls.is_in(sample, number)).copied().collect();
    let leaf = match kind {
        SampleKind::OffCpu => most(&inside, |sample| profile.waited_for(sample)),
        SampleKind::Await => most(&inside, |sample| {
            Some(profile.awaited(profile.location_ids(sample.stack)))
                .filter(|name| !name.is_empty())
        }),
        _ => calls.leaf_below(number, &inside, held).map(|(leaf, weight)| {
            let location = calls.location_in(leaf, &inside);
            let name = calls.name(leaf).to_owned();
            FunctionShare { name, location, share: weight as f64 / held as f64 }
        }),
    };
    let lacks_callers = |it: &&SampledCall<'_>| calls.is_cut(it) && !calls.is_in(it, number);
    let lacking = share(samples.iter().filter(lacks_callers).map(|sample| sample.weight).sum());
    let lacking = (calls.is_own(number) && lacking >= NOTABLE)
        .then(|| format!("{:.0} % in stacks without callers", lacking * 100.0));
    let beside = most(&inside, |sample| match profile.leaf(sample.leaf) {
        Some(Leaf::AwaitingOneOf { others, .. }) => Some(others.clone()),
        _ => None,
    });
    Some(Hotspot {
        kind,
        functions: vec![function(number, held)],
        callers: callers(calls, number, &inside, held),
        beside: beside.filter(|beside| {
            let is_other = leaf.as_ref().is_none_or(|leaf| leaf.name != beside.name);
            is_other && beside.share > 0.5 && !beside.name.is_empty()
        }),
        leaf: leaf.filter(|leaf| leaf.share >= NOTABLE),
        added: until(profile, &inside).or(lacking),
        is_certain: are_enough(kind, inside.iter()),
    })
}

/// The own functions that call one. Helpers of its module say little of what they are used for: if these call it, the
/// functions that call the module, and its own caller without a path if none is known.
fn callers(calls: &CallTree<'_>, of: usize, samples: &[SampledCall<'_>], held: u64) -> Vec<String> {
    let is_near = |name: &str| module_of(name) == module_of(calls.name(of));
    let first_around = |is_searched: &dyn Fn(usize) -> bool| {
        let mut weights: BTreeMap<&str, u64> = BTreeMap::new();
        for sample in samples {
            let caller = calls.callers(sample, of).find(|caller| is_searched(*caller));
            let caller = caller.filter(|caller| calls.is_own(*caller)).map(|of| calls.name(of));
            *weights.entry(caller.unwrap_or_default()).or_default() += sample.weight;
        }
        let least = held as f64 * NOTABLE;
        weights.retain(|name, weight| !name.is_empty() && *weight as f64 >= least);
        let mut callers: Vec<_> = weights.into_iter().collect();
        callers.sort_by_key(|(_, weight)| Reverse(*weight));
        callers.into_iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
    };
    let callers = first_around(&|caller| calls.is_own(caller));
    let [one] = callers.as_slice() else { return callers };
    if !is_near(one) {
        return callers;
    }
    // Beyond other code there is a framework, which calls all handlers.
    let further = first_around(&|caller| {
        let name = calls.name(caller);
        !calls.is_own(caller) || !is_near(name) && !name.ends_with("::main")
    });
    if !further.is_empty() {
        return further;
    }
    let short = one.rsplit("::").next().filter(|name| *name != "main");
    short.into_iter().map(str::to_owned).collect()
}

/// The path of a function without its name and that of its type.
fn module_of(name: &str) -> &str {
    let path = name.trim_start_matches('<').split(" as ").next().unwrap_or_default();
    let is_type = |part: &str| part.starts_with(char::is_uppercase);
    let parts = path.match_indices("::").map(|(at, _)| at);
    let end = parts.clone().find(|at| path.get(at + 2..).is_some_and(is_type));
    end.or(parts.last()).and_then(|end| path.get(..end)).unwrap_or_default()
}

/// Two or three functions that have at least half of that together, and none of them more than half alone. `elsewhere`:
/// what no own function below has.
fn several(by_weight: &[(usize, u64)], elsewhere: u64, held: u64) -> Option<Vec<(usize, u64)>> {
    let rest = |weight: u64| held.saturating_sub(weight);
    let is_too_much = |weight: u64| weight > rest(weight);
    if elsewhere >= rest(elsewhere) || by_weight.first().is_some_and(|(_, most)| is_too_much(*most))
    {
        return None;
    }
    let is_notable = |(_, weight): &(usize, u64)| *weight as f64 >= held as f64 * NOTABLE;
    let are_half = |some: &&[(usize, u64)]| {
        let together: u64 = some.iter().map(|(_, weight)| weight).sum();
        together >= rest(together) && some.iter().all(is_notable)
    };
    (2..=SEVERAL).filter_map(|count| by_weight.get(..count)).find(are_half).map(<[_]>::to_vec)
}

/// For how long at least one of some awaits was open.
fn open_ns(awaits: &[&Sample]) -> u64 {
    let points = awaits.iter().flat_map(|sample| &sample.points);
    let mut points: Vec<_> = points.map(|it| (it.time_unix_ns, it.weight)).collect();
    points.sort_unstable();
    let add = |(open_ns, end): (u64, u64), (from, ns): (u64, u64)| {
        let to = from.saturating_add(ns).max(end);
        (open_ns + (to - from.max(end)), to)
    };
    points.into_iter().fold((0, 0), add).0
}

/// What another span did just before most of them went on.
fn until(profile: &Profile, samples: &[SampledCall<'_>]) -> Option<String> {
    let until = most(samples, |sample| profile.leaf(sample.leaf)?.until());
    until.filter(|until| until.share > 0.5).map(|until| format!("until {}", until.name))
}

/// The text that samples with the most weight have, and its share of all of them.
fn most(
    samples: &[SampledCall<'_>],
    text: impl Fn(&Sample) -> Option<String>,
) -> Option<FunctionShare> {
    let mut weights: BTreeMap<String, u64> = BTreeMap::new();
    let mut all = 0_u64;
    for SampledCall { sample, weight, .. } in samples {
        all += weight;
        if let Some(text) = text(sample) {
            *weights.entry(text).or_default() += weight;
        }
    }
    let (name, weight) = weights.into_iter().max_by_key(|(_, weight)| *weight)?;
    let share = weight as f64 / all.max(1) as f64;
    Some(FunctionShare { name, share, ..FunctionShare::default() })
}

/// Where no own code holds enough.
fn fallback(
    profile: &Profile,
    kind: SampleKind,
    samples: &[SampledCall<'_>],
    share: impl Fn(u64) -> f64,
) -> Option<Hotspot> {
    let (name, location, share, call) = match kind {
        SampleKind::OffCpu | SampleKind::Await => {
            let site = profile.longest_site(kind, |_| true)?;
            (site.function, site.location, share(nanoseconds(site.waited)), site.call)
        }
        _ => {
            let (name, weight) = profile.functions_by(kind).into_iter().next()?;
            (own_name(&name), String::new(), share(weight), String::new())
        }
    };
    let function = FunctionShare { name, location, share };
    let leaf = FunctionShare { name: call, share: 1.0, ..FunctionShare::default() };
    let leaf = Some(leaf).filter(|leaf| !leaf.name.is_empty());
    // Time of which only the sum is known is no sample.
    let is_remark = function.name.starts_with('[') && function.name != LINKAGE;
    let is_certain = is_remark || are_enough(kind, samples.iter());
    let (functions, callers, beside) = (vec![function], Vec::new(), None);
    let added = until(profile, samples);
    Some(Hotspot { kind, functions, callers, leaf, beside, added, is_certain })
}

/// Whether there are as many points as three of one weight, or they are no samples: waits and long awaits.
fn are_enough<'a>(kind: SampleKind, samples: impl Iterator<Item = &'a SampledCall<'a>>) -> bool {
    let (mut sum, mut squares, mut exact) = (0.0, 0.0, 0.0);
    for point in samples.flat_map(|sample| &sample.sample.points) {
        let weight = point.weight as f64;
        sum += weight;
        squares += weight * weight;
        let is_exact = match kind {
            SampleKind::OffCpu => true,
            // Branches that await together have parts of a sample.
            SampleKind::Await => point.weight > SAMPLED_AWAIT_NS,
            SampleKind::AllocatedBytes => point.weight >= LARGE_BYTES,
            _ => false,
        };
        exact += if is_exact { weight } else { 0.0 };
    }
    // Kish's effective number of samples is above two.
    exact * 2.0 >= sum || sum * sum > 2.0 * squares
}

/// `99 % in shop::cheapest (src/prices.rs:41), 62 % of that in serde_json::to_string`.
impl Display for Hotspot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// A larger share is all.
        const NEARLY_ALL: f64 = 0.95;
        /// What lets only some of several futures go on, so that it comes first.
        const LIMITS: [&str; 4] = ["semaphore", "mutex", "rwlock", "pool"];
        if !self.is_certain {
            let names: Vec<_> = self.functions.iter().map(|of| of.name.as_str()).collect();
            return write!(f, "likely in {} (few samples)", names.join(" and "));
        }
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let callers = match self.callers.as_slice() {
            [] => String::new(),
            [of, _, _, ..] => format!("called by {of} and {} others", self.callers.len() - 1),
            few => format!("called by {}", few.join(" and ")),
        };
        let is_in = |of: &FunctionShare, limit| of.name.to_ascii_lowercase().contains(limit);
        let limits = |of: &&FunctionShare| LIMITS.iter().any(|limit| is_in(of, *limit));
        let (first, last): (Vec<_>, Vec<_>) = self.beside.iter().partition(limits);
        first.iter().try_for_each(|of| write!(f, "others at {} while ", of.name))?;
        for (number, FunctionShare { name, location, share }) in self.functions.iter().enumerate() {
            f.write_str(if number == 0 { "" } else { ", " })?;
            write!(f, "{} in {name}", percent(*share))?;
            let of_one = if self.functions.len() == 1 { callers.as_str() } else { "" };
            match [location.as_str(), of_one] {
                ["", ""] => {}
                ["", place] | [place, ""] => write!(f, " ({place})")?,
                [place, callers] => write!(f, " ({place}, {callers})")?,
            }
        }
        if self.functions.len() > 1 && !callers.is_empty() {
            write!(f, ", {callers}")?;
        }
        if let Some(FunctionShare { name, share, .. }) = &self.leaf {
            let (word, all) = match self.kind {
                SampleKind::OffCpu => ("", NEARLY_ALL),
                SampleKind::Await => ("at ", NEARLY_ALL),
                _ => ("in ", f64::INFINITY),
            };
            match *share > all {
                true => write!(f, " {word}{name}"),
                false => write!(f, ", {} of that {word}{name}", percent(*share)),
            }?;
        }
        last.iter().try_for_each(|of| write!(f, ", others at {}", of.name))?;
        self.added.iter().try_for_each(|added| write!(f, ", {added}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Facts, TimeBreakdown};
    use crate::profile::{
        CALLERS_NOT_COPIED, FrameKind, Function, Line, Location, LocationId, Mapping, Point,
        ProfileId,
    };

    #[test]
    fn a_brief_hotspot_still_says_which_function_it_is() {
        let brief = |name: &str, location: &str| {
            let mut hotspots = Hotspots::for_test(name, 0.9);
            hotspots.locate_for_test(location);
            hotspots.brief(BriefPart::LEVELS[7]).of(SampleKind::OnCpu).unwrap().functions[0]
                .name
                .clone()
        };
        assert_eq!(brief("render", "src/a.rs:1"), "render");
        assert_eq!(brief("shop_core::price", "src/lib.rs:4"), "shop_core::price");
        assert_eq!(brief("app::webapp::render", "src/webapp.rs:4"), "webapp::render");
        assert_eq!(brief("api::api::list", "src/api.rs:4"), "api::list");
        assert_eq!(brief("std::sync::poison::mutex::lock", ""), "std::mutex::lock");
        let until =
            "until `GET /a` left the thread after app::jobs::run (src/jobs.rs:7)".to_owned();
        let share = |name: &str, location: &str| FunctionShare {
            name: name.to_owned(),
            location: location.to_owned(),
            share: 1.0,
        };
        let mut hotspot = Hotspots::for_test("", 1.0).0.remove(0);
        hotspot.kind = SampleKind::Await;
        hotspot.functions = vec![share("app::web::list", "src/web.rs:4")];
        let leaf = "[lock likely held by `GET /b` at app::db::write (src/db.rs:2)]";
        (hotspot.leaf, hotspot.added) = (Some(share(leaf, "")), Some(until));
        let brief_of_all = hotspot.brief(BriefPart::LEVELS[2]);
        let leaf = "[lock likely held by `GET /b` at db::write (db.rs:2)]";
        assert_eq!(brief_of_all.leaf.unwrap().name, leaf);
        assert_eq!(brief_of_all.functions[0], share("web::list", "web.rs:4"));
        hotspot.functions[0].location = "old_src/web.rs:4".to_owned();
        assert_eq!(hotspot.brief(BriefPart::LEVELS[2]).functions[0].location, "old_src/web.rs:4");
        assert_eq!(
            brief_of_all.added.unwrap(),
            "until `GET /a` left the thread after jobs::run (jobs.rs:7)"
        );
        assert_eq!(brief("<app::A as app::B>::run", "src/b.rs:4"), "<app::A as app::B>::run");
        hotspot.callers = vec!["app::jobs::run".to_owned()];
        let [_, whole, short, without_places, without_leaves, without_both, ..] =
            BriefPart::LEVELS.map(|parts| hotspot.brief(parts));
        assert_eq!(
            (&whole.callers[0], &short.callers[0]),
            (&hotspot.callers[0], &"jobs::run".into())
        );
        let place = |it: &Hotspot| (it.functions[0].location.is_empty(), it.leaf.is_none());
        let places = [&whole, &without_places, &without_leaves, &without_both].map(place);
        assert_eq!(places, [(false, false), (true, false), (false, true), (true, true)]);
        assert_eq!(without_places.functions[0].name, "web::list");
    }

    const MS: u64 = 1_000_000;
    const STD: &str = "/rustc/59807616/library/alloc/src/collections/btree/map.rs";
    const CLONE: &str =
        "<alloc::collections::btree::map::BTreeMap<K,V,A> as core::clone::Clone>::clone";

    /// A profile of a program whose code is in the crates `shop` and `shop_core`.
    struct Samples(Profile);

    impl Samples {
        fn new() -> Self {
            let mut profile = Profile::new(ProfileId::for_test(1), MS);
            let target = |name: &'static str| Facts {
                target: name.into(),
                own_file: "x",
                ..Facts::default()
            };
            profile.spans = vec![target("shop::cart"), target("shop_core")];
            Self(profile)
        }

        /// The functions inlined at a location, the innermost first: `name file:line`, without a file `name`.
        fn location(&mut self, functions: &str, address: u64) -> LocationId {
            let lines = functions.split(" < ").map(|function| {
                let (name, place) = function.rsplit_once(" at ").unwrap_or((function, ":0"));
                let (file, line) = place.rsplit_once(':').unwrap();
                let function = Function { file: file.to_owned(), ..Function::named(name) };
                let function = self.0.add_function(function);
                Line { function, line: line.parse().unwrap(), column: 0 }
            });
            let lines = lines.collect();
            self.0.add_location(Location {
                mapping: None,
                address,
                kind: FrameKind::Rust,
                lines,
                is_inferred: false,
            })
        }

        /// Adds a sample with that stack, the innermost location first, of each weight.
        fn add(
            &mut self,
            kind: SampleKind,
            leaf: Leaf,
            stack: &[&str],
            weights: &[u64],
        ) -> &mut Self {
            let stack: Vec<_> = (1..)
                .zip(stack)
                .map(|(address, functions)| self.location(functions, address))
                .collect();
            self.add_locations(kind, leaf, stack, weights)
        }

        fn add_locations(
            &mut self,
            kind: SampleKind,
            leaf: Leaf,
            stack: Vec<LocationId>,
            weights: &[u64],
        ) -> &mut Self {
            let place = (self.0.add_stack(stack), self.0.add_leaf(leaf));
            for (time_unix_ns, weight) in (1..).zip(weights) {
                let point = Point { time_unix_ns, weight: *weight, thread: None };
                self.0.add_sample_at(kind, place, None, point);
            }
            self
        }

        /// Adds samples of a running thread.
        fn ran(&mut self, stack: &[&str], samples: usize) -> &mut Self {
            self.add(SampleKind::OnCpu, Leaf::Ran, stack, &vec![MS; samples])
        }

        fn hotspot(&self, kind: SampleKind) -> Option<Hotspot> {
            self.0.hotspots().of(kind).cloned()
        }

        fn said(&mut self, kind: SampleKind) -> String {
            self.0.classify();
            self.hotspot(kind).map_or_else(String::new, |hotspot| hotspot.to_string())
        }

        fn ran_in(&mut self) -> String {
            self.said(SampleKind::OnCpu)
        }
    }

    const HANDLE: &str = "shop::handle at shop/src/main.rs:9";
    const MAIN: &str = "shop::main at shop/src/main.rs:3";
    const RENDER: &str = "shop::render at shop/src/render.rs:20";
    const PARSE: &str = "shop::parse at shop/src/parse.rs:30";

    #[test]
    fn the_deepest_own_function_with_half_wins_over_the_leaf_with_the_most() {
        let cheapest = "shop::cheapest at shop/src/prices.rs:41";
        let clone = format!("{CLONE} at {STD}:1");
        let mut samples = Samples::new();
        samples.ran(&["_int_free", "free", cheapest, HANDLE, MAIN], 19);
        samples.ran(&["_int_malloc", &clone, cheapest, HANDLE, MAIN], 40);
        samples.ran(&["memcpy", &clone, cheapest, HANDLE, MAIN], 17);
        samples.ran(&[cheapest, HANDLE, MAIN], 23);
        samples.ran(&[HANDLE, MAIN], 1);
        let text = samples.ran_in();
        assert_eq!(
            text,
            "99 % in shop::cheapest (src/prices.rs:41, called by handle), 40 % of that in _int_malloc"
        );
        assert_eq!(samples.0.functions_by(SampleKind::OnCpu)[0].0, "_int_malloc");
    }

    #[test]
    fn where_no_call_has_half_the_one_with_the_most_is_named() {
        let mut samples = Samples::new();
        samples.ran(&["memcpy", "write", RENDER, MAIN], 30);
        samples.ran(&["_int_free", "free", RENDER, MAIN], 25);
        samples.ran(&[RENDER, MAIN], 20);
        assert_eq!(
            samples.ran_in(),
            "100 % in shop::render (src/render.rs:20), 40 % of that in memcpy"
        );
        samples.ran(&["_int_malloc", "malloc", RENDER, MAIN], 5);
        samples.ran(&["memset", "malloc", RENDER, MAIN], 30);
        let text = samples.ran_in();
        assert!(text.ends_with(", 32 % of that in malloc"), "by what it calls: {text}");
        let mut samples = Samples::new();
        samples.ran(&[RENDER, MAIN], 30);
        (0..20).for_each(|number| {
            samples.ran(&[&format!("f{number}"), RENDER, MAIN], 4);
        });
        assert!(!samples.ran_in().contains("of that"), "{}", samples.ran_in());
    }

    /// Optimized code has the time in what is inlined.
    #[test]
    fn nothing_of_the_standard_library_is_named_as_what_is_called() {
        let mut samples = Samples::new();
        let core = "/rustc/59807616/library/core/src";
        let less = format!("lt at {core}/cmp.rs:1835");
        let next = format!(
            "<core::ops::range::Range<A> as core::iter::Step>::spec_next at {core}/iter/range.rs:7"
        );
        samples.ran(&[&less, RENDER, MAIN], 50).ran(&["core::hint::spin", RENDER, MAIN], 20);
        samples.ran(&[&next, RENDER, MAIN], 20);
        assert_eq!(samples.ran_in(), "100 % in shop::render (src/render.rs:20)");
        samples.ran(&["memcpy", &next, RENDER, MAIN], 30);
        let expected = "100 % in shop::render (src/render.rs:20), 25 % of that in memcpy";
        assert_eq!(samples.ran_in(), expected);
    }

    #[test]
    fn a_system_call_is_named_by_what_makes_it_and_a_page_fault_by_the_kernel() {
        let mut samples = Samples::new();
        let entry = ["do_syscall_64", "entry_SYSCALL_64_after_hwframe"];
        for kernel in [&["iowrite16", "do_fsync"][..], &["kmem_cache_free", "__fput"], &[]] {
            samples.ran(&[kernel, &entry, &["__GI_fsync", RENDER, MAIN]].concat(), 3);
        }
        let text = samples.ran_in();
        assert_eq!(text, "100 % in shop::render (src/render.rs:20), 100 % of that in __GI_fsync");
        let mut samples = Samples::new();
        samples.ran(&["clear_page", "do_anonymous_page", "asm_exc_page_fault", RENDER, MAIN], 9);
        assert!(samples.ran_in().ends_with("100 % of that in clear_page"), "{}", samples.ran_in());
    }

    #[test]
    fn callees_that_split_what_a_function_holds_are_named_together() {
        let mut samples = Samples::new();
        samples.ran(&["memcpy", RENDER, "call_once", HANDLE, MAIN], 40);
        samples.ran(&[PARSE, HANDLE, MAIN], 35);
        samples.ran(&["shop::log at shop/src/log.rs:1", HANDLE, MAIN], 15);
        samples.ran(&[HANDLE, MAIN], 10);
        let expected = "40 % in shop::render (src/render.rs:20), 35 % in shop::parse (src/parse.rs:30), called by shop::handle";
        assert_eq!(samples.ran_in(), expected);
        // Two halves, of which neither is the answer.
        let mut samples = Samples::new();
        samples.ran(&[RENDER, HANDLE], 10).ran(&[PARSE, HANDLE], 10);
        let text = samples.ran_in();
        assert!(
            text.starts_with("50 % in shop::parse") && text.ends_with("called by shop::handle"),
            "{text}"
        );
        // Three.
        let mut samples = Samples::new();
        for name in ["a", "b", "c", "d", "e"] {
            samples.ran(&[&format!("shop::{name}"), HANDLE], 20);
        }
        let three = "20 % in shop::a, 20 % in shop::b, 20 % in shop::c, called by shop::handle";
        assert_eq!(samples.ran_in(), three);
        // Many that only together have half.
        let mut samples = Samples::new();
        (0..9).for_each(|number| {
            samples.ran(&[&format!("shop::f{number}"), HANDLE], 10);
        });
        assert!(samples.ran_in().starts_with("100 % in shop::handle"), "{}", samples.ran_in());
        // What it does itself, with foreign code, is most of it.
        let mut samples = Samples::new();
        samples.ran(&[RENDER, HANDLE], 25).ran(&[PARSE, HANDLE], 24).ran(&["memcpy", HANDLE], 51);
        assert_eq!(
            samples.ran_in(),
            "100 % in shop::handle (src/main.rs:9), 51 % of that in memcpy"
        );
        // One callee has most of a function that has little more than half.
        let mut samples = Samples::new();
        samples.ran(&[RENDER, HANDLE], 45).ran(&[HANDLE], 15).ran(&["_int_free"], 40);
        assert_eq!(
            samples.ran_in(),
            "60 % in shop::handle (src/main.rs:9), 75 % of that in shop::render"
        );
    }

    #[test]
    fn functions_without_a_common_caller_can_have_half_together() {
        let mut samples = Samples::new();
        samples
            .ran(&[RENDER, "start_thread"], 40)
            .ran(&[PARSE, "start_thread"], 35)
            .ran(&["idle"], 25);
        let text = samples.ran_in();
        assert_eq!(
            text,
            "40 % in shop::render (src/render.rs:20), 35 % in shop::parse (src/parse.rs:30)"
        );
    }

    #[test]
    fn a_function_is_one_wherever_it_is_called_inlined_or_recursive() {
        // By two callers, as instances of one generic function, at several addresses and lines.
        let mut samples = Samples::new();
        samples.ran(&["shop::render<Html> at shop/src/render.rs:20", "shop::a", HANDLE], 30);
        samples.ran(&["shop::render<Json> at shop/src/render.rs:21", "nop", "shop::b", HANDLE], 31);
        samples.ran(&[HANDLE], 39);
        assert_eq!(
            samples.ran_in(),
            "61 % in shop::render (src/render.rs:21, called by shop::b and shop::a)"
        );
        // A helper of a module is called by those that use the module.
        let (pause, again) = ("shop::retry::pause at shop/src/retry.rs:7", "shop::retry::again");
        let mut samples = Samples::new();
        samples.ran(&["memcpy", pause, again, again, "shop::pay", HANDLE, MAIN], 50);
        samples.ran(&[pause, again, "shop::order", "shop::orders::all", MAIN], 40);
        samples.ran(&[pause, again, MAIN], 10);
        assert_eq!(
            samples.ran_in(),
            "100 % in shop::retry::pause (src/retry.rs:7, called by shop::pay and shop::order), 50 % of that in memcpy"
        );
        for other in ["shop::ship", "shop::bill"] {
            samples.ran(&[pause, again, other, MAIN], 20);
        }
        let text = samples.ran_in();
        assert!(text.contains(", called by shop::pay and 3 others), "), "{text}");
        let mut samples = Samples::new();
        samples.ran(&[pause, again, "shop::orders::Orders::all", "shop::orders::list", MAIN], 9);
        assert_eq!(
            samples.ran_in(),
            "100 % in shop::retry::pause (src/retry.rs:7, called by shop::orders::Orders::all)"
        );
        // Not what a framework calls all handlers through.
        let call = "axum::handler::call at axum-0.8.9/src/handler.rs:3";
        let mut samples = Samples::new();
        samples.ran(&[pause, again, call, "shop::serve::trace", MAIN], 9);
        assert_eq!(
            samples.ran_in(),
            "100 % in shop::retry::pause (src/retry.rs:7, called by again)"
        );
        let method = "<shop::retry::Again as shop::Step>::run";
        let mut samples = Samples::new();
        samples.ran(&[pause, method, "shop::pay", HANDLE, MAIN], 9);
        assert_eq!(
            samples.ran_in(),
            "100 % in shop::retry::pause (src/retry.rs:7, called by shop::pay)"
        );
        // Inlined into another.
        let mut samples = Samples::new();
        samples.ran(
            &["shop::sum at shop/src/sum.rs:7 < shop::render at shop/src/render.rs:20", MAIN],
            9,
        );
        assert_eq!(samples.ran_in(), "100 % in shop::sum (src/sum.rs:7, called by render)");
        // A recursion counts once, also of several functions.
        let (visit, walk) =
            ("shop::visit at shop/src/tree.rs:5", "shop::walk at shop/src/tree.rs:9");
        let mut samples = Samples::new();
        samples.ran(&["memcpy", visit, walk, visit, walk, visit, MAIN], 60).ran(&[MAIN], 40);
        let text = samples.ran_in();
        assert_eq!(
            text,
            "60 % in shop::walk (src/tree.rs:9, called by visit), 100 % of that in memcpy"
        );
        let deep = vec![visit; 5_000];
        samples.ran(&deep, 100);
        assert!(samples.ran_in().starts_with("80 % in shop::visit"), "{}", samples.ran_in());
    }

    #[test]
    fn async_functions_and_closures_are_named_as_people_write_them() {
        let mut samples = Samples::new();
        let poll =
            "<tokio::Task<T> as core::future::future::Future>::poll at tokio-1.50.0/src/task.rs:3";
        let checkout = "shop::checkout::{closure#0} at shop/src/cart.rs:8";
        let closure = "shop::checkout::{{closure}}::{{closure}} at shop/src/cart.rs:12";
        samples.ran(&[closure, "fold", checkout, poll, MAIN], 9);
        assert_eq!(samples.ran_in(), "100 % in shop::checkout (src/cart.rs:12)");
        // Inlined closures have no path: they are a part of the function that they are written in.
        let inlined =
            "{closure#0} at shop/src/render.rs:22 < fold at /rustc/1/library/core/src/iter.rs:1";
        let mut samples = Samples::new();
        samples.ran(&[inlined, RENDER, MAIN], 9);
        assert_eq!(samples.ran_in(), "100 % in shop::render (src/render.rs:20)");
        // One of another file is on its own.
        let mut samples = Samples::new();
        samples.ran(&["{closure#0} at shop/src/other.rs:22", RENDER, MAIN], 9);
        assert_eq!(
            samples.ran_in(),
            "100 % in {closure#0} (src/other.rs:22, called by shop::render)"
        );
        let whole = "{async_fn#0} at shop/src/cart.rs:7";
        let mut samples = Samples::new();
        samples.ran(&[whole, poll, MAIN], 9);
        assert_eq!(samples.ran_in(), "100 % in async fn (src/cart.rs:7, called by shop::main)");
    }

    #[test]
    fn own_code_can_be_in_several_crates() {
        let mut samples = Samples::new();
        let core = "shop_core::price at core/src/price.rs:4";
        let dependency = "serde_json::from_slice at serde_json-1.0.100/src/de.rs:9";
        samples.ran(&[dependency, core, HANDLE, MAIN], 9);
        assert_eq!(
            samples.ran_in(),
            "100 % in shop_core::price (src/price.rs:4, called by shop::handle), 100 % of that in serde_json::from_slice"
        );
    }

    #[test]
    fn without_own_code_the_leaf_is_named() {
        let mut samples = Samples::new();
        samples.ran(&["sqlite3VdbeExec", "sqlite3_step"], 60).ran(&["memcpy"], 40);
        assert_eq!(samples.ran_in(), "60 % in sqlite3VdbeExec");
        // Own code that holds less than half.
        samples.ran(&[RENDER, MAIN], 40);
        assert_eq!(samples.ran_in(), "43 % in sqlite3VdbeExec");
        // Code without names.
        let mut samples = Samples::new();
        let shop =
            samples.0.add_mapping(Mapping { file: "/opt/shop".into(), ..Mapping::default() });
        let unnamed = Location {
            mapping: Some(shop),
            address: 0x20,
            kind: FrameKind::Native,
            lines: Vec::new(),
            is_inferred: false,
        };
        let unnamed = samples.0.add_location(unnamed);
        samples.add_locations(SampleKind::OnCpu, Leaf::Ran, vec![unnamed], &[MS; 3]);
        assert_eq!(samples.ran_in(), "100 % in shop+0x20");
        let render = samples.location(RENDER, 7);
        samples.add_locations(SampleKind::OnCpu, Leaf::Ran, vec![unnamed, render], &[MS; 9]);
        assert_eq!(
            samples.ran_in(),
            "75 % in shop::render (src/render.rs:20), 100 % of that in shop"
        );
        assert_eq!(Samples::new().ran_in(), "", "nothing");
    }

    #[test]
    fn stacks_that_are_cut_short_and_kernel_frames_hide_no_function() {
        let mut samples = Samples::new();
        let cut = samples.0.add_remark(CALLERS_NOT_COPIED);
        let copy = samples.0.add_function(Function::named("copy_to_user"));
        let kernel = Location {
            mapping: None,
            address: 1,
            kind: FrameKind::Kernel,
            lines: vec![Line { function: copy, line: 0, column: 0 }],
            is_inferred: false,
        };
        let kernel = samples.0.add_location(kernel);
        let (render, handle) = (samples.location(RENDER, 7), samples.location(HANDLE, 8));
        samples.add_locations(SampleKind::OnCpu, Leaf::Ran, vec![kernel, render, cut], &[MS; 50]);
        samples.add_locations(
            SampleKind::OnCpu,
            Leaf::Ran,
            vec![kernel, render, handle],
            &[MS; 30],
        );
        samples.add_locations(SampleKind::OnCpu, Leaf::Ran, vec![cut], &[MS; 20]);
        let text = samples.ran_in();
        assert_eq!(
            text,
            "80 % in shop::render (src/render.rs:20, called by handle), 100 % of that in copy_to_user, \
             20 % in stacks without callers"
        );
        // Most callers are unknown.
        let mut samples = Samples::new();
        let build = "regex::build at regex-1.13.1/src/lib.rs:2";
        for (leaf, count) in [("regex::next", 40), ("regex::add", 30), ("memcpy", 20)] {
            let names = [leaf, build];
            let mut stack: Vec<_> = names.map(|name| samples.location(name, 9)).into();
            stack.push(samples.0.add_remark(CALLERS_NOT_COPIED));
            samples.add_locations(SampleKind::OnCpu, Leaf::Ran, stack, &vec![MS; count]);
        }
        samples.ran(&[RENDER, MAIN], 10);
        assert_eq!(samples.ran_in(), "90 % in regex::build, 44 % of that in regex::next");
        let mut samples = Samples::new();
        samples.ran(&[RENDER, HANDLE], 100);
        // Time in the kernel of which only the sum is known.
        let remark = samples.0.add_remark("[kernel]");
        samples.add_locations(SampleKind::OnCpu, Leaf::Ran, vec![remark], &[400 * MS]);
        assert_eq!(samples.ran_in(), "80 % in [kernel]");
    }

    #[test]
    fn nothing_certain_is_said_of_few_samples() {
        let text = |weights: &[u64]| {
            let mut samples = Samples::new();
            samples.add(SampleKind::OnCpu, Leaf::Ran, &[RENDER, MAIN], weights);
            let text = samples.ran_in();
            let hotspot = samples.hotspot(SampleKind::OnCpu).unwrap();
            assert_eq!(hotspot.share().is_some(), hotspot.is_certain);
            text
        };
        let likely = "likely in shop::render (few samples)";
        assert_eq!([text(&[MS]), text(&[MS, MS])], [likely; 2]);
        assert_eq!(text(&[MS; 3]), "100 % in shop::render (src/render.rs:20)");
        // One represents nearly all.
        assert_eq!(text(&[100 * MS, MS, MS, MS, MS]), likely);
        let mut samples = Samples::new();
        samples.ran(&[RENDER, HANDLE], 1).ran(&[PARSE, HANDLE], 1);
        assert_eq!(samples.ran_in(), "likely in shop::parse and shop::render (few samples)");
        // A jump to a library is a sample, too.
        let mut samples = Samples::new();
        samples.ran(&[LINKAGE], 1);
        assert_eq!(samples.ran_in(), "likely in [plt] (few samples)");
        // Many others do not make one certain.
        let mut samples = Samples::new();
        samples.ran(&[RENDER, MAIN], 5).add(
            SampleKind::OnCpu,
            Leaf::Ran,
            &[PARSE, MAIN],
            &[100 * MS],
        );
        assert_eq!(samples.ran_in(), "likely in shop::parse (few samples)");
    }

    #[test]
    fn weights_count_and_not_numbers_of_samples() {
        let mut samples = Samples::new();
        samples.ran(&[PARSE, MAIN], 100);
        samples.add(SampleKind::OnCpu, Leaf::Ran, &[RENDER, MAIN], &[50 * MS; 4]);
        assert_eq!(samples.ran_in(), "67 % in shop::render (src/render.rs:20)");
    }

    #[test]
    fn a_share_is_that_of_the_on_cpu_time_sampled_or_not() {
        let share = |spans: &[(u64, u64, bool)]| {
            let span = |(subtree_on_cpu_ns, subtree_on_cpu_error_ns, is_topmost): &_| {
                let times = TimeBreakdown {
                    subtree_on_cpu_ns: *subtree_on_cpu_ns,
                    subtree_on_cpu_error_ns: *subtree_on_cpu_error_ns,
                    ..TimeBreakdown::default()
                };
                Facts { is_topmost: *is_topmost, times, ..Facts::default() }
            };
            let mut samples = Samples::new();
            samples.add(SampleKind::OnCpu, Leaf::Ran, &[RENDER, MAIN], &[10; 5]);
            samples.0.spans = spans.iter().map(span).collect();
            samples.0.classify();
            samples.hotspot(SampleKind::OnCpu).unwrap().share().unwrap()
        };
        assert_eq!(share(&[]), 1.0);
        // Samples were taken of a sixth of its time.
        assert_eq!(share(&[(300, 0, true)]), 50.0 / 300.0);
        assert_eq!(share(&[(300, 0, true), (200, 0, false), (100, 0, true)]), 50.0 / 400.0);
        assert_eq!(share(&[(300, 100, true)]), 50.0 / 200.0, "what is certain");
        assert_eq!(share(&[(40, 0, true)]), 1.0, "the samples represent more");
    }

    #[test]
    fn a_wait_is_in_an_own_function_with_its_system_call() {
        let blocked = |call: &str| Leaf::Blocked(call.to_owned());
        let reserve = "shop::reserve at shop/src/stock.rs:41";
        let lock = "std::sync::Mutex<T>::lock at /rustc/1/library/std/src/sync/mutex.rs:1";
        let mut samples = Samples::new();
        let kind = SampleKind::OffCpu;
        samples.add(kind, blocked("futex 0x7f01"), &["syscall", lock, reserve, MAIN], &[960 * MS]);
        samples.add(kind, blocked("sleep"), &["nanosleep", reserve, MAIN], &[20 * MS]);
        samples.add(kind, blocked("read"), &["read", PARSE, MAIN], &[20 * MS]);
        assert_eq!(
            samples.said(kind),
            "98 % in shop::reserve (src/stock.rs:41) at std::sync::Mutex::lock"
        );
        samples.add(kind, blocked("sleep"), &["nanosleep", reserve, MAIN], &[500 * MS]);
        assert_eq!(
            samples.said(kind),
            "99 % in shop::reserve (src/stock.rs:41), 65 % of that at std::sync::Mutex::lock"
        );
        // Without own code, the site as in the sum of waits.
        let mut samples = Samples::new();
        samples.add(kind, blocked("read"), &["read", "load_table"], &[20 * MS]);
        assert_eq!(samples.said(kind), "100 % in read [read]");
    }

    #[test]
    fn an_await_is_in_an_own_function_at_a_future() {
        let sleep = "<tokio::time::sleep::Sleep as core::future::future::Future>::poll at \
            tokio-1.54.1/src/time/sleep.rs:457";
        let fetch = "shop::fetch::{{closure}} at shop/src/upstream.rs:41";
        let mut samples = Samples::new();
        let kind = SampleKind::Await;
        samples.add(kind, Leaf::Awaiting, &[sleep, fetch, HANDLE], &[900 * MS]);
        samples.add(kind, Leaf::Awaiting, &[sleep, HANDLE], &[100 * MS]);
        assert_eq!(
            samples.said(kind),
            "90 % in shop::fetch (src/upstream.rs:41, called by handle) at tokio::time::sleep::Sleep"
        );
        // One or two that represent others are no certain sum, nor are the parts that branches have of one.
        for weight in [SAMPLED_AWAIT_NS, SAMPLED_AWAIT_NS / 2] {
            let mut samples = Samples::new();
            samples.add(kind, Leaf::Awaiting, &[sleep, fetch, HANDLE], &[weight; 2]);
            assert_eq!(samples.said(kind), "likely in shop::fetch (few samples)");
        }
    }

    #[test]
    fn what_lets_one_future_go_on_comes_before_what_that_awaits() {
        let said = |others: &str| {
            let mut hotspot = Hotspots::of_awaits_for_test(1.0).0.remove(0);
            hotspot.beside = Some(FunctionShare { name: others.to_owned(), ..Default::default() });
            (hotspot.to_string(), hotspot.brief(BriefPart::LEVELS[0]).to_string())
        };
        let there = "100 % in shop::fetch (src/upstream.rs:41) at tokio::time::sleep";
        let (whole, brief) = said("tokio::sync::semaphore::Semaphore::acquire");
        let at = "others at tokio::sync::semaphore::Semaphore::acquire";
        assert_eq!(whole, format!("{at} while {there}"));
        assert_eq!(brief, format!("others at tokio::Semaphore::acquire while {there}"));
        let (_, brief) = said("tokio::sync::rwlock::RwLock::read");
        assert_eq!(brief, format!("others at tokio::RwLock::read while {there}"));
        let (whole, _) = said("tokio::sync::notify::Notified");
        assert_eq!(whole, format!("{there}, others at tokio::sync::notify::Notified"));
    }

    /// In one span, a task awaits two others of which one is slow.
    #[test]
    fn what_a_joined_task_awaits_is_named_and_not_the_join() {
        let join = "<tokio::runtime::task::join::JoinHandle<T> as core::future::future::Future>::poll at \
            tokio-1.54.1/src/runtime/task/join.rs:9";
        let sleep = "<tokio::time::sleep::Sleep as core::future::future::Future>::poll at tokio-1.54.1/src/time/sleep.rs:457";
        let fetch = "shop::fetch::{{closure}} at shop/src/upstream.rs:41";
        let said = |fetched_ms: [u64; 2]| {
            let mut samples = Samples::new();
            let kind = SampleKind::Await;
            samples.add(kind, Leaf::Awaiting, &[join, HANDLE], &[600 * MS]);
            for fetched_ms in fetched_ms {
                samples.add(kind, Leaf::Awaiting, &[sleep, fetch], &[fetched_ms * MS]);
            }
            samples.said(kind)
        };
        let fetched = "100 % in shop::fetch (src/upstream.rs:41) at tokio::time::sleep::Sleep";
        assert_eq!([said([580, 15]), said([599, 599])], [fetched; 2]);
        let mut samples = Samples::new();
        samples.add(SampleKind::Await, Leaf::Awaiting, &[join, HANDLE], &[600 * MS]);
        samples.add(SampleKind::Await, Leaf::Awaiting, &[sleep, fetch], &[599 * MS]);
        samples.said(SampleKind::Await);
        assert_eq!(samples.0.awaits().total.as_millis(), 599);
        let rows = samples.0.own_rows(SampleKind::Await);
        assert!(rows.len() == 1 && rows[0].share == 1.0, "{rows:?}");
        // The other time is not explained by what it joins.
        let joined = said([300, 299]);
        assert!(joined.contains("50 % in shop::handle (src/main.rs:9)"), "{joined}");
    }

    #[test]
    fn an_own_function_with_less_than_half_goes_before_a_small_leaf() {
        let mut samples = Samples::new();
        samples.ran(&["memcpy", RENDER, MAIN], 49);
        for number in 0..17 {
            samples.ran(&[&format!("library_{number}")], 3);
        }
        assert_eq!(
            samples.ran_in(),
            "49 % in shop::render (src/render.rs:20), 100 % of that in memcpy"
        );
        samples.ran(&["library_0"], 60);
        assert_eq!(samples.ran_in(), "39 % in library_0");
    }

    #[test]
    fn one_large_allocation_is_certain() {
        let mut samples = Samples::new();
        samples.add(SampleKind::AllocatedBytes, Leaf::Allocated, &[RENDER, MAIN], &[500 << 20]);
        assert_eq!(
            samples.said(SampleKind::AllocatedBytes),
            "100 % in shop::render (src/render.rs:20)"
        );
    }

    #[test]
    fn bytes_are_held_like_time() {
        let mut samples = Samples::new();
        let (kind, clone) = (SampleKind::AllocatedBytes, format!("{CLONE} at {STD}:1"));
        samples.add(kind, Leaf::Allocated, &[&clone, RENDER, MAIN], &[512 << 10; 9]);
        samples.add(kind, Leaf::Allocated, &[PARSE, MAIN], &[512 << 10]);
        assert_eq!(samples.said(kind), "90 % in shop::render (src/render.rs:20)");
    }
}

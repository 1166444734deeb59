//! The stacks of a profile by function, as people write it: without addresses, type parameters and recursion.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::mem::replace;

use super::CALLERS_NOT_COPIED;
use super::awaits::own_name;
use super::code_origin::CodeOrigin;
use super::model::{Location, Profile};
use super::sample::{Sample, SampleKind};
use super::table::TableId as _;
use crate::facts::format::place_of;

/// A function that differs from others in its name or file.
struct NamedFunction<'a> {
    name: String,
    file: &'a str,
    is_own: bool,
    /// A closure of which only that is known: it is a part of the function around it.
    is_closure: bool,
}

/// A function below its callers. None of them is the same function: a recursion counts once.
#[derive(Clone, Copy)]
struct FunctionCall {
    caller: Option<usize>,
    function: usize,
}

/// All calls of a profile. Functions and calls have numbers; the number of a caller is lower.
pub(super) struct CallTree<'a> {
    profile: &'a Profile,
    functions: Vec<NamedFunction<'a>>,
    /// The functions and lines of each location, the outermost first, without those of Rust's library.
    locations: Vec<Vec<(usize, u32)>>,
    calls: Vec<FunctionCall>,
    /// The innermost call of each stack.
    ends: Vec<Option<usize>>,
}

/// A sample, or all that have its stack.
#[derive(Clone, Copy)]
pub(super) struct SampledCall<'a> {
    pub(super) sample: &'a Sample,
    pub(super) weight: u64,
    end: Option<usize>,
}

impl<'a> CallTree<'a> {
    pub(super) fn of(profile: &'a Profile) -> Self {
        let mut tree = Self {
            profile,
            functions: Vec::new(),
            locations: Vec::new(),
            calls: Vec::new(),
            ends: Vec::new(),
        };
        let mut known = HashMap::new();
        for (_, location) in profile.locations() {
            let functions = tree.functions_at(location, &mut known);
            tree.locations.push(functions);
        }
        tree.add_calls();
        tree
    }

    /// The functions and lines at a location, the outermost first.
    fn functions_at(
        &mut self,
        location: &Location,
        known: &mut HashMap<(String, &'a str), usize>,
    ) -> Vec<(usize, u32)> {
        let profile = self.profile;
        let mut number_of = |name: String, file: &'a str, is_own: bool| {
            let number = *known.entry((name, file)).or_insert_with_key(|(name, file)| {
                let is_closure = name.starts_with("{closure");
                let name = name.clone();
                self.functions.push(NamedFunction { name, file, is_own: false, is_closure });
                self.functions.len() - 1
            });
            if let Some(function) = self.functions.get_mut(number) {
                function.is_own |= is_own;
            }
            number
        };
        if location.lines.is_empty() {
            let mapping = location.mapping.and_then(|mapping| profile.mapping(mapping));
            let file = mapping.and_then(|mapping| mapping.file.rsplit('/').next());
            let name = file.unwrap_or("[code in no file]").to_owned();
            return vec![(number_of(name, "", false), 0)];
        }
        let lines = location.lines.iter().rev().filter_map(|line| {
            let function = profile.function(line.function)?;
            let origin = profile.origin(line.function);
            let is_shown = !matches!(origin, CodeOrigin::Std | CodeOrigin::Allocator);
            let name = is_shown.then(|| own_name(&function.name))?;
            Some((number_of(name, &function.file, origin == CodeOrigin::Own), line.line))
        });
        lines.collect()
    }

    /// Adds the calls of all stacks, of which those of callers come first.
    fn add_calls(&mut self) {
        let (mut known, mut is_called) = (HashMap::new(), vec![false; self.functions.len()]);
        for (caller, location) in self.profile.stack_nodes() {
            let mut end = caller.and_then(|caller| *self.ends.get(caller.number() as usize)?);
            let functions = self.locations.get(location.number() as usize);
            for (function, _) in functions.into_iter().flatten() {
                let function = self.written_in(*function, end);
                // What is called for the first time is not searched for in a stack that may be deep.
                let was_called =
                    is_called.get_mut(function).is_none_or(|is_called| replace(is_called, true));
                if was_called && self.path(end).any(|called| called == function) {
                    continue;
                }
                end = Some(*known.entry((end, function)).or_insert_with(|| {
                    self.calls.push(FunctionCall { caller: end, function });
                    self.calls.len() - 1
                }));
            }
            self.ends.push(end);
        }
    }

    /// The function that a closure without a path is a part of: the nearest own one around it in its file.
    fn written_in(&self, function: usize, caller: Option<usize>) -> usize {
        let closure = self.functions.get(function).filter(|of| of.is_closure && of.is_own);
        let Some(closure) = closure else { return function };
        let is_around = |number: &usize| {
            let around = self.functions.get(*number);
            around.is_some_and(|around| around.is_own && around.file == closure.file)
        };
        self.path(caller).find(is_around).unwrap_or(function)
    }

    pub(super) fn name(&self, function: usize) -> &str {
        self.functions.get(function).map_or("", |function| &function.name)
    }

    pub(super) fn is_own(&self, function: usize) -> bool {
        self.functions.get(function).is_some_and(|function| function.is_own)
    }

    pub(super) fn samples(&self, kind: SampleKind) -> Vec<SampledCall<'a>> {
        let sampled = |sample: &'a Sample| {
            let end = self.ends.get(sample.stack.number() as usize).copied().unwrap_or_default();
            SampledCall { sample, weight: sample.total(), end }
        };
        self.profile.without_joins(kind).into_iter().map(sampled).collect()
    }

    pub(super) fn is_in(&self, sample: &SampledCall<'_>, function: usize) -> bool {
        self.path(sample.end).any(|called| called == function)
    }

    /// The functions around one on the stack of a sample, the nearest first.
    pub(super) fn callers(
        &self,
        sample: &SampledCall<'_>,
        function: usize,
    ) -> impl Iterator<Item = usize> {
        self.path(sample.end).skip_while(move |called| *called != function).skip(1)
    }

    /// The functions of a call and those around it, the innermost first.
    fn path(&self, call: Option<usize>) -> impl Iterator<Item = usize> {
        let get = |call: usize| self.calls.get(call);
        let calls = std::iter::successors(call.and_then(get), move |of| get(of.caller?));
        calls.map(|call| call.function)
    }

    /// The functions on a stack that are below another, the outermost first.
    fn below(&self, sample: &SampledCall<'_>, function: usize) -> Vec<usize> {
        let file = self.functions.get(function).map_or("", |function| function.file);
        let is_there = |number: usize| {
            let of = self.functions.get(number);
            number == function || of.is_some_and(|of| of.is_own && of.is_closure && of.file == file)
        };
        let frames = self
            .profile
            .location_ids(sample.sample.stack)
            .flat_map(|id| self.locations.get(id.number() as usize).into_iter().flatten().rev());
        let mut below: Vec<_> =
            frames.map(|(number, _)| *number).take_while(|number| !is_there(*number)).collect();
        // A system call is known by what makes it.
        let entry = below.iter().position(|of| self.name(*of).starts_with("entry_SYSCALL"));
        below.drain(..entry.map_or(0, |entry| entry + 1));
        below.reverse();
        let mut known = HashSet::new();
        below.retain(|number| known.insert(*number));
        below
    }

    /// What a function's samples are in below it: the deepest function with half of their weight, else the one with the
    /// most. `None` if it calls nothing.
    pub(super) fn leaf_below(
        &self,
        function: usize,
        samples: &[SampledCall<'_>],
        half_of: u64,
    ) -> Option<(usize, u64)> {
        let stacks: Vec<_> =
            samples.iter().map(|sample| (self.below(sample, function), sample.weight)).collect();
        let mut held = vec![0_u64; self.functions.len()];
        let mut depths = held.clone();
        for (below, weight) in &stacks {
            for (depth, number) in (1..).zip(below) {
                add(&mut held, *number, *weight);
                if let Some(deepest) = depths.get_mut(*number) {
                    *deepest = depth.max(*deepest);
                }
            }
        }
        let holds =
            |number: &&usize| held.get(**number).is_some_and(|held| *held >= half_of.div_ceil(2));
        let mut votes = vec![0_u64; self.functions.len()];
        for (below, weight) in &stacks {
            let deepest = below.iter().rev().find(holds);
            deepest.into_iter().for_each(|number| add(&mut votes, *number, *weight));
        }
        if let Some((deepest, _)) = self.with_most(&votes, &held) {
            return Some((deepest, held.get(deepest).copied()?));
        }
        // Of equal ones, the deepest.
        let less = depths.iter().map(|depth| u64::MAX - depth);
        self.with_most(&held, &less.collect::<Vec<_>>())
    }

    /// The deepest own function that holds at least half of a weight, and what it holds: that in which most of the weight
    /// is that is in none below.
    pub(super) fn deepest_own(
        &self,
        samples: &[SampledCall<'_>],
        half_of: u64,
    ) -> Option<(usize, u64)> {
        self.deepest(samples, half_of, |function| self.is_own(function))
    }

    /// Whether the stack of a sample lacks its callers.
    pub(super) fn is_cut(&self, sample: &SampledCall<'_>) -> bool {
        self.path(sample.end).last().is_some_and(|of| self.name(of) == CALLERS_NOT_COPIED)
    }

    /// The deepest of all functions, if the stacks of at least half of the weight are cut.
    pub(super) fn deepest_without_callers(
        &self,
        samples: &[SampledCall<'_>],
        half_of: u64,
    ) -> Option<(usize, u64)> {
        let is_code = |function| !self.name(function).starts_with('[');
        let cut = samples.iter().filter(|sample| self.is_cut(sample));
        let cut_weight: u64 = cut.map(|sample| sample.weight).sum();
        self.deepest(samples, half_of, is_code).filter(|_| cut_weight >= half_of.div_ceil(2))
    }

    fn deepest(
        &self,
        samples: &[SampledCall<'_>],
        half_of: u64,
        is_it: impl Fn(usize) -> bool,
    ) -> Option<(usize, u64)> {
        let mut own = vec![0_u64; self.calls.len()];
        for SampledCall { weight, end, .. } in samples {
            end.iter().for_each(|call| add(&mut own, *call, *weight));
        }
        let mut in_calls = own.clone();
        let mut held = vec![0_u64; self.functions.len()];
        for (number, call) in self.calls.iter().enumerate().rev() {
            let weight = in_calls.get(number).copied().unwrap_or_default();
            call.caller.into_iter().for_each(|caller| add(&mut in_calls, caller, weight));
            if is_it(call.function) {
                add(&mut held, call.function, weight);
            }
        }
        // Of two that have a half each, neither is the deepest.
        let (half, more) = (half_of.div_ceil(2), half_of / 2 + 1);
        for least in [half, more] {
            let mut deepest: Vec<Option<usize>> = Vec::with_capacity(self.calls.len());
            let mut votes = vec![0_u64; self.functions.len()];
            for (call, weight) in self.calls.iter().zip(&own) {
                let is_here = held.get(call.function).is_some_and(|held| *held >= least);
                let around = || call.caller.and_then(|caller| *deepest.get(caller)?);
                let here = is_here.then_some(call.function).or_else(around);
                here.into_iter().for_each(|function| add(&mut votes, function, *weight));
                deepest.push(here);
            }
            let Some((function, most)) = self.with_most(&votes, &held) else { continue };
            let of_function = held.get(function).copied()?;
            let is_equal = |(votes, held): &(&u64, &u64)| **votes == most && **held == of_function;
            if least == more || votes.iter().zip(&held).filter(is_equal).count() == 1 {
                return Some((function, of_function));
            }
        }
        None
    }

    /// The function with the most weight; of several the one that holds less, as it is deeper, and then the first by name.
    fn with_most(&self, weights: &[u64], held: &[u64]) -> Option<(usize, u64)> {
        let weights = weights.iter().zip(held).enumerate().filter(|(_, (weight, _))| **weight > 0);
        let most = weights.max_by_key(|(number, (weight, held))| {
            (**weight, Reverse((**held, self.name(*number))))
        });
        most.map(|(number, (weight, _))| (number, *weight))
    }

    /// The own function that another one calls on the stack of a sample, with other code between them or not; of `None`, the
    /// outermost own function. The outer `None`: that function is not on the stack.
    pub(super) fn own_callee(
        &self,
        of: Option<usize>,
        sample: &SampledCall<'_>,
    ) -> Option<Option<usize>> {
        let mut callee = None;
        for function in self.path(sample.end) {
            if Some(function) == of {
                return Some(callee);
            }
            callee = Some(function).filter(|function| self.is_own(*function)).or(callee);
        }
        of.is_none().then_some(callee)
    }

    /// What the own functions hold that a function calls, those with the most first, and what none of them holds.
    pub(super) fn own_callees(
        &self,
        of: Option<usize>,
        samples: &[SampledCall<'_>],
    ) -> (Vec<(usize, u64)>, u64) {
        let mut weights: HashMap<Option<usize>, u64> = HashMap::new();
        for sample in samples {
            if let Some(callee) = self.own_callee(of, sample) {
                *weights.entry(callee).or_default() += sample.weight;
            }
        }
        let elsewhere = weights.remove(&None).unwrap_or_default();
        let weights = weights.into_iter().filter_map(|(callee, weight)| Some((callee?, weight)));
        let mut weights: Vec<_> = weights.collect();
        weights.sort_by(|(a, first), (b, second)| {
            second.cmp(first).then_with(|| self.name(*a).cmp(self.name(*b)))
        });
        (weights, elsewhere)
    }

    /// The file and line of a function with the most weight.
    pub(super) fn location_in(&self, function: usize, samples: &[SampledCall<'_>]) -> String {
        let mut lines: HashMap<u32, u64> = HashMap::new();
        for SampledCall { sample, weight, .. } in samples {
            let mut frames = self.profile.location_ids(sample.stack).flat_map(|id| {
                self.locations.get(id.number() as usize).into_iter().flatten().rev()
            });
            if let Some((_, line)) = frames.find(|(number, _)| *number == function) {
                *lines.entry(*line).or_default() += weight;
            }
        }
        let file = self.functions.get(function).map_or("", |function| function.file);
        let line = lines.into_iter().max_by_key(|(line, weight)| (*weight, u32::MAX - line));
        line.map_or_else(String::new, |(line, _)| place_of(file, line))
    }
}

fn add(sums: &mut [u64], number: usize, weight: u64) {
    if let Some(sum) = sums.get_mut(number) {
        *sum = sum.saturating_add(weight);
    }
}

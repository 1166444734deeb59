//! The parts of the collector's work that `benches/parts.rs` measures, on samples of the program itself. Compiled
//! only for that benchmark.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use crate::sampler::record::{Layout, Machine, Record, RecordPlace, Records, read_sample};
use crate::sampler::{OpenInterval, SpanInterval};
use crate::span::SpanKey;
use crate::symbols::{SymbolSettings, Symbolizer};
use crate::sys::{self, SampleRequest, SampleRing};
use crate::threads::owner;
use crate::unwind::{Module, ModuleAddress, Unwinder};

const STACK_BYTES: u32 = 8192;
const RING_BYTES: usize = 256 * 1024;
const MOST_FRAMES: usize = 256;
/// Samples per span interval.
const SAMPLES_PER_INTERVAL: usize = 4;

/// Samples as they were in the ring.
#[derive(Debug)]
pub struct Samples {
    bytes: Vec<u8>,
    places: Vec<RecordPlace>,
    layout: Layout,
}

impl Samples {
    /// Samples the calling thread until its ring is nearly full, while it runs `work` repeatedly. Returns `None`
    /// where perf events are refused.
    pub fn take(mut work: impl FnMut()) -> Option<Self> {
        let request = SampleRequest {
            period_ns: 200_000,
            stack_bytes: STACK_BYTES,
            ring_bytes: RING_BYTES,
            in_kernel: true,
            position_step: 0,
            signal: None,
            records_ahead_ns: 0,
        };
        let user_only = SampleRequest { in_kernel: false, ..request };
        let open = |request| sys::open_sample_ring(request, sys::current_tid());
        let ring = SampleRing::Perf(open(request).or_else(|_| open(user_only)).ok()?);
        ring.start().ok()?;
        let enough = RING_BYTES as u64 - 2 * Machine::NATIVE.sample_size(STACK_BYTES);
        while ring.head() < enough {
            work();
        }
        let mut bytes = vec![0; usize::try_from(ring.head()).ok()?];
        ring.copy(0, &mut bytes);
        let records = Records::between(bytes.as_slice(), 0, bytes.len() as u64).flatten();
        let places = records.filter_map(|record| match record {
            Record::Sample(place) => Some(place),
            _ => None,
        });
        let places = places.collect();
        let layout = Layout::of(&ring);
        Some(Self { bytes, places, layout })
    }

    /// The number of samples.
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// Parses the ring again and reads all samples except for their stacks.
    pub fn drain(&self) -> usize {
        let records = Records::between(self.bytes.as_slice(), 0, self.bytes.len() as u64).flatten();
        let samples = records.filter_map(|record| match record {
            Record::Sample(place) => read_sample(self.bytes.as_slice(), place, self.layout).ok(),
            _ => None,
        });
        samples.map(|sample| sample.kernel_chain.count() + 1).sum()
    }

    /// Attributes each sample to a span. Each span has [`SAMPLES_PER_INTERVAL`] samples.
    pub fn attribute(&self) -> usize {
        let intervals =
            self.places.chunks(SAMPLES_PER_INTERVAL).zip(1..).filter_map(|(places, key)| {
                let (first, last) = (places.first()?, places.last()?);
                let span = SpanKey::new(key)?;
                Some(SpanInterval { span, from: first.position, to: last.position + 1 })
            });
        let mut intervals: VecDeque<_> = intervals.collect();
        let from = self.bytes.len() as u64;
        let open = OpenInterval { span: None, from, is_in_hook: false };
        let owners = self.places.iter().map(|place| owner(&mut intervals, open, place.position));
        owners.flatten().count()
    }

    /// Unwinds all samples. Returns the number of frames.
    pub fn unwind(&self, unwinder: &mut Stacks) -> usize {
        self.places.iter().map(|place| self.frames(*place, unwinder).len()).sum()
    }

    fn frames<'a>(
        &self,
        place: RecordPlace,
        Stacks { unwinder, frames }: &'a mut Stacks,
    ) -> &'a [ModuleAddress] {
        if let Ok(sample) = read_sample(self.bytes.as_slice(), place, self.layout) {
            unwinder.unwind(
                sample.registers,
                |offset| sample.stack.word(offset),
                MOST_FRAMES,
                frames,
            );
        }
        frames
    }

    /// The distinct frames of all samples.
    pub fn frames_of_all(&self, stacks: &mut Stacks) -> Addresses {
        let mut seen = HashSet::new();
        for place in &self.places {
            seen.extend(self.frames(*place, stacks).iter().copied());
        }
        let modules = stacks.unwinder.modules();
        let frames = seen.into_iter().filter_map(|frame: ModuleAddress| {
            Some((Arc::clone(modules.get(frame.module()?)?), frame.address()))
        });
        Addresses(frames.collect())
    }
}

/// An unwinder.
#[derive(Debug)]
pub struct Stacks {
    unwinder: Unwinder,
    frames: Vec<ModuleAddress>,
}

impl Stacks {
    /// Reads the list of loaded modules; the cache is empty.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it reads the list of loaded modules")]
    pub fn new() -> Self {
        let mut unwinder = Unwinder::default();
        unwinder.refresh();
        Self { unwinder, frames: Vec::new() }
    }
}

/// Addresses with their modules.
#[derive(Debug)]
pub struct Addresses(Vec<(Arc<Module>, u64)>);

impl Addresses {
    /// The number of addresses.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// A symbolizer.
#[derive(Debug)]
pub struct NameLookup(Symbolizer);

impl NameLookup {
    /// Creates a symbolizer that has not read any file.
    #[must_use]
    #[allow(clippy::new_without_default, reason = "it reads files later")]
    pub fn new() -> Self {
        Self(Symbolizer::new(SymbolSettings { names: true, most_bytes: u64::MAX }))
    }

    /// Symbolizes all addresses. Returns how many have at least one function.
    pub fn find(&mut self, frames: &Addresses) -> usize {
        frames.0.iter().filter(|(module, address)| self.0.find(module, *address).is_some()).count()
    }
}

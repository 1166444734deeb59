//! The operations of a script, as generated and as played.

use std::fmt;

use proptest::prelude::*;

/// The rules that apply to a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// No rule matches it.
    Unmatched,
    /// Profiled but never kept: its threshold is an hour.
    Patient,
    Slow,
    /// Slow, with a lower threshold.
    Tight,
    Failing,
    /// Slow or failing. It also has a field that marks it as failed.
    Either,
}

const MS: u64 = 1_000_000;

impl Kind {
    pub(super) const ALL: [Self; 6] =
        [Self::Unmatched, Self::Patient, Self::Slow, Self::Tight, Self::Failing, Self::Either];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Unmatched => "unmatched",
            Self::Patient => "patient",
            Self::Slow => "slow",
            Self::Tight => "tight",
            Self::Failing => "failing",
            Self::Either => "either",
        }
    }

    pub(super) fn is_profiled(self) -> bool {
        self != Self::Unmatched
    }

    /// In nanoseconds.
    pub(super) fn threshold(self) -> Option<u64> {
        match self {
            Self::Unmatched | Self::Failing => None,
            Self::Patient => Some(3_600_000 * MS),
            Self::Slow => Some(100 * MS),
            Self::Tight => Some(10 * MS),
            Self::Either => Some(300 * MS),
        }
    }

    pub(super) fn is_kept_on_error(self) -> bool {
        matches!(self, Self::Failing | Self::Either)
    }

    pub(super) fn has_status(self) -> bool {
        self == Self::Either
    }
}

/// The parent given to a new span.
#[derive(Clone, Copy, Debug)]
pub(super) enum Under<S> {
    Current,
    Nothing,
    Span(S),
}

/// A generated operation. Numbers of threads and spans wrap around, so that each script can be played, also after
/// parts of it are removed. Impossible operations are skipped.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Open {
        thread: u8,
        kind: Kind,
        under: Under<u8>,
        enter: bool,
    },
    Enter {
        thread: u8,
        span: u8,
    },
    /// A whole span with samples that fails, as often inside a long span; then a round.
    Child {
        thread: u8,
        under: Under<u8>,
        samples: u8,
        flush: bool,
    },
    /// Leaves the span that is `up` levels above the innermost one.
    Exit {
        thread: u8,
        up: u8,
        and_drop: bool,
    },
    Panic {
        thread: u8,
    },
    Drop {
        thread: u8,
        span: u8,
    },
    Error {
        thread: u8,
        span: Option<u8>,
    },
    Status {
        thread: u8,
        span: u8,
    },
    Samples {
        thread: u8,
        count: u8,
        with_weight: bool,
    },
    Pass {
        ns: u64,
    },
    Off {
        thread: u8,
        ns: u64,
        preempted: bool,
    },
    /// A wait with a scan of the collector in the middle.
    Wait {
        thread: u8,
        before_ns: u64,
        after_ns: u64,
    },
    Round {
        flush: bool,
    },
    /// Threads outside spans are detached.
    Detach,
    EndThread {
        thread: u8,
    },
}

pub(super) const THREADS: usize = 3;

/// Times around all thresholds, and some that are not round.
fn time() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 1..50_000_u64,
        4 => prop::sample::select(&[MS, 7 * MS + 3][..]),
        3 => prop::sample::select(&[10 * MS, 40 * MS + 1, 100 * MS][..]),
        1 => prop::sample::select(&[300 * MS, 1_000 * MS, 2_000 * MS, 2_500 * MS][..]),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    // Uneven, so that there are deep trees.
    let thread = prop_oneof![5 => Just(0), 2 => Just(1), 1 => Just(2)];
    let span = 0..12_u8;
    let under = prop_oneof![
        6 => Just(Under::Current),
        1 => Just(Under::Nothing),
        2 => span.clone().prop_map(Under::Span),
    ];
    let kind = prop_oneof![
        1 => Just(Kind::Unmatched),
        2 => Just(Kind::Patient),
        2 => Just(Kind::Slow),
        2 => Just(Kind::Tight),
        3 => Just(Kind::Failing),
        2 => Just(Kind::Either),
    ];
    let up = prop_oneof![5 => Just(0), 1 => 0..4_u8];
    prop_oneof![
        8 => (thread.clone(), kind, under.clone(), prop::bool::weighted(0.8))
            .prop_map(|(thread, kind, under, enter)| Op::Open { thread, kind, under, enter }),
        3 => (thread.clone(), under.clone(), 0..3_u8, any::<bool>()).prop_map(
            |(thread, under, samples, flush)| Op::Child { thread, under, samples, flush },
        ),
        2 => (thread.clone(), span.clone()).prop_map(|(thread, span)| Op::Enter { thread, span }),
        6 => (thread.clone(), up, prop::bool::weighted(0.8))
            .prop_map(|(thread, up, and_drop)| Op::Exit { thread, up, and_drop }),
        1 => thread.clone().prop_map(|thread| Op::Panic { thread }),
        1 => (thread.clone(), span.clone()).prop_map(|(thread, span)| Op::Drop { thread, span }),
        3 => (thread.clone(), prop::option::weighted(0.3, span.clone()))
            .prop_map(|(thread, span)| Op::Error { thread, span }),
        1 => (thread.clone(), span).prop_map(|(thread, span)| Op::Status { thread, span }),
        8 => (thread.clone(), 1..4_u8, any::<bool>()).prop_map(|(thread, count, with_weight)| {
            Op::Samples { thread, count, with_weight }
        }),
        6 => time().prop_map(|ns| Op::Pass { ns }),
        2 => (thread.clone(), time(), any::<bool>())
            .prop_map(|(thread, ns, preempted)| Op::Off { thread, ns, preempted }),
        1 => (thread.clone(), time(), time()).prop_map(|(thread, before_ns, after_ns)| {
            Op::Wait { thread, before_ns, after_ns }
        }),
        5 => prop::bool::weighted(0.5).prop_map(|flush| Op::Round { flush }),
        1 => Just(Op::Detach),
        1 => thread.prop_map(|thread| Op::EndThread { thread }),
    ]
}

/// A script, and how it is played.
pub(super) fn script() -> impl Strategy<Value = (Vec<Op>, Ways)> {
    let ways = (prop::bool::weighted(0.75), prop::bool::weighted(0.5))
        .prop_map(|(has_switches, is_late)| Ways { has_switches, is_late });
    (prop::collection::vec(op(), 1..100), ways)
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Ways {
    /// The source records context switches.
    pub(super) has_switches: bool,
    /// The collector attaches threads that it finds in a span, and detaches them as soon as it finds them in none.
    /// Otherwise threads attach themselves and stay attached.
    pub(super) is_late: bool,
}

/// An operation as it is played. Spans are numbered in the order in which they are opened.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Open {
        thread: usize,
        span: usize,
        kind: Kind,
        under: Under<usize>,
    },
    Enter {
        thread: usize,
        span: usize,
    },
    /// Undoes the latest enter of the span on that thread.
    Exit {
        thread: usize,
        span: usize,
    },
    /// A panic leaves the innermost span.
    Panic {
        thread: usize,
    },
    /// The program drops its handle of the span.
    Drop {
        thread: usize,
        span: usize,
    },
    Error {
        thread: usize,
        span: Option<usize>,
    },
    Status {
        thread: usize,
        span: usize,
    },
    Sample {
        thread: usize,
        number: usize,
        weight_ns: Option<u64>,
    },
    Pass {
        ns: u64,
    },
    SwitchOut {
        thread: usize,
        preempted: bool,
    },
    SwitchIn {
        thread: usize,
    },
    Round {
        flush: bool,
        detach: bool,
    },
    EndThread {
        thread: usize,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Open { thread, span, kind, under } => {
                write!(f, "t{thread} opens s{span} ({})", kind.name())?;
                match under {
                    Under::Current => write!(f, " in its current span"),
                    Under::Nothing => write!(f, " as a root"),
                    Under::Span(parent) => write!(f, " under s{parent}"),
                }
            }
            Self::Enter { thread, span } => write!(f, "t{thread} enters s{span}"),
            Self::Exit { thread, span } => write!(f, "t{thread} leaves s{span}"),
            Self::Panic { thread } => write!(f, "t{thread} leaves the innermost span by a panic"),
            Self::Drop { thread, span } => write!(f, "t{thread} drops s{span}"),
            Self::Error { thread, span: None } => write!(f, "t{thread} has an error"),
            Self::Error { thread, span: Some(span) } => {
                write!(f, "t{thread} has an error in s{span}")
            }
            Self::Status { thread, span } => write!(f, "t{thread} records that s{span} failed"),
            Self::Sample { thread, number, weight_ns } => {
                write!(f, "sample {number} on t{thread}")?;
                weight_ns.map_or(Ok(()), |weight_ns| write!(f, " for {weight_ns} ns"))
            }
            Self::Pass { ns } => write!(f, "{ns} ns pass"),
            Self::SwitchOut { thread, preempted: true } => write!(f, "t{thread} is preempted"),
            Self::SwitchOut { thread, preempted: false } => write!(f, "t{thread} begins to wait"),
            Self::SwitchIn { thread } => write!(f, "t{thread} runs again"),
            Self::Round { flush: true, .. } => write!(f, "flush"),
            Self::Round { detach: true, .. } => write!(f, "a round that detaches"),
            Self::Round { .. } => write!(f, "a round"),
            Self::EndThread { thread } => {
                write!(f, "t{thread} ends, and a new thread becomes t{thread}")
            }
        }
    }
}

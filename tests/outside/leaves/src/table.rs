//! One row for each case.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::cases::Case;
use crate::probe::{Identity, Probe};
use crate::stack::Stack;
use crate::watch::Watch;

const LIMIT: Duration = Duration::from_secs(30);
/// A case that was ready at once is repeated.
const ATTEMPTS: usize = 3;

struct Poll {
    is_woken: bool,
    stacks: Vec<Stack>,
}

pub struct Row {
    pub leaf: &'static str,
    pub function: &'static str,
    same_waker: Vec<Poll>,
    new_waker: Vec<Poll>,
}

impl Row {
    pub async fn new(case: &Case) -> Self {
        Self {
            leaf: case.leaf,
            function: case.function,
            same_waker: polls(case, Identity::Same).await,
            new_waker: polls(case, Identity::New).await,
        }
    }

    /// Whether the last stack before each `Pending` shows the case's own function.
    pub fn is_hit(&self) -> bool {
        let is_hit = |polls: &[Poll]| (0..polls.len()).all(|poll| self.shows_function(polls, poll));
        is_hit(&self.same_waker) && is_hit(&self.new_waker)
    }

    pub fn text(&self) -> String {
        let (same, new) = (&self.same_waker, &self.new_waker);
        let cells = [
            self.leaf.to_owned(),
            self.cell(same, 0..1),
            self.cell(same, 1..same.len()),
            self.cell(new, 1..new.len()),
            self.seen(),
        ];
        format!("| {} |", cells.join(" | "))
    }

    fn shows_function(&self, polls: &[Poll], poll: usize) -> bool {
        held(polls, poll).is_some_and(|stack| stack.contains(self.function))
    }

    fn cell(&self, polls: &[Poll], range: std::ops::Range<usize>) -> String {
        let hits: BTreeSet<_> =
            range.clone().map(|poll| self.shows_function(polls, poll)).collect();
        let clones: BTreeSet<_> = range.map(|poll| polls[poll].stacks.len()).collect();
        let (Some(least), Some(most)) = (clones.first(), clones.last()) else {
            return "none".to_owned();
        };
        let hit = if hits.len() == 2 {
            "both"
        } else if hits.contains(&true) {
            "hit"
        } else {
            "miss"
        };
        if least == most {
            format!("{hit} ({least})")
        } else {
            format!("{hit} ({least} to {most})")
        }
    }

    /// In the order of the clones.
    fn seen(&self) -> String {
        let mut seen = Vec::new();
        for stack in self.new_waker.iter().flat_map(|poll| &poll.stacks) {
            let place = stack.place();
            if !seen.contains(&place) {
                seen.push(place);
            }
        }
        if seen.is_empty() { "no clone".to_owned() } else { seen.join("; ") }
    }

    /// What the last stack shows with the same waker in all polls, where nothing that is still awaited is there. A
    /// repeated poll with a new waker shows all that is.
    pub fn stale(&self) -> Vec<String> {
        let repeated = |polls: &[Poll]| -> Vec<usize> {
            (0..polls.len()).filter(|poll| !polls[*poll].is_woken).collect()
        };
        let pairs = repeated(&self.same_waker).into_iter().zip(repeated(&self.new_waker));
        let stale = pairs.filter_map(|(same, new)| {
            let held = held(&self.same_waker, same)?.place();
            let awaited: Vec<_> = self.new_waker[new].stacks.iter().map(Stack::place).collect();
            (!awaited.contains(&held)).then(|| format!("{held} instead of {}", awaited.join("; ")))
        });
        stale.collect()
    }
}

/// The last stack before the end of this poll.
fn held(polls: &[Poll], poll: usize) -> Option<&Stack> {
    polls[..=poll].iter().flat_map(|poll| &poll.stacks).next_back()
}

async fn polls(case: &Case, identity: Identity) -> Vec<Poll> {
    for _ in 0..ATTEMPTS {
        let probe = Probe::new(identity);
        let task = tokio::spawn((case.run)(Watch::Probe(probe.clone())));
        tokio::time::timeout(LIMIT, task).await.expect(case.function).expect(case.function);
        let polls: Vec<_> = probe
            .take()
            .into_iter()
            .map(|pending| Poll {
                is_woken: pending.is_woken,
                stacks: pending.stacks.into_iter().map(Stack::of_trace).collect(),
            })
            .collect();
        if !polls.is_empty() {
            return polls;
        }
    }
    panic!("{} was never pending", case.function);
}

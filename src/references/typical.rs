//! The profile of the mean reference span.

use crate::profile::{Attribute, Placed, Profile, ProfileId, Sample, Value, add_stacks};

/// The sum of the profiles of reference spans, by stack. Times, threads and spans are left out.
///
/// When it has twice as many spans as the least, all weights are halved, so that it follows what changes.
#[derive(Debug)]
pub(crate) struct TypicalProfile {
    sum: Profile,
    spans: u64,
}

/// How many spans it is of, at least, once there were as many.
const MIN_SPANS: u64 = 200;
/// If it takes more memory, what has least loses its stack.
const MAX_BYTES: usize = 128 * 1024;

impl Default for TypicalProfile {
    fn default() -> Self {
        Self { sum: Profile::new(ProfileId::NONE, 0), spans: 0 }
    }
}

impl TypicalProfile {
    /// Adds the profile of a span, whose functions have names.
    pub(super) fn add(&mut self, profile: &Profile) {
        add_stacks(&mut self.sum, profile, Placed::AtItsStack);
        self.spans += 1;
        if self.spans >= 2 * MIN_SPANS {
            self.sum = self.scaled(|weight| weight / 2);
            self.spans /= 2;
        }
        // Each time the half that has least.
        for _ in 0..16 {
            if self.sum.bytes() <= MAX_BYTES {
                break;
            }
            self.shrink();
        }
    }

    /// Adds the half of the samples that has least to one of its kind, without a stack.
    fn shrink(&mut self) {
        let mut weights: Vec<_> = self.sum.samples().iter().map(Sample::total).collect();
        weights.sort_unstable();
        let mut left = weights.len() / 2;
        let Some(least) = weights.get(left).copied() else { return };
        let mut small = |weight: u64| {
            let is_small = weight <= least && left > 0;
            left -= usize::from(is_small);
            is_small
        };
        let mut shrunk = Profile::new(ProfileId::NONE, 0);
        add_stacks(&mut shrunk, &self.sum, |weight| match small(weight) {
            true => Placed::WithOthers(weight),
            false => Placed::AtItsStack(weight),
        });
        self.sum = shrunk;
    }

    fn scaled(&self, scale: impl Fn(u64) -> u64) -> Profile {
        let mut scaled = Profile::new(ProfileId::NONE, 0);
        add_stacks(&mut scaled, &self.sum, |weight| Placed::AtItsStack(scale(weight)));
        scaled
    }

    /// What the mean span did.
    pub(crate) fn mean(&self, cohort: &str) -> Profile {
        let spans = self.spans.max(1);
        let mut mean = self.scaled(|weight| weight / spans);
        mean.name = cohort.to_owned();
        mean.title = format!("the typical {cohort}");
        mean
    }

    /// [`mean`](Self::mean) for one reader: with an id that no kept span has, as if it ended at `now_unix_ns`.
    pub(crate) fn requested(&self, cohort: &str, wall_ns: u64, now_unix_ns: u64) -> Profile {
        let mut profile = self.mean(cohort);
        profile.id = ProfileId::random().unwrap_or(ProfileId::NONE);
        profile.start_unix_ns = now_unix_ns.saturating_sub(wall_ns);
        profile.duration_ns = wall_ns;
        let attributes: [(_, Value); 3] = [
            ("typical.id", profile.id.to_string().into()),
            ("typical.route", cohort.into()),
            ("typical.references", self.spans.cast_signed().into()),
        ];
        let attributes = attributes.map(|(key, value)| Attribute { key, value });
        profile.attributes.extend(attributes);
        profile
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.sum.bytes()
    }
}

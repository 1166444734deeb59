//! What a profile lacks.

use crate::unwind::UnwindEnd;

macro_rules! losses {
    ($($(#[doc = $doc:literal])* $name:ident = $attribute:literal $words:literal,)+) => {
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub(crate) struct Losses {
            $($(#[doc = $doc])* pub(crate) $name: u64,)+
        }

        impl Losses {
            /// What there is of it: the attribute of profiles that has it, or an empty text, how much, and of what.
            pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, u64, &'static str)> {
                let all = [$(($attribute, self.$name, $words),)+];
                all.into_iter().filter(|(_, count, _)| *count > 0)
            }
        }

        impl std::ops::AddAssign for Losses {
            fn add_assign(&mut self, more: Self) {
                $(self.$name += more.$name;)+
            }
        }
    };
}

losses! {
    /// Samples whose stacks were dropped: only their CPU time is left.
    lost = "profile.samples_lost_memory" "stacks dropped for lack of memory",
    missing = "profile.samples_lost" "samples lost before they were read",
    ring_full = "profile.samples_lost_ring_full" "samples lost to a full ring in or before the span",
    downsampled = "profile.samples_downsampled" "samples downsampled",
    cut = "profile.stacks_truncated" "stacks cut short",
    incomplete = "profile.stacks_incomplete" "stacks not unwound to the end",
    /// Samples taken at a rate that the CPU budget had lowered.
    lowered = "profile.samples_at_lowered_rate" "samples at a lowered rate",
    /// Samples that came too late to represent all the time since the previous one.
    late = "profile.samples_lost_late" "samples that came too late",
    off_stack = "profile.stacks_on_other_stacks" "stacks whose callers are on another stack, as of coroutines",
    /// Samples of spans inside that were too many to tell apart: they are shown together in the span around them.
    folded = "" "samples of spans inside, which were too many to tell apart",
}

impl Losses {
    pub(crate) fn add_end(&mut self, end: UnwindEnd) {
        match end {
            UnwindEnd::Root => {}
            UnwindEnd::Cut => self.cut += 1,
            UnwindEnd::OtherStack => self.off_stack += 1,
            _ => self.incomplete += 1,
        }
    }
}

//! What a profile lacks, in words.

use crate::sinks::Losses;

pub(crate) const NOTHING_LOST: &str = "nothing lost";

pub(crate) fn losses_in_words(losses: &Losses) -> String {
    let words = list_of_losses(losses);
    if words.is_empty() { NOTHING_LOST.to_owned() } else { words.join(", ") }
}

pub(crate) fn list_of_losses(losses: &Losses) -> Vec<String> {
    let mut words = Vec::new();
    for (count, what) in [
        (losses.lost, "stacks dropped for lack of memory"),
        (losses.missing, "samples lost before they were read"),
        (losses.ring_full, "samples lost to a full ring in or before the span"),
        (losses.downsampled, "samples downsampled"),
        (losses.cut, "stacks cut short"),
        (losses.incomplete, "stacks not unwound to their end"),
        (losses.lowered, "samples at a lowered rate"),
        (losses.late, "samples that came too late"),
        (losses.off_stack, "stacks whose callers are on another stack, as of coroutines"),
        (losses.folded, "samples of spans inside, which were too many to tell apart"),
    ] {
        if count > 0 {
            words.push(format!("{count} {what}"));
        }
    }
    words
}

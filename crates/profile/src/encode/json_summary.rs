//! A profile in 2 KiB of JSON: for agents and scripts.

use super::brief::Brief;
use super::json::text_of;
use crate::profile::Profile;

/// Encodes the most important of a profile as a JSON object of at most 2,048 bytes: `name`, `reasons`, `time`, ids, the
/// `headline` that explains most of its time, `wall_ms` with its parts in `split_ms`, `functions` with the most of each
/// kind, how it differs from typical requests (`compared`), child spans (`children`), and what is `missing`. Where that is
/// too long, rows and the ends of long texts are left out.
pub fn json_summary(profile: &Profile) -> String {
    shortened(&Brief::of(profile))
}

pub(super) fn shortened(brief: &Brief<'_>) -> String {
    brief.within_limit(text_of).unwrap_or_else(|| "{}".to_owned())
}

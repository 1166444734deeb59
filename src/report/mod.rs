//! Texts about kept spans and their profiles, and about what the collector does.

mod format;
pub(crate) mod kept_event;
mod kept_fields;
mod losses;
mod profile;
mod starved;

pub(crate) use profile::*;

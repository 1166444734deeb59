//! Texts about kept spans and their profiles, and about what the collector does.

pub(crate) mod kept_event;
mod kept_fields;
mod profile;
pub(crate) mod source;
pub(crate) mod starved;

use crate::facts::format;

pub(crate) use profile::*;

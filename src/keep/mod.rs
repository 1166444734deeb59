//! Which spans are kept. Pure but for the callsite cache and the lock of the permits.

mod attribute;
mod bucket;
mod callsites;
mod keeper;
mod kept;
mod reasons;
mod rules;

pub(crate) use callsites::{Callsite, Callsites, STATUS_FIELD};
pub(crate) use keeper::{Epoch, Keeper};
pub(crate) use kept::OnKept;
pub use kept::{Kept, KeptSpan, NoProfile};
pub use reasons::{Reason, Reasons};
pub use rules::{Keep, Rule, Rules};

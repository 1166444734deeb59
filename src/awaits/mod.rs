//! Where futures wait: what a leaf future does when it clones the waker, inside the poll of a wrapper.
//!
//! A leaf that returns `Pending` first clones the waker, with everything that awaits it on the stack. The wrapper's waker
//! copies that stack. The copy stays with the future, and is sent to the collector only if the await was long and its
//! span is old.

mod future;
mod idle;
mod leaves;
mod observed;
mod place;
mod record;
mod room;
mod shared;

pub use future::{Profiled, ProfiledExt, queued};
pub(crate) use shared::{LayerAwaits, forget_all};

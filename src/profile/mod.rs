//! The profile in memory: tables and samples. Independent of formats, spans and threads.

mod attribute;
mod awaits;
mod branches;
mod builder;
mod call_tree;
mod code_origin;
mod compared;
mod downsampling;
mod dump;
mod hotspot;
mod leaf;
mod merge;
mod model;
mod names;
mod rebuild;
mod resource;
mod sample;
mod sample_list;
mod spans;
mod table;
mod waits;

pub use crate::ids::ProfileId;
pub use attribute::{Attribute, Value};
pub use awaits::Awaits;
#[cfg(feature = "firefox")]
pub(crate) use awaits::await_place;
pub(crate) use awaits::{SAMPLED_AWAIT_NS, own_name, unexplained_idle};
pub use builder::ProfileBuilder;
pub(crate) use code_origin::{CodeOrigin, LINKAGE, is_of_dependency};
pub(crate) use compared::{ComparedSummary, SlowerIn};
pub(crate) use downsampling::{Downsampling, Selection};
pub(crate) use dump::numbered;
pub use dump::{DumpedThread, ThreadActivity, ThreadDump};
pub use hotspot::{FunctionShare, Hotspot};
pub(crate) use hotspot::{Hotspots, OwnRow};
pub(crate) use leaf::LeafMark;
pub use leaf::{Leaf, LeafId, LockHolder};
pub(crate) use merge::{Placed, add_stacks, stack_weights};
pub(crate) use model::Compared;
pub use model::{
    FrameKind, Function, FunctionId, Line, Location, LocationId, Mapping, MappingId, Profile,
};
pub(crate) use names::{LONGEST_NAME, capped};
pub(crate) use rebuild::{SourceLine, Symbolized, Symbols};
pub use resource::Resource;
pub(crate) use sample::ProfileScope;
pub use sample::{Point, Sample, SampleKind, StackId};
pub use spans::{Link, LinkId, ProfiledThread, ThreadId};
pub(crate) use table::TableId;
pub use waits::{WaitSite, Waits};

/// Replaces the frames of a stack beyond what was copied of it.
pub(crate) const CALLERS_NOT_COPIED: &str = "[callers not copied]";
pub(crate) const CALLERS_WITHOUT_TABLES: &str = "[callers not found: no unwind tables]";

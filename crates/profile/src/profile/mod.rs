//! The profile in memory: tables and samples. Independent of formats, spans and threads.

mod attribute;
mod awaits;
mod branches;
mod builder;
mod call_tree;
mod code_origin;
mod compared;
#[doc(hidden)]
mod downsampling;
mod dump;
mod hotspot;
mod leaf;
#[doc(hidden)]
mod merge;
mod model;
mod rebuild;
mod resource;
mod sample;
mod sample_list;
mod spans;
mod table;
mod waits;

pub use crate::ids::ProfileId;
#[doc(hidden)]
pub use crate::text::{LONGEST_NAME, capped};
pub use attribute::{Attribute, Value};
pub(crate) use awaits::SAMPLED_AWAIT_NS;
pub use awaits::{Awaits, BEFORE_ERROR};
pub use builder::ProfileBuilder;
pub(crate) use code_origin::CodeOrigin;
pub use code_origin::{LINKAGE, is_of_dependency};
pub use compared::{ComparedSummary, SlowerIn};
pub use downsampling::{Downsampling, Selection};
pub use dump::{DumpedThread, ThreadActivity, ThreadDump};
pub(crate) use hotspot::OwnRow;
pub use hotspot::{BriefPart, FunctionShare, Hotspot, Hotspots};
pub use leaf::{Leaf, LeafId, LeafMark, LockHolder};
pub use merge::{Placed, add_stacks};
pub use model::{
    Compared, FrameKind, Function, FunctionId, Line, Location, LocationId, Mapping, MappingId,
    Profile,
};
pub use rebuild::{SourceLine, Symbolized, Symbols};
pub use resource::Resource;
pub use sample::{Point, ProfileScope, Sample, SampleKind, StackId};
pub use spans::{Link, LinkId, ProfiledThread, ThreadId};
pub(crate) use table::TableId;
pub use waits::{WaitSite, Waits};

/// Replaces the frames of a stack beyond what was copied of it.
pub const CALLERS_NOT_COPIED: &str = "[callers not copied]";
/// Replaces the frames of a stack that are not found because code has no unwind tables.
pub const CALLERS_WITHOUT_TABLES: &str = "[callers not found: no unwind tables]";

//! The profile as it is kept in memory: tables and samples. Knows no format, span or thread.

mod id;
mod model;
mod rename;
mod table;
mod waits;

pub use id::ProfileId;
pub(crate) use model::Symbols;
pub use model::{
    Attribute, FrameKind, Function, FunctionId, Line, Link, LinkId, Location, LocationId, Mapping,
    MappingId, Point, Profile, Sample, SampleKind, StackId, StringId, Value,
};
pub(crate) use rename::Names;
pub use waits::{Waiter, Waits};

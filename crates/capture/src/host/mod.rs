//! The machine, and the control groups of the process, by what the kernel writes in files. On other systems there are none.

mod cgroup;

pub use cgroup::{ControlGroup, ThrottlingUnknown, cpu_group_in, memory_left, memory_limit};

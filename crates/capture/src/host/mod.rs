//! The machine, and the control groups of the process, by what the kernel writes in files. On other systems there are none.

mod cgroup;
mod load;

pub use cgroup::{ControlGroup, ThrottlingUnknown, cpu_group_in, memory_left, memory_limit};
pub use load::{CpuUse, Load, load};

/// The number that follows a name in a line.
fn number_in(text: &str, name: &str) -> Option<u64> {
    let mut values =
        text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix([' ', ':']));
    values.next()?.split_ascii_whitespace().next()?.parse().ok()
}

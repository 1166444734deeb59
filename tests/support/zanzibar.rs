//! Functions whose names must not appear in any output.

use std::time::Duration;

#[inline(never)]
pub(crate) fn burn_zanzibar(cpu: Duration) {
    std::hint::black_box(crate::support::burn(cpu));
}

#[inline(never)]
pub(crate) fn sleep_zanzibar(time: Duration) {
    std::thread::sleep(time);
    std::hint::black_box(());
}

//! A call of the C library that calls back.
#![allow(unsafe_code, reason = "calls the C library")]

use std::ffi::{c_int, c_void};

/// Sorts in the C library, so that its functions are on the stack of each comparison. (musl has no unwind tables, and is
/// mostly a part of the program.)
pub(crate) fn sort_in_library(numbers: &mut [u64]) {
    if cfg!(target_env = "musl") {
        numbers.sort_unstable();
        return;
    }
    // SAFETY: that many numbers of that size, and a consistent comparison of two of them.
    unsafe {
        let base = numbers.as_mut_ptr().cast::<c_void>();
        libc::qsort(base, numbers.len(), size_of::<u64>(), Some(compare));
    }
}

unsafe extern "C" fn compare(one: *const c_void, other: *const c_void) -> c_int {
    // SAFETY: `qsort` compares two of the numbers.
    let (one, other) = unsafe { (*one.cast::<u64>(), *other.cast::<u64>()) };
    // Slow, so that most samples are here.
    let slowed = (0..50_u64).fold(one, |slowed, round| std::hint::black_box(slowed ^ round));
    std::hint::black_box(slowed);
    one.cmp(&other) as c_int
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_sorts() {
        let mut numbers: Vec<_> = (0..1_000_u64).map(|number| number * 7_919 % 1_009).collect();
        sort_in_library(&mut numbers);
        assert!(numbers.is_sorted());
    }
}

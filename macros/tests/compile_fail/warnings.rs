//! Warnings of `#[profiled]`.

#![deny(warnings)]

use tracing_profiling_macros::profiled;

/// In place of the crate that re-exports the macro.
mod stub {
    pub trait ProfiledExt: Sized {
        fn profiled(self) -> Self {
            self
        }
    }
    impl<T> ProfiledExt for T {}
}

struct Cart;

impl Cart {
    #[profiled(on_error, skip(self), crate = "crate::stub")]
    async fn pay(&self) -> std::io::Result<u64> {
        Ok(1)
    }
}

#[profiled(threshold = "5ms", on_error)]
fn refund() -> Result<(), String> {
    Err("no".to_owned())
}

#[profiled(on_error, err)]
fn checked() -> Result<(), String> {
    Ok(())
}

#[profiled(on_error)]
fn infallible() -> u64 {
    1
}

#[allow(deprecated)]
#[profiled(on_error)]
fn allowed() -> Result<(), String> {
    Ok(())
}

fn main() {
    drop((Cart.pay(), refund(), checked(), infallible(), allowed()));
}

//! Warnings of `#[profiled]`.

#![deny(warnings)]

use tracing_profiling_macros::profiled;

struct Cart;

impl Cart {
    #[profiled(on_error, skip(self))]
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

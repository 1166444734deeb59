//! Selects the allocator of `tests/hostile/main.rs`.

fn main() {
    println!("cargo::rustc-cfg=over_jemalloc");
    println!("cargo::rustc-check-cfg=cfg(over_jemalloc, tracing_profiling_unsupported)");
}

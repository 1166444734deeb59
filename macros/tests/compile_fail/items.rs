use tracing_profiling_macros::profiled;

#[profiled]
struct NoFunction;

#[profiled]
const fn constant() {}

trait Shop {
    #[profiled]
    fn checkout(&self);
}

fn main() {
    constant();
    _ = NoFunction;
}

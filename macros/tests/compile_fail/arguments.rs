use tracing_profiling_macros::profiled;

#[profiled(treshold = "50ms")]
fn misspelled() {}

#[profiled(threshold = 50)]
fn no_text() {}

#[profiled(threshold = "fast")]
fn no_duration() {}

#[profiled(threshold = "50ms", threshold = "60ms")]
fn twice() {}

#[profiled(off, on_error)]
fn never_and_sometimes() {}

#[profiled(on_error "name")]
fn no_comma() {}

#[profiled(50)]
fn nothing_known() {}

fn main() {
    misspelled();
    no_text();
    no_duration();
    twice();
    never_and_sometimes();
    no_comma();
    nothing_known();
}

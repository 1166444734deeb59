//! Code that is loaded and unloaded.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tracing::info_span;

use crate::host::Host;
use crate::support::burn;

/// Loads and unloads libraries and runs their code while it is sampled. With several libraries, one is often mapped
/// where another was before.
pub(crate) fn load_and_unload(_: &Host) {
    // A static program cannot load libraries.
    if cfg!(target_feature = "crt-static") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let libraries: Vec<_> = (1..=3).filter_map(|number| build(dir.path(), number)).collect();
    if libraries.is_empty() {
        println!("there is no C compiler: libm is used instead");
    }
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let libraries = &libraries;
            scope.spawn(move || {
                for round in 0..100 {
                    let _span = info_span!("loads").entered();
                    match libraries.get((thread + round) % libraries.len().max(1)) {
                        Some(path) => call_into(path),
                        None => call_into_libm(),
                    }
                    burn(Duration::from_micros(200));
                }
            });
        }
    });
}

fn call_into(path: &Path) {
    // SAFETY: the library was built below and has no initializers or finalizers.
    let library = unsafe { libloading::Library::new(path) }.unwrap();
    // SAFETY: the function has this signature, see below.
    let burn_there: libloading::Symbol<'_, unsafe extern "C" fn(u64, u64) -> u64> =
        unsafe { library.get(b"burn_in_the_library") }.unwrap();
    info_span!("in the library").in_scope(|| {
        for _ in 0..10 {
            // SAFETY: pure arithmetic.
            std::hint::black_box(unsafe { burn_there(20, 50_000) });
        }
    });
    library.close().unwrap();
}

fn call_into_libm() {
    // SAFETY: the program may have loaded libm already; loading it again does nothing.
    let library = unsafe { libloading::Library::new("libm.so.6") }.unwrap();
    // SAFETY: the function has this signature.
    let cos: libloading::Symbol<'_, unsafe extern "C" fn(f64) -> f64> =
        unsafe { library.get(b"cos") }.unwrap();
    for n in 0..50_000 {
        // SAFETY: pure arithmetic.
        std::hint::black_box(unsafe { cos(f64::from(n)) });
    }
    library.close().unwrap();
}

/// Builds a library. Each number gives code of a different size, so the unwind tables differ.
pub(crate) fn build(dir: &Path, number: usize) -> Option<PathBuf> {
    let source = dir.join(format!("guest{number}.c"));
    let padding = "    x += x >> 3;\n".repeat(number * 50);
    let code = format!(
        "static unsigned long padding(volatile unsigned long x) {{\n{padding}    return x;\n}}
         unsigned long burn_in_the_library(unsigned long depth, unsigned long rounds) {{
             volatile unsigned long x = rounds, frame[{number} * 8];
             frame[0] = x;
             if (depth) return burn_in_the_library(depth - 1, rounds) + frame[0];
             for (unsigned long i = 0; i < rounds; i++) x = (x ^ i) * 3 % 1000003;
             return padding(x);
         }}"
    );
    fs::write(&source, code).unwrap();
    let library = dir.join(format!("libguest{number}.so"));
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-fomit-frame-pointer", "-o"]).args([&library, &source]);
    let status = cc.status().ok()?;
    assert!(status.success());
    Some(library)
}

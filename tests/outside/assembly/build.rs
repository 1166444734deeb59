//! Compiles `src/no_tables.c` without unwind tables, once with frame pointers and once without.

fn main() {
    println!("cargo::rerun-if-changed=src/no_tables.c");
    for (suffix, flag) in [("framed", "-fno-omit-frame-pointer"), ("plain", "-fomit-frame-pointer")]
    {
        cc::Build::new()
            .file("src/no_tables.c")
            .define("NAME(name)", Some(&format!("name##_{suffix}")[..]))
            .flags(["-O2", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables", flag])
            .compile(&format!("no_tables_{suffix}"));
    }
}

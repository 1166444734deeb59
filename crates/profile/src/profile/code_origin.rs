//! Whose code a function is, and what it does for its callers, judging by its name, its file and where it is mapped.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use super::model::{Function, Mapping};
use super::sample::SampleKind;
use crate::facts::Facts;

/// Whose code a function is. Of a stack that waits, the innermost function with the least of these is what is of interest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum CodeOrigin {
    /// Rust code of the program itself.
    Own,
    /// Other code in the program: in another language, or without a name.
    #[default]
    Foreign,
    /// A crate that the program uses.
    Dependency,
    /// A crate that waits or polls on behalf of its callers.
    Runtime,
    /// `tracing` and this crate, which only call what they are around.
    Instrumentation,
    /// Rust's library, with its hash maps.
    Std,
    /// Through which Rust's library allocates.
    Allocator,
    /// This crate's wrappers of futures, wakers and allocators. They are left out of stacks.
    Wrapper,
    /// Code in another language in a shared library, or in no file.
    Library,
}

/// In place of a function: a part of the procedure linkage table, in which calls of other modules jump there.
pub const LINKAGE: &str = "[plt]";

/// What a crate is, if its name says that.
fn origin_of_crate(name: &str) -> Option<CodeOrigin> {
    const RUNTIMES: &str = "parking_lot parking_lot_core lock_api crossbeam crossbeam_channel \
        crossbeam_utils tokio mio rustix libc nix futures futures_util futures_core";
    match name {
        "std" | "core" | "alloc" | "hashbrown" => Some(CodeOrigin::Std),
        "tracing"
        | "tracing_profiling"
        | "tracing_profiling_capture"
        | "tracing_profiling_otlp"
        | "tracing_profiling_profile" => Some(CodeOrigin::Instrumentation),
        _ => RUNTIMES.split(' ').any(|of| of == name).then_some(CodeOrigin::Runtime),
    }
}

/// The program's own crates, as far as a profile shows them, and the directories of those of their packages that look like
/// directories of dependencies: that of a release has a version, too, and so has that of `cargo install`.
#[derive(Debug)]
pub(super) struct OwnCode {
    crates: BTreeSet<String>,
    packages: BTreeSet<String>,
}

impl OwnCode {
    /// Own crates are that of `main`, those of the kept spans, and that of which the program has the name.
    pub(super) fn of<'a>(
        functions: impl Iterator<Item = &'a Function> + Clone,
        spans: &[Facts],
        program: Option<&Mapping>,
    ) -> Self {
        let mains = functions.clone().filter_map(|function| function.name.strip_suffix("::main"));
        let spans = || spans.iter().filter(|span| !span.own_file.is_empty());
        let targets = spans().filter_map(|span| span.target.split("::").next());
        let program = program.map(|mapping| crate_named_by(&mapping.file));
        let crates = mains.chain(targets).map(|name| name.replace('-', "_")).chain(program);
        let is_own = |name: &String| is_name(name) && origin_of_crate(name).is_none();
        let crates: BTreeSet<_> = crates.filter(is_own).collect();
        let mut packages = BTreeSet::new();
        for Function { name, file, .. } in functions {
            let of = crate_of(name).filter(|of| crates.contains(*of) && !name.contains(" as "));
            let Some((of, package)) = of.zip(package_of(file)) else { continue };
            // Code of a macro has the file of the crate that defines it.
            let is_of_span =
                || spans().any(|span| file.strip_suffix(span.own_file).is_some_and(ends_directory));
            if is_of_dependency(file) && (crate_named_by(package) == of || is_of_span()) {
                packages.insert(package.to_owned());
            }
        }
        Self { crates, packages }
    }

    /// Of a program of which nothing is known.
    #[cfg(test)]
    pub(super) fn for_test() -> Self {
        Self::of(std::iter::empty(), &[], None)
    }

    /// Whose code a function is. `in_library`: it is mapped from a shared library, or from no file.
    pub(super) fn origin(&self, function: &Function, in_library: bool) -> CodeOrigin {
        const ALLOCATES: &str =
            "__rust_alloc __rust_dealloc __rust_realloc __rust_no_alloc __rg_ __rdl_";
        let Function { name, file, .. } = function;
        if is_wrapper(function) {
            return CodeOrigin::Wrapper;
        }
        if ALLOCATES.split(' ').any(|part| name.contains(part)) {
            return CodeOrigin::Allocator;
        }
        // The directory may be one of the program's workspace, and inlined functions have no path.
        if SOURCES.iter().any(|sources| is_of_this_crate(sources, file)) {
            return CodeOrigin::Instrumentation;
        }
        let by_name = crate_of_code(name);
        let other = if in_library { CodeOrigin::Library } else { CodeOrigin::Foreign };
        if is_of_std(file) {
            return CodeOrigin::Std;
        }
        // The program's own packages may look like those of dependencies.
        let has_own_package = || package_of(file).is_some_and(|of| self.packages.contains(of));
        if !file.is_empty() && is_of_dependency(file) && !has_own_package() {
            // A macro's code has the name of a function that uses it.
            let of = crate_of_file(file).or_else(|| by_name.map(str::to_owned));
            return of.and_then(|of| origin_of_crate(&of)).unwrap_or(CodeOrigin::Dependency);
        }
        let Some(of) = by_name else {
            return match file.ends_with(".rs") {
                true => CodeOrigin::Own,
                // In Rust, it only calls that of the program.
                false if name == "main" && file.is_empty() && !in_library => CodeOrigin::Std,
                false => other,
            };
        };
        if self.crates.contains(of) {
            return CodeOrigin::Own;
        }
        let is_own = !file.is_empty() || self.crates.is_empty();
        let unknown = if is_own { CodeOrigin::Own } else { CodeOrigin::Dependency };
        origin_of_crate(of).unwrap_or(unknown)
    }
}

/// Whether a function is of the layer's wrappers: of futures, of wakers, and the allocator.
fn is_wrapper(Function { name, file, .. }: &Function) -> bool {
    const MODULES: [(&str, &[&str]); 2] = [
        ("tracing_profiling::", &["awaits/"]),
        ("tracing_profiling_capture::", &["sys/task_waker", "sys/allocator", "sys/live_blocks"]),
    ];
    let mut of_files = MODULES.iter().zip(&*SOURCES);
    let is_in = |modules: &[&str], path: &str| modules.iter().any(|of| path.starts_with(of));
    let is_in_file = of_files.any(|((_, modules), sources)| {
        path_below(sources, file).is_some_and(|path| is_in(modules, path))
    });
    // Inlined functions have no path, and a trait of the program can have methods for wrappers.
    if crate_of(name).is_none() || !file.is_empty() && !is_in_file {
        return is_in_file;
    }
    let name = without_sigils(name);
    MODULES.iter().any(|(of_crate, modules)| {
        let path = name.strip_prefix(of_crate);
        path.is_some_and(|path| is_in(modules, &path.replace("::", "/")))
    })
}

/// The directories of the sources of the layer, of capture, and of this crate when they were built.
static SOURCES: LazyLock<[String; 3]> =
    LazyLock::new(|| sources(file!().strip_suffix("profile/code_origin.rs").unwrap_or_default()));

/// The directories of the other crates beside that of this one: in one workspace or, of releases, under one name.
fn sources(own: &str) -> [String; 3] {
    let [layer, capture] = match own.strip_suffix("crates/profile/src/") {
        Some(workspace) => ["", "crates/capture/"].map(|of| format!("{workspace}{of}src/")),
        None => ["-", "-capture-"].map(|of| {
            own.replacen("/tracing-profiling-profile-", &format!("/tracing-profiling{of}"), 1)
        }),
    };
    [layer, capture, own.to_owned()]
}

/// Whether a source file is in one of these, as far as its directory has a name.
fn is_of_this_crate(sources: &str, file: &str) -> bool {
    !matches!(sources, "src/" | "crates/capture/src/" | "crates/profile/src/")
        && path_below(sources, file).is_some()
}

/// The part of a path below a directory of sources, wherever that was when it was built.
fn path_below<'a>(sources: &str, file: &'a str) -> Option<&'a str> {
    let (before, path) = file.rsplit_once(sources)?;
    ends_directory(before).then_some(path)
}

/// Whether a function helps another one to do what a sample is of, and is left out where no other is further inside: it clones
/// the waker on behalf of a leaf future, or allocates on behalf of the code that calls it.
pub(super) fn is_helper(kind: SampleKind, origin: CodeOrigin, name: &str) -> bool {
    const PARTS: [&str; 4] = ["into_waker", "atomic_waker", "AtomicWaker", "WakerRef"];
    match kind {
        SampleKind::OnCpu | SampleKind::OffCpu => false,
        SampleKind::Await | SampleKind::Delay => {
            let is_of_std = matches!(origin, CodeOrigin::Std | CodeOrigin::Allocator);
            let is_poll = name.starts_with("poll") || name.ends_with("Future>::poll");
            !is_poll && (is_of_std || PARTS.iter().any(|part| name.contains(part)))
        }
        _ => matches!(origin, CodeOrigin::Std | CodeOrigin::Allocator | CodeOrigin::Wrapper),
    }
}

/// Whether a function limits the time of a future.
pub(super) fn limits_time(Function { name, file, .. }: &Function) -> bool {
    let has = |text: &str, parts: [&str; 2]| parts.iter().any(|part| text.contains(part));
    has(name, ["::timeout::", "Timeout<"]) || has(file, ["/timeout.rs", "/timeout/"])
}

/// The whole name of an async function or block that is inlined into its caller. Line tables have only the last part of
/// an inlined function's name, but its caller has the path of its future: `poll<shop::fetch::{async_fn_env#0}>`.
pub(super) fn whole_name(inlined: &str, caller: &str) -> Option<String> {
    let is_async = inlined.starts_with("{async_fn#") || inlined.starts_with("{async_block#");
    let last = inlined.split('<').next().filter(|_| is_async)?;
    let future = format!("::{}", last.replace('#', "_env#"));
    let mut parts = caller.split(&future);
    let (before, None) = (parts.next().zip(parts.next())?.0, parts.next()) else { return None };
    let path = before.rsplit(|c: char| !(c.is_alphanumeric() || "_:{}#".contains(c))).next()?;
    (!path.is_empty()).then(|| format!("{path}::{inlined}"))
}

fn without_sigils(name: &str) -> &str {
    let name = name.trim_start_matches(['<', '&', '(', '[', '*']);
    name.strip_prefix("mut ").or_else(|| name.strip_prefix("dyn ")).unwrap_or(name)
}

/// The crate in a Rust function's path; for `<A as B>::f`, that of `A`.
pub(super) fn crate_of(name: &str) -> Option<&str> {
    let (first, _) = without_sigils(name).split_once("::")?;
    is_name(first).then_some(first)
}

/// The crate that a function is written in by its name: programs implement their own traits for types of Rust's library.
fn crate_of_code(name: &str) -> Option<&str> {
    let of_trait = name.strip_prefix('<').and_then(|rest| {
        let is_outermost = |(at, _): &(usize, &str)| {
            let before = rest.get(..*at).unwrap_or_default();
            before.matches('<').count() <= before.matches('>').count()
        };
        let (at, separator) = rest.match_indices(" as ").find(is_outermost)?;
        crate_of(rest.get(at + separator.len()..)?)
    });
    match (crate_of(name), of_trait) {
        (Some(of), Some(of_trait)) if origin_of_crate(of) == Some(CodeOrigin::Std) => {
            Some(of_trait)
        }
        (of, of_trait) => of.or(of_trait),
    }
}

/// The crate of a dependency's source file: that of `tokio-1.50.0/src/time/sleep.rs` is `tokio`.
pub(super) fn crate_of_file(file: &str) -> Option<String> {
    file.rsplit_once("/src/").map(|(package, _)| crate_named_by(package))
}

/// The crate that the directory of a package or the file of a program has its name of, without a version or a test's hash.
fn crate_named_by(path: &str) -> String {
    let name = path.rsplit('/').next().unwrap_or_default();
    // Bazel puts the name of the repository before it.
    let name = name.rsplit("__").next().unwrap_or_default();
    let begins_version =
        |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit()) || is_hash(rest);
    let mut ends = name.match_indices('-').map(|(at, _)| at);
    let end = ends.find(|at| name.get(at + 1..).is_some_and(begins_version));
    name.get(..end.unwrap_or(name.len())).unwrap_or_default().replace('-', "_")
}

fn ends_directory(path: &str) -> bool {
    path.is_empty() || path.ends_with('/')
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

/// The directory of a source file's package: that above its sources.
fn package_of(file: &str) -> Option<&str> {
    let of = |directory: &str| file.rfind(directory);
    let at = of("/src/").or_else(|| of("/examples/")).or_else(|| of("/tests/"));
    let at = at.or_else(|| of("/benches/")).or_else(|| of("/"))?;
    file.get(..at).filter(|package| !package.is_empty())
}

/// Whether a text is a hash of cargo's builds or checkouts, or a commit's short one, as Nix and crate2nix name those.
fn is_hash(text: &str) -> bool {
    matches!(text.len(), 7 | 16) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a source file is of Rust's library, or of its hash maps.
fn is_of_std(file: &str) -> bool {
    let is_of_rust =
        ["/rustc/", "/rustc-", "/rustlib/src/rust/"].iter().any(|dir| file.contains(dir));
    (is_of_rust && file.contains("/library/")) || file.contains("hashbrown-")
}

/// Whether a source file seems to belong to a dependency. The path is complete, or shortened to begin at the package.
pub fn is_of_dependency(file: &str) -> bool {
    // Of the toolchain, and where cargo, `cargo vendor`, buck2 and Bazel put sources.
    const DIRS: &str =
        "rustc/ registry/src/ git/checkouts/ vendor/ third-party/ third_party/ external/";
    let is_in = |dir: &str| {
        let mut at = file.match_indices(dir).filter_map(|(at, _)| file.split_at_checked(at));
        // Directly below sources it is a module.
        at.any(|(before, rest)| {
            ends_directory(before) && (!before.ends_with("src/") || rest.contains("/src/"))
        })
    };
    if DIRS.split(' ').any(is_in) {
        return true;
    }
    let package = package_of(file).unwrap_or(file);
    let first = file.split('/').next().unwrap_or_default();
    let is_version = |end: &str| end.contains('.') && end.starts_with(|c: char| c.is_ascii_digit());
    let has_version = |part: &str| {
        part.match_indices('-').filter_map(|(at, _)| part.get(at + 1..)).any(is_version)
    };
    if has_version(first) || has_version(package.rsplit('/').next().unwrap_or_default()) {
        return true;
    }
    // A checkout. The output of a build script of the program is in the directory `out` below such a part.
    let is_checkout = |part: &str| part.rsplit_once('-').is_some_and(|(_, end)| is_hash(end));
    let next = file.split('/').skip(1);
    file.split('/').zip(next).any(|(part, next)| is_checkout(part) && next != "out")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_dependencies_are_recognized_by_short_paths() {
        for (file, expected) in [
            ("tokio-1.50.0/src/lib.rs", true),
            ("rand-0.9.0-rc.1/src/lib.rs", true),
            ("tokio-0123456789abcdef/abc1234/tokio/src/lib.rs", true),
            ("/build/tokio-39cfaa0/tokio/src/lib.rs", true),
            ("/tokio-39cfaa0/src/lib.rs", true),
            ("/build/source/src/lib.rs", false),
            ("/build/shop-backend/src/lib.rs", false),
            ("/shop/target/release/build/shop-0123456789abcdef/out/rules.rs", false),
            ("/rustc/library/std/src/io/mod.rs", true),
            ("vendor/tokio/src/lib.rs", true),
            ("/build/tokio-1.50.0/src/lib.rs", true),
            ("external/crates__tokio-1.50.0/src/lib.rs", true),
            ("external/crates__tokio/src/lib.rs", true),
            ("/proc/self/cwd/external/crates__tokio/src/lib.rs", true),
            ("./external/rules_rust++crate+crates__tokio/src/lib.rs", true),
            (
                "/root/.cache/bazel/_bazel_root/1/execroot/shop/external/crates__tokio/src/lib.rs",
                true,
            ),
            ("/root/.cache/bazel/_bazel_root/1/execroot/shop/src/external/tax.rs", false),
            ("third-party/rust/tokio/src/lib.rs", true),
            ("/src/chromium/third_party/rust/tokio/v1/crate/src/lib.rs", true),
            ("registry/src/index.crates.io-1/tokio-1.50.0/src/lib.rs", true),
            ("/src/vendor/tokio/src/lib.rs", true),
            ("/rust/deps/hashbrown-0.15.2/src/map.rs", true),
            ("shop/src/external/tax.rs", false),
            ("shop/src/vendor/mod.rs", false),
            ("shop-0123456789abcdef/out/rules.rs", false),
            ("shop/src/main.rs", false),
            ("shop-2/src/main.rs", false),
            ("src/main.rs", false),
            ("", false),
        ] {
            assert_eq!(is_of_dependency(file), expected, "{file}");
        }
    }

    #[test]
    fn the_sources_of_the_layer_are_beside_those_of_this_crate() {
        for [layer, capture, own] in [
            ["src/", "crates/capture/src/", "crates/profile/src/"],
            ["a/src/", "a/crates/capture/src/", "a/crates/profile/src/"],
            [
                "/r/tracing-profiling-0.1.0/src/",
                "/r/tracing-profiling-capture-0.1.0/src/",
                "/r/tracing-profiling-profile-0.1.0/src/",
            ],
        ] {
            assert_eq!(sources(own), [layer, capture, own]);
        }
    }

    #[test]
    fn this_crate_is_not_the_program_also_in_its_workspace() {
        for (sources, file, expected) in [
            ("/home/me/tracing-profiling/src/", "/home/me/tracing-profiling/src/layer.rs", true),
            (
                "libs/tracing-profiling/src/",
                "/home/me/shop/libs/tracing-profiling/src/span/mod.rs",
                true,
            ),
            ("/home/me/tracing-profiling/src/", "/home/me/shop/src/layer.rs", false),
            // Of any crate.
            ("src/", "/home/me/shop/src/layer.rs", false),
            ("crates/profile/src/", "/home/me/shop/crates/profile/src/lib.rs", false),
        ] {
            assert_eq!(is_of_this_crate(sources, file), expected, "{sources} {file}");
        }
    }

    #[test]
    fn packages_and_programs_have_the_name_of_their_crate() {
        for (path, expected) in [
            ("shop-2.0.1", "shop"),
            ("/build/shop-server-2.0.1", "shop_server"),
            ("vendor/shop", "shop"),
            ("shop-tools-2.0.1", "shop_tools"),
            ("external/rules_rust++crate+crates__tokio-1.50.0", "tokio"),
            ("/opt/shop-server", "shop_server"),
            ("shop-0123456789abcdef", "shop"),
            ("shop-fedcba9876543210", "shop"),
            ("[vdso]", "[vdso]"),
            ("", ""),
        ] {
            assert_eq!(crate_named_by(path), expected, "{path}");
        }
    }

    #[test]
    fn what_allocates_for_others_is_no_code_of_the_program() {
        let std = "/rustc/5980/library/alloc/src/vec/mod.rs";
        for (name, file) in [
            ("alloc::vec::Vec<T,A>::push", std),
            ("clone_subtree", std),
            (
                "<T as core::convert::From<U>>::from",
                "/home/a/lib/rustlib/src/rust/library/core/x.rs",
            ),
            ("insert", "/home/a/.cargo/registry/src/x/hashbrown-0.15.2/src/map.rs"),
            ("{closure#0}", "/srv/tracing-profiling/crates/capture/src/sys/allocator.rs"),
            ("remove", "/srv/tracing-profiling/crates/capture/src/sys/live_blocks.rs"),
            ("tracing_profiling_capture::sys::allocator::note_allocated", ""),
            ("shop::_::__rust_alloc", "shop/src/main.rs"),
            ("alloc::vec::Vec<shop::Item>::push", ""),
            ("<alloc::vec::Vec<<shop::A as shop::B>::C> as core::clone::Clone>::clone", ""),
        ] {
            let function = Function { file: file.to_owned(), ..Function::named(name) };
            let origin = OwnCode::for_test().origin(&function, false);
            assert!(is_helper(SampleKind::Allocations, origin, name), "{name} {file}");
        }
        for (name, file) in [
            ("<alloc::vec::Vec<u32> as shop::Encode>::encode", "shop/src/encode.rs"),
            ("<alloc::vec::Vec<u32> as shop::Encode>::encode", ""),
            ("<alloc::vec::Vec<<shop::A as core::ops::Add>::Output> as shop::Encode>::encode", ""),
            ("<shop::Item as core::clone::Clone>::clone", ""),
            ("<shop::Item as core::clone::Clone>::clone", "shop/src/item.rs"),
            ("shop::sys::allocator::new_arena", "shop/src/sys/allocator.rs"),
            ("shop::library::alloc", "shop/library/alloc/src/lib.rs"),
        ] {
            let function = Function { file: file.to_owned(), ..Function::named(name) };
            let origin = OwnCode::for_test().origin(&function, false);
            assert!(!is_helper(SampleKind::Allocations, origin, name), "{name} {file}");
        }
    }

    #[test]
    fn crates_are_read_from_paths() {
        for (name, expected) in [
            ("shop::f", Some("shop")),
            ("<std::net::TcpStream as std::io::Read>::read", Some("std")),
            ("<&mut shop::X as core::fmt::Write>::f", Some("shop")),
            ("nanosleep", None),
        ] {
            assert_eq!(crate_of(name), expected, "{name}");
        }
    }

    /// As line tables of an optimized build show them.
    #[test]
    fn inlined_async_functions_are_named_by_their_caller() {
        for (name, caller, expected) in [
            (
                "{async_fn#0}",
                "poll<shop::upstream::fetch::{async_fn_env#0}>",
                Some("shop::upstream::fetch::{async_fn#0}"),
            ),
            (
                "{async_block#0}",
                "poll<shop::cart::{async_fn#0}::{async_block_env#0}>",
                Some("shop::cart::{async_fn#0}::{async_block#0}"),
            ),
            (
                "{async_fn#1}<u8>",
                "call<(), shop::{impl#0}::total::{async_fn_env#1}<u8>>",
                Some("shop::{impl#0}::total::{async_fn#1}<u8>"),
            ),
            // Polled through a pointer.
            ("{async_fn#0}", "poll<alloc::boxed::Box<(dyn Future)>>", None),
            ("{async_fn#0}", "poll<shop::other::{async_fn_env#1}>", None),
            // One of two.
            ("{async_fn#0}", "poll<shop::a::{async_fn_env#0}, shop::b::{async_fn_env#0}>", None),
            ("{closure#0}", "call<shop::a::{closure_env#0}>", None),
            ("shop::fetch::{{closure}}", "poll", None),
        ] {
            assert_eq!(whole_name(name, caller).as_deref(), expected, "{name} {caller}");
        }
    }

    /// As in a profile of a program, of which other crates are known by their names alone.
    #[test]
    fn functions_belong_to_the_program_or_to_what_it_uses() {
        use CodeOrigin::{
            Allocator, Dependency, Foreign, Instrumentation, Library, Own, Runtime, Std, Wrapper,
        };
        let main = Function::named("shop::main");
        let own = OwnCode::of([&main].into_iter(), &[], None);
        let registry = "/root/.cargo/registry/src/index.crates.io-1";
        for (name, file, expected) in [
            ("shop::cart::total", "", Own),
            ("total", "shop/src/cart.rs", Own),
            ("<alloc::vec::Vec<u32> as shop::Encode>::encode", "shop/src/encode.rs", Own),
            ("<alloc::vec::Vec<u32> as shop::Encode>::encode", "", Own),
            ("shop_db::query", "shop/db/src/lib.rs", Own),
            ("poll<tracing_profiling::awaits::future::Profiled<F>>", "shop/src/main.rs", Own),
            ("sqlite3VdbeExec", "", Foreign),
            ("load", "table.c", Foreign),
            ("sqlx_core::pool::Pool<DB>::acquire", "", Dependency),
            ("acquire", "sqlx-core-0.8.6/src/pool/mod.rs", Dependency),
            ("sqlite3VdbeExec", &format!("{registry}/libsqlite3-sys-0.30.1/sqlite3.c"), Dependency),
            ("shop::serve::{{closure}}", "tokio-1.50.0/src/macros/select.rs", Runtime),
            ("tokio::task::spawn", "", Runtime),
            ("tokio::task::spawn", "/home/me/tokio/tokio/src/task.rs", Runtime),
            (
                "<tracing::instrument::Instrumented<T> as core::future::Future>::poll",
                "",
                Instrumentation,
            ),
            ("tracing_profiling::layer::on_enter", "", Instrumentation),
            ("<F as core::future::future::Future>::poll", "", Std),
            ("poll<shop::fetch::{async_fn_env#0}>", "/rustc/library/core/src/future/mod.rs", Std),
            ("sleep", "/usr/src/rustc-1.88.0/library/std/src/thread/mod.rs", Std),
            ("main", "", Std),
            ("__rustc::__rust_alloc", "", Allocator),
            (
                "<tracing_profiling::awaits::future::Profiled<F> as core::future::future::Future>::poll",
                "",
                Wrapper,
            ),
            ("poll<shop::fetch::{async_fn_env#0}>", &in_sources(0, "awaits/future.rs"), Wrapper),
            ("{closure#0}<u8>", &in_sources(1, "sys/task_waker.rs"), Wrapper),
            ("note_allocated", &in_sources(1, "sys/allocator.rs"), Wrapper),
        ] {
            let function = Function { file: file.to_owned(), ..Function::named(name) };
            assert_eq!(own.origin(&function, false), expected, "{name} {file}");
        }
        let name = "<tracing_profiling::awaits::future::Profiled<F> as shop::Retry>::retry";
        let of_program = Function { file: "shop/src/retry.rs".to_owned(), ..Function::named(name) };
        assert_ne!(own.origin(&of_program, false), Wrapper);
        for (name, file, expected) in [
            ("__nanosleep", "./time/nanosleep.c", Library),
            ("main", "", Library),
            ("plugin::run", "plugin/src/lib.rs", Own),
        ] {
            let function = Function { file: file.to_owned(), ..Function::named(name) };
            assert_eq!(own.origin(&function, true), expected, "{name} {file}");
        }
    }

    fn in_sources(number: usize, path: &str) -> String {
        format!("/anywhere/{}{path}", SOURCES[number].trim_start_matches('/'))
    }
}

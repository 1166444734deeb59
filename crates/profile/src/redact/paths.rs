//! Removes parts of paths that describe the machine on which they were made.

use std::borrow::Cow;

/// Source directories of a package.
const SOURCES: [&str; 4] = ["src", "tests", "examples", "benches"];

/// Shortens the path of a source file, like cargo's `trim-paths`. It begins at the package: `tokio-1.50.0/src/lib.rs`
/// wherever the registry is, `/rustc/library/std/src/io/mod.rs` wherever the toolchain is, `shop/src/main.rs` with the
/// package's directory but none above it. Of other files, the name and its directory remain.
///
/// Relative paths are unchanged, unless they contain `..`. Of paths of Windows, on which programs for Linux are built, too,
/// only the name of the file remains.
pub(super) fn short_source(path: &str) -> Cow<'_, str> {
    if path.contains('\\') || path.get(1..3) == Some(":/") {
        return Cow::Borrowed(path.rsplit(['/', '\\']).next().unwrap_or_default());
    }
    let is_absolute = path.starts_with('/');
    if !is_absolute && !path.split('/').any(|part| part == "..") {
        return Cow::Borrowed(path);
    }
    let parts = &*normal(path);
    let is_in_sources = || parts.iter().any(|part| SOURCES.contains(part));
    Cow::Owned(match of_toolchain(parts) {
        Some(rest) => format!("/rustc/{}", rest.join("/")),
        // It may lead into a home directory.
        None if !is_absolute && !is_in_sources() => {
            parts.last().copied().unwrap_or_default().into()
        }
        None => from_package(parts).join("/"),
    })
}

/// Shortens the path of a mapped file. Files of the system keep their path; of others, only the name remains.
pub(super) fn short_code(path: &str) -> Cow<'_, str> {
    // Not all of `/usr`: container images build programs in `/usr/src`.
    const OF_SYSTEM: &str = "/usr/lib/ /usr/lib64/ /usr/libexec/ /usr/bin/ /usr/sbin/ /usr/local/lib/ /usr/local/bin/ \
        /lib/ /lib64/ /bin/ /sbin/ /nix/store/";
    let is_of_system = OF_SYSTEM.split(' ').any(|system| path.starts_with(system));
    match path.rsplit_once('/') {
        Some((_, name)) if path.starts_with('/') && !is_of_system => Cow::Borrowed(name),
        _ => Cow::Borrowed(path),
    }
}

/// Resolves empty parts, `.` and `..`.
fn normal(path: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => _ = parts.pop(),
            part => parts.push(part),
        }
    }
    parts
}

/// The part below the toolchain's directory.
fn of_toolchain<'a, 'b>(parts: &'b [&'a str]) -> Option<&'b [&'a str]> {
    match parts {
        ["rustc", "library" | "compiler" | "vendor", ..] => parts.get(1..),
        // A commit or a version.
        ["rustc", _, _, ..] => parts.get(2..),
        _ => after(parts, &["rustlib", "src", "rust"]),
    }
}

/// The part after the last occurrence of these directories.
fn after<'a, 'b>(parts: &'b [&'a str], dirs: &[&str]) -> Option<&'b [&'a str]> {
    let at = parts.windows(dirs.len()).rposition(|window| window == dirs)?;
    parts.get(at + dirs.len()..).filter(|rest| !rest.is_empty())
}

fn from_package<'a, 'b>(parts: &'b [&'a str]) -> &'b [&'a str] {
    // The registry's directory is named after its host.
    let registry = after(parts, &["registry", "src"]).and_then(|rest| rest.get(1..));
    let own = || {
        let parts = parts.get(personal(parts)..).unwrap_or_default();
        let begin = package(parts);
        parts.get(begin..).unwrap_or_default()
    };
    registry
        .filter(|rest| rest.len() > 1)
        .or_else(|| after(parts, &["git", "checkouts"]))
        .or_else(|| after(parts, &["rust", "deps"]))
        .unwrap_or_else(own)
}

/// The number of leading directories that are personal and never shown.
fn personal(parts: &[&str]) -> usize {
    // Also in mounted directories: `/mnt/c/Users/alice/`.
    let is_home = |two: &[&str]| matches!(two, ["home" | "Users", name] if !SOURCES.contains(name));
    let dirs = parts.get(..parts.len().saturating_sub(1)).unwrap_or_default();
    match dirs.windows(2).position(is_home) {
        Some(home) => home + 2,
        None if matches!(parts, ["root", _, ..]) => 1,
        None => 0,
    }
}

/// The index at which the package of a file begins.
fn package(parts: &[&str]) -> usize {
    // Keeps `vendor`, so that a dependency is recognizable: `vendor/tokio/src/lib.rs`.
    if let Some(vendor) = parts.iter().position(|part| *part == "vendor") {
        return vendor;
    }
    // The output of a build script: `build/shop-0123456789abcdef/out/rules.rs`.
    let out = parts.windows(3).rposition(|window| matches!(window, ["build", _, "out"]));
    if let Some(build) = out {
        return build + 1;
    }
    let dirs = parts.get(..parts.len().saturating_sub(1)).unwrap_or_default();
    let is_sources = |part: &&str| SOURCES.contains(part);
    match dirs.iter().rposition(is_sources) {
        // `src/tests/` is a module.
        Some(at) if at > 0 && dirs.get(at - 1) == Some(&"src") => at.saturating_sub(2),
        Some(at) => at.saturating_sub(1),
        None => parts.len().saturating_sub(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_paths_begin_with_their_package() {
        for (path, short) in [
            (
                "/home/alice/.cargo/registry/src/index.crates.io-1949cf8c6b5b557f/tokio-1.2.0/src/a/x.rs",
                "tokio-1.2.0/src/a/x.rs",
            ),
            (
                "/usr/local/cargo/git/checkouts/tokio-0123456789abcdef/abc1234/tokio/src/lib.rs",
                "tokio-0123456789abcdef/abc1234/tokio/src/lib.rs",
            ),
            (
                "/rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/std/src/io/mod.rs",
                "/rustc/library/std/src/io/mod.rs",
            ),
            ("/rustc/library/std/src/io/mod.rs", "/rustc/library/std/src/io/mod.rs"),
            (
                "/home/alice/.rustup/toolchains/stable-x86_64/lib/rustlib/src/rust/library/core/src/ops/function.rs",
                "/rustc/library/core/src/ops/function.rs",
            ),
            ("/rust/deps/hashbrown-0.15.2/src/raw/mod.rs", "hashbrown-0.15.2/src/raw/mod.rs"),
            ("/home/alice/code/shop/src/main.rs", "shop/src/main.rs"),
            ("/home/alice/code/shop/crates/cart/src/a/b.rs", "cart/src/a/b.rs"),
            ("/home/alice/src/shop/src/main.rs", "shop/src/main.rs"),
            ("/home/alice/src/shop/tests/support/mod.rs", "shop/tests/support/mod.rs"),
            ("/home/alice/shop/src/tests/util.rs", "shop/src/tests/util.rs"),
            ("/home/alice/src/main.rs", "src/main.rs"),
            ("/home/alice/main.rs", "main.rs"),
            ("/root/shop/build.rs", "shop/build.rs"),
            ("/root/x.rs", "x.rs"),
            ("/Users/alice/x/y/z.c", "y/z.c"),
            (
                "C:\\Users\\alice\\.cargo\\registry\\src\\index.crates.io-6f17\\tokio-1.2.0\\src\\x.rs",
                "x.rs",
            ),
            ("C:\\Users\\alice\\shop\\src\\x.rs", "x.rs"),
            ("C:/Users/alice/shop/src/x.rs", "x.rs"),
            (
                "/home/alice/shop/target/release/build/shop-0123456789abcdef/out/rules.rs",
                "shop-0123456789abcdef/out/rules.rs",
            ),
            ("/home/alice/shop/vendor/tokio/src/lib.rs", "vendor/tokio/src/lib.rs"),
            ("/home/alice/shop/../cart/./src/lib.rs", "cart/src/lib.rs"),
            ("../../alice/cart/src/lib.rs", "cart/src/lib.rs"),
            ("/mnt/c/Users/alice/src/main.rs", "src/main.rs"),
            ("/nfs/home/alice/src/lib.rs", "src/lib.rs"),
            ("/nfs/home/alice/x.rs", "x.rs"),
            ("/usr/home/alice/code/x.rs", "code/x.rs"),
            ("/srv/home/src/x.rs", "home/src/x.rs"),
            ("../alice/x.rs", "x.rs"),
            ("..\\alice\\x.rs", "x.rs"),
            ("../cart/src/lib.rs", "cart/src/lib.rs"),
            (r"\\host\alice\x.rs", "x.rs"),
            (r"\\host\share\shop\src\x.rs", "x.rs"),
            (r"\\wsl$\Debian\home\alice\src\x.rs", "x.rs"),
            (r"\\?\C:\Users\alice\src\x.rs", "x.rs"),
            (r"\\?\UNC\host\alice\x.rs", "x.rs"),
            ("/build/glibc-2.36/nptl/futex-internal.c", "nptl/futex-internal.c"),
            ("/x.c", "x.c"),
            ("/", ""),
            ("src/main.rs", "src/main.rs"),
            ("./nptl/futex-internal.c", "./nptl/futex-internal.c"),
            ("", ""),
        ] {
            assert_eq!(short_source(path), short, "{path}");
            assert_eq!(short_source(short), short, "{short} stays");
        }
    }

    #[test]
    fn an_executable_keeps_its_name_and_system_libraries_their_path() {
        for (path, short) in [
            ("/home/alice/shop/target/release/shop", "shop"),
            ("/opt/shop/bin/shop", "shop"),
            ("/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu/libc.so.6"),
            ("/usr/src/myapp/target/release/shop", "shop"),
            ("/usr/home/alice/shop", "shop"),
            ("/usr/local/src/alice/shop", "shop"),
            ("/usr/local/lib/libshop.so", "/usr/local/lib/libshop.so"),
            ("[vdso]", "[vdso]"),
            ("", ""),
        ] {
            assert_eq!(short_code(path), short);
        }
    }

    proptest::proptest! {
        #[test]
        fn no_user_name_is_left(
            user in "[a-z]{9}",
            between in proptest::collection::vec("(work|src|vendor|tests|build|out|registry|git|[a-d])", 0..5),
            file in "[a-c]\\.rs",
        ) {
            for home in [
                "/home",
                "/Users",
                "/var/home",
                "/mnt/c/Users",
                "/nfs/home",
                "/src/home",
                "../../home",
                "C:\\Users",
                r"\\host\share\Users",
                r"\\wsl$\Debian\home",
            ] {
                let path = format!("{home}/{user}/{}/{file}", between.join("/"));
                let short = short_source(&path);
                proptest::prop_assert!(!short.contains(&user), "{} {}", path, short);
                proptest::prop_assert!(short.ends_with(&file));
            }
        }
    }
}

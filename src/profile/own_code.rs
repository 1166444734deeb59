//! Tells the program's own code from that of its dependencies.

use std::collections::BTreeSet;

use super::model::{Function, Profile};
use super::waits::{PLUMBING, crate_of};

/// The program's own crates, as far as a profile shows them, and the directories of those of their packages that look like
/// directories of dependencies: that of a release has a version, too, and so has that of `cargo install`.
#[derive(Debug, Default)]
pub(crate) struct OwnCode {
    crates: BTreeSet<String>,
    packages: BTreeSet<String>,
}

impl OwnCode {
    /// Own crates are that of `main`, those of the kept spans, and that of which the program has the name.
    pub(crate) fn of(profile: &Profile) -> Self {
        let functions = || profile.functions().map(|(_, function)| function);
        let mains = functions().filter_map(|function| function.name.strip_suffix("::main"));
        let spans = || profile.spans.iter().filter(|span| !span.own_file.is_empty());
        let targets = spans().filter_map(|span| span.target.split("::").next());
        let program = profile.first_mapping().and_then(|id| profile.mapping(id));
        let program = program.map(|mapping| crate_of_program(&mapping.file));
        let crates = mains.chain(targets).map(|name| name.replace('-', "_")).chain(program);
        let is_own = |name: &String| is_name(name) && !PLUMBING.contains(&name.as_str());
        let crates: BTreeSet<_> = crates.filter(is_own).collect();
        let mut packages = BTreeSet::new();
        for Function { name, file, .. } in functions() {
            let of = crate_of(name).filter(|of| crates.contains(*of) && !name.contains(" as "));
            let Some((of, package)) = of.zip(package_of(file)) else { continue };
            // Code of a macro has the file of the crate that defines it.
            let is_of_span =
                || spans().any(|span| file.strip_suffix(span.own_file).is_some_and(ends_directory));
            if is_of_dependency(file) && (is_named(package, of) || is_of_span()) {
                packages.insert(package.to_owned());
            }
        }
        Self { crates, packages }
    }

    /// Whether a source file is known to be the program's own, although it may look like that of a dependency.
    pub(super) fn contains(&self, file: &str) -> bool {
        package_of(file).is_some_and(|of| self.packages.contains(of))
    }

    /// The names of the crates.
    pub(crate) fn crates(&self) -> impl Iterator<Item = &str> {
        self.crates.iter().map(String::as_str)
    }

    /// The directories of packages that look like those of dependencies.
    pub(crate) fn packages(&self) -> impl Iterator<Item = &str> {
        self.packages.iter().map(String::as_str)
    }
}

fn ends_directory(path: &str) -> bool {
    path.is_empty() || path.ends_with('/')
}

/// Whether the directory of a package has the name of a crate, apart from a version: `shop-2.0.1`.
fn is_named(package: &str, of: &str) -> bool {
    let name = package.rsplit('/').next().unwrap_or_default().replace('-', "_");
    name.strip_prefix(of).is_some_and(|rest| {
        let version = rest.strip_prefix('_');
        rest.is_empty()
            || version.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    })
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

/// The crate of a program, by its file: that of a test ends in a hash.
fn crate_of_program(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or_default();
    let name = match name.rsplit_once('-') {
        Some((name, end)) if is_hash(end) => name,
        _ => name,
    };
    name.replace('-', "_")
}

/// The directory of a source file's package: that above its sources.
fn package_of(file: &str) -> Option<&str> {
    let of = |directory: &str| file.rfind(directory);
    let at = of("/src/").or_else(|| of("/examples/")).or_else(|| of("/tests/"));
    let at = at.or_else(|| of("/benches/")).or_else(|| of("/"))?;
    file.get(..at).filter(|package| !package.is_empty())
}

fn is_hash(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a source file is where only dependencies are: of the toolchain, or in cargo's directories, wherever its home is.
fn is_of_registry(file: &str) -> bool {
    const DIRS: [&str; 4] = ["rust/deps/", "registry/src/", "git/checkouts/", "library/std/"];
    let is_in = |dir: &str| {
        file.match_indices(dir).any(|(at, _)| at == 0 || file.as_bytes().get(at - 1) == Some(&b'/'))
    };
    file.contains("/rustc/") || DIRS.into_iter().any(is_in)
}

/// Whether a source file seems to belong to a dependency. The path is complete, or shortened to begin at the package.
pub(crate) fn is_of_dependency(file: &str) -> bool {
    // Where `cargo vendor`, buck2 and Bazel put sources.
    const DIRS: [&str; 4] =
        ["/vendor/", "/third-party/rust/", "/third_party/rust/", "/third_party/rust_crates/"];
    const OF_BAZEL: [&str; 2] = ["/proc/self/cwd/external/", "/_main/external/"];
    let begins = |dir: &&str| dir.strip_prefix('/').is_some_and(|dir| file.starts_with(dir));
    if is_of_registry(file)
        || DIRS.iter().any(|dir| file.contains(dir) || begins(dir))
        || OF_BAZEL.iter().any(|dir| file.contains(dir))
        || file.starts_with("external/")
    {
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
    let mut parts = file.split('/').skip(1);
    first.rsplit_once('-').is_some_and(|(_, end)| is_hash(end)) && parts.next() != Some("out")
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
            ("/rustc/library/std/src/io/mod.rs", true),
            ("vendor/tokio/src/lib.rs", true),
            ("/build/tokio-1.50.0/src/lib.rs", true),
            ("external/crates__tokio-1.50.0/src/lib.rs", true),
            ("external/crates__tokio/src/lib.rs", true),
            ("/proc/self/cwd/external/crates__tokio/src/lib.rs", true),
            ("third-party/rust/tokio/src/lib.rs", true),
            ("/src/chromium/third_party/rust/tokio/v1/crate/src/lib.rs", true),
            ("registry/src/index.crates.io-1/tokio-1.50.0/src/lib.rs", true),
            ("shop/src/external/tax.rs", false),
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
    fn a_package_has_the_name_of_its_crate() {
        for (package, of, expected) in [
            ("shop-2.0.1", "shop", true),
            ("/build/shop-server-2.0.1", "shop_server", true),
            ("vendor/shop", "shop", true),
            ("shop-tools-2.0.1", "shop", false),
            ("tokio-1.50.0", "shop", false),
        ] {
            assert_eq!(is_named(package, of), expected, "{package}");
        }
    }

    #[test]
    fn a_program_has_the_name_of_its_crate() {
        for (file, expected) in [
            ("/opt/shop-server", "shop_server"),
            ("shop-0123456789abcdef", "shop"),
            ("[vdso]", "[vdso]"),
            ("", ""),
        ] {
            assert_eq!(crate_of_program(file), expected);
        }
    }
}

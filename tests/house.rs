//! Holds what `docs/design.md` says of the source: who may import whom, where `unsafe` and
//! questions about the system are, and how long a file may be. And that the guide is up to date.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Who may import from whom. Each may import from itself and from the crate's root.
const IMPORTS: &[(&str, &[&str])] = &[
    ("layer", &["handle", "config", "control", "collector", "otel", "keep", "span", "error"]),
    ("churn", &["layer", "collector", "sampler", "export", "profile"]),
    ("text", &[]),
    ("handle", &["config", "control", "collector", "keep", "otel", "error", "stats"]),
    ("control", &["sys", "config", "collector", "keep", "otel", "error", "sys"]),
    ("hangup", &["handle", "control", "collector", "error", "sys"]),
    ("http", &["handle", "origin", "keep", "export", "error", "stats"]),
    ("origin", &["text"]),
    ("metrics", &["handle", "keep", "stats"]),
    (
        "config",
        &[
            "hangup",
            "layer",
            "control",
            "collector",
            "otel",
            "sampler",
            "keep",
            "export",
            "redact",
            "symbols",
            "profile",
            "span",
            "error",
            "stats",
            "sys",
        ],
    ),
    (
        "collector",
        &[
            "otel", "sampler", "keep", "unwind", "symbols", "redact", "span", "profile", "export",
            "error", "stats", "text", "sys",
        ],
    ),
    ("otel", &["keep", "span"]),
    ("export", &["encode", "profile", "span", "error", "stats", "text", "sys"]),
    ("encode", &["profile"]),
    ("keep", &["span", "profile", "stats"]),
    ("symbols", &["unwind", "profile", "sys"]),
    ("unwind", &["sampler", "sys"]),
    ("sampler", &["span", "stats", "sys"]),
    ("span", &["stats", "sys"]),
    ("redact", &["profile", "error", "text"]),
    ("profile", &[]),
    ("error", &["text"]),
    ("stats", &[]),
    ("sys", &[]),
    (
        "fuzzing",
        &[
            "sampler", "config", "redact", "keep", "profile", "export", "error", "text", "symbols",
            "unwind", "sys",
        ],
    ),
];

/// Lines of a file, its tests apart.
const LONGEST_FILE: usize = 600;

struct Source {
    path: PathBuf,
    /// The file without its tests.
    text: String,
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && path.file_name().is_some_and(|name| name != "tests.rs")
            {
                let text = fs::read_to_string(&path).unwrap();
                let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_owned();
                found.push(Source { path: path.strip_prefix(&root).unwrap().to_owned(), text });
            }
        }
    }
    assert!(found.len() > 30, "the source was found");
    found
}

impl Source {
    /// The first part of its path: the module of the crate's root that it belongs to.
    fn module(&self) -> String {
        let first = self.path.components().next().unwrap().as_os_str().to_str().unwrap();
        first.trim_end_matches(".rs").to_owned()
    }

    fn lines_of_code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
        lines.filter(|(_, line)| !line.starts_with("//"))
    }
}

#[test]
fn imports_go_down_only() {
    let mut wrong = Vec::new();
    for source in sources() {
        let module = source.module();
        if module == "lib" {
            continue;
        }
        let (_, allowed) = IMPORTS
            .iter()
            .find(|(name, _)| *name == module)
            .unwrap_or_else(|| panic!("`{module}` is not in the table"));
        for (number, line) in source.lines_of_code() {
            for path in line.split("crate::").skip(1) {
                let name: String =
                    path.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if name != module && !allowed.contains(&name.as_str()) {
                    wrong.push(format!("{}:{number}: {module} -> {name}", source.path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "imports that go up:\n{}", wrong.join("\n"));
}

#[test]
fn the_table_names_only_modules_that_there_are() {
    let modules: BTreeSet<_> = sources().iter().map(Source::module).collect();
    for (name, allowed) in IMPORTS {
        for module in allowed.iter().chain([name]) {
            assert!(modules.contains(*module), "{module}");
        }
    }
}

#[test]
fn the_collector_knows_no_exporter_but_the_trait() {
    for source in sources().into_iter().filter(|source| source.module() == "collector") {
        for (number, line) in source.lines_of_code() {
            let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
            let knows =
                words.any(|word| ["Directory", "Memory", "OtlpExporter", "encode"].contains(&word));
            assert!(!knows, "{}:{number}: {line}", source.path.display());
        }
    }
}

#[test]
fn unsafe_code_is_in_sys_alone() {
    for source in sources().into_iter().filter(|source| source.module() != "sys") {
        for (number, line) in source.lines_of_code() {
            // A word of HTTP.
            let line = line.replace("'unsafe-inline'", "");
            let is_unsafe =
                line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == "unsafe");
            assert!(!is_unsafe, "{}:{number}: {line}", source.path.display());
        }
    }
}

#[test]
fn only_sys_asks_which_system_it_is() {
    for source in sources().into_iter().filter(|source| source.module() != "sys") {
        for (number, line) in source.lines_of_code() {
            assert!(!line.contains("target_os"), "{}:{number}: {line}", source.path.display());
        }
    }
}

#[test]
fn no_file_is_too_long_to_read() {
    for source in sources() {
        let lines = source.text.lines().count();
        assert!(lines <= LONGEST_FILE, "{}: {lines} lines", source.path.display());
    }
}

/// What users read is what `.ci/interop` runs.
#[test]
fn the_guide_shows_the_files_of_the_collector_as_they_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = fs::read_to_string(root.join("docs/guide/collector.md")).unwrap();
    for name in ["collector.yaml", "builder.yaml"] {
        let file = fs::read_to_string(root.join("examples/collector").join(name)).unwrap();
        assert!(guide.contains(&format!("```yaml\n{file}```\n")), "{name}");
    }
}

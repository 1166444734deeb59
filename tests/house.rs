//! Checks the structure that `docs/design.md` describes: imports that go down only, `unsafe` and platform checks
//! only in `sys`, and limits on the size of files and types. Also checks that the guide is up to date.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;

/// The maximum lines of a file without its tests.
const LONGEST_FILE: usize = 600;
/// The maximum fields of a type.
const MOST_FIELDS: usize = 15;
/// The maximum number of files with methods of a type.
const MOST_FILES: usize = 2;
/// Types above these limits: their maximum fields and files, 0 where the limit holds. Lower an entry when its type has
/// shrunk.
const LARGER: &[(&str, usize, usize)] = &[
    ("Builder", 26, 3),
    ("Handle", 0, 4),
    ("Profile", 0, 4),
    ("Slot", 23, 0),
    ("Spans", 0, 6),
    ("ThreadState", 28, 0),
    ("TimeBreakdown", 18, 0),
    ("Unwinder", 0, 4),
];

#[derive(Clone)]
struct Source {
    path: PathBuf,
    /// The file without its tests.
    text: String,
}

/// All files of Rust below a directory.
fn rust_files_below(root: &Path) -> Vec<PathBuf> {
    let (mut found, mut dirs) = (Vec::new(), vec![root.to_owned()]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found
}

fn files_below(root: &Path) -> Vec<PathBuf> {
    let found = rust_files_below(root);
    assert!(found.len() > 5, "the source was found");
    found
}

/// Those of the layer.
fn sources() -> Vec<Source> {
    sources_of("src")
}

/// Those of each crate whose structure is checked.
fn sources_of_crates() -> [Vec<Source>; 5] {
    [sources(), sources_of(CAPTURE), sources_of(PROFILE), sources_of(OTLP), sources_of(SERVER)]
}

fn all_sources() -> Vec<Source> {
    sources_of_crates().concat()
}

fn sources_of(dir: &str) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(dir);
    let is_test = |path: &PathBuf| path.file_name().is_some_and(|name| name == "tests.rs");
    let files = files_below(&root).into_iter().filter(|path| !is_test(path));
    let source = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_owned();
        Source { path: path.strip_prefix(&root).unwrap().to_owned(), text }
    };
    files.map(source).collect()
}

impl Source {
    /// The module of the crate's root that it belongs to.
    fn module(&self) -> String {
        let first = self.path.components().next().unwrap().as_os_str().to_str().unwrap();
        first.trim_end_matches(".rs").to_owned()
    }

    fn lines_of_code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
        lines.filter(|(_, line)| !line.starts_with("//"))
    }
}

/// The imports of each module, by the module they come from, with the lines.
type Imports = BTreeMap<String, BTreeMap<String, Vec<String>>>;

fn imports(sources: &[Source]) -> Imports {
    let mut imports = Imports::new();
    for source in sources.iter().filter(|source| source.module() != "lib") {
        let module = source.module();
        for (number, line) in source.lines_of_code() {
            for path in line.split("crate::").skip(1) {
                let name: String =
                    path.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if name != module {
                    let line = format!("{}:{number}: {module} -> {name}", source.path.display());
                    let of_module = imports.entry(module.clone()).or_default();
                    of_module.entry(name).or_default().push(line);
                }
            }
        }
    }
    imports
}

/// The modules from top to bottom. Each imports only from those further down.
const LAYERS: &[&[&str]] = &[
    &["tower"],
    &["layer", "metrics"],
    &["handle", "interest"],
    &["control"],
    &["config"],
    &["start"],
    &["collect"],
    &["watch"],
    &["engine"],
    &["assemble", "publish", "threads"],
    &["history", "intake", "report"],
    &["allocations", "awaits", "otel", "references", "sinks"],
    &["inbox", "keep", "symbols"],
    &["span"],
    &["stats"],
    &["error", "log", "refresh"],
    &["layers"],
    // Of the crates below.
    &["compare", "encode", "export", "facts", "ids", "profile", "redact", "text"],
    &["budget", "drain", "sampler", "sys", "unwind"],
];

/// The crate of the sampling profiler, and its modules from top to bottom.
const CAPTURE: &str = "crates/capture/src";
const LAYERS_OF_CAPTURE: &[&[&str]] =
    &[&["profiler"], &["drain"], &["unwind"], &["sampler"], &["budget", "sys"]];

/// The crate of profiles, and its modules from top to bottom.
const PROFILE: &str = "crates/profile/src";
const LAYERS_OF_PROFILE: &[&[&str]] = &[
    &["export"],
    &["breakdown", "encode", "otel"],
    &["profile"],
    &["compare", "redact"],
    &["facts"],
    &["ids", "text"],
];

/// The crate that sends profiles, and its modules from top to bottom.
const OTLP: &str = "crates/otlp/src";
const LAYERS_OF_OTLP: &[&[&str]] = &[
    &["builder"],
    &["exporter"],
    &["transport"],
    &["grpc", "http", "tls"],
    &["answer", "settings"],
    &["protocol"],
];

/// The crate of the routes, and its modules from top to bottom.
const SERVER: &str = "crates/server/src";
const LAYERS_OF_SERVER: &[&[&str]] = &[
    &["heap"],
    &["compare", "continuous", "kept", "process", "threads"],
    &["origin", "routes"],
    &["answer"],
];

/// The lines that do not go down.
fn not_down(imports: Imports, layers: &[&[&str]]) -> Vec<String> {
    let depth = |module: &str| layers.iter().position(|layer| layer.contains(&module));
    let is_down = |module: &str, name: &str| depth(module) < depth(name);
    let of_all = imports.into_iter().flat_map(|(module, from)| {
        let wrong = from.into_iter().filter(move |(name, _)| !is_down(&module, name));
        wrong.flat_map(|(_, lines)| lines)
    });
    of_all.collect()
}

#[test]
fn imports_go_down() {
    // Tests and benches are above all of them, and a re-export of the crate's root would hide where an item comes from.
    let tops = ["lib", "churn", "fuzzing", "model", "testing"];
    for (dir, layers) in [
        ("src", LAYERS),
        (CAPTURE, LAYERS_OF_CAPTURE),
        (PROFILE, LAYERS_OF_PROFILE),
        (OTLP, LAYERS_OF_OTLP),
        (SERVER, LAYERS_OF_SERVER),
    ] {
        let is_top = |source: &Source| tops.contains(&&*source.module());
        let sources: Vec<_> =
            sources_of(dir).into_iter().filter(|source| !is_top(source)).collect();
        let modules: BTreeSet<_> = sources.iter().map(Source::module).collect();
        let listed = layers.concat().into_iter().map(str::to_owned).collect();
        let unlisted: Vec<_> = modules.difference(&listed).collect();
        assert!(unlisted.is_empty(), "not listed in the layers of {dir}: {unlisted:?}");
        let wrong = not_down(imports(&sources), layers);
        assert!(wrong.is_empty(), "not down:\n{}", wrong.join("\n"));
    }
}

/// The files in the same directory that a file uses: `super::file`, what `mod.rs` has of a file, and `mod.rs` itself.
fn neighbors(sources: &[Source], source: &Source) -> BTreeSet<PathBuf> {
    let dir = source.path.parent().unwrap();
    let find = |name: &str| sources.iter().find(|source| source.path == dir.join(name));
    let file = |name: &str| find(&format!("{name}.rs"));
    let words = |text: &str| -> Vec<String> {
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    // The statements of `mod.rs`, without those that only declare or pass on.
    let statements = |text: &str| -> (Vec<String>, Vec<String>) {
        let code: Vec<_> = text.lines().filter(|line| !line.trim().starts_with("//")).collect();
        let statements = code.join(" ").split(';').map(str::to_owned).collect::<Vec<_>>();
        statements.into_iter().partition(|it| it.contains("pub") && it.contains(" use "))
    };
    let passed_on = find("mod.rs").map(|top| statements(&top.text).0).unwrap_or_default();
    let origin = |item: &str| {
        let from = passed_on.iter().find(|it| words(it).iter().any(|word| word == item))?;
        words(from).iter().find_map(|word| file(word)).or_else(|| file(item))
    };
    let mut found = BTreeSet::new();
    let (_, own) = statements(&source.text);
    for statement in own {
        // What follows `super::super::` is in another directory.
        let mut parts = statement.split("super::").peekable();
        while let (Some(before), Some(rest)) = (parts.next(), parts.peek()) {
            if rest.is_empty() || before.is_empty() {
                continue;
            }
            let list = rest.strip_prefix('{').and_then(|list| list.split('}').next());
            let items = list.map_or_else(|| words(rest).into_iter().take(1).collect(), words);
            for item in items {
                let to = file(&item).or_else(|| origin(&item)).or_else(|| find("mod.rs"));
                found.extend(to.map(|to| to.path.clone()));
            }
        }
        if source.path.ends_with("mod.rs") {
            let names = words(&statement);
            let used = names.iter().filter(|name| statement.contains(&format!("{name}::")));
            found.extend(used.filter_map(|name| file(name)).map(|to| to.path.clone()));
        }
    }
    found.remove(&source.path);
    found
}

/// The files that use each other, directly or through others, for each directory in which more than two do.
fn circles(sources: &[Source]) -> BTreeMap<PathBuf, BTreeSet<PathBuf>> {
    let uses: BTreeMap<_, _> =
        sources.iter().map(|source| (&source.path, neighbors(sources, source))).collect();
    let reached = |from: &PathBuf| {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(to) = next.pop().and_then(|file| uses.get(file)) {
            next.extend(to.iter().filter(|file| reached.insert((*file).clone())));
        }
        reached
    };
    let all: BTreeMap<_, _> = uses.keys().map(|file| (*file, reached(file))).collect();
    let mut circles: BTreeMap<PathBuf, BTreeSet<PathBuf>> = BTreeMap::new();
    for (file, to) in &all {
        let with: BTreeSet<_> = to
            .iter()
            .filter(|other| all.get(other).is_some_and(|back| back.contains(*file)))
            .collect();
        if with.len() > 2 {
            circles.entry(file.parent().unwrap().to_owned()).or_default().insert((*file).clone());
        }
    }
    circles
}

/// Directories in which more than two files use each other, and how many at most. Lower an entry when they have become
/// fewer.
const CIRCLES: &[(&str, usize)] =
    &[("encode/html", 3), ("profile", 4), ("sampler", 6), ("span", 3), ("sys/linux", 13)];

#[test]
fn few_files_use_each_other() {
    let all = [CAPTURE, PROFILE, OTLP, SERVER].map(sources_of);
    let all = [vec![sources_but_the_model()], all.to_vec()].concat();
    let circles: Vec<_> = all.iter().map(|sources| circles(sources)).collect();
    for (dir, files) in circles.iter().flatten() {
        let stated = CIRCLES.iter().find(|(of, _)| Path::new(of) == dir);
        let most = stated.map_or(2, |(_, most)| *most);
        assert!(files.len() <= most, "{}: {files:#?}", dir.display());
    }
}

#[test]
fn wrong_imports_and_circles_are_found() {
    let source = |path: &str, text: &str| Source { path: path.into(), text: text.to_owned() };
    let sources = [
        source("top.rs", "use crate::one::One;"),
        source("one/mod.rs", "mod part;\npub(crate) use part::Part;\nfn f() { third::g() }"),
        source("one/part.rs", "fn f() { crate::two::g() }\nuse super::third;"),
        source("one/third.rs", "// use crate::top;\nuse super::{Own, Part};"),
        source("two.rs", "use crate::one::part;\nuse crate::bottom::Bottom;"),
        source("bottom.rs", ""),
    ];
    let layers: [&[&str]; 4] = [&["top"], &["one"], &["two"], &["bottom"]];
    assert_eq!(not_down(imports(&sources), &layers), ["two.rs:1: two -> one"]);
    let circle = circles(&sources).into_values().next().unwrap();
    assert_eq!(circle, ["one/mod.rs", "one/part.rs", "one/third.rs"].map(PathBuf::from).into());
    let fewer = [&sources[..1], &sources[2..]].concat();
    assert!(circles(&fewer).is_empty(), "two are no circle");
}

/// The number of fields of each type, and the files with its methods.
fn types(sources: &[Source]) -> BTreeMap<String, (usize, BTreeSet<PathBuf>)> {
    let mut types: BTreeMap<String, (usize, BTreeSet<PathBuf>)> = BTreeMap::new();
    for source in sources {
        // Type names are unique across modules.
        let name_of = |rest: &str| -> String {
            rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
        };
        let mut of_fields: Option<String> = None;
        for line in source.text.lines() {
            let declared = line
                .split_once("struct ")
                .filter(|(before, _)| before.is_empty() || before.starts_with("pub"));
            if let Some((_, rest)) = declared.filter(|_| line.ends_with('{')) {
                of_fields = Some(name_of(rest));
            } else if line == "}" {
                of_fields = None;
            } else if let Some(name) = &of_fields {
                let is_field = line.starts_with("    ")
                    && !line.starts_with("     ")
                    && !line.trim().starts_with(['/', '#'])
                    && line.contains(": ");
                types.entry(name.clone()).or_default().0 += usize::from(is_field);
            }
            let Some(rest) = line.strip_prefix("impl") else { continue };
            if !line.contains(" for ") {
                let rest = match rest.strip_prefix('<') {
                    Some(generic) => generic.split_once("> ").map_or("", |(_, rest)| rest),
                    None => rest.trim(),
                };
                types.entry(name_of(rest)).or_default().1.insert(source.path.clone());
            }
        }
    }
    types
}

#[test]
fn no_type_exceeds_its_stated_size() {
    let of_crate = |sources: Vec<Source>| {
        types(&sources.into_iter().filter(is_checked).collect::<Vec<_>>()).into_iter()
    };
    for (name, (fields, files)) in sources_of_crates().into_iter().flat_map(of_crate) {
        let stated = LARGER.iter().find(|(larger, ..)| *larger == name);
        let (most_fields, most_files) = stated.map_or((0, 0), |larger| (larger.1, larger.2));
        let is_within =
            fields <= most_fields.max(MOST_FIELDS) && files.len() <= most_files.max(MOST_FILES);
        assert!(is_within, "{name} has {fields} fields, and methods in {files:?}");
    }
}

/// Excludes types that are repeated per system or feature, test helpers, and generated messages.
fn is_checked(source: &Source) -> bool {
    let path = source.path.to_string_lossy();
    let others =
        ["model/", "roundtrip", "scripted.rs", "unsupported.rs", "/no_", "pprof_messages.rs"];
    !others.iter().any(|part| path.contains(part))
        && !["fuzzing", "churn"].contains(&&*source.module())
}

/// The declared types, by name, with the modules that declare them.
fn declared(sources: &[Source]) -> BTreeMap<String, BTreeSet<String>> {
    let mut declared: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in sources {
        for line in source.text.lines() {
            let line = line.strip_prefix("pub").map_or(line, |rest| {
                rest.strip_prefix('(')
                    .and_then(|rest| rest.split_once(')'))
                    .map_or(rest, |(_, rest)| rest)
            });
            let line = line.strip_prefix(' ').unwrap_or(line);
            let kinds = ["struct ", "enum ", "trait ", "type "];
            let Some(rest) = kinds.iter().find_map(|kind| line.strip_prefix(kind)) else {
                continue;
            };
            let name = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            declared.entry(name).or_default().insert(source.module());
        }
    }
    declared
}

#[test]
fn type_names_are_unique_across_modules() {
    for sources in sources_of_crates() {
        let sources: Vec<_> = sources.into_iter().filter(is_checked).collect();
        let declared = declared(&sources);
        assert!(declared.len() > 4, "only {} types were found", declared.len());
        let alike: Vec<_> = declared.iter().filter(|(_, modules)| modules.len() > 1).collect();
        assert!(alike.is_empty(), "{alike:?}");
    }
}

#[test]
fn the_collector_uses_exporters_only_through_the_trait() {
    let rooms = ["start", "collect", "watch", "engine", "publish"];
    let rooms: Vec<_> = rooms.iter().chain(WITHOUT_ENGINE).collect();
    for source in sources().into_iter().filter(|source| rooms.contains(&&&*source.module())) {
        for (number, line) in source.lines_of_code() {
            let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
            let uses =
                words.any(|word| ["Directory", "Memory", "OtlpExporter", "encode"].contains(&word));
            assert!(!uses, "{}:{number}: {line}", source.path.display());
        }
    }
}

/// The lines of code with a phrase, in files other than those.
fn lines_with(sources: &[Source], phrase: &str, but: &[&str]) -> Vec<String> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let is_whole = |line: &str| {
        let parts: Vec<_> = line.split(phrase).collect();
        parts.windows(2).any(|around| {
            let is_part = around.first().is_some_and(|before| before.ends_with(is_word));
            !is_part && around.last().is_some_and(|after| !after.starts_with(is_word))
        })
    };
    let others =
        sources.iter().filter(|source| !but.iter().any(|file| source.path.ends_with(file)));
    let lines = others.flat_map(|source| {
        let lines = source.lines_of_code().filter(|(_, line)| is_whole(line));
        lines.map(|(number, line)| format!("{}:{number}: {line}", source.path.display()))
    });
    lines.collect()
}

/// The lines that give behaviour to a message: an `impl`, or a function that it holds.
fn behaviour_of(sources: &[Source], message: &str) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources {
        let mut is_in_message = false;
        for (number, line) in source.lines_of_code() {
            let name_of =
                |line: &str| line.trim_end_matches(['{', ' ']).rsplit(' ').next() == Some(message);
            is_in_message |= line.contains("enum ") && name_of(line);
            let is_impl = line.starts_with("impl") && name_of(line);
            if is_impl || is_in_message && (line.contains("dyn ") || line.contains("fn(")) {
                found.push(format!("{}:{number}: {line}", source.path.display()));
            }
            is_in_message &= line != "}";
        }
    }
    found
}

/// Rooms that work with what they are given.
const WITHOUT_ENGINE: &[&str] = &["assemble", "intake", "publish", "report", "sinks", "threads"];

fn sources_but_the_model() -> Vec<Source> {
    sources().into_iter().filter(|source| !source.path.starts_with("model")).collect()
}

#[test]
fn only_the_loop_and_what_starts_it_know_the_collector() {
    let sources = sources_but_the_model();
    let outside: Vec<_> = sources
        .into_iter()
        .filter(|source| !["collect", "start"].contains(&&*source.module()))
        .collect();
    let others = lines_with(&outside, "Collector", &[]);
    assert!(others.is_empty(), "{}", others.join("\n"));
    // It is passed to nothing.
    let passed = lines_with(&sources_but_the_model(), "&mut Collector", &[]);
    assert!(passed.is_empty(), "{}", passed.join("\n"));
}

#[test]
fn messages_are_data() {
    for message in ["Command", "Job", "ExportJob"] {
        let sources = sources();
        let declared = lines_with(&sources, &format!("enum {message}"), &[]);
        assert_eq!(declared.len(), 1, "{message}");
        let behaviour = behaviour_of(&sources, message);
        assert!(behaviour.is_empty(), "{}", behaviour.join("\n"));
    }
}

#[test]
fn few_own_the_engine_and_most_rooms_do_not_know_it() {
    let owners = ["control.rs", "start.rs", "collect/run.rs"];
    let others = lines_with(&sources_but_the_model(), "Arc<Engine>", &owners);
    assert!(others.is_empty(), "{}", others.join("\n"));
    let without: Vec<_> = sources()
        .into_iter()
        .filter(|source| WITHOUT_ENGINE.contains(&&*source.module()))
        .collect();
    assert!(without.len() > 30, "the files were found");
    for word in ["Engine", "ProfileAdmission"] {
        let known = lines_with(&without, word, &[]);
        assert!(known.is_empty(), "{}", known.join("\n"));
    }
}

#[test]
fn names_and_behaviour_are_found() {
    let source = |path: &str, text: &str| Source { path: path.into(), text: text.to_owned() };
    let sources = [
        source("a/run.rs", "fn f(a: &mut Collector) {}\n// Collector\nMyCollector"),
        source("b.rs", "    fn f(a: &mut Collector) {}\nstruct Collectors;\nArc<Engine>"),
        source("job.rs", "enum Job {\n    A { then: Box<dyn FnOnce()> },\n}\nfn f(a: fn()) {}"),
        source("c.rs", "impl fmt::Display for Job {\n}\nimpl Jobs {\n}\nimpl Job {"),
    ];
    let line = "b.rs:1: fn f(a: &mut Collector) {}";
    assert_eq!(lines_with(&sources, "Collector", &["a/run.rs"]), [line]);
    assert_eq!(lines_with(&sources, "&mut Collector", &[]).len(), 2);
    assert_eq!(lines_with(&sources, "Arc<Engine>", &[]), ["b.rs:3: Arc<Engine>"]);
    let behaviour = [
        "job.rs:2: A { then: Box<dyn FnOnce()> },",
        "c.rs:1: impl fmt::Display for Job {",
        "c.rs:5: impl Job {",
    ];
    assert_eq!(behaviour_of(&sources, "Job"), behaviour);
}

/// In tests, too.
#[test]
fn unsafe_code_is_only_in_sys() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for dir in ["src", PROFILE, OTLP, SERVER, "macros/src"] {
        let text = fs::read_to_string(root.join(dir).join("lib.rs")).unwrap();
        assert!(text.contains("\n#![forbid(unsafe_code)]\n"), "{dir}");
    }
    let root = root.join(CAPTURE);
    let files = files_below(&root).into_iter().filter(|path| !path.starts_with(root.join("sys")));
    for path in files {
        let text = fs::read_to_string(&path).unwrap();
        let lines = text.lines().map(str::trim).enumerate();
        for (number, line) in lines.filter(|(_, line)| !line.starts_with("//")) {
            // A keyword of HTTP's Content-Security-Policy.
            let line = line.replace("'unsafe-inline'", "");
            let is_unsafe =
                line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == "unsafe");
            assert!(!is_unsafe, "{}:{}: {line}", path.display(), number + 1);
        }
    }
}

#[test]
fn only_sys_checks_the_target_os() {
    for source in all_sources().into_iter().filter(|source| source.module() != "sys") {
        for (number, line) in source.lines_of_code() {
            assert!(!line.contains("target_os"), "{}:{number}: {line}", source.path.display());
        }
    }
}

/// Rustdoc and editors show an item without the one before it, to which a pronoun would refer.
#[test]
fn no_line_of_a_doc_comment_begins_with_a_pronoun() {
    const PRONOUNS: [&str; 7] = ["It", "Its", "That", "The same", "These", "They", "Those"];
    for source in all_sources() {
        for (number, line) in source.text.lines().enumerate() {
            let line = line.trim_start();
            let doc = line.strip_prefix("/// ").or_else(|| line.strip_prefix("//! "));
            let is_pronoun = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric());
            let begins =
                |word: &&str| doc.and_then(|doc| doc.strip_prefix(*word)).is_some_and(is_pronoun);
            let found = PRONOUNS.iter().find(|word| begins(word));
            assert_eq!(found, None, "{}:{}: {line}", source.path.display(), number + 1);
        }
    }
}

/// A filter that matches no test would pass.
#[test]
fn what_miri_runs_has_tests() {
    let table = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(".ci/miri")).unwrap();
    let modules: Vec<_> = table.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(!modules.is_empty());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for module in modules {
        let path = module.replace("::", "/");
        let files = ["", "/mod", "/tests"].map(|file| format!("{path}{file}.rs"));
        let in_dirs =
            ["src", CAPTURE].map(|dir| files.each_ref().map(|file| root.join(dir).join(file)));
        let texts = in_dirs.iter().flatten().filter_map(|file| fs::read_to_string(file).ok());
        assert!(texts.into_iter().any(|text| text.contains("#[test]")), "{module}");
    }
}

#[test]
fn no_file_is_too_long_to_read() {
    for source in all_sources() {
        let lines = source.text.lines().count();
        assert!(lines <= LONGEST_FILE, "{}: {lines} lines", source.path.display());
    }
}

/// The lines of the product, without tests, at most. May only fall.
const TOTAL: usize = 56_689;
/// The same by crate and room: the first directory below `src`, or `(top)`. A feature that needs more lines takes them
/// from the entries of the rooms that pay for it.
const ROOMS: &[(&str, &str, usize)] = &[
    (".", "(top)", 3158),
    (".", "allocations", 243),
    (".", "assemble", 1075),
    (".", "awaits", 1645),
    (".", "collect", 1024),
    (".", "config", 936),
    (".", "engine", 919),
    (".", "history", 479),
    (".", "inbox", 259),
    (".", "intake", 510),
    (".", "keep", 3436),
    (".", "otel", 1053),
    (".", "publish", 1954),
    (".", "references", 718),
    (".", "report", 1240),
    (".", "sinks", 1717),
    (".", "span", 4762),
    (".", "symbols", 1936),
    (".", "threads", 2546),
    (".", "watch", 1189),
    ("crates/capture", "(top)", 228),
    ("crates/capture", "drain", 988),
    ("crates/capture", "sampler", 2135),
    ("crates/capture", "sys", 6200),
    ("crates/capture", "unwind", 2938),
    ("crates/otlp", "(top)", 1341),
    ("crates/profile", "(top)", 507),
    ("crates/profile", "compare", 1140),
    ("crates/profile", "encode", 2422),
    ("crates/profile", "export", 1033),
    ("crates/profile", "facts", 1297),
    ("crates/profile", "profile", 3672),
    ("crates/profile", "redact", 349),
    ("crates/server", "(top)", 1278),
    ("macros", "(top)", 362),
];

/// Lines that are not for tests: without items and files under `cfg(test)`.
fn product_lines(text: &str) -> usize {
    let gate =
        Regex::new(r"^\s*#(!?)\[cfg\((all\()?test\b|^\s*#\[cfg\(any\(test, fuzzing\)\)\]").unwrap();
    let no_code = Regex::new(r#"//.*|"(\\.|[^"\\])*"|'(\\.|[^'\\])'"#).unwrap();
    let (mut count, mut lines) = (0, text.split('\n').peekable());
    while let Some(line) = lines.next() {
        let Some(found) = gate.captures(line) else {
            count += 1;
            continue;
        };
        if found.get(1).is_some_and(|inner| !inner.is_empty()) {
            break;
        }
        while lines.next_if(|line| line.trim_start().starts_with("#[")).is_some() {}
        let (mut opened, mut closed) = (0, 0);
        for line in lines.by_ref() {
            let code = no_code.replace_all(line, "");
            opened += code.matches('{').count();
            closed += code.matches('}').count();
            let is_whole =
                if opened > 0 { closed >= opened } else { code.trim_end().ends_with([';', ',']) };
            if is_whole {
                break;
            }
        }
    }
    count
}

/// The lines of the product by crate and room.
fn rooms() -> BTreeMap<(String, String), usize> {
    let for_tests = Regex::new(
        r"(^|/)(tests?|testing|model|oracle|churn|fuzzing|scripted|deep|parts)(\.rs|/)|roundtrip|nested_code",
    );
    let (for_tests, gated_module) = (
        for_tests.unwrap(),
        Regex::new(r"#\[cfg\(test\)\]\s*(?:pub(?:\(crate\))? )?mod (\w+);").unwrap(),
    );
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let members = fs::read_dir(root.join("crates")).into_iter().flatten();
    let members = members.map(|member| format!("crates/{}", member.unwrap().file_name().display()));
    let mut rooms = BTreeMap::new();
    for name in [".".to_owned(), "macros".to_owned()].into_iter().chain(members) {
        let src = root.join(&name).join("src");
        let texts: Vec<_> = rust_files_below(&src)
            .into_iter()
            .map(|path| (fs::read_to_string(&path).unwrap(), path))
            .collect();
        let mut gated = BTreeSet::new();
        for (text, path) in &texts {
            let is_top = ["mod.rs", "lib.rs", "main.rs"].iter().any(|top| path.ends_with(top));
            let dir =
                if is_top { path.parent().unwrap().to_owned() } else { path.with_extension("") };
            gated.extend(gated_module.captures_iter(text).map(|found| dir.join(&found[1])));
        }
        for (text, path) in &texts {
            let file = path.strip_prefix(&src).unwrap().to_str().unwrap();
            let is_gated = path.with_extension("").ancestors().any(|dir| gated.contains(dir));
            if !for_tests.is_match(file) && !is_gated {
                let room = file.split_once('/').map_or("(top)", |(room, _)| room);
                *rooms.entry((name.clone(), room.to_owned())).or_default() += product_lines(text);
            }
        }
    }
    rooms
}

#[test]
fn no_room_grows() {
    let rooms = rooms();
    let stated = |name: &str, room: &str| {
        ROOMS.iter().find(|of| (of.0, of.1) == (name, room)).map_or(0, |of| of.2)
    };
    let grown: Vec<_> = rooms
        .iter()
        .filter(|((name, room), lines)| **lines > stated(name, room))
        .map(|((name, room), lines)| format!("{name} {room}: {lines}, not {}", stated(name, room)))
        .collect();
    let table: Vec<_> = rooms
        .iter()
        .map(|((name, room), lines)| format!("    ({name:?}, {room:?}, {lines}),"))
        .collect();
    let (grown, table) = (grown.join("\n"), table.join("\n"));
    let now: usize = rooms.values().sum();
    assert!(
        grown.is_empty(),
        "these rooms have more lines than `ROOMS` states:\n{grown}\nDelete as much there, or in another room, and \
         move the lines from its entry to this one. The sum stays within `TOTAL`, now {now} of {TOTAL}. All \
         entries as they are now:\n{table}"
    );
    let sum: usize = ROOMS.iter().map(|of| of.2).sum();
    assert!(
        sum <= TOTAL,
        "the entries of `ROOMS` add up to {sum}, more than `TOTAL`: {TOTAL}. As they are now, {now}:\n{table}"
    );
}

#[test]
fn lines_of_tests_do_not_count() {
    let text = "fn a() {}\n#[cfg(test)]\n#[derive(Debug)]\nstruct B {\n    c: &str, // }\n}\n#[cfg(all(test, unix))]\nuse d;\nfn e() {\n    #[cfg(test)]\n    f(\"{\");\n}";
    assert_eq!(product_lines(text), 3);
    assert_eq!(product_lines("//! A.\n#![cfg(test)]\nfn a() {}"), 1);
}

/// The guide shows the file that `.ci/interop` runs.
#[test]
fn the_guide_shows_the_configuration_of_the_collector_as_it_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = fs::read_to_string(root.join("docs/guide/receivers.md")).unwrap();
    let file = fs::read_to_string(root.join("examples/collector/collector.yaml")).unwrap();
    assert!(guide.contains(&format!("```yaml\n{file}```\n")));
}

/// Tests are named `file.rs::a_test`, or `file.rs::a_module::a_test` where a macro makes the module.
#[test]
fn each_invariant_of_the_design_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let design = fs::read_to_string(root.join("docs/design.md")).unwrap();
    let mut names = 0;
    for paragraph in design.split("\n\n").filter(|paragraph| paragraph.contains("**Invariant:**")) {
        let before = names;
        let in_ticks = paragraph.split('`').skip(1).step_by(2);
        for (file, test) in in_ticks.filter_map(|name| name.split_once(".rs::")) {
            let text = fs::read_to_string(root.join(file).with_extension("rs")).unwrap_or_default();
            let declared = match test.split_once("::") {
                Some((module, _)) => format!("{module}: "),
                None => format!("fn {test}("),
            };
            assert!(text.contains(&declared), "there is no test {test} in {file}.rs");
            names += 1;
        }
        assert!(names > before, "no test is named for this invariant: {paragraph}");
    }
    assert!(names > 50, "only {names} tests were found");
}

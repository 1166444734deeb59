//! Which samples the attributes of a span lead to: each id on an exported span is that of samples in OTLP.

use std::collections::HashSet;

use opentelemetry_proto::tonic::profiles::v1development as proto;
use prost::Message as _;
use tracing::Span;
use tracing_profiling::encode::otlp;
use tracing_profiling::{OpenSpan, Resource};

use super::*;

/// A sample of an exported profile.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Linked {
    profile: String,
    is_wait: bool,
    trace: Vec<u8>,
    span: Vec<u8>,
    /// The value of its attribute `span.name`.
    name: String,
}

fn linked_in(profile: &Profile) -> HashSet<Linked> {
    let message = otlp(profile, &Resource::new());
    let data = proto::ProfilesData::decode(message.as_slice()).unwrap();
    let dictionary = data.dictionary.unwrap();
    let string = |index: i32| dictionary.string_table[index as usize].as_str();
    let profiles = &data.resource_profiles[0].scope_profiles[0].profiles;
    let mut linked = HashSet::new();
    for profile in profiles {
        let kind = string(profile.sample_type.unwrap().type_strindex);
        let id = profile.profile_id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        for sample in &profile.samples {
            let link = &dictionary.link_table[sample.link_index as usize];
            let attributes: Vec<_> = sample
                .attribute_indices
                .iter()
                .map(|index| &dictionary.attribute_table[*index as usize])
                .collect();
            let keys: Vec<_> =
                attributes.iter().map(|attribute| string(attribute.key_strindex)).collect();
            // Placeholders have no thread.
            let is_placed = keys == ["span.name"];
            assert!(is_placed || keys == ["span.name", "thread.name"], "no ids: {keys:?}");
            let attribute = attributes[0];
            let value = attribute.value.clone().unwrap().value.unwrap();
            use opentelemetry_proto::tonic::common::v1::any_value::Value::StringValue;
            let StringValue(name) = value else { panic!("{value:?}") };
            linked.insert(Linked {
                profile: id.clone(),
                is_wait: kind == "off_cpu",
                trace: link.trace_id.clone(),
                span: link.span_id.clone(),
                name,
            });
        }
    }
    linked
}

/// The exported spans of a scene and what its samples link to.
struct Seen {
    spans: HashMap<String, SpanData>,
    linked: HashSet<Linked>,
}

impl Seen {
    /// Checks that each attribute leads to samples.
    fn of(scene: &Scene) -> Self {
        let spans = scene.spans();
        let linked: HashSet<_> = scene.profiles().iter().flat_map(linked_in).collect();
        let seen = Self { spans, linked };
        for (name, span) in &seen.spans {
            let id = text(span, "profile.id");
            if let Some(grafana) = text(span, "pyroscope.profile.id") {
                let trace = span.span_context.trace_id().to_bytes();
                let is_of = |sample: &&Linked| !sample.is_wait && hex(&sample.span) == grafana;
                let samples: Vec<_> = seen.linked.iter().filter(is_of).collect();
                assert!(!samples.is_empty(), "`{name}`: {grafana} in {:?}", seen.linked);
                assert!(samples.iter().all(|sample| sample.trace == trace), "{samples:?}");
                let is_here = |sample: &&Linked| Some(&sample.profile) == id.as_ref();
                assert!(id.is_none() || samples.iter().any(is_here), "`{name}`: {samples:?}");
            }
            if let Some(waits) = text(span, "profile.off_cpu_id") {
                let is_there = |sample: &Linked| sample.is_wait && sample.profile == waits;
                assert!(seen.linked.iter().any(is_there), "`{name}`: {waits} in {:?}", seen.linked);
            }
        }
        seen
    }

    /// The name of the span to which a span's `pyroscope.profile.id` leads.
    fn leads_to(&self, name: &str) -> Option<&str> {
        let id = text(&self.spans[name], "pyroscope.profile.id")?;
        let is_it =
            |(_, span): &(&String, &SpanData)| span.span_context.span_id().to_string() == id;
        Some(self.spans.iter().find(is_it).unwrap().0)
    }

    /// The names of the innermost spans of the on-CPU samples to which a span's `pyroscope.profile.id` leads, sorted.
    fn shown_by(&self, name: &str) -> Vec<&str> {
        let id = text(&self.spans[name], "pyroscope.profile.id");
        let is_of = |sample: &&Linked| !sample.is_wait && Some(hex(&sample.span)) == id;
        let names: HashSet<_> =
            self.linked.iter().filter(is_of).map(|sample| sample.name.as_str()).collect();
        let mut names: Vec<_> = names.into_iter().collect();
        names.sort_unstable();
        names
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Runs `action` and passes what was seen to `check`, if there are samples at all.
fn seen_in(set: fn(Builder) -> Builder, action: impl Fn(&Scene), check: impl Fn(&Seen)) {
    let scene = Scene::with(set, Sampler::AlwaysOn, in_order);
    scene.run(|| action(&scene));
    let seen = Seen::of(&scene);
    if HAS_STACKS {
        check(&seen);
    }
}

fn query(number: usize) -> Span {
    match number {
        0 => info_span!(target: "fast", "query 0"),
        1 => info_span!(target: "fast", "query 1"),
        2 => info_span!(target: "fast", "query 2"),
        3 => info_span!(target: "fast", "query 3"),
        _ => info_span!(target: "fast", "query 4"),
    }
}

/// All spans are kept, except those of target `fast`, and count as open for long after 10 s. Connections count as that
/// after 10 ms.
fn usual(builder: Builder) -> Builder {
    builder.rules("0ms,fast=1h,[connection]=on_cpu>1ms,[long]=1ms".parse().unwrap())
}

fn queries(numbers: std::ops::Range<usize>, each: Duration) {
    for number in numbers {
        query(number).in_scope(|| burn(each));
    }
}

#[test]
fn a_request_of_short_children_leads_to_their_samples() {
    seen_in(
        usual,
        |_| {
            info_span!("request").in_scope(|| queries(0..5, 20 * MS));
            // More than ten times its threshold.
            info_span!("long")
                .in_scope(|| info_span!(target: "fast", "part").in_scope(|| burn(60 * MS)));
        },
        |seen| {
            assert_eq!(seen.leads_to("request"), Some("request"));
            let shown = seen.shown_by("request");
            for name in ["query 0", "query 1", "query 2", "query 3", "query 4"] {
                assert!(shown.contains(&name), "{shown:?}");
                assert_eq!(seen.leads_to(name), None);
            }
            assert_eq!(seen.leads_to("long"), Some("long"));
            assert!(seen.shown_by("long").contains(&"part"));
        },
    );
}

#[test]
fn a_request_that_worked_itself_leads_to_its_samples() {
    seen_in(
        usual,
        |_| {
            info_span!("request").in_scope(|| burn(60 * MS));
        },
        |seen| {
            assert_eq!(seen.leads_to("request"), Some("request"));
            assert_eq!(seen.shown_by("request"), ["request"]);
        },
    );
}

#[test]
fn a_child_that_is_exported_before_its_root_leads_to_the_root() {
    seen_in(
        usual,
        |scene| {
            info_span!("request").in_scope(|| {
                info_span!("child").in_scope(|| burn(60 * MS));
                // As after some seconds.
                scene.handle.flush(PLENTY).unwrap();
                assert_eq!(scene.profiles().len(), usize::from(HAS_STACKS));
                queries(0..1, 40 * MS);
            });
        },
        |seen| {
            assert_eq!(seen.leads_to("request"), Some("request"));
            assert_eq!(seen.leads_to("child"), Some("request"));
            let shown = seen.shown_by("request");
            assert!(shown.contains(&"query 0"), "{shown:?}");
            // Its own profile has the child's samples again.
            assert!(shown.contains(&"child"), "{shown:?}");
        },
    );
}

/// All of the root's samples are in an earlier profile, too.
#[test]
fn a_root_leads_to_samples_that_were_exported_before_it_closed() {
    let scene = Scene::with(usual, Sampler::AlwaysOn, in_order);
    scene.run(|| {
        let request = info_span!("request");
        request.in_scope(|| info_span!("child").in_scope(|| burn(60 * MS)));
        scene.handle.flush(PLENTY).unwrap();
    });
    let seen = Seen::of(&scene);
    if HAS_STACKS {
        assert_eq!(seen.leads_to("request"), Some("request"));
        assert!(seen.shown_by("request").contains(&"child"));
    }
}

#[test]
fn a_child_whose_root_is_never_kept_leads_to_the_root() {
    for exports_first in [false, true] {
        seen_in(
            usual,
            |scene| {
                let root = info_span!(target: "fast", "root");
                root.in_scope(|| burn(MS));
                root.in_scope(|| info_span!("child").in_scope(|| burn(60 * MS)));
                if exports_first {
                    scene.handle.flush(PLENTY).unwrap();
                }
            },
            |seen| {
                assert_eq!(seen.leads_to("root"), None);
                assert_eq!(seen.leads_to("child"), Some("root"));
            },
        );
    }
}

#[test]
fn streams_of_a_connection_lead_to_themselves() {
    for exports_between in [false, true] {
        seen_in(
            usual,
            |scene| {
                let connection = info_span!("connection");
                connection.in_scope(|| ());
                std::thread::sleep(20 * MS);
                connection.in_scope(|| {
                    info_span!("stream a").in_scope(|| queries(0..2, 40 * MS));
                    if exports_between {
                        scene.handle.flush(PLENTY).unwrap();
                    }
                    info_span!("stream b").in_scope(|| {
                        queries(2..3, 40 * MS);
                        info_span!("slow child").in_scope(|| burn(40 * MS));
                    });
                });
            },
            |seen| {
                assert_eq!(seen.leads_to("stream a"), Some("stream a"));
                assert_eq!(seen.leads_to("stream b"), Some("stream b"));
                assert_eq!(seen.leads_to("slow child"), Some("stream b"));
                let [a, b] = ["stream a", "stream b"].map(|name| seen.shown_by(name));
                assert!(a.contains(&"query 0") && a.contains(&"query 1"), "{a:?}");
                assert!(b.contains(&"query 2"), "{b:?}");
                assert!(!a.iter().any(|name| b.contains(name)), "{a:?} {b:?}");
            },
        );
    }
}

#[test]
fn a_child_on_another_thread_leads_to_the_request() {
    seen_in(
        usual,
        |_| {
            let request = info_span!("request");
            request.in_scope(|| burn(MS));
            std::thread::scope(|scope| {
                let dispatch = tracing::dispatcher::get_default(Dispatch::clone);
                let child = info_span!(parent: &request, "child");
                scope.spawn(move || {
                    tracing::dispatcher::with_default(&dispatch, || {
                        child.in_scope(|| burn(60 * MS));
                        drop(child);
                    });
                });
            });
        },
        |seen| {
            assert_eq!(seen.leads_to("child"), Some("request"));
            assert_eq!(seen.leads_to("request"), Some("request"));
            assert!(seen.shown_by("request").contains(&"child"));
        },
    );
}

#[test]
fn a_span_that_only_waited_leads_to_its_waits() {
    let scene = Scene::with(usual, Sampler::AlwaysOn, in_order);
    // Until the collector has the stack of the wait, for which it may have to wait for a CPU.
    let wait_in = |name: &str| {
        let is_it = |span: &OpenSpan| span.name == name && !span.stack.is_empty();
        let is_seen = || scene.handle.open_spans(Duration::ZERO).unwrap().iter().any(is_it);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(100 * MS);
                let start = std::time::Instant::now();
                while HAS_STACKS && !is_seen() {
                    assert!(start.elapsed() < PLENTY, "{name}");
                    std::thread::sleep(10 * MS);
                }
            });
        });
    };
    scene.run(|| {
        info_span!("idle").in_scope(|| wait_in("idle"));
        info_span!("request").in_scope(|| {
            burn(60 * MS);
            info_span!("waits").in_scope(|| wait_in("waits"));
        });
    });
    let seen = Seen::of(&scene);
    if !HAS_STACKS {
        return;
    }
    assert_eq!(seen.leads_to("request"), Some("request"));
    for name in ["idle", "waits"] {
        let span = &seen.spans[name];
        // The sleep itself can take a sample.
        let has_sample = seen.linked.iter().any(|sample| !sample.is_wait && sample.name == name);
        assert!(has_sample || seen.leads_to(name).is_none(), "{name}: {:?}", seen.linked);
        assert!(text(span, "profile.off_cpu_id").is_some(), "{name}: {:?}", span.attributes);
    }
    // Those of the request contain the wait of its child.
    assert!(text(&seen.spans["request"], "profile.off_cpu_id").is_some());
}

/// A filter hides spans between a request and its slow child from OpenTelemetry.
#[test]
fn a_hidden_span_is_no_link() {
    let scene = Scene::with(usual, Sampler::AlwaysOn, |profiling, tracer| {
        let quiet = FilterFn::new(|metadata| !metadata.target().starts_with("quiet"));
        Dispatch::new(
            tracing_subscriber::registry().with(profiling).with(otel(tracer).with_filter(quiet)),
        )
    });
    scene.run(|| {
        let _hidden_root = info_span!(target: "quiet", "hidden root").entered();
        let _request = info_span!("request").entered();
        let _hidden = info_span!(target: "quiet", "hidden").entered();
        info_span!("child").in_scope(|| burn(60 * MS));
    });
    let seen = Seen::of(&scene);
    if HAS_STACKS {
        assert_eq!(seen.leads_to("child"), Some("request"));
        assert_eq!(seen.leads_to("request"), Some("request"));
    }
}

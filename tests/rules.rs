//! Each condition of the rules, with a real subscriber.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::time::{Duration, Instant};

use cpu_time::ThreadTime;
use support::Nanos as _;
use support::{HAS_STACKS, PLENTY, Setup, burn};
use tracing::field::Empty;
use tracing::{Span, error, info_span};
use tracing_profiling::{KeptSpan, Measure, Reason, Reasons, Source};

const MS: Duration = Duration::from_millis(1);

/// The kept spans with their reasons, in the order of the reports.
fn kept(setup: &Setup) -> Vec<(&'static str, String)> {
    let all = setup.kept();
    let spans = all.iter().flat_map(|kept| &kept.spans);
    spans.map(|span| (span.name(), span.reasons().to_string())).collect()
}

fn names(setup: &Setup) -> Vec<&'static str> {
    kept(setup).into_iter().map(|(name, _)| name).collect()
}

fn sleep(time: Duration) {
    std::thread::sleep(time);
}

#[test]
fn latency_to_the_last_exit_leaves_out_the_wait_for_children() {
    let start = Instant::now();
    loop {
        // No other layer enables the child.
        let rules = "[parent]=last_exit>20ms,[late]=last_exit>20ms,[child]=1h";
        let setup = Setup::new(rules);
        let to_last_exit = setup.run(|| {
            let start = Instant::now();
            let parent = info_span!("parent");
            let child = parent.in_scope(|| info_span!("child"));
            drop(parent);
            let to_last_exit = start.elapsed();
            sleep(60 * MS);
            drop(child);
            let late = info_span!("late");
            sleep(25 * MS);
            late.in_scope(|| {});
            to_last_exit
        });
        assert!(start.elapsed() < PLENTY, "{to_last_exit:?}");
        // Otherwise it was late, too.
        if to_last_exit < 20 * MS {
            assert_eq!(kept(&setup), [("late", "last_exit".to_owned())]);
            break;
        }
    }
    let setup = Setup::new("[parent]=20ms,[child]=1h");
    setup.run(|| {
        let parent = info_span!("parent");
        let child = parent.in_scope(|| info_span!("child"));
        drop(parent);
        sleep(60 * MS);
        drop(child);
    });
    let account = *setup.kept()[0].spans[0].times();
    assert!(account.after_last_exit().ns() >= 60_000_000, "{account:?}");
    assert!(account.idle().ns() >= account.after_last_exit().ns(), "{account:?}");
}

#[test]
fn an_error_of_a_child_is_not_an_own_error() {
    let setup = Setup::new("[outer]=error=self,[outermost]=error,[inner]=error=self");
    setup.run(|| {
        let _outermost = info_span!("outermost").entered();
        let _outer = info_span!("outer").entered();
        let _inner = info_span!("inner").entered();
        // An error in a span that no rule matches belongs to the enclosing span.
        info_span!("innermost").in_scope(|| error!("oh"));
    });
    let mut names = names(&setup);
    names.sort_unstable();
    assert_eq!(names, ["inner", "outermost"]);
}

#[test]
fn on_cpu_off_cpu_and_idle_time_decide() {
    let rules = "[a]=on_cpu>30ms,[b]=off_cpu>30ms,[c]=idle>30ms,[d]=on_cpu>60%,[e]=off_cpu>60%,[f]=idle>60%";
    let rules = rules.replace(',', "|hung=off,") + "|hung=off";
    let setup = Setup::with(&rules, |builder| builder.profiles_per_minute(1_000));
    setup.run(|| {
        // Each rule sees spans with CPU time, off-CPU time and idle time, and keeps one of them.
        for which in ["a", "b", "c", "d", "e", "f"] {
            let span = || match which {
                "a" => info_span!("a"),
                "b" => info_span!("b"),
                "c" => info_span!("c"),
                "d" => info_span!("d"),
                "e" => info_span!("e"),
                _ => info_span!("f"),
            };
            span().in_scope(|| burn(100 * MS));
            // Until one is not preempted, by the clocks around and in it. Shares are judged from 1 ms on.
            let (start, mut ran) = (Instant::now(), 0.0_f64);
            for number in 0.. {
                if number >= 50 && ran > 0.6 {
                    break;
                }
                assert!(start.elapsed() < PLENTY, "all are preempted");
                let start = Instant::now();
                let cpu = span().in_scope(|| {
                    let start = ThreadTime::now();
                    burn(MS);
                    start.elapsed()
                });
                ran = ran.max(cpu.as_secs_f64() / start.elapsed().as_secs_f64());
            }
            span().in_scope(|| sleep(100 * MS));
            let idle = span();
            sleep(100 * MS);
            drop(idle);
        }
    });
    let reasons = ["on_cpu", "off_cpu", "idle"];
    for (number, name) in ["a", "b", "c", "d", "e", "f"].into_iter().enumerate() {
        let part = number % 3;
        // On other systems the CPU time of a thread is unknown.
        if !HAS_STACKS && part != 2 {
            continue;
        }
        let kept = setup.kept();
        let spans = kept.iter().flat_map(|kept| &kept.spans).filter(|span| span.name() == name);
        let spans: Vec<_> = spans.collect();
        let parts = |span: &KeptSpan| {
            let account = span.times();
            [account.on_cpu().ns(), account.off_cpu().ns(), account.idle().ns()][part]
        };
        // The span that must be kept. On a busy machine the others may be blocked for as long.
        let meant = if name == "d" { 1_000_000 } else { 95_000_000 };
        assert!(spans.iter().any(|span| parts(span) >= meant), "{name}: {spans:?}");
        for span in spans {
            assert_eq!(span.reasons().to_string(), reasons[part]);
            let least = if number < 3 { 30_000_000 } else { span.times().wall().ns() / 10 * 6 };
            assert!(parts(span) > least, "{name}: {span:?}");
        }
    }
    let of = |name| kept(&setup).iter().filter(|(kept, _)| *kept == name).count();
    assert!(!HAS_STACKS || of("a") == 1, "CPU time does not depend on other load");
}

#[test]
fn on_cpu_judges_the_subtree_and_own_on_cpu_the_span_alone() {
    let rules = "[subtree]=on_cpu>60ms|hung=off,[own]=own_on_cpu>60ms|hung=off,\
        [both]=on_cpu>60ms|own_on_cpu>60ms|hung=off";
    let setup = Setup::new(rules);
    let in_two_threads = |span: Span| {
        let elsewhere = || {
            tracing::dispatcher::with_default(&setup.dispatch, || {
                info_span!(parent: &span, "both").in_scope(|| burn(70 * MS));
            });
        };
        std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap());
        span.in_scope(|| ());
    };
    setup.run(|| {
        in_two_threads(info_span!("subtree"));
        in_two_threads(info_span!("own"));
    });
    let mut kept = kept(&setup);
    kept.sort();
    let both = || ("both", "on_cpu|own_on_cpu".to_owned());
    let expected = vec![both(), both(), ("subtree", "on_cpu".to_owned())];
    assert_eq!(kept, if HAS_STACKS { expected } else { vec![] });
    let of = |measure| setup.handle.stats().kept_for(Reason::Above(measure));
    assert!(!HAS_STACKS || (of(Measure::SubtreeOnCpu), of(Measure::OnCpu)) == (3, 2));
}

const SEGMENTS: u32 = 5;

/// Runs a span with many segments; the thread does the same work between them. Returns bounds of the time that counts,
/// from the thread's own clocks inside and around the segments.
fn of_segments(rule: &str, segment: Duration, work: fn(Duration)) -> (Duration, Duration) {
    let (mut inside, mut around) = (Duration::ZERO, Duration::ZERO);
    let since = |start: (Instant, ThreadTime)| {
        let cpu = start.1.elapsed();
        if rule == "off_cpu" { start.0.elapsed().saturating_sub(cpu) } else { cpu }
    };
    let now = || (Instant::now(), ThreadTime::now());
    let span = info_span!("judged");
    for _ in 0..SEGMENTS {
        let outer = now();
        span.in_scope(|| {
            let inner = now();
            work(segment);
            inside += since(inner);
        });
        around += since(outer);
        burn(segment / 2);
    }
    (inside, around)
}

/// The same for the time between segments, in which `work` is done.
fn of_gaps(_: &str, gap: Duration, work: fn(Duration)) -> (Duration, Duration) {
    let (mut inside, mut around) = (Duration::ZERO, Duration::ZERO);
    let mut left_inside = Instant::now();
    let span = info_span!("judged");
    let mut left = Instant::now();
    for _ in 0..SEGMENTS {
        work(gap);
        inside += left.elapsed();
        span.in_scope(|| {
            around += left_inside.elapsed();
            burn(gap / 2);
            left_inside = Instant::now();
        });
        left = Instant::now();
    }
    drop(span);
    (inside, around + left_inside.elapsed())
}

type Played = fn(&str, Duration, fn(Duration)) -> (Duration, Duration);

/// Spans around the limit, from below to above.
fn verdicts_hold(
    source: Source,
    rule: &str,
    limit: Duration,
    (play, work): (Played, fn(Duration)),
) {
    let rules = format!("{rule}>{}us", limit.as_micros());
    let setup = Setup::with(&rules, |builder| builder.source(source).profiles_per_minute(100_000));
    let spans: Vec<_> = (40..=160)
        .step_by(10)
        .map(|percent| setup.run(|| play(rule, limit * percent / 100 / SEGMENTS, work)))
        .collect();
    let kept = setup.kept();
    let kept: Vec<_> = kept.iter().flat_map(|kept| &kept.spans).collect();
    let slack = Duration::from_micros(50);
    let must = spans.iter().filter(|(inside, _)| *inside > limit + slack).count();
    let must_not = spans.iter().filter(|(_, around)| *around + slack < limit).count();
    // On a busy machine sleeps and gaps can all be late.
    assert!(must > 0 && (must_not > 0 || rule != "on_cpu"), "{spans:?}");
    assert!(
        kept.len() >= must && kept.len() <= spans.len() - must_not,
        "{rule} of {limit:?} by {source:?}: {} of {spans:?}",
        kept.len()
    );
    let account = |span: &&KeptSpan| match rule {
        "off_cpu" => span.times().off_cpu().ns(),
        "idle" => span.times().idle().ns(),
        _ => span.times().on_cpu().ns(),
    };
    let least = kept.iter().map(account).min().unwrap();
    assert!(u128::from(least) > limit.as_nanos(), "{least}");
}

#[test]
fn verdicts_are_right_within_50_microseconds() {
    let burn = |time| _ = burn(time);
    for source in [Source::Auto, Source::Timer, Source::None] {
        for limit in [2 * MS, 7 * MS, 20 * MS] {
            verdicts_hold(source, "idle", limit, (of_gaps, burn));
            verdicts_hold(source, "idle", limit, (of_gaps, sleep));
            if HAS_STACKS {
                verdicts_hold(source, "on_cpu", limit, (of_segments, burn));
                verdicts_hold(source, "off_cpu", limit, (of_segments, sleep));
            }
        }
    }
}

#[test]
fn a_percentile_keeps_rare_spans_over_its_minimum() {
    let start = Instant::now();
    let (setup, longest) = loop {
        let (setup, longest) = usual_and_rare_spans();
        assert!(start.elapsed() < PLENTY, "every round has a usual span of {longest:?}");
        // Otherwise one of the usual spans was rare: this time includes all that the layer sees.
        if longest < 100 * MS {
            break (setup, longest);
        }
    };
    assert_eq!(kept(&setup), [("usual", "percentile".to_owned())], "{longest:?}");
    assert_eq!(setup.handle.stats().kept_for(Reason::Percentile), 1);
}

/// The fields that the layer itself advises to show: each request has a path of its own.
#[test]
fn a_percentile_keeps_rare_requests_of_paths_that_occur_once() {
    let paths: [fn(u32) -> String; 2] = [
        |number| format!("/users/{number}"),
        // No id by its looks.
        |number| number.to_string().bytes().map(|digit| char::from(digit + 49)).collect(),
    ];
    for path in paths {
        let setup = Setup::with("p90>10ms", |builder| {
            builder.span_fields(["method", "uri"]).profiles_per_minute(1_000_000)
        });
        let request = |number| {
            let uri = path(number);
            info_span!("request", method = "GET", uri)
        };
        setup.run(|| {
            (0..2_000).for_each(|number| drop(request(number)));
            (2_000..2_010).for_each(|number| {
                let _rare = request(number);
                sleep(12 * MS);
            });
        });
        let kept = kept(&setup);
        let rare = kept.iter().filter(|(_, reasons)| reasons == "percentile").count();
        assert!(rare >= 10, "{kept:?}");
    }
}

/// Returns the time of the longest usual span.
fn usual_and_rare_spans() -> (Setup, Duration) {
    let setup = Setup::new("p90>100ms");
    let longest = setup.run(|| {
        let mut longest = Duration::ZERO;
        let mut usual = |time| {
            let start = Instant::now();
            let span = info_span!("usual");
            sleep(time);
            drop(span);
            longest = longest.max(start.elapsed());
        };
        (0..200).for_each(|_| usual(Duration::ZERO));
        // Another name has its own percentile, which is still unknown.
        let unknown = info_span!("unknown");
        sleep(110 * MS);
        drop(unknown);
        usual(MS);
        let rare = info_span!("usual");
        sleep(110 * MS);
        drop(rare);
        longest
    });
    (setup, longest)
}

#[test]
fn one_in_n_keeps_that_share_of_healthy_spans() {
    let setup = Setup::new("1h|one_in=100");
    setup.run(|| {
        for _ in 0..10_000 {
            info_span!("healthy").in_scope(|| {});
        }
    });
    // Six standard deviations.
    let kept = setup.handle.stats().spans.kept;
    assert!((40..=160).contains(&kept), "{kept}");
    let reasons: Reasons = [Reason::OneIn].into_iter().collect();
    assert!(setup.kept().iter().all(|kept| kept.spans[0].reasons() == reasons));
}

#[test]
fn always_keeps_every_span_and_off_none() {
    let setup = Setup::new("always,[noise]=off");
    setup.run(|| {
        for _ in 0..3 {
            info_span!("span").in_scope(|| info_span!("noise").in_scope(|| {}));
        }
    });
    assert_eq!(names(&setup), ["span"; 3]);
}

#[test]
fn field_values_decide_when_set_at_creation_or_later() {
    let setup = Setup::new("[checkout{tenant=acme}]=always,[checkout{tenant=test}]=off,1h");
    let at_once = |tenant: &str| info_span!("checkout", tenant);
    let later = |tenant: &str| {
        let span = info_span!("checkout", tenant = Empty, number = Empty);
        span.in_scope(|| _ = Span::current().record("tenant", tenant));
        span.record("number", 7);
        span
    };
    setup.run(|| {
        for tenant in ["acme", "test", "other"] {
            at_once(tenant).in_scope(|| {});
            later(tenant).in_scope(|| {});
        }
        info_span!("checkout").in_scope(|| {});
        info_span!("refund", tenant = "acme").in_scope(|| {});
    });
    assert_eq!(names(&setup), ["checkout"; 2]);
}

#[test]
fn patterns_match_whole_values_set_at_creation_or_later() {
    let setup = Setup::new(
        r#"[a{tenant=acme-.*}]=always,[b{uri=~"/cart/[0-9]{1,3}"}]=always,[c{status=5..}]=always,1h"#,
    );
    setup.run(|| {
        for (tenant, uri, status) in [
            ("acme-eu", "/cart/17", 503),
            ("acme", "/cart/1234", 404),
            ("big-acme-eu", "/x/cart/17", 5030),
        ] {
            info_span!("a", tenant).in_scope(|| {});
            info_span!("b", uri = %uri).in_scope(|| {});
            let later = info_span!("c", status = Empty);
            later.record("status", status);
        }
        info_span!("b", uri = ?"/cart/3").in_scope(|| {});
    });
    let mut names = names(&setup);
    names.sort_unstable();
    assert_eq!(names, ["a", "b", "b", "c"]);
}

#[test]
fn a_span_that_a_later_value_keeps_has_samples_from_the_beginning() {
    let setup = Setup::new("[checkout{tenant=acme}]=always");
    let run = |tenant: &str| {
        let span = info_span!("checkout", tenant = Empty).entered();
        burn(300 * MS);
        span.record("tenant", tenant);
    };
    setup.run(|| {
        run("other");
        run("acme");
    });
    assert_eq!(names(&setup), ["checkout"]);
    if HAS_STACKS {
        assert!(setup.kept()[0].spans[0].samples() >= 3, "{:?}", setup.kept());
    }
}

#[test]
fn keep_current_keeps_the_current_span() {
    let setup = Setup::with("1h", |builder| builder.profiles_per_minute(1));
    setup.run(|| {
        assert!(!setup.handle.keep_current(), "no span is entered");
        for _ in 0..3 {
            let _outer = info_span!("outer").entered();
            let _span = info_span!("asked for").entered();
            burn(300 * MS);
            info_span!("inner").in_scope(|| {});
            assert!(setup.handle.keep_current());
        }
        info_span!("not asked for").in_scope(|| {});
    });
    assert_eq!(kept(&setup), vec![("asked for", "forced".to_owned()); 3]);
    if HAS_STACKS {
        assert_eq!(setup.profiles().len(), 3, "the rate limit of its rule does not apply");
    }
}

#[test]
fn all_reasons_of_a_span_are_reported() {
    let setup = Setup::new("10ms|error|idle>1ms|always");
    setup.run(|| {
        let span = info_span!("span");
        sleep(20 * MS);
        span.in_scope(|| error!("oh"));
    });
    assert_eq!(kept(&setup), [("span", "latency|error|idle|always".to_owned())]);
    let stats = setup.handle.stats();
    let [latency, idle] = [Measure::Wall, Measure::Idle].map(Reason::Above);
    for reason in [latency, Reason::Error, idle, Reason::Always] {
        assert_eq!(stats.kept_for(reason), 1, "{reason:?}");
    }
    assert_eq!((stats.spans.kept, stats.spans.seen), (1, 1));
}

#[test]
fn seen_spans_are_counted_including_those_of_ended_threads() {
    let setup = Setup::new("1h,[noise]=off");
    let run = || {
        for _ in 0..1_000 {
            info_span!("span").in_scope(|| info_span!("noise").in_scope(|| {}));
        }
    };
    setup.run(|| {
        run();
        std::thread::scope(|scope| {
            for _ in 0..10 {
                scope.spawn(|| tracing::dispatcher::with_default(&setup.dispatch, run));
            }
        });
    });
    assert_eq!(setup.handle.stats().spans.seen, 11_000);
}

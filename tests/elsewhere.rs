//! Systems other than Linux: spans have their times, and what cannot be measured is unknown.

#![cfg(tracing_profiling_unsupported)]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test")]

mod support;

use std::time::Duration;

use support::Setup;
use tracing::info_span;

const MS: Duration = Duration::from_millis(1);

#[test]
fn on_cpu_time_is_unknown_and_not_the_whole_wall_time() {
    let setup = Setup::new("0ms");
    setup.run(|| {
        info_span!("sleeps").in_scope(|| std::thread::sleep(400 * MS));
        info_span!("awaits", later = 1);
    });
    let kept = setup.kept();
    let account = *kept[0].spans[0].times();
    assert!(account.is_cpu_time_unknown, "{account:?}");
    let cpu_times = [account.on_cpu(), account.on_cpu_error(), account.off_cpu()];
    assert_eq!(cpu_times, [Duration::ZERO; 3]);
    assert!(
        account.wall() >= Duration::from_millis(400) && account.idle() < account.wall(),
        "{account:?}"
    );
    // A span that was never entered used no CPU time, and that is known.
    assert!(!kept[1].spans[0].times().is_cpu_time_unknown);
}

#[test]
fn rules_about_cpu_time_keep_no_span() {
    for rules in ["on_cpu>1ms", "own_on_cpu>1ms", "off_cpu>1ms", "on_cpu>1%|off_cpu>1%"] {
        let setup = Setup::new(rules);
        setup.run(|| info_span!("sleeps").in_scope(|| std::thread::sleep(20 * MS)));
        assert_eq!(setup.kept().len(), 0, "{rules}");
    }
}

#[test]
fn the_source_names_the_system_and_no_kernel() {
    let source = Setup::new("0ms").handle.source();
    assert!(source.contains("only on Linux") && source.contains("cannot be read"), "{source}");
    assert!(!source.contains("kernel"), "{source}");
}

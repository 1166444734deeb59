//! `#[profiled]` on functions of every kind.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::missing_const_for_fn,
    unsafe_code,
    reason = "a test"
)]

mod support;

use std::fmt::Debug;
use std::time::Duration;

use support::{HAS_STACKS, Setup, burn, functions};
use tracing::Instrument;
use tracing_profiling::profile::SampleKind;
use tracing_profiling::{Reason, profiled};

const MS: Duration = Duration::from_millis(1);

#[profiled(threshold = "0ms")]
fn sync(count: u64) -> u64 {
    count + 1
}

#[profiled(threshold = "0ms", name = "renamed", level = "debug", fields(user = 7, %text), skip(text))]
fn with_arguments_of_instrument(text: &str) -> usize {
    text.len()
}

#[profiled(threshold = "0ms")]
async fn asynchronous(count: u64) -> u64 {
    tokio::task::yield_now().await;
    count
}

#[profiled(threshold = "0ms", skip_all)]
fn future<T: Debug + Send>(value: T) -> impl Future<Output = T> + Send {
    async move { value }.instrument(tracing::Span::current())
}

#[profiled(threshold = "0ms", skip(items))]
fn generic<T, const N: usize>(items: &[T; N]) -> Vec<T>
where
    T: Debug + Clone,
{
    items.to_vec()
}

#[profiled(threshold = "0ms")]
fn recursive(depth: u32) -> u32 {
    if depth == 0 { 0 } else { 1 + recursive(depth - 1) }
}

/// # Safety
///
/// None is needed.
#[profiled(threshold = "0ms")]
unsafe fn not_safe() -> u8 {
    1
}

#[profiled(threshold = "0ms")]
extern "C" fn for_c(number: i32) -> i32 {
    number
}

#[profiled(on_error, err)]
fn fails(how: bool) -> Result<(), String> {
    if how { Err("on purpose".to_owned()) } else { Ok(()) }
}

#[profiled(off)]
fn never() {
    burn(5 * MS);
}

#[profiled]
fn as_the_rules_say() {
    burn(5 * MS);
}

#[profiled(threshold = "1h")]
fn named_by_a_directive() {
    burn(5 * MS);
}

struct Shop {
    price: u64,
}

trait Till {
    fn total(&self) -> u64;
}

impl Shop {
    #[profiled(threshold = "0ms", skip(self))]
    fn method(&mut self) -> &mut u64 {
        &mut self.price
    }

    #[profiled(threshold = "0ms", skip_all)]
    async fn async_method(self) -> u64 {
        self.price
    }
}

impl Till for Shop {
    #[profiled(threshold = "0ms", skip(self))]
    fn total(&self) -> u64 {
        self.price
    }
}

const PAUSE: Duration = Duration::from_millis(30);

#[profiled(threshold = "0ms")]
async fn question_mark(text: &str) -> Result<impl Fn() -> u64 + use<>, Box<dyn std::error::Error>> {
    tokio::time::sleep(PAUSE).await;
    let number: u64 = text.parse()?;
    Ok(move || number)
}

#[profiled(threshold = "0ms")]
async fn returns_early<T: Clone + Debug>(value: &T, early: bool) -> Option<T> {
    #![allow(clippy::needless_return)]
    tokio::time::sleep(PAUSE).await;
    if early {
        return None;
    }
    Some(value.clone())
}

#[profiled(threshold = "0ms")]
async fn changes(mut number: u64) {
    tokio::time::sleep(PAUSE).await;
    number += 1;
    assert!(number > 1);
}

#[async_trait::async_trait]
trait Store {
    async fn load(&self, key: u64) -> u64;
}

#[async_trait::async_trait]
impl Store for Shop {
    #[profiled(threshold = "0ms", skip(self))]
    async fn load(&self, key: u64) -> u64 {
        tokio::time::sleep(PAUSE).await;
        self.price + key
    }
}

mod beside_a_module_of_that_name {
    /// As programs do that set up their log in such a module.
    mod tracing {}

    #[tracing_profiling::profiled(threshold = "0ms")]
    pub(crate) fn beside() {}
}

/// The names of the kept spans, in order.
fn kept(rules: &str, action: impl FnOnce()) -> Vec<&'static str> {
    let setup = Setup::new(rules);
    setup.run(action);
    setup.kept_names().concat()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

#[test]
fn functions_of_every_kind_are_spans_with_a_threshold_of_their_own() {
    let names = kept("1h|level<=debug", || {
        assert_eq!(sync(1), 2);
        assert_eq!(with_arguments_of_instrument("text"), 4);
        assert_eq!(block_on(asynchronous(3)), 3);
        assert_eq!(block_on(future("value")), "value");
        assert_eq!(generic(&[1, 2]), [1, 2]);
        // SAFETY: it has no preconditions.
        assert_eq!(unsafe { not_safe() }, 1);
        assert_eq!(for_c(5), 5);
        let mut shop = Shop { price: 6 };
        *shop.method() += 1;
        assert_eq!(shop.total(), 7);
        assert_eq!(block_on(shop.load(1)), 8);
        assert_eq!(block_on(shop.async_method()), 7);
        beside_a_module_of_that_name::beside();
    });
    // Those with a profile are reported once it is exported, and the others at once.
    let sorted = |mut names: Vec<_>| {
        names.sort_unstable();
        names
    };
    let expected = [
        "sync",
        "renamed",
        "asynchronous",
        "future",
        "generic",
        "not_safe",
        "for_c",
        "method",
        "total",
        "load",
        "async_method",
        "beside",
    ];
    assert_eq!(sorted(names), sorted(expected.to_vec()));
}

#[test]
fn async_functions_of_every_kind_show_what_they_await() {
    let setup = Setup::new("1h");
    setup.run(|| {
        assert_eq!(block_on(question_mark("7")).unwrap()(), 7);
        assert!(block_on(question_mark("seven")).is_err());
        assert_eq!(block_on(returns_early(&1, false)), Some(1));
        assert_eq!(block_on(returns_early(&1, true)), None);
        block_on(changes(1));
        assert_eq!(block_on(Shop { price: 6 }.load(1)), 7);
    });
    let awaits: Vec<_> = setup
        .profiles()
        .iter()
        .map(|profile| {
            let mut awaits = profile.of_kind(SampleKind::Await);
            let sample = awaits.next().unwrap();
            assert!(awaits.next().is_none(), "one place");
            let span = profile.link(sample.link.unwrap()).unwrap().span.clone();
            let name = format!("{span}::");
            let functions = functions(profile, sample);
            assert!(!HAS_STACKS || functions.iter().any(|function| function.contains(&name)));
            span
        })
        .collect();
    let expected =
        ["question_mark", "question_mark", "returns_early", "returns_early", "changes", "load"];
    assert_eq!(awaits, expected);
}

#[test]
fn each_call_of_a_recursive_function_is_a_span() {
    let setup = Setup::new("1h");
    setup.run(|| assert_eq!(recursive(3), 3));
    assert_eq!(setup.kept_names(), [["recursive"; 4]], "one tree");
}

#[test]
fn a_returned_error_keeps_the_span_and_success_does_not() {
    let setup = Setup::new("1h");
    setup.run(|| {
        fails(false).unwrap();
        fails(true).unwrap_err();
    });
    let kept = setup.kept();
    assert_eq!(kept.len(), 1);
    assert!(kept[0].spans[0].reasons().contains(Reason::Error));
}

#[test]
fn without_settings_the_rules_apply_and_off_disables_the_span() {
    let all = || {
        never();
        as_the_rules_say();
        named_by_a_directive();
    };
    assert_eq!(kept("0ms", all), ["as_the_rules_say"]);
    // A directive with its name overrides the attribute.
    assert_eq!(
        kept("0ms,profiled=0ms", all),
        ["never", "as_the_rules_say", "named_by_a_directive"]
    );
    assert_eq!(kept("1h,[never]=0ms", all), ["never"]);
    assert_eq!(kept("profiled=1h", all), [""; 0]);
    // Without a rule for all spans, only those with a setting are profiled.
    assert_eq!(kept("other=0ms", || _ = sync(1)), ["sync"]);
    assert_eq!(kept("other=0ms", as_the_rules_say), [""; 0]);
}

#[test]
fn other_layers_see_nothing_of_the_settings() {
    let out = std::sync::Arc::new(std::sync::Mutex::new(Vec::<u8>::new()));
    #[derive(Clone)]
    struct Writer(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);
    impl std::io::Write for Writer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let writer = Writer(out.clone());
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::DEBUG)
        .with_span_events(tracing_subscriber::fmt::format::FmtSpan::CLOSE)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || with_arguments_of_instrument("words"));
    let text = String::from_utf8(out.lock().unwrap().clone()).unwrap();
    assert!(text.contains("renamed{user=7 text=words}"), "{text}");
    assert!(!text.contains("threshold"), "{text}");
}

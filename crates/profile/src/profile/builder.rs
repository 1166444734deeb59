//! Builds profiles by hand.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{Attribute, FrameKind, Link, LinkId, Point, Profile, ProfileId, SampleKind, Value};
use crate::facts::format::nanoseconds as ns;

/// Builds a profile by hand, to test an `Exporter`. The id, title and notes are fields that can be
/// set on the result.
///
/// ```
/// use std::time::Duration;
/// use tracing_profiling_profile::profile::{Profile, SampleKind};
///
/// let ms = Duration::from_millis;
/// let profile = Profile::builder("GET /cart")
///     .duration(ms(300))
///     .sample(SampleKind::OnCpu, &["GET /cart"], &["shop::render", "main"], ms(10), ms(1))
///     .sample(SampleKind::OffCpu, &["GET /cart", "query"], &["shop::ask", "main"], ms(20), ms(250))
///     .build();
/// assert_eq!(profile.sample_count(), 1);
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ProfileBuilder {
    profile: Profile,
}

impl ProfileBuilder {
    pub(super) fn new(name: String) -> Self {
        let mut profile = Profile::new(ProfileId::from_bytes([1; 16]), 1_000_000);
        profile.name = name;
        Self { profile }
    }

    /// When the profile begins, in 64-bit nanoseconds since the Unix epoch; earlier times count as the epoch.
    pub fn start(mut self, start: SystemTime) -> Self {
        self.profile.start_unix_ns = ns(start.duration_since(UNIX_EPOCH).unwrap_or_default());
        self
    }

    /// How long the profile is.
    pub fn duration(mut self, duration: Duration) -> Self {
        self.profile.duration_ns = ns(duration);
        self
    }

    /// Adds an attribute of the profile.
    pub fn attribute(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.profile.attributes.push(Attribute { key, value: value.into() });
        self
    }

    /// Adds a sample, a wait, an await or a scheduling delay.
    ///
    /// The sample belongs to the last of `spans`, which are listed from the outermost. `functions` is the stack, with
    /// the innermost first. `at` is the time since the beginning. `weight` is the CPU time that the sample represents,
    /// or the duration of the others.
    pub fn sample(
        mut self,
        kind: SampleKind,
        spans: &[&str],
        functions: &[&str],
        at: Duration,
        weight: Duration,
    ) -> Self {
        let profile = &mut self.profile;
        let mut link: Option<LinkId> = None;
        for span in spans {
            let span = Link::named(*span, link);
            link = Some(profile.add_link(span));
        }
        let functions = functions.iter();
        let locations = functions.map(|name| profile.add_named(FrameKind::Rust, name)).collect();
        let stack = profile.add_stack(locations);
        let time_unix_ns = profile.start_unix_ns.saturating_add(ns(at));
        profile.add_sample(
            kind,
            stack,
            link,
            Point { time_unix_ns, weight: ns(weight), thread: None },
        );
        self
    }

    /// Returns the profile.
    pub fn build(mut self) -> Profile {
        self.profile.classify();
        self.profile
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_built_profile_has_what_was_added() {
        let (ms, second) = (Duration::from_millis(1), Duration::from_secs(1));
        let profile = Profile::builder("cart")
            .start(UNIX_EPOCH + second)
            .duration(second)
            .attribute("tenant", "acme")
            .sample(SampleKind::OnCpu, &["cart"], &["render", "main"], 3 * ms, ms)
            .sample(SampleKind::OnCpu, &["cart"], &["render", "main"], 2 * ms, ms)
            .sample(SampleKind::OffCpu, &["cart", "query"], &["ask", "main"], 4 * ms, 9 * ms)
            .build();
        assert_eq!((profile.start_unix_ns, profile.duration_ns), (1_000_000_000, 1_000_000_000));
        assert_eq!(profile.attributes[0].value, Value::from("acme"));
        assert_eq!((profile.sample_count(), profile.wait_count()), (2, 1));
        assert_eq!(
            (profile.total(SampleKind::OnCpu), profile.total(SampleKind::OffCpu)),
            (2_000_000, 9_000_000)
        );
        let [ran, waited] = profile.samples() else { panic!("one sample per stack: {profile:?}") };
        let times: Vec<_> = ran.points.iter().map(|point| point.time_unix_ns).collect();
        assert_eq!(times, [1_002_000_000, 1_003_000_000]);
        assert_eq!(profile.span_path(waited.link), ["cart", "query"]);
        assert_eq!(profile.functions_by(SampleKind::OnCpu), [("render".to_owned(), 2_000_000)]);
    }
}

//! Which traces go on, from `TRACING_PROFILING_TRACES`.

pub(crate) const EXPECTED: &str = match cfg!(feature = "opentelemetry-sdk") {
    true => "all, or kept, kept|one_in=100, kept|one_in=100|sampled_parents",
    false => "nothing: the feature `opentelemetry-sdk` of tracing-profiling is not on",
};
const DEFAULT_ONE_IN: u32 = 100;

/// Which traces go on beside those of kept and failed spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TraceChoice {
    /// 0 for none.
    pub(crate) one_in: u32,
    /// Traces that come from a remote parent with the sampled flag go on.
    pub(crate) sampled_parents: bool,
}

impl Default for TraceChoice {
    fn default() -> Self {
        Self { one_in: DEFAULT_ONE_IN, sampled_parents: false }
    }
}

impl TraceChoice {
    /// `None` if the text is none of [`EXPECTED`].
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut choice = Self { one_in: 0, sampled_parents: false };
        let mut parts = text.split('|').map(str::trim);
        match parts.next()? {
            "all" => choice.one_in = 1,
            "kept" => {}
            _ => return None,
        }
        for part in parts {
            match part.split_once('=').map(|(name, number)| (name.trim(), number)) {
                Some(("one_in", number)) if choice.one_in == 0 => {
                    choice.one_in = number.trim().parse().ok().filter(|number| *number > 0)?;
                }
                None if part == "sampled_parents"
                    && !choice.sampled_parents
                    && choice.one_in != 1 =>
                {
                    choice.sampled_parents = true;
                }
                _ => return None,
            }
        }
        cfg!(feature = "opentelemetry-sdk").then_some(choice)
    }
}

#[cfg(feature = "opentelemetry-sdk")]
impl TraceChoice {
    /// The rejection threshold of ordinary traces, of 56 bits: one goes on whose randomness is not below it.
    pub(super) fn threshold(self) -> u64 {
        match u64::from(self.one_in) {
            0 => 1 << 56,
            traces => (1 << 56) - (1 << 56) / traces,
        }
    }
}

#[cfg(all(test, feature = "opentelemetry-sdk"))]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_all_or_kept_with_others() {
        let choice = |one_in, sampled_parents| Some(TraceChoice { one_in, sampled_parents });
        for (text, expected) in [
            ("all", choice(1, false)),
            ("kept", choice(0, false)),
            (" kept | one_in = 100 ", choice(100, false)),
            ("kept|sampled_parents|one_in=7", choice(7, true)),
        ] {
            assert_eq!(TraceChoice::parse(text), expected, "{text}");
        }
        let malformed = [
            "",
            "off",
            "one_in=100",
            "kept|",
            "kept|one_in",
            "kept|one_in=0",
            "kept|one_in=x",
            "kept|one_in=2|one_in=3",
            "all|one_in=2",
            "all|sampled_parents",
            "kept|kept",
            "kept|sampled_parents|sampled_parents",
            "kept|one_in=4294967296",
        ];
        for text in malformed {
            assert_eq!(TraceChoice::parse(text), None, "{text}");
        }
    }

    #[test]
    fn one_in_n_is_a_threshold_of_56_bits() {
        let threshold = |one_in| TraceChoice { one_in, sampled_parents: false }.threshold();
        assert_eq!([0, 1, 2, 4].map(threshold), [1 << 56, 0, 1 << 55, 3 << 54]);
        assert_eq!(threshold(u32::MAX), (1 << 56) - (1 << 24));
    }
}

//! How long a name may be.

use std::borrow::Cow;

/// Bytes of the longest name of a function, file or span: whoever makes a longer one gets a part of it.
pub(crate) const LONGEST_NAME: usize = 4096;

/// A name, or as much of it as a name may be long.
pub(crate) fn capped(name: &str) -> Cow<'_, str> {
    if name.len() <= LONGEST_NAME {
        return name.into();
    }
    let mut ends = (0..=LONGEST_NAME - '…'.len_utf8()).rev();
    let begin = ends.find_map(|end| name.get(..end)).unwrap_or_default();
    format!("{begin}…").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_longer_is_cut_between_letters() {
        for (name, length) in [("a", 4096), ("a", 4097), ("ä", 2048), ("ä", 5000), ("→", 9999)]
        {
            let name = name.repeat(length);
            let capped = capped(&name);
            assert!(capped.len() <= LONGEST_NAME);
            assert_eq!(capped == name, name.len() <= LONGEST_NAME);
        }
    }
}

//! The maximum length of names.

use std::borrow::Cow;

/// The maximum length of the name of a function, file or span, in bytes. Longer ones are truncated.
pub const LONGEST_NAME: usize = 4096;

/// The name, truncated if it is too long.
pub fn capped(name: &str) -> Cow<'_, str> {
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
    fn long_names_are_cut_between_characters() {
        for (name, length) in [("a", 4096), ("a", 4097), ("ä", 2048), ("ä", 5000), ("→", 9999)]
        {
            let name = name.repeat(length);
            let capped = capped(&name);
            assert!(capped.len() <= LONGEST_NAME);
            assert_eq!(capped == name, name.len() <= LONGEST_NAME);
        }
    }
}

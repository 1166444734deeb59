//! Texts of `/proc`.

/// What follows a name at the beginning of a line, up to its end.
pub(super) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The hexadecimal mask that follows a name at the beginning of a line.
pub(super) fn mask_in(text: &str, name: &str) -> Option<u64> {
    u64::from_str_radix(field(text, name)?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_masks_of_proc() {
        let status = "Name:\tx\nSigPnd:\t0000000000000001\nSigBlk:\t4000000000000200\nSigIgn:\t0\n";
        assert_eq!(mask_in(status, "SigBlk:"), Some(1 << 62 | 1 << 9));
        assert_eq!(mask_in("pos:\t0\nsigmask:\t0000000000010000\n", "sigmask:"), Some(1 << 16));
        assert_eq!(mask_in("SigBlk:\tx\n", "SigBlk:"), None);
        assert_eq!(mask_in("", "SigBlk:"), None);
    }
}

//! A profile in 2 KiB of JSON, for agents and scripts, and what JSON of several kinds has in common.

use serde::Serialize;
use serde_json::Value;

use super::brief::Brief;
use crate::profile::Profile;

/// Encodes the most important of a profile as a JSON object of at most 2,048 bytes: `name`, `reasons`, `time`, ids, the
/// `headline` that explains most of its time, `wall_ms` with its parts in `split_ms`, `functions` with the most of each
/// kind, how it differs from typical requests (`compared`), child spans (`children`), and what is `missing`. Where that is
/// too long, rows and the ends of long texts are left out.
pub fn json_summary(profile: &Profile) -> String {
    summary_of(&Brief::of(profile))
}

pub(super) fn summary_of(brief: &Brief<'_>) -> String {
    brief.within_limit(text_of).unwrap_or_else(|| "{}".to_owned())
}

/// JSON that ends no element of a page that contains it. The separators end a line in older scripts.
pub(super) fn text_of(value: &impl Serialize) -> String {
    let text = serde_json::to_string(value).unwrap_or_default();
    let escaped = |text: String, of| text.replace(of, &format!("\\u{:04x}", u32::from(of)));
    ['<', '\u{2028}', '\u{2029}'].into_iter().fold(text, escaped)
}

/// An object without the members that are null, which are unknown.
pub fn known(mut object: Value) -> Value {
    _ = object.as_object_mut().map(|members| members.retain(|_, value| !value.is_null()));
    object
}

/// An object with the members of both.
pub fn joined(mut object: Value, with: Value) -> Value {
    if let (Value::Object(members), Value::Object(others)) = (&mut object, with) {
        members.extend(others);
    }
    object
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_is_what_a_parser_reads_and_ends_no_element() {
        let text = "a\"b\\c</script>\n\r\t\u{0}\u{1f}\u{7f}\u{2028}\u{2029}\u{202e} ü日🔥";
        let json = text_of(&text);
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        assert!(!json.contains('<') && !json.contains('\u{2028}'));
    }

    #[test]
    fn objects_have_what_is_known() {
        let all = joined(json!({ "is": false, "none": null }), json!({ "empty": [] }));
        assert_eq!(known(all), json!({ "is": false, "empty": [] }));
    }
}

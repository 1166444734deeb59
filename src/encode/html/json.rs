//! Writes JSON. A serializer would add four crates to every build, for two functions.

use std::fmt::Display;
use std::io::{self, Write};

/// Writes a value.
pub(in crate::encode) trait Json {
    fn write(&self, out: &mut dyn Write) -> io::Result<()>;
}

/// What `write` writes.
pub(in crate::encode) fn text_of(write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
    let mut json = Vec::new();
    // Writing to memory does not fail.
    _ = write(&mut json);
    String::from_utf8(json).unwrap_or_default()
}

/// A value whose `Display` is JSON: a number or a truth.
pub(in crate::encode) struct Plain<T>(pub(in crate::encode) T);

/// The elements of an array, which can be iterated once per call.
pub(in crate::encode) struct Array<F>(pub(in crate::encode) F);

/// An object, which is written by its members.
pub(in crate::encode) struct Object<'a> {
    out: &'a mut dyn Write,
    is_first: bool,
}

impl<T: Display> Json for Plain<T> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "{}", self.0)
    }
}

/// Finite numbers only. With a point, unlike an integer.
impl Json for f64 {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "{self:?}")
    }
}

impl Json for str {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(b"\"")?;
        for character in self.chars() {
            match character {
                '"' => out.write_all(b"\\\"")?,
                '\\' => out.write_all(b"\\\\")?,
                // `<` could end the element that contains the text. The separators end a line in older scripts.
                '\0'..=' ' | '<' | '\u{7f}' | '\u{2028}' | '\u{2029}' if character != ' ' => {
                    write!(out, "\\u{:04x}", u32::from(character))?;
                }
                _ => write!(out, "{character}")?,
            }
        }
        out.write_all(b"\"")
    }
}

impl Json for String {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        self.as_str().write(out)
    }
}

impl<T: Json + ?Sized> Json for &T {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        (**self).write(out)
    }
}

impl<A: Json, B: Json> Json for (A, B) {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(b"[")?;
        self.0.write(out)?;
        out.write_all(b",")?;
        self.1.write(out)?;
        out.write_all(b"]")
    }
}

impl<I: Iterator<Item: Json>, F: Fn() -> I> Json for Array<F> {
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(b"[")?;
        for (number, element) in (self.0)().enumerate() {
            if number > 0 {
                out.write_all(b",")?;
            }
            element.write(out)?;
        }
        out.write_all(b"]")
    }
}

impl<'a> Object<'a> {
    /// Writes an object with the members that `write` adds.
    pub(in crate::encode) fn write(
        out: &'a mut dyn Write,
        write: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> io::Result<()> {
        out.write_all(b"{")?;
        let mut object = Self { out, is_first: true };
        write(&mut object)?;
        object.out.write_all(b"}")
    }

    pub(in crate::encode) fn member(&mut self, name: &str, value: impl Json) -> io::Result<()> {
        value.write(self.name(name)?)
    }

    /// Adds a member that is an object itself.
    pub(in crate::encode) fn object(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut Object<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        Object::write(self.name(name)?, write)
    }

    /// The output, in which the value of a member must follow.
    pub(in crate::encode) fn name(&mut self, name: &str) -> io::Result<&mut dyn Write> {
        if !std::mem::take(&mut self.is_first) {
            self.out.write_all(b",")?;
        }
        name.write(self.out)?;
        self.out.write_all(b":")?;
        Ok(self.out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_what_a_parser_reads_and_ends_no_element() {
        let text = "a\"b\\c</script>\n\r\t\u{0}\u{1f}\u{7f}\u{2028}\u{2029}\u{202e} ü日🔥";
        let mut json = Vec::new();
        text.write(&mut json).unwrap();
        let json = String::from_utf8(json).unwrap();
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        assert!(!json.contains('<') && !json.contains('\u{2028}'));
    }

    #[test]
    fn objects_nest() {
        let mut json = Vec::new();
        let inner = |object: &mut Object<'_>| {
            object.member("list", Array(|| [1, 2].into_iter().map(Plain)))?;
            object.member("none", Array(std::iter::empty::<&str>))
        };
        Object::write(&mut json, |object| {
            object.member("is", Plain(true))?;
            object.object("inner", inner)?;
            object.member("pair", ("a", "b"))
        })
        .unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let expected = serde_json::json!({
            "is": true, "inner": { "list": [1, 2], "none": [] }, "pair": ["a", "b"]
        });
        assert_eq!(json, expected);
    }
}

//! Writing small JSON documents; reading none.

use std::fmt::Write;

/// An object under construction: keys in the order they are given.
#[derive(Debug)]
pub(crate) struct Object {
    out: String,
}

impl Object {
    pub(crate) fn new() -> Self {
        let mut out = String::with_capacity(4096);
        out.push('{');
        Self { out }
    }

    pub(crate) fn text(&mut self, key: &str, value: &str) {
        self.key(key);
        escape_into(&mut self.out, value);
    }

    pub(crate) fn integer(&mut self, key: &str, value: u64) {
        self.key(key);
        self.write(format_args!("{value}"));
    }

    pub(crate) fn boolean(&mut self, key: &str, value: bool) {
        self.raw(key, if value { "true" } else { "false" });
    }

    /// A number; what JSON has no word for (NaN, infinities) becomes null.
    pub(crate) fn number(&mut self, key: &str, value: f64) {
        self.key(key);
        if value.is_finite() {
            self.write(format_args!("{value:?}"));
        } else {
            self.out.push_str("null");
        }
    }

    /// A value that is JSON already.
    pub(crate) fn raw(&mut self, key: &str, value: &str) {
        self.key(key);
        self.out.push_str(value);
    }

    /// An object within.
    pub(crate) fn object(&mut self, key: &str, fill: impl FnOnce(&mut Self)) {
        self.key(key);
        self.braces(fill);
    }

    /// An array of objects.
    pub(crate) fn array<F: FnOnce(&mut Self)>(&mut self, key: &str, items: impl Iterator<Item = F>) {
        self.key(key);
        self.out.push('[');
        for (index, fill) in items.enumerate() {
            if index > 0 {
                self.out.push(',');
            }
            self.braces(fill);
        }
        self.out.push(']');
    }

    pub(crate) fn end(mut self) -> String {
        self.out.push('}');
        self.out
    }

    fn braces(&mut self, fill: impl FnOnce(&mut Self)) {
        self.out.push('{');
        fill(self);
        self.out.push('}');
    }

    fn key(&mut self, key: &str) {
        if !self.out.ends_with('{') {
            self.out.push(',');
        }
        self.write(format_args!("\"{key}\":"));
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.out.write_fmt(text);
    }
}

/// A JSON string, quotes included (RFC 8259, section 7).
pub(crate) fn escape_into(out: &mut String, text: &str) {
    out.push('"');
    for char in text.chars() {
        match char {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{0}'..='\u{1f}' => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\u{:04x}", u32::from(char));
            }
            _ => out.push(char),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_cannot_leave_its_string() {
        let mut object = Object::new();

        object.text("name", "a\"},\\\n\u{1b}é");

        assert_eq!(object.end(), r#"{"name":"a\"},\\\u000a\u001bé"}"#);
    }

    #[test]
    fn numbers_without_a_word_in_json_are_null() {
        let mut object = Object::new();

        object.number("a", 2.0);
        object.number("b", f64::NAN);

        assert_eq!(object.end(), r#"{"a":2.0,"b":null}"#);
    }
}

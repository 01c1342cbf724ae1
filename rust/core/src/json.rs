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
        self.digits(value, 1);
    }

    pub(crate) fn boolean(&mut self, key: &str, value: bool) {
        self.raw(key, if value { "true" } else { "false" });
    }

    /// `value` divided by ten to the `digits`, without rounding: integers print several times faster than floats.
    pub(crate) fn decimal(&mut self, key: &str, value: u64, digits: u32) {
        self.key(key);
        let unit = 10_u64.pow(digits);
        let (mut fraction, mut width) = (value % unit, digits as usize);
        while width > 1 && fraction % 10 == 0 {
            fraction /= 10;
            width -= 1;
        }
        self.digits(value / unit, 1);
        self.out.push('.');
        self.digits(fraction, width);
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
        self.out.push('"');
        self.out.push_str(key);
        self.out.push_str("\":");
    }

    /// At least `width` digits. By hand: the formatting machinery was most of a snapshot's time.
    fn digits(&mut self, mut value: u64, width: usize) {
        let mut digits = [b'0'; 20];
        let mut start = digits.len();
        while value > 0 || digits.len() - start < width.max(1) {
            start -= 1;
            digits[start] = b'0' + u8::try_from(value % 10).unwrap_or(0);
            value /= 10;
        }
        self.out.push_str(std::str::from_utf8(&digits[start..]).unwrap_or("0"));
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
    fn decimals_keep_every_digit_and_no_idle_zero() {
        let mut object = Object::new();

        for (key, value) in [("a", 0), ("b", 666_666), ("c", 500_000), ("d", 70)] {
            object.decimal(key, value, 4);
        }

        assert_eq!(object.end(), r#"{"a":0.0,"b":66.6666,"c":50.0,"d":0.007}"#);
    }

    #[test]
    fn objects_and_arrays_nest() {
        let mut object = Object::new();

        object.object("own", |own| own.integer("pid", 1));
        object.array("all", [2, 3].into_iter().map(|pid| move |peer: &mut Object| peer.integer("pid", pid)));

        assert_eq!(object.end(), r#"{"own":{"pid":1},"all":[{"pid":2},{"pid":3}]}"#);
    }
}

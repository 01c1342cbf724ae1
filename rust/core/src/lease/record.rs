//! The record in the lease file: who took the lease, for people and tools. A hint, never the truth.
//!
//! 512 bytes: the pid and a newline (gpulease's format), one JSON object, spaces, a newline. It is written by one
//! pwrite(2) and never truncated or cleared, because both cost more than the lock itself; whether the lease is held is
//! said by the state byte. So a reader may find the record of a former holder, of another program, or garbage.

use serde_json::Value;

use super::LeaseMode;
use super::hint::Author;
use crate::json::escape_into;

/// Bytes of a record: a page would do as well, but one sector is enough for every field.
pub(super) const RECORD_BYTES: usize = 512;
/// Longest reason, in bytes of UTF-8; cut further when its escapes do not fit.
pub(super) const REASON_BYTES_MAX: usize = 200;
/// Longest name, in bytes of UTF-8; the kernel's command names have 15.
const NAME_BYTES_MAX: usize = 39;
/// What `,"since_us":`, the longest number, the brace and the newline take at the end.
const TAIL_BYTES: usize = 12 + 20 + 2;

/// A record without its time: made once, stamped at every acquisition.
#[derive(Debug)]
pub(super) struct RecordTemplate {
    head: String,
    /// The same for hints.
    pub(super) author: Author,
}

/// What goes into a record.
#[derive(Debug, Clone)]
pub(super) struct RecordFields<'a> {
    pub(super) token: u64,
    pub(super) pid: u32,
    /// The process that took the lock, which `/proc/locks` names.
    pub(super) lock_pid: u32,
    pub(super) pid_namespace: u64,
    pub(super) uid: u32,
    pub(super) name: &'a str,
    pub(super) mode: LeaseMode,
    pub(super) reason: Option<&'a str>,
}

impl RecordTemplate {
    pub(super) fn new(fields: &RecordFields<'_>) -> Self {
        let RecordFields { token, pid, lock_pid, pid_namespace, uid, name, mode, reason } = fields;
        let author = Author::new(*pid, *pid_namespace, name);
        let name = json_text(name, NAME_BYTES_MAX);
        let mut head = format!(
            "{pid}\n{{\"token\":\"{token:016x}\",\"pid\":{pid},\"lock_pid\":{lock_pid},\"pidns\":{pid_namespace},\"uid\":{uid},\
             \"name\":{name},\"mode\":\"{}\"",
            mode.as_str()
        );
        if let Some(reason) = reason {
            head.push_str(",\"reason\":");
            let room = RECORD_BYTES - TAIL_BYTES - head.len();
            head.push_str(&json_text(cut(reason, REASON_BYTES_MAX), room));
        }
        Self { head, author }
    }

    /// The whole record for an acquisition at `since_us` (wall clock).
    pub(super) fn stamp(&self, since_us: i64) -> [u8; RECORD_BYTES] {
        use std::io::Write;
        let mut record = [b' '; RECORD_BYTES];
        record[RECORD_BYTES - 1] = b'\n';
        // The parts fit by construction; a part that did not would be cut and read as an unknown holder.
        let _ = write!(&mut record[..RECORD_BYTES - 1], "{},\"since_us\":{since_us}}}", self.head);
        record
    }
}

/// What a reader could make of a record; everything may be missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) pid: Option<u32>,
    pub(super) lock_pid: Option<u32>,
    pub(super) pid_namespace: Option<u64>,
    pub(super) name: Option<String>,
    pub(super) reason: Option<String>,
    pub(super) mode: Option<LeaseMode>,
    pub(super) since_us: Option<i64>,
}

impl Record {
    /// Read any bytes: what is not a record gives no fields.
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let end_of_first = bytes.iter().position(|&byte| byte == b'\n').unwrap_or(bytes.len());
        let Some(pid) =
            std::str::from_utf8(&bytes[..end_of_first]).ok().and_then(|line| line.trim().parse().ok())
        else {
            return Self::default();
        };
        let bare = Self { pid: Some(pid), ..Self::default() };
        let rest = bytes.get(end_of_first + 1..).unwrap_or_default();
        let Ok(Value::Object(fields)) = serde_json::from_slice::<Value>(rest) else { return bare };
        // Another program that wrote its pid over ours leaves our second line behind.
        if fields.get("pid").and_then(Value::as_u64) != Some(u64::from(pid)) {
            return bare;
        }
        let text =
            |key: &str, max| fields.get(key).and_then(Value::as_str).map(|value| cut(value, max).to_owned());
        Self {
            lock_pid: fields.get("lock_pid").and_then(Value::as_u64).and_then(|pid| pid.try_into().ok()),
            pid_namespace: fields.get("pidns").and_then(Value::as_u64),
            name: text("name", NAME_BYTES_MAX),
            reason: text("reason", REASON_BYTES_MAX),
            mode: fields.get("mode").and_then(Value::as_str).and_then(LeaseMode::from_name),
            since_us: fields.get("since_us").and_then(Value::as_i64),
            ..bare
        }
    }
}

/// `text` cut to `max` bytes, never inside a character.
fn cut(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// `text` as a JSON string of at most `max` bytes, quotes and escapes included.
fn json_text(text: &str, max: usize) -> String {
    let mut length = text.len().min(max);
    loop {
        let mut json = String::new();
        escape_into(&mut json, cut(text, length));
        if json.len() <= max || length == 0 {
            return json;
        }
        length -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fields<'a>(name: &'a str, reason: Option<&'a str>) -> RecordFields<'a> {
        RecordFields {
            token: u64::MAX,
            pid: u32::MAX,
            lock_pid: u32::MAX,
            pid_namespace: u64::MAX,
            uid: u32::MAX,
            name,
            mode: LeaseMode::Exclusive,
            reason,
        }
    }

    #[test]
    fn a_record_reads_back_what_was_written() {
        let record =
            RecordTemplate::new(&fields("train", Some("fine-tune \"llama\"\n"))).stamp(1_764_551_234_567_890);

        let read = Record::parse(&record);

        assert_eq!(record.last(), Some(&b'\n'));
        assert!(record.starts_with(b"4294967295\n{"));
        assert_eq!(read.pid, Some(u32::MAX));
        assert_eq!(read.name.as_deref(), Some("train"));
        assert_eq!(read.reason.as_deref(), Some("fine-tune \"llama\"\n"));
        assert_eq!(read.mode, Some(LeaseMode::Exclusive));
        assert_eq!(read.since_us, Some(1_764_551_234_567_890));
        assert_eq!(read.pid_namespace, Some(u64::MAX));
    }

    #[test]
    fn gpulease_and_broken_records_give_what_they_have() {
        assert_eq!(Record::parse(b"4711\n").pid, Some(4711));
        assert_eq!(Record::parse(b"4711").pid, Some(4711));
        assert_eq!(
            Record::parse(b"12\n{\"pid\":13,\"name\":\"old\"}"),
            Record { pid: Some(12), ..Record::default() }
        );
        assert_eq!(Record::parse(b""), Record::default());
        assert_eq!(Record::parse(&[0; RECORD_BYTES]), Record::default());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = Record::parse(&bytes);
        }

        #[test]
        fn any_name_and_reason_fit_and_read_back_as_prefixes(name in ".*", reason in "[\\s\\S]{0,300}", since in any::<i64>()) {
            let record = RecordTemplate::new(&fields(&name, Some(&reason))).stamp(since);
            let read = Record::parse(&record);
            prop_assert_eq!(read.since_us, Some(since));
            prop_assert!(name.starts_with(&read.name.unwrap_or_default()));
            prop_assert!(reason.starts_with(&read.reason.unwrap_or_default()));
        }
    }
}

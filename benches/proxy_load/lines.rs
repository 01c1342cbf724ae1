//! The lines that a stream is made of, each with the moment of its sending.

use std::str::from_utf8;

/// Bytes of a line, its end included.
const LINE: usize = 120;
const DIGITS: usize = 20;
const BEFORE: &[u8] = br#"{"t":""#;
const AFTER: &[u8] = br#"","model":"bench","message":{"role":"assistant","content":""#;
const END: &[u8] = b"\"},\"done\":false}\n";

/// The head of a streamed answer.
pub(crate) fn stream_head() -> &'static [u8] {
    b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
}

/// A line in the chunked coding.
pub(crate) fn chunk(now_ns: u64) -> Vec<u8> {
    let mut bytes = format!("{LINE:x}\r\n").into_bytes();
    let begin = bytes.len();
    bytes.extend_from_slice(BEFORE);
    bytes.extend_from_slice(format!("{now_ns:0DIGITS$}").as_bytes());
    bytes.extend_from_slice(AFTER);
    bytes.resize(begin + LINE - END.len(), b'x');
    bytes.extend_from_slice(END);
    bytes.extend_from_slice(b"\r\n");
    bytes
}

/// Cuts what arrives into lines.
#[derive(Default)]
pub(crate) struct Lines(Vec<u8>);

impl Lines {
    /// Take a piece; `each` gets the moment of every line that it ends.
    pub(crate) fn push(&mut self, piece: &[u8], each: &mut dyn FnMut(u64)) {
        self.0.extend_from_slice(piece);
        let mut at = 0;
        while let Some(end) = self.0[at..].iter().position(|byte| *byte == b'\n') {
            if let Some(moment) = moment(&self.0[at..at + end]) {
                each(moment);
            }
            at += end + 1;
        }
        self.0.drain(..at);
    }
}

fn moment(line: &[u8]) -> Option<u64> {
    from_utf8(line.get(BEFORE.len()..BEFORE.len() + DIGITS)?).ok()?.parse().ok()
}

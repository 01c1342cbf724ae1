//! As much of HTTP/1.1 as both ends need: a message is read in pieces as they come.

use std::io;
use std::str::from_utf8;

/// Which end sent a message: without a length, a request has no body and an answer goes on to the close.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sender {
    Client,
    Server,
}

/// What a head says that matters here.
#[derive(Default)]
pub(crate) struct Head {
    /// The first line.
    pub(crate) first: Vec<u8>,
    /// The connection ends with this message.
    pub(crate) close: bool,
    /// `Sec-WebSocket-Key`, empty for none.
    pub(crate) key: Vec<u8>,
    length: Option<u64>,
    chunked: bool,
}

#[derive(Clone, Copy)]
enum State {
    Head,
    Counted(u64),
    ChunkSize,
    Chunk(u64),
    ChunkEnd,
    Trailers,
    ToClose,
    Complete,
}

/// Messages of one connection, one after the other.
pub(crate) struct Message {
    pub(crate) head: Head,
    sender: Sender,
    state: State,
    bytes: Vec<u8>,
    at: usize,
}

impl Message {
    pub(crate) fn of(sender: Sender) -> Self {
        Self { head: Head::default(), sender, state: State::Head, bytes: Vec::new(), at: 0 }
    }

    /// Take what arrived; the body goes to `body`. True once the message is complete.
    ///
    /// # Errors
    /// It is no HTTP.
    pub(crate) fn push(&mut self, data: &[u8], body: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        self.bytes.extend_from_slice(data);
        while !self.complete() && self.step(body)? {}
        if self.at == self.bytes.len() {
            self.bytes.clear();
            self.at = 0;
        }
        Ok(self.complete())
    }

    pub(crate) fn complete(&self) -> bool {
        matches!(self.state, State::Complete)
    }

    /// Expect the next message; what arrived of it stays.
    pub(crate) fn next(&mut self) {
        self.state = State::Head;
    }

    /// What arrived after a message that changed the protocol.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        self.bytes.drain(..self.at);
        self.at = 0;
        std::mem::take(&mut self.bytes)
    }

    /// The status of an answer, 0 for none.
    pub(crate) fn status(&self) -> u16 {
        let digits = self.head.first.get(9..12).and_then(|text| from_utf8(text).ok());
        digits.and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    fn step(&mut self, body: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        let rest = &self.bytes[self.at..];
        let (state, taken) = match self.state {
            State::Head => {
                let Some(end) = find(rest, b"\r\n\r\n") else { return Ok(false) };
                self.head.read(&rest[..end])?;
                (self.after_head(), end + 4)
            }
            State::Counted(left) | State::Chunk(left) => {
                let taken = rest.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                body(&rest[..taken]);
                (self.after_data(left - as_u64(taken)), taken)
            }
            State::ToClose => {
                body(rest);
                (State::ToClose, rest.len())
            }
            State::ChunkSize | State::ChunkEnd | State::Trailers => {
                let Some(end) = find(rest, b"\r\n") else { return Ok(false) };
                (self.after_line(&rest[..end])?, end + 2)
            }
            State::Complete => return Ok(false),
        };
        self.state = state;
        self.at += taken;
        Ok(taken > 0)
    }

    fn after_head(&self) -> State {
        let bodyless = self.sender == Sender::Server && matches!(self.status(), 101 | 204 | 304);
        match self.head.length {
            _ if bodyless => State::Complete,
            _ if self.head.chunked => State::ChunkSize,
            Some(0) => State::Complete,
            Some(length) => State::Counted(length),
            None if self.sender == Sender::Client => State::Complete,
            None => State::ToClose,
        }
    }

    fn after_data(&self, left: u64) -> State {
        match (self.state, left) {
            (State::Counted(_), 0) => State::Complete,
            (State::Counted(_), _) => State::Counted(left),
            (_, 0) => State::ChunkEnd,
            _ => State::Chunk(left),
        }
    }

    fn after_line(&self, line: &[u8]) -> io::Result<State> {
        match self.state {
            State::ChunkSize => {
                let digits = line.split(|byte| *byte == b';').next().unwrap_or_default();
                let text = from_utf8(digits).map_err(|_| fault("chunk size"))?;
                let size = u64::from_str_radix(text.trim(), 16).map_err(|_| fault("chunk size"))?;
                Ok(if size == 0 { State::Trailers } else { State::Chunk(size) })
            }
            State::Trailers if line.is_empty() => Ok(State::Complete),
            State::Trailers => Ok(State::Trailers),
            _ => Ok(State::ChunkSize),
        }
    }
}

impl Head {
    fn read(&mut self, head: &[u8]) -> io::Result<()> {
        let mut lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
        self.first.clear();
        self.first.extend_from_slice(lines.next().unwrap_or_default());
        self.close = self.first.ends_with(b"HTTP/1.0");
        (self.length, self.chunked) = (None, false);
        self.key.clear();
        lines.try_for_each(|line| self.field(line))
    }

    fn field(&mut self, line: &[u8]) -> io::Result<()> {
        let colon = line.iter().position(|byte| *byte == b':').ok_or_else(|| fault("header"))?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"content-length") {
            let text = from_utf8(value).map_err(|_| fault("length"))?;
            self.length = Some(text.parse().map_err(|_| fault("length"))?);
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            self.chunked = value.eq_ignore_ascii_case(b"chunked");
        } else if name.eq_ignore_ascii_case(b"connection") {
            self.close = value.eq_ignore_ascii_case(b"close");
        } else if name.eq_ignore_ascii_case(b"sec-websocket-key") {
            self.key.extend_from_slice(value);
        }
        Ok(())
    }
}

/// An error about bytes that are not what they should be.
pub(crate) fn fault(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not as HTTP has it: {what}"))
}

pub(crate) fn as_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

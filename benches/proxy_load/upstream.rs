//! The fake upstream: one thread, as little per request as there can be.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use serde_json::json;

use crate::answers::{Answer, Known, answer};
use crate::clock::now_ns;
use crate::http::{Message, Sender};
use crate::lines::{chunk, stream_head};
use crate::output;
use crate::system::{Poll, Timer, accept, listen};
use crate::websocket::{accepted, echo};

const READ: usize = 65_536;

/// What a connection is doing.
enum Doing {
    Requests,
    Stream { period_ns: u64, random: u64, begun: bool },
    Echo { bytes: Vec<u8> },
}

struct Connection {
    stream: TcpStream,
    message: Message,
    doing: Doing,
    serial: u64,
}

struct Upstream {
    poll: Poll,
    timer: Timer,
    /// By descriptor.
    connections: Vec<Option<Connection>>,
    /// Moments of the next chunks, each with the descriptor and the serial of its connection.
    due: BinaryHeap<Reverse<(u64, usize, u64)>>,
    known: Known,
}

/// Serve until stdin ends; the port is the first line of stdout.
pub(crate) fn serve() -> io::Result<()> {
    let (listener, stdin) = (listen()?, io::stdin());
    let mut upstream = Upstream {
        poll: Poll::new()?,
        timer: Timer::new()?,
        connections: Vec::new(),
        due: BinaryHeap::new(),
        known: Known::default(),
    };
    upstream.poll.add(&listener)?;
    upstream.poll.add(&upstream.timer)?;
    upstream.poll.add(&stdin)?;
    output(&json!({"port": listener.local_addr()?.port()}))?;
    let (gate, clock, end) = (token(&listener), token(&upstream.timer), token(&stdin));
    let (mut ready, mut buffer) = (Vec::new(), vec![0; READ]);
    loop {
        upstream.poll.wait(&mut ready, -1)?;
        for &token in &ready {
            match token {
                _ if token == end => return Ok(()),
                _ if token == gate => upstream.accept(&listener)?,
                _ if token == clock => upstream.tick()?,
                _ => upstream.serve(token, &mut buffer),
            }
        }
    }
}

impl Upstream {
    fn accept(&mut self, listener: &TcpListener) -> io::Result<()> {
        while let Ok(stream) = accept(listener) {
            self.poll.add(&stream)?;
            let fd = token(&stream);
            if self.connections.len() <= fd {
                self.connections.resize_with(fd + 1, || None);
            }
            self.known.accepted += 1;
            let (message, serial) = (Message::of(Sender::Client), self.known.accepted);
            self.connections[fd] = Some(Connection { stream, message, doing: Doing::Requests, serial });
        }
        Ok(())
    }

    /// Send the chunks that are due, and sleep until the next one.
    fn tick(&mut self) -> io::Result<()> {
        while let Some(&Reverse((at, fd, serial))) = self.due.peek() {
            let now = now_ns();
            if at > now {
                return self.timer.set(at);
            }
            self.due.pop();
            let Some(Some(connection)) = self.connections.get_mut(fd) else { continue };
            let Doing::Stream { period_ns, random, begun } = &mut connection.doing else { continue };
            if connection.serial != serial {
                continue;
            }
            self.due.push(Reverse((at + pause(random, *period_ns), fd, serial)));
            let head = if std::mem::replace(begun, true) { b"" } else { stream_head() };
            let line = [head, &chunk(now_ns())].concat();
            if connection.stream.write(&line).ok() != Some(line.len()) {
                self.close(fd);
            }
        }
        self.timer.set(0)
    }

    fn serve(&mut self, fd: usize, buffer: &mut [u8]) {
        let Some(Some(connection)) = self.connections.get_mut(fd) else { return };
        let keep = match connection.stream.read(buffer) {
            Ok(0) => false,
            Ok(count) => self.take(fd, &buffer[..count]).unwrap_or(false),
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        };
        if !keep {
            self.close(fd);
        }
        if std::mem::take(&mut self.known.close_idle) {
            self.close_idle(fd);
        }
    }

    /// Answer what arrived; false where the connection ends with it.
    fn take(&mut self, fd: usize, data: &[u8]) -> io::Result<bool> {
        let Some(Some(connection)) = self.connections.get_mut(fd) else { return Ok(false) };
        match &mut connection.doing {
            Doing::Stream { .. } => Ok(true),
            Doing::Echo { bytes } => {
                bytes.extend_from_slice(data);
                let (answers, closed) = echo(bytes);
                connection.stream.write_all(&answers)?;
                Ok(!closed)
            }
            Doing::Requests => self.requests(fd, data),
        }
    }

    fn requests(&mut self, fd: usize, data: &[u8]) -> io::Result<bool> {
        let Some(Some(connection)) = self.connections.get_mut(fd) else { return Ok(false) };
        let mut data = data;
        while connection.message.push(data, &mut |_| {})? {
            data = &[];
            match answer(&connection.message.head.first, &mut self.known) {
                Answer::Whole(answer) => connection.stream.write_all(&answer)?,
                Answer::Echo => {
                    connection.stream.write_all(&accepted(&connection.message.head.key))?;
                    connection.doing = Doing::Echo { bytes: connection.message.rest() };
                    return Ok(true);
                }
                Answer::Stream { period_ns } => {
                    self.stream(fd, period_ns)?;
                    return Ok(true);
                }
            }
            if connection.message.head.close {
                return Ok(false);
            }
            connection.message.next();
        }
        Ok(true)
    }

    /// Begin a stream; its head goes out with the first chunk, as that of an engine that computes it.
    fn stream(&mut self, fd: usize, period_ns: u64) -> io::Result<()> {
        let Some(Some(connection)) = self.connections.get_mut(fd) else { return Ok(()) };
        let mut random = connection.serial;
        let at = now_ns() + pause(&mut random, period_ns);
        self.due.push(Reverse((at, fd, connection.serial)));
        connection.doing = Doing::Stream { period_ns, random, begun: false };
        self.known.streams += 1;
        let Some(&Reverse((first, ..))) = self.due.peek() else { return Ok(()) };
        self.timer.set(first)
    }

    fn close(&mut self, fd: usize) {
        let Some(connection) = self.connections.get_mut(fd).and_then(Option::take) else { return };
        if matches!(connection.doing, Doing::Stream { .. }) {
            self.known.streams -= 1;
            self.known.last_left_ns = now_ns();
        }
    }

    fn close_idle(&mut self, asking: usize) {
        for (fd, place) in self.connections.iter_mut().enumerate() {
            let idle = matches!(place, Some(Connection { doing: Doing::Requests, .. }));
            if idle && fd != asking {
                *place = None;
            }
        }
    }
}

/// Nanoseconds until the next chunk, from half a period to one and a half: streams do not march in step.
fn pause(random: &mut u64, period_ns: u64) -> u64 {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    period_ns / 2 + (*random >> 33) * period_ns / (1 << 31)
}

fn token(source: &impl AsRawFd) -> usize {
    usize::try_from(source.as_raw_fd()).unwrap_or_default()
}

//! Streams that run at a rate of their own: how late each line is, and what becomes of them when their clients leave.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use serde_json::{Value, json};

use crate::caller::Caller;
use crate::clock::now_ns;
use crate::http::{Message, Sender, as_u64, fault};
use crate::lines::Lines;
use crate::options::Options;
use crate::requests::request;
use crate::system::{Poll, connect, reset};
use crate::window::Window;

const READ: usize = 65_536;
const BODY: usize = 300;
const LOOK_MS: i32 = 20;
const WATCHDOG_NS: u64 = 20_000_000_000;

struct Stream {
    socket: TcpStream,
    answer: Message,
    lines: Lines,
    begun: bool,
}

/// All streams of a run.
struct Streams {
    poll: Poll,
    by_fd: Vec<Option<Stream>>,
    ready: Vec<usize>,
    buffer: Vec<u8>,
    faults: u64,
}

/// Run `--streams` of `--rate` lines a second through `--port`, and note how late the lines are.
pub(crate) fn run(options: &Options) -> Result<Value, Box<dyn Error>> {
    let mut streams = Streams::open(options)?;
    let mut window = Window::open(options)?;
    while !window.over(now_ns()) {
        streams.read(&mut |now, sent| window.note(now, now.saturating_sub(sent)))?;
    }
    streams.leave(options)?;
    Ok(window.close(streams.faults))
}

/// Cut `--streams` that run with a reset, all at once: when did the upstream see the last of them go?
pub(crate) fn run_cut(options: &Options) -> Result<Value, Box<dyn Error>> {
    let mut streams = Streams::open(options)?;
    let watchdog = now_ns() + WATCHDOG_NS;
    while !streams.all_begun() {
        streams.read(&mut |_, _| {})?;
        if now_ns() > watchdog || streams.faults > 0 {
            return Err("not all streams begin".into());
        }
    }
    streams.leave(options)
}

impl Streams {
    fn open(options: &Options) -> Result<Self, Box<dyn Error>> {
        let (port, count): (u16, usize) = (options.get("port")?, options.get("streams")?);
        let path = format!("/api/chat?rate={}", options.get::<u64>("rate")?);
        let (poll, buffer, request) = (Poll::new()?, vec![0; READ], request("POST", &path, BODY));
        let mut streams = Self { poll, by_fd: Vec::new(), ready: Vec::new(), buffer, faults: 0 };
        for _ in 0..count {
            streams.add(port, &request)?;
        }
        Ok(streams)
    }

    fn add(&mut self, port: u16, request: &[u8]) -> io::Result<()> {
        let mut stream = connect(port)?;
        stream.write_all(request)?;
        stream.set_nonblocking(true)?;
        self.poll.add(&stream)?;
        let fd = usize::try_from(stream.as_raw_fd()).map_err(|_| fault("descriptor"))?;
        if self.by_fd.len() <= fd {
            self.by_fd.resize_with(fd + 1, || None);
        }
        let (answer, lines) = (Message::of(Sender::Server), Lines::default());
        self.by_fd[fd] = Some(Stream { socket: stream, answer, lines, begun: false });
        Ok(())
    }

    /// Read what there is; `each` gets now and the moment at which a line was sent.
    fn read(&mut self, each: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
        self.poll.wait(&mut self.ready, LOOK_MS)?;
        for &fd in &self.ready {
            let Some(Some(stream)) = self.by_fd.get_mut(fd) else { continue };
            if stream.read(&mut self.buffer, each).is_err() {
                self.faults += 1;
                self.by_fd[fd] = None;
            }
        }
        Ok(())
    }

    fn all_begun(&self) -> bool {
        self.by_fd.iter().flatten().all(|stream| stream.begun)
    }

    /// Reset all of them and wait until the upstream at `--upstream` has none left.
    fn leave(&mut self, options: &Options) -> Result<Value, Box<dyn Error>> {
        let mut upstream = Caller::to(options.get("upstream")?)?;
        let begin_ns = now_ns();
        let streams: Vec<_> = self.by_fd.drain(..).flatten().collect();
        let count = as_u64(streams.len());
        for stream in streams {
            reset(stream.socket)?;
        }
        let cut_ns = now_ns() - begin_ns;
        loop {
            let status = upstream.call("GET", "/bench/status")?;
            if status["streams"] == 0 {
                let last = status["last_left_ns"].as_u64().unwrap_or_default();
                return Ok(
                    json!({"count": count, "cut_ns": cut_ns, "gone_ns": last.saturating_sub(begin_ns)}),
                );
            }
            if now_ns() > begin_ns + WATCHDOG_NS {
                return Err(format!("the upstream still has streams: {}", status["streams"]).into());
            }
        }
    }
}

impl Stream {
    fn read(&mut self, buffer: &mut [u8], each: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
        let size = match self.socket.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(size) => size,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        let now = now_ns();
        let Self { answer, lines, begun, .. } = self;
        let mut line = |sent| {
            *begun = true;
            each(now, sent);
        };
        let ended = answer.push(&buffer[..size], &mut |piece| lines.push(piece, &mut line))?;
        if ended { Err(fault("a stream that ends")) } else { Ok(()) }
    }
}

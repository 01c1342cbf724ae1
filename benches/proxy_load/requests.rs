//! Closed loop: each connection asks again as soon as it has its answer. Requests, or websocket messages.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use serde_json::Value;

use crate::caller::Caller;
use crate::clock::now_ns;
use crate::http::{Message, Sender, fault};
use crate::options::Options;
use crate::system::{Poll, connect};
use crate::websocket::{count, message};
use crate::window::Window;

const READ: usize = 65_536;
const MESSAGE_BYTES: u8 = 64;
const OK: u16 = 200;
const SWITCHING: u16 = 101;
/// After so many the rest would be no better.
const FAULTS_MAX: u64 = 1000;
const LOOK_MS: i32 = 20;

/// What comes back on a connection.
enum Talk {
    Answers(Message),
    Echo(Vec<u8>),
}

struct Client {
    stream: TcpStream,
    talk: Talk,
    sent_ns: u64,
}

/// What is sent again and again, and how a connection begins.
struct Load {
    port: u16,
    bytes: Vec<u8>,
    handshake: Option<Vec<u8>>,
}

/// Run `--connections` loops to `--port`: of `--method` on `--path` with `--body` bytes, or an echo if `--method` is
/// `WEBSOCKET`. The upstream at `--upstream` says how many connections that took.
pub(crate) fn run(options: &Options) -> Result<Value, Box<dyn Error>> {
    let (load, connections) = (Load::read(options)?, options.get("connections")?);
    let (mut poll, mut clients) = (Poll::new()?, Vec::new());
    for _ in 0..connections {
        load.join(&poll, &mut clients)?;
    }
    let mut upstream = Caller::to(options.get("upstream")?)?;
    let before = accepted(&mut upstream)?;
    let mut window = Window::open(options)?;
    let (mut ready, mut buffer, mut faults) = (Vec::new(), vec![0; READ], 0);
    while !window.over(now_ns()) {
        poll.wait(&mut ready, LOOK_MS)?;
        for &fd in &ready {
            let Some(Some(client)) = clients.get_mut(fd) else { continue };
            if client.turn(&mut buffer, &load.bytes, &mut window).is_ok() {
                continue;
            }
            clients[fd] = None;
            faults += 1;
            if faults > FAULTS_MAX {
                return Err("too many faults: the proxy refuses, or closes connections".into());
            }
            load.join(&poll, &mut clients)?;
        }
    }
    let mut found = window.close(faults);
    found["accepted"] = (accepted(&mut upstream)? - before).into();
    Ok(found)
}

/// Connections that the upstream has ever accepted.
fn accepted(upstream: &mut Caller) -> Result<u64, Box<dyn Error>> {
    Ok(upstream.call("GET", "/bench/status")?["accepted"].as_u64().unwrap_or_default())
}

impl Load {
    fn read(options: &Options) -> Result<Self, Box<dyn Error>> {
        let (method, path): (String, String) = (options.get("method")?, options.get("path")?);
        let port = options.get("port")?;
        if method == "WEBSOCKET" {
            let handshake = format!(
                "GET {path} HTTP/1.1\r\nHost: bench\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
                 Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            );
            let handshake = Some(handshake.into_bytes());
            return Ok(Self { port, bytes: message(MESSAGE_BYTES), handshake });
        }
        Ok(Self { port, bytes: request(&method, &path, options.get("body")?), handshake: None })
    }

    /// Add a client that has just asked for the first time.
    fn join(&self, poll: &Poll, clients: &mut Vec<Option<Client>>) -> io::Result<()> {
        let mut stream = connect(self.port)?;
        let mut talk = Talk::Answers(Message::of(Sender::Server));
        if let Some(handshake) = &self.handshake {
            talk = Talk::Echo(shake(&mut stream, handshake)?);
        }
        stream.set_nonblocking(true)?;
        poll.add(&stream)?;
        let fd = usize::try_from(stream.as_raw_fd()).map_err(|_| fault("descriptor"))?;
        if clients.len() <= fd {
            clients.resize_with(fd + 1, || None);
        }
        let client = clients[fd].insert(Client { stream, talk, sent_ns: 0 });
        client.send(&self.bytes)
    }
}

impl Client {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sent_ns = now_ns();
        self.stream.write_all(bytes)
    }

    /// Read; ask again if that was the whole answer.
    fn turn(&mut self, buffer: &mut [u8], bytes: &[u8], window: &mut Window) -> io::Result<()> {
        let size = match self.stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(size) => size,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        if !self.answered(&buffer[..size])? {
            return Ok(());
        }
        let now = now_ns();
        window.note(now, now - self.sent_ns);
        self.send(bytes)
    }

    fn answered(&mut self, data: &[u8]) -> io::Result<bool> {
        match &mut self.talk {
            Talk::Echo(bytes) => {
                bytes.extend_from_slice(data);
                Ok(count(bytes) > 0)
            }
            Talk::Answers(answer) => {
                if !answer.push(data, &mut |_| {})? {
                    return Ok(false);
                }
                if answer.status() != OK || answer.head.close {
                    return Err(fault("status, or a connection that closes"));
                }
                answer.next();
                Ok(true)
            }
        }
    }
}

/// A request with a body of some bytes, as a client of Ollama sends it.
pub(crate) fn request(method: &str, path: &str, body: usize) -> Vec<u8> {
    let text = format!("{method} {path} HTTP/1.1\r\nHost: bench\r\nUser-Agent: bench\r\nAccept: */*\r\n");
    let (begin, end) = (r#"{"model":"bench","prompt":""#, r#""}"#);
    if body == 0 {
        return (text + "\r\n").into_bytes();
    }
    let filling = "x".repeat(body.saturating_sub(begin.len() + end.len()));
    let body = format!("{begin}{filling}{end}");
    let length = body.len();
    format!("{text}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}").into_bytes()
}

/// Open a websocket; what arrived after the handshake.
fn shake(stream: &mut TcpStream, handshake: &[u8]) -> io::Result<Vec<u8>> {
    stream.write_all(handshake)?;
    let (mut answer, mut buffer) = (Message::of(Sender::Server), [0; 4096]);
    loop {
        let size = stream.read(&mut buffer)?;
        if size == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if answer.push(&buffer[..size], &mut |_| {})? {
            break;
        }
    }
    if answer.status() == SWITCHING { Ok(answer.rest()) } else { Err(fault("status of a handshake")) }
}

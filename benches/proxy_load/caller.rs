//! One call after the other on one connection, for what is asked beside the load.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::TcpStream;

use serde_json::Value;

use crate::http::{Message, Sender};
use crate::requests::request;
use crate::system::connect;

/// A connection that waits for each answer.
pub(crate) struct Caller {
    stream: TcpStream,
    answer: Message,
}

impl Caller {
    /// Connect to a port of this machine.
    pub(crate) fn to(port: u16) -> io::Result<Self> {
        Ok(Self { stream: connect(port)?, answer: Message::of(Sender::Server) })
    }

    /// The JSON of an answer.
    pub(crate) fn call(&mut self, method: &str, path: &str) -> Result<Value, Box<dyn Error>> {
        self.stream.write_all(&request(method, path, 0))?;
        let (mut body, mut buffer) = (Vec::new(), [0; 8192]);
        loop {
            let size = self.stream.read(&mut buffer)?;
            if size == 0 {
                return Err(format!("no answer to {method} {path}").into());
            }
            if self.answer.push(&buffer[..size], &mut |piece| body.extend_from_slice(piece))? {
                break;
            }
        }
        self.answer.next();
        Ok(serde_json::from_slice(&body)?)
    }
}

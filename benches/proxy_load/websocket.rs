//! As much of RFC 6455 as an echo of small messages needs.

use crate::sha1::sha1;

const GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const FINAL: u8 = 0x80;
const MASKED: u8 = 0x80;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// A frame as it stands at the beginning of some bytes.
struct Frame {
    opcode: u8,
    mask: Option<[u8; 4]>,
    begin: usize,
    end: usize,
}

/// The answer to a handshake.
pub(crate) fn accepted(key: &[u8]) -> Vec<u8> {
    let accept = base64(&sha1(&[key, GUID].concat()));
    let mut answer =
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n".to_vec();
    answer.extend_from_slice(b"Sec-WebSocket-Accept: ");
    answer.extend_from_slice(accept.as_bytes());
    answer.extend_from_slice(b"\r\n\r\n");
    answer
}

/// A masked binary message of a client.
pub(crate) fn message(size: u8) -> Vec<u8> {
    let mask = [0x12, 0x34, 0x56, 0x78];
    let mut frame = vec![FINAL | BINARY, MASKED | size.min(125)];
    frame.extend_from_slice(&mask);
    frame.extend((0..size.min(125)).map(|index| b'x' ^ mask[usize::from(index % 4)]));
    frame
}

/// Take the whole frames off the front of `bytes`; the answers, and whether the peer closed.
pub(crate) fn echo(bytes: &mut Vec<u8>) -> (Vec<u8>, bool) {
    let (mut answers, mut at, mut closed) = (Vec::new(), 0, false);
    while let Some(frame) = first(&bytes[at..]) {
        let mut data = bytes[at + frame.begin..at + frame.end].to_vec();
        if let Some(mask) = frame.mask {
            data.iter_mut().zip(mask.iter().cycle()).for_each(|(byte, key)| *byte ^= key);
        }
        closed |= frame.opcode == CLOSE;
        match frame.opcode {
            PONG => {}
            PING => put(&mut answers, PONG, &data),
            opcode => put(&mut answers, opcode, &data),
        }
        at += frame.end;
    }
    bytes.drain(..at);
    (answers, closed)
}

/// Take the whole frames off the front of `bytes`; how many of them are messages.
pub(crate) fn count(bytes: &mut Vec<u8>) -> u32 {
    let (mut messages, mut at) = (0, 0);
    while let Some(frame) = first(&bytes[at..]) {
        messages += u32::from(frame.opcode == BINARY);
        at += frame.end;
    }
    bytes.drain(..at);
    messages
}

fn put(out: &mut Vec<u8>, opcode: u8, data: &[u8]) {
    out.push(FINAL | opcode);
    match (u8::try_from(data.len()), u16::try_from(data.len())) {
        (Ok(length @ 0..=125), _) => out.push(length),
        (_, Ok(length)) => {
            out.push(126);
            out.extend_from_slice(&length.to_be_bytes());
        }
        _ => {
            out.push(127);
            out.extend_from_slice(&(data.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(data);
}

fn first(bytes: &[u8]) -> Option<Frame> {
    let (opcode, second) = (bytes.first()? & 0x0f, *bytes.get(1)?);
    let (length, mut begin) = match second & 0x7f {
        126 => (u64::from(u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?)), 4),
        127 => (u64::from_be_bytes(bytes.get(2..10)?.try_into().ok()?), 10),
        short => (u64::from(short), 2),
    };
    let mut mask = None;
    if second & MASKED != 0 {
        mask = Some(bytes.get(begin..begin + 4)?.try_into().ok()?);
        begin += 4;
    }
    let end = begin + usize::try_from(length).ok()?;
    (bytes.len() >= end).then_some(Frame { opcode, mask, begin, end })
}

fn base64(bytes: &[u8]) -> String {
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let mut three = [0; 3];
        three[..group.len()].copy_from_slice(group);
        let bits = u32::from_be_bytes([0, three[0], three[1], three[2]]);
        for place in 0..4 {
            let sextet = (bits >> (18 - 6 * place)) & 63;
            let digit = BASE64[usize::try_from(sextet).unwrap_or_default()];
            text.push(if place > group.len() { '=' } else { char::from(digit) });
        }
    }
    text
}

//! The upstream and the load of `make bench-proxy`: one program, one thread each, much cheaper than any proxy.
//!
//! `proxy_load MODE --NAME VALUE …` prints one JSON object. Plain epoll, because the figures of a proxy are taken on
//! cores that it shares with its load: what the load costs is missing there.

mod answers;
mod caller;
mod clock;
mod http;
mod lines;
mod options;
mod requests;
mod sha1;
mod streams;
mod system;
mod upstream;
mod websocket;
mod window;

use std::error::Error;
use std::io::{self, Write};

use serde_json::Value;

use options::Options;

fn main() -> Result<(), Box<dyn Error>> {
    let (mode, options) = Options::read(std::env::args().skip(1))?;
    match mode.as_str() {
        "upstream" => upstream::serve()?,
        "requests" => output(&requests::run(&options)?)?,
        "streams" => output(&streams::run(&options)?)?,
        "cut" => output(&streams::run_cut(&options)?)?,
        _ => return Err(format!("no such mode: `{mode}`").into()),
    }
    Ok(())
}

/// Print one object on a line of its own.
fn output(value: &Value) -> io::Result<()> {
    let mut stdout = io::stdout();
    writeln!(stdout, "{value}")?;
    stdout.flush()
}

//! Chats that wait for an image job, and how soon the proxy knows that their clients left.

use std::error::Error;
use std::io::Write;
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::caller::Caller;
use crate::clock::now_ns;
use crate::options::Options;
use crate::requests::request;
use crate::system::{connect, reset};

const BODY: usize = 300;
const WATCHDOG_NS: u64 = 20_000_000_000;

/// Reset `--streams` chats that wait at `--port` behind an image job that was posted to `--comfy`, all at once: when does
/// `/healthz`, asked again and again, count none of them? The job at `--upstream` then ends.
pub(crate) fn run(options: &Options) -> Result<Value, Box<dyn Error>> {
    let (mut upstream, mut proxy) =
        (Caller::to(options.get("upstream")?)?, Caller::to(options.get("port")?)?);
    Caller::to(options.get("comfy")?)?.call("POST", "/prompt")?;
    let found = measure(options, &mut proxy);
    upstream.call("POST", "/bench/release")?;
    until(&mut proxy, |health| health["state"] == "idle")?;
    found
}

fn measure(options: &Options, proxy: &mut Caller) -> Result<Value, Box<dyn Error>> {
    let (port, count): (u16, usize) = (options.get("port")?, options.get("streams")?);
    let chat = request("POST", "/api/chat?rate=1", BODY);
    let waiters = (0..count).map(|_| ask(port, &chat)).collect::<Result<Vec<_>, _>>()?;
    until(proxy, |health| health["waiting"]["llm"] == count)?;
    let begin_ns = now_ns();
    for waiter in waiters {
        reset(waiter)?;
    }
    let cut_ns = now_ns() - begin_ns;
    until(proxy, |health| health["waiting"]["llm"] == 0)?;
    Ok(json!({"count": count, "cut_ns": cut_ns, "gone_ns": now_ns() - begin_ns}))
}

fn ask(port: u16, request: &[u8]) -> std::io::Result<TcpStream> {
    let mut stream = connect(port)?;
    stream.write_all(request)?;
    Ok(stream)
}

fn until(proxy: &mut Caller, wanted: impl Fn(&Value) -> bool) -> Result<(), Box<dyn Error>> {
    let begin_ns = now_ns();
    loop {
        let health = proxy.call("GET", "/healthz")?;
        if wanted(&health) {
            return Ok(());
        }
        if now_ns() - begin_ns > WATCHDOG_NS {
            return Err(format!("not reached, and /healthz says: {health}").into());
        }
    }
}

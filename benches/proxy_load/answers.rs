//! What the fake upstream answers: an Ollama that needs no time, a `ComfyUI` that holds a job until it is told.

use serde_json::json;

/// How a request is answered.
pub(crate) enum Answer {
    /// At once, with this.
    Whole(Vec<u8>),
    /// With a chunk every `period_ns` on average, without an end.
    Stream {
        /// Nanoseconds.
        period_ns: u64,
    },
    /// With an echo of websocket messages.
    Echo,
}

/// What the upstream knows of itself.
#[derive(Default)]
pub(crate) struct Known {
    /// Streams that run.
    pub(crate) streams: usize,
    /// When the last stream ended that its client left, on the monotonic clock.
    pub(crate) last_left_ns: u64,
    /// Connections that were accepted, ever.
    pub(crate) accepted: u64,
    /// Whether the image job still runs.
    pub(crate) held: bool,
    /// Set by a request to close every connection on which nothing is in flight.
    pub(crate) close_idle: bool,
}

const JOB: &str = "bench-job";
const SMALL: &str = r#"{"version":"0.12.6-bench"}"#;
const GENERATED: &str =
    r#"{"model":"bench","response":"ok","done":true,"done_reason":"stop","eval_count":1}"#;

/// The answer to a request by its first line.
pub(crate) fn answer(first: &[u8], known: &mut Known) -> Answer {
    let line = String::from_utf8_lossy(first);
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    match (method, path) {
        ("GET", "/api/version") => whole(200, SMALL),
        ("POST", "/api/generate") => whole(200, GENERATED),
        ("POST", "/api/chat") => Answer::Stream { period_ns: period_ns(query) },
        ("GET", "/ws") => Answer::Echo,
        (_, path) => other(path, known),
    }
}

fn other(path: &str, known: &mut Known) -> Answer {
    match path {
        "/api/ps" => whole(200, r#"{"models":[]}"#),
        "/system_stats" => whole(200, r#"{"system":{"comfyui_version":"bench"},"devices":[]}"#),
        "/prompt" => {
            known.held = true;
            whole(200, &json!({"prompt_id": JOB, "number": 1, "node_errors": {}}).to_string())
        }
        "/queue" => {
            let running = if known.held { json!([[1, JOB, {}, {}, []]]) } else { json!([]) };
            whole(200, &json!({"queue_running": running, "queue_pending": []}).to_string())
        }
        "/history/bench-job" => {
            let status = json!({"status_str": "success", "completed": true, "messages": []});
            whole(200, &json!({JOB: {"status": status, "outputs": {}}}).to_string())
        }
        "/free" => whole(200, ""),
        "/bench/release" => {
            known.held = false;
            whole(200, "{}")
        }
        "/bench/close-idle" => {
            known.close_idle = true;
            whole(200, "{}")
        }
        "/bench/status" => whole(200, &status(known)),
        _ => whole(404, r#"{"error":"no such path"}"#),
    }
}

fn status(known: &Known) -> String {
    let Known { streams, last_left_ns, accepted, .. } = known;
    json!({"streams": streams, "last_left_ns": last_left_ns, "accepted": accepted}).to_string()
}

fn whole(status: u16, body: &str) -> Answer {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n");
    Answer::Whole((head + body).into_bytes())
}

fn period_ns(query: &str) -> u64 {
    let rate = query.strip_prefix("rate=").and_then(|text| text.parse::<u64>().ok()).unwrap_or(1);
    1_000_000_000 / rate.max(1)
}
